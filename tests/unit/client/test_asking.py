"""Which broker is asked first: one that hangs is waited for once, whichever client of the process asks."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from natslog.client import ClientOptions, NatslogClient, asking
from natslog.errors import BrokerUnavailable, PartsUnavailable
from natslog.nats_server import free_port
from tests.unit.client.answering import Answers, serving

_TIMEOUT_S = 0.3


class _Answering(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *_: Any) -> None:
        """Not into the tests' output."""


@pytest.fixture
def answering() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answering)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def hanging() -> Iterator[socket.socket]:
    """The kernel takes connections, as for a process that is stopped, and no process answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as listening:
        listening.setblocking(False)
        yield listening


def url_of(listening: socket.socket) -> str:
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def connections_to(listening: socket.socket) -> int:
    """Since it was last asked."""
    count = 0
    while True:
        try:
            listening.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


def ask(*servers: str) -> None:
    """As a task does: with a client of its own."""
    with NatslogClient(servers, ClientOptions(timeout_s=_TIMEOUT_S, retries=0)) as client:
        assert client.streams() == []


def test_broker_that_hangs_is_waited_for_once_by_all_clients_of_a_process(
    answering: str, hanging: socket.socket
) -> None:
    for _ in range(3):
        ask(url_of(hanging), answering)
    assert connections_to(hanging) == 1


def test_silence_is_forgotten_after_ten_times_its_cost_and_with_the_first_answer(
    answering: str, hanging: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_ASKED_LAST_S", 0.0)
    clock = [1000.0]
    monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def silent_for(waited_s: float) -> None:
        asking._ask_last(url_of(hanging), waited_s=waited_s)

    silent_for(30.0)
    clock[0] += 299
    ask(url_of(hanging), answering)
    assert connections_to(hanging) == 0
    clock[0] += 2
    ask(url_of(hanging), answering)
    assert connections_to(hanging) == 1
    silent_for(30.0)
    asking._ask_last(answering, waited_s=30.0)
    ask(answering)
    ask(url_of(hanging), answering)
    assert connections_to(hanging) == 0, "the one that has answered since comes first"


@pytest.mark.parametrize("dead_first", [True, False])
def test_error_says_what_a_broker_answered_rather_than_which_one_could_not_be_reached(dead_first: bool) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    refusal = PartsUnavailable("part 0 is staged at broker 2, which does not respond")
    with serving() as start:
        servers = [nobody, start(Answers(orders=(503, refusal.to_json(), {})))]
        client = NatslogClient(
            servers if dead_first else servers[::-1], ClientOptions(retries=1, retry_interval_s=0.01)
        )
        with pytest.raises(BrokerUnavailable, match="staged at broker 2"):
            client.stream("orders")


@pytest.mark.long
def test_first_answer_is_awaited_for_a_limited_time_and_one_that_hangs_leaves_time_for_others(
    hanging: socket.socket,
) -> None:
    class Slow(_Answering):
        def do_GET(self) -> None:
            time.sleep(1.2)
            super().do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    Thread(target=server.serve_forever, daemon=True).start()
    options = ClientOptions(first_answer_within_s=3.0)
    with NatslogClient([url_of(hanging), f"http://127.0.0.1:{server.server_port}"], options) as client:
        assert client.streams() == []
    server.shutdown()
    server.server_close()
    asking._silent_until.clear()
    started = time.monotonic()
    with NatslogClient([url_of(hanging)], options) as client, pytest.raises(BrokerUnavailable) as caught:
        client.streams()
    assert f"{url_of(hanging)} did not answer within 3 s" in str(caught.value)
    assert caught.value.facts["answered"] is False
    assert 2.5 < time.monotonic() - started < options.timeout_s
