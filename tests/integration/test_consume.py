"""Consumers against real brokers: at least once and in order, whatever is killed meanwhile."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from natslog.client import ClientOptions, ConsumedBatch, Consumer, NatslogClient, confirming
from natslog.errors import CursorNotFound, DataLoss, OffsetOutOfRange, StreamNotFound, StreamRecreated
from tests.cluster_harness import running_cluster
from tests.harness import BrokerProcess, eventually, natslog, publish_acked, running


class Reading:
    """Consumes in a thread of its own until it has all of `count` messages."""

    def __init__(self, consumer: Consumer, count: int) -> None:
        self.values: list[bytes] = []
        self._consumer, self._count = consumer, count
        self._pool = ThreadPoolExecutor(1)
        self._done = self._pool.submit(self._run)

    def _run(self) -> None:
        with self._consumer as consumer:
            for batch in consumer:
                self.values += values_of(batch)
                if len(self.values) >= self._count:
                    return

    def wait(self, within_s: float = 60.0) -> list[bytes]:
        try:
            self._done.result(within_s)
        finally:
            self._consumer.close()
            self._pool.shutdown()
        return self.values


def values_of(batch: ConsumedBatch) -> list[bytes]:
    assert batch.record_batch["offset"].to_pylist() == list(range(batch.start_offset, batch.next_offset))
    return list(batch.record_batch["value"].to_pylist())


def numbers(start: int, end: int) -> list[bytes]:
    return [b"%d" % at for at in range(start, end)]


@pytest.fixture
def stream(client: NatslogClient, nats_url: str, name: str) -> str:
    client.create_stream(name, f"{name}.>")
    for start in range(0, 100, 20):
        publish_acked(nats_url, f"{name}.{'even' if start % 40 == 0 else 'odd'}", numbers(start, start + 20))
    return name


# ---- one broker ----


@pytest.fixture
def losses_are_confirmed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirming, "PERSISTS_S", 0.2)


@pytest.mark.long
def test_consumer_resumes_and_follows(client: NatslogClient, nats_url: str, stream: str) -> None:
    with client.consume(stream, cursor="billing", max_bytes=1, checkpoint_every=1) as consumer:
        first = next(consumer)
        second = next(consumer)
        assert client.cursor("billing", stream)["offset"] == first.next_offset == second.start_offset > 0
    assert client.cursor("billing", stream)["offset"] == second.next_offset
    reading = Reading(client.consume(stream, cursor="billing"), 130 - second.next_offset)
    eventually(lambda: len(reading.values) == 100 - second.next_offset)
    publish_acked(nats_url, f"{stream}.new", numbers(100, 130))
    assert reading.wait() == numbers(second.next_offset, 130)
    shown = client.cursor("billing", stream)
    assert (shown["offset"], shown["lag"]["rows"]) == (130, 0)


def test_consumer_ends_at_the_end_without_follow(client: NatslogClient, nats_url: str, stream: str) -> None:
    consumer = client.consume(stream, follow=False)
    publish_acked(nats_url, f"{stream}.new", numbers(100, 130))
    assert [value for batch in consumer for value in values_of(batch)] == numbers(0, 100)


def test_filter_and_columns_are_applied_at_the_broker(client: NatslogClient, stream: str) -> None:
    consumer = client.consume(stream, cursor="odd", follow=False, subject=f"{stream}.odd", columns=["value"])
    batches = list(consumer)
    assert {tuple(batch.record_batch.schema.names) for batch in batches} == {("value",)}
    values = [value for batch in batches for value in batch.record_batch["value"].to_pylist()]
    assert values == numbers(20, 40) + numbers(60, 80)
    assert client.cursor("odd", stream)["offset"] == 100, "also behind messages that do not match"


def test_start_at_a_time(client: NatslogClient, stream: str) -> None:
    last = next(client.read(stream, 99, 100))["timestamp"][0].as_py()
    assert isinstance(last, datetime)
    offset = client.offset_at(stream, last.isoformat())[0]
    assert 0 < offset < 100
    assert client.consume(stream, start=last).position == offset
    assert client.consume(stream, start=last.isoformat()).position == offset


def test_latest_means_when_the_consumer_was_made(client: NatslogClient, nats_url: str, stream: str) -> None:
    client.consume(stream, cursor="late", start="latest")  # and it ends without a checkpoint
    publish_acked(nats_url, f"{stream}.new", numbers(100, 105))
    consumer = client.consume(stream, cursor="late", start="latest", follow=False)
    assert [value for batch in consumer for value in values_of(batch)] == numbers(100, 105)


def test_close_ends_a_long_poll(client: NatslogClient, stream: str) -> None:
    consumer = client.consume(stream, cursor="closed", start="latest", wait_ms=60_000)
    closing = threading.Timer(0.3, consumer.close)
    started = time.monotonic()
    closing.start()
    assert list(consumer) == []
    assert time.monotonic() - started < 10
    closing.join()


def test_two_consumers_of_one_cursor_are_logged(
    client: NatslogClient, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = (client.consume(stream, cursor="both", max_bytes=1, checkpoint="manual") for _ in range(2))
    next(one)
    one.checkpoint()
    assert "another program" not in caplog.text
    next(other), next(other)
    with caplog.at_level(logging.WARNING, "natslog.client"):
        other.checkpoint()
    assert f"cursor both on stream {stream} was set to {one.position} by another program" in caplog.text
    assert client.cursor("both", stream)["offset"] == other.position


@pytest.mark.usefixtures("losses_are_confirmed_soon")
def test_cursor_that_is_missing_or_wrong(client: NatslogClient, stream: str) -> None:
    with pytest.raises(StreamNotFound):
        client.consume("nosuch", cursor="billing")
    client.set_cursor("ahead", stream, 175)
    for follow in (True, False):
        with pytest.raises(OffsetOutOfRange, match="has offsets 0 to 99: offset 175 of consumer 'ahead' is beyond"):
            next(client.consume(stream, cursor="ahead", follow=follow))
    with pytest.raises(OffsetOutOfRange, match="has offsets 0 to 99"):
        next(client.consume(stream, cursor="never", start=175))
    with pytest.raises(CursorNotFound):
        client.cursor("never", stream)


@pytest.mark.usefixtures("losses_are_confirmed_soon")
def test_retention_that_overtook_the_cursor(
    client: NatslogClient, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.set_cursor("slow", stream, 10)
    client.purge(stream, 50)
    with pytest.raises(DataLoss, match="offsets 10 to 49 are lost"):
        next(client.consume(stream, cursor="slow"))
    assert client.cursor("slow", stream)["offset"] == 10
    consumer = client.consume(stream, cursor="slow", on_data_loss="skip", follow=False)
    assert [value for batch in consumer for value in values_of(batch)] == numbers(50, 100)
    assert "offsets 10 to 49 are lost" in caplog.text


@pytest.mark.usefixtures("losses_are_confirmed_soon")
@pytest.mark.parametrize("on_data_loss", ["fail", "skip"])
def test_stream_that_is_created_again(client: NatslogClient, nats_url: str, stream: str, on_data_loss: str) -> None:
    consumer = client.consume(stream, cursor="old", wait_ms=200, on_data_loss=on_data_loss)  # type: ignore[arg-type]
    while consumer.position < 100:
        next(consumer)
    client.delete_stream(stream)
    client.create_stream(stream, f"{stream}.>")
    publish_acked(nats_url, f"{stream}.new", numbers(0, 150))
    if on_data_loss == "fail":
        with pytest.raises(StreamRecreated, match="from offset 100 on are lost"):
            next(consumer)
        with pytest.raises(CursorNotFound):
            client.cursor("old", stream)
        return
    with consumer:
        values: list[bytes] = []
        while consumer.position != 150:
            values += values_of(next(consumer))
    assert values == numbers(0, 150)
    assert client.cursor("old", stream)["offset"] == 150


# ---- what is killed ----

_PROGRAM = """
import sys, time
from natslog.client import ClientOptions, NatslogClient

