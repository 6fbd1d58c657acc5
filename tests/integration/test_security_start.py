"""Enabling security, and using it as an operator does: the first token, the commands, profiles, rotation of tokens."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from natslog.cli.common import Global
from natslog.client import ClientOptions, NatslogClient
from natslog.errors import BrokerUnavailable, StorageQuotaExceeded, Unauthorized
from tests.cluster_harness import running_cluster
from tests.harness import BrokerProcess, eventually, natslog, publish_acked, running
from tests.integration.test_access import admin_token

SECURED = {"NATSLOG_SECURITY": "true"}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("secured"), environment=SECURED) as (_, broker):
        yield broker


@pytest.fixture
def operator(secured: BrokerProcess, tmp_path: Path) -> dict[str, str]:
    """The environment of a shell with a profile of the administrator as the default."""
    (tmp_path / "admin.token").write_text(admin_token(secured) + "\n")
    (tmp_path / "admin.token").chmod(0o600)
    profiles = f'default = "ops"\n[profiles.ops]\nservers = ["{secured.url}"]\ntoken_file = "admin.token"\n'
    profiles += f'[profiles.without-token]\nservers = ["{secured.url}"]\n'
    (tmp_path / "config.toml").write_text(profiles)
    return os.environ | {"NATSLOG_CONFIG": str(tmp_path / "config.toml")}


def client_of(broker: BrokerProcess, token: str | None) -> NatslogClient:
    return NatslogClient(broker.url, ClientOptions(retries=0, token=token))


# ---- the start ----


@pytest.mark.long
def test_the_first_start_prints_the_token_of_the_administrator_and_stores_it_nowhere(tmp_path: Path) -> None:
    with running(tmp_path, environment=SECURED) as (_, broker):
        token = admin_token(broker)
        assert client_of(broker, token).whoami()["identity"] == "admin"
        secret = token.split("_", 2)[2].encode()
        broker.terminate()  # a running broker replaces files
        for path in (tmp_path / "data").rglob("*"):
            assert not path.is_file() or secret not in path.read_bytes(), path
        broker.log_path.write_text("")
        broker.start()
        assert "nlt_" not in broker.output(), "the second start prints none"
        assert client_of(broker, token).whoami()["identity"] == "admin"
        broker.terminate()
        broker.log_path.write_text("")
        broker.environment = SECURED | {"NATSLOG_NEW_ADMIN_TOKEN": "true"}
        broker.start()
        another = admin_token(broker)
        assert another != token
        assert len(client_of(broker, another).tokens()) == 2
        broker.terminate()
        broker.environment = {}
        broker.start()
        with pytest.raises(Unauthorized):
            client_of(broker, None).streams()
        assert "security is enabled in this cluster" in broker.output()
        broker.terminate()
        broker.log_path.write_text("")
        broker.start()
        eventually(lambda: "access by tokens" in broker.output(), what="it states what applies, not what is configured")


def answers_until(
    broker: BrokerProcess, token: str, is_last: Callable[[tuple[int, str]], bool]
) -> set[tuple[int, str]]:
    """Status and code of each answer to this token, up to the first one that `is_last`."""
    found: set[tuple[int, str]] = set()

    def asked() -> bool:
        request = urllib.request.Request(f"{broker.url}/v1/whoami", headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=30):
                answer = (200, "")
        except urllib.error.HTTPError as error:
            answer = (error.code, json.loads(error.read())["error"]["code"])
        except OSError:
            return False  # it does not listen yet
        found.add(answer)
        return is_last(answer)

    while not asked():
        time.sleep(0.002)
        assert len(found) < 10
    return found


@pytest.mark.long
def test_brokers_that_start_never_refuse_a_valid_token_nor_accept_a_revoked_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both were changed by commands that they apply only when a majority has started."""
    monkeypatch.setenv("NATSLOG_SECURITY", "true")
    with running_cluster(tmp_path) as cluster:
        eventually(lambda: all(one.output().endswith("ready\n") for one in cluster.brokers))
        (printed,) = [line for one in cluster.brokers for line in one.output().splitlines() if line.startswith("nlt_")]
        admin = NatslogClient([one.url for one in cluster.brokers], ClientOptions(token=printed))
        valid, revoked = (admin.create_token("reader")["token"] for _ in range(2))
        admin.revoke_token(revoked.split("_")[1])
        for token, last in ((valid, 200), (revoked, 401)):
            for broker in cluster.brokers:
                broker.kill()
            for broker in cluster.brokers:
                broker.spawn()
            answers = answers_until(cluster.brokers[0], token, lambda answer, last=last: answer[0] in (200, last))
            assert answers - {(503, "not_ready")} >= {(503, "starting")}, "it was asked before it knew"
            assert {status for status, _ in answers} == {503, last}, answers
            eventually(lambda: all(one.ready() for one in cluster.brokers))


