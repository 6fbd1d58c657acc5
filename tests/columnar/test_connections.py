"""How the reader takes responses from connections: each form that HTTP allows, and servers that are slow or hostile."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.columnar.test_hostile import ROWS, STREAM_ID, honest, read
from tests.columnar.test_hostile import Server as Hostile
from tests.harness import eventually

FACTS = (
    b"Natslog-Stream-Id: " + STREAM_ID.encode() + b"\r\nNatslog-Leader-Epoch: 1\r\n"
    b"natslog-next-offset:%d\r\nNATSLOG-BATCHES:   columns  \r\n" % ROWS
)
_FOR_EVER_S = 60.0


class Relay:
    """Before an honest server: passes requests on, except those for messages, whose response `respond` writes.

    Attributes:
        opened: how many connections there were. `asked`: how many requests for messages.
    """

    def __init__(self, honest: Hostile, tls: ssl.SSLContext | None = None) -> None:
        self.honest, self._tls = honest, tls
        self.respond: Callable[[socket.socket], None] = lambda peer: peer.sendall(with_length())
        self.opened = self.asked = 0
        self.end_after = False  # the connection, behind each response
        self.takes_bodies = True
        self.stopped = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._peers: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    @property
    def url(self) -> str:
        return f"http{'' if self._tls is None else 's'}://127.0.0.1:{self._server.getsockname()[1]}"

    def __enter__(self) -> Relay:
        self._threads[0].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stopped.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.drop()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def drop(self) -> None:
        """Closes every connection, as a broker does that is stopped, or that has too many idle ones."""
        for peer in self._peers:
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the reader has closed it

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return  # stopped
            self.opened += 1
            self._peers.append(peer)
            self._threads.append(threading.Thread(target=self._serve, args=(peer,)))
            self._threads[-1].start()

    def _serve(self, accepted: socket.socket) -> None:
        with ExitStack() as closing:
            try:
                peer = closing.enter_context(accepted)
                if self._tls is not None:
                    peer = closing.enter_context(self._tls.wrap_socket(accepted, server_side=True))
                    self._peers.append(peer)
                while (request := self._request(peer)) is not None:
                    if b"/messages?" in request.split(b"\r\n", 1)[0]:
                        self.asked += 1
                        self.respond(peer)
                    else:
                        peer.sendall(self._of_honest(request))
                    if self.end_after:
                        return
            except OSError:
                return  # closed by the reader, or by `drop`

    def _request(self, peer: socket.socket) -> bytes | None:
        found = b""
        while b"\r\n\r\n" not in found:
            if not (more := peer.recv(65536)):
                return None
            found += more
        head, _, body = found.partition(b"\r\n\r\n")
        lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
        if lengths and not self.takes_bodies:
            self.stopped.wait(_FOR_EVER_S)
            return None
        while lengths and len(body) < int(lengths[0]):
            body += peer.recv(65536)
        return head + b"\r\n\r\n" + body

    def _of_honest(self, request: bytes) -> bytes:
        """With a length, so that the connection can go on."""
        with socket.create_connection(("127.0.0.1", self.honest.server_port)) as to:
            to.sendall(request)
            found = b""
            while more := to.recv(65536):
                found += more
        head, _, body = found.partition(b"\r\n\r\n")
        head = head.replace(b"HTTP/1.0", b"HTTP/1.1", 1)
        return head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def with_length() -> bytes:
    body = honest()
    return b"HTTP/1.1 200 OK\r\n" + FACTS + b"Content-Length: %d\r\n\r\n" % len(body) + body


def in_chunks(size: int, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    body = honest()
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%X%b\r\n%b\r\n" % (len(one), extension, one) for one in pieces)
    return head(b"Transfer-Encoding: chunked") + chunks + b"0\r\n" + trailers + b"\r\n"


def head(*lines: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\n" + FACTS + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def sent(data: bytes) -> Callable[[socket.socket], None]:
    return lambda peer: peer.sendall(data)


def sent_and_closed(data: bytes) -> Callable[[socket.socket], None]:
    def respond(peer: socket.socket) -> None:
        peer.sendall(data)
        peer.shutdown(socket.SHUT_RDWR)

    return respond


@pytest.fixture
def relay() -> Iterator[Relay]:
    with ExitStack() as closing:
        server = closing.enter_context(Hostile())
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        closing.callback(thread.join)
        closing.callback(server.shutdown)
        yield closing.enter_context(Relay(server))


def in_small_pieces(peer: socket.socket) -> None:
    for at in range(0, len(data := with_length()), 7):
        peer.sendall(data[at : at + 7])


@pytest.mark.parametrize(
    "respond",
    [
        pytest.param(sent(with_length()), id="length"),
        pytest.param(sent(in_chunks(1)), id="chunks of one byte"),
        pytest.param(sent(in_chunks(100, b' ; name="a"', b"Checksum: none\r\n")), id="chunks, extensions, trailers"),
        pytest.param(sent_and_closed(head() + honest()), id="until the connection ends"),
        pytest.param(sent_and_closed(with_length().replace(b"HTTP/1.1", b"HTTP/1.0", 1)), id="HTTP 1.0"),
        pytest.param(sent(b"HTTP/1.1 102 Processing\r\nA: b\r\n\r\n" * 3 + with_length()), id="interim responses"),
        pytest.param(sent(with_length().replace(b"200 OK", b"200", 1)), id="no reason"),
        pytest.param(sent(with_length().replace(b"\r\n", b"\n")), id="lines without CR"),
        pytest.param(in_small_pieces, id="small pieces"),
        pytest.param(sent(with_length().replace(b"200 OK", b"200 \x85", 1)), id="reason that is no text"),
        pytest.param(sent(with_length().replace(b"\r\n", b"\r\nVia: proxy-\xc3\x85\r\n", 1)), id="header beyond ASCII"),
        pytest.param(
            sent(with_length().replace(b"\r\n", b"\r\nSlow:" + b" " * 30_000 + b"\r" + b" " * 30_000 + b"x\r\n", 1)),
            id="header that is slow to match",
        ),
    ],
)
def test_every_form_of_a_response_is_read(
    spark: SparkSession, relay: Relay, respond: Callable[[socket.socket], None]
) -> None:
    relay.respond = respond
    for _ in range(2):  # whatever is left of the first one on its connection
        assert [row.subject for row in read(spark, relay).collect()] == ["s0", "s1", "s2"]


@pytest.mark.parametrize(
    ("response", "error"),
    [
        pytest.param(b"\x15\x03\x03\x00\x02\x02\x16\n", "the response is not HTTP", id="another protocol"),
        pytest.param(b"HTTP/1.1 99 OK\r\n\r\n", "the response is not HTTP", id="status"),
        pytest.param(b"HTTP/2 200\r\n\r\n", "the response is not HTTP", id="HTTP 2"),
        pytest.param(head(b"no header"), "headers that are not HTTP", id="header"),
        pytest.param(head(*[b"Many: %d" % at for at in range(300)]), "or too many", id="many headers"),
        pytest.param(b"HTTP/1.1 200 OK\r\nLong: " + b"a" * 70_000, "very long headers", id="long header"),
        pytest.param(head(b"Content-Length: 5", b"Content-Length: 6"), "states two lengths", id="two lengths"),
        pytest.param(head(b"Content-Length: -1"), "no valid length", id="negative"),
        pytest.param(head(b"Content-Length: " + b"9" * 30), "no valid length", id="not a number of 64 bits"),
        pytest.param(head(b"Transfer-Encoding: gzip"), "transfer coding other than chunked", id="coding"),
        pytest.param(head(b"Transfer-Encoding: chunked") + b"soon\r\n", "a chunk has no length", id="chunk"),
        pytest.param(head(b"Transfer-Encoding: chunked") + b"-5\r\n", "a chunk has no length", id="negative chunk"),
        pytest.param(
            head(b"Transfer-Encoding: chunked") + b"1\r\n" + honest()[:1] + b"b\r\n",
            "longer than its length",
            id="long",
        ),
        pytest.param(head(b"Content-Length: 1000000") + honest()[:50], "the response ended early", id="short"),
        pytest.param(
            head(b"Transfer-Encoding: chunked") + b"5\r\n", "the response ended early", id="chunk without end"
        ),
        pytest.param(b"", "the broker closed the connection", id="nothing"),
        pytest.param(b"HTTP/1.1 200", "the broker closed the connection", id="a part of a line"),
    ],
)
def test_what_is_not_http_is_an_error(spark: SparkSession, relay: Relay, response: bytes, error: str) -> None:
    relay.respond = sent_and_closed(response)
    with pytest.raises(Exception, match=error):
        read(spark, relay, fetchTimeout="1s", fetchRetries="0").collect()


def test_connections_are_used_again(spark: SparkSession, relay: Relay) -> None:
    frame = read(spark, relay)
    frame.collect()
    before = relay.opened
    for _ in range(5):
        assert len(frame.collect()) == ROWS
    assert relay.opened == before


@pytest.mark.parametrize("is_told", [True, False])
def test_connection_that_was_closed_meanwhile_costs_no_retry(spark: SparkSession, relay: Relay, is_told: bool) -> None:
    frame = read(spark, relay, fetchRetries="0", retryInterval="60s")
    relay.end_after = not is_told
    if is_told:
        relay.respond = sent(with_length().replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
    started_s = time.monotonic()
    for _ in range(3):
        assert len(frame.collect()) == ROWS
        relay.drop()
    assert relay.asked >= 3
    assert time.monotonic() - started_s < 60, "a retry waits for that long"


def test_what_came_on_an_idle_connection_answers_no_request(spark: SparkSession, relay: Relay) -> None:
    is_read, has_more = threading.Event(), threading.Event()

    def with_more(peer: socket.socket) -> None:
        peer.sendall(with_length())
        is_read.wait(_FOR_EVER_S)
        peer.sendall(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        has_more.set()

    relay.respond = with_more
    frame = read(spark, relay, fetchRetries="0", retryInterval="60s")
    for _ in range(3):
        is_read.clear()
        has_more.clear()
        assert len(frame.collect()) == ROWS
        is_read.set()
        assert has_more.wait(10)


def test_head_that_comes_slowly_is_no_response(spark: SparkSession, relay: Relay) -> None:
    def slowly(peer: socket.socket) -> None:
        while not relay.stopped.wait(0.1):
            peer.sendall(b"A")

    relay.respond = slowly
    with pytest.raises(Exception, match="no response within 1 s"):
        read(spark, relay, fetchTimeout="1s", fetchRetries="0").collect()


def test_body_that_stops_is_an_error(spark: SparkSession, relay: Relay) -> None:
    def half(peer: socket.socket) -> None:
        peer.sendall((data := with_length())[: len(data) - 20])
        relay.stopped.wait(_FOR_EVER_S)

    relay.respond = half
    with pytest.raises(Exception, match="the broker sent nothing for 1 s"):
        read(spark, relay, fetchTimeout="1s", fetchRetries="0").collect()


def test_body_that_drips_is_an_error(spark: SparkSession, relay: Relay) -> None:
    def dripping(peer: socket.socket) -> None:
        data = with_length()
        peer.sendall(data[: len(data) - 300])
        for at in range(len(data) - 300, len(data)):
            peer.sendall(data[at : at + 1])
            if relay.stopped.wait(0.05):
                return

    relay.respond = dripping
    with pytest.raises(Exception, match="it arrived at less than 1024 bytes per second"):
        read(spark, relay, fetchTimeout="1s", fetchRetries="0").collect()


def test_request_that_is_not_received_has_a_time_limit(spark: SparkSession, relay: Relay) -> None:
    relay.takes_bodies = False
    streams = ",".join(f"{at:06}" + "a" * 200 for at in range(60_000))  # more than sockets hold
    started_s = time.monotonic()
    with pytest.raises(Exception, match="no response within 2 s"):
        read(spark, relay, stream=streams, fetchTimeout="2s", fetchRetries="0").collect()
    assert time.monotonic() - started_s < _FOR_EVER_S / 2


def test_redirects_that_are_refused_keep_no_connection(spark: SparkSession, relay: Relay) -> None:
    """To a server that requires the token and must not have it: the reader tries again until its time is over."""
    with Relay(relay.honest) as other:
        other.respond = sent(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 500000\r\n\r\n" + bytes(500_000))
        relay.respond = sent(
            b"HTTP/1.1 307 Moved\r\nLocation: " + other.url.encode() + b"/messages?a=1\r\nContent-Length: 2\r\n\r\n{}"
        )
        jvm: Any = spark._jvm
        files = Path(f"/proc/{jvm.java.lang.ProcessHandle.current().pid()}/fd")
        before = len(list(files.iterdir()))
        with pytest.raises(Exception, match="requires credentials"):
            read(spark, relay, fetchRetries="0", fetchTimeout="1s", token=f"nlt_{'0' * 12}_{'A' * 43}").collect()
        assert other.asked > 50
        assert len(list(files.iterdir())) < before + 20


@pytest.mark.parametrize("is_begun", [True, False])
def test_task_that_waits_for_a_broker_can_be_cancelled(spark: SparkSession, relay: Relay, is_begun: bool) -> None:
    waiting = threading.Event()

    def hang(peer: socket.socket) -> None:
        peer.sendall(with_length()[: 400 if is_begun else 0])
        waiting.set()
        relay.stopped.wait(_FOR_EVER_S)

    relay.respond = hang
    frame = read(spark, relay, fetchTimeout="50s")
    errors: list[str] = []

    def collect() -> None:
        spark.sparkContext.setJobGroup("waits", "a job that waits", interruptOnCancel=True)
        try:
            frame.collect()
        except Exception as error:
            errors.append(str(error))

    thread = threading.Thread(target=collect)
    thread.start()
    assert waiting.wait(30)
    started_s = time.monotonic()
    spark.sparkContext.cancelJobGroup("waits")
    thread.join(_FOR_EVER_S)
    assert "cancelled" in errors[0]
    tracker = spark.sparkContext.statusTracker()
    eventually(lambda: not tracker.getActiveStageIds(), 30, "the task has ended")
    assert time.monotonic() - started_s < _FOR_EVER_S / 2
    relay.respond = sent(with_length())
    assert len(frame.collect()) == ROWS, "the next task is not interrupted"
