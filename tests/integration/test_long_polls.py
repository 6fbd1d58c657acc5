"""Long polls: many readers that wait for the same messages get each of them once, in order, whatever they ask for."""

from __future__ import annotations

import asyncio
import hashlib
import selectors
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from natslog.arrow.ipc import END_OF_STREAM
from natslog.client import NatslogClient
from natslog.errors import OffsetOutOfRange
from tests.harness import BrokerProcess, all_values, eventually, publish_acked, with_nats

TOTAL = 600
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "small": {"max_bytes": 3000},
    "filtered": {"subject": "*.odd"},
    "columns": {"columns": ["offset", "value"]},
}


@pytest.fixture
def stream(client: NatslogClient, name: str) -> str:
    client.create_stream(name, f"{name}.*")
    return name


class Following(threading.Thread):
    """Reads up to `TOTAL` by long polls."""

    def __init__(self, client: NatslogClient, stream: str, start: int, asked: dict[str, Any]) -> None:
        super().__init__()
        self.client, self.stream, self.start_offset, self.asked = client, stream, start, asked
        self.rows: list[tuple[int, bytes]] = []
        self.next_offset = start
        self.start()

    def run(self) -> None:
        while self.next_offset < TOTAL:
            fetched = self.client.fetch(self.stream, self.next_offset, wait_ms=10_000, **self.asked)
            for batch in fetched.batches:
                offsets, values = batch.column("offset").to_pylist(), batch.column("value").to_pylist()
                self.rows += zip(offsets, values, strict=True)
            self.next_offset = fetched.next_offset

    def expected(self, values: list[bytes]) -> list[tuple[int, bytes]]:
        rows = list(enumerate(values))[self.start_offset :]
        return rows[self.start_offset % 2 ^ 1 :: 2] if "subject" in self.asked else rows


def publish(nats_url: str, stream: str) -> list[bytes]:
    """`TOTAL` messages in commits of several sizes, on two subjects in turn. Returns all that was published."""
    values = [b"%d" % at * (at % 40 + 1) for at in range(TOTAL)]

    async def work(connection: Any) -> None:
        at = 0
        while at < TOTAL:
            upto = min(at + (1, 3, 40, 1, 1, 100)[at % 6], TOTAL)
            subjects = [f"{stream}.{'odd' if low % 2 else 'even'}" for low in range(at, upto)]
            asks = [connection.request(to, values[low], timeout=30) for low, to in enumerate(subjects, at)]
            await asyncio.gather(*asks)
            at = upto

    with_nats(nats_url, work)
    return values


