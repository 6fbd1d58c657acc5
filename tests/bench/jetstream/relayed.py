"""The limit of a consumer that is not a part of the server: the same load on one that has nothing to do but to send.

Its frames are made beforehand (see `relaying`), so what remains is what the NATS server takes to pass on messages,
requests and acks, with as many fetches in flight as in the other runs.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from natslog.nats_server import NatsServer
from tests.bench.jetstream.connection import Connection, wait
from tests.bench.jetstream.consumer_load import Member
from tests.bench.jetstream.relaying import NEXT
from tests.bench.jetstream.sides import Figures
from tests.bench.processor_time import processor_seconds
from tests.bench.sides import ROOT, scratch

RELAY = "a consumer that only sends frames made beforehand"
_WITHIN_S = 120.0


def relayed(messages: int, *, batch: int = 0, members: int = 1) -> Figures:
    """Pulled by so many connections in batches, and acked; or, with a batch of 0, pushed to one."""
    with scratch() as folder:
        server = NatsServer(0, Path(folder) / "nats.log").start()
        try:
            with _relaying(server, messages, batch) as process:
                pids = (server.pid, process.pid)
                used, started = processor_seconds(pids), time.perf_counter()
                if batch:
                    _pull(server.port, messages, batch, members)
                else:
                    _push(server.port, messages)
                assert process.stdout is not None
                assert process.stdout.readline() == b"acked\n"
                taken = time.perf_counter() - started
                used = processor_seconds(pids) - used
                return {"rate": messages / taken, "rate_cpu_us": used / messages * 1e6}
        finally:
            server.stop()


@contextmanager
def _relaying(server: NatsServer, messages: int, batch: int) -> Iterator[subprocess.Popen[bytes]]:
    options = ["--messages", str(messages), "--batch", str(batch)]
    command = [sys.executable, "-m", "tests.bench.jetstream.relaying", str(server.port), server.leaf_url, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def _pull(port: int, messages: int, batch: int, members: int) -> None:
    fetching = [Member(port, batch) for _ in range(members)]
    connections, received, deadline = [one.connection for one in fetching], 0, time.monotonic() + _WITHIN_S
    for member in fetching:
        member.fetch()
    while received < messages or any(one.has_unsent for one in connections):
        assert time.monotonic() < deadline, f"{received} of {messages} messages came"
        wait(connections, 0.1)
        received += sum(member.receive() for member in fetching)


def _push(port: int, messages: int) -> None:
    connection, received, deadline = Connection(port), 0, time.monotonic() + _WITHIN_S
    subject = f"{connection.inbox}.push"
    connection.subscribe(subject)
    connection.send(f"PUB {NEXT} {subject} 0\r\n\r\n".encode())
    while received < messages:
        assert time.monotonic() < deadline, f"{received} of {messages} messages came"
        wait([connection], 0.1)
        received += sum(len(frames.rows) for frames in connection.received())