@pytest.mark.long
def test_one_of_several_brokers_prints_the_token_and_all_of_them_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATSLOG_SECURITY", "true")
    with running_cluster(tmp_path) as cluster:
        eventually(lambda: all(one.output().endswith("ready\n") for one in cluster.brokers))
        printed = [line for one in cluster.brokers for line in one.output().splitlines() if line.startswith("nlt_")]
        assert len(printed) == 1
        for broker in cluster.brokers:
            eventually(lambda url=broker: client_of(url, printed[0]).whoami()["identity"] == "admin")
        client = NatslogClient([one.url for one in cluster.brokers], ClientOptions(token=printed[0]))
        client.create_stream("orders", "orders.>", replicas=3)
        assert len(publish_acked(cluster.nats_url, "orders.a", [b"x"] * 5)) == 5
        assert sum(batch.num_rows for batch in client.read("orders")) == 5
        reader = client.create_token("reader")["token"]
        client.add_rule("reader", "read", "orders")
        for broker in cluster.brokers:  # those that do not lead redirect, and the token is sent again
            assert sum(batch.num_rows for batch in client_of(broker, reader).read("orders")) == 5
        token_id = reader.split("_")[1]
        client.revoke_token(token_id)
        for broker in cluster.brokers:
            eventually(lambda one=broker: _is_refused(one, reader), within_s=30, what="revoked everywhere")


def _is_refused(broker: BrokerProcess, token: str) -> bool:
    try:
        client_of(broker, token).whoami()
    except Unauthorized:
        return True
    return False


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_security_a_broker_does_not_listen_on_a_network(tmp_path: Path, host: str) -> None:
    done = natslog("server", "--data-dir", str(tmp_path), "--http-host", host, "--http-port", "0", check=False)
    assert done.returncode == 1
    assert "security = true" in done.stderr
    assert "--insecure" in done.stderr
    assert not any(tmp_path.iterdir())


def test_insecure_listens_on_a_network_and_says_so(tmp_path: Path) -> None:
    with running(tmp_path, http_host="0.0.0.0", environment={"NATSLOG_INSECURE": "true"}) as (_, broker):
        eventually(lambda: "WITHOUT CREDENTIALS" in broker.output())


@pytest.mark.long
def test_on_loopback_a_broker_says_that_there_is_no_security(tmp_path: Path) -> None:
    with running(tmp_path) as (_, broker):
        eventually(lambda: "from this machine only" in broker.output())
        assert client_of(broker, None).whoami()["security"] is False
        assert client_of(broker, "anything").streams() == []
        done = natslog("token", "create", "alice", url=broker.url, check=False)
        assert "security = true" in done.stderr


# ---- the commands ----


@pytest.mark.long
def test_an_operator_creates_checks_and_revokes(
    operator: dict[str, str], secured: BrokerProcess, tmp_path: Path
) -> None:
    def run(*arguments: str, code: int = 0, **options: Any) -> str:
        done = natslog(*arguments, check=False, env=operator, **options)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert "admin (token" in run("whoami")
    run("stream", "create", "orders", "--subject", "orders.>")
    file = tmp_path / "alice.token"
    assert "written to" in run("token", "create", "alice", "--expires", "1h", "--note", "for tests", "-o", str(file))
    assert file.stat().st_mode & 0o777 == 0o600
    assert "File exists" in run("token", "create", "alice", "-o", str(file), code=1)
    assert "refused" in run("acl", "check", "alice", "read", "orders", code=3)
    assert "r" in run("acl", "add", "alice", "read", "orders*", "--subject", "orders.eu.>")
    assert "limited" in run("acl", "check", "alice", "read", "orders", code=3)
    assert "allowed" in run("acl", "check", "alice", "read", "orders", "--subject", "orders.eu.x")
    assert "alice" in run("acl", "ls")
    run("role", "add", "ops", "alice")
    assert "ops" in run("role", "ls")
    run("acl", "add", "role:ops", "manage", "orders")
    as_alice = ("--profile", "without-token", "--token-file", str(file))
    assert "ops" in run(*as_alice, "whoami")
    run(*as_alice, "stream", "pause", "orders")
    run("role", "rm", "ops", "alice")
    assert "may not manage" in run(*as_alice, "stream", "resume", "orders", code=1)
    run("stream", "resume", "orders")
    assert "requires credentials" in run("--profile", "without-token", "stream", "ls", code=1)
    listed = json.loads(run("token", "ls", "--json"))
    (mine,) = [one for one in listed if one["identity"] == "alice"]
    assert "token" not in mine
    assert "for tests" in run("token", "ls")
    assert "--yes" in run("token", "revoke", mine["id"], code=1, stdin=None)
    run("token", "revoke", mine["id"], "--yes")
    assert "unknown or was revoked" in run(*as_alice, "stream", "ls", code=1)
    assert "did you mean 'ops'" in run("--profile", "opz", "stream", "ls", code=1)


