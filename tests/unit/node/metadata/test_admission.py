"""Whose links a broker takes: what its own metadata says of the lives of another broker's data folder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from natslog.cluster.commands import BrokerRecord, Proposal, RegisterBroker
from natslog.cluster.metadata import Metadata
from natslog.config import BrokerConfig
from natslog.consensus import Entry, HardState, Member
from natslog.errors import ClusterMismatch, NotReady, OutdatedFolder
from natslog.node.data_dir import DataDir
from natslog.node.metadata.admission import Admission
from natslog.node.metadata.entries import commands_of
from natslog.node.metadata.group import MetadataGroup, founding_snapshot
from natslog.node.peers.handshake import PROTOCOL, Hello
from natslog.node.peers.keys import KeyRing

SEVENTH = BrokerRecord(id=2, url="http://log2", directory="d2", life=7, nonce="g")
EIGHTH = msgspec.structs.replace(SEVENTH, life=8, nonce="h")


def opened(folder: Path, *, later: tuple[RegisterBroker, ...] = (), known: BrokerRecord = SEVENTH) -> Any:
    """Broker 1, whose stored metadata has broker 2 in life 7; `later` is in its log, committed."""

    def ignored(*arguments: Any) -> None:
        """No server listens."""

    def group_of(data_dir: DataDir) -> MetadataGroup:
        handlers = dict.fromkeys(("send", "forward", "on_applied", "on_leader", "on_bug"), ignored)
        return MetadataGroup(data_dir.raft, 1, **handlers, raise_level=data_dir.raise_level)

    data_dir = DataDir(folder, 1)
    members = tuple(Member(id=one, directory=directory, url="") for one, directory in ((1, "d1"), (2, "d2")))
    group = group_of(data_dir)
    group.found(founding_snapshot(Metadata(cluster_id="c", brokers={2: known}), members))
    entries = tuple(
        Entry(2 + at, 1, "command", msgspec.msgpack.encode(Proposal(id=str(at), command=command)))
        for at, command in enumerate(later)
    )
    if entries:
        group.store.save(HardState(term=1, commit=1 + len(entries)), None, entries, None)
        group.store.close()
        group = group_of(data_dir)
    data_dir.join("c")
    return Admission(BrokerConfig(broker_id=1), data_dir, group, KeyRing(()))


def hello(*lives: str, directory: str = "d2") -> Hello:
    return Hello(
        broker=2,
        url="http://log2",
        directory=directory,
        life=9,
        cluster_id="c",
        protocol=PROTOCOL,
        version="",
        min_level=2,
        max_level=3,
        wall_us=0,
        lives=lives,
    )


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def in_loop() -> None:
        await work()

    asyncio.run(in_loop())


def test_folder_that_had_the_registered_life_is_let_in_also_where_this_broker_is_behind(tmp_path: Path) -> None:
    async def work() -> None:
        admission = opened(tmp_path)
        admission.check_peer(hello("d2.7.g", "d2.8.h"))
        admission.check_peer(hello("d2.5.e", "d2.7.g", "d2.30.z", "d2.31.y"))
        await admission.group.stop()

    run(work)


@pytest.mark.parametrize("lives", [(), ("d2.6.f",), ("d2.6.f", "d2.7.x"), ("d2.6.f", "d2.7.x", "d2.8.x")])
def test_older_copy_is_not_let_in(tmp_path: Path, lives: tuple[str, ...]) -> None:
    async def work() -> None:
        admission = opened(tmp_path)
        with pytest.raises(OutdatedFolder, match=r"d2\.7\.g.*cluster remove 2 --force"):
            admission.check_peer(hello(*lives))
        await admission.group.stop()

    run(work)


def test_other_folder_is_refused_as_such(tmp_path: Path) -> None:
    async def work() -> None:
        admission = opened(tmp_path)
        with pytest.raises(ClusterMismatch, match="not the registered one"):
            admission.check_peer(hello("d3.1.a", directory="d3"))
        await admission.group.stop()

    run(work)


def test_life_registered_without_nonce_is_recognised_by_its_exact_name(tmp_path: Path) -> None:
    async def work() -> None:
        known = msgspec.structs.replace(SEVENTH, nonce="")
        admission = opened(tmp_path, known=known)
        admission.check_peer(hello("d2.6", "d2.7", "d2.8.h"))
        with pytest.raises(OutdatedFolder):
            admission.check_peer(hello("d2.6", "d2.7.x"))  # the copy of life 6 began a life 7 of its own
        await admission.group.stop()

    run(work)


def test_link_is_taken_only_when_the_stored_registrations_are_applied_and_given_up_when_a_newer_one_is(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        eighth = RegisterBroker(broker=EIGHTH, lives=("d2.7.g", "d2.8.h"))
        admission = opened(tmp_path, later=(eighth,))
        older = hello("d2.7.g", "d2.8.x")
        with pytest.raises(NotReady):
            admission.check_peer(older)
        admission.check_still_current(older)
        group = admission.group
        ready = group.raft.ready()
        group._apply(ready, commands_of(ready.committed))
        group.raft.advance(ready)
        assert group.state.brokers[2] == EIGHTH
        with pytest.raises(OutdatedFolder):
            admission.check_still_current(older)
        with pytest.raises(OutdatedFolder):
            admission.check_peer(older)
        admission.check_peer(hello("d2.7.g", "d2.8.h", "d2.9.i"))
        await group.stop()

    run(work)
