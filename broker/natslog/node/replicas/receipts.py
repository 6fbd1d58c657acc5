"""Receipts of erasures: what each replica of a stream has rewritten, and whether it has finished.

Each broker states it for its own replica; a broker that does not answer is named with the reason. Copies that no
replica changes are named too: segments and folders that were kept because they are damaged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from natslog.errors import ErasureNotFound
from natslog.model import StreamRecord
from natslog.node.cluster_node import ClusterNode
from natslog.node.replicas.hosting import Hosting
from natslog.node.threads import in_thread

_ASK_WITHIN_S = 5.0

ReplicaReceipt: TypeAlias = dict[str, Any]
"""`broker`, `erases`, `messages`, `requested_us`, `files`, `completed_us` (0: not complete), `remaining`; or
`problem`."""


class Receipts:
    """Of one broker. Also answers the request `erasure` of other brokers."""

    def __init__(self, cluster: ClusterNode, hosting: Hosting) -> None:
        self._cluster, self._hosting = cluster, hosting

    async def on_this_broker(self, name: str, erasure_id: str) -> ReplicaReceipt:
        """Of the replica here.

        Raises:
            ErasureNotFound, BrokerUnavailable; NatslogError: it has no log.
        """
        stream = self._hosting.require(name)
        log = stream.usable_log()
        found = log.erasures.receipt(erasure_id)
        if found is None:
            raise ErasureNotFound(
                f"the replica of stream {name!r} on broker {self._cluster.me} has no erasure {erasure_id!r}",
                stream=name,
                erasure=erasure_id,
            )
        known, receipt = found
        return {
            "broker": stream.me,
            "erases": known.erases,
            "messages": known.messages,
            "requested_us": known.requested_us,
            "files": msgspec.to_builtins(receipt.files),
            "completed_us": receipt.completed_us,
            "remaining": await in_thread(self._hosting.services.readers, _kept_damaged, log.folder),
        }

    async def everywhere(self, record: StreamRecord, erasure_id: str) -> list[ReplicaReceipt]:
        """Of every replica, in the order of the record."""
        named = {"name": record.name, "erasure_id": erasure_id}
        return await self._cluster.requests.ask_each(record.replicas, "erasure", _ASK_WITHIN_S, **named)


def _kept_damaged(folder: Path) -> list[str]:
    """Files and folders of the replica that were set aside, relative to the folder of all streams."""
    kept = [*folder.glob("*.damaged*"), *folder.parent.glob(f"{folder.name}.damaged-*")]
    return sorted(str(path.relative_to(folder.parent)) for path in kept)
