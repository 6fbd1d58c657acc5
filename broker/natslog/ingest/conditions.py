"""Headers of a message that make a demand on the stream: conditions, a time to live, and a roll-up.

Theory of operation. A kernel marks the few messages that have such a header; only these are read one by one. What
depends on the stream's settings is decided when a message arrives. A condition that depends on earlier messages
(`Condition`) goes with the row to the stream's writer, which checks it in the step that appends the row.

Source: JetStream's headers (nats-server, `server/stream.go`). As there, the first header of a name counts, and an empty
one is none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from natslog.wire import native
from natslog.wire.envelope import OPENING_ARRAY
from natslog.wire.frames import Frames
from natslog.wire.layout import HEADER_LEN, PAYLOAD

EXPECTED_PREFIX = "Nats-Expected-"
EXPECTED_STREAM = "Nats-Expected-Stream"
LAST_SEQUENCE = "Nats-Expected-Last-Sequence"
LAST_SUBJECT_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
LAST_MESSAGE_ID = "Nats-Expected-Last-Msg-Id"
TTL = "Nats-TTL"
ROLLUP = "Nats-Rollup"

KNOWN_EXPECTATIONS = {EXPECTED_STREAM, LAST_SEQUENCE, LAST_SUBJECT_SEQUENCE, LAST_MESSAGE_ID}
_PREFIXES = tuple(np.frombuffer(name.encode(), np.uint8) for name in (EXPECTED_PREFIX, f"{TTL}:", f"{ROLLUP}:"))
_FEATURES = tuple(np.frombuffer(name, np.uint8) for name in (b"Nats-Batch-Id:", b"Nats-Schedule:", b"Nats-Incr:"))
_DEMAND = re.compile(rb"\n(Nats-(?:Expected-[^:\r\n]*|TTL|Rollup)):([^\r\n]*)")
_FAST_BATCH = np.frombuffer(b".$FI", np.uint8)
_NEVER = -1

Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Condition:
    """What must be so before a row is appended; None: nothing. Sequences are offsets plus one; 0: no message.

    Attributes:
        last_sequence: of the stream. `last_subject_sequence`: of the row's subject. `last_message_id`: of the last
            message of the stream. is_rollup: roll-ups are in force.
    """

    last_sequence: int | None = None
    last_subject_sequence: int | None = None
    last_message_id: str | None = None
    is_rollup: bool = False


_NOTHING = Condition()


def marked(frames: Frames) -> Marks | None:
    """Which frames have a header that makes a demand; None: none has."""
    marks = np.zeros(len(frames.rows), np.bool_)
    native.mark_header_prefixes(frames.buffer, frames.rows, *_PREFIXES, marks)
    return marks if marks.any() else None


def marked_features(frames: Frames) -> list[Marks]:
    """Which frames have a header of an atomic batch, of a schedule, and of a counter: features that natslog does not
    have. A message with such a header means something else than a plain one.
    """
    any_of_them = np.zeros(len(frames.rows), np.bool_)
    native.mark_header_prefixes(frames.buffer, frames.rows, *_FEATURES, any_of_them)
    found = [np.zeros(len(frames.rows), np.bool_) for _ in _FEATURES]
    if any_of_them.any():
        for prefix, marks in zip(_FEATURES, found, strict=True):
            native.mark_header_prefix(frames.buffer, frames.rows, prefix, marks)
    return found


def are_of_fast_batches(frames: Frames) -> Marks:
    """Which frames belong to a fast batch of JetStream: their reply subject ends with `.$FI`."""
    marks = np.zeros(len(frames.rows), np.bool_)
    native.mark_reply_ends(frames.buffer, frames.rows, _FAST_BATCH, marks)
    return marks


def begin_as_envelopes(frames: Frames) -> Marks:
    """Which frames have a payload that begins as an envelope of rows does."""
    marks = np.zeros(len(frames.rows), np.bool_)
    native.mark_openings(frames.buffer, frames.rows, OPENING_ARRAY, marks)
    return marks


def demands_at(frames: Frames, at: int) -> dict[str, str]:
    """The first value of each header that makes a demand, of one frame, which is UTF-8."""
    row = frames.rows[at]
    block = frames.buffer[row[PAYLOAD] - row[HEADER_LEN] : row[PAYLOAD]].tobytes()
    found: dict[str, str] = {}
    for name, value in _DEMAND.findall(block):
        found.setdefault(name.decode(), value.decode().strip(" \t"))
    return found


def condition_of(demands: dict[str, str]) -> Condition | None:
    """None where nothing depends on earlier messages."""
    condition = Condition(
        _sequence(demands.get(LAST_SEQUENCE)),
        _sequence(demands.get(LAST_SUBJECT_SEQUENCE)),
        demands.get(LAST_MESSAGE_ID) or None,
        bool(demands.get(ROLLUP)),
    )
    return condition if condition != _NOTHING else None


def _sequence(text: str | None) -> int | None:
    """What is not a number is a condition that is never met."""
    if not text:
        return None
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else _NEVER


def conditions_of(frames: Frames) -> list[tuple[int, Condition]]:
    """Of the frames that have one, with their numbers in ascending order."""
    marks = marked(frames)
    rows = [] if marks is None else np.flatnonzero(marks).tolist()
    found = [(at, condition_of(demands_at(frames, at))) for at in rows]
    return [(at, condition) for at, condition in found if condition is not None]
