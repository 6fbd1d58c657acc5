"""Streams: settings and state, their replicas, and the removal of messages."""

from __future__ import annotations

import base64
import re
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from natslog.errors import InvalidRequest
from natslog.http.shapes.common import (
    AnyProblem,
    BrokerNumber,
    Count,
    Name,
    Offset,
    OffsetRange,
    Subject,
    Subjects,
    Time,
)
from natslog.model import (
    SETTINGS,
    Acks,
    Compression,
    Discard,
    Fork,
    ImportState,
    JetStreamSettings,
)
from natslog.node.removing import Erased, erased_key, erased_subject
from natslog.subjects import MAX_NAME_CHARS, check_subject

_ERASURE_ID = "[0-9a-z-]{1,32}"


def _body_with_settings(name: str, doc: str, *others: tuple[Any, ...]) -> type[msgspec.Struct]:
    """The body of a request that states settings of a stream, each of which may be left out, and has other fields."""
    types = {"subject": Subject, "subjects": Subjects}
    for one in SETTINGS:
        types[one.name] = one.setting.json_type | None if one.setting.is_nullable else one.setting.json_type
    fields = [(field, kind | UnsetType, UNSET) for field, kind in types.items()]
    return msgspec.defstruct(
        name, [*fields, *others], kw_only=True, forbid_unknown_fields=True, namespace={"__doc__": doc}
    )


ChangedStream = _body_with_settings(
    "ChangedStream",
    """Settings of a stream. Durations are seconds or text such as `7d`, sizes are bytes or text such as `10GiB`.
    `subjects`: all that are recorded from then on; `subject`: the only one. `if_version`: the `settings_version` that
    the stream had when it was read; `id`: its id. If one of them differs by then, nothing is changed (409).
    """,
    ("paused", bool | UnsetType | None, UNSET),
    ("if_version", Count | UnsetType | None, UNSET),
    ("id", str | UnsetType | None, UNSET),
)
NewStream = _body_with_settings(
    "NewStream",
    """Name, subject (or `subjects`) and settings of a stream. Durations and sizes as for `ChangedStream`.""",
    ("name", Name),
)


class ReplicaScrub(msgspec.Struct, kw_only=True):
    """The state of the scrubbing of one replica.

    `scrubbed_at`: when its last pass was completed. `scrub_progress`: of the pass that is under way, from 0 to 1; null:
    none is. `damaged`: offsets that cannot be read; a range without offsets is a segment that begins there and has a
    damaged header or footer. `lost`: offsets that were damaged, and accepted as lost. `problem`: why the replica states
    nothing.
    """

    broker: BrokerNumber
    scrubbed_at: Time | None = None
    scrub_progress: Annotated[float, Meta(ge=0, le=1)] | None = None
    damaged: list[OffsetRange] = []
    lost: list[OffsetRange] = []
    problem: AnyProblem | UnsetType = UNSET


class Repair(msgspec.Struct, forbid_unknown_fields=True):
    """Offsets that are damaged on every replica become removed ones."""

    EXPECTED: ClassVar = (
        'damage is repaired automatically where it can be; to accept the loss of the rest: {"accept_loss": true}'
    )

    accept_loss: Literal[True]


class ReplicaLoss(msgspec.Struct):
    """The offsets that one replica has given up. `problem`: why it was not repaired."""

    broker: BrokerNumber
    lost: list[OffsetRange] = []
    problem: AnyProblem | UnsetType = UNSET


class Repaired(msgspec.Struct):
    """What was lost on each replica."""

    name: Name
    replicas: list[ReplicaLoss]


class Scrub(msgspec.Struct):
    """The state of the scrubbing of all replicas of a stream."""

    name: Name
    replicas: list[ReplicaScrub]


class Compressed(msgspec.Struct):
    """The compressed segments: stored bytes, bytes of their rows before compression, and the ratio of both."""

    bytes: Count
    uncompressed_bytes: Count
    ratio: Annotated[float, Meta(ge=0)]


