"""Parts that a commit names and that another broker has: the leader copies them, so that a batch survives a change of
the leader between staging and commit.

A copy is received as an upload is: it is checked completely, and its receipt must be the one that the commit names.
"""

from __future__ import annotations

import asyncio
import binascii
from base64 import b64decode
from collections.abc import AsyncIterator, Iterable
from typing import Any
from weakref import WeakValueDictionary

from natslog.errors import BrokerUnavailable, PartsMissing, PartsUnavailable
from natslog.ingest.staged_rows import RowRules
from natslog.model import BrokerId, PartReceipt
from natslog.node.cluster_node import ClusterNode
from natslog.node.writes.staging import BatchKey, Staging

_PIECE_WITHIN_S = 10.0


class StagedCopies:
    """Of one broker."""

    def __init__(self, cluster: ClusterNode, staging: Staging) -> None:
        self._cluster, self._staging = cluster, staging
        # A copy replaces another of the same part, which may be in use: one commit of a batch at a time.
        self._copying: WeakValueDictionary[BatchKey, asyncio.Lock] = WeakValueDictionary()

    async def fetch(self, key: BatchKey, receipts: Iterable[PartReceipt], covered_by: tuple[str, ...]) -> None:
        """Copies what is staged at other brokers, by what the receipts state, and not here.

        Args:
            covered_by: the stream's subjects.

        Raises:
            PartsUnavailable: a broker that has one does not respond. PartsMissing: it does not have it any more.
        """
        async with self._copying.setdefault(key, asyncio.Lock()):
            for receipt in receipts:
                broker = BrokerId(receipt.broker or self._cluster.me)
                known = broker != self._cluster.me and broker in self._cluster.state.brokers
                if known and self._staging.lacks(key, receipt):
                    await self._fetch_one(key, receipt, broker, covered_by)

    async def _fetch_one(
        self, key: BatchKey, receipt: PartReceipt, broker: BrokerId, covered_by: tuple[str, ...]
    ) -> None:
        first = await self._piece(key, receipt, broker, 0)
        rules = RowRules(covered_by, first["default_subject"])

        async def chunks() -> AsyncIterator[bytes]:
            piece, at = first, 0
            while data := _decoded(piece):
                yield data
                at += len(data)
                piece = await self._piece(key, receipt, broker, at)

        await self._staging.receive(key, receipt.part, receipt.attempt, rules, chunks())

    async def _piece(self, key: BatchKey, receipt: PartReceipt, broker: BrokerId, at: int) -> dict[str, Any]:
        stream, producer, batch = key
        named = {"stream": stream, "producer": producer, "batch": batch, "part": receipt.part}
        link = self._cluster.link_to(broker)
        try:
            if link is None:
                raise BrokerUnavailable(f"broker {broker} is not connected")
            found = await link.ask("staged_part", _PIECE_WITHIN_S, **named, attempt=receipt.attempt, at=at)
        except BrokerUnavailable as error:
            raise PartsUnavailable(
                f"part {receipt.part} of batch {batch} of {producer} is staged at broker {broker}, which does not "
                f"respond ({error.message}): repeat the commit when it is back",
                broker=broker,
            ) from error
        if not isinstance(found, dict) or {"data", "default_subject"} - found.keys():
            raise PartsMissing(f"broker {broker} answered with no part: stage the batch again")
        return found


def _decoded(piece: dict[str, Any]) -> bytes:
    try:
        return b64decode(piece["data"], validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise PartsMissing(f"a part from another broker cannot be decoded ({error}): stage the batch again") from error
