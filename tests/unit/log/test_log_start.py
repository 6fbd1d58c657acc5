"""Where a log starts is stored before files are removed; what is lost is told from what retention removed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from natslog.errors import CorruptLog
from natslog.log import LogOptions, ReplicaLog
from natslog.log.checked_file import read_checked, write_checked
from natslog.model import Epoch, StreamSettings
from tests.conftest import STREAM_ID, open_log, retain, rows, stored_values
from tests.unit.log.test_replica_log import batches_of

SMALL = LogOptions(segment_bytes=4096, min_free_bytes=0)


def filled(folder: Path, commits: int = 40, **settings: object) -> ReplicaLog:
    """Several sealed segments and an active one; a new epoch half-way."""
    log = open_log(folder, SMALL, **settings)
    for at in range(commits):
        if at == commits // 2:
            log.begin_epoch(Epoch(5))
        log.append(rows([b"%d" % at, b"x" * 500]), 1_000_000 + at)
    while log.seal_next():
        pass
    return log


def retained(folder: Path) -> ReplicaLog:
    """The same, of which retention has removed the first segments."""
    log = filled(folder, max_messages=40)
    assert retain(log, 2_000_000) > 1
    assert log.log_start_offset > 0
    return log


def segments_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".active", ".arrow"))


def must(folder: Path, **settings: Any) -> ReplicaLog:
    wanted = StreamSettings(subject="orders.>", **settings)
    return ReplicaLog(folder, STREAM_ID, wanted, SMALL, must_exist=True)


# ---- the first segments ----


def test_a_lost_first_segment_is_damage_and_not_retention(log_folder: Path) -> None:
    log = filled(log_folder)
    values = stored_values(log)
    log.close()
    first, second = segments_of(log_folder)[:2]
    first.unlink()
    again = open_log(log_folder, SMALL)
    assert isinstance(again.failure, CorruptLog)
    assert f"offsets 0 to {int(second.stem) - 1} are missing" in again.failure.message
    assert again.log_start_offset == 0, "no later start is reported"
    with pytest.raises(CorruptLog):
        again.reader.plan_read(0, max_bytes=1000)
    assert stored_values(again, int(second.stem)) == values[int(second.stem) :], "reads go on behind it"
    assert again.reader.splits(0, 10, max_bytes=None, max_rows=None, min_splits=1)[0].start == 0
    assert again.reader.lag(0).rows == again.log_end_offset - int(second.stem)


def test_a_lost_first_segment_behind_retention_is_damage_too(log_folder: Path) -> None:
    log = retained(log_folder)
    start = log.log_start_offset
    log.close()
    segments_of(log_folder)[0].unlink()
    again = open_log(log_folder, SMALL)
    assert isinstance(again.failure, CorruptLog)
    assert again.log_start_offset == again.first_damaged_offset() == start


def test_a_replica_that_lost_its_first_segment_is_repaired_from_another(tmp_path: Path) -> None:
    leader = filled(tmp_path / "leader")
    copy = filled(tmp_path / "copy")
    copy.close()
    segments_of(tmp_path / "copy")[0].unlink()
    damaged = open_log(tmp_path / "copy", SMALL)
    start = damaged.first_damaged_offset()
    assert start == 0
    damaged.discard_from(start)
    assert damaged.failure is None
    damaged.append_copies(batches_of(leader))
    damaged.close()
    assert stored_values(open_log(tmp_path / "copy", SMALL)) == stored_values(leader)


def test_the_start_is_on_stable_storage_before_a_file_is_removed(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(log_folder, max_messages=40)
    unlink, seen = Path.unlink, []

    def watched(path: Path, missing_ok: bool = False) -> None:
        if path.parent == log_folder and path.suffix in (".arrow", ".active") and path.exists():
            shutil.rmtree(log_folder.parent / "crashed", ignore_errors=True)
            shutil.copytree(log_folder, log_folder.parent / "crashed")
            crashed = open_log(log_folder.parent / "crashed", SMALL)
            seen.append((crashed.log_start_offset, crashed.failure, stored_values(crashed, log.first_readable_offset)))
            crashed.close()
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", watched)
        dropped = retain(log, 2_000_000)
    assert len(seen) >= dropped > 1
    expected = (log.log_start_offset, None, stored_values(log, log.first_readable_offset))
    assert all(one == expected for one in seen), "opening ends the removal that a crash interrupted"


@pytest.mark.parametrize("lost", ["log-start", "hw-checkpoint"])
def test_a_lost_start_is_rebuilt_from_the_other_file(log_folder: Path, lost: str) -> None:
    log = retained(log_folder)
    log.checkpoint()
    start, end = log.log_start_offset, log.log_end_offset
    log.close()
    (log_folder / lost).unlink()
    again = open_log(log_folder, SMALL)
    assert (again.failure, again.log_start_offset, again.log_end_offset) == (None, start, end)
    assert 0 < again.checkpointed <= end, "what is sealed is committed"
    again.close()
    assert (log_folder / lost).exists()
    segments_of(log_folder)[0].unlink()
    assert isinstance(open_log(log_folder, SMALL).failure, CorruptLog), "and it counts again"


def test_a_damaged_start_file_is_rebuilt(log_folder: Path) -> None:
    log = retained(log_folder)
    start = log.log_start_offset
    log.close()
    data = bytearray((log_folder / "log-start").read_bytes())
    data[-30] ^= 1
    (log_folder / "log-start").write_bytes(data)
    again = open_log(log_folder, SMALL)
    assert (again.failure, again.log_start_offset) == (None, start)


def test_both_copies_of_the_start_lost_is_damage_and_no_default(log_folder: Path) -> None:
    log = retained(log_folder)
    log.close()
    (log_folder / "log-start").unlink()
    (log_folder / "hw-checkpoint").unlink()
    assert isinstance(open_log(log_folder, SMALL).failure, CorruptLog)


def test_retention_makes_room_on_a_full_disk(log_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = filled(log_folder, max_messages=40)

    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("natslog.log.checkpoints.write_checked", no_room)
        assert retain(log, 2_000_000) > 1
    start = log.log_start_offset
    for segment in log.chain.unsealed:
        segment.close()
    again = open_log(log_folder, SMALL)
    assert (again.failure, again.log_start_offset) == (None, start)


# ---- natslog 0.1.0 ----


def as_left_by_0_1(folder: Path, drop: int) -> int:
    """A checkpoint without a start, no other file of this version, and its retention. Returns the log start."""
    checkpoint = read_checked(folder / "hw-checkpoint", "hw-checkpoint", 1)
    assert checkpoint is not None
    content = {"high_watermark": checkpoint["high_watermark"]}
    write_checked(folder / "hw-checkpoint", "hw-checkpoint", 1, content)
    for path in segments_of(folder)[:drop]:
        path.unlink()
    return int(segments_of(folder)[0].stem)


def test_a_log_of_0_1_starts_where_its_first_file_does(log_folder: Path) -> None:
    filled(log_folder).close()
    (log_folder / "log-start").unlink()
    start = as_left_by_0_1(log_folder, 2)
    again = open_log(log_folder, SMALL)
    assert (again.failure, again.log_start_offset) == (None, start)
    again.close()
    segments_of(log_folder)[0].unlink()
    assert isinstance(open_log(log_folder, SMALL).failure, CorruptLog), "from then on it is stored"


def test_a_start_stored_before_a_downgrade_is_no_lie_after_the_second_upgrade(log_folder: Path) -> None:
    retained(log_folder).close()
    start = as_left_by_0_1(log_folder, 1)
    again = open_log(log_folder, SMALL)
    assert (again.failure, again.log_start_offset) == (None, start), "the checkpoint tells who wrote it"


# ---- side files ----


def test_lost_leader_epochs_are_rebuilt_from_the_headers_of_the_batches(log_folder: Path) -> None:
    log = filled(log_folder)
    entries = log.epochs.entries
    assert entries == [(1, 0), (5, 40)]
    log.close()
    (log_folder / "leader-epochs").unlink()
    again = open_log(log_folder, SMALL)
    assert again.epochs.entries == entries
    assert (log_folder / "leader-epochs").exists()
    again.close()


def test_rebuilt_epochs_behind_retention_say_the_same_of_every_offset(log_folder: Path) -> None:
    log = retained(log_folder)
    known = [log.epochs.last_epoch_before(end) for end in range(log.log_start_offset + 1, log.log_end_offset + 1)]
    log.close()
    (log_folder / "leader-epochs").unlink()
    again = open_log(log_folder, SMALL)
    ends = range(again.log_start_offset + 1, again.log_end_offset + 1)
    assert [again.epochs.last_epoch_before(end) for end in ends] == known


def test_lost_leader_epochs_of_a_log_without_messages_are_no_default(log_folder: Path) -> None:
    log = open_log(log_folder, replicas=3)
    log.begin_at(40, Epoch(3))
    log.close()
    (log_folder / "leader-epochs").unlink()
    with pytest.raises(CorruptLog, match="leader-epochs is missing"):
        open_log(log_folder, replicas=3)


# ---- whether there is a log ----


def test_a_log_that_must_exist_is_not_begun_anew_where_its_folder_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CorruptLog, match="mounted") as refused:
        must(tmp_path / "streams" / "orders")
    assert refused.value.facts["file"] == str(tmp_path / "streams" / "orders")
    assert not (tmp_path / "streams").exists()


@pytest.mark.parametrize("keep_side_files", [True, False])
def test_a_log_that_must_exist_is_not_begun_anew_where_its_segments_are_missing(
    log_folder: Path, keep_side_files: bool
) -> None:
    filled(log_folder).close()
    for path in log_folder.iterdir():
        if path.suffix or not keep_side_files:
            path.unlink()
    before = os.listdir(log_folder)
    with pytest.raises(CorruptLog, match="mounted"):
        must(log_folder)
    assert os.listdir(log_folder) == before


def test_side_files_without_a_segment_are_no_new_log(log_folder: Path) -> None:
    filled(log_folder).close()
    for path in segments_of(log_folder):
        path.unlink()
    (log_folder / "hw-checkpoint").unlink()  # the epochs tell it too
    again = open_log(log_folder, SMALL)
    assert isinstance(again.failure, CorruptLog)
    assert segments_of(log_folder) == []


def test_a_new_log_has_its_first_segment_and_must_exist_from_then_on(log_folder: Path) -> None:
    open_log(log_folder).close()
    assert [path.name for path in segments_of(log_folder)] == [f"{0:020d}.active"]
    log = must(log_folder)
    assert (log.failure, log.log_end_offset, log.epochs.entries) == (None, 0, [(1, 0)])
    assert log.append(rows([b"x"]), 1)[0] == 0
    log.close()
    assert stored_values(must(log_folder)) == [b"x"]


def test_a_new_log_that_was_not_finished_is_finished_by_the_next_start(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash after each file that is made."""
    replace, left = os.replace, [0]

    def crashing(source: Any, target: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        replace(source, target)

    for made in range(4):
        left[0] = made
        shutil.rmtree(log_folder, ignore_errors=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", crashing)
            with pytest.raises(KeyboardInterrupt):
                open_log(log_folder)
        log = open_log(log_folder)
        assert (log.failure, log.log_end_offset, log.epochs.entries) == (None, 0, [(1, 0)])
        log.close()
    assert sorted(path.name for path in log_folder.iterdir() if not path.suffix) == [
        "hw-checkpoint",
        "leader-epochs",
        "log-start",
    ]


# ---- the leader's start ----


def test_segments_below_the_leaders_start_are_dropped(tmp_path: Path) -> None:
    leader = filled(tmp_path / "leader", max_messages=40)
    copy = open_log(tmp_path / "copy", SMALL)
    for batch in batches_of(leader):
        copy.append_copies([batch])
    assert retain(leader, 2_000_000) > 1
    start = leader.log_start_offset
    copy.chain.committed = 4
    assert copy.drop_before(start) <= 1, "what is not known to be committed stays"
    copy.chain.committed = copy.log_end_offset
    assert copy.drop_before(start) > 1, "though nothing is sealed here"
    assert start - 20 < copy.log_start_offset <= start
    assert copy.drop_before(start) == 0
    assert copy.drop_before(copy.log_end_offset + 100) > 0
    assert len(copy.chain.segments) == 1, "the last segment stays"
    copy.close()
    again = open_log(tmp_path / "copy", SMALL)
    assert (again.failure, again.log_start_offset) == (None, copy.log_start_offset)
    assert stored_values(again, again.log_start_offset) == stored_values(leader, again.log_start_offset)
