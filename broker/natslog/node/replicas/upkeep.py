"""Background work of a broker, at a bounded rate: checkpoints, retention, sealing, and burying what was deleted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor

from natslog.cluster.commands import BuryStream, Tombstone
from natslog.config import BrokerConfig
from natslog.errors import NatslogError
from natslog.log import ReplicaLog
from natslog.node.cluster_clock import CLOCKS_APART_S, ClusterClock
from natslog.node.metadata.group import MetadataGroup
from natslog.node.replicas.hosting import Hosting
from natslog.node.replicas.stream import HostedStream
from natslog.node.writes.staging import Staging
from natslog.times import format_timestamp_us

logger = logging.getLogger("natslog.node")

_RECOVERY_BYTES = 1024 * 1024 * 1024  # of all streams: what a start may have to read, some seconds' worth
_USUAL_SHARE = 0.25
_UNSEALED_IN_PEACE = 8
_LONGEST_PAUSE_S = 0.25
_SEEN_AT_LEAST_S = 600.0
"""A tombstone is seen for so long, or its grace period if that is shorter, before files go: clocks may jump."""
_STEADY_AT_LEAST_S = 3600.0
"""So long, or for the grace period, a single broker's clock has not jumped before it says that files may go."""
_WARN_EVERY_S = 600.0


class Pacer:
    """Keeps background work of one thread to a share of a core, so that commits have the rest."""

    def __init__(self, is_stopping: Callable[[], bool]) -> None:
        self.is_stopping = is_stopping
        self.share = _USUAL_SHARE
        self._worked_s = time.thread_time()

    def pause(self) -> None:
        """Sleeps as long as the work since the last pause asks for."""
        worked_s = time.thread_time() - self._worked_s
        if not self.is_stopping():
            time.sleep(min(_LONGEST_PAUSE_S, worked_s * (1 / self.share - 1)))
        self._worked_s = time.thread_time()


