"""Direct requests for one message each, answered in groups.

Theory of operation. Requests of a stream that arrive together are kept as columns, and looked up and answered together.
A group is answered in the event loop, in a fraction of a millisecond, if all that the connection has received before is
committed, the newest offset of each subject is known in memory, and the messages are kept there (`log.kept_messages`).
Requests for which that does not hold are answered in a reader's thread; those that arrive meanwhile are the next group.
So groups are as large as the load requires, and a single request waits for no other.

What a thread has read is kept, and what it has looked up is sent only while this broker leads the stream. Messages
that newer ones hide between look-up and answer are answered: they were visible after the request had arrived.

Bounds: requests that wait count for the limits of `JetStreamApi`, with the bytes of their subjects. Answers are built
and sent in parts of `_PART_BYTES`, or of one answer, and the next part waits until the server accepts more. A thread
reads about `_READ_BYTES` for each part, and one stored batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from natslog.errors import CorruptLog, NatslogError
from natslog.jetstream.direct import Status
from natslog.log import StreamLog
from natslog.log.newest import Texts
from natslog.log_events import event
from natslog.node.broker import Broker
from natslog.node.replicas.stream import HostedStream
from natslog.node.supervisor import Supervisor
from natslog.wire.direct_frames import (
    Answers,
    Limits,
    Longs,
    Requests,
    frames_at_once,
    frames_of,
    most_frame_bytes,
    rendered,
)

logger = logging.getLogger("natslog.jetstream")

_PART_BYTES = 1024 * 1024
_AT_ONCE_BYTES = 512 * 1024
_READ_BYTES = 4 * 1024 * 1024
_LOOKED_UP = 5
"""How often a message is looked up that is removed from the files meanwhile."""
_COLUMNS = ["timestamp", "subject", "headers", "value"]
_ALL_PRESENT = np.ones(0, np.bool_)
_NOTHING = memoryview(b"")
_NOT_KEPT = -2


def _status(code: int, text: str) -> Any:
    return np.frombuffer(Status(code, text).headers, np.uint8)


_NOT_FOUND, _TOO_LARGE = _status(404, "Message Not Found"), _status(500, "Message Exceeds Maximum Payload")
UNAVAILABLE, FAILED = _status(503, "Stream Not Available"), _status(500, "Internal Error")


class Group:
    """Requests to one stream, and which of them are answered.

    Args:
        most_bytes: of an answer.
    """

    def __init__(self, log: StreamLog, stream: str, requests: Requests, most_bytes: int) -> None:
        self._log, self._stream, self._requests = log, stream, requests
        self._limits = Limits(most_bytes, _TOO_LARGE, _NOT_FOUND)
        self._rows = np.arange(len(requests))
        """Of the requests that are not answered yet."""

    def answers_now(self) -> tuple[memoryview, Requests | None]:
        """Those that need no file and no waiting; and the other requests. For the event loop."""
        requests, rows = self._requests, self._rows
        offsets = self._offsets(requests, is_now=True)
        if offsets is None:
            return _NOTHING, requests
        places, data, missing, size_bytes = self._log.kept.find(offsets)
        room_bytes = most_frame_bytes(requests, size_bytes, self._limits)
        if missing == len(requests) or room_bytes > _AT_ONCE_BYTES:
            return _NOTHING, requests
        others = None
        if missing:
            is_known = places[:, 0] != _NOT_KEPT
            others, rows, places = requests.take(rows[~is_known]), rows[is_known], places[is_known]
        return frames_at_once(requests.replies, rows, Answers(places, data), self._limits, room_bytes), others

    def answers(self) -> Iterator[memoryview]:
        """Frames in parts. For a reader's thread."""
        for tried in range(_LOOKED_UP):
            rows = self._rows
            if not len(rows):
                return
            try:
                version = self._log.kept.version
                offsets = self._offsets(self._requests if tried == 0 else self._requests.take(rows))
            except CorruptLog as error:
                yield from self.failures(error)
                return
            assert offsets is not None, "a thread waits for what is unknown"
            places, data, _, _ = self._log.kept.find(offsets)
            is_known = places[:, 0] != _NOT_KEPT
            yield from self._frames(rows[is_known], Answers(places[is_known], data))
            yield from self._read(rows[~is_known], offsets[~is_known], version)
        yield from self.all_with(_NOT_FOUND)

    def failures(self, error: NatslogError) -> Iterator[memoryview]:
        """To all that are not answered yet."""
        self._warn(error)
        return self.all_with(FAILED)

    def all_with(self, status: Any) -> Iterator[memoryview]:
        return self._statuses(self._rows, status)

    def _warn(self, error: NatslogError) -> None:
        logger.warning(
            f"direct requests to stream {self._stream} failed: {error.message}",
            extra=event("jetstream.request_failed", stream=self._stream, reason=error.code),
        )

    def _offsets(self, requests: Requests, *, is_now: bool = False) -> Longs | None:
        """Of the messages that these requests are for; -1 where there is none. None: not all can be told now.

        Raises:
            CorruptLog: a part of the log is damaged.
        """
        log, has_sequences = self._log, bool(requests.sequences.any())
        rows = np.flatnonzero(requests.sequences == 0) if has_sequences else self._rows
        newest: Longs | None = None
        if len(rows):
            subjects = Texts(*(requests.take(rows) if has_sequences else requests).subjects, _ALL_PRESENT)
            newest = log.newest.of_subjects_now(subjects) if is_now else log.newest.of_subjects(subjects)
            if newest is None or not has_sequences:
                return newest
        found = log.newest.visible_now(requests.sequences - 1) if is_now else log.newest.visible(requests.sequences - 1)
        if found is not None and newest is not None:
            found[rows] = newest
        return found

    def _read(self, rows: Longs, offsets: Longs, version: int) -> Iterator[memoryview]:
        """Answers those of which the messages are stored. Args: version: of what is kept, before the look-up."""
        order = np.argsort(offsets, kind="stable")
        rows, offsets = rows[order], offsets[order]
        for chosen, batch in _joined(self._log.reader.rows_at(np.unique(offsets))):
            first, end = np.searchsorted(offsets, chosen[0]), np.searchsorted(offsets, chosen[-1], "right")
            within = slice(int(first), int(end))
            number = np.searchsorted(chosen, offsets[within])
            is_read = chosen[number] == offsets[within]
            asking, number = rows[within][is_read], number[is_read]
            if isinstance(batch, CorruptLog):
                self._warn(batch)
                yield from self._statuses(asking, FAILED)
                continue
            answers = rendered(batch, chosen, self._stream)
            self._log.kept.add(chosen, answers.places, answers.data, version)
            yield from self._frames(asking, Answers(answers.places[number], answers.data))

    def _frames(self, rows: Longs, answers: Answers) -> Iterator[memoryview]:
        self._rows = np.setdiff1d(self._rows, rows, assume_unique=True)
        return frames_of(self._requests.replies, rows, answers, self._limits, _PART_BYTES)

    def _statuses(self, rows: Longs, status: Any) -> Iterator[memoryview]:
        places = np.tile(np.array([0, len(status), len(status)]), (len(rows), 1))
        return self._frames(rows, Answers(places, status))


