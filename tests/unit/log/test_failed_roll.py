"""A file is made and then something fails: nothing may be left that a later start takes for a part of the log."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from natslog.errors import CorruptLog, StorageFailed, StorageFull, StorageUnavailable
from natslog.log import LogOptions, ReplicaLog
from natslog.log.checked_file import read_checked, write_checked
from natslog.log.segment import ActiveSegment
from natslog.model import Epoch
from tests.conftest import STREAM_ID, open_log, retain, rows, stored_values
from tests.unit.log.test_replica_log import batches_of

SMALL = LogOptions(segment_bytes=4096, min_free_bytes=0)


def failing_folder_fsync(patch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def failing(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    patch.setattr(os, "fsync", failing)


def too_many_open_folders(patch: pytest.MonkeyPatch) -> None:
    open_file = os.open

    def failing(path: Any, flags: int, *arguments: Any) -> int:
        if flags & os.O_DIRECTORY:
            raise OSError(errno.EMFILE, "Too many open files")
        return open_file(path, flags, *arguments)

    patch.setattr(os, "open", failing)


def filled(folder: Path, commits: int) -> tuple[ReplicaLog, list[bytes]]:
    log = open_log(folder)
    values = [b"%d" % at for at in range(commits)]
    for at, value in enumerate(values):
        log.append(rows([value]), 1_000_000 + at)
    return log, values


def crash(log: ReplicaLog) -> None:
    for segment in log.chain.unsealed:
        segment.close()


def make_empty_successor(log: ReplicaLog) -> Path:
    """As natslog 0.1.0 left it where the folder fsync of a roll failed: appends continued in the segment before."""
    ActiveSegment.create(log.folder, STREAM_ID, log.log_end_offset).close()
    return log.folder / f"{log.log_end_offset:020d}.active"


@pytest.mark.parametrize("failing", [failing_folder_fsync, too_many_open_folders])
def test_failed_roll_leaves_no_file_and_no_acked_message_is_cut(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch, failing: Callable[[pytest.MonkeyPatch], None]
) -> None:
    log, values = filled(log_folder, 5)
    before = sorted(os.listdir(log_folder))
    with monkeypatch.context() as patch:
        failing(patch)
        with pytest.raises(StorageUnavailable):
            log.roll()
    assert sorted(os.listdir(log_folder)) == before
    for at in range(5, 10):
        values.append(b"%d" % at)
        log.append(rows([values[-1]]), 3_000_000)
    crash(log)
    again = open_log(log_folder)
    assert again.failure is None
    assert stored_values(again) == values


def test_failed_roll_over_an_empty_segment_keeps_the_end_of_the_log(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that says where the log ends is replaced by an equal one; neither may be missing afterwards."""
    log = open_log(log_folder, max_age_s=8.0)
    log.append(rows([b"x"] * 500), 1_000_000)
    log.roll()
    assert log.upkeep.seal_next()
    assert retain(log, 20_000_000) == 1
    log.chain.segments[-1].failed = True  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        failing_folder_fsync(patch)
        with pytest.raises(StorageUnavailable):
            log.append(rows([b"y"]), 21_000_000)
    crash(log)
    assert open_log(log_folder).log_end_offset == 500


def test_whole_batches_are_kept_where_an_empty_successor_begins_below_their_end(log_folder: Path) -> None:
    log, values = filled(log_folder, 5)
    leftover = make_empty_successor(log)
    for at in range(5, 10):
        values.append(b"%d" % at)
        log.append(rows([values[-1]]), 3_000_000)
    crash(log)
    again = open_log(log_folder)
    assert again.failure is None
    assert stored_values(again) == values
    assert not leftover.exists()
    again.append(rows([b"next"]), 4_000_000)
    again.close()
    assert stored_values(open_log(log_folder)) == [*values, b"next"]


def test_a_torn_tail_behind_an_empty_successor_is_still_cut(log_folder: Path) -> None:
    log, values = filled(log_folder, 5)
    leftover = make_empty_successor(log)
    log.append(rows([b"torn" * 100]), 3_000_000)
    path = log.chain.segments[-1].path
    crash(log)
    os.truncate(path, path.stat().st_size - 10)
    again = open_log(log_folder)
    assert again.failure is None
    assert stored_values(again) == values
    assert leftover.exists(), "it begins where the log ends"


