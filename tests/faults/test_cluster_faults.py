"""Faults of a real cluster under load, one of each kind; `python -m tests.chaos` mixes them at random for hours.

Every test publishes all the time, breaks something, heals it, waits until all replicas are in sync, and lets the same
checkers speak: nothing acked is lost on any replica, each id is stored once, in order, all replicas are equal, what was
read stays, writes went on within 10 s.
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from natslog.client import NatslogClient
from natslog.client.publisher import Publisher, Rows
from natslog.nats_server import free_port
from tests.chaos import damage
from tests.chaos.checkers import judge, served_copy
from tests.chaos.history import FaultEvent, History
from tests.chaos.network import NATS, missing_for_network
from tests.chaos.recorders import BatchPublisher, Probe, Reader
from tests.cluster_harness import Cluster, ClusterBroker, running_cluster
from tests.harness import eventually

RESUME_WITHIN_S = 10.0
SYNC_WITHIN_S = 40.0
SETTINGS = {"segment_bytes": "64KiB", "retention_interval": "1s"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three brokers on loopback."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), settings=SETTINGS) as cluster:
        yield cluster


@pytest.fixture
def cluster(plain: Cluster) -> Cluster:
    """All up and in sync, whatever the last test did."""
    for broker in plain.brokers:
        if not broker.is_up:
            broker.kill()
            broker.spawn()
    plain.wait_ready()
    plain.wait_in_sync()
    return plain


class Load:
    """Publishers, a probe and a reader on a stream of its own."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.history = cluster, History()
        self.stream = f"orders-{secrets.token_hex(3)}"
        with cluster.client() as client:
            client.create_stream(self.stream, f"{self.stream}.>", replicas=3, min_isr=2, dedupe_window="10m")
        url, run = cluster.nats_url, secrets.token_hex(4)
        self.publishers = [BatchPublisher(self.history, url, run, self.stream, ack_timeout_s=30.0) for _ in range(2)]
        self.probe = Probe(self.history, url, self.stream)
        self.recorders = [*self.publishers, self.probe, Reader(self.history, cluster, self.stream, seed=1)]
        for recorder in self.recorders:
            recorder.start()
        self.wait_for_acks(300)

    def wait_for_acks(self, count: int) -> None:
        goal = self.history.acked + count
        eventually(lambda: self.history.acked >= goal, 30, f"{count} more acked messages")

    @contextmanager
    def fault(self, kind: str, *, keeps_majority: bool = True) -> Iterator[FaultEvent]:
        """Broken within; on leaving it is whole again, and the cluster must come back by itself."""
        event = FaultEvent(kind, self.stream, time.monotonic(), keeps_majority)
        self.history.faults.append(event)
        yield event
        event.healed_s = event.healed_s or time.monotonic()
        self.cluster.wait_ready()
        self.cluster.wait_in_sync(SYNC_WITHIN_S)
        event.in_sync_s = time.monotonic()

    def wait_until_resumed(self) -> None:
        """Acks of messages that were sent after now."""
        sent, one = len(self.probe.published.sent_s), self.probe.published
        within_s = RESUME_WITHIN_S + 5
        eventually(lambda: any(acked is not None for acked in one.acked_s[sent:]), within_s, "writes resume")

    def broken_promises(self) -> list[str]:
        """Ends the load and judges what every replica serves by itself, and how long writes took to go on."""
        self.wait_for_acks(100)
        self.stop()
        copies = [served_copy(broker, self.stream) for broker in self.cluster.brokers]
        sizes = [copy.rows.num_rows for copy in copies]
        assert max(sizes) >= self.history.acked > 0, "at least what was acked is there"
        found = judge(self.history, copies, RESUME_WITHIN_S, SYNC_WITHIN_S)
        return [f"{one.promise}: {one.text}" for one in found]

    def stop(self) -> None:
        for recorder in self.recorders:
            recorder.stopping.set()
        for recorder in self.recorders:
            recorder.finish()
            assert not recorder.is_alive(), f"{recorder.name} ends"
        self.cluster.wait_replicated(self.stream)

    def leader(self) -> ClusterBroker:
        return eventually(lambda: self.cluster.leader_of(self.stream), 30, "a leader")

    def follower(self) -> ClusterBroker:
        leader = self.leader()
        return next(broker for broker in self.cluster.brokers if broker is not leader)


