"""The leader's end of replication on real logs: what one answer holds while the streams go on growing."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from natslog.cluster.roles import Diverging, Fenced, FetchPosition
from natslog.errors import CorruptAnswer, StorageFailed, StorageFull
from natslog.log import LogOptions, ReplicaLog
from natslog.log.sealed import SealedSegment
from natslog.log.segment import read_at
from natslog.model import Epoch, StreamId
from natslog.node.peers.messages import FetchRequest, FetchResponse
from natslog.node.replicas.fetch_sessions import FetchSession
from natslog.node.replicas.fetcher import _append_copies
from natslog.node.replicas.replicated_log import ReplicatedLog
from natslog.node.replicas.stream import HostedStream
from tests.conftest import rows
from tests.unit.node.replicas.replica_stage import ME, OTHER, ReplicaStage, append, record_of, run

Streams = dict[StreamId, HostedStream]


class Disturbed(Executor):
    """Does something on the loop's thread each time before work is handed to a thread."""

    def __init__(self, disturb: Callable[[], None]) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._disturb = disturb

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        self._disturb()
        return self._pool.submit(work, *arguments, **named)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


def with_streams(folder: Path, story: Callable[[Streams], Awaitable[None]]) -> None:
    """Two streams that broker 1 leads and broker 2 keeps; more than a tail's worth of bytes in each."""

    async def told(stage: ReplicaStage) -> None:
        streams: Streams = {}
        for name in ("orders", "events"):
            stream = await stage.host(record_of(name, holders=(OTHER,)))
            await stage.change(stream, holders=(ME, OTHER))
            streams[stream.id] = stream
            for _ in range(20):
                append(stream, b"x" * 100_000)
        await story(streams)
        for stream in streams.values():
            await stream.driver.stop()

    run(folder, told)


def finder(streams: Streams) -> Callable[[StreamId], ReplicatedLog | None]:
    """By the id of a stream, its log of messages."""
    return lambda stream_id: None if stream_id not in streams else streams[stream_id].messages


