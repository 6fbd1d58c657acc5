"""Many readers of one stream by long polls, as the client polls. A process of its own, without a client library.

    python -m tests.bench.pollers URL STREAM READERS TOTAL WITHIN_S OUT

Prints `ready` when each reader has sent its first poll, and one line of JSON when each has read offsets 0 to TOTAL, or
the time is up. OUT gets a row for each answer that had messages: reader, start, end, and the time of its arrival.

The body of every answer is checked: by its CRC it is one that was decoded and compared with what was published.
"""

from __future__ import annotations

import heapq
import json
import re
import select
import socket
import sys
import time
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from tests.bench.raw_nats import payload

_READ_BYTES = 4 << 20
_HEAD = re.compile(rb"HTTP/1\.1 (\d+) ")
_LENGTH = re.compile(rb"\r\nContent-Length: (\d+)", re.IGNORECASE)
_NEXT = re.compile(rb"\r\nNatslog-Next-Offset: (\d+)", re.IGNORECASE)
_AGAIN_S = 0.2  # after a refusal, as the client


class Reader:
    """One connection, and where it is in the stream."""

    def __init__(self, number: int, address: tuple[str, int], path: str) -> None:
        self.number, self.offset = number, 0
        self.received = bytearray()
        self.wanted_bytes = 0  # before `received` can be a whole answer
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self._poll = (
            f"GET {path}?start=%d&max_bytes=8388608&wait_ms=20000 HTTP/1.1\r\nHost: x\r\nNatslog-Batches: whole\r\n\r\n"
        )

    def poll(self) -> None:
        self.socket.send((self._poll % self.offset).encode())

    def answer(self, data: memoryview) -> tuple[bytes, memoryview | bytearray] | None:
        """Head and body of the answer that `data` ends; None: there is more to come."""
        whole: memoryview | bytearray = data
        if self.received:
            self.received += data
            if len(self.received) < self.wanted_bytes:
                return None
            whole = self.received
        start = bytes(whole[:2048])
        end = start.find(b"\r\n\r\n") + 4
        if end >= 4:
            found = _LENGTH.search(start, 0, end)
            assert found is not None, start[:end]
            self.wanted_bytes = end + int(found[1])
            if len(whole) == self.wanted_bytes:
                self.received, self.wanted_bytes = bytearray(), 0
                return start[:end], whole[end:]
        if not self.received:
            self.received += data
        return None


class Bodies:
    """Knows whether a body is what was asked for; each different one is decoded once."""

    def __init__(self) -> None:
        self._known: set[tuple[int, int, int]] = set()
        self._value = payload(128)

    def __len__(self) -> int:
        return len(self._known)

    def check(self, start: int, end: int, body: memoryview | bytearray) -> None:
        key = (start, end, crc32c(body))
        if key in self._known:
            return
        table = pa.ipc.open_stream(bytes(body)).read_all()
        offsets = table.column("offset").to_numpy()
        assert offsets[0] <= start < end <= offsets[-1] + 1, (offsets[0], offsets[-1], start, end)
        assert (np.diff(offsets) == 1).all(), "no message is missing"
        assert set(table.column("value").unique().to_pylist()) == {self._value}
        self._known.add(key)


def run(url: str, stream: str, count: int, total: int, within_s: float, out: str) -> dict[str, float]:
    address = urlsplit(url)
    path = f"/v1/streams/{stream}/messages"
    readers = [Reader(number, (address.hostname or "", address.port or 0), path) for number in range(count)]
    events = select.epoll()
    by_fd = {reader.socket.fileno(): reader for reader in readers}
    for reader in readers:
        events.register(reader.socket, select.EPOLLIN)
        reader.poll()
    print("ready", flush=True)
    answers: list[tuple[int, int, int, float]] = []
    again: list[tuple[float, int]] = []  # when to poll again after a refusal
    bodies, buffer = Bodies(), memoryview(bytearray(_READ_BYTES))
    reading, refused, received = count, 0, 0
    until = time.perf_counter() + within_s
    while reading and (now := time.perf_counter()) < until:
        while again and again[0][0] <= now:
            readers[heapq.heappop(again)[1]].poll()
        for fd, _ in events.poll(0.05):
            reader = by_fd[fd]
            taken = reader.socket.recv_into(buffer)
            assert taken, "the broker closed the connection"
            received += taken
            answer = reader.answer(buffer[:taken])
            if answer is None:
                continue
            head, body = answer
            status, next_offset = _HEAD.match(head), _NEXT.search(head)
            assert status is not None, head
            if status[1] != b"200" or next_offset is None:
                refused += 1
                heapq.heappush(again, (time.perf_counter() + _AGAIN_S, reader.number))
                continue
            end = int(next_offset[1])
            if end > reader.offset:
                answers.append((reader.number, reader.offset, end, time.perf_counter()))
                bodies.check(reader.offset, end, body)
                reader.offset = end
            if end < total:
                reader.poll()
            else:
                reading -= 1
    np.save(out, np.array(answers, np.float64))
    return {
        "answers": len(answers),
        "refused": refused,
        "unfinished": reading,
        "received_bytes": received,
        "decoded_bodies": len(bodies),
        "cpu_s": time.process_time(),
    }


if __name__ == "__main__":
    url, stream, count, total, within_s, out = sys.argv[1:]
    print(json.dumps(run(url, stream, int(count), int(total), float(within_s), out)))
