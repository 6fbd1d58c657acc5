"""The leafnode connection, with a real NATS server; a server that breaks the protocol is played."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import nats
import pytest

from natslog.errors import ConfigError
from natslog.nats_server import NatsServer, free_port
from natslog.wire.credentials import NatsCredentials
from natslog.wire.leaf import LeafLink
from tests.harness import LEAST_WITHIN_S, BrokerProcess, eventually, flushed, natslog, running
from tests.nats_login import METHODS, Login, server_with, tls, token, user_and_password

ACK = b"$JS.ACK.S.C.1.1.1.0.0"
COUNT, SIZE = 1000, 8192


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(0, tmp_path_factory.mktemp("leaf") / "nats.log").start()
    yield server
    server.stop()


@contextmanager
def leaf_server(folder: Path, configuration: str = "", leafnodes: str = "") -> Iterator[tuple[NatsServer, str]]:
    """A server with this configuration, whose TLS, if there is any, is that of leafnodes as well; and their URL."""
    port, block = free_port(), re.search(r"^tls \{.*\}$", configuration, re.MULTILINE)
    leafnodes += block[0] if block else ""
    text = f"{configuration}\nleafnodes {{ host: 127.0.0.1, port: {port}\n{leafnodes}\n}}\n"
    with server_with(folder, text) as server:
        yield server, f"nats-leaf://127.0.0.1:{port}"


async def until(condition: Callable[[], object], what: str, within_s: float = LEAST_WITHIN_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert condition(), what


@asynccontextmanager
async def linked(urls: str, **options: Any) -> AsyncIterator[LeafLink]:
    """Up."""
    link = LeafLink(urls, name="test", **options)
    await link.open()
    try:
        await until(lambda: link.is_up, "the link is up")
        yield link
    finally:
        await link.close()


@asynccontextmanager
async def client_of(server: NatsServer, **options: Any) -> AsyncIterator[Any]:
    client = await nats.connect(server.url, **options)
    try:
        yield client
    finally:
        await client.close()


class Received:
    """Messages of some subscriptions, with the name of the subscription before each."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._subscriptions: list[Any] = []
        self._noted = 0
        self.messages: list[tuple[str, str, str, dict[str, str] | None, bytes]] = []

    async def subscribe(self, name: str, subject: str, queue: str = "") -> Any:
        async def note(message: Any) -> None:
            headers = None if message.headers is None else {str(k): v for k, v in message.headers.items()}
            self.messages.append((name, message.subject, message.reply, headers, message.data))
            self._noted += 1

        subscription = await self._client.subscribe(subject, queue=queue, cb=note)
        self._subscriptions.append(subscription)
        await flushed(self._client)
        return subscription

    async def of(self, link: LeafLink, *sent: bytes) -> list[tuple[str, str, str, dict[str, str] | None, bytes]]:
        """What these messages of the link become, sorted."""
        self.messages.clear()
        assert link.send_now(b"".join(sent))
        assert await link.quiesced()
        await flushed(self._client)  # what the server has routed is here
        # Not the length of the queues: a message that was taken from one may still wait for its callback.
        await until(lambda: sum(one._received for one in self._subscriptions) == self._noted, "delivered")
        return sorted(self.messages, key=repr)


def message(line: bytes, payload: bytes = b"", headers: bytes | None = None) -> bytes:
    sizes = b"%d" % len(payload) if headers is None else b"%d %d" % (len(headers), len(headers) + len(payload))
    kind = b"LMSG" if headers is None else b"HMSG"
    return b"%s %s %s\r\n%s%s\r\n" % (kind, line, sizes, headers or b"", payload)


# ---- interest ----


