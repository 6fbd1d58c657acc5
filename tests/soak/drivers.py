"""Spark jobs as a supervisor runs them: started again whenever they end, killed and paused by faults.
They read with the Python source and with the columnar reader in turn.

A driver is a session of processes: the job's Python, Spark's JVM, and the Python workers. A kill takes job and JVM at
once, as the kernel's out-of-memory killer or a lost machine would; workers, in process groups of their own, find their
pipes closed and end a little later, while the next driver may be at work already.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from natslog.nats_server import end_with_parent
from pyspark_natslog.jar import jar_path
from tests.harness import eventually
from tests.soak.changing_job import CONFLICTS
from tests.spark.job_processes import JOBS

APPENDED, CHANGED = "appended", "changed"

_CHECK_EVERY_S = 0.3
_WATCH_EVERY_S = 0.01
_WORKERS_END_WITHIN_S = 30.0
_TERM_WITHIN_S = 90.0


class Driver:
    """One job, over and over, with one checkpoint.

    Args:
        checkpoint: also given to the job, here to read how far it is.
        footprint: a number that grows whenever a batch leaves something where it writes; None: not known now.
        needs_jar: the job has no other reader.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        checkpoint: Path,
        environment: dict[str, str],
        footprint: Callable[[], int | None],
        *,
        needs_jar: bool = False,
    ) -> None:
        self.name, self.checkpoint, self.footprint = name, checkpoint, footprint
        self.killed_half_done = 0
        self._needs_jar = needs_jar
        self.log_path = checkpoint.with_name(f"{name}.log")
        self.starts = 0
        self.own_ends: list[str] = []  # its last words, where it ended by itself
        self._command = [sys.executable, str(JOBS / command[0]), *command[1:], "--checkpoint", str(checkpoint)]
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions: list[int] = []
        self._lock = threading.Lock()
        self._is_kept = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name=f"keeper of {name}", daemon=True)

    def start(self) -> Driver:
        """From now on it runs."""
        self._is_kept.set()
        with self._lock:
            self._spawn()
        self._keeper.start()
        return self

    def _spawn(self) -> None:
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._with_reader(),
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self._sessions.append(self._process.pid)
        self.starts += 1

    def _with_reader(self) -> dict[str, str]:
        """Every second start has the columnar reader: each goes on where the other one was killed."""
        if self.starts % 2 == 0 and not self._needs_jar:
            return self._environment
        given = self._environment["PYSPARK_SUBMIT_ARGS"]
        return self._environment | {"PYSPARK_SUBMIT_ARGS": f"--jars {jar_path()} {given}"}

    def _keep(self) -> None:
        while self._is_kept.is_set():
            time.sleep(_CHECK_EVERY_S)
            with self._lock:
                if self._is_kept.is_set() and self._process is not None and self._process.poll() is not None:
                    self.own_ends.append(f"{self._process.returncode}: {self._last_words()}")
                    self._spawn()

    def _last_words(self) -> str:
        return self.log_path.read_text(errors="replace").strip().rpartition("\n")[2][-300:]

    # ---- what is done to it ----

    def kill(self) -> None:
        """SIGKILL for job and JVM; it is down until `restart`."""
        with self._lock:
            assert self._process is not None, "it was started"
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process = None

    def restart(self) -> None:
        with self._lock:
            if self._process is None:
                self._spawn()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, number)

    def terminate(self) -> int:
        """SIGTERM to the job, as a supervisor ends it; returns its exit code."""
        with self._lock:
            assert self._process is not None, "it was started"
            self._process.send_signal(signal.SIGTERM)
            code = self._process.wait(_TERM_WITHIN_S)
            self._is_kept.clear()  # not before: the kernel signals children of a thread that ends (`end_with_parent`)
            return code

    def close(self) -> None:
        """Nothing of it runs any more."""
        self._is_kept.clear()
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        deadline = time.monotonic() + _WORKERS_END_WITHIN_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for one in left:
            one.kill()

    def _left(self) -> list[psutil.Process]:
        """Processes of its sessions; the numbers are not given away again while one of them lives."""
        found = []
        for one in psutil.process_iter():
            try:
                if os.getsid(one.pid) in self._sessions:
                    found.append(one)
            except ProcessLookupError:
                continue
        return found

    # ---- how far it is ----

    @property
    def batches(self) -> int:
        """Micro-batches that are finished."""
        return finished_batches(self.checkpoint)

    def position(self, stream: str) -> int:
        """The offset up to which finished batches go."""
        return position_of(self.checkpoint, stream)

    def wait_until_half_done(self, within_s: float) -> bool:
        """Returns in the middle of a batch, when some of it is written and it is not noted as done; False: in vain."""
        deadline = time.monotonic() + within_s
        done, before = self.batches, self.footprint()
        while time.monotonic() < deadline:
            now = self.footprint()
            if self.batches != done or before is None:
                done, before = self.batches, self.footprint()
            elif now is not None and now > before:
                return self.batches == done
            time.sleep(_WATCH_EVERY_S)
        return False

    def wait_for_batches(self, more: int, within_s: float) -> None:
        wanted = self.batches + more
        eventually(lambda: self.batches >= wanted, within_s, f"{more} more batches of {self.name}")


