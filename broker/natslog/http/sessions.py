"""Sign-in for browsers: a token that is given once becomes a cookie, which scripts of a page cannot read.

Theory of operation. The cookie names a session of this broker; the session has the token, so a stolen cookie is
worthless when it was signed out, after `LASTS_S`, and at every other broker. A request with the cookie counts as one
with the token. Browsers send cookies by themselves, so a request that changes something must also have the header
`Natslog-Csrf` with the value that the sign-in answered: pages of other sites can neither read nor send it.

Sessions outlast a restart: a file has each of them sealed with AES-256-GCM, by a key that is derived from its cookie,
which the broker does not keep. Neither the file nor the cookie is of use without the other. Where the file cannot be
replaced it is removed, so that no session is there again that was ended; if it cannot be removed either, signing out
fails.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import secrets
import socket
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from natslog.errors import FileUnavailable, Forbidden, InvalidRequest, NatslogError
from natslog.http.access import AUDITED, GUARD, LIMITS, rights_of
from natslog.http.context import BROKER
from natslog.http.endpoint import Call, PlainCall
from natslog.http.shapes import security as shapes
from natslog.http.shapes.common import Answer, shape_response
from natslog.log.checked_file import read_checked, sync_folder, write_checked
from natslog.log_events import event

logger = logging.getLogger("natslog.http")
SESSION_PATH = "/v1/session"
CSRF_HEADER = "Natslog-Csrf"
LASTS_S = 12 * 3600.0
MOST_SESSIONS, MOST_OF_ONE = 1_000, 10
_OF_BROWSERS = ("Origin", "Sec-Fetch-Site")
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class Session(msgspec.Struct, frozen=True):
    """`until_s`: in seconds of the Unix epoch."""

    identity: str
    token: str
    csrf: str
    until_s: float


class _Sealed(msgspec.Struct, frozen=True):
    """As the file has it. `content`: a `Session`, sealed."""

    identity: str
    until_s: float
    content: bytes


_FILE, _FILE_VERSION = "sessions", 1
_COOKIE = re.compile("[A-Za-z0-9_-]{43}")
_CLOCK_STEP_S = 60.0
"""By so much the clock may be set back while sessions last; further, it would prolong them."""
_NONCE = bytes(12)
"""A key seals one session only."""


class Sessions:
    """Of one broker. An identity has at most `MOST_OF_ONE`; a further one ends its oldest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sealed: OrderedDict[str, _Sealed] = OrderedDict()  # by what is derived from the cookie
        self._open: dict[str, Session] = {}  # those that were used since the broker started
        self._has_changed = False
        self._writer: asyncio.Task[None] | None = None
        try:
            found = read_checked(path, _FILE, _FILE_VERSION) or {}
            self._sealed.update(msgspec.convert(found, dict[str, _Sealed]))
        except (NatslogError, OSError, msgspec.ValidationError) as error:
            logger.warning("users of the console must sign in again: %s", error, extra=event("sessions.lost"))
        self._drop_expired()

    async def begin(self, identity: str, token: str) -> tuple[str, Session]:
        """The value of its cookie, which is a secret."""
        self._drop_expired()
        own = [name for name, one in self._sealed.items() if one.identity == identity]
        for name in own[: max(0, len(own) - MOST_OF_ONE + 1)]:
            self._drop(name)
        while len(self._sealed) >= MOST_SESSIONS:
            self._drop(next(iter(self._sealed)))
        session = Session(identity, token, secrets.token_urlsafe(24), time.time() + LASTS_S)
        cookie = secrets.token_urlsafe(32)
        name = _derived(cookie, b"name").hex()
        sealed = AESGCM(_derived(cookie, b"key")).encrypt(_NONCE, msgspec.json.encode(session), None)
        self._sealed[name], self._open[name] = _Sealed(identity, session.until_s, sealed), session
        with suppress(FileUnavailable):  # it is logged; the session lasts until a restart
            await self._written()
        return cookie, session

    def of(self, request: web.Request) -> Session | None:
        """The session that the cookie of a request names, if there is one: the same object as long as it lasts."""
        cookie = request.cookies.get(cookie_of(request), "")
        if not _COOKIE.fullmatch(cookie):
            return None
        name = _derived(cookie, b"name").hex()
        if (sealed := self._sealed.get(name)) is None:
            return None
        try:
            if name not in self._open:
                content = AESGCM(_derived(cookie, b"key")).decrypt(_NONCE, sealed.content, None)
                self._open[name] = msgspec.json.decode(content, type=Session)
        except (InvalidTag, msgspec.MsgspecError):  # the file was changed, or another version has written it
            self._drop(name)
            return None
        session = self._open[name]
        return session if 0 < session.until_s - time.time() < LASTS_S + _CLOCK_STEP_S else None

    async def end(self, request: web.Request) -> None:
        """Raises FileUnavailable: it would be there again after a restart."""
        cookie = request.cookies.get(cookie_of(request), "")
        is_dropped = _COOKIE.fullmatch(cookie) and self._drop(_derived(cookie, b"name").hex())
        if is_dropped or self._has_changed:
            await self._written()

    def _drop_expired(self) -> None:
        for name in [name for name, one in self._sealed.items() if one.until_s <= time.time()]:
            self._drop(name)

    def _drop(self, name: str) -> bool:
        self._open.pop(name, None)
        return self._sealed.pop(name, None) is not None

    async def _written(self) -> None:
        """Returns when the file has what is so now, also where the request is cancelled meanwhile."""
        self._has_changed = True
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write(), name="sessions of the console")
        await asyncio.shield(self._writer)

    async def _write(self) -> None:
        while self._has_changed:
            self._has_changed = False
            try:
                await asyncio.to_thread(self._replace, dict(self._sealed))
            except FileUnavailable:
                self._has_changed = True  # the next sign-in or sign-out tries again
                raise

    def _replace(self, content: dict[str, _Sealed]) -> None:
        try:
            write_checked(self._path, _FILE, _FILE_VERSION, content)
        except OSError as error:
            logger.warning("a restart ends the sessions of the console: %s", error, extra=event("sessions.lost"))
            try:
                self._path.unlink(missing_ok=True)
                sync_folder(self._path.parent)
            except OSError as second:
                raise FileUnavailable(
                    f"the session may be there again after a restart, because {self._path} can neither be written nor "
                    f"removed: {second}. Delete this file, and sign out once more"
                ) from second


