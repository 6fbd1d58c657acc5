"""Cuts at every byte, flips of every bit of an active segment: no ack is lost to a torn tail, damage is named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from natslog.arrow import ipc
from natslog.errors import CorruptLog
from natslog.log.recovery import Scan, scan_segment
from natslog.log.segment import file_header
from tests.conftest import STREAM_ID, open_log, rows, stored_values

COMMITS = [[b"a"], [b"bb", b"ccc"], [b"dddd" * 40]]


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, list[int], list[int]]:
    """A crashed log (never closed) of three commits; where each commit ends in the file, and in offsets."""
    folder = tmp_path / "original"
    log = open_log(folder)
    ends, offsets = [], []
    for at, values in enumerate(COMMITS):
        log.append(rows(values), 1_000_000 + at)
        ends.append(log.chain.segments[-1].size_bytes)
        offsets.append(log.log_end_offset)
    return folder, ends, offsets


def active_file(folder: Path) -> Path:
    return next(folder.glob("*.active"))


def copy_of(folder: Path, name: str) -> Path:
    target = folder.parent / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    return target


@pytest.mark.long
def test_recovery_after_a_cut_at_every_byte_keeps_exactly_the_whole_commits(
    written: tuple[Path, list[int], list[int]],
) -> None:
    folder, ends, offsets = written
    size = active_file(folder).stat().st_size
    assert size == ends[-1]
    header_bytes = len(file_header(STREAM_ID, 0))
    flat = [value for commit in COMMITS for value in commit]
    for cut in range(size + 1):
        crashed = copy_of(folder, "cut")
        os.truncate(active_file(crashed), cut)
        log = open_log(crashed)
        kept = max([0, *(offset for end, offset in zip(ends, offsets, strict=True) if end <= cut)])
        assert log.failure is None, f"cut at {cut}: {log.failure}"
        assert log.log_end_offset == kept, f"cut at {cut}"
        assert stored_values(log) == flat[:kept], f"cut at {cut}"
        if cut in (0, 7, header_bytes, ends[0] + 5, size - 1, size):  # and the log goes on from there
            assert log.append(rows([b"next"]), 2_000_000)[0] == kept
            log.close()
            assert stored_values(open_log(crashed)) == [*flat[:kept], b"next"]


@pytest.mark.long
def test_recovery_after_a_flip_of_every_bit_names_the_damage_and_loses_nothing_else(
    written: tuple[Path, list[int], list[int]],
) -> None:
    folder, ends, offsets = written
    path = active_file(folder)
    original = path.read_bytes()
    header_bytes = len(file_header(STREAM_ID, 0))
    starts = [header_bytes, *ends[:-1]]
    first_offsets = [0, *offsets[:-1]]
    for position in range(header_bytes, len(original)):
        commit = max(at for at, start in enumerate(starts) if start <= position)
        for bit in range(8):
            damaged = bytearray(original)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            scan = scan_segment(path, position=header_bytes, base_offset=0)
            where = f"byte {position} bit {bit}"
            assert scan.torn_bytes == 0, f"{where}: damage was taken for a torn tail"
            assert [damage.position for damage in scan.damages] == [starts[commit]], where
            found = scan.damages[0]
            assert found.path == path
            assert found.start_offset == first_offsets[commit], where
            assert found.end_offset in (offsets[commit], None), where
            assert found.end_offset == offsets[commit] or commit == len(COMMITS) - 1, where
            whole = [at for at in range(len(COMMITS)) if at != commit]
            assert list(scan.index.base_offsets) == [first_offsets[at] for at in whole], where


@pytest.mark.long
def test_recovery_after_a_flip_of_every_bit_of_the_file_header_refuses_writes(
    written: tuple[Path, list[int], list[int]],
) -> None:
    folder, _, _ = written
    path = active_file(folder)
    original = path.read_bytes()
    for position in range(len(file_header(STREAM_ID, 0))):
        for bit in range(8):
            damaged = bytearray(original)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            log = open_log(folder)
            assert isinstance(log.failure, CorruptLog), f"byte {position} bit {bit}"
            assert str(path) in log.failure.message
            for segment in log.chain.segments:
                segment.close()


def test_damaged_stream_serves_the_rest_and_refuses_reads_and_writes_of_the_damage(
    written: tuple[Path, list[int], list[int]],
) -> None:
    folder, ends, _ = written
    path = active_file(folder)
    data = bytearray(path.read_bytes())
    data[ends[1] - 3] ^= 0x10  # in the second commit's body
    path.write_bytes(data)
    log = open_log(folder)
    with pytest.raises(CorruptLog) as refused:
        log.append(rows([b"x"]), 3_000_000)
    assert refused.value.facts["file"] == str(path)
    assert (refused.value.facts["start"], refused.value.facts["end"]) == (1, 3)
    with log.reader.plan_read(0, max_bytes=1 << 20) as plan:
        assert plan.next_offset == 1  # what lies before the damage is served first
    with pytest.raises(CorruptLog):
        log.reader.plan_read(1, max_bytes=1 << 20)
    with log.reader.plan_read(3, max_bytes=1 << 20) as plan:
        assert plan.next_offset == 4


def test_log_cut_below_its_checkpoint_is_damage_not_a_torn_tail(written: tuple[Path, list[int], list[int]]) -> None:
    folder, ends, _ = written
    log = open_log(folder)
    log.close()  # checkpoints the high watermark
    os.truncate(active_file(folder), ends[1] + 20)
    log = open_log(folder)
    assert isinstance(log.failure, CorruptLog)
    assert active_file(folder).stat().st_size == ends[1] + 20, "a damaged file is not touched"


def test_missing_segment_behind_the_checkpoint_is_damage(written: tuple[Path, list[int], list[int]]) -> None:
    folder, _, _ = written
    open_log(folder).close()
    active_file(folder).unlink()
    log = open_log(folder)
    assert isinstance(log.failure, CorruptLog)
    assert "offsets 0 to 3" in log.failure.message


def test_tail_of_unwritten_blocks_is_torn(written: tuple[Path, list[int], list[int]]) -> None:
    """What ext4 shows after power loss where a file had grown and its blocks had not been written."""
    folder, ends, _ = written
    log = open_log(folder)
    log.append(rows([b"z" * 20_000]), 2_000_000)
    end = log.chain.segments[-1].size_bytes
    with open(active_file(folder), "r+b") as file:
        file.seek(end - end % 4096 - 4096)
        file.write(b"\0" * (end - file.tell()))
    log = open_log(folder)
    assert log.failure is None
    assert log.log_end_offset == 4
    assert active_file(folder).stat().st_size == ends[-1]


def test_sealing_in_place_cut_short_at_every_byte_of_the_footer_recovers(tmp_path: Path) -> None:
    from natslog.log import LogOptions

    folder = tmp_path / "log"
    log = open_log(folder, LogOptions(segment_bytes=1 << 20, min_free_bytes=0))
    log.append(rows([b"x" * 1_200_000]), 1_000_000)
    log.roll()
    full = log.chain.segments[0]
    size = full.size_bytes
    log.upkeep.seal_next()
    sealed = next(folder.glob("*.arrow"))
    data = sealed.read_bytes()
    sealed.unlink()
    for cut in range(size, len(data), 7):
        (folder / f"{0:020d}.active").write_bytes(data[:cut])
        recovered = open_log(folder)
        assert recovered.failure is None, f"cut at {cut}: {recovered.failure}"
        assert recovered.log_end_offset == 1
        for segment in recovered.chain.segments:
            segment.close()


def test_end_of_stream_in_the_place_of_a_committed_batch_is_damage(
    written: tuple[Path, list[int], list[int]],
) -> None:
    """Eight wrong bytes look like a file whose sealing was interrupted; what follows them is no footer."""
    folder, ends, offsets = written
    for place, checkpointed in ((ends[0], 0), (ends[1], offsets[2])):
        scan = scan_of(copy_of(folder, "wrong"), place, checkpointed)
        assert scan.torn_bytes == 0
        assert [damage.start_offset for damage in scan.damages] == [offsets[ends.index(place)]]


def scan_of(folder: Path, place: int, checkpointed: int) -> Scan:
    path = active_file(folder)
    data = bytearray(path.read_bytes())
    data[place : place + 8] = ipc.END_OF_STREAM
    path.write_bytes(data)
    header_bytes = len(file_header(STREAM_ID, 0))
    return scan_segment(path, position=header_bytes, base_offset=0, durable_offset=checkpointed)
