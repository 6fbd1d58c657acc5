"""A consumer at the leader of its stream: a request is served from what was read before, unless it must not be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from natslog.jetstream.consumers.config import ConsumerConfig
from natslog.jetstream.consumers.machine import Consumer
from natslog.jetstream.consumers.served import ServedConsumer
from natslog.jetstream.consumers.state import ConsumerRecord
from natslog.log import ReplicaLog
from tests.conftest import open_log, rows

NOW_US = 1_790_000_000_000_000


class Leaf:
    """A leafnode connection that keeps what is sent."""

    def __init__(self) -> None:
        self.is_up = self.is_writable = True
        self.max_payload_bytes = 1 << 20
        self.written_bytes = 0
        self.taken_bytes: int | None = None  # by the kernel, which takes no more; None: it takes all
        self.sent: list[bytes] = []
        self.interest = SimpleNamespace(has=lambda *_: True, groups=lambda _: frozenset[str]())

    def send_now(self, protocol: bytes | memoryview) -> bool:
        if not self.is_up:
            return False
        self.written_bytes += len(protocol)
        self.sent.append(bytes(protocol))
        return True

    @property
    def unsent_bytes(self) -> int:
        return 0 if self.taken_bytes is None else self.written_bytes - self.taken_bytes

    async def drain(self) -> None:
        """Until the server has accepted what was sent."""
        if not self.is_writable:
            await asyncio.sleep(0)
            self.is_writable = self.is_up

    @property
    def delivered(self) -> int:
        return sum(frames.count(b"LMSG ") for frames in self.sent)


class Owner:
    """Of one consumer. `may_deliver`: whether the broker has a metadata session."""

    def __init__(self, log: ReplicaLog, readers: ThreadPoolExecutor) -> None:
        self.stream: Any = SimpleNamespace(name="A", usable_log=lambda: log)
        self.pushing: set[Any] = set()
        self.leaf: Any = Leaf()
        self.readers = readers
        self.may_deliver = True
        self.spawned = 0

    def now_us(self) -> int:
        return 1

    def changed(self, served: ServedConsumer) -> None:
        """There is nothing that stores it."""

    def note_window(self, served: ServedConsumer) -> None:
        """It is kept."""

    def answer_when_stored(self, served: ServedConsumer, reply: str) -> None:
        raise AssertionError("there are no acks")

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        self.spawned += 1
        return asyncio.create_task(work, name=name)

    def advise(self, kind: str, served: ServedConsumer, **facts: Any) -> None:
        raise AssertionError("there is nothing to state")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def served_from(
    folder: Path,
    story: Callable[[ServedConsumer, Owner], Coroutine[Any, Any, None]],
    *,
    ack_policy: Any = "explicit",
    **settings: Any,
) -> None:
    """A pull consumer of ten messages."""
    log = open_log(folder)
    log.append(rows([b"%d" % number for number in range(10)]), NOW_US)
    config = ConsumerConfig(durable_name="C", ack_policy=ack_policy, max_waiting=512, **settings)
    record = ConsumerRecord(created_us=NOW_US, config=config, start=1, resume=1)

    async def run() -> None:
        with ThreadPoolExecutor(1) as readers:
            owner = Owner(log, readers)
            machine = Consumer("C", config, 1, has_interest=lambda _: True)
            machine.begin(1, 10)
            served = ServedConsumer(owner, "C", "id", record, machine)
            served.begin()
            await story(served, owner)
            served.close("409 Consumer Deleted")
            await served.closed()

    asyncio.run(run())
    log.close()


def pull(served: ServedConsumer, batch: int = 1) -> None:
    """As it comes over the connection of the stream."""
    served.pull("reply", b"%d" % batch)
    served.wake()


def test_a_status_is_sent_together_with_the_messages_before_it(tmp_path: Path) -> None:
    """nats.js makes its next request when it gets "Message Size Exceeds MaxBytes" before it has processed them."""

    async def story(served: ServedConsumer, owner: Owner) -> None:
        served.pull("reply", b'{"batch": 9, "max_bytes": 110}')
        served.wake()
        await until(lambda: owner.leaf.delivered > 0 and served._pump is None)
        (sent,) = owner.leaf.sent
        assert 1 < owner.leaf.delivered < 9, "messages, and the status"
        assert b"409 Message Size Exceeds MaxBytes" in sent

    served_from(tmp_path, story)


def test_request_is_answered_in_the_same_turn_from_what_was_read(tmp_path: Path) -> None:
    async def story(served: ServedConsumer, owner: Owner) -> None:
        pull(served)
        await until(lambda: owner.leaf.delivered == 1)
        await until(lambda: served._pump is None)
        spawned = owner.spawned
        pull(served, 3)
        assert owner.leaf.delivered == 4, "before any task runs"
        assert owner.spawned == spawned

    served_from(tmp_path, story)


def test_message_that_is_committed_is_delivered_in_the_same_turn_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a filter; no file is read for it, and no thread waited for."""

    async def story(served: ServedConsumer, owner: Owner) -> None:
        log = owner.stream.usable_log()
        pull(served, 1000)
        await until(lambda: served.is_hungry and served._pump is None)
        delivered = owner.leaf.delivered
        log.append(rows([b"the first one is read from its file"]), 1)
        served.wake()
        await until(lambda: owner.leaf.delivered == delivered + 1 and served._pump is None)
        delivered, spawned = delivered + 1, owner.spawned
        with monkeypatch.context() as patch:
            patch.setattr(log.reader, "plan_read", None)
            for at in range(20):
                log.append(rows([b"%d" % at] * (1 + at % 3)), 1)
                delivered += 1 + at % 3
                served.wake()
                assert owner.leaf.delivered == delivered
                assert served.is_hungry
            for at in range(20):
                log.append(rows([b"%d" % at], "another.one"), 1)
                delivered += not served.record.config.filters
                served.wake()
                assert owner.leaf.delivered == delivered
                assert served.is_hungry
        assert owner.spawned == spawned

    for filters in ([], ["*.new", "none"]):
        served_from(tmp_path / str(len(filters)), story, filter_subjects=filters)


