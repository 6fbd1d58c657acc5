"""Loads (or compiles, the first time on a machine) the kernels before the first message has to wait for it."""

from __future__ import annotations

import numpy as np

from natslog.wire import kernels
from natslog.wire.frames import FrameParser

_SAMPLE = b"MSG a 1 1\r\nx\r\nHMSG a 1 b 48 49\r\nNATS/1.0\r\nNatslog-Key: k\r\nNats-Msg-Id: 12345\r\n\r\nx\r\n"


def warm_up() -> None:
    """Runs every kernel once on the types it is used with."""
    parser = FrameParser()
    parser.receive_data(_SAMPLE)
    word = np.frombuffer(b"Nats-Msg-Id", np.uint8)
    for frames in parser.frames():
        rows, buffer = frames.rows, frames.buffer
        kernels.gather(buffer, rows[:, 3], rows[:, 4], np.zeros(64, np.uint8), np.zeros(64, np.int32), 0)
        marks = np.zeros(len(rows), np.bool_)
        kernels.mark_high_bytes(buffer, rows, marks)
        kernels.mark_header_prefix(buffer, rows, word, marks)
        pairs = np.zeros((kernels.count_headers(buffer, rows), 4), np.int64)
        first, keys, ids = (np.zeros(shape, np.int64) for shape in (len(rows) + 1, (len(rows), 2), (len(rows), 2)))
        kernels.split_headers(buffer, rows, word, word, pairs, first, keys, ids)
        hashes = np.zeros((len(rows), 2), np.uint64)
        kernels.hash_ids(buffer, ids[:, 0], ids[:, 1], hashes)
        table, offsets, found = np.zeros((8, 2), np.uint64), np.zeros(8, np.int64), np.zeros(len(rows), np.int64)
        kernels.insert_ids(table, offsets, hashes, found)
        kernels.find_ids(table, offsets, hashes, found)