@pytest.mark.parametrize(
    ("pattern", "queue", "subject"),
    [("in.a", "", "in.a"), ("in.*", "", "in.b"), ("in.>", "", "in.c.d"), ("jobs", "workers", "jobs")],
)
def test_interest_begins_and_ends_with_the_subscription(
    server: NatsServer, pattern: str, queue: str, subject: str
) -> None:
    async def story() -> None:
        changed: list[str] = []
        async with linked(server.leaf_url, on_interest=changed.append) as link, client_of(server) as client:
            assert not link.interest.has(subject)
            first = await client.subscribe(pattern, queue=queue)
            second = await client.subscribe(pattern, queue=queue)
            await flushed(client)
            assert await link.quiesced()
            assert link.interest.has(subject)
            assert link.interest.has(subject, "workers") == bool(queue)
            await first.unsubscribe()
            await flushed(client)
            assert await link.quiesced()
            assert link.interest.has(subject), "one subscription is left"
            assert changed == [pattern]
            await second.unsubscribe()
            await flushed(client)
            assert await link.quiesced()
            assert not link.interest.has(subject)
            assert changed == [pattern, pattern]

    asyncio.run(story())


def test_interest_that_exists_before_is_complete_when_the_link_is_up(server: NatsServer) -> None:
    async def story() -> None:
        changed: list[str] = []
        async with client_of(server) as client:
            for at in range(2000):
                await client.subscribe(f"before.{at}")
            await flushed(client)
            complete: list[bool] = []
            link = LeafLink(server.leaf_url, name="test", on_interest=changed.append)
            link.on_state = lambda up: complete.append(all(link.interest.has(f"before.{at}") for at in range(2000)))
            await link.open()
            await until(lambda: link.is_up, "up")
            await link.close()
            assert complete == [True]
            assert not changed, "on_state has said it"
            assert not link.interest.has("before.1")

    asyncio.run(story())


def test_quiesced_sees_each_subscription_that_was_made_just_before(server: NatsServer) -> None:
    async def story() -> None:
        async with linked(server.leaf_url) as link, client_of(server) as client:
            for at in range(200):
                await client.subscribe(f"just.{at}")
                await flushed(client)
                assert await link.quiesced()
                assert link.interest.has(f"just.{at}")
            assert all(await asyncio.gather(*(link.quiesced() for _ in range(1000))))

    asyncio.run(story())


def test_calls_of_settled_in_one_turn_share_a_round_trip_and_later_ones_do_not(server: NatsServer) -> None:
    async def story() -> None:
        async with linked(server.leaf_url) as link:
            assert link._connection is not None
            first = link._connection.ping()
            assert link._connection.ping() is first
            await asyncio.sleep(0)
            assert link._connection.ping() is not first, "that PING was sent before this call"
            assert await first

    asyncio.run(story())


# ---- messages ----


def test_delivery_has_the_subject_of_the_stream_and_an_ack_subject(server: NatsServer) -> None:
    async def story() -> None:
        headers = b"NATS/1.0\r\nNatslog-A: b\r\n\r\n"
        async with linked(server.leaf_url) as link, client_of(server) as client:
            received = Received(client)
            await received.subscribe("s", "in.a")
            ack = ACK.decode()
            assert await received.of(link, message(b"in.a " + ACK + b"@orders.new", b"one")) == [
                ("s", "orders.new", ack, None, b"one")
            ]
            assert await received.of(link, message(b"in.a " + ACK + b"@orders.new", b"two", headers)) == [
                ("s", "orders.new", ack, {"Natslog-A": "b"}, b"two")
            ]
            assert await received.of(link, message(b"in.a " + ACK + b"@a@b.c", b"\r\nPING\r\n")) == [
                ("s", "a@b.c", ack, None, b"\r\nPING\r\n")
            ]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("form", "reached"),
    [
        (b"in.q %s", {"plain"}),
        (b"in.q + %s workers", {"plain", "workers"}),
        (b"in.q + %s workers loggers", {"plain", "workers", "loggers"}),
        (b"in.q + %s others", {"plain"}),
    ],
)
@pytest.mark.parametrize("headers", [None, b"NATS/1.0\r\nA: b\r\n\r\n"], ids=["LMSG", "HMSG"])
def test_queue_groups_get_what_names_them_and_plain_subscribers_everything(
    server: NatsServer, form: bytes, reached: set[str], headers: bytes | None
) -> None:
    async def story() -> None:
        async with linked(server.leaf_url) as link, client_of(server) as client:
            received = Received(client)
            await received.subscribe("plain", "in.q")
            for group in ("workers", "workers", "loggers"):
                await received.subscribe(group, "in.*", group)
            assert await link.quiesced()
            assert link.interest.groups("in.q") == {"workers", "loggers"}
            got = await received.of(link, message(form % (ACK + b"@orders.new"), b"x", headers))
            assert [one[0] for one in got] == sorted(reached)
            assert {one[1:3] for one in got} == {("orders.new", ACK.decode())}
            without_reply = form.replace(b" + %s", b" | ").replace(b" %s", b"")
            got = await received.of(link, message(without_reply, b"x", headers))
            assert [one[0] for one in got] == sorted(reached)
            assert {one[1:3] for one in got} == {("in.q", "")}

    asyncio.run(story())


