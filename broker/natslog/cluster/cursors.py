"""Cursors: positions of named consumers. Brokers only store them; a consumer may resume at its cursor.

Invariant. A cursor may be moved back. Its previous position and the time of this change are kept until it is moved back
again.
"""

from __future__ import annotations

import msgspec

from natslog.cluster.commands import SetCursor
from natslog.errors import StreamRecreated
from natslog.model import Offset, StreamId, StreamRecord, beyond_fork, fork_offset

CONSUMER_PREFIX = "jetstream:"
"""A cursor whose name begins so is a JetStream consumer: it is only shown. Names of other cursors have no colon."""


class CursorRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The position of `consumer` in a stream: the next `offset` that it has not read, as set at `set_us`.

    Attributes:
        rewound_from: its position when it was last moved back, at `rewound_us`; None where it never was.
        owner: the identity that set it first; "" without security.
    """

    consumer: str
    stream: str
    stream_id: StreamId
    offset: Offset
    set_us: int
    rewound_from: Offset | None = None
    rewound_us: int | None = None
    owner: str = ""


def cursor_key(consumer: str, stream: str) -> str:
    """Names hold no slash."""
    return f"{consumer}/{stream}"


def moved(known: CursorRecord | None, command: SetCursor) -> CursorRecord:
    """The cursor after the command."""
    record = CursorRecord(
        consumer=command.consumer,
        stream=command.stream,
        stream_id=command.stream_id,
        offset=command.offset,
        set_us=command.set_us,
        owner=command.owner if known is None else known.owner,
    )
    if known is None:
        return record
    if command.offset < known.offset:
        return msgspec.structs.replace(record, rewound_from=known.offset, rewound_us=command.set_us)
    return msgspec.structs.replace(record, rewound_from=known.rewound_from, rewound_us=known.rewound_us)


def of_present_stream(change: SetCursor, record: StreamRecord) -> SetCursor:
    """The position in the stream as it is now: positions of one that it was restored from are valid up to the fork.

    Raises:
        StreamRecreated: the position is of another stream, or beyond the fork.
    """
    fork = fork_offset(record.lineage, change.stream_id)
    if fork is not None and change.offset <= fork:
        return msgspec.structs.replace(change, stream_id=record.id)
    if fork is not None:
        raise beyond_fork(record.name, change.stream_id, record.id, change.offset, fork)
    if record.id != change.stream_id:
        raise StreamRecreated(
            f"stream {record.name!r} was deleted and created again (its id is {record.id}, not {change.stream_id}): "
            f"offset {change.offset} of the former stream is not valid in it",
            stream=record.name,
            id=record.id,
        )
    return change
