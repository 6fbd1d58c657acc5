"""What a hosted stream does on real files when the metadata, followers and disks want something of it."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import pytest

from natslog.cluster.commands import AppointLeaders, DisableReplicas, HoldReplicas, IsrChange
from natslog.cluster.roles import CutTo, Diverging, FetchPosition, Matching
from natslog.errors import CorruptLog, StorageFailed, StorageFull, StreamPaused
from natslog.log import LogOptions, ReplicaLog
from natslog.log.message_ids import MessageIds
from natslog.log.segment import read_at
from natslog.log.stored_ids import StoredIds
from natslog.model import BrokerId, Epoch, StreamRecord, StreamSettings
from natslog.node.clock import elapsed_us, monotonic_ms, now_us
from natslog.node.replicas.log_folder import LogFolder
from tests.unit.node.replicas.replica_stage import ME, OTHER, ReplicaStage, append, new_record, record_of, run

ALONE = StreamSettings(subject="orders.>")


async def led(stage: ReplicaStage, **changes: Any) -> Any:
    """A stream that broker 1 leads, new."""
    stream = await stage.host(new_record(**changes))
    await stage.change(stream, holders=stream.record.replicas)
    return stream


def test_a_new_replica_says_that_its_log_exists_before_it_takes_a_role(tmp_path: Path) -> None:
    async def story(stage: ReplicaStage) -> None:
        record = new_record()
        stream = await stage.host(record)
        assert stream.log is not None
        assert (stream.leading, stage.nats.subjects) == (None, [])
        (proposed,) = stage.proposed
        assert isinstance(proposed, HoldReplicas)
        assert (proposed.broker, proposed.stream_ids) == (ME, (record.id,))
        await stage.change(stream, holders=(ME,))
        assert stream.is_ready
        assert stage.nats.subjects == ["orders.>"]
        await stream.driver.stop()

    run(tmp_path, story)


def test_the_message_ids_are_read_once_however_often_it_is_asked_to_prepare_to_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again when the present leader stops while the metadata leader returns the leadership to it."""
    read, newest_ids = list[float](), MessageIds.newest

    def noted(ids: MessageIds, window_s: float) -> object:
        read.append(window_s)
        return newest_ids(ids, window_s)

    monkeypatch.setattr(MessageIds, "newest", noted)

    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        await stage.change(stream, leader=OTHER, leader_epoch=Epoch(2))
        assert stream.following is not None
        read.clear()
        await stream.driver.steps.prepare_to_lead(stream.usable_log())
        await stream.driver.steps.prepare_to_lead(stream.usable_log())
        await stage.change(stream, leader=ME, leader_epoch=Epoch(3))
        assert stream.is_ready
        assert read == [stream.record.settings.dedupe_window_s]
        await stream.driver.stop()

    run(tmp_path, story)


def test_message_ids_that_are_adopted_while_it_prepares_to_lead_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_read, may_return, newest_ids = threading.Event(), threading.Event(), MessageIds.newest
    given = np.array([[7, 8]], np.uint64)

    def slow(ids: MessageIds, window_s: float) -> object:
        found = newest_ids(ids, window_s)
        has_read.set()
        assert may_return.wait(20)
        return found

    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        append(stream, b"its id is kept by the leader only")
        await stage.change(stream, leader=OTHER, leader_epoch=Epoch(2))
        stream.usable_log().chain.committed = 1
        monkeypatch.setattr(MessageIds, "newest", slow)
        preparing = asyncio.create_task(stream.driver.steps.prepare_to_lead(stream.usable_log()))
        assert await asyncio.to_thread(has_read.wait, 20)
        kept = StoredIds(given, np.array([0]), np.array([now_us()])).to_bytes()
        adopting = asyncio.create_task(stream.messages.adopt_ids(Epoch(2), 1, kept))
        for _ in range(1000):
            if len(stream.usable_log().ids.kept.read().offsets):
                break
            await asyncio.sleep(0.01)
        may_return.set()
        await asyncio.gather(preparing, adopting)
        await stage.change(stream, leader=ME, leader_epoch=Epoch(3))
        assert stream.ingest.dedupe.find(given, now_us()).tolist() == [0]
        await stream.driver.stop()

    run(tmp_path, story)


