"""Responses that are damaged on their way: the rows are right in the end, or there is an error; the JVM never ends."""

from __future__ import annotations

import random
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pyspark.sql import SparkSession

from natslog.client import NatslogClient
from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, publish_acked

ROWS = 400
TIMES = 60
_HOP_BY_HOP = ("transfer-encoding", "content-length", "connection", "date", "server")

Damage = Callable[[bytes], bytes]


def value(at: int) -> bytes:
    """Of a size at which brokers send batches as they are stored: they join small ones."""
    return b"value %d " % at + b"x" * 2000


@contextmanager
def relay(url: str, damage: Damage, *, always: bool) -> Iterator[str]:
    """A server that passes requests on to the broker, and damages every other response with messages, or all."""
    count = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Quiet."""

        def _pass_on(self) -> None:
            nonlocal count
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))) or None
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")
            }
            request = urllib.request.Request(url + self.path, body, headers, method=self.command)
            try:
                answer = urllib.request.urlopen(request)
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                data, status = answer.read(), answer.status
                fields = [(name, value) for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP]
            if "json" in answer.headers.get("Content-Type", ""):  # tasks read from where splits say
                data = data.replace(url.encode(), f"http://127.0.0.1:{server.server_port}".encode())
            if "/messages" in self.path and status == 200:
                count += 1
                data = damage(data) if always or count % 2 else data
            self.send_response(status)
            for name, value in fields:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _pass_on

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def flipped(data: bytes, seed: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(seed.choice((1, 1, 1, 4, 40))):
        changed[seed.randrange(len(changed))] ^= 1 << seed.randrange(8)
    return bytes(changed)


def cut(data: bytes, seed: random.Random) -> bytes:
    return data[: seed.randrange(len(data))]


def doubled(data: bytes, seed: random.Random) -> bytes:
    at = seed.randrange(len(data))
    return data[:at] + data[at - min(at, 200) :]


@pytest.fixture
def filled(shared: tuple[NatsServer, BrokerProcess], client: NatslogClient, name: str) -> str:
    client.create_stream(name, f"{name}.>")
    for start in range(0, ROWS, 50):
        values = [value(at) for at in range(start, start + 50)]
        publish_acked(shared[0].url, f"{name}.é", values, headers={"number": str(start)} if start % 100 else None)
    return name


@pytest.mark.parametrize("damage", [flipped, cut, doubled])
@pytest.mark.parametrize("options", [{}, {"subjectFilter": "*.é"}], ids=["stored", "filtered"])
def test_damage_is_found_and_the_rows_are_requested_again(
    spark: SparkSession, broker: BrokerProcess, filled: str, damage: Callable[..., bytes], options: dict[str, str]
) -> None:
    """A filtered response has no CRC: a changed value of it cannot be found."""
    seed = random.Random(7)
    damaged: list[bytes] = []

    def damaged_once(data: bytes) -> bytes:
        damaged.append(data)
        return damage(data, seed)

    with relay(broker.url, damaged_once, always=False) as url:
        for _ in range(TIMES):
            read = spark.read.format("natslog").options(servers=url, stream=filled, includeHeaders="true", **options)
            rows = read.option("retryInterval", "1ms").load().collect()
            assert len(rows) == ROWS
            assert [row.offset for row in rows] == list(range(ROWS))
            assert {row.stream for row in rows} == {filled}
            if not options:
                assert [bytes(row.value) for row in rows] == [value(at) for at in range(ROWS)]
                assert [row.headers is None for row in rows] == [at // 50 % 2 == 0 for at in range(ROWS)]
    assert len(damaged) >= TIMES / 2


def test_response_that_is_damaged_every_time_is_an_error(
    spark: SparkSession, broker: BrokerProcess, filled: str
) -> None:
    def last_byte_of_a_value(data: bytes) -> bytes:
        at = data.rindex(b"value 399")
        return data[:at] + b"w" + data[at + 1 :]

    with relay(broker.url, last_byte_of_a_value, always=True) as url:
        read = spark.read.format("natslog").options(servers=url, stream=filled, retryInterval="1ms").load()
        with pytest.raises(Exception, match="has a wrong CRC32C"):
            read.collect()
