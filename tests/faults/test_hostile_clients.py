"""One client cannot harm the others: floods of connections, slow readers, unfinished uploads."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, all_values, eventually, publish_acked

FILES = 1024


@contextmanager
def limited(folder: Path, files: int) -> Iterator[tuple[NatsServer, BrokerProcess]]:
    """A broker that may open so many files."""
    folder.mkdir(parents=True, exist_ok=True)
    server = NatsServer(0, folder / "nats.log").start()
    broker = BrokerProcess(folder / "data", server.url)
    broker.prefix = ["prlimit", f"--nofile={files}:{files}"]
    try:
        yield server, broker.start()
    finally:
        broker.kill()
        server.stop()


def connect(broker: BrokerProcess, within_s: float = 10) -> socket.socket:
    address = urlsplit(broker.url)
    return socket.create_connection((address.hostname, address.port), within_s)


def first_bytes(connection: socket.socket) -> bytes:
    """What has been answered so far."""
    connection.setblocking(False)
    try:
        return connection.recv(4096) or b"closed"
    except BlockingIOError:
        return b""
    except ConnectionResetError:
        return b"closed"
    finally:
        connection.settimeout(10)


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HT"], ids=["silent", "half a request"])
def test_more_idle_connections_than_files_leave_room_for_the_others(tmp_path: Path, sent: bytes) -> None:
    with limited(tmp_path / "own", FILES) as (nats, broker), ExitStack() as idle:
        broker.client().create_stream("orders", "orders")
        for _ in range(FILES + 76):
            one = idle.enter_context(connect(broker))
            one.sendall(sent)
        time.sleep(2)
        assert broker.ready()
        assert publish_acked(nats.url, "orders", [b"a"])[0]["offset"] == 0
        broker.client().create_stream("more", "more")
        assert publish_acked(nats.url, "more", [b"b"])[0]["offset"] == 0
        assert all_values(broker.client(), "orders") == [b"a"]
        assert psutil.Process(broker.pid).num_fds() < 0.9 * FILES
        idle.close()
        eventually(lambda: psutil.Process(broker.pid).num_fds() < 100, 20, "their files are closed")
        assert "Traceback" not in broker.output()
        assert broker.terminate() < 5


def test_more_long_polls_than_connections_are_refused_and_operators_still_served(tmp_path: Path) -> None:
    with limited(tmp_path / "own", FILES) as (nats, broker), ExitStack() as polling:
        broker.client().create_stream("orders", "orders")
        head = b"GET /v1/streams/orders/messages?start=0&wait_ms=60000 HTTP/1.1\r\nHost: x\r\n\r\n"
        polls = []
        for count in range(FILES):
            one = polling.enter_context(connect(broker))
            one.sendall(head)
            polls.append(one)
            if count % 100 == 0:
                time.sleep(0.2)
        waiting = [one for one in polls if first_bytes(one) == b""]
        assert 400 < len(waiting) <= FILES // 2 + 64
        one_more = polling.enter_context(connect(broker))
        one_more.sendall(head)
        refused = one_more.recv(4096)
        assert refused.startswith(b"HTTP/1.1 429")
        assert b'"code": "overloaded"' in refused
        assert broker.ready()
        assert publish_acked(nats.url, "orders", [b"a"])[0]["offset"] == 0
        assert waiting[0].recv(12) == b"HTTP/1.1 200"
        assert "Traceback" not in broker.output()
