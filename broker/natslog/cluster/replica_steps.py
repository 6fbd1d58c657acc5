"""The types of the replica state machine: its inputs, its states without a role, the steps that it requests, and the
notices that it gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from natslog.cluster.commands import BackgroundCommand, IsrChange
from natslog.cluster.epochs import EpochHistory
from natslog.cluster.roles import BeginAt, CutTo
from natslog.errors import NatslogError
from natslog.model import BrokerId, Epoch


class Log(Protocol):
    """The properties of an open log that the machine reads; of messages, or the companion log."""

    @property
    def epochs(self) -> EpochHistory: ...
    @property
    def log_start_offset(self) -> int: ...
    @property
    def log_end_offset(self) -> int: ...
    @property
    def written_end_offset(self) -> int:
        """Of what is written, though perhaps not yet on stable storage: a follower may have it."""

    @property
    def whole_end_offset(self) -> int: ...
    @property
    def high_watermark(self) -> int: ...


class Surroundings(Protocol):
    """The current state that all replicas of a broker share."""

    @property
    def incarnation(self) -> str:
        """Of this life of the broker."""

    @property
    def is_registered(self) -> bool:
        """Whether the metadata has this incarnation."""

    @property
    def has_session(self) -> bool:
        """Whether a metadata leader has confirmed this broker lately."""

    @property
    def has_room(self) -> bool:
        """Whether the disk completes writes."""

    @property
    def has_time(self) -> bool:
        """Whether enough of the cluster's clocks are known to determine the time."""


# ---- states without a role ----


@dataclass(frozen=True, slots=True)
class Closed:
    """The log is not open; `problem` says why it could not be opened."""

    problem: NatslogError | None = None


@dataclass(frozen=True, slots=True)
class Idle:
    """The log is open, and the replica has no role."""


# ---- steps: one at a time, each answered by `done` or `failed` ----


@dataclass(frozen=True, slots=True)
class Open:
    """Open the log; where it `must_exist` and does not, that is damage. Answered by `opened`."""

    must_exist: bool


@dataclass(frozen=True, slots=True)
class OpenCompanion:
    """Open the companion log, or create it, and hand over all records in it that are known to be committed. Where it
    `must_exist` and does not, that is damage. `epoch`: of this leader, which begins in the log; None if the replica
    does not lead. Answered by `companion_opened`.
    """

    must_exist: bool
    epoch: Epoch | None


@dataclass(frozen=True, slots=True)
class SetAside:
    """Rename the folder of a log that cannot be opened, so that it is kept; with the companion log in it."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Truncate the log of `messages` at the damage; the rest is fetched again from the leader. The `companion` log is
    closed, and set aside as a whole.
    """

    messages: bool
    companion: bool


@dataclass(frozen=True, slots=True)
class Close:
    """Checkpoint and close both logs."""


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    """Store the epoch in both logs, rebuild the deduplication window, make the ingest ready to accept messages."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Subscribe to these subjects and no others; if NATS is unreachable, as soon as it is connected again. A
    subscription that there is already is of the same group.
    """

    subjects: tuple[str, ...]
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Unsubscribe; messages that the server has already sent still arrive."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Return when everything received so far has been appended."""


@dataclass(frozen=True, slots=True)
class StopWriting:
    """Return when nothing is appended any more; `abandon`: another replica is leader, so uncommitted messages are not
    acknowledged.
    """

    abandon: bool


@dataclass(frozen=True, slots=True)
class Copy:
    """Append the records of the response that was just passed to `answered`, which includes the leader's HW."""

    leader_high_watermark: int


Step: TypeAlias = (
    Open
    | OpenCompanion
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


# ---- notices: the machine does not wait for them ----


@dataclass(frozen=True, slots=True)
class Follow:
    """Fetch from this broker, beginning with the current position; restart if it is already being fetched from."""

    leader: BrokerId


@dataclass(frozen=True, slots=True)
class Unfollow:
    """Fetch no more."""


@dataclass(frozen=True, slots=True)
class StandBy:
    """Receive these subjects as well, and keep what the log does not have yet; none: no more. The next `Subscribe`
    takes the subscription over, with what was kept.
    """

    subjects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Propose:
    """A change of the metadata. It may be lost or refused: the record shows the result."""

    command: BackgroundCommand


@dataclass(frozen=True, slots=True)
class ProposeIsr:
    """As `Propose`; the broker gathers those of all its streams."""

    change: IsrChange


@dataclass(frozen=True, slots=True)
class Halted:
    """The leader's log contradicts committed messages of this replica. The replica does nothing until an operator has
    checked it.
    """

    why: str


@dataclass(frozen=True, slots=True)
class Damaged:
    """Data on this disk differs from what was written: a notice for the log file of the broker."""

    error: NatslogError


Notice: TypeAlias = Follow | Unfollow | StandBy | Propose | ProposeIsr | Halted | Damaged
