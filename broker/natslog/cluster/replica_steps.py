"""The words of the replica state machine: what it sees, its states, the steps it asks for, the notices it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from natslog.cluster.commands import BackgroundCommand, IsrChange
from natslog.cluster.epochs import EpochHistory
from natslog.cluster.roles import BeginAt, CutTo, FollowerReplica, LeaderReplica
from natslog.errors import NatslogError
from natslog.model import BrokerId, Epoch


class Log(Protocol):
    """What the machine reads of an open log."""

    @property
    def epochs(self) -> EpochHistory: ...
    @property
    def log_start_offset(self) -> int: ...
    @property
    def log_end_offset(self) -> int: ...
    @property
    def whole_end_offset(self) -> int: ...
    @property
    def high_watermark(self) -> int: ...


class Surroundings(Protocol):
    """What all replicas of a broker have in common, as it is now."""

    @property
    def incarnation(self) -> str:
        """Of this life of the broker."""

    @property
    def is_registered(self) -> bool:
        """Whether the metadata knows this incarnation."""

    @property
    def has_session(self) -> bool:
        """Whether a metadata leader has confirmed this broker lately."""

    @property
    def has_room(self) -> bool:
        """Whether the disk takes writes."""

    @property
    def has_time(self) -> bool:
        """Whether enough of the cluster's clocks are known to say what time it is."""

    @property
    def level(self) -> int:
        """The cluster's feature level."""


# ---- states ----


@dataclass(frozen=True, slots=True)
class Closed:
    """The log is not open; `problem` says why it could not be opened."""

    problem: NatslogError | None = None


@dataclass(frozen=True, slots=True)
class Idle:
    """The log is open, and the replica has no role."""


@dataclass(frozen=True, slots=True)
class Following:
    role: FollowerReplica


@dataclass(slots=True)
class Leading:
    """`is_ready`: the subscription was requested once. `subscribed_to`: the subject, "" while there is no subscription.
    `is_writing`: the ingest of this role has not been stopped.
    """

    role: LeaderReplica
    is_ready: bool = False
    subscribed_to: str = ""
    is_writing: bool = True


State: TypeAlias = Closed | Idle | Following | Leading


# ---- steps: one at a time, each answered by `done` or `failed` ----


@dataclass(frozen=True, slots=True)
class Open:
    """Open the log; where it `must_exist` and does not, that is damage. Answered by `opened`."""

    must_exist: bool


@dataclass(frozen=True, slots=True)
class SetAside:
    """Keep the folder of a log that cannot be opened under another name."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Drop what is damaged; it is fetched again from the leader."""


@dataclass(frozen=True, slots=True)
class Close:
    """Checkpoint and close the log."""


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    """Store the epoch, rebuild the deduplication window, make the ingest ready to take messages."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Have NATS deliver the messages of this subject from now on; where NATS is unreachable, as soon as it is back."""

    subject: str


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Take no more messages; those that the server has sent already still arrive."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Return when everything received so far has been appended."""


@dataclass(frozen=True, slots=True)
class StopWriting:
    """Return when nothing is appended any more; `abandon`: another replica leads, so what is not committed is not
    acknowledged.
    """

    abandon: bool


@dataclass(frozen=True, slots=True)
class Copy:
    """Append the records of the answer that was just given to `answered`; the leader's HW came with them."""

    leader_high_watermark: int


Step: TypeAlias = (
    Open
    | SetAside
    | Repair
    | Close
    | BeginEpoch
    | Subscribe
    | Unsubscribe
    | Drain
    | StopWriting
    | Copy
    | CutTo
    | BeginAt
)


# ---- notices: nothing is waited for ----


@dataclass(frozen=True, slots=True)
class Follow:
    """Fetch from this broker, beginning with the present position; again if it is fetched from already."""

    leader: BrokerId


@dataclass(frozen=True, slots=True)
class Unfollow:
    """Fetch no more."""


@dataclass(frozen=True, slots=True)
class Propose:
    """A change of the metadata. It may be lost or refused: the record tells."""

    command: BackgroundCommand


@dataclass(frozen=True, slots=True)
class ProposeIsr:
    """As `Propose`; the broker gathers those of all its streams."""

    change: IsrChange


@dataclass(frozen=True, slots=True)
class Halted:
    """The leader contradicts what is committed here. The replica does nothing until an operator has checked it."""

    why: str


@dataclass(frozen=True, slots=True)
class Damaged:
    """Something on this disk is not what was written: for the log."""

    error: NatslogError


Notice: TypeAlias = Follow | Unfollow | Propose | ProposeIsr | Halted | Damaged
