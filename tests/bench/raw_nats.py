"""A publisher that is not the limit: one socket, frames built once, acks counted in place. A process of its own.

    python -m tests.bench.raw_nats acked PORT SUBJECT --bytes 128 --window 4000 --seconds 3
    python -m tests.bench.raw_nats flood PORT SUBJECT --bytes 128 --seconds 10
    python -m tests.bench.raw_nats paced PORT SUBJECT --bytes 128 --rate 10000 --seconds 5

Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import socket
import sys
import time

import numpy as np

_LF = 10
_READ_BYTES = 1 << 20
_SEND_BYTES = 256 * 1024
_PATIENCE_S = 20.0
_INBOX = "_INBOX.bench"
_SEQUENCE = re.compile(rb"MSG _INBOX\.bench\.(\d+) ")


class RawConnection:
    """A NATS connection without a client library."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(_READ_BYTES)
        self._view = memoryview(self._buffer)
        self._kept = 0
        self._read_info()
        self.socket.sendall(
            b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true}\r\nSUB '
            + _INBOX.encode()
            + b".> 1\r\nPING\r\n"
        )
        self._await(b"PONG\r\n")
        self.socket.setblocking(False)

    def _read_info(self) -> None:
        self._await(b"\r\n")

    def _await(self, text: bytes) -> None:
        found = b""
        while text not in found:
            chunk = self.socket.recv(65536)
            assert chunk, "the server closed the connection"
            found += chunk

    def send_some(self, data: memoryview) -> int:
        try:
            return self.socket.send(data[:_SEND_BYTES])
        except BlockingIOError:
            return 0

    def send_all(self, data: memoryview) -> None:
        self.socket.setblocking(True)
        self.socket.sendall(data)
        self.socket.setblocking(False)

    def receive(self) -> memoryview:
        """What came, after what `keep` left; empty where nothing did."""
        try:
            count = self.socket.recv_into(self._view[self._kept :])
        except BlockingIOError:
            return self._view[:0]
        assert count, "the server closed the connection"
        count += self._kept
        self._kept = 0
        return self._view[:count]

    def keep(self, rest: memoryview) -> None:
        """The end of what `receive` gave, to stand before what comes next."""
        self._kept = len(rest)
        self._buffer[: self._kept] = bytes(rest)

    @staticmethod
    def lines(data: memoryview) -> int:
        """How many lines end in it. An answer has two: its own, and its payload's."""
        return int(np.count_nonzero(np.frombuffer(data, np.uint8) == _LF))

    def wait(self, seconds: float, *, to_write: bool) -> None:
        select.select([self.socket], [self.socket] if to_write else [], [], seconds)

    def ping(self) -> None:
        """Returns when the server has processed all that was sent."""
        self.socket.setblocking(True)
        self.socket.sendall(b"PING\r\n")
        self._await(b"PONG\r\n")