class Upkeep:
    """One round every `retention_interval`, until it is stopped."""

    def __init__(
        self,
        config: BrokerConfig,
        group: MetadataGroup,
        clock: ClusterClock,
        hosting: Hosting,
        staging: Staging,
        executor: Executor,
    ) -> None:
        self._config, self._group, self._hosting, self._staging = config, group, hosting, staging
        self._clock, self._executor = clock, executor
        self._warned_s = -_WARN_EVERY_S
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._seen_since: dict[str, float] = {}

    def start(self, on_bug: Callable[[str, BaseException], None]) -> None:
        """`on_bug` is told what ended it."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                on_bug("upkeep", error)

        self._task = asyncio.create_task(self._run(), name="upkeep")
        self._task.add_done_callback(ended)

    def stop_soon(self) -> None:
        """Work under way comes to its end at the next pause."""
        self._stopping.set()

    async def stopped(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not await self._is_stopping_within(self._config.retention_interval_s):
            due = rolled_and_due([stream for stream in self._hosting.streams.values() if stream.log is not None])
            await loop.run_in_executor(self._executor, self._maintain_all, due)
            await self._bury_tombstones()
            await self._staging.drop_forgotten()
            self._warn_of_clocks()

    async def _is_stopping_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._stopping.wait()
        except TimeoutError:
            return False

    def _maintain_all(self, streams: list[HostedStream]) -> None:
        """In a thread."""
        pacer = Pacer(self._stopping.is_set)
        for stream in streams:
            if not pacer.is_stopping():
                maintain(stream, pacer)

    def _warn_of_clocks(self) -> None:
        if time.monotonic() - self._warned_s < _WARN_EVERY_S:
            return
        for warning in clock_warnings(list(self._hosting.streams.values())):
            self._warned_s = time.monotonic()
            logger.warning("%s", warning)

    # ---- what was deleted ----

    async def _bury_tombstones(self) -> None:
        """Removes the files of replicas deleted longer ago than the grace period; what fails is tried again."""
        mine = {key: one for key, one in self._group.state.tombstones.items() if one.broker == self._hosting.me}
        now = time.monotonic()
        self._seen_since = {key: self._seen_since.get(key, now) for key in mine}
        for tombstone in mine.values():
            is_there = tombstone.key in self._group.state.tombstones and self._hosting.find(tombstone.id) is None
            if self._stopping.is_set() or not is_there or not self._is_due(tombstone, now):
                continue
            try:
                await self._bury(tombstone)
            except (NatslogError, OSError) as error:
                logger.error("the files of deleted stream %s could not be removed yet: %s", tombstone.name, error)

    def _is_due(self, tombstone: Tombstone, now: float) -> bool:
        """By the time that it was seen here; what was before this start counts by a clock that others confirm."""
        grace_s = self._config.tombstone_grace_s
        seen_s = now - self._seen_since[tombstone.key]
        if seen_s >= grace_s:
            return True
        time_us = self._clock.trusted_us(int(min(grace_s, _STEADY_AT_LEAST_S) * 1e6))
        is_past = time_us is not None and time_us - tombstone.deleted_us >= grace_s * 1_000_000
        return is_past and seen_s >= min(grace_s, _SEEN_AT_LEAST_S)

    async def _bury(self, tombstone: Tombstone) -> None:
        await self._hosting.delete_files(tombstone.id)
        logger.info("stream %s (%s), deleted before: files removed", tombstone.name, tombstone.id)
        await self._group.propose(BuryStream(id=tombstone.id, broker=tombstone.broker))


def rolled_and_due(streams: list[HostedStream]) -> list[HostedStream]:
    """Ends active segments that are full or old, and the costliest ones where a start would have too much to read.

    Returns:
        The streams with work for a thread. A look at one that rests costs microseconds.
    """
    recovery_bytes = {stream.record.name: stream.usable_log().recovery_bytes for stream in streams}
    excess = sum(recovery_bytes.values()) - _RECOVERY_BYTES
    for stream in sorted(streams, key=lambda one: recovery_bytes[one.record.name], reverse=True):
        ingest = stream.ingest
        if ingest is not None and (excess > 0 or stream.usable_log().is_roll_due(ingest.stream_time.now_us())):
            ingest.roll()
            excess -= recovery_bytes[stream.record.name]
    return [stream for stream in streams if stream.log is not None and stream.log.needs_upkeep()]


def maintain(stream: HostedStream, pacer: Pacer) -> None:
    """In a thread, beside commits: checkpoints, applies retention, seals. One that fails stops no other."""
    log = stream.log  # it may be closed, or opened anew, at any time
    if log is None:
        return
    for work in (log.checkpoint, lambda: _drop_expired(stream, log), lambda: _seal_all(log, pacer)):
        try:
            work()
        except (NatslogError, OSError) as error:
            logger.error("stream %s: maintenance failed, and is tried again: %s", stream.name, error)


def _drop_expired(stream: HostedStream, log: ReplicaLog) -> None:
    """Only the leader decides what expires; followers apply its log start."""
    ingest = stream.ingest
    if ingest is None or not stream.is_leading:
        return
    time_us = ingest.stream_time.now_us()
    if dropped := log.enforce_retention(time_us):
        logger.info(
            "stream %s: retention deleted %d segments, the log starts at %d; stream time is %s",
            stream.name,
            dropped,
            log.log_start_offset,
            format_timestamp_us(time_us),
        )


def _seal_all(log: ReplicaLog, pacer: Pacer) -> None:
    pacer.share = _USUAL_SHARE if len(log.chain.unsealed) <= _UNSEALED_IN_PEACE else 1.0
    while not pacer.is_stopping() and log.seal_next(pacer.pause):
        pass


def clock_warnings(streams: list[HostedStream]) -> list[str]:
    """Where this machine's wall clock is not the time that streams led here go by."""
    behind_s = [stream.ingest.stream_time.behind_s() for stream in streams if stream.ingest is not None]
    apart = [seconds for seconds in behind_s if abs(seconds) > CLOCKS_APART_S]
    if not apart:
        return []
    return [
        f"this machine's wall clock is {max(apart, key=abs):+.0f} s apart from the time of {len(apart)} of the "
        f"{len(behind_s)} streams led here: set it right (NTP). Messages are stamped, and expire, by stream time. It "
        "follows the clocks of a majority of the brokers; a single broker's clock is followed when it has been steady "
        "for as long as it is ahead, at most an hour"
    ]
