"""Processes of natslog that start in a fraction of the time: forked from one that has imported everything.

Theory of operation. A broker needs 0.9 s of a core until it is ready, a command 0.4 s, nearly all of it for imports,
and the tests start thousands of both. `start` has a server, one for each process and network, fork instead: the child
takes the files, variables and arguments that it is given, and runs the command line from there. It is a process as any
other, with its own memory, signals and files; what it has not done itself is the import. The server has one thread of
Python, as a fork copies no others; those of libraries (jemalloc's in pyarrow) are prepared for forks.

A process that is to be started in another way (by another program, with variables that the interpreter or the compiled
kernels read) is started as usual, and so is one whose memory or command line is looked at: `AS_USERS_START_IT` among
its variables, or among those of pytest for all.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from natslog.nats_server import end_with_parent

AS_USERS_START_IT = {"NATSLOG_TESTS_FORK": "0"}
"""Variables of a process that is not forked."""

_ROOT = Path(__file__).parents[1]
_COMMAND = [sys.executable, "-m", "natslog"]
_MAX_REQUEST = 256 * 1024
_READ_LATE = ("HOME", "PYTEST_CURRENT_TEST", "PYTHONFAULTHANDLER")


class ForkedProcess:
    """What the tests use of `subprocess.Popen`."""

    def __init__(self, server: _Server, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._descriptor = os.pidfd_open(pid)  # the server keeps the process until its exit code is asked for

    def poll(self) -> int | None:
        """The exit code, or the negative number of the signal that ended it; None while it runs."""
        return self._await(0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        code = self._await(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(_COMMAND, timeout or 0.0)
        return code

    def _await(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            ends = select.poll()
            ends.register(self._descriptor, select.POLLIN)
            if ends.poll(None if timeout_s is None else timeout_s * 1000):
                os.close(self._descriptor)
                self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes], errors: IO[bytes]
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Starts a process without input, which ends with this one."""
    if _can_fork(command, environment):
        return _server_here().start(command[len(_COMMAND) :], environment, output, errors)
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        env=environment,
        preexec_fn=end_with_parent,
    )


def run(command: Sequence[str], within_s: float) -> subprocess.CompletedProcess[str]:
    """A command without input, from start to end, with what it wrote. Raises subprocess.TimeoutExpired."""
    with TemporaryFile() as output, TemporaryFile() as errors:
        process = start(command, os.environ, output, errors)
        try:
            process.wait(within_s)
        except BaseException:
            process.kill()
            process.wait()
            raise
        texts = [_text_of(file) for file in (output, errors)]
    return subprocess.CompletedProcess(list(command), process.wait(), *texts)


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    with io.TextIOWrapper(file) as text:  # newlines as subprocess has them
        return text.read()


def _can_fork(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    if list(command[: len(_COMMAND)]) != _COMMAND or environment.items() >= AS_USERS_START_IT.items():
        return False
    own = _server_here().environment
    differing = {name for name in environment.keys() | own.keys() if environment.get(name) != own.get(name)}
    return all(map(_is_read_late, differing))


def _is_read_late(name: str) -> bool:
    """By natslog, when it runs: not by the interpreter, nor by a module that is imported."""
    return name in _READ_LATE or (name.startswith("NATSLOG_") and name != "NATSLOG_KERNELS_FILE")


# ---- the server ----


class _Server:
    """Forks on request, one request at a time. It ends with its client, and what it has forked ends with it."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_REQUEST)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

        atexit.register(self._close)

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes], errors: IO[bytes]
    ) -> ForkedProcess:
        request = {"arguments": list(arguments), "environment": dict(environment), "folder": os.getcwd()}
        files = [output.fileno(), errors.fileno()]
        return ForkedProcess(self, self._ask(request, files)["pid"])

    def exit_code(self, pid: int) -> int:
        """Of a process that has ended: its number is free after that."""
        code: int = self._ask({"ended": pid}, [])["code"]
        return code

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()

    def _ask(self, request: Any, files: list[int]) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            return json.loads(self._socket.recv(_MAX_REQUEST))


_servers: dict[tuple[int, str], _Server] = {}
_starting = threading.Lock()


def _server_here() -> _Server:
    """In the network of this thread: see `Network.entered`."""
    place = (os.getpid(), os.readlink("/proc/thread-self/ns/net"))
    with _starting:
        if place not in _servers:
            _servers[place] = _Server()
        return _servers[place]


def _serve(descriptor: int) -> dict[str, Any] | None:
    """Returns in each child, with what it is to run, and in the server at the end of its client."""
    with socket.socket(fileno=descriptor) as client:
        while True:
            message, files, _, _ = socket.recv_fds(client, _MAX_REQUEST, 2)
            if not message:
                return None
            request: dict[str, Any] = json.loads(message)
            if "ended" in request:
                _, status = os.waitpid(request["ended"], 0)
                client.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
                continue
            pid = os.fork()
            if pid == 0:
                _take_files(*files)
                return request
            for file in files:
                os.close(file)
            client.send(json.dumps({"pid": pid}).encode())


def _take_files(output: int, errors: int) -> None:
    """As standard output and error, which Python opens anew."""
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")


def main() -> None:
    for name in ("natslog.cli", "natslog.client.publisher", "natslog.runner"):
        importlib.import_module(name)
    importlib.import_module("natslog.wire.library").library()
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, "a fork would copy one thread only"
    request = _serve(int(sys.argv[1]))
    if request is None:
        return
    end_with_parent()
    os.environ.clear()
    os.environ.update(request["environment"])
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    os.chdir(request["folder"])
    sys.argv[1:] = request["arguments"]
    runpy.run_module("natslog", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
