"""The companion log on real files: three brokers in one process, which are killed, disconnected, and lose files."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from natslog.errors import CorruptLog, InvalidRequest, NatslogError, NoLeader, StorageFull
from natslog.log.segment import ActiveSegment
from natslog.log.verify import check_file, files_of
from natslog.node.replicas.companion import MAX_RECORDS_BYTES
from natslog.node.replicas.upkeep import Pacer, maintain
from tests.unit.node.replicas.trio import STREAM, Trio, run

REMOVED = "removed"


def companion_folder(folder: Path, number: int = 1) -> Path:
    return folder / str(number) / STREAM / "companion"


def companion_of(trio: Trio, number: int) -> Path:
    return companion_folder(trio.folder, number)


def test_stream_without_records_has_no_companion_log(tmp_path: Path) -> None:
    async def story(trio: Trio) -> None:
        trio.publish(b"m")
        await trio.until(lambda: trio.streams[1].high_watermark == 1)  # type: ignore[index]
        assert not trio.record.has_companion
        assert trio.streams[1].companion.size_bytes == 0  # type: ignore[index]

    run(tmp_path, story)
    assert not list(tmp_path.rglob("companion*"))


def test_record_is_answered_when_it_is_on_all_replicas_and_is_delivered_on_each_in_order(tmp_path: Path) -> None:
    async def story(trio: Trio) -> None:
        leader = await trio.led(1)
        assert await leader.companion.append([(REMOVED, b"a"), ("other", b"b")]) == 2
        assert [
            len(stream.companion.files.chain.segments) for stream in trio.streams.values() if stream.companion.log
        ] == [1] * 3
        ends = [stream.companion.files.log_end_offset for stream in trio.streams.values() if stream.companion.log]
        assert ends == [2, 2, 2], "answered, and not on every in-sync replica"
        assert trio.given[leader.me] == [(0, REMOVED, b"a"), (1, "other", b"b")], "answered before it was delivered"
        answers = await asyncio.gather(*(leader.companion.append([(REMOVED, b"%d" % at)]) for at in range(20)))
        assert sorted(answers) == list(range(3, 23))
        await trio.all_given(b"a", b"b", *(value for *_, value in trio.given[leader.me][2:]))
        assert [offset for offset, *_ in trio.given[leader.me]] == list(range(22))
        assert leader.companion.size_bytes > 0
        assert leader.usable_log().log_end_offset == 0, "no offset of the stream is spent"

    run(tmp_path, story)


def test_answered_record_survives_the_leader_which_is_killed(tmp_path: Path) -> None:
    async def story(trio: Trio) -> None:
        leader = await trio.led(1)
        trio.publish(b"m")
        await leader.companion.append([(REMOVED, b"answered")])
        await trio.kill(1)
        trio.appoint(2, 2, 3)
        leader = await trio.led(2)
        assert trio.given[leader.me] == [(0, REMOVED, b"answered")], "it serves, and was not given the record"
        await leader.companion.append([(REMOVED, b"next")])
        trio.restart(1)
        await trio.in_sync(1, 2, 3)
        await trio.all_given(b"answered", b"next")

    run(tmp_path, story)


def test_leadership_is_transferred_with_both_logs_while_records_are_appended(tmp_path: Path) -> None:
    async def story(trio: Trio) -> None:
        answered: list[bytes] = []

        async def keep_appending() -> None:
            for at in range(60):
                value = b"%d" % at
                while value not in answered:
                    leader = trio.streams[trio.record.leader or trio.numbers[0]]
                    try:
                        await leader.companion.append([(REMOVED, value)])
                        answered.append(value)
                    except NoLeader:
                        await asyncio.sleep(0.01)

        appending = asyncio.create_task(keep_appending())
        await trio.until(lambda: len(answered) > 10)
        await trio.streams[trio.numbers[0]].driver.transfer_leadership(trio.numbers[1])
        await trio.led(2)
        await appending
        await trio.until(
            lambda: (
                len({tuple(given) for given in trio.given.values()}) == 1
                and {value for *_, value in trio.given[trio.numbers[2]]} == set(answered)
            )
        )
        assert [offset for offset, *_ in trio.given[trio.numbers[2]]] == list(range(len(trio.given[trio.numbers[2]])))

    run(tmp_path, story)


def test_unanswered_record_of_a_former_leader_is_cut(tmp_path: Path) -> None:
    async def story(trio: Trio) -> None:
        leader = await trio.led(1)
        await leader.companion.append([(REMOVED, b"answered")])
        trio.cut |= {(2, 1), (3, 1)}  # type: ignore[arg-type]
        unanswered = asyncio.create_task(leader.companion.append([(REMOVED, b"lost")]))
        await trio.until(lambda: leader.companion.log is not None and leader.companion.files.log_end_offset == 2)
        trio.appoint(2, 2, 3)
        with pytest.raises(NoLeader, match="may or may not have taken effect"):
            await unanswered
        trio.cut.clear()
        await (await trio.led(2)).companion.append([(REMOVED, b"kept")])
        await trio.in_sync(1, 2, 3)
        await trio.all_given(b"answered", b"kept")
        assert [offset for offset, *_ in trio.given[leader.me]] == [0, 1]

    run(tmp_path, story)


@pytest.mark.long
def test_follower_that_was_away_joins_with_both_logs(tmp_path: Path) -> None:
    async def story(trio: Trio) -> None:
        leader = await trio.led(1)
        await trio.kill(3)
        append = asyncio.create_task(leader.companion.append([(REMOVED, b"%d" % at) for at in range(50)]))
        await trio.in_sync(1, 2)
        assert await append == 50, "a follower that is away holds it up for lag_ms only"
        trio.publish(b"m")
        trio.restart(3)
        await trio.in_sync(1, 2, 3)
        await trio.all_given(*(b"%d" % at for at in range(50)))
        assert trio.streams[3].may_serve  # type: ignore[index]

    run(tmp_path, story)


def test_follower_that_was_restarted_serves_when_it_was_given_all_that_it_has(tmp_path: Path) -> None:
    """Its files may lack messages that only these records name, and a deleted message must not be served again."""

    async def story(trio: Trio) -> None:
        leader = await trio.led(1)
        trio.publish(b"m")
        await leader.companion.append([(REMOVED, b"answered")])
        await trio.all_given(b"answered")
        await trio.kill(3)
        trio.cut |= {(3, 1)}  # type: ignore[arg-type]
        stream = trio.restart(3)
        await trio.until(lambda: stream.following is not None and stream.companion.log is not None, "it follows")
        assert 3 in trio.record.isr
        assert not trio.given[stream.me]
        assert not stream.may_serve
        trio.cut.clear()
        await trio.until(lambda: stream.may_serve, "it serves")
        assert [value for *_, value in trio.given[stream.me]] == [b"answered"]

    run(tmp_path, story)


@pytest.mark.long
def test_follower_that_copies_nothing_of_an_empty_snapshot_serves_and_leads(tmp_path: Path) -> None:
    """The records were of messages that are below the log start by now."""

    async def story(trio: Trio) -> None:
        leader = await trio.led(1)
        await leader.companion.append([(REMOVED, b"a")])
        await trio.all_given(b"a")
        await trio.kill(3)
        await trio.in_sync(1, 2)
        await leader.companion.append([(REMOVED, b"b")])
        await leader.companion.shorten([])
        stream = trio.restart(3)
        await trio.in_sync(1, 2, 3)
        await trio.until(lambda: stream.may_serve, "it serves")
        await trio.kill(1)
        trio.appoint(3, 2, 3)
        await trio.led(3)

    run(tmp_path, story)


def test_lost_companion_folder_is_damage_and_is_fetched_again(tmp_path: Path) -> None:
    async def story(trio: Trio) -> None:
        leader = await trio.led(1)
        trio.publish(b"m")
        await leader.companion.append([(REMOVED, b"answered")])
        await trio.stop(3)
        shutil.rmtree(companion_of(trio, 3))
        stream = trio.restart(3, is_clean=True)
        await trio.until(lambda: stream.damage is not None or 3 not in trio.record.isr, "the loss is found")
        await trio.in_sync(1, 2, 3)
        await trio.all_given(b"answered")
        assert stream.damage is None

    run(tmp_path, story)


def test_damaged_companion_file_is_set_aside_and_fetched_again(tmp_path: Path) -> None:
    async def story(trio: Trio) -> None:
        leader = await trio.led(1)
        trio.publish(b"m")
        await leader.companion.append([(REMOVED, b"answered" * 20)])
        await leader.companion.append([(REMOVED, b"another" * 20)])
        await trio.stop(3)
        (file,) = companion_of(trio, 3).glob("*.active")
        data = bytearray(file.read_bytes())
        data[data.index(b"answered")] ^= 1
        file.write_bytes(data)
        stream = trio.restart(3, is_clean=True)
        await trio.until(lambda: 3 not in trio.record.isr, "the damage is found")
        await trio.in_sync(1, 2, 3)
        await trio.all_given(b"answered" * 20, b"another" * 20)
        assert list((companion_of(trio, 3).parent).glob("companion.damaged-1")), "what was damaged is kept"
        assert stream.usable_log().log_end_offset == 1

    run(tmp_path, story)


def test_single_replica_delivers_everything_before_it_serves_again(tmp_path: Path) -> None:
    async def story(trio: Trio) -> None:
        leader = await trio.led(1)
        await leader.companion.append([(REMOVED, b"a"), (REMOVED, b"b")])
        await trio.stop(1)
        stream = trio.restart(1, is_clean=True)
        trio.appoint(1, 1)
        await trio.until(lambda: stream.may_serve)
        assert [value for *_, value in trio.given[leader.me]] == [b"a", b"b"]
        assert await (await trio.led(1)).companion.append([(REMOVED, b"c")]) == 3
        await trio.kill(1)
        trio.restart(1, companion_from=2)
        trio.appoint(1, 1)
        await trio.led(1)
        assert trio.given[leader.me] == [(2, REMOVED, b"c")]

    run(tmp_path, story, replicas=1, min_isr=1)


def test_sealed_records_are_delivered_again_after_a_restart(tmp_path: Path) -> None:
    async def story(trio: Trio) -> None:
        stream = await trio.led(1)
        for value in (b"a", b"b"):
            await stream.companion.append([(REMOVED, value)])
            assert stream.companion.log is not None
            stream.companion.files.roll()
        await asyncio.to_thread(maintain, [stream], Pacer(lambda: False), 0.0)
        await asyncio.to_thread(maintain, [stream], Pacer(lambda: False), 0.0)
        await trio.kill(1)
        trio.restart(1)
        trio.appoint(1, 1)
        await trio.led(1)
        assert [value for *_, value in trio.given[stream.me]] == [b"a", b"b"]

    run(tmp_path, story, replicas=1, min_isr=1)
    assert len(list(companion_folder(tmp_path).glob("*.arrow"))) == 2


def test_single_replica_whose_companion_log_is_lost_does_not_serve(tmp_path: Path) -> None:
    """It would show what was removed."""

    async def story(trio: Trio) -> None:
        await (await trio.led(1)).companion.append([(REMOVED, b"a")])
        await trio.stop(1)
        shutil.rmtree(companion_of(trio, 1))
        stream = trio.restart(1, is_clean=True)
        trio.appoint(1, 1)
        await trio.until(lambda: stream.problem is not None)
        assert "companion is missing" in (stream.problem.message if stream.problem else "")
        assert not stream.may_serve

    run(tmp_path, story, replicas=1, min_isr=1)


def test_snapshot_takes_the_place_of_what_it_stands_for(tmp_path: Path) -> None:
    async def story(trio: Trio) -> None:
        leader = await trio.led(1)
        for _ in range(3):
            for at in range(20):
                await leader.companion.append([(REMOVED, b"%d" % at * 1000)])
            await leader.companion.shorten([("snapshot", b"all")])
        start = leader.companion.files.log_start_offset
        assert start == leader.companion.files.log_end_offset - 1
        await trio.in_sync(1, 2, 3)
        for number in (2, 3):
            companion = trio.streams[number].companion.log  # type: ignore[index]
            assert companion is not None
            await trio.until(lambda companion=companion: companion.replicated.leader_log_start == start)
            await asyncio.to_thread(maintain, [trio.streams[number]], Pacer(lambda: False), 0.0)  # type: ignore[index]
            assert companion.log.log_start_offset > 20, "a follower keeps everything for ever"
        await leader.companion.append([(REMOVED, b"after")])
        await trio.kill(2)
        shutil.rmtree(trio.folder / "2" / STREAM)
        trio.restart(2)
        await trio.until(lambda: [value for *_, value in trio.given[2]] == [b"all", b"after"])  # type: ignore[index]
        await trio.in_sync(1, 2, 3)

    run(tmp_path, story)


def test_records_that_a_snapshot_does_not_stand_for_are_kept(tmp_path: Path) -> None:
    """They were appended, and not delivered, when it was made."""

    async def story(trio: Trio) -> None:
        leader = await trio.led(1)
        await leader.companion.append([(REMOVED, b"old")])
        appending = asyncio.create_task(leader.companion.append([(REMOVED, b"new")]))
        await asyncio.sleep(0)
        await leader.companion.shorten([("snapshot", b"old")])
        await appending
        assert leader.companion.log is not None
        records = [
            value for offset, _, value in trio.given[leader.me] if offset >= leader.companion.files.log_start_offset
        ]
        assert sorted(records) == [b"new", b"old"]

    run(tmp_path, story)


def test_record_without_space_is_refused_and_later_ones_are_taken(tmp_path: Path) -> None:
    async def story(trio: Trio) -> None:
        stream = await trio.led(1)
        await stream.companion.append([(REMOVED, b"a")])
        store = trio.stages[stream.me].services.store
        store.max_bytes = 1
        with pytest.raises(StorageFull):
            await stream.companion.append([(REMOVED, b"refused")])
        store.max_bytes = None
        assert await stream.companion.append([(REMOVED, b"b")]) == 2
        await trio.all_given(b"a", b"b")

    run(tmp_path, story, replicas=1, min_isr=1)


def test_records_that_are_too_large_at_once_are_refused(tmp_path: Path) -> None:
    async def story(trio: Trio) -> None:
        stream = await trio.led(1)
        with pytest.raises(InvalidRequest, match="request less at once"):
            await stream.companion.append([(REMOVED, bytes(MAX_RECORDS_BYTES))])

    run(tmp_path, story, replicas=1, min_isr=1)


def test_follower_refuses_records(tmp_path: Path) -> None:
    async def story(trio: Trio) -> None:
        with pytest.raises(NatslogError) as refused:
            await trio.streams[2].companion.append([(REMOVED, b"a")])  # type: ignore[index]
        assert refused.value.retriable

    run(tmp_path, story)


def test_verify_reads_the_companion_log(tmp_path: Path) -> None:
    async def story(trio: Trio) -> None:
        await (await trio.led(1)).companion.append([(REMOVED, b"a" * 100)])

    run(tmp_path, story, replicas=1, min_isr=1)
    files = [path for path in files_of(tmp_path) if path.parent.name == "companion"]
    assert {path.suffix or path.name for path in files} >= {".active", "hw-checkpoint", "leader-epochs", "log-start"}
    assert not any(check_file(path).problems for path in files)
    (active,) = (path for path in files if path.suffix == ".active")
    data = bytearray(active.read_bytes())
    data[data.index(b"a" * 100)] ^= 1
    active.write_bytes(data)
    assert check_file(active).problems


def test_companion_log_whose_disk_fails_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(trio: Trio) -> None:
        leader = await trio.led(1)
        trio.publish(b"m")
        await leader.companion.append([(REMOVED, b"a")])
        follower = trio.streams[trio.numbers[2]]
        assert follower.companion.log is not None
        with monkeypatch.context() as patch:
            patch.setattr(follower.companion.files, "active_for_append", failing)
            appending = asyncio.create_task(leader.companion.append([(REMOVED, b"b")]))
            await trio.until(lambda: trio.numbers[2] not in trio.record.isr, "the failed disk leaves the ISR")
            await appending
        await trio.in_sync(1, 2, 3)
        await trio.until(lambda: {value for *_, value in trio.given[follower.me]} == {b"a", b"b"})

    run(tmp_path, story)


def test_damage_of_a_companion_log_does_not_repair_the_log_of_messages(tmp_path: Path) -> None:
    async def story(trio: Trio) -> None:
        leader = await trio.led(1)
        trio.publish(b"m")
        await leader.companion.append([(REMOVED, b"a")])
        await trio.in_sync(1, 2, 3)
        follower = trio.streams[trio.numbers[2]]
        damaged, messages = follower.companion.log, follower.messages
        assert damaged is not None
        damaged.replicated.note_damage(CorruptLog("a record is damaged", start=0, end=1))
        await trio.until(lambda: follower.companion.log not in (None, damaged), "it is fetched again")
        await trio.in_sync(1, 2, 3)
        assert follower.messages is messages
        damaged.replicated.note_damage(CorruptLog("found late", start=0, end=1))
        await asyncio.sleep(0.1)
        assert follower.driver.replica.logs.damage is None, "that log is closed"

    run(tmp_path, story)


def failing(*_: object) -> ActiveSegment:
    raise OSError(5, "Input/output error")
