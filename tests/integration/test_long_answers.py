"""Answers without `max_bytes` reach the end of their range; ranges are exact unless whole batches are asked for."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
import urllib3

from natslog.arrow import ipc
from natslog.client import NatslogClient
from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, eventually, publish_acked, running
from tests.integration.asking import ask, error

NDJSON = "application/x-ndjson"
ROWS, BATCH = 40_000, 2000
VALUE = b"v" * 1000
PATH = "/v1/streams/orders/messages"


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with a stream of 40 MB, in batches of 2 MB: more than one part of any kind of answer."""
    with running(tmp_path_factory.mktemp("long"), segment_bytes="8MiB") as (nats, broker):
        broker.client().create_stream("orders", "orders.>")
        for at in range(0, ROWS, BATCH):
            publish_acked(nats.url, f"orders.{at // BATCH % 2}", [VALUE] * BATCH)
        yield broker


def offsets(answer: urllib3.BaseHTTPResponse) -> list[int]:
    if answer.headers["Content-Type"] == NDJSON:
        return [json.loads(line)["offset"] for line in answer.data.splitlines()]
    assert answer.data.endswith(ipc.END_OF_STREAM)
    return pa.ipc.open_stream(answer.data).read_all().column("offset").to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("query", "accept"),
    [("", "*/*"), ("&exact=false", "*/*"), ("&columns=offset,value", "*/*"), ("&subject=%3E", "*/*"), ("", NDJSON)],
    ids=["exact", "whole", "columns", "rewritten", "ndjson"],
)
@pytest.mark.long
def test_answer_without_max_bytes_reaches_the_end_of_its_range(long: BrokerProcess, query: str, accept: str) -> None:
    answer = ask(long, "GET", f"{PATH}?start=0{query}", Accept=accept)
    assert offsets(answer) == list(range(ROWS))
    assert answer.headers["Natslog-Next-Offset"] == str(ROWS)
    assert answer.headers["Transfer-Encoding"] == "chunked"
    part = ask(long, "GET", f"{PATH}?start=1&end={ROWS - 1}&max_bytes=1000000{query}", Accept=accept)
    assert int(part.headers["Natslog-Next-Offset"]) < ROWS // 2
    assert "Transfer-Encoding" not in part.headers


@pytest.mark.parametrize("accept", ["*/*", NDJSON])
@pytest.mark.long
def test_answer_in_parts_has_the_rows_of_the_range_and_no_others(long: BrokerProcess, accept: str) -> None:
    answer = ask(long, "GET", f"{PATH}?start=7&end={ROWS - 7}", Accept=accept)
    assert offsets(answer) == list(range(7, ROWS - 7))
    assert (answer.headers["Natslog-Batches"], answer.headers["Natslog-Next-Offset"]) == ("exact", str(ROWS - 7))


