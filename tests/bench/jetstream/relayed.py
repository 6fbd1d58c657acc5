"""What the NATS server alone takes for the deliveries of a consumer, and their acks: the same frames, made beforehand.

This is the limit of a consumer that is not a part of the server: its messages and acks pass through it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

from natslog.nats_server import NatsServer
from natslog.wire.credentials import NatsCredentials
from natslog.wire.leaf import LeafLink
from tests.bench.jetstream.connection import Connection, acks_of, wait
from tests.bench.jetstream.sides import MESSAGE_BYTES, Figures
from tests.bench.processor_time import processor_seconds
from tests.bench.sides import scratch

RELAY = "the NATS server alone, relaying the same frames"
_DELIVER_TO, _ACKS = "to.me", "$JS.ACK.S.C.*.*.*.*.*"
_AT_ONCE = 10_000
_WITHIN_S = 120.0


def relayed(messages: int, *, is_acked: bool) -> Figures:
    """Sends `messages` deliveries on a leafnode connection to one subscriber, which acks each of them, or none."""
    with scratch() as folder:
        server = NatsServer(0, Path(folder) / "nats.log").start()
        try:
            return _run(server, messages, is_acked=is_acked)
        finally:
            server.stop()


def _run(server: NatsServer, messages: int, *, is_acked: bool) -> Figures:
    reader, counter = Connection(server.port), Connection(server.port)
    sizes = [(first, min(_AT_ONCE, messages + 1 - first)) for first in range(1, messages + 1, _AT_ONCE)]
    frames_made = [_deliveries(first, count, messages) for first, count in sizes]
    reader.subscribe(_DELIVER_TO)
    counter.subscribe(_ACKS if is_acked else "unused")
    used, started = processor_seconds((server.pid,)), time.perf_counter()
    sending = threading.Thread(target=lambda: asyncio.run(_send(server.leaf_url, frames_made)))
    sending.start()
    received = acked = 0
    while received < messages or (is_acked and acked < messages):
        assert time.perf_counter() - started < _WITHIN_S, f"{received} of {messages} came, {acked} acks"
        wait([reader, counter], 1.0)
        for frames in reader.received():
            received += len(frames.rows)
            if is_acked:
                reader.send(acks_of(frames))
        acked += sum(len(frames.rows) for frames in counter.received())
    taken = time.perf_counter() - started
    sending.join()
    return {"rate": messages / taken, "rate_cpu_us": (processor_seconds((server.pid,)) - used) / messages * 1e6}


async def _send(leaf_url: str, frames: list[bytes]) -> None:
    link = LeafLink(leaf_url, name="relay", credentials=NatsCredentials())
    await link.open()
    while not link.interest.has(_DELIVER_TO):  # noqa: ASYNC110 (there is no event for it)
        await asyncio.sleep(0.01)
    for one in frames:
        assert link.send_now(one)
        await link.drain()
    while link.unsent_bytes:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await link.close()


def _deliveries(first: int, count: int, messages: int) -> bytes:
    value = b"v" * MESSAGE_BYTES
    return b"".join(
        b"LMSG %b $JS.ACK.S.C.1.%d.%d.1795629019806377000.%d@s.x %d\r\n%b\r\n"
        % (_DELIVER_TO.encode(), seq, seq, messages - seq, len(value), value)
        for seq in range(first, first + count)
    )
