"""Lag reports and cursors of queries against brokers that are well, slow, dead, or no brokers at all."""

from __future__ import annotations

import json
import logging
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from natslog.client import ClientOptions, NatslogClient
from natslog.errors import TooManyCursors
from natslog.nats_server import free_port
from pyspark_natslog.source import cursor_mirror
from pyspark_natslog.source.cursor_mirror import CursorMirror
from pyspark_natslog.source.lag import LagReport
from pyspark_natslog.source.offsets import StreamOffset
from pyspark_natslog.source.options import SourceOptions
from pyspark_natslog.source.schema import spark_schema
from pyspark_natslog.source.watched_reader import WatchedStreamReader
from tests.harness import BrokerProcess, eventually, publish_acked, running

LATEST = {"orders": {"id": "a", "offset": 100}, "returns": {"id": "b", "offset": 7}, "new": {"id": "c", "offset": 5}}
END = {"orders": {"id": "a", "offset": 60}, "returns": {"id": "b", "offset": 7}, "new": {"id": "older", "offset": 9}}


def reader_of(url: str, stream: str, **options: Any) -> WatchedStreamReader:
    parsed = SourceOptions.parse({"servers": url, "stream": stream} | options, streaming=True)
    return WatchedStreamReader(parsed, spark_schema(parsed.selected_columns()))


@pytest.fixture
def stream(client: NatslogClient, nats_url: str, name: str) -> str:
    client.create_stream(name, name)
    publish_acked(nats_url, name, [b"." * 100] * 100)
    return name


# ---- lag ----


@pytest.mark.long
def test_reader_reports_what_is_left_behind_the_end_it_gave(broker: BrokerProcess, stream: str) -> None:
    reader = pickle.loads(pickle.dumps(reader_of(broker.url, stream, maxOffsetsPerTrigger="30")))
    assert reader.reportLatestOffset() is None, "nothing is known yet"
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert set(end[stream]) == {"id", "offset"}
    report = reader.reportLatestOffset()[stream]
    assert (report["offset"], report["rows_behind"]) == (100, 70)
    assert report["bytes_behind"] > 70 * 100
    assert report["seconds_behind"] > 0
    reader.latestOffset(end, ReadAllAvailable())
    report = reader.reportLatestOffset()[stream]
    assert (report["rows_behind"], report["bytes_behind"], report["seconds_behind"]) == (0, 0, 0)
    reader.stop()


@pytest.mark.long
def test_loss_of_a_deleted_stream_is_in_the_report(
    broker: BrokerProcess, client: NatslogClient, stream: str, name: str
) -> None:
    client.create_stream(f"{name}-kept", f"{name}-kept")
    reader = reader_of(broker.url, f"{stream},{name}-kept", failOnDataLoss="false")
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    client.delete_stream(stream)
    reader.latestOffset(end, ReadAllAvailable())
    report = reader.reportLatestOffset()
    assert report is not None
    assert {at: report[at]["rows_lost"] for at in report} == {stream: None, f"{name}-kept": 0}
    assert (report[stream]["offset"], report[stream]["rows_behind"]) == (100, 0)
    reader.stop()


