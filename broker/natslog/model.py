"""Types that all layers share: the settings of a stream, its record as the metadata stores it, and positions in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NewType

import msgspec

from natslog.errors import StreamRecreated
from natslog.setting_kinds import Choice, Duration, Flag, Name, Size, Tags, Whole, stated_settings

Ack = Literal["none", "flush", "stored"]
"""The confirmation that a publisher waits for: none, that of the server, or that of a stream for each row."""

MAX_IN_FLIGHT = 20_000
"""Default limit of rows that a publisher has sent and no stream has acked."""

Offset = NewType("Offset", int)
Epoch = NewType("Epoch", int)
StreamId = NewType("StreamId", str)
BrokerId = NewType("BrokerId", int)
Compression = Literal["none", "zstd", "lz4"]
Acks = Literal["reply", "any", "header", "never"]
"""Where a message's ack goes: to its reply subject if that is an inbox; to any reply subject that no stream records, as
JetStream does; to the subject in its header `Natslog-Ack-To`; or nowhere."""
Discard = Literal["old", "new"]
Retention = Literal["limits", "interest", "workqueue"]
MAX_REPLICAS = 9
MAX_PER_SUBJECT = 1_000_000
MAX_SUBJECTS = 64
MAX_TAGS = 16
"""Of one stream."""
DEFAULT_WINDOW_S = 120.0


class JetStreamSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Fields of a stream's configuration in the JetStream API that have no setting of their own.

    Attributes:
        storage: as requested; all streams are stored in files. inactive_threshold_ns, max_ack_pending: limits of
            consumers; 0: none. discard_new_per_subject: with `discard: new`, also the limit per subject refuses new
            messages. first_seq: the first sequence as requested; 0: 1. retention: whether messages are also removed
            when a consumer has acked one (`workqueue`), or every consumer that reads it has (`interest`).
    """

    description: str = ""
    storage: Literal["file", "memory"] = "file"
    max_consumers: int = -1
    allow_direct: bool = False
    discard_new_per_subject: bool = False
    first_seq: int = 0
    inactive_threshold_ns: int = 0
    max_ack_pending: int = 0
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    retention: Retention = "limits"


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The settings of a stream. Ages are in seconds, sizes in bytes; None is "no limit".

    At the limit per subject the oldest message of the subject goes, whatever `discard` is.

    Attributes:
        more_subjects: those after the first. jetstream: of streams that were created or changed by the JetStream API.
    """

    subject: str
    replicas: Annotated[int, Whole("Number of replicas.", 1, MAX_REPLICAS)] = 1
    min_isr: Annotated[
        int,  # null: a majority, `default_min_isr`
        Whole("Number of replicas that must be in sync for writes.", 1, MAX_REPLICAS, null=0),
    ] = 1
    group: Annotated[
        str | None, Name("Share the subject with the group's other streams; none: with no stream.", null=None)
    ] = None
    max_age_s: Annotated[
        float | None, Duration("Delete messages older than this: 12h, 7d; none: no limit.", null=None)
    ] = None
    max_bytes: Annotated[int | None, Size("Keep at most this size: 10GiB; none: no limit.", null=None)] = None
    max_messages: Annotated[
        int | None, Whole("Keep at most this number of messages; none: no limit.", 1, 2**62, null=None)
    ] = None
    compression: Annotated[
        Compression, Choice("Compression of sealed segments: zstd, lz4 or none.", Compression, null="none")
    ] = "none"
    dedupe_window_s: Annotated[
        float, Duration("Store each Nats-Msg-Id once within this time: 2m; 0: no deduplication.", null=0.0)
    ] = DEFAULT_WINDOW_S
    acks: Annotated[
        Acks,
        Choice(
            "Where acks go: reply (to each message's reply subject, if it is an inbox), any (to any reply subject that "
            "no stream records), header (to the subject in Natslog-Ack-To) or never. To record the requests to a "
            "service, use header or never.",
            Acks,
            null="reply",
        ),
    ] = "reply"
    more_subjects: tuple[str, ...] = ()
    max_messages_per_subject: Annotated[
        int | None,
        Whole("Keep the newest so many messages of each subject; none: no limit.", 1, MAX_PER_SUBJECT, null=None),
    ] = None
    compact: Annotated[bool, Flag("Keep the newest message of each key, and messages without a key.", null=False)] = (
        False
    )
    tombstone_retention_s: Annotated[float, Duration("Delete a tombstone (a deleted key) after this time: 24h.")] = (
        86400.0
    )
    allow_ttl: Annotated[bool, Flag("Messages with the header Nats-TTL expire by themselves.", null=False)] = False
    ttl_s: Annotated[
        float | None,
        Duration("Messages without a Nats-TTL expire after this time: 1h; none: never.", null=None),
    ] = None
    discard: Annotated[
        Discard,
        Choice("At a limit of messages or bytes: old deletes old messages, new refuses new ones.", Discard, null="old"),
    ] = "old"
    max_message_bytes: Annotated[
        int | None, Size("Refuse larger messages, headers included: 64KiB; none: no limit.", null=None)
    ] = None
    deny_delete: Annotated[
        bool,
        Flag("Refuse to delete single messages. It cannot be turned off again.", null=False, flag="--deny-delete"),
    ] = False
    deny_purge: Annotated[
        bool, Flag("Refuse to purge. It cannot be turned off again.", null=False, flag="--deny-purge")
    ] = False
    allow_rollup: Annotated[
        bool,
        Flag(
            "Messages with the header Nats-Rollup (sub or all) remove older ones, of their subject or all.", null=False
        ),
    ] = False
    placement_tags: Annotated[
        tuple[str, ...],
        Tags(
            "Tag that each broker with a replica must have (setting tags of the broker). May be repeated; none: any.",
            MAX_TAGS,
            "placement tag",
            null=(),
            flag="--placement-tag",
        ),
    ] = ()
    prevent_delete: Annotated[bool, Flag("Refuse to delete the stream until this is turned off.", null=False)] = False
    managed_by: Annotated[
        str | None,
        Name("The declaration that natslog apply --prune may delete the stream for; none.", null=None),
    ] = None
    standby: Annotated[
        bool,
        Flag(
            "In-sync followers subscribe as well, and store what is published without acks at a failover.", null=False
        ),
    ] = False
    jetstream: JetStreamSettings | None = None

    @property
    def age_limit_s(self) -> float | None:
        """From which age on no message is visible, whichever it is."""
        ages_s = [self.max_age_s, None if self.allow_ttl else self.ttl_s]
        return min((age_s for age_s in ages_s if age_s is not None), default=None)

    @property
    def subjects(self) -> tuple[str, ...]:
        """All that are recorded. No two of them overlap."""
        return (self.subject, *self.more_subjects)

    def to_json(self) -> dict[str, Any]:
        """The form of the HTTP API: durations as text, sizes as numbers."""
        body: dict[str, Any] = {"subject": self.subject, "subjects": list(self.subjects)}
        return body | {one.name: one.setting.shown(getattr(self, one.field)) for one in _AS_SHOWN}


SETTINGS = stated_settings(StreamSettings)
"""All but the subjects. What reads, shows and describes settings follows from these."""
_AS_SHOWN = sorted(SETTINGS, key=lambda one: isinstance(one.setting, Duration))
"""Durations last."""


def subjects_of(stream: Mapping[str, Any]) -> tuple[str, ...]:
    """The subjects that a listed stream records."""
    return tuple(stream["subjects"])


def subject_setting(subjects: str | Sequence[str]) -> dict[str, Any]:
    """The setting that names these subjects."""
    if not isinstance(subjects, str) and len(subjects) == 1:
        subjects = subjects[0]
    return {"subject": subjects} if isinstance(subjects, str) else {"subjects": list(subjects)}


def default_min_isr(replicas: int) -> int:
    """A majority of the replication factor: 1 of 1, 2 of 3, 3 of 5."""
    return replicas // 2 + 1


def min_isr_after_resize(was: StreamSettings, replicas: int) -> int:
    """Where an edit names another number of replicas only: the default again where it was the default, else as it is
    if that can be.
    """
    if was.min_isr == default_min_isr(was.replicas):
        return default_min_isr(replicas)
    return min(was.min_isr, replicas)


class FormerRule(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How messages hid older ones until an edit. `until_epoch`: the first leader epoch to which it does not apply."""

    until_epoch: Epoch
    max_messages_per_subject: int | None = None
    compact: bool = False
    allow_rollup: bool = False


