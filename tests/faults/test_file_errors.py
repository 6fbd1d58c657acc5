"""Every place at which a broker uses a file, each with the errors that it may get there: the broker stays up, says why
it refuses, and goes on when the error is gone. What was acked is there in the end.

The places are those that a broker comes by under this load; they are not written down here, so that new ones count.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nats
import nats.errors
import nats.js.errors
import pyarrow as pa
import pytest
from nats.js.api import ConsumerConfig, RetentionPolicy, StreamConfig

from natslog.client import ClientOptions, NatslogClient
from natslog.client.appending import PartUploader
from natslog.errors import NatslogError
from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, all_values, eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

WRITES = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
OPENS = (errno.EMFILE, errno.EACCES, errno.EIO)
ERRORS = {
    **dict.fromkeys(("open", "scandir", "listdir"), OPENS),
    **dict.fromkeys(("read", "pread", "preadv", "stat", "statvfs"), (errno.EIO,)),
    **dict.fromkeys(("mkdir", "rename", "replace", "link"), (errno.ENOSPC, errno.EACCES, errno.EIO)),
    **dict.fromkeys(("unlink", "remove", "rmdir"), (errno.EACCES, errno.EIO)),
}
FINAL = ("write", "pwrite", "pwritev", "fsync", "fdatasync", "ftruncate")
"""What the kernel has kept of a write that failed is not known: the log is recovered by a new start of the broker."""
FAILS_FOR_S = 0.4
RECORDED_FOR_S = 20.0
BY_DESIGN = "natslog.node.metadata.raft_"
"""A broker whose disk does not store what it has to promise to other brokers stops, and says so: only a new start shows
what is stored. It waits for file descriptors, and has a reserve of space.
"""
SETTINGS = {"segment_bytes": "64KiB", "retention_interval": "300ms", "scrub_interval": "2s"}


class Load:
    """Threads that use a broker in every way; what fails is tried again."""

    def __init__(self, broker: BrokerProcess, nats_url: str) -> None:
        self.broker, self.nats_url = broker, nats_url
        self.acked: set[bytes] = set()
        self.stopping = threading.Event()
        self.number = 0
        works = (self.publish, self.consume, self.read, self.remove, self.manage, self.append)
        self.threads = [threading.Thread(target=self._go_on, args=(work,)) for work in works]
        self.bugs: list[BaseException] = []

    def _go_on(self, work: Callable[[], None]) -> None:
        while not self.stopping.is_set():
            try:
                work()
            except (NatslogError, OSError, nats.errors.Error, nats.js.errors.Error, TimeoutError):
                self.stopping.wait(0.1)
            except BaseException as error:
                self.bugs.append(error)
                raise

    def client(self) -> NatslogClient:
        return NatslogClient(self.broker.url, ClientOptions(retries=0, timeout_s=3))

    def publish(self) -> None:
        asyncio.run(self._publish())

    async def _publish(self) -> None:
        connection = await nats.connect(self.nats_url, max_reconnect_attempts=0)
        try:
            while not self.stopping.is_set():
                value = b"%08d" % self.number + b"x" * 300
                self.number += 1
                await connection.publish(f"newest.{self.number % 10}", value)
                await connection.publish("aged.x", value, headers={"Nats-TTL": "1s"})
                headers = {"Nats-Msg-Id": value[:8].decode()}
                try:
                    answer = await connection.request("orders.x", value, headers=headers, timeout=1)
                except (TimeoutError, nats.errors.NoRespondersError):
                    continue
                if b'"error"' not in answer.data:
                    self.acked.add(value)
                await asyncio.sleep(0.003)
        finally:
            await connection.close()

    def consume(self) -> None:
        asyncio.run(self._consume())

    async def _consume(self) -> None:
        connection = await nats.connect(self.nats_url, max_reconnect_attempts=0)
        try:
            js = connection.jetstream(timeout=2)
            await js.add_stream(StreamConfig(name="JOBS", subjects=["jobs.>"], retention=RetentionPolicy.WORK_QUEUE))
            await js.add_consumer("JOBS", ConsumerConfig(durable_name="worker", ack_wait=2))
            pulled = await js.pull_subscribe_bind(consumer="worker", stream="JOBS")
            while not self.stopping.is_set():
                await js.publish("jobs.x", b"x" * 100, timeout=2)
                for message in await pulled.fetch(1, timeout=1):
                    await message.ack_sync(timeout=2)
                await js.stream_info("JOBS")
        finally:
            await connection.close()

    def read(self) -> None:
        with self.client() as client:
            client.fetch("orders", client.position("orders")["log_start_offset"], max_bytes=100_000)
            client.fetch("newest", client.position("newest")["log_start_offset"], columns=["value"])
            client.offset_at("orders", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 5)))
            list(client.subjects("newest"))
            client.search_page("orders", text="00")
            client.latest_as_of("newest")
            client.splits("orders", max_bytes=10_000)
            client.lag("orders", "earliest")
            client.segments("orders")
            client.overview()
            client.history("orders")
            client.stream("aged")

    def remove(self) -> None:
        with self.client() as client:
            position = client.position("orders")
            client.delete_message("aged", client.position("aged")["high_watermark"] - 1)
            client.erase("newest", subject="newest.3")
            client.purge("newest", subject="newest.4", keep=1)
            client.set_cursor("someone", "orders", position["high_watermark"])
            client.lag("orders", cursor="someone")
            client.scrub("orders", begin=True)
        self.stopping.wait(0.3)

    def manage(self) -> None:
        with self.client() as client:
            client.create_stream("other", "other.>", compression="zstd")
            client.edit_stream("other", max_messages=1000)
            client.roll("newest")
            client.delete_stream("other")
        self.stopping.wait(0.3)

    def append(self) -> None:
        with self.client() as client:
            batch = client.last_append("appended", "query").batch
            uploader = PartUploader(client, "appended", "query", (batch if batch is not None else -1) + 1)
            uploader.add(pa.record_batch({"value": pa.array([b"x" * 1000] * 200, pa.binary())}))
            client.commit_append("appended", "query", (batch if batch is not None else -1) + 1, uploader.finish())
        self.stopping.wait(0.2)

    def __enter__(self) -> Load:
        with self.client() as client:
            client.create_stream("orders", "orders.>")
            client.create_stream("newest", "newest.>", max_messages_per_subject=3)
            client.create_stream("aged", "aged.>", allow_ttl=True, max_age="3s", dedupe_window="1s")
            client.create_stream("appended", "appended.>", max_messages=2000)
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(60)


@contextmanager
def loaded(folder: Path) -> Iterator[tuple[Load, Path]]:
    faults = folder / "faults"
    faults.mkdir()
    server = NatsServer(0, folder / "nats.log").start()
    broker = BrokerProcess(folder / "broker", server.url, nats_leaf_url=server.leaf_url, **SETTINGS)
    broker.module, broker.environment = "tests.faulty_files", {"NATSLOG_FAULTS": str(faults)}
    try:
        with Load(broker.start(), server.url) as load:
            yield load, faults
    finally:
        broker.kill()
        server.stop()


def places_of(faults: Path) -> list[str]:
    return sorted(set((faults / "places").read_text().splitlines()))


def errors_of(place: str) -> tuple[int, ...]:
    return ERRORS.get(place.split()[0], WRITES)


@pytest.mark.parametrize("part", range(3))
def test_an_error_of_any_file_operation_stops_no_broker(tmp_path: Path, part: int) -> None:
    with loaded(tmp_path) as (load, faults):
        broker = load.broker
        time.sleep(RECORDED_FOR_S)
        places = places_of(faults)
        assert len(places) > 100, places
        problems = []
        for place in places:
            for number in errors_of(place)[part : part + 1]:
                if BY_DESIGN not in place or number == errno.EMFILE:
                    problems += fails_and_goes_on(load, faults, place, number)
        assert not problems, "\n\n".join(problems)
        assert not load.bugs
        load.end()
        stored = set(all_values(broker.client(), "orders"))
        assert load.acked <= stored, f"{len(load.acked - stored)} acked messages are lost"
        assert "Traceback" not in broker.output()


def fails_and_goes_on(load: Load, faults: Path, place: str, number: int) -> list[str]:
    """What is wrong afterwards."""
    broker, what = load.broker, f"{place} {errno.errorcode[number]}"
    said_before = len(broker.output())
    (faults / "fail.tmp").write_text(f"{place} {number}")
    (faults / "fail.tmp").rename(faults / "fail")
    time.sleep(FAILS_FOR_S)
    (faults / "fail").unlink()
    found = []

    def goes_on() -> bool:
        acked = len(load.acked)
        time.sleep(0.1)
        return len(load.acked) > acked and broker.ready()

    try:
        if broker._process is None or broker._process.poll() is not None:
            raise AssertionError("the broker ended")
        eventually(goes_on, 30, "it goes on")
    except AssertionError as error:
        said = "".join(line for line in broker.output()[said_before:].splitlines(True) if "natslog.audit" not in line)
        is_final = place.split()[0] in FINAL and "until the broker is restarted" in said
        if not is_final:
            found.append(f"{what}: {error}\n{said[-3000:]}")
        broker.kill()
        broker.start()
    if "Traceback" in (said := broker.output()[said_before:]):
        found.append(f"{what}: a traceback\n{said[-2500:]}")
    return found
