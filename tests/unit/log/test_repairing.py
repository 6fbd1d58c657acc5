"""Sealed segments that are repaired in place with batches of another replica."""

from __future__ import annotations

import os
import shutil
import signal
from base64 import b64decode
from pathlib import Path

import pytest

from natslog.errors import CorruptAnswer, CorruptLog, OffsetOutOfRange
from natslog.log import ReplicaLog
from natslog.log.repairing import FetchedBatches, missing_ranges
from natslog.log.verify import check_file
from natslog.node.replicas.range_repair import _damaged_segments, _piece
from tests.conftest import open_log, rows, stored_values
from tests.unit.log.test_scrub import flip, scrub, sealed_log, segment_at


def two_replicas(folder: Path, value_bytes: int = 1000) -> tuple[ReplicaLog, ReplicaLog]:
    """With the same messages; the second one has other batches, most of them not sealed."""
    log = sealed_log(folder / "log", value_bytes=value_bytes)
    log.close()
    shutil.copytree(folder / "log", folder / "other")
    log, other = open_log(folder / "log"), open_log(folder / "other")
    values = stored_values(log)
    other.discard_from(14)  # in the middle of a segment
    for value in values[14:]:
        other.append(rows([value]), 1_790_000_000_000_000)
    other.chain.committed = None
    return log, other


def fetched_from(other: ReplicaLog, fetched: FetchedBatches, start: int, end: int) -> None:
    while start < end:
        message, total = b"", 1
        while len(message) < total:
            piece = _piece(other, start, end, len(message))
            message, total = message + b64decode(piece["data"]), piece["total"]
        start = fetched.add(message, start, end)


def repair(log: ReplicaLog, other: ReplicaLog) -> list[tuple[int, int]]:
    """All that the last pass found. Returns what was fetched."""
    asked = []
    for segment, end_offset, damaged in _damaged_segments(log):
        assert end_offset is not None
        with FetchedBatches(log.folder) as fetched:
            for start, end in missing_ranges(segment, end_offset, log.stream_id, damaged):
                asked.append((start, end))
                fetched_from(other, fetched, start, end)
            assert log.replace_sealed(segment, end_offset, fetched)
        log.scrub.verified(segment.base_offset, end_offset, [], is_pass=False)
    return asked


def test_only_the_damaged_batch_is_fetched(tmp_path: Path) -> None:
    log, other = two_replicas(tmp_path, value_bytes=100_000)  # sealed in place: two batches a segment
    values = stored_values(log)
    segment = segment_at(log, 1)
    assert len(segment.index) == 2
    flip(segment.path, segment.index.positions[1] + 5000)
    assert len(scrub(log)) == 1
    assert repair(log, other) == [(15, 20)]
    assert (stored_values(log), log.scrub.damaged, scrub(log)) == (values, (), [])
    assert check_file(segment.path).problems == ()
    log.close()
    assert stored_values(open_log(tmp_path / "log")) == values


