"""Steps that receive: pulls, acks, subscriptions of push consumers, and waiting until both servers agree.

No step sleeps for a fixed time. What takes effect after its answer (an ack without a reply, a message that is counted,
a timer that redelivers) is followed by `Until`, which waits for a value, or `Agreed`, which waits until both servers
give the same answer.

What cannot be equal is masked: the time in the reply subject of a message, the random part of flow control subjects,
names that the server generates, and how many heartbeats there are.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from tests.harness import flushed
from tests.jetstream.both import Api, Receiving, Session

_POLL_S = 0.002
_AFTER_FAILURE_S = 0.1
"""A run whose answers differ already does not wait again and again."""
_ID_CHARS = 22
_ACK_REPLY = re.compile(r"(\$JS\.ACK\..*)\.\d{16,}\.(\d+)$")
_PARSER = re.compile(r"^Bad Request - (?!heartbeat|Not a |Priority|Invalid )")
"""The words of the parser, which are not compared."""
_FLOW_REPLY = re.compile(r"(\$JS\.FC\..*)\.[^.]+$")

Received = tuple[str, str, dict[str, str], bytes]
"""Subject, reply subject, headers (a status is `Status` and `Description`) and payload."""


@dataclass(frozen=True, slots=True)
class Pull(Receiving):
    """A request for messages, and all that comes until `want` messages or a status that ends it.

    Args:
        body: as JSON; bytes as they are.
        want: None for the batch that `body` states.
    """

    stream: str
    consumer: str
    body: Any = b""
    want: int | None = None
    headers: dict[str, str] | None = None

    async def answer(self, session: Session) -> list[Received]:
        name = f"pull {len(session.mailboxes)}"
        await PullLater(name, self.stream, self.consumer, self.body, self.headers).answer(session)
        want = self.want
        if want is None:
            want = self.body.get("batch", 1) if isinstance(self.body, dict) else 1
        found = await Collect(name, want).answer(session)
        await Unsubscribe(name).answer(session)
        return found


@dataclass(frozen=True, slots=True)
class PullLater(Receiving):
    """A request for messages that `Collect` of the same name receives. It is processed when this step ends."""

    name: str
    stream: str
    consumer: str
    body: Any = b""
    headers: dict[str, str] | None = None

    async def answer(self, session: Session) -> None:
        inbox = session.connection.new_inbox()
        session.mailboxes[self.name] = mailbox = _Mailbox(session, inbox)
        await mailbox.subscribe(inbox)
        subject = session.actual(f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{self.consumer}")
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        await session.connection.publish(subject, body, reply=inbox, headers=self.headers)
        await flushed(session.connection)


@dataclass(frozen=True, slots=True)
class Collect(Receiving):
    """What came for a `PullLater` or `Subscribe`: up to `want` messages, or until a status that ends the request.

    Heartbeats and flow control are left to their own steps.

    Args:
        is_sorted: by payload, where the order of arrival is not determined.
    """

    name: str
    want: int = 1
    is_sorted: bool = False

    async def answer(self, session: Session) -> list[Received]:
        found = await session.mailboxes[self.name].take(self.want)
        if self.is_sorted:
            found.sort(key=lambda one: one[3])
        session.deliveries += [reply for _, reply, _, _ in found if reply.startswith("$JS.ACK.")]
        return [_masked(one, session) for one in found]


@dataclass(frozen=True, slots=True)
class Heartbeat(Receiving):
    """The next heartbeat of a subscription or pull that comes from now on."""

    name: str

    async def answer(self, session: Session) -> Received | str:
        mailbox = session.mailboxes[self.name]
        mailbox.forget_heartbeats()
        return _masked(await mailbox.heartbeat(), session)


@dataclass(frozen=True, slots=True)
class AnswerFlowControl(Receiving):
    """Waits for a request of flow control, and answers it by an empty message."""

    name: str

    async def answer(self, session: Session) -> Received | str:
        request = await session.mailboxes[self.name].flow_control()
        await session.connection.publish(request[1], b"")
        await flushed(session.connection)
        return _masked(request, session)


@dataclass(frozen=True, slots=True)
class Subscribe(Receiving):
    """A subscription, whose messages `Collect` receives. Several may share a name: members of a queue group."""

    name: str
    subject: str
    queue: str = ""

    async def answer(self, session: Session) -> None:
        if self.name not in session.mailboxes:
            session.mailboxes[self.name] = _Mailbox(session, None)
        await session.mailboxes[self.name].subscribe(self.subject, self.queue)


@dataclass(frozen=True, slots=True)
class Advisories(Receiving):
    """So many advisories that a subscription has received: subject, reply subject and fields, sorted. The ids and times
    are checked, and masked.
    """

    name: str
    want: int

    async def answer(self, session: Session) -> list[tuple[str, str, dict[str, Any]]]:
        found = []
        for subject, reply, headers, payload in await session.mailboxes[self.name].take(self.want):
            body = json.loads(session.masked(payload.decode()))
            assert not headers
            assert len(body["id"]) == _ID_CHARS
            assert body.keys() >= {"id", "timestamp"}
            datetime.fromisoformat(body["timestamp"])
            found.append((session.masked(subject), reply, body | {"id": "an id", "timestamp": "a time"}))
        return sorted(found, key=repr)


@dataclass(frozen=True, slots=True)
class Unsubscribe(Receiving):
    """All subscriptions of this name end; what they have received stays."""

    name: str

    async def answer(self, session: Session) -> None:
        await session.mailboxes[self.name].unsubscribe()


@dataclass(frozen=True, slots=True)
class Ack(Receiving):
    """An ack of a message that was received.

    Args:
        at: index into all messages that this run has received from consumers; or the whole subject.
        is_request: with a reply subject; the answer is the payload of the reply.
    """

    at: int | str = -1
    payload: bytes = b"+ACK"
    is_request: bool = True

    async def answer(self, session: Session) -> bytes | str | None:
        if (subject := _subject(session, self.at)) is None:
            return "no such message"
        if not self.is_request:
            await session.connection.publish(subject, self.payload)
            return None
        try:
            reply = await session.connection.request(subject, self.payload, timeout=session.patience_s)
        except NoRespondersError:
            return "no answer"
        return bytes(reply.data)


@dataclass(frozen=True, slots=True)
class Next(Receiving):
    """`+NXT`: an ack that is a pull as well. `body`: as JSON; bytes as they are."""

    at: int = -1
    body: Any = b""
    want: int = 1

    async def answer(self, session: Session) -> list[Received]:
        if (subject := _subject(session, self.at)) is None:
            return []
        name = f"next {len(session.mailboxes)}"
        inbox = session.connection.new_inbox()
        session.mailboxes[name] = mailbox = _Mailbox(session, inbox)
        await mailbox.subscribe(inbox)
        body = self.body if isinstance(self.body, bytes) else b" " + json.dumps(self.body).encode()
        await session.connection.publish(subject, b"+NXT" + body, reply=inbox)
        found = await Collect(name, self.want).answer(session)
        await mailbox.unsubscribe()
        return found


@dataclass(frozen=True, slots=True)
class Until(Receiving):
    """Repeats a request until a field of its answer has a value, and gives the last answer.

    Args:
        path: names, separated by dots. A field that is missing has the value None.
    """

    call: str
    path: str
    value: Any
    body: Any = b""

    async def answer(self, session: Session) -> Any:
        deadline = time.monotonic() + session.patience_s
        while True:
            found = await session.answer(Api(self.call, self.body))
            if _field(found, self.path) == self.value:
                return found
            if time.monotonic() > deadline:
                session.patience_s = _AFTER_FAILURE_S
                return found
            await asyncio.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class Agreed(Receiving):
    """Repeats a request to both servers until their answers are equal, twice in a row: what they have accepted has
    taken effect.
    """

    call: str
    body: Any = b""

    async def answer(self, session: Session) -> Any:
        deadline = time.monotonic() + session.patience_s
        before = None
        while True:
            found = await session.answer(Api(self.call, self.body))
            is_late = time.monotonic() > deadline
            other, other_is_late = await session.exchange((found, is_late))
            if found == other == before:
                return found
            if is_late or other_is_late:
                session.patience_s = _AFTER_FAILURE_S
                return found
            before = found if found == other else None
            await asyncio.sleep(_POLL_S)


class _Mailbox:
    """What the subscriptions of one name have received. `inbox`: shown as "inbox"."""

    def __init__(self, session: Session, inbox: str | None) -> None:
        self._session = session
        self._inbox = inbox
        self._subscriptions: list[Any] = []
        self._messages: asyncio.Queue[Received] = asyncio.Queue()
        self._heartbeats: asyncio.Queue[Received] = asyncio.Queue()
        self._flow_control: asyncio.Queue[Received] = asyncio.Queue()

    async def subscribe(self, subject: str, queue: str = "") -> None:
        connection = self._session.connection
        self._subscriptions.append(await connection.subscribe(subject, queue=queue, cb=self._receive))
        await flushed(connection)

    async def unsubscribe(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions.clear()
        await flushed(self._session.connection)

    async def _receive(self, message: Any) -> None:
        headers = dict(message.headers or {})
        subject = "inbox" if message.subject == self._inbox else message.subject
        received = (subject, message.reply, headers, bytes(message.data))
        match headers.get("Status"), headers.get("Description"):
            case "100", "Idle Heartbeat":
                self._heartbeats.put_nowait(received)
            case "100", "FlowControl Request":
                self._flow_control.put_nowait(received)
            case _:
                self._messages.put_nowait(received)

    async def take(self, want: int) -> list[Received]:
        found: list[Received] = []
        while len(found) < want and not (found and "Status" in found[-1][2]):
            try:
                found.append(await asyncio.wait_for(self._messages.get(), self._session.patience_s))
            except TimeoutError:
                break
        return found

    def forget_heartbeats(self) -> None:
        while not self._heartbeats.empty():
            self._heartbeats.get_nowait()

    async def heartbeat(self) -> Received:
        return await _from(self._heartbeats, self._session.patience_s)

    async def flow_control(self) -> Received:
        return await _from(self._flow_control, self._session.patience_s)


async def _from(queue: asyncio.Queue[Received], within_s: float) -> Received:
    try:
        return await asyncio.wait_for(queue.get(), within_s)
    except TimeoutError:
        raise NatsTimeoutError from None


def _subject(session: Session, at: int | str) -> str | None:
    """None: there were not so many messages."""
    if isinstance(at, str):
        return session.actual(at)
    return session.deliveries[at] if -len(session.deliveries) <= at < len(session.deliveries) else None


def _masked(received: Received, session: Session) -> Received:
    """Without what differs between two servers."""
    subject, reply, headers, payload = received
    headers = {str.__str__(name): _FLOW_REPLY.sub(r"\1.random", text) for name, text in headers.items()}
    if headers.get("Status") == "503":  # there is no responder; a server adds the subject, a client's reply does not
        headers = {"Status": "503"}
    if _PARSER.search(description := headers.get("Description", "")):
        headers["Description"] = description.partition(" - ")[0]
    reply = _FLOW_REPLY.sub(r"\1.random", _ACK_REPLY.sub(r"\1.time.\2", session.masked(reply)))
    if reply.startswith("_INBOX."):
        reply = "inbox"
    return subject, reply, {name: session.masked(text) for name, text in headers.items()}, payload


def _field(answer: Any, path: str) -> Any:
    for name in path.split("."):
        answer = answer.get(name) if isinstance(answer, dict) else None
    return answer
