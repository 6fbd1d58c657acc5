"""When the leader of a stream removes messages, and when the records of it are replaced by a snapshot.

Theory of operation. Only the leader decides what is removed, and it states that in records of the companion log. Not
where the stream is to stay as it is: it is sealed, or its messages are those of another stream that is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from natslog.model import StreamRecord

_SHORTEN_FROM_BYTES = 4 * 1024 * 1024
_SNAPSHOT_SHARE = 4
RECORDED_AT_LEAST = 1000
_RECORDED_SHARE = 16


def decides_removals(record: StreamRecord, *, leads: bool) -> bool:
    """Whether this replica decides which messages have expired, or are past a limit."""
    return leads and not record.sealed and not record.import_state


def purged_start(record: StreamRecord, *, leads: bool) -> int | None:
    """Segments below this offset are removed by the leader, although nothing expires: the stream was purged before it
    was sealed. None: `decides_removals` applies.
    """
    return record.purged_below if leads and record.sealed and not record.import_state else None


def prepares_companion(record: StreamRecord) -> bool:
    """Whether the companion log is created before the first record: a message may expire within a second."""
    return record.settings.allow_ttl and len(record.isr) >= record.settings.min_isr


def is_to_be_recorded(hidden: int, stored: int, *, waits_for_rewriting: int, at_least: int = RECORDED_AT_LEAST) -> bool:
    """Whether offsets that newer messages hide are recorded, so that their segments are rewritten.

    Args:
        hidden: how many are in sealed segments. stored: rows of these that are not removed by records.
        waits_for_rewriting: rows that a rewrite would drop: no file is rewritten before all of it is recorded.
    """
    enough = max(at_least, stored // _RECORDED_SHARE)
    return hidden >= enough or (hidden > 0 and waits_for_rewriting >= enough)


def is_snapshot_due(companion_bytes: int, snapshot_bytes: int | None = None) -> bool:
    """Whether the records are replaced by a snapshot, where that is much smaller.

    Args:
        snapshot_bytes: None: it is not made yet. True: it is to be made.
    """
    if companion_bytes < _SHORTEN_FROM_BYTES:
        return False
    return snapshot_bytes is None or companion_bytes > _SNAPSHOT_SHARE * snapshot_bytes


@dataclass(frozen=True, slots=True)
class OldestMessage:
    """The first visible message of a log: its timestamp, or None where there was none below `end`."""

    timestamp_us: int | None
    end: int

    def expires_us(self, age_s: float, now_us: int, high_watermark: int) -> int:
        """When the log has to be looked at again. A message that arrives now expires after its age."""
        age_us = int(age_s * 1e6)
        if self.timestamp_us is None:
            return now_us + (0 if high_watermark > self.end else age_us)
        return self.timestamp_us + age_us
