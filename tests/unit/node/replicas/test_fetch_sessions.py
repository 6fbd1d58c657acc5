"""The leader's end of replication on real logs: what one answer holds while the streams go on growing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from natslog.cluster.roles import Fenced, FetchPosition, LeaderReplica
from natslog.errors import CorruptLog
from natslog.log import LogOptions, ReplicaLog
from natslog.log.segment import read_at
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, StreamSettings
from natslog.node.peers.messages import FetchRequest, FetchResponse
from natslog.node.replicas.fetch_sessions import FetchSession
from natslog.node.replicas.fetcher import _append_copies
from natslog.node.replicas.stream import HostedStream
from tests.conftest import rows

LEADER, FOLLOWER = BrokerId(1), BrokerId(2)


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


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[dict[StreamId, HostedStream]]:
    """Two streams that broker 1 leads and broker 2 keeps; more than a tail's worth of bytes in each."""
    found: dict[StreamId, HostedStream] = {}
    for at, name in enumerate(("orders", "events")):
        settings = StreamSettings(subject=f"{name}.>", replicas=2)
        stream_id = StreamId(f"{at:032x}")
        log = ReplicaLog(tmp_path / name, stream_id, settings, LogOptions(min_free_bytes=0))
        log.begin_epoch(Epoch(1))
        record = StreamRecord(
            name=name,
            id=stream_id,
            settings=settings,
            created_us=0,
            leader=LEADER,
            leader_epoch=Epoch(1),
            replicas=(LEADER, FOLLOWER),
            isr=(LEADER, FOLLOWER),
        )
        stream = found[stream_id] = HostedStream(record, LEADER, log)
        stream.leading = LeaderReplica(LEADER, record, log_end_offset=0, high_watermark=0, now_ms=0)
        for _ in range(20):
            append(stream, b"x" * 100_000)
    yield found
    for stream in found.values():
        stream.usable_log().close()


def append(stream: HostedStream, value: bytes) -> None:
    log = stream.usable_log()
    log.append(rows([value]), 1_000_000)
    stream.appended(log.log_end_offset)


def asked(session: FetchSession, number: int, streams: dict[StreamId, HostedStream], offset: int) -> FetchResponse:
    position = FetchPosition(Epoch(1), offset, Epoch(1) if offset else Epoch(0))
    request = FetchRequest(number, "life", tuple((stream_id, position) for stream_id in streams))
    response, payload = asyncio.run(session.serve(request))
    assert sum(answer.length for answer in response.answers) == sum(map(len, payload))
    return response


def test_a_stream_that_grows_while_an_answer_is_made_is_in_it_once(streams: dict[StreamId, HostedStream]) -> None:
    first = next(iter(streams.values()))
    with Disturbed(lambda: append(first, b"new")) as executor:
        session = FetchSession(FOLLOWER, streams.get, executor)
        response = asked(session, 1, streams, 0)
        assert sorted(answer.stream_id for answer in response.answers) == sorted(streams)
        end = first.usable_log().log_end_offset
        response = asked(session, 2, {first.record.id: first}, end - 1)
        assert [answer.stream_id for answer in response.answers] == [first.record.id]


def test_what_has_no_room_in_an_answer_is_in_the_next(streams: dict[StreamId, HostedStream]) -> None:
    with ThreadPoolExecutor(1) as executor:
        session = FetchSession(FOLLOWER, streams.get, executor)
        position = FetchPosition(Epoch(1), 0, Epoch(0))
        changed = tuple((stream_id, position) for stream_id in streams)
        small, _ = asyncio.run(session.serve(FetchRequest(1, "life", changed, max_bytes=500_000)))
        rest, _ = asyncio.run(session.serve(FetchRequest(2, "life", max_bytes=500_000)))
    assert [answer.stream_id for answer in (*small.answers, *rest.answers)] == list(streams)


def test_replica_that_catches_up_gets_a_third_of_the_time_or_comes_nearer_as_fast_as_the_log_grows(
    streams: dict[StreamId, HostedStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bytes: what it missed may be large messages, and what comes meanwhile many small ones."""
    first = next(iter(streams.values()))
    now_s = 100.0
    monkeypatch.setattr("natslog.node.replicas.fetch_sessions.time.monotonic", lambda: now_s)
    with ThreadPoolExecutor(1) as executor:
        session = FetchSession(FOLLOWER, streams.get, executor)

    def pause_after(seconds: float, offset: int, got_bytes: int = 1000, grew_bytes: int = 0) -> float:
        nonlocal now_s
        now_s += seconds
        if (part := session._catching_up.get(first.record.id)) is not None:
            part.got_bytes = got_bytes
        first.usable_log().appended_bytes += grew_bytes
        pause_s = session._pause_s(first.record.id, FetchPosition(Epoch(1), offset, Epoch(1)))
        now_s += pause_s  # then it gets the next part
        return round(pause_s, 3)

    assert pause_after(0.1, 0) == 0.0, "in sync"
    enough = msgspec.structs.replace(first.record.settings, min_isr=1)
    first.record = msgspec.structs.replace(first.record, settings=enough)
    first.wanted = msgspec.structs.replace(first.record, isr=(LEADER,))
    assert pause_after(0.1, 0) == 0.0, "nothing is known of it yet"
    assert pause_after(0.1, 2) == 0.2
    assert pause_after(0.05, 3) == 0.1
    assert pause_after(9.0, 4) == 1.0, "a hiccup is not paid twice"
    assert pause_after(0.1, 5, grew_bytes=1) == 0.2
    # 1,000 bytes in 0.1 s; the log grows by 4,000 a second: 8,000 a second are to come
    assert pause_after(0.1, 6, grew_bytes=1200) == 0.025
    assert pause_after(0.1, 7, grew_bytes=2000) == 0.0, "it grows faster than can be fetched"
    first.record = msgspec.structs.replace(
        first.record, settings=msgspec.structs.replace(first.record.settings, min_isr=2)
    )
    assert pause_after(0.1, 8) == 0.0, "without it nothing is written"
    assert pause_after(0.1, 19) == 0.0, "hardly anything is missing"


def test_who_leads_no_more_when_the_records_are_read_answers_with_none(
    streams: dict[StreamId, HostedStream],
) -> None:
    first = next(iter(streams.values()))

    def depose() -> None:
        first.leading = None

    with Disturbed(depose) as executor:
        session = FetchSession(FOLLOWER, streams.get, executor)
        response = asked(session, 1, {first.record.id: first}, 0)
    (answer,) = response.answers
    assert isinstance(answer.verdict, Fenced)
    assert answer.length == 0


def test_records_of_a_later_epoch_than_the_answering_leaders_are_not_copied(
    streams: dict[StreamId, HostedStream], tmp_path: Path
) -> None:
    first = next(iter(streams.values()))
    log = ReplicaLog(tmp_path / "copy", first.record.id, first.record.settings, LogOptions(min_free_bytes=0))
    copy = HostedStream(first.record, FOLLOWER, log)
    first.usable_log().begin_epoch(Epoch(2))
    append(first, b"of epoch 2")
    with first.usable_log().reader.plan_read(0, max_bytes=1 << 24, uncommitted=True) as plan:
        data = b"".join(read_at(piece.fd, piece.position, piece.length) for piece in plan.ranges)
    with pytest.raises(CorruptLog, match="records of epoch 2"):
        _append_copies(copy, Epoch(1), memoryview(data))
    assert log.log_end_offset == 0
    _append_copies(copy, Epoch(2), memoryview(data))
    assert log.log_end_offset == first.usable_log().log_end_offset
    log.close()
