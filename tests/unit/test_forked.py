"""Processes that the tests fork are as those that are started: output, exit codes, signals, variables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests import forked
from tests.chaos.network import Network, missing_for_network
from tests.harness import eventually, natslog

NATSLOG = [sys.executable, "-m", "natslog"]


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments", [["--version"], ["stream", "lss"], ["verify", "."], ["--server", "http://127.0.0.1:1", "stream", "ls"]]
)
def test_command_writes_and_returns_what_one_does_that_is_not_forked(arguments: list[str]) -> None:
    quick = natslog(*arguments, check=False)
    usual = subprocess.run([*NATSLOG, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert (quick.returncode, quick.stdout, quick.stderr) == (usual.returncode, usual.stdout, usual.stderr)


def test_process_has_the_folder_and_the_variables_of_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NATSLOG_SERVER", "http://127.0.0.1:2")
    assert "http://127.0.0.1:2" in natslog("stream", "ls", check=False).stderr
    assert natslog("verify", ".", check=False).stderr == "error: . contains no natslog files\n"


def test_process_that_is_killed_says_by_which_signal(tmp_path: Path) -> None:
    command = [*NATSLOG, "server", "--data-dir", str(tmp_path / "data"), "--nats-url", "nats://127.0.0.1:1"]
    with (tmp_path / "log").open("wb") as log:
        process = forked.start(command, os.environ, log, log)
    assert isinstance(process, forked.ForkedProcess)
    eventually((tmp_path / "log").read_bytes, what="it runs")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(20) == -signal.SIGKILL
    process.kill()  # it has ended: nothing is sent to a process that may have its number now
    assert process.poll() == -signal.SIGKILL


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "variables"),
    [
        (["env", *NATSLOG, "--version"], {}),
        ([sys.executable, "-c", "from natslog.cli import main; main()", "--version"], {}),
        ([*NATSLOG, "--version"], {"LD_PRELOAD": ""}),
        ([*NATSLOG, "--version"], {"NATSLOG_KERNELS_FILE": ""}),
        ([*NATSLOG, "--version"], forked.AS_USERS_START_IT),
    ],
)
def test_what_has_to_begin_in_another_way_is_not_forked(
    tmp_path: Path, command: list[str], variables: dict[str, str]
) -> None:
    with (tmp_path / "out").open("wb") as out:
        process = forked.start(command, os.environ | variables, out, out)
    assert not isinstance(process, forked.ForkedProcess)
    assert process.wait(60) == 0
    assert (tmp_path / "out").read_text().startswith("natslog ")


def test_process_is_in_the_network_of_the_thread_that_starts_it(tmp_path: Path) -> None:
    if (lacking := missing_for_network()) is not None:
        pytest.skip(lacking)
    command = [*NATSLOG, "server", "--data-dir", str(tmp_path / "data"), "--nats-url", "nats://127.0.0.1:1"]
    natslog("--version")
    network = Network(1, f"forked{os.getpid()}")
    with closing(network), network.entered(), (tmp_path / "log").open("wb") as log:
        process = forked.start(command, os.environ, log, log)
        try:
            assert isinstance(process, forked.ForkedProcess)
            assert os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/thread-self/ns/net")
        finally:
            process.kill()
            process.wait(20)
