"""Attacks on the links between brokers, by a process that does not have the cluster's secret."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from natslog.nats_server import end_with_parent, free_port
from tests.cluster_harness import Cluster, ClusterBroker, running_cluster
from tests.harness import eventually, publish_acked, write_secret

RELAY = Path(__file__).with_name("peer_relay.py")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path / "cluster") as cluster:
        yield cluster


def leader_and_follower(cluster: Cluster) -> tuple[ClusterBroker, ClusterBroker]:
    leader = cluster.metadata_leader()
    assert leader is not None
    return leader, next(broker for broker in cluster.brokers if broker is not leader)


def terms(cluster: Cluster) -> list[int]:
    return [broker.json("/v1/cluster", timeout_s=5)["metadata_term"] for broker in cluster.brokers]


@pytest.mark.long
def test_relayed_handshake_gives_an_attacker_no_link(cluster: Cluster, tmp_path: Path) -> None:
    """An HTTP client has the metadata leader dial an attacker, who relays everything to a follower and then sends a
    Raft message of his own with the highest term there is.
    """
    leader, follower = leader_and_follower(cluster)
    port, log = free_port(), tmp_path / "relay.log"
    with open(log, "ab") as out:
        relay = subprocess.Popen(
            [sys.executable, str(RELAY), str(port), follower.url, str(leader.number), str(follower.number)],
            stdout=out,
            stderr=out,
            preexec_fn=end_with_parent,
        )
    try:
        eventually(lambda: "listening" in log.read_text(), what="the relay listens")
        answer = leader.ask("POST", "/v1/cluster/brokers", {"url": f"http://127.0.0.1:{port}"}, timeout_s=15)
        eventually(lambda: "the victim answered" in log.read_text() or "link opened" in log.read_text())
        said = log.read_text()
        assert "dialled" in said, "the leader dials what it is told to: else this proves nothing"
        time.sleep(1)  # for the forged term to spread, where it is taken
        assert max(terms(cluster)) < 1000
        assert "link opened" not in said
        assert answer is not None
        assert answer.status >= 400
        assert "peer_urls" in json.loads(answer.data)["error"]["message"]
    finally:
        relay.kill()
        relay.wait()
    for broker in cluster.brokers:
        broker.kill()
    for broker in cluster.brokers:
        broker.spawn()
    cluster.wait_ready()
    assert max(terms(cluster)) < 1000
    cluster.client().create_stream("after", "after", replicas=3)
    assert publish_acked(cluster.nats.url, "after", [b"on"])[0]["offset"] == 0


def open_websocket(broker: ClusterBroker) -> socket.socket:
    """The beginning of a message of 90 MiB is sent after the upgrade."""
    connection = socket.create_connection(("127.0.0.1", broker.http_port), timeout=30)
    connection.sendall(
        b"GET /internal/link HTTP/1.1\r\nHost: broker\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
    )
    connection.sendall(b"\x82\xff" + (90 * 1024 * 1024).to_bytes(8, "big") + b"\0\0\0\0")
    return connection


def memory_bytes(pid: int) -> int:
    return psutil.Process(pid).memory_info().rss


@pytest.mark.long
def test_unauthenticated_websockets_take_little_memory(cluster: Cluster) -> None:
    broker = cluster.brokers[0]
    before = memory_bytes(broker.pid)
    connections = [open_websocket(broker) for _ in range(12)]
    most = before
    try:
        for _ in range(40):  # 40 MiB on each of them, as far as they take it
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.sendall(bytes(1024 * 1024))
            most = max(most, memory_bytes(broker.pid))
    finally:
        for connection in connections:
            connection.close()
    assert most - before < 32 * 1024 * 1024
    assert broker.ready()


# ---- what an operator does about secrets ----


@pytest.mark.long
def test_secret_is_rotated_while_the_cluster_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    """As docs/OPERATIONS.md says: both secrets on each broker, one after another; then only the new one."""
    cluster.client().create_stream("orders", "orders", replicas=3)
    old = (cluster.folder / "secret").read_text().strip()
    new, offset = secrets.token_hex(32), 0
    for lines in ([new, old], [new]):
        for broker in cluster.brokers:
            path = write_secret(tmp_path / f"secret-{broker.number}", "\n".join(lines) + "\n")
            broker.settings["cluster_secret_file"] = path
            broker.terminate()
            broker.spawn()
            cluster.wait_in_sync()
            assert publish_acked(cluster.nats.url, "orders", [b"on"])[0]["offset"] == offset
            offset += 1
    assert all("another cluster secret" not in broker.output() for broker in cluster.brokers)
    stranger = cluster.brokers[2]
    stranger.settings["cluster_secret_file"] = write_secret(tmp_path / "old-secret", old)
    stranger.terminate()
    stranger.spawn()
    eventually(lambda: "another cluster secret" in stranger.output(), 30, "the old secret is good for nothing")
