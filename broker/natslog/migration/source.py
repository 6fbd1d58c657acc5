"""A stream of a NATS server with JetStream, as its API shows it.

Source: nats-server, `server/jetstream_api.go`.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import msgspec

from natslog.errors import InvalidRequest, MigrationFailed, NatsUnavailable, StreamNotFound
from natslog.times import parse_timestamp_us
from natslog.wire.frames import Frames
from natslog.wire.layout import HEADER_LEN, PAYLOAD, PAYLOAD_LEN, SUBJECT, SUBJECT_LEN
from natslog.wire.link import NatsLink

INBOX = "_INBOX.natslog."
_NOT_IN_NAMES = frozenset(" .*>/\\")
_TIMEOUT_S = 5.0
_TRIES = 4
_RETRY_S = 0.5
_STREAM_NOT_FOUND = 10059
_TRANSIENT = frozenset((10008, 10023, 10076))  # unavailable, insufficient resources, JetStream not enabled (starting)


class SourceState(msgspec.Struct, frozen=True):
    """`deleted`: sequences between the first and the last message that have none; only if they were asked for."""

    messages: int = 0
    first_seq: int = 0
    last_seq: int = 0
    deleted: tuple[int, ...] | None = None


class SourceInfo(msgspec.Struct, frozen=True):
    """`config`: as JetStream states it."""

    config: dict[str, Any]
    created: str
    state: SourceState

    @property
    def id(self) -> str:
        """Names this stream, and no other that has its name later, in the lineage of the natslog stream."""
        return f"jetstream:{self.config['name']}:{self.created}"

    @property
    def subjects(self) -> tuple[str, ...]:
        return tuple(self.config.get("subjects") or ())

    @property
    def is_sealed(self) -> bool:
        return bool(self.config.get("sealed"))

    @property
    def first_offset(self) -> int:
        """Of the first message that it has, or will have."""
        return max(0, self.state.first_seq - 1) if self.state.messages else self.state.last_seq


class _Problem(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Reply(msgspec.Struct, frozen=True):
    error: _Problem | None = None


class _Consumer(msgspec.Struct, frozen=True):
    config: dict[str, Any]
    created: str
    ack_floor: dict[str, Any]


class _ConsumerPage(msgspec.Struct, frozen=True):
    total: int = 0
    consumers: tuple[_Consumer, ...] | None = None


class JetStreamSource:
    """Requests about one stream. `open` it first.

    Args:
        prefix: of the subjects of the API.
    """

    def __init__(self, link: NatsLink, stream: str, prefix: str) -> None:
        """Raises InvalidRequest: a stream of JetStream cannot have this name."""
        if not stream or not stream.isprintable() or _NOT_IN_NAMES & set(stream):
            raise InvalidRequest(f"{stream[:80]!r} is no name of a stream of JetStream")
        self.link, self.stream, self.prefix = link, stream, prefix
        self._inbox = f"{INBOX}{secrets.token_hex(8)}"
        self._waiting: dict[bytes, asyncio.Future[tuple[bytes, bytes]]] = {}

    async def open(self) -> None:
        await self.link.attach((f"{self._inbox}.*",), self._receive)

    def _receive(self, frames: Frames) -> None:
        for row in frames.rows:
            subject = frames.buffer[row[SUBJECT] : row[SUBJECT] + row[SUBJECT_LEN]].tobytes()
            waiting = self._waiting.pop(subject.rpartition(b".")[2], None)
            if waiting is not None and not waiting.done():
                headers = frames.buffer[row[PAYLOAD] - row[HEADER_LEN] : row[PAYLOAD]].tobytes()
                waiting.set_result((headers, frames.buffer[row[PAYLOAD] : row[PAYLOAD] + row[PAYLOAD_LEN]].tobytes()))

    async def request(self, call: str, body: dict[str, Any] | None = None) -> bytes:
        """The answer to a request, which may be repeated while JetStream is not available.

        Raises:
            StreamNotFound, MigrationFailed: JetStream refuses it. NatsUnavailable: there is no answer.
        """
        problem: Exception | None = None
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(_RETRY_S)
            try:
                answer = await self._ask(f"{self.prefix}.{call}", b"" if body is None else msgspec.json.encode(body))
            except NatsUnavailable as error:
                problem = error
                continue
            refusal = _decoded(answer, _Reply).error
            if refusal is None:
                return answer
            problem = self._refused(call, refusal)
            if refusal.err_code not in _TRANSIENT:
                break
        assert problem is not None, "there was no answer without an error"
        raise problem

    async def _ask(self, subject: str, payload: bytes) -> bytes:
        """Raises NatsUnavailable."""
        token = secrets.token_hex(6).encode()
        answer: asyncio.Future[tuple[bytes, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[token] = answer
        where = self.link.shown_url
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reply = f"{self._inbox}.{token.decode()}"
                if not self.link.send_now(f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n"):
                    raise NatsUnavailable(f"the connection to NATS at {where} is lost: repeat the import", url=where)
                headers, data = await answer
        except TimeoutError:
            raise NatsUnavailable(
                f"JetStream at {where} does not answer {subject}: check that it is enabled there for this account, and "
                "that the NATS user may publish to this subject",
                url=where,
            ) from None
        finally:
            self._waiting.pop(token, None)
        if headers.startswith(b"NATS/1.0 503"):
            raise NatsUnavailable(
                f"nothing answers {subject} at {where}: JetStream is not enabled there for this account", url=where
            )
        return data

    def _refused(self, call: str, problem: _Problem) -> StreamNotFound | MigrationFailed:
        if problem.err_code == _STREAM_NOT_FOUND:
            return StreamNotFound(
                f"JetStream at {self.link.shown_url} has no stream {self.stream!r}",
                stream=self.stream,
                server=self.link.shown_url,
            )
        return MigrationFailed(
            f"JetStream at {self.link.shown_url} refuses {call}: {problem.description} ({problem.err_code})"
        )

    async def info(self, *, deleted: bool = False) -> SourceInfo:
        """Args: deleted: whether `deleted` of the state is requested. Raises as `request`."""
        body = {"deleted_details": True} if deleted else None
        info: SourceInfo = _decoded(await self.request(f"STREAM.INFO.{self.stream}", body), SourceInfo)
        return info

    async def consumers(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The durable consumers, as the client imports them, and names of the others."""
        durable: list[dict[str, Any]] = []
        others: list[str] = []
        seen = 0
        while True:
            answer = await self.request(f"CONSUMER.LIST.{self.stream}", {"offset": seen})
            page = _decoded(answer, _ConsumerPage)
            found = page.consumers or ()
            seen += len(found)
            for one in found:
                if not one.config.get("durable_name"):
                    others.append(str(one.config.get("name", "")))
                    continue
                floor = one.ack_floor.get("consumer_seq", 0), one.ack_floor.get("stream_seq", 0)
                created_us = parse_timestamp_us(one.created, "created")
                durable.append({"config": one.config, "created_us": created_us, "ack_floor": floor})
            if not found or seen >= page.total:
                return durable, [name for name in others if name]


def _decoded(data: bytes, kind: type[Any]) -> Any:
    """Raises MigrationFailed."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MigrationFailed(f"the answer of the JetStream API cannot be read: {error}") from error
