"""Appends to an internal stream that is led here. As a direct append, a call returns when its rows are committed.

Theory of operation. The stream's writer does the work between two commits of messages (`_Errand`). Rows are appended as
one batch. Those of a producer that numbers its rows upwards (`append_once`) are appended as one run, whose number is
that of its last row: the log itself shows which rows of a repeated call are stored already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.errors import NatslogError, StorageFailed
from natslog.node.replicas.direct_append import not_leading, wait_until_committed
from natslog.node.replicas.stream import HostedStream
from natslog.node.writes.stream_ingest import StreamIngest

NOTHING = -1
"""Instead of a number: the producer has stored nothing."""


class Row(NamedTuple):
    """`number`: of its producer; 0 without one."""

    number: int
    subject: str
    key: str
    value: str


class Stored(NamedTuple):
    """Rows in the log, at `[start, end)`. `number`: of the last one. `is_new`: appended by this call."""

    number: int
    start: int
    end: int
    is_new: bool
    is_run: bool


async def append(stream: HostedStream, make: Callable[[], Sequence[Row]]) -> Stored:
    """Appends rows as one batch: after a crash, all of them are there or none.

    Args:
        make: makes the rows, at least one, in the writer's thread.

    Raises:
        NoLeader, NotEnoughReplicas, StorageFull, …: they may be stored or not.
    """

    def work(ingest: StreamIngest) -> Stored:
        _require_writable(ingest)
        rows, now_us = make(), ingest.stream_time.now_us()
        start, _ = ingest.log.append(_buffers_of(rows), now_us)
        return Stored(rows[-1].number, start, start + len(rows), is_new=True, is_run=False)

    stored = await _in_writer(stream, work)
    assert stored is not None, "rows were appended"
    return stored


async def append_once(stream: HostedStream, producer: str, rows: Sequence[Row]) -> int:
    """Appends the rows of a producer that are not stored yet.

    Args:
        rows: by number, which may leave gaps.

    Returns:
        The number of the producer's last row, when it is committed; `NOTHING`: it has none.

    Raises:
        NoLeader, NotEnoughReplicas, StorageFull, …: they may be stored or not; the same call may be repeated.
    """

    def work(ingest: StreamIngest) -> Stored | None:
        last = ingest.log.last_run(producer)
        fresh = [row for row in rows if last is None or row.number > last.batch]
        if not fresh:
            return None if last is None else Stored(last.batch, last.start, last.end, is_new=False, is_run=True)
        _require_writable(ingest)
        buffers = _buffers_of(fresh)
        run = ingest.log.append_run(
            producer,
            fresh[-1].number,
            [buffers],
            rows=len(fresh),
            size_bytes=buffers.nbytes,
            now_us=ingest.stream_time.now_us(),
        )
        return Stored(run.batch, run.start, run.end, is_new=True, is_run=True)

    stored = await _in_writer(stream, work)
    return NOTHING if stored is None else stored.number


def _require_writable(ingest: StreamIngest) -> None:
    """Raises the reason why this broker appends nothing now."""
    if (why_not := ingest.why_not()) is not None:
        raise why_not


async def _in_writer(stream: HostedStream, work: Callable[[StreamIngest], Stored | None]) -> Stored | None:
    """What the work has stored, when that is committed."""
    leading, ingest = stream.leading, stream.ingest
    if leading is None or ingest is None or stream.is_transferring:
        raise not_leading(stream)
    errand = _Errand(stream, ingest, work, asyncio.get_running_loop().create_future())
    ingest.hand_to_writer(errand)
    outcome = await errand.done
    if isinstance(outcome, NatslogError):
        raise outcome
    if outcome is not None:
        await wait_until_committed(stream, leading, outcome.end)
    return outcome


_Outcome: TypeAlias = Stored | NatslogError | None


@dataclass(frozen=True, slots=True)
class _Errand:
    """The writer's task for one call; `done` is set in the event loop."""

    stream: HostedStream
    ingest: StreamIngest
    work: Callable[[StreamIngest], Stored | None]
    done: asyncio.Future[_Outcome]

    def __call__(self) -> None:
        outcome: _Outcome
        try:
            outcome = self.work(self.ingest)
        except NatslogError as error:
            outcome = error
        except OSError as error:
            outcome = StorageFailed(f"stream {self.stream.name!r}: {error}")
        self.done.get_loop().call_soon_threadsafe(self._finish, outcome)

    def _finish(self, outcome: _Outcome) -> None:
        """Before any later commit, and also if no request waits any more."""
        if isinstance(outcome, Stored) and outcome.is_new:
            self.stream.driver.appended(outcome.end, outcome.start if outcome.is_run else None)
            self.ingest.stats.committed += outcome.end - outcome.start
        if not self.done.done():
            self.done.set_result(outcome)


def _buffers_of(rows: Sequence[Row]) -> RowBuffers:
    columns = [
        pa.array([row.subject for row in rows], pa.string()),
        pa.array([row.key.encode() for row in rows], pa.binary()),
        pa.nulls(len(rows), PAYLOAD_SCHEMA.field("headers").type),
        pa.array([row.value.encode() for row in rows], pa.binary()),
    ]
    return RowBuffers.of(pa.RecordBatch.from_arrays(columns, schema=PAYLOAD_SCHEMA))