@pytest.mark.parametrize("reply", [b"$JS.FC.orders.worker.3", b""])
def test_statuses_and_flow_control_arrive(server: NatsServer, reply: bytes) -> None:
    async def story() -> None:
        async with linked(server.leaf_url) as link, client_of(server) as client:
            received = Received(client)
            await received.subscribe("s", "in.status")
            sent = message(b"in.status " + reply, headers=b"NATS/1.0 100 FlowControl Request\r\n\r\n")
            (got,) = await received.of(link, sent)
            assert got[1:3] == ("in.status", reply.decode())
            assert got[3] is not None
            assert got[3]["Status"] == "100"

    asyncio.run(story())


def test_messages_of_clients_do_not_come_over_the_link(server: NatsServer) -> None:
    async def story() -> None:
        async with linked(server.leaf_url) as link, client_of(server) as client:
            assert link._connection is not None
            await client.publish("anything", b"x" * 1000)
            await flushed(client)
            assert await link.quiesced()
            await link.quiesced()
            assert link._connection._reader.is_between_lines
            assert link.connections == 1

    asyncio.run(story())


def test_two_brokers_on_one_server_have_their_own_connections(server: NatsServer) -> None:
    """Also if they have one name, as brokers of two clusters may."""

    async def story() -> None:
        async with linked(server.leaf_url) as one, linked(server.leaf_url) as other, client_of(server) as client:
            received = Received(client)
            await received.subscribe("s", "in.both")
            assert await one.quiesced()
            assert await other.quiesced()
            assert one.interest.has("in.both")
            assert other.interest.has("in.both")
            assert [m[4] for m in await received.of(one, message(b"in.both", b"1"))] == [b"1"]
            assert [m[4] for m in await received.of(other, message(b"in.both", b"2"))] == [b"2"]
            assert (one.connections, other.connections) == (1, 1)

    asyncio.run(story())


def test_message_that_is_larger_than_the_limit_ends_the_connection(tmp_path: Path) -> None:
    async def story(server: NatsServer, url: str) -> None:
        lost = asyncio.Event()
        async with linked(url, on_state=lambda up: None if up else lost.set()) as link:
            assert link.max_payload_bytes == 1000
            assert link.send_now(message(b"in.a", b"x" * 1000))
            assert await link.quiesced()
            assert link.send_now(message(b"in.a", b"x" * 1001))
            async with asyncio.timeout(10):
                await lost.wait()
            assert "Maximum Payload" in link.problem
            await until(lambda: link.is_up, "up again")

    with leaf_server(tmp_path, "max_payload: 1000") as (server, url):
        asyncio.run(story(server, url))


# ---- loss ----


def test_interest_is_complete_again_when_the_server_has_restarted(tmp_path: Path) -> None:
    async def story() -> None:
        states: list[bool] = []
        server = NatsServer(0, tmp_path / "nats.log").start()
        try:
            async with linked(server.leaf_url, on_state=states.append) as link:
                client = await nats.connect(server.url, reconnect_time_wait=0.05, max_reconnect_attempts=-1)
                await client.subscribe("again.*")
                await flushed(client)
                assert await link.quiesced()
                assert link.interest.has("again.x")
                await asyncio.to_thread(server.stop)
                await until(lambda: states == [True, False], "lost")
                assert not link.is_up
                assert not link.interest.has("again.x")
                assert not link.send_now(message(b"again.x", b"1"))
                assert not link.may_send("again.x")
                assert not await link.quiesced()
                await until(lambda: "leafnodes { port: 7422 }" in link.problem, "the remedy")
                await asyncio.to_thread(server.start)
                await until(lambda: link.is_up and link.interest.has("again.x"), "up again")
                assert (states, link.connections, link.problem) == ([True, False, True], 2, "")
                await client.close()
        finally:
            server.stop()

    asyncio.run(story())