def spawned(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    return asyncio.create_task(work, name=name)


def served(session: FetchSession, request: FetchRequest) -> asyncio.Future[tuple[FetchResponse, list[bytes]]]:
    answered = asyncio.get_running_loop().create_future()
    session.serve(request, lambda response, payload: answered.set_result((response, payload)))
    return answered


async def asked(session: FetchSession, number: int, streams: Streams, offset: int) -> FetchResponse:
    position = FetchPosition(Epoch(1), offset, Epoch(1) if offset else Epoch(0))
    request = FetchRequest(number, "life", tuple((stream_id, position) for stream_id in streams))
    response, payload = await served(session, request)
    assert sum(answer.length for answer in response.answers) == sum(map(len, payload))
    return response


def test_a_stream_that_grows_while_an_answer_is_made_is_in_it_once(tmp_path: Path) -> None:
    async def story(streams: Streams) -> None:
        first = next(iter(streams.values()))
        with Disturbed(lambda: append(first, b"new")) as executor:
            session = FetchSession(OTHER, finder(streams), executor, spawned)
            response = await asked(session, 1, streams, 0)
            assert sorted(answer.stream_id for answer in response.answers) == sorted(streams)
            end = first.usable_log().log_end_offset
            response = await asked(session, 2, {first.id: first}, end - 1)
            assert [answer.stream_id for answer in response.answers] == [first.id]

    with_streams(tmp_path, story)


def test_what_has_no_room_in_an_answer_is_in_the_next(tmp_path: Path) -> None:
    async def story(streams: Streams) -> None:
        with ThreadPoolExecutor(1) as executor:
            session = FetchSession(OTHER, finder(streams), executor, spawned)
            position = FetchPosition(Epoch(1), 0, Epoch(0))
            changed = tuple((stream_id, position) for stream_id in streams)
            small, _ = await served(session, FetchRequest(1, "life", changed, max_bytes=500_000))
            rest, _ = await served(session, FetchRequest(2, "life", max_bytes=500_000))
        assert [answer.stream_id for answer in (*small.answers, *rest.answers)] == list(streams)

    with_streams(tmp_path, story)


def test_replica_that_catches_up_gets_a_third_of_the_time_or_comes_nearer_as_fast_as_the_log_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bytes: what it missed may be large messages, and what comes meanwhile many small ones."""

    async def story(streams: Streams) -> None:
        first = next(iter(streams.values()))
        now_s = 100.0
        session = FetchSession(OTHER, finder(streams), ThreadPoolExecutor(1), spawned)

        def pause_after(seconds: float, offset: int, got_bytes: int = 1000, grew_bytes: int = 0) -> float:
            nonlocal now_s
            now_s += seconds
            if (part := session._catching_up.get(first.id)) is not None:
                part.got_bytes = got_bytes
            first.usable_log().appended_bytes += grew_bytes
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("natslog.node.replicas.fetch_sessions.time.monotonic", lambda: now_s)
                pause_s = session._pause_s(first.id, FetchPosition(Epoch(1), offset, Epoch(1)))
            now_s += pause_s  # then it gets the next part
            return round(pause_s, 3)

        def needs(min_isr: int, isr: tuple[int, ...]) -> None:
            settings = msgspec.structs.replace(first.record.settings, min_isr=min_isr)
            first.driver.record = msgspec.structs.replace(first.record, settings=settings, isr=isr)
            assert first.leading is not None
            first.leading.update(first.record, 0.0)

        assert pause_after(0.1, 0) == 0.0, "in sync"
        needs(1, (ME,))
        assert pause_after(0.1, 0) == 0.0, "nothing is known of it yet"
        assert pause_after(0.1, 2) == 0.2
        assert pause_after(0.05, 3) == 0.1
        assert pause_after(9.0, 4) == 1.0, "a long interruption is not paid twice"
        assert pause_after(0.1, 5) == 0.2
        # 1,000 bytes in 0.1 s; the log grows by 4,000 a second: 8,000 a second are to come
        assert pause_after(0.1, 6, grew_bytes=1200) == 0.025
        assert not session.is_outpaced(first.id)
        assert pause_after(0.1, 7, grew_bytes=20_000) == 0.0, "it grows faster than can be fetched"
        with monkeypatch.context() as patch:
            patch.setattr("natslog.node.replicas.fetch_sessions.time.monotonic", lambda: now_s)
            assert session.is_outpaced(first.id), "then writers are to wait for it"
        needs(2, (ME,))
        assert pause_after(0.1, 8) == 0.0, "without it nothing is written"
        assert pause_after(0.1, 19) == 0.0, "hardly anything is missing"

    with_streams(tmp_path, story)


def test_replica_comes_nearer_also_where_the_log_grows_in_bursts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Direct appends come as runs of megabytes with pauses between them: the pauses are no idle log."""

    async def story(streams: Streams) -> None:
        first = next(iter(streams.values()))
        first.driver.record = msgspec.structs.replace(
            first.record, settings=msgspec.structs.replace(first.record.settings, min_isr=1), isr=(ME,)
        )
        assert first.leading is not None
        first.leading.update(first.record, 0.0)
        session, log = FetchSession(OTHER, finder(streams), ThreadPoolExecutor(1), spawned), first.usable_log()
        now_s, fetched_bytes, begin_s, begin_bytes = 100.0, 0, 100.0, log.appended_bytes
        monkeypatch.setattr("natslog.node.replicas.fetch_sessions.time.monotonic", lambda: now_s)
        while now_s < begin_s + 60:
            log.appended_bytes = begin_bytes + 10_000 * int(now_s - begin_s)  # a run each second
            now_s += session._pause_s(first.id, FetchPosition(Epoch(1), 1, Epoch(1)))
            now_s += 0.05
            session._catching_up[first.id].got_bytes = 1000
            fetched_bytes += 1000
        assert not session.is_outpaced(first.id)
        assert fetched_bytes > 1.5 * (log.appended_bytes - begin_bytes)

    with_streams(tmp_path, story)


def test_replica_that_has_caught_up_with_a_sealed_end_is_told_of_what_comes_next(tmp_path: Path) -> None:
    """The log has no active segment where a loss of power has taken the empty one."""

    async def story(stage: ReplicaStage) -> None:
        stream = await stage.host(record_of(holders=(), isr=(ME,)))
        await stage.change(stream, holders=(ME, OTHER))
        append(stream, b"sealed")
        log = stream.usable_log()
        log.roll()
        assert log.upkeep.seal_next()
        await stream.driver.stop()
        (empty,) = (stage.folder / stream.id).glob("*.active")
        empty.unlink()
        stream = await stage.host(stream.record)
        assert isinstance(stream.usable_log().chain.last, SealedSegment)
        with ThreadPoolExecutor(1) as executor:
            session = FetchSession(OTHER, finder({stream.id: stream}), executor, spawned)
            await asked(session, 1, {stream.id: stream}, 1)
            append(stream, b"next")
            response, payload = await served(session, FetchRequest(2, "life"))
        assert [answer.stream_id for answer in response.answers] == [stream.id]
        assert payload
        await stream.driver.stop()

    run(tmp_path, story)


def test_a_position_that_confirms_what_was_sent_is_answered_when_there_is_something_new(tmp_path: Path) -> None:
    """Otherwise each message would take two answers for each follower, one of which is empty."""

    async def story(streams: Streams) -> None:
        first = next(iter(streams.values()))
        with ThreadPoolExecutor(1) as executor:
            session, log = FetchSession(OTHER, finder(streams), executor, spawned), first.usable_log()
            response = await asked(session, 1, {first.id: first}, log.log_end_offset - 1)
            assert response.answers[0].length > 0
            asking = asyncio.create_task(asked(session, 2, {first.id: first}, log.log_end_offset))
            _, pending = await asyncio.wait([asking], timeout=0.005)
            assert pending, "nothing is new"
            append(first, b"new")
            response = await asking
            assert response.answers[0].length > 0
            asking = asyncio.create_task(asked(session, 3, {first.id: first}, log.log_end_offset))
            response = await asyncio.wait_for(asking, 0.3)
            assert [(one.length, one.high_watermark) for one in response.answers] == [(0, log.log_end_offset)], (
                "the new high watermark follows soon"
            )
            response = await asyncio.wait_for(asked(session, 4, {first.id: first}, log.log_end_offset), 0.3)
            assert [one.length for one in response.answers] == [0], "asked again without having got records"

    with_streams(tmp_path, story)


async def catching_up(streams: Streams, executor: Executor) -> tuple[FetchSession, HostedStream, ReplicaLog]:
    """A session whose follower is out of sync, and was sent all of the first stream."""
    first = next(iter(streams.values()))
    needs = msgspec.structs.replace(first.record.settings, min_isr=1)
    first.driver.record = msgspec.structs.replace(first.record, settings=needs, isr=(ME,))
    assert first.leading is not None
    first.leading.update(first.record, 0.0)
    session = FetchSession(OTHER, finder(streams), executor, spawned)
    await asked(session, 1, {first.id: first}, 2)
    assert first.id in session._catching_up
    return session, first, first.usable_log()


def test_a_replica_that_has_caught_up_is_told_of_the_next_records(tmp_path: Path) -> None:
    async def story(streams: Streams) -> None:
        with ThreadPoolExecutor(1) as executor:
            session, first, log = await catching_up(streams, executor)
            asking = asyncio.create_task(asked(session, 2, {first.id: first}, log.log_end_offset))
            await asyncio.sleep(0.001)
            append(first, b"new")
            response = await asyncio.wait_for(asking, 0.3)
            assert response.answers[0].length > 0

    with_streams(tmp_path, story)


def test_a_high_watermark_that_moves_while_a_replica_catches_up_is_sent(tmp_path: Path) -> None:
    """Its next position only confirms what it was sent, but not that."""

    async def story(streams: Streams) -> None:
        with ThreadPoolExecutor(1) as executor:
            session, first, log = await catching_up(streams, executor)
            session.mark(first.id, has_records=False)
            response = await asyncio.wait_for(asked(session, 2, {first.id: first}, log.log_end_offset), 0.3)
            assert [(one.length, one.high_watermark) for one in response.answers] == [(0, log.high_watermark)]

    with_streams(tmp_path, story)


def test_records_that_could_not_be_read_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower has got nothing, so it does not ask again: a failure that passes must not leave it behind."""

    def unreadable(*arguments: Any) -> bytes:
        raise OSError(24, "Too many open files")

    async def story(streams: Streams) -> None:
        first = next(iter(streams.values()))
        monkeypatch.setattr("natslog.node.replicas.fetch_sessions._READ_AGAIN_S", 0.01)
        with ThreadPoolExecutor(1) as executor:
            session = FetchSession(OTHER, finder(streams), executor, spawned)
            with monkeypatch.context() as patched:
                patched.setattr("natslog.node.replicas.fetch_sessions.read_at", unreadable)
                response = await asked(session, 1, {first.id: first}, 0)
                assert [answer.length for answer in response.answers] == [0]
            response, payload = await served(session, FetchRequest(2, "life"))
        assert [answer.stream_id for answer in response.answers] == [first.id]
        assert payload

    with_streams(tmp_path, story)


def test_a_replica_that_has_stopped_leading_when_the_records_are_read_answers_with_none(tmp_path: Path) -> None:
    async def story(streams: Streams) -> None:
        first = next(iter(streams.values()))

        class Deposing(Executor):
            """Reads, and meanwhile another replica has become leader."""

            def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
                done: Future[Any] = Future()
                record = msgspec.structs.replace(first.record, leader=OTHER, leader_epoch=Epoch(2), version=9)
                first.driver.changed(record)
                outcome = work(*arguments, **named)
                asyncio.get_running_loop().call_later(0.5, done.set_result, outcome)
                return done

        session = FetchSession(OTHER, finder(streams), Deposing(), spawned)
        response = await asked(session, 1, {first.id: first}, 0)
        (answer,) = response.answers
        assert isinstance(answer.verdict, Fenced)
        assert answer.length == 0

    with_streams(tmp_path, story)


def test_records_of_a_later_epoch_than_the_answering_leaders_are_not_copied(tmp_path: Path) -> None:
    async def story(streams: Streams) -> None:
        first = next(iter(streams.values()))
        log = ReplicaLog(tmp_path / "copy", first.id, first.record.settings, LogOptions(min_free_bytes=0))
        first.usable_log().begin_epoch(Epoch(2))
        append(first, b"of epoch 2")
        with first.usable_log().reader.plan_read(0, max_bytes=1 << 24, uncommitted=True) as plan:
            data = b"".join(read_at(piece.fd, piece.position, piece.length) for piece in plan.ranges)
        with pytest.raises(CorruptAnswer, match="records of epoch 2"):
            _append_copies(log, "orders", Epoch(1), memoryview(data))
        assert log.log_end_offset == 0
        _append_copies(log, "orders", Epoch(2), memoryview(data))
        assert log.log_end_offset == first.usable_log().log_end_offset
        log.close()

    with_streams(tmp_path, story)


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_request_is_not_held_while_the_follower_of_a_new_leader_may_say_where_it_is(
    tmp_path: Path, asked_before: bool
) -> None:
    """Otherwise the new leader knows half a second later what is committed."""

    async def story(streams: Streams) -> None:
        first, second = streams.values()
        end = first.usable_log().log_end_offset
        with ThreadPoolExecutor(1) as executor:
            session = FetchSession(
                OTHER, lambda one: None if one == first.id else streams[one].messages, executor, spawned
            )
            await asked(session, 1, streams if asked_before else {second.id: second}, end)
            held = served(session, FetchRequest(2, "life"))
            await asyncio.sleep(0)
            session._find = finder(streams)  # from now on it leads the other one, too
            session.expect(first.id)
            async with asyncio.timeout(0.3):
                response, _ = await held
                assert [answer.stream_id for answer in response.answers] == [first.id][: int(asked_before)]
                for number in (3, 4):  # the first of them may have a high watermark
                    await served(session, FetchRequest(number, "life"))
            await asked(session, 5, {first.id: first}, end)
            await served(session, FetchRequest(6, "life"))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await served(session, FetchRequest(7, "life"))

    with_streams(tmp_path, story)


def written_and_synced(stream: HostedStream, value: bytes) -> None:
    """As the event loop commits."""
    log = stream.usable_log()
    log.append(rows([value]), 1_000_000, written=stream.driver.send_written)
    stream.driver.appended(log.log_end_offset)


def test_a_commit_is_sent_before_it_is_synced_and_counts_when_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(streams: Streams) -> None:
        first = next(iter(streams.values()))
        end = first.usable_log().log_end_offset
        happened: list[str] = []
        sync = os.fdatasync

        def noting_sync(fd: int) -> None:
            sync(fd)
            happened.append(f"synced, HW {first.high_watermark}")

        monkeypatch.setattr(os, "fdatasync", noting_sync)
        with ThreadPoolExecutor(1) as executor:
            session = FetchSession(OTHER, finder(streams), executor, spawned)

            def ask(number: int, offset: int | None = None) -> None:
                """Args: `offset`: if the position has changed."""
                changed = () if offset is None else ((first.id, FetchPosition(Epoch(1), offset, Epoch(1))),)
                request = FetchRequest(number, "life", changed)
                session.serve(request, lambda response, payload: happened.append(f"answered {response.number}"))

            ask(1, end)
            assert happened.pop() == "answered 1", "with the verdict"
            ask(2)
            written_and_synced(first, b"new")
            assert happened == ["answered 2", f"synced, HW {end}"]
            assert first.high_watermark == end, "the follower has not confirmed it"
            ask(3, end + 1)
            assert first.high_watermark == end + 1
            assert len(happened) == 2, "there is nothing to send"
            await asyncio.sleep(0.05)
            assert happened[2:] == ["answered 3"], "with the new HW, and not with records that it has"
            written_and_synced(first, b"it has not asked")
            assert len(happened) == 4
            ask(4, end + 1)
            assert happened[4:] == ["answered 4"], "what was not sent before"
            ask(5, end + 2)
            first.usable_log().append(rows([b"by a thread that has not reported it"]), 1_000_000)
            written_and_synced(first, b"not what follows for the follower")
            assert "answered 5" not in happened[:-1]
            session.close()

    with_streams(tmp_path, story)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_commit_that_was_sent_and_could_not_be_synced_is_the_last_one_of_its_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Otherwise the leader could append another message at an offset that a follower has. Of a full disk, too."""

    async def story(streams: Streams) -> None:
        first = next(iter(streams.values()))
        log, answers = first.usable_log(), list[FetchResponse]()
        end = log.log_end_offset

        def failing(fd: int) -> None:
            raise OSError(code, os.strerror(code))

        with ThreadPoolExecutor(1) as executor:
            session = FetchSession(OTHER, finder(streams), executor, spawned)
            position = FetchPosition(Epoch(1), end, Epoch(1))
            for request in (FetchRequest(1, "life", ((first.id, position),)), FetchRequest(2, "life")):
                session.serve(request, lambda answer, _: answers.append(answer))
            with monkeypatch.context() as patch:
                patch.setattr(os, "fdatasync", failing)
                with pytest.raises(StorageFailed):
                    written_and_synced(first, b"sent")
            assert [answer.length > 0 for (answer,) in (one.answers for one in answers)] == [False, True]
            with pytest.raises(StorageFailed):
                written_and_synced(first, b"another one")
            assert log.log_end_offset == log.written_end_offset == end
            position = FetchPosition(Epoch(1), end + 1, Epoch(1))
            assert first.messages.judged(position) == Diverging(Epoch(1), end), (
                "the follower cuts it off, or leads with it"
            )
            session.close()

    with_streams(tmp_path, story)


def test_a_full_disk_that_is_noticed_by_the_sync_is_not_final_where_nothing_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(streams: Streams) -> None:
        first = next(iter(streams.values()))

        def failing(fd: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", failing)
            with pytest.raises(StorageFull):
                written_and_synced(first, b"no follower asks for it")
        end = first.usable_log().log_end_offset
        written_and_synced(first, b"when there is room")
        assert first.usable_log().log_end_offset == end + 1

    with_streams(tmp_path, story)
