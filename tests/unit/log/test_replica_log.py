"""A log as a replica: a leader's batches byte for byte, epochs, cutting, beginning anew, and what is not committed."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from natslog.arrow import ipc
from natslog.errors import CorruptLog, OffsetOutOfRange, StorageUnavailable
from natslog.log import LogOptions, ReplicaLog
from natslog.log.batch_encoder import EncodedBatch
from natslog.model import Epoch
from natslog.node.replicas.fetch_sessions import records_from
from tests.conftest import open_log, retain, rows, stored_values
from tests.unit.log.test_run_log import append_run

SMALL = LogOptions(segment_bytes=4096, min_free_bytes=0)


def batches_of(log: ReplicaLog, start: int = 0) -> list[EncodedBatch]:
    """What a leader would send from `start` on, committed or not."""
    found: list[EncodedBatch] = []
    while start < log.log_end_offset:
        for data in records_from(log, start, 1 << 20):
            found += [EncodedBatch(header, [message]) for header, message in ipc.split_messages(data, source="t")]
        start = found[-1].header.end_offset
    return found


def filled(folder: Path, commits: int, options: LogOptions = SMALL) -> ReplicaLog:
    log = open_log(folder, options)
    log.begin_epoch(Epoch(3))
    for at in range(commits):
        log.append(rows([b"%d" % at, b"x" * 500]), 1_000_000 + at)
    return log


def copy_of(leader: ReplicaLog, folder: Path) -> ReplicaLog:
    log = open_log(folder, SMALL)
    log.append_copies(batches_of(leader))
    return log


def test_copies_are_byte_for_byte_the_leaders(tmp_path: Path) -> None:
    leader = filled(tmp_path / "leader", 30)
    copy = copy_of(leader, tmp_path / "copy")
    assert stored_values(copy) == stored_values(leader)
    assert copy.epochs.entries == [(1, 0), (3, 0)] or copy.epochs.entries == [(3, 0)]
    mine = b"".join(bytes(one.pieces[0]) for one in batches_of(copy))
    assert mine == b"".join(bytes(one.pieces[0]) for one in batches_of(leader))


def test_copies_that_do_not_continue_the_log_are_refused(tmp_path: Path) -> None:
    leader = filled(tmp_path / "leader", 4)
    copy = open_log(tmp_path / "copy")
    with pytest.raises(CorruptLog, match="the next offset of the log is 0"):
        copy.append_copies(batches_of(leader)[1:])
    assert copy.log_end_offset == 0


@pytest.mark.parametrize("end", [0, 2, 10, 30, 58, 60])
def test_cut_log_ends_there_also_after_a_restart(tmp_path: Path, end: int) -> None:
    leader = filled(tmp_path / "leader", 30)
    expected = stored_values(leader)[:end]
    copy = copy_of(leader, tmp_path / "copy")
    copy.chain.committed = 0
    copy.cut_to(end)
    assert copy.log_end_offset == end
    assert [epoch for epoch, start in copy.epochs.entries if start >= end] == []
    copy.close()
    again = open_log(tmp_path / "copy", SMALL)
    assert again.log_end_offset == end
    assert again.failure is None
    assert stored_values(again) == expected
    again.append_copies(batches_of(leader, end)) if end < 60 else None
    assert stored_values(again) == stored_values(leader)


def test_committed_records_are_never_cut(tmp_path: Path) -> None:
    log = filled(tmp_path / "log", 5)
    log.chain.committed = 6
    with pytest.raises(AssertionError, match="never cut"):
        log.cut_to(4)


def test_log_begins_anew_where_the_leader_begins(tmp_path: Path) -> None:
    leader = filled(tmp_path / "leader", 30)
    copy = copy_of(leader, tmp_path / "copy")
    copy.checkpoint()
    copy.begin_at(40, leader.epochs.last_epoch_before(40))
    assert (copy.log_start_offset, copy.log_end_offset, copy.high_watermark) == (40, 40, 40)
    copy.append_copies(batches_of(leader, 40))
    copy.close()
    again = open_log(tmp_path / "copy", SMALL)
    assert again.failure is None
    assert (again.log_start_offset, again.log_end_offset) == (40, 60)
    assert stored_values(again, 40) == stored_values(leader)[40:]


def test_damage_is_discarded_and_fetched_again(tmp_path: Path) -> None:
    leader = filled(tmp_path / "leader", 30)
    copy = copy_of(leader, tmp_path / "copy")
    copy.checkpoint()
    copy.close()
    victim = sorted((tmp_path / "copy").glob("*.active"))[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    damaged = open_log(tmp_path / "copy", SMALL)
    assert damaged.failure is not None
    start = damaged.first_damaged_offset()
    assert start is not None
    damaged.discard_from(start)
    assert damaged.failure is None
    damaged.append_copies(batches_of(leader, start))
    damaged.close()
    assert stored_values(open_log(tmp_path / "copy", SMALL)) == stored_values(leader)


@pytest.mark.parametrize("commits", [1, 4])
def test_damage_in_the_last_batch_is_cut_away_with_it(tmp_path: Path, commits: int) -> None:
    """Recovery does not know what the damaged bytes hold; nothing may be appended behind them."""
    leader = filled(tmp_path / "leader", commits, LogOptions(min_free_bytes=0))
    copy = open_log(tmp_path / "copy")
    copy.append_copies(batches_of(leader))
    copy.checkpoint()
    copy.close()
    (victim,) = (tmp_path / "copy").glob("*.active")
    data = bytearray(victim.read_bytes())
    data[-20] ^= 1
    victim.write_bytes(data)
    damaged = open_log(tmp_path / "copy")
    start = damaged.first_damaged_offset()
    assert start == 2 * commits - 2
    damaged.discard_from(start)
    damaged.append_copies(batches_of(leader, start))
    damaged.close()
    again = open_log(tmp_path / "copy")
    assert again.failure is None
    assert stored_values(again) == stored_values(leader)


def test_damaged_sealed_segment_is_discarded_whole(tmp_path: Path) -> None:
    leader = filled(tmp_path / "leader", 30)
    copy = open_log(tmp_path / "copy", SMALL)
    for batch in batches_of(leader):
        copy.append_copies([batch])
    while copy.upkeep.seal_next():
        pass
    sealed = sorted((tmp_path / "copy").glob("*.arrow"))
    assert sealed
    for number, victim in enumerate((sealed[-1], sealed[0])):
        data = bytearray(victim.read_bytes())
        data[len(data) // 3] ^= 1
        victim.write_bytes(data)
        start = copy.first_damaged_offset()
        assert start == int(victim.stem), f"case {number}"
        copy.discard_from(start)
        assert copy.log_end_offset == start
    copy.append_copies(batches_of(leader))
    copy.chain.committed = copy.log_end_offset
    assert stored_values(copy) == stored_values(leader)


def test_what_is_not_committed_is_for_replicas_only(tmp_path: Path) -> None:
    log = filled(tmp_path / "log", 5)
    log.chain.committed = 4
    assert log.high_watermark == 4
    assert len(stored_values(log)) == 4
    with pytest.raises(OffsetOutOfRange):
        log.reader.plan_read(6, max_bytes=1000)
    assert sum(batch.header.rows for batch in batches_of(log)) == 10
    assert log.reader.offset_at(1_000_001) == (2, 1_000_001)
    assert log.reader.offset_at(1_000_003) == (4, None), "beyond the high watermark is the future"


def test_what_is_not_committed_is_neither_sealed_nor_dropped(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log", SMALL, max_messages=1)
    for at in range(30):
        log.append(rows([b"x" * 500]), 1_000_000 + at)
    log.chain.committed = 0
    assert not log.upkeep.seal_next()
    assert retain(log, 2_000_000_000_000) == 0
    log.chain.committed = 30
    while log.upkeep.seal_next():
        pass
    assert retain(log, 2_000_000_000_000) > 0


def test_epochs_are_known_again_after_a_restart(tmp_path: Path) -> None:
    log = filled(tmp_path / "log", 2)
    log.begin_epoch(Epoch(7))
    log.append(rows([b"new"]), 2_000_000)
    log.close()
    again = open_log(tmp_path / "log", SMALL)
    assert again.epoch == 7
    assert again.epochs.last_epoch_before(4) == 3
    assert again.epochs.last_epoch_before(5) == 7


def test_slice_of_a_larger_batch_proves_itself(tmp_path: Path) -> None:
    """A follower that needs a part of a merged batch gets that part, with CRCs of its own."""
    leader = filled(tmp_path / "leader", 30)
    while leader.upkeep.seal_next():
        pass
    assert os.listdir(tmp_path / "leader")
    whole = batches_of(leader)[0].header
    assert whole.rows > 2, "sealing has merged commits"
    first = batches_of(leader, 1)[0].header
    assert (first.base_offset, first.end_offset, first.epoch) == (1, whole.end_offset, 3)


@pytest.mark.parametrize("replicas", [1, 3])
def test_several_batches_written_at_once_of_which_the_first_did_not_reach_the_disk_are_torn(
    tmp_path: Path, replicas: int
) -> None:
    """The blocks of one write may reach the disk in any order; where a commit is one batch, it is damage."""
    leader = open_log(tmp_path / "leader")
    for at in range(6):
        leader.append(rows([os.urandom(20_000)]), 1_000_000 + at)
    sent = batches_of(leader)
    copy = open_log(tmp_path / "copy", replicas=replicas)
    copy.append_copies(sent[:3])
    whole_bytes = copy.chain.segments[-1].size_bytes
    copy.append_copies(sent[3:])  # and now the power goes, before anybody was told
    path = copy.chain.segments[-1].path
    with open(path, "r+b") as file:
        file.seek(-(-whole_bytes // 4096) * 4096)
        file.write(bytes(4096))
    again = open_log(tmp_path / "copy", replicas=replicas)
    assert (again.failure is None) == (replicas > 1)
    if replicas > 1:
        assert again.log_end_offset == 3
        again.append_copies(sent[3:])
        assert stored_values(again) == stored_values(leader)
    else:
        assert isinstance(again.failure, CorruptLog)


def test_what_is_known_to_be_committed_is_damage_and_never_torn(tmp_path: Path) -> None:
    leader = open_log(tmp_path / "leader")
    for at in range(3):
        leader.append(rows([os.urandom(20_000)]), 1_000_000 + at)
    copy = open_log(tmp_path / "copy", replicas=3)
    copy.append_copies(batches_of(leader))
    copy.chain.committed = 3
    copy.checkpoint()
    with open(copy.chain.segments[-1].path, "r+b") as file:
        file.seek(4096)
        file.write(bytes(4096))
    again = open_log(tmp_path / "copy", replicas=3)
    assert isinstance(again.failure, CorruptLog)


def test_log_that_begins_anew_says_which_epoch_lay_below(tmp_path: Path) -> None:
    copy = copy_of(filled(tmp_path / "leader", 5), tmp_path / "copy")
    copy.begin_at(40, Epoch(3))
    copy.close()
    again = open_log(tmp_path / "copy", SMALL)
    assert again.epochs.last_epoch_before(40) == 3


def test_too_many_open_files_are_no_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch of the leader could not be stored: nothing was written, and the same batches are appended later."""
    leader, copy = filled(tmp_path / "leader", 3), open_log(tmp_path / "copy")

    def failing(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("natslog.log.stream_log.write_epochs", failing)
        with pytest.raises(StorageUnavailable, match="LimitNOFILE"):
            copy.append_copies(batches_of(leader))
    assert (copy.failure, copy.log_end_offset) == (None, 0)
    copy.append_copies(batches_of(leader))
    assert copy.log_end_offset == leader.log_end_offset
    assert copy.epochs.entries == leader.epochs.entries
    leader.close()
    copy.close()


def test_last_commits_are_sent_as_they_are_in_the_file(log_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a cut, a run, a roll and a change of the leader: what followers get is what is stored."""
    log, chance = open_log(log_folder, replicas=3), random.Random(7)
    sent_as_they_are = 0
    for step in range(200):
        match chance.randrange(6):
            case 0 if log.log_end_offset:
                log.cut_to(chance.randrange(max(0, log.log_end_offset - 3), log.log_end_offset + 1))
                log.begin_epoch(Epoch(log.epoch + 1))
            case 1:
                append_run(log, "query", step, [[b"r%d" % step], [b"s"]])
            case 2:
                log.roll()
            case 3:
                log.begin_epoch(Epoch(log.epoch + 1))
            case _:
                log.append(rows([b"%d" % step * chance.choice([1, 1, 20_000])] * chance.randrange(1, 3)), step)
        log.chain.committed = 0
        for start in range(max(0, log.log_end_offset - 4), log.log_end_offset):
            found = b"".join(records_from(log, start, 1 << 30))
            sent_as_they_are += log.recent.stored(start, log.log_end_offset) is not None
            with monkeypatch.context() as patch:
                patch.setattr(log.recent, "stored", lambda start, end: None)
                assert found == b"".join(records_from(log, start, 1 << 30))
    assert sent_as_they_are > 100
    log.close()
