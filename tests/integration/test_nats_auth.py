"""Every way to log in to NATS, against a server that requires it: the broker, the publisher and the command line."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import ssl
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from natslog.client.publisher import Publisher, Rows
from natslog.errors import ConfigError, NatsLoginRefused, NatsUnavailable
from natslog.nats_server import free_port
from natslog.wire.link import NatsCredentials, NatsLink
from natslog.wire.transport import InPlaceTransport
from tests.harness import BrokerProcess, all_values, eventually, natslog, on_terminal
from tests.nats_login import (
    METHODS,
    Accounts,
    KeyPair,
    Login,
    credentials,
    nkey,
    private,
    server_with,
    tls,
    tls_and_user,
    token,
    user_and_password,
    user_in_a_file,
    user_key,
)

METHOD = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)


def few_now(methods: Sequence[Callable[[Path], Login]], now: Sequence[Callable[[Path], Login]]) -> pytest.MarkDecorator:
    """All of them; those that are not in `now` with the long tests."""
    marked = [pytest.param(one, marks=() if one in now else pytest.mark.long) for one in methods]
    return pytest.mark.parametrize("method", marked, ids=[one.__name__ for one in methods])


def rows(subject: str, count: int) -> Rows:
    return Rows(pa.array([subject] * count), pa.array([b"%d" % at for at in range(count)]))


def settings_of(login: dict[str, Any]) -> dict[str, Any]:
    """As settings of a broker."""
    given = {f"nats_{name}": value for name, value in login.items() if value is not None}
    return {name: value for name, value in given.items() if value is not True}


@contextmanager
def broker_with(folder: Path, nats_url: str, login: dict[str, Any]) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(folder / "data", nats_url, **settings_of(login))
    broker.environment = {f"NATSLOG_NATS_{name.upper()}": "true" for name, value in login.items() if value is True}
    try:
        yield broker
    finally:
        broker.kill()


@pytest.mark.long
@METHOD
def test_broker_records_and_publisher_gets_acks(tmp_path: Path, method: Callable[[Path], Login]) -> None:
    login = method(tmp_path)
    with server_with(tmp_path, login.configuration) as server:
        with broker_with(tmp_path, server.url, login.right) as broker:
            client = broker.start().client()
            client.create_stream("orders", "orders")
            with Publisher(server.url, credentials=NatsCredentials(**login.right)) as publisher:
                publisher.publish(rows("orders", 100), "stored")
            assert all_values(client, "orders") == [b"%d" % at for at in range(100)]
            options = [
                text
                for name, value in login.right.items()
                if value is not None
                for text in (f"--nats-{name.replace('_', '-')}", *([] if value is True else [str(value)]))
            ]
            natslog("pub", "orders", "more", "--ack", "--nats-url", server.url, *options, url=broker.url)
            assert len(all_values(client, "orders")) == 101
            assert not [secret for secret in login.secret if secret in broker.output()]


@few_now(METHODS, [user_and_password, tls])
@pytest.mark.long
def test_wrong_credentials_are_an_error_with_the_remedy(
    tmp_path: Path, method: Callable[[Path], Login], caplog: pytest.LogCaptureFixture
) -> None:
    login = method(tmp_path)
    with server_with(tmp_path, login.configuration) as server, caplog.at_level(logging.DEBUG, "natslog"):
        publisher = Publisher(server.url, credentials=NatsCredentials(**login.wrong), connect_timeout_s=4)
        with pytest.raises(NatsUnavailable) as refused, publisher:
            pass
    assert login.said in refused.value.message
    assert isinstance(refused.value, NatsLoginRefused) == ("tls" not in login.said and bool(login.secret))
    assert login.said in caplog.text, "a broker logs it, and tries again"
    shown = f"{caplog.text} {json.dumps(refused.value.to_json())} {publisher._link._credentials!r}"
    shown += "".join(traceback.format_exception(refused.value))
    assert not [secret for secret in login.secret if secret in shown]


@pytest.mark.long
def test_broker_with_a_wrong_password_says_which_file_to_correct_and_connects_when_it_is(tmp_path: Path) -> None:
    login = user_and_password(tmp_path)
    with server_with(tmp_path, login.configuration) as server:
        with broker_with(tmp_path, server.url, login.wrong) as broker:
            broker.spawn()
            eventually(lambda: login.said in broker.output(), 30, login.said)
            Path(login.wrong["password_file"]).write_text(Path(login.right["password_file"]).read_text())
            eventually(broker.ready, 30, "the broker is ready without a restart")
            assert not [secret for secret in login.secret if secret in broker.output()]


# ---- rotation ----


def _other(login: Login, rotated: Login) -> None:
    """Replaces the content of the files of one login by those of another."""
    for name, path in login.right.items():
        if name.endswith("_file") and path != rotated.right[name]:
            Path(path).write_text(Path(rotated.right[name]).read_text())


@few_now([token, user_and_password, user_in_a_file, nkey, credentials, tls], [credentials, tls])
@pytest.mark.long
def test_rotated_files_are_used_at_the_next_connection(tmp_path: Path, method: Callable[[Path], Login]) -> None:
    """The server is stopped, and starts with other secrets at the same address."""
    (tmp_path / "next").mkdir()
    login, rotated, port = method(tmp_path), method(tmp_path / "next"), free_port()
    with broker_with(tmp_path, f"nats://127.0.0.1:{port}", login.right) as broker:
        with server_with(tmp_path, login.configuration, port):
            client = broker.start().client()
            client.create_stream("orders", "orders")
            url = f"nats://127.0.0.1:{port}"
            with Publisher(url, credentials=NatsCredentials(**login.right)) as publisher:
                publisher.publish(rows("orders", 10), "stored")
        eventually(lambda: not broker.ready(), 30, "the connection is lost")
        _other(login, rotated)
        with server_with(tmp_path / "next", rotated.configuration, port):
            eventually(broker.ready, 30, "the broker has connected with the rotated file")
            with Publisher(url, credentials=NatsCredentials(**rotated.right)) as publisher:
                publisher.publish(rows("orders", 10), "stored")
            assert len(all_values(client, "orders")) == 20


@pytest.mark.long
def test_server_that_reloads_other_users_while_the_broker_is_connected(tmp_path: Path) -> None:
    """It ends the connection with an error, after which nats-py alone does not connect again."""
    (tmp_path / "next").mkdir()
    login, rotated = user_and_password(tmp_path), user_and_password(tmp_path / "next")
    with server_with(tmp_path, login.configuration) as server:
        with broker_with(tmp_path, server.url, login.right) as broker:
            broker.start()
            (tmp_path / "nats.conf").write_text(rotated.configuration)
            os.kill(server.pid, signal.SIGHUP)
            said = f"correct the user 'natslog' or the password in {login.right['password_file']}"
            eventually(lambda: said in broker.output(), 30, said)
            assert not broker.ready()
            _other(login, rotated)
            eventually(broker.ready, 30, "the broker has connected with the rotated file")


def test_file_that_is_missing_during_a_rotation_is_named_and_used_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    login, port = token(tmp_path), free_port()
    path = Path(login.right["token_file"])
    content = path.read_text()

    def start_without_the_file() -> None:
        server.stop()
        path.unlink()
        server.start()

    async def lose_the_file() -> None:
        link = NatsLink(f"nats://127.0.0.1:{port}", name="test", credentials=NatsCredentials(**login.right))
        await link.open()
        await link.wait_until_up(10)
        await asyncio.to_thread(start_without_the_file)
        async with asyncio.timeout(20):
            while f"cannot read the NATS token file {path}" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        private(path, content)
        await link.wait_until_up(10)
        await link.close()

    with server_with(tmp_path, login.configuration, port) as server:
        asyncio.run(lose_the_file())
    said = [record for record in caplog.records if "cannot read the NATS token file" in record.getMessage()]
    assert len(said) <= 3, "it is not logged at each attempt"


# ---- files and settings ----


@pytest.mark.parametrize("name", ["creds_file", "nkey_file", "password_file", "token_file", "tls_key_file"])
@pytest.mark.parametrize("mode", [0o604, 0o602])
def test_broker_refuses_secrets_that_everyone_can_read_or_change(tmp_path: Path, name: str, mode: int) -> None:
    path = Path(private(tmp_path / "secret", user_key().seed))
    more = {"password_file": {"user": "natslog"}, "tls_key_file": {"tls_cert_file": str(path)}}.get(name, {})
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"readable or writable by every user.*chmod 600 {path}") as refused:
        NatsCredentials(**{name: str(path)}, **more, requires_private_files=True).check()
    assert path.read_text() not in refused.value.message


@pytest.mark.long
def test_broker_process_refuses_a_token_file_that_everyone_can_read(tmp_path: Path) -> None:
    path = Path(private(tmp_path / "token", "token"))
    path.chmod(0o644)
    broker = BrokerProcess(tmp_path / "data", "nats://127.0.0.1:1", nats_token_file=path)
    broker.spawn()
    assert broker.wait(60) == 1
    assert f"chmod 600 {path}" in broker.output()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"user": "natslog"}, "belong together"),
        ({"password_file": "p"}, "belong together"),
        ({"user": "natslog", "user_file": "u", "password_file": "p"}, "user or the user file"),
        ({"user": "natslog", "password_file": "p", "token_file": "t"}, "only one"),
        ({"creds_file": "c", "nkey_file": "n"}, "only one"),
        ({"nkey_file": "n", "user": "natslog", "password_file": "p"}, "only one"),
        ({"tls_key_file": "k"}, "requires the client certificate"),
    ],
)
def test_credentials_that_exclude_each_other_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NatsCredentials(**given)


def _broken(folder: Path) -> Iterator[tuple[dict[str, Any], str]]:
    seed = user_key().seed
    account = KeyPair(0).seed
    with_credentials, _ = Accounts().credentials()
    yield {"nkey_file": private(folder / "no.nk", "none")}, "is no nkey seed"
    yield {"nkey_file": private(folder / "account.nk", account)}, "is no nkey seed"
    yield {"nkey_file": private(folder / "short.nk", seed[:-9])}, "is no nkey seed"
    yield {"nkey_file": private(folder / "empty.nk", "")}, "is empty"
    yield {"token_file": private(folder / "empty", " \n")}, "is empty"
    yield {"token_file": str(folder)}, "cannot read the NATS token file"
    yield {"creds_file": private(folder / "none.creds", "none")}, "is no NATS credentials file"
    only_seed = with_credentials[with_credentials.index("-----BEGIN USER") :]
    yield {"creds_file": private(folder / "seed.creds", only_seed)}, "is no NATS credentials file"
    only_token = with_credentials[: with_credentials.index("-----BEGIN USER")]
    yield {"creds_file": private(folder / "token.creds", only_token)}, "is no NATS credentials file"
    (folder / "binary").write_bytes(b"\xff\xfe")
    yield {"token_file": str(folder / "binary")}, "is not UTF-8"
    yield {"tls_ca_file": private(folder / "ca.pem", "none")}, "no CA certificates"
    yield {"tls_cert_file": private(folder / "cert.pem", "none")}, "cannot be used"


def test_files_of_another_kind_are_refused_without_their_content(tmp_path: Path) -> None:
    for given, said in _broken(tmp_path):
        with pytest.raises(ConfigError, match=said) as refused:
            NatsCredentials(**given).check()
        assert not re.search("S[UA][A-Z0-9]{6}", refused.value.message)


@pytest.mark.long
def test_key_with_a_passphrase_is_refused_and_no_terminal_is_asked(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    tls(tmp_path)
    key = tmp_path / "tls" / "client-key.pem"
    pair = serialization.load_pem_private_key(key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"passphrase")
    key.write_bytes(pair.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
    given = NatsCredentials(tls_cert_file=str(tmp_path / "tls" / "client.pem"), tls_key_file=str(key))
    with pytest.raises(ConfigError, match="must have no passphrase"):
        given.check()
    options = ["--nats-tls-cert-file", str(given.tls_cert_file), "--nats-tls-key-file", str(key)]
    code, shown = on_terminal("pub", "a", "b", "--nats-url", "nats://127.0.0.1:1", *options, types="passphrase\n")
    assert code == 1
    assert "must have no passphrase" in shown
    assert "Enter" not in shown


def test_credentials_file_with_the_line_ends_of_windows(tmp_path: Path) -> None:
    login = credentials(tmp_path)
    path = Path(login.right["creds_file"])
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    with server_with(tmp_path, login.configuration) as server:
        with Publisher(server.url, credentials=NatsCredentials(**login.right)) as publisher:
            publisher.publish(rows("orders", 1), "flush")


# ---- TLS that an attacker removes ----


@contextmanager
def server_without_tls() -> Iterator[tuple[int, list[bytes]]]:
    """Says that it needs no TLS, and keeps what it receives."""
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):  # the listener was closed
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        connection.settimeout(1)
                        connection.sendall(b'INFO {"server_id":"X","max_payload":1048576,"auth_required":true}\r\n')
                        while data := connection.recv(4096):
                            received.append(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1], received
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("scheme", ["nats", "tls"])
@pytest.mark.long
def test_no_secret_is_sent_to_a_server_without_tls(tmp_path: Path, scheme: str) -> None:
    login = tls_and_user(tmp_path)
    right = {name: value for name, value in login.right.items() if scheme == "nats" or "tls" not in name}
    with server_without_tls() as (port, received):
        publisher = Publisher(f"{scheme}://127.0.0.1:{port}", credentials=NatsCredentials(**right), connect_timeout_s=2)
        with pytest.raises(NatsUnavailable, match="does not offer TLS"), publisher:
            pass
    assert received == []


@pytest.mark.long
def test_tls_is_used_where_the_server_only_offers_it(tmp_path: Path) -> None:
    login = tls(tmp_path)
    with server_with(tmp_path, login.configuration + "allow_non_tls: true") as server:
        with Publisher(server.url, credentials=NatsCredentials(**login.right)) as publisher:
            transport = publisher._link._client._transport  # type: ignore[union-attr]
            assert isinstance(transport._io_writer.get_extra_info("ssl_object"), ssl.SSLObject)  # type: ignore[union-attr]
        with pytest.raises(NatsUnavailable, match="CA file"):
            Publisher(server.url, credentials=NatsCredentials(**login.wrong), connect_timeout_s=2).__enter__()


@pytest.mark.long
def test_websocket_with_tls(tmp_path: Path) -> None:
    login, port = tls_and_user(tmp_path), free_port()
    at = tmp_path / "tls"
    pair = f'cert_file: "{at}/broker.pem", key_file: "{at}/broker-key.pem"'
    configuration = f"{login.configuration}\nwebsocket {{ port: {port}, tls {{ {pair} }} }}\n"
    with server_with(tmp_path, configuration):
        url = f"wss://127.0.0.1:{port}"
        with Publisher(url, credentials=NatsCredentials(**login.right)) as publisher:
            publisher.publish(rows("orders", 10), "flush")
        with pytest.raises(NatsLoginRefused, match=re.escape(login.said)):
            Publisher(url, credentials=NatsCredentials(**login.wrong), connect_timeout_s=3).__enter__()
        plain = Publisher(url.replace("wss", "ws"), credentials=NatsCredentials(**login.right), connect_timeout_s=2)
        with pytest.raises(NatsUnavailable), plain:
            pass


@pytest.mark.long
def test_certificate_for_another_host_is_refused(tmp_path: Path) -> None:
    login = tls(tmp_path)
    with server_with(tmp_path, login.configuration) as server:
        publisher = Publisher(
            server.url.replace("127.0.0.1", "127.0.0.2"),
            credentials=NatsCredentials(**login.right),
            connect_timeout_s=2,
        )
        with pytest.raises(NatsUnavailable), publisher:
            pass


@pytest.mark.long
@pytest.mark.parametrize("is_early", [False, True], ids=["info after the handshake began", "info before the handshake"])
def test_handshake_first_with_a_server_that_does_not_begin_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    connect = InPlaceTransport.connect

    async def connect_until_info(transport: Any, *args: Any, **kwargs: Any) -> None:
        await connect(transport, *args, **kwargs)
        if is_early and not transport._io_reader._buffer:
            await transport._io_reader._wait_for_data("test")

    monkeypatch.setattr(InPlaceTransport, "connect", connect_until_info)
    login, first = tls(tmp_path), {"tls_handshake_first": True}
    with server_with(tmp_path, login.configuration) as server:
        publisher = Publisher(server.url, credentials=NatsCredentials(**login.right, **first), connect_timeout_s=4)
        with pytest.raises(NatsUnavailable, match="remove handshake first"), publisher:
            pass
