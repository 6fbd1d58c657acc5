"""The limit of all logs of a broker: what is refused, and from when on there is room again."""

from __future__ import annotations

from pathlib import Path

import pytest

from natslog.errors import StorageFull
from natslog.log import LogOptions, StoreLimit
from tests.conftest import open_log, rows


def test_a_limit_counts_what_was_measured_and_what_was_appended_since() -> None:
    store = StoreLimit(1000)
    store.measured(600)
    store.take(300)
    assert (store.used_bytes, store.has_room) == (900, True)
    with pytest.raises(StorageFull, match="max_store_bytes is 1000"):
        store.take(200)
    assert store.used_bytes == 900, "what is refused takes nothing"


def test_a_broker_that_refused_a_message_has_no_room_before_more_than_that_is_free() -> None:
    """Otherwise it would go on leading streams whose messages it refuses."""
    store = StoreLimit(1000)
    store.measured(900)
    with pytest.raises(StorageFull):
        store.take(200)
    assert not store.has_room
    for used_bytes, has_room in ((900, False), (700, False), (600, True), (900, True)):
        store.measured(used_bytes)
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
