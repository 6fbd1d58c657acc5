"""Moments in which a log used to be, or could be, caught half-way: rolling, sealing, retention, several files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from natslog.arrow import ipc
from natslog.errors import CorruptLog, StorageFull, StorageUnavailable
from natslog.log import LogOptions
from natslog.log.sealed import read_footer_index
from natslog.log.verify import check_file
from tests.conftest import open_log, retain, rows, stored_values

SMALL = LogOptions(segment_bytes=4096, min_free_bytes=0)


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_log_end_is_kept_when_an_empty_segment_meets_a_full_disk(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(log_folder, max_age_s=8.0)
    log.append(rows([b"x"] * 500), 1_000_000)
    log.roll()
    assert log.upkeep.seal_next()
    assert retain(log, 20_000_000) == 1
    for broken in ("writev", "open", "open"):
        with monkeypatch.context() as patch:
            patch.setattr(os, broken, no_room)
            with pytest.raises(StorageFull):
                log.append(rows([b"y"]), 21_000_000)
        assert log.log_end_offset == 500
    assert log.append(rows([b"z"]), 22_000_000)[0] == 500
    log.close()
    assert open_log(log_folder).log_end_offset == 501


def test_too_many_open_files_while_rolling_is_retried(log_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(log_folder, SMALL)
    log.append(rows([b"x" * 5000]), 1)

    def too_many(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("natslog.log.segment.os.open", too_many)
        with pytest.raises(StorageUnavailable):
            log.append(rows([b"y"]), 2)
    assert log.append(rows([b"z"]), 3)[0] == 1


@pytest.mark.parametrize("size", [3500, 4096, 20_000])
def test_very_long_subjects_survive_sealing(log_folder: Path, size: int) -> None:
    log = open_log(log_folder, SMALL)
    log.append(rows([b"a", b"b"], subject='s"' * (size // 2)), 1)
    log.append(rows([b"c" * 5000]), 2)
    log.append(rows([b"d"]), 3)
    while log.upkeep.seal_next():
        pass
    assert log.chain.segments[0].path.suffix == ".arrow"
    assert stored_values(log) == [b"a", b"b", b"c" * 5000, b"d"]


def test_segment_that_cannot_be_sealed_stops_neither_sealing_nor_retention(log_folder: Path) -> None:
    log = open_log(log_folder, SMALL, max_messages=20)
    for at in range(40):
        log.append(rows([b"%d" % at * 100] * 5), 1_000_000 + at)
    victim = log.chain.segments[0]
    data = bytearray(victim.path.read_bytes())
    data[-20] ^= 1
    victim.path.write_bytes(data)
    with pytest.raises(CorruptLog):
        log.upkeep.seal_next()
    assert not list(log_folder.glob("*.tmp"))
    while log.upkeep.seal_next():
        pass
    assert retain(log, 0) > 1
    assert log.high_watermark - log.log_start_offset <= 20


def test_full_disk_while_sealing_leaves_everything_as_it_was(log_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(log_folder, SMALL)
    for at in range(30):
        log.append(rows([b"%d" % at * 100] * 5), at)
    before = stored_values(log)
    with monkeypatch.context() as patch:
        patch.setattr("natslog.log.sealed.write_all", no_room)
        with pytest.raises(StorageFull):
            log.upkeep.seal_next()
    assert stored_values(log) == before
    assert log.upkeep.seal_next(), "it is tried again when there is room"


def test_crash_between_the_sealed_file_and_removing_the_active_one(log_folder: Path) -> None:
    log = open_log(log_folder, SMALL)
    for at in range(30):
        log.append(rows([b"%d" % at * 100] * 5), at)
    before = stored_values(log)
    active = log.chain.segments[0].path
    data = active.read_bytes()
    log.upkeep.seal_next()
    log.close()
    active.write_bytes(data)
    log = open_log(log_folder, SMALL)
    assert stored_values(log) == before
    assert not active.exists()


def several_unsealed(folder: Path) -> list[Path]:
    log = open_log(folder, SMALL)
    for at in range(30):
        log.append(rows([os.urandom(300)] * 3), at)
    for segment in log.chain.segments:
        segment.close()
    return [segment.path for segment in log.chain.segments]


def test_zeros_in_a_full_segment_are_damage_not_a_torn_tail(log_folder: Path) -> None:
    victim = several_unsealed(log_folder)[1]
    data = bytearray(victim.read_bytes())
    data[-4096:] = b"\0" * 4096
    victim.write_bytes(data)
    log = open_log(log_folder, SMALL)
    assert isinstance(log.failure, CorruptLog)
    assert victim.read_bytes() == data, "a damaged file is not touched"


def test_full_segment_cut_to_nothing_is_damage(log_folder: Path) -> None:
    victim = several_unsealed(log_folder)[1]
    os.truncate(victim, 5)
    log = open_log(log_folder, SMALL)
    assert isinstance(log.failure, CorruptLog)
    assert victim.exists()


def test_new_segment_whose_header_was_never_written_is_removed(log_folder: Path) -> None:
    log = open_log(log_folder)
    log.append(rows([b"x"]), 1)
    log.close()
    stray = log_folder / f"{1:020d}.active"
    stray.write_bytes(b"\0" * 712)
    log = open_log(log_folder)
    assert log.failure is None
    assert log.append(rows([b"y"]), 2)[0] == 1
    assert stored_values(log) == [b"x", b"y"]


def test_unfinished_commit_whose_payload_holds_batches_is_torn_not_damage(log_folder: Path) -> None:
    """A publisher who sends stored batches as payloads cannot make recovery serve them."""
    log = open_log(log_folder)
    log.append(rows([b"real"]), 1)
    forged = open_log(log_folder.parent / "other")
    forged.append(rows([b"forged"] * 7), 1)
    with forged.reader.plan_read(0, max_bytes=1 << 20) as plan:
        (message,) = plan.messages()
    far = ipc.encode_batch(ipc.decode_batch(message), base_offset=10**9, epoch=1, max_timestamp_us=1)
    log.append(rows([b"p" * lead + bytes(far) for lead in range(8)]), 2)
    end = log.log_end_offset
    near = ipc.encode_batch(ipc.decode_batch(message), base_offset=end + 1, epoch=1, max_timestamp_us=1)
    log.append(rows([b"p" * lead + bytes(near) for lead in range(8)]), 3)
    path = log.chain.segments[0].path
    os.truncate(path, path.stat().st_size - 8)
    log = open_log(log_folder)
    assert log.failure is None
    assert log.log_end_offset == end
    assert b"forged" not in stored_values(log)


def test_damaged_batch_whose_payload_holds_batches_names_just_itself(log_folder: Path) -> None:
    log = open_log(log_folder)
    log.append(rows([b"real"]), 1)
    with log.reader.plan_read(0, max_bytes=1 << 20) as plan:
        (message,) = plan.messages()
    inner = bytes(ipc.encode_batch(ipc.decode_batch(message), base_offset=2, epoch=1, max_timestamp_us=1))
    log.append(rows([b"p" * lead + inner for lead in range(8)]), 2)
    log.append(rows([b"after"]), 3)
    entry = log.chain.segments[0].index[1]
    path = log.chain.segments[0].path
    data = bytearray(path.read_bytes())
    data[entry.position + entry.length - 1] ^= 1
    path.write_bytes(data)
    log = open_log(log_folder)
    (found,) = log.chain.damages
    assert (found.start_offset, found.end_offset) == (1, 9)


def test_damaged_offsets_are_in_some_split(log_folder: Path) -> None:
    log = open_log(log_folder)
    for at in range(20):
        log.append(rows([b"%d" % at]), at)
    entry = log.chain.segments[0].index[10]
    path = log.chain.segments[0].path
    data = bytearray(path.read_bytes())
    data[entry.position + entry.length - 1] ^= 1
    path.write_bytes(data)
    reader = open_log(log_folder).reader
    for start, end, count in ((0, 20, 1), (0, 20, 20), (10, 11, 1), (5, 11, 3), (10, 20, 4)):
        splits = reader.splits(start, end, max_bytes=None, max_rows=None, min_splits=count)
        assert (splits[0].start, splits[-1].end) == (start, end)
        assert all(left.end == right.start for left, right in zip(splits, splits[1:], strict=False))
        holder = next(split for split in splits if split.start <= 10 < split.end)
        with pytest.raises(CorruptLog):
            read_all(reader, holder.start, holder.end)


def read_all(reader, start: int, end: int) -> None:
    while start < end:
        with reader.plan_read(start, end, max_bytes=1 << 20) as plan:
            start = plan.next_offset


def test_verify_finds_every_flip_in_a_footer(log_folder: Path) -> None:
    log = open_log(log_folder, SMALL)
    for at in range(12):
        log.append(rows([b"%d" % at * 100] * 5), at)
    log.upkeep.seal_next()
    path = log.chain.segments[0].path
    log.close()
    original = path.read_bytes()
    assert not check_file(path).problems
    index = read_footer_index(path)
    end_of_batches = index.positions[-1] + index.lengths[-1]
    for position in range(end_of_batches, len(original), 3):
        damaged = bytearray(original)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        assert check_file(path).problems, f"byte {position}"


@pytest.mark.parametrize("written_days_ago", [-365, 0, 365])
def test_a_message_expires_by_its_timestamp_and_not_by_when_its_file_was_written(
    log_folder: Path, written_days_ago: int
) -> None:
    log = open_log(log_folder, max_age_s=60.0)
    stamped_us = int(log_folder.parent.stat().st_mtime * 1e6)
    log.append(rows([b"x"]), stamped_us)
    log.roll()
    log.upkeep.seal_next()
    written_s = stamped_us / 1e6 - written_days_ago * 86_400
    os.utime(log.chain.segments[0].path, (written_s, written_s))
    log.close()
    log = open_log(log_folder, max_age_s=60.0)
    assert retain(log, stamped_us + 59_000_000) == 0
    assert retain(log, stamped_us + 61_000_000) == 1
    log.close()
