"""Secrets are shown nowhere: tokens, passwords, the secret of the cluster and private keys are searched in all that
brokers, commands, clients and Spark write, print, answer and send.

One scene uses credentials of all kinds, from files, and one token as text, in requests that succeed and that fail. All
that can be seen of it is collected by place. Each place must contain a text that proves that it was reached.
"""

from __future__ import annotations

import http.client
import io
import json
import logging
import os
import ssl
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest

from natslog.client import ClientOptions, NatslogClient
from natslog.client.publisher import Publisher, Rows
from natslog.errors import NatslogError
from natslog.nats_server import NatsServer
from natslog.wire.link import NatsCredentials
from tests.forked import AS_USERS_START_IT
from tests.harness import BrokerProcess, eventually, write_secret

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(600)]

ROWS = 20
CLUSTER_SECRET = "ClusterSecret0123456789abcdefghij"
NATS_PASSWORDS = {user: f"NatsPassword0123456789of{user}" for user in ("broker", "publisher", "spark")}
NATS_TOKEN = "NatsToken0123456789abcdefghij"
URL_PASSWORD = "UrlPassword0123456789abcdefghij"
WRONG_TOKEN = f"nlt_{'0' * 12}_WrongToken{'W' * 33}"
PATHS = (
    "/healthz", "/readyz", "/metrics", "/openapi.json", "/v1/cluster", "/v1/streams", "/v1/streams/orders",
    "/v1/streams/orders/messages?start=0&format=ndjson", "/v1/cursors", "/v1/whoami", "/v1/tokens", "/v1/acl",
    "/v1/acl/check?action=read&stream=orders", "/v1/roles", "/v1/quotas", "/v1/nothing",
)  # fmt: skip


@dataclass
class Scene:
    """Secrets by name, and what was seen by place. `private`: files that contain secrets."""

    folder: Path
    secrets: dict[str, bytes] = field(default_factory=dict)
    seen: dict[str, bytes] = field(default_factory=dict)

    @property
    def private(self) -> Path:
        return self.folder / "private"

    def file(self, name: str) -> str:
        return str(self.private / name)

    def hold(self, name: str, text: str) -> str:
        """A secret, and a file that contains it."""
        self.secrets[name] = text.encode()
        return str(write_secret(self.private / name, text + "\n"))

    def see(self, place: str, *contents: str | bytes) -> None:
        parts = [one.encode() if isinstance(one, str) else one for one in contents]
        self.seen[place] = b"\n".join([self.seen.get(place, b""), *parts])

    def see_folder(self, place: str, folder: Path) -> None:
        self.see(place, *(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()))

    def see_process(self, place: str, pid: int) -> None:
        for name in ("cmdline", "environ"):
            self.see(place, Path(f"/proc/{pid}/{name}").read_bytes())


def shown_in(content: bytes, secrets: dict[str, bytes]) -> list[str]:
    """The secrets that were found, with the text before the first occurrence."""
    texts = []
    for name in found_in(content, secrets):
        at = max(content.find(secrets[name]), content.find(_wide(secrets[name])))
        texts.append(f"{name} after {content[max(0, at - 120) : at].decode(errors='replace')!r}")
    return texts


def found_in(content: bytes, secrets: dict[str, bytes]) -> list[str]:
    """The names of the secrets in it, also where a text has two bytes for each character."""
    return [name for name, secret in secrets.items() if secret in content or _wide(secret) in content]


def _wide(secret: bytes) -> bytes:
    return secret.decode().encode("utf-16-le")


# ---- the scene ----


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    scene = Scene(tmp_path_factory.mktemp("secrets"))
    scene.private.mkdir()
    with started(scene) as (broker, nats_url, token_nats_url):
        make_identities(scene, broker)
        publish(scene, broker, nats_url)
        run_commands(scene, broker)
        ask_with_python(scene, broker)
        ask_over_http(scene, broker)
        run_spark(scene, broker, nats_url, token_nats_url)
        scene.see_process("process of the broker", broker.pid)
        broker.terminate()
    scene.see("log of the broker", broker.output())
    scene.see("audit log", (scene.folder / "audit.log").read_bytes())
    scene.see_folder("data folder", broker.folder)
    return scene