_COMPANION = ".companion"


def companion_id(stream_id: StreamId) -> StreamId:
    """Names the companion log of a stream between brokers."""
    return StreamId(stream_id + _COMPANION)


def stream_of_companion(log_id: StreamId) -> StreamId | None:
    """The stream whose companion log has this id; None if it is a stream's own id."""
    stream_id, found, _ = log_id.partition(_COMPANION)
    return StreamId(stream_id) if found else None


ImportState = Literal["", "importing", "imported"]
"""`importing`: batches of an export are being appended, and the stream is not served. `imported`: that is complete, and
the stream was not resumed since: it has taken no message, and does not subscribe.
"""
TOMBSTONE_HEADER = "Natslog-Tombstone"
"""A message with it deletes its key in a compacted stream, whatever its value is."""
MAX_LINEAGE = 64


class Fork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stream that was exported, from which another one was restored: all below `offset` is equal in both, so that its
    positions up to `offset` are valid in the restored stream.
    """

    id: StreamId
    offset: Offset


def fork_offset(lineage: Iterable[Fork], stream_id: str) -> Offset | None:
    """Up to which offset positions in that stream are valid; None where the lineage does not name it."""
    return next((fork.offset for fork in lineage if fork.id == stream_id), None)


def beyond_fork(stream: str, was: str, is_now: str, offset: int, fork: int) -> StreamRecreated:
    """A position in a stream that was exported before it had reached this offset."""
    return StreamRecreated(
        f"stream {stream!r} was restored from an export that ends at offset {fork} (its id is {is_now}, that of the "
        f"original is {was}). The position {offset} is beyond it: messages {fork} to {offset} of the original are not "
        f"in the restored stream, and those that it has from {fork} on are others. Restore a newer export, or set the "
        f"position to {fork}, where the restored stream differs from the original",
        stream=stream,
        id=is_now,
        fork=fork,
    )


class StreamRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A stream as the metadata knows it. `id` is never used again after the stream is deleted.

    Attributes:
        leader: None while there is none. `leader_epoch`: of the present leader, or of the last one. replicas: the
        brokers that hold it; the first is the preferred leader. `isr`: the replicas that have everything committed, and
        are counted. version: increases with every change of the fields after `created_us`; an ISR change names the one
        it was made for. eligible: not in the ISR, yet holding all that is committed, because they left when it fell
        below `min_isr`. unproven: of ISR and eligible, those that have restarted uncleanly and not yet caught up with a
        leader. target: the replicas wanted, while the stream is being moved. holders: replicas whose log was created on
        their disk, so that a log that is missing there is damage. target_min_isr: `min_isr` once `target` is reached,
        where the number of replicas changes too; else 0. purged_below: messages below this offset were purged: they are
        no longer served, and their files are removed. sealed: nothing is added to the stream any more, and nothing
        removed from it. former_subjects: subjects that the stream recorded before it was edited. owner: the identity
        that created it; "" without security. former_rules: rules that hid more messages than the present settings do,
        oldest first. has_companion: the stream has a companion log (`node.replicas.companion`). companion_holders: as
        `holders`, of the companion log. lineage: the streams whose positions are valid in this one, because it was
        restored from an export, oldest first. first_offset: where a log without files begins. import_state: see
        `ImportState`. settings_version: increases with every edit (`settings`, `paused`, another number of replicas).
        rules_version: the settings version by which a rule was added that hides messages, after messages were removed;
        the removals of before do not count for rules (ADR 25).
    """

    name: str
    id: StreamId
    settings: StreamSettings
    created_us: int
    leader: BrokerId | None
    leader_epoch: Epoch
    replicas: tuple[BrokerId, ...]
    isr: tuple[BrokerId, ...]
    version: int = 0
    eligible: tuple[BrokerId, ...] = ()
    unproven: tuple[BrokerId, ...] = ()
    target: tuple[BrokerId, ...] = ()
    paused: bool = False
    holders: tuple[BrokerId, ...] = ()
    target_min_isr: int = 0
    purged_below: Offset = Offset(0)
    sealed: bool = False
    former_subjects: tuple[str, ...] = ()
    owner: str = ""
    former_rules: tuple[FormerRule, ...] = ()
    has_companion: bool = False
    companion_holders: tuple[BrokerId, ...] = ()
    lineage: tuple[Fork, ...] = ()
    first_offset: Offset = Offset(0)
    import_state: ImportState = ""
    settings_version: int = 0
    rules_version: int = 0

    @property
    def recorded_subjects(self) -> tuple[str, ...]:
        """Wildcards that cover the subjects of all messages of the stream."""
        return (*self.settings.subjects, *self.former_subjects)

    @property
    def candidates(self) -> tuple[BrokerId, ...]:
        """The replicas that have everything that was committed, as far as their disks kept it."""
        return self.isr + self.eligible


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """A part `[start, end)` of a stream that one task reads; `urls` nearest first.

    `rows`, `bytes`: None if they are unknown to this reader.
    """

    start: int
    end: int
    rows: int | None
    bytes: int | None
    urls: tuple[str, ...] = ()


ONE_OFF_PRODUCERS = "write-"
"""Names of producers that append one batch begin so."""

OnConflict = Literal["fail", "skip", "append"]
"""What becomes of a batch of a direct append that is not the next one of its producer: see `BatchConflict`."""


class PartReceipt(msgspec.Struct, frozen=True):
    """The response to the upload of a part of a direct append, by which the commit names the part.

    Attributes:
        digest: CRC32C of the upload. `content`: digest of the rows, the same in any order, 32 hexadecimal digits.
        broker: where the part is staged. A client may leave both out.
    """

    part: str
    attempt: int
    rows: int
    digest: str
    content: str | None = None
    broker: int | None = None

    def names(self, staged: PartReceipt) -> bool:
        """Whether this is the receipt of that part, as a client may have sent it back; or of a copy of it."""
        content = staged.content if self.content is None else self.content
        return msgspec.structs.replace(self, content=content, broker=staged.broker) == staged


class Appended(msgspec.Struct, frozen=True):
    """Offsets `[start, end)` hold the batch's rows. `duplicate`: it had been committed before."""

    start: int
    end: int
    duplicate: bool
