"""Batches whose messages were removed: an offset without a row is a removed one, in every file and for every reader."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow import ipc
from natslog.arrow.batch_line import FIRST_FORMAT, LATEST_FORMAT
from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.log import LogOptions, ReplicaLog
from natslog.log.batch_encoder import EncodedBatch
from natslog.log.batch_index import BatchEntry, BatchIndex
from natslog.log.verify import check_file
from tests.conftest import open_log, stored_values


def message_of(base: int, count: int, *, batch_format: int = LATEST_FORMAT, with_ids: bool = False) -> memoryview:
    """A batch of `count` rows, a second apart."""
    columns: dict[str, Any] = {
        "offset": range(base, base + count),
        "timestamp": [at * 1_000_000 for at in range(base, base + count)],
        "subject": [f"orders.{at % 3}" for at in range(base, base + count)],
        "value": [b"%d" % at for at in range(base, base + count)],
    }
    arrays = [pa.array(columns.get(field.name, [None] * count), field.type) for field in MESSAGE_SCHEMA]
    ids = np.arange(count * ipc.ID_BYTES, dtype=np.uint8).reshape(count, ipc.ID_BYTES) + 1 if with_ids else None
    return ipc.encode_batch(
        pa.record_batch(arrays, schema=MESSAGE_SCHEMA),
        base_offset=base,
        epoch=1,
        max_timestamp_us=(base + count - 1) * 1_000_000,
        packed_ids=ids,
        batch_format=batch_format,
    )


def gapped(base: int, count: int, removed: set[int], **options: Any) -> memoryview:
    flags = np.array([at in removed for at in range(base, base + count)], bool)
    return ipc.without_rows(message_of(base, count, **options), flags)


def header_of(message: memoryview) -> ipc.BatchHeader:
    header = ipc.proven_header(message)
    assert header is not None
    assert ipc.body_holds(header, message)
    return header


def filled(folder: Path, removed: set[int], edges: list[int], **options: Any) -> ReplicaLog:
    """A log of batches between these offsets, copied from a leader, without the rows that were removed."""
    log = open_log(folder, LogOptions(min_free_bytes=0, **options.pop("log", {})), **options)
    for base, end in pairwise(edges):
        message = gapped(base, end - base, removed)
        log.append_copies([EncodedBatch(header_of(message), [message])])
    return log


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 20),
    removed=st.sets(st.integers(100, 119)),
    bounds=st.tuples(st.integers(95, 125), st.integers(95, 125)),
    batch_format=st.sampled_from([FIRST_FORMAT, LATEST_FORMAT]),
    with_ids=st.booleans(),
)
def test_a_clipped_batch_has_the_rows_and_offsets_of_the_range(
    count: int, removed: set[int], bounds: tuple[int, int], batch_format: int, with_ids: bool
) -> None:
    with_ids = with_ids and batch_format == LATEST_FORMAT
    whole = gapped(100, count, removed, batch_format=batch_format, with_ids=with_ids)
    start, end = max(100, min(bounds)), min(100 + count, max(bounds))
    if start >= end:
        return
    clipped = ipc.clip_batch(whole, start, end)
    header, batch = header_of(clipped), ipc.decode_batch(clipped)
    expected = [at for at in range(start, end) if at not in removed]
    assert (header.base_offset, header.end_offset, header.rows) == (start, end, len(expected))
    assert batch.column("offset").to_pylist() == expected
    assert batch.column("value").to_pylist() == [b"%d" % at for at in expected]
    assert header.has_gaps == (len(expected) < end - start)
    if header.has_gaps:
        assert header.batch_format == LATEST_FORMAT, "format 1 cannot state it"
    if with_ids and expected:
        ids = ipc.packed_ids_of(header, clipped)
        assert ids is not None
        assert ids[:, 0].tolist() == [(at - 100) * ipc.ID_BYTES % 256 + 1 for at in expected]


def test_an_index_states_rows_only_where_messages_were_removed() -> None:
    index = BatchIndex()
    index.append(BatchEntry(0, 10, 10, 100, 50, 7))
    assert index.to_text().startswith(b"v1 "), "versions before 0.2.0 read it"
    index.append(BatchEntry(10, 20, 3, 150, 50, 9))
    text = index.to_text()
    assert text.startswith(b"v2 ")
    read = BatchIndex.from_text(text, "a file")
    assert [read[at] for at in range(2)] == [index[at] for at in range(2)]


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("merges", [True, False], ids=["merged", "batches that are large already"])
def test_a_log_with_removed_messages_is_sealed_reopened_and_read_the_same(
    log_folder: Path, compression: str, merges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not merges:
        monkeypatch.setattr("natslog.log.sealed._LARGE_COMMIT_BYTES", 1)
    removed = {0, 1, 7, *range(20, 40), 55, 99}
    log = filled(log_folder, removed, [0, 10, 20, 30, 40, 70, 100], compression=compression)
    expected = [b"%d" % at for at in range(100) if at not in removed]
    assert stored_values(log) == expected
    log.close()
    log = open_log(log_folder, compression=compression)
    assert (log.log_start_offset, log.log_end_offset) == (0, 100), "offsets whose messages are removed are not lost"
    assert log.failure is None
    log.roll()
    while log.upkeep.seal_next():
        pass
    sealed = log.chain.segments[0]
    assert sealed.path.suffix == ".arrow"
    assert stored_values(log) == expected
    report = check_file(sealed.path)
    assert (report.problems, report.messages) == ((), len(expected))
    with pa.OSFile(str(sealed.path)) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table.column("value").to_pylist() == expected
    log.close()
    assert stored_values(open_log(log_folder, compression=compression)) == expected


def test_a_segment_all_of_whose_messages_were_removed_keeps_its_offsets(log_folder: Path) -> None:
    log = filled(log_folder, set(range(20)), [0, 10, 20])
    log.roll()
    while log.upkeep.seal_next():
        pass
    log.close()
    log = open_log(log_folder)
    assert (log.log_start_offset, log.log_end_offset, stored_values(log)) == (0, 20, [])
    assert log.reader.offset_at(0) == (20, None)


def test_times_are_found_behind_removed_messages(log_folder: Path) -> None:
    log = filled(log_folder, {4, 8, 9, *range(10, 20), 25}, [0, 10, 20, 30])
    for at in range(30):
        following = next(offset for offset in range(at, 30) if offset not in {4, 8, 9, *range(10, 20), 25})
        assert log.reader.offset_at(at * 1_000_000) == (following, following * 1_000_000)
    assert log.reader.offset_at(0, start=8) == (20, 20_000_000)
    lag = log.reader.lag(8)
    assert lag.oldest_us is not None
    assert 8_000_000 <= lag.oldest_us <= 20_000_000


def test_a_plan_that_ends_before_its_last_batch_does_not_count_the_rows_of_it(log_folder: Path) -> None:
    log = filled(log_folder, {2, 12, 13, 25}, [0, 10, 20, 30])
    with log.reader.plan_read(1, 27, max_bytes=1 << 20) as plan:
        plan.take_uneven()
        assert (plan.next_offset, plan.removed_rows) == (27, 4)
        plan._end_before(0, plan.ranges[0].first)
        assert (plan.next_offset, plan.removed_rows) == (10, 1)


def test_a_replica_cuts_a_log_inside_a_batch_with_removed_messages(log_folder: Path) -> None:
    log = filled(log_folder, {3, 5, 6, 12}, [0, 10, 20])
    log.chain.committed = 0
    log.cut_to(7)
    assert log.log_end_offset == 7
    log.chain.committed = 7
    assert stored_values(log) == [b"0", b"1", b"2", b"4"]
    log.close()
    log = open_log(log_folder)
    assert (log.log_end_offset, log.failure) == (7, None)


def test_damage_before_a_batch_far_away_is_damage_and_not_a_torn_tail(log_folder: Path) -> None:
    """The offsets of the next whole batch may be higher than the bytes between would have room for."""
    log = filled(log_folder, set(range(5, 2000)), [0, 10, 1990, 2000, 2010])
    second = log.chain.segments[-1].index[1]
    path = log.chain.segments[-1].path
    log.close()
    content = bytearray(path.read_bytes())
    content[second.position : second.position + second.length] = b"\xaa" * second.length
    path.write_bytes(content)
    damaged = open_log(log_folder)
    (damage,) = damaged.chain.damages
    assert (damage.start_offset, damage.end_offset) == (10, 1990)
    assert damaged.log_end_offset == 2010