@pytest.mark.long
def test_readers_of_all_kinds_get_each_message_once_and_in_order(
    broker: BrokerProcess, nats_url: str, stream: str
) -> None:
    readers = [Following(broker.client(), stream, 0, asked) for asked in KINDS.values() for _ in range(6)]
    values = publish(nats_url, stream)
    readers += [Following(broker.client(), stream, start, {}) for start in (1, TOTAL // 2, TOTAL - 1)]
    for reader in readers:
        reader.join(60)
        assert reader.rows == reader.expected(values), reader.asked
    assert all_values(broker.client(), stream) == values


def test_a_poll_gets_all_that_was_acked_before_it_was_asked(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, stream: str
) -> None:
    """Also while others share their answers."""
    stop = threading.Event()

    def follow() -> None:
        at = 0
        while not stop.is_set():
            at = reader.fetch(stream, at, wait_ms=200).next_offset

    reader, at = broker.client(), 0
    with ThreadPoolExecutor(8) as threads:
        for _ in range(8):
            threads.submit(follow)
        try:
            for _ in range(30):
                acked = publish_acked(nats_url, f"{stream}.x", [b"a", b"b"])[-1]["offset"]
                fetched = client.fetch(stream, at, wait_ms=5000)
                assert fetched.next_offset > acked
                at = fetched.next_offset
        finally:
            stop.set()


def test_a_poll_that_is_behind_does_not_wait_for_those_at_the_end(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, stream: str
) -> None:
    publish_acked(nats_url, f"{stream}.x", [b"a", b"b"])
    with ThreadPoolExecutor(1) as threads:
        at_the_end = threads.submit(client.fetch, stream, 2, wait_ms=20_000)
        for start in (0, 1, 0):
            fetched = broker.client().fetch(stream, start, wait_ms=60_000)
            assert fetched.next_offset == 2
            assert not at_the_end.done(), "nothing has come meanwhile"
        publish_acked(nats_url, f"{stream}.x", [b"c"])
        assert at_the_end.result().next_offset == 3


def ask(broker: BrokerProcess, stream: str, count: int, *headers: str) -> list[socket.socket]:
    """So many connections, each with a long poll from the stream's start."""
    address = urlsplit(broker.url)
    path = f"/v1/streams/{stream}/messages?start=0&wait_ms=60000&max_bytes=8388608"
    request = "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()
    found = []
    for _ in range(count):
        found.append(socket.create_connection((address.hostname, address.port), 10))
        found[-1].sendall(request)
    return found


def answers(connections: list[socket.socket], ending: bytes) -> Counter[tuple[bytes, str]]:
    """Status and digest of the body of each answer, which ends with `ending` unless it is an error."""
    received = {one: bytearray() for one in connections}
    found: Counter[tuple[bytes, str]] = Counter()
    with selectors.DefaultSelector() as waiting:
        for one in connections:
            waiting.register(one, selectors.EVENT_READ)
        while received:
            ready = waiting.select(60)
            assert ready, f"{len(received)} have no whole answer"
            for key, _ in ready:
                one = key.fileobj
                assert isinstance(one, socket.socket)
                part = one.recv(1 << 20)
                received[one] += part
                is_error = received[one][:12] != b"HTTP/1.1 200"
                if not part or is_error or received[one].endswith(ending):
                    waiting.unregister(one)
                    head, _, body = received.pop(one).partition(b"\r\n\r\n")
                    found[bytes(head[9:12]), hashlib.sha256(body).hexdigest()] += 1
    return found


@pytest.mark.long
def test_more_readers_than_may_wait_for_a_slot_get_the_lines_that_they_wait_for(
    broker: BrokerProcess, nats_url: str, stream: str
) -> None:
    """What they wait for is so large that an answer takes a slot, for which at most 1,024 may wait."""
    readers = ask(broker, stream, 1100, "Accept: application/x-ndjson")
    try:
        eventually(lambda: psutil.Process(broker.pid).num_fds() > 1100, what="all of them are connected")
        publish_acked(nats_url, f"{stream}.x", [b"x" * 300_000])
        ((status, _), count), *others = answers(readers, b"}\n").items()
        assert (status, count, others) == (b"200", 1100, [])
    finally:
        for one in readers:
            one.close()


def test_readers_that_leave_take_nothing_from_those_that_stay(
    broker: BrokerProcess, nats_url: str, stream: str
) -> None:
    readers = ask(broker, stream, 100)
    for one in readers[::2]:
        one.close()
    publish_acked(nats_url, f"{stream}.x", [b"first"])
    ((status, _), count), *others = answers(readers[1::2], END_OF_STREAM).items()
    assert (status, count, others) == (b"200", 50, [])
    for one in readers[1::2]:
        one.close()
    assert "Traceback" not in broker.output()


def test_what_was_purged_is_not_sent_from_what_was_made_for_polls(
    broker: BrokerProcess, nats_url: str, stream: str
) -> None:
    """The answer that several polls shared is in memory still."""

    def at_once(start: int) -> list[Any]:
        def ask(_: int) -> Any:
            try:
                return broker.client().fetch(stream, start, wait_ms=10_000)
            except OffsetOutOfRange as error:
                return error

        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(ask, at) for at in range(4)]
            if start == 0 and broker.client().stream(stream)["high_watermark"] == 0:
                publish_acked(nats_url, f"{stream}.odd", [b"%d" % at for at in range(20)])
            return [one.result() for one in asking]

    assert all(found.batches for found in at_once(0))
    broker.client().purge(stream, 10)
    publish_acked(nats_url, f"{stream}.odd", [b"next"])
    assert {type(found) for found in at_once(0)} == {OffsetOutOfRange}
