"""Runs: there whole or not at all, on every replica, through crashes, cuts and sealing; what producers committed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from natslog.arrow import ipc
from natslog.arrow.row_buffers import RowBuffers
from natslog.arrow.run_marks import RunMark, find_mark
from natslog.errors import StorageFailed, StorageFull
from natslog.log import LogOptions, ReplicaLog
from natslog.log.batch_encoder import EncodedBatch
from natslog.log.producers import ProducerTable
from natslog.log.verify import check_file
from tests.conftest import open_log, rows, stored_values

SMALL = LogOptions(segment_bytes=4096, min_free_bytes=0)
NO_LIMIT = 1 << 30


def append_run(log: ReplicaLog, producer: str, batch: int, values: list[list[bytes]], now_us: int = 1) -> RunMark:
    count = sum(map(len, values))
    return log.append_run(producer, batch, map(rows, values), rows=count, size_bytes=100 * count, now_us=now_us)


def headers_of(log: ReplicaLog) -> list[ipc.BatchHeader]:
    with log.reader.plan_read(log.log_start_offset, max_bytes=NO_LIMIT, uncommitted=True) as plan:
        return list(plan.headers())


def copies(log: ReplicaLog) -> list[EncodedBatch]:
    with log.reader.plan_read(0, max_bytes=NO_LIMIT, uncommitted=True) as plan:
        return [
            EncodedBatch(header, [message])
            for header, message in ipc.split_messages(b"".join(plan.messages()), source="test")
        ]


def test_run_is_contiguous_marked_and_at_one_time(log_folder: Path) -> None:
    log = open_log(log_folder)
    log.append(rows([b"before"]), 1)
    run = append_run(log, "query-1", 7, [[b"a", b"b"], [b"c"]], now_us=50)
    log.append(rows([b"after"]), 2)
    assert run == RunMark("query-1", 7, 1, 4)
    assert stored_values(log) == [b"before", b"a", b"b", b"c", b"after"]
    assert [header.run for header in headers_of(log)] == [None, run, run, None]
    assert [header.max_timestamp_us for header in headers_of(log)] == [1, 50, 50, 50]
    assert log.unfinished_run is None


def test_each_batch_of_a_run_is_synced_before_the_next_is_written(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power cut could leave a hole before a whole batch, which recovery takes for damage."""
    log, calls = open_log(log_folder), []
    for name in ("writev", "fdatasync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, real=real, name=name: (calls.append(name), real(*given))[1])
    append_run(log, "q", 0, [[b"a"], [b"b"], [b"c"]])
    assert calls[-6:] == ["writev", "fdatasync"] * 3


def test_mark_is_found_in_headers_only_as_it_was_written() -> None:
    mark = RunMark("a" * 128, 2**62, 0, 2**62)
    assert find_mark(b"xx" + mark.to_line() + b"\0") == mark
    with_digest = RunMark("a" * 128, 2**62, 0, 2**62, 2**128 - 1)
    assert find_mark(b"xx" + with_digest.to_line() + b"\0") == with_digest
    assert find_mark(RunMark("a", 0, 0, 1, 5).to_line()) == RunMark("a", 0, 0, 1, 5)
    assert find_mark(b"v1 base_offset=0000000000000000001 rows=1") is None


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_sealing_keeps_runs_apart_and_their_marks(log_folder: Path, compression: str) -> None:
    log = open_log(log_folder, SMALL, compression=compression)
    expected: list[bytes] = []
    for at in range(30):
        log.append(rows([b"%d" % at * 50]), at)
        append_run(log, "q", at, [[b"r%d" % at, b"s"], [b"t"]], now_us=at)
        expected += [b"%d" % at * 50, b"r%d" % at, b"s", b"t"]
    while log.upkeep.seal_next():
        pass
    assert len(log.chain.segments) > 3
    marked = [header.run for header in headers_of(log) if header.run is not None]
    assert [(run.batch, run.start) for run in marked] == [(at, 4 * at + 1) for at in range(30) for _ in (0, 1)]
    assert stored_values(log) == expected
    assert not check_file(log.chain.segments[0].path).problems
    log.close()
    assert open_log(log_folder, SMALL).last_run("q") == RunMark("q", 29, 117, 120)


def test_no_segment_is_rolled_inside_a_run_on_leader_and_follower(log_folder: Path) -> None:
    log, copy = open_log(log_folder, SMALL), open_log(log_folder.parent / "copy", SMALL)
    for at in range(4):
        append_run(log, "q", at, [[b"x" * 1000] * 3] * 5)
    for batch in copies(log):
        copy.append_copies([batch])
    starts = {15 * at for at in range(4)}
    for one in (log, copy):
        assert {segment.base_offset for segment in one.chain.segments} == starts


# ---- failing in the middle ----


def failing_after(count: int, error: BaseException) -> Iterator[RowBuffers]:
    for at in range(count):
        yield rows([b"part %d" % at])
    raise error


@pytest.mark.parametrize("count", [0, 1, 3])
def test_run_whose_rows_cannot_be_read_leaves_the_log_as_it_was(log_folder: Path, count: int) -> None:
    log = open_log(log_folder)
    log.append(rows([b"before"]), 1)
    with pytest.raises(ValueError, match="unreadable"):
        log.append_run("q", 0, failing_after(count, ValueError("unreadable")), rows=9, size_bytes=9, now_us=2)
    assert (log.log_end_offset, log.last_run("q")) == (1, None)
    assert append_run(log, "q", 0, [[b"again"]]).start == 1
    log.close()
    assert stored_values(open_log(log_folder)) == [b"before", b"again"]


@pytest.mark.parametrize(
    ("number", "error", "room_comes_back"), [(errno.ENOSPC, StorageFull, True), (errno.EIO, StorageFailed, False)]
)
@pytest.mark.parametrize("step", range(1, 5))
def test_disk_that_fails_in_the_middle_of_a_run_leaves_nothing_of_it(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch, step: int, number: int, error: type, room_comes_back: bool
) -> None:
    log = open_log(log_folder)
    log.append(rows([b"before"]), 1)
    calls = 0

    def failing(real):
        def call(*arguments: object) -> object:
            nonlocal calls
            calls += 1
            if calls >= step:
                raise OSError(number, os.strerror(number))
            return real(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing(os.fdatasync))
        with pytest.raises(error):
            append_run(log, "q", 0, [[b"%d" % at] for at in range(4)])
    assert log.log_end_offset == 1
    assert log.last_run("q") is None
    if room_comes_back:
        assert append_run(log, "q", 0, [[b"again"]]).end == 2
    log.close()
    assert stored_values(open_log(log_folder)) == [b"before", b"again"][: 1 + room_comes_back]


# ---- crashes: the file as it was after every write of a run, and cut at every byte ----


def crashed_at(folder: Path, size_bytes: int, whole: bytes) -> ReplicaLog:
    (path,) = folder.glob("*.active")
    path.write_bytes(whole[:size_bytes])
    return open_log(folder)


def test_log_cut_at_any_byte_of_a_run_has_all_of_it_or_nothing_once_it_leads(log_folder: Path) -> None:
    log = open_log(log_folder)
    log.append(rows([b"before"]), 1)
    before = log.chain.last.size_bytes
    run = append_run(log, "q", 3, [[b"a", b"b"], [b"c"], [b"d"]])
    log.close()
    (path,) = log_folder.glob("*.active")
    whole = path.read_bytes()
    boundaries = [log.chain.last.index.positions[at] for at in range(1, 4)] + [len(whole)]
    for size_bytes in sorted({*range(before, len(whole), 97), *boundaries}):
        for leftover in ("hw-checkpoint", "producers", "leader-epochs"):  # of what came after the crash
            (log_folder / leftover).unlink(missing_ok=True)
        one = crashed_at(log_folder, size_bytes, whole)
        assert one.failure is None
        assert one.whole_end_offset == (run.end if size_bytes == len(whole) else run.start)
        one.chain.committed = one.checkpointed  # as a broker opens it
        one.begin_epoch(one.epoch + 1)
        one.chain.committed = None
        if size_bytes == len(whole):
            assert stored_values(one) == [b"before", b"a", b"b", b"c", b"d"]
            assert one.last_run("q") == run
        else:
            assert stored_values(one) == [b"before"]
            assert one.last_run("q") is None
            assert append_run(one, "q", 3, [[b"a", b"b", b"c"], [b"d"]]).start == 1
            assert one.last_run("q").end == run.end
        one.close()


def test_follower_keeps_a_part_of_a_run_and_goes_on_with_it(log_folder: Path) -> None:
    log, copy = open_log(log_folder), open_log(log_folder.parent / "copy")
    run = append_run(log, "q", 0, [[b"a"], [b"b"], [b"c"]])
    first, second, third = copies(log)
    copy.append_copies([first, second])
    assert (copy.unfinished_run, copy.whole_end_offset, copy.log_end_offset) == (run, 0, 2)
    assert copy.last_run("q") is None
    copy.close()
    copy = open_log(log_folder.parent / "copy")
    assert (copy.unfinished_run, copy.log_end_offset) == (run, 2)
    copy.append_copies([third])
    assert (copy.whole_end_offset, copy.last_run("q")) == (3, run)


# ---- what producers committed ----


def test_cut_run_brings_back_what_its_producer_committed_before(log_folder: Path) -> None:
    log = open_log(log_folder)
    log.chain.committed = 0
    first = append_run(log, "q", 0, [[b"a"]])
    other = append_run(log, "other", 5, [[b"b"]])
    log.chain.committed = 2
    assert log.last_run("q") == first
    append_run(log, "q", 1, [[b"c"], [b"d"]])
    newest = append_run(log, "q", 2, [[b"e"]])
    assert (log.last_run("q"), log.last_run("q", is_committed=True)) == (newest, first)
    log.cut_to(4)
    assert log.last_run("q") == RunMark("q", 1, 2, 4)
    log.cut_to(2)
    assert log.last_run("q") == first
    assert log.last_run("other") == other


def test_run_cut_after_the_table_was_rebuilt_brings_back_what_its_producer_committed_before(log_folder: Path) -> None:
    log = open_log(log_folder, SMALL)
    first = append_run(log, "q", 0, [[b"a"]])
    for at in range(30):
        log.append(rows([b"x" * 300]), at)
    log.checkpoint()
    uncommitted = append_run(log, "q", 1, [[b"b"]])
    for segment in log.chain.unsealed:
        segment.close()
    (log_folder / "producers").unlink()
    log = open_log(log_folder, SMALL)
    log.chain.committed = log.checkpointed  # as a broker opens it
    assert log.last_run("q") == uncommitted
    log.cut_to(uncommitted.start)
    assert log.last_run("q") == first, "or a repeated commit of it would be appended again"


@pytest.mark.parametrize("harm", ["none", "missing", "damaged", "stale", "ahead"])
def test_table_of_producers_survives_whatever_became_of_its_file(log_folder: Path, harm: str) -> None:
    log = open_log(log_folder, SMALL)
    for at in range(20):
        append_run(log, f"q{at % 3}", at, [[b"x" * 300] * 2, [b"y" * 300]])
        if at == 9:
            log.store_producers()
            stale = (log_folder / "producers").read_bytes()
    while log.upkeep.seal_next():
        pass
    expected = {name: log.last_run(name) for name in ("q0", "q1", "q2", "nobody")}
    log.close()
    path = log_folder / "producers"
    match harm:
        case "missing":
            path.unlink()
        case "damaged":
            path.write_bytes(path.read_bytes()[:-3])
        case "stale":
            path.write_bytes(stale)
    if harm == "ahead":  # the log was shortened behind the file's back: a replica that lost its end
        log = open_log(log_folder, SMALL)
        log.chain.committed = 0
        log.discard_from(log.chain.last.base_offset)
        end = log.log_end_offset
        for segment in log.chain.unsealed:
            segment.close()
        expected = {name: mark for name, mark in expected.items() if mark is not None and mark.end <= end}
        assert expected
    log = open_log(log_folder, SMALL)
    assert {name: log.last_run(name) for name in expected} == expected


@pytest.mark.parametrize("stop", ["in order", "killed", "killed before the first new segment"])
def test_log_without_runs_is_not_read_for_its_first_one(log_folder: Path, stop: str) -> None:
    """A writer would wait for that: seconds, in a large log."""
    log = open_log(log_folder, SMALL)
    for at in range(2 if "first" in stop else 60):
        log.append(rows([b"x" * 300]), at)
    end = log.log_end_offset
    if stop == "in order":
        log.close()
    assert (log_folder / "producers").exists() == ("first" not in stop)
    log = open_log(log_folder, SMALL)
    assert len(log.chain.segments) == 1 if "first" in stop else len(log.chain.segments) > 3
    read: list[tuple[int, int]] = []
    log.producers._marks = lambda start, end: iter(read.append((start, end)) or ())  # type: ignore[func-returns-value]
    assert log.last_run("first") is None
    assert (log.log_end_offset, read) == (end, [])
    log.close()
    assert (log_folder / "producers").exists() == ("first" not in stop), "a short log without runs needs none"


def test_least_recently_used_producers_go(log_folder: Path) -> None:
    log_folder.mkdir()
    table = ProducerTable(log_folder, lambda start, end: iter(()), most=3)
    table.open(0, 0, 0, is_short=True)
    for at, name in enumerate(["a", "b", "c", "a", "d"]):
        table.note(RunMark(name, at, at, at + 1), at)
    assert [name for name in "abcd" if table.last_run(name, 0, 5, is_committed=True)] == ["a", "c", "d"]


def test_one_off_producers_evict_no_others(log_folder: Path) -> None:
    log_folder.mkdir()
    table = ProducerTable(log_folder, lambda start, end: iter(()), most=3)
    table.open(0, 0, 0, is_short=True)
    for at, name in enumerate(["query", *(f"write-{at}" for at in range(9)), "other"]):
        table.note(RunMark(name, at, at, at + 1, at), at)
    table.store(11, is_short=False)
    for found in (table, ProducerTable(log_folder, lambda start, end: iter(()), most=3)):
        found.open(0, 11, 11, is_short=False)
        known = {name: found.last_run(name, 0, 11, is_committed=True) for name in ("query", "other", "write-5")}
        assert known == {
            "query": RunMark("query", 0, 0, 1, 0),
            "other": RunMark("other", 10, 10, 11, 10),
            "write-5": None,
        }
        assert found.last_run("write-8", 0, 11, is_committed=True) == RunMark("write-8", 9, 9, 10, 9)


def test_batch_with_a_damaged_mark_is_damage(log_folder: Path) -> None:
    """A mark may then state anything, for example a run without rows: it is read when the CRC has proven it."""
    log = open_log(log_folder)
    run = append_run(log, "q", 7, [[b"a"]])
    [copy] = copies(log)
    message = bytes(b"".join(copy.pieces))
    changed = message.replace(b"start=%019d end=" % run.start, b"start=%019d end=" % run.end)
    assert changed != message
    assert ipc.proven_header(changed) is None
    assert ipc.proven_header(message) == copy.header