def test_second_url_is_used_where_the_first_does_not_answer(server: NatsServer) -> None:
    async def story() -> None:
        async with linked(f"nats-leaf://127.0.0.1:{free_port()},{server.leaf_url}") as link:
            assert await link.quiesced()

    asyncio.run(story())


@contextmanager
def stopped(server: NatsServer) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    threads = Path(f"/proc/{server.pid}/task")
    try:
        while any((one / "stat").read_text().rpartition(")")[2].split()[0] != "T" for one in threads.iterdir()):
            time.sleep(0.001)  # the signal takes effect when the system runs each thread next
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.long
def test_server_that_says_nothing_any_more_is_lost_after_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("natslog.wire.leaf._SILENT_PINGS", 3)  # a minute else

    async def story(server: NatsServer) -> None:
        states: list[bool] = []
        async with linked(server.leaf_url, on_state=states.append) as link:
            with stopped(server):
                assert not await link.quiesced(0.2)
                await until(lambda: states == [True, False], "lost")
                assert "sent nothing" in link.problem
            await until(lambda: link.is_reachable, "up again")
            assert states == [True, False, True]

    server = NatsServer(0, tmp_path / "nats.log").start()
    try:
        asyncio.run(story(server))
    finally:
        server.stop()


@pytest.mark.long
def test_server_that_accepts_less_than_is_sent_delays_and_then_refuses_more(tmp_path: Path) -> None:
    async def story(server: NatsServer) -> None:
        async with linked(server.leaf_url) as link:
            with stopped(server):
                sent = 0
                while link.send_now(message(b"in.a", b"x" * SIZE) * COUNT):
                    sent += 1
                assert sent >= 8, "64 MiB"
                assert link.unsent_bytes > 64 * 1024 * 1024
                waiting = asyncio.create_task(link.drain())
                await asyncio.sleep(0.1)
                assert not waiting.done()
                assert not link.is_writable
            async with asyncio.timeout(30):
                await waiting
            assert link.is_writable
            assert link.unsent_bytes <= 1024 * 1024
            assert await link.quiesced(20)
            assert link.connections == 1
            with stopped(server):
                while link.send_now(message(b"in.a", b"x" * SIZE) * COUNT):
                    pass
                async with asyncio.timeout(10):
                    await link.close()
            assert not link.is_up

    server = NatsServer(0, tmp_path / "nats.log").start()
    try:
        asyncio.run(story(server))
    finally:
        server.stop()


def test_close_sends_what_was_sent_before(server: NatsServer) -> None:
    async def story() -> None:
        async with client_of(server) as client:
            subscription = await client.subscribe("last.*", pending_bytes_limit=1 << 30)
            async with linked(server.leaf_url) as link:
                assert link.send_now(message(b"last.a", b"x" * SIZE) * 4 * COUNT)
                assert link.unsent_bytes, "the kernel takes less at once"
            await until(lambda: subscription._received == 4 * COUNT, "all arrive")

    asyncio.run(story())


# ---- logins ----


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_link_logs_in_with(tmp_path: Path, method: Callable[[Path], Login], caplog: pytest.LogCaptureFixture) -> None:
    login = method(tmp_path)

    async def story(url: str) -> None:
        async with linked(url, credentials=NatsCredentials(**login.right)) as link:
            assert await link.quiesced()
            assert link._connection is not None
            assert link._connection.has_tls == ("tls_ca_file" in login.right)
        link = LeafLink(url, name="wrong", credentials=NatsCredentials(**login.wrong))
        await link.open()
        await until(lambda: login.said in link.problem, login.said)
        await asyncio.sleep(0.6)
        assert not link.connections
        await link.close()

    with leaf_server(tmp_path, login.configuration) as (_, url), caplog.at_level(logging.DEBUG, "natslog"):
        asyncio.run(story(url))
    assert sum(login.said in one.message for one in caplog.records) == 1, "logged once"
    assert not [secret for secret in login.secret if secret in caplog.text]


