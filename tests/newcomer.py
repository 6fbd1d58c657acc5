"""A newcomer's machine: a fresh checkout, terminals in which nothing is activated, and ports that are free."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from natslog.nats_server import end_with_parent, is_listening
from tests.harness import eventually
from tests.readme import ROOT, Command

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KEPT = ("HOME", "LANG", "JAVA_HOME")
_END = "end-of-the-output-with-exit-code"
_READY_WITHIN_S = 120.0  # at its first start a broker compiles its kernels
_STOP_WITHIN_S = 30.0


def fresh_checkout(folder: Path) -> Path:
    """What a clone of this checkout would hold, with changes that are not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def plain_environment() -> dict[str, str]:
    """Nothing of the environment that the tests run in, but what pip needs to reach its index; the first `python3` in
    PATH is the one that this environment was made with.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or name.startswith("PIP_") or name.lower().endswith("_proxy")
    }
    pip = {"PIP_NO_COMPILE": "1"}  # most of what is installed is not imported
    return kept | pip | {"PATH": f"{sys.base_prefix}/bin:{_SYSTEM_PATH}"}


@contextmanager
def own_network(*ports: int, hosts: Path | None = None) -> Iterator[list[str]]:
    """What commands begin with to run in a network namespace of their own, where all ports are free. Without the right
    to make one: nothing, where the ports are free, and the test is skipped where they are not, or with `hosts`.

    Args:
        hosts: what these commands see as `/etc/hosts`.
    """
    names = "" if hosts is None else f"mount --bind {hosts} /etc/hosts && "
    script = f"ip link set lo up && {names}echo up && exec sleep infinity"
    command = ["unshare", "--net", "--mount", "sh", "-c", script]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent)
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() == "up\n":
            yield ["nsenter", f"--net=/proc/{holder.pid}/ns/net", f"--mount=/proc/{holder.pid}/ns/mnt", "--wd=."]
            return
        if hosts is not None:
            pytest.skip("names of hosts of its own need root")
        taken = [port for port in ports if is_listening(port)]
        if taken:
            pytest.skip(f"a network namespace needs root, and port {taken[0]} is taken")
        yield []
    finally:
        holder.kill()
        holder.wait()


class Terminal:
    """A shell in `folder` that runs one command after another. It ends with its `with` block.

    Args:
        prefix: what the shell's own command begins with (`own_network`). variables: further ones of its environment.
    """

    def __init__(self, folder: Path, prefix: list[str], variables: Mapping[str, str] = {}) -> None:
        self._shell = subprocess.Popen(
            [*prefix, "bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=plain_environment() | variables,
            preexec_fn=end_with_parent,
        )

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._shell.kill()
        self._shell.communicate()

    def run(self, command: str) -> tuple[int, str]:
        """Exit code and output, standard error included, as on a screen."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{{ {command}\n}} </dev/null\nprintf '\\n{_END} %s\\n' $?\n")
        self._shell.stdin.flush()
        lines: list[str] = []
        for line in self._shell.stdout:
            if line.startswith(_END):
                return int(line.split()[1]), "".join(lines)
            lines.append(line)
        raise AssertionError(f"the shell ended in {command!r}: {''.join(lines)}")

    def play(self, command: Command) -> None:
        """Fails the test where the command fails, or prints something else than README says."""
        code, output = self.run(command.text)
        assert code == 0, f"$ {command.text}\n{output}"
        _compare(command, output)


def _compare(command: Command, output: str) -> None:
    printed = "\n".join(command.output)
    assert command.is_answered_by(output), f"$ {command.text}\n{output}\n--- README says:\n{printed}"


_terminals = count(2)


@contextmanager
def left_running(
    command: Command, folder: Path, prefix: list[str], variables: Mapping[str, str] = {}, exit_code: int = 0
) -> Iterator[Path]:
    """In a terminal of its own, from when it has printed what README says until ^C, which must end it with this code.
    Yields the file that has its output.
    """
    log = folder.parent / f"terminal-{next(_terminals)}.log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [*prefix, "bash", "--noprofile", "--norc", "-c", f"exec {command.text}"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=folder,
            env=plain_environment() | variables,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    try:
        eventually(
            lambda: command.is_answered_by(log.read_text()) or process.poll() is not None,
            _READY_WITHIN_S,
            f"the output of {command.text!r} in {log}",
        )
        _compare(command, log.read_text())
        yield log
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(_STOP_WITHIN_S) == exit_code, log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
