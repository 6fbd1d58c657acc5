"""Every call at every listener of a broker, by somebody without credentials. Neither is written down here: calls are
those that the server describes, listeners those that the process has.
"""

from __future__ import annotations

import re
import socket
import ssl
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from natslog.client import ClientOptions, NatslogClient
from natslog.http.openapi import document
from natslog.node.peers.handshake import LINK_PATH
from tests.faults.test_hostile_clients import FILES, limited
from tests.harness import BrokerProcess, eventually
from tests.integration.test_access import admin_token
from tests.integration.test_tls import _make

pytestmark = pytest.mark.long

CALLS = [
    *((method.upper(), path) for path, calls in document()["paths"].items() for method in calls),
    ("GET", LINK_PATH),
]
BODIES = {  # what comes of a request before nothing more comes
    "head": "",
    "no body": "Content-Length: 1000\r\n\r\n",
    "a byte of the body": "Content-Length: 1000\r\n\r\n{",
    "half a chunk": "Transfer-Encoding: chunked\r\n\r\nff\r\n{",
}
ENDS_WITHIN_S = 60


def head(method: str, path: str, stream: str) -> str:
    concrete = re.sub(r"\{name\}", stream, path)
    return f"{method} {re.sub(r'{[^}]*}', '1', concrete)} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def listeners(broker: BrokerProcess) -> set[tuple[str, int]]:
    found = psutil.Process(broker.pid).net_connections("inet")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def connected(broker: BrokerProcess, address: tuple[str, int], context: ssl.SSLContext | None) -> socket.socket:
    connection = socket.create_connection(address, 10)
    return connection if context is None else context.wrap_socket(connection, server_hostname="localhost")


@pytest.mark.parametrize("has_tls", [False, True], ids=["http", "https"])
def test_who_has_no_credentials_takes_no_place_learns_nothing_and_leaves_few_lines(
    tmp_path: Path, has_tls: bool
) -> None:
    settings = _make(tmp_path / "tls") if has_tls else {}
    context = ssl.create_default_context(cafile=settings["tls_ca_file"]) if has_tls else None
    with limited(tmp_path / "own", FILES, settings, NATSLOG_SECURITY="true") as (_, broker), ExitStack() as stack:
        options = ClientOptions(retries=0, timeout_s=20, token=admin_token(broker), **broker.tls)
        admin = stack.enter_context(NatslogClient(broker.url, options))
        admin.create_stream("orders", "orders")
        addresses = listeners(broker)
        assert (urlsplit(broker.url).hostname, urlsplit(broker.url).port) in addresses
        unfinished: list[socket.socket] = []
        with ExitStack() as opened:
            for address in addresses:
                for method, path in CALLS:
                    for kind, rest in BODIES.items():
                        if method == "GET" and kind != "head":
                            continue
                        one = opened.enter_context(connected(broker, address, context))
                        one.sendall((head(method, path, "orders") + rest).encode())
                        unfinished.append(one)
                for _ in range(FILES):
                    one = opened.enter_context(connected(broker, address, context))
                    one.sendall(head("GET", "/v1/streams", "orders").encode())
            admin.create_stream("other", "other")
            assert {one["name"] for one in admin.streams()} == {"orders", "other"}
            assert psutil.Process(broker.pid).num_fds() < FILES // 2
            eventually(lambda: all(map(has_ended, unfinished)), ENDS_WITHIN_S, "all of them have ended")
        for address in addresses:
            for method, path in CALLS:
                there, elsewhere = (
                    answer(broker, address, context, method, path, one) for one in ("orders", "nowhere-to-be-found")
                )
                assert there == elsewhere, f"{method} {path} tells that a stream exists"
        admin.delete_stream("orders")
        lines = [line for line in broker.output().splitlines() if "natslog.audit" in line]
        assert len([line for line in lines if "stream.delete" not in line and "admin" not in line]) <= 10
        assert "Traceback" not in broker.output()


def has_ended(connection: socket.socket) -> bool:
    """Answered, or closed."""
    connection.setblocking(False)
    try:
        connection.recv(4096)
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True
    return True


def answer(
    broker: BrokerProcess, address: tuple[str, int], context: ssl.SSLContext | None, method: str, path: str, name: str
) -> tuple[bytes, ...]:
    """Status and body of the whole request, without what differs from request to request."""
    with connected(broker, address, context) as one:
        one.sendall((head(method, path, name) + "Connection: close\r\nContent-Length: 2\r\n\r\n{}").encode())
        data = b""
        while piece := one.recv(65536):
            data += piece
    start, _, body = data.partition(b"\r\n\r\n")
    if path != LINK_PATH:
        assert b"x-content-type-options: nosniff" in start.lower(), (method, path)
        assert not has_strict(start) or context is not None
    status = start.split(b"\r\n")[0]
    is_same = status.split()[1:2] in ([b"401"], [b"403"], [b"404"], [b"400"])
    return (status, re.sub(name.encode(), b"", body)) if is_same else (status,)


def has_strict(start: bytes) -> bool:
    return b"strict-transport-security" in start.lower()