@pytest.mark.long
def test_answer_in_parts_is_filtered_to_its_end(long: BrokerProcess) -> None:
    answer = ask(long, "GET", f"{PATH}?start=0&subject=orders.1&columns=offset")
    assert offsets(answer) == [at for at in range(ROWS) if at // BATCH % 2]


def raw_answer(broker: BrokerProcess, version: str, query: str) -> bytes:
    with socket.create_connection(("127.0.0.1", broker.http_port)) as raw:
        raw.sendall(f"GET {PATH}?{query} HTTP/{version}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: raw.recv(1 << 20), b""))


@pytest.mark.long
def test_client_of_http_1_0_reads_to_the_end_of_the_connection(long: BrokerProcess) -> None:
    head, _, body = raw_answer(long, "1.0", "start=0").partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert pa.ipc.open_stream(body).read_all().num_rows == ROWS


@pytest.mark.long
def test_connection_is_kept_for_further_requests_after_an_answer_in_parts(long: BrokerProcess) -> None:
    with urllib3.HTTPConnectionPool("127.0.0.1", long.http_port, maxsize=1) as pool:
        for _ in range(3):
            assert offsets(pool.request("GET", f"{PATH}?start=0")) == list(range(ROWS))
        assert pool.num_connections == 1


@pytest.mark.long
@pytest.mark.parametrize("accept", ["*/*", pytest.param(NDJSON, marks=pytest.mark.long)])
def test_answer_that_fails_midway_is_recognised_as_cut_off(own: Path, accept: str) -> None:
    with with_sealed(own, "none", 64) as (_, broker):
        sealed = sorted(broker.folder.glob("streams/[!_]*/*.arrow"))[-1]
        broker.kill()
        data = bytearray(sealed.read_bytes())
        data[len(data) // 2] ^= 1
        sealed.write_bytes(data)
        broker.start()
        with pytest.raises(urllib3.exceptions.ProtocolError):
            ask(broker, "GET", f"{PATH}?start=0", Accept=accept)
        answer = ask(broker, "GET", f"{PATH}?start=0&max_bytes=1000000", Accept=accept)
        assert (answer.status, len(offsets(answer)) > 0) == (200, True)
        assert f"is incomplete: {sealed}: the batch at byte" in broker.output()
        assert "Traceback" not in broker.output()


# ---- whole or exact ----


@pytest.mark.long
@pytest.mark.parametrize(("start", "end"), [(7, 11), (0, 7), (7, ROWS), (1990, 2010), (1990, 6010)])
def test_range_is_cut_exactly_unless_whole_batches_are_asked_for(long: BrokerProcess, start: int, end: int) -> None:
    path = f"{PATH}?start={start}&end={end}"
    whole = [ask(long, "GET", f"{path}&exact=false"), ask(long, "GET", path, Natslog_Batches="whole")]
    assert {answer.headers["Natslog-Batches"] for answer in whole} == {"whole"}
    stored = offsets(whole[0])
    assert stored == offsets(whole[1]) == list(range(stored[0], stored[-1] + 1))
    assert stored[0] <= start < end <= stored[-1] + 1
    exact = ask(long, "GET", path)
    assert offsets(exact) == offsets(ask(long, "GET", f"{path}&exact=true")) == list(range(start, end))
    assert exact.headers["Natslog-Batches"] == ("whole" if stored == list(range(start, end)) else "exact")
    for header, _ in ipc.split_messages(exact.data, source="the answer"):
        assert start <= header.base_offset < header.end_offset <= end, "each batch still proves itself"


def test_range_of_whole_batches_is_not_cut(long: BrokerProcess) -> None:
    stored = offsets(ask(long, "GET", f"{PATH}?start=10&end=11&exact=false"))
    exact = ask(long, "GET", f"{PATH}?start={stored[0]}&end={stored[-1] + 1}")
    assert (offsets(exact), exact.headers["Natslog-Batches"]) == (stored, "whole")


@pytest.mark.parametrize("value", ["yes", "1", ""])
def test_exact_is_true_or_false(long: BrokerProcess, value: str) -> None:
    answer = ask(long, "GET", f"{PATH}?start=0&exact={value}")
    assert (answer.status, error(answer)["parameter"]) == (400, "exact")


def test_python_client_receives_stored_batches_and_cuts_them_itself(
    long: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    ask_broker = NatslogClient._ask

    def noting(client: NatslogClient, *arguments: object, **named: object) -> urllib3.BaseHTTPResponse:
        answer = ask_broker(client, *arguments, **named)  # type: ignore[arg-type]
        told.append(answer.headers.get("Natslog-Batches"))
        return answer

    monkeypatch.setattr(NatslogClient, "_ask", noting)
    fetched = long.client().fetch("orders", 7, 11)
    assert [batch.column("offset").to_pylist() for batch in fetched.batches] == [[7, 8, 9, 10]]
    assert told == ["whole"]


# ---- max_bytes ----


@contextmanager
def with_sealed(folder: Path, compression: str, count: int) -> Iterator[tuple[NatsServer, BrokerProcess]]:
    """A stream of `count` messages of 900 kB, in sealed segments of 8 MiB but for the end."""
    with running(folder, segment_bytes="8MiB", retention_interval="200ms") as (server, broker):
        broker.client().create_stream("orders", "orders", compression=compression)
        for _ in range(count):
            publish_acked(server.url, "orders", [b"x" * 900_000])
        eventually(lambda: len(list(broker.folder.glob("streams/[!_]*/*.arrow"))) >= count * 9 // 84, what="sealed")
        yield server, broker


@pytest.mark.long
@pytest.mark.parametrize(
    ("query", "accept"),
    [("", "*/*"), ("&exact=false", "*/*"), ("&columns=offset,value", "*/*"), ("&subject=%3E", "*/*"), ("", NDJSON)],
    ids=["exact", "whole", "columns", "rewritten", "ndjson"],
)
@pytest.mark.parametrize("compression", ["zstd", pytest.param("lz4", marks=pytest.mark.long)])
def test_max_bytes_counts_what_compressed_messages_take_when_they_are_read(
    own: Path, compression: str, query: str, accept: str
) -> None:
    with with_sealed(own, compression, 40) as (_, broker):
        assert broker.client().stream("orders")["bytes"] < 12_000_000, "compressed"
        for max_bytes, most in ((20_000_000, 20_000_000), (1, 9_000_000)):
            answer = ask(broker, "GET", f"{PATH}?start=0&max_bytes={max_bytes}{query}", Accept=accept)
            read = offsets(answer)
            assert answer.headers["Natslog-Next-Offset"] == str(len(read))
            assert 0 < len(read) * 900_000 <= most
        assert len(offsets(ask(broker, "GET", f"{PATH}?start=0{query}", Accept=accept))) == 40


@pytest.mark.parametrize("start", [0, 1, 1990, 39_000])
def test_client_that_asks_for_no_whole_batches_reads_every_range(
    long: BrokerProcess, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    """As clients do that leave out rows of whole batches themselves."""
    monkeypatch.setattr("natslog.client.client._WHOLE_BATCHES", {})
    read: list[int] = []
    for fetched in long.client().answers("orders", start, start + 999, max_bytes=300_000):
        assert fetched.next_offset == start + len(read) + sum(batch.num_rows for batch in fetched.batches)
        read += [offset for batch in fetched.batches for offset in batch.column("offset").to_pylist()]
    assert read == list(range(start, start + 999))
