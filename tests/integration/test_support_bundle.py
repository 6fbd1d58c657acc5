"""`natslog support-bundle`: no payloads and no secrets in any byte of it; brokers that are down, or hostile."""

from __future__ import annotations

import asyncio
import gzip
import http.server
import json
import logging
import re
import secrets
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
import pytest
from typer.testing import CliRunner

from natslog.cli.main import application
from natslog.client import ClientOptions, NatslogClient
from natslog.diagnosis.bundle.making import MOST_BYTES
from natslog.security.certificates import make_certificates
from tests import nats_login
from tests.harness import BrokerProcess, write_secret

FOLDER = "natslog-support/"


def canary(what: str) -> str:
    return f"{what}{secrets.token_hex(8)}"


def files_of(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        entries = tar.getmembers()
        assert all(one.isfile() and one.name.startswith(FOLDER) and ".." not in one.name for one in entries)
        return {one.name.removeprefix(FOLDER): tar.extractfile(one).read() for one in entries}  # type: ignore[union-attr]


def made(archive: Path, *arguments: str, url: str | None = None, token_file: Path | None = None) -> dict[str, Any]:
    """The command in this process, and what it prints."""
    options = [*(["--server", url] if url else []), *(["--token-file", str(token_file)] if token_file else [])]
    done = CliRunner().invoke(application(), [*options, "support-bundle", "--json", "-o", str(archive), *arguments])
    assert done.exit_code == 0, done.exception or done.output
    body: dict[str, Any] = json.loads(done.stdout)
    return body


# ---- a broker with everything that is secret ----


@dataclass
class Secret:
    broker: BrokerProcess
    flags: list[str]
    token_file: Path
    log: Path
    environment: dict[str, str]
    canaries: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secret]:
    """A broker with security, TLS, a cluster secret, a NATS user with a password in the URL, a leafnode login of its
    own; messages; and a log in which each secret occurs.
    """
    folder = tmp_path_factory.mktemp("secret")
    found = {
        name: canary(name) for name in ("payload", "header", "key", "password", "subjectless", "variable", "audit")
    }
    found["aws"] = "wJalrXUtnFEMI" + secrets.token_hex(14)[:27]
    found["cluster"] = secrets.token_hex(32)
    found["nkey"] = nats_login.user_key().seed
    made_at = make_certificates(folder / "tls", ["127.0.0.1"], ["client"], 30)
    assert made_at.written
    tls = {name: folder / "tls" / file for name, file in TLS.items()}
    found["tls key"] = tls["tls_key_file"].read_text().splitlines()[2]
    write_secret(folder / "cluster-secret", found["cluster"])
    write_secret(folder / "leaf.nk", found["nkey"])
    configuration = f"authorization {{ user: natslog, password: {found['password']!r} }}"
    with nats_login.server_with(folder, configuration) as server:
        url = server.url.replace("//", f"//natslog:{found['password']}@")
        broker = BrokerProcess(folder / "data", url, **tls, cluster_secret_file=folder / "cluster-secret")
        broker.settings |= {"admin_token_file": folder / "admin.token", "audit_file": folder / "audit.jsonl"}
        broker.environment = {"NATSLOG_SECURITY": "true"}
        broker.start()
        try:
            token_file = folder / "admin.token"
            found["token"] = token_file.read_text().strip()
            options = ClientOptions(token_file=str(token_file), tls_ca_file=str(tls["tls_ca_file"]))
            with NatslogClient(broker.url, options) as client:
                client.create_stream("orders", "orders.>")
                client.create_stream("secret-customer", "secret-customer.>")
                client.create_stream("dropped-project", "dropped-project.x")
                client.delete_stream("dropped-project")
                made_token = client.create_token("spark", note=found["subjectless"])
                found["other token"] = made_token["token"]
                asyncio.run(_publish(url, found))
                assert client.position("orders")["high_watermark"] == 3
                client.erase("orders", key=found["key"])
            flags = [f"--data-dir={broker.folder}", f"--nats-url={url}", f"--http-port={broker.http_port}"]
            flags += [f"--{name.replace('_', '-')}={path}" for name, path in tls.items()]
            flags += [f"--cluster-secret-file={folder / 'cluster-secret'}", "--security"]
            flags += ["--nats-leaf-url", f"nats-leaf://u:{found['password']}@127.0.0.1:1"]
            flags += [f"--nats-leaf-nkey-file={folder / 'leaf.nk'}"]
            environment = {"MY_API_TOKEN": found["variable"], "AWS_SECRET_ACCESS_KEY": found["aws"]}
            log = folder / "with-secrets.log"
            log.write_text(broker.output() + _log_with(found))
            yield Secret(broker, flags, token_file, log, environment, found)
        finally:
            broker.kill()


TLS = {"tls_cert_file": "broker.pem", "tls_key_file": "broker-key.pem", "tls_ca_file": "ca.pem"}


