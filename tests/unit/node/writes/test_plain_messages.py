"""Messages that are committed at once, in the event loop and straight from their frames: all that holds for others."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.errors import NatslogError, StorageFull, StreamSealed
from natslog.ingest.ack_rules import AckRules
from natslog.log import StreamLog
from natslog.node.writes.ingest_memory import IngestMemory
from natslog.node.writes.pace import DiskPace
from natslog.node.writes.stream_ingest import StreamIngest
from natslog.wire.frames import FrameParser
from tests.conftest import open_log, stored_values, stream_time_of


class QuickDisk(DiskPace):
    is_quick = True  # type: ignore[assignment]


class Answers:
    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def send_now(self, protocol: bytes | memoryview) -> bool:
        self.bodies += [json.loads(line) for line in bytes(protocol).split(b"\r\n") if line.startswith(b"{")]
        return True


@pytest.fixture
def log(log_folder: Path) -> Iterator[StreamLog]:
    log = open_log(log_folder)
    yield log
    log.close()


def receive(ingest: StreamIngest, *values: bytes, headers: bytes = b"") -> None:
    parser = FrameParser()
    for value in values:
        sizes = b"%d %d" % (len(headers), len(headers) + len(value)) if headers else b"%d" % len(value)
        verb = b"HMSG" if headers else b"MSG"
        parser.receive_data(b"%b orders.new 1 _INBOX.a %b\r\n%b%b\r\n" % (verb, sizes, headers, value))
    for frames in parser.frames():
        ingest.receive(frames)


def run(log: StreamLog, work: Callable[[StreamIngest, Answers], Any], **settings: Any) -> list[BaseException]:
    """Returns what stopped the writer."""
    bugs: list[BaseException] = []

    async def main() -> None:
        answers = Answers()
        with ThreadPoolExecutor(2) as writers:
            given: dict[str, Any] = {
                "stream_time": stream_time_of(log),
                "sender": answers,
                "executor": writers,
                "memory": IngestMemory(1 << 20),
                "ack_rules": AckRules.of("reply", ["orders.>"], ["_INBOX."]),
                "pace": QuickDisk(),
            }
            ingest = StreamIngest("orders", log, **given | settings)
            ingest.start(lambda what, error: bugs.append(error))
            await work(ingest, answers)
            await asyncio.sleep(0)
            if not bugs:
                await asyncio.wait_for(ingest.stop(), 20)

    asyncio.run(main())
    return bugs


def test_a_commit_is_made_and_acked_before_the_frames_are_given_back(log: StreamLog) -> None:
    async def work(ingest: StreamIngest, answers: Answers) -> None:
        for at in range(5):
            receive(ingest, b"%d" % at, b"and")
            assert answers.bodies[-2:] == [{"stream": "orders", "seq": 2 * at + seq} for seq in (1, 2)]
            assert ingest.is_quiescent
        stats = ingest.stats
        assert (stats.received, stats.committed, stats.commits, stats.acked_commits) == (10, 10, 5, 5)

    assert not run(log, work)
    assert stored_values(log) == [text for at in range(5) for text in (b"%d" % at, b"and")]


def test_a_full_disk_is_answered_and_the_next_message_is_stored(
    log: StreamLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise StorageFull("the disk is full", file="f")

    async def work(ingest: StreamIngest, answers: Answers) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(log.shared.room, "require", full)
            receive(ingest, b"lost")
        assert answers.bodies[0]["error"]["err_code"] == 10047
        assert ingest.stats.refused["storage_full"] == 1
        receive(ingest, b"stored")
        assert answers.bodies[1:] == [{"stream": "orders", "seq": 1}]

    assert not run(log, work)
    assert stored_values(log) == [b"stored"]


def test_what_waits_for_other_replicas_is_bounded(log: StreamLog) -> None:
    async def work(ingest: StreamIngest, answers: Answers) -> None:
        for _ in range(400):  # of 32 bytes each, and their acks need more, however they are divided into commits
            receive(ingest, b"x")
        assert ingest.stats.refused["overloaded"] > 0
        assert all(body["error"]["err_code"] == 10167 for body in answers.bodies)
        stored = log.log_end_offset
        assert 0 < stored < 400
        answers.bodies.clear()
        ingest.release(stored)
        assert [body["seq"] for body in answers.bodies] == list(range(1, stored + 1))

    assert not run(log, work, memory=IngestMemory(10_000), appended=lambda end_offset: None)


def with_id(text: bytes) -> bytes:
    return b"NATS/1.0\r\nNats-Msg-Id: %b\r\nNatslog-Key: k\r\n\r\n" % text


@pytest.mark.parametrize("form", [b"%b", b"~%bbcdefghijklmnop"], ids=["a text", "natslog's own form"])
def test_a_repeated_id_is_acked_as_a_duplicate_and_not_stored(
    log: StreamLog, monkeypatch: pytest.MonkeyPatch, form: bytes
) -> None:
    gathered: list[Any] = []

    async def work(ingest: StreamIngest, answers: Answers) -> None:
        monkeypatch.setattr(ingest, "_gather_wanted", gathered.append)
        receive(ingest, b"1", headers=with_id(form % b"a"))
        receive(ingest, b"2", headers=with_id(form % b"b"))
        receive(ingest, b"1 again", headers=with_id(form % b"a"))
        receive(ingest, b"3", b"3 again", headers=with_id(form % b"c"))
        receive(ingest, b"4")
        seqs = [(body["seq"], body.get("duplicate", False)) for body in answers.bodies]
        assert seqs == [(1, False), (2, False), (1, True), (3, False), (3, True), (4, False)]

    assert not run(log, work)
    assert not gathered, "all take the short way"
    assert stored_values(log) == [b"1", b"2", b"3", b"4"]


def test_a_stream_that_takes_nothing_refuses(log: StreamLog) -> None:
    async def work(ingest: StreamIngest, answers: Answers) -> None:
        receive(ingest, b"x")
        assert answers.bodies[0]["error"]["err_code"] == 10109

    assert not run(log, work, refuses=StreamSealed("sealed"))
    assert log.log_end_offset == 0


def test_a_message_that_is_too_large_is_refused(log: StreamLog) -> None:
    log.settings = msgspec.structs.replace(log.settings, max_message_bytes=10)

    async def work(ingest: StreamIngest, answers: Answers) -> None:
        receive(ingest, b"x" * 10, b"x" * 11)
        await ingest.drained()
        assert answers.bodies[0]["error"]["err_code"] == 10054
        assert answers.bodies[1] == {"stream": "orders", "seq": 1}

    assert not run(log, work)


def test_no_commit_is_made_beside_another_turn_of_the_writer(log: StreamLog) -> None:
    writes, may_go_on = threading.Event(), threading.Event()

    def errand() -> None:
        writes.set()
        assert may_go_on.wait(20)
        assert log.log_end_offset == 0

    async def work(ingest: StreamIngest, answers: Answers) -> None:
        ingest.hand_to_writer(errand)
        await asyncio.to_thread(writes.wait, 20)
        receive(ingest, b"x")
        assert not answers.bodies
        may_go_on.set()
        await ingest.drained()
        assert answers.bodies == [{"stream": "orders", "seq": 1}]

    assert not run(log, work)


def test_an_errand_that_came_meanwhile_is_executed(log: StreamLog, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    write = log._write

    async def work(ingest: StreamIngest, answers: Answers) -> None:
        def writing(*arguments: Any, **named: Any) -> None:
            ingest.hand_to_writer(lambda: done.append(log.log_end_offset))
            write(*arguments, **named)

        monkeypatch.setattr(log, "_write", writing)
        receive(ingest, b"x")
        assert done == [1]

    assert not run(log, work)


def test_a_bug_is_reported_and_nothing_is_acked(log: StreamLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("a bug")

    async def work(ingest: StreamIngest, answers: Answers) -> None:
        monkeypatch.setattr("natslog.log.stream_log.encode_plain", fails)
        with pytest.raises(RuntimeError):
            receive(ingest, b"x")
        assert not answers.bodies

    (bug,) = run(log, work)
    assert str(bug) == "a bug"
    assert not isinstance(bug, NatslogError)


class SlowDisk(DiskPace):
    is_quick = False  # type: ignore[assignment]


def ended_in_thread(ingest: StreamIngest) -> None:
    """Waits without giving the event loop a turn."""
    deadline_s = time.monotonic() + 20
    while ingest._writer._has_turn:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.mark.parametrize("how", ["plain", "gathered"])
def test_what_a_thread_has_committed_is_told_of_first(log: StreamLog, how: str) -> None:
    """Otherwise the log would seem to be cut, and acks would be lost."""
    pace, ends = SlowDisk(), list[int]()

    async def work(ingest: StreamIngest, answers: Answers) -> None:
        def appended(end_offset: int) -> None:
            ends.append(end_offset)
            ingest.release(end_offset)

        ingest._appended = appended
        receive(ingest, b"by a thread")
        ended_in_thread(ingest)
        pace.is_quick = True  # type: ignore[misc]
        receive(ingest, b"x", headers=b"NATS/1.0\r\nNatslog-Ack: full\r\n\r\n" if how == "gathered" else b"")
        ended_in_thread(ingest)
        await ingest.quiesced()
        assert ends == [1, 2]
        assert [body["seq"] for body in answers.bodies] == [1, 2]

    assert not run(log, work, pace=pace)


@pytest.mark.parametrize("where", ["in a thread", "in the event loop"])
def test_what_an_errand_has_appended_is_told_of_first(
    log: StreamLog, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    told: list[str] = []

    async def work(ingest: StreamIngest, answers: Answers) -> None:
        loop = asyncio.get_running_loop()

        def errand() -> None:
            loop.call_soon_threadsafe(told.append, "errand")

        def appended(end_offset: int) -> None:
            told.append(f"commit {end_offset}")
            ingest.release(end_offset)

        ingest._appended = appended
        if where == "in a thread":
            ingest.hand_to_writer(errand)
            ended_in_thread(ingest)
        else:
            write = log._write

            def writing(*arguments: Any, **named: Any) -> None:
                monkeypatch.setattr(log, "_write", write)
                ingest.hand_to_writer(errand)
                write(*arguments, **named)

            monkeypatch.setattr(log, "_write", writing)
            receive(ingest, b"1")
        receive(ingest, b"2")
        ended_in_thread(ingest)
        await ingest.quiesced()
        expected = {"in a thread": ["errand", "commit 1"], "in the event loop": ["commit 1", "errand", "commit 2"]}
        assert told == expected[where]

    assert not run(log, work)


def test_runs_that_take_long_are_not_made_in_the_event_loop_any_more(
    log: StreamLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They tell the pace of the disk how long they took, as commits of messages do."""
    pace, in_loop = DiskPace(), list[bool]()
    empty = {"subject": ["orders.new"], "value": [b"v"], "key": [None], "headers": [None]}
    rows = RowBuffers.of(
        pa.RecordBatch.from_pydict({name: empty[name] for name in PAYLOAD_SCHEMA.names}, PAYLOAD_SCHEMA)
    )

    async def work(ingest: StreamIngest, answers: Answers) -> None:
        receive(ingest, b"x")
        await ingest.drained()
        synced = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", lambda fd: (time.sleep(0.05), synced(fd)))
        for number in range(1, 30):
            done = asyncio.Event()
            loop, main = asyncio.get_running_loop(), threading.get_ident()

            def errand(number: int = number, done: asyncio.Event = done) -> None:
                log.append_run("p", number, [rows], rows=1, size_bytes=100, now_us=1)
                in_loop.append(threading.get_ident() == main)  # noqa: B023
                loop.call_soon_threadsafe(done.set)  # noqa: B023

            ingest.hand_to_writer(errand, rows=1, size_bytes=100)
            await done.wait()
            await asyncio.sleep(0.001)

    assert not run(log, work, pace=pace)
    assert in_loop.count(True) < 15, in_loop
    assert not any(in_loop[-5:])
