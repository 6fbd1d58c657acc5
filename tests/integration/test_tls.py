"""A broker whose HTTP port serves TLS, and three brokers that verify each other: real processes, real certificates."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import urllib3

from natslog.client import ClientOptions, NatslogClient
from natslog.errors import BrokerUnavailable, ConfigError
from natslog.nats_server import NatsServer
from natslog.security.certificates import make_certificates
from tests.bench.cluster_sides import three_brokers
from tests.harness import BrokerProcess, all_values, eventually, natslog, publish_acked, running, write_secret

_MANY_HANDSHAKES = 600


def _settings(folder: Path, name: str = "broker") -> dict[str, str]:
    return {
        "tls_cert_file": str(folder / f"{name}.pem"),
        "tls_key_file": str(folder / f"{name}-key.pem"),
        "tls_ca_file": str(folder / "ca.pem"),
    }


def _make(folder: Path) -> dict[str, str]:
    make_certificates(folder, ["localhost", "127.0.0.1"], ["client"], 30)
    return _settings(folder)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    _make(folder)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[tuple[str, BrokerProcess]]:
    """With a CA: clients may present a certificate."""
    folder = tmp_path_factory.mktemp("broker")
    with running(folder / "natslog", **_settings(certificates)) as (server, broker):
        yield server.url, broker


def _client(broker: BrokerProcess, **options: str) -> NatslogClient:
    return NatslogClient(broker.url, ClientOptions(retries=0, timeout_s=10, **options))


@pytest.mark.long
def test_messages_larger_than_one_piece_arrive_unchanged(served: tuple[str, BrokerProcess], certificates: Path) -> None:
    nats_url, broker = served
    with _client(broker, tls_ca_file=str(certificates / "ca.pem")) as client:
        client.create_stream("large", "large")
        sent = [bytes([at]) * 900_000 for at in range(40)]
        publish_acked(nats_url, "large", sent)
        assert all_values(client, "large") == sent


def test_only_the_authority_that_was_given_is_trusted(served: tuple[str, BrokerProcess], certificates: Path) -> None:
    _, broker = served
    with _client(broker) as client, pytest.raises(BrokerUnavailable, match="(?i)certificate"):
        client.cluster()
    plain = NatslogClient(broker.url.replace("https", "http"), ClientOptions(retries=0, timeout_s=5))
    with plain, pytest.raises(BrokerUnavailable):
        plain.cluster()
    with _client(broker, tls_ca_file=str(certificates / "ca.pem")) as client:
        assert client.cluster()["brokers"][0]["url"] == broker.url
    assert broker.metrics()["natslog_tls_certificate_expires_seconds"] > time.time() + 29 * 24 * 3600


@pytest.mark.long
def test_command_line(served: tuple[str, BrokerProcess], certificates: Path) -> None:
    _, broker = served
    command = [sys.executable, "-m", "natslog", "--server", broker.url]
    done = subprocess.run([*command, "stream", "ls"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "certificate" in done.stderr.lower()
    command += ["--tls-ca", str(certificates / "ca.pem"), "stream", "create", "made", "--subject", "made"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_certificate_of_a_client_is_required(tmp_path: Path, certificates: Path) -> None:
    settings = _settings(certificates) | {"tls_client_certs": "required"}
    with running(tmp_path / "natslog", **settings) as (_, broker):
        with _client(broker, tls_ca_file=str(certificates / "ca.pem")) as client, pytest.raises(BrokerUnavailable):
            client.cluster()
        with _client(broker, **_settings(certificates, "client")) as client:
            assert client.cluster()["brokers"]


@pytest.mark.long
def test_replaced_certificate_without_a_restart(tmp_path: Path) -> None:
    settings, after = _make(tmp_path / "now"), _make(tmp_path / "next")
    with running(tmp_path / "natslog", **settings) as (_, broker):
        old = urllib3.HTTPSConnectionPool("127.0.0.1", broker.http_port, ca_certs=settings["tls_ca_file"], maxsize=1)
        assert old.request("GET", "/healthz").status == 200
        for name in ("tls_cert_file", "tls_key_file", "tls_ca_file"):
            Path(settings[name]).write_bytes(Path(after[name]).read_bytes())
        eventually(broker.ready, 30, "it presents the certificate of the new authority")
        assert old.request("GET", "/healthz").status == 200
        assert old.num_connections == 1, "on the connection that was open"


@pytest.mark.long
def test_handshakes_that_are_not_finished_delay_no_others(tmp_path: Path, certificates: Path) -> None:
    with running(tmp_path / "natslog", **_settings(certificates)) as (_, broker), ExitStack() as opened:
        for _ in range(_MANY_HANDSHAKES):
            opened.enter_context(socket.create_connection(("127.0.0.1", broker.http_port)))
        eventually(broker.ready, 30, "the silent ones were disconnected")


def test_readers_that_leave_early_are_noticed(served: tuple[str, BrokerProcess], certificates: Path) -> None:
    nats_url, broker = served
    with _client(broker, tls_ca_file=str(certificates / "ca.pem")) as client:
        client.create_stream("left", "left")
        publish_acked(nats_url, "left", [bytes(900_000)] * 40)
        pool = urllib3.PoolManager(ca_certs=str(certificates / "ca.pem"), retries=False)
        for _ in range(5):
            answer = pool.request("GET", f"{broker.url}/v1/streams/left/messages?start=0", preload_content=False)
            answer.read(100_000)
            answer.close()
        assert len(all_values(client, "left")) == 40
    assert "SSL connection is closed" not in broker.output()


@pytest.mark.long
def test_advice_of_the_client(served: tuple[str, BrokerProcess], certificates: Path, tmp_path: Path) -> None:
    _, broker = served
    with _client(broker) as client, pytest.raises(BrokerUnavailable, match="--tls-ca"):
        client.cluster()
    plain = NatslogClient(broker.url.replace("https", "http"), ClientOptions(retries=0, timeout_s=5))
    with plain, pytest.raises(BrokerUnavailable, match="begins with https"):
        plain.cluster()
    with pytest.raises(ConfigError, match="belong together"):
        _client(broker, tls_cert_file=str(certificates / "client.pem"))
    with pytest.raises(ConfigError, match="cannot read"):
        _client(broker, tls_ca_file=str(certificates))
    settings = _settings(certificates) | {"tls_client_certs": "required"}
    with running(tmp_path / "natslog", **settings) as (_, strict):
        with _client(strict, tls_ca_file=str(certificates / "ca.pem")) as client:
            with pytest.raises(BrokerUnavailable, match="may require a client certificate"):
                client.cluster()


def test_data_that_is_not_tls(served: tuple[str, BrokerProcess]) -> None:
    _, broker = served
    for sent in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x00\x05hello", bytes(1000)):
        with socket.create_connection(("127.0.0.1", broker.http_port)) as raw:
            raw.settimeout(10)
            raw.sendall(sent)
            answer = b""
            try:
                while piece := raw.recv(1000):
                    answer += piece
            except ConnectionResetError:
                pass
            assert b"HTTP/1.1 200" not in answer
    assert broker.ready()
    assert "Traceback" not in broker.output()


@pytest.mark.long
def test_wrong_files_end_the_start_with_the_remedy(tmp_path: Path, certificates: Path) -> None:
    settings = _settings(certificates) | {"tls_key_file": str(certificates / "client-key.pem")}
    broker = BrokerProcess(tmp_path / "natslog", "nats://127.0.0.1:1", **settings)
    broker.spawn()
    assert broker.wait(60) == 1
    assert "both must be PEM files of one pair" in broker.output()


@pytest.mark.long
def test_link_that_fails_because_of_tls_is_explained(tmp_path: Path, certificates: Path) -> None:
    _make(tmp_path / "other")
    secret = write_secret(tmp_path / "secret", "0123456789abcdef" * 2)
    folders = {1: certificates, 2: tmp_path / "other"}
    with ExitStack() as processes:
        server = NatsServer(0, tmp_path / "nats.log").start()
        processes.callback(server.stop)
        brokers = [
            BrokerProcess(
                tmp_path / f"broker-{number}",
                server.url,
                broker_id=number,
                cluster_secret_file=secret,
                **_settings(folder),
            )
            for number, folder in folders.items()
        ]
        for broker in brokers:
            broker.settings["seeds"] = ",".join(other.url for other in brokers)
            broker.spawn()
            processes.callback(broker.kill)
        for broker, other in zip(brokers, reversed(brokers), strict=True):
            said = f"{other.url}: the TLS handshake failed"
            eventually(lambda broker=broker, said=said: said in broker.output(), 30, said)


@pytest.mark.long
def test_three_brokers_verify_each_other(tmp_path: Path, certificates: Path) -> None:
    with three_brokers(tmp_path, **_settings(certificates)) as (server, brokers):
        client = brokers[0].client()
        client.create_stream("orders", "orders", replicas=3, min_isr=3)
        sent = [b"%d" % at for at in range(1000)]
        publish_acked(server.url, "orders", sent)
        for broker in brokers:
            assert all_values(broker.client(), "orders") == sent
        with_none = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        pool = urllib3.PoolManager(ssl_context=with_none, retries=False)
        answer = pool.request("POST", brokers[0].url + "/internal/link", body=b"{}")
        assert answer.status >= 400
        assert b"must present a certificate" in answer.data


def _connected(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> ssl.SSLSession:
    """Of a TLS connection on which a request was answered. Raises OSError: the broker refuses it."""
    with socket.create_connection(("127.0.0.1", port), 10) as raw:
        with context.wrap_socket(raw, server_hostname="127.0.0.1", session=session) as secured:
            secured.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = secured.recv(1000)
            if not answer.startswith(b"HTTP/1.1 200"):
                raise ConnectionResetError("no answer")
            assert secured.session is not None
            return secured.session


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.long
def test_authority_that_is_removed_is_refused_without_a_restart(tmp_path: Path, version: ssl.TLSVersion) -> None:
    settings = _make(tmp_path / "ours") | {"tls_client_certs": "required"}
    _make(tmp_path / "theirs")
    ca = Path(settings["tls_ca_file"])
    ours = ca.read_bytes()
    ca.write_bytes(ours + (tmp_path / "theirs" / "ca.pem").read_bytes())
    context = ssl.create_default_context(cafile=str(ca))
    context.minimum_version = context.maximum_version = version
    context.load_cert_chain(tmp_path / "theirs" / "client.pem", tmp_path / "theirs" / "client-key.pem")
    with running(tmp_path / "natslog", **settings) as (_, broker):
        session = _connected(broker.http_port, context)
        assert _connected(broker.http_port, context, session)
        ca.write_bytes(ours)
        eventually(lambda: "the TLS files were loaded again" in broker.output(), 30)
        for offered in (None, session):  # a session must not be resumed with a certificate that is refused now
            with pytest.raises(OSError):
                _connected(broker.http_port, context, offered)
        assert broker.ready(), "other certificates are accepted"


@pytest.mark.long
def test_failed_handshakes_are_logged_once_a_minute(tmp_path: Path, certificates: Path) -> None:
    _make(tmp_path / "other")
    strange = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    strange.load_cert_chain(tmp_path / "other" / "client.pem", tmp_path / "other" / "client-key.pem")
    with running(tmp_path / "natslog", **_settings(certificates)) as (_, broker):
        for _ in range(5):
            socket.create_connection(("127.0.0.1", broker.http_port)).close()
        for _ in range(20):
            with pytest.raises(OSError):
                _connected(broker.http_port, strange)
        eventually(lambda: "TLS handshakes" in broker.output(), 30)
        lines = [line for line in broker.output().splitlines() if "TLS handshake" in line]
        assert len(lines) == 1, lines
        assert "WARNING" in lines[0]
        assert "1 TLS handshakes of clients failed in the last minute; the last one, of 127.0.0.1" in lines[0]
        assert "certificate" in lines[0]
        assert broker.ready()


@pytest.mark.long
def test_cluster_names_the_tls_problem_of_a_link_and_refuses_another_scheme(tmp_path: Path, certificates: Path) -> None:
    other = _make(tmp_path / "other")
    options = ["--tls-ca", str(certificates / "ca.pem")]
    with three_brokers(tmp_path / "cluster", **_settings(certificates)) as (_, brokers):
        started = time.monotonic()
        added = natslog(*options, "cluster", "add", "http://127.0.0.1:1", url=brokers[0].url, check=False)
        assert time.monotonic() - started < 10
        assert added.returncode == 1
        assert "must begin with https://" in added.stderr
        brokers[2].terminate()
        brokers[2].settings |= other
        brokers[2].spawn()

        def problem() -> dict[str, str]:
            (found,) = [one for one in brokers[0].client().cluster()["brokers"] if one["id"] == 3]
            return {} if found["alive"] else found["problem"]

        eventually(lambda: "the TLS handshake failed" in problem().get("message", ""), 30)
        assert problem()["code"] == "broker_unavailable"
        assert all("problem" not in one for one in brokers[0].client().cluster()["brokers"] if one["alive"])
        shown = natslog(*options, "cluster", "status", url=brokers[0].url, check=False)
        assert shown.returncode == 1
        assert f"broker 3 at {brokers[2].url} is down: the TLS handshake failed" in shown.stdout
