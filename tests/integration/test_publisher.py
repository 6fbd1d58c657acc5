"""The publisher behind `natslog pub` and the Spark sink: what counts as stored, what is refused before it is sent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from natslog.client import NatslogClient
from natslog.client.publisher import BY_HEADER, BY_REPLY, Publisher, Rows
from natslog.errors import ConfigError, InvalidRequest, NatsLoginRefused, NatsUnavailable, PublishFailed
from natslog.model import Ack
from natslog.nats_server import NatsServer, free_port
from natslog.wire.envelope import enveloped
from natslog.wire.link import NatsCredentials
from tests.harness import all_values, eventually, flushed, with_nats


def rows(subject: str, count: int, **columns: Any) -> Rows:
    values = pa.array([b"%d" % at for at in range(count)])
    return Rows(pa.array([subject] * count), values, **columns)


def ids(*texts: str | None) -> Any:
    return pa.array(texts, pa.string())


@pytest.fixture
def jetstream(tmp_path: Path) -> Iterator[NatsServer]:
    arguments = ("--jetstream", "--store_dir", str(tmp_path / "js"))
    server = NatsServer(0, tmp_path / "js.log", arguments=arguments).start()
    yield server
    server.stop()


def test_refusal_of_a_jetstream_stream_is_no_ack(jetstream: NatsServer) -> None:
    async def create(connection: Any) -> None:
        await connection.jetstream().add_stream(name="S", subjects=["s"], max_msgs=2, discard="new")

    with_nats(jetstream.url, create)
    with Publisher(jetstream.url, ack_timeout_s=1) as publisher:
        with pytest.raises(PublishFailed, match="8 rows were not acked.*maximum messages exceeded"):
            publisher.publish(rows("s", 10), "stored")
        assert publisher.acked == 2


def test_refusal_that_repetition_cannot_change_ends_the_wait(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name, max_message_bytes=100)
    with Publisher(nats_url) as publisher:
        started = time.monotonic()
        with pytest.raises(PublishFailed, match=r"1 rows were not acked \(.*: the stream refused them: "):
            publisher.publish(Rows(pa.array([name] * 2), pa.array([b"a", b"b" * 200])), "stored")
        assert time.monotonic() - started < 15, "a refusal for good is not waited for: the limit is 30 s"
        publisher.publish(rows(name, 3), "stored")
        assert publisher.acked == 4


@pytest.mark.long
def test_envelope_that_the_caller_has_made_is_acked(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    payload = enveloped(pa.RecordBatch.from_pydict({"value": pa.array([b"a", b"b"])}))
    with Publisher(nats_url) as publisher:
        publisher.publish(Rows(pa.array([name]), pa.array([payload])), "stored")
        assert publisher.acked == 1
    assert all_values(client, name) == [b"a", b"b"]


def test_answer_that_is_not_text_ends_no_connection(nats_url: str, name: str) -> None:
    """Anyone may publish to an inbox: here, an ack of an envelope with another number of rows, in another encoding."""

    async def answer(nats: Any) -> None:
        async def respond(message: Any) -> None:
            await message.respond(b'{"stream":"\xff","seq":1}')

        await nats.subscribe(name, cb=respond)
        await flushed(nats)
        await asyncio.to_thread(publish)

    def publish() -> None:
        with Publisher(nats_url, envelope=True, ack_timeout_s=5) as publisher:
            with pytest.raises(PublishFailed, match="stored as one message"):
                publisher.publish(rows(name, 100), "stored")
            assert publisher._link.connections == 1

    with_nats(nats_url, answer)


def test_stream_that_takes_an_envelope_for_a_message_has_not_stored_its_rows(jetstream: NatsServer) -> None:
    async def create(connection: Any) -> None:
        await connection.jetstream().add_stream(name="S", subjects=["s"])

    with_nats(jetstream.url, create)
    with Publisher(jetstream.url, envelope=True) as publisher:
        with pytest.raises(PublishFailed, match="stored as one message instead of as its rows"):
            publisher.publish(rows("s", 100), "stored")
        assert publisher.acked == 0
        publisher.send(rows("s", 100), "stored", envelope=False)
        publisher.wait_for_ack("stored")
        assert publisher.acked == 100


@pytest.mark.parametrize("ack", ["flush", "stored"])
def test_messages_the_server_forbids_are_an_error(tmp_path: Path, ack: str) -> None:
    config = tmp_path / "nats.conf"
    config.write_text('authorization { users = [{user: u, password: p, permissions: {publish: "allowed.>"}}] }')
    server = NatsServer(0, tmp_path / "nats.log", arguments=("--config", str(config))).start()
    try:
        url = f"nats://u:p@127.0.0.1:{server.port}"
        with Publisher(url, ack_timeout_s=5) as publisher, pytest.raises(PublishFailed, match="refused messages"):
            publisher.publish(rows("other", 3), ack)
    finally:
        server.stop()


@contextmanager
def nats_with(folder: Path, settings: str) -> Iterator[NatsServer]:
    """A server with these lines in its configuration."""
    config = folder / "nats.conf"
    config.write_text(settings)
    server = NatsServer(0, folder / "nats.log", arguments=("--config", str(config))).start()
    try:
        yield server
    finally:
        server.stop()


@pytest.mark.parametrize("login", ["", "user:WRONG_SECRET@"])
@pytest.mark.long
def test_login_that_the_server_refuses_is_an_error_with_the_remedy(tmp_path: Path, login: str) -> None:
    with nats_with(tmp_path, "authorization { user: user, password: RIGHT_SECRET }") as server:
        publisher = Publisher(f"nats://{login}127.0.0.1:{server.port}", connect_timeout_s=2)
        remedy = "refused the login .*: correct user and password in the URL, or give credentials"
        with pytest.raises(NatsLoginRefused, match=remedy) as refused, publisher:
            pass
        assert not refused.value.retriable
        assert "SECRET" not in str(refused.value.to_json())


@contextmanager
def server_that_refuses_once_and_resets() -> Iterator[int]:
    """The port of a listener that answers as a NATS server does to a wrong login: the first connection reads the
    error, later ones are reset before they do, as where the server closes with unread data.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            refused = False
            with suppress(OSError):  # the listener was closed
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(b'INFO {"server_id":"X","max_payload":1048576,"auth_required":true}\r\n')
                        connection.recv(1)
                        if not refused:
                            read = b""
                            while b"PING\r\n" not in read:
                                read += connection.recv(4096)
                            connection.sendall(b"-ERR 'Authorization Violation'\r\n")
                            refused = True
                        # Closing with unread data resets the connection.

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield port
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.long
def test_login_that_was_refused_stays_the_reason_when_later_connections_are_reset() -> None:
    with server_that_refuses_once_and_resets() as port:
        publisher = Publisher(f"nats://127.0.0.1:{port}", connect_timeout_s=2)
        with pytest.raises(NatsLoginRefused, match="Authorization Violation"), publisher:
            pass


