"""Repair of sealed segments in place: only the damaged range is fetched from another replica.

Theory of operation. What is committed is the same on every replica, so any of them may give it. Each damaged range is
requested batch by batch (`stored_batches`), in the order of `cluster.damage.RangeRepair`. When all of a segment was
fetched, the file is written anew and takes the place of the damaged one (`log.repairing`), beside all other work on the
log: the replica keeps its role, stays in sync, and serves all other offsets meanwhile.

If a replica does not answer, or has no room, the repair is tried again at the next look. If every other replica has
damage at the same place, nothing is changed, and the exact offsets are reported.
"""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from itertools import pairwise
from typing import Any, TypeAlias

from natslog.cluster.damage import Fetch, GiveUp, OffsetRange, RangeRepair
from natslog.errors import (
    BrokerUnavailable,
    CorruptLog,
    NatslogError,
    OffsetOutOfRange,
)
from natslog.log import ReplicaLog
from natslog.log.repairing import FetchedBatches, missing_ranges
from natslog.log.sealed import SealedSegment
from natslog.log_events import event
from natslog.model import BrokerId, StreamId, StreamRecord
from natslog.node.cluster_node import ClusterNode
from natslog.node.peers.pieces import ask_for_pieces, piece
from natslog.node.removing import Removing
from natslog.node.replicas.hosting import Hosting
from natslog.node.replicas.log_folder import storage_error
from natslog.node.replicas.stream import HostedStream
from natslog.node.threads import in_thread
from natslog.units import offsets_between

logger = logging.getLogger("natslog.node")

_ACCEPTED_WITHIN_S = 60.0

ReplicaLoss: TypeAlias = dict[str, Any]
"""`broker`, `lost` (ranges of offsets); or `problem`."""


class RangeRepairs:
    """Of one broker. Also answers the request `stored_batches` of other brokers."""

    def __init__(self, cluster: ClusterNode, hosting: Hosting, readers: Executor, removing: Removing) -> None:
        self._cluster, self._hosting, self._readers, self._removing = cluster, hosting, readers, removing

    # ---- for other brokers ----

    async def piece(self, stream_id: str, start: int, end: int, at: int) -> dict[str, Any]:
        """The stored batch that holds `start`, within `[start, end)`: its bytes from `at` on, and how many it has.

        Raises:
            NatslogError: it is not known to be committed here, was removed, or is damaged.
        """
        stream = self._hosting.find(StreamId(stream_id))
        if stream is None:
            raise BrokerUnavailable(f"broker {self._cluster.me} has no replica of the stream")
        return await in_thread(self._readers, _piece, stream.usable_log(), start, end, at)

    # ---- the repair ----

    async def repair(self, stream: HostedStream) -> None:
        """Repairs what is known to be damaged in sealed segments, as far as that is possible now."""
        log = stream.log
        if log is None or not log.scrub.damaged or stream.is_to_be_repaired or not stream.has_others_in_sync:
            return
        for segment, end_offset, damaged in _damaged_segments(log):
            if end_offset is None:
                stream.driver.repair_all(log.scrub.problem or CorruptLog("the end of the log is damaged"))
                return
            await self._repair_segment(stream, log, segment, end_offset, damaged)

    async def accept_loss(self, name: str) -> ReplicaLoss:
        """Repairs the replica here; offsets that are damaged on every replica become removed ones.

        Raises:
            NatslogError: another replica that may have them does not answer, or the repair failed.
        """
        stream = self._hosting.require(name)
        log, lost = stream.usable_log(), list[OffsetRange]()
        try:
            for segment, end_offset, damaged in _damaged_segments(log):
                if end_offset is None:
                    raise log.scrub.problem or CorruptLog("the end of the log is damaged")
                lost += await self._replace(stream, log, segment, end_offset, damaged, accepts_loss=True)
        except OSError as error:
            raise storage_error(error, f"stream {name!r}: a damaged segment could not be repaired") from error
        if stream.is_leading:  # also of an earlier request, which did not record all of it
            await self._removing.record_gaps(stream)
        return {"broker": stream.me, "lost": lost}

    async def accept_loss_everywhere(self, record: StreamRecord) -> list[ReplicaLoss]:
        """Of one replica after the other, so that what the first one gives up is the same on all; a `problem` where
        that failed.
        """
        found: list[ReplicaLoss] = []
        for broker in record.replicas:
            found += await self._cluster.requests.ask_each(
                [broker], "accept_loss", _ACCEPTED_WITHIN_S, name=record.name
            )
        return found

    async def _repair_segment(
        self, stream: HostedStream, log: ReplicaLog, segment: SealedSegment, end_offset: int, damaged: list[OffsetRange]
    ) -> None:
        try:
            await self._replace(stream, log, segment, end_offset, damaged)
        except OSError as error:
            problem = storage_error(error, f"stream {stream.name!r}: a damaged segment could not be repaired")
            logger.error(
                "%s; it is tried again",
                problem.message,
                extra=event("replica.repair_failed", stream=stream.name, reason=problem.code),
            )
        except _NotRepairable as error:
            self._report(stream, error)
        except NatslogError as error:
            logger.warning(
                "stream %s: the repair of a damaged segment waits: %s",
                stream.name,
                error.message,
                extra=event("replica.repair_waits", stream=stream.name, reason=error.code),
            )
            if isinstance(error, CorruptLog):
                log.scrub.note(error)

    async def _replace(
        self,
        stream: HostedStream,
        log: ReplicaLog,
        segment: SealedSegment,
        end_offset: int,
        damaged: list[OffsetRange],
        *,
        accepts_loss: bool = False,
    ) -> list[OffsetRange]:
        """Repairs one segment. Returns the offsets that are lost, if that is accepted."""
        ranges = await in_thread(self._readers, missing_ranges, segment, end_offset, log.stream_id, damaged)
        record, lost = stream.record, list[OffsetRange]()
        others = [broker for broker in dict.fromkeys((*record.isr, *record.replicas)) if broker != stream.me]
        with FetchedBatches(log.folder) as fetched:
            for start, end in ranges:
                start = await in_thread(self._readers, _pass_unreadable, log, fetched, start, end)
                repair = RangeRepair((start, end), others, accepts_loss=accepts_loss)
                await self._fetch(stream, log, fetched, repair)
                if repair.without_copy is not None:
                    raise _NotRepairable(repair.without_copy)
                if repair.problem is not None:
                    raise repair.problem
                lost += repair.lost
            if not await in_thread(self._readers, log.replace_sealed, segment, end_offset, fetched):
                return []
        log.scrub.accept(lost)
        log.scrub.verified(segment.base_offset, end_offset, [], is_pass=False)
        await in_thread(self._readers, log.scrub.store)
        stream.losses.resolved((segment.base_offset, end_offset), lost)
        stream.scrub_repaired += max(0, len(damaged) - len(lost))
        repaired = [one for one in ranges if one not in lost]
        if repaired or not lost:
            self._log_repaired(stream, segment, repaired)
        for start, end in lost:
            what = f"the loss of {offsets_between(start, end)} was accepted"
            logger.error(
                "stream %s: %s",
                stream.name,
                what,
                extra=event("replica.lost", stream=stream.name, offset=start, end_offset=end),
            )
            stream.report("activity.replica.lost", f"{segment.path.name}: {what}")
        return lost

    def _log_repaired(self, stream: HostedStream, segment: SealedSegment, ranges: list[OffsetRange]) -> None:
        fetched = ", ".join(f"{start} to {end - 1}" for start, end in ranges)
        what = f"offsets {fetched} were fetched from another replica" if ranges else "its header and footer"
        logger.warning(
            "stream %s: %s was repaired: %s",
            stream.name,
            segment.path,
            what,
            extra=event("replica.repaired", stream=stream.name, path=segment.path),
        )
        stream.report("activity.replica.repaired", f"{segment.path.name}: {what}")

    def _report(self, stream: HostedStream, error: _NotRepairable) -> None:
        """Once for each range."""
        if stream.losses.note(error.range):
            logger.error(
                "stream %s: %s",
                stream.name,
                error.message,
                extra=event(
                    "replica.not_repairable", stream=stream.name, offset=error.range[0], end_offset=error.range[1]
                ),
            )

    async def _fetch(self, stream: HostedStream, log: ReplicaLog, fetched: FetchedBatches, repair: RangeRepair) -> None:
        """Until the repair of the range has ended."""
        while (step := repair.next_step()) is not None:
            match step:
                case GiveUp(lost=lost):
                    await in_thread(self._readers, _give_up, log, fetched, *lost)
                    repair.given_up()
                case Fetch(broker=broker, start=start, end=end):
                    try:
                        repair.fetched(fetched.add(await self._batch(broker, stream.id, start, end), start, end))
                    except NatslogError as error:
                        repair.refused(error)

    async def _batch(self, broker: BrokerId, stream_id: StreamId, start: int, end: int) -> bytes:
        if (link := self._cluster.link_to(broker)) is None:
            raise BrokerUnavailable(f"broker {broker} is not connected")
        return await ask_for_pieces(link, "stored_batches", stream_id=stream_id, start=start, end=end)


