"""The deduplication window rebuilt from the log: all ids that can be read, and a word of those that cannot."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.arrow.schema import HEADERS_TYPE
from natslog.ingest.dedupe import NEW, DedupeWindow
from natslog.log import LogOptions, ReplicaLog
from natslog.log.sealed import _INDEX_TEXT
from natslog.node.clock import now_us
from natslog.node.writes.dedupe_rebuild import prepared_dedupe, rebuilt_dedupe
from natslog.wire import own_ids
from natslog.wire.message_ids import ids_of_headers
from tests.conftest import open_log

SMALL = LogOptions(segment_bytes=4096, min_free_bytes=0)
BATCHES, ROWS = 30, 10


def headers_of(batch: int) -> pa.Array:
    return pa.array([[{"key": "Nats-Msg-Id", "value": f"{batch}.{row}"}] for row in range(ROWS)], HEADERS_TYPE)


def filled(folder: Path, stamped_us: int) -> ReplicaLog:
    log = open_log(folder, SMALL)
    for at in range(BATCHES):
        columns = [pa.array(["a"] * ROWS), pa.nulls(ROWS, pa.binary()), headers_of(at), pa.array([b"v" * 50] * ROWS)]
        log.append(RowBuffers.of(pa.RecordBatch.from_arrays(columns, schema=PAYLOAD_SCHEMA)), stamped_us)
    while log.upkeep.seal_next():
        pass
    return log


@pytest.fixture
def log(log_folder: Path):
    log = filled(log_folder, now_us())
    yield log
    log.close()


def known(window: DedupeWindow, at_us: int | None = None) -> list[int]:
    """The batches all of whose ids the window knows."""
    found, at_us = [], now_us() if at_us is None else at_us
    for at in range(BATCHES):
        ids = ids_of_headers(headers_of(at))
        assert ids is not None
        offsets = window.find(ids, at_us)
        if (offsets != NEW).all():
            assert offsets.tolist() == list(range(at * ROWS, (at + 1) * ROWS))
            found.append(at)
    return found


def test_whole_log_is_remembered(log) -> None:
    window, damage = rebuilt_dedupe(60.0, log)
    assert damage is None
    assert known(window) == list(range(BATCHES))


def test_nothing_is_remembered_without_a_window(log) -> None:
    window, damage = rebuilt_dedupe(0.0, log)
    assert damage is None
    assert known(window) == []


@pytest.mark.parametrize("where", ["footer", "header", "body"])
def test_what_lies_behind_damage_is_remembered_and_the_damage_is_told(log, where: str) -> None:
    segment = log.chain.segments[2]
    assert segment.path.suffix == ".arrow"
    base, end, positions = segment.base_offset, segment.end_offset, list(segment.index.positions)
    content = bytearray(segment.path.read_bytes())
    index_text = list(_INDEX_TEXT.finditer(bytes(content)))[-1]
    at = {"footer": sum(index_text.span()) // 2, "header": positions[0] + 20, "body": positions[0] + 1200}[where]
    content[at] ^= 4
    segment.path.write_bytes(bytes(content))
    segment.forget()
    window, damage = rebuilt_dedupe(60.0, log)
    assert damage is not None
    assert segment.path.name in damage.message
    remembered = known(window)
    missing = sorted(set(range(BATCHES)) - set(remembered))
    assert missing, "the damage hides some"
    assert base // ROWS <= missing[0]
    assert missing[-1] <= (end - 1) // ROWS, "of the damaged segment only"


MINUTE_US = 60_000_000


def spread(folder: Path, *, sealed: bool) -> ReplicaLog:
    """A batch every ten seconds, from minute 100 on."""
    log = open_log(folder, SMALL)
    for at in range(BATCHES):
        columns = [pa.array(["a"] * ROWS), pa.nulls(ROWS, pa.binary()), headers_of(at), pa.array([b"v" * 50] * ROWS)]
        rows_of_batch = RowBuffers.of(pa.RecordBatch.from_arrays(columns, schema=PAYLOAD_SCHEMA))
        log.append(rows_of_batch, 100 * MINUTE_US + at * 10_000_000)
    while sealed and log.upkeep.seal_next():
        pass
    return log


@pytest.mark.long
@pytest.mark.parametrize("sealed", [False, True])
def test_a_window_filled_from_the_log_judges_as_that_of_the_leader_who_stored_it(tmp_path: Path, sealed: bool) -> None:
    """Whether a follower read single commits, or the large batches that sealing makes of them."""
    log = spread(tmp_path / "log", sealed=sealed)
    newest_us = log.newest_timestamp_us
    for asked_us in range(newest_us, newest_us + 3 * MINUTE_US, 7_000_000):
        leaders = DedupeWindow(60.0)
        for at in range(BATCHES):
            ids = ids_of_headers(headers_of(at))
            assert ids is not None
            offsets = np.arange(at * ROWS, (at + 1) * ROWS)
            leaders.remember(ids, offsets, 100 * MINUTE_US + at * 10_000_000)
        successors, damage = rebuilt_dedupe(60.0, log)
        assert damage is None
        found = known(successors, asked_us)
        assert found == known(leaders, asked_us)
        within = [at for at in range(BATCHES) if asked_us - (100 * MINUTE_US + at * 10_000_000) < MINUTE_US]
        assert within == found, "those that were stored within the window"
    log.close()


def test_the_time_of_files_does_not_count(tmp_path: Path) -> None:
    spread(tmp_path / "log", sealed=True).close()
    for path in (tmp_path / "log").glob("0*"):
        os.utime(path, (1.0, 1.0))
    log = open_log(tmp_path / "log", SMALL)
    window, _ = rebuilt_dedupe(60.0, log)
    assert known(window, log.newest_timestamp_us)[-6:] == list(range(BATCHES - 6, BATCHES))
    log.close()


def test_a_disk_that_does_not_read_is_told_and_stops_nothing(log, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int, position: int, length: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("natslog.log.read_plan.read_at", failing)
    window, damage = rebuilt_dedupe(60.0, log)
    assert damage is not None
    assert "Input/output error" in damage.message
    assert known(window) == []


def test_retention_meanwhile_costs_no_id(log, monkeypatch: pytest.MonkeyPatch) -> None:
    first_left = log.chain.segments[2].base_offset
    plan_read = log.reader.plan_read

    def overtaken(start: int, *range_end: int, **options: object) -> object:
        if log.log_start_offset == 0 and start < first_left:
            monkeypatch.undo()
            assert log.upkeep.drop_before(first_left) == 2
        return plan_read(start, *range_end, **options)

    monkeypatch.setattr(log.reader, "plan_read", overtaken)
    window, damage = rebuilt_dedupe(60.0, log)
    assert damage is None
    assert log.log_start_offset == first_left
    assert known(window) == list(range(BATCHES))


def test_packed_ids_are_remembered_from_active_and_sealed_segments(log_folder: Path) -> None:
    """Some rows have an id in their headers, some a packed one, some none; batches without any are among them."""
    log, stamped_us = open_log(log_folder, SMALL), now_us()
    random = np.random.default_rng(7)
    expected: list[tuple[np.ndarray, int]] = []
    for at in range(BATCHES):
        packed = random.integers(1, 256, (ROWS, own_ids.PACKED_BYTES), np.uint8)
        packed[::3] = 0
        headers = pa.array([None, [{"key": "Nats-Msg-Id", "value": f"{at}"}]] + [None] * (ROWS - 2), HEADERS_TYPE)
        packed[1] = 0
        if at % 5 == 0:
            packed[:], headers = 0, pa.nulls(ROWS, HEADERS_TYPE)
        columns = [pa.array(["a"] * ROWS), pa.nulls(ROWS, pa.binary()), headers, pa.array([b"v" * 50] * ROWS)]
        batch = pa.RecordBatch.from_arrays(columns, schema=PAYLOAD_SCHEMA)
        base, _ = log.append(RowBuffers.of(batch, packed if packed.any() else None), stamped_us)
        hashes = own_ids.hashed(packed)
        if (of_headers := ids_of_headers(headers)) is not None:
            hashes[1] = of_headers[1]
        expected += [(hashes[row], base + row) for row in range(ROWS) if hashes[row].any()]
    for is_sealed in (False, True):
        while is_sealed and log.upkeep.seal_next():
            pass
        window, damage = rebuilt_dedupe(120.0, log)
        assert damage is None
        found = window.find(np.array([ids for ids, _ in expected]), stamped_us)
        assert found.tolist() == [offset for _, offset in expected]
    log.close()


@pytest.fixture
def read_from(log, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets from which batches were read."""
    read, plan_read = list[int](), log.reader.plan_read

    def noted(start: int, *range_end: int, **options: object) -> object:
        read.append(start)
        return plan_read(start, *range_end, **options)

    monkeypatch.setattr(log.reader, "plan_read", noted)
    return read