def test_empty_successors_in_the_middle_of_the_log_are_removed(log_folder: Path) -> None:
    """Two rolls failed, a third one worked, and the segment before was sealed since."""
    log, values = filled(log_folder, 3)
    leftovers = [make_empty_successor(log)]
    log.append(rows([b"a"]), 2_000_000)
    leftovers.append(make_empty_successor(log))
    log.append(rows([b"b"]), 2_000_000)
    log.roll()
    log.append(rows([b"c"]), 2_000_002)
    assert log.upkeep.seal_next()
    crash(log)
    again = open_log(log_folder)
    assert again.failure is None
    assert stored_values(again) == [*values, b"a", b"b", b"c"]
    assert not any(path.exists() for path in leftovers)


def test_a_successor_with_rows_beside_whole_batches_is_damage_and_nothing_is_cut(log_folder: Path) -> None:
    log, _ = filled(log_folder, 5)
    make_empty_successor(log)
    other = open_log(log_folder.parent / "other")
    other.begin_at(5, Epoch(1))
    other.append(rows([b"other"]), 3_000_000)
    log.append(rows([b"mine"]), 3_000_000)
    crash(log)
    crash(other)
    os.replace(other.chain.segments[-1].path, log_folder / f"{5:020d}.active")
    sizes = {path.name: path.stat().st_size for path in log_folder.glob("*.active")}
    again = open_log(log_folder)
    assert isinstance(again.failure, CorruptLog)
    assert [(known.start_offset, known.end_offset) for known in again.chain.damages] == [(5, 6)]
    assert {path.name: path.stat().st_size for path in log_folder.glob("*.active")} == sizes
    assert again.first_damaged_offset() == 5
    again.discard_from(5)
    again.close()
    assert stored_values(open_log(log_folder)) == [b"%d" % at for at in range(5)]


def test_no_segment_follows_one_whose_unacknowledged_bytes_could_not_be_cut(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two files would hold rows of the same offset, and one of them was acknowledged."""
    log, values = filled(log_folder, 2)

    def cannot(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", no_room)
        patch.setattr(os, "ftruncate", cannot)
        with pytest.raises(StorageFull):
            log.append(rows([b"not acked"]), 2_000_000)
        with pytest.raises(StorageUnavailable):
            log.append(rows([b"not acked either"]), 2_000_000)
    assert log.append(rows([b"acked"]), 2_000_000)[0] == 2
    crash(log)
    again = open_log(log_folder)
    assert again.failure is None
    assert stored_values(again) == [*values, b"acked"]


def test_beginning_anew_that_fails_leaves_no_file(log_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = filled(log_folder, 5)
    segments = sorted(path.name for path in log_folder.glob("*.active"))
    with monkeypatch.context() as patch:
        create = ActiveSegment.create

        def failing(*arguments: Any) -> ActiveSegment:
            failing_folder_fsync(patch)
            return create(*arguments)

        patch.setattr(ActiveSegment, "create", failing)
        with pytest.raises(StorageFailed):
            log.begin_at(40, Epoch(1))
    assert sorted(path.name for path in log_folder.glob("*.active")) == segments
    crash(log)
    again = open_log(log_folder)
    assert (again.log_start_offset, again.log_end_offset) in ((0, 5), (40, 40))
    assert again.failure is None


def test_failed_replacement_of_a_checked_file_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hw-checkpoint"
    write_checked(path, "hw-checkpoint", 1, {"high_watermark": 1})

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(OSError, match="Input/output"):
            write_checked(path, "hw-checkpoint", 1, {"high_watermark": 2})
    assert os.listdir(tmp_path) == ["hw-checkpoint"]
    assert read_checked(path, "hw-checkpoint", 1) == {"high_watermark": 1}


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_epoch_that_could_not_be_stored_is_stored_by_the_next_try(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = filled(log_folder, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", no_room)
        with pytest.raises(OSError, match="No space"):
            log.begin_epoch(Epoch(4))
    log.begin_epoch(Epoch(4))
    log.append(rows([b"of epoch 4"]), 2_000_000)
    crash(log)
    assert open_log(log_folder).epochs.entries == [(1, 0), (4, 2)]


def test_an_epoch_of_copied_batches_that_could_not_be_stored_is_stored_by_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, _ = filled(tmp_path / "leader", 2)
    leader.begin_epoch(Epoch(4))
    leader.append(rows([b"of epoch 4"]), 2_000_000)
    copy = open_log(tmp_path / "copy")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", no_room)
        with pytest.raises(StorageFull):
            copy.append_copies(batches_of(leader))
    copy.append_copies(batches_of(leader))
    crash(copy)
    assert open_log(tmp_path / "copy").epochs.entries == leader.epochs.entries == [(1, 0), (4, 2)]
