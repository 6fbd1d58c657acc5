"""The leader of a stream stores the states of its consumers, and answers confirmed acks when they are stored."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from pyroaring import BitMap64

from natslog.errors import CorruptLog
from natslog.jetstream.consumers.leading import LedConsumers


class _Served:
    """A consumer whose leadership ends."""

    is_closed = True

    def __init__(self, name: str) -> None:
        self.name = name


def test_answer_to_a_stored_ack_does_not_depend_on_what_follows() -> None:
    """The start of the log could not be moved, although the removal was committed: that is tried again."""
    sent: list[bytes] = []
    moves: list[bool] = []

    def move_start() -> None:
        moves.append(True)
        if len(moves) == 1:
            raise CorruptLog("a footer is damaged")

    async def nothing(*_: object) -> None:
        """It is appended."""

    async def send(data: bytes) -> None:
        sent.append(data)

    async def removable(_: object) -> BitMap64:
        return BitMap64([1]) if not moves else BitMap64()

    led: Any = SimpleNamespace(
        _answers=["_INBOX.ack"],
        _changed=set(),
        _moves_start=False,
        _records_of=lambda stream, removed: [b"record"],
        _state_of=None,
        readers=None,
        stream=SimpleNamespace(companion=SimpleNamespace(append=nothing), nats=SimpleNamespace(send=send)),
        retention=SimpleNamespace(removable=removable, recorded=lambda: None, move_start=move_start),
    )

    async def story() -> None:
        with pytest.raises(CorruptLog):
            await LedConsumers._store_now(led)
        assert sent == [b"PUB _INBOX.ack 0\r\n\r\n"]
        await LedConsumers._store_now(led)
        assert len(sent) == 1
        assert len(moves) == 2
        await LedConsumers._store_now(led)
        assert len(moves) == 2

    asyncio.run(story())


def test_an_ack_whose_store_was_interrupted_is_not_answered_before_its_state_is_stored() -> None:
    """Where the leadership ended during a store, the acks were answered without their states: the simulation found it
    (seed 41). A consumer that was deleted meanwhile has no state any more.
    """
    sent: list[bytes] = []
    stored: list[Any] = []
    fails = [True]

    async def append(records: list[Any]) -> None:
        if fails:
            raise asyncio.CancelledError
        stored.extend(records)

    async def send(data: bytes) -> None:
        sent.append(data)

    async def removable(_: object) -> BitMap64:
        return BitMap64()

    served, deleted = _Served("c"), _Served("d")
    led: Any = SimpleNamespace(
        _answers=["_INBOX.ack"],
        _changed={served, deleted},
        _moves_start=False,
        _state_of=lambda served: served.name,
        consumers={"c": served, "d": _Served("d")},
        stream=SimpleNamespace(companion=SimpleNamespace(append=append), nats=SimpleNamespace(send=send)),
        retention=SimpleNamespace(removable=removable, recorded=lambda: None, not_recorded=lambda: None),
    )

    async def story() -> None:
        with pytest.raises(asyncio.CancelledError):
            await LedConsumers._store_now(led)
        assert not sent
        fails.clear()
        await LedConsumers._store_now(led)
        assert stored == ["c"]
        assert sent == [b"PUB _INBOX.ack 0\r\n\r\n"]

    asyncio.run(story())


def test_a_purge_is_applied_to_consumers_again_where_the_log_could_not_be_read() -> None:
    """For example without descriptors; the simulation found it (seed 65)."""
    told: list[bool] = []

    async def purged(_: str) -> None:
        told.append(True)
        if len(told) == 1:
            raise CorruptLog("a file cannot be read")

    async def story() -> None:
        tasks: list[asyncio.Task[None]] = []
        led: Any = SimpleNamespace(
            _is_ending=False,
            _purged_below=0,
            purged=purged,
            spawn=lambda work, name: tasks.append(asyncio.create_task(work)),
            stream=SimpleNamespace(name="s", record=SimpleNamespace(purged_below=5)),
        )
        led._apply_purge = lambda: LedConsumers._apply_purge(led)
        led._find_purge = lambda: LedConsumers._find_purge(led)
        led._find_purge()
        await asyncio.gather(*tasks)
        assert led._purged_below == 0
        led._find_purge()
        await asyncio.gather(*tasks)
        assert led._purged_below == 5
        led._find_purge()
        assert len(told) == len(tasks) == 2

    asyncio.run(story())