@contextmanager
def under_load(cluster: Cluster) -> Iterator[Load]:
    """Publishers, a probe and a reader work while the test breaks things, until it asks for `broken_promises`."""
    load = Load(cluster)
    try:
        yield load
    finally:
        for recorder in load.recorders:
            recorder.stopping.set()
        if cluster.network is None and all(broker.is_up for broker in cluster.brokers):
            with cluster.client() as client:
                client.delete_stream(load.stream)


# ---- processes ----


@pytest.mark.long
def test_leader_killed_under_load_loses_nothing_and_writes_resume(cluster: Cluster) -> None:
    with under_load(cluster) as load:
        leader = load.leader()
        with load.fault("leader killed"):
            leader.kill()
            load.wait_until_resumed()
            leader.spawn()
        assert load.broken_promises() == []


@pytest.mark.long
def test_stream_leader_and_metadata_leader_killed_loses_nothing(cluster: Cluster) -> None:
    with under_load(cluster) as load:
        leader, other = load.leader(), load.follower()
        cluster.operate("POST", "/v1/cluster/transfer", {"metadata": True, "to": other.number})
        eventually(lambda: cluster.metadata_leader() is other, 30, "the metadata leadership moves")
        with load.fault("both leaders killed", keeps_majority=False) as event:
            leader.kill()
            other.kill()
            time.sleep(0.5)
            leader.spawn()
            other.spawn()
            cluster.wait_alive()
            event.healed_s = time.monotonic()
            load.wait_until_resumed()
        assert load.broken_promises() == []


@pytest.mark.long
def test_follower_killed_is_back_in_sync_by_itself(cluster: Cluster) -> None:
    with under_load(cluster) as load:
        follower = load.follower()
        with load.fault("follower killed"):
            follower.kill()
            load.wait_until_resumed()
            follower.spawn()
        assert load.broken_promises() == []


@pytest.mark.long
def test_leader_paused_until_it_is_a_zombie_changes_nothing_when_it_wakes(cluster: Cluster) -> None:
    with under_load(cluster) as load:
        leader = load.leader()
        with load.fault("leader paused"):
            leader.pause()
            eventually(lambda: load.leader() is not leader, 30, "another leads")
            load.wait_until_resumed()
            leader.resume()
        assert load.broken_promises() == []


@pytest.mark.long
def test_all_killed_at_once_loses_nothing(cluster: Cluster) -> None:
    with under_load(cluster) as load:
        with load.fault("all killed", keeps_majority=False) as event:
            for broker in cluster.brokers:
                broker.kill()
            for broker in cluster.brokers:
                broker.spawn()
            cluster.wait_alive()
            event.healed_s = time.monotonic()
            load.wait_until_resumed()
        assert load.broken_promises() == []


@pytest.mark.long
def test_all_killed_at_once_and_the_leader_gone_for_longer_the_others_go_on(cluster: Cluster) -> None:
    """None of the two is known to hold everything before both have said where their logs end."""
    with under_load(cluster) as load:
        leader = load.leader()
        others = [broker for broker in cluster.brokers if broker is not leader]
        with load.fault("all killed, two come back", keeps_majority=False) as event:
            for broker in cluster.brokers:
                broker.kill()
            for broker in others:
                broker.spawn()
            for broker in others:
                eventually(lambda broker=broker: broker.ask("GET", "/healthz") is not None, 60, "it answers")
            event.healed_s = time.monotonic()
            load.wait_until_resumed()
            leader.spawn()
        assert load.broken_promises() == []


@pytest.mark.long
def test_rolling_restart_shows_a_publisher_no_error(cluster: Cluster) -> None:
    with under_load(cluster) as load:
        for broker in cluster.brokers:
            with load.fault(f"restart of broker {broker.number}"):
                broker.terminate()
                broker.spawn()
        assert [publisher.errors for publisher in load.publishers] == [[], []]
        assert load.broken_promises() == []