@contextmanager
def started(scene: Scene) -> Iterator[tuple[BrokerProcess, str, str]]:
    """A broker, the URL of its NATS server with TLS and users, and that of another one with a token."""
    certs = scene.folder / "private" / "certs"
    subprocess.run([sys.executable, "-m", "natslog", "tls", "init", str(certs)], check=True, stdout=subprocess.DEVNULL)
    for key in certs.glob("*-key.pem"):
        scene.secrets[key.name] = key.read_bytes().splitlines()[2]  # the middle of the key
    users = [
        {"user": user, "password": Path(scene.hold(f"nats-{user}", password)).read_text().strip()}
        for user, password in NATS_PASSWORDS.items()
    ]
    users[2]["permissions"] = {"publish": ["alerts.>"], "subscribe": ["_INBOX.>"]}  # type: ignore[assignment]
    tls = {"cert_file": str(certs / "broker.pem"), "key_file": str(certs / "broker-key.pem")}
    config = write_secret(scene.private / "nats.conf", json.dumps({"tls": tls, "authorization": {"users": users}}))
    token = write_secret(scene.private / "token.conf", json.dumps({"authorization": {"token": NATS_TOKEN}}))
    scene.hold("nats-token", NATS_TOKEN)
    servers = [
        NatsServer(0, scene.folder / f"{path.stem}.log", arguments=("--config", str(path))).start()
        for path in (config, token)
    ]
    nats_url = servers[0].url.replace("nats://", "tls://")
    broker = BrokerProcess(
        scene.folder / "data", nats_url, nats_user="broker", nats_password_file=scene.file("nats-broker"),
        nats_tls_ca_file=certs / "ca.pem", tls_ca_file=certs / "ca.pem", tls_cert_file=certs / "broker.pem",
        tls_key_file=certs / "broker-key.pem", cluster_secret_file=scene.hold("cluster-secret", CLUSTER_SECRET),
        admin_token_file=scene.file("admin"), audit_file=scene.folder / "audit.log", log_level="debug",
    )  # fmt: skip
    broker.settings |= {"seeds": broker.url, "advertise_url": broker.url}
    broker.environment = AS_USERS_START_IT | {"NATSLOG_SECURITY": "true"}
    try:
        yield broker.start(), nats_url, servers[1].url
    finally:
        broker.kill()
        for server in servers:
            server.stop()


def options_of(scene: Scene, broker: BrokerProcess, identity: str) -> ClientOptions:
    return ClientOptions(
        token_file=scene.file(identity), tls_ca_file=broker.tls["tls_ca_file"], retries=0, timeout_s=5.0
    )


def make_identities(scene: Scene, broker: BrokerProcess) -> None:
    admin_token = Path(scene.file("admin")).read_text().strip()
    scene.secrets["admin"] = secret_of(admin_token)
    with NatslogClient(broker.url, options_of(scene, broker, "admin")) as client:
        for identity in ("spark", "text", "expired", "revoked"):
            created = client.create_token(identity, expires="1s" if identity == "expired" else "1h")
            scene.hold(identity, created["token"])
            scene.secrets[identity] = secret_of(created["token"])
            if identity == "revoked":
                client.revoke_token(created["id"])
        scene.hold("wrong", WRONG_TOKEN)
        scene.secrets["wrong"] = secret_of(WRONG_TOKEN)
        for name in ("orders", "alerts", "private"):
            client.create_stream(name, f"{name}.>")
        for identity in ("spark", "text"):
            client.add_rule(identity, "read", "orders")
            client.add_rule(identity, "publish", "alerts")
        eventually(lambda: any(one["expired"] for one in client.tokens()), what="a token expires")


def secret_of(token: str) -> bytes:
    """Without the prefix and the id, which are public."""
    return token.split("_", 2)[2].encode()


def shown(error: BaseException) -> str:
    return f"{error}\n{error!r}\n{''.join(traceback.format_exception(error))}"


@contextmanager
def debug_log(scene: Scene, place: str) -> Iterator[None]:
    """Of this process."""
    text, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(text), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        scene.see(place, text.getvalue())


def publish(scene: Scene, broker: BrokerProcess, nats_url: str) -> None:
    """Messages of stream `orders`; then what NATS refuses."""
    ca_file = broker.tls["tls_ca_file"]
    login = NatsCredentials(user="publisher", password_file=scene.file("nats-publisher"), tls_ca_file=ca_file)
    wrong = NatsCredentials(user="publisher", password_file=scene.file("wrong"), tls_ca_file=ca_file)
    scene.secrets["url-password"] = URL_PASSWORD.encode()
    in_url = nats_url.replace("://", f"://publisher:{URL_PASSWORD}@")
    with debug_log(scene, "Publisher"):
        with Publisher(nats_url, credentials=login) as publisher:
            values = pa.array([b"value of a message"] * ROWS, pa.binary())
            publisher.publish(Rows(pa.array(["orders.a"] * ROWS), values), "stored")
            scene.see("Publisher", f"{publisher!r} {login!r}")
        for url, credentials in ((nats_url, wrong), (in_url, NatsCredentials(tls_ca_file=ca_file))):
            with pytest.raises(NatslogError) as refused, Publisher(url, credentials=credentials, connect_timeout_s=1.0):
                pass
            scene.see("Publisher", shown(refused.value), json.dumps(refused.value.to_json()))


