"""Streams with `standby`: what publishers without acks send while the leader is killed is stored once and in order."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.js.errors import NoStreamResponseError

from natslog.client import NatslogClient
from natslog.model import BrokerId
from tests.cluster_harness import Cluster, ClusterBroker, running_cluster
from tests.harness import all_values, eventually, with_nats
from tests.plain_publisher import Found, PlainPublisher

pytestmark = pytest.mark.timeout(300)

SUBJECT = "plain"
WHOLE = Found(0, 0, 0)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path) as cluster:
        with cluster.client() as client:
            client.create_stream("standby", f"{SUBJECT}.>", replicas=3, standby=True)
        wait_until_standing_by(cluster)
        yield cluster


def wait_until_standing_by(cluster: Cluster, followers: int = 2) -> None:
    """So many of them."""

    def standing_by() -> float:
        return sum(broker.metrics()['natslog_stream_standing_by{stream="standby"}'] for broker in cluster.brokers)

    cluster.wait_in_sync()
    eventually(lambda: standing_by() == followers, 30, f"{followers} followers stand by")


def kill_leader(cluster: Cluster) -> int:
    """Returns when another broker leads."""
    victim = cluster.leader_of("standby")
    assert victim is not None
    victim.kill()
    eventually(lambda: cluster.leader_of("standby") not in (None, victim), 30, "another broker leads")
    return victim.number


def found(client: NatslogClient, publisher: PlainPublisher) -> Found:
    """When nothing more is appended."""
    ends = [-1]

    def is_whole() -> bool:
        position = client.position("standby")
        ends.append(position["high_watermark"])
        return ends[-1] >= publisher.sent or ends[-40:] == 40 * ends[-1:]

    eventually(is_whole, 60, "all is stored, or nothing more comes")
    return Found.of(all_values(client, "standby"), publisher.sent)


def test_plain_messages_survive_a_killed_leader(cluster: Cluster) -> None:
    publisher = PlainPublisher(cluster.nats_url, SUBJECT, 2000)
    publisher.start()
    time.sleep(1.0)
    kill_leader(cluster)
    time.sleep(0.5)
    publisher.stop()
    with cluster.client() as client:
        assert found(client, publisher) == WHOLE


class Heartbeats(PlainPublisher):
    """Messages of a subject that are all equal, with headers."""

    def _frame(self, number: int) -> bytes:
        headers = b"NATS/1.0\r\nNatslog-Key: k%d\r\n\r\n" % (number % 3)
        sizes = b"%d %d" % (len(headers), len(headers) + 5)
        return b"HPUB %s.beat %s\r\n%salive\r\n" % (self._subject, sizes, headers)


def test_equal_messages_are_counted(cluster: Cluster) -> None:
    publisher = Heartbeats(cluster.nats_url, SUBJECT, 1000)
    publisher.start()
    time.sleep(1.0)
    kill_leader(cluster)
    time.sleep(0.5)
    publisher.stop()
    with cluster.client() as client:
        eventually(lambda: client.position("standby")["high_watermark"] >= publisher.sent, 30, "all are stored")
        keys = [key for batch in client.read("standby") for key in batch.column("key").to_pylist()]
    assert Counter(keys) == Counter(b"k%d" % (number % 3) for number in range(publisher.sent))


def test_followers_stand_by_as_the_settings_say(cluster: Cluster) -> None:
    with cluster.client() as client:
        client.edit_stream("standby", standby=False)
        wait_until_standing_by(cluster, 0)
        client.edit_stream("standby", standby=True, subject="other")
        wait_until_standing_by(cluster)
        client.edit_stream("standby", subjects=[f"{SUBJECT}.>", "another"])
        publisher = PlainPublisher(cluster.nats_url, SUBJECT, 1000)
        publisher.start()
        time.sleep(0.5)
        kill_leader(cluster)
        publisher.stop()
        assert found(client, publisher) == WHOLE


class Requester(threading.Thread):
    """Sends numbered requests, one every 5 ms, until `stop`, and waits until each is answered.

    Attributes:
        answers: by number: `stored`, `503`, or an error.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.sent, self.stop = url, 0, False
        self.answers: defaultdict[int, list[str]] = defaultdict(list)

    def run(self) -> None:
        with_nats(self.url, self._ask)

    async def _ask(self, connection: Any) -> None:
        async def take(message: Any) -> None:
            status = (message.headers or {}).get("Status", "")
            answer = status or ("stored" if "seq" in json.loads(message.data) else message.data.decode())
            self.answers[int(message.subject.rpartition(".")[2])].append(answer)

        inbox = connection.new_inbox()
        await connection.subscribe(f"{inbox}.*", cb=take)
        while not self.stop:
            await connection.publish(f"{SUBJECT}.request", b"r%d" % self.sent, reply=f"{inbox}.{self.sent}")
            self.sent += 1
            await asyncio.sleep(0.005)
        for _ in range(500):
            if len(self.answers) == self.sent:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # for more than one answer


