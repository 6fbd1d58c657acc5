"""The limit of all logs of a broker: what is refused, and from when on there is room again."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from natslog.errors import StorageFull, StorageUnavailable
from natslog.log import LogOptions, StoreLimit
from natslog.log.segment import ActiveSegment
from tests.conftest import open_log, rows


def test_a_limit_counts_what_was_measured_and_what_was_appended_since() -> None:
    store = StoreLimit(1000)
    store.measured(600, store.taken_bytes)
    store.take(300)
    assert (store.used_bytes, store.has_room) == (900, True)
    with pytest.raises(StorageFull, match="max_store_bytes is 1000"):
        store.take(200)
    assert store.used_bytes == 900, "what is refused takes nothing"


def test_a_broker_that_refused_a_message_has_no_room_before_more_than_that_is_free() -> None:
    """Otherwise it would go on leading streams whose messages it refuses."""
    store = StoreLimit(1000)
    store.measured(900, store.taken_bytes)
    with pytest.raises(StorageFull):
        store.take(200)
    assert not store.has_room
    for used_bytes, has_room in ((900, False), (700, False), (600, True), (900, True)):
        store.measured(used_bytes, store.taken_bytes)
        assert store.has_room == has_room, used_bytes


def test_without_a_limit_there_is_always_room() -> None:
    store = StoreLimit(None)
    store.take(2**62)
    assert store.has_room


def test_logs_share_a_limit_and_small_messages_count_with_what_is_stored_beside_them(tmp_path: Path) -> None:
    store = StoreLimit(200_000)
    logs = [open_log(tmp_path / name, LogOptions(min_free_bytes=0, store=store)) for name in ("a", "b")]
    for number in range(1000):
        try:
            logs[number % 2].append(rows([b"v"] * 50), number)
        except StorageFull:
            break
    else:
        raise AssertionError("nothing was refused")
    stored = sum(log.chain.size_bytes for log in logs)
    assert 150_000 < stored <= 200_000


def test_what_is_appended_during_a_measurement_counts() -> None:
    store = StoreLimit(1000)
    store.measured(700, store.taken_bytes)
    began = store.taken_bytes
    store.take(300)
    store.measured(500, began)
    assert store.used_bytes == 800, "files were removed, and the new one was not measured yet"
    with pytest.raises(StorageFull):
        store.take(300)
    began = store.taken_bytes
    store.take(100)
    store.measured(900, began)
    assert store.used_bytes == 900, "it was measured"


def test_an_append_that_is_under_way_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StoreLimit(1_000_000)
    log = open_log(tmp_path / "log", LogOptions(min_free_bytes=0, store=store))
    before, during = log.stored_bytes, list[int]()
    append = ActiveSegment.append

    def measured(self: ActiveSegment, *batches: Any, **named: Any) -> None:
        during.append(log.stored_bytes)
        append(self, *batches, **named)

    monkeypatch.setattr(ActiveSegment, "append", measured)
    log.append(rows([b"x" * 10_000]), 1)
    assert during[0] >= before + 10_000
    assert log.stored_bytes == log.chain.size_bytes > before + 10_000
    with pytest.raises(StorageFull):
        log.append(rows([b"x" * 1_000_000]), 1)
    assert log.stored_bytes == log.chain.size_bytes
    log.close()


def test_a_refusal_of_more_than_fits_does_not_hold_for_ever() -> None:
    store = StoreLimit(1000)
    with pytest.raises(StorageFull):
        store.take(1600)
    for used_bytes, has_room in ((600, False), (500, True)):
        store.measured(used_bytes, store.taken_bytes)
        assert store.has_room == has_room


def test_free_space_that_cannot_be_read_is_no_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(tmp_path / "log", LogOptions(min_free_bytes=1))

    def failing(folder: Path) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("natslog.log.room.free_bytes", failing)
        with pytest.raises(StorageUnavailable, match="Input/output error"):
            log.append(rows([b"v"]), 1)
    assert log.append(rows([b"v"]), 1)[0] == 0
    log.close()


def test_a_disk_that_refused_a_message_has_no_room_before_more_than_that_is_free() -> None:
    """A disk that only natslog fills stays above `min_free_bytes`, by less than the next message needs."""
    store = StoreLimit(None)

    def has_room(free_bytes: int, measured_s: float = float("inf")) -> bool:
        return store.disk_has_room(free_bytes, 1000, measured_s)

    assert has_room(1100)
    assert not has_room(999)
    store.disk_refused(100)
    assert not has_room(1100)
    assert not has_room(1399)
    assert not has_room(5000, measured_s=0.0), "that was before it refused"
    assert has_room(1400)
    assert has_room(1100), "it has accepted messages since"
    store.disk_refused(10_000)
    assert has_room(2000), "one very large message is refused, and others are not"


def test_a_log_states_that_its_disk_refused_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StoreLimit(None)
    log = open_log(tmp_path, LogOptions(min_free_bytes=1000, store=store))
    monkeypatch.setattr("natslog.log.room.free_bytes", lambda folder: 1010)
    with pytest.raises(StorageFull):
        log.append(rows([b"x" * 100]), 1)
    assert not store.disk_has_room(1010, 1000, float("inf"))


def test_one_very_large_message_is_refused_and_the_disk_is_not_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a publisher of such messages would move the leaderships of all streams."""
    store = StoreLimit(None)
    log = open_log(tmp_path, LogOptions(min_free_bytes=1000, store=store))
    monkeypatch.setattr("natslog.log.room.free_bytes", lambda folder: 2000)
    with pytest.raises(StorageFull):
        log.append(rows([b"x" * 10_000]), 1)
    assert store.disk_has_room(2000, 1000, 0.0)
