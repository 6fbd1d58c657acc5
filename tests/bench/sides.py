"""What is measured: natslog with its NATS server, JetStream in the same server binary, and the raw publisher."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nats
from nats.js.api import StreamConfig

from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, running

ROOT = Path(__file__).parents[2]
SUBJECT = "bench"
STREAM = "BENCH"
_PUBLISHERS, _VALUE = 8, b"v" * 128
_RAW_ENDS_WITHIN_S = 60.0


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder on the disk that the checkout is on: a temporary one may be memory, and then fsync costs nothing."""
    with TemporaryDirectory(dir=ROOT, prefix=".bench-") as name:
        yield Path(name)


@contextmanager
def natslog_side(**settings: Any) -> Iterator[tuple[NatsServer, BrokerProcess]]:
    """A NATS server and a broker with one empty stream."""
    with scratch() as folder, running(folder / "natslog", **settings) as (server, broker):
        broker.client().create_stream(STREAM, SUBJECT)
        yield server, broker


@contextmanager
def jetstream_side(*, sync_always: bool = False) -> Iterator[NatsServer]:
    """The same server binary with JetStream, file storage, one replica, and one empty stream."""
    with scratch() as folder:
        sync = ", sync_interval: always" if sync_always else ""
        config = folder / "nats.conf"
        config.write_text(f'jetstream {{ store_dir: "{folder / "js"}"{sync} }}\n')
        server = NatsServer(0, folder / "nats.log", arguments=("-c", str(config))).start()
        try:
            asyncio.run(_make_stream(server.url))
            yield server
        finally:
            server.stop()


async def _make_stream(url: str) -> None:
    connection = await nats.connect(url)
    await connection.jetstream().add_stream(StreamConfig(name=STREAM, subjects=[SUBJECT]))
    await connection.close()


def jetstream_stored(server: NatsServer) -> int:
    """How many messages its stream holds."""

    async def ask() -> int:
        connection = await nats.connect(server.url)
        info = await connection.jetstream().stream_info(STREAM)
        await connection.close()
        return info.state.messages

    return asyncio.run(ask())


async def publish_singly(url: str, subject: str, messages: int) -> None:
    """By eight connections of nats-py, each of which waits for the ack of one message before it sends the next."""

    async def publish(count: int) -> None:
        connection = await nats.connect(url)
        for _ in range(count):
            await connection.request(subject, _VALUE, timeout=60)
        await connection.close()

    await asyncio.gather(*(publish(messages // _PUBLISHERS) for _ in range(_PUBLISHERS)))


def raw_publish(server: NatsServer, how: str, subject: str = SUBJECT, **options: float) -> dict[str, float]:
    """Runs the raw publisher; see `raw_nats`."""
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "tests.bench.raw_nats", how, str(server.port), subject, *flags]
    within_s = options.get("seconds", 0) + _RAW_ENDS_WITHIN_S
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=within_s)
    return dict(json.loads(done.stdout))


def resident_mib(pid: int) -> float:
    """Peak resident memory of a process so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
