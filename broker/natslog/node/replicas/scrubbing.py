"""Scrubbing of all replicas on this broker: sealed segments are read back in the background, at a bounded rate.

Theory of operation. Every half minute each stream is checked for whether a pass over its log is due, which touches no
file. Streams with a pass take turns of some seconds; one small step after another is read in a thread, with a pause
after each. A pause is so long that neither the configured rate nor a twentieth of the time is exceeded: a disk that is
busy with commits, or slow, is read more slowly.

What is damaged is reported once. If another replica is in sync, the damaged range is fetched from it (`range_repair`).
Until then, and where there is none, this one goes on serving all else: the exact offsets are shown until they are
intact, and scrubbing continues behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any, TypeAlias

from natslog.config import BrokerConfig
from natslog.errors import ShuttingDown
from natslog.log import ReplicaLog
from natslog.log.scrub import STEP_BYTES, Finding, read_back
from natslog.log.sealed import SealedSegment
from natslog.log_events import event
from natslog.model import StreamRecord
from natslog.node.clock import wait_for_at_most
from natslog.node.cluster_node import ClusterNode
from natslog.node.removing import Removing
from natslog.node.replicas.hosting import Hosting
from natslog.node.replicas.range_repair import RangeRepairs
from natslog.node.replicas.stream import HostedStream

logger = logging.getLogger("natslog.node")

_CHECK_EVERY_S = 30.0
_REPAIR_POLL_S = 1.0
_TURN_S = 5.0
_STORE_EVERY_S = 10.0
_LONGEST_PAUSE_S = 10.0
_SHARE = 0.05  # of the time, at most, is spent reading
_ASK_WITHIN_S = 2.0

ReplicaScrub: TypeAlias = dict[str, Any]
"""`broker`, `completed_us` (0: never), `progress` (0 to 1, or null), `damaged`, `lost` (ranges); or `problem`."""


def pause_s(read_bytes: int, took_s: float, max_bytes_per_s: int) -> float:
    """How long to wait after a step."""
    return min(_LONGEST_PAUSE_S, max(read_bytes / max_bytes_per_s, took_s * (1 / _SHARE - 1)))


class Scrubber:
    """Of one broker. Also answers the request `scrub` of other brokers."""

    def __init__(
        self, config: BrokerConfig, cluster: ClusterNode, hosting: Hosting, readers: Executor, removing: Removing
    ) -> None:
        self._config, self._cluster, self._hosting, self._readers = config, cluster, hosting, readers
        self.repairs = RangeRepairs(cluster, hosting, readers, removing)
        self._stopping, self._wanted = asyncio.Event(), asyncio.Event()
        self._stored_s: dict[ReplicaLog, float] = {}

    # ---- life ----

    def wake(self) -> None:
        """There is something to be repaired."""
        self._wanted.set()

    def stop_soon(self) -> None:
        """Work in progress ends after the present step."""
        self._stopping.set()
        self._wanted.set()

    # ---- on request ----

    async def on_this_broker(self, name: str, begin: bool = False) -> ReplicaScrub:
        """The state of the replica here; with `begin`, a new pass begins, from the start of the log.

        Raises:
            NatslogError: it has no log.
        """
        stream = self._hosting.require(name)
        log = stream.usable_log()
        if begin:
            log.scrub.begin(log.chain, self._now_us(), is_requested=True)
            await self._in_thread(log.scrub.store)
            self._wanted.set()
        return self.state(stream, log)

    def state(self, stream: HostedStream, log: ReplicaLog) -> ReplicaScrub:
        scrub = log.scrub
        return {
            "broker": stream.me,
            "completed_us": scrub.completed_us,
            "progress": scrub.share(log.log_start_offset),
            "damaged": list(scrub.damaged),
            "lost": list(scrub.lost),
        }

    async def everywhere(self, record: StreamRecord, *, begin: bool = False) -> list[ReplicaScrub]:
        """Of every replica, in the order of the record; a `problem` where a broker does not answer."""
        requests = self._cluster.requests
        return await requests.ask_each(record.replicas, "scrub", _ASK_WITHIN_S, name=record.name, begin=begin)

    # ---- in the background ----

    async def run(self) -> None:
        """Returns after `stop_soon`, when work in progress has ended."""
        is_behind = False
        while not await self._is_stopping_within(0.0 if is_behind else self._next_check_s()):
            self._wanted.clear()
            is_behind = False
            try:
                await self._repair_damaged()
            except ShuttingDown:
                return
            for stream in self._due():
                try:
                    is_behind = await self._take_turn(stream) or is_behind
                except ShuttingDown:
                    return
                if self._wanted.is_set():
                    break

    async def _is_stopping_within(self, seconds: float) -> bool:
        await wait_for_at_most(seconds, self._wanted.wait())
        return self._stopping.is_set()

    def _next_check_s(self) -> float:
        """Sooner while a pass waits for the repair of its log."""
        is_waiting = any(one.log is not None and one.log.scrub.is_running for one in self._hosting.streams.values())
        return _REPAIR_POLL_S if is_waiting else _CHECK_EVERY_S

    def _now_us(self) -> int:
        reading = self._cluster.clock.reading()
        return reading.wall_us if reading.agreed_us is None else reading.agreed_us

    async def _repair_damaged(self) -> None:
        """Replicas whose damage was found by readers, or while no other replica could repair it."""
        for stream in [one for one in self._hosting.streams.values() if one.scrub_problem is not None]:
            await self.repairs.repair(stream)

    def _due(self) -> list[HostedStream]:
        """Streams with a pass, requested ones first. Checking an idle one touches no file."""
        now_us, interval_s = self._now_us(), self._config.scrub_interval_s
        due = [
            (not log.scrub.is_requested, at, stream)
            for at, stream in enumerate(self._hosting.streams.values())
            if (log := stream.log) is not None
            and not stream.is_to_be_repaired
            and log.scrub.is_due(log.chain, now_us, interval_s)
        ]
        return [stream for _, _, stream in sorted(due, key=lambda one: one[:2])]

    async def _take_turn(self, stream: HostedStream) -> bool:
        """Reads segments for a while. Returns whether the pass is still under way."""
        log, until_s = stream.log, time.monotonic() + _TURN_S
        if log is None:
            return False
        scrub = log.scrub
        if not scrub.is_running:
            scrub.begin(log.chain, self._now_us())
        while (chosen := await self._in_thread(scrub.next_segment, log.chain)) is not None:
            segment, end_offset = chosen
            if time.monotonic() > until_s:
                return True
            if not await self._read_segment(stream, log, segment, end_offset):
                return False
        scrub.complete(self._now_us(), log.log_start_offset)
        await self._store(stream, log)
        logger.debug("stream %s: all sealed segments were read back", stream.name)
        return False

    async def _read_segment(
        self, stream: HostedStream, log: ReplicaLog, segment: SealedSegment, end_offset: int
    ) -> bool:
        """False where the scrubbing of this log ends here: it is closed or to be repaired, or the broker stops."""
        passes, findings, read_bytes = log.scrub.passes, list[Finding](), 1
        with contextlib.closing(read_back(segment, end_offset, findings)) as reading:
            while read_bytes:
                try:
                    read_bytes = await self._step(reading)
                except OSError as error:  # for example too many open files: the segment is read at the next turn
                    logger.warning(
                        "stream %s: scrubbing pauses: %s",
                        stream.name,
                        error,
                        extra=event("scrub.paused", stream=stream.name),
                    )
                    return False
                stream.scrubbed_bytes += read_bytes
                if self._stopping.is_set() or stream.log is not log or stream.is_to_be_repaired:
                    return False
                if log.scrub.passes != passes:  # a new one was requested
                    return True
        if not log.chain.is_current(segment):  # retention removed it meanwhile
            findings.clear()
        self._report(stream, log, segment, log.scrub.verified(segment.base_offset, end_offset, findings))
        if findings:
            await self.repairs.repair(stream)
        if findings or time.monotonic() - self._stored_s.get(log, -_STORE_EVERY_S) >= _STORE_EVERY_S:
            await self._store(stream, log)
        return True

    async def _step(self, reading: Iterator[int]) -> int:
        """Reads some bytes, and pauses. Returns how many; 0 at the end."""
        read_bytes, took_s = await self._in_thread(_read_some, reading)
        await wait_for_at_most(pause_s(read_bytes, took_s, self._config.scrub_max_bytes_per_s), self._stopping.wait())
        return int(read_bytes)

    def _report(self, stream: HostedStream, log: ReplicaLog, segment: SealedSegment, findings: list[Finding]) -> None:
        for finding in findings:
            logger.error(
                "stream %s: scrubbing found damage: %s",
                stream.name,
                finding.error.message,
                extra=event("replica.damaged", stream=stream.name),
            )
            stream.report("activity.replica.damaged", finding.error.message)
        stream.scrub_damaged += len(findings)
        if findings:
            log.reader.forget_proofs(segment.path)

    async def _store(self, stream: HostedStream, log: ReplicaLog) -> None:
        """The files of a log that is closed do not change any more."""
        self._stored_s = {log: time.monotonic()}
        if stream.log is log:
            await self._in_thread(log.scrub.store)

    async def _in_thread(self, work: Callable[..., Any], *arguments: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._readers, work, *arguments)


def _read_some(reading: Iterator[int]) -> tuple[int, float]:
    """Bytes and seconds of about one step. In a thread."""
    started_s, read_bytes = time.perf_counter(), 0
    for count in reading:
        read_bytes += count
        if read_bytes >= STEP_BYTES:
            break
    return read_bytes, time.perf_counter() - started_s
