"""The same requests to a NATS server with JetStream, and to a plain one with a broker of natslog beside it.

What cannot be equal is not compared: times, names of servers, and what follows "invalid JSON:" (the words of the
parser).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import nats
from nats.errors import NoRespondersError

_TIMES = ("first_ts", "last_ts", "created", "ts", "time")
_NO_TIME = "0001-01-01T00:00:00Z"
_INVALID_JSON = "invalid JSON: "
_ANSWERS_WITHIN_S = 5.0


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


Step = Api | Publish | Send | Direct


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
        elif name == "cluster":
            found[name] = "a cluster"
        elif name == "description" and isinstance(one, str) and one.startswith(_INVALID_JSON):
            found[name] = _INVALID_JSON
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

        async def played(url: str) -> list[Any]:
            connection = await nats.connect(url)
            try:
                return [await answer_of(connection, step) for step in steps]
            finally:
                await connection.close()

        async def both() -> tuple[list[Any], list[Any]]:
            first, second = await asyncio.gather(*(played(url) for url in self.urls))
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