def _derived(cookie: str, what: bytes) -> bytes:
    """The name of a session in the file, or the key that seals it."""
    return hmac.digest(cookie.encode(), what, "sha256")


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
        if not secrets.compare_digest(stated.encode(errors="surrogateescape"), session.csrf.encode()):
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


async def sign_in(call: Call[None, shapes.NewSession]) -> Answer[shapes.SignedIn]:
    """Sign in: the response sets a cookie, which stands for the token at this broker"""
    request, token = call.request, call.body.token.strip()
    identity = request.app[GUARD].identify(f"Bearer {token}", None)
    if identity.is_anonymous:
        raise InvalidRequest("this broker needs no credentials, so there is nothing to sign in to")
    facts: dict[str, object] = {"identity": identity.name, "token": identity.token}
    request[AUDITED] = facts
    await request.app[LIMITS].admit(identity.name, request.app[GUARD].rights(identity).quota())
    await request.app[SESSIONS].end(request)  # the one that this browser had before
    cookie, session = await request.app[SESSIONS].begin(identity.name, token)
    response = shape_response(shapes.SignedIn(identity.name, session.csrf), status=201)
    response.set_cookie(
        cookie_of(request),
        cookie,
        path="/",
        httponly=True,
        samesite="Strict",
        secure=request.secure,
        max_age=int(LASTS_S),
    )
    return response


async def shown(call: PlainCall) -> Answer[shapes.SessionState]:
    """Whether credentials are needed, and who is signed in with a cookie"""
    request = call.request
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


async def sign_out(call: PlainCall) -> web.Response:
    """Sign out"""
    request = call.request
    await request.app[SESSIONS].end(request)
    response = web.Response(status=204)
    response.del_cookie(cookie_of(request), path="/", httponly=True, samesite="Strict", secure=request.secure)
    return response
