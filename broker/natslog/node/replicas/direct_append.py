"""Commits of direct appends: one run in the stream's log for each (producer, batch), answered when it is committed.

Theory of operation. The work is handed to the stream's writer, which does it between two commits of messages: looks up
what the producer committed last, appends the staged parts as one run, or says that it is a duplicate. The event loop
then waits until the high watermark has passed the run, as acks of messages do. A commit that is asked for twice at once
is done by the writer one after the other, so the second one finds the first one's run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
    ShuttingDown,
    StorageFailed,
)
from natslog.ingest.dedupe import Ids, Offsets, ids_of_headers
from natslog.model import StreamRecord
from natslog.node.replicas.stream import HostedStream
from natslog.node.writes.staging import StagedPart, rows_of
from natslog.node.writes.stream_ingest import StreamIngest

logger = logging.getLogger("natslog.node")

_COMMITTED_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Commit:
    """What is to be appended. `missing`: why the parts are not here, which matters only where it is no duplicate."""

    producer: str
    batch: int
    parts: Sequence[StagedPart]
    missing: NatslogError | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """`[start, end)` are the rows, where that is known: of an older batch than the producer's last it is not."""

    start: int | None
    end: int | None
    duplicate: bool


async def commit(stream: HostedStream, asked: Commit) -> Committed:
    """Appends the parts, once. Returns when all of it is committed.

    Raises:
        PartsMissing, StorageFull, StreamPaused, …: nothing was appended. NoLeader, NotEnoughReplicas: not known to be
        committed yet; asking again tells.
    """
    leading, ingest = stream.leading, stream.ingest
    if leading is None or ingest is None or stream.is_transferring:
        raise _not_leading(stream.record)
    work = _RunWork(stream, ingest, asked, asyncio.get_running_loop().create_future())
    ingest.hand_to_writer(work.run)
    run, is_new = await work.done
    await _wait_for(stream, leading, run.end)
    if is_new:
        ingest.stats.committed += run.end - run.start
    is_known = run.batch == asked.batch
    return Committed(run.start if is_known else None, run.end if is_known else None, not is_new)


async def _wait_for(stream: HostedStream, leading: LeaderReplica, end: int) -> None:
    """Returns when HW has reached this offset."""
    try:
        async with asyncio.timeout(_COMMITTED_WITHIN_S):
            while leading.high_watermark < end:
                advanced = stream.advanced
                if stream.leading is not leading:
                    raise _not_leading(stream.record)
                if advanced.is_set():
                    raise ShuttingDown("the broker is shutting down: ask again, another one will know")
                await advanced.wait()
    except TimeoutError as error:
        raise NotEnoughReplicas(
            f"the rows are stored here and not yet on all in-sync replicas of stream {stream.record.name!r}: ask again",
            stream=stream.record.name,
        ) from error


def _not_leading(record: StreamRecord) -> NoLeader:
    return NoLeader(f"the leadership of stream {record.name!r} is changing: ask again", stream=record.name)


@dataclass(slots=True)
class _RunWork:
    """What the writer does for one commit; `done` is told in the event loop: the run, and whether it is new."""

    stream: HostedStream
    ingest: StreamIngest
    asked: Commit
    done: asyncio.Future[tuple[RunMark, bool]]
    seconds: float = 0.0
    _ids: list[tuple[Ids, Offsets]] = field(default_factory=list)

    def run(self) -> None:
        loop = self.done.get_loop()
        try:
            outcome = self._append()
        except NatslogError as error:
            loop.call_soon_threadsafe(self._refuse, error)
        except pa.ArrowException as error:  # whatever was uploaded, it stops no broker
            logger.exception("a direct append to stream %s cannot be stored", self.stream.record.name)
            loop.call_soon_threadsafe(self._refuse, InvalidRequest(f"rows that cannot be stored: {error}"))
        except OSError as error:
            loop.call_soon_threadsafe(self._refuse, StorageFailed(f"stream {self.stream.record.name!r}: {error}"))
        else:
            loop.call_soon_threadsafe(self._tell, outcome)

    def _tell(self, outcome: tuple[RunMark, bool]) -> None:
        """At once, before any later commit is told of, and also where nobody waits any more."""
        run, is_new = outcome
        stats = self.ingest.stats
        if is_new:
            self.stream.appended(run.end, run.start)
            stats.runs += 1
            stats.run_seconds += self.seconds
        else:
            stats.run_duplicates += 1
        if not self.done.done():
            self.done.set_result(outcome)

    def _refuse(self, error: NatslogError) -> None:
        if not self.done.done():
            is_of_replica = isinstance(error, StorageFailed | CorruptLog)
            self.done.set_exception(self.stream.as_told(error) if is_of_replica else error)

    def _append(self) -> tuple[RunMark, bool]:
        ingest, asked, started = self.ingest, self.asked, time.perf_counter()
        last = ingest.log.last_run(asked.producer)
        if last is not None and asked.batch <= last.batch:
            return last, False
        if (why_not := asked.missing or ingest.why_not()) is not None:
            raise why_not
        time_us = ingest.stream_time.now_us()
        run = ingest.log.append_run(
            asked.producer,
            asked.batch,
            self._chunks(),
            rows=sum(part.rows for part in asked.parts),
            size_bytes=sum(part.size_bytes for part in asked.parts),
            now_us=time_us,
        )
        for ids, offsets in self._ids:
            ingest.dedupe.remember(ids, offsets + run.start, time_us)
        self.seconds = time.perf_counter() - started
        return run, True

    def _chunks(self) -> Iterator[RowBuffers]:
        """The rows to be appended; given up where this broker ends, or leads no more."""
        rows = 0
        for batch in rows_of(self.asked.parts):
            if (why_not := self.ingest.why_not()) is not None:
                raise why_not
            self._note_ids(batch, rows)
            rows += batch.num_rows
            yield RowBuffers.of(batch)

    def _note_ids(self, batch: pa.RecordBatch, first: int) -> None:
        """Message ids of the rows: a publish that repeats one is a duplicate."""
        headers = batch.column("headers")
        if headers.null_count < batch.num_rows and self.ingest.dedupe.window_us:
            ids = ids_of_headers(headers)
            if ids is not None:
                self._ids.append((ids, np.arange(first, first + batch.num_rows, dtype=np.int64)))
