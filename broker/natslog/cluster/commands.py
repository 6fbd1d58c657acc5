"""What the metadata log holds: commands, and the records that they carry. Their form is stored and sent, tags included.

A command says all that is needed to carry it out: ids, times and placements are decided by the proposer.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from natslog.cluster.security_commands import AddRule, AssignRole, CreateToken, SecurityCommand, SetQuota
from natslog.model import BrokerId, Epoch, Fork, Offset, StreamId, StreamSettings


class BrokerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`life` counts the starts of its process on the data folder `directory`; `is_draining`: it is to hold no replica.
    `nonce`: of this start; "" where it was registered at feature level 1, and has not started since. `tags`: streams
    may require them of the brokers that hold their replicas. `is_stopping`: this life of it ends, so it becomes the
    leader of no stream; from feature level 3 on.
    """

    id: BrokerId
    url: str
    rack: str = ""
    directory: str = ""
    life: int = 0
    is_draining: bool = False
    former_directories: tuple[str, ...] = ()
    nonce: str = ""
    tags: tuple[str, ...] = ()
    is_stopping: bool = False

    @property
    def incarnation(self) -> str:
        """Names one life of one folder."""
        return f"{self.directory}.{self.life}" + (f".{self.nonce}" if self.nonce else "")


class Tombstone(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files that `broker` still has of a deleted stream, or of a replica that was moved to another broker."""

    id: StreamId
    name: str
    deleted_us: int
    broker: BrokerId = BrokerId(1)

    @property
    def key(self) -> str:
        return tombstone_key(self.id, self.broker)


def tombstone_key(stream_id: StreamId, broker: BrokerId) -> str:
    return f"{stream_id}/{broker}"


class RegisterBroker(
    msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A broker's new life. `after` names the life that ended gracefully immediately before it, so that its logs are
    unchanged since then; "" otherwise (for example after a kill). `lives`: those that its folder had.
    """

    broker: BrokerRecord
    after: str = ""
    lives: tuple[str, ...] = ()


class DrainBroker(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    broker: BrokerId
    is_draining: bool


class ForgetBroker(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """It holds no replica any more and is not a member of the cluster."""

    broker: BrokerId


class StopBroker(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """This life of `broker` stops gracefully: from here on no leadership is transferred to it. Level 3."""

    broker: BrokerId
    incarnation: str


class CreateStream(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """`placement` names the brokers to hold it; the first leads. `owner`: its quotas count the stream. It begins at
    `first_offset`.

    An import creates it with `is_import`, and messages of `former_subjects` follow, of the last stream in `lineage`.
    """

    name: str
    id: StreamId
    settings: StreamSettings
    created_us: int
    placement: tuple[BrokerId, ...]
    owner: str = ""
    is_import: bool = False
    first_offset: Offset = Offset(0)
    lineage: tuple[Fork, ...] = ()
    former_subjects: tuple[str, ...] = ()


class EditStream(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """`changed`: the fields of `settings` that count, so that two edits at once both hold; None: all. `subject` stands
    for all subjects. `id`, `if_version`: only the stream of this id is edited, and only if its settings are of this
    version.
    """

    name: str
    settings: StreamSettings
    changed: tuple[str, ...] | None = None
    id: StreamId | UnsetType = UNSET
    if_version: int | UnsetType = UNSET


class PauseStream(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """`id`, `if_version`: as in `EditStream`."""

    name: str
    paused: bool
    id: StreamId | UnsetType = UNSET
    if_version: int | UnsetType = UNSET


class PurgeStream(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Messages of the stream of this id below the offset `below` are removed; what was purged stays so."""

    name: str
    id: StreamId
    below: Offset


class BeginImport(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """More of an export follows, perhaps with messages of `subjects`, into a stream that was imported, not resumed."""

    name: str
    id: StreamId
    subjects: tuple[str, ...]


class FinishImport(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """All of the export is there, of a stream with this lineage; `resumes`: messages are taken from now on."""

    name: str
    id: StreamId
    lineage: tuple[Fork, ...]
    resumes: bool


class SealStream(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Makes the stream permanently read-only."""

    name: str


class DeleteStream(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """`id`, `if_version`: as in `EditStream`."""

    name: str
    deleted_us: int
    id: StreamId | UnsetType = UNSET
    if_version: int | UnsetType = UNSET


class DropTombstone(msgspec.Struct, frozen=True, kw_only=True, tag="BuryStream", forbid_unknown_fields=True):
    """The files are gone: the tombstone may go too."""

    id: StreamId
    broker: BrokerId = BrokerId(1)


class IsrChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the leader of `epoch` wants; good for one `version` of the record, and for those lives of the members that
    it has seen ("" is not checked). `proven`: restarted uncleanly, and caught up since.
    """

    stream_id: StreamId
    epoch: Epoch
    version: int
    isr: tuple[BrokerId, ...]
    incarnations: tuple[str, ...]
    proven: tuple[BrokerId, ...] = ()


class ChangeIsrs(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Of streams that `broker` leads; those whose version has changed meanwhile are skipped."""

    broker: BrokerId
    changes: tuple[IsrChange, ...]


class Appointment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A leader for the next epoch of a stream, good for one `version` of its record."""

    stream_id: StreamId
    version: int
    leader: BrokerId
    isr: tuple[BrokerId, ...]


class AppointLeaders(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    appointments: tuple[Appointment, ...]


class OwnReplicas(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `broker` states about its replicas of these streams, in the life `incarnation`."""

    broker: BrokerId
    incarnation: str
    stream_ids: tuple[StreamId, ...]


class DisableReplicas(OwnReplicas, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """`broker` has found damage in these streams: it must not lead them and does not count until it has caught up."""


class HoldReplicas(OwnReplicas, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """`broker` has created the logs of these streams on its disk, durably."""


class CreateCompanion(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The stream gets a companion log, as `broker`, which leads it in `epoch`, requests."""

    stream_id: StreamId
    broker: BrokerId
    epoch: Epoch


class HoldCompanions(OwnReplicas, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """As `HoldReplicas`, of the companion logs of these streams."""


class LeaveReplicas(OwnReplicas, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """`broker` stops gracefully: it leaves these in-sync replicas, and keeps its eligibility."""


class MoveReplicas(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Moves a stream's replicas to other brokers; the old replicas are removed when the new ones are in sync."""

    name: str
    target: tuple[BrokerId, ...]


class ResizeReplicas(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Another number of replicas, on the brokers of `target`; it and `min_isr` are in force when those are in sync.
    `id`, `if_version`: as in `EditStream`.
    """

    name: str
    target: tuple[BrokerId, ...]
    min_isr: int
    id: StreamId | UnsetType = UNSET
    if_version: int | UnsetType = UNSET


class FinishMoves(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """`(stream, version)` of moves whose target is in sync; the files of the other brokers become tombstones."""

    moves: tuple[tuple[StreamId, int], ...]
    moved_us: int


class SetCursor(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """Position of a named consumer in the stream of this id: the next offset that it has not read. `owner`: as in
    `CreateStream`.
    """

    consumer: str
    stream: str
    stream_id: StreamId
    offset: Offset
    set_us: int
    owner: str = ""


class DropCursor(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    consumer: str
    stream: str


class DropMovedCursors(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Of natslog 0.2.0, after it has finalized an upgrade from level 1. It may be in the log, and changes nothing."""


class FinalizeUpgrade(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Every broker supports `level`: its additions may be written from now on."""

    level: int


Command: TypeAlias = (
    RegisterBroker
    | DrainBroker
    | ForgetBroker
    | StopBroker
    | CreateStream
    | EditStream
    | PauseStream
    | PurgeStream
    | BeginImport
    | FinishImport
    | SealStream
    | DeleteStream
    | DropTombstone
    | ChangeIsrs
    | AppointLeaders
    | DisableReplicas
    | HoldReplicas
    | CreateCompanion
    | HoldCompanions
    | LeaveReplicas
    | MoveReplicas
    | ResizeReplicas
    | FinishMoves
    | SetCursor
    | DropCursor
    | DropMovedCursors
    | FinalizeUpgrade
    | SecurityCommand
)

_RETENTION = {"max_age_s", "max_bytes", "max_messages"}


def needs_room(command: Command) -> bool:
    """Whether a broker refuses to propose it while its own disk is full: it makes the metadata or a log grow, and
    neither frees space nor keeps streams led. An edit of retention alone may free space.
    """
    if isinstance(command, EditStream):
        return command.changed is None or not set(command.changed) <= _RETENTION
    return isinstance(command, CreateStream | CreateToken | AddRule | AssignRole | SetQuota)


BackgroundCommand: TypeAlias = (
    ChangeIsrs
    | AppointLeaders
    | DisableReplicas
    | HoldReplicas
    | CreateCompanion
    | HoldCompanions
    | LeaveReplicas
    | MoveReplicas
    | FinishMoves
    | ForgetBroker
    | StopBroker
)
"""Decisions of brokers. Applied late or twice they change nothing: each names the version, the life, the target or the
former member that it was made for. So they are proposed without an id, and no outcome of them is kept.
"""


class Proposal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A command, and the client that requests it.

    Attributes:
        id: names the request: a repeated request has the outcome of the first one. "": it is a `BackgroundCommand`, and
            its outcome is not kept.
        client: the client; the outcomes of one client never displace those of another. `elapsed_ms`: on the metadata
            leader's monotonic clock since its last proposal; set by that leader. `address`: where the request came
            from.
    """

    id: str
    command: Command
    client: str = ""
    elapsed_ms: int = 0
    address: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`changed`, or the error it was refused with, in its JSON form."""

    changed: bool
    error: dict[str, Any] | None = None