def test_a_window_that_was_prepared_is_completed_from_what_was_stored_since(log, read_from: list[int]) -> None:
    """And has nothing that was not committed then: it may have been truncated since."""
    log.chain.committed = (BATCHES - 10) * ROWS
    prepared = prepared_dedupe(60.0, log)
    assert prepared is not None
    assert known(prepared.window) == list(range(BATCHES - 10))
    read_from.clear()
    window, damage = rebuilt_dedupe(60.0, log, prepared)
    assert damage is None
    assert known(window) == list(range(BATCHES))
    assert min(read_from) == prepared.end


def test_a_window_that_is_prepared_twice_is_read_once(log, read_from: list[int]) -> None:
    """The leadership is often requested for its preferred leader at the moment at which the present one stops."""
    log.chain.committed = (BATCHES - 10) * ROWS
    first = prepared_dedupe(60.0, log)
    log.chain.committed = (BATCHES - 5) * ROWS
    read_from.clear()
    second = prepared_dedupe(60.0, log, first)
    assert first is not None
    assert second is not None
    assert known(second.window) == list(range(BATCHES - 5)), "nothing that is not committed"
    assert min(read_from) == first.end
    assert second.end == (BATCHES - 5) * ROWS
    window, damage = rebuilt_dedupe(60.0, log, second)
    assert damage is None
    assert known(window) == list(range(BATCHES))


def test_a_window_that_was_prepared_for_another_length_is_read_again(log) -> None:
    window, _ = rebuilt_dedupe(120.0, log, prepared_dedupe(60.0, log))
    assert window.window_us == 120_000_000
    assert known(window) == list(range(BATCHES))


def test_nothing_is_prepared_of_a_log_that_cannot_be_read(log, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int, position: int, length: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("natslog.log.read_plan.read_at", failing)
    assert prepared_dedupe(60.0, log) is None


def test_ids_of_rows_that_went_since_a_window_was_prepared_are_in_it(log) -> None:
    log.chain.committed = 100
    prepared = prepared_dedupe(60.0, log)
    log.chain.committed = log.log_end_offset
    start = log.chain.segments[-1].base_offset
    assert log.upkeep.drop_before(start) > 0
    assert start > 100
    window, damage = rebuilt_dedupe(60.0, log, prepared)
    assert damage is None
    assert known(window) == list(range(BATCHES))