@pytest.mark.long
def test_removal_that_would_leave_no_majority_is_refused_and_changes_nothing(cluster: Cluster) -> None:
    with under_load(cluster) as load:
        lost = load.follower()
        mistaken = next(one for one in cluster.brokers if one not in (lost, load.leader()))
        with load.fault("one lost, another one named"):
            lost.kill()  # a moment ago: its session is alive yet
            leader = eventually(cluster.metadata_leader, 30, "a metadata leader")
            answer = leader.ask("DELETE", f"/v1/cluster/brokers/{mistaken.number}?force=true", timeout_s=10)
            assert answer is not None
            assert (answer.status, answer.json()["error"]["down"]) == (400, [lost.number])
            load.wait_until_resumed()
            cluster.replace(lost)
        assert load.broken_promises() == []


@pytest.mark.long
def test_cluster_whose_brokers_have_all_moved_finds_itself_by_its_seeds(tmp_path: Path) -> None:
    with running_cluster(tmp_path, settings=SETTINGS) as cluster:
        with cluster.client() as client:
            client.create_stream("orders", "orders", replicas=3)
        for broker in cluster.brokers:
            broker.kill()
        ports = [free_port() for _ in cluster.brokers]
        seeds = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        for broker, port in zip(cluster.brokers, ports, strict=True):
            broker.http_port, broker.url = port, f"http://127.0.0.1:{port}"
            broker.settings["seeds"] = seeds
            broker.spawn()
        cluster.wait_ready(40)
        cluster.wait_in_sync()
        state = cluster.state()
        assert state is not None
        assert sorted(one["url"] for one in state["brokers"]) == sorted(broker.url for broker in cluster.brokers)


# ---- damage ----


@pytest.mark.parametrize("kind", [pytest.param("sealed", marks=pytest.mark.long), "active"])
def test_bit_flip_in_a_segment_is_mended_by_itself(cluster: Cluster, kind: str) -> None:
    with under_load(cluster) as load:
        stream_id = cluster.stream(load.stream)["id"]  # type: ignore[index]
        follower = load.follower()
        eventually(lambda: damage.files_of_kind(follower, stream_id, "sealed"), 30, "a sealed segment")
        with load.fault(f"bit flip: {kind}"):
            follower.kill()
            what = damage.flip_bit(damage.files_of_kind(follower, stream_id, kind)[0], random.Random(1))
            follower.spawn()
            cluster.wait_ready()
            with NatslogClient(follower.url) as client:  # right or from elsewhere, never wrong
                values = [value for batch in client.read(load.stream) for value in batch.column("value").to_pylist()]
            stored = served_copy(load.leader(), load.stream).values()
            assert values == stored[: len(values)], what
        assert load.broken_promises() == []