url, every = sys.argv[1:]
options = dict(checkpoint_every=int(every), checkpoint_interval_s=None, max_bytes=1)
with NatslogClient(url, ClientOptions(retries=3)).consume("orders", cursor="billing", **options) as consumer:
    for batch in consumer:
        print(" ".join(value.decode() for value in batch.record_batch["value"].to_pylist()), flush=True)
        time.sleep(0.02)  # the work
"""


@contextmanager
def consuming(url: str, every: int) -> Iterator[subprocess.Popen[str]]:
    """A process that consumes, prints a line for each batch, and is killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, url, str(every)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_of(process: subprocess.Popen[str], count: int) -> list[int]:
    assert process.stdout is not None
    return [int(word) for _ in range(count) for word in process.stdout.readline().split()]


def test_consumer_that_is_killed_resumes_without_a_gap(broker: BrokerProcess, nats_url: str) -> None:
    client = broker.client()
    client.create_stream("orders", "orders")
    for start in range(0, 100, 10):
        publish_acked(nats_url, "orders", [b"%d" % at for at in range(start, start + 10)])
    seen: list[int] = []
    for _ in range(2):
        with consuming(broker.url, every=1) as process:
            seen += lines_of(process, 3)
    kept = client.cursor("billing", "orders")["offset"]
    assert 0 < kept <= max(seen) + 1, "nothing is stored that was not printed"
    with consuming(broker.url, every=10**6) as process:
        while not seen or seen[-1] != 99:
            last = lines_of(process, 1)
            seen += last
        process.send_signal(signal.SIGINT)
        assert process.wait(20) != 0
    assert client.cursor("billing", "orders")["offset"] >= last[0] > kept, "what was processed is stored on the way out"
    assert sorted(set(seen)) == list(range(100))
    assert all(later <= earlier + 1 for earlier, later in zip(seen, seen[1:], strict=False)), "no gap at any time"


