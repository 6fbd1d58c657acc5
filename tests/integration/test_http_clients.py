"""Clients that are slow, leave early, send half of something: they do not delay other clients, and leave no resources
behind.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from natslog.client import NatslogClient
from tests.harness import BrokerProcess, all_values, eventually, publish_acked, running
from tests.integration.asking import ask, error


@pytest.mark.long
def test_half_a_request_does_not_disturb_others(broker: BrokerProcess) -> None:
    with socket.create_connection(("127.0.0.1", broker.http_port)) as raw:
        raw.sendall(b"POST /v1/streams HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert ask(broker, "GET", "/healthz").status == 200


@pytest.mark.long
def test_slow_client_delays_no_other(broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    publish_acked(nats_url, name, [b"x" * 1_000_000] * 24)
    with socket.create_connection(("127.0.0.1", broker.http_port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(f"GET /v1/streams/{name}/messages?max_bytes=100000000 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        slow.recv(100)  # and reads no further
        assert len(all_values(client, name)) == 24
        assert publish_acked(nats_url, name, [b"y"])[0]["offset"] == 24


# ---- slow clients of answers that are made in memory ----

_SLOW = 60
_REWRITTEN = "/v1/streams/orders/messages?subject=%3E&columns=value"


@contextmanager
def running_with_orders(folder: Path) -> Iterator[tuple[BrokerProcess, NatslogClient]]:
    """A broker whose answer to `_REWRITTEN` has nearly 8 MB."""
    with running(folder) as (server, broker):
        client = broker.client()
        client.create_stream("orders", "orders")
        for at in range(8):
            publish_acked(server.url, "orders", [b"%d" % at * 990_000])
        yield broker, client


def slow_request(broker: BrokerProcess, path: str) -> socket.socket:
    """Sends it, and reads nothing of the answer yet."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", broker.http_port))
    raw.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    return raw


def anonymous_bytes(broker: BrokerProcess) -> int:
    status = Path(f"/proc/{broker.pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))


def rest_of(raw: socket.socket) -> bytes:
    return b"".join(iter(lambda: raw.recv(1 << 20), b""))


def files_without_a_name(broker: BrokerProcess) -> int:
    folder = Path(f"/proc/{broker.pid}/fd")
    return sum(os.readlink(link).endswith("(deleted)") for link in folder.iterdir())


@pytest.mark.alone  # clients that receive nothing for some seconds are disconnected
@pytest.mark.long
def test_rewritten_answers_for_many_slow_clients_need_little_memory(own: Path) -> None:
    with running_with_orders(own) as (broker, client):
        whole = ask(broker, "GET", _REWRITTEN).data
        assert len(whole) > 6_000_000
        before = anonymous_bytes(broker)
        with ExitStack() as closing:
            slow = [closing.enter_context(slow_request(broker, _REWRITTEN)) for _ in range(_SLOW)]
            begun = [raw.recv(100) for raw in slow]
            assert all(answer.startswith(b"HTTP/1.1 200") for answer in begun)
            assert files_without_a_name(broker) > _SLOW // 2, "what memory has no room for"
            # 64 MiB, and what allocators keep of making sixty answers at once, 150 MB; without files it is 475 MB more
            eventually(lambda: anonymous_bytes(broker) - before < 300_000_000, what="little memory")
            assert len(all_values(client, "orders")) == 8, "others are served meanwhile"
            for answer, raw in zip(begun, slow, strict=True):
                assert (answer + rest_of(raw)).partition(b"\r\n\r\n")[2] == whole
        eventually(lambda: files_without_a_name(broker) == 0)


@pytest.mark.long
def test_answer_for_which_neither_memory_nor_disk_have_room_is_429(own: Path) -> None:
    with running_with_orders(own) as (broker, _):
        broker.kill()
        broker.settings["min_free_bytes"] = 1 << 60
        broker.start()
        with ExitStack() as closing:
            slow = [closing.enter_context(slow_request(broker, _REWRITTEN)) for _ in range(_SLOW)]
            begun = [raw.recv(100) for raw in slow]
            assert {answer[:12] for answer in begun} == {b"HTTP/1.1 200", b"HTTP/1.1 429"}
            refused = ask(broker, "GET", _REWRITTEN)
            assert (refused.status, error(refused)["code"]) == (429, "overloaded")
            assert "slow clients" in error(refused)["message"]
        eventually(lambda: ask(broker, "GET", _REWRITTEN).status == 200)


# ---- clients that leave, and hostile numbers ----


def hang_up_after(broker: BrokerProcess, method: str, path: str, body: bytes = b"") -> None:
    """Sends a whole request and is gone before the answer."""
    with socket.create_connection(("127.0.0.1", broker.http_port)) as raw:
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)


@pytest.mark.long
def test_change_is_carried_out_whole_when_the_client_hangs_up(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    for at in range(20):
        stream = f"{name}-{at}"
        hang_up_after(broker, "POST", "/v1/streams", json.dumps({"name": stream, "subject": stream}).encode())
        client.create_stream(stream, stream)  # there already, or made now; in either case it records
        assert publish_acked(nats_url, stream, [b"x"])[0]["offset"] == 0
        hang_up_after(broker, "DELETE", f"/v1/streams/{stream}")
        eventually(lambda stream=stream: ask(broker, "GET", f"/v1/streams/{stream}").status == 404)
    broker.kill()
    broker.start()
    assert not [body for body in client.streams() if body["name"].startswith(f"{name}-")]


def test_readers_that_leave_early_leave_no_open_files(broker: BrokerProcess, filled: str) -> None:
    before = len(os.listdir(f"/proc/{broker.pid}/fd"))
    for _ in range(30):
        hang_up_after(broker, "GET", f"/v1/streams/{filled}/messages?start=0")
        assert ask(broker, "GET", f"/v1/streams/{filled}/messages?start=0").status == 200
    eventually(lambda: len(os.listdir(f"/proc/{broker.pid}/fd")) <= before + 3)


def test_refused_uploads_leave_nothing_behind(broker: BrokerProcess, filled: str) -> None:
    for batch in range(20):
        path = f"/v1/streams/{filled}/appends/q/{batch}/parts/0"
        assert ask(broker, "PUT", path, {"no": "arrow"}).status == 400
    assert b"natslog_staged_bytes 0.0" in ask(broker, "GET", "/metrics").data
