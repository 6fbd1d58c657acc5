"""The stream of the simulation of a consumer: messages that come, are removed one by one, and are purged."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from random import Random

import numpy as np

from natslog.jetstream.consumers.config import ConsumerConfig
from natslog.jetstream.consumers.machine import Batch

SUBJECTS = 4


@dataclass(slots=True)
class Message:
    seq: int
    subject: int
    size_bytes: int
    time_us: int


class Stream:
    """Args: filters: the subjects that the consumer reads.

    Attributes:
        order: sequences of the messages that there are and that the consumer reads, ascending. first: all below are
            gone; last: the last message that there was.
    """

    def __init__(self, filters: frozenset[int]) -> None:
        self.filters = filters
        self.messages: dict[int, Message] = {}
        self.order: list[int] = []
        self.first, self.last = 1, 0

    def publish(self, subject: int, size_bytes: int, time_us: int) -> None:
        self.last += 1
        self.messages[self.last] = Message(self.last, subject, size_bytes, time_us)
        if subject in self.filters:
            self.order.append(self.last)

    def remove(self, seq: int) -> None:
        if self.messages.pop(seq, None) is not None and self.has(seq):
            del self.order[bisect_left(self.order, seq)]

    def purge(self, upto: int) -> None:
        """All up to this sequence are gone."""
        for seq in range(self.first, upto + 1):
            self.remove(seq)
        self.first = max(self.first, upto + 1)

    def has(self, seq: int) -> bool:
        """Whether there is this message for the consumer."""
        at = bisect_left(self.order, seq)
        return at < len(self.order) and self.order[at] == seq

    def read(self, start: int, most: int) -> Window:
        """So many messages from `start` on."""
        at = bisect_left(self.order, start)
        found = self.order[at : at + most]
        upto = found[-1] + 1 if len(found) == most else max(self.last + 1, start)
        return Window([self.messages[seq] for seq in found], upto)

    def chosen(self, seqs: list[int]) -> Window:
        """Those of these messages that there are, in this order."""
        return Window([self.messages[seq] for seq in seqs if self.has(seq)], 0)

    def count_from(self, seq: int) -> int:
        return len(self.order) - bisect_left(self.order, seq)

    def last_of_each(self) -> list[int]:
        """The last message of each subject that the consumer reads."""
        return sorted({self.messages[seq].subject: seq for seq in self.order}.values())


@dataclass(slots=True)
class Window:
    """Messages that were read. `upto`: all that the consumer reads below, from where the read began, are in it."""

    messages: list[Message]
    upto: int

    @property
    def seqs(self) -> list[int]:
        return [one.seq for one in self.messages]

    def only(self, seqs: set[int]) -> Window:
        return Window([one for one in self.messages if one.seq in seqs], self.upto)

    def batch(self, most: int) -> Batch:
        part = self.messages[:most]
        return Batch(
            np.array([one.seq for one in part], np.int64),
            np.array([one.size_bytes for one in part], np.int64),
            np.array([one.time_us for one in part], np.int64),
        )


# ---- what a seed chooses ----

_MS = 1_000_000


@dataclass(slots=True)
class Plan:
    """A consumer, and how much happens. `deliver`: where it begins."""

    config: ConsumerConfig
    filters: frozenset[int]
    deliver: str
    sizes: tuple[int, int]
    publish_ms: tuple[float, float]


def plan_of(chance: Random) -> Plan:
    filters = frozenset(range(chance.choice((SUBJECTS, SUBJECTS, 1, 2))))
    is_push = chance.random() < 0.4
    policy = chance.choice(("explicit", "explicit", "explicit", "explicit", "all", "all", "none"))
    max_deliver = chance.choice((-1, -1, -1, 1, 2, 3, 5))
    ack_wait_ms = chance.choice((100, 300, 1000))
    backoff_ms = chance.choice(((), (), (), (80, 300), (50, 400, 900)))
    if 0 < max_deliver < len(backoff_ms):
        backoff_ms = ()
    config = ConsumerConfig(
        durable_name="c",
        ack_policy=policy,
        ack_wait=(backoff_ms[0] if backoff_ms else ack_wait_ms) * _MS if policy != "none" else 0,
        max_deliver=max_deliver,
        backoff=tuple(one * _MS for one in backoff_ms) if policy != "none" else (),
        max_ack_pending=chance.choice((-1, 1, 3, 10, 40, 1000)) if policy != "none" else 0,
        max_waiting=0 if is_push else chance.choice((3, 512)),
        replay_policy=chance.choice(("instant",) * 6 + ("original",)) if is_push else "instant",
        **(push_of(chance) if is_push else {}),
    )
    is_heavy = config.flow_control and chance.random() < 0.7
    deliver = chance.choice(("all", "all", "all", "new", "by_start_sequence", "last_per_subject"))
    sizes = (100_000, 700_000) if is_heavy else (1, 300)
    return Plan(config, filters, deliver, sizes, chance.choice(((2.0, 60.0), (20.0, 200.0))))


def push_of(chance: Random) -> dict[str, object]:
    flow_control = chance.random() < 0.5
    heartbeat_ms = chance.choice((100, 500)) if flow_control or chance.random() < 0.4 else 0
    return {
        "deliver_subject": "out",
        "flow_control": flow_control,
        "idle_heartbeat": heartbeat_ms * _MS,
        "rate_limit_bps": 0 if flow_control else chance.choice((0, 0, 0, 200_000)),
    }
