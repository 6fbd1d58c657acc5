"""Records shared by all layers: stream settings, positions, and their JSON forms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal, NewType

import msgspec

from natslog.errors import InvalidRequest, StreamRecreated
from natslog.subjects import check_name, check_subject, is_wildcard, overlap
from natslog.units import format_duration, parse_duration_s, parse_size_bytes

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
MAX_REPLICAS = 9
MAX_PER_SUBJECT = 1_000_000
MAX_SUBJECTS = 64
MAX_TAGS = 16
"""Of one stream."""
_DEFAULT_WINDOW_S = 120.0


Retention = Literal["limits", "interest", "workqueue"]


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

    Attributes:
        more_subjects: those after the first. max_messages_per_subject: so many of the newest messages of each subject
            are visible. compact: a message hides older ones with the same key. tombstone_retention_s: how long a
            tombstone stays visible. allow_ttl: messages may have a time to live of their own; ttl_s: of the others.
            discard: what happens at a limit of messages or bytes: the oldest messages go, or new ones are refused. At
            the limit per subject the oldest one of the subject goes. max_message_bytes: of headers and payload
            together. deny_delete, deny_purge: single messages are not deleted, the stream is not purged; once set, they
            remain set. allow_rollup: messages with the header `Nats-Rollup` remove older ones. placement_tags: of the
            brokers that may hold replicas. prevent_delete: the stream is not deleted until it is turned off.
            managed_by: the declaration (`natslog apply`) that may delete the stream. jetstream: of streams that were
            created or changed by the JetStream API.
    """

    subject: str
    replicas: int = 1
    min_isr: int = 1
    group: str | None = None
    max_age_s: float | None = None
    max_bytes: int | None = None
    max_messages: int | None = None
    compression: Compression = "none"
    dedupe_window_s: float = _DEFAULT_WINDOW_S
    acks: Acks = "reply"
    more_subjects: tuple[str, ...] = ()
    max_messages_per_subject: int | None = None
    compact: bool = False
    tombstone_retention_s: float = 86400.0
    allow_ttl: bool = False
    ttl_s: float | None = None
    discard: Discard = "old"
    max_message_bytes: int | None = None
    deny_delete: bool = False
    deny_purge: bool = False
    allow_rollup: bool = False
    placement_tags: tuple[str, ...] = ()
    prevent_delete: bool = False
    managed_by: str | None = None
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
        body |= msgspec.structs.asdict(self) | {"placement_tags": list(self.placement_tags)}
        del body["more_subjects"], body["jetstream"]
        max_age_s, window_s = body.pop("max_age_s"), body.pop("dedupe_window_s")
        tombstones_s, ttl_s = body.pop("tombstone_retention_s"), body.pop("ttl_s")
        return body | {
            "max_age": None if max_age_s is None else format_duration(max_age_s),
            "dedupe_window": format_duration(window_s) if window_s else None,
            "tombstone_retention": format_duration(tombstones_s),
            "ttl": None if ttl_s is None else format_duration(ttl_s),
        }


SETTING_NAMES = tuple(StreamSettings(subject="x").to_json())
"""Names of settings in JSON, in the order they are shown."""


def setting_fields(body: dict[str, Any]) -> tuple[str, ...]:
    """The fields of `StreamSettings` that a request body names; `subject` stands for all subjects."""
    return tuple(sorted({_FIELDS.get(name, name) for name in body}))


def parse_settings(body: dict[str, Any], base: StreamSettings | None = None) -> StreamSettings:
    """Settings from a request body, checked.

    Args:
        body: JSON names to values; durations and sizes as numbers or text.
        base: settings to change (an edit); without it, `subject` or `subjects` is required and the rest has defaults.

    Raises:
        InvalidRequest: an unknown name, or a value out of range, the message names the valid values.
    """
    changes = parsed_fields(body)
    if base is None and "subject" not in changes:
        raise InvalidRequest("a stream needs a subject")
    replicas = changes.get("replicas", base.replicas if base else 1)
    if changes.get("min_isr") is None and (base is None or "min_isr" in changes):
        changes["min_isr"] = default_min_isr(replicas)
    settings = msgspec.structs.replace(base, **changes) if base else StreamSettings(**changes)
    _check_first_tokens(settings, changes)
    _check_limits(settings, changes)
    return settings


