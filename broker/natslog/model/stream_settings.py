"""The settings of a stream: what they are, and how requests and files state them.

Each field of `StreamSettings` states its setting. From these fields follow the parsers below, the options of `natslog
stream create` and `edit`, the bodies of requests, the form of the console, and docs/SETTINGS.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Annotated, Any, Literal

import msgspec

from natslog.errors import InvalidRequest
from natslog.setting_kinds import Choice, Duration, Flag, Name, Size, Tags, Whole, stated_settings
from natslog.subjects import check_subject, is_wildcard, overlap
from natslog.units import format_duration

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
OF_NATS = {
    "$SYS": "the NATS server's own messages",
    "$JS": "requests to JetStream, and its answers,",
    "_INBOX": "answers to requests, and acks,",
}
"""First tokens of subjects that no stream records, and what is sent on them."""


class JetStreamSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Fields of a stream's configuration in the JetStream API that have no setting of their own (feature level 2).

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

    `acks` other than `reply`, and all settings after it, are written from feature level 2 on. At the limit per subject
    the oldest message of the subject goes, whatever `discard` is.

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
"""All but the subjects."""
_BY_NAME = {one.name: one for one in SETTINGS}
_AS_SHOWN = sorted(SETTINGS, key=lambda one: isinstance(one.setting, Duration))
"""Durations last."""
SIZE_NAMES = frozenset(one.name for one in SETTINGS if isinstance(one.setting, Size))
SETTING_NAMES = tuple(StreamSettings(subject="x").to_json())
"""Names of settings in JSON, in the order they are shown."""


def setting_fields(body: dict[str, Any]) -> tuple[str, ...]:
    """The fields of `StreamSettings` that a request body names; `subject` stands for all subjects."""
    names = {"subject" if name == "subjects" else name for name in body}
    return tuple(sorted(_BY_NAME[name].field if name in _BY_NAME else name for name in names))


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
    if not changes.get("min_isr") and (base is None or "min_isr" in changes):
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
    stated = [_BY_NAME[name] for name in body if name in _BY_NAME]
    return _parsed_subjects(body) | {one.field: one.setting.parse(body[one.name], one.name) for one in stated}


def settings_of_stream(shown: Mapping[str, Any]) -> StreamSettings:
    """The settings of a stream as the HTTP API shows it; those that an older broker does not state have defaults.

    Raises:
        InvalidRequest: they are not as this version has them.
    """
    return StreamSettings(**parsed_fields({name: shown[name] for name in SETTING_NAMES if name in shown}))


def subjects_of(stream: Mapping[str, Any]) -> tuple[str, ...]:
    """The subjects that a listed stream records. Brokers of natslog 0.1.0 state only `subject`."""
    return tuple(stream.get("subjects") or [stream["subject"]])


def subject_setting(subjects: str | Sequence[str]) -> dict[str, Any]:
    """The setting that names these subjects; one subject is named as brokers of natslog 0.1.0 accept it."""
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
    for internal, what in OF_NATS.items():
        if subject.split(".")[0] == internal:
            raise InvalidRequest(
                f"{what} are not recorded: choose another subject than {subject!r}", setting="subject", subject=subject
            )
    return subject


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
    is_chosen = settings.dedupe_window_s != DEFAULT_WINDOW_S  # the default is in exports, too
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
