"""The bearer token, and which servers it is sent to.

The rule. `Authorization` is sent to an origin (scheme, host and port) if

1. a server URL that was given has this origin, or
2. a given server names the origin in its list of members (`GET /v1/cluster`), and has the same scheme itself.

A request to any other origin (of a redirect, or of a preferred URL) is made without the token. The list is requested
from given servers only, and a redirect of that request is not followed, so that no origin can add itself. User and
password in a URL are not sent at all. Lists are shared by all clients of the process; a list is requested again after
60 s, and after 5 s where it does not name an origin.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TypeAlias

import msgspec
import urllib3

from natslog.errors import ConfigError
from natslog.log_events import event

logger = logging.getLogger("natslog.client")

Origin: TypeAlias = tuple[str, str, int]
"""Scheme, host and port."""

_ASK_AGAIN_S = 60.0
_ASK_AGAIN_UNKNOWN_S = 5.0
_DEFAULT_PORTS = {"http": 80, "https": 443}


class _Member(msgspec.Struct):
    url: str | None = None


class _Cluster(msgspec.Struct):
    brokers: list[_Member]


def origin_of(url: str) -> Origin | None:
    """None where it is no http(s) URL. Read as urllib3, which connects, reads it."""
    try:
        parsed = urllib3.util.parse_url(url)
    except urllib3.exceptions.LocationParseError:
        return None
    if parsed.scheme not in _DEFAULT_PORTS or not parsed.host:
        return None
    return parsed.scheme, parsed.host.lower(), parsed.port or _DEFAULT_PORTS[parsed.scheme]


def read_token(token: str | None, token_file: str | None) -> str | None:
    """The token; of the file, if there is one.

    Raises:
        ConfigError: the file cannot be read, or the token has characters that cannot be sent in a header.
    """
    if token_file:
        try:
            with open(token_file, encoding="ascii") as file:
                token = file.read().strip()
                mode = os.fstat(file.fileno()).st_mode
                if stat.S_ISREG(mode) and mode & 0o077:
                    _warn_of_readable(token_file)
        except OSError as error:
            raise ConfigError(f"cannot read the token file {token_file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the token file {token_file} contains characters that are not ASCII") from error
    if token and not (token.isascii() and token.isprintable()):
        raise ConfigError("the token has characters that cannot be sent: it must be one line of printable ASCII")
    return token or None


@functools.cache  # once for each file
def _warn_of_readable(token_file: str) -> None:
    logger.warning(
        f"the token file {token_file} can be read by other users: run chmod 600 on it",
        extra=event("client.token_file_readable", path=token_file),
    )


class Members:
    """The members of clusters, as the given servers list them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._lists: dict[object, tuple[float, frozenset[Origin]]] = {}

    def have(self, origin: Origin, servers: Sequence[str], key: object, ask: Callable[[str], bytes | None]) -> bool:
        """Whether a server names this origin as a member, and has its scheme. If no server responds, the last list is
        used.

        Args:
            servers: those that were given. `key`: names the client and its servers.
            ask: the body of one server's `GET /v1/cluster`, None where it gives none.
        """
        with self._lock:
            asked_at, known = self._lists.get(key, (-_ASK_AGAIN_S, frozenset[Origin]()))
            age_s = time.monotonic() - asked_at
            if age_s < (_ASK_AGAIN_S if origin in known else _ASK_AGAIN_UNKNOWN_S):
                return origin in known
        for server in servers:
            named = _named(ask(server), server)
            if named is not None:
                known = named
                break
        with self._lock:
            self._lists[key] = time.monotonic(), known
        return origin in known


def _named(body: bytes | None, server: str) -> frozenset[Origin] | None:
    """The origins of a list's members that have the server's scheme; None where it is no list."""
    if body is None:
        return None
    try:
        brokers = msgspec.json.decode(body, type=_Cluster).brokers
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    given = origin_of(server)
    origins = {origin_of(member.url) for member in brokers if member.url is not None}
    return frozenset(origin for origin in origins if origin is not None and given is not None and origin[0] == given[0])