_SOME_NKEY = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"


def test_credentials_file_that_holds_none_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "user.creds"
    with nats_with(tmp_path, f"authorization {{ users: [{{ nkey: {_SOME_NKEY} }}] }}") as server:
        credentials = NatsCredentials(creds_file=str(file))
        file.write_text("none")
        with pytest.raises(ConfigError, match=r"user\.creds is no NATS credentials file"):
            Publisher(server.url, credentials=credentials).__enter__()
        file.write_text("-----BEGIN USER NKEY SEED-----\nSUAB\n------END USER NKEY SEED------\n")
        with pytest.raises(ConfigError, match=r"user\.creds is no NATS credentials file"):
            Publisher(server.url, credentials=credentials).__enter__()


@pytest.mark.long
@pytest.mark.parametrize("ack", ["none", "flush", "stored"])
def test_server_that_ends_for_good_while_publishing_is_an_error_with_the_remedy(tmp_path: Path, ack: Ack) -> None:
    with nats_with(tmp_path, "") as server, Publisher(server.url, ack_timeout_s=1) as publisher:
        publisher.publish(rows("a", 5), "flush")
        server.stop()
        eventually(lambda: not publisher._link.is_up, what="the link has lost its connection")
        with pytest.raises(NatsUnavailable, match="no NATS server responds at .*: start one, or correct the URL"):
            publisher.publish(rows("a", 5), ack)


def test_message_above_the_servers_limit_is_an_error_that_names_limit_and_row(tmp_path: Path) -> None:
    with nats_with(tmp_path, "max_payload: 1024") as server, Publisher(server.url) as publisher:
        large = Rows(pa.array(["a", "b"]), pa.array([b"x", b"x" * 2000]))
        with pytest.raises(PublishFailed, match=r"larger than the server's limit of 1024 bytes: row 1 \(subject 'b'\)"):
            publisher.publish(large, "flush")


def test_publisher_that_is_not_open_is_an_error_with_the_remedy(nats_url: str) -> None:
    publisher = Publisher(nats_url)
    with pytest.raises(InvalidRequest, match="use it in a `with`"):
        publisher.publish(rows("a", 1), "flush")
    with publisher:
        publisher.publish(rows("a", 1), "flush")
    with pytest.raises(InvalidRequest, match="use it in a `with`"):
        publisher.publish(rows("a", 1), "flush")
    with pytest.raises(InvalidRequest, match="make a new one"), publisher:
        pass