class Stream(msgspec.Struct, kw_only=True):
    """A stream. Its leader alone states a position (`log_start_offset` to `segments`); without one there is a
    `problem`. `subject`: the first of `subjects`; `former_subjects`: wildcards of others that it recorded before.
    `settings_version`: increases with each edit. `scrub`, `compressed`: of the replica of the leader; `compressed` is
    missing where no segment is, or it is unknown. `lineage`: the streams from whose exports it was restored, and up to
    which offset their positions are valid in it. `jetstream`: of streams that were created or changed by the JetStream
    API, what their configuration has beside these settings, as far as it is not the default.
    """

    name: Name
    id: str
    subject: str
    subjects: list[str]
    replicas: Count
    min_isr: Count
    group: str | None
    max_bytes: int | None
    max_messages: int | None
    max_messages_per_subject: int | None
    compact: bool
    tombstone_retention: str
    allow_ttl: bool
    ttl: str | None
    discard: Discard
    compression: Compression
    acks: Acks
    max_message_bytes: int | None
    deny_delete: bool
    deny_purge: bool
    allow_rollup: bool
    placement_tags: list[str]
    prevent_delete: bool
    standby: bool
    managed_by: str | None
    settings_version: Count
    max_age: str | None
    dedupe_window: str | None
    paused: bool
    sealed: bool
    envelopes: bool
    former_subjects: list[str]
    lineage: list[Fork]
    import_state: ImportState
    created: Time
    leader: BrokerNumber | None
    leader_epoch: Count
    replica_ids: list[BrokerNumber]
    isr: list[BrokerNumber]
    target_replica_ids: list[BrokerNumber] | UnsetType = UNSET
    log_start_offset: Offset | UnsetType = UNSET
    high_watermark: Offset | UnsetType = UNSET
    messages: Count | UnsetType | None = UNSET
    bytes: Count | UnsetType | None = UNSET
    segments: Count | UnsetType | None = UNSET
    compressed: Compressed | UnsetType | None = UNSET
    scrub: ReplicaScrub | UnsetType = UNSET
    jetstream: JetStreamSettings | UnsetType = UNSET
    problem: AnyProblem | UnsetType = UNSET


class Rolled(msgspec.Struct):
    """All messages below `sealed_end` are in Arrow files in this folder of the leader."""

    name: Name
    sealed_end: Offset
    folder: str


class Purge(msgspec.Struct, forbid_unknown_fields=True):
    """Messages below this offset; without it, all that are committed now. `subject`: only those whose subject it
    covers. `keep`: so many of the newest stay.
    """

    below: Offset | UnsetType = UNSET
    subject: Subject | UnsetType | None = UNSET
    keep: Count | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.subject:
            check_subject(self.subject, wildcards=True)
        if self.keep and self.below is not UNSET:
            raise InvalidRequest("below and keep exclude each other: give one of them", field="keep")


class Purged(msgspec.Struct):
    """The position of the stream afterwards. `purged`: how many messages were removed."""

    name: Name
    log_start_offset: Offset
    purged: Count
    high_watermark: Offset


class MessageDeleted(msgspec.Struct):
    """A message that was removed."""

    name: Name
    offset: Offset


class Erase(msgspec.Struct, forbid_unknown_fields=True):
    """Exactly one of them. `subject`: may have wildcards. `key`: as text; `key_base64`: of any bytes."""

    EXPECTED: ClassVar = 'give what to erase: {"subject": …}, {"key": …} or {"key_base64": …}, one of them'

    subject: Subject | UnsetType = UNSET
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        if sum(one is not UNSET for one in (self.subject, self.key, self.key_base64)) != 1:
            raise InvalidRequest(self.EXPECTED)
        self.erased()

    def erased(self) -> Erased:
        """What is erased. Raises InvalidRequest: it is no subject, or no base64."""
        if self.subject is not UNSET:
            return erased_subject(check_subject(self.subject, wildcards=True))
        name = "key_base64" if self.key is UNSET else "key"
        try:
            return erased_key(
                base64.b64decode(str(self.key_base64), validate=True) if self.key is UNSET else self.key.encode()
            )
        except ValueError as error:  # also that of letters outside of ASCII
            raise InvalidRequest(f"{name} is not valid: {error}", field=name) from error


