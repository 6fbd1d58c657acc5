"""What happened to streams whose messages are removed: by their rules, by age, and on request.

A message has a number, which determines its subject, key, time to live and value. Acks name the offsets at which it is
stored. A message that was sent more than once may also be stored at an offset that no ack named.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tests.chaos.history import History

NEVER_S = float("inf")
_PADDING = b" " + b"-" * 1000


@dataclass(frozen=True, slots=True)
class Rules:
    """Of one stream. Ages in seconds; `ttls`: what messages carry, in turn, and what it is (None: they carry none)."""

    replicas: int
    settings: dict[str, Any]
    subjects: int
    keys: int = 0
    per_subject: int | None = None
    tombstones_s: float = NEVER_S
    ttl_s: float = NEVER_S
    ttls: tuple[tuple[str | None, float], ...] = ()


_OFTEN_REWRITTEN = {"dedupe_window": "4s"}
RULES = {
    "newest": Rules(3, {"max_messages_per_subject": 3}, subjects=12, per_subject=3),
    "states": Rules(
        5, {"compact": True, "tombstone_retention": "6s"}, subjects=4, keys=20, per_subject=None, tombstones_s=6.0
    ),
    "fading": Rules(
        3,
        {"allow_ttl": True, "ttl": "9s"},
        subjects=6,
        ttl_s=9.0,
        ttls=((None, 9.0), ("3s", 3.0), (None, 9.0), ("1h", 3600.0), ("never", NEVER_S), ("20", 20.0)),
    ),
}
SETTINGS = {name: rules.settings | _OFTEN_REWRITTEN for name, rules in RULES.items()}


@dataclass(slots=True)
class KeyedMessage:
    """`key`: None where it has none; `ttl_s`: after which it expires. Times are of the wall clock; `offsets`: as acked.

    `tries`: how often it was sent; each may be stored, but for those that are found to be repeated.
    """

    number: int
    subject: str
    key: str | None
    ttl: str | None
    ttl_s: float
    is_tombstone: bool
    sent_s: float
    tries: int = 0
    tried_s: float = 0.0
    acked_s: float | None = None
    offsets: set[int] = field(default_factory=set)

    @property
    def value(self) -> bytes:
        return b"" if self.is_tombstone else b"%s-%08d" % (self.subject.encode(), self.number) + _PADDING

    @property
    def unknown_copies(self) -> int:
        """How many more may be stored."""
        return self.tries - len(self.offsets)


def message(stream: str, rules: Rules, number: int, choice: int, now_s: float) -> KeyedMessage:
    """Args: choice: any number, by chance: of the subject and the key."""
    has_key = rules.keys > 0 and choice % 5 > 0
    is_tombstone = has_key and choice % 7 == 0
    ttl, ttl_s = rules.ttls[number % len(rules.ttls)] if rules.ttls else (None, rules.ttl_s)
    return KeyedMessage(
        number,
        f"{stream}.s{choice % rules.subjects}",
        f"k{choice % rules.keys}" if has_key else None,
        ttl,
        rules.tombstones_s if is_tombstone else ttl_s,
        is_tombstone,
        now_s,
    )


Outcome = Literal["done", "missing", "unknown"]


@dataclass(frozen=True, slots=True)
class Removal:
    """A request. `offset`: of a deletion; else a purge of `subject` below `below`, or of all but the newest `keep`.

    `outcome`: done (answered), missing (the message was hidden before), unknown (it may be done later). Times as in
    `KeyedMessage`; `end`: all below was acked when it began.
    """

    outcome: Outcome
    began_s: float
    ended_s: float
    end: int
    offset: int | None = None
    subject: str | None = None
    below: int | None = None
    keep: int = 0

    def names(self, offset: int, subject: str) -> bool:
        """Whether it may remove this message."""
        if self.offset is not None:
            return offset == self.offset
        return subject == self.subject and (self.below is None or offset < self.below)


class RemovalHistory(History):
    """Of one stream.

    Attributes:
        messages: by number. `stored`: by offset, as acks say. `seen`: offset → value, as readers got it. `passed`: the
            offsets that a reader found removed.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.rules = RULES[stream]
        self.messages: list[KeyedMessage] = []
        self.stored: dict[int, KeyedMessage] = {}
        self.removals: list[Removal] = []
        self.seen: dict[int, bytes] = {}
        self.passed: set[int] = set()
        self.looks = 0
        self.acked_end = 0  # all below is committed

    @property
    def acked(self) -> int:
        return sum(one.acked_s is not None for one in self.messages)

    @property
    def unacked(self) -> list[KeyedMessage]:
        return [one for one in self.messages if one.acked_s is None]

    def ack(self, number: int, offset: int, now_s: float) -> None:
        """The message is stored at this offset."""
        one = self.messages[number]
        known = self.stored.setdefault(offset, one)
        if known is not one:
            self.violate("2 one history", f"offset {offset} is acked for message {known.number} and for {number}")
        one.offsets.add(offset)
        one.acked_s = one.acked_s or now_s
        self.acked_end = max(self.acked_end, offset + 1)
