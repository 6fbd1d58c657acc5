"""Sign-in for browsers: a token that is given once becomes a cookie, which scripts of a page cannot read.

Theory of operation. The cookie names a session in the memory of this broker; the session has the token, so a stolen
cookie is worthless when it was signed out, after `LASTS_S`, and at every other broker. A request with the cookie counts
as one with the token. Browsers send cookies by themselves, so a request that changes something must also have the
header `Natslog-Csrf` with the value that the sign-in answered: pages of other sites can neither read nor send it.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from natslog.errors import Forbidden, InvalidRequest
from natslog.http import shapes
from natslog.http.access import AUDITED, GUARD, LIMITS, access, rights_of
from natslog.http.bodies import read_body
from natslog.http.context import BROKER, query
from natslog.http.shapes import shape_response

routes = web.RouteTableDef()

SESSION_PATH = "/v1/session"
CSRF_HEADER = "Natslog-Csrf"
LASTS_S = 12 * 3600.0
MOST_SESSIONS, MOST_OF_ONE = 1_000, 10
_OF_BROWSERS = ("Origin", "Sec-Fetch-Site")
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class Session:
    identity: str
    token: str
    csrf: str
    until_s: float


class Sessions:
    """Of one broker. An identity has at most `MOST_OF_ONE`; a further one ends its oldest."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Session] = OrderedDict()

    def begin(self, identity: str, token: str) -> tuple[str, Session]:
        """Its id, which is a secret."""
        now_s = time.monotonic()
        own = [number for number, one in self._by_id.items() if one.identity == identity]
        over = [number for number, one in self._by_id.items() if one.until_s <= now_s]
        for number in [*over, *own[: max(0, len(own) - MOST_OF_ONE + 1)]]:
            self._by_id.pop(number, None)
        while len(self._by_id) >= MOST_SESSIONS:
            self._by_id.popitem(last=False)
        session = Session(identity, token, secrets.token_urlsafe(24), now_s + LASTS_S)
        number = secrets.token_urlsafe(32)
        self._by_id[number] = session
        return number, session

    def of(self, request: web.Request) -> Session | None:
        """The session that the cookie of a request names, if there is one."""
        session = self._by_id.get(request.cookies.get(cookie_of(request), ""))
        return session if session is not None and session.until_s > time.monotonic() else None

    def end(self, request: web.Request) -> None:
        self._by_id.pop(request.cookies.get(cookie_of(request), ""), None)


def cookie_of(request: web.Request) -> str:
    """The name of the cookie: browsers send a cookie to all ports of a host, so it has the port."""
    return f"natslog_session_{request.url.port or 0}"


SESSIONS: web.AppKey[Sessions] = web.AppKey("sessions", Sessions)


def session_of(request: web.Request) -> Session | None:
    """The session whose token is used; None if the request has credentials of its own."""
    return None if "Authorization" in request.headers else request.app[SESSIONS].of(request)


def authorization_of(request: web.Request) -> list[str]:
    """The headers Authorization of a request; without one, what its session stands for.

    Raises:
        Forbidden: a change with the cookie only, without the header that proves that the page was served here.
    """
    if (session := session_of(request)) is None:
        return request.headers.getall("Authorization", [])
    is_sign_in = request.method == "POST" and request.path == SESSION_PATH  # which uses no rights of the session
    if request.method not in _READING and not is_sign_in:
        stated = request.headers.get(CSRF_HEADER, "")
        if not secrets.compare_digest(stated.encode(), session.csrf.encode()):
            raise Forbidden(
                f"a change with the cookie of a session must have the header {CSRF_HEADER} with the value that the "
                "sign-in answered: load the page again"
            )
    return [f"Bearer {session.token}"]


def require_same_site(request: web.Request) -> None:
    """A page of another site must not change anything here, not even where no credentials are needed: browsers state
    the origin of the page. Nor may a page whose name was made to point here (DNS rebinding) do anything: where no
    credentials are needed, a browser must address the broker by a name that is known to be its own.

    Raises:
        Forbidden.
    """
    origin, host = request.headers.get("Origin"), request.headers.get("Host", "").lower()
    if origin is not None and request.method not in _READING:
        parts = urlsplit(origin)
        if parts.netloc.lower() != host or (parts.scheme == "https") != request.secure:
            raise Forbidden(f"the request was sent by a page of {origin[:200]}, which is not a page of this broker")
    if not request.app[GUARD].is_on and _is_of_browser(request) and not _is_own_name(request, host):
        raise Forbidden(
            f"this cluster needs no credentials, so a browser must address a broker by its IP address, localhost, or "
            f"the URL that it has in natslog cluster status, and not by {host[:200]!r}"
        )


def _is_of_browser(request: web.Request) -> bool:
    headers = request.headers
    states_language = headers.get("Accept-Language", "*") != "*"  # programs of Node.js send a *
    return "Mozilla" in headers.get("User-Agent", "") or states_language or any(one in headers for one in _OF_BROWSERS)


def _is_own_name(request: web.Request, host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    own = {urlsplit(str(known.url)).hostname for known in request.app[BROKER].state.brokers.values()}
    return name in own | {socket.gethostname().lower()}


# ---- calls ----


@routes.post(SESSION_PATH)
@access("open", changes=True)
async def sign_in(request: web.Request) -> web.Response:
    """Begins a session with a token."""
    query(request)
    try:  # not by `json_body`, whose bodies the audit log repeats
        given = msgspec.json.decode(await read_body(request), type=shapes.NewSession)
    except ValueError as error:
        raise InvalidRequest('the body must be JSON with a token: {"token": "nlt_…"}') from error
    token = given.token.strip()
    identity = request.app[GUARD].identify(f"Bearer {token}", None)
    if identity.is_anonymous:
        raise InvalidRequest("this broker needs no credentials, so there is nothing to sign in to")
    facts: dict[str, object] = {"signed_in": identity.name}
    request[AUDITED] = facts
    await request.app[LIMITS].admit(identity.name, request.app[GUARD].rights(identity).quota())
    request.app[SESSIONS].end(request)  # the one that this browser had before
    number, session = request.app[SESSIONS].begin(identity.name, token)
    response = shape_response(shapes.SignedIn(identity.name, session.csrf), status=201)
    response.set_cookie(
        cookie_of(request),
        number,
        path="/",
        httponly=True,
        samesite="Strict",
        secure=request.secure,
        max_age=int(LASTS_S),
    )
    return response


@routes.get(SESSION_PATH)
@access("open")
async def shown(request: web.Request) -> web.Response:
    """Whether this broker needs credentials, and who is signed in."""
    query(request)
    guard, session = request.app[GUARD], request.app[SESSIONS].of(request)
    rights = rights_of(request)
    return shape_response(
        shapes.SessionState(
            needs_token=guard.is_on and rights.identity.is_anonymous,
            identity="" if rights.identity.is_anonymous else rights.identity.name,
            csrf="" if session is None else session.csrf,
            may_monitor=rights.may("monitor"),
            may_administer=rights.may("admin"),
        )
    )


@routes.delete(SESSION_PATH)
@access("open", changes=True)
async def sign_out(request: web.Request) -> web.Response:
    """Ends the session."""
    query(request)
    request.app[SESSIONS].end(request)
    response = web.Response(status=204)
    response.del_cookie(cookie_of(request), path="/", httponly=True, samesite="Strict", secure=request.secure)
    return response
