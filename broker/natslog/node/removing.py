"""Removal of single messages: on request, when they expire, and of what newer messages hide.

Theory of operation. The leader determines exact offsets, and appends them as bitmaps to the companion log of the stream
(`removed` records). When a record is committed, every replica hides these offsets. So a request is answered when the
messages are hidden, on stable storage of all in-sync replicas. What has expired by stream time is hidden within some
tens of milliseconds: the leader looks at every stream once a second, and notes when the next message expires. What is
past an age limit is the beginning of the log, whose start for readers is moved; the files go later. When newer messages
hide many older ones in sealed segments (by a limit per subject or by key), their offsets are recorded too: segments are
rewritten only without recorded messages, and so the same ones on each replica.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from natslog.arrow.covered import covered
from natslog.cluster.removals import (
    RECORDED_AT_LEAST,
    OldestMessage,
    decides_removals,
    is_snapshot_due,
    is_to_be_recorded,
    prepares_companion,
)
from natslog.errors import CorruptLog, MessageNotFound, NatslogError, OffsetOutOfRange
from natslog.log import ReplicaLog
from natslog.log.erasing import ErasedOffsets, Erases
from natslog.log.removed import offset_range, offset_set, to_array, to_bytes
from natslog.log_events import event
from natslog.node.cluster_clock import StreamTime
from natslog.node.replicas.companion_records import ERASED, REMOVED, RULES, Record
from natslog.node.replicas.hosting import Hosting
from natslog.node.replicas.stream import HostedStream
from natslog.node.supervisor import Supervisor
from natslog.node.threads import in_thread

logger = logging.getLogger("natslog.node")

_EVERY_S = 1.0
_LEAST_PAUSE_S = 0.05
_OTHERS_WAIT_S = 0.2
_STREAMS_AT_ONCE = 64
_OFFSETS_OF_A_RECORD = 1 << 22
"""A bitmap of so many offsets takes at most 0.5 MiB."""
_RECORDS_AT_ONCE = 32

Chosen = Callable[[pa.RecordBatch], Any]
"""Which rows of a batch are meant: a boolean array."""


@dataclass(frozen=True, slots=True)
class Erased:
    """What is erased. `marks`: of a column of subjects or keys. `marks_of_bytes`: of the same texts as binaries."""

    erases: Erases
    marks: Callable[[Any], Any]
    marks_of_bytes: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class ErasureBegun:
    """`messages`: how many rows were stored."""

    id: str
    messages: int


class Removing:
    """See the module. Args: `tasks`: what takes long is one of them."""

    def __init__(self, hosting: Hosting, executor: Executor, tasks: Supervisor) -> None:
        self._hosting, self._executor, self._tasks = hosting, executor, tasks
        self._slow: dict[HostedStream, asyncio.Task[None]] = {}  # what takes long goes on beside the others
        self._oldest: dict[HostedStream, tuple[ReplicaLog, OldestMessage]] = {}
        self._due_s: dict[HostedStream, float] = {}  # when something expires that does so before the next look

    async def run(self) -> None:
        check_s = 0.0
        while True:
            began_s = time.monotonic()
            if began_s >= check_s:
                check_s = began_s + _EVERY_S
                await self._check_all()
            else:
                for stream in [stream for stream, due_s in self._due_s.items() if due_s <= began_s]:
                    await self._begin(stream, self._expire)
            now_s = time.monotonic()
            until_s = min([check_s, *self._due_s.values()])
            await asyncio.sleep(max(until_s - now_s, now_s - began_s, _LEAST_PAUSE_S))  # at most half of the time

    async def _check_all(self) -> None:
        streams = list(self._hosting.streams.values())
        self._slow = {stream: task for stream, task in self._slow.items() if not task.done()}
        for stream in self._oldest.keys() - set(streams):
            del self._oldest[stream]
        self._due_s.clear()
        for number, stream in enumerate(streams):
            if number % _STREAMS_AT_ONCE == 0:
                await asyncio.sleep(0)  # what else the broker does has its turn
            log = stream.log
            if log is None:
                continue
            if stream.removes_messages or (is_snapshot_due(stream.companion.size_bytes) and stream.is_leading):
                await self._begin(stream, self._maintain)
            elif stream.record.settings.age_limit_s is not None and self._is_age_due(stream, log):
                await self._begin(stream, self._expire)

    async def _begin(self, stream: HostedStream, work: Callable[[HostedStream, ReplicaLog], Awaitable[None]]) -> None:
        """Returns when it is done, or goes on beside the others."""
        self._due_s.pop(stream, None)
        log, slow = stream.log, self._slow.get(stream)
        if log is None or (slow is not None and not slow.done()):
            return
        task = self._slow[stream] = self._tasks.start(self._served(stream, log, work), f"removals of {stream.name}")
        await asyncio.wait([task], timeout=_OTHERS_WAIT_S)

    @staticmethod
    async def _served(
        stream: HostedStream, log: ReplicaLog, work: Callable[[HostedStream, ReplicaLog], Awaitable[None]]
    ) -> None:
        try:
            await work(stream, log)
        except (NatslogError, OSError) as error:
            if isinstance(error, CorruptLog) and stream.has_others_in_sync:
                stream.note_damage(error)
            logger.warning(
                "stream %s: removed messages could not be recorded yet: %s",
                stream.name,
                error,
                extra=event("stream.removals_not_recorded", stream=stream.name),
            )

    async def _maintain(self, stream: HostedStream, log: ReplicaLog) -> None:
        if _stream_time(stream) is not None:
            if log.visibility.rules_version < (version := stream.record.rules_version):
                await self.count_anew(stream, version)
            if prepares_companion(stream.record):
                await stream.companion.prepare()
            await self._expire(stream, log)
            hidden = await in_thread(self._executor, _recordable, log) if log.visibility.has_rules else BitMap64()
            if hidden:
                await self.record(stream, hidden)
        if stream.is_leading:
            await self._shorten(stream, log)

    async def count_anew(self, stream: HostedStream, version: int) -> None:
        """A rule was added that hides messages: removals of before do not count for it on any replica. What they hide
        here stays hidden. Raises as `Companion.append`.
        """
        log = stream.usable_log()
        hidden = await in_thread(self._executor, _derived, log)
        records = [*_records(hidden), (RULES, b"%d" % version)]
        for first in range(0, len(records), _RECORDS_AT_ONCE):
            await stream.companion.append(records[first : first + _RECORDS_AT_ONCE])

    # ---- what expires ----

    def _is_age_due(self, stream: HostedStream, log: ReplicaLog) -> bool:
        """Whether a message may be past the age limit now. If one is before the next look at all, that is noted."""
        stream_time, age_s = _stream_time(stream), stream.record.settings.age_limit_s
        if stream_time is None or age_s is None:
            return False
        known_log, oldest = self._oldest.get(stream, (None, None))
        if oldest is None or known_log is not log:
            return True
        now_us = stream_time.expiry_us()
        expires_us = oldest.expires_us(age_s, now_us, log.high_watermark)
        self._note_due(stream, expires_us - now_us)
        return expires_us <= now_us

    def _note_due(self, stream: HostedStream, in_us: int) -> None:
        if 0 < in_us < _EVERY_S * 1e6:
            due_s = time.monotonic() + in_us / 1e6
            self._due_s[stream] = min(due_s, self._due_s.get(stream, due_s))

    async def _expire(self, stream: HostedStream, log: ReplicaLog) -> None:
        """Hides what has expired."""
        stream_time, settings = _stream_time(stream), stream.record.settings
        if stream_time is None:
            return
        now_us = stream_time.expiry_us()
        if settings.age_limit_s is not None:
            await self._expire_by_age(stream, log, settings.age_limit_s, now_us)
        if settings.allow_ttl and settings.ttl_s is not None:
            start, past_us = log.first_readable_offset, now_us - int(settings.ttl_s * 1e6)
            upto, following_us = await in_thread(self._executor, log.reader.offset_at, past_us, start)
            if upto > start:
                await in_thread(self._executor, log.upkeep.apply_rules)
                expired = log.visibility.without_own_ttl(start, upto)
                if expired:
                    await self.record(stream, expired)
            if following_us is not None:
                self._note_due(stream, following_us - past_us)
        if log.visibility.has_rules:
            await self._expire_single(stream, log, now_us)

    async def _expire_by_age(self, stream: HostedStream, log: ReplicaLog, age_s: float, now_us: int) -> None:
        end, start = log.high_watermark, log.first_readable_offset
        oldest_us = await in_thread(self._executor, log.limits.expire, now_us)
        if log.first_readable_offset > start:
            stream.driver.log_start_moved()
        oldest = OldestMessage(oldest_us, end)
        self._oldest[stream] = log, oldest
        self._note_due(stream, oldest.expires_us(age_s, now_us, log.high_watermark) - now_us)

    async def _expire_single(self, stream: HostedStream, log: ReplicaLog, now_us: int) -> None:
        """What has a time of its own."""
        await in_thread(self._executor, log.upkeep.apply_rules)
        due = log.visibility.expired(now_us, leads=True)
        try:
            if due:
                await self.record(stream, due)
        except BaseException:
            log.visibility.not_recorded(due, now_us)
            raise
        if (next_us := log.visibility.next_expiry_us()) is not None:
            self._note_due(stream, next_us - now_us)

    # ---- on request ----

    async def delete(self, stream: HostedStream, offset: int, *, erased_us: int | None = None) -> None:
        """Removes one message of a stream that is led here.

        Args:
            erased_us: where given, its bytes are removed from all replicas as well, as requested at that time.

        Raises:
            MessageNotFound: there is no message at this offset. As `Companion.append`.
        """
        log = stream.usable_log()
        removed = await in_thread(self._executor, log.visibility.removed_below, log.high_watermark)
        start, end = log.first_readable_offset, log.high_watermark
        if not start <= offset < end or removed.is_hidden(offset):
            raise MessageNotFound(
                f"stream {stream.name!r} has no message at offset {offset}: its offsets are {start} to {end - 1}, "
                "and messages among them may have been removed",
                offset=offset,
                log_start_offset=start,
                high_watermark=end,
            )
        offsets = offset_range(offset, offset + 1)
        if erased_us is None:
            await self.record(stream, offsets)
            return
        begun = ErasureBegun(secrets.token_hex(8), 1)
        past_limits = list(_records(offset_range(log.log_start_offset, log.chain.limited_below)))
        await stream.companion.append([*past_limits, *_erasure_records(begun, "subject", offsets, end, erased_us)])

    async def remove_where(self, stream: HostedStream, chosen: Chosen, end: int, *, keep: int = 0) -> int:
        """Removes the visible messages below `end` that are meant, but for the newest `keep` of them. Returns how many.

        Raises:
            CorruptLog: the log must be read for it, and cannot be. As `Companion.append`.
        """
        log = stream.usable_log()
        found = await in_thread(self._executor, _found, log, chosen, end)
        if keep:
            found = offset_set(to_array(found)[: max(0, len(found) - keep)])
        if found:
            await self.record(stream, found)
        return len(found)

    # ---- erasure ----

    async def erase(self, stream: HostedStream, what: Erased, now_us: int) -> ErasureBegun | None:
        """Hides the messages with this key, or on these subjects, that are committed now, also those that are hidden
        already; replicas remove their bytes from then on. None: there is nothing of them here.

        Raises:
            CorruptLog: the log must be read for it, and cannot be. As `Companion.append`.
        """
        log = stream.usable_log()
        end = log.high_watermark
        rows, known, derived = await in_thread(self._executor, _stored_rows_of, log, what, end)
        if not rows and not known:
            return None
        begun = ErasureBegun(secrets.token_hex(8), len(rows))
        hidden = derived | offset_range(log.log_start_offset, log.chain.limited_below)
        records = _erasure_records(begun, what.erases, rows | known, end, now_us)
        await stream.companion.append([*_records(hidden - rows), *records])
        return begun

    # ---- imports ----

    async def remove_imported(
        self, stream: HostedStream, removed: BitMap64, subjects: BitMap64, keys: BitMap64, now_us: int
    ) -> None:
        """What the original of an imported stream does not have any more; `subjects` and `keys` of it were erased.

        Raises:
            As `Companion.append`.
        """
        log = stream.usable_log()
        stored, end = offset_range(log.log_start_offset, log.log_end_offset), log.log_end_offset
        records = list(_records((removed & stored) - log.visibility.removed.recorded))
        known = log.erasures.all_rows()
        erased: list[tuple[Erases, BitMap64]] = [
            ("subject", (subjects & stored) - known.dropped),
            ("key", (keys & stored) - known.emptied),
        ]
        for erases, offsets in erased:
            begun = ErasureBegun(secrets.token_hex(8), len(offsets))
            records += _erasure_records(begun, erases, offsets, end, now_us)
        if records:
            await stream.companion.append(records)

    async def record_gaps(self, stream: HostedStream) -> None:
        """Raises CorruptLog; as `Companion.append`."""
        log = stream.usable_log()
        gaps = await in_thread(self._executor, log.reader.gaps)
        records = list(_records(gaps - log.visibility.removed.recorded))
        for first in range(0, len(records), _RECORDS_AT_ONCE):
            await stream.companion.append(records[first : first + _RECORDS_AT_ONCE])

    async def record(self, stream: HostedStream, offsets: BitMap64) -> None:
        """Returns when these offsets are hidden on all in-sync replicas. Raises as `Companion.append`."""
        await stream.companion.append(self.records_of(stream, offsets))

    @staticmethod
    def records_of(stream: HostedStream, offsets: BitMap64) -> list[Record]:
        """Records of a companion log that hide these offsets."""
        log = stream.usable_log()
        if log.chain.limited_below > log.log_start_offset:  # no message returns because others were removed
            offsets = offsets | offset_range(log.log_start_offset, log.chain.limited_below)
        return list(_records(offsets))

    async def _shorten(self, stream: HostedStream, log: ReplicaLog) -> None:
        """The companion log is replaced by what is removed, where it has become much larger than that."""
        if is_snapshot_due(stream.companion.size_bytes):
            snapshot = [*_snapshot(log), *stream.consumers.snapshot()]
            if is_snapshot_due(stream.companion.size_bytes, sum(len(data) for _, data in snapshot)):
                await stream.companion.shorten(snapshot)


def _stream_time(stream: HostedStream) -> StreamTime | None:
    """Of a stream whose messages expire here: the leader decides what does, by the time of the stream."""
    ingest = stream.ingest
    if ingest is None or not decides_removals(stream.record, leads=stream.is_leading):
        return None
    return ingest.stream_time


def _snapshot(log: ReplicaLog) -> list[Record]:
    """Records that state what all records of the companion log do."""
    removed, version = log.visibility.removed, log.visibility.rules_version
    counted_anew: list[Record] = [*_records(removed.uncounted), (RULES, b"%d" % version)] if version else []
    erased: list[Record] = [(ERASED, data) for data in log.erasures.records()]
    return [*counted_anew, *_records(removed.recorded - removed.uncounted), *erased]


def _records(offsets: BitMap64) -> Iterator[tuple[str, bytes]]:
    at, end = (int(offsets.min()), int(offsets.max()) + 1) if offsets else (0, 0)
    while at < end:
        part = offsets & offset_range(at, at + _OFFSETS_OF_A_RECORD)
        if part:
            yield REMOVED, to_bytes(part)
        at += _OFFSETS_OF_A_RECORD
        if at < end and not part:
            at = max(at, int((offsets & offset_range(at, end)).min()))


def _erasure_records(
    begun: ErasureBegun, erases: Erases, offsets: BitMap64, below: int, now_us: int
) -> Iterator[tuple[str, bytes]]:
    for _, data in _records(offsets):
        record = ErasedOffsets(
            id=begun.id, erases=erases, below=below, requested_us=now_us, messages=begun.messages, offsets=data
        )
        yield ERASED, record.to_bytes()


def _recordable(log: ReplicaLog, at_least: int = RECORDED_AT_LEAST) -> BitMap64:
    """What newer messages hide in sealed segments, if that is enough for rewriting them."""
    log.upkeep.apply_rules()
    start, end = log.log_start_offset, log.sealed_end_offset
    hidden = log.visibility.removed.derived(start, end)
    stored = end - start - log.visibility.removed.count(start, end)
    waiting = log.upkeep.pending_rows if hidden else 0
    is_enough = is_to_be_recorded(len(hidden), stored, waits_for_rewriting=waiting, at_least=at_least)
    return hidden if is_enough else BitMap64()


def _derived(log: ReplicaLog) -> BitMap64:
    """All that newer messages hide."""
    log.upkeep.apply_rules()
    return log.visibility.removed.derived(log.log_start_offset, log.high_watermark)


def _found(log: ReplicaLog, chosen: Chosen, end: int) -> BitMap64:
    """What a limit removes meanwhile is left out."""
    found, start = BitMap64(), log.first_readable_offset
    while start < end:
        try:
            for batch in log.reader.visible_rows(start, end):
                offsets = batch.column("offset").to_numpy()
                found |= offset_set(offsets[np.asarray(chosen(batch), bool)])
                start = int(offsets[-1]) + 1
            break
        except OffsetOutOfRange:
            if log.first_readable_offset <= start:
                raise
            start = log.first_readable_offset
    return found


def _stored_rows_of(log: ReplicaLog, what: Erased, end: int) -> tuple[BitMap64, BitMap64, BitMap64]:
    """Rows below `end` that are to be erased; offsets of those of which only the text is known; and what rows below
    `end` hide without a record, which must be recorded before any of them is dropped.
    """
    log.upkeep.apply_rules()
    rows = BitMap64()
    for _, batch in log.reader.stored_rows(log.log_start_offset, end, prove=True):
        rows |= offset_set(batch.column("offset").to_numpy()[what.marks(batch.column(what.erases))])
    known = log.visibility.offsets_of_texts(what.erases, what.marks_of_bytes)
    below = offset_range(0, end)
    return rows, known & below, log.visibility.removed.derived(log.log_start_offset, end)


def of_subject(pattern: str) -> Chosen:
    """Messages whose subject this pattern covers."""

    def chosen(batch: pa.RecordBatch) -> Any:
        subjects = batch.column("subject").dictionary_encode()
        by_subject = np.asarray(covered(subjects.dictionary, (pattern,)), bool)
        return by_subject[subjects.indices.to_numpy()]

    return chosen


def erased_subject(pattern: str) -> Erased:
    """Messages whose subject this pattern covers."""

    def marks(subjects: Any) -> Any:
        return np.asarray(covered(subjects, (pattern,)), bool)

    return Erased("subject", marks, lambda subjects: marks(subjects.cast(pa.string())))


def erased_key(key: bytes) -> Erased:
    """Messages with this key."""

    def marks(keys: Any) -> Any:
        return pc.fill_null(pc.equal(keys, pa.scalar(key, pa.binary())), False).to_numpy(zero_copy_only=False)

    return Erased("key", marks, marks)
