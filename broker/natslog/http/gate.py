"""The gate of the HTTP API: one middleware that asks the guard before a handler runs, and while it runs.

Theory of operation. For a call about one stream, the stream is looked up first, so that its rules are applied to what
exists; where it does not exist, the handler does not run. Requests in progress are checked again once a second, if the
metadata has changed or a token has expired: one that would be refused now is cancelled, and answered with the reason,
or cut off where its response has begun. Changes and refusals are written to the audit log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress

from aiohttp import web
from aiohttp.typedefs import Middleware

from natslog.errors import (
    Forbidden,
    InvalidRequest,
    NatslogError,
    QuotaExceeded,
    Starting,
    StreamNotFound,
    Unauthorized,
)
from natslog.http.access import AUDITED, PAID_BYTES, PENDING, RIGHTS, Access, Pending, rights_of
from natslog.http.connections import connection_of
from natslog.http.context import BODY, BROKER, OWNER, READING, REQUEST_ID, broker_of, request_id
from natslog.http.endpoint import endpoint_of
from natslog.http.errors_as_json import Handler
from natslog.http.sessions import SESSIONS, authorization_of, require_same_site, session_of
from natslog.log_events import event
from natslog.model import StreamRecord
from natslog.request_ids import HEADER, handling, is_well_formed, new_request_id
from natslog.security.audit import AuditLog
from natslog.security.guard import NO_CREDENTIALS, Guard, Identity, Rights
from natslog.security.limits import Limits

logger = logging.getLogger("natslog.http")

_RECHECK_EVERY_S = 1.0
_OF_DATA = frozenset({"publish", "cursor"})
"""Changes that programs make all the time: they are no events."""
_FIRST_REFUSED = 400
_MOST_BODY_CHARS = 512


class Gate:
    """The middleware, and the requests in progress. Of one server. `report`: receives the facts of each change that was
    made.
    """

    def __init__(
        self, guard: Guard, limits: Limits, audit: AuditLog, report: Callable[[dict[str, object]], None]
    ) -> None:
        self._guard, self._limits, self._audit, self._report = guard, limits, audit, report
        self._pending: set[Pending] = set()
        self._seen: object = None
        self._timer: asyncio.TimerHandle | None = None

    # ---- life ----

    def start(self, version: Callable[[], object]) -> None:
        """Args: `version`: changes with the metadata."""
        self._timer = asyncio.get_running_loop().call_later(_RECHECK_EVERY_S, self.start, version)
        self._audit.flush()
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
                if not pending.is_signed_in():
                    raise Unauthorized("the session of this request has ended meanwhile")
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
            endpoint = endpoint_of(request)
            needed = Access("credentials") if endpoint is None else endpoint.access
            require_same_site(request)
            if not self._guard.is_on or needed.kind == "peers":
                request[RIGHTS], request[OWNER] = self._guard.rights(NO_CREDENTIALS), ""
                if needed.kind not in ("open", "peers"):  # no identity is required
                    connection_of(request).proved()
                return await self._audited(request, handler, needed)
            return await self._authorized(request, handler, needed)

        return authorize

    async def _authorized(self, request: web.Request, handler: Handler, needed: Access) -> web.StreamResponse:
        identity = NO_CREDENTIALS
        try:
            if needed.kind != "open":
                identity = self._identify(request)
            elif authorization_of(request):
                with suppress(Unauthorized, Starting):  # what needs no credentials is answered in any case
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
                try:
                    return await self._watched(request, handler, needed, rights)
                finally:  # whether or not the handler has read it
                    self._limits.took(rights, request.content.total_bytes - request.get(PAID_BYTES, 0))
        except (Unauthorized, Forbidden, QuotaExceeded) as error:
            self._log_refusal(request, needed, identity, error)
            source = identity.name if not identity.is_anonymous else f"address {request.remote}"
            if not await self._limits.refuse(source):
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionAbortedError("too many requests of this source are refused") from error
            raise

    def _identify(self, request: web.Request) -> Identity:
        given = authorization_of(request)
        if len(given) > 1:
            raise Unauthorized("the header Authorization is given twice")
        transport = request.transport
        certificate = transport.get_extra_info("peercert") if transport is not None else None
        return self._guard.identify(given[0] if given else None, certificate)

    def _tag_connection(self, request: web.Request, rights: Rights) -> None:
        """Raises QuotaExceeded."""
        connection = connection_of(request)
        connection.belongs_to(rights.identity.name, self._limits, rights.quota())
        connection.proved()

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
        pending = Pending(request.app[BROKER], rights, task)
        pending.check = lambda: _check_again(pending, request, needed)
        sessions, session = request.app[SESSIONS], session_of(request)
        if session is not None and needed.kind != "open":
            pending.is_signed_in = lambda: sessions.of(request) is session
        request[PENDING] = pending
        self._pending.add(pending)
        try:
            return await self._audited(request, handler, needed)
        except asyncio.CancelledError:
            if pending.ended_by is None or task.uncancel():
                raise
            if request.writer.output_size > 0:
                logger.info(
                    f"the response to {request.remote} was cut off: {pending.ended_by.message}",
                    extra=event("response.cut_off", address=request.remote, reason=pending.ended_by.code),
                )
                self._log_refusal(request, needed, rights.identity, pending.ended_by)
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError("the response must not be continued") from None
            raise pending.ended_by from None
        finally:
            self._pending.discard(pending)

    # ---- the audit log ----

    async def _audited(self, request: web.Request, handler: Handler, needed: Access) -> web.StreamResponse:
        is_change = needed.changes if needed.changes is not None else request.method not in READING
        if not is_change or needed.kind == "peers":
            return await handler(request)
        outcome: dict[str, object] = {"status": 499, "code": "not_answered", "may_be_applied": True}  # it was cancelled
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
                facts |= _body_facts(request) | outcome
                status = outcome["status"]
                if self._has_changed_nothing(request, needed):
                    self._audit.unauthenticated(request.remote or "", **facts)
                else:
                    self._audit.changed(**facts)
                    if needed.action not in _OF_DATA and isinstance(status, int) and status < _FIRST_REFUSED:
                        self._report(facts | {"change": _change_id(request)})

    def _has_changed_nothing(self, request: web.Request, needed: Access) -> bool:
        """A client without an identity: signing in has failed, or there was no session to sign out of."""
        is_open = self._guard.is_on and needed.kind == "open" and rights_of(request).identity.is_anonymous
        return is_open and AUDITED not in request

    def _log_refusal(self, request: web.Request, needed: Access, identity: Identity, error: NatslogError) -> None:
        facts = _facts(request, identity) | {"status": error.status, "code": error.code, "reason": error.message}
        if not identity.token and "token" in error.facts:  # of a token that is not valid
            facts["token"] = error.facts["token"]
        facts |= {"action": needed.action} if needed.action else {}
        if identity.is_anonymous:
            self._audit.unauthenticated(request.remote or "", **facts)
        else:
            self._audit.refused(**facts)


def _change_id(request: web.Request) -> str:
    """By which the metadata names the change that was requested."""
    try:
        return request_id(request).id
    except InvalidRequest:  # the call makes no change of the metadata, and has not looked at the id
        return ""


def _check_again(pending: Pending, request: web.Request, needed: Access) -> None:
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
    endpoint, body = endpoint_of(request), request.get(BODY)
    facts: dict[str, object] = {} if body is None else {"body": body[:_MOST_BODY_CHARS].decode(errors="replace")}
    if body is not None and endpoint is not None and endpoint.body_kept == "unlogged":
        facts = {"body": "(not logged)"}
    return facts | ({"query": request.query_string} if request.query_string else {})


GATE: web.AppKey[Gate] = web.AppKey("gate", Gate)


@web.middleware
async def name_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Each request has an id: the one that the client gave, or a new one where that is none or not well-formed. Each
    response names it, and each line that is logged meanwhile.
    """
    given = request.headers.get(HEADER, "")
    request[REQUEST_ID] = given if is_well_formed(given) else new_request_id()
    with handling(request[REQUEST_ID]):
        return await handler(request)


async def state_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Before the headers of a response are sent."""
    if (request_id := request.get(REQUEST_ID)) is not None:
        response.headers[HEADER] = request_id
    response.headers["Server"] = "natslog"
    response.headers["X-Content-Type-Options"] = "nosniff"
    if request.secure:
        response.headers["Strict-Transport-Security"] = "max-age=31536000"
