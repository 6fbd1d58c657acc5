"""The stream of the simulation of a consumer: messages that come, are removed one by one, and are purged. Beside the
log, in which they are, is what the checks compare with.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
import numpy as np

from natslog.jetstream.consumers.config import ConsumerConfig
from natslog.log import LogOptions, ReplicaLog
from natslog.log.removed import offset_set
from natslog.model import BrokerId, Epoch, JetStreamSettings, Offset, Retention, StreamId, StreamRecord, StreamSettings
from tests.conftest import rows

SUBJECTS = 4
_ID = "ab" * 16
_SUBJECT_BYTES = len("s.0")


@dataclass(slots=True)
class Message:
    seq: int
    subject: int
    size_bytes: int
    time_us: int


class Stream:
    """Args: filters: the subjects that the consumer reads.

    Attributes:
        every: all messages that there were. messages: those that there are. order: sequences of those of them that the
            consumer reads, ascending. first: all below are gone; last: the last message that there was.
    """

    def __init__(self, filters: frozenset[int], folder: Path, retention: Retention) -> None:
        settings = StreamSettings(subject="s.>", jetstream=JetStreamSettings(retention=retention))
        self.log = ReplicaLog(folder, _ID, settings, LogOptions(min_free_bytes=0))
        me = BrokerId(1)
        self.record = StreamRecord(
            name="s",
            id=StreamId(_ID),
            settings=settings,
            created_us=1,
            leader=me,
            leader_epoch=Epoch(1),
            replicas=(me,),
            isr=(me,),
        )
        self.filters = filters
        self.every: dict[int, Message] = {}
        self.messages: dict[int, Message] = {}
        self.order: list[int] = []
        self.first, self.last = 1, 0

    def publish(self, subject: int, size_bytes: int, time_us: int) -> None:
        """Args: size_bytes: of subject and value."""
        self.last += 1
        value = bytes(max(0, size_bytes - _SUBJECT_BYTES))
        self.log.append(rows([value], subject=f"s.{subject}"), time_us)
        message = Message(self.last, subject, _SUBJECT_BYTES + len(value), time_us)
        self.every[self.last] = self.messages[self.last] = message
        if subject in self.filters:
            self.order.append(self.last)

    def remove(self, seq: int) -> None:
        self.log.visibility.removed.record(offset_set(np.array([seq - 1], np.int64)))
        self._forget(seq)

    def _forget(self, seq: int) -> None:
        if self.messages.pop(seq, None) is not None and self.has(seq):
            del self.order[bisect_left(self.order, seq)]

    def purge(self, upto: int) -> None:
        """All up to this sequence are gone; the metadata state it."""
        self.record = msgspec.structs.replace(self.record, purged_below=Offset(upto))
        self.log.chain.purged_below = upto
        self._begin_behind(upto)

    def limit(self, upto: int) -> None:
        """The same, because they are past a limit."""
        self.log.limits.move_to(upto)
        self._begin_behind(upto)

    def _begin_behind(self, upto: int) -> None:
        for seq in range(self.first, upto + 1):
            self._forget(seq)
        self.first = max(self.first, upto + 1)

    def has(self, seq: int) -> bool:
        """Whether there is this message for the consumer."""
        at = bisect_left(self.order, seq)
        return at < len(self.order) and self.order[at] == seq

    def last_of_each(self) -> list[int]:
        """The last message of each subject that the consumer reads."""
        return sorted({self.messages[seq].subject: seq for seq in self.order}.values())


# ---- what a seed chooses ----

_MS = 1_000_000


@dataclass(slots=True)
class Plan:
    """A consumer, and how much happens. `deliver`: where it begins."""

    config: ConsumerConfig
    retention: Retention
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
        filter_subjects=tuple(f"s.{number}" for number in sorted(filters)) if len(filters) < SUBJECTS else (),
        replay_policy=chance.choice(("instant",) * 6 + ("original",)) if is_push else "instant",
        **(push_of(chance) if is_push else {}),
    )
    is_heavy = config.flow_control and chance.random() < 0.7
    deliver = chance.choice(("all", "all", "all", "new", "by_start_sequence", "last_per_subject", "last_per_subject"))
    sizes = (100_000, 700_000) if is_heavy else (1, 300)
    publish_ms = chance.choice(((2.0, 60.0), (20.0, 200.0)))
    keeps_all = policy != "explicit" or deliver != "all"
    retention: Retention = "limits" if keeps_all else chance.choice(("limits", "workqueue", "interest"))
    return Plan(config, retention, filters, deliver, sizes, publish_ms)


def push_of(chance: Random) -> dict[str, object]:
    flow_control = chance.random() < 0.5
    heartbeat_ms = chance.choice((100, 500)) if flow_control or chance.random() < 0.4 else 0
    return {
        "deliver_subject": "out",
        "flow_control": flow_control,
        "idle_heartbeat": heartbeat_ms * _MS,
        "rate_limit_bps": 0 if flow_control else chance.choice((0, 0, 0, 200_000)),
    }