def parsed_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `StreamSettings` that a request body stands for, each of them checked by itself.

    Raises:
        InvalidRequest: an unknown name, or a value out of range.
    """
    unknown = sorted(set(body) - set(SETTING_NAMES))
    if unknown:
        raise InvalidRequest(
            f"unknown setting {unknown[0]!r}; known are {', '.join(SETTING_NAMES)}", setting=unknown[0]
        )
    return _parsed_subjects(body) | {
        _FIELDS.get(name, name): _PARSERS[name](body[name]) for name in body if name in _PARSERS
    }


def settings_of_stream(shown: Mapping[str, Any]) -> StreamSettings:
    """The settings of a stream as the HTTP API shows it; those that an older broker does not state have defaults.

    Raises:
        InvalidRequest: they are not as this version has them.
    """
    return StreamSettings(**parsed_fields({name: shown[name] for name in SETTING_NAMES if name in shown}))


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


def _whole(name: str, low: int, high: int) -> Any:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidRequest(f"{name} {value!r} must be a whole number from {low} to {high}")
        return value

    return parse


def _optional(parse: Any) -> Any:
    return lambda value: None if value is None else parse(value)


def _flag(name: str) -> Any:
    def parse(value: Any) -> bool:
        if value is not None and not isinstance(value, bool):
            raise InvalidRequest(f"{name} {value!r} must be true or false", setting=name)
        return bool(value)

    return parse


def _compression(value: Any) -> Any:
    if value not in ("none", "zstd", "lz4", None):
        raise InvalidRequest(f"compression {value!r} must be none, zstd or lz4")
    return value or "none"


def _acks(value: Any) -> Any:
    if value not in ("reply", "any", "header", "never", None):
        raise InvalidRequest(f"acks {value!r} must be reply, any, header or never")
    return value or "reply"


def _discard(value: Any) -> Any:
    if value not in ("old", "new", None):
        raise InvalidRequest(f"discard {value!r} must be old or new", setting="discard")
    return value or "old"


def _tags(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple | None) or len(value or ()) > MAX_TAGS:
        raise InvalidRequest(f"placement_tags must be a list of at most {MAX_TAGS} tags", setting="placement_tags")
    return tuple(dict.fromkeys(check_name(one, "placement tag") for one in value or ()))


def _parsed_subjects(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that `subject` and `subjects` of a request body stand for. Raises InvalidRequest."""
    if "subjects" not in body:
        return {"subject": _recorded_subject(body["subject"]), "more_subjects": ()} if "subject" in body else {}
    given = body["subjects"]
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_SUBJECTS:
        raise InvalidRequest(f"subjects must be a list of 1 to {MAX_SUBJECTS} subjects", setting="subjects")
    first, *more = map(_recorded_subject, given)
    if body.get("subject", first) != first:
        raise InvalidRequest(
            f"subject {body['subject']!r} is not the first of subjects, {first!r}: give only one of both settings",
            setting="subject",
        )
    for one, other in combinations((first, *more), 2):
        if overlap(one, other):
            raise InvalidRequest(
                f"the subjects {one!r} and {other!r} overlap: NATS would deliver a message on both twice. "
                "Remove one of them, or give subjects that have no message in common",
                setting="subjects",
                subjects=[one, other],
            )
    return {"subject": first, "more_subjects": tuple(more)}


def _recorded_subject(value: Any) -> str:
    subject = check_subject(value, wildcards=True)
    for internal, what in _INTERNAL.items():
        if subject.split(".")[0] == internal:
            raise InvalidRequest(
                f"{what} are not recorded: choose another subject than {subject!r}", setting="subject", subject=subject
            )
    return subject


_INTERNAL = {
    "$SYS": "the NATS server's own messages",
    "$JS": "requests to JetStream, and its answers,",
    "_INBOX": "answers to requests, and acks,",
}


def _check_first_tokens(settings: StreamSettings, changes: dict[str, Any]) -> None:
    """What a subject that begins with a wildcard excludes. Raises InvalidRequest."""
    wild = [subject for subject in settings.subjects if is_wildcard(subject.split(".")[0])]
    if not wild or not {"subject", "acks"} & set(changes):
        return
    if settings.acks in ("reply", "any"):
        raise InvalidRequest(
            f"a stream on {wild[0]!r} records the requests to all services, and clients would receive its "
            "acks instead of the services' answers: choose acks header or never (--acks)",
            setting="acks",
        )
    for subject in settings.subjects:
        if subject.startswith("$"):
            raise InvalidRequest(
                f"a stream on {wild[0]!r} does not record subjects that begin with $: record {subject!r} with another "
                "stream",
                setting="subjects",
            )


