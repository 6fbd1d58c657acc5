"""What a client receives and unpacks is bounded, whatever answers it: endless, large, slow, or packed responses."""

from __future__ import annotations

import gzip
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest

from natslog.client import ClientOptions, NatslogClient
from natslog.client.answers import Fetched, RequestedRows, rows_of
from natslog.errors import BrokerUnavailable, CorruptAnswer, NatslogError
from tests.unit.client.test_answers import answer

MIB = 1024 * 1024
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
LIMIT = 4 * MIB
BODIES = {
    "until it is closed": (HEAD + b"\r\n", b"x" * MIB),
    "in chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + b"x" * MIB + b"\r\n"),
    "of a stated length": (HEAD + b"Content-Length: 1000000000000\r\n\r\n", b"x" * MIB),
    "in its headers": (HEAD, b"X-Natslog: " + b"x" * 1000 + b"\r\n"),
}


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does this with each connection; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    try:
                        serve(connection)
                    except OSError:
                        continue  # the client has closed it

        Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def client_of(url: str, timeout_s: float = 30.0) -> NatslogClient:
    return NatslogClient(url, ClientOptions(timeout_s=timeout_s, retries=0))


@pytest.mark.parametrize("kind", BODIES)
def test_an_endless_response_ends_at_what_was_asked_for(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    head, piece = BODIES[kind]
    sent = 0

    def serve(connection: socket.socket) -> None:
        nonlocal sent
        connection.sendall(head)
        while sent < 100 * LIMIT:
            connection.sendall(piece)
            sent += len(piece)

    with listening(serve) as url, client_of(url) as client:
        with pytest.raises(BrokerUnavailable, match="more than 4194304 bytes|more than 100 headers"):
            client._ask("GET", "/v1/streams/orders", most_body_bytes=LIMIT)
    assert sent < 8 * LIMIT, "what is in the buffers of the connection is sent besides"


def test_a_compressed_response_is_not_unpacked() -> None:
    body = gzip.compress(b"[" + b" " * 100 * MIB + b"]")

    def serve(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    with listening(serve) as url, client_of(url) as client, pytest.raises(NatslogError, match="not JSON"):
        client.streams()


def test_a_response_that_drips_ends_after_the_time_limit() -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"Content-Length: 1000000\r\n\r\n")
        for _ in range(600):
            connection.sendall(b"x")
            time.sleep(0.05)

    began_s = time.monotonic()
    with listening(serve) as url, client_of(url, timeout_s=1.0) as client:
        with pytest.raises(BrokerUnavailable, match="1024 bytes per second"):
            client.stream("orders")
    assert time.monotonic() - began_s < 25, "it would have dripped for 30 s"


def exact_answer(values: list[bytes]) -> Any:
    """As of a request with a filter; compressed, which a broker does not do."""
    asked = RequestedRows("orders", 0, len(values), ("value",), is_filtered=True)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, asked.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(pa.record_batch([pa.array(values, pa.binary())], schema=asked.schema))
    response = answer([len(values)], len(values))
    response.data = sink.getvalue().to_pybytes()
    del response.headers["Natslog-Batches"]
    return response, asked


def whole_answer(values: list[bytes]) -> Any:
    return answer([len(values)] * 2, 2 * len(values)), RequestedRows(
        "orders", 0, 2 * len(values), None, is_filtered=False
    )


@pytest.mark.parametrize("made", [exact_answer, whole_answer])
def test_rows_that_unpack_to_more_than_was_asked_for_are_not_unpacked(made: Callable[[list[bytes]], Any]) -> None:
    response, asked = made([b"\0" * 1000] * 5000)
    assert sum(batch.num_rows for batch in rows_of(response, asked).batches) in (5000, 10_000)
    assert len(response.data) < MIB
    before, peak = pa.total_allocated_bytes(), pa.default_memory_pool().max_memory()
    with pytest.raises(CorruptAnswer, match="unpacks to more than 4194304 bytes"):
        rows_of(response, replace(asked, most_bytes=4 * MIB))
    assert pa.total_allocated_bytes() - before < MIB
    assert pa.default_memory_pool().max_memory() == peak


def test_the_parts_of_an_answer_count_together() -> None:
    response, asked = answer([1000] * 10, 10_000), RequestedRows("orders", 0, 10_000, None, is_filtered=False)
    part, rows = rows_of(response, replace(asked, most_bytes=5 * MIB), 1), 0
    with pytest.raises(CorruptAnswer, match="unpacks to more"):
        rows = _rows_of_all(part)
    assert rows == 0


def _rows_of_all(part: Fetched) -> int:
    rows = 0
    while True:
        rows += sum(batch.num_rows for batch in part.batches)
        if part.rest is None:
            return rows
        part = part.rest.decoded(1)