def test_user_and_password_of_the_leafnodes_block_in_the_url(tmp_path: Path) -> None:
    async def story(url: str) -> None:
        right = url.replace("//", "//leaf:p%40ss@")
        async with linked(right) as link:
            assert await link.quiesced()
            assert "ss@" not in link.shown_url
        wrong = LeafLink(url.replace("//", "//leaf:SECRET@"), name="test")
        await wrong.open()
        await until(lambda: "correct user and password in the URL" in wrong.problem, "the remedy")
        assert "SECRET" not in wrong.problem + wrong.shown_url
        await wrong.close()

    with leaf_server(tmp_path, leafnodes="authorization { user: leaf, password: 'p@ss' }") as (_, url):
        asyncio.run(story(url))


def test_token_in_the_url(tmp_path: Path) -> None:
    login = token(tmp_path)

    async def story(url: str) -> None:
        async with linked(url.replace("//", f"//{login.secret[0]}@")) as link:
            assert await link.quiesced()

    with leaf_server(tmp_path, login.configuration) as (_, url):
        asyncio.run(story(url))


def test_rotated_file_is_used_at_the_next_attempt(tmp_path: Path) -> None:
    login = user_and_password(tmp_path)

    def rotate() -> None:
        Path(login.wrong["password_file"]).write_text(Path(login.right["password_file"]).read_text())

    async def story(url: str) -> None:
        link = LeafLink(url, name="test", credentials=NatsCredentials(**login.wrong))
        await link.open()
        await until(lambda: login.said in link.problem, login.said)
        rotate()
        await until(lambda: link.is_up, "up")
        assert not link.problem
        await link.close()

    with leaf_server(tmp_path, login.configuration) as (_, url):
        asyncio.run(story(url))


def test_file_that_cannot_be_read_is_an_error_of_open(tmp_path: Path) -> None:
    link = LeafLink("nats-leaf://127.0.0.1", name="test", credentials=NatsCredentials(token_file=str(tmp_path / "no")))
    with pytest.raises(ConfigError, match="cannot read the NATS token file"):
        asyncio.run(link.open())


def test_nothing_is_sent_without_tls_where_tls_is_wanted(tmp_path: Path) -> None:
    login = tls(tmp_path)
    received = bytearray()

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"client_id": 1, "leafnode_urls": ["a"]}\r\n')
        received.extend(await reader.read())

    async def story() -> None:
        credentials = NatsCredentials(**login.right)
        for scheme, given in (("nats-leaf", credentials), ("tls", NatsCredentials())):
            async with played(play) as url:
                link = LeafLink(url.replace("nats-leaf", scheme), name="test", credentials=given)
                await link.open()
                await until(lambda link=link: "does not offer TLS" in link.problem, "the reason")
                await link.close()

    asyncio.run(story())
    assert not received


def test_permissions_of_the_user_are_stated_and_end_the_connection_if_they_are_ignored(tmp_path: Path) -> None:
    configuration = """accounts { A { users: [
        { user: leaf, password: pw, permissions: { publish: { allow: ["in.>"], deny: ["in.secret"] } } }
        { user: client, password: pw } ] } }"""

    async def story(server: NatsServer, url: str) -> None:
        lost = asyncio.Event()
        leaf = url.replace("//", "//leaf:pw@")
        async with linked(leaf, on_state=lambda up: None if up else lost.set()) as link:
            async with client_of(server, user="client", password="pw") as client:
                received = Received(client)
                for subject in ("in.a", "in.*", "out"):
                    await received.subscribe(subject, subject)
                assert await link.quiesced()
                assert [link.may_send(one) for one in ("in.a", "in.secret", "out")] == [True, False, False]
                got = await received.of(link, message(b"in.a " + ACK + b"@out", b"1"))
                assert [one[:2] for one in got] == [("in.*", "out"), ("in.a", "out")]
                assert not link.interest.has("out"), "the server states only what it accepts"
                assert link.interest.has("in.secret"), "but for patterns it cannot"
                link.send_now(message(b"in.secret", b"1"))
                async with asyncio.timeout(10):
                    await lost.wait()
                assert 'Permissions Violation for Publish to "in.secret"' in link.problem
                assert "permit the NATS user" in link.problem

    with leaf_server(tmp_path, configuration) as (server, url):
        asyncio.run(story(server, url))