def _check_limits(settings: StreamSettings, changes: dict[str, Any]) -> None:
    """Settings that contradict each other. Raises InvalidRequest."""
    if settings.min_isr > settings.replicas:
        raise InvalidRequest(f"min_isr {settings.min_isr} is more than the number of replicas, {settings.replicas}")
    largest, most = settings.max_message_bytes or 0, settings.max_bytes or 2**63
    if {"max_bytes", "max_message_bytes"} & set(changes) and largest > most:
        raise InvalidRequest(
            f"max_message_bytes {largest} is more than max_bytes {most}: the stream could not keep such a message. "
            "Lower max_message_bytes, or raise max_bytes",
            setting="max_message_bytes",
        )
    if settings.allow_rollup and settings.deny_purge:
        raise InvalidRequest(
            "roll-ups require the purge permission: a stream has either deny_purge or allow_rollup",
            setting="allow_rollup",
        )
    if {"max_age_s", "ttl_s"} & set(changes):
        _check_ttl(settings)
    is_chosen = settings.dedupe_window_s != _DEFAULT_WINDOW_S  # the default is in exports, too
    if is_chosen and {"max_age_s", "dedupe_window_s"} & set(changes):
        _check_window(settings)


def _check_ttl(settings: StreamSettings) -> None:
    ttl_s, max_age_s = settings.ttl_s, settings.max_age_s
    if ttl_s is not None and ttl_s < 1.0:
        raise InvalidRequest(f"ttl {format_duration(ttl_s)} must be at least 1s", setting="ttl")
    if ttl_s is not None and max_age_s is not None and ttl_s > max_age_s:
        raise InvalidRequest(
            f"ttl {format_duration(ttl_s)} is more than max_age {format_duration(max_age_s)}: messages would be "
            "removed before they expire. Lower ttl, or raise max_age",
            setting="ttl",
        )


def _check_window(settings: StreamSettings) -> None:
    """Ids of messages are found in the log: what retention has removed cannot be compared any more."""
    if settings.max_age_s is not None and settings.dedupe_window_s > settings.max_age_s:
        raise InvalidRequest(
            f"dedupe_window {format_duration(settings.dedupe_window_s)} is more than max_age "
            f"{format_duration(settings.max_age_s)}: messages would be removed before the window ends. Lower "
            "dedupe_window, or raise max_age",
            setting="dedupe_window",
        )


_FIELDS = {
    "max_age": "max_age_s",
    "dedupe_window": "dedupe_window_s",
    "tombstone_retention": "tombstone_retention_s",
    "ttl": "ttl_s",
    "subjects": "subject",
}
_PARSERS: dict[str, Any] = {
    "replicas": _whole("replicas", 1, MAX_REPLICAS),
    "min_isr": _optional(_whole("min_isr", 1, MAX_REPLICAS)),
    "group": _optional(lambda value: check_name(value, "group")),
    "max_age": _optional(lambda value: parse_duration_s(value, "max_age")),
    "max_bytes": _optional(lambda value: parse_size_bytes(value, "max_bytes")),
    "max_messages": _optional(_whole("max_messages", 1, 2**62)),
    "compression": _compression,
    "acks": _acks,
    "max_messages_per_subject": _optional(_whole("max_messages_per_subject", 1, MAX_PER_SUBJECT)),
    "compact": _flag("compact"),
    "allow_ttl": _flag("allow_ttl"),
    "ttl": _optional(lambda value: parse_duration_s(value, "ttl")),
    "discard": _discard,
    "tombstone_retention": lambda value: parse_duration_s(value, "tombstone_retention"),
    "max_message_bytes": _optional(lambda value: parse_size_bytes(value, "max_message_bytes")),
    "deny_delete": _flag("deny_delete"),
    "deny_purge": _flag("deny_purge"),
    "allow_rollup": _flag("allow_rollup"),
    "placement_tags": _tags,
    "prevent_delete": _flag("prevent_delete"),
    "managed_by": _optional(lambda value: check_name(value, "managed_by")),
    "dedupe_window": lambda value: 0.0 if value in (None, 0, "0") else parse_duration_s(value, "dedupe_window"),
}


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
