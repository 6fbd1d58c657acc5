"""What a broker states while it starts, and how its start ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, eventually, with_nats


def test_a_broker_is_ready_when_its_jetstream_api_is_served(tmp_path: Path) -> None:
    """The server has JetStream, so finding that out takes some tenths of a second."""
    nats = NatsServer(0, tmp_path / "nats.log", arguments=("--jetstream", "--store_dir", str(tmp_path / "js"))).start()
    broker = BrokerProcess(tmp_path / "own", nats.url).spawn()
    try:
        deadline_s = time.monotonic() + 60
        while not broker.ready():
            assert time.monotonic() < deadline_s, broker.output()
            time.sleep(0.002)
        assert broker.client().cluster()["jetstream"] == "domain"
        with_nats(nats.url, lambda connection: connection.request("$JS.natslog.API.INFO", b"", timeout=5))
        assert "not ready after" not in broker.output()
    finally:
        broker.kill()
        nats.stop()


def test_a_start_that_takes_long_states_what_it_waits_for(tmp_path: Path, nats_url: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef\n")
    secret.chmod(0o600)
    broker = BrokerProcess(tmp_path / "own", nats_url, cluster_secret_file=secret)
    broker.settings["seeds"] = f"{broker.url},http://127.0.0.1:1,http://127.0.0.1:2"
    broker.spawn()
    try:
        line = "not ready after 2 s: waiting for the other brokers of the cluster"
        eventually(lambda: line in broker.output(), what="the log states it")
        assert not broker.ready()
        os.kill(broker.pid, signal.SIGINT)
        assert broker.wait(30) == 0
        assert "Traceback" not in broker.output()
    finally:
        broker.kill()


def test_interruption_while_modules_are_loaded_leaves_no_traceback(tmp_path: Path) -> None:
    """A module that every command imports, interrupted in the middle."""
    (tmp_path / "typer.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, "-m", "natslog", "--version"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
