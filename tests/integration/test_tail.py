"""The tail of a stream over one connection (`GET /v1/streams/{name}/tail`)."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pyarrow as pa
import pytest
import urllib3

from natslog.arrow.ipc import END_OF_STREAM, decode_batch
from natslog.arrow.projection import ProjectedHeader, proven_at, schema_of
from natslog.arrow.schema import COLUMNS
from natslog.client import NatslogClient
from tests.harness import BrokerProcess, publish_acked, running

Message = tuple[ProjectedHeader, pa.RecordBatch]


class Tail:
    """The messages of one response, as they arrive."""

    def __init__(self, response: http.client.HTTPResponse, columns: tuple[str, ...]) -> None:
        self._response, self._columns = response, columns
        self._take(schema_of(columns).serialize().size)

    def _take(self, count: int) -> bytes:
        data = self._response.read(count)
        assert len(data) == count, "the response ended early"
        return data

    def next(self) -> Message | None:
        """None where the response has ended."""
        prefix = self._take(8)
        if prefix == END_OF_STREAM:
            assert self._response.read() == b""
            return None
        header = prefix + self._take(int.from_bytes(prefix[4:], "little"))
        line = header[header.index(b"v1 base_offset") :]
        body_bytes = int(line.partition(b"body_bytes=")[2][:12])
        found, message = proven_at(memoryview(header + self._take(body_bytes)), 0, self._columns, source="the tail")
        return found, decode_batch(message, schema_of(self._columns))

    def until(self, end: int) -> list[Message]:
        """All up to the one that ends there."""
        found: list[Message] = []
        while not found or found[-1][0].end_offset < end:
            message = self.next()
            assert message is not None, "the response has ended"
            found.append(message)
        return found


@contextmanager
def tail_of(broker: BrokerProcess, name: str, start: int, **asked: Any) -> Iterator[Tail]:
    url = urlsplit(broker.url)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=20)
    columns = tuple(asked["columns"].split(",")) if "columns" in asked else COLUMNS
    try:
        connection.request("GET", f"/v1/streams/{name}/tail?{urlencode({'start': start, **asked})}")
        response = connection.getresponse()
        assert response.status == 200, response.read()
        yield Tail(response, columns)
    finally:
        connection.close()


def rows_of(messages: list[Message], column: str = "value") -> list[Any]:
    return [value for _, rows in messages for value in rows.column(column).to_pylist()]


def check_offsets(messages: list[Message], start: int, end: int) -> None:
    """The messages follow one another."""
    at = start
    for header, rows in messages:
        assert (header.base_offset, header.rows) == (at, rows.num_rows)
        at = header.end_offset
    assert at == end


@pytest.fixture
def stream(client: NatslogClient, name: str) -> str:
    client.create_stream(name, f"{name}.*")
    return name


def test_what_is_there_and_what_follows_is_sent(
    broker: BrokerProcess, nats_url: str, client: NatslogClient, stream: str
) -> None:
    before = [b"%d" % number for number in range(50)]
    publish_acked(nats_url, f"{stream}.a", before)
    with tail_of(broker, stream, 0) as tail:
        messages = tail.until(50)
        for number in range(50, 60):
            publish_acked(nats_url, f"{stream}.b", [b"%d" % number])
            more = tail.until(number + 1)
            assert rows_of(more) == [b"%d" % number]
            messages += more
        check_offsets(messages, 0, 60)
        assert rows_of(messages, "offset") == list(range(60))
        assert rows_of(messages, "subject") == [f"{stream}.a"] * 50 + [f"{stream}.b"] * 10


def test_the_last_commits_are_sent_as_they_are_stored(broker: BrokerProcess, nats_url: str, stream: str) -> None:
    """Whoever is asked for rows of a log keeps its next commits in memory."""
    columns = ("subject", "key", "headers", "value")
    with tail_of(broker, stream, 0, columns=",".join(columns)) as tail:
        publish_acked(nats_url, f"{stream}.a", [b"0"])
        tail.until(1)
        messages: list[Message] = []
        for number in range(1, 5):
            publish_acked(nats_url, f"{stream}.a", [b"%d" % number], headers={"Natslog-Key": f"k{number}"})
            messages += tail.until(number + 1)
    check_offsets(messages, 1, 5)
    for header, _ in messages:
        first = header.crcs[0][0]
        assert first, "the CRCs go on from the columns that are stored before those that are sent"
        assert [before for before, _ in header.crcs] == [first, *(after for _, after in header.crcs[:-1])]
    assert rows_of(messages) == [b"1", b"2", b"3", b"4"]
    assert rows_of(messages, "key") == [b"k1", b"k2", b"k3", b"k4"]
    assert rows_of(messages, "headers") == [[{"key": "Natslog-Key", "value": f"k{number}"}] for number in range(1, 5)]


def test_a_message_without_rows_is_sent_where_nothing_happens(
    broker: BrokerProcess, client: NatslogClient, stream: str
) -> None:
    with tail_of(broker, stream, 0) as tail:
        started = time.monotonic()
        messages = [tail.next() for _ in range(3)]
    assert time.monotonic() - started > 1, "the second and the third are sent a heartbeat apart"
    assert [(header.base_offset, header.end_offset, rows.num_rows) for header, rows in filter(None, messages)] == [
        (0, 0, 0)
    ] * 3


def test_offsets_of_removed_messages_are_stated(
    broker: BrokerProcess, nats_url: str, client: NatslogClient, stream: str
) -> None:
    publish_acked(nats_url, f"{stream}.a", [b"%d" % number for number in range(10)])
    client.delete_message(stream, 4)
    client.delete_message(stream, 9)
    with tail_of(broker, stream, 2, columns="offset,value") as tail:
        messages = tail.until(10)
    check_offsets(messages, 2, 10)
    assert rows_of(messages, "offset") == [2, 3, 5, 6, 7, 8]


def test_rows_of_other_subjects_are_left_out(broker: BrokerProcess, nats_url: str, stream: str) -> None:
    publish_acked(nats_url, f"{stream}.a", [b"1"])
    with tail_of(broker, stream, 0, subject=f"{stream}.b", columns="value") as tail:
        publish_acked(nats_url, f"{stream}.a", [b"2", b"3"])
        publish_acked(nats_url, f"{stream}.b", [b"4"])
        messages = tail.until(4)
    check_offsets(messages, 0, 4)
    assert rows_of(messages) == [b"4"]


def test_the_response_ends_where_the_broker_stops(own: Path) -> None:
    with running(own) as (_, broker):
        broker.client().create_stream("s", "s")
        with tail_of(broker, "s", 0) as tail:
            assert tail.next() is not None
            broker.terminate()
            while tail.next() is not None:
                pass


def test_offsets_that_are_not_in_the_log_are_refused(
    broker: BrokerProcess, nats_url: str, client: NatslogClient, stream: str
) -> None:
    publish_acked(nats_url, f"{stream}.a", [b"1", b"2"])
    client.purge(stream, below=1)
    for start in (0, 3):
        with pytest.raises(AssertionError, match="offset_out_of_range"), tail_of(broker, stream, start):
            pass


def test_positions_beyond_the_end_of_the_stream_are_refused(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    """New messages at these offsets would be left out."""
    client.create_stream(name, name)
    publish_acked(nats_url, name, [b"a", b"b"])
    url = f"{broker.url}/v1/streams/{name}/tail?start=0&passed=subject:"
    answer = urllib3.request("GET", f"{url}3", preload_content=False)
    assert (answer.status, answer.json()["error"]["code"]) == (503, "no_leader")
    assert "passed up to offset 3, but it ends at 2" in answer.json()["error"]["message"]
    answer = urllib3.request("GET", f"{url}2", preload_content=False)
    assert answer.status == 200
    answer.release_conn()