class ChangingDriver(Driver):
    """`changing_job.py`, whose version can be changed, and whose checkpoints can be set back, while it is down."""

    def __init__(
        self,
        name: str,
        command: list[str],
        folder: Path,
        environment: dict[str, str],
        footprint: Callable[[], int | None],
    ) -> None:
        folder.mkdir(parents=True)
        self._folder, self._saved, self._version = folder, folder.with_name(f"{folder.name}-saved"), 0
        self._version_path = folder.with_name(f"{folder.name}-version")
        self._version_path.write_text("0")
        given = [*command, "--folder", str(folder), "--version", str(self._version_path)]
        super().__init__(name, given, folder / "published", environment, footprint)

    @property
    def conflicts(self) -> list[str]:
        """Why each generation of appended rows ended, but the last one."""
        path = self._folder / CONFLICTS
        return path.read_text().splitlines() if path.exists() else []

    def position(self, stream: str) -> int:
        """Of both queries."""
        appended = self._folder / f"{APPENDED}-{len(self.conflicts)}"
        return min(super().position(stream), position_of(appended, stream))

    def change(self) -> None:
        """Another version of the job, from its next start on."""
        self._version += 1
        self._version_path.write_text(str(self._version))

    def save(self) -> None:
        """Its checkpoints as they are, for `set_back`."""
        shutil.rmtree(self._saved, ignore_errors=True)
        shutil.copytree(self._folder, self._saved)

    def set_back(self) -> bool:
        """Its checkpoints as they were saved; what ended before stays ended. False: none were saved."""
        if not self._saved.is_dir():
            return False
        conflicts = self.conflicts
        shutil.rmtree(self._folder)
        shutil.copytree(self._saved, self._folder)
        if not (self._folder / f"{APPENDED}-{len(conflicts)}").is_dir():
            conflicts.append(f"{len(conflicts)}: its checkpoint was set back to before it began")
        (self._folder / CONFLICTS).write_text("".join(f"{line}\n" for line in conflicts))
        return True


def finished_batches(checkpoint: Path) -> int:
    """Micro-batches that Spark has noted as done."""
    path = checkpoint / "commits"
    return max((int(one) for one in os.listdir(path) if one.isdecimal()), default=-1) + 1 if path.is_dir() else 0


def position_of(checkpoint: Path, stream: str) -> int:
    """The offset up to which finished batches go."""
    if not (batch := finished_batches(checkpoint)):
        return 0
    logged = (checkpoint / "offsets" / str(batch - 1)).read_text().splitlines()[-1]
    return int(json.loads(logged)[stream]["offset"])
