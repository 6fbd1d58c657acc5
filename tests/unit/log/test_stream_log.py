"""The log as a whole: append, roll, seal, retention, reading beside it all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from natslog.arrow import ipc
from natslog.errors import CorruptLog, OffsetOutOfRange, StorageFailed, StorageFull
from natslog.log import LogOptions, read_plan
from tests.conftest import decoded, open_log, retain, rows, stored_values

SMALL = LogOptions(segment_bytes=4096, min_free_bytes=0)


def fill(log, commits: int, size: int = 100, start_us: int = 1_000_000) -> None:
    for at in range(commits):
        log.append(rows([b"%d-%d" % (at, row) + b"." * size for row in range(5)]), start_us + at)


def test_append_sequences_densely_and_time_never_goes_back(log_folder: Path) -> None:
    log = open_log(log_folder)
    assert log.append(rows([b"a", b"b"]), 5_000_000) == (0, 5_000_000)
    assert log.append(rows([b"c"]), 4_000_000) == (2, 5_000_000)  # the clock jumped back
    log.close()
    log = open_log(log_folder)
    assert log.append(rows([b"d"]), 1) == (3, 5_000_000)
    assert stored_values(log) == [b"a", b"b", b"c", b"d"]


def test_fsync_happens_before_append_returns(log_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(log_folder)
    log.append(rows([b"first"]), 1_000_000)
    synced = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd)))
    log.append(rows([b"second"]), 1_000_001)
    assert synced == [log.chain.segments[-1].size_bytes], "the whole commit was in the file when it was synced"


def test_rolled_segments_are_sealed_and_read_the_same(log_folder: Path) -> None:
    log = open_log(log_folder, SMALL)
    fill(log, 30)
    before = stored_values(log)
    assert len(log.chain.segments) > 5
    while log.upkeep.seal_next():
        pass
    assert [segment.path.suffix for segment in log.chain.segments][-2:] == [".arrow", ".active"]
    assert stored_values(log) == before
    assert stored_values(log, 77) == before[77:]
    log.close()
    assert stored_values(open_log(log_folder, SMALL)) == before


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4"])
def test_sealing_merges_tiny_commits_and_keeps_every_row(log_folder: Path, compression: str) -> None:
    log = open_log(log_folder, LogOptions(segment_bytes=40_000, min_free_bytes=0), compression=compression)
    fill(log, 60)
    before = stored_values(log)
    while log.upkeep.seal_next():
        pass
    sealed = log.chain.segments[0]
    assert len(sealed.index) == 1, "tiny commits became one batch"
    assert stored_values(log) == before


def test_little_is_read_for_the_first_of_many_messages(log_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(log_folder)
    for at in range(160):  # 10 MB
        log.append(rows([b"x" * 128] * 400), 1_000_000 + at)
    sizes = []
    real = read_plan.read_at

    def counted(fd: int, position: int, length: int) -> bytes:
        sizes.append(length)
        return real(fd, position, length)

    monkeypatch.setattr(read_plan, "read_at", counted)
    found = log.reader.visible_rows(0, log.high_watermark)
    read = len(next(found))
    assert sum(sizes) < 512 * 1024
    assert read + sum(map(len, found)) == 160 * 400
    assert max(sizes) > 2 * 1024 * 1024, "a long read is in few parts"


def test_sealing_large_commits_rewrites_nothing(log_folder: Path) -> None:
    log = open_log(log_folder, LogOptions(segment_bytes=1 << 20, min_free_bytes=0))
    log.append(rows([b"x" * 600_000]), 1)
    log.append(rows([b"y" * 600_000]), 2)
    active = log.chain.segments[0].path
    inode, head = active.stat().st_ino, active.read_bytes()
    log.roll()
    assert log.upkeep.seal_next()
    sealed = active.with_suffix(".arrow")
    assert sealed.stat().st_ino == inode
    assert sealed.read_bytes().startswith(head)
    assert pa.ipc.open_file(str(sealed)).read_all().num_rows == 2


OTHER_READERS = """
import json, sys
path = sys.argv[1]
import pyarrow as pa
stored = pa.ipc.open_file(path).read_all()
import pandas, polars, duckdb
found = {
    "pyarrow": stored.column("value").to_pylist(),
    "polars": polars.read_ipc(path)["value"].to_list(),
    "pandas": list(pandas.read_feather(path)["value"]),
    "duckdb": [row[0] for row in duckdb.sql('select value from stored order by "offset"').fetchall()],
}
assert not any(name.split(".")[0] == "natslog" for name in sys.modules), "natslog was imported"
print(json.dumps({name: [value.decode() for value in values] for name, values in found.items()}))
"""


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_sealed_segment_is_read_by_other_programs_without_natslog(log_folder: Path, compression: str) -> None:
    log = open_log(log_folder, SMALL, compression=compression)
    fill(log, 12)
    while log.upkeep.seal_next():
        pass
    sealed = log.chain.segments[0]
    expected = [value.decode() for value in stored_values(log)[: sealed.end_offset]]
    command = [sys.executable, "-c", OTHER_READERS, str(sealed.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict.fromkeys(("pyarrow", "polars", "pandas", "duckdb"), expected)


def test_sealed_batches_carry_statistics(log_folder: Path) -> None:
    log = open_log(log_folder, SMALL)
    fill(log, 12)
    log.upkeep.seal_next()
    sealed = log.chain.segments[0]
    with open(sealed.path, "rb") as file:
        file.seek(sealed.index[0].position)
        stream = ipc.schema_message() + file.read(sealed.index[0].length) + ipc.END_OF_STREAM
    metadata = pa.ipc.open_stream(stream).read_next_batch_with_custom_metadata().custom_metadata
    stats = json.loads(metadata[b"natslog.stats"])
    assert stats["offset"] == [0, sealed.end_offset]
    assert stats["subject"] == ["orders.new", "orders.new"]


def test_flipped_bit_in_a_sealed_batch_is_found_before_it_is_served(log_folder: Path) -> None:
    log = open_log(log_folder, SMALL)
    fill(log, 30)
    while log.upkeep.seal_next():
        pass
    log.close()
    victim = log.chain.segments[1]
    data = bytearray(victim.path.read_bytes())
    entry = victim.index[0]
    data[entry.position + entry.length - 20] ^= 1
    victim.path.write_bytes(data)
    log = open_log(log_folder, SMALL)
    with log.reader.plan_read(0, max_bytes=1 << 20) as plan:
        assert plan.next_offset == victim.base_offset
    with pytest.raises(CorruptLog) as found:
        log.reader.plan_read(victim.base_offset, max_bytes=1 << 20)
    assert found.value.facts == {
        "file": str(victim.path),
        "position": entry.position,
        "start": entry.base_offset,
        "end": entry.end_offset,
    }


def test_damaged_footer_is_reported(log_folder: Path) -> None:
    log = open_log(log_folder, SMALL)
    fill(log, 30)
    while log.upkeep.seal_next():
        pass
    log.close()
    path = log.chain.segments[0].path
    os.truncate(path, path.stat().st_size - 3)
    log = open_log(log_folder, SMALL)
    with pytest.raises(CorruptLog, match="footer"):
        log.reader.plan_read(0, max_bytes=100)


# ---- retention ----


def sealed_log(folder: Path, **limits: object):
    log = open_log(folder, SMALL, **limits)
    fill(log, 60)
    while log.upkeep.seal_next():
        pass
    return log


def test_retention_by_messages_keeps_exactly_so_many_and_removes_whole_segments(log_folder: Path) -> None:
    log = sealed_log(log_folder, max_messages=100)
    values = stored_values(log)
    assert retain(log, 0) > 0
    start = log.first_readable_offset
    assert log.high_watermark - start == 100
    assert log.log_start_offset <= start < log.chain.segments[1].base_offset
    assert stored_values(log, start) == values[start:]
    with pytest.raises(OffsetOutOfRange):
        log.reader.plan_read(start - 1, max_bytes=1)


def test_retention_by_bytes_keeps_as_many_messages_as_fit(log_folder: Path) -> None:
    log = sealed_log(log_folder, max_bytes=20_000)
    assert retain(log, 0) > 0
    start = log.first_readable_offset
    assert log.reader.extent(start, log.high_watermark).bytes <= 20_000
    log.chain.limited_below = start - 1
    assert log.reader.extent(start - 1, log.high_watermark).bytes > 17_500, "header and footer count with a whole file"
    assert log.log_start_offset <= start < log.chain.segments[1].base_offset


def test_retention_by_age_hides_each_message_at_its_time_and_drops_segments_of_hidden_ones(log_folder: Path) -> None:
    log = sealed_log(log_folder, max_age_s=10.0)
    times: dict[int, int] = {}
    for _, batch in log.reader.stored_rows(0, log.high_watermark):
        times |= zip(batch["offset"].to_pylist(), batch["timestamp"].cast("int64").to_pylist(), strict=True)
    newest_us = max(times.values())
    for now_us in range(min(times.values()) + 10_000_000, newest_us + 10_000_000, 7):
        following_us = log.limits.expire(now_us)
        start = log.first_readable_offset
        assert times[start] == following_us >= now_us - 10_000_000
        assert start == 0 or times[start - 1] < now_us - 10_000_000
        log.upkeep.enforce_retention()
        segments = log.chain.segments
        assert len(segments) == 1 or segments[0].base_offset <= start < segments[1].base_offset
    assert log.limits.expire(newest_us + 10_000_001) is None
    log.upkeep.enforce_retention()
    assert log.first_readable_offset == log.high_watermark
    assert [segment.path.suffix for segment in log.chain.segments] == [".active"]
    log.close()


def test_retention_limits_combine_the_strictest_wins(log_folder: Path) -> None:
    log = sealed_log(log_folder, max_messages=200, max_bytes=10_000, max_age_s=1e6)
    retain(log, 0)
    start, end = log.first_readable_offset, log.high_watermark
    assert log.reader.extent(start, end).bytes <= 10_000
    assert end - start <= 200


def test_retention_does_not_disturb_a_reader_in_mid_scan(log_folder: Path) -> None:
    log = sealed_log(log_folder, max_messages=10)
    values = stored_values(log)
    plan = log.reader.plan_read(0, max_bytes=1 << 30)
    assert retain(log, 0) > 5
    read = [value for message in plan.messages() for value in decoded(message).column("value").to_pylist()]
    plan.close()
    assert read == values
    with pytest.raises(OffsetOutOfRange):
        log.reader.plan_read(0, max_bytes=1 << 30)


def test_idle_stream_shrinks_and_keeps_its_end(log_folder: Path) -> None:
    """The active segment rolls by age, so that retention can drop what was the last segment."""
    log = open_log(log_folder, max_age_s=8.0)
    log.append(rows([b"x"] * 10), 1_000_000)
    assert not log.is_roll_due(1_500_000)
    assert log.is_roll_due(2_000_000)  # an eighth of max_age
    log.roll()
    assert log.upkeep.seal_next()
    assert retain(log, 10_000_000) == 1
    assert (log.log_start_offset, log.high_watermark) == (10, 10)
    log.close()
    log = open_log(log_folder)
    assert log.append(rows([b"y"]), 11_000_000)[0] == 10


# ---- reading ----


def test_read_out_of_range_names_both_bounds(log_folder: Path) -> None:
    log = open_log(log_folder)
    fill(log, 2)
    for offset in (-1, 11):
        with pytest.raises(OffsetOutOfRange) as error:
            log.reader.plan_read(offset, max_bytes=1)
        assert error.value.facts == {"offset": offset, "log_start_offset": 0, "high_watermark": 10}
    assert log.reader.plan_read(10, max_bytes=1).next_offset == 10


def test_offset_at_finds_the_first_message_not_older(log_folder: Path) -> None:
    log = open_log(log_folder, SMALL)
    fill(log, 40)  # five rows each, a microsecond apart
    while log.upkeep.seal_next():
        pass
    for commit in range(40):
        assert log.reader.offset_at(1_000_000 + commit) == (5 * commit, 1_000_000 + commit)
    assert log.reader.offset_at(0)[0] == 0
    assert log.reader.offset_at(2_000_000) == (200, None)


# ---- a disk that fails ----


def test_full_disk_refuses_before_anything_is_lost_and_resumes(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(log_folder)
    log.append(rows([b"a"]), 1)
    with monkeypatch.context() as patch:
        patch.setattr("natslog.log.room.free_bytes", lambda folder: 0)
        time.sleep(0.11)  # what was free a tenth of a second ago is taken to be free still
        for _ in range(2):
            with pytest.raises(StorageFull):
                log.append(rows([b"b"]), 2)
    assert log.append(rows([b"c"]), 3)[0] == 1
    assert stored_values(log) == [b"a", b"c"]


def test_write_that_runs_out_of_room_midway_leaves_no_half_commit(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(log_folder)
    log.append(rows([b"a"]), 1)
    real = os.writev

    def half(fd: int, pieces: list[memoryview]) -> int:
        real(fd, [pieces[0][: len(pieces[0]) // 2]])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", half)
        with pytest.raises(StorageFull):
            log.append(rows([b"b"]), 2)
    assert log.append(rows([b"c"]), 3)[0] == 1, "writing goes on in a new file"
    log.close()
    assert stored_values(open_log(log_folder)) == [b"a", b"c"]


def test_first_failed_fsync_is_final(log_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(log_folder)
    log.append(rows([b"a"]), 1)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(StorageFailed):
            log.append(rows([b"b"]), 2)
    with pytest.raises(StorageFailed):  # though fsync works again: the kernel has forgotten the lost pages
        log.append(rows([b"c"]), 3)
    assert stored_values(log) == [b"a"]
    assert stored_values(open_log(log_folder)) == [b"a"], "the failed commit is not found later"
