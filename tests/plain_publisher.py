"""A publisher without acks, at a steady rate: numbered messages on several subjects, over a connection of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_TURN_S = 0.005


class PlainPublisher(threading.Thread):
    """Publishes `<subject>.<number % subjects>` until `stop`. Args: padding: what each payload has behind its number.

    Attributes:
        sent: how many messages the server has received, after `stop`.
    """

    def __init__(self, url: str, subject: str, rate: int, *, subjects: int = 8, padding: bytes = b"") -> None:
        super().__init__(daemon=True)
        host, _, port = url.removeprefix("nats://").rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.sendall(b'CONNECT {"verbose":false,"headers":true}\r\n')
        self._subject, self._subjects, self._padding = subject.encode(), subjects, padding
        self._rate, self._is_ending = rate, threading.Event()
        self.sent = 0

    def run(self) -> None:
        begun_s = time.monotonic()
        while not self._is_ending.wait(_TURN_S):
            due = int((time.monotonic() - begun_s) * self._rate)
            self._socket.sendall(b"".join(map(self._frame, range(self.sent, due))))
            self.sent = due

    def _frame(self, number: int) -> bytes:
        payload = b"%d %s" % (number, self._padding)
        return b"PUB %s.%d %d\r\n%s\r\n" % (self._subject, number % self._subjects, len(payload), payload)

    def stop(self) -> None:
        """Returns when the server has received all messages."""
        self._is_ending.set()
        self.join()
        self._socket.settimeout(10.0)
        self._socket.sendall(b"PING\r\n")
        received = b""
        while b"PONG" not in received:
            received += self._socket.recv(65536)
        self._socket.close()


@dataclass(frozen=True, slots=True)
class Found:
    """What a stream has of a publisher's messages."""

    lost: int
    doubled: int
    disordered: int

    @classmethod
    def of(cls, values: Sequence[bytes], sent: int, subjects: int = 8) -> Found:
        numbers = [int(value.split()[0]) for value in values]
        counts = Counter(numbers)
        disordered, newest = 0, dict.fromkeys(range(subjects), -1)
        for number in numbers:
            disordered += number < newest[number % subjects]
            newest[number % subjects] = max(newest[number % subjects], number)
        return cls(sent - len(counts), len(numbers) - len(counts), disordered)
