"""Places for Spark to run in: a standalone cluster, a Connect server, other versions of Spark.

All of it comes from the pip package, listens on loopback, logs into the folder given and is ended by its own process
ids. The Python of these places has what natslog depends on but not natslog, which is there only by `PYTHONPATH`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from natslog.nats_server import end_with_parent, free_port
from tests.harness import eventually

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("program.py")
_QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_UP_WITHIN_S = 120.0
_RUN_WITHIN_S = 500.0


def spark_home() -> Path:
    """The pip package of the Spark under test."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter and what it finds: `path` goes into `PYTHONPATH`."""

    executable: Path
    path: tuple[Path, ...]

    def environment(self, home: Path) -> dict[str, str]:
        """For whatever starts Spark or Python: nothing of the environment the tests run in leaks into it."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SPARK", "PYSPARK"))
        }
        return kept | {
            "PYTHONPATH": os.pathsep.join(map(str, self.path)),
            "PYSPARK_PYTHON": str(self.executable),
            "PYSPARK_DRIVER_PYTHON": str(self.executable),
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_HOSTNAME": "127.0.0.1",
        }


def python_without_natslog(folder: Path) -> Path:
    """An interpreter with all that natslog needs, but without natslog: `.pth` files, by which a checkout is installed,
    count only where a folder is a site of its own.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def copied_connector(folder: Path) -> Path:
    """natslog and its connector, as files in a folder."""
    folder.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "broker" / "natslog", folder / "natslog", ignore=ignored)
    shutil.copytree(ROOT / "connector" / "pyspark_natslog", folder / "pyspark_natslog", ignore=ignored)
    return folder


def run_program(
    python: Python, home: Path, arguments: Sequence[str], environment: Mapping[str, str] = {}
) -> tuple[dict[str, Any], str]:
    """What `program.py` found there, and what it and Spark said on the way."""
    command = [str(python.executable), str(PROGRAM), *arguments]
    given = python.environment(home) | dict(environment)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=given, timeout=_RUN_WITHIN_S)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


class SparkProcess:
    """A part of Spark that stays: master, worker, Connect server. Ended by its process group, so that the Python and
    Java it has started end with it.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        with open(log, "ab") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env=dict(environment) | {"SPARK_DAEMON_JAVA_OPTS": _QUICK_JAVA, "SPARK_DAEMON_MEMORY": "512m"},
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, words: str) -> None:
        eventually(lambda: words in self.output() or self._must_live(), _UP_WITHIN_S, f"{words!r} in {self._log}")

    def _must_live(self) -> bool:
        assert self._process.poll() is None, f"it ended: {self.output()[-3000:]}"
        time.sleep(0.1)
        return False

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(10)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()


def spark_class(*arguments: str) -> list[str]:
    return [str(spark_home() / "bin" / "spark-class"), *arguments]


@dataclass(frozen=True, slots=True)
class Master:
    """Of a standalone cluster. `page`: the port of its web page."""

    url: str
    page: int

    def wait_for_workers(self, count: int) -> None:
        eventually(lambda: self._workers_alive() == count, _UP_WITHIN_S, f"{count} workers of {self.url}")

    def _workers_alive(self) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.page}/json/", timeout=30) as answer:
            return int(json.load(answer)["aliveworkers"])


@contextmanager
def standalone_master(folder: Path, environment: Mapping[str, str]) -> Iterator[Master]:
    """Of a cluster that has no workers yet."""
    folder.mkdir()
    port, page = free_port(), free_port()
    command = spark_class("org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(port))
    process = SparkProcess([*command, "--webui-port", str(page)], folder / "master.log", environment)
    try:
        process.wait_for("I have been elected leader")
        yield Master(f"spark://127.0.0.1:{port}", page)
    finally:
        process.stop()


@contextmanager
def standalone_cluster(folder: Path, python: Python, workers: int = 2) -> Iterator[str]:
    """The master's URL, once all workers (of one core each) have joined."""
    environment = python.environment(spark_home())
    with standalone_master(folder, environment) as master, ExitStack() as steps:
        for number in range(workers):
            command = spark_class("org.apache.spark.deploy.worker.Worker", "--host", "127.0.0.1", "--cores", "1")
            command += ["--memory", "1g", "--webui-port", "0", "--work-dir", str(folder / f"work-{number}")]
            worker = SparkProcess([*command, master.url], folder / f"worker-{number}.log", environment)
            steps.callback(worker.stop)
        master.wait_for_workers(workers)
        yield master.url


@contextmanager
def connect_server(folder: Path, python: Python) -> Iterator[str]:
    """Its `sc://` URL, once it listens."""
    folder.mkdir()
    port = free_port()
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": 2,
        "spark.sql.warehouse.dir": folder / "warehouse",
    }
    flags = [text for name, value in settings.items() for text in ("--conf", f"{name}={value}")]
    # as sbin/start-connect-server.sh does, in the foreground
    command = spark_class("org.apache.spark.deploy.SparkSubmit", "--master", "local[2]", "--driver-memory", "512m")
    command += [*flags, "--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    environment = python.environment(spark_home()) | {"SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1"}
    server = SparkProcess(command, folder / "connect.log", environment)
    try:
        server.wait_for("Spark Connect server started at")
        yield f"sc://127.0.0.1:{port}"
    finally:
        server.stop()


# ---- other versions of Spark ----


_NO_INDEX = ("(from versions: none)", "ConnectionError", "ConnectTimeout", "ReadTimeout", "Could not fetch URL")
"""pip's words where it could not ask."""


class NotToBeHad(Exception):
    """This version of Spark cannot be had here: the package index does not answer."""


def another_spark(version: str) -> Path:
    """The folder with this version of PySpark, from the package index the first time; later from the user's cache.

    Raises:
        NotToBeHad: with what pip said.
    """
    folder = _cache() / f"pyspark-{version}-python{sys.version_info.major}.{sys.version_info.minor}"
    if folder.exists():
        return folder
    making = folder.with_name(f"{folder.name}.{os.getpid()}")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--disable-pip-version-check",
    ]
    command += ["--target", str(making), f"pyspark=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(making, ignore_errors=True)
        assert any(words in done.stderr for words in _NO_INDEX), done.stderr
        raise NotToBeHad(f"the package index does not answer, so there is no pyspark {version}: {done.stderr[-300:]}")
    try:
        making.rename(folder)
    except OSError:  # another run was quicker
        shutil.rmtree(making)
    return folder


def _cache() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "natslog-tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
