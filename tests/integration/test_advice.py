"""What a broker that cannot start, or is not let in, tells its operator to do: the advice is followed to the letter."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from natslog.client import NatslogClient
from natslog.nats_server import free_port
from tests.chaos import damage
from tests.cluster_harness import Cluster, ClusterBroker, running_cluster
from tests.harness import all_values, eventually, natslog, publish_acked


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[damage.used_bytes(file) // 2] ^= 1
    file.write_bytes(content)


def damage_raft_log(broker: ClusterBroker) -> str:
    """Returns what the broker says when it is started then."""
    flip_a_byte(damage.files_of_kind(broker, "", "raft-log")[0])
    has_started, said = damage.starts(broker)
    assert not has_started
    return " ".join(said.split())


def give_empty_folder(broker: ClusterBroker) -> None:
    broker.kill()
    shutil.rmtree(broker.folder)
    broker.spawn()


@pytest.mark.long
def test_advice_for_two_damaged_raft_logs_of_three_needs_no_majority(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        with cluster.client() as client:
            client.create_stream("orders", "orders", replicas=3)
            publish_acked(cluster.nats_url, "orders", [b"%d" % at for at in range(20)])
            cluster.wait_replicated("orders")
        for broker in cluster.brokers:
            broker.terminate()
        said = [damage_raft_log(broker) for broker in cluster.brokers[1:]]
        for one in said:
            assert "If a majority of the brokers is still running: natslog cluster remove ID --force" in one
            assert "If no majority is left because several brokers are damaged or lost: stop an intact broker" in one
            assert "natslog cluster recover DIR on its data folder, start it" in one
            assert "If this is the only broker of the cluster: restore its data folder from a copy" in one
        intact = cluster.broker(1)
        natslog("cluster", "recover", "--yes", str(intact.folder))
        intact.start()
        for broker in cluster.brokers[1:]:
            give_empty_folder(broker)
            natslog("cluster", "add", broker.url, url=intact.url)
        eventually(lambda: all(broker.ready() for broker in cluster.brokers), 60, "all brokers are ready")
        with intact.client() as client:
            assert all_values(client, "orders") == [b"%d" % at for at in range(20)]


@pytest.mark.long
def test_broker_that_was_down_follows_a_leader_that_was_added_meanwhile(tmp_path: Path) -> None:
    """Its own membership does not name that leader, and only the leader can tell it."""
    with running_cluster(tmp_path) as cluster:
        third = cluster.broker(3)
        third.terminate()
        fourth = added(cluster, tmp_path / "fourth")
        try:
            with cluster.broker(1).client() as client:
                eventually(lambda: role_of(client, 4) == "voter", 40, "broker 4 votes")
                client.transfer_metadata(4)
                eventually(lambda: client.cluster()["metadata_leader"] == 4, 30, "broker 4 leads the metadata")
            before = len(third.output())
            third.spawn()
            eventually(lambda: third.ready(), 30, "broker 3 has joined under the new leader")
            said = third.output()[before:]
            assert "empty data folder" not in said
            assert {one["id"] for one in third.json("/v1/cluster")["brokers"]} == {1, 2, 3, 4}
        finally:
            fourth.kill()


def added(cluster: Cluster, folder: Path) -> ClusterBroker:
    common = {name: cluster.brokers[0].settings[name] for name in ("seeds", "cluster_secret_file", "log_level")}
    fourth = ClusterBroker(4, folder, cluster.nats_url, "127.0.0.1", free_port(), **common).spawn()
    eventually(lambda: fourth.ask("GET", "/healthz") is not None, 40, "broker 4 answers")
    natslog("cluster", "add", fourth.url, url=cluster.broker(1).url)
    return fourth


def role_of(client: NatslogClient, number: int) -> str | None:
    return {one["id"]: one["role"] for one in client.cluster()["brokers"]}.get(number)
