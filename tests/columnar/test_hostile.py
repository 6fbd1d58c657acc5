"""A server that answers as no broker does: the reader states an error, and neither hangs nor ends the JVM."""

from __future__ import annotations

import json
import struct
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

import pyarrow as pa
import pytest
from crc32c import crc32c
from pyspark.sql import DataFrame, SparkSession

from natslog.arrow import ipc
from natslog.arrow.batch_line import proven_header
from natslog.arrow.batch_metadata import BatchMetadata
from natslog.arrow.projection import project, schema_of
from natslog.arrow.schema import MESSAGE_SCHEMA

STREAM, STREAM_ID = "hostile", "ab" * 16
COLUMNS = ("subject", "offset")
ROWS = 3
_SUBJECT_EDGES, _SUBJECT_BYTES = 1, 2  # buffers
_ENOUGH = 64 * 1024 * 1024

Body = Iterator[bytes]


class Server(ThreadingHTTPServer):
    """States one stream. `messages`: the body of each response with messages; `kind`, `next_offset`: its headers;
    `tails`: the body of each response with a tail; `counted`: of `extent`, by start and end.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.end = ROWS
        self.kind, self.next_offset = "columns", str(ROWS)
        self.messages: Callable[[], Body] = lambda: iter([honest()])
        self.tails: Callable[[], Body] = lambda: iter([])
        self.status_of_tails = 200
        self.counted: Callable[[int, int], Any] = lambda start, end: {"start": start, "end": end, "rows": end - start}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        server, url = self.server, urllib.parse.urlsplit(self.path)
        asked = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        start, end = (int(urllib.parse.parse_qs(url.query).get(name, ["0"])[0]) for name in ("start", "end"))
        state = {
            "name": STREAM,
            "id": STREAM_ID,
            "log_start_offset": 0,
            "high_watermark": server.end,
            "leader_epoch": 1,
        }
        match url.path.rsplit("/", 1)[-1]:
            case "positions":
                self._send([json.dumps([state]).encode()])
            case "plans":
                self._send([json.dumps(plan(state, json.loads(asked)["positions"][STREAM])).encode()])
            case "extent":
                self._send([json.dumps(server.counted(start, end)).encode()])
            case "messages":
                self._send(server.messages())
            case "tail":
                self._send(server.tails(), server.status_of_tails)
            case _:
                self._send([json.dumps(state).encode()])

    do_POST = do_GET

    def _send(self, body: Any, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Natslog-Stream-Id", STREAM_ID)
        self.send_header("Natslog-Leader-Epoch", "1")
        self.send_header("Natslog-Next-Offset", self.server.next_offset)
        self.send_header("Natslog-Batches", self.server.kind)
        self.end_headers()  # the end of the connection is that of the body
        try:
            for piece in body:
                self.wfile.write(piece)
        except OSError:
            return  # the reader has closed the connection


def plan(state: dict[str, Any], position: dict[str, Any]) -> dict[str, Any]:
    """Of all that is asked for, by one task."""
    start, end = position["start"], state["high_watermark"] if position["end"] is None else position["end"]
    part = {"stream": STREAM, "start": start, "end": end, "bytes": 1000, "urls": []}
    stream = state | {"start": start, "end": end, "rows": end - start, "lost": []}
    return {"streams": {STREAM: stream}, "others": {}, "tasks": [[part]]}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


class HasUrl(Protocol):
    @property
    def url(self) -> str: ...


def read(spark: SparkSession, server: HasUrl, **more: str) -> DataFrame:
    options = {"servers": server.url, "stream": STREAM, "columns": ",".join(COLUMNS), "fetchRetries": "1"}
    options |= {"fetchTimeout": "5s", "retryInterval": "1ms"}
    return spark.read.format("natslog").options(**(options | more)).load()


def rows() -> pa.RecordBatch:
    items = [
        {"offset": at, "timestamp": at, "subject": f"s{at}", "key": None, "headers": None, "value": b""}
        for at in range(ROWS)
    ]
    return pa.RecordBatch.from_pylist(items, schema=MESSAGE_SCHEMA)


def message() -> tuple[bytearray, bytearray]:
    """Header and body of a stored batch with these columns, as brokers send them."""
    stored = bytes(ipc.encode_batch(rows(), base_offset=0, epoch=1, max_timestamp_us=ROWS))
    described = proven_header(stored)
    assert described is not None
    projected = project(described, stored, COLUMNS)
    body = stored[described.header_bytes :]
    return projected.header, bytearray(b"".join(body[start:end] for start, end in projected.body))


def response(header: bytearray, body: bytearray) -> bytes:
    """With CRCs that are right: whoever makes a message can compute them."""
    buffers = BatchMetadata(bytes(header[8:])).buffers
    middle = buffers[3][0]  # the first one of the second column
    at = header.index(b"columns=") + len(b"columns=")
    crcs = b"00000000-%08x,00000000-%08x" % (crc32c(bytes(body[:middle])), crc32c(bytes(body[middle:])))
    header[at : at + len(crcs)] = crcs
    at = header.index(b"header_crc32c=") + len(b"header_crc32c=")
    header[at : at + 8] = b"0" * 8
    header[at : at + 8] = b"%08x" % crc32c(bytes(header))
    return ipc.schema_message(schema_of(COLUMNS)) + bytes(header) + bytes(body) + ipc.END_OF_STREAM


def honest() -> bytes:
    return response(*message())


def with_edges(*edges: int) -> tuple[bytearray, bytearray]:
    """Where the texts of subjects begin and end."""
    header, body = message()
    at = BatchMetadata(bytes(header[8:])).buffers[_SUBJECT_EDGES][0]
    struct.pack_into(f"<{len(edges)}i", body, at, *edges)
    return header, body


def with_buffer(start: int, length: int, *edges: int) -> bytes:
    """The bytes of subjects are said to be there."""
    header, body = with_edges(*edges)
    stated = struct.pack("<qq", *BatchMetadata(bytes(header[8:])).buffers[_SUBJECT_BYTES])
    at = header.index(stated)
    header[at : at + 16] = struct.pack("<qq", start, length)
    return response(header, body)


def test_honest_answer_is_read(spark: SparkSession, server: Server) -> None:
    assert [row.subject for row in read(spark, server).collect()] == ["s0", "s1", "s2"]


@pytest.mark.parametrize(
    "crafted",
    [
        pytest.param(lambda: with_buffer(1 << 62, (1 << 62) + 0x7FFFFFF0, 0, 100_000, 100_000, 100_000), id="overflow"),
        pytest.param(lambda: with_buffer(1 << 62, (1 << 62) + 0x7FFFFFF0, 0x7F000000, 0x7F000010), id="far"),
        pytest.param(lambda: with_buffer(0, 1 << 40, 0, 1, 2, 3), id="longer than the body"),
        pytest.param(lambda: with_buffer(-8, 8, 0, 1, 2, 3), id="before the body"),
        pytest.param(lambda: response(*with_edges(0, 2, 4, 1 << 30)), id="last edge beyond"),
        pytest.param(lambda: response(*with_edges(0, 1 << 30, 4, 6)), id="edge beyond"),
        pytest.param(lambda: response(*with_edges(-4, 2, 4, 6)), id="negative edge"),
        pytest.param(lambda: response(*with_edges(0, 4, 2, 6)), id="descending edges"),
    ],
)
def test_places_outside_of_the_body_are_an_error(
    spark: SparkSession, server: Server, crafted: Callable[[], bytes]
) -> None:
    server.messages = lambda: iter([crafted()])
    with pytest.raises(Exception, match="a part of the response has metadata that cannot be read"):
        read(spark, server).collect()
    server.messages = lambda: iter([honest()])
    assert len(read(spark, server).collect()) == ROWS, "the JVM goes on"


def test_body_of_a_length_that_is_not_sent_takes_no_memory_for_it(spark: SparkSession, server: Server) -> None:
    def too_long() -> Body:
        header, body = message()
        metadata = memoryview(header)[8:]
        BatchMetadata(bytes(metadata)).set_body_bytes(metadata, (1 << 30) - 8)
        line = header.index(b"body_bytes=") + len(b"body_bytes=")
        header[line : line + 12] = b"%012d" % ((1 << 30) - 8)
        yield response(header, body)

    server.messages = too_long
    with pytest.raises(Exception, match="the response ended early"):
        read(spark, server).collect()


@pytest.mark.parametrize("kind", ["exact", "columns"])
def test_answers_without_an_end_are_an_error(spark: SparkSession, server: Server, kind: str) -> None:
    opening = ipc.schema_message(schema_of(COLUMNS))

    def schemas() -> Body:
        sent = 0
        while sent < _ENOUGH:
            yield opening * 100
            sent += 100 * len(opening)

    server.kind, server.messages = kind, schemas
    with pytest.raises(Exception, match="a second schema"):
        read(spark, server).collect()


def test_batches_without_rows_have_a_limit(spark: SparkSession, server: Server) -> None:
    empty = rows().select(list(COLUMNS)).slice(0, 0)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, empty.schema) as writer:
        writer.write_batch(empty)
    opening = ipc.schema_message(empty.schema)
    one = sink.getvalue().to_pybytes()[len(opening) : -len(ipc.END_OF_STREAM)]

    def batches() -> Body:
        yield opening
        for _ in range(3000):
            yield one * 100

    server.kind, server.messages = "exact", batches
    with pytest.raises(Exception, match="more than 100000 messages without rows"):
        read(spark, server).collect()


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_damaged_compressed_buffer_is_an_error_of_the_reader(spark: SparkSession, server: Server, codec: str) -> None:
    batch = pa.RecordBatch.from_arrays(
        [pa.array(["subject" * 40] * ROWS), pa.array(range(ROWS), pa.int64())], schema=schema_of(COLUMNS)
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_batch(batch)
    data = bytearray(sink.getvalue().to_pybytes())
    magic = {"zstd": b"\x28\xb5\x2f\xfd", "lz4": b"\x04\x22\x4d\x18"}[codec]
    at = data.index(magic)
    data[at : at + 4] = b"\0\0\0\0"
    server.kind, server.messages = "exact", lambda: iter([bytes(data)])
    with pytest.raises(Exception, match="a part of the response has metadata that cannot be read"):
        read(spark, server).collect()


@pytest.mark.parametrize("text", ["9999999999999999999", "soon"])
def test_header_that_is_no_offset_is_an_error(spark: SparkSession, server: Server, text: str) -> None:
    server.next_offset = text
    with pytest.raises(Exception, match="the header Natslog-Next-Offset of the response is not an offset"):
        read(spark, server, fetchTimeout="100ms").collect()


def test_count_is_not_limited_to_31_bits(spark: SparkSession, server: Server) -> None:
    server.end = 5_000_000_000
    server.next_offset = str(server.end)
    assert read(spark, server).count() == 5_000_000_000


@pytest.mark.parametrize(
    "stated",
    [
        lambda start, end: {"start": start, "end": end, "rows": -5},
        lambda start, end: {"start": start, "end": end, "rows": end - start + 1},
        lambda start, end: {"start": start, "end": end, "rows": 1 << 40},
        lambda start, end: {"start": start + 1, "end": end, "rows": 1},
        lambda start, end: {"start": start, "end": end - 1, "rows": 1},
        lambda start, end: {"start": start, "end": end, "rows": None},
        lambda start, end: {"start": start, "end": end},
        lambda start, end: [],
    ],
)
def test_count_that_cannot_be_right_is_not_used(
    spark: SparkSession, server: Server, stated: Callable[[int, int], Any]
) -> None:
    """Brokers before this version do not state it."""
    server.counted = stated

    def offsets() -> Body:
        sink = pa.BufferOutputStream()
        batch = rows().select(["offset"])
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield sink.getvalue().to_pybytes()

    server.kind, server.messages = "exact", offsets
    assert read(spark, server).count() == ROWS


@pytest.mark.parametrize(
    "subject", ["x" * 2000, "a\u00a0b", "a\u0085b", "a\u2028b", "a b", "a..b", ".a", "*", "a.>", "é"]
)
def test_filter_on_a_subject_that_cannot_be_requested_gives_no_rows(
    spark: SparkSession, server: Server, subject: str
) -> None:
    frame = read(spark, server)
    assert frame.where(frame.subject == subject).collect() == []
