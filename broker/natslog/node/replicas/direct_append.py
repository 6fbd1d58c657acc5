"""Commits of direct appends: one run in the stream's log for each (producer, batch), answered when it is committed.

Theory of operation. The stream's writer does the work, between two commits of messages: it looks up the producer's last
run, and either finds the batch there or appends the staged parts as one run. The event loop then waits until the high
watermark has passed the run, as acks of messages do. Commits of one batch that are requested at once are done one after
the other, so the second one finds the run of the first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from natslog.arrow.row_buffers import RowBuffers
from natslog.arrow.run_marks import RunMark
from natslog.cluster.roles import LeaderReplica
from natslog.errors import (
    CorruptLog,
    InvalidRequest,
    NatslogError,
    NoLeader,
    NotEnoughReplicas,
    PartsMissing,
    ShuttingDown,
    StorageFailed,
)
from natslog.ingest.dedupe import Ids, ids_of_headers
from natslog.model import Appended, PartReceipt
from natslog.node.replicas.stream import HostedStream
from natslog.node.writes.staging import BatchKey, StagedPart, Staging, rows_of
from natslog.node.writes.stream_ingest import StreamIngest

logger = logging.getLogger("natslog.node")

_COMMITTED_WITHIN_S = 30.0
_PAUSE_AT_MOST_S = 2.0

_Outcome: TypeAlias = tuple[RunMark, bool] | NatslogError
"""The producer's last run and whether it is new, or the reason why nothing was appended."""


async def commit(stream: HostedStream, staging: Staging, key: BatchKey, receipts: Iterable[PartReceipt]) -> Appended:
    """Appends the named parts as one run, once. Returns when it is committed; what is staged for the batch is dropped.

    Raises:
        PartsMissing, StorageFull, StreamPaused, …: nothing was appended. NoLeader, NotEnoughReplicas: not confirmed as
        committed yet; a repeated request shows the result.
    """
    parts: list[StagedPart] | PartsMissing
    try:
        parts = staging.named(key, receipts)
    except PartsMissing as error:
        parts = error  # no error where the batch was appended before
    if isinstance(parts, PartsMissing) or any(part.receipt.rows for part in parts):
        appended = await _append_once(stream, key, parts)
    else:
        end = stream.usable_log().high_watermark
        appended = Appended(end, end, duplicate=False)
    await staging.drop(key)
    return appended


async def _append_once(stream: HostedStream, key: BatchKey, parts: list[StagedPart] | PartsMissing) -> Appended:
    leading, ingest = stream.leading, stream.ingest
    if leading is None or ingest is None or stream.is_transferring:
        raise _not_leading(stream)
    _, producer, batch = key
    started = time.monotonic()
    work = _Work(stream, ingest, producer, batch, parts, asyncio.get_running_loop().create_future())
    ingest.hand_to_writer(work)
    outcome = await work.done
    if isinstance(outcome, NatslogError):
        raise stream.as_told(outcome) if isinstance(outcome, StorageFailed | CorruptLog) else outcome
    run, is_new = outcome
    await _wait_until_committed(stream, leading, run.end)
    if is_new:
        ingest.stats.committed += run.end - run.start
        await _let_replicas_catch_up(stream, time.monotonic() - started)
    return Appended(run.start, run.end, not is_new) if run.batch == batch else Appended(None, None, duplicate=True)


async def _let_replicas_catch_up(stream: HostedStream, took_s: float) -> None:
    """Producers append as fast as the leader takes runs. If that is as fast as a replica out of sync can copy, the
    replica would never catch up: each producer pauses for as long as its append took.
    """
    if stream.outpaces_replica:
        await asyncio.sleep(min(took_s, _PAUSE_AT_MOST_S))


async def _wait_until_committed(stream: HostedStream, leading: LeaderReplica, end: int) -> None:
    try:
        async with asyncio.timeout(_COMMITTED_WITHIN_S):
            while leading.high_watermark < end:
                advanced = stream.advanced
                if stream.leading is not leading:
                    raise _not_leading(stream)
                if advanced.is_set():
                    raise ShuttingDown("the broker is shutting down: repeat the request; another broker answers it")
                await advanced.wait()
    except TimeoutError as error:
        raise NotEnoughReplicas(
            f"the rows are stored on this broker, but not yet on all in-sync replicas of stream {stream.name!r}: "
            "repeat the request",
            stream=stream.name,
        ) from error


def _not_leading(stream: HostedStream) -> NoLeader:
    return NoLeader(f"the leadership of stream {stream.name!r} is changing: repeat the request", stream=stream.name)


@dataclass(frozen=True, slots=True)
class _Work:
    """The writer's task for one commit; `done` is set in the event loop."""

    stream: HostedStream
    ingest: StreamIngest
    producer: str
    batch: int
    parts: list[StagedPart] | PartsMissing
    done: asyncio.Future[_Outcome]

    def __call__(self) -> None:
        started, outcome = time.perf_counter(), self._outcome()
        self.done.get_loop().call_soon_threadsafe(self._finish, outcome, time.perf_counter() - started)

    def _finish(self, outcome: _Outcome, seconds: float) -> None:
        """Before any later commit, and also if no request waits any more."""
        stats = self.ingest.stats
        match outcome:
            case run, True:
                self.stream.appended(run.end, run.start)
                stats.runs += 1
                stats.run_seconds += seconds
            case _, False:
                stats.run_duplicates += 1
        if not self.done.done():
            self.done.set_result(outcome)

    def _outcome(self) -> _Outcome:
        try:
            last = self.ingest.log.last_run(self.producer)
            if last is not None and self.batch <= last.batch:
                return last, False
            if isinstance(self.parts, PartsMissing):
                return self.parts
            return self._append(self.parts), True
        except NatslogError as error:
            return error
        except pa.ArrowException as error:  # no upload may stop the broker
            logger.exception("a direct append to stream %s cannot be stored", self.stream.name)
            return InvalidRequest(f"the rows cannot be stored: {error}")
        except OSError as error:
            return StorageFailed(f"stream {self.stream.name!r}: {error}")

    def _append(self, parts: list[StagedPart]) -> RunMark:
        self._check_writable()
        ingest, time_us = self.ingest, self.ingest.stream_time.now_us()
        ids: list[tuple[int, Ids]] = []
        run = ingest.log.append_run(
            self.producer,
            self.batch,
            self._chunks(parts, ids),
            rows=sum(part.receipt.rows for part in parts),
            size_bytes=sum(part.size_bytes for part in parts),
            now_us=time_us,
        )
        for row, found in ids:
            start = run.start + row
            ingest.dedupe.remember(found, np.arange(start, start + len(found), dtype=np.int64), time_us)
        return run

    def _chunks(self, parts: list[StagedPart], ids: list[tuple[int, Ids]]) -> Iterator[RowBuffers]:
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
