"""Planning a read: what can be read from a position, how limits are shared, and how a read becomes tasks."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from natslog.planning import (
    AskedPlan,
    Division,
    LostRange,
    PlannedRange,
    PlannedStream,
    ReadLimits,
    ReadPosition,
    TaskLimits,
    Waiting,
    divided_again,
    full_tasks,
    reach,
    share_limit,
    shares_of,
    task_ends,
)

MIB = 1024 * 1024
offsets = st.integers(0, 30)
counts = st.dictionaries(st.text("abcdef", min_size=1), st.integers(0, 1000), min_size=1)


def piece(stream: str, start: int, end: int, size_bytes: int | None = None) -> PlannedRange:
    return PlannedRange(stream=stream, start=start, end=end, rows=end - start, bytes=size_bytes, urls=())


# ---- where reading begins and ends ----


def lost_offsets(stream: PlannedStream, upto: int) -> set[int]:
    return {at for one in stream.lost for at in range(one.start, upto if one.end is None else one.end)}


@settings(max_examples=500)
@given(
    bounds=st.tuples(offsets, offsets).map(sorted),
    start=offsets,
    end=st.none() | offsets,
    stream_id=st.sampled_from(["same", "former", "other"]),
    fork=offsets,
    is_open=st.booleans(),
    limit=st.none() | offsets,
)
def test_every_offset_is_read_or_lost_or_waits(
    bounds: list[int],
    start: int,
    end: int | None,
    stream_id: str,
    fork: int,
    is_open: bool,
    limit: int | None,
) -> None:
    """The model: an offset of the position is valid here below the fork, and is there within the bounds."""
    assume(end is None or start <= end)
    low, high = bounds
    stream = PlannedStream(
        id="same", leader_epoch=1, log_start_offset=low, high_watermark=high, lineage={"former": fork}
    )
    position = ReadPosition(stream_id, start, end, is_open)
    reach(stream, position, None if limit is None else ("same", limit))
    assert low <= stream.start <= stream.end <= high or stream.start == stream.end
    valid_to = {"same": 2**62, "former": fork, "other": 0}[stream_id]
    read, lost = set(range(stream.start, stream.end)), lost_offsets(stream, 31)
    if end is not None:
        asked = set(range(start, end))
        there = {at for at in asked if at < valid_to and low <= at < high}
        assert read == (there if limit is None else {at for at in there if at < max(limit, stream.start)})
        read_before = range(min(high, valid_to), start)  # and lost too, if the log has become shorter than that
        assert lost <= asked | set(read_before)
        assert lost >= {at for at in asked - there if not (is_open and stream_id != "other" and at < low)}
    elif stream_id == "other":
        assert (stream.start, stream.lost) == (low, [LostRange(start, None, "recreated")])
    else:
        assert stream.start == min(max(min(start, valid_to), low), high)
        assert is_open or lost >= set(range(min(start, valid_to), low))
    if limit is None and end is None:
        assert stream.end == high


def test_a_limit_of_another_stream_of_this_name_is_ignored() -> None:
    stream = PlannedStream(id="new", leader_epoch=1, log_start_offset=0, high_watermark=9)
    reach(stream, None, ("old", 3))
    assert (stream.start, stream.end) == (0, 9)
    reach(stream, None, ("new", 3))
    assert (stream.start, stream.end) == (0, 3)


# ---- how much of it ----


@given(counts, st.integers(1, 2000))
def test_limit_is_shared_in_proportion_and_used_up(waiting: dict[str, int], limit: int) -> None:
    shares = share_limit(waiting, limit)
    total = sum(waiting.values())
    assert sum(shares.values()) == min(limit, total)
    assert all(0 <= shares[name] <= rows for name, rows in waiting.items())
    if total > limit:
        slack = len(waiting) + 1
        assert all(abs(shares[name] - rows * limit / total) <= slack for name, rows in waiting.items())
    if limit >= len(waiting):
        assert all(shares[name] for name, rows in waiting.items() if rows), "each stream gets some"


@given(counts, st.none() | st.integers(1, 2000), st.none() | st.integers(1, 100_000), st.integers(1, 500), st.data())
def test_limits_combine_and_hold_where_sizes_are_unknown(
    rows: dict[str, int], max_rows: int | None, max_bytes: int | None, row_bytes: int, data: st.DataObject
) -> None:
    unknown = data.draw(st.sets(st.sampled_from(sorted(rows))))
    waiting = {
        name: Waiting(0, count, count, None if name in unknown else count * row_bytes) for name, count in rows.items()
    }
    shares = shares_of(waiting, ReadLimits(max_rows=max_rows, max_bytes=max_bytes))
    behind = [name for name, count in rows.items() if count]
    assert set(shares) <= set(behind)
    if max_rows is None or max_rows >= len(behind):
        assert set(shares) == set(behind)
    if max_rows is not None:
        assert sum(share.rows or 0 for share in shares.values()) <= max_rows
    if max_bytes is not None:
        assert all(share.bytes for share in shares.values())
        assert sum(share.bytes or 0 for share in shares.values()) <= max_bytes + len(behind)
    if max_rows is None and max_bytes is None:
        assert all(shares[name].holds(waiting[name]) for name in shares)


def test_removed_offsets_use_up_no_limit_and_are_passed() -> None:
    waiting = {"full": Waiting(0, 50, 50, 5000), "gap": Waiting(7, 900, 0, 0), "end": Waiting(5, 5, 0, 0)}
    shares = shares_of(waiting, ReadLimits(max_rows=10))
    assert {name: one.rows for name, one in shares.items()} == {"full": 10, "gap": None}
    assert shares_of(waiting, ReadLimits(min_rows=51)) == {}
    assert set(shares_of(waiting, ReadLimits(min_rows=50))) == {"full", "gap"}


# ---- in which tasks ----


@pytest.mark.parametrize(
    ("size_bytes", "cores", "tasks"),
    [
        (0, 2, 0),
        (1, 2, 1),
        (100 * MIB, 2, 2),
        (256 * MIB, 2, 4),
        (900 * MIB + 1, 2, 4),
        (2_000_000_001, 8, 16),
        (4096 * MIB, 8, 16),
        (8192 * MIB, 8, 32),
        (20_000 * MIB, 2, 79),
    ],
)
def test_tasks_become_larger_where_there_are_two_for_each_core(size_bytes: int, cores: int, tasks: int) -> None:
    limits = TaskLimits(cores=cores, usual_bytes=64 * MIB, max_bytes=256 * MIB)
    assert full_tasks(limits, size_bytes) == tasks


def test_given_maximum_holds() -> None:
    assert full_tasks(TaskLimits(cores=2, usual_bytes=10 * MIB, max_bytes=10 * MIB), 1000 * MIB) == 100


def test_tasks_are_equal_in_rows_where_sizes_are_unknown() -> None:
    pieces = [piece("orders", low, high) for low, high in pairwise(range(0, 12_000_001, 1_000_000))]
    division = Division(TaskLimits(min_tasks=4), {"orders": (12_000_000, 0)})
    assert [sum(one.rows or 0 for one in task) for task in division.packed(pieces)] == [3_000_000] * 4


def test_a_huge_stream_is_cut_by_its_share_of_all_bytes() -> None:
    taken = {"huge": (9_000, 900 * MIB), "small": (10, 1 * MIB), "empty": (0, 0)}
    division = Division(TaskLimits(cores=8), taken)
    assert division.tasks == 16
    assert [division.parts_of(name) for name in taken] == [16, 1, 1]
    assert Division(TaskLimits(cores=8, max_rows=100), taken).most_parts_of("huge") == 90


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.integers(0, 40)), max_size=30),
    st.none() | st.integers(1, 12),
    st.none() | st.integers(1, 80),
    st.integers(1, 100),
)
def test_tasks_have_every_part_once_and_obey_their_limits(
    parts: list[tuple[str, int, int]], min_tasks: int | None, max_rows: int | None, max_bytes: int
) -> None:
    pieces, ends = [], dict.fromkeys("abc", 0)
    for stream, rows, size_bytes in parts:
        pieces.append(piece(stream, ends[stream], ends[stream] + rows, size_bytes))
        ends[stream] += rows
    limits = TaskLimits(min_tasks=min_tasks, max_rows=max_rows, max_bytes=max_bytes)
    tasks = Division(limits, {name: (end, end) for name, end in ends.items()}).packed(pieces)
    key = lambda one: (one.stream, one.start, one.end)  # noqa: E731
    assert sorted(key(one) for task in tasks for one in task) == sorted(map(key, pieces))
    assert len(tasks) >= min(min_tasks or 1, len(pieces))
    for task in tasks:
        assert task == sorted(task, key=key)
        if len(task) > 1:
            assert sum(one.bytes or 0 for one in task) <= max_bytes
            assert max_rows is None or sum(one.rows or 0 for one in task) <= max_rows


@given(st.data(), st.integers(1, 5))
def test_a_repeated_batch_has_the_same_rows_in_each_task(data: st.DataObject, count: int) -> None:
    """Whatever is lost of it since: the model is a list of the offsets of each task."""
    pieces, ends = [], {}
    for stream in "ab":
        edges = sorted(data.draw(st.sets(st.integers(1, 40), min_size=1, max_size=8)))
        pieces += [piece(stream, low, high, 1) for low, high in pairwise([0, *edges])]
        ends[stream] = edges[-1]
    limits = TaskLimits(min_tasks=count)
    tasks = Division(limits, {name: (end, end) for name, end in ends.items()}).packed(pieces)
    low = {name: data.draw(st.integers(0, end)) for name, end in ends.items()}
    again = divided_again({name: (low[name], end) for name, end in ends.items()}, task_ends(tasks))
    rows = [[(one.stream, at) for one in task for at in range(one.start, one.end)] for task in tasks]
    expected = [[(stream, at) for stream, at in task if at >= low[stream]] for task in rows]
    found = [[(one.stream, at) for one in task for at in range(one.start, one.end)] for task in again]
    assert found == expected[: len(found)]
    assert not any(expected[len(found) :])


def test_tasks_are_numbered_by_where_their_shares_end() -> None:
    first = [piece("a", 0, 10), piece("a", 10, 20), piece("b", 0, 5)]
    second = [piece("a", 20, 30), piece("b", 5, 9)]
    assert task_ends([first, second]) == {"a": [(0, 20), (1, 30)], "b": [(0, 5), (1, 9)]}
    assert task_ends([first]) == {}


def test_many_parts_of_which_each_is_a_task_are_packed_soon() -> None:
    """Each part looks at a few tasks only: 50,000 parts took an hour otherwise."""
    parts = [piece("a", at, at + 1, 100) for at in range(50_000)]
    tasks = Division(TaskLimits(max_rows=1), {"a": (50_000, 5_000_000)}).packed(parts)
    assert len(tasks) == 50_000
    assert all(len(task) == 1 for task in tasks)


@pytest.mark.parametrize("wrong", [{"wait_ms": 60_001}, {"wait_ms": -1}, {"pattern": "a" * 256}])
def test_what_holds_a_broker_for_long_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, AskedPlan)
