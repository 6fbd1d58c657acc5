"""Which messages of a follower that stands by are stored: received frames are compared with rows of the log.

Theory of operation. A row is compared by the hash of its subject, key, headers and value; messages go through the same
columns as in the leader, so that equal ones have equal hashes. Several equal messages are told apart by their number
only: of n equal messages and m equal rows the first m messages are stored. Their order is that of their publisher.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.ingest.ack_rules import AckRules
from natslog.ingest.batches import BatchBuilder
from natslog.ingest.columns import Column, Texts
from natslog.ingest.envelopes import Envelope, Refused, open_messages, split_envelopes
from natslog.ingest.unwanted import split_by_text
from natslog.wire import native
from natslog.wire.envelope import OPENING_ARRAY
from natslog.wire.frames import Frames
from natslog.wire.layout import REPLY, REPLY_LEN
from natslog.wire.row_hashes import row_hashes

Words: TypeAlias = npt.NDArray[np.uint64]
"""A hash of each row."""
Marks: TypeAlias = npt.NDArray[np.bool_]

COMPARED = ("offset", "subject", "key", "headers", "value")
"""The columns of the log that are read."""
_ID_HEADER = np.frombuffer(b"Nats-Msg-Id:", np.uint8)


def screened(frames: Frames, rules: AckRules) -> Frames:
    """What of these is of use at a failover: messages whose publishers wait for no answer, and requests, whose
    publishers are told that they are not stored. Not of use are requests that would have to be unpacked for that
    (envelopes), and messages with an id, which are repeated by their publishers.
    """
    opened, _ = open_messages(frames)
    frames, _ = split_by_text(rules.applied(frames, opened))
    envelopes, with_id = np.zeros((2, len(frames.rows)), np.bool_)
    native.mark_openings(frames.buffer, frames.rows, OPENING_ARRAY, envelopes)
    native.mark_header_prefix(frames.buffer, frames.rows, _ID_HEADER, with_id)
    unwanted = np.where(are_requests(frames), envelopes, with_id)
    return frames.select(~unwanted) if unwanted.any() else frames


def are_requests(frames: Frames) -> Marks:
    """Of frames that `screened` has returned: marks of those whose publishers wait for an ack."""
    marks: Marks = frames.rows[:, REPLY_LEN] > 0
    return marks


def replies_of(requests: Frames) -> Texts:
    column, rows = Column(), requests.rows
    column.extend(requests.buffer, np.ascontiguousarray(rows[:, REPLY]), np.ascontiguousarray(rows[:, REPLY_LEN]))
    return column.texts


def words_of_rows(rows: pa.RecordBatch) -> Words:
    """Of rows that are stored, or as they would be."""
    subject, key, headers, value = (rows.column(name) for name in COMPARED[1:])
    return np.ascontiguousarray(row_hashes(subject, value, key, headers)[:, 0])


def words_of_frames(frames: Frames) -> Words:
    """Of each message; of an envelope, which is stored as a whole, that of its first row."""
    found = [np.zeros(0, np.uint64)]
    for received, _ in split_envelopes(frames):
        builder = BatchBuilder()
        match received:
            case Frames():
                builder.add(received)
            case Envelope(subject=subject, reply=reply, rows=rows):
                builder.add_envelope(subject, reply, rows.slice(0, 1), None)
            case Refused():
                found.append(np.zeros(1, np.uint64))
        if builder.rows:
            found.append(words_of_rows(builder.taken().rows.to_arrow()))
    return np.concatenate(found)


def unmatched(messages: Words, rows: Words) -> tuple[Marks, Marks]:
    """Marks of the messages that are not stored, and of the rows whose messages were not received: of equal ones the
    last ones.
    """
    count = len(messages)
    _, groups = np.unique(np.concatenate((messages, rows)), return_inverse=True)
    of_messages, of_rows = groups[:count], groups[count:]
    are_left = _rank(of_messages) >= np.bincount(of_rows, minlength=len(groups))[of_messages]
    return are_left, _rank(of_rows) >= np.bincount(of_messages, minlength=len(groups))[of_rows]


def _rank(groups: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The number of members of its group before each one."""
    order, counts = np.argsort(groups, kind="stable"), np.bincount(groups)
    rank = np.empty(len(groups), np.int64)
    rank[order] = np.arange(len(groups)) - (np.cumsum(counts) - counts)[groups[order]]
    return rank