def test_replica_that_cannot_read_the_message_ids_it_holds_does_not_lead(cluster: Cluster) -> None:
    """It would store a retry of what it cannot read a second time. The damage is found by no reader before."""
    name = f"ids-{secrets.token_hex(3)}"
    with cluster.client() as client:
        stream_id = client.create_stream(name, name, replicas=3, dedupe_window="10m")["id"]
        ids = pa.array([f"id{at}" for at in range(3000)])
        rows = Rows(pa.array([name] * 3000), pa.array([b"x" * 100] * 3000), ids=ids)
        with Publisher(cluster.nats.url) as publisher:
            for part in rows.parts(200, 10**9):  # commits, of which several make a segment
                publisher.publish(part, "stored")
            leader = cluster.brokers[client.stream(name)["leader"] - 1]
            follower = next(one for one in cluster.brokers if one is not leader)
            eventually(lambda: damage.files_of_kind(follower, stream_id, "sealed"), 30, "a sealed segment")
            sealed = damage.files_of_kind(follower, stream_id, "sealed")[0]
            content = bytearray(sealed.read_bytes())
            content[len(content) // 2] ^= 1
            sealed.write_bytes(bytes(content))
            client.transfer_stream(name, follower.number)
            publisher.publish(rows, "stored")
        cluster.wait_in_sync(SYNC_WITHIN_S)
        assert client.position(name)["high_watermark"] == 3000
        client.delete_stream(name)


@pytest.mark.long
def test_damaged_raft_log_refuses_to_start_and_the_broker_is_replaced(cluster: Cluster) -> None:
    with under_load(cluster) as load:
        follower = load.follower()
        with load.fault("raft log damaged"):
            follower.terminate()
            log = damage.files_of_kind(follower, "", "raft-log")[0]
            content = bytearray(log.read_bytes())
            content[damage.used_bytes(log) // 2] ^= 1
            log.write_bytes(content)
            has_started, said = damage.starts(follower)
            assert not has_started
            assert "natslog cluster remove" in said
            cluster.replace(follower)
        assert load.broken_promises() == []


# ---- hosts and disks ----


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Cluster]:
    if (lacking := missing_for_network()) is not None:
        pytest.skip(lacking)
    with running_cluster(tmp_path, network=True, settings=SETTINGS) as cluster:
        yield cluster


def test_leader_cut_off_from_the_others_loses_nothing(hosts: Cluster) -> None:
    network = hosts.network
    assert network is not None, "these have hosts"
    with under_load(hosts) as load:
        leader = load.leader()
        others = [broker.number for broker in hosts.brokers if broker is not leader]
        with load.fault("leader cut off"):
            network.separate(leader.number, others)
            load.wait_until_resumed()
            eventually(lambda: load.leader() is not leader, 30, "another leads")
            network.heal()
        assert load.broken_promises() == []


@pytest.mark.long
def test_leader_cut_off_from_nats_hands_over_until_it_hears_nats_again(hosts: Cluster) -> None:
    network = hosts.network
    assert network is not None, "these have hosts"
    with under_load(hosts) as load:
        leader, other = load.leader(), load.follower()
        hosts.operate("POST", "/v1/cluster/transfer", {"metadata": True, "to": other.number})
        eventually(lambda: hosts.metadata_leader() is other, 30, "the metadata leadership moves")
        with load.fault("leader cut off from NATS"):
            network.cut(NATS, leader.number)
            network.cut(leader.number, NATS)
            eventually(lambda: load.leader() is not leader, RESUME_WITHIN_S, "another leads", is_promise=True)
            load.wait_until_resumed()
            assert leader.ask("GET", "/readyz").status == 503, "it says that it hears no NATS"  # type: ignore[union-attr]
            network.heal()
        eventually(lambda: load.leader() is leader, 30, "it leads again")
        assert load.broken_promises() == []


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="a loop device needs root")
def test_leader_of_streams_and_metadata_whose_disk_hangs_is_succeeded(tmp_path: Path) -> None:
    with running_cluster(tmp_path, disks=True, settings=SETTINGS) as cluster, under_load(cluster) as load:
        leader = load.leader()
        cluster.operate("POST", "/v1/cluster/transfer", {"metadata": True, "to": leader.number})
        eventually(lambda: cluster.metadata_leader() is leader, 30, "the metadata leadership moves")
        assert leader.disk is not None, "it has one"
        with load.fault("disk hangs"):
            leader.disk.freeze()
            load.wait_until_resumed()
            leader.disk.thaw()
        assert load.broken_promises() == []


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="a loop device needs root")
def test_power_lost_everywhere_at_once_loses_nothing(tmp_path: Path) -> None:
    with running_cluster(tmp_path, disks=True, settings=SETTINGS) as cluster, under_load(cluster) as load:
        for _ in range(2):
            with load.fault("power lost everywhere", keeps_majority=False) as event:
                cluster.lose_power(cluster.brokers)
                for broker in cluster.brokers:
                    broker.spawn()
                cluster.wait_alive()
                event.healed_s = time.monotonic()
                load.wait_until_resumed()
        assert load.broken_promises() == []
