"""A broker publishes to NATS itself, on behalf of a request, and waits for the acks of the streams.

Each message has a reply subject of its own, with a number that cannot be guessed: who receives a message could forge
its ack, as everywhere in NATS, but not that of another one. No two numbers are consecutive, because a stream may answer
such messages with one ack (ADR 21). What comes as an ack is foreign text: whatever it is, it is at most an error of its
own message.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from natslog.errors import NatsUnavailable
from natslog.wire.frames import Frames
from natslog.wire.lanes import NatsLanes
from natslog.wire.layout import PAYLOAD, PAYLOAD_LEN, SUBJECT, SUBJECT_LEN
from natslog.wire.link import NatsLink
from natslog.wire.outgoing import BY_HEADER, BY_REPLY, ack_header_bytes
from natslog.wire.outgoing_rows import Rows, check_rows

_ACK_WITHIN_S = 5.0
_MOST_ACK_BYTES = 4096
_MOST_OFFSET = 2**62


class _Error(msgspec.Struct):
    description: str


class _Ack(msgspec.Struct):
    stream: str | None = None
    seq: int = 0
    duplicate: bool = False
    error: _Error | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """What the stream answered. `offset`: where it is stored. `problem`: why it is not, or why that is not known."""

    offset: int | None = None
    duplicate: bool = False
    problem: str = ""


@dataclass(slots=True)
class _Waiting:
    stream: str
    outcome: asyncio.Future[Stored]


class Publishing:
    """Of one broker; the event loop's."""

    def __init__(self, nats: NatsLanes) -> None:
        self._nats = nats
        self._inbox = f"_INBOX.{secrets.token_hex(11)}"
        self._waiting: dict[int, _Waiting] = {}
        self._attaching = asyncio.Lock()
        self._is_attached = False

    @property
    def _link(self) -> NatsLink:
        return self._nats.lane("")

    @property
    def most_bytes(self) -> int:
        """The largest message, with its own headers, that the server accepts."""
        return self.most_bytes_of([])

    def most_bytes_of(self, limits: Sequence[int]) -> int:
        """The largest message that also streams with these limits (`max_message_bytes`) accept."""
        return min([self._link.max_payload_bytes, *limits]) - ack_header_bytes(self._inbox)

    async def publish(self, rows: Rows, streams: Sequence[str]) -> list[Stored]:
        """Publishes the rows, and returns what became of each, in their order.

        Args:
            streams: of each row, the stream whose ack counts.

        Raises:
            PublishFailed: a row that NATS would not accept; none was sent. NatsUnavailable: no server is connected.
        """
        check_rows(rows, self.most_bytes)
        await self._attach()
        loop = asyncio.get_running_loop()
        numbers = [2 * secrets.randbits(61) for _ in streams]
        waiting = [_Waiting(stream, loop.create_future()) for stream in streams]
        self._waiting.update(zip(numbers, waiting, strict=True))
        try:
            if not await self._link.send(rows.frames(self._inbox, np.array(numbers), BY_REPLY | BY_HEADER)):
                raise NatsUnavailable(
                    f"NATS at {self._link.shown_url} is not connected: repeat the request when it is",
                    url=self._link.shown_url,
                )
            outcomes = [one.outcome for one in waiting]
            await asyncio.wait(outcomes, timeout=_ACK_WITHIN_S)
            return [one.outcome.result() if one.outcome.done() else _unacked(one.stream) for one in waiting]
        finally:
            for number in numbers:
                del self._waiting[number]

    async def _attach(self) -> None:
        async with self._attaching:
            if not self._is_attached:
                await self._link.attach((f"{self._inbox}.*",), self._receive)
                self._is_attached = True

    def _receive(self, frames: Frames) -> None:
        for row in frames.rows.tolist():
            subject = bytes(frames.buffer[row[SUBJECT] : row[SUBJECT] + row[SUBJECT_LEN]]).decode("ascii", "replace")
            number = subject.rpartition("~")[2]
            waiting = self._waiting.get(int(number)) if number.isdecimal() else None
            if waiting is None or waiting.outcome.done():
                continue
            answer = bytes(frames.buffer[row[PAYLOAD] : row[PAYLOAD] + row[PAYLOAD_LEN]])
            if (found := _outcome(answer, waiting.stream)) is not None:
                waiting.outcome.set_result(found)


def _outcome(answer: bytes, stream: str) -> Stored | None:
    """None: another stream answered, which also records the subject."""
    if not answer:
        return Stored(problem=f"no stream receives messages on this subject now: stream {stream!r} has no leader")
    try:
        ack = msgspec.json.decode(answer[:_MOST_ACK_BYTES], type=_Ack)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return Stored(problem=f"the answer is not an ack: {answer[:100]!r}")
    if ack.stream not in (None, stream):
        return None
    if ack.error is not None:
        return Stored(problem=ack.error.description[:1000])
    if not 0 < ack.seq <= _MOST_OFFSET:
        return Stored(problem=f"the answer is not an ack: {answer[:100]!r}")
    return Stored(offset=ack.seq - 1, duplicate=ack.duplicate)


def _unacked(stream: str) -> Stored:
    return Stored(
        problem=f"stream {stream!r} did not ack it within {_ACK_WITHIN_S:.0f} s; it may be stored all the same"
    )