@contextmanager
def black_hole() -> Iterator[str]:
    """Takes connections, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def answering(status: int, body: bytes, asked: list[str] | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if asked is not None:
                asked.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def check_unknown(found: dict[str, Any]) -> None:
    """Rows are known all the same; nothing is asked about what is not behind."""
    assert {name: at["rows_behind"] for name, at in found.items()} == {"orders": 40, "returns": 0, "new": 5}
    assert (found["orders"]["bytes_behind"], found["orders"]["seconds_behind"]) == (None, None)
    assert (found["returns"]["bytes_behind"], found["returns"]["seconds_behind"]) == (0, 0)


def test_slow_broker_costs_a_tenth_of_a_second_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 1000.0
    with black_hole() as url:
        report = LagReport((url,), ClientOptions(timeout_s=1.0), clock=lambda: now_s)
        taken_s = []
        for step_s in (0, 1, 3.9, 0.2, 6):
            now_s += step_s
            started = time.monotonic()
            check_unknown(report.added_to(LATEST, END))
            taken_s.append(time.monotonic() - started)
        report.close()
    asked = [seconds > 0.09 for seconds in taken_s]
    assert asked[:3] == [True, False, False], "not asked again for five seconds"
    assert max(taken_s) < 0.5
    assert len([one for one in caplog.records if "the query continues" in one.message]) == 1, "said once a minute"


@pytest.mark.long
@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"no JSON"),
        (200, b"[1, 2]"),
        (200, b'{"orders": {"rows": 1, "bytes": "many", "seconds": 1}}'),
        (200, b'{"orders": {"bytes": 1, "seconds": 1}}'),
        (200, b'{"orders": 7}'),
        (200, b'{"orders": null, "new": null}'),
        (500, b"oh"),
        (503, b'{"error": {"code": "not_ready", "message": "wait", "retriable": true}}'),
    ],
)
def test_answer_that_says_nothing_is_null(status: int, body: bytes) -> None:
    with answering(status, body) as url:
        report = LagReport((url,), ClientOptions())
        check_unknown(report.added_to(LATEST, END))
        report.close()


def test_counts_that_are_unknown_to_this_reader_are_null() -> None:
    lag = {"rows": None, "bytes": None, "seconds": 1.5}
    with answering(200, json.dumps({"orders": lag, "new": lag | {"rows": 3, "bytes": 9}}).encode()) as url:
        report = LagReport((url,), ClientOptions())
        found = report.added_to(LATEST, END)
        report.close()
    shown = {name: (at["rows_behind"], at["bytes_behind"], at["seconds_behind"]) for name, at in found.items()}
    assert shown == {"orders": (40, None, 1.5), "returns": (0, 0, 0), "new": (3, 9, 1.5)}


def test_broker_that_refused_is_asked_again_after_five_seconds() -> None:
    now_s, asked, counts = 1000.0, [], []
    with answering(500, b"oh", asked) as url:
        report = LagReport((url,), ClientOptions(), clock=lambda: now_s)
        for step_s in (0, 1, 3.9, 0.2, 1, 5):
            now_s += step_s
            report.added_to(LATEST, END)
            counts.append(len(asked))
        report.close()
    assert counts == [1, 1, 1, 2, 2, 3]


def test_dead_broker_is_null_at_once() -> None:
    report = LagReport((f"http://127.0.0.1:{free_port()}",), ClientOptions())
    check_unknown(report.added_to(LATEST, END))
    report.close()


def test_nobody_is_asked_where_nothing_is_behind() -> None:
    with black_hole() as url:
        report, started = LagReport((url,), ClientOptions()), time.monotonic()
        assert report.added_to(LATEST, LATEST)["orders"]["rows_behind"] == 0
        assert time.monotonic() - started < 0.05
        report.close()


# ---- cursors ----


def mirror_at(*urls: str) -> CursorMirror:
    return CursorMirror("report", urls, ClientOptions(timeout_s=1.0))


def entries(broker: BrokerProcess) -> float:
    """Changes of cursors."""
    return broker.metrics().get('natslog_stream_high_watermark{stream="__cursors"}', 0.0)


@pytest.mark.long
def test_fast_query_writes_its_cursor_about_once_a_second(
    broker: BrokerProcess, client: NatslogClient, stream: str
) -> None:
    mirror, before = pickle.loads(pickle.dumps(mirror_at(broker.url))), entries(broker)
    stream_id = client.stream(stream)["id"]
    started, slowest_s = time.monotonic(), 0.0
    for offset in range(100_000):
        asked = time.monotonic()
        mirror.note({stream: StreamOffset(stream_id, offset)})
        slowest_s = max(slowest_s, time.monotonic() - asked)
        if asked - started > 2.5:
            break
        time.sleep(0.005)
    mirror.close()
    assert client.cursor("report", stream)["offset"] == offset, "the last one is written"
    assert 3 <= entries(broker) - before <= 5
    assert slowest_s < 0.1


def test_cursor_that_cannot_be_keeps_no_other_from_being_written(
    broker: BrokerProcess, client: NatslogClient, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_cursor = NatslogClient.set_cursor

    def no_room_for_one(self: NatslogClient, consumer: str, name: str, *arguments: Any, **named: Any) -> Any:
        if name == "a-stream":
            raise TooManyCursors("there are 1000 cursors already")
        return set_cursor(self, consumer, name, *arguments, **named)

    monkeypatch.setattr(NatslogClient, "set_cursor", no_room_for_one)
    mirror = mirror_at(broker.url)
    mirror.note({"a-stream": StreamOffset("x", 5), stream: StreamOffset(client.stream(stream)["id"], 7)})
    mirror.close()
    assert client.cursor("report", stream)["offset"] == 7


def test_cursor_of_a_query_that_stands_still_is_written_once(
    broker: BrokerProcess, client: NatslogClient, stream: str
) -> None:
    mirror, before = mirror_at(broker.url), entries(broker)
    at = {stream: StreamOffset(client.stream(stream)["id"], 5)}
    for _ in range(15):
        mirror.note(at)
        time.sleep(0.1)
    mirror.close()
    assert entries(broker) - before == 1


@pytest.mark.long
def test_dead_broker_neither_fails_nor_delays_a_note_and_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cursor_mirror, "_AGAIN_AFTER_S", 0.2)
    with running(tmp_path / "own") as (_, broker):
        stream_id = broker.client().create_stream("orders", "orders")["id"]
        broker.kill()
        mirror, started = mirror_at(broker.url), time.monotonic()
        for offset in range(50):
            mirror.note({"orders": StreamOffset(stream_id, offset)})
        assert time.monotonic() - started < 0.5
        time.sleep(1)
        assert len([one for one in caplog.records if "the query continues" in one.getMessage()]) == 1
        broker.start()
        eventually(lambda: broker.client().cursors(), 30, "it is written when a broker is back")
        assert broker.client().cursor("report", "orders")["offset"] == 49
        mirror.close()


@pytest.mark.long
def test_close_waits_no_longer_than_two_seconds() -> None:
    with black_hole() as first, black_hole() as second, black_hole() as third:
        mirror = mirror_at(first, second, third)
        mirror.note({"orders": StreamOffset("a", 1)})
        started = time.monotonic()
        mirror.close()
        assert time.monotonic() - started < 2.5


def test_stream_that_was_created_again_is_not_written_and_others_are(
    broker: BrokerProcess, client: NatslogClient, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = client.create_stream(f"{stream}-other", f"{stream}-other")
    mirror = mirror_at(broker.url)
    mirror.note({stream: StreamOffset("former", 5), f"{stream}-other": StreamOffset(other["id"], 0)})
    mirror.close()
    assert [one["stream"] for one in client.cursors(consumer="report") if one["stream"].startswith(stream)] == [
        f"{stream}-other"
    ]
    assert "deleted and created again" in caplog.text


KILLED = """
import sys, time
from natslog.client import ClientOptions
from pyspark_natslog.source.cursor_mirror import CursorMirror
from pyspark_natslog.source.offsets import StreamOffset
url, stream, stream_id = sys.argv[1:]
mirror = CursorMirror("killed", (url,), ClientOptions())
for offset in range(1, 51):
    mirror.note({stream: StreamOffset(stream_id, offset)})
    time.sleep(0.005)
print("noted", flush=True)
time.sleep(60)
"""


def test_last_position_is_written_when_spark_ends_the_process(
    broker: BrokerProcess, client: NatslogClient, stream: str
) -> None:
    command = [sys.executable, "-c", KILLED, broker.url, stream, client.stream(stream)["id"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"noted\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM, "it dies of it as it would have"
    assert client.cursor("killed", stream)["offset"] == 50


@pytest.fixture(autouse=True)
def _warnings_are_seen(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """And the handler that a note leaves for Spark's sake is taken away again."""
    caplog.set_level(logging.WARNING, "pyspark_natslog")
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)