@pytest.mark.parametrize("leafnodes", ["compression: s2_best", "min_version: 2.9.0"])
def test_servers_that_prefer_compression_or_require_a_version(tmp_path: Path, leafnodes: str) -> None:
    async def story(server: NatsServer, url: str) -> None:
        async with linked(url) as link, client_of(server) as client:
            received = Received(client)
            await received.subscribe("s", "in.a")
            assert len(await received.of(link, message(b"in.a", b"x" * 10000))) == 1

    with leaf_server(tmp_path, leafnodes=leafnodes) as (server, url):
        asyncio.run(story(server, url))


# ---- wrong and hostile servers ----


@asynccontextmanager
async def played(
    play: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """The URL of a server that behaves so with each connection, and closes it then."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await play(reader, writer)
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"nats-leaf://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


async def problem_with(
    play: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], said: str
) -> None:
    """The link states this problem, does not come up, and can be closed."""
    async with played(play) as url:
        link = LeafLink(url, name="test")
        await link.open()
        await until(lambda: said in link.problem, said)
        assert not link.connections
        async with asyncio.timeout(5):
            await link.close()


INFO = b'INFO {"client_id": 1, "leafnode_urls": ["a"], "max_payload": 100}\r\n'


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The login of a leafnode."""
    writer.write(INFO)
    assert (await reader.readline()).startswith(b"CONNECT")
    assert await reader.readline() == b"PING\r\n"


@pytest.mark.long
@pytest.mark.parametrize("is_dropped", [True, False])
def test_what_a_server_that_does_not_answer_has_not_received_is_dropped(is_dropped: bool) -> None:
    """Otherwise the kernel would send it for some 15 minutes, while others deliver. Closing waits as long as the server
    reads.
    """
    total, ends = 64 * 1024 * 1024, asyncio.Event()
    received = [0]
    reset = [False]

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept(reader, writer)
        writer.write(b"PONG\r\n")
        await ends.wait()
        try:
            while chunk := await reader.read(1024 * 1024):
                received[0] += len(chunk)
        except ConnectionResetError:
            reset[0] = True

    async def main() -> None:
        async with played(play) as url:
            link = LeafLink(url, name="test")
            await link.open()
            await until(lambda: link.is_up, "it is up")
            connection = link._connection
            assert connection is not None
            assert link.send_now(b"x" * total)
            if is_dropped:
                await until(lambda: not link.is_reachable, "it has not answered")
                link.drop_unreceived()
                await asyncio.sleep(0)
                ends.set()
                await until(lambda: reset[0], "nothing more comes")
                assert received[0] < total
            else:
                link.drop_unreceived()  # it has answered just now
                assert link.is_up
                ends.set()
                await until(lambda: received[0] >= total, "all has come")
            assert connection.has_ended == is_dropped
            await link.close()

    asyncio.run(main())


def test_port_for_clients_is_named_as_the_problem(server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        link = LeafLink(server.url, name="test")
        await link.open()
        await until(lambda: "a port for clients" in link.problem, "the reason")
        assert "leafnodes block" in link.problem
        await asyncio.sleep(0.8)
        await link.close()

    asyncio.run(story())
    assert sum("a port for clients" in one.message for one in caplog.records) == 1, "logged once"


def test_port_on_which_nothing_listens_is_named_as_the_problem() -> None:
    async def story() -> None:
        link = LeafLink(f"nats-leaf://localhost:{free_port()}", name="test")
        await link.open()
        await until(lambda: "nothing listens there" in link.problem, "the reason")
        await link.close()

    asyncio.run(story())


def test_server_that_requires_tls_and_whose_certificate_is_not_known(tmp_path: Path) -> None:
    login = tls(tmp_path)

    async def story(url: str) -> None:
        link = LeafLink(url, name="test")
        await link.open()
        await until(lambda: "give the CA file of the server" in link.problem, "the remedy")
        await link.close()

    with leaf_server(tmp_path, login.configuration) as (_, url):
        asyncio.run(story(url))


def test_handshake_first_with_a_server_that_does_not_begin_with_it(tmp_path: Path) -> None:
    login = tls(tmp_path)

    async def story(url: str) -> None:
        credentials = NatsCredentials(**login.right, tls_handshake_first=True)
        link = LeafLink(url, name="test", credentials=credentials)
        await link.open()
        await until(lambda: "remove handshake first" in link.problem, "the remedy")
        await link.close()

    with leaf_server(tmp_path, login.configuration) as (_, url):
        asyncio.run(story(url))


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "not the protocol of a leafnode listener"),
        (b"INFO {\r\n", "INFO of the server is not valid"),
        (b"", "sent no INFO"),
        (b"-ERR 'maximum connections exceeded'\r\n", "maximum connections exceeded"),
    ],
)
def test_server_that_sends_something_else_and_closes(sent: bytes, said: str) -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await writer.drain()

    asyncio.run(problem_with(play, said))