@pytest.mark.parametrize("place", [4, 60, 0.3, 0.9, -3, -60, "cut", "gone"])
def test_damage_at_every_place_of_a_segment_is_repaired(tmp_path: Path, place: float | str) -> None:
    log, other = two_replicas(tmp_path)
    values, path = stored_values(log), segment_at(log, 1).path
    size = path.stat().st_size
    if place == "cut":
        os.truncate(path, size // 2)
    elif place == "gone":
        path.write_bytes(b"")
    else:
        assert not isinstance(place, str)
        flip(path, int(place * size) if isinstance(place, float) else int(place) % size)
    assert scrub(log)
    repair(log, other)
    assert (scrub(log), log.scrub.damaged) == ([], ())
    assert stored_values(log) == values
    assert check_file(path).problems == ()


def test_replicas_with_damage_at_different_places_repair_each_other(tmp_path: Path) -> None:
    log, other = two_replicas(tmp_path)
    values = stored_values(log)
    flip(segment_at(log, 1).path, 3000)
    flip(segment_at(other, 0).path, 3000)
    assert scrub(log)
    assert scrub(other)
    repair(log, other)
    repair(other, log)
    assert stored_values(log) == stored_values(other) == values


@pytest.mark.parametrize("position", [-3, -60, 60])
def test_of_a_segment_with_a_damaged_frame_nothing_is_fetched(tmp_path: Path, position: int) -> None:
    log, other = two_replicas(tmp_path)
    values, path = stored_values(log), segment_at(log, 1).path
    flip(path, position % path.stat().st_size)
    assert scrub(log)
    assert repair(log, other) == []
    assert (stored_values(log), scrub(log)) == (values, [])


def test_damage_at_the_same_place_changes_nothing(tmp_path: Path) -> None:
    log, other = two_replicas(tmp_path)
    for one in (log, other):
        flip(segment_at(one, 0).path, 3000)
        assert scrub(one)
    before = segment_at(log, 0).path.read_bytes()
    with pytest.raises(CorruptLog, match="offsets 0 to 9"):
        repair(log, other)
    assert segment_at(log, 0).path.read_bytes() == before
    assert len(stored_values(log, 10)) == 21


def test_readers_of_the_damaged_file_go_on_and_new_ones_get_the_repaired_one(tmp_path: Path) -> None:
    log, other = two_replicas(tmp_path, value_bytes=100_000)
    values, segment = stored_values(log), segment_at(log, 1)
    with log.reader.plan_read(10, 15, max_bytes=1 << 30) as plan:
        flip(segment.path, segment.index.positions[1] + 5000)
        scrub(log)
        repair(log, other)
        assert len(plan.messages()) == 1
    assert stored_values(log, 10) == values[10:]
    assert not log.replace_sealed(segment, 20, FetchedBatches(log.folder)), "it was replaced before"


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    log, other = two_replicas(tmp_path)
    segment = segment_at(log, 1)
    message = b64decode(_piece(other, 10, 14, 0)["data"])
    with FetchedBatches(log.folder) as fetched:
        for damaged in (message[:-1], message[:300] + b"x" + message[301:], b""):
            with pytest.raises(CorruptAnswer):
                fetched.add(damaged, 10, 14)
        with pytest.raises(CorruptAnswer):
            fetched.add(message, 11, 14)
        with pytest.raises(CorruptAnswer):
            fetched.add(message, 10, 12)
        assert fetched.add(message, 10, 14) == 14
        with pytest.raises(CorruptLog):
            log.replace_sealed(segment, 20, fetched)  # 14 to 20 are neither fetched nor in a batch of their own
    assert not list((tmp_path / "log").glob("*.tmp"))
    with pytest.raises(OffsetOutOfRange):
        _piece(other, 31, 40, 0)
    other.chain.committed = 12
    with pytest.raises(OffsetOutOfRange):
        _piece(other, 14, 16, 0)


@pytest.mark.parametrize("is_renamed", [False, True])
def test_kill_in_the_middle_of_a_repair_leaves_the_old_file_or_the_new_one(tmp_path: Path, is_renamed: bool) -> None:
    log, other = two_replicas(tmp_path)
    values, path = stored_values(log), segment_at(log, 1).path
    flip(path, 3000)
    assert scrub(log)
    log.scrub.store()
    damaged = path.read_bytes()
    child = os.fork()
    if not child:  # killed at the rename, or behind it
        replace = os.replace

        def killed(source: Path, target: Path) -> None:
            if is_renamed:
                replace(source, target)
            os.kill(os.getpid(), signal.SIGKILL)

        os.replace = killed  # type: ignore[assignment]
        repair(log, other)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (path.read_bytes() == damaged) is not is_renamed
    log.close()
    log = open_log(tmp_path / "log")
    assert not list((tmp_path / "log").glob("*.tmp"))
    assert log.failure is None
    assert log.scrub.damaged == ((10, 20),)
    repair(log, other)
    assert stored_values(log) == values
