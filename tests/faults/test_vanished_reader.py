"""A reader whose host vanishes in the middle of an answer: its network failed, and no disk."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest

from natslog.client.publisher import Publisher
from natslog.wire.outgoing_rows import Rows
from tests.chaos.network import NATS, Network, address, missing_for_network
from tests.cluster_harness import running_cluster
from tests.harness import eventually

READER = 250
STREAM = "orders"
ROWS, VALUE_BYTES = 32, 512 * 1024


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


def add_reader(network: Network, broker: int) -> None:
    """A host of its own beside the clients; the broker's kernel gives up on it after some seconds."""
    run("ip", "-n", network.namespace(NATS), "address", "add", f"{address(READER)}/24", "dev", "bridge")
    run(*network.prefix(broker), "sh", "-c", "echo 3 > /proc/sys/net/ipv4/tcp_retries2")


@pytest.mark.timeout(180)
@pytest.mark.long
def test_reader_that_vanishes_is_no_damage_of_the_log(tmp_path: Path) -> None:
    if (lacking := missing_for_network()) is not None:
        pytest.skip(lacking)
    with running_cluster(tmp_path / "own", brokers=1, network=True) as cluster:
        network, broker = cluster.network, cluster.brokers[0]
        assert network is not None, "it has hosts"
        add_reader(network, broker.number)
        with cluster.client() as client:
            client.create_stream(STREAM, STREAM, compression="none")
            with Publisher(cluster.nats_url) as publisher:
                values = pa.array([os.urandom(VALUE_BYTES) for _ in range(ROWS)])
                publisher.publish(Rows(pa.repeat(STREAM, ROWS), values), "stored")
            with socket.create_connection(
                (address(broker.number), broker.http_port), source_address=(address(READER), 0)
            ) as reader:
                question = f"GET /v1/streams/{STREAM}/messages?max_bytes=100000000 HTTP/1.1\r\nHost: x\r\n\r\n"
                reader.sendall(question.encode())
                assert reader.recv(100).startswith(b"HTTP/1.1 200"), "an answer is on its way"
                network.cut(READER, broker.number)
                damaged, log = f'natslog_stream_damaged{{stream="{STREAM}"}}', broker.output

                def has_ended() -> bool:
                    return "was not sent completely" in log() or broker.metrics()[damaged] == 1.0

                eventually(has_ended, 30, "the answer ends")
            assert "timed out" in log(), "the kernel gave up"
            assert broker.metrics()[damaged] == 0.0
            assert "cannot be read" not in log()
            assert sum(batch.num_rows for batch in client.read(STREAM)) == ROWS