def test_broker_without_a_session_delivers_nothing_of_what_was_read(tmp_path: Path) -> None:
    """Another broker may lead the stream by now, and the messages may be acked there."""

    async def story(served: ServedConsumer, owner: Owner) -> None:
        pull(served)
        await until(lambda: owner.leaf.delivered == 1)
        await until(lambda: served._pump is None)
        owner.may_deliver = False
        pull(served)
        await until(lambda: served._pump is None)
        assert owner.leaf.delivered == 1
        owner.may_deliver = True
        served.wake()
        await until(lambda: owner.leaf.delivered == 2)

    served_from(tmp_path, story)


def test_request_waits_while_the_server_accepts_less_than_is_sent(tmp_path: Path) -> None:
    """The pump waits for the server after what it sends."""

    async def story(served: ServedConsumer, owner: Owner) -> None:
        pull(served)
        await until(lambda: owner.leaf.delivered == 1)
        await until(lambda: served._pump is None)
        owner.leaf.is_writable = False
        pull(served)
        assert owner.leaf.delivered == 1, "not in the same turn"
        await until(lambda: owner.leaf.delivered == 2)

    served_from(tmp_path, story)


@pytest.mark.parametrize("ack_policy", ["explicit", "none"])
def test_nothing_is_assigned_when_the_connection_is_lost_while_messages_are_read(
    tmp_path: Path, ack_policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(served: ServedConsumer, owner: Owner) -> None:
        read = served._read

        async def read_and_lose(log: Any, wanted: Any) -> Any:
            found = await read(log, wanted)
            owner.leaf.is_up = owner.leaf.is_writable = False
            return found

        monkeypatch.setattr(ServedConsumer, "_read", lambda self, log, wanted: read_and_lose(log, wanted))
        pull(served, 4)
        await until(lambda: served._pump is None and not owner.leaf.is_up)
        assert (served.machine.next_seq, len(served.machine.pulls)) == (1, 1)
        monkeypatch.undo()
        served.link_is_down()
        owner.leaf.is_up = owner.leaf.is_writable = True
        served.wake()
        await until(lambda: owner.leaf.delivered == 4)

    served_from(tmp_path, story, ack_policy=ack_policy)


def test_messages_without_acks_that_were_not_sent_are_taken_back(tmp_path: Path) -> None:
    async def story(served: ServedConsumer, owner: Owner) -> None:
        pull(served, 2)
        await until(lambda: owner.leaf.delivered == 2)
        owner.leaf.taken_bytes = owner.leaf.written_bytes
        pull(served, 3)
        pull(served, 1)
        await until(lambda: owner.leaf.delivered == 6)
        assert served.machine.next_seq == 7
        served.link_is_down()
        assert (served.machine.next_seq, served.machine.delivered) == (3, (2, 2))
        owner.leaf.taken_bytes = None
        pull(served, 8)
        await until(lambda: owner.leaf.delivered == 6 + 8)
        served.link_is_down()
        assert served.machine.next_seq == 11, "all of it was sent"

    served_from(tmp_path, story, ack_policy="none")


def test_consumer_that_delivers_to_a_subject_follows_its_subscribers_until_it_is_closed(tmp_path: Path) -> None:
    async def story(served: ServedConsumer, owner: Owner) -> None:
        assert owner.pushing == {served}
        served.close("409 Leadership Change")
        assert not owner.pushing
        served.begin()  # its leadership has ended while it was being created
        assert not owner.pushing

    served_from(tmp_path, story, ack_policy="none", deliver_subject="to")
