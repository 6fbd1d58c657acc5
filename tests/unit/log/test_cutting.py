"""Cuts that fall anywhere: into a sealed segment, into a batch, into what is damaged; with a crash at every step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from natslog.errors import CorruptLog, StorageFull
from natslog.log import LogOptions, ReplicaLog
from natslog.log.sealed import SealedSegment
from natslog.log.verify import check_file, files_of
from natslog.model import Epoch
from tests.conftest import open_log, rows, stored_values
from tests.unit.log.test_failed_roll import no_room
from tests.unit.log.test_replica_log import batches_of

SMALL = LogOptions(segment_bytes=4096, min_free_bytes=0)
COMMITS = 24


def sealed_log(folder: Path, compression: str = "zstd") -> ReplicaLog:
    """Four sealed segments of merged batches, and an active one; of two epochs. Nothing is known to be committed."""
    log = open_log(folder, SMALL, compression=compression)
    for at in range(COMMITS):
        if at == COMMITS // 2:
            log.begin_epoch(Epoch(3))
        log.append(rows([b"%d" % at, os.urandom(500)]), 1_000_000 + at)
    while log.upkeep.seal_next():
        pass
    log.chain.committed = 0
    assert sum(isinstance(segment, SealedSegment) for segment in log.chain.segments) >= 3
    return log


def values_of(log: ReplicaLog) -> list[bytes]:
    former, log.chain.committed = log.chain.committed, None
    found = stored_values(log, log.log_start_offset)
    log.chain.committed = former
    return found


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_log_is_cut_at_any_offset_though_it_is_sealed_and_goes_on_from_there(
    tmp_path: Path, compression: str
) -> None:
    whole = sealed_log(tmp_path / "whole", compression)
    values, epochs = values_of(whole), whole.epochs.entries
    copies = batches_of(whole)
    whole.close()
    for end in range(compression == "zstd", 2 * COMMITS + 1, 2):
        folder = tmp_path / "cut"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", folder)
        log = open_log(folder, SMALL, compression=compression)
        log._checkpoints.lower_high_watermark(0)
        log.chain.committed = 0
        log.cut_to(end)
        assert log.log_end_offset == end
        assert log.epochs.entries == [(epoch, start) for epoch, start in epochs if start < end]
        assert values_of(log) == values[:end]
        following = [batch for batch in copies if batch.header.base_offset >= end]
        if following and following[0].header.base_offset == end:
            log.append_copies(following)
            assert values_of(log) == values
        log.close()
        again = open_log(folder, SMALL)
        assert again.failure is None
        assert values_of(again) == values[: again.log_end_offset]
        assert again.log_end_offset >= end
        again.close()
        assert all(not check_file(path).problems for path in files_of(folder))


def crash_points(monkeypatch: pytest.MonkeyPatch, folder: Path, work: Callable[[], Any]) -> list[Path]:
    """Copies of the folder as it was before every call that changes it."""
    found: list[Path] = []

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            found.append(folder.with_name(f"{folder.name}-{len(found)}"))
            shutil.copytree(folder, found[-1])
            return call(*arguments, **named)

        return noted

    with monkeypatch.context() as patch:
        for name in ("writev", "replace", "unlink", "ftruncate", "fsync"):
            patch.setattr(os, name, noting(getattr(os, name)))
        work()
    return found


@pytest.mark.parametrize("end", [0, 7, 11, 24, 33])
def test_a_crash_at_any_step_of_a_cut_leaves_a_log_between_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    log = sealed_log(tmp_path / "log")
    values = values_of(log)
    log._checkpoints.lower_high_watermark(0)
    points = crash_points(monkeypatch, tmp_path / "log", lambda: log.cut_to(end))
    assert len(points) > 3
    for point in points:
        crashed = open_log(point, SMALL)
        assert crashed.failure is None, f"{point.name}: {crashed.failure}"
        assert end <= crashed.log_end_offset <= len(values)
        assert values_of(crashed) == values[: crashed.log_end_offset]
        crashed.chain.committed = 0
        crashed.cut_to(end)
        assert values_of(crashed) == values[:end]
        crashed.close()


def damage_in(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def several_batches(folder: Path) -> ReplicaLog:
    """A sealed segment of several batches: runs keep their bounds."""
    log = open_log(folder)
    for at in range(6):
        batches = [rows([b"%d-%d" % (at, part), os.urandom(3000)]) for part in range(2)]
        log.append_run("p", at, batches, rows=4, size_bytes=12_000, now_us=1_000_000 + at)
    log.roll()
    log.append(rows([b"last"]), 1_000_011)
    assert log.upkeep.seal_next()
    return log


@pytest.mark.parametrize("batch", [0, 5, 11])
def test_only_what_is_damaged_in_a_sealed_segment_and_behind_it_is_discarded(tmp_path: Path, batch: int) -> None:
    whole = several_batches(tmp_path / "log")
    values, copies = values_of(whole), batches_of(whole)
    entry = whole.chain.segments[0].index[batch]
    whole.close()
    damage_in(sorted((tmp_path / "log").glob("*.arrow"))[0], entry.position + entry.length - 2000)
    log = open_log(tmp_path / "log")
    log.chain.committed = log.checkpointed
    start = log.first_damaged_offset()
    assert start == entry.base_offset
    log.discard_from(start)
    assert (log.failure, log.log_end_offset) == (None, entry.base_offset)
    assert values_of(log) == values[: entry.base_offset]
    log.append_copies([copy for copy in copies if copy.header.base_offset >= start])
    log.close()
    again = open_log(tmp_path / "log")
    assert again.failure is None
    assert values_of(again) == values


@pytest.mark.parametrize("what", [b"ARROW1", b"v1 batches="])
def test_a_damaged_footer_costs_no_batch_of_its_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: bytes
) -> None:
    whole = several_batches(tmp_path / "log")
    values = values_of(whole)
    whole.close()
    victim = sorted((tmp_path / "log").glob("*.arrow"))[0]
    damage_in(victim, victim.read_bytes().rindex(what) + 4)
    log = open_log(tmp_path / "log")
    log.chain.committed = log.checkpointed
    start = log.first_damaged_offset()
    assert start == 24
    points = crash_points(monkeypatch, tmp_path / "log", lambda: log.discard_from(24))
    assert values_of(log) == values[:24]
    for point in points:
        crashed = open_log(point)
        crashed.chain.committed = crashed.checkpointed
        again = crashed.first_damaged_offset()
        assert again in (None, 24)
        if again is not None:
            crashed.discard_from(again)
        assert values_of(crashed) == values[: crashed.log_end_offset]
        assert crashed.log_end_offset >= 24
        crashed.close()


def test_a_cut_that_would_keep_damaged_batches_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    log = several_batches(tmp_path / "log")
    log.chain.committed = 0
    segment = log.chain.segments[0]
    entry = segment.index[2]
    damage_in(segment.path, entry.position + entry.length - 2000)
    before = segment.path.read_bytes()
    with pytest.raises(CorruptLog):
        log.cut_to(15)
    assert segment.path.read_bytes() == before
    assert not list((tmp_path / "log").glob("*.tmp"))


def test_a_cut_for_which_there_is_no_room_is_done_when_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = sealed_log(tmp_path / "log")
    values = values_of(log)
    with monkeypatch.context() as patch:
        patch.setattr("natslog.log.cutting.write_all", no_room)
        with pytest.raises(StorageFull):
            log.cut_to(7)
    log.cut_to(7)
    assert values_of(log) == values[:7]


def test_a_cut_inside_a_batch_of_the_active_segment_keeps_its_first_rows(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    log.append(rows([b"a", b"b"]), 1)
    log.append(rows([b"c", b"d", b"e"]), 2)
    log.chain.committed = 0
    log.cut_to(4)
    assert values_of(log) == [b"a", b"b", b"c", b"d"]
    log.append(rows([b"next"]), 3)
    log.close()
    assert stored_values(open_log(tmp_path / "log")) == [b"a", b"b", b"c", b"d", b"next"]
