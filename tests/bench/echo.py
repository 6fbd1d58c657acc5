"""A subscriber that acks at once and stores nothing, to find the server's own limit.

    python -m tests.bench.echo PORT SUBJECT [FILE]

With a file it appends as many bytes to it as a batch of natslog has, and syncs them, before it acks: what is left is
the least that a process beside the server takes for a durable ack.
"""

from __future__ import annotations

import os
import sys

import numpy as np

from natslog.ingest import acks
from natslog.ingest.batches import BatchBuilder
from natslog.wire.frames import FrameParser
from natslog.wire.layout import SID
from tests.bench.raw_nats import RawConnection

_OUR_SID = 2
_BATCH_BYTES, _ROW_BYTES = 1024, 192


def main(port: int, subject: str, path: str | None = None) -> None:
    fd = -1 if path is None else os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
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
                os.write(fd, bytes(_BATCH_BYTES + _ROW_BYTES * batch.rows.rows))
                os.fdatasync(fd)
            if batch.replies is not None:
                connection.socket.sendall(acks.stored(batch.replies, offsets, stream="echo", epoch=1))
            builder.clear()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
