"""Commits of direct appends: one run in the stream's log for each (producer, batch), answered when it is committed.

Theory of operation. The stream's writer does the work, between two commits of messages: it looks up the producer's last
run, and either finds the batch there or appends the staged parts as one run. The event loop then waits until the high
watermark has passed the run, as acks of messages do. Commits of one batch that are requested at once are done one after
the other, so the second one finds the run of the first.

Invariant: a batch is a duplicate only if it is the producer's last one, with as many rows and the same digest. Any
other batch that is not above the last one is a conflict: it could be rows that were stored, or others. The client
decides.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from natslog.arrow.row_buffers import RowBuffers
from natslog.arrow.run_marks import RunMark
from natslog.cluster.roles import LeaderReplica
from natslog.errors import (
    BatchConflict,
    CorruptLog,
    InvalidRequest,
    NatslogError,
    NoLeader,
    NotEnoughReplicas,
    PartsMissing,
    ShuttingDown,
    StorageFailed,
)
from natslog.log_events import event
from natslog.model import Appended, OnConflict, PartReceipt
from natslog.node.replicas.staged_copies import StagedCopies
from natslog.node.replicas.stream import HostedStream
from natslog.node.writes.staging import BatchKey, Part, PartInMemory, StagedPart, Staging, rows_of
from natslog.node.writes.stream_ingest import StreamIngest
from natslog.wire.message_ids import Ids, ids_of_headers
from natslog.wire.row_hashes import sum_digests

logger = logging.getLogger("natslog.node")

_COMMITTED_WITHIN_S = 30.0
_PAUSE_AT_MOST_S = 2.0

_Outcome: TypeAlias = tuple[RunMark, bool] | NatslogError
"""The producer's last run and whether it is new, or the reason why nothing was appended."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What a client requests.

    Attributes:
        on_conflict: `fail`: it is answered with `BatchConflict`; `append`: the batch is appended all the same, and the
            producer continues behind it; `skip`: where it is the producer's last batch with other rows, it is left out.
        allowed: wildcards of the subjects on which the identity that commits may publish now; None: all.
        after: the batch that has to be the producer's last one, 0 where it has none; None: any lower one.
    """

    key: BatchKey
    receipts: Sequence[PartReceipt]
    on_conflict: OnConflict = "fail"
    allowed: tuple[str, ...] | None = None
    after: int | None = None

    @property
    def rows(self) -> int:
        return sum(receipt.rows for receipt in self.receipts)

    @property
    def digest(self) -> int | None:
        """Of the rows of all parts; None where a receipt does not state it."""
        digests = [receipt.content for receipt in self.receipts]
        known = [int(digest, 16) for digest in digests if digest is not None]
        return sum_digests(known) if len(known) == len(digests) else None

    def repeats(self, run: RunMark) -> bool:
        """Whether these are the rows of that run, as far as both state it."""
        unknown = run.digest is None or self.digest is None
        return self.rows == run.end - run.start and (unknown or self.digest == run.digest)


async def commit(stream: HostedStream, staging: Staging, copies: StagedCopies, requested: Commit) -> Appended:
    """Appends the named parts as one run, once. Returns when it is committed; what is staged for the batch is dropped.
    Parts that are staged at another broker are copied first.

    Raises:
        As `_commit`; PartsUnavailable: the broker that has a part does not respond: repeat the request.
    """
    try:
        return await _commit(stream, staging, requested)
    except PartsMissing:
        if all(receipt.broker is None or not staging.lacks(requested.key, receipt) for receipt in requested.receipts):
            raise
        await copies.fetch(requested.key, requested.receipts, stream.record.settings.subjects)
    return await _commit(stream, staging, requested)


async def _commit(stream: HostedStream, staging: Staging, requested: Commit) -> Appended:
    """Appends the named parts, which are staged here.

    Raises:
        BatchConflict, PartsMissing, Forbidden, StorageFull, …: nothing was appended. NoLeader, NotEnoughReplicas: not
        confirmed as committed yet; a repeated request shows the result.
    """
    parts: list[StagedPart] | PartsMissing
    key = requested.key
    try:
        parts = staging.named(key, requested.receipts)
        await staging.require_allowed(parts, requested.allowed)
        requested = replace(requested, receipts=[part.receipt for part in parts])  # what they state was proven here
    except PartsMissing as error:
        parts = error  # no error where the batch was appended before
    if isinstance(parts, PartsMissing) or any(part.receipt.rows for part in parts):
        appended = await _append_once(stream, requested, parts)
    else:
        end = stream.usable_log().high_watermark
        appended = Appended(end, end, duplicate=False)
    await staging.drop(key)
    return appended


async def append_following(stream: HostedStream, key: BatchKey, after: int, rows: PartInMemory) -> Appended:
    """Appends rows as the batch that follows `after`, once. Raises as `_commit`; InvalidRequest: there are none."""
    if not rows.receipt.rows:
        raise InvalidRequest("there are no rows: a batch without rows is not stored")
    return await _append_once(stream, Commit(key, [rows.receipt], after=after), [rows], size_bytes=rows.size_bytes)


async def _append_once(
    stream: HostedStream, requested: Commit, parts: Sequence[Part] | PartsMissing, *, size_bytes: int | None = None
) -> Appended:
    """Args: size_bytes: of the rows, where all are in memory."""
    leading, ingest = stream.leading, stream.ingest
    if leading is None or ingest is None or stream.is_transferring:
        raise not_leading(stream)
    started = time.monotonic()
    work = _Work(stream, ingest, requested, parts, asyncio.get_running_loop().create_future())
    is_in_memory = size_bytes is not None and not ingest.log.producers.is_partial
    ingest.hand_to_writer(work, rows=requested.rows if is_in_memory else 0, size_bytes=size_bytes or 0)
    outcome = await work.done
    if isinstance(outcome, NatslogError):
        raise stream.error_for_clients(outcome) if isinstance(outcome, StorageFailed | CorruptLog) else outcome
    run, is_new = outcome
    await wait_until_committed(stream, leading, run.end)
    if is_new:
        ingest.stats.committed += run.end - run.start
        await _let_replicas_catch_up(stream, time.monotonic() - started)
    return Appended(run.start, run.end, not is_new)


async def _let_replicas_catch_up(stream: HostedStream, took_s: float) -> None:
    """Producers append as fast as the leader takes runs. If that is as fast as a replica out of sync can copy, the
    replica would never catch up: each producer pauses for as long as its append took.
    """
    if stream.outpaces_replica:
        await asyncio.sleep(min(took_s, _PAUSE_AT_MOST_S))


async def wait_until_committed(stream: HostedStream, leading: LeaderReplica, end: int) -> None:
    """Returns when the high watermark has passed `end`. Raises NoLeader, NotEnoughReplicas, ShuttingDown."""
    try:
        async with asyncio.timeout(_COMMITTED_WITHIN_S):
            while leading.high_watermark < end:
                advanced = stream.advanced
                if stream.leading is not leading:
                    raise not_leading(stream)
                if advanced.is_set():
                    raise ShuttingDown("the broker is shutting down: repeat the request; another broker answers it")
                await advanced.wait()
    except TimeoutError as error:
        raise NotEnoughReplicas(
            f"the rows are stored on this broker, but not yet on all in-sync replicas of stream {stream.name!r}: "
            "repeat the request",
            stream=stream.name,
        ) from error


def not_leading(stream: HostedStream) -> NoLeader:
    """The error while another broker is becoming leader."""
    return NoLeader(f"the leadership of stream {stream.name!r} is changing: repeat the request", stream=stream.name)


@dataclass(frozen=True, slots=True)
class _Work:
    """The writer's task for one commit; `done` is set in the event loop."""

    stream: HostedStream
    ingest: StreamIngest
    requested: Commit
    parts: Sequence[Part] | PartsMissing
    done: asyncio.Future[_Outcome]

    def __call__(self) -> None:
        started, outcome = time.perf_counter(), self._outcome()
        report = partial(self._finish, outcome, time.perf_counter() - started)
        if self._is_in_loop():
            report()
        else:
            self.done.get_loop().call_soon_threadsafe(report)

    def _is_in_loop(self) -> bool:
        """Whether the writer does this in the event loop: later commits are reported there at once, too."""
        try:
            return asyncio.get_running_loop() is self.done.get_loop()
        except RuntimeError:
            return False  # a thread, which has none

    def _finish(self, outcome: _Outcome, seconds: float) -> None:
        """Before any later commit, and also if no request waits any more."""
        stats = self.ingest.stats
        match outcome:
            case run, True:
                self.stream.driver.appended(run.end, run.start)
                stats.runs += 1
                stats.run_seconds += seconds
            case _, False:
                stats.run_duplicates += 1
        if not self.done.done():
            self.done.set_result(outcome)

    def _outcome(self) -> _Outcome:
        try:
            last = self.ingest.log.last_run(self.requested.key[1])
            if self.requested.after is not None and not self._follows(last):
                return self._not_following(last)
            if last is not None and self._is_stored(last):
                return last, False
            if isinstance(self.parts, PartsMissing):
                return self.parts
            run = self._append(self.parts)
            if last is not None and run.batch <= last.batch:
                self._note_decision("appended", last)
            return run, True
        except NatslogError as error:
            return error
        except pa.ArrowException as error:  # no upload may stop the broker
            logger.exception(
                "a direct append to stream %s cannot be stored",
                self.stream.name,
                extra=event("append.failed", stream=self.stream.name),
            )
            return InvalidRequest(f"the rows cannot be stored: {error}")
        except OSError as error:
            return StorageFailed(f"stream {self.stream.name!r}: {error}")

    def _follows(self, last: RunMark | None) -> bool:
        """Whether it is the batch behind the one that it names, or is stored already."""
        requested, batch = self.requested, self.requested.key[2]
        if last is None:
            return requested.after == 0
        return last.batch == requested.after or (last.batch == batch and requested.repeats(last))

    def _not_following(self, last: RunMark | None) -> BatchConflict:
        _, producer, batch = self.requested.key
        return BatchConflict(
            f"stream {self.stream.name!r}: batch {batch} of {producer} follows batch {self.requested.after}, but its "
            f"last batch is {'not known' if last is None else last.batch}: another writer has appended as this "
            "producer, or the stream has lost it. Nothing was appended. Request the last batch, and leave out what it "
            "contains (start the query again)",
            producer=producer,
            batch=batch,
            last_batch=None if last is None else last.batch,
        )

    def _is_stored(self, last: RunMark) -> bool:
        """Whether the batch is the last one of its producer, and is not to be appended. Raises BatchConflict."""
        requested, batch = self.requested, self.requested.key[2]
        if batch > last.batch:
            return False
        is_last = batch == last.batch
        if is_last and requested.repeats(last):
            return True
        skips = is_last and requested.on_conflict == "skip"
        if not skips and requested.on_conflict != "append":
            raise self._conflict(last)
        if skips:
            self._note_decision("left out", last)
        return skips

    def _note_decision(self, what: str, last: RunMark) -> None:
        _, producer, batch = self.requested.key
        logger.warning(
            "stream %s: batch %d of %s (%d rows) was %s on request; its last stored batch was %d (%d rows)",
            self.stream.name, batch, producer, self.requested.rows, what, last.batch, last.end - last.start,
            extra=event(
                "append.conflict_resolved", stream=self.stream.name, producer=producer, batch=batch,
                count=self.requested.rows,
            ),
        )  # fmt: skip

    def _conflict(self, last: RunMark) -> BatchConflict:
        _, producer, batch = self.requested.key
        stored = last.end - last.start
        if batch == last.batch:
            problem = (
                f"batch {batch} of {producer} is stored with {stored} rows, but now has other rows "
                f"({self.requested.rows}): the job was changed, or rows of its source were removed since. To keep the "
                'stored rows and leave these out, use "skip"; to append these as well, "append"'
            )
        else:
            problem = (
                f"batch {batch} of {producer} was sent after its batch {last.batch} was stored: the checkpoint was set "
                'back. To append it all the same (rows of earlier batches may be stored twice), use "append"'
            )
        return BatchConflict(
            f"stream {self.stream.name!r}: {problem} (option onConflict of the Spark sink, on_conflict of a commit). "
            "Or give the query a new checkpoint location: it is then another producer",
            producer=producer,
            batch=batch,
            rows=self.requested.rows,
            last_batch=last.batch,
            last_rows=stored,
        )

    def _append(self, parts: Sequence[Part]) -> RunMark:
        self._check_writable()
        ingest, time_us = self.ingest, self.ingest.stream_time.now_us()
        ids: list[tuple[int, Ids]] = []
        _, producer, batch = self.requested.key
        rows, size_bytes = sum(part.receipt.rows for part in parts), sum(part.size_bytes for part in parts)
        ingest.room.require(rows, size_bytes)
        run = ingest.log.append_run(
            producer,
            batch,
            self._chunks(parts, ids),
            rows=rows,
            size_bytes=size_bytes,
            now_us=time_us,
            digest=self.requested.digest,
        )
        for row, found in ids:
            start = run.start + row
            ingest.dedupe.remember(found, np.arange(start, start + len(found), dtype=np.int64), time_us)
        return run

    def _chunks(self, parts: Sequence[Part], ids: list[tuple[int, Ids]]) -> Iterator[RowBuffers]:
        """The rows to be appended. Their message ids are added to `ids`, behind the number of the first row."""
        row = 0
        for batch in rows_of(parts):
            self._check_writable()
            headers = batch.column("headers")
            has_headers = self.ingest.dedupe.window_us and headers.null_count < batch.num_rows
            if has_headers and (found := ids_of_headers(headers)) is not None:
                ids.append((row, found))
            row += batch.num_rows
            yield RowBuffers.of(batch)

    def _check_writable(self) -> None:
        """Raises the reason why this broker appends nothing now: it is shutting down, is no longer leader, the stream
        is paused, …
        """
        if (why_not := self.ingest.why_not()) is not None:
            raise why_not
