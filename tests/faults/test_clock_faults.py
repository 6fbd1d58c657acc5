"""Wall clocks that are wrong, on real brokers: nothing expires early, no message id is stored twice, and what is due
expires in the end.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from natslog.client import NatslogClient
from natslog.nats_server import NatsServer
from tests.clocks import WallClock
from tests.cluster_harness import Cluster, running_cluster
from tests.harness import BrokerProcess, eventually, publish_acked, stream_folder

HOUR_S = 3600
ROUND_S = 0.2
SETTINGS = {"segment_bytes": "64KiB", "retention_interval": f"{ROUND_S}s"}
PAYLOAD = b"x" * 8000  # a segment has some eight of them


@contextmanager
def alone(folder: Path) -> Iterator[tuple[NatsServer, BrokerProcess, WallClock]]:
    """A single broker whose clock can be set; it is not started yet."""
    server = NatsServer(0, folder / "nats.log").start()
    clock = WallClock(folder / "clock")
    broker = BrokerProcess(folder / "data", server.url, **SETTINGS)
    broker.environment = clock.environment
    try:
        yield server, broker, clock
    finally:
        broker.kill()
        server.stop()


def fill(url: str, count: int = 40) -> None:
    """In commits of their own, so that there are several segments."""
    for _ in range(count // 8):
        publish_acked(url, "orders.new", [PAYLOAD] * 8)


def wait_until_sealed(client: NatslogClient, broker: BrokerProcess) -> None:
    """What retention may drop is there."""
    streams = broker.folder / "streams"
    eventually(lambda: len(list(streams.glob("[!_]*/*.arrow"))) >= 3, 30, "segments are sealed")
    assert client.stream("orders")["log_start_offset"] == 0


def stays(read: Any, expected: Any, for_s: float) -> None:
    deadline = time.monotonic() + for_s
    while time.monotonic() < deadline:
        assert read() == expected
        time.sleep(0.1)


def readiness(broker: BrokerProcess) -> dict[str, Any]:
    with urllib.request.urlopen(f"{broker.url}/readyz", timeout=30) as answer:
        return dict(json.load(answer))


def age_s(client: NatslogClient, offset: int) -> float:
    """How long ago a message was stored, as its timestamp says, by this process's clock; negative: in the future."""
    for batch in client.read("orders", start=offset):
        return time.time() - batch.column("timestamp")[0].as_py().timestamp()
    raise AssertionError("it is there")


@pytest.mark.long
def test_one_boot_with_the_clock_an_hour_ahead_removes_nothing_and_stamps_nothing_ahead(tmp_path: Path) -> None:
    with alone(tmp_path) as (server, broker, clock):
        client = broker.start().client()
        client.create_stream("orders", "orders.>", max_age="40m")
        fill(server.url)
        wait_until_sealed(client, broker)
        broker.terminate()
        clock.set(HOUR_S)
        broker.start()
        publish_acked(server.url, "orders.new", [b"while the clock is ahead"])
        stays(lambda: client.stream("orders")["log_start_offset"], 0, 20 * ROUND_S)
        assert abs(age_s(client, 40)) < 60
        assert "correct the clock (NTP)" in readiness(broker)["warnings"][0]
        assert "correct the clock (NTP)" in broker.output()
        broker.terminate()
        clock.set(0)
        broker.start()
        stays(lambda: client.stream("orders")["log_start_offset"], 0, 5 * ROUND_S)
        eventually(lambda: not readiness(broker)["warnings"], 200, "followed after as long as it was down")


@pytest.mark.long
def test_a_clock_that_jumps_an_hour_while_the_broker_runs_removes_nothing(tmp_path: Path) -> None:
    with alone(tmp_path) as (server, broker, clock):
        client = broker.start().client()
        client.create_stream("orders", "orders.>", max_age="40m")
        fill(server.url)
        wait_until_sealed(client, broker)
        clock.set(HOUR_S)
        time.sleep(1.5)  # as long as it takes to jump
        publish_acked(server.url, "orders.new", [b"while the clock is ahead"])
        stays(lambda: client.stream("orders")["log_start_offset"], 0, 20 * ROUND_S)
        assert abs(age_s(client, 40)) < 60


