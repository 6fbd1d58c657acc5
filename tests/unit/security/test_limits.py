"""Quotas: counts, rates and refusals, in real time that is short."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from natslog.errors import QuotaExceeded
from natslog.security.guard import Guard, Identity, Rights
from natslog.security.limits import DEFAULTS, Limits
from natslog.security.records import Quota, Security


def rights(quota: Quota) -> Rights:
    return Guard(lambda: Security(quotas={"alice": quota}), lambda: 0).rights(Identity("alice"))


def test_requests_beyond_the_rate_wait_and_then_are_refused() -> None:
    async def run() -> None:
        limits, quota, started = Limits(), Quota(requests_per_s=50), time.monotonic()
        for _ in range(100):  # the burst of two seconds
            await limits.admit("alice", quota)
        assert time.monotonic() - started < 0.5
        await asyncio.gather(*(limits.admit("alice", quota) for _ in range(25)))
        assert 0.3 < time.monotonic() - started < 3, "half a second's worth waited"
        waiting = [asyncio.create_task(limits.admit("alice", quota)) for _ in range(200)]
        done, _ = await asyncio.wait(waiting, timeout=0.05)
        refused = [one.exception() for one in done if one.exception() is not None]
        assert refused
        assert isinstance(refused[0], QuotaExceeded)
        assert refused[0].facts["retry_after_s"] > 1
        await limits.admit("bob", quota)  # another identity does not wait
        for one in waiting:
            one.cancel()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_counts_are_limited_and_given_back() -> None:
    async def run() -> None:
        limits, quota = Limits(), Quota(connections=2, requests=1, polls=1)
        limits.connected("alice", quota)
        usage = limits.connected("alice", quota)
        with pytest.raises(QuotaExceeded, match="2 connections"):
            limits.connected("alice", quota)
        usage.connections -= 1
        limits.connected("alice", quota)
        one = rights(quota)
        with limits.request("alice"):
            with pytest.raises(QuotaExceeded, match="requests"):
                await limits.admit("alice", quota)
            with limits.poll(one):
                await limits.admit("alice", quota)  # who polls has no request in progress
                with limits.request("alice"), pytest.raises(QuotaExceeded, match="polls"), limits.poll(one):
                    pass
        await limits.admit("alice", quota)
        assert (usage.requests, usage.polls) == (0, 0)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_bytes_are_paid_for() -> None:
    async def run() -> None:
        limits, one = Limits(), rights(Quota(bytes_out_per_s=1_000_000, bytes_in_per_s=1_000_000))
        started = time.monotonic()
        limits.charge(one, 2_000_000)  # the burst
        await limits.sent(one)
        assert time.monotonic() - started < 0.2
        limits.charge(one, 500_000)
        await limits.sent(one)
        assert 0.4 < time.monotonic() - started < 2

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(25):
                yield bytes(100_000)

        started = time.monotonic()
        received = [len(chunk) async for chunk in limits.received(one, chunks())]
        assert sum(received) == 2_500_000
        assert 0.4 < time.monotonic() - started < 2

    asyncio.run(asyncio.wait_for(run(), 20))


def test_refusals_of_one_source_are_slowed_down_and_then_end_the_connection() -> None:
    async def run() -> None:
        limits, started = Limits(), time.monotonic()
        answers = [asyncio.create_task(limits.refuse("address x")) for _ in range(1000)]
        done, _ = await asyncio.wait(answers, timeout=0.3)
        dropped = sum(one.result() is False for one in done)
        assert dropped > 700, "more than ten seconds' worth"
        assert sum(one.result() is True for one in done) < 100
        assert await limits.refuse("address y")
        assert time.monotonic() - started < 1
        for one in answers:
            one.cancel()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_what_is_remembered_of_sources_is_bounded() -> None:
    async def run() -> None:
        limits = Limits()
        for number in range(30_000):
            limits.usage(f"address {number}").connections += 1  # in use, so that none is forgotten
        assert len(limits._usages) <= 10_001

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_quota_has_defaults() -> None:
    assert DEFAULTS.requests_per_s
    assert DEFAULTS.bytes_out_per_s is None