@pytest.mark.long
def test_quotas_are_set_and_applied(operator: dict[str, str], secured: BrokerProcess) -> None:
    admin = client_of(secured, admin_token(secured))
    for name in ("busy", "other"):
        admin.add_rule(name, "manage", f"{name}*", f"{name}.>")
    token = admin.create_token("busy")["token"]
    limits = ("--requests-per-s", "5", "--streams", "1", "--stored-bytes", "10MiB", "--cursors", "0")
    assert natslog("quota", "set", "busy", *limits, env=operator).returncode == 0
    assert "10485760" in natslog("quota", "ls", env=operator).stdout
    busy = client_of(secured, token)
    with pytest.raises(StorageQuotaExceeded, match="max_bytes"):
        busy.create_stream("busy1", "busy.a")
    busy.create_stream("busy1", "busy.a", max_bytes="5MiB")
    with pytest.raises(StorageQuotaExceeded, match="may have 1"):
        busy.create_stream("busy2", "busy.b", max_bytes="1MiB")

    refusals: list[str] = []

    def spend() -> None:
        for _ in range(5):
            try:
                busy.streams()
            except BrokerUnavailable as error:
                refusals.append(error.message)

    threads = [threading.Thread(target=spend) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refusals
    assert all("requests_per_s" in refusal for refusal in refusals)
    assert admin.streams(), "others are not affected"
    patient = NatslogClient(secured.url, ClientOptions(token=token))
    assert patient.streams(), "a client waits as it is asked to"
    natslog("quota", "rm", "busy", env=operator)


@pytest.mark.long
def test_a_token_file_that_is_replaced_is_used_by_the_next_request(secured: BrokerProcess, tmp_path: Path) -> None:
    admin = client_of(secured, admin_token(secured))
    old, new = (admin.create_token("rotating") for _ in range(2))
    file = tmp_path / "token"
    file.write_text(old["token"])
    client = NatslogClient(secured.url, ClientOptions(retries=0, token_file=str(file)))
    assert client.whoami()["token"] == old["id"]
    file.write_text(new["token"])
    admin.revoke_token(old["id"])
    assert client.whoami()["token"] == new["id"]


def test_a_request_that_waits_uses_a_token_file_that_is_replaced_meanwhile(
    secured: BrokerProcess, tmp_path: Path
) -> None:
    admin = client_of(secured, admin_token(secured))
    admin.create_stream("waiting", "waiting")
    admin.add_rule("waiter", "read", "waiting")
    old, new = (admin.create_token("waiter") for _ in range(2))
    file = tmp_path / "token"
    file.write_text(old["token"])
    client = NatslogClient(secured.url, ClientOptions(retries=0, token_file=str(file)))
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(client.fetch, "waiting", 0, wait_ms=20_000)
        eventually(lambda: _messages_requests(admin) == 1, what="it waits")
        file.write_text(new["token"])
        admin.revoke_token(old["id"])
        eventually(lambda: _messages_requests(admin) == 2, what="the broker ends it, and the client repeats it")
        publish_acked(secured.nats_url, "waiting", [b"x"])
        assert sum(batch.num_rows for batch in fetching.result(20).batches) == 1


def _messages_requests(client: NatslogClient) -> int:
    """How many requests for messages the broker has received."""
    name = 'natslog_http_requests_total{path="/v1/streams/{name}/messages"} '
    lines = client._ask("GET", "/metrics").data.decode().splitlines()
    return sum(int(float(line.removeprefix(name))) for line in lines if line.startswith(name))


def test_the_token_of_a_profile_is_not_sent_to_other_servers(
    operator: dict[str, str], secured: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATSLOG_CONFIG", operator["NATSLOG_CONFIG"])
    assert Global().client().options.token_file is not None
    assert Global(servers=(f"{secured.url}/",)).client().options.token_file is not None
    for other in ("http://127.0.0.1:1", secured.url.replace("127.0.0.1", "localhost"), f"{secured.url},http://a:1"):
        assert Global(servers=(other,)).client().options.token_file is None
        assert Global(servers=(other,), profile="ops").client().options.token_file is None


def test_the_audit_file_is_written_privately_and_may_be_moved_away(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    with running(tmp_path, environment=SECURED | {"NATSLOG_AUDIT_FILE": str(file)}) as (_, broker):
        admin = client_of(broker, admin_token(broker))
        admin.create_stream("orders", "orders.>")
        assert file.stat().st_mode & 0o777 == 0o600
        first, event = [json.loads(line) for line in file.read_text().splitlines()]
        assert first["created_token"] == admin_token(broker).split("_")[1]
        assert (event["event"], event["identity"], event["route"], event["status"]) == (
            "change",
            "admin",
            "/v1/streams",
            201,
        )
        assert json.loads(event["body"]) == {"name": "orders", "subject": "orders.>"}
        assert re.fullmatch(r"[0-9a-f]{32}", event["request_id"])
        file.rename(tmp_path / "audit.jsonl.1")
        with pytest.raises(Unauthorized):
            client_of(broker, None).streams()
        (event,) = [json.loads(line) for line in file.read_text().splitlines()]
        assert (event["event"], event["status"], event["code"]) == ("refused", 401, "unauthorized")
        assert "natslog.audit" not in broker.output()


def test_waiting_for_a_healthy_cluster_ends_where_no_token_is_given(secured: BrokerProcess) -> None:
    """Waiting would not change that; the sentence is printed once."""
    done = natslog("cluster", "status", "--wait", "60", url=secured.url, check=False)
    assert done.returncode == 1
    assert "waiting" not in done.stderr
    assert done.stderr.count("requires credentials") == 1