@pytest.mark.long
def test_an_idle_stream_of_a_single_broker_expires_by_a_right_clock_also_after_restarts(tmp_path: Path) -> None:
    with alone(tmp_path) as (server, broker, _):
        client = broker.start().client()
        client.create_stream("orders", "orders.>", max_age="8s")
        fill(server.url)
        time.sleep(3)
        broker.terminate()
        time.sleep(3)
        broker.start()
        eventually(lambda: client.stream("orders")["log_start_offset"] == 40, 30, "everything is past its age")
        publish_acked(server.url, "orders.new", [b"after all that"])
        assert abs(age_s(client, 40)) < 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three brokers; the clock of the third can be set."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), clocks=(3,), settings=SETTINGS) as cluster:
        cluster.wait_in_sync()
        yield cluster


def lead(cluster: Cluster, stream: str, number: int) -> None:
    def leads() -> bool:
        leader = cluster.leader_of(stream)
        if leader is not None and leader.number != number:
            leader.ask("POST", f"/v1/streams/{stream}/leader", {"to": number}, timeout_s=10)
        return leader is not None and leader.number == number

    eventually(leads, 40, f"broker {number} leads {stream}")
    cluster.wait_in_sync()


def publish_once(cluster: Cluster, stream: str, message_id: str) -> dict[str, Any]:
    return publish_acked(cluster.nats_url, f"{stream}.new", [b"v"], headers={"Nats-Msg-Id": message_id})[0]


@pytest.mark.long
def test_a_message_id_is_stored_once_when_leadership_passes_over_a_broker_whose_clock_is_ahead(
    cluster: Cluster,
) -> None:
    with cluster.client() as client:
        client.create_stream("once", "once.>", replicas=3, min_isr=2, dedupe_window="10m")
        lead(cluster, "once", 1)
        first = publish_once(cluster, "once", "a")
        cluster.set_clock(3, HOUR_S)
        time.sleep(1.5)
        lead(cluster, "once", 3)
        publish_once(cluster, "once", "by the one ahead")
        for number in (1, 3):
            lead(cluster, "once", number)
            again = publish_once(cluster, "once", "a")
            assert again.get("duplicate"), f"a message id is stored twice by broker {number}"
            assert again["seq"] == first["seq"]
        cluster.set_clock(3, 0)


@pytest.mark.long
def test_a_leader_and_a_follower_whose_clock_is_ahead_remove_nothing_early(cluster: Cluster) -> None:
    with cluster.client() as client:
        client.create_stream("orders", "orders.>", replicas=3, min_isr=2, max_age="40m")
        lead(cluster, "orders", 1)
        fill(cluster.nats_url)
        ahead = cluster.broker(3)
        streams = stream_folder(ahead.folder, str(client.stream("orders")["id"]))
        eventually(lambda: len(list(streams.glob("*.arrow"))) >= 3, 30, "segments are sealed")
        cluster.set_clock(3, HOUR_S)
        time.sleep(1.5)
        stays(lambda: (streams / f"{0:020d}.arrow").exists(), True, 10 * ROUND_S)
        lead(cluster, "orders", 3)
        publish_acked(cluster.nats_url, "orders.new", [b"while the clock is ahead"])
        stays(lambda: client.stream("orders")["log_start_offset"], 0, 20 * ROUND_S)
        assert abs(age_s(client, 40)) < 60, "the others agree on another time"
        shown = cluster.broker(1).json("/v1/cluster", timeout_s=4)["brokers"][2]
        assert abs(shown["clock_apart_s"] - HOUR_S) < 30, "the clocks are compared again and again"
        cluster.set_clock(3, 0)
