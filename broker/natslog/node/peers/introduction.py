"""The dialler's side of the handshake over HTTP. The server at the address is not authenticated until the end of it."""

from __future__ import annotations

import ssl

import aiohttp
import msgspec

from natslog.errors import BrokerUnavailable, ClusterMismatch, NatslogError, NotReady, OutdatedFolder
from natslog.node.peers.handshake import LINK_PATH, MAX_HELLO_BYTES, PROOF_HEADER, Dialling, Met
from natslog.node.peers.owner import LinkOwner

_MAX_REASON_CHARS = 600


async def introduce(
    session: aiohttp.ClientSession, owner: LinkOwner, url: str, tls: ssl.SSLContext | bool = True
) -> Met:
    """Sends the hello to the broker at this address.

    Args:
        tls: for an `https` URL; True: the authorities of the system verify the other side.

    Raises:
        ClusterMismatch: the two brokers do not belong to one cluster, or the server is not a broker. BrokerUnavailable:
        it cannot answer now.
    """
    if not owner.keys.keys:
        raise ClusterMismatch("this broker has no cluster secret: set cluster_secret_file")
    dialling = Dialling(owner.keys, owner.hello(url))
    headers = {PROOF_HEADER: dialling.proof, "Content-Type": "application/json"}
    async with session.post(
        url + LINK_PATH, data=dialling.body, headers=headers, allow_redirects=False, ssl=tls
    ) as response:
        body = await _bounded_body(response)
        if response.status != 200:
            raise _refusal(response.status, body)
        met = dialling.met(body, response.headers.get(PROOF_HEADER, ""))
    owner.check_peer(met.peer)
    return met


async def _bounded_body(response: aiohttp.ClientResponse) -> bytes:
    """The answer of the server at that address. Raises ClusterMismatch: it is longer than any broker's."""
    body = bytearray()
    while chunk := await response.content.read(MAX_HELLO_BYTES):
        body += chunk
        if len(body) > MAX_HELLO_BYTES:
            raise ClusterMismatch("its answer is larger than 64 KiB: it is not a broker")
    return bytes(body)


def _refusal(status: int, body: bytes) -> NatslogError:
    """The text of the other side is only displayed, because it is not authenticated. Two kinds of its refusals are
    kept, because they are displayed in other places: this broker's folder is outdated, and the other broker is
    starting.
    """
    try:
        error = msgspec.json.decode(body)["error"]
        reason = "".join(char for char in str(error["message"]) if char.isprintable())[:_MAX_REASON_CHARS]
    except (ValueError, RecursionError, KeyError, TypeError):
        return ClusterMismatch(f"it answered HTTP {status}, which is not the answer of a broker")
    match error.get("code"):
        case OutdatedFolder.code:
            return OutdatedFolder(reason, broker=error.get("broker"))
        case NotReady.code:
            return NotReady(reason)
    return ClusterMismatch(reason) if status < 500 else BrokerUnavailable(reason)
