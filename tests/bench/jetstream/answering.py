"""A subscriber that answers each request at once: what a request and its answer take that pass through a NATS server.

    python -m tests.bench.jetstream.answering PORT SUBJECT

For requests that are sent one after the other: one read has one of them.
"""

from __future__ import annotations

import sys

from tests.bench.jetstream.connection import Connection
from tests.bench.raw_nats import payload

_ANSWER = payload(128)


def main(port: int, subject: str) -> None:
    connection = Connection(port)
    connection.subscribe(subject)
    connection.socket.setblocking(True)
    print("ready", flush=True)
    while received := connection.socket.recv(65536):
        match received.split(b"\r\n")[0].split(b" "):
            case [b"MSG", _, _, reply, _]:
                connection.socket.sendall(b"PUB %s %d\r\n%s\r\n" % (reply, len(_ANSWER), _ANSWER))
            case [b"PING"]:
                connection.socket.sendall(b"PONG\r\n")
            case other:
                raise AssertionError(f"not a request: {other}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
