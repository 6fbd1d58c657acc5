"""The index of subjects against the same found by looking at every message."""

from __future__ import annotations

import errno
import math
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from natslog.errors import CorruptLog
from natslog.log import ReplicaLog, StreamLog, small_segments
from natslog.log.newest import Texts
from natslog.log.removed import Hidden, HiddenThen, offset_set
from natslog.log.rules import Rule
from natslog.log.subject_counts import COUNTS_SCHEMA, KeptCounts, KnownCounts, SubjectCounts, combined
from natslog.log.subject_part import SubjectPart, file_identity
from natslog.model import Epoch
from tests.conftest import open_log, retain
from tests.unit.log.test_visibility import OPTIONS, Model, Replica, rows_of

SUBJECTS = ["a", "a.b", "b", "é", "\U0001f600", "\uffee"]
MESSAGES = st.lists(st.tuples(st.sampled_from(SUBJECTS), st.none(), st.none()), min_size=1, max_size=8)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), MESSAGES),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 60), max_size=6)),
        st.tuples(st.just("roll and seal"), st.none()),
        st.tuples(st.just("rewrite"), st.none()),
        st.tuples(st.just("merge"), st.none()),
        st.tuples(st.just("look up"), st.integers(0, 70)),
        st.tuples(st.just("reopen"), st.sampled_from(["whole", "damaged", "cut", "without"])),
        st.tuples(st.just("limit start"), st.integers(0, 40)),
        st.tuples(st.just("drop"), st.none()),
    ),
    max_size=30,
)


