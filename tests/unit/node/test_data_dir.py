"""A data folder that is not ours, not ready, or not usable: one sentence that says what to do, nothing changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from natslog.errors import CorruptLog, DataDirError
from natslog.log.checked_file import read_checked, write_checked
from natslog.node.data_dir import DataDir
from tests.conftest import open_log


def test_folder_is_claimed_and_found_again(tmp_path: Path) -> None:
    first = DataDir(tmp_path / "d", 1)
    first.release()
    second = DataDir(tmp_path / "d", 1)
    assert second.identity == first.identity
    second.release()


@pytest.mark.parametrize("mounted", [".", "streams"])
def test_new_file_system_that_is_mounted_is_an_unused_folder(tmp_path: Path, mounted: str) -> None:
    (tmp_path / "data" / mounted / "lost+found").mkdir(parents=True)
    DataDir(tmp_path / "data", 1).release()
    (tmp_path / "used" / "streams" / "orders.0").mkdir(parents=True)
    with pytest.raises(CorruptLog, match="was used before"):
        DataDir(tmp_path / "used", 1)


def test_folder_of_another_broker_is_refused(tmp_path: Path) -> None:
    DataDir(tmp_path, 1).release()
    with pytest.raises(DataDirError, match="belongs to broker 1, but this is broker 2"):
        DataDir(tmp_path, 2)
    DataDir(tmp_path, 1).release()


def test_folder_in_use_by_a_live_process_is_refused_and_free_when_it_is_gone(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from natslog.node.data_dir import DataDir;"
        f"DataDir(Path({str(tmp_path)!r}), 1); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DataDirError, match=f"in use by a running broker .process {holder.pid}."):
            DataDir(tmp_path, 1)
        holder.kill()
    DataDir(tmp_path, 1).release()


def test_newer_format_is_refused(tmp_path: Path) -> None:
    DataDir(tmp_path, 1).release()
    write_checked(tmp_path / "broker", "broker", 4, {"broker_id": 1, "cluster_id": "c", "new": True})
    with pytest.raises(DataDirError, match="format version 4.*upgrade natslog"):
        DataDir(tmp_path, 1)


def test_damaged_identity_is_refused(tmp_path: Path) -> None:
    DataDir(tmp_path, 1).release()
    (tmp_path / "broker").write_bytes((tmp_path / "broker").read_bytes()[:-2])
    with pytest.raises(CorruptLog):
        DataDir(tmp_path, 1)


def test_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataDirError, match="cannot be written"):
        DataDir(tmp_path / "file", 1)


@pytest.fixture
def read_only_folder(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        tmp_path.chmod(0o555)
        yield tmp_path
        tmp_path.chmod(0o755)
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_folder_that_is_not_writable_is_refused(read_only_folder: Path) -> None:
    with pytest.raises(DataDirError, match="cannot be written.*--data-dir"):
        DataDir(read_only_folder / "data", 1)


def test_checked_file_is_old_or_new_never_a_part(tmp_path: Path) -> None:
    path = tmp_path / "hw-checkpoint"
    assert read_checked(path, "hw-checkpoint", 1) is None
    write_checked(path, "hw-checkpoint", 1, {"high_watermark": 1})
    (tmp_path / "hw-checkpoint.new").write_bytes(b"half a fi")  # a crash while the next one was written
    assert read_checked(path, "hw-checkpoint", 1) == {"high_watermark": 1}
    write_checked(path, "hw-checkpoint", 1, {"high_watermark": 2})
    assert read_checked(path, "hw-checkpoint", 1) == {"high_watermark": 2}


@pytest.mark.parametrize("name", ["broker", "life"])
def test_damaged_identity_or_life_says_what_to_do_and_touches_nothing(tmp_path: Path, name: str) -> None:
    DataDir(tmp_path, 1).release()
    damaged = (tmp_path / name).read_bytes()[:6]
    (tmp_path / name).write_bytes(damaged)
    with pytest.raises(CorruptLog, match=f"{name}.*natslog cluster remove ID.*empty data folder.*restore"):
        DataDir(tmp_path, 1)
    assert (tmp_path / name).read_bytes() == damaged
    DataDir(tmp_path / "other", 1).release()


def test_stream_whose_removal_was_cut_short_is_never_opened_as_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = DataDir(tmp_path, 1)
    stream = folder.stream_folder("aa")
    stream.mkdir()
    for name in ("0.arrow", "1.arrow"):
        (stream / name).write_bytes(b"x")

    def cut_short(path: Path) -> None:
        (path / "0.arrow").unlink()
        raise OSError("the power is gone")

    with monkeypatch.context() as broken:
        broken.setattr("natslog.node.data_dir.shutil.rmtree", cut_short)
        with pytest.raises(OSError, match="power"):
            folder.remove_stream("aa")
    assert not stream.exists(), "no part of it is left under its name"
    stream.mkdir()  # moved back here meanwhile, and deleted again
    folder.remove_stream("aa")
    folder.remove_stream("aa")
    assert list(folder.streams.iterdir()) == []
    folder.release()


def test_folder_of_natslog_0_1_0_keeps_its_name_and_newer_ones_carry_the_streams(tmp_path: Path) -> None:
    folder = DataDir(tmp_path, 1)
    one, other = "aa" * 16, "bb" * 16
    old = folder.stream_folder(one)
    old.mkdir()
    new = folder.stream_folder(other, "orders.v1")
    new.mkdir()
    assert (old.name, new.name) == (one, f"orders.v1.{other}")
    (folder.streams / f"orders.v1.{other}.damaged-1").mkdir()
    for copied in (one, other):  # copies that somebody keeps there are left alone
        (folder.streams / f"orders.{copied}.bak").mkdir()
    folder.release()
    again = DataDir(tmp_path, 1)
    assert (again.stream_folder(one, "returns"), again.stream_folder(other, "renamed")) == (old, new)
    again.remove_stream(other)
    assert not new.exists()
    again.release()


def test_two_folders_of_one_stream_are_refused(tmp_path: Path) -> None:
    """One may be a copy that an operator put there: neither is preferred by chance."""
    folder = DataDir(tmp_path, 1)
    for name in ("aa" * 16, "orders." + "aa" * 16):
        (folder.streams / name).mkdir()
    folder.release()
    with pytest.raises(DataDirError, match="hold logs of the same stream"):
        DataDir(tmp_path, 1)


def test_removal_that_a_crash_ended_goes_on_after_a_restart(tmp_path: Path) -> None:
    folder = DataDir(tmp_path, 1)
    (folder.streams / f"orders.{'aa' * 16}.removed").mkdir()
    folder.release()
    again = DataDir(tmp_path, 1)
    again.remove_stream("aa" * 16)
    assert list(again.streams.iterdir()) == []
    again.release()


class _Names:
    """Which folders were made, and are not on stable storage with their names yet."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.synced: set[Path] = set()
        self.unsynced: set[Path] = set()
        mkdir, fsync = os.mkdir, os.fsync

        def noting_mkdir(path: Any, *arguments: Any, **named: Any) -> None:
            mkdir(path, *arguments, **named)
            self.unsynced.add(Path(path))

        def noting_fsync(fd: int) -> None:
            fsync(fd)
            target = Path(os.readlink(f"/proc/self/fd/{fd}"))
            self.synced.add(target)
            self.unsynced -= {path for path in self.unsynced if path.parent == target}

        patch.setattr(os, "mkdir", noting_mkdir)
        patch.setattr(os, "fsync", noting_fsync)


def test_names_of_folders_are_on_stable_storage_before_anything_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = _Names(monkeypatch)
    folder = tmp_path / "var" / "natslog" / "data"
    data_dir = DataDir(folder, 1)
    assert names.unsynced == set()
    assert {tmp_path, tmp_path / "var", folder.parent, folder} <= names.synced
    open_log(data_dir.stream_folder("ab" * 16)).close()
    assert names.unsynced == set()
    assert data_dir.streams in names.synced
    data_dir.release()


def test_names_of_folders_that_another_start_made_are_synced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have ended between making a folder and syncing the one above."""
    folder = tmp_path / "data"
    (folder / "streams").mkdir(parents=True)
    names = _Names(monkeypatch)
    DataDir(folder, 1).release()
    assert {tmp_path, folder} <= names.synced
