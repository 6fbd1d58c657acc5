"""Segments of small batches are closed early and become one again: nothing is lost, and they stay few."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from natslog.arrow import ipc
from natslog.errors import CorruptLog, StorageFull
from natslog.log import LogOptions, ReplicaLog, batch_index
from natslog.log import small_segments as module
from natslog.log.sealed import SealedSegment, read_footer_index
from natslog.log.small_segments import Extents, Full, chosen
from natslog.log.verify import check_file
from natslog.model import Epoch
from tests.conftest import open_log, rows, stored_values
from tests.unit.log.crash_points import Images, images_of
from tests.unit.log.test_run_log import append_run

ORDINARY = Full(128 * 1024 * 1024, 2**62, 3_600_000_000)
FULL = Full(1_000_000, 2**62, 3_600_000_000)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts as many is little."""
    monkeypatch.setattr(batch_index, "_MOST_BATCHES", 16)
    monkeypatch.setattr(batch_index, "_FEWEST_BATCHES", 4)
    monkeypatch.setattr(module, "_MERGED_AT_ONCE", 4)


def value(number: int) -> bytes:
    return b"%d" % number


def append(log: ReplicaLog, count: int) -> None:
    """Each as a commit, a second apart."""
    for number in range(log.log_end_offset, log.log_end_offset + count):
        log.append(rows([value(number)], subject=f"orders.{number % 5}"), 1_000_000 * (number + 1))


def seal_all(log: ReplicaLog) -> None:
    while log.upkeep.seal_next():
        pass


def merge_all(log: ReplicaLog) -> int:
    return sum(1 for _ in iter(log.upkeep.merge_next, False))


def sealed(log: ReplicaLog) -> list[SealedSegment]:
    return [one for one in log.chain.segments if isinstance(one, SealedSegment)]


def check(log: ReplicaLog) -> None:
    """It has all rows, in files that follow each other and hold what they state."""
    assert stored_values(log) == [value(number) for number in range(log.log_start_offset, log.log_end_offset)]
    for segment in sealed(log):
        assert not check_file(segment.path).problems
    ends = [segment.end_offset for segment in log.chain.segments]
    assert [segment.base_offset for segment in log.chain.segments][1:] == ends[:-1]
    assert {path.name for path in log.folder.glob("0*.a*")} == {one.path.name for one in log.chain.segments}


# ---- which ones ----


def written_and_left(sizes: Sequence[int], full: Full, *, apart_us: int = 0) -> tuple[float, int]:
    """How often each byte was written when these were sealed one after another, and how many segments there are."""
    segments: list[Extents] = []
    written = 0
    for number, size in enumerate(sizes):
        written += size
        begin_us = number * apart_us
        segments.append(Extents(size, number, number + 1, begin_us, begin_us + apart_us))
        while parts := chosen(segments, full):
            whole = segments[parts[0]]
            for at in parts[1:]:
                whole = whole.with_next(segments[at])
            assert len(parts) > 1
            assert whole.share(full) <= 1
            written += whole.size_bytes
            segments[parts[0] : parts[-1] + 1] = [whole]
    return written / sum(sizes), len(segments)


