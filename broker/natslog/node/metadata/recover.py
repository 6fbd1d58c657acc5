"""The last resort: a majority of the brokers is permanently lost, and a remaining one starts a new cluster.

It is an explicit operation on a stopped broker. Messages that only the lost brokers stored are lost, and their number
is unknown. The new cluster therefore has another id, so that no old broker can join it with its old folder.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import msgspec

from natslog.cluster.encoding import decode_proposal, decode_state, encode_state
from natslog.cluster.metadata import Metadata
from natslog.consensus import HardState, Index, Member, Membership, Snapshot, Term
from natslog.errors import InvalidRequest
from natslog.log.checked_file import sync_folder
from natslog.model import BrokerId, Offset, StreamRecord
from natslog.node.data_dir import DataDir, read_identity
from natslog.node.disk_reserve import DiskReserve
from natslog.node.metadata.entries import check_entries
from natslog.node.metadata.raft_store import RaftStore


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """The initial state of the new cluster. `kept`: streams with a replica on this broker. `lost`: streams without
    one.
    """

    cluster_id: str
    former_cluster_id: str
    broker: int
    kept: tuple[str, ...]
    lost: tuple[str, ...]


def recover(folder: Path, *, is_dry_run: bool) -> Recovered:
    """Makes the stopped broker of this folder the only member of a new cluster.

    Args:
        is_dry_run: only returns the plan.

    Raises:
        InvalidRequest: not the folder of a broker that belongs to a cluster. CorruptLog: it cannot be read.
        DataDirError: its broker is running.
    """
    found = read_identity(folder)
    if found is not None and not (folder / "raft").exists() and (folder / "raft.new").is_dir():
        (folder / "raft.new").rename(folder / "raft")  # an earlier recovery was interrupted immediately before this
    if found is None or not (folder / "raft").is_dir():
        raise InvalidRequest(f"{folder} is not the data folder of a broker that belongs to a cluster")
    data_dir = DataDir(folder, found.broker_id)
    try:
        return _recover(data_dir, is_dry_run)
    finally:
        data_dir.release()


def _recover(data_dir: DataDir, is_dry_run: bool) -> Recovered:
    store, identity = RaftStore(data_dir.raft), data_dir.identity
    me = BrokerId(identity.broker_id)
    state = _replayed_state(store)
    kept = {name: record for name, record in state.streams.items() if me in record.replicas}
    recovered = Recovered(
        cluster_id=secrets.token_hex(8),
        former_cluster_id=identity.cluster_id,
        broker=me,
        kept=tuple(sorted(kept)),
        lost=tuple(sorted(set(state.streams) - set(kept))),
    )
    if is_dry_run:
        return recovered
    known = state.brokers.get(me)
    new = Metadata(
        cluster_id=recovered.cluster_id,
        version=state.version,
        brokers={} if known is None else {me: known},
        streams={name: _alone(record, me) for name, record in kept.items()},
        tombstones={key: one for key, one in state.tombstones.items() if one.broker == me},
        feature_level=state.feature_level,
    )
    member = Member(id=me, directory=identity.directory, url="" if known is None else known.url)
    snapshot = Snapshot(
        index=Index(store.last_index + 1),
        term=Term(store.hard_state.term + 1),
        membership=Membership(members=(member,)),
        data=encode_state(new),
    )
    data_dir.raise_level(new.feature_level)
    _replace_store(data_dir, store, snapshot)
    data_dir.recovered_as(recovered.cluster_id)
    return recovered


def _replayed_state(store: RaftStore) -> Metadata:
    """Committed or not: proposals that reached this disk are kept."""
    state = decode_state(store.snapshot.data)
    check_entries(store.entries)
    for entry in store.entries:
        if entry.kind == "command":
            state.decide(decode_proposal(entry.data))
    return state


def _alone(record: StreamRecord, me: BrokerId) -> StreamRecord:
    return msgspec.structs.replace(
        record,
        settings=msgspec.structs.replace(record.settings, replicas=1, min_isr=1),
        leader=None,
        replicas=(me,),
        isr=(me,),
        eligible=(),
        unproven=(),
        target=(),
        target_min_isr=0,
        purged_below=Offset(0),  # the log of this broker may end below it
        holders=(me,) if me in record.holders else (),
        companion_holders=(me,) if me in record.companion_holders else (),
        version=record.version + 1,
    )


def _replace_store(data_dir: DataDir, store: RaftStore, snapshot: Snapshot) -> None:
    """The old one is kept beside it; a crash in between leaves the old one, under one name or the other."""
    store.close()
    fresh = data_dir.path / "raft.new"
    shutil.rmtree(fresh, ignore_errors=True)
    reserve = DiskReserve(data_dir.raft / "reserve")
    RaftStore(fresh, reserve=reserve).save(HardState(term=snapshot.term, commit=snapshot.index), None, (), snapshot)
    former = data_dir.path / f"raft.before-{snapshot.index}"
    data_dir.raft.rename(former)
    fresh.rename(data_dir.raft)
    sync_folder(data_dir.path)
