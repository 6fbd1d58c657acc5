"""A subscriber that acks at once and stores nothing, to find the server's own limit.

    python -m tests.bench.echo PORT SUBJECT [FILE [COPIES]]

With a file it appends as many bytes to it as a batch of natslog has, and syncs them, before it acks: what is left is
the least that a process beside the server takes for a durable ack. With copies, so many other processes append and sync
the same bytes meanwhile, and it acks when all of them have answered.
"""

from __future__ import annotations

import os
import socket
import sys

import numpy as np

from natslog.ingest import acks
from natslog.ingest.batches import BatchBuilder
from natslog.wire.frames import FrameParser
from natslog.wire.layout import SID
from tests.bench.raw_nats import RawConnection

_OUR_SID = 2
_BATCH_BYTES, _ROW_BYTES = 1024, 192


def main(port: int, subject: str, path: str | None = None, copies: int = 0) -> None:
    followers = [_follower(f"{path}.{number}") for number in range(copies)]
    fd = -1 if path is None else _opened(path)
    connection = RawConnection(port)
    connection.socket.setblocking(True)
    connection.socket.sendall(f"SUB {subject} {_OUR_SID}\r\n".encode())
    connection.ping()
    print("ready", flush=True)
    parser, builder, offset = FrameParser(), BatchBuilder(), 0
    while count := connection.socket.recv_into(parser.room()):
        parser.filled(count)
        for frames in parser.frames():
            builder.add(frames.select(frames.rows[:, SID] == _OUR_SID))
        if builder.rows:
            batch = builder.taken()
            offsets = np.arange(offset, offset + batch.rows.rows)
            offset += batch.rows.rows
            if fd >= 0:
                data = bytes(_BATCH_BYTES + _ROW_BYTES * batch.rows.rows)
                for follower in followers:
                    follower.sendall(len(data).to_bytes(4, "big") + data)
                os.write(fd, data)
                os.fdatasync(fd)
                for follower in followers:
                    assert follower.recv(1), "it has ended"
            if batch.replies is not None:
                connection.socket.sendall(acks.stored(batch.replies, offsets, stream="echo", epoch=1))
            builder.clear()


def _opened(path: str) -> int:
    return os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)


def _follower(path: str) -> socket.socket:
    """The connection to a process that stores what it is sent, and answers with a byte. It ends with this one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        if os.fork() == 0:
            connection, _ = server.accept()
            _store(connection, _opened(path))
            os._exit(0)
        near = socket.create_connection(server.getsockname())
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near


def _store(connection: socket.socket, fd: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    received = b""
    while data := connection.recv(1 << 20):
        received += data
        while len(received) >= 4 and len(received) >= (end := 4 + int.from_bytes(received[:4], "big")):
            os.write(fd, received[4:end])
            os.fdatasync(fd)
            connection.sendall(b"\0")
            received = received[end:]


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:]))
