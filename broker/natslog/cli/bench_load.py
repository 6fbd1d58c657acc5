"""The load of `natslog bench pub`: generated messages through the project's own publisher, a connection a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from natslog.cli.latencies import Latencies
from natslog.client.publisher import Publisher, Rows
from natslog.errors import InvalidRequest
from natslog.model import Ack
from natslog.wire.link import NatsCredentials

_CHUNK_ROWS = 4000
_LEAST_ROWS = 100  # of a chunk, where messages and window permit it: a call to the publisher takes some 100 µs
_CHUNK_BYTES = 8 * 1024 * 1024
_SHOWN_EVERY_S = 0.1


@dataclass(slots=True)
class Done:
    """What was sent, by all publishers. `seconds`: from the first message to the last ack."""

    sent: int = 0
    acked: int = 0
    seconds: float = 0.0
    latencies: Latencies = field(default_factory=Latencies)


@dataclass(slots=True)
class _Part:
    """One publisher, and what it has sent."""

    publisher: Publisher
    latencies: Latencies
    sent: int = 0


class Load:
    """Messages of one size to one subject.

    Args:
        in_flight: messages of a publisher that wait for acks.
    """

    def __init__(
        self,
        nats_url: str,
        credentials: NatsCredentials,
        *,
        subject: str,
        size_bytes: int,
        in_flight: int,
        ack: Ack,
        ack_timeout_s: float,
    ) -> None:
        self._nats_url, self._credentials = nats_url, credentials
        self._subject, self._size_bytes = subject, size_bytes
        self._in_flight, self._ack, self._ack_timeout_s = in_flight, ack, ack_timeout_s
        self._stop = threading.Event()

    def run(
        self, publishers: int, count: int | None, within_s: float | None, progress: Callable[[float, int], None]
    ) -> Done:
        """Returns when all is sent and, where asked for, acked.

        Args:
            count: messages of all publishers together; `within_s`: what comes first ends it.

        Raises:
            InvalidRequest: the server does not take messages of this size. NatsUnavailable, PublishFailed.
        """
        with ExitStack() as connections, ThreadPoolExecutor(publishers) as threads:
            parts = [self._part(connections) for _ in range(publishers)]
            rows = self._rows(parts[0].publisher.max_payload_bytes)
            started = time.monotonic()
            running = [
                threads.submit(self._publish, part, rows, share, None if within_s is None else started + within_s)
                for part, share in zip(parts, _shares(count, publishers), strict=True)
            ]
            try:
                while (waited := wait(running, _SHOWN_EVERY_S, FIRST_EXCEPTION)).not_done:
                    if any(one.exception() for one in waited.done):
                        break
                    sent = sum(part.sent for part in parts)
                    passed = (time.monotonic() - started) / within_s if within_s else 0.0
                    progress(max(passed, sent / count if count else 0.0), sent)
            finally:
                self._stop.set()  # one has failed, or ^C
            for one in running:
                one.result()
            return _sum(parts, time.monotonic() - started)

    def _part(self, connections: ExitStack) -> _Part:
        latencies = Latencies()
        publisher = Publisher(
            self._nats_url,
            credentials=self._credentials,
            ack_timeout_s=self._ack_timeout_s,
            max_in_flight=self._in_flight,
            on_acked=latencies.add,
        )
        return _Part(connections.enter_context(publisher), latencies)

    def _rows(self, limit_bytes: int) -> Rows:
        """A chunk, which is sent again and again: printable bytes that do not compress to nothing.

        Raises:
            InvalidRequest: the server does not accept messages of this size.
        """
        size = self._size_bytes
        if size > limit_bytes:
            raise InvalidRequest(
                f"--size {size} is larger than the {limit_bytes} bytes that the NATS server accepts in a message "
                "(max_payload)"
            )
        wanted = _CHUNK_ROWS if self._ack != "stored" else min(_CHUNK_ROWS, max(_LEAST_ROWS, self._in_flight))
        count = max(1, min(wanted, _CHUNK_BYTES // size))
        offsets = np.arange(count + 1, dtype=np.int32) * np.int32(size)
        data = np.random.default_rng().integers(ord("!"), ord("~"), count * size, np.uint8)
        values = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
        return Rows(pa.repeat(self._subject, count), values)

    def _publish(self, part: _Part, rows: Rows, count: int | None, until: float | None) -> None:
        """In a thread: one publisher's share."""
        while not self._stop.is_set() and (until is None or time.monotonic() < until):
            left = len(rows) if count is None else min(len(rows), count - part.sent)
            if not left:
                break
            part.publisher.send(rows.slice(0, left), self._ack, first_row=part.sent + 1)
            part.sent += left
        part.publisher.wait_for_ack(self._ack)


def _shares(count: int | None, publishers: int) -> list[int | None]:
    """How many messages each of them sends."""
    if count is None:
        return [None] * publishers
    return [count // publishers + (at < count % publishers) for at in range(publishers)]


def _sum(parts: list[_Part], seconds: float) -> Done:
    done = Done(sum(part.sent for part in parts), sum(part.publisher.acked for part in parts), seconds)
    for part in parts:
        done.latencies.merge(part.latencies)
    return done
