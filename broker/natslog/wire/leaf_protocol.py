"""The leafnode protocol of NATS, as far as the side needs it that connects and subscribes to nothing: bytes in, lines
out. No I/O.

A server sends `INFO`, and after `CONNECT` a second `INFO` with the permissions, `LS+` and `LS-` lines for the interest
of the account, `PING`, `PONG` and `-ERR`. Messages to a leafnode that subscribes to nothing do not occur; they are
skipped.

Source: leafnode.go, parser.go and client.go of nats-server 2.15; `RemoteLeafOpts`, `leafConnectInfo`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from natslog.errors import ConfigError
from natslog.urls import without_secrets
from natslog.wire.credentials import Login
from natslog.wire.interest import Interest

DEFAULT_PORT = 7422
MAX_LINE_BYTES = 1024 * 1024
_SCHEMES = ("nats-leaf", "nats", "tls")


class LeafProtocolError(Exception):
    """The bytes are not those of a leafnode listener: the connection cannot be used any more."""


# ---- addresses ----


@dataclass(frozen=True, slots=True)
class LeafAddress:
    """One server. `user` without `password` is a token, as in the URLs of NATS servers."""

    shown: str
    host: str
    port: int
    wants_tls: bool
    user: str | None
    password: str | None

    def __repr__(self) -> str:
        """Without user and password."""
        return f"LeafAddress({self.shown!r})"


def addresses_in(urls: str) -> list[LeafAddress]:
    """Of one URL, or of several with commas between them.

    Raises:
        ConfigError: one of them is not the URL of a leafnode listener.
    """
    found = [_address(url.strip()) for url in urls.split(",") if url.strip()]
    if not found:
        raise ConfigError(f"nats_leaf_url is empty: write nats-leaf://host:{DEFAULT_PORT}")
    return found


def _address(url: str) -> LeafAddress:
    shown = without_secrets(url)
    try:
        parts = urlsplit(url if "://" in url else f"nats-leaf://{url}")
        port = parts.port
    except ValueError:  # its text may quote a part of a password
        raise ConfigError(f"nats_leaf_url {shown!r}: host or port is wrong; write nats-leaf://host:7422") from None
    if parts.scheme not in _SCHEMES:
        raise ConfigError(f"nats_leaf_url {shown!r} must begin with nats-leaf://, nats:// or tls://")
    if not parts.hostname:
        raise ConfigError(f"nats_leaf_url {shown!r} names no host: write nats-leaf://host:{DEFAULT_PORT}")
    user = None if parts.username is None else unquote(parts.username)
    password = None if parts.password is None else unquote(parts.password)
    return LeafAddress(shown, parts.hostname, port or DEFAULT_PORT, parts.scheme == "tls", user, password)


# ---- what a server says of itself ----


class _Subjects(msgspec.Struct):
    allow: list[str] | None = None
    deny: list[str] | None = None


class LeafInfo(msgspec.Struct):
    """`INFO` of a server. `exported`: which messages it accepts of this leafnode (field `export`); in the one that
    follows `CONNECT`, which has `connect_info`.
    """

    version: str = ""
    client_id: int = 0
    leafnode_urls: list[str] | None = None
    nonce: str = ""
    tls_required: bool = False
    tls_available: bool = False
    max_payload: int = 1024 * 1024
    connect_info: bool = False
    exported: _Subjects | None = msgspec.field(default=None, name="export")

    @property
    def is_of_leaf_port(self) -> bool:
        """Only a leafnode listener sends both; the rule of nats-server itself."""
        return self.client_id != 0 and self.leafnode_urls is not None


def info_of(line: bytes) -> LeafInfo:
    """Raises LeafProtocolError."""
    try:
        return msgspec.json.decode(line[4:], type=LeafInfo)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LeafProtocolError(f"INFO of the server is not valid: {error}") from error


class Permissions:
    """Which subjects the server accepts messages for: another one ends the connection."""

    def __init__(self, exported: _Subjects | None = None) -> None:
        exported = exported or _Subjects()
        self._allowed = None if exported.allow is None else _patterns(exported.allow)
        self._denied = _patterns(exported.deny or [])

    def permit(self, subject: str) -> bool:
        return (self._allowed is None or self._allowed.has(subject)) and not self._denied.has(subject)


def _patterns(subjects: list[str]) -> Interest:
    found = Interest()
    for subject in subjects:
        found.add(subject)
    return found


# ---- what is sent ----


def connect_line(info: LeafInfo, address: LeafAddress, login: Login, *, name: str, server_id: str) -> bytes:
    """`CONNECT` for the server that has sent `info`.

    No `compress_mode`: the connection is not compressed. No `remote_account`: the server would replace connections of
    the same name. `version` is the server's own, because a server with `min_version` compares it.
    """
    body: dict[str, Any] = {"name": name, "server_id": server_id, "version": info.version}
    body |= {"headers": True, "protocol": 1} | _login_fields(address, login, info.nonce)
    return b"CONNECT " + msgspec.json.encode(body) + b"\r\n"


def _login_fields(address: LeafAddress, login: Login, nonce: str) -> dict[str, str]:
    """User and password of the URL take precedence over those of files; a JWT or nkey is sent in addition."""
    user, password, token = login.user, login.password, login.token
    if address.user is not None:
        user, password = address.user, address.password
        token = address.user if password is None else None
    fields: dict[str, str | None] = {"user": user, "pass": password, "auth_token": token}
    jwt, seed = login.jwt_and_seed()
    if seed is not None:
        public_key, signature = _signed(seed, nonce)
        fields |= {"jwt": jwt, "sig": signature, "nkey": public_key if jwt is None else None}
    return {name: value for name, value in fields.items() if value is not None}


def _signed(seed: str, nonce: str) -> tuple[str, str]:
    """The public key of the seed, and the signature of the nonce."""
    import nkeys

    pair = nkeys.from_seed(bytearray(seed.encode()))
    signature = base64.urlsafe_b64encode(pair.sign(nonce.encode())).rstrip(b"=").decode()
    public_key = pair.public_key.decode()
    pair.wipe()
    return public_key, signature


# ---- what is received ----


def text_of(data: bytes) -> str:
    """Of a subject or a queue group, which may be any bytes: equal texts for equal bytes."""
    return data.decode("utf-8", "surrogateescape")


def bytes_of(text: str) -> bytes:
    """What `text_of` was given."""
    return text.encode("utf-8", "surrogateescape")


def subscription_of(line: bytes) -> tuple[str, str | None, int]:
    """Subject, queue group and count of a `LS+` or `LS-` line.

    Raises:
        LeafProtocolError: it is neither.
    """
    arguments = [text_of(one) for one in line[4:].replace(b"\t", b" ").split(b" ") if one]
    match arguments:
        case [subject]:
            return subject, None, 1
        case [subject, group]:
            return subject, group, 1
        case [subject, group, count] if count.isdecimal() and len(count) < 10:
            return subject, group, int(count)
        case _:
            raise LeafProtocolError(f"not a subscription: {line[:80]!r}")


class LeafReader:
    """One per connection: received bytes in, whole lines out, in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipped_bytes = 0

    @property
    def is_between_lines(self) -> bool:
        """Nothing of a further line was received."""
        return not self._rest and not self._skipped_bytes

    def receive_data(self, data: bytes) -> Iterator[bytes]:
        """Lines that are complete now, without CR LF and without messages; exhaust it before the next call.

        Raises:
            LeafProtocolError: a line is longer than `MAX_LINE_BYTES`, or states a message without a size.
        """
        data = self._rest + data if self._rest else data
        position = 0
        while True:
            step = min(self._skipped_bytes, len(data) - position)
            self._skipped_bytes -= step
            position += step
            end = data.find(b"\r\n", position)
            if end < 0:
                break
            line = data[position:end]
            position = end + 2
            if line.startswith((b"LMSG ", b"HMSG ")):
                self._skipped_bytes = _message_bytes(line)
            else:
                yield line
        self._rest = data[position:]
        if len(self._rest) > MAX_LINE_BYTES:
            raise LeafProtocolError(f"a line of more than {MAX_LINE_BYTES} bytes: {self._rest[:60]!r}")


def _message_bytes(line: bytes) -> int:
    """What follows the line: header, payload and CR LF."""
    size = line.rsplit(None, 1)[-1]
    if not size.isdigit() or len(size) > 10:
        raise LeafProtocolError(f"a message without a size: {line[:80]!r}")
    return int(size) + 2
