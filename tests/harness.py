"""Real processes for tests: a NATS server and a broker on free ports, started, killed and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import nats

from natslog.client import ClientOptions, NatslogClient
from natslog.nats_server import NatsServer, free_port
from natslog.node.data_dir import stream_id_of
from tests import forked

Result = TypeVar("Result")

START_WITHIN_S = 60.0
_COMMAND_WITHIN_S = 180.0


LEAST_WITHIN_S = 30.0
"""A machine under load can be so late: a shorter time decides only about a promise that is about time."""


def eventually(
    condition: Callable[[], Result],
    within_s: float = LEAST_WITHIN_S,
    what: str = "",
    every_s: float = 0.02,
    *,
    is_promise: bool = False,
) -> Result:
    """The condition's first true result; fails the test where there is none in time. A condition that itself needs a
    core (a Spark job) is looked at less often, or it takes the time from what it waits for.

    Args:
        is_promise: the time itself is promised; otherwise it is at least `LEAST_WITHIN_S`.
    """
    within_s = within_s if is_promise else max(within_s, LEAST_WITHIN_S)
    deadline = time.monotonic() + within_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {what or condition}"
        time.sleep(every_s)
    return result


def _thread_states(pid: int) -> set[str]:
    states = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            states.add(path.read_text().rpartition(")")[2].split()[0])
    return states


class BrokerProcess:
    """`natslog server` as a process of its own.

    Args:
        settings: further settings, as flags (`segment_bytes=4096` → `--segment-bytes 4096`).
    """

    def __init__(self, folder: Path, nats_url: str, **settings: Any) -> None:
        self.folder = folder
        self.nats_url = nats_url
        self.settings = settings
        self.http_port = free_port()
        names = ("tls_ca_file", "tls_cert_file", "tls_key_file")
        self.tls = {name: str(settings[name]) for name in names if name in settings}
        self.url = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.http_port}"
        self.log_path = folder.with_name(folder.name + ".log")
        self.prefix: list[str] = []
        self.python = sys.executable
        self.module = "natslog"
        self.environment: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | forked.ForkedProcess | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def command(self) -> list[str]:
        flags = [text for name, value in self.settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        base = [
            self.python,
            "-m",
            self.module,
            "server",
            "--data-dir",
            str(self.folder),
            "--nats-url",
            self.nats_url,
        ]
        return [*self.prefix, *base, "--http-port", str(self.http_port), *flags]

    @property
    def whole_environment(self) -> dict[str, str]:
        """With it, SIGABRT makes the process write the stack of each thread to its log."""
        return os.environ | {"PYTHONFAULTHANDLER": "1"} | self.environment

    def spawn(self) -> BrokerProcess:
        """Starts the process without waiting."""
        with open(self.log_path, "ab") as log:
            self._process = forked.start(self.command(), self.whole_environment, log, log)
        return self

    def start(self) -> BrokerProcess:
        self.spawn()
        eventually(lambda: self.ready() or self._must_live(), START_WITHIN_S, "the broker is ready")
        return self

    def _must_live(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the broker ended: {self.output()[-2000:]}"
        return False

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=2, context=self._context()) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def output(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait(self, timeout_s: float = 60.0) -> int:
        assert self._process is not None
        return self._process.wait(timeout_s)

    def halt(self) -> None:
        """As when the power goes: no code of it runs any more, and what a system call returns has no effect. `kill`
        follows.

        The power of the disk alone cannot be cut under load: if ext4 is shut down while an fdatasync runs, this may
        return success for data that is lost (seen in 2 % of such cuts, without natslog), and a message would be acked.
        """
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGSTOP)
        eventually(
            lambda: _thread_states(self.pid) <= set("TtDZX"),
            what="all of its threads are stopped, or wait in the kernel",
        )

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, and no other process is notified."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self, timeout_s: float = 60.0) -> float:
        """SIGTERM; returns the seconds it took to leave, which must be with exit code 0."""
        assert self._process is not None
        started = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)  # it writes the stack of each thread to its log
            code = self._process.wait()
        said = self.output()[-6000:]
        assert code == 0, f"exit code {code}: {said.strip().splitlines()[-1:]}\n{said}"
        self._process = None
        return time.monotonic() - started

    def client(self) -> NatslogClient:
        return NatslogClient(self.url, ClientOptions(retries=3, patience_s=10, **self.tls))

    def _context(self) -> ssl.SSLContext | None:
        """With the broker's own certificate: it is one of a client as well."""
        if not self.tls:
            return None
        context = ssl.create_default_context(cafile=self.tls["tls_ca_file"])
        context.load_cert_chain(self.tls["tls_cert_file"], self.tls["tls_key_file"])
        return context

    @property
    def credentials(self) -> dict[str, str]:
        """Headers of requests."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Metric with labels, as printed → value."""
        request = urllib.request.Request(f"{self.url}/metrics", headers=self.credentials)
        with urllib.request.urlopen(request, timeout=30, context=self._context()) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


