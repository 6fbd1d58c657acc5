"""One stream's ingest on a real log: who commits, in which order things happen, what memory it may take."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from natslog.ingest.ack_rules import AckRules
from natslog.ingest.batches import BatchBuilder
from natslog.log import LogOptions, StreamLog
from natslog.log.segment import ActiveSegment
from natslog.node.writes.ingest_memory import IngestMemory
from natslog.node.writes.stream_ingest import StreamIngest
from natslog.wire.frames import FrameParser, Frames
from tests.conftest import open_log, stored_values, stream_time_of

ACK_RULES = AckRules.of("reply", ["orders.>"], ["_INBOX."])


class Sent:
    """Takes the acks, and sees that what they are for is durable."""

    def __init__(self, log: StreamLog) -> None:
        self.log = log
        self.acked = 0

    def send_now(self, protocol: bytes | memoryview) -> bool:
        self.acked += bytes(protocol).count(b'"seq":') - bytes(protocol).count(b'"error":')
        assert self.acked <= self.log.high_watermark, "acked and not yet durable"
        return True


def frames_of(values: list[bytes]) -> Iterator[Frames]:
    parser = FrameParser()
    parser.receive_data(b"".join(b"MSG orders.new 1 _INBOX.a %d\r\n%s\r\n" % (len(value), value) for value in values))
    return parser.frames()


@pytest.fixture
def log(log_folder: Path) -> Iterator[StreamLog]:
    log = open_log(log_folder)
    yield log
    log.close()


def run(log: StreamLog, work: Callable[[StreamIngest, Sent], Any], limit_bytes: int = 1 << 30) -> Sent:
    """Starts ingest, lets `work` (a coroutine function) use it, stops it."""

    async def main() -> Sent:
        sent = Sent(log)
        with ThreadPoolExecutor(4) as writers:
            memory = IngestMemory(limit_bytes)
            ingest = StreamIngest(
                "orders",
                log,
                stream_time=stream_time_of(log),
                sender=sent,
                executor=writers,
                memory=memory,
                ack_rules=ACK_RULES,
            )
            bugs: list[BaseException] = []
            ingest.start(lambda what, error: bugs.append(error))
            await work(ingest, sent)
            await asyncio.wait_for(ingest.stop(), 20)
            assert not bugs
            assert memory.used_bytes == 0, "all memory is given back"
        return sent

    return asyncio.run(main())


def receive(ingest: StreamIngest, *values: bytes) -> None:
    for frames in frames_of(list(values)):
        ingest.receive(frames)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.long
def test_a_quick_disk_is_written_by_the_loop_and_a_slow_one_by_threads(
    log: StreamLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, threads, slowness = ActiveSegment.append, [], [0.0]

    def watched(*arguments: Any, **named: Any) -> None:
        threads.append(threading.current_thread().name)
        time.sleep(slowness[0])
        append(*arguments, **named)

    monkeypatch.setattr(ActiveSegment, "append", watched)
    for name in ("_QUICK_S", "_SLOW_S"):
        monkeypatch.setattr(f"natslog.node.writes.pace.{name}", 0.2)  # this machine's disk may be busy
    monkeypatch.setattr("natslog.node.writes.pace._MOST_COUNTED_S", 10.0)

    async def work(ingest: StreamIngest, sent: Sent) -> None:
        for at in range(40):
            slowness[0] = 0.0 if at < 30 else 2.0 if at == 30 else 0.0
            receive(ingest, b"%d" % at)
            await until(lambda at=at: sent.acked == at + 1)  # type: ignore[misc]

    run(log, work)
    assert threads[0] != "MainThread", "a disk that is not known yet is left to a thread"
    assert "MainThread" in threads[20:30], "one that has been quick is not"
    assert all(name != "MainThread" for name in threads[31:34]), "one that was slow once is left to threads again"
    assert stored_values(log) == [b"%d" % at for at in range(40)]


def test_a_commit_waits_for_copies_of_the_one_before_and_is_made_without_them(
    log: StreamLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("natslog.node.writes.pace.COPIES_WITHIN_S", 0.5)

    async def main() -> None:
        sent, ends = Sent(log), list[int]()
        with ThreadPoolExecutor(2) as writers:
            ingest = StreamIngest(
                "orders",
                log,
                stream_time=stream_time_of(log),
                sender=sent,
                executor=writers,
                memory=IngestMemory(1 << 30),
                ack_rules=ACK_RULES,
                appended=ends.append,
            )
            ingest.start(lambda what, error: pytest.fail(f"{what}: {error}"))
            receive(ingest, b"0")
            await until(lambda: ends == [1] and ingest._writer.is_idle)  # a turn that goes on takes what comes
            receive(ingest, b"1")
            receive(ingest, b"2")
            await asyncio.sleep(0.02)
            assert ends == [1], "copies of the first one are awaited"
            ingest.release(1)
            await until(lambda: ends == [1, 3])
            receive(ingest, b"3")
            began_s = time.monotonic()
            await until(lambda: ends == [1, 3, 4])
            assert time.monotonic() - began_s > 0.4, "they did not come"
            receive(ingest, b"4")
            await ingest.drained()
            assert log.log_end_offset == 5, "without waiting"
            receive(ingest, b"5")
            await asyncio.wait_for(ingest.stop(), 20)
            assert stored_values(log) == [b"%d" % at for at in range(6)]

    asyncio.run(main())


def test_acks_come_after_the_commit_and_one_writer_writes(log: StreamLog, monkeypatch: pytest.MonkeyPatch) -> None:
    append, inside = log.append, threading.Lock()

    def alone(*arguments: Any) -> tuple[int, int]:
        assert inside.acquire(blocking=False), "two turns of one stream at once"
        try:
            time.sleep(0.001)
            return append(*arguments)
        finally:
            inside.release()

    monkeypatch.setattr(log, "append", alone)
    values = [b"%d" % at for at in range(3000)]

    async def work(ingest: StreamIngest, sent: Sent) -> None:
        for at in range(0, 3000, 10):
            receive(ingest, *values[at : at + 10])
            if at % 50 == 0:
                await asyncio.sleep(0)
        await until(lambda: sent.acked == 3000)

    run(log, work)
    assert stored_values(log) == values


def test_nothing_is_acked_while_the_commit_is_under_way(log: StreamLog, monkeypatch: pytest.MonkeyPatch) -> None:
    append, may_go = log.append, threading.Event()

    def held(*arguments: Any) -> tuple[int, int]:
        assert may_go.wait(20)
        return append(*arguments)

    monkeypatch.setattr(log, "append", held)

    async def work(ingest: StreamIngest, sent: Sent) -> None:
        receive(ingest, b"a")
        await asyncio.sleep(0.05)
        receive(ingest, b"b", b"c")  # gathers meanwhile: the loop is not held up
        assert sent.acked == 0
        may_go.set()
        await until(lambda: sent.acked == 3)

    run(log, work)
    assert len(log.chain.segments[0].index) == 2, "what gathered during one commit is the next"


def test_what_does_not_fit_into_memory_is_refused_counted_and_nothing_else_is(
    log: StreamLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, may_go = log.append, threading.Event()

    def held(*arguments: Any) -> tuple[int, int]:
        assert may_go.wait(20)
        return append(*arguments)

    monkeypatch.setattr(log, "append", held)

    async def work(ingest: StreamIngest, sent: Sent) -> None:
        for at in range(10):
            receive(ingest, b"%d" % at + b"x" * 300)
        assert ingest.stats.refused["overloaded"] == 7
        may_go.set()
        await until(lambda: sent.acked == 3)

    run(log, work, limit_bytes=1100)
    assert [value[:1] for value in stored_values(log)] == [b"0", b"1", b"2"]


def test_builders_are_used_again_unless_one_large_message_has_bloated_them() -> None:
    memory = IngestMemory(1 << 30)
    builder = memory.builder()
    for frames in frames_of([b"x" * 1000]):
        builder.add(frames)
    memory.take_back(builder)
    assert memory.builder() is builder
    assert builder.rows == 0
    for frames in frames_of([b"x" * (40 << 20)]):
        builder.add(frames)
    memory.take_back(builder)
    assert memory.builder() is not builder
    assert isinstance(memory.builder(), BatchBuilder)


def test_a_due_roll_and_its_fsyncs_are_left_to_a_thread(log_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(log_folder, LogOptions(segment_bytes=2000, min_free_bytes=0))
    monkeypatch.setattr("natslog.node.writes.pace._QUICK_S", 5.0)  # this machine's disk may be busy
    create, append, rolled_by, appended_by = ActiveSegment.create, ActiveSegment.append, [], []

    def noting_roll(*arguments: Any) -> ActiveSegment:
        rolled_by.append(threading.current_thread().name)
        return create(*arguments)

    def noting_append(*arguments: Any, **named: Any) -> None:
        appended_by.append(threading.current_thread().name)
        append(*arguments, **named)

    monkeypatch.setattr(ActiveSegment, "create", noting_roll)
    monkeypatch.setattr(ActiveSegment, "append", noting_append)

    async def work(ingest: StreamIngest, sent: Sent) -> None:
        for at in range(60):
            receive(ingest, b"%d" % at)
            await until(lambda at=at: sent.acked == at + 1)  # type: ignore[misc]

    run(log, work)
    assert "MainThread" in appended_by, "what is quick is written by the loop"
    assert len(rolled_by) > 5
    assert "MainThread" not in rolled_by
    log.close()


def test_messages_that_wait_for_another_replica_are_charged_for_their_acks_only(log_folder: Path) -> None:
    """One of three replicas is gone, and until it has left the in-sync replicas HW stands still: 3 s at 50 MB/s."""
    log = open_log(log_folder)
    limit_bytes, committed = 16 * 1024 * 1024, [0]

    class Acks:
        acked = 0

        def send_now(self, protocol: bytes | memoryview) -> bool:
            self.acked += bytes(protocol).count(b'"seq":') - bytes(protocol).count(b'"error":')
            return True

    async def main() -> None:
        acks, memory = Acks(), IngestMemory(limit_bytes)
        with ThreadPoolExecutor(2) as writers:
            ingest = StreamIngest(
                "orders",
                log,
                stream_time=stream_time_of(log),
                sender=acks,
                executor=writers,
                memory=memory,
                ack_rules=ACK_RULES,
                appended=lambda end_offset: committed[0],
            )
            ingest.start(lambda what, error: pytest.fail(f"{what}: {error}"))
            values = [b"x" * 4096] * 500
            for at in range(75):
                receive(ingest, *values)
                await until(lambda at=at: log.log_end_offset == 500 * (at + 1))  # type: ignore[misc]
                await until(lambda at=at: ingest.stats.commits > at)  # type: ignore[misc]
            assert not ingest.stats.refused, "150 MB were taken"
            assert acks.acked == 0
            assert 0 < memory.used_bytes < limit_bytes // 2, "what is held is charged"
            held_bytes = memory.used_bytes
            ingest.release(500)
            assert acks.acked == 500
            assert memory.used_bytes < held_bytes
            ingest.release(log.log_end_offset)
            assert acks.acked == log.log_end_offset
            assert memory.used_bytes == 0
            await asyncio.wait_for(ingest.stop(), 20)

    asyncio.run(main())
    log.close()


def test_acks_that_wait_for_another_replica_count_against_the_limit(log: StreamLog) -> None:
    """Else small messages would fill the memory with what is to be answered."""

    async def main() -> None:
        memory = IngestMemory(100_000)
        with ThreadPoolExecutor(2) as writers:
            ingest = StreamIngest(
                "orders",
                log,
                stream_time=stream_time_of(log),
                sender=Sent(log),
                executor=writers,
                memory=memory,
                ack_rules=ACK_RULES,
                appended=lambda end_offset: 0,
            )
            ingest.start(lambda what, error: pytest.fail(f"{what}: {error}"))
            for at in range(100):
                receive(ingest, *[b"x"] * 100)
                await until(lambda at=at: ingest.stats.commits + ingest.stats.refused.total() > at)  # type: ignore[misc]
            assert ingest.stats.refused["overloaded"] > 0
            assert memory.used_bytes < 150_000
            await asyncio.wait_for(ingest.abandon(), 20)
            assert memory.used_bytes == 0

    asyncio.run(main())