def _joined(
    parts: Iterator[tuple[Longs, pa.RecordBatch | CorruptLog]],
) -> Iterator[tuple[Longs, pa.RecordBatch | CorruptLog]]:
    """Small batches one after another as one."""
    gathered: list[tuple[Longs, pa.RecordBatch]] = []
    size_bytes = 0
    for offsets, batch in parts:
        if isinstance(batch, CorruptLog):
            yield offsets, batch
            continue
        gathered.append((offsets, batch.select(_COLUMNS)))
        size_bytes += gathered[-1][1].nbytes
        if size_bytes >= _READ_BYTES:
            yield _one(gathered)
            gathered, size_bytes = [], 0
    if gathered:
        yield _one(gathered)


def _one(parts: list[tuple[Longs, pa.RecordBatch]]) -> tuple[Longs, pa.RecordBatch]:
    if len(parts) == 1:
        return parts[0]
    (batch,) = pa.Table.from_batches([batch for _, batch in parts]).combine_chunks().to_batches()
    return np.concatenate([offsets for offsets, _ in parts]), batch


class DirectGroups:
    """Of one broker. In the event loop.

    Args:
        leads: whether this broker leads a stream now.
        room: for what is read at once. `most_answer_bytes`: what the NATS server accepts.

    Attributes:
        count, size_bytes: of the requests that wait. tasks: which answer them.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        leads: Callable[[HostedStream], bool],
        room: asyncio.Semaphore,
        most_answer_bytes: Callable[[], int],
        settled_within_s: float,
    ) -> None:
        self._broker, self._leads, self._room = broker, leads, room
        self._most_answer_bytes, self._settled_within_s = most_answer_bytes, settled_within_s
        self._waiting: dict[HostedStream, list[Requests]] = {}
        self._busy: set[HostedStream] = set()
        self.count = self.size_bytes = 0
        self.tasks = Supervisor(log_failed_answer)

    def add(self, stream: HostedStream, requests: Requests) -> None:
        """They are answered soon; first, what was received with them is passed on."""
        self._waiting.setdefault(stream, []).append(requests)
        self.count, self.size_bytes = self.count + len(requests), self.size_bytes + requests.nbytes
        if stream not in self._busy:
            self._busy.add(stream)
            asyncio.get_running_loop().call_soon(self._answer_soon, stream)

    def _answer_soon(self, stream: HostedStream) -> None:
        requests = self._answered_now(stream, self._taken(stream))
        if requests is None:
            self._busy.discard(stream)
        else:
            self.tasks.start(self._answer_all(stream, requests), f"direct requests to stream {stream.name}")

    def _taken(self, stream: HostedStream) -> Requests:
        """All that wait; they are counted until `_release`."""
        return Requests.joined(self._waiting.pop(stream))

    def _release(self, requests: Requests) -> None:
        self.count, self.size_bytes = self.count - len(requests), self.size_bytes - requests.nbytes

    def _answered_now(self, stream: HostedStream, requests: Requests) -> Requests | None:
        """Answers what can be answered at once. Returns the others; None: there are none."""
        log = stream.log
        if log is None or not stream.is_quiescent or not self._leads(stream):
            return requests
        try:
            frames, others = Group(log, stream.name, requests, self._most_answer_bytes()).answers_now()
            if others is requests or not self._sends_now(stream, frames):
                return requests
        except Exception:  # a bug, or what a thread reports better
            logger.exception(
                f"direct requests to stream {stream.name} could not be answered at once",
                extra=event("jetstream.request_error", stream=stream.name),
            )
            return requests
        self._release(requests)
        if others is not None:
            self.count, self.size_bytes = self.count + len(others), self.size_bytes + others.nbytes
        return others

    @staticmethod
    def _sends_now(stream: HostedStream, frames: bytes | memoryview) -> bool:
        """Sends the frames, if no more than this waits for the server; otherwise False, and nothing is sent."""
        return stream.nats.unsent_bytes <= _PART_BYTES and stream.nats.send_now(frames)

    async def _answer_all(self, stream: HostedStream, requests: Requests | None) -> None:
        """And all that arrive meanwhile."""
        try:
            while requests is not None:
                try:
                    await self._answer(stream, requests)
                finally:
                    self._release(requests)
                requests = None
                while requests is None and stream in self._waiting:
                    requests = self._answered_now(stream, self._taken(stream))
        finally:
            self._busy.discard(stream)
            for left in self._waiting.pop(stream, []):  # cancelled
                self._release(left)

    async def _answer(self, stream: HostedStream, requests: Requests) -> None:
        try:
            log = stream.usable_log()
        except NatslogError as error:
            logger.warning(
                f"direct requests to stream {stream.name} failed: {error.message}",
                extra=event("jetstream.request_failed", stream=stream.name, reason=error.code),
            )
            return
        group = Group(log, stream.name, requests, self._most_answer_bytes())
        try:
            async with asyncio.timeout(self._settled_within_s):
                await stream.quiesced(is_on_its_connection=True)
        except TimeoutError:
            await self._send(stream, group.all_with(UNAVAILABLE))
            return
        except NatslogError as error:
            await self._send(stream, group.failures(error))
            return
        try:
            await self._send(stream, group.answers())
        except NatslogError as error:
            await self._send(stream, group.failures(error))
        except Exception:  # a bug: these requests fail, and nothing else
            logger.exception(
                f"direct requests to stream {stream.name} failed",
                extra=event("jetstream.request_error", stream=stream.name),
            )
            await self._send(stream, group.all_with(FAILED))

    async def _send(self, stream: HostedStream, parts: Iterator[memoryview]) -> None:
        """While this broker leads the stream."""
        loop, has_more = asyncio.get_running_loop(), True
        while has_more:
            async with self._room:
                part, has_more = await loop.run_in_executor(self._broker.readers, _next_part, parts)
            if not self._leads(stream):
                return
            if part:
                await stream.nats.send(part)


def log_failed_answer(task: str, error: BaseException) -> None:
    """A bug: these requests fail, and nothing else."""
    logger.error("%s: no answer: %r", task, error, exc_info=error, extra=event("jetstream.request_error"))


def _next_part(parts: Iterator[memoryview]) -> tuple[bytes, bool]:
    """Some of them together, and whether there may be more."""
    gathered, size_bytes = [], 0
    for part in parts:
        gathered.append(part)
        size_bytes += len(part)
        if size_bytes >= _PART_BYTES // 2:
            return b"".join(gathered), True
    return b"".join(gathered), False