async def _publish(url: str, found: dict[str, str]) -> None:
    connection = await nats.connect(url)
    for number in range(3):
        headers = {"X-Secret": found["header"], "Natslog-Key": found["key"]}
        await connection.request(f"orders.{number}", found["payload"].encode(), timeout=30, headers=headers)
    await connection.close()


def _log_with(found: dict[str, str]) -> str:
    """As a careless program might log them: each as it is, with its name, and in a URL."""
    begin = "2026-11-27 07:00:31,525 WARNING natslog.node: "
    lines = []
    for name, text in found.items():
        if name in ("payload", "header", "key", "subjectless"):
            continue  # what is in messages only cannot be recognised, and natslog logs none of it
        lines += [f"{begin}{name}_token={text}", f"{begin}failed at nats://user:{text}@host:4222", text]
    exact = ("password", "cluster", "nkey", "tls key", "token", "variable", "aws")
    lines += [f"{begin}this is {found[name]} in a sentence" for name in exact]
    lines += [f"2026-11-27 07:00:31,525 INFO    natslog.audit: {found['payload']}", found["payload"], found["key"]]
    return "\n".join(lines) + "\n"


@pytest.fixture
def with_variables(secret: Secret, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in secret.environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.long
@pytest.mark.usefixtures("with_variables")
@pytest.mark.parametrize("hashes", [False, True])
def test_no_payload_and_no_secret_in_any_byte(secret: Secret, tmp_path: Path, hashes: bool) -> None:
    archive = tmp_path / "b.tar.gz"
    flags = [*secret.flags, "--log", str(secret.log), "--log", str(secret.log.parent / "nats.log")]
    body = made(archive, *flags, *(["--hash-names"] if hashes else []), token_file=secret.token_file)
    assert body["missing"] == {}
    wanted = {"manifest.json", "doctor.json", "settings.json", "streams.json", "overview.json", "history.json"}
    wanted |= {"activity.jsonl", "brokers/1/metrics.txt", "data-folder.txt", "logs/1.log", "versions.json", "proc.txt"}
    assert wanted <= set(body["files"])
    files = files_of(archive)
    everything = gzip.decompress(archive.read_bytes())
    for name, text in secret.canaries.items():
        for form in (text, text.rpartition("_")[2]):  # of a token the secret part as well
            assert form.encode() not in everything, (
                name,
                [file for file, data in files.items() if form.encode() in data],
            )
    assert b"connected to NATS" in files["logs/1.log"]
    assert b"Server is ready" in files["logs/2.log"]
    kinds = [json.loads(line)["event"] for line in files["activity.jsonl"].splitlines()]
    assert {"activity.stream.created", "activity.operator.request", "activity.security.changed"} <= set(kinds)
    assert ("natslog_stream_high_watermark" in files["brokers/1/metrics.txt"].decode()) is True
    _check_manifest(files)
    _check_names(files, everything, hashes=hashes)


def _check_manifest(files: dict[str, bytes]) -> None:
    manifest = json.loads(files["manifest.json"])
    assert {one["name"]: one["bytes"] for one in manifest["files"]} == {
        name: len(data) for name, data in files.items() if name != "manifest.json"
    }
    assert all(one["what"] for one in manifest["files"])


def _check_names(files: dict[str, bytes], everything: bytes, *, hashes: bool) -> None:
    """With digests no name is left, also not of the stream that was deleted, and they are the same ones everywhere."""
    for name in (b"secret-customer", b"dropped-project"):
        assert (name in everything) is not hashes
    streams = {one["name"]: one for one in json.loads(files["streams.json"])}
    names = set(json.loads(files["overview.json"])["streams"]["name"])
    assert names == {name for name in streams if not name.startswith("__")}
    assert len(names) == 2
    folders = files["data-folder.txt"].decode()
    for name in names:
        assert f'{{stream="{name}"}}' in files["brokers/1/metrics.txt"].decode()
        assert f"streams/{name}.{streams[name]['id']}/" in folders
        assert streams[name]["subjects"] == [f"{name}.>"]


def test_file_is_private_and_not_replaced(tmp_path: Path) -> None:
    archive = tmp_path / "b.tar.gz"
    archive.write_text("mine")
    command = ["--server", "http://127.0.0.1:1", "support-bundle", "-o", str(archive)]
    done = CliRunner().invoke(application(), command)
    assert "--force" in str(done.exception)
    assert archive.read_text() == "mine"
    done = CliRunner().invoke(application(), [*command, "--force"])
    assert "It has no payloads and no secrets" in done.output
    assert archive.stat().st_mode & 0o777 == 0o600
    assert "manifest.json" in files_of(archive)
    assert list(tmp_path.iterdir()) == [archive]


# ---- brokers that are down, or hostile ----


@pytest.mark.long
def test_without_any_broker_it_has_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(mode=0o700)
    flags = ["--data-dir", str(tmp_path / "d"), "--nats-url", "nats://127.0.0.1:1", "--log", str(tmp_path / "no.log")]
    body = made(tmp_path / "b.tar.gz", *flags, url="http://127.0.0.1:1")
    assert {"streams.json", "overview.json", "history.json", "activity.jsonl", "cluster.json"} < set(body["missing"])
    assert "No such file" in body["missing"]["logs/1.log"]
    files = files_of(tmp_path / "b.tar.gz")
    assert {"doctor.json", "settings.json", "versions.json", "proc.txt", "data-folder.txt", "facts.json"} < set(files)
    missing = {one["name"]: one["why"] for one in json.loads(files["manifest.json"])["missing"]}
    assert "no broker answered" in missing["cluster.json"]
    assert json.loads(files["doctor.json"])["problems"] >= 1


@contextmanager
def broker_that_answers(answer: Callable[[str], bytes]) -> Iterator[str]:
    """A server of HTTP that looks like a broker: the body of the answer to each path."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answer(self.path.partition("?")[0])
            try:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError as error:  # the client has enough
                logging.debug("%s", error)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.long
def test_hostile_answers_choose_no_names_and_add_nothing(tmp_path: Path) -> None:
    evil = canary("evil")
    urls: list[str] = []

    def answer(path: str) -> bytes:
        brokers = [
            {
                "id": number,
                "url": urls[0],
                "role": "voter",
                "alive": True,
                "rack": "r",
                evil: evil,
                "clock_apart_s": evil,
            }
            for number in (1, "../../../tmp/x", -5, None, [1])
        ]
        bodies: dict[str, Any] = {
            "/v1/cluster": {"cluster_id": "x", "brokers": brokers, evil: evil, "streams": 2, "version": "1\x1b[2J"},
            "/v1/overview": {
                "findings": [{"code": f"x {evil}", "level": 7}],
                "streams": {"name": {evil: 1}},
                "at": evil * 9,
            },
            "/v1/streams": [{"name": f"../{number}", "id": "../", "settings": evil} for number in range(3)],
            "/readyz": [[evil]],
            "/healthz": {"status": "alive", "version": ["x"]},
        }
        if path == "/metrics":
            return f'natslog_x{{stream="a",b="{evil} x"}} 1\n{evil} 5\nnatslog_y {evil}\n'.encode()
        if path == "/v1/history":
            return b"[" * 200_000
        return json.dumps(bodies.get(path, {})).encode()

    with broker_that_answers(answer) as url:
        urls.append(url)
        made(tmp_path / "b.tar.gz", url=url)
    files = files_of(tmp_path / "b.tar.gz")
    assert {"cluster.json", "overview.json", "streams.json", "brokers/1/metrics.txt"} <= set(files)
    everything = b"".join(files.values())
    assert all(re.fullmatch(r"[a-z.-]+|brokers/-?\d+/[a-z.]+", name) for name in files), list(files)
    kept = {name for name, data in files.items() if evil.encode() in data}
    assert kept <= {"doctor.json"}  # the finding as a text for people
    assert b"\x1b" not in everything
    assert json.loads(files["doctor.json"])["outcomes"]
    assert sorted(tmp_path.iterdir()) == [tmp_path / "b.tar.gz"]


@pytest.mark.long
def test_thousands_of_streams_and_endless_texts_are_limited(tmp_path: Path) -> None:
    stream = {"subject": "s", "subjects": ["s" * 200] * 3, "replicas": 3, "isr": [1, 2, 3], "leader": 1}
    names = [f"stream-{number:05}" for number in range(2_000)]
    urls: list[str] = []

    def answer(path: str) -> bytes:
        columns = {"name": names, "messages": [5] * len(names)}
        brokers = [{"id": 1, "url": urls[0], "role": "voter", "alive": True}]
        bodies: dict[str, Any] = {
            "/v1/cluster": {"brokers": brokers, "nats_leaf_problem": "x" * 4_000_000},
            "/v1/overview": {"findings": [], "streams": columns, "broker_stats": []},
            "/v1/streams": [stream | {"name": name, "id": "a" * 32} for name in names],
            "/v1/history": {"every_s": 5, "brokers": {str(one): {"x": [1.5] * 720} for one in range(3)}},
        }
        if path == "/metrics":
            return b'natslog_x{stream="stream"} 1\n' * 400_000
        return json.dumps(bodies.get(path, {})).encode()

    with broker_that_answers(answer) as url:
        urls.append(url)
        made(tmp_path / "b.tar.gz", url=url)
    files = files_of(tmp_path / "b.tar.gz")
    assert [one["name"] for one in json.loads(files["streams.json"])] == names
    assert json.loads(files["overview.json"])["streams"]["name"] == names
    assert sum(map(len, files.values())) < MOST_BYTES / 4
    assert (tmp_path / "b.tar.gz").stat().st_size < 2_000_000
