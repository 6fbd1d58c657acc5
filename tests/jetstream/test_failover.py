"""A pull consumer of a stream with three replicas under load, while leaders are killed, paused and cut off.

Every message that was acked to its publisher is received at least once, and none again whose own ack was answered: such
an answer means that the ack is stored on all in-sync replicas.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import nats
import nats.errors
import pytest

from tests.cluster_harness import Cluster
from tests.harness import eventually, with_nats
from tests.jetstream.three_brokers import (
    RESUMES_WITHIN_S,
    consumer_info,
    create_consumer,
    create_stream,
    cut_off_leader,
    in_background,
    kill_leader,
    pause_leader,
    three_brokers,
)

PROGRESS = 150
"""Messages that are published and received between faults."""
PACE_S = 0.005
ACK_WAIT_S = 3.0
PULL_S = 1.0
ACK_AGAIN_S = 0.5
BATCH = 20
_NO_RESPONDERS = "503"
_REFUSED = b'{"batch": 1, "expires": 1, "idle_heartbeat": 1000}'
"""A pull request that gets a status at once, on the connection of messages: behind those that were sent before."""


class Receipt(NamedTuple):
    """`times`: how often it was delivered, as its reply subject states it."""

    seq: int
    delivered_as: int
    times: int


@dataclass
class Load:
    """A publisher and a receiver of one stream, on one connection.

    What arrives for pull requests and as answers to acks comes by one subscription, so that its order is known.

    Attributes:
        published: sequences of acked messages. receipts: in the order of their arrival. answered: sequences whose ack
            was. confirmed: those of them for which all that was sent before has arrived. again: receipts of these.
    """

    stream: str
    consumer: str
    chance: Random = field(default_factory=lambda: Random(7))
    published: set[int] = field(default_factory=set)
    receipts: list[Receipt] = field(default_factory=list)
    received: set[int] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)
    confirmed: set[int] = field(default_factory=set)
    again: list[tuple[Receipt, str]] = field(default_factory=list)
    is_publishing: bool = True
    is_receiving: bool = True
    _waiting: dict[int, str] = field(default_factory=dict)
    _pull: int = 0
    _left: int = 0
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, url: str) -> None:
        """As long as `is_publishing` and `is_receiving`."""
        self._connection = await nats.connect(url)
        self._inbox = self._connection.new_inbox()
        await self._connection.subscribe(f"{self._inbox}.>", cb=self._arrived)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._publish())
                tasks.create_task(self._receive())
                tasks.create_task(self._ack_again())
        finally:
            await self._connection.close()

    def wait_until_acked(self, url: str) -> None:
        def is_acked() -> bool:
            return self.published <= self.received and not self._waiting and left_of(url, self.stream, self.consumer)

        eventually(is_acked, 60, "everything is received and acked", every_s=0.2)

    # ---- publishing ----

    async def _publish(self) -> None:
        """Each message is sent until it is acked, and stored once."""
        number = 0
        while self.is_publishing:
            number += 1
            while self.is_receiving:
                try:
                    answer = await self._connection.request(
                        f"{self.stream}.{number % 7}", b"%d" % number, timeout=2, headers={"Nats-Msg-Id": str(number)}
                    )
                except (nats.errors.TimeoutError, nats.errors.NoRespondersError):  # there is no leader now
                    await asyncio.sleep(PACE_S)
                    continue
                if "seq" in (found := json.loads(answer.data)):
                    self.published.add(found["seq"])
                    break
            await asyncio.sleep(PACE_S)

    # ---- receiving ----

    async def _receive(self) -> None:
        """One pull request after the other; one that does not end in time was lost with its leader."""
        while self.is_receiving:
            self._pull, self._left = self._pull + 1, BATCH
            self._ended.clear()
            body = json.dumps({"batch": BATCH, "expires": int(PULL_S * 1e9)}).encode()
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{self.consumer}"
            await self._connection.publish(subject, body, reply=f"{self._inbox}.pull.{self._pull}")
            try:
                async with asyncio.timeout(PULL_S + 1):
                    await self._ended.wait()
            except TimeoutError:
                continue

    async def _arrived(self, message: Any) -> None:
        kind, _, number = message.subject.removeprefix(f"{self._inbox}.").partition(".")
        if "$JS.ACK." in message.reply:
            self._left -= 1
            if not self._left:
                self._ended.set()
            await self._received(message)
            return
        status = (message.headers or {}).get("Status", "")
        if status == _NO_RESPONDERS:
            return  # there is no leader now
        if kind == "ack":
            self.answered.add(int(number))
            self._waiting.pop(int(number), None)
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{self.consumer}"
            await self._connection.publish(subject, _REFUSED, reply=f"{self._inbox}.fence.{number}")
        elif kind == "fence":
            self.confirmed.add(int(number))
        elif int(number) == self._pull and not status.startswith("100"):
            self._ended.set()

    async def _received(self, message: Any) -> None:
        times, seq, delivered_as = (int(one) for one in message.reply.split(".")[4:7])
        receipt = Receipt(seq, delivered_as, times)
        self.receipts.append(receipt)
        self.received.add(seq)
        if seq in self.confirmed:
            self.again.append((receipt, message.reply))
        kind = self.chance.choice(("confirmed", "confirmed", "plain", "negative", "none"))
        if times > 2 or kind == "confirmed":
            self._waiting[seq] = message.reply
            await self._ack(seq)
        elif kind != "none":
            await self._connection.publish(message.reply, b"+ACK" if kind == "plain" else b"-NAK")

    async def _ack(self, seq: int) -> None:
        await self._connection.publish(self._waiting[seq], b"+ACK", reply=f"{self._inbox}.ack.{seq}")

    async def _ack_again(self) -> None:
        """Acks that were not answered: their leader may have failed."""
        while self.is_receiving:
            before = set(self._waiting)
            await asyncio.sleep(ACK_AGAIN_S)
            for seq in sorted(before & set(self._waiting)):
                await self._ack(seq)


def left_of(url: str, stream: str, consumer: str) -> bool:
    """Whether nothing is to be delivered or acked any more."""

    async def work(connection: Any) -> bool:
        try:
            answer = await connection.request(f"$JS.API.CONSUMER.INFO.{stream}.{consumer}", b"", timeout=2)
        except (nats.errors.TimeoutError, nats.errors.NoRespondersError):
            return False
        found = json.loads(answer.data)
        return found.get("num_pending") == 0 and found.get("num_ack_pending") == 0

    return with_nats(url, work)


def play(cluster: Cluster, name: str, faults: Callable[[Load], None], *, may_be_late: bool = False) -> Load:
    """The load while these faults happen: what holds of it is required. may_be_late: what a leader has sent before it
    is cut off may arrive when that has ended.
    """
    create_stream(cluster, name, subjects=[f"{name}.>"])
    create_consumer(cluster, name, "worker", ack_wait=int(ACK_WAIT_S * 1e9), max_ack_pending=500)
    load = Load(name, "worker")
    with in_background(load.run(cluster.nats_url)):
        try:
            faults(load)
            load.is_publishing = False
            load.wait_until_acked(cluster.nats_url)
        finally:
            load.is_publishing = load.is_receiving = False
    assert may_be_late or not load.again, (
        f"{len(load.again)} deliveries of messages whose ack was answered: {load.again[:5]}"
    )
    assert load.published <= load.received, sorted(load.published - load.received)[:10]
    assert len(load.confirmed) > len(load.published) // 4
    assert any(receipt.times > 1 for receipt in load.receipts)
    floor = consumer_info(cluster, name, "worker")["ack_floor"]["stream_seq"]
    assert floor >= max(load.published)
    return load


def wait_for_progress(load: Load) -> None:
    published, received = len(load.published) + PROGRESS, len(load.received) + PROGRESS

    def is_reached() -> bool:
        return len(load.published) >= published and len(load.received) >= received

    eventually(is_reached, 60, "messages are published and received")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with three_brokers(tmp_path_factory.mktemp("failover") / "own") as cluster:
        yield cluster


def kills_and_pauses(cluster: Cluster, stream: str, rounds: int) -> Callable[[Load], None]:
    def faults(load: Load) -> None:
        for _ in range(rounds):
            for fail in (kill_leader, pause_leader):
                wait_for_progress(load)
                fail(cluster, stream, lambda: wait_for_progress(load))
        wait_for_progress(load)

    return faults


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_many_failures_lose_no_message(cluster: Cluster) -> None:
    play(cluster, "much", kills_and_pauses(cluster, "much", 2))


@pytest.mark.long
@pytest.mark.root
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "with_nats",
    [pytest.param(False, id="from brokers"), pytest.param(True, id="from everything", marks=pytest.mark.extended)],
)
def test_leader_that_is_cut_off_loses_no_message(tmp_path: Path, with_nats: bool) -> None:
    """A leader that receives pull requests and acks, while another one leads already, delivers nothing again. What it
    has sent to a server that it cannot reach arrives later.
    """
    with three_brokers(tmp_path / "own", network=True) as cluster:

        def faults(load: Load) -> None:
            for _ in range(3):
                wait_for_progress(load)
                cut_off_leader(cluster, "cut", lambda: wait_for_progress(load), with_nats=with_nats)
            wait_for_progress(load)

        play(cluster, "cut", faults, may_be_late=with_nats)


# ---- what a new leader continues ----


class Puller:
    """Pulls and acks one after the other."""

    def __init__(self, connection: Any, stream: str, consumer: str) -> None:
        self._connection = connection
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"

    async def pull(self, want: int) -> list[tuple[Receipt, str]]:
        """So many messages, with their reply subjects. Requests are repeated while there is no leader."""
        found: list[tuple[Receipt, str]] = []
        deadline = time.monotonic() + RESUMES_WITHIN_S
        while len(found) < want:
            assert time.monotonic() < deadline, f"{len(found)} of {want} messages"
            inbox = self._connection.new_inbox()
            subscription = await self._connection.subscribe(inbox)
            body = json.dumps({"batch": want - len(found), "expires": int(PULL_S * 1e9)}).encode()
            await self._connection.publish(self._subject, body, reply=inbox)
            found += [one async for one in self._messages(subscription, want - len(found))]
            await subscription.unsubscribe()
        return found

    @staticmethod
    async def _messages(subscription: Any, most: int) -> Any:
        for _ in range(most):
            try:
                message = await subscription.next_msg(timeout=PULL_S + 1)
            except nats.errors.TimeoutError:
                return
            if "$JS.ACK." not in message.reply:
                return
            times, seq, delivered_as = (int(one) for one in message.reply.split(".")[4:7])
            yield Receipt(seq, delivered_as, times), message.reply

    async def answered(self, reply: str, what: bytes) -> None:
        """An ack, until it is answered, which means that it is stored with all that was delivered before."""
        async with asyncio.timeout(RESUMES_WITHIN_S):
            while True:
                try:
                    await self._connection.request(reply, what, timeout=1)
                    return
                except (nats.errors.TimeoutError, nats.errors.NoRespondersError):
                    continue


async def publish_some(connection: Any, subject: str, count: int) -> None:
    for _ in range(count):
        await connection.request(subject, b"x", timeout=30)


def restart_all(cluster: Cluster) -> None:
    """All are killed at once."""
    for broker in cluster.brokers:
        broker.kill()
    for broker in cluster.brokers:
        broker.spawn()
    cluster.wait_ready()
    cluster.wait_in_sync()


def terminate_all(cluster: Cluster) -> None:
    """In an orderly way, one after the other, and only then started again."""
    for broker in cluster.brokers:
        broker.terminate()
    for broker in cluster.brokers:
        broker.spawn()
    cluster.wait_ready()
    cluster.wait_in_sync()


FAULTS: dict[str, Callable[[Cluster, str], None]] = {
    "leader killed": kill_leader,
    "leader paused": pause_leader,
    "all killed": lambda cluster, _: restart_all(cluster),
    "all stopped": lambda cluster, _: terminate_all(cluster),
}
IN_SHORT = ("leader killed",)


@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=() if one in IN_SHORT else pytest.mark.long) for one in FAULTS]
)
def test_new_leader_continues_positions_pending_messages_and_counts(cluster: Cluster, fault: str) -> None:
    name = f"continues{list(FAULTS).index(fault)}"
    create_stream(cluster, name, allow_direct=True)
    create_consumer(cluster, name, "worker", ack_wait=int(ACK_WAIT_S * 1e9), max_deliver=5)

    async def before(connection: Any) -> None:
        await publish_some(connection, name, 10)
        puller = Puller(connection, name, "worker")
        first = await puller.pull(6)
        assert [(one.seq, one.times) for one, _ in first] == [(seq, 1) for seq in range(1, 7)]
        for _, reply in first[:3]:  # 1, 2 and 3: delivered again
            await puller.answered(reply, b"-NAK")
        again = await puller.pull(3)
        assert [(one.seq, one.times) for one, _ in again] == [(1, 2), (2, 2), (3, 2)]
        await puller.answered(first[4][1], b"+ACK")
        await puller.answered(again[1][1], b"+TERM")

    with_nats(cluster.nats_url, before)
    FAULTS[fault](cluster, name)
    shown = consumer_info(cluster, name, "worker")
    assert shown["num_ack_pending"] == 4
    assert shown["num_pending"] == 4
    assert shown["num_redelivered"] == 2
    assert (shown["delivered"]["consumer_seq"], shown["delivered"]["stream_seq"]) == (9, 6)
    assert (shown["ack_floor"]["consumer_seq"], shown["ack_floor"]["stream_seq"]) == (0, 0)

    async def after(connection: Any) -> None:
        puller = Puller(connection, name, "worker")
        found = await puller.pull(8)
        assert sorted((one.seq, one.times) for one, _ in found) == [
            *((1, 3), (3, 3), (4, 2), (6, 2)),
            *((seq, 1) for seq in range(7, 11)),
        ]
        assert sorted(one.delivered_as for one, _ in found) == list(range(10, 18))
        for _, reply in found:
            await puller.answered(reply, b"+ACK")

    with_nats(cluster.nats_url, after)
    shown = consumer_info(cluster, name, "worker")
    assert (shown["num_ack_pending"], shown["num_pending"], shown["num_redelivered"]) == (0, 0, 0)
    assert shown["ack_floor"]["stream_seq"] == 10