def test_passwords_in_urls_are_not_shown() -> None:
    publisher = Publisher("nats://user:SECRET@127.0.0.1:1", connect_timeout_s=0.5)
    with pytest.raises(NatsUnavailable) as refused, publisher:
        pass
    assert "SECRET" not in refused.value.message + str(refused.value.facts)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"subjects": pa.array(["x" * 5000])}, "subject is longer than 1024 bytes: row 7"),
        ({"subjects": pa.array(["a.>"])}, "not one plain NATS subject: row 7"),
        ({"subjects": pa.array([None], pa.string())}, "subject is null"),
        ({"keys": pa.array([b" a"])}, "key is not one line of UTF-8 text without leading or trailing blanks"),
        ({"keys": pa.array([b"a\nb"])}, "key is not one line"),
        ({"keys": pa.array([b"\xff"])}, "key is not one line"),
        ({"ids": pa.array(["z "])}, "message id is not one line"),
        ({"headers": pa.array([[{"key": "a:b", "value": "c"}]])}, "header name or value"),
        ({"headers": pa.array([[{"key": "a", "value": "c\r\nX: y"}]])}, "header name or value"),
    ],
)
def test_rows_that_would_arrive_otherwise_are_refused_before_any_is_sent(
    nats_url: str, columns: dict[str, Any], words: str
) -> None:
    given = {"subjects": pa.array(["fine"]), "values": pa.array([b"x"])} | columns
    with Publisher(nats_url) as publisher, pytest.raises(PublishFailed, match=words):
        publisher.publish(Rows(**given), "none", first_row=7)


