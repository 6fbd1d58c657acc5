"""The disk reserve, and the Raft store that lives on it, on a small file system that is really full."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from natslog.consensus.types import Entry, HardState, Index, Snapshot, Term
from natslog.errors import StorageFailed
from natslog.log.checked_file import read_checked
from natslog.model import BrokerId
from natslog.node.data_dir import DataDir
from natslog.node.disk_reserve import RESERVE_BYTES, DiskReserve
from natslog.node.metadata.raft_store import RaftStore

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """To the last byte."""
    filler = folder / "filler"
    with open(filler, "ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(65536))
    assert free_bytes(folder) == 0
    return filler


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def test_reserve_is_allocated_given_back_in_steps_and_made_whole_when_there_is_room(disk: Path) -> None:
    reserve = DiskReserve(disk / "reserve")
    before = free_bytes(disk)
    reserve.refill()
    assert reserve.has_room
    assert before - free_bytes(disk) == RESERVE_BYTES == os.stat(disk / "reserve").st_size
    filler = fill(disk)
    reserve.refill()
    assert not reserve.has_room, "it is whole, and beside it there is nothing"
    steps = 0
    while reserve.release():
        steps += 1
        assert free_bytes(disk) == steps * RESERVE_BYTES // 16
    assert steps == 16
    reserve.refill()
    assert (reserve.has_room, os.stat(disk / "reserve").st_size) == (False, 0), "the room is left to who needs it"
    os.truncate(filler, filler.stat().st_size - RESERVE_BYTES // 4)
    reserve.refill()
    assert reserve.has_room
    assert os.stat(disk / "reserve").st_blocks * 512 == RESERVE_BYTES


def test_write_gets_room_from_the_reserve_and_other_errors_are_raised(disk: Path) -> None:
    reserve = DiskReserve(disk / "reserve")
    reserve.refill()
    fill(disk)
    assert reserve.within(lambda: (disk / "vital").write_bytes(bytes(1024 * 1024))) == 1024 * 1024
    assert not reserve.has_room
    with pytest.raises(OSError, match="No space left"):
        reserve.within(lambda: (disk / "large").write_bytes(bytes(8 * 1024 * 1024)))
    with pytest.raises(FileNotFoundError):
        reserve.within(lambda: (disk / "missing" / "file").write_bytes(b""))


def test_quota_that_leaves_no_room_is_noticed_though_the_disk_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel here has no quotas: what it would say is said for it."""
    file, real = tmp_path / "reserve", os.posix_fallocate
    reserve = DiskReserve(file)
    reserve.refill()
    assert reserve.release()
    held_bytes = file.stat().st_size

    def over_quota(fd: int, start: int, length: int) -> None:
        real(fd, start, length - 4096)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", over_quota)
        reserve.refill()
        assert not reserve.has_room
        assert not reserve.has_room_now()
        assert file.stat().st_size == held_bytes
    reserve.refill()
    assert reserve.has_room_now()


def test_raft_store_goes_on_on_a_full_disk_over_many_snapshots(disk: Path) -> None:
    reserve = DiskReserve(disk / "reserve")
    reserve.refill()
    store = RaftStore(disk / "raft", reserve=reserve, room_bytes=100_000)
    fill(disk)
    for at in range(1, 301):
        hard_state = HardState(term=Term(at), vote=BrokerId(at), commit=Index(at))
        store.save(hard_state, None, (Entry(Index(at), Term(at), "command", b"x" * 2000),), None)
        if at % 60 == 0:
            store.compact(Snapshot(index=Index(at), term=Term(at), data=bytes(500_000)))
            assert store.snapshot.index == at
    found = RaftStore(disk / "raft")
    assert (found.hard_state, found.entries, found.snapshot.index) == (hard_state, store.entries, 300)
    assert not reserve.has_room