class _NotRepairable(NatslogError):
    """Every other replica is damaged at the same place."""

    code = "corrupt_log"

    def __init__(self, lost: OffsetRange) -> None:
        super().__init__(
            f"{offsets_between(*lost)} are damaged on every replica and cannot be repaired: restore a file of one "
            "of them from a copy, then scrub the stream, or accept the loss (natslog repair). All other offsets "
            "are served"
        )
        self.range = lost


def _give_up(log: ReplicaLog, fetched: FetchedBatches, start: int, end: int) -> int:
    """In a thread. Returns `end`."""
    epoch, newest_us = log.epochs.last_epoch_before(start + 1), log.newest_before(start)
    return fetched.add_removed(start, end, epoch=max(epoch, 0), max_timestamp_us=newest_us)


def _pass_unreadable(log: ReplicaLog, fetched: FetchedBatches, start: int, end: int) -> int:
    """Where the part of a range begins that readers may get: other replicas may have removed what lies below. In a
    thread.
    """
    upto = min(end, log.first_readable_offset)
    return _give_up(log, fetched, start, upto) if start < upto else start


def _damaged_segments(log: ReplicaLog) -> list[tuple[SealedSegment, int | None, list[OffsetRange]]]:
    """Each damaged segment, where it ends (None: unknown), and its damaged ranges."""
    found = []
    for segment, following in pairwise([*log.chain.snapshot(), None]):
        if isinstance(segment, SealedSegment):
            upto = following.base_offset if following is not None else None
            inside = [
                one for one in log.scrub.damaged if segment.base_offset <= one[0] and (upto is None or one[0] < upto)
            ]
            if inside:
                found.append((segment, upto, inside))
    return found


def _piece(log: ReplicaLog, start: int, end: int, at: int) -> dict[str, Any]:
    """As stored: a removed row may hide older ones. In a thread."""
    end = min(end, log.high_watermark)
    if not log.log_start_offset <= start < end:
        raise OffsetOutOfRange(f"offset {start} is not known to be committed here", offset=start)
    with log.reader.plan_read(start, end, max_bytes=1, uncommitted=True) as plan:
        cut = next(filter(None, plan.take_uneven()), None)  # one batch: it begins too early, or ends too late
        messages: list[bytes | memoryview] = [*plan.messages()] if cut is None else [cut]
    return piece(messages[0], at)
