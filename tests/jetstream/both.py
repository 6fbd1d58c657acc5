"""The same requests to a NATS server with JetStream, and to a plain one with a broker of natslog beside it.

Steps that receive messages of consumers are in `consuming.py`.

What cannot be equal is not compared: times, names of servers, and what follows "invalid JSON:" (the words of the
parser).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import nats
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

_TIMES = ("first_ts", "last_ts", "created", "ts", "time", "last_active", "pinned_ts", "pause_remaining")
_NO_TIME = "0001-01-01T00:00:00Z"
_INVALID_JSON = "invalid JSON: "
_OVERLAP = "subjects overlap with an existing stream"
_ANSWERS_WITHIN_S = 30.0
_CONSUMER_CREATED = "consumer_create_response"
_GENERATED_NAME = re.compile("^[A-Za-z0-9]{8}$")
"""Tests give no consumer a name of this length."""


@dataclass(frozen=True, slots=True)
class Api:
    """A request to `$JS.API.<call>`. `body`: as JSON; bytes as they are."""

    call: str
    body: Any = b""
    headers: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Publish:
    """A message, whose ack is waited for."""

    subject: str
    value: bytes = b"x"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Send:
    """A message without a reply subject."""

    subject: str
    value: bytes = b"x"


@dataclass(frozen=True, slots=True)
class Direct:
    """A direct request, `$JS.API.DIRECT.GET.<call>`; all messages of its answer."""

    call: str
    body: Any = b""
    headers: dict[str, str] | None = None


class Receiving:
    """A step that uses what the connection has received before: see `consuming.py`."""

    async def answer(self, session: Session) -> Any:
        raise NotImplementedError


Step = Api | Publish | Send | Direct | Receiving


class Meeting:
    """Where both sides exchange values, so that one waits for the other."""

    def __init__(self) -> None:
        self._for: tuple[asyncio.Queue[Any], asyncio.Queue[Any]] = (asyncio.Queue(), asyncio.Queue())

    async def exchange(self, side: int, value: Any) -> Any:
        self._for[1 - side].put_nowait(value)
        return await self._for[side].get()


class Session:
    """One connection, on which steps are played one after the other. `side`: 0 is JetStream, 1 is natslog.

    Names that the server has generated are `GENERATED0`, `GENERATED1`, … in steps and in answers.
    """

    def __init__(self, connection: Any, side: int, meeting: Meeting) -> None:
        self.connection = connection
        self.deliveries: list[str] = []
        """Reply subjects of all messages of consumers that a step has received, which an ack names by its index."""
        self.mailboxes: dict[str, Any] = {}
        self.patience_s = _ANSWERS_WITHIN_S
        """How long a step waits for what does not come."""
        self._generated: list[str] = []
        self._side = side
        self._meeting = meeting

    async def exchange(self, value: Any) -> Any:
        """That of the other side, which plays the same step."""
        return await self._meeting.exchange(self._side, value)

    async def answer(self, step: Step) -> Any:
        try:
            if isinstance(step, Receiving):
                return await step.answer(self)
            if not isinstance(step, Api):
                return await answer_of(self.connection, step)
            return self._masked(await answer_of(self.connection, replace(step, call=self.actual(step.call))))
        except NatsTimeoutError:
            return "no answer in time"

    def actual(self, text: str) -> str:
        """With generated names in place of `GENERATED0`."""
        for at, name in enumerate(self._generated):
            text = text.replace(f"GENERATED{at}", name)
        return text

    def masked(self, text: str) -> str:
        """The inverse of `actual`."""
        for at, name in enumerate(self._generated):
            text = text.replace(name, f"GENERATED{at}")
        return text

    def _masked(self, answer: Any) -> Any:
        if isinstance(answer, dict) and "config" in answer and _CONSUMER_CREATED in answer["type"]:
            self._generated += _GENERATED_NAME.findall(answer["name"])
        return json.loads(self.masked(json.dumps(answer)))


def comparable(value: Any) -> Any:
    """Without what differs between two servers."""
    if isinstance(value, list):
        return [comparable(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.get("deleted") == [0]:  # the server lists sequence 0 of a stream that never had a message
        value = {name: one for name, one in value.items() if name not in ("deleted", "num_deleted")}
    if (value.get("messages"), value.get("last_seq")) == (0, 0):  # there it is 1 after a purge
        value = value | {"first_seq": 0}
    found = {}
    for name, one in value.items():
        if name in _TIMES and one != _NO_TIME:
            found[name] = "a time"
        elif name == "cluster" and "ack_floor" in value:
            continue  # a single server states it for streams, and not for consumers
        elif name == "cluster":
            found[name] = "a cluster"
        elif name == "description" and isinstance(one, str) and one.startswith(_INVALID_JSON):
            found[name] = _INVALID_JSON
        elif name == "description" and isinstance(one, str) and one.startswith(_OVERLAP):
            found[name] = _OVERLAP  # natslog names the other stream
        elif name == "api":
            found[name] = {"level": one["level"]}
        else:
            found[name] = comparable(one)
    return found


async def answer_of(connection: Any, step: Step) -> Any:
    """What the server answers, as far as it can be compared."""
    try:
        match step:
            case Api(call, body, headers):
                payload = body if isinstance(body, bytes) else json.dumps(body).encode()
                asking = connection.request(f"$JS.API.{call}", payload, timeout=_ANSWERS_WITHIN_S, headers=headers)
                return comparable(json.loads((await asking).data))
            case Publish(subject, value, headers):
                asking = connection.request(subject, value, timeout=_ANSWERS_WITHIN_S, headers=headers or None)
                return comparable(json.loads((await asking).data))
            case Send(subject, value):
                await connection.publish(subject, value)
                return None
            case Direct():
                return await _messages_of(connection, step)
            case Receiving():
                raise AssertionError("played by a session")
    except NoRespondersError:
        return "no answer"


async def _messages_of(connection: Any, step: Direct) -> list[tuple[dict[str, str], bytes]]:
    """Headers and payload of each message that answers; the last one has a status, if there are several."""
    inbox = connection.new_inbox()
    subscription = await connection.subscribe(inbox)
    payload = step.body if isinstance(step.body, bytes) else json.dumps(step.body).encode()
    is_for_several = isinstance(step.body, dict) and bool({"batch", "multi_last"} & set(step.body))
    await connection.publish(f"$JS.API.DIRECT.GET.{step.call}", payload, reply=inbox, headers=step.headers)
    found: list[tuple[dict[str, str], bytes]] = []
    while not found or (is_for_several and "Status" not in found[-1][0]):
        message = await subscription.next_msg(timeout=_ANSWERS_WITHIN_S)
        headers = dict(message.headers or {})
        if "Nats-Time-Stamp" in headers:
            headers["Nats-Time-Stamp"] = "a time"
        found.append((headers, message.data))
    await subscription.unsubscribe()
    return found


class Both:
    """Both servers. Args: URLs of NATS servers."""

    def __init__(self, jetstream_url: str, natslog_url: str) -> None:
        self.urls = (jetstream_url, natslog_url)

    def compare(self, steps: Sequence[Step]) -> list[Any]:
        """The answers to these steps, one after the other: they are equal."""
        expected, found = self.answers(steps)
        for at, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert other == one, f"step {at} of {len(steps)}, {steps[at]}:\nJetStream {one}\nnatslog   {other}"
        return found

    def answers(self, steps: Sequence[Step]) -> tuple[list[Any], list[Any]]:
        """Of JetStream, and of natslog."""

        async def played(side: int, meeting: Meeting) -> list[Any]:
            connection = await nats.connect(self.urls[side])
            session = Session(connection, side, meeting)
            try:
                return [await session.answer(step) for step in steps]
            finally:
                await connection.close()

        async def both() -> tuple[list[Any], list[Any]]:
            meeting = Meeting()
            first, second = await asyncio.gather(played(0, meeting), played(1, meeting))
            return first, second

        return asyncio.run(both())

    def delete_all(self) -> None:
        """All streams of both."""

        async def emptied(url: str) -> None:
            connection = await nats.connect(url)
            try:
                while names := (await answer_of(connection, Api("STREAM.NAMES")))["streams"]:
                    for name in names:
                        await answer_of(connection, Api(f"STREAM.DELETE.{name}"))
            finally:
                await connection.close()

        async def all_of_them() -> None:
            await asyncio.gather(*(emptied(url) for url in self.urls))

        asyncio.run(all_of_them())
