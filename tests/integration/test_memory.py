"""What a broker takes that has nothing to do: memory, as an operator sees it (RSS), and open files."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.harness import BrokerProcess, all_values, eventually, publish_acked, running

IDLE_BYTES = 150_000_000


def resident_bytes(broker: BrokerProcess) -> int:
    return int(psutil.Process(broker.pid).memory_info().rss)


def test_idle_broker_with_one_stream_takes_less_than_150_mb(own: Path) -> None:
    with running(own, retention_interval="200ms") as (nats, broker):
        client = broker.client()
        client.create_stream("orders", "orders")
        eventually(lambda: resident_bytes(broker) < IDLE_BYTES, what="a broker that has just started is small")
        for _ in range(10):
            publish_acked(nats.url, "orders", [b"x"] * 100)
        assert len(all_values(client, "orders")) == 1000
        assert broker.metrics()
        taken = resident_bytes(broker)
        assert taken < IDLE_BYTES, f"{taken / 1e6:.0f} MB once it has done a little of everything"
        mapped = Path(f"/proc/{broker.pid}/maps").read_text()
        assert "numba" not in mapped, "the compiler is not loaded"


def test_stream_keeps_one_file_open(own: Path) -> None:
    with running(own) as (nats, broker), broker.client() as client:
        process = psutil.Process(broker.pid)
        client.create_stream("s0", "s.0")
        before = process.num_fds()
        for at in range(1, 50):
            client.create_stream(f"s{at}", f"s.{at}")
            publish_acked(nats.url, f"s.{at}", [b"x"])
            assert all_values(client, f"s{at}") == [b"x"]
        eventually(lambda: process.num_fds() == before + 49, what="what reading and publishing opened is closed")
