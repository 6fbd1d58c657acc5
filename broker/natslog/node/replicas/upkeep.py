"""Background work of a broker, at a bounded rate: checkpoints, retention, sealing, and removing deleted streams.

Theory of operation. A round checkpoints every stream and applies its retention, then seals for a bounded time, one
segment of each stream in turn. Remaining segments are sealed in the next round, which then follows at once. Checkpoints
and retention therefore run for all streams, however fast one of them fills segments. Sealing takes a quarter of a core
while few segments wait, and up to a whole one as more do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor

from natslog.cluster.commands import DropTombstone, Tombstone
from natslog.cluster.removals import decides_removals, purged_start
from natslog.config import BrokerConfig
from natslog.errors import NatslogError, ShuttingDown
from natslog.log import ReplicaLog
from natslog.log_events import event
from natslog.node.clock import now_us, wait_for_at_most
from natslog.node.cluster_clock import CLOCKS_APART_S, ClusterClock
from natslog.node.metadata.group import MetadataGroup
from natslog.node.replicas.hosting import Hosting
from natslog.node.replicas.stream import HostedStream
from natslog.node.writes.staging import Staging
from natslog.node.writes.stream_ingest import StreamIngest
from natslog.times import format_timestamp_us

logger = logging.getLogger("natslog.node")

_RECOVERY_BYTES = 1024 * 1024 * 1024  # of all streams: the most that a start reads, in some seconds
_USUAL_SHARE = 0.25
_UNSEALED_IN_PEACE = 8
_UNSEALED_AT_FULL_SHARE = 16
_LONGEST_PAUSE_S = 0.25
_SEALING_S = 5.0
_SEEN_AT_LEAST_S = 600.0
"""A tombstone must exist for this time, or its grace period if that is shorter, before files are removed: clocks may
jump."""
_STEADY_AT_LEAST_S = 3600.0
"""The clock of a single broker must not have jumped for this time, or for the grace period, before it is used to remove
files."""
_WARN_EVERY_S = 600.0
_ROLL_WITHIN_S, _ROLL_POLL_S = 30.0, 0.05


class Pacer:
    """Limits background work of one thread to a share of a core, so that commits have the rest."""

    def __init__(self, is_stopping: Callable[[], bool]) -> None:
        self.is_stopping = is_stopping
        self.share = _USUAL_SHARE
        self._worked_s = time.thread_time()

    def adapt(self, unsealed: int) -> None:
        """Sets the number of segments of a log that wait to be sealed."""
        excess = (unsealed - _UNSEALED_IN_PEACE) / (_UNSEALED_AT_FULL_SHARE - _UNSEALED_IN_PEACE)
        self.share = _USUAL_SHARE + (1 - _USUAL_SHARE) * min(1.0, max(0.0, excess))

    def pause(self) -> None:
        """Sleeps as long as the work since the last pause requires."""
        worked_s = time.thread_time() - self._worked_s
        if not self.is_stopping():
            time.sleep(min(_LONGEST_PAUSE_S, worked_s * (1 / self.share - 1)))
        self._worked_s = time.thread_time()


class Upkeep:
    """One round every `retention_interval`, or sooner where sealing is behind, until it is stopped."""

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
        self._rounds = 0
        self._loop = asyncio.get_running_loop()
        self._stopping, self._wanted = asyncio.Event(), asyncio.Event()
        self._seen_since: dict[str, float] = {}
        self._deleted_bytes: dict[str, int] = {}

    def stop_soon(self) -> None:
        """Work in progress ends at the next pause."""
        self._stopping.set()
        self._wanted.set()

    async def run(self) -> None:
        """Returns after `stop_soon`, when work in progress has ended."""
        loop, is_behind = self._loop, False
        while not await self._is_stopping_within(0.0 if is_behind else self._config.retention_interval_s):
            self._wanted.clear()
            due = rolled_and_due([stream for stream in self._hosting.streams.values() if stream.log is not None])
            self._rounds += 1
            first = self._rounds % max(1, len(due))
            due = due[first:] + due[:first]  # if there is time for one segment only, it is that of another stream
            is_behind = await loop.run_in_executor(self._executor, self._maintain, due)
            await self._delete_expired_streams()
            await loop.run_in_executor(self._executor, self._measure_store)
            await self._staging.drop_forgotten()
            self._warn_of_clocks()

    def _maintain(self, due: list[HostedStream]) -> bool:
        """In a thread, whose processor time the pacer counts."""
        return maintain(due, Pacer(self._stopping.is_set))

    async def _is_stopping_within(self, seconds: float) -> bool:
        await wait_for_at_most(seconds, self._wanted.wait())
        return self._stopping.is_set()

    async def roll(self, stream: HostedStream) -> int:
        """Closes the active segment of a stream that is led here. Returns the offset up to which all is sealed, when
        that is so, or after a while.

        Raises:
            ShuttingDown: this broker does not lead it any more.
        """
        log, ingest = stream.usable_log(), stream.ingest
        if ingest is None:
            raise ShuttingDown("this broker is no longer the leader of the stream: repeat the request")
        end, deadline_s = log.log_end_offset, time.monotonic() + _ROLL_WITHIN_S
        ingest.roll()
        while log.sealed_end_offset < end and time.monotonic() < deadline_s and not self._stopping.is_set():
            self._wanted.set()
            await asyncio.sleep(_ROLL_POLL_S)
        return log.sealed_end_offset

    def begin_round(self) -> None:
        """Soon, rather than at its time: there are files to remove, or to seal. From any thread."""
        self._loop.call_soon_threadsafe(self._wanted.set)

    def _warn_of_clocks(self) -> None:
        if time.monotonic() - self._warned_s < _WARN_EVERY_S:
            return
        for warning in clock_warnings(list(self._hosting.streams.values())):
            self._warned_s = time.monotonic()
            logger.warning("%s", warning, extra=event("clock.stream_time"))

    def _measure_store(self) -> None:
        """In a thread: the bytes of all streams, and of deleted ones whose files are still there."""
        store = self._hosting.services.store
        taken_bytes = store.taken_bytes
        mine = [one for one in list(self._group.state.tombstones.values()) if one.broker == self._hosting.me]
        self._deleted_bytes = {one.key: self._bytes_of_deleted(one) for one in mine}
        logs = [log for stream in list(self._hosting.streams.values()) for log in stream.logs]
        used_bytes = sum(log.stored_bytes for log in logs) + sum(self._deleted_bytes.values())
        store.measured(used_bytes, taken_bytes)

    def _bytes_of_deleted(self, tombstone: Tombstone) -> int:
        """Nothing is written to these files any more."""
        known = self._deleted_bytes.get(tombstone.key)
        return self._hosting.folder_bytes(tombstone.id) if known is None else known

    # ---- deleted streams ----

    async def _delete_expired_streams(self) -> None:
        """Removes the files of replicas deleted longer ago than the grace period; failures are tried again."""
        mine = {key: one for key, one in self._group.state.tombstones.items() if one.broker == self._hosting.me}
        now = time.monotonic()
        self._seen_since = {key: self._seen_since.get(key, now) for key in mine}
        for tombstone in mine.values():
            is_there = tombstone.key in self._group.state.tombstones and self._hosting.find(tombstone.id) is None
            if self._stopping.is_set() or not is_there or not self._is_due(tombstone, now):
                continue
            try:
                await self._delete_stream(tombstone)
            except (NatslogError, OSError) as error:
                logger.error(
                    "the files of deleted stream %s could not be removed yet: %s",
                    tombstone.name,
                    error,
                    extra=event("stream.files_not_removed", stream=tombstone.name),
                )

    def _is_due(self, tombstone: Tombstone, now: float) -> bool:
        """By the time since it was seen here; time before this start counts by a clock that others confirm."""
        grace_s = self._config.tombstone_grace_s
        seen_s = now - self._seen_since[tombstone.key]
        if seen_s >= grace_s:
            return True
        time_us = self._clock.trusted_us(int(min(grace_s, _STEADY_AT_LEAST_S) * 1e6))
        is_past = time_us is not None and time_us - tombstone.deleted_us >= grace_s * 1_000_000
        return is_past and seen_s >= min(grace_s, _SEEN_AT_LEAST_S)

    async def _delete_stream(self, tombstone: Tombstone) -> None:
        await self._hosting.delete_files(tombstone.id)
        logger.info(
            "stream %s (%s): the files of the deleted stream were removed",
            tombstone.name,
            tombstone.id,
            extra=event("stream.files_removed", stream=tombstone.name),
        )
        await self._group.propose(DropTombstone(id=tombstone.id, broker=tombstone.broker))


def rolled_and_due(streams: list[HostedStream]) -> list[HostedStream]:
    """Closes active segments that are full or old, or have many small batches, and the costliest ones if a start would
    have too much to read.

    Returns:
        The streams with work for a thread. Checking an idle one costs microseconds.
    """
    recovery_bytes = {stream.name: stream.usable_log().recovery_bytes for stream in streams}
    excess = sum(recovery_bytes.values()) - _RECOVERY_BYTES
    for stream in sorted(streams, key=lambda one: recovery_bytes[one.name], reverse=True):
        ingest = stream.ingest
        stream.usable_log().recent.drop_unwanted()
        if (companion := stream.companion.files) is not None:
            companion.recent.drop_unwanted()
        if stream.following is not None and stream.usable_log().is_to_be_rolled:
            stream.roll_soon()
        if ingest is not None and (excess > 0 or _is_roll_due(stream, ingest)):
            ingest.roll()
            excess -= recovery_bytes[stream.name]
    return [stream for stream in streams if (log := stream.log) is not None and _is_due(stream, log)]


def _is_roll_due(stream: HostedStream, ingest: StreamIngest) -> bool:
    """The whole of a sealed stream is to be in sealed segments."""
    log = stream.usable_log()
    return (stream.record.sealed and log.has_open_rows) or log.is_roll_due(ingest.stream_time.now_us())


def _is_due(stream: HostedStream, log: ReplicaLog) -> bool:
    if (companion := stream.companion.log) is not None:
        companion_start = companion.log.log_start_offset
        if companion.log.upkeep.is_needed() or companion.replicated.leader_log_start > companion_start:
            return True
    return log.upkeep.is_needed() or stream.leader_log_start > log.log_start_offset


def maintain(streams: list[HostedStream], pacer: Pacer, sealing_s: float = _SEALING_S) -> bool:
    """One round, in a thread, beside commits. A failure of one stream does not affect others.

    Args:
        sealing_s: about how long to seal; a segment that was begun is finished.

    Returns:
        Whether segments are left to be sealed.
    """
    for stream in streams:
        if pacer.is_stopping():
            return False
        for work in (_checkpoint, _apply_rules, _drop_expired, _keep_companion, _index_subjects):
            _tried(stream, work)
    until, waiting = time.monotonic() + sealing_s, streams
    while waiting:
        left = []
        for stream in waiting:
            if pacer.is_stopping():
                return False
            if time.monotonic() > until:
                return True
            if _tried(stream, lambda stream, log: _next_segment(stream, log, pacer)):
                left.append(stream)
        waiting = left
    return False


def _tried(stream: HostedStream, work: Callable[[HostedStream, ReplicaLog], bool]) -> bool:
    """What `work` returns; False where it failed, or the stream has no log: it may be closed at any time."""
    log = stream.log
    if log is None:
        return False
    try:
        return work(stream, log)
    except (NatslogError, OSError) as error:
        logger.error(
            "stream %s: maintenance failed and will be tried again: %s",
            stream.name,
            error,
            extra=event("stream.maintenance_failed", stream=stream.name),
        )
        return False


def _checkpoint(_: HostedStream, log: ReplicaLog) -> bool:
    log.checkpoint()
    log.ids.expire()
    return True


def _apply_rules(stream: HostedStream, log: ReplicaLog) -> bool:
    """Not before the records of the companion log are known, which state what does not count for rules."""
    if stream.companion.is_missing:
        return False
    log.upkeep.apply_rules()
    return True


def _index_subjects(_: HostedStream, log: ReplicaLog) -> bool:
    log.subjects.keep_up()
    return False


def _drop_expired(stream: HostedStream, log: ReplicaLog) -> bool:
    """Only the leader decides what expires; followers apply its log start."""
    ingest = stream.ingest
    if stream.following is not None:
        return bool(log.upkeep.drop_before(stream.leader_log_start))
    if ingest is None:
        return False
    time_us, record, leads = ingest.stream_time.now_us(), stream.record, stream.is_leading
    if (purged := purged_start(record, leads=leads)) is not None:
        dropped = log.upkeep.drop_before(purged)
    else:
        dropped = log.upkeep.enforce_retention() if decides_removals(record, leads=leads) else 0
    if dropped:
        logger.info(
            "stream %s: retention deleted %d segments, the log starts at %d; stream time is %s",
            stream.name,
            dropped,
            log.log_start_offset,
            format_timestamp_us(time_us),
            extra=event("stream.retention", stream=stream.name, offset=log.log_start_offset, count=dropped),
        )
        stream.driver.log_start_moved()
    return bool(dropped)


def _keep_companion(stream: HostedStream, _: ReplicaLog) -> bool:
    """Nothing in it expires: a follower removes what its leader has removed. Its segments are small."""
    if (companion := stream.companion.log) is not None:
        companion.log.checkpoint()
        if stream.following is not None:
            companion.log.upkeep.drop_before(companion.replicated.leader_log_start)
        companion.log.upkeep.seal_next()
        companion.log.upkeep.merge_next()
    return False


def _next_segment(stream: HostedStream, log: ReplicaLog, pacer: Pacer) -> bool:
    """Seals, merges or rewrites segments, if there are some to be. Erasure comes first, once the rows are sealed."""
    is_done = _erase_one(log, pacer) or _seal_one(log, pacer) or log.upkeep.merge_next(pacer.pause)
    return is_done or _rewrite_one(stream, log, pacer)


def _erase_one(log: ReplicaLog, pacer: Pacer) -> bool:
    return log.erasures.is_pending and log.upkeep.erase_next(now_us(), pacer.pause)


def _seal_one(log: ReplicaLog, pacer: Pacer) -> bool:
    pacer.adapt(len(log.chain.unsealed))
    return log.upkeep.seal_next(pacer.pause)


def _rewrite_one(stream: HostedStream, log: ReplicaLog, pacer: Pacer) -> bool:
    """Only segments of which no message id is needed any more to recognise a repeated message."""
    window_us = int(2 * stream.record.settings.dedupe_window_s * 1_000_000)
    return log.upkeep.rewrite_next(log.newest_timestamp_us + int(log.idle_s * 1_000_000) - window_us, pacer.pause)


def clock_warnings(streams: list[HostedStream]) -> list[str]:
    """If this machine's wall clock differs from the time of streams that are led here."""
    behind_s = [stream.ingest.stream_time.behind_s() for stream in streams if stream.ingest is not None]
    apart = [seconds for seconds in behind_s if abs(seconds) > CLOCKS_APART_S]
    if not apart:
        return []
    return [
        f"the wall clock of this machine differs by {max(apart, key=abs):+.0f} s from the time of {len(apart)} of "
        f"the {len(behind_s)} streams that this broker leads: correct the clock (NTP). Timestamps and expiry of "
        "messages follow stream time. Stream time follows the clocks of a majority of the brokers; the clock of a "
        "single broker is followed when it has not jumped for as long as it is ahead, at most an hour"
    ]