def test_ten_million_messages_published_singly_are_few_files() -> None:
    written, count = written_and_left([8192 * 167] * (10_000_000 // 8192), ORDINARY)
    assert count <= 2 * (10_000_000 * 167 // (128 * 1024 * 1024) + 1)
    assert written <= 3


def test_twenty_messages_a_second_are_few_files() -> None:
    """Closed every 30 s; an hour of them is a full segment."""
    hours = 24
    written, count = written_and_left([600 * 167] * hours * 120, ORDINARY, apart_us=30_000_000)
    assert count <= 2 * hours
    assert written <= 3.1


@pytest.mark.parametrize("seed", range(20))
def test_segments_of_any_size_stay_few(seed: int) -> None:
    chance = random.Random(seed)
    mean = chance.choice([1000, 5000, 10_000, 30_000, 100_000])
    spread = chance.choice([0.5, 1.0, 2.0])
    sizes = [min(int(mean * chance.lognormvariate(0, spread)) + 1, 1_000_000) for _ in range(30_000_000 // mean)]
    written, count = written_and_left(sizes, FULL)
    assert count <= 3 * sum(sizes) / FULL.size_bytes + 40
    assert written <= 6


def extents(*sizes: int) -> list[Extents]:
    return [Extents(size, number, number + 1, 0, 0) for number, size in enumerate(sizes)]


def test_those_between_large_ones_become_one_however_few_they_are() -> None:
    large = 900_000
    assert chosen(extents(large, 10, 7000, large), FULL) == range(1, 3)
    assert chosen(extents(large, 10, 7000), FULL) == range(0), "others may follow"
    assert chosen(extents(10, large, 10), FULL) == range(0)
    assert chosen(extents(*[400_000] * 3), FULL) == range(2), "no more than a full one"
    assert chosen(extents(400_000, 400_000), FULL) == range(0)


def test_those_that_are_far_apart_in_time_stay_apart() -> None:
    hour_us = 3_600_000_000
    far = [Extents(10, number, number + 1, 2 * number * hour_us, 2 * number * hour_us + 1) for number in range(50)]
    assert chosen(far, FULL) == range(0)


# ---- of a log ----


def test_a_segment_is_closed_when_it_has_many_small_batches(log_folder: Path, few: None) -> None:
    closed: list[int] = []
    log = open_log(log_folder, LogOptions(min_free_bytes=0, closed_early=lambda: closed.append(log.log_end_offset)))
    append(log, 40)
    assert [segment.base_offset for segment in log.chain.segments] == [0, 16, 32]
    assert closed == [16, 32]
    log.append(rows([b"x"] * 32 * 64), 40_000_000)
    append(log, 10)
    assert len(log.chain.segments) == 3, "its batches are not small on average"
    log.close()


def test_a_segment_of_some_small_batches_is_closed_after_a_while(log_folder: Path, few: None) -> None:
    log = open_log(log_folder)
    log.append(rows([b"x"]), 1_000_000)
    for at in range(3):
        log.append(rows([b"x"]), 30_000_000 + at)
    assert not log.is_to_be_rolled
    assert not log.is_roll_due(log.newest_timestamp_us)
    log.append(rows([b"x"]), 32_000_000)
    assert log.is_to_be_rolled, "also of a follower, that does not know stream time"
    assert log.is_roll_due(log.newest_timestamp_us)
    log.roll()
    log.append(rows([b"x"]), 33_000_000)
    log.append(rows([b"x"]), 90_000_000)
    assert not log.is_to_be_rolled, "two are few, however old they are"
    log.close()


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_small_segments_become_one(log_folder: Path, few: None, compression: str) -> None:
    log = open_log(log_folder, compression=compression)
    for epoch in range(1, 17):
        if epoch in (3, 10):
            log.begin_epoch(Epoch(epoch))
        append(log, 16)
        seal_all(log)
        merge_all(log)
        check(log)
    assert len(sealed(log)) <= 6
    epochs = {}
    with log.reader.plan_read(0, max_bytes=1 << 20) as plan:
        for header in plan.headers():
            epochs[header.base_offset] = header.epoch
    assert set(epochs.values()) == {1, 3, 10}
    assert {min(base for base, epoch in epochs.items() if epoch == one) for one in (1, 3, 10)} == {0, 32, 144}
    assert not log.upkeep.merge_next(), "nothing is to be done"
    assert not log.upkeep.is_needed() or log.high_watermark > log.checkpointed or log.chain.has_unsealed
    log.close()
    log = open_log(log_folder, compression=compression)
    check(log)
    log.close()


def test_nothing_is_merged_where_older_versions_may_come_back(log_folder: Path, few: None) -> None:
    log = open_log(log_folder, LogOptions(min_free_bytes=0, merges_segments=False))
    append(log, 100)
    seal_all(log)
    assert not log.upkeep.merge_next()
    assert len(sealed(log)) == 6
    log.close()


def prepared(folder: Path, segments: int = 4) -> ReplicaLog:
    log = open_log(folder)
    append(log, 16 * segments + 1)
    seal_all(log)
    assert len(sealed(log)) == segments
    return log


@pytest.mark.parametrize("tears", [False, True], ids=["synced", "torn"])
def test_a_crash_while_segments_are_merged(log_folder: Path, few: None, tmp_path: Path, tears: bool) -> None:
    log = prepared(log_folder)
    log.subjects.counts()
    before = {path.name: path.read_bytes() for path in log_folder.glob("*.arrow")}
    images = Images(log_folder, tmp_path / "images", tears=tears)
    with images_of(images):
        assert log.upkeep.merge_next()
    check(log)
    log.close()
    first = f"{0:020d}.arrow"
    whole = (log_folder / first).read_bytes()
    moments = [image.moment.partition(": ")[2] for image in images.made]
    for expected in (f"replace {0:020d}.tmp", "replace hw-checkpoint.new", f"unlink {16:020d}.arrow"):
        assert moments.count(expected) == 1, moments
    seen = set()
    for image in images.made:
        found = {path.name: path.read_bytes() for path in image.folder.glob("*.arrow")}
        assert found[first] in (before[first], whole), image.moment
        is_merged = found[first] == whole
        assert is_merged or found == before, image.moment
        log = open_log(image.folder)
        check(log)
        assert len(sealed(log)) == (1 if is_merged else 4), image.moment
        assert log.subjects.on_subject("orders.1").count == 13, image.moment
        seen.add((is_merged, len(found)))
        log.close()
    assert {(False, 4), (True, 4), (True, 3), (True, 2)} <= seen, "each moment was seen"


def test_what_an_interrupted_merge_stated_is_no_reason_to_remove_other_segments(log_folder: Path, few: None) -> None:
    log = prepared(log_folder)
    assert log.upkeep.merge_next()
    assert len(sealed(log)) == 1
    log.discard_from(20)
    append(log, 1)
    log.roll()
    append(log, 60)
    seal_all(log)
    log.close()
    log = open_log(log_folder)
    assert stored_values(log, 20) == [value(number) for number in range(20, 81)]
    log.close()


def test_readers_of_former_files_read_on(log_folder: Path, few: None) -> None:
    log = prepared(log_folder)
    with log.reader.plan_read(0, max_bytes=1 << 20) as plan:
        former = log.chain.snapshot()
        assert log.upkeep.merge_next()
        found = [one for message in plan.messages() for one in ipc.decode_batch(message)["value"].to_pylist()]
        assert found == [value(number) for number in range(plan.next_offset)]
    for segment in former[:4]:
        with pytest.raises(FileNotFoundError):
            log.chain.open(segment)
    check(log)
    log.close()


def test_a_missing_segment_is_not_covered_by_the_merged_one(log_folder: Path, few: None) -> None:
    log = prepared(log_folder, 9)
    log.close()
    (log_folder / f"{32:020d}.arrow").unlink()
    log = open_log(log_folder)
    append(log, 16)
    seal_all(log)
    with pytest.raises(CorruptLog, match="begins at another offset than 32"):
        log.upkeep.merge_next()
    merge_all(log)
    with pytest.raises(CorruptLog):
        stored_values(log, 32)
    assert stored_values(log, 48) == [value(number) for number in range(48, log.log_end_offset)]
    log.close()


@pytest.mark.parametrize("what", ["batch", "footer"])
def test_a_damaged_segment_is_left_and_others_go_on(log_folder: Path, few: None, what: str) -> None:
    log = prepared(log_folder, 9)
    victim = sealed(log)[4]
    index = read_footer_index(victim.path)
    data = bytearray(victim.path.read_bytes())
    data[index.positions[-1] + index.lengths[-1] - 1 if what == "batch" else -1] ^= 1
    victim.path.write_bytes(data)
    victim.forget()
    victim.known = None
    victim.forget_proofs()
    with pytest.raises(CorruptLog):
        merge_all(log)
    merge_all(log)
    assert victim in log.chain.segments
    assert victim.is_unmergeable
    assert len(sealed(log)) == 3, "those before it, itself, and those behind it"
    assert not list(log_folder.glob("*.tmp"))
    assert stored_values(log, 80) == [value(number) for number in range(80, log.log_end_offset)]
    log.close()


def test_no_room_to_merge_leaves_everything_as_it_was(
    log_folder: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = prepared(log_folder)

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("natslog.log.sealed.write_all", no_room)
        with pytest.raises(StorageFull):
            log.upkeep.merge_next()
    check(log)
    assert len(sealed(log)) == 4
    assert log.upkeep.merge_next(), "it is tried again when there is room"
    check(log)
    log.close()


def test_a_log_that_is_closed_while_it_merges(log_folder: Path, few: None) -> None:
    log = prepared(log_folder)

    def close() -> None:
        log.shared.is_closed = True

    assert not log.upkeep.merge_next(close)
    log.shared.is_closed = False
    log.close()
    log = open_log(log_folder)
    assert len(sealed(log)) == 4
    check(log)
    log.close()


def test_the_index_of_subjects_is_merged_without_reading_messages(
    log_folder: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = prepared(log_folder)
    log.subjects.keep_up()
    before = log.subjects.counts()[1].table
    assert len(list(log_folder.glob("*.subjects"))) == 4
    read: list[tuple[int, int]] = []
    monkeypatch.setattr(log.subjects, "_rows", lambda start, end: read.append((start, end)) or iter(()))
    assert log.upkeep.merge_next()
    assert log.subjects.counts()[1].table == before
    assert [path.name for path in log_folder.glob("*.subjects")] == [f"{0:020d}.subjects"]
    log.close()
    log = open_log(log_folder)
    monkeypatch.setattr(log.subjects, "_rows", lambda start, end: read.append((start, end)) or iter(()))
    log.subjects.keep_up()
    assert read == []
    log.close()


def test_sizes_as_jetstream_counts_them_are_those_of_the_merged_file(log_folder: Path, few: None) -> None:
    log = prepared(log_folder)
    whole, part = log.message_bytes.total(0, log.log_end_offset), log.message_bytes.total(3, 50)
    assert log.upkeep.merge_next()
    assert log.message_bytes.total(0, log.log_end_offset) == whole
    assert log.message_bytes.total(3, 50) == part
    log.close()


def test_a_start_by_limits_does_not_go_back(log_folder: Path, few: None, tmp_path: Path) -> None:
    log = open_log(log_folder, max_bytes=100_000)
    append(log, 65)
    seal_all(log)
    log.settings = msgspec.structs.replace(log.settings, max_bytes=2000)
    log.limits.advance()
    start = log.first_readable_offset
    assert start > 0
    log.settings = msgspec.structs.replace(log.settings, max_bytes=100_000)
    assert log.upkeep.merge_next()
    assert log.first_readable_offset == start
    log.chain.limited_below = 0
    log.close()
    log = open_log(log_folder, max_bytes=100_000)
    assert log.first_readable_offset == start
    log.close()


def test_batches_of_runs_keep_their_bounds(log_folder: Path, few: None) -> None:
    log = open_log(log_folder)
    runs = []
    for number in range(6):
        runs.append(append_run(log, "query", number, [[b"a"], [b"b"]], now_us=1_000_000 * (number + 1)))
        append(log, 14)
    seal_all(log)
    assert merge_all(log)
    with log.reader.plan_read(0, max_bytes=1 << 20) as plan:
        found = [header.run for header in plan.headers() if header.run is not None]
    assert found == [run for run in runs for _ in range(2)]
    log.close()
