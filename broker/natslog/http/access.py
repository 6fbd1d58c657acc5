"""Access to the HTTP API: each call declares what it needs, and one middleware asks the guard before the handler runs.

Theory of operation. `@access(...)` states what a handler needs; the server does not start with a handler that states
nothing. For a call about one stream, the stream is looked up first, so that its rules are applied to what exists; where
it does not exist, the handler does not run. A handler that depends on more (the subjects of a limited identity, the
streams in a body) asks `rights_of(request)`.

Requests in progress are checked again once a second, if the metadata has changed or a token has expired: one that
would be refused now is cancelled, and answered with the reason, or cut off where its response has begun.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware
from msgspec import UNSET

from natslog.errors import (
    Forbidden,
    InvalidRequest,
    NatslogError,
    QuotaExceeded,
    StreamNotFound,
    Unauthorized,
)
from natslog.http.bodies import BODY
from natslog.http.connections import Connection
from natslog.http.context import BROKER, OWNER, REQUEST_ID, broker_of
from natslog.http.errors_as_json import Handler
from natslog.model import StreamRecord
from natslog.node.broker import Broker
from natslog.security.audit import AuditLog
from natslog.security.decisions import Patterns
from natslog.security.guard import NO_CREDENTIALS, Guard, Identity, Rights
from natslog.security.limits import Limits
from natslog.security.records import Action

logger = logging.getLogger("natslog.http")

Kind = Literal["open", "peers", "credentials", "cluster", "stream", "checked"]
_RECHECK_EVERY_S = 1.0
_NAMES_AT_ONCE = 200
_MOST_UNKNOWN = 1_000
_READING = frozenset({"GET", "HEAD", "OPTIONS"})

HandlerFunction = TypeVar("HandlerFunction", bound=Callable[[web.Request], Awaitable[web.StreamResponse]])


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


_ACCESS = "__natslog_access__"


def access(
    kind: Kind, action: Action | None = None, *, parameter: str = "name", changes: bool | None = None
) -> Callable[[HandlerFunction], HandlerFunction]:
    """Declares what a handler needs: see `Access`."""

    def declared(handler: HandlerFunction) -> HandlerFunction:
        setattr(handler, _ACCESS, Access(kind, action, parameter, changes))
        return handler

    return declared


def access_of(handler: object) -> Access | None:
    """None where it states nothing."""
    found = getattr(handler, _ACCESS, None)
    return found if isinstance(found, Access) else None


def require_declared(app: web.Application) -> None:
    """Every handler of the server states what it needs."""
    for route in app.router.routes():
        assert access_of(route.handler) is not None, f"{route.method} {route.resource} does not declare its access"


# ---- what handlers ask ----

RIGHTS = web.RequestKey("rights", Rights)
_PENDING = web.RequestKey("pending", object)
GUARD: web.AppKey[Guard] = web.AppKey("guard", Guard)
LIMITS: web.AppKey[Limits] = web.AppKey("limits", Limits)


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
    pending = request.get(_PENDING)
    if isinstance(pending, _Pending):
        pending.still_holds = lambda: _limits_are(pending, patterns, action, name)
    return patterns


def _limits_are(pending: _Pending, patterns: Patterns | None, action: Action, name: str) -> None:
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
    pending = request.get(_PENDING)
    if isinstance(pending, _Pending):
        pending.check()
        pending.still_holds()


_COUNTS = ("bytes", "rows", "segments")

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


# ---- the middleware ----


class _Pending:
    """A request in progress. `still_holds` raises why it would be refused now; `ended_by`: why it was cancelled."""

    def __init__(self, broker: Broker, rights: Rights, task: asyncio.Task[Any]) -> None:
        self._broker, self.rights, self.task = broker, rights, task
        self.still_holds: Callable[[], None] = lambda: None
        self.check: Callable[[], None] = lambda: None
        self.ended_by: NatslogError | None = None

    def stream(self, name: str) -> StreamRecord | None:
        found: StreamRecord | None = self._broker.state.streams.get(name)
        return found


class Gate:
    """The middleware, and the requests in progress. Of one server.

    Args:
        audit: None where nothing is logged.
    """

    def __init__(self, guard: Guard, limits: Limits, audit: AuditLog) -> None:
        self._guard, self._limits, self._audit = guard, limits, audit
        self._pending: set[_Pending] = set()
        self._seen: object = None
        self._timer: asyncio.TimerHandle | None = None

    # ---- life ----

    def start(self, version: Callable[[], object]) -> None:
        """Args: `version`: changes with the metadata."""
        self._timer = asyncio.get_running_loop().call_later(_RECHECK_EVERY_S, self.start, version)
        if self._guard.is_on:
            seen = version()
            self._recheck(rules_changed=seen != self._seen)
            self._seen = seen

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._audit.close()

    def _recheck(self, *, rules_changed: bool) -> None:
        for pending in list(self._pending):
            if pending.ended_by is not None:
                continue
            try:
                if not self._guard.is_valid(pending.rights.identity):
                    raise Unauthorized("the credentials of this request have expired or were revoked meanwhile")
                if rules_changed:
                    pending.check()
                    pending.still_holds()
            except NatslogError as error:
                pending.ended_by = error
                pending.task.cancel()

    # ---- a request ----

    @property
    def middleware(self) -> Middleware:
        @web.middleware
        async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
            needed = access_of(request.match_info.handler) or Access("credentials")
            if not self._guard.is_on or needed.kind == "peers":
                request[RIGHTS], request[OWNER] = self._guard.rights(NO_CREDENTIALS), ""
                return await self._audited(request, handler, needed)
            return await self._authorized(request, handler, needed)

        return authorize

    async def _authorized(self, request: web.Request, handler: Handler, needed: Access) -> web.StreamResponse:
        identity = NO_CREDENTIALS
        try:
            if needed.kind != "open":
                identity = self._identify(request)
            elif "Authorization" in request.headers:
                with suppress(Unauthorized):  # what needs no credentials is answered with wrong ones, too
                    identity = self._identify(request)
            rights = request[RIGHTS] = self._guard.rights(identity)
            request[OWNER] = rights.owner
            with ExitStack() as held:
                if needed.kind != "open":
                    rights.require_credentials()
                    self._tag_connection(request, rights)
                    await self._limits.admit(identity.name, rights.quota())
                    held.enter_context(self._limits.request(identity.name))
                    await self._require(request, rights, needed)
                return await self._watched(request, handler, needed, rights)
        except (Unauthorized, Forbidden, QuotaExceeded) as error:
            self._log_refusal(request, needed, identity, error)
            source = identity.name if not identity.is_anonymous else f"address {request.remote}"
            if not await self._limits.refuse(source):
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionAbortedError("too many requests of this source are refused") from error
            raise

    def _identify(self, request: web.Request) -> Identity:
        given = request.headers.getall("Authorization", [])
        if len(given) > 1:
            raise Unauthorized("the header Authorization is given twice")
        transport = request.transport
        certificate = transport.get_extra_info("peercert") if transport is not None else None
        return self._guard.identify(given[0] if given else None, certificate)

    def _tag_connection(self, request: web.Request, rights: Rights) -> None:
        """Raises QuotaExceeded."""
        connection = request.protocol
        assert isinstance(connection, Connection), "the server makes no others"
        connection.belongs_to(rights.identity.name, self._limits, rights.quota())

    async def _require(self, request: web.Request, rights: Rights, needed: Access) -> None:
        """Raises Forbidden, Unauthorized; StreamNotFound."""
        if needed.kind == "cluster":
            assert needed.action is not None, "a call about the cluster names its action"
            rights.require(needed.action)
        elif needed.kind == "stream":
            name = request.match_info[needed.parameter]
            try:
                record = await broker_of(request).record(name)
            except StreamNotFound:
                _require_on_name(rights, needed, name)
                raise
            _require_on(rights, needed, record)

    async def _watched(
        self, request: web.Request, handler: Handler, needed: Access, rights: Rights
    ) -> web.StreamResponse:
        """While the handler runs, the request is checked again."""
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        pending = _Pending(request.app[BROKER], rights, task)
        pending.check = lambda: _check_again(pending, request, needed)
        request[_PENDING] = pending
        self._pending.add(pending)
        try:
            return await self._audited(request, handler, needed)
        except asyncio.CancelledError:
            if pending.ended_by is None or task.uncancel():
                raise
            if request.writer.output_size > 0:
                logger.info("the response to %s was cut off: %s", request.remote, pending.ended_by.message)
                self._log_refusal(request, needed, rights.identity, pending.ended_by)
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError("the response must not be continued") from None
            raise pending.ended_by from None
        finally:
            self._pending.discard(pending)

    # ---- the audit log ----

    async def _audited(self, request: web.Request, handler: Handler, needed: Access) -> web.StreamResponse:
        is_change = needed.changes if needed.changes is not None else request.method not in _READING
        if not is_change or needed.kind == "peers":
            return await handler(request)
        outcome: dict[str, object] = {"status": 499, "code": "client_disconnected"}
        try:
            response = await handler(request)
            outcome = {"status": response.status}
            return response
        except web.HTTPException as error:
            outcome = {"status": error.status}
            raise
        except NatslogError as error:
            outcome = {"status": error.status, "code": error.code}
            raise
        except Exception:
            outcome = {"status": 500, "code": "internal"}
            raise
        finally:
            if outcome["status"] != 307 and outcome.get("code") not in ("unauthorized", "forbidden", "quota_exceeded"):
                facts = _facts(request, rights_of(request).identity) | request.get(AUDITED, {})
                self._audit.changed(**facts, **_body_facts(request), **outcome)

    def _log_refusal(self, request: web.Request, needed: Access, identity: Identity, error: NatslogError) -> None:
        facts = _facts(request, identity) | {"status": error.status, "code": error.code, "reason": error.message}
        if not identity.token and "token" in error.facts:  # of a token that is not valid
            facts["token"] = error.facts["token"]
        self._audit.refused(**facts, **({"action": needed.action} if needed.action else {}))


def _check_again(pending: _Pending, request: web.Request, needed: Access) -> None:
    """Raises Forbidden, Unauthorized."""
    if needed.kind == "open":
        return
    pending.rights.require_credentials()
    if needed.kind == "cluster" and needed.action is not None:
        pending.rights.require(needed.action)
    elif needed.kind == "stream":
        name = request.match_info[needed.parameter]
        if (record := pending.stream(name)) is not None:
            _require_on(pending.rights, needed, record)
        else:
            _require_on_name(pending.rights, needed, name)


def _require_on(rights: Rights, needed: Access, record: StreamRecord) -> None:
    if needed.action is None:
        if not rights.may_see(record.name, record.recorded_subjects):
            raise rights.refused_on(None, record.name)
    elif needed.action in ("manage", "admin"):
        rights.require_whole(needed.action, record.name, record.recorded_subjects)
    else:
        rights.limits(needed.action, record.name, record.recorded_subjects)


def _require_on_name(rights: Rights, needed: Access, name: str) -> None:
    if needed.action is not None:
        rights.require_name(needed.action, name)
    elif not rights.may_see(name, (">",)):
        raise rights.refused_on(None, name)


def _facts(request: web.Request, identity: Identity) -> dict[str, object]:
    found = request.match_info.route.resource
    return {
        "identity": identity.name,
        "token": identity.token,
        "from": request.remote or "",
        "method": request.method,
        "path": request.path,
        "route": "" if found is None else found.canonical,
        "request_id": request[REQUEST_ID],
    }


def _body_facts(request: web.Request) -> dict[str, object]:
    """What a change asks for: the parameters, and the JSON that was sent, to its first characters."""
    body = request.get(BODY)
    facts: dict[str, object] = {} if body is None else {"body": body[:_MOST_BODY_CHARS].decode(errors="replace")}
    return facts | ({"query": request.query_string} if request.query_string else {})


AUDITED: web.RequestKey[dict[str, object]] = web.RequestKey("audited", dict)
"""Further facts of a change for the audit log."""
_MOST_BODY_CHARS = 512
GATE: web.AppKey[Gate] = web.AppKey("gate", Gate)

_REQUEST_ID = re.compile(r"[A-Za-z0-9-]{8,64}")


def given_id(request: web.Request) -> str | None:
    """The id that the client gave; None where it is no id."""
    given = request.headers.get("Natslog-Request-Id")
    return given if given is not None and _REQUEST_ID.fullmatch(given) else None


@web.middleware
async def name_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Each request has an id: the one that the client gave, or a new one. Each response names it."""
    request[REQUEST_ID] = given_id(request) or secrets.token_hex(16)
    return await handler(request)


async def state_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Before the headers of a response are sent."""
    if (request_id := request.get(REQUEST_ID)) is not None:
        response.headers["Natslog-Request-Id"] = request_id
    response.headers["Server"] = "natslog"
