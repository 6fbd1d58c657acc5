"""The demo's folder, its logs, and the processes that must end with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import TypeVar

import psutil  # type: ignore[import-untyped]

from natslog.client import ClientOptions, NatslogClient
from natslog.wire.link import NatsCredentials

Result = TypeVar("Result")

JOBS = Path(__file__).resolve().parent
STEP_WITHIN_S = 120.0
STOP_WITHIN_S = 20.0
SHORT_RUN = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For JVMs that run for seconds: compile quickly, with less optimisation."""


class DemoFailed(Exception):
    """A step failed; the message is one sentence for the terminal."""


@dataclass(slots=True)
class Stage:
    """The demo's folders, addresses and processes, which end with it.

    Attributes:
        options, credentials: with which the demo itself reads and publishes.
        reading, publishing: arguments with which jobs log in to the broker, and to NATS.
    """

    folder: Path
    servers: str = ""
    nats_url: str = ""
    options: ClientOptions = field(default_factory=lambda: ClientOptions(retries=2))
    credentials: NatsCredentials = field(default_factory=NatsCredentials)
    reading: tuple[str, ...] = ()
    publishing: tuple[str, ...] = ()
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def log_path(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def client(self) -> NatslogClient:
        return NatslogClient(self.servers, self.options)

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """A process whose output goes to its log; in a session of its own, so that ^C reaches only the demo."""
        given = {name: value for name, value in os.environ.items() if not name.startswith("NATSLOG_")}
        environment = given | {
            "NATSLOG_CONFIG": os.devnull,  # no profile of the user
            "NATSLOG_SERVER": self.servers,
            "NATS_URL": self.nats_url,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_SUBMIT_ARGS": f"--conf spark.ui.enabled=false --driver-java-options '{SHORT_RUN}' pyspark-shell",
        }
        with open(self.log_path(name), "ab") as log:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.children.append(child)
        return child

    def run(self, name: str, command: Sequence[str]) -> str:
        """The output of a process that has succeeded. Raises DemoFailed."""
        child = self.start(name, command)
        self.wait_for(name, child, lambda: child.poll() is not None, STEP_WITHIN_S, "it to end")
        return self.log_path(name).read_text(errors="replace")

    def wait_for(
        self, name: str, child: subprocess.Popen[bytes], met: Callable[[], Result], within_s: float, what: str
    ) -> Result:
        """The condition's first true result. Raises DemoFailed if the process fails, or after `within_s`."""
        deadline = time.monotonic() + within_s
        while True:
            code = child.poll()
            if code:
                raise DemoFailed(
                    f"{name} failed with exit code {code}: {self._last_line(name)}; see {self.log_path(name)}"
                )
            if result := met():
                return result
            if code is not None:
                raise DemoFailed(f"{name} ended while the demo waited for {what}; see {self.log_path(name)}")
            if time.monotonic() > deadline:
                raise DemoFailed(
                    f"{name}: no success within {within_s:.0f} s, waiting for {what}; see {self.log_path(name)}"
                )
            time.sleep(0.1)

    def _last_line(self, name: str) -> str:
        lines = self.log_path(name).read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else "it printed nothing"

    def end(self, child: subprocess.Popen[bytes]) -> int:
        """Sends SIGTERM, and after `STOP_WITHIN_S` SIGKILL also to its children; returns its exit code."""
        if child.poll() is None:
            family = psutil.Process(child.pid).children(recursive=True)
            child.terminate()
            try:
                child.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                for process in [psutil.Process(child.pid), *family]:
                    if process.is_running():
                        process.kill()
                child.wait()
        self.children.remove(child)
        return child.returncode

    def end_all(self) -> None:
        """Ends the last started process first: jobs before the broker that they use."""
        for child in reversed(list(self.children)):
            self.end(child)


@contextmanager
def open_stage() -> Iterator[Stage]:
    """A stage whose processes are ended afterwards. Its folder is deleted, except the logs of a demo that failed."""
    stage = Stage(Path(tempfile.mkdtemp(prefix="natslog-demo-")))
    (stage.folder / "logs").mkdir()
    try:
        yield stage
    except BaseException:
        stage.end_all()
        for part in stage.folder.iterdir():
            if part.name != "logs" and part.is_dir():
                rmtree(part, ignore_errors=True)
            elif part.is_file():
                part.unlink()
        raise
    stage.end_all()
    rmtree(stage.folder, ignore_errors=True)


def natslog(*arguments: str) -> list[str]:
    """The command line, of this very installation."""
    return [sys.executable, "-m", "natslog", *arguments]


def job(name: str, *arguments: str) -> list[str]:
    """A job of this folder."""
    return [sys.executable, str(JOBS / name), *arguments]