def test_requests_without_a_leader_are_refused_and_not_stored(cluster: Cluster) -> None:
    requester = Requester(cluster.nats_url)
    requester.start()
    time.sleep(0.5)
    kill_leader(cluster)
    time.sleep(0.5)
    requester.stop = True
    requester.join()
    answers = [requester.answers[number] for number in range(requester.sent)]
    with cluster.client() as client:
        stored = all_values(client, "standby")
    refused = [number for number, one in enumerate(answers) if "503" in one]
    assert len(refused) > 10, "while there was no leader"
    assert {one for answered in answers for one in answered} == {"stored", "503"}
    assert {len(set(one)) for one in answers} <= {0, 1}, "no answer contradicts another one"
    others = [number for number in range(requester.sent) if number not in refused]
    assert sorted(stored) == sorted(b"r%d" % number for number in others), "also if its ack was lost with the leader"


def test_jetstream_clients_learn_at_once_that_there_is_no_leader(cluster: Cluster) -> None:
    """The leader and another broker have ended, so there is no majority for a new leader: the third broker answers."""
    leader = cluster.leader_of("standby")
    others = [broker for broker in cluster.brokers if broker is not leader]
    for broker in (leader, others[0]):
        assert broker is not None
        broker.kill()

    async def publish(connection: Any) -> None:
        stream = connection.jetstream()

        async def is_refused(timeout_s: float) -> bool:
            try:
                await stream.publish(f"{SUBJECT}.x", b"never stored", timeout=timeout_s)
            except NoStreamResponseError:
                return True
            except TimeoutError:
                return False
            raise AssertionError("it was acked")

        while not await is_refused(0.5):  # the end of the others was not noticed yet
            pass
        assert all([await is_refused(20.0) for _ in range(100)])

    with_nats(cluster.nats_url, publish)


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "silent", "stopped", "transferred"])
def test_no_plain_message_is_lost_by_changes_of_the_leader(cluster: Cluster, how: str) -> None:
    publisher = PlainPublisher(cluster.nats_url, SUBJECT, 20_000, padding=b"x" * 100)
    publisher.start()
    for _ in range(3):
        leader = cluster.leader_of("standby")
        assert leader is not None
        change_leader(cluster, leader, how)
        wait_until_standing_by(cluster)
    publisher.stop()
    with cluster.client() as client:
        assert found(client, publisher) == WHOLE


def change_leader(cluster: Cluster, leader: ClusterBroker, how: str) -> None:
    """Returns when another broker leads, and all run again."""
    to = next(broker.number for broker in cluster.brokers if broker is not leader)
    match how:
        case "killed":
            leader.kill()
        case "silent":
            leader.pause()
        case "stopped":
            leader.terminate()
        case _:
            with cluster.client() as client:
                client.transfer_stream("standby", BrokerId(to))
    eventually(lambda: cluster.leader_of("standby") not in (None, leader), 30, "another broker leads")
    if how == "silent":
        leader.resume()
    elif how != "transferred":
        leader.spawn()
    cluster.wait_ready()