def run_commands(scene: Scene, broker: BrokerProcess) -> None:
    def run(token: str, *arguments: str, **environment: str) -> int:
        login = ["--token-file", scene.file(token), "--tls-ca", broker.tls["tls_ca_file"], "--server", broker.url]
        command = [sys.executable, "-m", "natslog", *login, *arguments]
        done = subprocess.run(command, capture_output=True, check=False, timeout=120, env=os.environ | environment)
        scene.see("commands", done.stdout, done.stderr)
        return done.returncode

    for command in ("whoami", "token ls", "acl ls", "role ls", "quota ls", "stream ls --json", "cluster status --json"):
        assert run("admin", *command.split()) == 0, command
    assert run("admin", "token", "create", "again", "-o", scene.file("again")) == 0
    scene.secrets["again"] = secret_of(Path(scene.file("again")).read_text().strip())
    assert run("admin", "token", "create", "again", "-o", scene.file("again")) == 1  # the file exists
    assert run("admin", "token", "revoke", "--yes", Path(scene.file("again")).read_text().strip()) == 0
    assert run("spark", "cat", "orders") == 0
    for token in ("wrong", "expired", "revoked"):
        assert run(token, "stream", "ls") == 1
    assert run("spark", "cat", "private") == 1
    shown_by_help = {"NATSLOG_TOKEN": WRONG_TOKEN, "NATSLOG_NATS_URL": f"nats://user:{URL_PASSWORD}@127.0.0.1:1"}
    for command in ("--help", "server --help", "pub --help", "token create --help"):
        assert run("wrong", *command.split(), **shown_by_help) == 0

    login = ["--token-file", scene.file("spark"), "--tls-ca", broker.tls["tls_ca_file"], "--server", broker.url]
    follow = [sys.executable, "-m", "natslog", *login, "cat", "--follow", "orders"]
    with subprocess.Popen(follow, stdout=subprocess.PIPE) as following:
        assert following.stdout is not None
        assert following.stdout.readline()
        scene.see_process("process of a command", following.pid)
        following.kill()


def ask_with_python(scene: Scene, broker: BrokerProcess) -> None:
    """Clients that have the token as text, and errors."""
    with debug_log(scene, "client"):
        for identity in ("text", "wrong", "expired", "revoked"):
            token = Path(scene.file(identity)).read_text().strip()
            options = ClientOptions(token=token, tls_ca_file=broker.tls["tls_ca_file"], retries=0)
            with NatslogClient(broker.url, options) as client:
                scene.see("client", f"{client!r} {options!r}")
                with pytest.raises(NatslogError) as refused:
                    client.stream("private")
                scene.see("client", shown(refused.value), json.dumps(refused.value.to_json()))
                with pytest.raises(NatslogError) as refused:
                    client.revoke_token(token)  # the whole token, where its id was to be given
                scene.see("client", shown(refused.value))
        options = ClientOptions(token=WRONG_TOKEN + "\n", retries=0)
        with pytest.raises(NatslogError) as refused, NatslogClient("http://127.0.0.1:1", options) as client:
            client.cluster()
        scene.see("client", shown(refused.value))


def ask_over_http(scene: Scene, broker: BrokerProcess) -> None:
    context = ssl.create_default_context(cafile=broker.tls["tls_ca_file"])

    def ask(method: str, path: str, authorization: str | None, body: str | None = None) -> bytes:
        connection = http.client.HTTPSConnection("127.0.0.1", broker.http_port, timeout=20, context=context)
        try:
            headers = {} if authorization is None else {"Authorization": authorization}
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            return f"{answer.status} {answer.headers}".encode() + answer.read()
        finally:
            connection.close()

    tokens = {name: Path(scene.file(name)).read_text().strip() for name in ("admin", "spark", "wrong", "expired")}
    for path in PATHS:
        scene.see("answers", path, ask("GET", path, f"Bearer {tokens['admin']}"))
    for token in ("spark", "wrong", "expired"):
        scene.see("answers", ask("GET", "/v1/tokens", f"Bearer {tokens[token]}"))
    for authorization in (f"Basic {tokens['wrong']}", tokens["wrong"], f"Bearer {tokens['wrong']} {tokens['wrong']}"):
        scene.see("answers", ask("GET", "/v1/cluster", authorization))
    scene.see("answers", ask("POST", "/v1/tokens", f"Bearer {tokens['admin']}", body=f'{{"tokn": "{tokens["wrong"]}"'))
    # Where secrets do not belong: the one who sent it may see it in the answer, but logs must not contain it.
    for authorization in (None, f"Bearer {tokens['admin']}"):
        for name in ("spark", "wrong"):
            ask("DELETE", f"/v1/tokens/x{tokens[name]}", authorization)
            ask("GET", f"/v1/streams/{tokens[name]}?token={tokens[name]}", authorization)
            ask("POST", f"/v1/streams/{tokens[name]}/seal", authorization)