class ErasedFile(msgspec.Struct):
    """A file of a broker that was written again. `rows`: how many of its rows were erased."""

    name: str
    bytes_before: Count
    bytes_after: Count
    rows: Count
    at: Time


class ReplicaErasure(msgspec.Struct, kw_only=True):
    """What one replica has done. `completed_at`: since when no file of its log has the bytes; null: it has not
    finished. `remaining`: files and folders that were kept because they are damaged, and may have them. `problem`: why
    the replica states nothing.
    """

    broker: BrokerNumber
    completed_at: Time | None = None
    files: list[ErasedFile] = []
    remaining: list[str] = []
    problem: AnyProblem | UnsetType = UNSET


class Erasure(msgspec.Struct, kw_only=True):
    """The receipt of an erasure. The text that was named is not stored, and not in it.

    `id`: null: the stream had nothing to erase. `messages`: how many were stored. `complete`: all replicas have
    finished.
    """

    name: Name
    id: str | None
    erases: Literal["subject", "key"]
    messages: Count
    requested_at: Time | None
    complete: bool
    replicas: list[ReplicaErasure]


class Segment(msgspec.Struct):
    """A file of the log, which has offsets from `start` to `end`, exclusive. `sealed`: it is complete, and an Arrow IPC
    file. `newest`: time of its newest message; null: not known without reading the file.
    """

    start: Offset
    end: Offset
    bytes: Count
    sealed: bool
    newest: Time | None


class Segments(msgspec.Struct):
    """The files of the leader's log, the newest first. `total`: how many there are."""

    name: Name
    total: Count
    segments: list[Segment]


class ReplicaProgress(msgspec.Struct):
    """How far a replica has copied the log, as the leader states it. `end`: it has all messages below; null: it has
    stated nothing since this leader began. `behind`: how many messages it lacks.
    """

    broker: BrokerNumber
    leads: bool
    in_sync: bool
    end: Offset | None
    behind: Count


class Progress(msgspec.Struct):
    """The replicas of a stream. `end`: of the leader's log; `high_watermark`: what all of them in sync have."""

    name: Name
    end: Offset
    high_watermark: Offset
    replicas: list[ReplicaProgress]


# ---- parameters ----


class StreamsOf(msgspec.Struct, frozen=True):
    """Which streams are listed."""

    pattern: Annotated[
        Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None, Meta(description="names that match this glob")
    ] = None
    subject: Annotated[Subject | None, Meta(description="streams that record this plain subject")] = None
    group: Annotated[str | None, Meta(description="of this group")] = None
    internal: Annotated[bool, Meta(description="true: also streams that natslog itself writes")] = False

    def __post_init__(self) -> None:
        if self.subject is not None:
            check_subject(self.subject, wildcards=False)


class DeletedStream(msgspec.Struct, frozen=True):
    """What a stream must be in order to be deleted."""

    id: Annotated[str | None, Meta(description="of the stream")] = None
    if_version: Annotated[
        Offset | None, Meta(description="the settings_version that the stream had when it was read")
    ] = None


class ErasureOf(msgspec.Struct, frozen=True):
    """An erasure."""

    id: Annotated[
        str,
        Meta(
            description="id of an erasure, as POST has returned it",
            extra_json_schema={"pattern": f"^{_ERASURE_ID}$"},
        ),
    ]

    def __post_init__(self) -> None:
        if not re.fullmatch(_ERASURE_ID, self.id):
            raise InvalidRequest("give the id of an erasure, as POST has returned it: ?id=…", parameter="id")


class MessagePath(msgspec.Struct, frozen=True):
    """A message."""

    offset: Offset