def test_snapshot_for_which_the_reserve_is_too_small_waits_and_saves_go_on(disk: Path) -> None:
    reserve = DiskReserve(disk / "reserve")
    reserve.refill()
    store = RaftStore(disk / "raft", reserve=reserve)
    entry = Entry(Index(1), Term(1), "command", b"x")
    store.save(HardState(term=Term(1), commit=Index(1)), None, (entry,), None)
    filler = fill(disk)
    store.compact(Snapshot(index=Index(1), term=Term(1), data=bytes(6_000_000)))
    assert (store.snapshot.index, store.entries) == (0, (entry,))
    store.save(HardState(term=Term(2), vote=BrokerId(1), commit=Index(1)), None, (), None)
    assert RaftStore(disk / "raft").hard_state.term == 2
    filler.unlink()
    store.compact(Snapshot(index=Index(1), term=Term(1), data=bytes(6_000_000)))
    assert (store.snapshot.index, RaftStore(disk / "raft").snapshot.index) == (1, 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("step", range(60))
def test_no_room_in_any_step_of_a_save_loses_nothing_and_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, number: int
) -> None:
    """The kernel refuses one call, after half a write, say; a reserve that is whole makes room."""
    reserve = DiskReserve(tmp_path / "reserve")
    reserve.refill()
    store = RaftStore(tmp_path / "raft", reserve=reserve, room_bytes=400)
    steps_left, real = step, {name: getattr(os, name) for name in ("writev", "fsync", "fdatasync", "pwrite")}

    def refusing(name: str) -> None:
        def call(fd: int, *arguments: object) -> object:
            nonlocal steps_left
            if "/raft" not in os.readlink(f"/proc/self/fd/{fd}"):
                return real[name](fd, *arguments)
            steps_left -= 1
            if steps_left == -1:
                if name == "writev":
                    os.write(fd, b"half")
                raise OSError(number, os.strerror(number))
            return real[name](fd, *arguments)

        monkeypatch.setattr(os, name, call)

    for name in real:
        refusing(name)
    entries = tuple(Entry(Index(at), Term(at), "command", b"x" * 50) for at in range(1, 7))
    store.save(HardState(term=Term(4), vote=BrokerId(1)), None, entries[:4], None)
    store.save(HardState(term=Term(4), vote=BrokerId(1), commit=Index(2)), None, (), None)
    store.save(None, Index(4), (entries[3],), None)
    store.compact(Snapshot(index=Index(2), term=Term(2), data=b"state"))
    store.save(HardState(term=Term(6), vote=BrokerId(2), commit=Index(4)), None, entries[4:], None)
    monkeypatch.undo()
    for one in (store, RaftStore(tmp_path / "raft")):
        assert one.hard_state == HardState(term=Term(6), vote=BrokerId(2), commit=Index(4))
        assert (one.snapshot.index, one.entries) == (2, entries[2:])
    if steps_left < 0:
        assert os.stat(tmp_path / "reserve").st_size < RESERVE_BYTES


def test_store_without_anything_left_of_the_reserve_fails(disk: Path) -> None:
    fill(disk)
    with pytest.raises(StorageFailed, match="No space left"):
        RaftStore(disk / "raft", reserve=DiskReserve(disk / "reserve")).save(HardState(term=Term(1)), None, (), None)


def test_folder_is_claimed_and_released_on_a_full_disk(disk: Path) -> None:
    """`broker` and `life` are written with the reserve of the folder."""
    folder = disk / "data"
    DataDir(folder, 1).release()
    (folder / "raft").mkdir()
    reserve = DiskReserve(folder / "raft" / "reserve")
    reserve.refill()
    (folder / "lock").unlink()  # its block is the first that is missing
    (folder / "lock").write_bytes(b"1")
    fill(disk)
    claimed = DataDir(folder, 1)
    claimed.life.end()
    claimed.release()
    assert os.stat(folder / "raft" / "reserve").st_size < RESERVE_BYTES
    assert read_checked(folder / "life", "life", 2) is not None
