"""Lag from the indexes, compared with reading every row; and its cost, which does not grow with what is unread."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.errors import CorruptLog
from natslog.log import LogOptions, ReplicaLog, sealed
from tests.conftest import decoded, open_log, retain, rows

SMALL = LogOptions(segment_bytes=4096, min_free_bytes=0)


def fill(log: ReplicaLog, commits: int, start_us: int = 1_000_000, step_us: int = 1000) -> None:
    """Commits of one to five rows, a millisecond apart."""
    for at in range(commits):
        log.append(rows([b"." * 100] * (1 + at % 5)), start_us + at * step_us)


def seal_all(log: ReplicaLog) -> None:
    while log.upkeep.seal_next():
        pass


def unread(log: ReplicaLog, start: int) -> list[tuple[int, int]]:
    """The dumb way: (offset, timestamp) of every row from `start` to HW that can be read."""
    found: list[tuple[int, int]] = []
    start = max(start, log.first_readable_offset)
    while start < log.high_watermark:
        try:
            plan = log.reader.plan_read(start, max_bytes=1 << 20)
        except CorruptLog as error:
            start = int(error.facts["end"] or log.high_watermark)
            continue
        with plan:
            for message in plan.messages():
                batch = decoded(message)
                times = batch.column("timestamp").cast(pa.int64()).to_pylist()
                found += zip(batch.column("offset").to_pylist(), times, strict=True)
            start = plan.next_offset
    return [(offset, time) for offset, time in found if offset < log.high_watermark]


def stored_bytes(log: ReplicaLog, offset: int) -> float:
    """Of the batches from `offset` to HW, the outer ones in proportion; of whole segments, headers and footers too."""
    start, end, found = max(offset, log.first_readable_offset), log.high_watermark, 0.0
    for segment in log.chain.segments:
        index = segment.index
        for at in range(len(index)):
            rows = index.end_offsets[at] - index.base_offsets[at]
            asked = min(end, index.end_offsets[at]) - max(start, index.base_offsets[at])
            found += index.lengths[at] * max(0, asked) / rows
        if start <= segment.base_offset < segment.end_offset <= end:
            found += segment.size_bytes - sum(index.lengths)
    return found


def check(log: ReplicaLog, offset: int) -> None:
    first = max(offset, log.first_readable_offset)
    lag, expected = log.reader.lag(offset), [row for row in unread(log, offset) if row[0] >= first]
    assert lag.rows == len(expected)
    assert lag.oldest_us == (expected[0][1] if expected else None)
    assert abs(lag.bytes - stored_bytes(log, offset)) <= 2
    assert lag.lost_rows == max(0, log.first_readable_offset - offset)
    assert lag.beyond_rows == max(0, offset - log.high_watermark)


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(
    commits=st.integers(0, 60),
    sealed_segments=st.integers(0, 12),
    uncommitted=st.integers(0, 9),
    max_messages=st.sampled_from([None, 40, 90]),
    compression=st.sampled_from(["none", "zstd"]),
)
def test_lag_equals_reading_every_row(
    tmp_path_factory: pytest.TempPathFactory,
    commits: int,
    sealed_segments: int,
    uncommitted: int,
    max_messages: int | None,
    compression: str,
) -> None:
    log = open_log(tmp_path_factory.mktemp("lag") / "log", SMALL, max_messages=max_messages, compression=compression)
    fill(log, commits)
    for _ in range(sealed_segments):
        log.upkeep.seal_next()
    retain(log, 0)
    log.chain.committed = max(log.first_readable_offset, log.log_end_offset - uncommitted)
    for offset in range(0, log.log_end_offset + 3, 1 + commits // 12):
        check(log, offset)
    log.close()


def test_damaged_rows_are_not_waited_for(log_folder: Path) -> None:
    log = open_log(log_folder)
    fill(log, 10)
    log.close()
    (path,) = log_folder.glob("*.active")
    entry = log.chain.segments[0].index[3]  # four rows, offsets 6 to 10
    data = bytearray(path.read_bytes())
    data[entry.position + entry.length - 30] ^= 1
    path.write_bytes(data)
    log = open_log(log_folder)
    assert log.failure is not None
    assert log.reader.lag(0).rows == log.high_watermark - 4
    behind = log.reader.lag(7)  # in the hole: the first that can be read is behind it
    assert (behind.rows, behind.oldest_us) == (log.high_watermark - 10, 1_000_000 + 4 * 1000)
    log.close()


def test_age_of_a_message_in_a_damaged_batch_is_told_from_the_index(log_folder: Path) -> None:
    log = open_log(log_folder, SMALL)
    fill(log, 40)
    seal_all(log)
    log.close()
    victim = log.chain.segments[0]
    entry = victim.index[0]
    data = bytearray(victim.path.read_bytes())
    data[entry.position + 400] ^= 0xFF
    victim.path.write_bytes(data)
    log = open_log(log_folder, SMALL)
    lag = log.reader.lag(1)
    assert (lag.rows, lag.oldest_us) == (log.high_watermark - 1, entry.max_timestamp_us)
    log.close()


def test_age_of_a_message_in_a_file_that_is_cut_short_is_told_from_the_index(log_folder: Path) -> None:
    """Also when the batch was validated before."""
    log = open_log(log_folder, SMALL)
    fill(log, 40)
    seal_all(log)
    entry = log.chain.segments[0].index[0]
    assert log.reader.lag(1).oldest_us != entry.max_timestamp_us
    with open(log.chain.segments[0].path, "r+b") as file:
        file.truncate(entry.position)
    assert log.reader.lag(1).oldest_us == entry.max_timestamp_us
    log.close()


def test_age_does_not_depend_on_the_schema_in_a_footer(log_folder: Path) -> None:
    """The footer of a sealed segment has a copy of it for readers of Arrow files, without a checksum."""
    log = open_log(log_folder, SMALL)
    fill(log, 30)
    log.roll()
    seal_all(log)
    before = [log.reader.lag(offset).oldest_us for offset in range(3)]
    path = log.chain.segments[0].path
    content = path.read_bytes()
    at = content.rindex(b"timestamp")
    path.write_bytes(content[:at] + b"timestimp" + content[at + 9 :])
    assert [log.reader.lag(offset).oldest_us for offset in range(3)] == before
    log.close()


def test_cost_does_not_grow_with_what_is_unread(log_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(log_folder, SMALL)
    fill(log, 400)
    seal_all(log)
    log.close()
    log = open_log(log_folder, SMALL)
    assert len(log.chain.segments) > 40
    footers, batches = [], []
    read_footer, read_batch = sealed.read_footer_index, sealed.read_batch
    monkeypatch.setattr(sealed, "read_footer_index", lambda path: footers.append(path) or read_footer(path))
    monkeypatch.setattr(sealed, "read_batch", lambda *given: batches.append(given) or read_batch(*given))
    for _ in range(3):
        log.reader.lag(1)
    assert (len(footers), len(batches)) == (1, 1), "one index, one batch to prove, and never again"
    log.close()


@pytest.mark.long
def test_indexes_kept_in_memory_are_bounded(log_folder: Path) -> None:
    log = open_log(log_folder, SMALL)
    fill(log, 800)
    seal_all(log)
    log.close()
    log = open_log(log_folder, SMALL)
    bases = [segment.base_offset for segment in log.chain.segments]
    assert len(bases) > 80
    for base in bases:
        log.reader.lag(base)
    loaded = [one for one in log.chain.segments if getattr(one, "_index", None) is not None]
    assert len(loaded) < 80
    log.close()


def test_no_file_stays_open(log_folder: Path) -> None:
    log = open_log(log_folder, SMALL)
    fill(log, 40)
    seal_all(log)
    log.reader.lag(1)
    before = len(os.listdir("/proc/self/fd"))
    for offset in range(50):
        log.reader.lag(offset)
    assert len(os.listdir("/proc/self/fd")) == before
    log.close()