def on_each_subject(model: Model, start: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for offset in model.visible:
        if offset >= start:
            found.setdefault(model.messages[offset][0], []).append(offset)
    return found


def check_many_at_once(log: StreamLog, model: Model, expected: dict[str, list[int]]) -> None:
    """As for direct requests."""
    subjects = [*SUBJECTS, "none", "", "a.c", *SUBJECTS]
    texts = Texts.of(pa.array(subjects, pa.string()))
    last = [expected.get(subject, [-1])[-1] for subject in subjects]
    assert log.subjects.last_of((texts.offsets, texts.data)).tolist() == last
    assert log.newest.of_subjects(texts).tolist() == last
    at_once = log.newest.of_subjects_now(texts)
    assert at_once is None or at_once.tolist() == last
    offsets = np.arange(len(model.messages) + 2)
    visible = [at if at in model.visible and at >= log.first_readable_offset else -1 for at in offsets.tolist()]
    assert log.newest.visible(offsets).tolist() == visible
    found = log.newest.visible_now(offsets)
    assert found is not None
    assert found.tolist() == visible
    rows = {}
    for some, batch in log.reader.rows_at(offsets):
        assert isinstance(batch, pa.RecordBatch)
        assert batch.column("offset").to_pylist() == some.tolist()
        rows |= dict(zip(some.tolist(), batch.column("value").to_pylist(), strict=True))
    assert all(value == b"%d" % at for at, value in rows.items())
    assert {at for at in visible if at >= 0} <= set(rows)


def check(log: StreamLog, model: Model, start: int) -> None:
    expected = on_each_subject(model, log.first_readable_offset)
    check_many_at_once(log, model, expected)
    for subject in [*SUBJECTS, "none", "", "a.c"]:
        offsets = expected.get(subject, [])
        found = log.subjects.on_subject(subject)
        assert (found.count, found.first, found.last) == (len(offsets), *(offsets or [-1])[:1], *(offsets or [-1])[-1:])
        assert log.subjects.last(subject) == (offsets or [-1])[-1]
        assert log.subjects.next(subject, start) == next((at for at in offsets if at >= start), -1)
    state, counts = log.subjects.counts()
    assert state.end == counts.end == log.high_watermark
    listed = [tuple(row.values()) for row in counts.table.to_pylist()]
    assert listed == [
        (subject, len(at), at[0], at[-1]) for subject, at in sorted(expected.items(), key=lambda one: one[0].encode())
    ]


def index_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.subjects"))


def harm(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    match how:
        case "damaged":
            data[len(data) // 2 : len(data) // 2 + 1] = b"\xa5"
        case "cut":
            data = data[: len(data) // 2]
        case "without":
            data = bytearray()
    path.unlink()  # the one that is mapped stays as it is
    path.write_bytes(data)


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(operations=OPERATIONS, limit=st.sampled_from([None, 1, 2]))
def test_what_is_found_is_what_a_model_has(operations: list[tuple[str, Any]], limit: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        replica, model = Replica(Path(folder)), Model(per_subject=limit)
        replica.set_rules((Rule(Epoch(0), limit),))
        for name, argument in operations:
            log = replica.log
            match name:
                case "append":
                    log.append(rows_of(argument, len(model.messages)), 1_000_000 + len(model.messages))
                    model.append(argument)
                case "remove":
                    offsets = {offset for offset in argument if offset < len(model.messages)}
                    model.recorded |= offsets
                    replica.record(offsets)
                case "roll and seal":
                    log.roll()
                    log.upkeep.seal_next()
                    log.subjects.keep_up()
                case "rewrite":
                    log.upkeep.apply_rules()
                    replica.record(set(log.visibility.removed.derived(0, log.high_watermark)))
                    log.upkeep.rewrite_next(2**60)
                case "merge":
                    with patch.multiple(small_segments, _MERGED_AT_ONCE=2, _MERGED_EARLY=1.0):
                        log.upkeep.merge_next()
                case "look up":
                    check(log, model, argument)
                case "reopen":
                    start = log.chain.limited_below
                    if argument != "whole":
                        for path in index_files(replica.folder):
                            harm(path, argument)
                    replica.reopen(forgets=False)
                    replica.log.limits.move_to(start)
                case "limit start":
                    log.limits.move_to(argument)
                case "drop":
                    retain(log, 0)
        check(replica.log, model, 0)
        replica.log.close()


def filled(log: StreamLog, subject: str, count: int = 3) -> None:
    start = log.log_end_offset
    log.append(rows_of([(subject, None, None)] * count, start), 1_000_000)


def sealed(log: StreamLog, subject: str) -> None:
    filled(log, subject)
    log.roll()
    log.upkeep.seal_next()


def test_messages_that_are_removed_after_a_look_up_are_not_found(log_folder: Path) -> None:
    log = open_log(log_folder, OPTIONS)
    sealed(log, "a")
    filled(log, "a", 200)
    filled(log, "b")
    texts = Texts.of(pa.array(["b", "a", "none"]))
    for removed, last in ((range(0), 202), (range(202, 203), 201), (range(100, 203), 99), (range(3, 203), 2)):
        log.visibility.removed.record(offset_set(np.array(removed, np.int64)))
        assert log.newest.of_subjects(texts).tolist() == [205, last, -1]
        assert log.subjects.last("a") == last
    log.visibility.removed.record(offset_set(np.arange(206)))
    assert log.newest.of_subjects(texts).tolist() == [-1, -1, -1]


def test_a_start_reads_only_what_is_not_in_sealed_segments(log_folder: Path) -> None:
    log = open_log(log_folder, OPTIONS)
    log.subjects.keep_up()
    sealed(log, "a")
    sealed(log, "b")
    filled(log, "a")
    log.subjects.keep_up()
    assert index_files(log_folder) == [], "nobody has asked for subjects"
    assert log.subjects.last("b") == 5
    log.close()

    log = open_log(log_folder, OPTIONS)
    read: list[tuple[int, int]] = []
    rows = log.subjects._rows
    log.subjects._rows = lambda start, end: (read.append((start, end)), rows(start, end))[1]
    assert log.subjects.on_subject("a").count == 6
    assert read == [(6, 9)]
    filled(log, "a")
    assert log.subjects.last("a") == 11
    assert log.subjects.last("a") == 11
    assert read == [(6, 9), (9, 12)], "each message is read once"
    assert read == [(6, 9), (9, 12)]
    log.roll()
    log.upkeep.seal_next()
    log.subjects.keep_up()
    assert read == [(6, 9), (9, 12)], "the part of a sealed segment is that of its messages in memory"
    assert len(index_files(log_folder)) == 3
    filled(log, "a")
    assert log.subjects.last("a") == 14
    sealed(log, "b")
    log.subjects.keep_up()
    assert (log.subjects.last("a"), log.subjects.last("b")) == (14, 17), "not all were in memory"
    log.close()


def test_files_of_the_index_go_with_their_segments(log_folder: Path) -> None:
    log = open_log(log_folder, OPTIONS)
    for subject in "abc":
        sealed(log, subject)
    assert log.subjects.last("c") == 8
    log.limits.move_to(6)
    retain(log, 0)
    assert [path.stem for path in index_files(log_folder)] == [f"{6:020}"]
    log.close()
    (log_folder / f"{0:020}.subjects").write_bytes(b"of a segment that another version has removed")
    open_log(log_folder, OPTIONS).close()
    assert [path.stem for path in index_files(log_folder)] == [f"{6:020}"]


def test_a_segment_that_was_written_again_leaves_no_text_of_a_removed_message(log_folder: Path) -> None:
    replica = Replica(log_folder)
    log = replica.log
    log.append(rows_of([("secret", None, None), ("a", None, None)], 0), 1_000_000)
    log.roll()
    log.upkeep.seal_next()
    assert log.subjects.last("secret") == 0
    assert b"secret" in index_files(log_folder)[0].read_bytes()
    replica.record({0})
    assert log.upkeep.rewrite_next(2**60)
    assert index_files(log_folder) == []
    log.subjects.keep_up()
    assert b"secret" not in index_files(log_folder)[0].read_bytes()
    assert (log.subjects.last("secret"), log.subjects.last("a")) == (-1, 1)
    log.close()


def test_no_text_of_a_removed_message_is_written_from_memory(log_folder: Path) -> None:
    replica = Replica(log_folder)
    log = replica.log
    log.append(rows_of([("secret", None, None), ("a", None, None)], 0), 1_000_000)
    assert log.subjects.last("secret") == 0
    replica.record({0})
    log.roll()
    log.upkeep.seal_next()
    assert log.upkeep.rewrite_next(2**60)
    log.subjects.keep_up()
    assert b"secret" not in index_files(log_folder)[0].read_bytes()
    assert log.subjects.last("a") == 1
    log.close()


def test_a_cut_log_has_no_subjects_of_what_was_cut(log_folder: Path) -> None:
    log = open_log(log_folder, OPTIONS)
    assert isinstance(log, ReplicaLog)
    sealed(log, "a")
    filled(log, "b")
    assert log.subjects.last("b") == 5
    log.discard_from(4)
    assert log.subjects.last("b") == 3
    log.discard_from(1)
    assert (log.subjects.last("a"), log.subjects.last("b")) == (0, -1)
    filled(log, "c")
    log.chain.committed = log.log_end_offset
    assert (log.subjects.on_subject("c").count, log.subjects.last("a")) == (3, 0)
    log.roll()
    log.upkeep.seal_next()
    log.subjects.keep_up()
    log.discard_from(1)
    filled(log, "d")
    log.chain.committed = log.log_end_offset
    log.roll()
    log.upkeep.seal_next()
    assert (log.subjects.last("c"), log.subjects.last("d")) == (-1, 3), "the file is of another segment file"
    log.close()


def test_messages_that_replaced_cut_ones_are_found(log_folder: Path) -> None:
    log = open_log(log_folder, OPTIONS)
    filled(log, "a")
    assert log.subjects.last("a") == 2
    log.discard_from(1)
    assert log.subjects.last("a") == 0
    filled(log, "b")
    log.chain.committed = log.log_end_offset
    assert (log.subjects.last("a"), log.subjects.on_subject("b").count) == (0, 3)
    log.close()


def test_a_damaged_file_is_made_again(log_folder: Path) -> None:
    log = open_log(log_folder, OPTIONS)
    sealed(log, "a")
    sealed(log, "b")
    filled(log, "c")
    assert log.subjects.last("a") == 2
    log.close()
    path = index_files(log_folder)[0]
    intact = path.read_bytes()
    for at in range(0, len(intact), max(1, len(intact) // 97)):
        harmed = bytearray(intact)
        harmed[at] ^= 0x55
        path.unlink()
        path.write_bytes(harmed)
        log = open_log(log_folder, OPTIONS)
        found = log.subjects.on_subject("a")
        assert (found.count, found.first, found.last) == (3, 0, 2), at
        log.close()
        assert path.read_bytes()[128:] == intact[128:]


def test_a_file_whose_parts_do_not_fit_is_made_again(tmp_path: Path) -> None:
    segment = tmp_path / "a.arrow"
    segment.write_bytes(b"x")
    part = SubjectPart(0, 9, pa.array(["a", "b"]), np.array([4, 9], np.int32), np.arange(9, dtype=np.uint32))
    part.store(segment, file_identity(segment))
    assert SubjectPart.stored(segment, 0, 9) is not None
    part.rows = part.rows[:-1]
    part.store(segment, file_identity(segment))
    assert SubjectPart.stored(segment, 0, 9) is None


def test_counts_are_of_what_is_not_hidden_in_a_range() -> None:
    subjects = ["a", "b", "a", "b", "a", "c"]
    batch = pa.record_batch({"offset": pa.array(range(10, 16), pa.int64()), "subject": pa.array(subjects)})
    part = SubjectPart.of_rows(10, 16, [batch])
    found = part.counts(HiddenThen(BitMap64([12, 13])), 11, 15).to_pylist()
    assert [tuple(row.values()) for row in found] == [("a", 1, 14, 14), ("b", 1, 11, 11)]


def test_damage_is_reported_and_nothing_is_guessed(log_folder: Path) -> None:
    log = open_log(log_folder, OPTIONS)
    sealed(log, "a")
    path = log.chain.segments[0].path
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 3)
        file.write(b"\xff\xff")
    with pytest.raises(CorruptLog):
        log.subjects.last("a")
    with pytest.raises(CorruptLog):
        log.subjects.counts()
    log.close()


def test_without_space_the_index_is_in_memory(log_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(log_folder, OPTIONS)
    sealed(log, "a")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", no_space)
        assert log.subjects.last("a") == 2
    assert sorted(path.suffix for path in log_folder.iterdir() if path.stem.startswith("0")) == [".active", ".arrow"]
    assert log.subjects.last("a") == 2
    log.close()


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_counts_at_hand_are_those_that_need_no_messages(log_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natslog.log.subject_index._FEW_BYTES", 0)
    log = open_log(log_folder, OPTIONS)
    for subject in ("a", "b"):
        sealed(log, subject)
    assert log.subjects.counts_at_hand(math.inf) is None
    _, counts = log.subjects.counts()
    log.close()
    log = open_log(log_folder, OPTIONS)
    assert log.subjects.counts_at_hand(0) is None, "no time to load parts"
    found = log.subjects.counts_at_hand(math.inf)
    assert found is not None
    assert (found.table, found.end) == (counts.table, counts.end)
    assert log.subjects.counts_at_hand(0) is not None, "they are in memory"
    filled(log, "a")
    assert log.subjects.counts_at_hand(math.inf) is None
    monkeypatch.setattr("natslog.log.subject_index._FEW_BYTES", 1 << 20)
    found = log.subjects.counts_at_hand(math.inf)
    assert found is not None
    assert found.table == log.subjects.counts()[1].table
    log.close()


def test_counts_are_continued_while_messages_are_only_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question costs what was added since the last one, whatever else changed."""
    asked: list[tuple[int, int]] = []
    counts_of_part = SubjectPart.counts

    def noting(part: SubjectPart, hidden: Hidden, start: int, end: int) -> pa.Table:
        asked.append((start, end))
        return counts_of_part(part, hidden, start, end)

    monkeypatch.setattr(SubjectPart, "counts", noting)
    replica = Replica(tmp_path)
    log = replica.log

    def counted() -> tuple[dict[str, int], list[tuple[int, int]]]:
        asked.clear()
        table = log.subjects.counts()[1].table
        return dict(zip(table.column("subject").to_pylist(), table.column("count").to_pylist(), strict=True)), asked

    for at, subject in enumerate("aab"):
        log.append(rows_of([(subject, None, None)], at), at + 1)
    assert counted() == ({"a": 2, "b": 1}, [(0, 3)])
    assert counted() == ({"a": 2, "b": 1}, [])
    log.append(rows_of([("b", None, None)], 3), 4)
    found, ranges = counted()
    assert (found, {one[0] for one in ranges}) == ({"a": 2, "b": 2}, {3})
    replica.record({1})
    assert counted()[0] == {"a": 1, "b": 2}, "one of those that were counted is hidden"
    log.limits.move_to(1)
    assert counted()[0] == {"b": 2}, "the log begins later"
    replica.log.close()


@pytest.mark.parametrize("cut_to", [0, 1, 2])
def test_messages_that_take_the_place_of_lost_ones_are_found(log_folder: Path, cut_to: int) -> None:
    """Where a loss was accepted, another leader has other messages with the same offsets."""
    log = open_log(log_folder, OPTIONS)
    assert isinstance(log, ReplicaLog)
    for at, subject in enumerate("aab"):
        log.append(rows_of([(subject, None, None)], at), 1_000_000 + at)
    assert log.subjects.on_subject("b").count == 1
    assert log.reader.time_us_of(2) == 1_000_002
    assert len(log.subjects.counts()[1].table) == 2
    log.discard_from(cut_to)
    for at in range(cut_to, 3):
        log.append(rows_of([("c", None, None)], at), 2_000_000 + at)
    log.chain.committed = 3
    expected = {subject: count for subject, count in (("a", min(cut_to, 2)), ("c", 3 - cut_to)) if count}
    table = log.subjects.counts()[1].table
    assert dict(zip(table.column("subject").to_pylist(), table.column("count").to_pylist(), strict=True)) == expected
    assert [log.subjects.on_subject(subject).count for subject in "bc"] == [0, 3 - cut_to]
    assert log.reader.time_us_of(2) == 2_000_002
    log.close()


def test_parts_with_a_range_of_more_than_32_bits(tmp_path: Path) -> None:
    """Offsets that were removed take space in the range only."""
    offsets = pa.array([5, 1 << 40, (1 << 40) + 7], pa.int64())
    batch = pa.record_batch({"offset": offsets, "subject": pa.array(["a", "b", "a"])})
    part = SubjectPart.of_rows(5, (1 << 40) + 8, [batch])
    later = pa.record_batch({"offset": pa.array([1 << 41], pa.int64()), "subject": pa.array(["a"])})
    joined = SubjectPart.joined([part, SubjectPart.of_rows((1 << 40) + 8, (1 << 41) + 1, [later])])
    assert joined.offsets_of(b"a", 6, 1 << 62).tolist() == [(1 << 40) + 7, 1 << 41]


TABLES = st.lists(
    st.dictionaries(st.sampled_from(SUBJECTS), st.integers(1, 9), max_size=4).map(
        lambda counts: sorted(counts.items())
    ),
    max_size=6,
)


@given(TABLES, st.integers(1, 3))
def test_counts_of_ranges_are_added_up_and_paged(ranges: list[list[tuple[str, int]]], limit: int) -> None:
    tables, expected, offset = [], dict[str, list[int]](), 0
    for one in ranges:
        rows = []
        for subject, count in one:
            rows.append((subject, count, offset, offset + count - 1))
            known = expected.setdefault(subject, [0, offset, 0])
            known[0], known[2] = known[0] + count, offset + count - 1
            offset += count
        named = [dict(zip(COUNTS_SCHEMA.names, row, strict=True)) for row in rows]
        tables.append(pa.Table.from_pylist(named, schema=COUNTS_SCHEMA))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("natslog.log.subject_counts._ROWS_AT_LEAST", 3)
        counts = SubjectCounts(combined(tables), offset)
    listed = [(subject, *facts) for subject, facts in sorted(expected.items(), key=lambda one: one[0].encode())]
    found, after = list[tuple[Any, ...]](), None
    while page := [tuple(row.values()) for row in counts.page(after, limit).to_pylist()]:
        assert len(page) <= limit
        found += page
        after = page[-1][0]
    assert found == listed


def test_a_pattern_covers_as_in_nats() -> None:
    batch = pa.record_batch(
        {"offset": pa.array(range(4), pa.int64()), "subject": pa.array(["a", "a.b", "a.b.c", "b.b"])}
    )
    part = SubjectPart.of_rows(0, 4, [batch])
    counts = SubjectCounts(part.counts(HiddenThen(BitMap64()), 0, 4), 4)
    assert counts.covered_by(("a.>",)).table.column("subject").to_pylist() == ["a.b", "a.b.c"]
    assert counts.covered_by(("*.b", "a")).table.column("subject").to_pylist() == ["a", "a.b", "b.b"]


def test_counts_of_the_logs_of_a_broker_are_kept_within_a_bound() -> None:
    def known(subjects: int) -> KnownCounts:
        numbers = pa.array(range(subjects))
        table = pa.table([pa.array([f"{at:04}" for at in range(subjects)]), numbers, numbers, numbers], COUNTS_SCHEMA)
        return KnownCounts(0, 0, SubjectCounts(table, subjects))

    kept = KeptCounts(3 * known(100).nbytes)
    for log in "abc":
        kept.keep(log, known(100))
    assert kept.of("a") is not None
    kept.keep("d", known(100))
    assert [log for log in "abcd" if kept.of(log)] == ["a", "c", "d"], "that of b was asked for longest ago"
    kept.keep("e", known(1000))
    assert not any(map(kept.of, "abcde")), "it is larger than all that is kept"
    kept.keep("a", known(1))
    kept.drop("a")
    assert kept.of("a") is None


def test_counts_that_were_made_of_messages_that_are_cut_off_meanwhile_are_not_kept(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(log_folder, OPTIONS)
    assert isinstance(log, ReplicaLog)
    for at, subject in enumerate("aab"):
        log.append(rows_of([(subject, None, None)], at), 1_000_000 + at)
    counts_of_part = SubjectPart.counts

    def cutting(part: SubjectPart, hidden: Hidden, start: int, end: int) -> pa.Table:
        monkeypatch.undo()
        log.discard_from(1)
        for at in (1, 2):
            log.append(rows_of([("c", None, None)], at), 2_000_000 + at)
        log.chain.committed = 3
        return counts_of_part(part, hidden, start, end)

    monkeypatch.setattr(SubjectPart, "counts", cutting)
    log.subjects.counts()
    table = log.subjects.counts()[1].table
    assert dict(zip(table.column("subject").to_pylist(), table.column("count").to_pylist(), strict=True)) == {
        "a": 1,
        "c": 2,
    }
    log.close()


@pytest.mark.parametrize("limit", [1, 2])
def test_number_of_subjects_is_known_where_each_has_one_message(tmp_path: Path, limit: int) -> None:
    replica = Replica(tmp_path)
    replica.set_rules((Rule(Epoch(0), limit),))
    log = replica.log
    for at, subject in enumerate(["a", "b", "a", "c", "a", "b"]):
        log.append(rows_of([(subject, None, None)], at), at + 1)
    replica.record({3})
    state, subjects = log.subjects.number()
    assert (state.end, subjects) == (6, 2)
    assert len(log.subjects.counts()[1].table) == 2
    log.close()
