"""Slots for answers: hosts take turns, the number of requests that wait is bounded, and no slot is ever lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from natslog.errors import Overloaded
from natslog.http.fair_slots import FairSlots


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await story()

    asyncio.run(bounded())


async def turns() -> None:
    """Lets every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_hosts_take_turns_however_many_requests_each_has() -> None:
    async def story() -> None:
        slots, served = FairSlots(1, 100, 60.0), []
        first = slots.slot("busy")
        await first.__aenter__()

        async def ask(host: str) -> None:
            async with slots.slot(host):
                served.append(host)

        tasks = [asyncio.create_task(ask(host)) for host in ["busy"] * 5 + ["one", "two"]]
        await turns()
        assert served == []
        await first.__aexit__(None, None, None)
        await asyncio.gather(*tasks)
        assert served == ["busy", "one", "two", "busy", "busy", "busy", "busy"]
        assert slots.waiting == 0

    run(story)


def test_too_many_and_too_long_are_overloaded() -> None:
    async def story() -> None:
        slots = FairSlots(1, 1, 0.01)
        async with slots.slot("a"):
            waiting = asyncio.create_task(slots.slot("b").__aenter__())
            await turns()
            with pytest.raises(Overloaded, match="1 requests are already waiting"):
                await slots.slot("c").__aenter__()
            with pytest.raises(Overloaded, match="this request waited"):
                await waiting
        async with slots.slot("c"):
            assert slots.waiting == 0

    run(story)


def test_client_that_leaves_when_its_turn_has_come_takes_no_slot_with_it() -> None:
    """Otherwise one client that leaves at the right moment ends all answers of this kind for good."""

    async def story() -> None:
        slots = FairSlots(1, 10, 60.0)
        first = slots.slot("a")
        await first.__aenter__()
        waiting = asyncio.create_task(slots.slot("b").__aenter__())
        await turns()
        await first.__aexit__(None, None, None)  # it is b's turn, which is not told yet
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with slots.slot("c"):
            assert slots.waiting == 0

    run(story)


def test_client_that_leaves_while_it_waits_is_passed_over() -> None:
    async def story() -> None:
        slots = FairSlots(1, 10, 60.0)
        async with slots.slot("a"):
            waiting = asyncio.create_task(slots.slot("b").__aenter__())
            await turns()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert slots.waiting == 0
        async with slots.slot("c"):
            pass

    run(story)


def test_client_that_has_just_left_is_passed_over() -> None:
    """Its task has not run since: it waits for a turn that nobody takes any more."""

    async def story() -> None:
        slots = FairSlots(1, 10, 60.0)
        async with slots.slot("a"):
            leaves = asyncio.create_task(slots.slot("b").__aenter__())
            stays = asyncio.create_task(slots.slot("b").__aenter__())
            await turns()
            leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        await asyncio.wait_for(stays, 5)
        assert slots.waiting == 0

    run(story)
