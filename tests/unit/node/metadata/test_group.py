"""The metadata group around the pure core: what is saved, and in which order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from natslog.cluster.commands import BrokerRecord, Proposal, RegisterBroker
from natslog.cluster.metadata import Metadata
from natslog.consensus import Member, Snapshot
from natslog.model import BrokerId
from natslog.node.metadata.group import MetadataGroup, Request, founding_snapshot

ME = BrokerId(1)


def test_compaction_waits_for_a_received_snapshot_to_be_stored(tmp_path: Path) -> None:
    """The last chunk came while something else was being saved: the core has it, the disk has it not."""

    async def run() -> None:
        def ignored(*arguments: Any) -> None:
            """No server listens."""

        group = MetadataGroup(
            tmp_path,
            ME,
            send=ignored,
            forward=ignored,
            on_applied=ignored,
            on_leader=ignored,
            on_bug=ignored,
            raise_level=ignored,
        )
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


def test_a_change_requested_twice_ends_for_both_also_where_the_first_gives_up(tmp_path: Path) -> None:
    """A client that disconnects and repeats its request with the same id."""

    def ignored(*arguments: Any) -> None:
        """No server listens."""

    async def run() -> None:
        group = MetadataGroup(
            tmp_path,
            ME,
            send=ignored,
            forward=ignored,
            on_applied=ignored,
            on_leader=ignored,
            on_bug=ignored,
            raise_level=ignored,
        )
        membership = (Member(id=ME, directory="d", url="http://127.0.0.1:1"),)
        group.found(founding_snapshot(Metadata(cluster_id="c", feature_level=2), membership))
        group.start()
        propose_once, held = group._propose_once, list[Proposal]()
        group._propose_once = held.append  # type: ignore[method-assign]
        register = RegisterBroker(broker=BrokerRecord(id=ME, url="http://127.0.0.1:1", directory="d", nonce="n"))
        first, second = (asyncio.create_task(group.propose(register, Request("one", "client"))) for _ in range(2))
        async with asyncio.timeout(30):
            while len(held) < 2 or not group.is_leader:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            first.cancel()
            await asyncio.wait([first])
            propose_once(held[0])
            assert await second
        assert not group._waiting
        await group.stop()

    asyncio.run(run())
