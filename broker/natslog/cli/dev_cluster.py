"""Several brokers on this machine, each in a process of its own, for `natslog dev --brokers 3`."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from natslog.errors import ConfigError, NatslogError
from natslog.nats_server import end_with_parent, free_port, is_listening

_READY_WITHIN_S = 60.0
_STOP_WITHIN_S = 15.0
_CHECK_EVERY_S = 0.2


class DevCluster:
    """Runs from `start` to `stop`. Broker n keeps its state in `folder/broker-n`.

    Args:
        leaf_url: of the leafnode listener of the NATS server; None: as the environment states it.
        first_port: of broker 1; the others count up. 0: any free ones.
        log: the settings of the log.
    """

    def __init__(
        self, folder: Path, nats_url: str, leaf_url: str | None, brokers: int, first_port: int, log: dict[str, str]
    ) -> None:
        self._folder = folder
        self._nats_urls = {"NATSLOG_NATS_URL": nats_url}
        if leaf_url is not None:
            self._nats_urls["NATSLOG_NATS_LEAF_URL"] = leaf_url
        self._log = log
        ports = [first_port + at if first_port else free_port() for at in range(brokers)]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self._ports = ports
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_stopping = False

    def start(self) -> DevCluster:
        """Returns when all are ready.

        Raises:
            ConfigError: a port is taken. NatslogError: a broker ended; the last line of its log is named.
        """
        taken = [port for port in self._ports if is_listening(port)]
        if taken:
            raise ConfigError(
                f"port {taken[0]} is already in use: choose another first port with --http-port", port=taken[0]
            )
        secret = self._secret_file()
        try:
            for number, port in enumerate(self._ports, start=1):
                self._processes.append(self._spawn(number, port, secret))
            deadline = time.monotonic() + _READY_WITHIN_S
            while not all(_is_ready(url) for url in self.urls):
                self._raise_if_ended()
                if time.monotonic() > deadline:
                    raise NatslogError(f"the brokers were not ready in time: see {self._folder}/broker-*.log")
                time.sleep(0.05)
        except BaseException:
            self.stop()
            raise
        return self

    def _secret_file(self) -> Path:
        path = self._folder / "cluster-secret"
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(32) + "\n")
        return path

    def _spawn(self, number: int, port: int, secret: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "natslog", "server", "--broker-id", str(number), "--http-port", str(port)]
        command += ["--data-dir", str(self._folder / f"broker-{number}")]
        command += [
            "--seeds",
            ",".join(self.urls),
            "--cluster-secret-file",
            str(secret),
        ]
        command += [text for name, value in self._log.items() for text in (f"--{name.replace('_', '-')}", value)]
        with open(self._folder / f"broker-{number}.log", "ab") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self._environment(),
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def _environment(self) -> dict[str, str]:
        """With the URLs of NATS, in which a password may be: every user sees arguments. Without settings of TLS: these
        brokers are reached by `http` URLs.
        """
        given = {name: value for name, value in os.environ.items() if not name.startswith("NATSLOG_TLS_")}
        return given | self._nats_urls

    def _ended(self) -> dict[int, int]:
        """The brokers that have exited, with their exit codes."""
        codes = {number: process.poll() for number, process in enumerate(self._processes, start=1)}
        return {number: code for number, code in codes.items() if code is not None}

    def _how_ended(self, number: int, code: int) -> str:
        log = self._folder / f"broker-{number}.log"
        last = " ".join(log.read_text(errors="replace").strip().splitlines()[-1:])
        if self._log["log_format"] == "json" and last.startswith("{"):
            last = json.loads(last)["message"]
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return f"broker {number} {how}; the last line of its log, {log}: {last}"

    def _raise_if_ended(self) -> None:
        for number, code in self._ended().items():
            raise NatslogError(self._how_ended(number, code))

    def wait(self, report: Callable[[str], None]) -> None:
        """Returns on SIGINT, SIGTERM or SIGHUP. The others continue when a broker exits, which is reported.

        Raises NatslogError: all of them have exited.
        """
        known: dict[int, int] = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note_signal)
        while not self._is_stopping:
            ended = self._ended()
            if len(ended) == len(self._processes) > 0:
                raise NatslogError(self._how_ended(*next(iter(ended.items()))))
            for broker in sorted(ended.keys() - known.keys()):
                how = self._how_ended(broker, ended[broker])
                report(f"{how}. The others continue; the next start of natslog dev starts it again")
            known = ended
            time.sleep(_CHECK_EVERY_S)

    def _note_signal(self, *_: object) -> None:
        """Takes no lock: a second signal may come within it, and would wait for this one."""
        self._is_stopping = True

    def stop(self) -> None:
        """Sends SIGTERM to one broker after another, so that each can transfer its leaderships; SIGKILL after 15 s."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
