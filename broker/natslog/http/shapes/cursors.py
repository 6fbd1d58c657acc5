"""Cursors, and the lag of a position."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from natslog.http.shapes.common import Count, CursorName, CursorText, Name, NameText, Offset, Time
from natslog.subjects import check_name

MAX_CURSORS_AT_ONCE = 10_000


class Lag(msgspec.Struct):
    """The messages between an offset and the high watermark. `seconds`: the age of the oldest of them.

    `lost_rows` were deleted before the offset was reached; `beyond_rows`: the offset is so far beyond the end.
    """

    offset: Offset
    rows: Count | None
    bytes: Count | None
    seconds: Annotated[float, Meta(ge=0)] | None
    lost_rows: Count
    beyond_rows: Count
    log_start_offset: Offset
    high_watermark: Offset
    id: str


class Rewound(msgspec.Struct, rename={"from_": "from"}):
    """A cursor was moved back from this offset."""

    from_: Offset
    timestamp: Time


class Sequences(msgspec.Struct):
    """`consumer_seq` counts deliveries. `stream_seq`: of the message; its offset is one less."""

    consumer_seq: Count
    stream_seq: Count


class ConsumerNumbers(msgspec.Struct):
    """As `CONSUMER.INFO` of the JetStream API states them. `num_pending`: messages that are still to be delivered for
    the first time; null if they are not counted within half a second: the next request continues. `num_ack_pending`:
    delivered and not acked, of which `num_redelivered` more than once. `num_waiting`: pull requests that wait for
    messages.
    """

    delivered: Sequences
    ack_floor: Sequences
    num_pending: Count | None
    num_ack_pending: Count
    num_redelivered: Count
    num_waiting: Count


class Cursor(msgspec.Struct):
    """The position of a consumer. `lag` is null if the leader of the stream does not answer. If the name begins with
    `jetstream:`, it is a JetStream consumer, which can only be shown: `timestamp` is that of its last ack, or creation,
    and `jetstream` has its numbers; null if it is not served, or the identity may not read all subjects of the stream.
    `stopped`: it has had a message to read for a minute, and has not moved.
    """

    consumer: CursorName
    stream: Name
    id: str
    offset: Offset
    timestamp: Time
    rewound: Rewound | None
    lag: Lag | UnsetType | None = UNSET
    stopped: bool | UnsetType = UNSET
    jetstream: ConsumerNumbers | UnsetType | None = UNSET


class NewCursor(msgspec.Struct, forbid_unknown_fields=True):
    """The next offset that the consumer has not read. `timestamp`: the time of this position, by default the current
    time. `id`: of the stream. A response to GET may be sent back: its other fields are ignored.
    """

    offset: Offset
    timestamp: str | int | UnsetType = UNSET
    id: Annotated[str | UnsetType | None, Meta(description="the id of the stream, as GET /v1/streams shows it")] = UNSET
    consumer: Name | UnsetType = UNSET
    stream: Name | UnsetType = UNSET
    rewound: Any = UNSET
    lag: Any = UNSET
    stopped: Any = UNSET


class OneOfCursors(msgspec.Struct, forbid_unknown_fields=True):
    """As `NewCursor`. JetStream consumers are refused, with an error that names the call that changes them."""

    consumer: CursorName
    stream: Name
    offset: Offset
    timestamp: str | int | UnsetType = UNSET
    id: str | None = None


class NewCursors(msgspec.Struct, forbid_unknown_fields=True):
    """All are set, or none where one is refused."""

    cursors: Annotated[list[OneOfCursors], Meta(max_length=MAX_CURSORS_AT_ONCE)]


class CursorsSet(msgspec.Struct):
    """`set`: how many."""

    set: Count


# ---- parameters ----


class CursorsOf(msgspec.Struct, frozen=True):
    """Which cursors are listed."""

    consumer: Annotated[str | None, Meta(description="only of this consumer")] = None
    stream: Annotated[str | None, Meta(description="only on this stream")] = None


class CursorPath(msgspec.Struct, frozen=True):
    """A consumer, and the stream on which it has a cursor."""

    consumer: CursorText
    stream: NameText

    def __post_init__(self) -> None:
        check_name(self.stream)
