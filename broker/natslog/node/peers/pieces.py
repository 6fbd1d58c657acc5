"""Long byte strings as answers between brokers: in pieces, each an answer of its own."""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from typing import Any

from natslog.errors import CorruptAnswer
from natslog.node.peers.links import DialledLink

_PIECE_BYTES = 2 * 1024 * 1024
_PIECE_WITHIN_S = 10.0


def piece(data: bytes | memoryview, at: int) -> dict[str, Any]:
    """The answer to a request for the part from `at` on."""
    return {"data": b64encode(data[at : at + _PIECE_BYTES]).decode(), "total": len(data)}


async def ask_for_pieces(link: DialledLink, what: str, **asked: Any) -> bytes:
    """All that the other broker answers to `what`.

    Raises:
        NatslogError: as the other broker answers; CorruptAnswer: the answer cannot be decoded.
    """
    data = b""
    while True:
        found = await link.ask(what, _PIECE_WITHIN_S, **asked, at=len(data))
        try:
            part, total = b64decode(found["data"], validate=True), int(found["total"])
        except (binascii.Error, TypeError, ValueError, KeyError) as error:
            raise CorruptAnswer(f"the answer of another broker to {what} cannot be decoded: {error}") from error
        data += part
        if not part or len(data) >= total:
            return data
