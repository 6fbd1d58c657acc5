"""HTTP requests to brokers: to any of them, with retries at all of them within the given time.

The module implements pooled connections, redirects to a leader, retries that are applied once, credentials that are
read when they are used, and the original errors of the broker. The token goes to servers that were given, and to
members of their cluster over the same scheme; the rule is in `credentials`.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self, TypeAlias, TypeVar
from urllib.parse import quote, urlencode, urljoin

import msgspec
import urllib3

from natslog import tracing
from natslog.client.bounded import MOST_BODY_BYTES, BoundedPools, most_bytes
from natslog.client.credentials import Members, origin_of, read_token
from natslog.client.epochs import LeaderEpochs, stated_in
from natslog.client.rounds import Rounds
from natslog.config import DEFAULT_SERVER_URL
from natslog.errors import (
    BrokerUnavailable,
    ConfigError,
    CorruptAnswer,
    InvalidRequest,
    NatslogError,
    OffsetOutOfRange,
    Unauthorized,
    from_json,
)
from natslog.urls import without_secrets

_CONNECT_TIMEOUT_S = 3.0
_LEAST_TIMEOUT_S = 1.0
_MOST_REDIRECTS = 3
LEADER_WITHIN_S = 15.0
_ASK_EACH_WITHIN_S = 2.0
_ASKED_LAST_S = 15.0
_ASKED_LAST_WAITS = 10  # times the wait for the missing response: a paused broker takes at most a tenth of the time
_NEED_TOKEN = (401, 403)
_OF_A_PROXY = (502, 503, 504)
_TOKEN_NOT_SENT = (
    "%s requires credentials, but the token was not sent to it: it is not one of the configured servers, and none of "
    "them lists it as a member with the same URL scheme; add it to the servers"
)
_TRANSPORT_ERRORS = (urllib3.exceptions.HTTPError, OSError)
_NAMED_CONNECTION = re.compile(r"^\w+\(host=.*?, port=\d+\): ")
"""What urllib3 begins its texts with; natslog states the URL itself."""


_silent_until: dict[str, float] = {}
"""Brokers that did not respond, and the time from which they are tried in normal order again. Shared by all clients in
this process: each task of Spark has its own client, and would otherwise wait for the same failed broker again.
"""


leader_epochs = LeaderEpochs()
"""Of all clients in this process, for the same reason."""


_members = Members()
"""Of all clients in this process, for the same reason."""

Result = TypeVar("Result")

Facts: TypeAlias = dict[str, Any]
"""An object of JSON."""

Judge: TypeAlias = Callable[[urllib3.BaseHTTPResponse], NatslogError | None]
"""The reason why a response must not be used; None if it is valid. The error is retriable if another broker, or a later
request, may give a valid response."""


class RedirectFailed(Exception):
    """The target of a redirect does not respond, or requires the token."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Settings of a client's requests.

    Attributes:
        timeout_s: for one answer. `retries`: rounds over all servers after the first. `retry_interval_s`: between them.
        patience_s: minimum time for which requests are repeated while no broker can be reached.
        first_answer_within_s: where no broker has answered this client by then, counted from its first request, no
            request is repeated any more; the error has the fact `answered`, false. None: no limit.
        token_file: a file with the bearer token, read when it is used. `token`: the token itself. It goes to the
            given servers, and to members of their cluster over the same scheme (`natslog.client.credentials`).
    """

    timeout_s: float = 30.0
    retries: int = 5
    retry_interval_s: float = 0.2
    patience_s: float = 0.0
    first_answer_within_s: float | None = None
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None


def parse_servers(text: str | Sequence[str] | None) -> tuple[str, ...]:
    """Broker URLs from `NATSLOG_SERVER` style text; without text, that variable; without it, this machine.

    Raises:
        ConfigError: not an http(s) URL.
    """
    text = text or os.environ.get("NATSLOG_SERVER") or DEFAULT_SERVER_URL
    parts = text.split(",") if isinstance(text, str) else list(text)
    servers = tuple(part.strip().rstrip("/") for part in parts if part.strip())
    for server in servers:
        if origin_of(server) is None:
            raise ConfigError(f"server {without_secrets(server)!r} is not a URL: write http://host:9292")
    if not servers:
        raise ConfigError("no server given: write http://host:9292")
    return servers


class Asker:
    """Sends each request to brokers until one of them responds. Thread-safe; picklable (connections are made again in
    the other process).

    Args:
        servers: a URL, several, or comma-separated; see `parse_servers`.
        options: everything else.
    """

    def __init__(self, servers: str | Sequence[str] | None = None, options: ClientOptions = ClientOptions()) -> None:
        self.options = options
        self.servers = parse_servers(servers)
        for name in ("tls_ca_file", "tls_cert_file", "tls_key_file"):
            file = getattr(options, name)
            if file is not None and not (os.path.isfile(file) and os.access(file, os.R_OK)):
                raise ConfigError(f"cannot read the {name.replace('_', ' ').replace('tls', 'TLS')} {file}", file=file)
        if (options.tls_cert_file is None) != (options.tls_key_file is None):
            raise ConfigError("the TLS client certificate and its key belong together: give both files, or none")
        self._start()

    def _start(self) -> None:
        self._pool = self._new_pool()
        self._has_answered, self._first_until_s = False, 0.0

    def _new_pool(self) -> urllib3.PoolManager:
        options = self.options
        return BoundedPools(
            maxsize=8,
            retries=False,
            timeout=urllib3.Timeout(connect=_CONNECT_TIMEOUT_S, read=options.timeout_s),
            ca_certs=options.tls_ca_file,
            cert_file=options.tls_cert_file,
            key_file=options.tls_key_file,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "servers": self.servers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.options, self.servers = state["options"], state["servers"]
        self._start()

    def close(self) -> None:
        """Closes idle connections."""
        self._pool.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---- requests ----

    def _ask(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str] = MappingProxyType({}),
        prefer: Sequence[str] = (),
        timeout_s: float | None = None,
        parts_within_s: float = 0.0,
        most_body_bytes: int = MOST_BODY_BYTES,
        judge: Judge = lambda response: leader_epochs.outdated(stated_in(response.headers)),
    ) -> urllib3.BaseHTTPResponse:
        """The response of the first broker that gives one.

        Args:
            parts_within_s: how long it waits for the broker that has staged parts.
            most_body_bytes: a larger response is not received.
            judge: by default, a response of an older leader about a stream's bounds is not used.

        Raises:
            NatslogError: the error of the broker that refused; `BrokerUnavailable` when no broker responded.
        """
        servers = self._most_promising_first(dict.fromkeys([*prefer, *self.servers]))
        named = dict(headers)
        if method != "GET":
            named["Natslog-Request-Id"] = secrets.token_hex(16)  # a retry is applied once
        rounds, token = self._rounds(parts_within_s), self._token()
        while (pause_s := rounds.pause_s(time.monotonic())) is not None:
            if rounds.count:
                if self._left_for_first_s() <= 0:
                    break
                time.sleep(pause_s)
            rounds.begin()
            for place, server in enumerate(servers):
                began_s, status = time.monotonic(), 0
                try:
                    within_s = self._within_s(timeout_s, len(servers) - place)
                    most_bytes.set(most_body_bytes)  # each time: the judge may have sent another request
                    response = self._send(method, server + path, query, body, within_s, named)
                    _silent_until.pop(server, None)
                    self._has_answered, status = True, response.status
                    error = _error_of(response, server) if status >= 300 else judge(response)
                    if error is None:
                        return response
                except CorruptAnswer as failure:  # of the judge, or it is too large
                    error = failure
                except RedirectFailed as failure:
                    rounds.redirect_failed(str(failure))
                    continue
                except _TRANSPORT_ERRORS as failure:
                    rounds.unreachable(f"{without_secrets(server)}: {_reason(failure)}{self._advice(server, failure)}")
                    _ask_last(server, waited_s=time.monotonic() - began_s)
                    continue
                if isinstance(error, Unauthorized) and self._has_another_token(token):
                    token = self._token()  # the file was replaced
                    rounds.token_replaced(error.message)
                elif error.retriable:
                    rounds.refused(without_secrets(server), error, status=status)
                else:
                    raise error
            rounds.end()
        raise self._unanswered(f"{method} {path}", servers, rounds)

    def _rounds(self, parts_within_s: float) -> Rounds:
        options = self.options
        return Rounds(
            retries=options.retries,
            retry_interval_s=options.retry_interval_s,
            patience_s=options.patience_s,
            leader_within_s=LEADER_WITHIN_S,
            parts_within_s=parts_within_s,
            now_s=time.monotonic(),
        )

    def _within_s(self, timeout_s: float | None, servers_left: int) -> float:
        """For one server: one that does not answer leaves time for the others."""
        share_s = self._left_for_first_s() / servers_left
        return min(timeout_s or self.options.timeout_s, max(_LEAST_TIMEOUT_S, share_s))

    def _unanswered(self, request: str, servers: Sequence[str], rounds: Rounds) -> BrokerUnavailable:
        shown = list(map(without_secrets, servers))
        advice = "" if rounds.has_answer else ". Check that `natslog dev` or `natslog server` is running there"
        if self._left_for_first_s() > 0:
            what = f"no broker answered {request}; last error: {rounds.problem}"
            return BrokerUnavailable(what + advice, servers=shown)
        within_s = self.options.first_answer_within_s
        what = f"{' and '.join(shown)} did not answer within {within_s:.0f} s: {rounds.problem}"
        return BrokerUnavailable(what + advice, servers=shown, answered=False)

    def _left_for_first_s(self) -> float:
        """What is left of the time for the first answer; infinite after it."""
        within_s = self.options.first_answer_within_s
        if within_s is None or self._has_answered:
            return math.inf
        self._first_until_s = self._first_until_s or time.monotonic() + within_s
        return self._first_until_s - time.monotonic()

    def _advice(self, server: str, failure: BaseException) -> str:
        """What may be wrong with TLS, if anything looks like it."""
        said, options = _reason(failure), self.options
        if "CERTIFICATE_VERIFY_FAILED" in said:
            return ": give the CA that signed the broker's certificate (--tls-ca, tlsCaFile), and a host that it is for"
        if not isinstance(failure, urllib3.exceptions.ProtocolError):
            return ""
        if not server.startswith("https:"):
            return " (if it serves TLS, its URL begins with https://)"
        if options.tls_cert_file is None:
            return " (it may require a client certificate: --tls-cert and --tls-key, tlsCertFile and tlsKeyFile)"
        return " (it may refuse the client certificate: another CA signed it, or it has expired)"

    def _of_each(self, path: str, query: dict[str, Any] | None = None) -> Iterator[urllib3.BaseHTTPResponse]:
        """The response of each broker to one GET with a short timeout; brokers that do not respond are omitted."""
        most_bytes.set(MOST_BODY_BYTES)
        for server in self._most_promising_first(self.servers):
            timeout_s = min(_ASK_EACH_WITHIN_S, self.options.timeout_s)
            try:
                response = self._send("GET", server + path, query, None, timeout_s, {})
            except (RedirectFailed, CorruptAnswer, *_TRANSPORT_ERRORS):
                continue
            if response.status < 300:
                yield response

    @staticmethod
    def _most_promising_first(servers: Iterable[str]) -> list[str]:
        """Servers that did not respond a moment ago come last: a failed one costs one wait, not one for each
        request.
        """
        now = time.monotonic()
        return sorted(servers, key=lambda server: _silent_until.get(server, 0.0) > now)

    def _send(
        self,
        method: str,
        url: str,
        query: dict[str, Any] | None,
        body: Any,
        timeout_s: float | None,
        named: Mapping[str, str],
    ) -> urllib3.BaseHTTPResponse:
        given = {name: value for name, value in (query or {}).items() if value is not None}
        try:
            url = f"{url}?{urlencode(given)}" if given else url
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the request is not valid Unicode: correct {given!r}") from error
        data, headers = _encoded(body)
        headers |= named
        headers |= tracing.current_headers()
        connect_s = self.options.timeout_s if isinstance(body, memoryview) else _CONNECT_TIMEOUT_S  # sending counts too
        timeout = urllib3.Timeout(connect=connect_s, read=timeout_s or self.options.timeout_s)
        token = self._token()
        for _ in range(_MOST_REDIRECTS):
            is_trusted = token is not None and self._may_have_token(url)
            allowed = {"Authorization": f"Bearer {token}"} if is_trusted else {}
            try:
                response = self._pool.request(
                    method,
                    url,
                    body=data,
                    headers=headers | allowed,
                    timeout=timeout,
                    redirect=False,
                    decode_content=False,  # natslog does not compress responses; a few bytes could unpack to gigabytes
                )
            except _TRANSPORT_ERRORS as failure:
                if "Natslog-Redirected" in headers:
                    raise RedirectFailed(f"{_shown_server(url)}: {_reason(failure)}") from failure
                raise
            if response.status != 307 or "Location" not in response.headers:
                if response.status in _NEED_TOKEN and token is not None and not is_trusted:
                    raise RedirectFailed(_TOKEN_NOT_SENT % _shown_server(url))
                return response
            url, headers["Natslog-Redirected"] = _target(url, response.headers["Location"]), "true"
        raise RedirectFailed(f"{_shown_server(url)}: redirected more than {_MOST_REDIRECTS} times")

    def _token(self) -> str | None:
        """As the options have it now."""
        return read_token(self.options.token, self.options.token_file)

    def _has_another_token(self, sent: str | None) -> bool:
        """Whether the token file was replaced since this token was read."""
        return self.options.token_file is not None and self._token() != sent

    def _may_have_token(self, url: str) -> bool:
        """The rule of `credentials`."""
        origin = origin_of(url)
        if origin is None:
            return False
        if origin in map(origin_of, self.servers):
            return True
        servers = self._most_promising_first(self.servers)
        return _members.have(origin, servers, (self.servers, self.options.tls_ca_file), self._list_of_members)

    def _list_of_members(self, server: str) -> bytes | None:
        """The response of a given server; None if it is not a list."""
        token = self._token()
        timeout_s = min(_ASK_EACH_WITHIN_S, self.options.timeout_s)
        try:
            response = self._pool.request(
                "GET",
                f"{server}/v1/cluster",
                headers={"Authorization": f"Bearer {token}"},
                timeout=urllib3.Timeout(connect=_CONNECT_TIMEOUT_S, read=timeout_s),
                redirect=False,
                decode_content=False,
            )
        except (*_TRANSPORT_ERRORS, CorruptAnswer):
            return None
        return response.data if response.status == 200 else None

    def _json(self, method: str, path: str, kind: type[Result], **asked: Any) -> Result:
        """An answer's body. Raises NatslogError: it is not of this type; see also `_ask`."""
        return decoded(self._ask(method, path, **asked).data, kind, f"{method} {path}")


