"""A log that is purged below an offset: readers no longer get what lies there, files go in whole segments."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.errors import OffsetOutOfRange
from natslog.log import LogOptions, ReplicaLog
from tests.conftest import open_log, retain, rows

SMALL = LogOptions(segment_bytes=4096, min_free_bytes=0)
START_US, STEP_US = 1_000_000, 1000


def filled(folder: Path, commits: int = 60) -> ReplicaLog:
    """Three rows a commit, a millisecond apart, all committed; the older segments sealed."""
    log = open_log(folder, SMALL)
    for at in range(commits):
        log.append(rows([b"." * 100] * 3), START_US + at * STEP_US)
    while log.upkeep.seal_next():
        pass
    return log


def test_purged_messages_are_out_of_range_for_readers_at_once(tmp_path: Path) -> None:
    log = filled(tmp_path)
    log.chain.purged_below = 100  # inside a batch
    with pytest.raises(OffsetOutOfRange) as refused:
        log.reader.plan_read(99, max_bytes=1)
    assert refused.value.facts["log_start_offset"] == log.first_readable_offset == 100
    with log.reader.plan_read(100, max_bytes=1) as plan:
        assert plan.next_offset > 100
    with pytest.raises(OffsetOutOfRange):
        log.reader.splits(0, 180, max_bytes=None, max_rows=None, min_splits=1)
    lag = log.reader.lag(0)
    assert (lag.rows, lag.lost_rows) == (80, 100)


def test_replicas_still_get_what_their_segments_hold(tmp_path: Path) -> None:
    log = filled(tmp_path)
    log.chain.purged_below = 100
    with log.reader.plan_read(0, max_bytes=1, uncommitted=True) as plan:
        assert plan.next_offset > 0


@settings(max_examples=60, deadline=None)
@given(below=st.integers(0, 180), wanted=st.integers(-5, 70))
def test_first_offset_at_a_time_is_never_a_purged_one(
    tmp_path_factory: pytest.TempPathFactory, below: int, wanted: int
) -> None:
    log = _shared_log(tmp_path_factory)
    found = log.reader.offset_at(START_US + wanted * STEP_US, below)
    expected = max(below, 3 * max(0, wanted))
    assert found == ((expected, START_US + expected // 3 * STEP_US) if expected < 180 else (180, None))


_logs: list[ReplicaLog] = []


def _shared_log(factory: pytest.TempPathFactory) -> ReplicaLog:
    if not _logs:
        _logs.append(filled(factory.mktemp("log")))
    return _logs[0]


def test_whole_segments_below_are_removed_and_the_last_one_after_a_roll(tmp_path: Path) -> None:
    log = filled(tmp_path)
    bases = [segment.base_offset for segment in log.chain.segments]
    assert len(bases) > 3
    log.chain.purged_below = bases[2] + 1
    assert log.upkeep.is_needed()
    assert retain(log, START_US) == 2
    assert log.log_start_offset == bases[2], "the segment that holds purged and other messages stays"
    log.chain.purged_below = log.high_watermark
    assert log.is_roll_due(START_US)
    log.roll()
    retain(log, START_US)
    assert [segment.base_offset for segment in log.chain.segments] == [180]
    assert not log.is_roll_due(START_US), "once is enough"
    assert log.append(rows([b"next"]), START_US)[0] == 180


def test_log_that_was_purged_opens_where_it_starts(tmp_path: Path) -> None:
    log = filled(tmp_path)
    log.chain.purged_below = 180
    log.roll()
    retain(log, START_US)
    log.close()
    again = open_log(tmp_path, SMALL)
    assert (again.log_start_offset, again.log_end_offset) == (180, 180)


def test_follower_that_knows_of_a_purge_before_the_messages_shows_nothing_else(tmp_path: Path) -> None:
    log = filled(tmp_path)
    log.chain.committed = 90
    log.chain.purged_below = 150
    assert log.first_readable_offset == 90
    assert retain(log, START_US) >= 1
    assert log.log_start_offset <= 90, "what is not known to be committed stays"
