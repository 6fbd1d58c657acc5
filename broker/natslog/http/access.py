"""Access to the HTTP API: what a call needs, and how a handler finds out what the identity may do.

Theory of operation. Each row of `table` has an `Access`. `gate` compares it with the rules before the handler runs. A
handler that depends on more (the subjects of a limited identity, the streams in a body) asks `rights_of(request)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET

from natslog.errors import Forbidden, InvalidRequest, NatslogError
from natslog.http.context import broker_of
from natslog.model import StreamRecord
from natslog.node.broker import Broker
from natslog.security.decisions import Patterns
from natslog.security.guard import Guard, Rights
from natslog.security.limits import Limits
from natslog.security.records import Action

Kind = Literal["open", "peers", "credentials", "cluster", "stream", "checked"]
_NAMES_AT_ONCE = 200
_MOST_UNKNOWN = 1_000


@dataclass(frozen=True, slots=True)
class Access:
    """What a call needs.

    Attributes:
        kind: `open`: nothing. `peers`: the handshake of brokers, which the handler does. `credentials`: any identity
            that may do something. `cluster`: `action` on everything. `stream`: `action` on a stream; without an action,
            any one. `checked`: credentials, and the handler checks what the body or query names.
        parameter: of the path, with the name of the stream. `changes`: whether it changes anything, so that it is in
            the audit log.
    """

    kind: Kind
    action: Action | None = None
    parameter: str = "name"
    changes: bool | None = None


# ---- a request in progress ----


class Pending:
    """A request in progress. `still_holds` raises why it would be refused now; `is_signed_in`: its session, if it has
    one, goes on; `ended_by`: why it was cancelled.
    """

    def __init__(self, broker: Broker, rights: Rights, task: asyncio.Task[Any]) -> None:
        self._broker, self.rights, self.task = broker, rights, task
        self.still_holds: Callable[[], None] = lambda: None
        self.check: Callable[[], None] = lambda: None
        self.is_signed_in: Callable[[], bool] = lambda: True
        self.ended_by: NatslogError | None = None

    def stream(self, name: str) -> StreamRecord | None:
        found: StreamRecord | None = self._broker.state.streams.get(name)
        return found


# ---- what handlers ask ----

RIGHTS = web.RequestKey("rights", Rights)
PENDING = web.RequestKey("pending", object)
GUARD: web.AppKey[Guard] = web.AppKey("guard", Guard)
LIMITS: web.AppKey[Limits] = web.AppKey("limits", Limits)
PAID_BYTES: web.RequestKey[int] = web.RequestKey("paid_bytes", int)
"""Of the body, what was charged to the identity while it was received."""
AUDITED: web.RequestKey[dict[str, object]] = web.RequestKey("audited", dict)
"""Further facts of a change for the audit log."""


def rights_of(request: web.Request) -> Rights:
    """What the identity behind the request may do."""
    return request[RIGHTS]


def limits_of(request: web.Request, action: Action, record: StreamRecord) -> Patterns | None:
    """The subjects of the stream on which the request may do this; None: all of them.

    While the request is in progress, they must stay the same.

    Raises:
        Forbidden, Unauthorized: it may not do this to the stream.
    """
    rights, name, recorded = rights_of(request), record.name, record.recorded_subjects
    patterns = rights.limits(action, name, recorded)
    pending = request.get(PENDING)
    if isinstance(pending, Pending):
        pending.still_holds = lambda: _limits_are(pending, patterns, action, name)
    return patterns


def _limits_are(pending: Pending, patterns: Patterns | None, action: Action, name: str) -> None:
    record = pending.stream(name)
    if record is not None and pending.rights.limits(action, name, record.recorded_subjects) != patterns:
        raise Forbidden("the access rules have changed since this request came: repeat it")


async def require_readable(request: web.Request, names: Iterable[str]) -> None:
    """Streams that a body names. Other requests have their turn meanwhile.

    Raises:
        InvalidRequest: too many of them do not exist. Forbidden, Unauthorized: one of them may not be read.
    """
    broker, rights, unknown = broker_of(request), rights_of(request), 0
    if not rights.is_limited:
        return
    for at, name in enumerate(names, start=1):
        if at % _NAMES_AT_ONCE == 0:
            await asyncio.sleep(0)
        if (record := broker.state.streams.get(name)) is not None:
            rights.limits("read", name, record.recorded_subjects)
            continue
        rights.require_name("read", name)
        unknown += 1
        if unknown > _MOST_UNKNOWN:  # each of these is compared with all rules of the identity
            raise InvalidRequest(f"more than {_MOST_UNKNOWN} of the streams that the request names do not exist")


def require_still(request: web.Request) -> None:
    """After a wait: the request is permitted still, on the same subjects. (In between it is checked once a second.)

    Raises:
        Forbidden, Unauthorized: it is not.
    """
    pending = request.get(PENDING)
    if isinstance(pending, Pending):
        pending.check()
        pending.still_holds()


_COUNTS = ("bytes", "rows", "segments", "compressed", "messages")

Shape = TypeVar("Shape", bound=msgspec.Struct)


def with_counts(request: web.Request, record: StreamRecord, shown: Shape) -> Shape:
    """A stream, position, lag or split as it is shown. For an identity that may not read all subjects of the stream,
    counts of rows and bytes are null: they would include messages of others.
    """
    if rights_of(request).subjects("read", record.name, record.recorded_subjects) is None:
        return shown
    counts = [name for name in _COUNTS if getattr(shown, name, UNSET) is not UNSET]
    return msgspec.structs.replace(shown, **dict.fromkeys(counts))


@contextmanager
def polling(request: web.Request) -> Iterator[None]:
    """While the request waits for messages. Raises QuotaExceeded."""
    with request.app[LIMITS].poll(rights_of(request)):
        yield