def write_secret(path: Path, text: str) -> Path:
    """A file of cluster secrets that only its owner can read, as brokers demand."""
    path.touch(mode=0o600)
    path.write_text(text)
    return path


@contextmanager
def running(
    folder: Path, *, nats_arguments: tuple[str, ...] = (), environment: Mapping[str, str] = {}, **settings: Any
) -> Iterator[tuple[NatsServer, BrokerProcess]]:
    """A NATS server and a broker that uses it; both are gone afterwards.

    Args:
        environment: variables of the broker. `settings`: as for `BrokerProcess`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    server = NatsServer(0, folder / "nats.log", arguments=nats_arguments).start()
    broker = BrokerProcess(folder / "data", server.url, **settings)
    broker.environment = dict(environment)
    try:
        yield server, broker.start()
    finally:
        broker.kill()
        server.stop()


def with_nats(url: str, work: Callable[[Any], Coroutine[Any, Any, Result]]) -> Result:
    """Runs `work(connection)` with a plain nats-py connection, as a service developer has it."""

    async def run() -> Result:
        connection = await nats.connect(url, connect_timeout=30)
        try:
            return await work(connection)
        finally:
            await connection.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


async def flushed(connection: Any) -> None:
    """Returns when the server has all that was published: nats-py's PING overtakes what its first flush writes."""
    await connection.flush()
    await connection.flush()


def publish_acked(
    url: str, subject: str, values: list[bytes], headers: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Publishes each value with a reply subject and returns the answers, in order, each with an offset or an error."""

    async def work(connection: Any) -> list[dict[str, Any]]:
        asks = [connection.request(subject, value, timeout=60, headers=headers) for value in values]
        answers = [json.loads(answer.data) for answer in await asyncio.gather(*asks)]
        return [_with_offset(answer) for answer in answers]

    return with_nats(url, work)


def _with_offset(answer: dict[str, Any]) -> dict[str, Any]:
    sequence = answer.pop("seq", 0)
    return answer | ({"seq": sequence, "offset": sequence - 1} if sequence else {})


def natslog(
    *arguments: str, url: str | None = None, check: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    """The command line, as a user runs it. `options`: of `subprocess.run`."""
    server = ["--server", url] if url else []
    command = [sys.executable, "-m", "natslog", *server, *arguments]
    if options:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMMAND_WITHIN_S, **options
        )
    else:
        done = forked.run(command, _COMMAND_WITHIN_S)
    assert not check or done.returncode == 0, done.stderr
    return done


def on_terminal(*arguments: str, url: str | None = None, types: str = "") -> tuple[int, str]:
    """Exit code and output of the command line with a person before it, who types at once."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "natslog", *(["--server", url] if url else []), *arguments]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        os.write(ours, types.encode())
        shown = b""
        with suppress(OSError):  # the end of a terminal is EIO
            while part := os.read(ours, 65536):
                shown += part
        code = process.wait(60)
    os.close(ours)
    return code, shown.decode(errors="replace").replace("\r\n", "\n")


def stream_folder(folder: Path, stream_id: str) -> Path:
    """Of a broker with this data folder: where the log of the stream is, or would be with no name."""
    streams = folder / "streams"
    there = streams.iterdir() if streams.exists() else ()
    return next((one for one in there if stream_id_of(one) == stream_id), streams / stream_id)


def all_values(client: NatslogClient, stream: str) -> list[bytes]:
    """Every value of a stream, offsets checked to be dense."""
    values: list[bytes] = []
    expected = client.position(stream)["log_start_offset"]
    for batch in client.read(stream):
        offsets = batch.column("offset").to_pylist()
        assert offsets == list(range(expected, expected + len(offsets)))
        expected += len(offsets)
        values += batch.column("value").to_pylist()
    return values
