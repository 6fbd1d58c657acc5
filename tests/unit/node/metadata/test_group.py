"""The metadata group around the pure core: what is saved, and in which order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from natslog.cluster.metadata import Metadata
from natslog.consensus import Member, Snapshot
from natslog.model import BrokerId
from natslog.node.metadata.group import MetadataGroup, founding_snapshot

ME = BrokerId(1)


def test_compaction_waits_for_a_received_snapshot_to_be_stored(tmp_path: Path) -> None:
    """The last chunk came while something else was being saved: the core has it, the disk has it not."""

    async def run() -> None:
        def ignored(*arguments: Any) -> None:
            """Nobody listens."""

        group = MetadataGroup(tmp_path, ME, send=ignored, forward=ignored, on_applied=lambda: None, on_bug=ignored)
        membership = (Member(id=ME, directory="d", url="http://127.0.0.1:1"),)
        group.found(founding_snapshot(Metadata(cluster_id="c"), membership))
        known = group.store.snapshot
        received = Snapshot(index=known.index + 100, term=known.term, membership=known.membership, data=known.data)
        group.raft.log.restore(received)
        await group._compact()
        assert group.store.snapshot.index == known.index, "what is being received is not stored by compaction"
        ready = group.raft.ready()
        assert ready is not None
        assert ready.snapshot is not None
        group._save(ready)
        group.raft.advance(ready)
        await group._compact()
        assert group.store.snapshot.index == received.index
        await group.stop()

    asyncio.run(run())