def payload(size: int) -> bytes:
    """Not compressible to nothing, and the same each time."""
    return bytes((i * 31 + i // 7) % 94 + 33 for i in range(size))


def frames(subject: str, size: int, count: int, reply: bool) -> tuple[memoryview, int]:
    """`count` equal frames, and the length of one."""
    to = f"{_INBOX}.0 " if reply else ""
    one = f"PUB {subject} {to}{size}\r\n".encode() + payload(size) + b"\r\n"
    return memoryview(one * count), len(one)


def acked(
    port: int, subject: str, size: int, window: int, seconds: float, warm_s: float, count: int = 0
) -> dict[str, float]:
    """Keeps `window` messages unanswered; counts answers between the end of `warm_s` and `seconds` later.

    An answer may be a refusal: the caller compares with what was stored.

    Args:
        count: ends when so many messages are answered, if that is earlier; 0 for any number.
    """
    connection = RawConnection(port)
    data, each = frames(subject, size, window, reply=True)
    sent_bytes, lines = 0, 0
    limit = count or sys.maxsize
    started, started_cpu = time.perf_counter(), time.process_time()
    counted_from, counted_at = 0, started
    is_warm = False
    while (now := time.perf_counter()) < started + warm_s + seconds and lines // 2 < limit:
        if not is_warm and now >= started + warm_s:
            is_warm, counted_from, counted_at = True, lines // 2, now
        room = min(window + lines // 2, limit) * each - sent_bytes
        if room > 0:
            at = sent_bytes % len(data)
            sent_bytes += connection.send_some(data[at : at + room])
        received = connection.receive()
        if received:
            lines += connection.lines(received)
        elif room <= 0:
            connection.wait(0.1, to_write=False)
    ended = time.perf_counter()
    rate = (lines // 2 - counted_from) / (ended - counted_at)
    sent = -(-sent_bytes // each)
    connection.send_all(data[sent_bytes % each : each] if sent_bytes % each else data[:0])
    while lines // 2 < sent and time.perf_counter() < ended + _PATIENCE_S:
        connection.wait(0.1, to_write=False)
        lines += connection.lines(connection.receive())
    return {"rate": rate, "sent": sent, "acked": lines // 2, "cpu_s": time.process_time() - started_cpu}


def flood(port: int, subject: str, size: int, seconds: float) -> dict[str, float]:
    """As fast as the server takes it, without acks."""
    connection = RawConnection(port)
    data, each = frames(subject, size, 8192, reply=False)
    sent_bytes = 0
    started = time.perf_counter()
    while time.perf_counter() < started + seconds:
        at = sent_bytes % len(data)
        done = connection.send_some(data[at:])
        sent_bytes += done
        if not done:
            connection.wait(0.1, to_write=True)
    taken = time.perf_counter() - started
    connection.send_all(data[sent_bytes % each : each] if sent_bytes % each else data[:0])
    connection.ping()
    sent = -(-sent_bytes // each)
    return {"sent": sent, "rate": sent / taken}


def paced(port: int, subject: str, size: int, rate: float, seconds: float, warm_s: float) -> dict[str, float]:
    """One message each 1/`rate` s, whatever the answers; latency counts from when a message was due.

    `started` is the time of the first one on the clock that all processes of a machine share (`time.perf_counter`).
    """
    connection = RawConnection(port)
    body = payload(size)
    due: list[float] = []
    latencies: list[float] = []
    unsent = b""
    acks, total = 0, int((warm_s + seconds) * rate)
    started = time.perf_counter()
    give_up_at = started + warm_s + seconds + _PATIENCE_S
    while acks < total and (now := time.perf_counter()) < give_up_at:
        ready = min(total, int((now - started) * rate) + 1)
        if ready > len(due):
            first = len(due)
            due += [started + number / rate for number in range(first, ready)]
            unsent += b"".join(
                b"PUB %s %s.%d %d\r\n%s\r\n" % (subject.encode(), _INBOX.encode(), number, size, body)
                for number in range(first, ready)
            )
        if unsent:
            unsent = unsent[connection.send_some(memoryview(unsent)) :]
        if received := connection.receive():
            now = time.perf_counter()
            numbers = [int(text) for text in _SEQUENCE.findall(received)]
            acks += len(numbers)
            latencies += [now - due[number] for number in numbers if number >= warm_s * rate]
            connection.keep(received[_last_line_start(received) :])
        else:
            next_due = started + len(due) / rate if len(due) < total else now + 0.05
            connection.wait(max(0.0, min(next_due - time.perf_counter(), 0.05)), to_write=False)
    latencies.sort()
    count = len(latencies)
    assert count, "no message was acked"
    return {
        "acked": acks,
        "sent": len(due),
        "started": started,
        "p50_ms": latencies[count // 2] * 1e3,
        "p99_ms": latencies[min(count - 1, count * 99 // 100)] * 1e3,
    }


def _last_line_start(data: memoryview) -> int:
    """Where a line that `data` ends in the middle of begins."""
    return bytes(data).rfind(b"\n") + 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=["acked", "flood", "paced"])
    parser.add_argument("port", type=int)
    parser.add_argument("subject")
    parser.add_argument("--bytes", type=int, default=128)
    parser.add_argument("--window", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warm", type=float, default=1.0)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--rate", type=float, default=10_000.0)
    given = parser.parse_args()
    if given.how == "acked":
        result = acked(given.port, given.subject, given.bytes, given.window, given.seconds, given.warm, given.count)
    elif given.how == "flood":
        result = flood(given.port, given.subject, given.bytes, given.seconds)
    else:
        result = paced(given.port, given.subject, given.bytes, given.rate, given.seconds, given.warm)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
