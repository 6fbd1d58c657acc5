"""Batches of an export, appended by the leader at the offsets that they have.

Theory of operation. While a stream is being imported, no message is taken, so the log ends where the import has come.
A request brings the batches that follow; the stream's writer appends them as a follower appends copies: byte for byte,
but with the epoch of this leader. The request is answered when they are committed.

Invariant. What is there already is passed over, so a request may be repeated, and two imports of one export may run at
the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from natslog.arrow.batch_line import BatchHeader
from natslog.arrow.restamping import restamped
from natslog.errors import CorruptLog, InvalidRequest, NatslogError, OffsetOutOfRange, StorageFailed, StreamConflict
from natslog.log.batch_encoder import EncodedBatch
from natslog.model import Fork
from natslog.node.replicas.direct_append import not_leading, wait_until_committed
from natslog.node.replicas.stream import HostedStream
from natslog.node.writes.stream_ingest import StreamIngest

Batches: TypeAlias = Sequence[tuple[BatchHeader, memoryview]]


async def append_batches(stream: HostedStream, batches: Batches) -> int:
    """Returns where the log ends then, all of it committed but for the part of a run that it may end in.

    Args:
        batches: checked (`arrow.restamping`).

    Raises:
        StreamConflict: the stream is not being imported any more. OffsetOutOfRange: they begin behind the end of the
        log. StorageFull, NoLeader, NotEnoughReplicas, …: repeat the request.
    """
    leading, ingest = stream.leading, stream.ingest
    if leading is None or ingest is None or stream.is_transferring:
        raise not_leading(stream)
    work = _Append(stream, ingest, batches, asyncio.get_running_loop().create_future())
    ingest.hand_to_writer(work)
    outcome = await work.done
    if isinstance(outcome, NatslogError):
        raise stream.error_for_clients(outcome) if isinstance(outcome, StorageFailed | CorruptLog) else outcome
    await wait_until_committed(stream, leading, stream.usable_log().whole_end_offset)
    return outcome


def require_complete(stream: HostedStream, lineage: Sequence[Fork]) -> None:
    """Raises StreamConflict: the log does not end where the export does."""
    log, end = stream.usable_log(), lineage[-1].offset
    if not log.high_watermark == log.log_end_offset == end:
        raise StreamConflict(
            f"stream {stream.name!r} ends at offset {log.log_end_offset}, but the export at {end}: repeat the import; "
            "another one may be in progress",
            stream=stream.name,
            next_offset=log.log_end_offset,
        )


@dataclass(frozen=True, slots=True)
class _Append:
    """The writer's task; `done` is set in the event loop."""

    stream: HostedStream
    ingest: StreamIngest
    batches: Batches
    done: asyncio.Future[int | NatslogError]

    def __call__(self) -> None:
        try:
            outcome: int | NatslogError = self._append()
        except NatslogError as error:
            outcome = error
        except OSError as error:
            outcome = StorageFailed(f"stream {self.stream.name!r}: {error}")
        self.done.get_loop().call_soon_threadsafe(self._finish, outcome)

    def _finish(self, outcome: int | NatslogError) -> None:
        """Before any later append, and also if no request waits any more."""
        if not isinstance(outcome, NatslogError):
            self._announce(outcome)
        if not self.done.done():
            self.done.set_result(outcome)

    def _announce(self, end_offset: int) -> None:
        """What is appended up to this offset; a run when it is complete, so that HW passes it at once."""
        plain_end = 0
        for header, _ in self.batches:
            if header.end_offset > end_offset:
                return
            if header.run is None:
                plain_end = header.end_offset
            elif header.end_offset == header.run.end:
                self._announce_end(plain_end)
                self._announce_end(header.end_offset, is_run=True)
        self._announce_end(plain_end)

    def _announce_end(self, end_offset: int, *, is_run: bool = False) -> None:
        leading = self.stream.leading
        if leading is not None and end_offset > leading.log_end_offset:
            self.stream.driver.appended(end_offset, leading.log_end_offset if is_run else None)

    def _append(self) -> int:
        """Raises the reason why this broker appends nothing now."""
        log = self.stream.usable_log()
        if self.stream.record.import_state != "importing":
            raise StreamConflict(
                f"stream {self.stream.name!r} is not being imported: another import has completed it",
                stream=self.stream.name,
            )
        if (why_not := self.ingest.why_not_write()) is not None:
            raise why_not
        wanted = [(header, message) for header, message in self.batches if header.end_offset > log.log_end_offset]
        if not wanted:
            return log.log_end_offset
        first = wanted[0][0]
        if first.base_offset != log.log_end_offset:
            raise OffsetOutOfRange(
                f"stream {self.stream.name!r} ends at offset {log.log_end_offset}: import the batches from there on, "
                f"not from {first.base_offset}",
                stream=self.stream.name,
                next_offset=log.log_end_offset,
            )
        self._check(wanted, log.newest_timestamp_us)
        log.append_copies([EncodedBatch(*restamped(header, message, log.epoch)) for header, message in wanted])
        return log.log_end_offset

    def _check(self, wanted: Batches, newest_us: int) -> None:
        """Raises InvalidRequest: they cannot be in one log, or in one of this cluster."""
        for header, _ in wanted:
            if header.max_timestamp_us < newest_us:
                raise InvalidRequest(f"the batch at offset {header.base_offset} is older than the one before it")
            newest_us = header.max_timestamp_us
            run = header.run
            if run is not None and not run.start <= header.base_offset < header.end_offset <= run.end:
                raise InvalidRequest(f"the batch at offset {header.base_offset} has the mark of another run")
