"""What a follower keeps: within its memory, for some seconds, and until the log has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from natslog.ingest.standby import words_of_frames
from natslog.node.writes.ingest_memory import IngestMemory, IngestStats
from natslog.node.writes.standby_messages import StandbyMessages
from natslog.wire.frames import Frames
from natslog.wire.layout import PAYLOAD, PAYLOAD_LEN
from tests.unit.ingest.test_standby import frames_of


def frames(*values: bytes) -> Frames:
    return frames_of(*[("s.a", b"", b"", value) for value in values])


def values_of(parts: Sequence[Frames]) -> list[bytes]:
    return [
        part.buffer[row[PAYLOAD] : row[PAYLOAD] + row[PAYLOAD_LEN]].tobytes() for part in parts for row in part.rows
    ]


class Kept:
    def __init__(self, limit_bytes: int = 1_000_000) -> None:
        self.memory, self.stats = IngestMemory(limit_bytes), IngestStats()
        self.messages = StandbyMessages(self.memory, self.stats, lambda frames: frames)

    def stored(self, *values: bytes, at_s: float = 0.0) -> None:
        compare = self.messages.comparison()
        self.messages.apply(compare(words_of_frames(frames(*values)) if values else np.zeros(0, np.uint64)), at_s)

    def taken(self) -> list[bytes]:
        taken = values_of(self.messages.take())
        assert self.memory.used_bytes == 0, "all memory was given back"
        return taken


def test_what_is_stored_is_dropped_and_the_rest_keeps_its_order() -> None:
    kept = Kept()
    for at, values in enumerate([(b"1", b"2", b"3"), (b"4", b"2"), (b"5",)]):
        kept.messages.add(frames(*values), at * 0.3)
    before = kept.memory.used_bytes
    kept.stored(b"1", b"2", b"4")
    assert kept.memory.used_bytes == before / 2
    kept.messages.add(frames(b"6"), 0.9)
    assert kept.taken() == [b"3", b"2", b"5", b"6"]
    assert kept.messages.is_empty


def test_a_row_may_come_before_its_message_for_a_while() -> None:
    kept = Kept()
    kept.stored(b"1", b"2", b"3", at_s=0.0)
    kept.messages.add(frames(b"2"), 1.0)
    kept.stored(at_s=1.0)
    assert kept.messages.is_empty
    kept.stored(at_s=3.5)
    kept.messages.add(frames(b"1"), 3.6)
    kept.stored(at_s=3.6)
    assert kept.taken() == [b"1"], "it counts as another one by now"


def test_what_the_leader_does_not_store_is_dropped_in_the_end() -> None:
    kept = Kept()
    kept.messages.add(frames(b"refused"), 0.0)
    kept.stored(at_s=9.9)
    assert not kept.messages.is_empty
    kept.stored(at_s=10.1)
    assert kept.taken() == []


def test_without_memory_the_oldest_messages_are_dropped_and_counted() -> None:
    kept = Kept(limit_bytes=5_000)
    had_room = [kept.messages.add(frames(b"%d" % number * 1_000), number * 0.3) for number in range(6)]
    assert had_room == [True] * 4 + [False] * 2
    assert kept.stats.standby_dropped == 2
    kept.memory.charge(5_000)  # of other streams
    assert [kept.messages.add(frames(b"x"), 2.0) for _ in range(2)] == [False, False]
    kept.memory.give_back(5_000)
    assert (kept.taken(), kept.stats.standby_dropped) == ([], 8)


def test_what_is_dropped_during_a_comparison_stays_dropped() -> None:
    kept = Kept(limit_bytes=2_500)
    kept.messages.add(frames(b"1" * 1_000), 0.0)
    kept.messages.add(frames(b"2" * 1_000), 0.3)
    compare = kept.messages.comparison()
    kept.messages.add(frames(b"3" * 1_000), 0.6)
    kept.messages.apply(compare(words_of_frames(frames(b"2" * 1_000))), 0.7)
    assert kept.taken() == [b"3" * 1_000]