def decoded(data: bytes, kind: type[Result], what: str) -> Result:
    """A body of JSON. Raises NatslogError: it is not JSON, or not of this type."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NatslogError(
            f"{what}: the response is not JSON: check that the URL is that of a natslog broker"
        ) from error
    return converted(body, kind, what)


def converted(body: Any, kind: type[Result], what: str) -> Result:
    """The decoded JSON. Raises NatslogError: it is not of this type."""
    try:
        return msgspec.convert(body, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise NatslogError(
            f"{what}: the response has unexpected contents ({error}): check that the URL is that of a natslog broker"
        ) from error


def in_path(name: str) -> str:
    """A name as one part of a path. Raises InvalidRequest: the text cannot be sent."""
    try:
        return quote(name, safe="") or "-"
    except (UnicodeEncodeError, TypeError) as error:
        raise InvalidRequest(f"{name!r} is not valid Unicode: correct the name") from error


def _encoded(body: Any) -> tuple[Any, dict[str, str]]:
    """What is sent: rows as they are (a memoryview of an Arrow IPC stream), anything else as JSON."""
    if body is None:
        return None, {}
    if isinstance(body, memoryview):
        return body, {"Content-Type": "application/vnd.apache.arrow.stream"}
    try:
        text = json.dumps(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON ({error}): correct its values") from error
    return text.encode(), {"Content-Type": "application/json"}


def _ask_last(server: str, *, waited_s: float) -> None:
    _silent_until[server] = time.monotonic() + max(_ASKED_LAST_S, _ASKED_LAST_WAITS * waited_s)


def _error_of(response: urllib3.BaseHTTPResponse, server: str) -> NatslogError:
    """The error of the broker; if it comes from an older leader and concerns a stream's bounds, an error that says
    so.
    """
    try:
        body = json.loads(response.data)
    except (ValueError, RecursionError):
        body = None
    if not (isinstance(body, dict) and isinstance(body.get("error"), dict)):
        said = (
            f"{without_secrets(server)} answered HTTP {response.status}, which is not the response of a natslog broker"
        )
        return BrokerUnavailable(said) if response.status in _OF_A_PROXY else NatslogError(said)
    error = from_json(body)
    outdated = leader_epochs.outdated(error.facts) if isinstance(error, OffsetOutOfRange) else None
    return outdated or error


def _target(url: str, location: str) -> str:
    """The target of a redirect. Raises RedirectFailed: it has none."""
    try:
        target = urljoin(url, location)
    except ValueError:
        target = ""
    if origin_of(target) is None:
        raise RedirectFailed(f"{_shown_server(url)}: it redirects to a location that is not an http(s) URL")
    return target


def _shown_server(url: str) -> str:
    """Scheme, host and port: the text before them may be secret, and the text after them is known."""
    scheme, _, rest = url.partition("://")
    return without_secrets(f"{scheme}://{re.split('[/?#]', rest.rpartition('@')[2], maxsplit=1)[0]}")


def _reason(failure: BaseException) -> str:
    text = str(failure.args[-1] if failure.args else failure) or type(failure).__name__
    return _NAMED_CONNECTION.sub("", text)
