"""Data of a newer natslog: no field is dropped, the broker stops and names the remedy, and nothing is changed."""

from __future__ import annotations

import asyncio
import shutil
import typing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from natslog.cluster.commands import FinalizeUpgrade, Proposal
from natslog.cluster.encoding import decode_proposal, decode_state, encode_proposal, encode_state
from natslog.cluster.features import LATEST_LEVEL
from natslog.cluster.metadata import Metadata
from natslog.cluster.outcomes import RecentOutcomes
from natslog.consensus import AppendRequest, Entry, HardState, Index, Member, Membership, Message, Snapshot, Term
from natslog.errors import UpgradeRequired
from natslog.log.checked_file import read_checked, write_checked
from natslog.model import BrokerId
from natslog.node.data_dir import DataDir, Identity, read_identity
from natslog.node.life import _Stored
from natslog.node.metadata.entries import check_entries
from natslog.node.metadata.group import MetadataGroup, founding_snapshot
from natslog.node.metadata.raft_store import RaftStore
from natslog.node.metadata.raft_stored import Save
from natslog.node.metadata.raft_wal import Manifest
from natslog.node.metadata.recover import recover

ME, OTHER = BrokerId(1), BrokerId(2)
pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
GOLDEN = Path(__file__).parents[3] / "golden" / "data-dir-v0.2.0" / "data"


def structs_in(kind: Any, found: set[Any]) -> set[Any]:
    """Every struct that is part of a type."""
    for part in typing.get_args(kind):
        structs_in(part, found)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in found:
        found.add(kind)
        for hint in typing.get_type_hints(kind).values():
            structs_in(hint, found)
    return found


def test_every_struct_of_the_metadata_rejects_unknown_fields() -> None:
    found: set[Any] = set()
    roots = (Metadata, RecentOutcomes, Proposal, Entry, Snapshot, Membership, Identity, _Stored, Message)
    for root in (*roots, Manifest, Save):
        structs_in(root, found)
    assert len(found) > 30
    lax = sorted(kind.__name__ for kind in found if not kind.__struct_config__.forbid_unknown_fields)
    assert lax == []


def widened(data: bytes, *path: str) -> bytes:
    """With one field more, in the map at the end of the path."""
    body = at = unpack(data)
    for name in path:
        at = at[name]
    at["of_a_newer_version"] = 1
    return pack(body)


def test_states_and_commands_of_a_newer_version_are_refused() -> None:
    state = unpack((GOLDEN.parents[1] / "metadata-imports-state-v2.msgpack").read_bytes(), type=Metadata)
    data = encode_state(state)
    assert decode_state(data) == state
    newer = [widened(data), widened(data, "streams", "resumed"), widened(data, "streams", "resumed", "settings")]
    for one in newer:
        with pytest.raises(UpgradeRequired, match="newer version of natslog.*of_a_newer_version.*upgrade this broker"):
            decode_state(one)
    with pytest.raises(UpgradeRequired, match=f"feature level {LATEST_LEVEL + 1}.*upgrade this broker"):
        decode_state(encode_state(Metadata(cluster_id="c", feature_level=LATEST_LEVEL + 1)))
    proposal = encode_proposal(Proposal(id="p", command=FinalizeUpgrade(level=2)))
    unknown = pack({"id": "p", "command": {"type": "RenameStream", "name": "a"}})
    higher = encode_proposal(Proposal(id="p", command=FinalizeUpgrade(level=LATEST_LEVEL + 1)))
    for one in (widened(proposal), widened(proposal, "command"), unknown, higher):
        with pytest.raises(UpgradeRequired, match="upgrade this broker"):
            decode_proposal(one)


