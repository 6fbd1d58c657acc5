"""`natslog doctor` with real brokers and NATS servers: healthy ones, and each kind of trouble."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from natslog.cli.main import application
from natslog.diagnosis.doctor import CHECKS, PRODUCTION
from natslog.nats_server import NatsServer
from tests import nats_login
from tests.cluster_harness import running_cluster
from tests.harness import BrokerProcess, eventually, natslog, on_terminal, publish_acked

Found = dict[str, list[dict[str, Any]]]


def diagnosed(*arguments: str, url: str | None = None, folder: Path | None = None) -> tuple[int, Found]:
    """Exit code, and outcomes by check, in this process: the command starts in a second, and there are many.

    Args: `folder`: in which it is executed.
    """
    with contextlib.chdir(folder or Path.cwd()):
        done = CliRunner().invoke(application(), [*(["--server", url] if url else []), "doctor", "--json", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, by_check(done.stdout)


def by_check(printed: str) -> Found:
    found: Found = {}
    for one in json.loads(printed)["outcomes"]:
        found.setdefault(one["check"], []).append(one)
    return found


def states(found: Found, check: str) -> list[str]:
    return [one["state"] for one in found[check]]


def settings_of(broker: BrokerProcess) -> list[str]:
    return [
        *("--data-dir", str(broker.folder), "--nats-url", broker.nats_url),
        *("--http-port", str(broker.http_port)),
    ]


@contextmanager
def silent_port() -> Iterator[int]:
    """Accepts connections, and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepted = []

        def accept() -> None:
            while True:
                try:
                    accepted.append(listening.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        for one in accepted:
            one.close()


def test_healthy_broker_has_no_problem_and_is_not_disturbed(broker: BrokerProcess, filled: str) -> None:
    before = {path for path in broker.folder.rglob("*") if "raft" not in path.parts}
    done = natslog("doctor", "--json", *settings_of(broker))
    found = by_check(done.stdout)
    assert done.stderr == ""
    of_more = {"nats.certificate", "security.certificate", "security.files", "security.administrator", "cluster.links"}
    assert set(found) >= {check.name for check in CHECKS} - of_more
    bad = {name for name in found if set(states(found, name)) & {"problem", "not checked"}}
    assert not bad, [found[name] for name in bad]
    assert found["disk.folder"][0]["facts"]["process"] == broker.pid
    assert found["limits.open_files"][0]["facts"]["process"] == broker.pid
    assert 0 < found["disk.latency"][0]["facts"]["small_p50_ms"] <= found["disk.latency"][0]["facts"]["small_p99_ms"]
    assert found["nats.version"][0]["facts"]["version"].startswith("2.")
    assert {path for path in broker.folder.rglob("*") if "raft" not in path.parts} == before
    assert publish_acked(broker.nats_url, f"{filled}.x", [b"after"])[0]["offset"] == 100


def test_what_production_lacks_is_named_with_its_command(broker: BrokerProcess, filled: str) -> None:
    code, found = diagnosed("--production", *settings_of(broker))
    assert code == 0, "what is missing is a warning"
    assert {check.name for check in PRODUCTION} <= set(found)
    missing = {name: one[0]["remedy"] for name, one in found.items() if one[0]["state"] == "warning"}
    assert "natslog server --seeds" in missing["production.brokers"]
    assert "natslog stream edit" in missing["production.replicas"]
    assert "natslog stream edit" in missing["production.retention"]
    assert "natslog token create" in missing["production.tokens"]
    assert states(found, "production.backups") == ["not checked"]
    assert "natslog export --all" in found["production.backups"][0]["found"]
    assert not set(diagnosed(*settings_of(broker))[1]) & {check.name for check in PRODUCTION}


@pytest.mark.long
def test_output_on_a_terminal_ends_with_what_to_do(broker: BrokerProcess, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    code, shown = on_terminal("doctor", "--data-dir", str(tmp_path / "open"), "--nats-url", broker.nats_url)
    assert code == 1
    assert "Traceback" not in shown
    assert "1 problem, " in shown
    lines = shown[shown.index("1 problem, ") :]
    assert f"problem disk.folder: every user of this machine may write to {tmp_path}/open" in lines
    assert f"Run chmod 700 {tmp_path}/open" in lines
    assert list((tmp_path / "open").iterdir()) == []


def test_before_the_first_start(broker: BrokerProcess, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "data"
    code, found = diagnosed("--data-dir", str(folder), "--nats-url", broker.nats_url, "--http-port", "0")
    assert code == 0
    assert states(found, "cluster.answer") == ["not checked"]
    assert "does not exist yet" in found["disk.folder"][0]["found"]
    assert states(found, "disk.latency") in (["ok"], ["warning"])
    assert list(tmp_path.iterdir()) == []
    assert "another natslog cluster" in found["nats.jetstream"][0]["found"]
    assert found["nats.jetstream"][0]["state"] == "warning"


def test_without_settings_only_the_brokers_are_checked(broker: BrokerProcess, tmp_path: Path) -> None:
    code, found = diagnosed(url=broker.url, folder=tmp_path)
    assert code == 0
    assert states(found, "cluster.quorum") == ["ok"]
    assert states(found, "nats.login") == states(found, "disk.latency") == ["not checked"]


def test_settings_that_are_wrong_are_a_problem(broker: BrokerProcess, tmp_path: Path) -> None:
    (tmp_path / "natslog.toml").write_text('htp_port = 1\ndata_dir = "x"\n')
    code, found = diagnosed("--config", str(tmp_path / "natslog.toml"), url=broker.url)
    assert code == 1
    assert "did you mean 'http_port'" in found["settings"][0]["found"]
    assert states(found, "disk.latency") == ["not checked"]


@pytest.mark.long
def test_port_that_is_used_and_name_that_is_not_found(broker: BrokerProcess, tmp_path: Path) -> None:
    code, found = diagnosed(
        *("--data-dir", str(tmp_path / "d"), "--nats-url", broker.nats_url, "--http-port", str(broker.http_port)),
        *("--advertise-url", "http://no-such-host.invalid:9292"),
        url=broker.url,
    )
    assert code == 1
    assert states(found, "network.port") == ["problem"]
    assert "no-such-host.invalid" in found["network.names"][0]["found"]


@pytest.mark.long
def test_login_that_nats_refuses(tmp_path: Path) -> None:
    login = nats_login.user_and_password(tmp_path)
    with nats_login.server_with(tmp_path, login.configuration) as server:
        files = ["--nats-user", login.wrong["user"], "--nats-password-file", login.wrong["password_file"]]
        code, found = diagnosed("--data-dir", str(tmp_path / "d"), "--nats-url", server.url, *files)
        assert code == 1
        assert states(found, "nats.login") == ["problem"]
        assert login.said in found["nats.login"][0]["found"]
        assert not [secret for secret in login.secret if secret in json.dumps(found)]
        files[-1] = login.right["password_file"]
        _, found = diagnosed("--data-dir", str(tmp_path / "d"), "--nats-url", server.url, *files)
        assert states(found, "nats.login") == states(found, "security.files") == ["ok"]
        Path(login.right["password_file"]).chmod(0o644)
        _, found = diagnosed("--data-dir", str(tmp_path / "d"), "--nats-url", server.url, *files)
        assert "chmod 600" in found["security.files"][0]["found"]


def test_permissions_that_are_missing_are_named(tmp_path: Path) -> None:
    allowed = 'publish: ["_INBOX.>"], subscribe: ["$JS.API.>", "_INBOX.natslog.>"]'
    configuration = f"accounts {{ A {{ users = [ {{ user: b, password: p4ss, permissions: {{ {allowed} }} }} ] }} }}"
    with nats_login.server_with(tmp_path, configuration) as server:
        url = server.url.replace("//", "//b:p4ss@")
        code, found = diagnosed("--data-dir", str(tmp_path / "d"), "--nats-url", url)
    assert code == 1
    refused = found["nats.permissions"][0]["facts"]["refused"]
    assert refused == ["subscribe to $JS.ACK.>", "subscribe to $JS.FC.>", "publish to $JS.API.INFO"]
    assert "p4ss" not in json.dumps(found)


@pytest.mark.long
def test_certificate_of_the_nats_server_and_a_server_that_is_down(tmp_path: Path) -> None:
    login = nats_login.tls(tmp_path)
    with nats_login.server_with(tmp_path, login.configuration) as server:
        urls = f"tls://localhost:{server.port},nats://127.0.0.1:1"
        flags = [
            "--data-dir",
            str(tmp_path / "d"),
            "--nats-url",
            urls,
            "--nats-tls-ca-file",
            login.right["tls_ca_file"],
        ]
        code, found = diagnosed(*flags)
    assert code == 0
    assert states(found, "nats.login") == ["ok", "warning"]
    assert 25 < found["nats.certificate"][0]["facts"]["days"] <= 30


@pytest.mark.long
def test_jetstream_of_the_server_and_a_port_that_is_not_for_leafnodes(tmp_path: Path) -> None:
    configuration = f'jetstream {{ store_dir: "{tmp_path}/js" }}\nmax_payload: 65536'
    with nats_login.server_with(tmp_path, configuration) as server:
        leaf = ["--nats-leaf-url", server.url.replace("nats://", "nats-leaf://")]
        code, found = diagnosed("--data-dir", str(tmp_path / "d"), "--nats-url", server.url, *leaf)
    assert code == 1
    assert "domain natslog" in found["nats.jetstream"][0]["found"]
    assert states(found, "nats.max_payload") == ["warning"]
    assert "not one for leafnodes" in found["nats.leafnode"][0]["found"]


@pytest.mark.long
def test_leafnode_listener_is_recognised_without_a_login(tmp_path: Path) -> None:
    server = NatsServer(0, tmp_path / "nats.log").start()
    try:
        flags = ["--data-dir", str(tmp_path / "d"), "--nats-url", server.url, "--nats-leaf-url", server.leaf_url]
        _, found = diagnosed(*flags)
        assert states(found, "nats.leafnode") == ["ok"]
        assert states(found, "nats.jetstream") == ["ok"]
    finally:
        server.stop()


@pytest.mark.long
def test_servers_that_do_not_answer_do_not_hang_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natslog.diagnosis.probes.cluster.ANSWER_WITHIN_S", 1.0)
    monkeypatch.setattr("natslog.diagnosis.probes.nats._CONNECTED_WITHIN_S", 1.0)
    started = time.monotonic()
    with silent_port() as nats, silent_port() as http:
        flags = ["--nats-url", f"nats://127.0.0.1:{nats}", "--nats-leaf-url", f"nats-leaf://127.0.0.1:{nats}"]
        code, found = diagnosed("--data-dir", str(tmp_path / "d"), *flags, url=f"http://127.0.0.1:{http}")
    assert code == 1
    assert states(found, "nats.login") == ["problem"]
    assert states(found, "nats.leafnode") == ["problem"]
    assert set(states(found, "cluster.answer")) <= {"problem", "not checked"}
    assert states(found, "disk.calls") == ["ok"]
    assert time.monotonic() - started < 60


@pytest.mark.long
def test_interrupted_it_leaves_nothing(broker: BrokerProcess, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(mode=0o700)
    command = [
        sys.executable,
        "-m",
        "natslog",
        "doctor",
        "--data-dir",
        str(tmp_path / "d"),
        "--nats-url",
        "nats://[::1]:1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=dict(os.environ))
    try:
        seen = eventually(lambda: list((tmp_path / "d").iterdir()) or process.poll() is not None, 30, every_s=0.001)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert seen is not True, "the probe was seen"
    assert b"Traceback" not in said
    assert process.returncode in (0, 1, 130)
    assert list((tmp_path / "d").iterdir()) == []


@pytest.mark.long
def test_cluster_with_a_broker_that_is_down(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        cluster.client().create_stream("s", "s", replicas=3)
        cluster.wait_in_sync()
        servers = ",".join(one.url for one in cluster.brokers)
        code, found = diagnosed(url=servers, folder=tmp_path)
        assert code == 0
        assert found["cluster.links"][0]["found"].startswith("3 brokers")
        assert states(found, "clock.brokers") == ["ok"]
        cluster.brokers[2].kill()

        def is_found() -> bool:
            nonlocal code, found
            code, found = diagnosed(url=servers, folder=tmp_path)
            codes = {one["facts"].get("code") for one in found["cluster.findings"]}
            return codes >= {"broker_down", "stream_under_replicated"}

        eventually(is_found, 30)
        assert code == 1
        down = next(one for one in found["cluster.findings"] if one["facts"]["code"] == "broker_down")
        assert "Start broker 3" in down["remedy"]
        assert states(found, "cluster.quorum") == ["warning"]
        bundle = tmp_path / "b.tar.gz"
        done = CliRunner().invoke(application(), ["--server", servers, "support-bundle", "--json", "-o", str(bundle)])
        assert done.exit_code == 0
        body = json.loads(done.stdout)
        assert {"brokers/3/metrics.txt", "brokers/3/readyz.json"} <= set(body["missing"])
        assert {"brokers/1/metrics.txt", "brokers/2/cluster.json", "overview.json"} <= set(body["files"])
        with tarfile.open(bundle) as tar:
            assert b"broker_down" in tar.extractfile("natslog-support/overview.json").read()  # type: ignore[union-attr]
