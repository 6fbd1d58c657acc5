"""The rules by which newer messages of a stream hide older ones, and which of its messages expire one by one."""

from __future__ import annotations

from dataclasses import dataclass

from natslog.model import Epoch


@dataclass(frozen=True, slots=True)
class Rule:
    """How messages of a stream hide older ones.

    Attributes:
        from_epoch: the first leader epoch whose rows it is applied to. `per_subject`: how many messages of a subject
            are visible; None: all. `compacts`: a message hides older ones with the same key. `rolls_up`: roll-ups hide
            older messages.
    """

    from_epoch: Epoch
    per_subject: int | None = None
    compacts: bool = False
    rolls_up: bool = False

    @property
    def hides(self) -> bool:
        return self.per_subject is not None or self.compacts or self.rolls_up


NO_RULE = Rule(Epoch(0))


@dataclass(frozen=True, slots=True)
class Expiry:
    """Which messages of a stream expire one by one.

    Attributes:
        has_own: messages may have a time to live of their own. `tombstones_us`: how long a tombstone is visible; None:
            the stream has none.
    """

    has_own: bool = False
    tombstones_us: int | None = None

    @property
    def concerns_any(self) -> bool:
        return self.has_own or self.tombstones_us is not None


NO_EXPIRY = Expiry()


def weaker(one: Rule, other: Rule) -> Rule:
    """From the epoch of the other one on: it hides what both hide."""
    limits = [one.per_subject, other.per_subject]
    limit = None if None in limits else max(each for each in limits if each is not None)
    return Rule(other.from_epoch, limit, one.compacts and other.compacts, one.rolls_up and other.rolls_up)