def test_a_log_that_is_missing_is_damage_and_is_fetched_again_when_nobody_counts_on_it(tmp_path: Path) -> None:
    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        append(stream, b"acked")
        await stream.driver.stop()
        shutil.rmtree(tmp_path / stream.id)
        stream = await stage.host(stream.record)
        assert stream.log is None
        assert isinstance(stream.problem, CorruptLog)
        assert "is missing" in stream.problem.message
        stage.proposed.clear()
        stream.driver.tick({})
        (proposed,) = stage.proposed
        assert isinstance(proposed, DisableReplicas)
        await stage.change(stream, isr=(OTHER,), leader=OTHER, leader_epoch=Epoch(2))
        assert stream.damage is None
        assert stream.following is not None
        assert stream.usable_log().log_end_offset == 0
        await stream.driver.stop()

    run(tmp_path, story)


@contextmanager
def unreadable_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(folder: LogFolder, record: Any, *, must_exist: bool) -> NoReturn:
        raise StorageFailed("Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(LogFolder, "open", fail)
        yield


async def acked_and_stopped(stage: ReplicaStage, **changes: Any) -> StreamRecord:
    """The record of a stream with one message, whose replica here is closed."""
    stream = await led(stage)
    append(stream, b"acked")
    await stage.change(stream, **changes)
    await stream.driver.stop()
    stage.proposed.clear()
    return stream.record


def test_a_log_that_cannot_be_read_leaves_the_candidates_and_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was opened again every second for ever, and its stream had no leader where the record named this one."""

    async def story(stage: ReplicaStage) -> None:
        record = await acked_and_stopped(stage)
        with unreadable_logs(monkeypatch):
            stream = await stage.host(record)
            stream.driver.tick({})
            assert [type(one) for one in stage.proposed] == [DisableReplicas]
        await stage.change(stream, isr=(OTHER,), leader=OTHER, leader_epoch=Epoch(2))
        assert stream.following is not None
        assert stream.usable_log().log_end_offset == 0
        await stream.driver.stop()

    run(tmp_path, story)
    assert list(tmp_path.glob("*.damaged-1")), "what could not be read is kept"


def test_the_only_candidate_whose_log_cannot_be_read_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(stage: ReplicaStage) -> None:
        record = await acked_and_stopped(stage, isr=(ME,))
        with unreadable_logs(monkeypatch):
            stream = await stage.host(record)
            stream.driver.tick({})
            assert (stage.proposed, stream.log) == ([], None)
        async with asyncio.timeout(10):
            while stream.leading is None:
                stream.driver.tick({})
                await asyncio.sleep(0.05)
        assert stream.usable_log().log_end_offset == 1
        await stream.driver.stop()

    run(tmp_path, story)


def test_a_missing_log_of_a_single_replica_refuses_to_serve(tmp_path: Path) -> None:
    async def story(stage: ReplicaStage) -> None:
        alone = {"settings": ALONE, "replicas": (ME,), "isr": (ME,)}
        stream = await led(stage, **alone)
        append(stream, b"acked")
        await stream.driver.stop()
        shutil.rmtree(tmp_path / stream.id)
        stream = await stage.host(stream.record)
        assert (stream.log, stream.leading) == (None, None)
        assert stream.problem is not None
        assert "mount the file system or restore the folder" in stream.problem.message
        assert not (tmp_path / stream.id).exists(), "nothing is created in its place"

    run(tmp_path, story)


def test_a_role_ends_before_the_next_one_begins(tmp_path: Path) -> None:
    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        append(stream, b"one")
        await stage.change(stream, leader=OTHER, leader_epoch=Epoch(2))
        assert (stream.leading, stream.ingest, stage.nats.subjects) == (None, None, [])
        assert stage.followed == [stream.messages]
        await stage.change(stream, leader=ME, leader_epoch=Epoch(3))
        assert stage.followed == []
        assert stream.is_ready
        assert stream.usable_log().epoch == 3
        await stream.driver.stop()

    run(tmp_path, story)


def test_followers_are_expected_in_each_epoch_also_of_the_same_leader(tmp_path: Path) -> None:
    """As at the end of a move. They ask in the new epoch at once, because no request of them is held for long."""

    async def story(stage: ReplicaStage) -> None:
        expected = list[int]()
        stage.appointed = lambda record: expected.append(record.leader_epoch)  # type: ignore[method-assign]
        stream = await led(stage)
        await stage.change(stream, leader_epoch=Epoch(2))
        await stage.change(stream, isr=(ME,))
        assert expected == [1, 2]
        await stream.driver.stop()

    run(tmp_path, story)


def test_an_edited_subject_moves_the_subscription(tmp_path: Path) -> None:
    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        settings = StreamSettings(subject="returns.>", replicas=2, min_isr=1)
        await stage.change(stream, settings=settings, paused=True)
        assert stage.nats.subjects == ["returns.>"]
        assert stream.ingest is not None
        assert isinstance(stream.ingest.why_not(), StreamPaused)
        await stream.driver.stop()

    run(tmp_path, story)


def test_edited_subjects_are_subscribed_in_one_step(tmp_path: Path) -> None:
    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        settings = StreamSettings(subject="orders.>", more_subjects=("*.returns", "c"), replicas=2, min_isr=1)
        await stage.change(stream, settings=settings)
        assert stage.nats.subjects == ["orders.>", "*.returns", "c"]
        assert stream.ingest is not None
        assert stream.ingest.ack_rules.omits_internal, "one of them begins with a wildcard"
        stage.has_session = False
        stream.driver.tick({})
        await stage.wait_until_idle(stream)
        assert stage.nats.subjects == []
        await stream.driver.stop()

    run(tmp_path, story)


def test_without_a_metadata_session_it_takes_no_messages_and_states_no_position(tmp_path: Path) -> None:
    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        stage.has_session = False
        stream.driver.tick({})
        await stage.wait_until_idle(stream)
        assert stage.nats.subjects == []
        assert not stream.is_leading
        assert stream.may_serve
        stage.has_session = True
        stream.driver.tick({})
        await stage.wait_until_idle(stream)
        assert stage.nats.subjects == ["orders.>"]
        assert stream.is_leading
        await stream.driver.stop()

    run(tmp_path, story)


def position(stream: Any, offset: int, epoch: int = 1) -> FetchPosition:
    return FetchPosition(Epoch(epoch), offset, Epoch(epoch) if offset else Epoch(0), stream.record.version)


def test_leadership_is_transferred_when_the_other_one_has_caught_up(tmp_path: Path) -> None:
    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        append(stream, b"one")
        transfer = asyncio.create_task(stream.driver.transfer_leadership(OTHER))
        await asyncio.sleep(0)
        await stage.wait_until_idle(stream)
        assert stream.is_transferring
        assert stage.nats.subjects == []
        stage.proposed.clear()
        stream.messages.fetched(OTHER, position(stream, 0), "other.1")
        assert stage.proposed == []
        stream.messages.fetched(OTHER, position(stream, 1), "other.1")
        (proposed,) = stage.proposed
        assert isinstance(proposed, AppointLeaders)
        assert proposed.appointments[0].leader == OTHER
        await stage.change(stream, leader=OTHER, leader_epoch=Epoch(2))
        await transfer
        assert stream.following is not None
        await stream.driver.stop()

    run(tmp_path, story)


def test_a_broker_that_stops_leaves_the_isr_as_soon_as_another_one_leads(tmp_path: Path) -> None:
    """It stops before it follows. The new leader would wait until it lags, and ack nothing meanwhile."""

    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        append(stream, b"one")
        assert not stream.driver.leave(), "it leads"
        record, version = stream.record, stream.record.version + 1
        stream.driver.changed(msgspec.structs.replace(record, version=version, leader=OTHER, leader_epoch=Epoch(2)))
        assert stream.following is None, "what it has received is still being written"
        assert stream.driver.leave()
        await stage.wait_until_idle(stream)
        await stream.driver.stop()

    run(tmp_path, story)


def test_leadership_is_not_transferred_to_a_replica_that_has_restarted_uncleanly(tmp_path: Path) -> None:
    """What its former life had is void: it may have lost it, and would have led without it."""

    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        append(stream, b"one")
        assert isinstance(stream.messages.fetched(OTHER, position(stream, 1), "other.1"), Matching)
        stage.proposed.clear()
        transfer = asyncio.create_task(stream.driver.transfer_leadership(OTHER))
        await asyncio.sleep(0)
        await stage.change(stream, unproven=(OTHER,))
        async with asyncio.timeout(5):
            await transfer
            await stream.driver.transfer_leadership(OTHER)
        stream.driver.tick({})
        assert not any(isinstance(one, AppointLeaders) for one in stage.proposed)
        await stream.driver.stop()

    run(tmp_path, story)


def test_a_transfer_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        append(stream, b"one")
        transfer = asyncio.create_task(stream.driver.transfer_leadership(OTHER))
        await asyncio.sleep(0)
        await stage.wait_until_idle(stream)
        late_ms = monotonic_ms() + 4000
        monkeypatch.setattr("natslog.node.replicas.replica_driver.monotonic_ms", lambda: late_ms)
        stream.driver.tick({})
        await stage.wait_until_idle(stream)
        async with asyncio.timeout(5):
            await transfer
        assert stage.nats.subjects == ["orders.>"], "it goes on leading"
        await stream.driver.stop()

    run(tmp_path, story)


def test_direct_appends_wait_until_a_transfer_that_was_given_up_has_been_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise new appends come in front of the end that draining waits for, and the leader never subscribes again."""

    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        assert stream.ingest is not None
        drained = asyncio.Event()
        monkeypatch.setattr(stream.ingest, "drained", drained.wait)
        transfer = asyncio.create_task(stream.driver.transfer_leadership(OTHER))
        await asyncio.sleep(0.05)
        assert stage.nats.subjects == [], "it has reached the step Drain"
        late_ms = monotonic_ms() + 4000
        monkeypatch.setattr("natslog.node.replicas.replica_driver.monotonic_ms", lambda: late_ms)
        stream.driver.tick({})
        assert stream.is_transferring, "direct appends are refused while it drains"
        drained.set()
        await stage.wait_until_idle(stream)
        async with asyncio.timeout(5):
            await transfer
        assert not stream.is_transferring
        assert stage.nats.subjects == ["orders.>"], "it goes on leading"
        await stream.driver.stop()

    run(tmp_path, story)


def test_a_transfer_that_is_given_up_without_a_session_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing is left to be done, and who waits for the transfer has to be told all the same."""

    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        transfer = asyncio.create_task(stream.driver.transfer_leadership(OTHER))
        await asyncio.sleep(0)
        await stage.wait_until_idle(stream)
        stage.has_session = False
        late_ms = monotonic_ms() + 4000
        monkeypatch.setattr("natslog.node.replicas.replica_driver.monotonic_ms", lambda: late_ms)
        stream.driver.tick({})
        async with asyncio.timeout(5):
            await transfer
        assert not stream.is_transferring
        assert stream.leading is not None, "it goes on leading"
        await stream.driver.stop()

    run(tmp_path, story)


def test_an_epoch_that_had_no_room_begins_when_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica was neither damaged nor forgotten."""

    async def story(stage: ReplicaStage) -> None:
        stream = await stage.host(new_record())
        stage.proposed.clear()
        full = [True]
        begin_epoch = ReplicaLog.begin_epoch

        def begin(self: ReplicaLog, epoch: Epoch) -> None:
            if full[0]:
                raise OSError(28, "No space left on device")
            begin_epoch(self, epoch)

        monkeypatch.setattr(ReplicaLog, "begin_epoch", begin)
        stage.disk.free_bytes = -1
        await stage.change(stream, holders=(ME, OTHER))
        assert isinstance(stream.problem, StorageFull)
        assert stream.damage is None
        full[0] = False
        later_ms = monotonic_ms() + 5000
        monkeypatch.setattr("natslog.node.replicas.replica_driver.monotonic_ms", lambda: later_ms)
        stream.driver.tick({})
        await stage.wait_until_idle(stream)
        assert not stream.is_ready, "there is no room yet"
        stage.disk.free_bytes = 2**60
        stream.driver.tick({})
        await stage.wait_until_idle(stream)
        assert stream.is_ready
        assert stream.problem is None
        await stream.driver.stop()

    run(tmp_path, story)


def test_a_leader_whose_epoch_has_no_room_gives_its_leadership_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(stage: ReplicaStage) -> None:
        stream = await stage.host(new_record())

        def begin(self: ReplicaLog, epoch: Epoch) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(ReplicaLog, "begin_epoch", begin)
        await stage.change(stream, holders=(ME, OTHER))
        stage.proposed.clear()
        await stream.driver.transfer_leadership(OTHER)
        (proposed,) = stage.proposed
        assert isinstance(proposed, AppointLeaders)
        assert proposed.appointments[0].leader == OTHER
        await stream.driver.stop()

    run(tmp_path, story)


def test_refused_proposals_of_the_only_candidate_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is refused is repeated ever more rarely; what must be refused is not proposed."""

    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        stream.note_damage(CorruptLog("a hole"))
        await asyncio.sleep(0)
        now_ms = monotonic_ms()
        clock = [now_ms]
        monkeypatch.setattr("natslog.node.replicas.replica_driver.monotonic_ms", lambda: clock[0])
        stage.proposed.clear()
        for _ in range(400):  # 100 s
            clock[0] += 250
            stream.driver.tick({})
        await stage.wait_until_idle(stream)
        disabling = [one for one in stage.proposed if isinstance(one, DisableReplicas)]
        assert 5 <= len(disabling) <= 15
        await stage.change(stream, isr=(ME,), eligible=())
        stage.proposed.clear()
        for _ in range(400):
            clock[0] += 250
            stream.driver.tick({})
        assert [one for one in stage.proposed if isinstance(one, DisableReplicas)] == []
        await stream.driver.stop()

    run(tmp_path, story)


def copied_from(stream: Any, start: int) -> bytes:
    with stream.usable_log().reader.plan_read(start, max_bytes=1 << 24, uncommitted=True) as plan:
        return b"".join(read_at(piece.fd, piece.position, piece.length) for piece in plan.ranges)


def test_a_follower_cuts_what_its_leader_does_not_have_and_copies_the_rest(tmp_path: Path) -> None:
    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        for value in (b"one", b"two"):
            append(stream, value)
        await stage.change(stream, leader=OTHER, leader_epoch=Epoch(2))
        asked = stream.messages.position()
        assert (asked.offset, asked.last_epoch) == (2, 1)
        assert await stream.messages.answered(Epoch(2), Diverging(Epoch(1), 1), None, 1)
        assert stream.usable_log().log_end_offset == 1
        assert not await stream.messages.answered(Epoch(1), Matching(), None, 1), (
            "an answer of another epoch changes nothing"
        )
        assert isinstance(CutTo(1), CutTo)
        await stream.driver.stop()

    run(tmp_path, story)


def test_damage_found_while_copying_leads_to_a_repair_that_keeps_what_is_whole(tmp_path: Path) -> None:
    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        for value in (b"one", b"two", b"three"):
            append(stream, value)
        log = stream.usable_log()
        segment = log.chain.segments[-1]
        with open(segment.path, "r+b") as file:  # noqa: ASYNC230
            file.seek(segment.index.positions[1] + 40)
            file.write(b"\xff\xff\xff\xff")
        stream.note_damage(CorruptLog("found by a reader"))
        await asyncio.sleep(0)
        await stage.wait_until_idle(stream)
        assert stream.leading is None, "a damaged leader with an in-sync replica beside it stops leading"
        await stage.change(stream, isr=(OTHER,), leader=OTHER, leader_epoch=Epoch(2))
        assert stream.damage is None
        assert stream.usable_log().log_end_offset == 1
        assert stream.following is not None
        await stream.driver.stop()

    run(tmp_path, story)


def test_a_folder_that_cannot_be_opened_is_kept_under_another_name(tmp_path: Path) -> None:
    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        append(stream, b"one")
        await stream.driver.stop()
        (tmp_path / stream.id / "hw-checkpoint").write_bytes(b"natslog hw-checkpoint v1 bytes=3 crc32c=00000000\n{}")
        stream = await stage.host(record_of(isr=(OTHER,), leader=OTHER, leader_epoch=Epoch(2)))
        assert stream.following is not None
        assert (tmp_path / f"{stream.id}.damaged-1").is_dir()
        await stream.driver.stop()

    run(tmp_path, story)


def test_a_follower_that_is_stopped_while_it_copies_ends_in_order(tmp_path: Path) -> None:
    """Its step was under way for ever, and the broker ended uncleanly after some seconds."""

    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        append(stream, b"one")
        await stage.change(stream, leader=OTHER, leader_epoch=Epoch(2))

        async def copy() -> None:
            await asyncio.Event().wait()

        copying = asyncio.create_task(stream.messages.answered(Epoch(2), Matching(), lambda log: copy(), 1))
        await asyncio.sleep(0)
        copying.cancel()  # as the fetcher does when it is closed
        with pytest.raises(asyncio.CancelledError):
            await copying
        async with asyncio.timeout(5):
            await stream.driver.stop()
        assert stream.log is None

    run(tmp_path, story)


def test_a_follower_behind_leaves_and_rejoins_through_its_leader(tmp_path: Path) -> None:
    async def story(stage: ReplicaStage) -> None:
        stream = await led(stage)
        append(stream, b"one")
        stream.driver.tick({OTHER: monotonic_ms() - 60_000})
        stream._replica.tick(monotonic_ms() + 10_000, {})
        changes = [one for one in stream._replica.take_notices() if hasattr(one, "change")]
        assert [one.change.isr for one in changes] == [(ME,)]
        assert isinstance(changes[0].change, IsrChange)
        await stream.driver.stop()

    run(tmp_path, story)


def test_a_new_log_is_made_where_none_has_to_be(tmp_path: Path) -> None:
    folder = LogFolder(tmp_path / "new", LogOptions(min_free_bytes=0))
    with pytest.raises(CorruptLog, match="is missing"):
        folder.open(record_of(), must_exist=True)
    assert not folder.path.exists()
    folder.open(record_of(), must_exist=False).close()
    folder.open(record_of(), must_exist=True).close()


def test_an_epoch_waits_a_moment_for_the_clocks_of_a_majority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stamped before may be far behind; then stream time leaps, and message ids of a moment ago expire."""

    async def story(stage: ReplicaStage) -> None:
        stage.services.clock.refresh([ME, OTHER])  # nothing is known of the other one's clock
        stream = await stage.host(record_of(holders=()))
        await stage.change(stream, holders=(ME, OTHER))
        stream.driver.tick({})
        await stage.wait_until_idle(stream)
        assert stream.leading is None
        stage.services.clock.note(OTHER, now_us(), elapsed_us())
        stream.driver.tick({})
        await stage.wait_until_idle(stream)
        assert stream.leading is not None
        await stream.driver.stop()
        other = await stage.host(record_of("returns", holders=()))
        stage.services.clock.refresh([ME, BrokerId(3), BrokerId(4)])
        await stage.change(other, holders=(ME, OTHER))
        assert other.leading is None
        late_ms = monotonic_ms() + 2100
        monkeypatch.setattr("natslog.node.replicas.replica_driver.monotonic_ms", lambda: late_ms)
        other.driver.tick({})
        await stage.wait_until_idle(other)
        assert other.leading is not None, "it does not wait for ever"
        await other.driver.stop()

    run(tmp_path, story)