@pytest.mark.parametrize("name", ["broker", "life", "raft/hard-state"])
def test_a_file_with_a_newer_field_stops_the_start_and_stays_as_it_is(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(GOLDEN, folder)
    kind, version = name.replace("/", "-"), 3 if name == "broker" else 2
    body = read_checked(folder / name, kind, version)
    write_checked(folder / name, kind, version, body | {"of_a_newer_version": 1})
    before = contents(folder)
    opened = partial(RaftStore, folder / "raft") if name.startswith("raft") else partial(DataDir, folder, 1)
    with pytest.raises(UpgradeRequired, match=f"{name}.*newer version of natslog.*upgrade this broker"):
        opened()
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, bytes]:
    found = {path for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_a_folder_of_a_higher_level_is_refused(tmp_path: Path) -> None:
    DataDir(tmp_path, 1).release()
    write_checked(tmp_path / "broker", "broker", 3, Identity(broker_id=1, feature_level=LATEST_LEVEL + 1))
    for opened in (lambda: DataDir(tmp_path, 1), lambda: recover(tmp_path, is_dry_run=True)):
        with pytest.raises(UpgradeRequired, match=f"feature level {LATEST_LEVEL + 1}.*upgrade this broker"):
            opened()


# ---- the group, with a real store ----


class Opened:
    """A group of two brokers on a folder, which this one follows."""

    def __init__(self, folder: Path, *, level: int = 2) -> None:
        self.folder, self.bugs, self.levels, self.applied = folder, [], [], 0
        if not (folder / "hard-state").exists():
            members = tuple(Member(id=one, directory=f"d{one}", url=f"http://127.0.0.1:{one}") for one in (1, 2))
            snapshot = founding_snapshot(Metadata(cluster_id="c", feature_level=level), members)
            RaftStore(folder).save(HardState(term=1, commit=1), None, (), snapshot)

        def ignored(*arguments: Any) -> None:
            """No server listens."""

        self.group = MetadataGroup(
            folder,
            ME,
            send=ignored,
            forward=ignored,
            on_applied=ignored,
            on_leader=ignored,
            on_bug=lambda what, error: self.bugs.append(error),
            raise_level=lambda level: self.levels.append((level, self.group_level())),
        )

    def group_level(self) -> int:
        return self.group.state.feature_level if hasattr(self, "group") else 0

    async def receive(self, *entries: Entry, commit: int) -> None:
        request = AppendRequest(sender=OTHER, to=ME, term=2, prev_index=1, prev_term=1, entries=entries, commit=commit)
        self.group.received((request,))
        async with asyncio.timeout(10):
            while not self.bugs and self.group.raft.applied < commit:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def command(index: int, data: bytes) -> Entry:
    return Entry(index, 2, "command", data)


UNKNOWN = pack({"id": "p", "command": {"type": "RenameStream", "name": "a"}})
RAISED = encode_proposal(Proposal(id="r", command=FinalizeUpgrade(level=3)))


def test_an_unknown_command_from_the_leader_stops_the_broker_and_is_not_stored(tmp_path: Path) -> None:
    async def run() -> None:
        opened = Opened(tmp_path)
        opened.group.start()
        before = opened.group.state
        await opened.receive(command(2, UNKNOWN), commit=1)
        await opened.group.stop()
        assert [type(bug) for bug in opened.bugs] == [UpgradeRequired]
        assert opened.group.state == before
        assert RaftStore(tmp_path).last_index == 1

    asyncio.run(run())


def test_an_unknown_command_in_the_stored_log_stops_the_start(tmp_path: Path) -> None:
    async def run() -> None:
        Opened(tmp_path)
        RaftStore(tmp_path).save(HardState(term=2, commit=1), None, [command(2, UNKNOWN)], None)
        before = contents(tmp_path)
        with pytest.raises(UpgradeRequired, match="RenameStream.*upgrade this broker"):
            Opened(tmp_path)
        assert contents(tmp_path) == before

    asyncio.run(run())


def test_the_folder_notes_a_level_before_it_is_applied(tmp_path: Path) -> None:
    async def run() -> None:
        opened = Opened(tmp_path)
        opened.group.start()
        await opened.receive(command(2, RAISED), commit=2)
        await opened.group.stop()
        assert opened.bugs == []
        assert opened.group.state.feature_level == 3
        assert opened.levels == [(2, 0), (3, 2)], "at the start, and while the state was at level 2"

    asyncio.run(run())


def test_the_folder_notes_a_level_before_a_snapshot_of_it_is_stored(tmp_path: Path) -> None:
    async def run() -> None:
        opened = Opened(tmp_path)
        known = opened.group.store.snapshot
        newer = Snapshot(
            index=known.index + 100,
            term=known.term,
            membership=known.membership,
            data=encode_state(Metadata(cluster_id="c", feature_level=3)),
        )
        stored: list[int] = []
        opened.group._raise_level = lambda level: stored.append(opened.group.store.snapshot.index)
        opened.group.raft.log.restore(newer)
        opened.group.start()
        async with asyncio.timeout(10):
            while opened.group.state.feature_level < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await opened.group.stop()
        assert stored == [known.index]

    asyncio.run(run())


def test_the_identity_names_the_level(tmp_path: Path) -> None:
    folder = DataDir(tmp_path, 1)
    folder.join("c")
    assert read_checked(tmp_path / "broker", "broker", 3)["feature_level"] == 2, "natslog 0.2.0 takes none as level 1"
    folder.raise_level(3)
    folder.raise_level(2)
    folder.release()
    found = read_identity(tmp_path)
    assert found is not None
    assert (found.feature_level, found.cluster_id, found.directory) == (3, "c", folder.identity.directory)


def test_recover_keeps_the_level(tmp_path: Path) -> None:
    async def run() -> None:
        folder = DataDir(tmp_path, 1)
        folder.join("c")
        Opened(folder.raft, level=2)
        folder.release()

    asyncio.run(run())
    recover(tmp_path, is_dry_run=False)
    assert decode_state(RaftStore(tmp_path / "raft").snapshot.data).feature_level == 2
    assert read_checked(tmp_path / "broker", "broker", 3)["feature_level"] == 2


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81", b"\xa1\xff", b"\x91" * 5000], ids=repr)
def test_bytes_that_are_no_message_pack_are_refused_like_those_of_a_newer_version(data: bytes) -> None:
    with pytest.raises(UpgradeRequired):
        decode_proposal(data)
    with pytest.raises(UpgradeRequired):
        decode_state(data + b"\xc1")
    with pytest.raises(UpgradeRequired):
        check_entries([Entry(Index(1), Term(1), "membership", data)])


# ---- level 1, and what natslog 0.2.0 has not completed ----


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "at feature level 1.*Run natslog 0.2.0 on all brokers"),
        ({"feature_level": 1, "outcomes": {"p": {"changed": True}}}, "Run natslog 0.2.0 on all brokers"),
        ({"feature_level": 2, "cursors": {"c/s": {"consumer": "c"}}}, "make 1,024 changes of the metadata"),
        ({"feature_level": 2, "outcomes": {"p": {"changed": True}}}, "make 1,024 changes of the metadata"),
        ({"feature_level": 2, "cursor_outcomes": {"p": {"changed": True}}}, "make 1,024 changes of the metadata"),
    ],
)
def test_states_of_level_1_and_those_that_are_half_way_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(UpgradeRequired, match=problem):
        decode_state(pack({"cluster_id": "c"} | fields))


def test_a_state_names_what_natslog_0_2_0_would_take_as_level_1() -> None:
    written = unpack(encode_state(Metadata(cluster_id="c")))
    assert written == {"cluster_id": "c", "feature_level": 2, "cursors_moved": True}
