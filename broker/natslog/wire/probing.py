"""What a NATS server accepts from a user, found out over a connection of its own: for `natslog doctor`.

Nothing is stored or consumed. A subscription is ended in the same write that begins it, and what is published goes to
subjects of this probe alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from natslog.errors import NatslogError, NatsLoginRefused, NatsUnavailable
from natslog.urls import without_secrets
from natslog.wire.api_probe import clusters_in, headers_of_answers, is_of_broker
from natslog.wire.credentials import NatsCredentials
from natslog.wire.leaf_protocol import LeafProtocolError, addresses_in, info_of
from natslog.wire.link import NatsLink

_ROUND_TRIPS = 20
_CHECK_EVERY_S, _TRIED_AGAIN_S = 0.1, 1.0
_ANSWERS_WITHIN_S = 0.5
_INBOX = "_INBOX.natslog."
_FIRST_SID = 900_000  # nats-py counts from 1
_MOST_LINE_BYTES = 1024 * 1024


class ServerFacts(msgspec.Struct, kw_only=True):
    """One server of `nats_url`. `problem`: why there is no connection; the other fields are then empty.

    Attributes:
        url: without user and password. refused: "publish to …" and "subscribe to …", as far as they were tried.
        api_clusters: natslog clusters that answer `$JS.API.INFO`; api_server: the NATS server, or another program does.
        certificate_expires_s: of the server, in seconds since 1970; None without TLS.
    """

    url: str
    problem: str = ""
    is_login_refused: bool = False
    version: str = ""
    max_payload_bytes: int = 0
    has_jetstream: bool = False
    has_tls: bool = False
    certificate_expires_s: float | None = None
    round_trips_ms: list[float] = []
    refused: list[str] = []
    api_clusters: list[str] = []
    api_server: bool = False


class LeafFacts(msgspec.Struct, kw_only=True):
    """A listener of `nats_leaf_url`. `is_leaf_port`: None if the server begins with the TLS handshake."""

    url: str
    problem: str = ""
    version: str = ""
    is_leaf_port: bool | None = None


async def probe_server(
    url: str,
    credentials: NatsCredentials,
    *,
    publishes: Sequence[str],
    subscribes: Sequence[str],
    api_info: str | None,
    within_s: float,
) -> ServerFacts:
    """Connects to one server, and ends the connection.

    Args:
        publishes: subjects of this probe to which something empty is published. subscribes: subjects with wildcards.
        api_info: where the JetStream API is asked who serves it; None: it is not asked.
        within_s: for the connection; everything after it has limits of its own.
    """
    link = NatsLink(url, name="natslog doctor", credentials=credentials)
    facts = ServerFacts(url=without_secrets(url))
    try:
        await link.open()
        await _connect(link, within_s)
        _state(link, facts)
        for _ in range(_ROUND_TRIPS):
            started = time.perf_counter()
            await link.flush()
            facts.round_trips_ms.append((time.perf_counter() - started) * 1000)
        await _try_permissions(link, facts, publishes, subscribes)
        if api_info is not None:
            await _ask_api(link, facts, api_info)
    except NatslogError as error:
        facts.problem, facts.is_login_refused = error.message, isinstance(error, NatsLoginRefused)
    finally:
        await link.close()
    return facts


async def _connect(link: NatsLink, within_s: float) -> None:
    """Raises NatsUnavailable: as soon as it is certain that there is no connection."""
    started_s = time.monotonic()
    while True:
        try:
            return await link.wait_until_up(_CHECK_EVERY_S)
        except NatsUnavailable:
            waited_s = time.monotonic() - started_s
            if link.is_refused or waited_s > (_TRIED_AGAIN_S if link.has_problem else within_s):
                raise


def _state(link: NatsLink, facts: ServerFacts) -> None:
    info: dict[str, Any] = link.server_info
    facts.version = str(info.get("version", ""))
    facts.max_payload_bytes = link.max_payload_bytes
    facts.has_jetstream = bool(info.get("jetstream"))
    certificate = link.server_certificate
    facts.has_tls = certificate is not None
    if certificate and "notAfter" in certificate:
        facts.certificate_expires_s = float(ssl.cert_time_to_seconds(certificate["notAfter"]))


async def _try_permissions(
    link: NatsLink, facts: ServerFacts, publishes: Sequence[str], subscribes: Sequence[str]
) -> None:
    tried = [(f"publish to {subject}", f"PUB {subject} 0\r\n\r\n") for subject in publishes]
    for sid, subject in enumerate(subscribes, start=_FIRST_SID):
        tried.append((f"subscribe to {subject}", f"SUB {subject} {sid}\r\nUNSUB {sid}\r\n"))
    for what, protocol in tried:
        forbidden = link.forbidden
        await link.send(protocol.encode())
        await link.flush()  # a refusal comes before the answer to it
        if link.forbidden > forbidden:
            facts.refused.append(what)


async def _ask_api(link: NatsLink, facts: ServerFacts, subject: str) -> None:
    inbox = f"{_INBOX}{secrets.token_hex(8)}"
    answers = await headers_of_answers(link, subject, inbox, within_s=_ANSWERS_WITHIN_S)
    if answers is None:
        facts.refused.append(f"publish to {subject}")
        return
    facts.api_clusters = sorted({one for headers in answers for one in clusters_in(headers)})
    facts.api_server = not all(map(is_of_broker, answers))


# ---- leafnode listeners ----


async def probe_leaf(url: str, *, within_s: float, handshake_first: bool) -> LeafFacts:
    """Connects to the first server of the URL, and reads its INFO. It does not log in: the server never has a second
    leafnode of the same broker.

    Args:
        handshake_first: the server sends nothing before TLS, so only the connection is tried.
    """
    facts = LeafFacts(url=without_secrets(url))
    writer = None
    try:
        address = addresses_in(url)[0]
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=_MOST_LINE_BYTES)
            if not handshake_first:
                info = info_of(await reader.readline())
                facts.version, facts.is_leaf_port = info.version, info.is_of_leaf_port
    except (NatslogError, LeafProtocolError, OSError, ValueError) as error:
        text = "no answer" if isinstance(error, TimeoutError) else str(error)
        facts.problem = text or type(error).__name__
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    return facts
