"""Quotas of identities at one broker: how much of it one identity may take at once.

Theory of operation. Requests beyond a rate first wait, up to `_MOST_WAIT_S`, so that a client that is only a little too
fast needs no logic of its own; beyond that they are refused with 429 and `Retry-After`. Bytes are charged before
they are sent and when they have been received, and the next part of a response, or the next request, waits for them.
Refused requests (401, 403 and 429) are answered at a bounded rate for each source, because a client that repeats them
without a pause would otherwise take the processor from others.

All of this belongs to the event loop; times are those of the monotonic clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from natslog.errors import QuotaExceeded
from natslog.security.guard import Rights
from natslog.security.records import Quota

DEFAULTS = Quota(connections=2048, requests=512, polls=2048, requests_per_s=50)
"""What an identity gets that has no quota. Bytes are not limited."""

_BURST_S = 2.0
_MOST_WAIT_S = 2.0
_REFUSALS_PER_S = 20.0
_REFUSAL_BURST_S = 1.0
_MOST_REFUSAL_WAIT_S = 10.0
_MOST_SOURCES = 10_000
_ALL_OTHERS = "all others"


class _Rate:
    """A rate limit with a burst. `free_s`: when all that was taken is paid for."""

    __slots__ = ("free_s",)

    def __init__(self) -> None:
        self.free_s = 0.0

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self.free_s - now_s)

    def take(self, count: float, per_s: float, burst_s: float, now_s: float) -> None:
        self.free_s = max(self.free_s, now_s - burst_s) + count / per_s


class Usage:
    """Of one identity, or of one address for refusals."""

    __slots__ = ("bytes_in", "bytes_out", "connections", "polls", "rate", "refusals", "requests")

    def __init__(self) -> None:
        self.connections = self.requests = self.polls = 0
        self.rate, self.bytes_in, self.bytes_out, self.refusals = _Rate(), _Rate(), _Rate(), _Rate()

    def is_idle(self, now_s: float) -> bool:
        rates = (self.rate, self.bytes_in, self.bytes_out, self.refusals)
        return not (self.connections or self.requests or self.polls or any(one.wait_s(now_s) for one in rates))


class Limits:
    """Of one broker. `refused`: how many requests were refused."""

    def __init__(self) -> None:
        self._usages: dict[str, Usage] = {}
        self._forgot_s = 0.0
        self.refused = 0

    def usage(self, name: str) -> Usage:
        found = self._usages.get(name)
        if found is not None:
            return found
        if len(self._usages) >= _MOST_SOURCES:
            self._forget_idle()
        if len(self._usages) >= _MOST_SOURCES:
            return self._usages.setdefault(_ALL_OTHERS, Usage())
        return self._usages.setdefault(name, Usage())

    def _forget_idle(self) -> None:
        """At most once a second, however many sources there are."""
        now_s = time.monotonic()
        if now_s - self._forgot_s >= 1.0:
            self._forgot_s = now_s
            self._usages = {name: one for name, one in self._usages.items() if not one.is_idle(now_s)}

    # ---- connections ----

    def connected(self, name: str, quota: Quota) -> Usage:
        """Counts another connection in what is returned. Raises QuotaExceeded: there are too many."""
        usage = self.usage(name)
        _require(name, "connections", usage.connections, quota.connections, DEFAULTS.connections)
        usage.connections += 1
        return usage

    # ---- requests ----

    async def admit(self, name: str, quota: Quota) -> None:
        """Returns when the rate permits another request. Raises QuotaExceeded."""
        usage, now_s = self.usage(name), time.monotonic()
        _require(name, "requests", usage.requests, quota.requests, DEFAULTS.requests)
        per_s = quota.requests_per_s or DEFAULTS.requests_per_s
        assert per_s is not None, "it has a default"
        wait_s = max(usage.rate.wait_s(now_s), usage.bytes_in.wait_s(now_s), usage.bytes_out.wait_s(now_s))
        if wait_s > _MOST_WAIT_S:
            which = "requests_per_s" if usage.rate.wait_s(now_s) == wait_s else "bytes_in_per_s or bytes_out_per_s"
            raise QuotaExceeded(
                f"{name} has reached its quota ({which}) at this broker: repeat the request in {wait_s:.0f} s",
                quota=which,
                retry_after_s=round(wait_s, 1),
            )
        usage.rate.take(1, per_s, _BURST_S, now_s)
        if wait_s:
            await asyncio.sleep(wait_s)

    @contextmanager
    def request(self, name: str) -> Iterator[None]:
        """While a request is in progress."""
        usage = self.usage(name)
        usage.requests += 1
        try:
            yield
        finally:
            usage.requests -= 1

    @contextmanager
    def poll(self, rights: Rights) -> Iterator[None]:
        """While a request waits for messages: it then counts as a poll. Raises QuotaExceeded."""
        if not rights.is_limited:
            yield
            return
        name = rights.identity.name
        usage = self.usage(name)
        _require(name, "polls", usage.polls, rights.quota().polls, DEFAULTS.polls)
        usage.polls, usage.requests = usage.polls + 1, usage.requests - 1
        try:
            yield
        finally:
            usage.polls, usage.requests = usage.polls - 1, usage.requests + 1

    # ---- bytes ----

    def charge(self, rights: Rights, count: int) -> None:
        """Before so many bytes of a response are sent: who disconnects before the last one has paid for them, too."""
        if rights.is_limited and (per_s := rights.quota().bytes_out_per_s) is not None:
            self.usage(rights.identity.name).bytes_out.take(count, per_s, _BURST_S, time.monotonic())

    async def sent(self, rights: Rights) -> None:
        """They were sent: returns when more may be."""
        if rights.is_limited and rights.quota().bytes_out_per_s is not None:
            wait_s = self.usage(rights.identity.name).bytes_out.wait_s(time.monotonic())
            if wait_s > 0:
                await asyncio.sleep(wait_s)

    def took(self, rights: Rights, count: int) -> None:
        """So many bytes of a body that is read into memory were received: the next request waits for them."""
        if rights.is_limited and (per_s := rights.quota().bytes_in_per_s) is not None:
            self.usage(rights.identity.name).bytes_in.take(count, per_s, _BURST_S, time.monotonic())

    async def received(self, rights: Rights, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The chunks of a body, at the rate of the identity."""
        async for chunk in chunks:
            yield chunk
            self.took(rights, len(chunk))
            if rights.is_limited and rights.quota().bytes_in_per_s is not None:
                wait_s = self.usage(rights.identity.name).bytes_in.wait_s(time.monotonic())
                if wait_s > 0:
                    await asyncio.sleep(wait_s)

    # ---- refusals ----

    async def refuse(self, source: str) -> bool:
        """Returns when the refusal may be answered; False: there are too many, and the connection is to be closed."""
        self.refused += 1
        usage, now_s = self.usage(source), time.monotonic()
        wait_s = usage.refusals.wait_s(now_s)
        if wait_s > _MOST_REFUSAL_WAIT_S:
            return False
        usage.refusals.take(1, _REFUSALS_PER_S, _REFUSAL_BURST_S, now_s)
        if wait_s:
            await asyncio.sleep(wait_s)
        return True


def _require(name: str, what: str, used: int, quota: int | None, default: int | None) -> None:
    """Raises QuotaExceeded."""
    most = default if quota is None else quota
    if most is not None and used >= most:
        raise QuotaExceeded(
            f"{name} has {used} {what} at this broker, and may have {most}: close some, or repeat the request later",
            quota=what,
            retry_after_s=1,
        )