def run_spark(scene: Scene, broker: BrokerProcess, nats_url: str, token_nats_url: str) -> None:
    described = {
        "servers": broker.url,
        "rows": ROWS,
        "ca_file": broker.tls["tls_ca_file"],
        "token_file": scene.file("spark"),
        "token_text": Path(scene.file("text")).read_text().strip(),
        "password_file": scene.file("nats-spark"),
        "nats_url": nats_url,
        "nats_url_with_wrong_password": nats_url.replace("://", f"://spark:{URL_PASSWORD}@"),
        "token_nats_url": token_nats_url,
        "nats_token_file": scene.file("nats-token"),
    } | {f"{kind}_file": scene.file(kind) for kind in ("wrong", "expired", "revoked")}
    (scene.private / "scene.json").write_text(json.dumps(described))
    out = scene.folder / "out"
    out.mkdir()
    program = [sys.executable, "-m", "tests.spark.secrets_program", scene.file("scene.json"), str(out)]
    done = subprocess.run(program, capture_output=True, check=False, timeout=500)
    scene.see("Spark: output", done.stdout, done.stderr)
    for path in out.iterdir():
        if path.is_dir():
            scene.see_folder(f"Spark: {path.name}", path)
        else:
            scene.see(f"Spark: {path.name}", path.read_bytes())
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-3000:]


# ---- what is searched ----

PROOFS = {
    "Publisher": "NatsLoginRefused",
    "commands": "has expired",
    "process of a command": "--token-file",
    "process of the broker": "--cluster-secret-file",
    "client": "Unauthorized",
    "answers": "natslog_stream_high_watermark",
    "log of the broker": "DEBUG",
    "audit log": '"event": "refused"',
    "data folder": "digest",
    "Spark: output": "WARN",
    "Spark: events": "physicalPlanDescription",
    "Spark: ui": "natslog-secrets",
    "Spark: batch-explain": "BatchScan natslog",
    "Spark: batch-text-explain": "BatchScan natslog",
    "Spark: stream-explain": "natslog",
    "Spark: stream-text-explain": "natslog",
    "Spark: stream-checkpoint": "orders",
    "Spark: stream-text-checkpoint": "orders",
    "Spark: stream-progress": "numInputRows",
    "Spark: stream-text-progress": "numInputRows",
    "Spark: running-checkpoint": "orders",
    "Spark: running-processes": "pyspark",
    "Spark: sql-explain": "natslog",
    "Spark: pickled-reader": "private/spark",
    "Spark: pickled-partitions": "orders",
    "Spark: pickled-text-partitions": "orders",
    "Spark: pickled-sink": "private/nats-spark",
    "Spark: shown-options": "token_file",
    "Spark: error-wrong": "Unauthorized",
    "Spark: error-expired": "has expired",
    "Spark: error-revoked": "Unauthorized",
    "Spark: error-forbidden": "Forbidden",
    "Spark: error-text-forbidden": "Forbidden",
    "Spark: error-unreachable": "no broker answered",
    "Spark: error-unknown-option": "unknown option",
    "Spark: error-no-token-file": "cannot read the token file",
    "Spark: error-nats-login": "NatsLoginRefused",
    "Spark: error-nats-subject": "ermissions",
    "Spark: error-nats-url": "NatsLoginRefused",
    "Spark: error-http-sink": "Forbidden",
}


def test_no_place_shows_a_secret(scene: Scene) -> None:
    shown = {place: shown_in(content, scene.secrets) for place, content in scene.seen.items()}
    assert [f"{place}: {text}" for place, texts in shown.items() for text in texts] == []


def test_every_place_was_reached(scene: Scene) -> None:
    assert [place for place, proof in PROOFS.items() if proof.encode() not in scene.seen.get(place, b"")] == []
    assert sorted(set(scene.seen) - set(PROOFS)) == []


def test_the_search_finds_secrets_where_they_are(scene: Scene) -> None:
    scene.see_folder("private", scene.private)
    content = scene.seen.pop("private")
    assert sorted(found_in(content, scene.secrets)) == sorted(scene.secrets)
    assert found_in("x".join(CLUSTER_SECRET).encode(), scene.secrets) == []
    assert found_in(CLUSTER_SECRET.encode("utf-16-le"), scene.secrets) == ["cluster-secret"]