def test_few_in_flight_are_few(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    with Publisher(nats_url, max_in_flight=10) as publisher:
        sizes = []
        send = publisher._send_slice

        async def counted(*arguments: Any) -> None:
            await send(*arguments)
            sizes.append(publisher._in_flight.messages)

        publisher._send_slice = counted  # type: ignore[method-assign]
        publisher.publish(rows(name, 200, ids=ids(*(f"i{at}" for at in range(200)))), "stored")
    assert max(sizes) <= 10
    assert len(all_values(client, name)) == 200


@pytest.mark.long
def test_rows_without_an_id_are_never_sent_twice(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    client.edit_stream(name, paused=True)
    sent: list[list[int]] = []
    with Publisher(nats_url, ack_timeout_s=3) as publisher:
        send = publisher._send_slice

        async def noted(part: Any, which: Any) -> None:
            sent.append(which.tolist())
            await send(part, which)

        publisher._send_slice = noted  # type: ignore[method-assign]
        with pytest.raises(PublishFailed, match="paused"):
            publisher.publish(rows(name, 2, ids=ids("a", None)), "stored")
    first, *again = sent
    assert first == [0, 1]
    assert again, "the row with an id is sent again"
    assert all(which == [0] for which in again)


def test_connection_reset_while_the_server_takes_nothing_is_said_and_the_next_rows_go_out(tmp_path: Path) -> None:
    port = free_port()
    server = NatsServer(port, tmp_path / "nats.log").start()
    large = Rows(pa.array(["large"] * 80), pa.array([b"x" * 500_000] * 80))
    outcome: list[str] = []

    def publish(publisher: Publisher) -> None:
        try:
            publisher.publish(large, "flush")
        except NatsUnavailable as error:
            outcome.append(error.message)

    with Publisher(server.url) as publisher:
        os.kill(server.pid, signal.SIGSTOP)
        thread = threading.Thread(target=publish, args=[publisher], daemon=True)
        thread.start()
        transport: Any = publisher._link._client._transport  # type: ignore[union-attr]
        looks: list[int] = []

        def takes_nothing() -> bool:
            looks.append(transport.unsent_bytes)
            return looks[-1] > 0 and looks[-10:] == looks[-1:] * 10

        eventually(takes_nothing, 30, "the server takes nothing more")
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        server = NatsServer(port, tmp_path / "nats.log").start()
        thread.join(20)
        assert not thread.is_alive(), "it goes on, or gives up"
        lost = "the connection to NATS was lost while publishing: some rows may not have arrived, so publish them again"
        assert outcome == [lost]
        publisher.publish(rows("small", 5), "flush")
    server.stop()


@pytest.mark.parametrize("then", ["wait_for_ack", "send"])
def test_caller_that_was_busy_for_longer_than_acks_may_take_loses_nothing(
    client: NatslogClient, nats_url: str, name: str, then: str
) -> None:
    client.create_stream(name, name)
    with Publisher(nats_url, ack_timeout_s=0.5) as publisher:
        publisher.send(rows(name, 5, ids=ids(*"abcde")), "stored")
        time.sleep(1.0)
        if then == "send":
            publisher.send(rows(name, 5, ids=ids(*"fghij")), "stored")
        publisher.wait_for_ack("stored")
        assert publisher.acked == (10 if then == "send" else 5)


def test_empty_message_ids_are_none(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    with Publisher(nats_url) as publisher:
        publisher.publish(rows(name, 5, ids=ids("", "", "", "", "")), "stored")
    assert len(all_values(client, name)) == 5


# ---- which streams ack, and how ----


@pytest.mark.long
def test_named_streams_must_all_ack(client: NatslogClient, nats_url: str, name: str) -> None:
    """Without names, the first ack of any stream counts, also where the intended one refuses."""
    intended, other = f"{name}-intended", f"{name}-other"
    client.create_stream(intended, f"{name}.>")
    client.create_stream(other, f"{name}.*")
    client.edit_stream(intended, paused=True)
    some = rows(f"{name}.a", 3, ids=ids(*"abc"))
    with Publisher(nats_url, ack_timeout_s=1) as publisher:
        publisher.publish(some, "stored")
        assert publisher.acked == 3
    with Publisher(nats_url, ack_timeout_s=5, streams=(other, intended)) as publisher:  # and rows are sent again
        started = time.monotonic()
        words = f"the ack of stream '{intended}' is missing: the stream refused them: .*paused"
        with pytest.raises(PublishFailed, match=words):
            publisher.publish(some, "stored")
        assert time.monotonic() - started < 9, "acks of the other one, again and again, are no progress"
        assert publisher.acked == 0
        client.edit_stream(intended, paused=False)
        publisher.publish(some, "stored")
        assert publisher.acked == 3
    assert len(all_values(client, intended)) == len(all_values(client, other)) == 3


def test_ack_of_a_stream_that_was_not_named_does_not_count(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, f"{name}.>")
    for wrong in (f"{name}-", name[:-1], f"x{name}"):
        with Publisher(nats_url, ack_timeout_s=0.5, streams=(wrong,)) as publisher:
            with pytest.raises(PublishFailed, match=f"the ack of stream '{wrong}' is missing: no stream answered"):
                publisher.publish(rows(f"{name}.a", 1, ids=ids("a")), "stored")
            assert publisher.acked == 0


@pytest.mark.long
@pytest.mark.parametrize("has_other", [False, True])
def test_acks_requested_in_a_header(client: NatslogClient, nats_url: str, name: str, has_other: bool) -> None:
    """Where a service answers on the subject, a stream's setting `acks` is `header`."""
    client.create_stream(name, f"{name}.>", acks="header")
    some = rows(f"{name}.a", 1200, ids=pa.array([f"{at}" for at in range(1200)]))
    with Publisher(nats_url, ack_timeout_s=1) as publisher, pytest.raises(PublishFailed, match="no stream answered"):
        publisher.publish(rows(f"{name}.a", 1), "stored")
    names, ack_to = [name], BY_HEADER
    if has_other:
        client.create_stream(f"{name}-other", f"{name}.*")
        names, ack_to = [name, f"{name}-other"], BY_HEADER | BY_REPLY
    with Publisher(nats_url, ack_timeout_s=5, streams=names) as publisher:
        publisher.send(some, "stored", ack_to=ack_to)
        publisher.wait_for_ack("stored")
        assert publisher.acked == 1200
        largest = publisher.max_payload_bytes - publisher.ack_header_bytes
        one = Rows(pa.array([f"{name}.a"]), pa.array([b"x" * largest]))
        with pytest.raises(PublishFailed, match="larger than the server's limit"):
            publisher.send(one, "stored", ack_to=BY_HEADER)


def test_rows_that_wait_for_acks_and_rows_that_do_not_are_confirmed_together(
    client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, f"{name}.>")
    with Publisher(nats_url, ack_timeout_s=5) as publisher:
        publisher.send(rows(f"{name}.a", 10), "stored")
        publisher.send(rows("not.recorded", 10), "flush")
        publisher.wait_for_ack("stored")
        assert (publisher.acked, publisher._unflushed_bytes) == (10, 0)


def test_streams_that_record_a_subject_are_listed(client: NatslogClient, name: str) -> None:
    for number, subject in enumerate(("{}.>", "{}.a", "{}.*.c", "{}.b")):
        client.create_stream(f"{name}-{number}", subject.format(name))
    listed = {subject: [body["name"] for body in client.streams(subject=f"{name}.{subject}")] for subject in "abx"}
    assert listed == {"a": [f"{name}-0", f"{name}-1"], "b": [f"{name}-0", f"{name}-3"], "x": [f"{name}-0"]}
    assert [body["name"] for body in client.streams(subject=f"{name}.x.c")] == [f"{name}-0", f"{name}-2"]
    with pytest.raises(InvalidRequest, match="wildcard"):
        client.streams(subject=f"{name}.>")
