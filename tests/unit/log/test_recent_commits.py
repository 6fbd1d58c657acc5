"""The last small commits of a log in memory: what is asked for is what is in the file, and memory is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from natslog.arrow.row_buffers import RowBuffers
from natslog.log import LogOptions, ReplicaLog
from natslog.log.batch_encoder import EncodedBatch, encode_rows
from natslog.log.recent_commits import RecentCommits, RecentRoom
from natslog.wire.small_batches import rows_of
from tests.conftest import open_log, rows


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def log(log_folder: Path) -> Iterator[ReplicaLog]:
    log = open_log(log_folder, LogOptions(min_free_bytes=0))
    assert isinstance(log, ReplicaLog)
    yield log
    log.close()


def commit(base_offset: int, *values: bytes) -> EncodedBatch:
    given: RowBuffers = rows(list(values))
    return encode_rows(given, base_offset=base_offset, timestamp_us=1, epoch=1)


def wanted(room: RecentRoom, clock: Clock) -> RecentCommits:
    recent = RecentCommits(room, clock)
    assert recent.stored(0, 1) is None
    return recent


def test_nothing_is_kept_until_somebody_asks(log: ReplicaLog) -> None:
    log.append(rows([b"a"]), 1)
    assert log.recent.rows(0, 1) is None
    log.append(rows([b"b", b"c"]), 2)
    log.append(rows([b"d"]), 3)
    found = log.recent.rows(1, 4)
    assert found is not None
    assert found.column("value").to_pylist() == [b"b", b"c", b"d"]
    assert found.column("offset").to_pylist() == [1, 2, 3]
    assert log.recent.rows(1, 4) is found, "decoded once for all that ask"
    assert log.recent.rows(0, 4) is None
    assert log.recent.rows(2, 4) is None, "in the middle of a commit"
    assert log.recent.rows(1, 2) is None


def test_large_commits_and_runs_leave_no_gap(log: ReplicaLog) -> None:
    log.recent.stored(0, 1)
    log.append(rows([b"a"]), 1)
    log.append(rows([b"x" * 100_000]), 2)
    assert log.recent.rows(0, 1) is None
    assert log.recent.rows(0, 2) is None
    log.append(rows([b"b"]), 3)
    assert log.recent.rows(2, 3) is not None


def test_what_was_cut_off_is_not_found(log: ReplicaLog) -> None:
    log.recent.stored(0, 1)
    for value in (b"a", b"b", b"c"):
        log.append(rows([value]), 1)
    log.discard_from(1)
    assert log.recent.rows(0, 2) is None
    log.append(rows([b"other"]), 2)
    found = log.recent.rows(1, 2)
    assert found is not None
    assert found.column("value").to_pylist() == [b"other"]


def test_memory_is_bounded_and_given_back() -> None:
    clock = Clock()
    one = commit(0, b"x" * 1000)
    size_bytes = one.header.total_bytes
    room = RecentRoom(5 * size_bytes)
    first, second = wanted(room, clock), wanted(room, clock)
    for at in range(4):
        first.committed(commit(at, b"x" * 1000))
    second.committed(commit(0, b"x" * 1000))
    assert room.left_bytes < size_bytes
    second.committed(commit(1, b"x" * 1000))
    assert second.stored(0, 2) is None, "no room: it is read from the file"
    assert first.stored(0, 4) is not None
    clock.now_s += 11
    first.drop_unwanted()
    second.drop_unwanted()
    assert room.left_bytes == 5 * size_bytes
    first.committed(commit(4, b"y"))
    assert first.stored(4, 5) is None, "it was not asked for for a while"


def test_where_there_is_no_room_a_log_keeps_its_newest_commits() -> None:
    clock = Clock()
    size_bytes = commit(0, b"x").header.total_bytes
    recent = wanted(RecentRoom(3 * size_bytes), clock)
    for at in range(10):
        recent.committed(commit(at, b"x"))
    assert recent.stored(7, 10) is not None
    assert recent.stored(6, 10) is None


def test_damage_in_memory_is_no_damage_of_the_log() -> None:
    recent = wanted(RecentRoom(), Clock())
    damaged = commit(0, b"x" * 100)
    body = bytearray(damaged.pieces[-1])
    body[-1] ^= 1
    recent.committed(EncodedBatch(damaged.header, [*damaged.pieces[:-1], memoryview(body)]))
    assert recent.rows(0, 1) is None
    assert recent.stored(0, 1) is None


def test_rows_that_are_cut_off_while_they_are_decoded_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = wanted(RecentRoom(), Clock())
    recent.committed(commit(0, b"lost"))

    def cutting(data: bytes, *, source: str) -> Any:
        monkeypatch.undo()
        recent.clear()
        recent.committed(commit(0, b"new"))
        return rows_of(data, source=source)

    monkeypatch.setattr("natslog.log.recent_commits.rows_of", cutting)
    assert recent.rows(0, 1) is not None
    found = recent.rows(0, 1)
    assert found is not None
    assert found.column("value").to_pylist() == [b"new"]


def test_a_log_keeps_its_newest_commits() -> None:
    clock, room = Clock(), RecentRoom()
    recent = wanted(room, clock)
    for at in range(1000):
        recent.committed(commit(at, b"x" * 200))
    assert recent.stored(0, 1000) is None
    assert recent.stored(990, 1000) is not None
    recent.clear()
    assert recent.stored(990, 1000) is None
    assert room.left_bytes == RecentRoom().left_bytes