@pytest.mark.parametrize("first", [b"", INFO], ids=["at all", "after INFO"])
def test_server_that_accepts_and_says_nothing(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natslog.wire.leaf._CONNECT_TIMEOUT_S", 0.2)

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        await reader.read()

    asyncio.run(problem_with(play, "did not answer" if first else "sent no INFO"))


def test_data_without_tls_before_the_tls_handshake_is_refused() -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = json.dumps({"client_id": 1, "leafnode_urls": ["a"], "tls_required": True}).encode()
        writer.write(b"INFO " + info + b"\r\nLS+ injected\r\n")
        await reader.read()

    asyncio.run(problem_with(play, "without TLS before the TLS handshake"))


@pytest.mark.parametrize("line", [b"LS+ a b c d\r\n", b"LMSG a\r\n", b"NONSENSE\r\n", b"x" * (1 << 20) + b"y"])
def test_link_that_is_up_leaves_a_server_that_breaks_the_protocol(line: bytes) -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept(reader, writer)
        writer.write(b"PONG\r\n")
        await reader.readline()
        writer.write(line)
        await reader.read()

    async def story() -> None:
        async with played(play) as url:
            link = LeafLink(url, name="test")
            await link.open()
            await until(lambda: link.connections >= 2, "connected again")
            await link.close()

    asyncio.run(story())


def test_lines_in_pieces_and_messages_that_nobody_subscribed_to() -> None:
    sent = (
        b"LS+ a.b\r\nLMSG a 8\r\nLS+ no\r\n\r\nLS+ c.* g 2\r\nHMSG a r 5 6\r\nPONG\r\n\r\nPING\r\nLS- a.b\r\nPONG\r\n"
    )
    answers = bytearray()

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept(reader, writer)
        for at in range(len(sent)):
            writer.write(sent[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0)
        answers.extend(await reader.readline())
        await reader.read()

    async def story() -> None:
        async with played(play) as url, linked(url) as link:
            assert link.interest.has("c.x", "g")
            assert not link.interest.has("a.b")
            assert not link.interest.has("no")
            assert link.max_payload_bytes == 100
            await until(lambda: answers == b"PONG\r\n", "the PING is answered")

    asyncio.run(story())


def test_half_a_line_is_not_interest() -> None:
    """The server ends within a line; on the next connection it begins anew."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept(reader, writer)
        writer.write(b"LS+ whole\r\nPONG\r\nLS+ ha")
        await reader.readline()

    async def story() -> None:
        seen: list[bool] = []
        async with played(play) as url:
            link = LeafLink(url, name="test")
            link.on_state = lambda up: seen.append(link.interest.has("whole") and not link.interest.has("ha"))
            await link.open()
            await until(lambda: len(seen) >= 4, "connected twice, and lost twice")
            await link.close()
        assert seen[:4] == [True, False, True, False]

    asyncio.run(story())


def test_callback_that_fails_ends_the_connection_and_is_logged(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(subject: str) -> None:
        raise RuntimeError("broken")

    async def story() -> None:
        async with linked(server.leaf_url, on_interest=fail) as link, client_of(server) as client:
            await client.subscribe("fails")
            await flushed(client)
            await until(lambda: link.connections == 2, "connected again")
            assert link.interest.has("fails")

    asyncio.run(story())
    assert "a receiver of leafnode interest failed" in caplog.text


@pytest.mark.long
def test_close_in_every_moment_ends_the_link(server: NatsServer) -> None:
    async def story() -> None:
        for turns in range(40):
            link = LeafLink(server.leaf_url, name="test")
            await link.open()
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(5):
                await link.close()
            assert not link.is_up
            await link.close()
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "nats-leaf"]

    asyncio.run(story())


# ---- brokers ----


def leaf_of(broker: BrokerProcess) -> str:
    return str(broker.client().cluster()["nats_leaf"])


def leaf_metrics(broker: BrokerProcess) -> dict[str, float]:
    prefix = "natslog_nats_leaf_"
    found = {name.removeprefix(prefix): value for name, value in broker.metrics().items() if name.startswith(prefix)}
    return {name: value for name, value in found.items() if not name.endswith("_created")}


def warnings_of(broker: BrokerProcess) -> list[str]:
    """Of `/readyz`, which is 503 while NATS is away."""
    try:
        with urllib.request.urlopen(f"{broker.url}/readyz", timeout=30) as answer:
            return list(json.load(answer)["warnings"])
    except urllib.error.HTTPError as error:
        return list(json.load(error)["warnings"])


@pytest.mark.long
def test_broker_states_whether_its_leafnode_connection_is_up(tmp_path: Path) -> None:
    with running(tmp_path) as (server, broker):
        assert leaf_of(broker) == "off"
        assert "nats_leaf_url is not set" in natslog("cluster", "status", url=broker.url).stdout
        assert warnings_of(broker) == []
        assert leaf_metrics(broker) == {}
        broker.terminate()
        broker.settings["nats_leaf_url"] = server.leaf_url
        broker.start()
        eventually(lambda: leaf_of(broker) == "up", what="up")
        assert "leafnode connection to NATS: up" in natslog("cluster", "status", url=broker.url).stdout
        assert leaf_metrics(broker) == {"connected": 1, "connections_total": 1, "unsent_bytes": 0}
        server.stop()
        eventually(lambda: leaf_of(broker) == "down", what="down")
        assert leaf_metrics(broker) == {"connected": 0, "connections_total": 1, "unsent_bytes": 0}
        eventually(lambda: "leafnodes { port: 7422 }" in broker.output(), what="the remedy")
        eventually(lambda: "leafnodes { port: 7422 }" in warnings_of(broker)[0], what="it is a warning")
        assert "so JetStream consumers get no messages" in warnings_of(broker)[0]
        shown = natslog("cluster", "status", url=broker.url, check=False).stdout
        assert re.search(r"leafnode connection to NATS: down: .*leafnodes \{ port: 7422 \}", shown, re.DOTALL)
        server.start()
        eventually(lambda: leaf_of(broker) == "up", what="up again")
        assert warnings_of(broker) == []
        assert leaf_metrics(broker) == {"connected": 1, "connections_total": 2, "unsent_bytes": 0}
        broker.terminate()


@pytest.mark.long
def test_broker_whose_leafnode_connection_needs_a_login_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "leaf").mkdir()
    client, leaf = user_and_password(tmp_path), token(tmp_path / "leaf")
    leafnodes = f"authorization {{ user: leaf, password: {leaf.secret[0]!r} }}"
    with leaf_server(tmp_path, client.configuration, leafnodes) as (server, url):
        settings = {f"nats_{name}": value for name, value in client.right.items()}
        settings |= {"nats_leaf_user": "leaf", "nats_leaf_password_file": leaf.right["token_file"]}
        broker = BrokerProcess(tmp_path / "data", server.url, nats_leaf_url=url, **settings)
        try:
            broker.start()
            eventually(lambda: leaf_of(broker) == "up", what="up")
            broker.terminate()
        finally:
            broker.kill()


def test_broker_does_not_start_with_a_wrong_url(tmp_path: Path) -> None:
    done = natslog("server", "--data-dir", str(tmp_path / "d"), "--nats-leaf-url", "http://u:SECRET@a", check=False)
    assert done.returncode == 1
    assert "must begin with nats-leaf://" in done.stderr
    assert "SECRET" not in done.stderr
