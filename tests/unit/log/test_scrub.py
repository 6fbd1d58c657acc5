"""Reading sealed segments back: what is found in damaged files, and how a pass goes on after a restart."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from natslog.errors import CorruptLog
from natslog.log import LogOptions, ReplicaLog
from natslog.log import scrub as scrubbing
from natslog.log.batch_index import BatchIndex
from natslog.log.scrub import STEP_BYTES, Finding, ScrubProgress, read_back
from natslog.log.sealed import SealedSegment
from natslog.log.verify import check_file
from natslog.model import Epoch
from tests.conftest import open_log, rows, stored_values

DAY_US = 86_400_000_000
WEEK_S = 7 * 86400.0
NOW_US = 1_790_000_000_000_000


def sealed_log(folder: Path, segments: int = 3, value_bytes: int = 1000) -> ReplicaLog:
    """So many sealed segments of ten messages, and one message in an unsealed segment."""
    log = open_log(folder)
    for number in range(segments):
        for _ in range(2):
            log.append(rows([os.urandom(value_bytes) for _ in range(5)]), NOW_US)
        log.roll()
        assert log.seal_next(), number
    log.append(rows([b"open"]), NOW_US)
    return log


def flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 4]))


def segment_at(log: ReplicaLog, at: int) -> SealedSegment:
    segment = log.chain.segments[at]
    assert isinstance(segment, SealedSegment)
    return segment


def found_in(segment: SealedSegment, end_offset: int) -> tuple[list[Finding], list[int]]:
    findings: list[Finding] = []
    steps = list(read_back(segment, end_offset, findings))
    return findings, steps


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_too_few_resources_of_the_process_are_no_damage(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    segment = segment_at(sealed_log(log_folder, 1), 0)
    for target in ("natslog.log.scrub.os.open", "natslog.log.scrub.read_footer_index", "natslog.log.scrub.read_at"):
        with monkeypatch.context() as patch:
            patch.setattr(target, lambda *_: (_ for _ in ()).throw(OSError(number, "too few")))
            findings: list[Finding] = []
            with pytest.raises(OSError, match="too few"):
                list(read_back(segment, 10, findings))
            assert findings == []


def test_a_footer_that_cannot_be_read_once_is_no_damage(log_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = segment_at(sealed_log(log_folder, 1), 0)
    failures = [OSError(errno.EIO, "once")]
    read = scrubbing.read_footer_index

    def read_footer(path: Path) -> BatchIndex:
        if failures:
            raise failures.pop()
        return read(path)

    monkeypatch.setattr(scrubbing, "read_footer_index", read_footer)
    assert found_in(segment, 10)[0] == []
    assert not failures


def test_damage_below_the_log_start_is_forgotten(log_folder: Path) -> None:
    log = sealed_log(log_folder)
    flip(segment_at(log, 0).path, segment_at(log, 0).size_bytes // 3)
    flip(segment_at(log, 1).path, segment_at(log, 1).size_bytes // 3)
    scrub(log)
    assert [start // 10 for start, _ in log.scrub.damaged] == [0, 1]
    log.drop_before(10)
    assert [start // 10 for start, _ in log.scrub.damaged] == [1]
    log.begin_at(500, Epoch(1))
    assert log.scrub.damaged == ()


def scrub(log: ReplicaLog, now_us: int = NOW_US) -> list[Finding]:
    """A whole pass. Returns the findings that are new."""
    new: list[Finding] = []
    log.scrub.begin(log.chain, now_us)
    while (chosen := log.scrub.next_segment(log.chain)) is not None:
        segment, end_offset = chosen
        new += log.scrub.verified(segment.base_offset, end_offset, found_in(segment, end_offset)[0])
    log.scrub.complete(now_us, log.log_start_offset)
    return new


@pytest.mark.long
def test_every_bit_flip_in_a_sealed_segment_is_found(tmp_path: Path) -> None:
    log = sealed_log(tmp_path / "log", 1, value_bytes=40)
    segment = segment_at(log, 0)
    whole = segment.path.read_bytes()
    assert found_in(segment, 10)[0] == []
    missed = []
    for position in range(len(whole)):
        flip(segment.path, position)
        if not found_in(segment, 10)[0]:
            missed.append(position)
        segment.path.write_bytes(whole)
    assert missed == []
    log.close()


def test_steps_are_small_and_read_all_batches(tmp_path: Path) -> None:
    log = sealed_log(tmp_path / "log", 1, value_bytes=200_000)
    segment = segment_at(log, 0)
    findings, steps = found_in(segment, 10)
    assert findings == []
    assert max(steps) <= STEP_BYTES
    assert sum(steps) == sum(segment.index.lengths) > 2_000_000
    log.close()


def test_exact_offsets_are_named_and_other_batches_are_served(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    for _ in range(3):
        log.append(rows([os.urandom(200_000), os.urandom(100_000)]), NOW_US)  # sealed in place: a batch a commit
    log.roll()
    assert log.seal_next()
    log.append(rows([b"open"]), NOW_US)
    segment = segment_at(log, 0)
    assert len(stored_values(log)) == 7, "the batches were read once: they count as proven"
    flip(segment.path, segment.index.positions[1] + 5000)
    (finding,) = scrub(log)
    assert (finding.start, finding.end) == (2, 4)
    assert f"{segment.path}: the batch at byte {segment.index.positions[1]}, offsets 2 to 3" in finding.error.message
    problem = log.scrub.problem
    assert problem is not None
    assert "offsets 2 to 3 are damaged" in problem.message
    log.reader.forget_proofs(segment.path)
    with log.reader.plan_read(0, max_bytes=1 << 30) as plan:
        assert plan.next_offset == 2
    with pytest.raises(CorruptLog, match="offsets 2 to 3"):
        log.reader.plan_read(2, max_bytes=1 << 30)
    assert len(stored_values(log, 4)) == 3
    log.append(rows([b"more"]), NOW_US)
    log.close()


def test_a_batch_that_holds_when_it_is_read_again_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = sealed_log(tmp_path / "log", 1)
    read, failed = scrubbing._read_from_disk, list[int]()

    def failing_once(fd: int, position: int, length: int) -> bytes:
        if not failed:
            failed.append(position)
            return bytes(length)
        return read(fd, position, length)

    monkeypatch.setattr(scrubbing, "_read_from_disk", failing_once)
    assert found_in(segment_at(log, 0), 10)[0] == []
    assert failed
    log.close()


def test_known_damage_is_reported_once_until_the_file_is_restored(tmp_path: Path) -> None:
    log = sealed_log(tmp_path / "log")
    path = segment_at(log, 1).path
    whole = path.read_bytes()
    flip(path, len(whole) // 2)
    assert [(one.start, one.end) for one in scrub(log)] == [(10, 20)]
    assert scrub(log) == [], "it is known"
    assert log.scrub.damaged == ((10, 20),)
    log.scrub.store()
    log.close()
    log = open_log(tmp_path / "log")
    assert log.scrub.damaged == ((10, 20),), "it is known after a restart too"
    assert scrub(log) == []
    path.write_bytes(whole)
    assert scrub(log) == []
    assert (log.scrub.damaged, log.scrub.problem) == ((), None)
    path.unlink()
    assert [(one.start, one.end) for one in scrub(log)] == [(10, 20)], "a file that is gone is damage as well"
    log.close()


def test_damage_beside_the_batches_loses_no_offsets(tmp_path: Path) -> None:
    log = sealed_log(tmp_path / "log", 2)
    segment = segment_at(log, 1)
    flip(segment.path, 60)  # in the file header
    (finding,) = scrub(log)
    assert (finding.start, finding.end) == (10, 10)
    assert "All its messages are intact" in finding.error.message
    assert log.first_damaged_offset() == 10, "a repair fetches the segment again"
    assert "the header or footer of the segments that begin at 10" in str(log.scrub.problem)
    log.discard_from(10)
    assert log.scrub.damaged == ()
    log.close()


def test_a_pass_continues_after_a_restart_behind_what_was_read(tmp_path: Path) -> None:
    log = sealed_log(tmp_path / "log")
    log.scrub.begin(log.chain, NOW_US)
    assert log.scrub.share(0) == 0.0
    log.scrub.verified(0, 10, [])
    log.scrub.store()
    log.close()
    log = open_log(tmp_path / "log")
    assert log.scrub.is_running
    assert log.scrub.share(0) == pytest.approx(10 / 21)
    chosen = log.scrub.next_segment(log.chain)
    assert chosen is not None
    assert (chosen[0].base_offset, chosen[1]) == (10, 20)
    assert check_file(tmp_path / "log" / "scrub").problems == ()
    log.close()


def test_progress_that_cannot_be_read_begins_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = sealed_log(tmp_path / "log")
    scrub(log)
    log.scrub.store()
    log.close()
    flip(tmp_path / "log" / "scrub", 90)
    log = open_log(tmp_path / "log")
    assert "is ignored" in caplog.text
    assert log.scrub.completed_us == 0
    assert log.failure is None
    log.close()


def test_where_it_is_not_stored_there_is_no_file(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log", LogOptions(min_free_bytes=0, stores_scrub=False))
    log.scrub.store()
    assert not (tmp_path / "log" / "scrub").exists()
    log.close()


def test_segments_sealed_meanwhile_wait_for_the_next_pass_and_dropped_ones_are_passed_over(tmp_path: Path) -> None:
    log = sealed_log(tmp_path / "log")
    log.scrub.begin(log.chain, NOW_US)
    log.roll()
    assert log.seal_next()
    log.append(rows([b"open"]), NOW_US)
    log.drop_before(20)
    assert log.log_start_offset == 20
    chosen = log.scrub.next_segment(log.chain)
    assert chosen is not None
    assert chosen[0].base_offset == 20
    log.scrub.verified(20, 30, [])
    assert log.scrub.next_segment(log.chain) is None
    log.scrub.complete(NOW_US, 20)
    assert not log.scrub.is_running
    log.close()


def test_a_segment_that_retention_removes_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    log = sealed_log(tmp_path / "log", value_bytes=200_000)
    segment, findings = segment_at(log, 0), list[Finding]()
    reading = read_back(segment, 10, findings)
    next(reading)
    log.drop_before(10)
    assert not segment.path.exists()
    list(reading)
    assert not log.chain.is_current(segment), "whoever reads it drops what was found"
    log.close()


def test_a_truncated_log_is_read_again_from_there(tmp_path: Path) -> None:
    log = sealed_log(tmp_path / "log")
    log.scrub.begin(log.chain, NOW_US)
    log.scrub.verified(0, 10, [])
    log.scrub.verified(10, 20, [Finding(12, 14, CorruptLog("damaged"))])
    log.discard_from(12)
    assert log.scrub.damaged == ()
    assert log.scrub._known.next_offset == 12
    log.close()


@pytest.mark.parametrize(
    ("elapsed_us", "is_due"), [(0, False), (6 * DAY_US, False), (7 * DAY_US, True), (-1, True), (-400 * DAY_US, True)]
)
def test_a_pass_is_due_after_the_interval_and_when_the_clock_was_wrong(
    tmp_path: Path, elapsed_us: int, is_due: bool
) -> None:
    log = sealed_log(tmp_path / "log")
    assert log.scrub.is_due(log.chain, NOW_US, WEEK_S), "nothing was read yet"
    scrub(log)
    assert log.scrub.is_due(log.chain, NOW_US + elapsed_us, WEEK_S) == is_due
    assert not log.scrub.is_due(log.chain, NOW_US + elapsed_us, 0.0), "it is turned off"
    log.scrub.begin(log.chain, NOW_US, is_requested=True)
    assert log.scrub.is_due(log.chain, NOW_US + elapsed_us, 0.0), "a requested pass is not"
    log.close()


def test_a_log_without_sealed_segments_is_never_due(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    log.append(rows([b"x"]), NOW_US)
    assert not log.scrub.is_due(log.chain, NOW_US, WEEK_S)
    log.scrub.begin(log.chain, NOW_US)
    assert log.scrub.next_segment(log.chain) is None
    log.close()


def test_pages_are_dropped_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = sealed_log(tmp_path / "log", 1, value_bytes=200_000)
    segment = segment_at(log, 0)
    calls: list[tuple[str, int, int]] = []
    fadvise, pread = os.posix_fadvise, os.pread

    def advised(fd: int, start: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            calls.append(("drop", start, length))
        fadvise(fd, start, length, advice)

    def read(fd: int, length: int, position: int) -> bytes:
        calls.append(("read", position, length))
        return pread(fd, length, position)

    monkeypatch.setattr(os, "posix_fadvise", advised)
    monkeypatch.setattr(os, "pread", read)
    found_in(segment, 10)
    inside = [at for at, (what, position, length) in enumerate(calls) if what == "read" and length >= 8192]
    assert inside
    for at in inside:
        _, position, length = calls[at]
        for what, start, dropped in (calls[at - 1], calls[at + 1]):
            assert what == "drop" or length > 1_000_000, "the footer was dropped as a whole"
            if what == "drop":
                assert start % 4096 == dropped % 4096 == 0
                assert start <= position < position + length <= start + dropped
    log.close()


def test_a_new_log_knows_nothing(tmp_path: Path) -> None:
    progress = ScrubProgress(tmp_path / "none")
    assert (progress.completed_us, progress.damaged, progress.problem, progress.share(0)) == (0, (), None, None)