@pytest.mark.long
def test_consumer_survives_kill_9_of_its_broker(own: Path) -> None:
    with running(own) as (server, broker):
        client = NatslogClient(broker.url, ClientOptions(retries=0))
        client.create_stream("orders", "orders")
        publish_acked(server.url, "orders", numbers(0, 50))
        reading = Reading(client.consume("orders", cursor="billing", max_bytes=1, checkpoint_interval_s=0.1), 150)
        for start in (50, 100):
            eventually(lambda start=start: len(reading.values) == start)
            broker.kill()
            broker.start()
            publish_acked(server.url, "orders", numbers(start, start + 50))
        assert reading.wait() == numbers(0, 150)
        assert client.cursor("billing", "orders")["offset"] == 150


@pytest.mark.long
def test_consumer_follows_the_leader_of_three_brokers(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "own") as cluster:
        client = cluster.client()
        client.create_stream("orders", "orders", replicas=3)
        cluster.wait_in_sync()
        publish_acked(cluster.nats.url, "orders", numbers(0, 100))
        reading = Reading(client.consume("orders", cursor="billing", checkpoint_every=10), 300)
        for start in (100, 200):
            eventually(lambda start=start: len(reading.values) == start)
            former = cluster.leader_of("orders")
            assert former is not None
            former.kill()
            eventually(lambda former=former: cluster.leader_of("orders") not in (None, former), 30.0, "another leader")
            publish_acked(cluster.nats.url, "orders", numbers(start, start + 100))
            eventually(lambda start=start: len(reading.values) == start + 100, 60.0, "the consumer follows")
            former.start()
            cluster.wait_in_sync()
        assert reading.wait() == numbers(0, 300)
        assert client.cursor("billing", "orders")["offset"] == 300


@pytest.mark.long
def test_cat_follows_across_a_restart(own: Path) -> None:
    with running(own) as (server, broker):
        broker.client().create_stream("orders", "orders")
        publish_acked(server.url, "orders", numbers(0, 3))
        command = [sys.executable, "-m", "natslog", "--server", broker.url, "cat", "orders", "--follow", "--count", "6"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as following:
            assert following.stdout is not None
            assert [following.stdout.readline() for _ in range(3)] == [b"0\n", b"1\n", b"2\n"]
            broker.kill()
            broker.start()
            publish_acked(server.url, "orders", numbers(3, 6))
            assert following.stdout.read() == b"3\n4\n5\n"
        beyond = natslog("cat", "orders", "--from", "99", url=broker.url, check=False)
        assert (beyond.returncode, "has offsets 0 to 5" in beyond.stderr) == (1, True)
