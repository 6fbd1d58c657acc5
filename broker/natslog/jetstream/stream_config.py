"""The configuration of a stream in the JetStream API, and the settings of the natslog stream that it stands for.

Theory of operation. A JetStream stream is a natslog stream. Most fields of its configuration are settings that the
natslog stream has as well, and are derived from these (`config_of`), so that edits by either API are seen in both. The
others are stored with the settings (`JetStreamSettings`). A configuration is checked as the server checks it, in the
same order, so that the same error is answered. Fields that natslog does not support are refused, never ignored.

Source: nats-server, `checkStreamCfg` and `configUpdateCheck` in `server/stream.go`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from natslog.errors import InvalidRequest
from natslog.jetstream.errors import api_error, invalid_config, pedantic
from natslog.jetstream.requests import ApiRequest, Signed, Unsigned
from natslog.model import (
    DEFAULT_WINDOW_S,
    MAX_PER_SUBJECT,
    MAX_SUBJECTS,
    JetStreamSettings,
    Offset,
    Retention,
    StreamRecord,
    StreamSettings,
    default_min_isr,
)
from natslog.stream_settings import OF_NATS
from natslog.subjects import MAX_NAME_CHARS, check_name, check_subject, includes, is_internal, overlap

MAX_NAME_BYTES = 255
MAX_DESCRIPTION_BYTES = 4096
MAX_METADATA_BYTES = 128 * 1024
MAX_REPLICAS = 5
MAX_FIRST_SEQ = 2**53
_LEAST_AGE_NS = 100_000_000
_DEFAULT_WINDOW_NS = int(DEFAULT_WINDOW_S * 1e9)
_NOT_IN_NAMES = frozenset(" \t\r\n\f.*>\\/")
_US = 1000
_RESERVED = ("$JS.>", "$JSC.>", "$NRG.>")
_DEFAULT = StreamSettings(subject="any")
REQUIRED_LEVEL = "_nats.req.level"
_DYNAMIC = ("_nats.ver", "_nats.level")


class Placement(ApiRequest, frozen=True, kw_only=True):
    cluster: str = ""
    tags: tuple[str, ...] = ()
    preferred: str = ""


class ConsumerLimits(ApiRequest, frozen=True, kw_only=True):
    """Of consumers of the stream that do not choose their own. `inactive_threshold`: nanoseconds; 0: no limit."""

    inactive_threshold: Signed = 0
    max_ack_pending: Signed = 0


class StreamConfig(ApiRequest, frozen=True, kw_only=True):
    """As the API has it: durations in nanoseconds, sizes in bytes, -1 is "no limit"."""

    name: str = ""
    description: str = ""
    subjects: tuple[str, ...] = ()
    retention: Retention = "limits"
    max_consumers: Signed = 0
    max_msgs: Signed = 0
    max_bytes: Signed = 0
    max_age: Signed = 0
    max_msgs_per_subject: Signed = 0
    max_msg_size: Signed = 0
    discard: Literal["old", "new"] = "old"
    storage: Literal["file", "memory"] = "file"
    num_replicas: Signed = 0
    no_ack: bool = False
    duplicate_window: Signed = 0
    placement: Placement | None = None
    mirror: dict[str, Any] | None = None
    sources: tuple[Any, ...] = ()
    compression: Literal["none", "s2"] = "none"
    first_seq: Unsigned = 0
    subject_transform: dict[str, Any] | None = None
    republish: dict[str, Any] | None = None
    allow_direct: bool = False
    mirror_direct: bool = False
    discard_new_per_subject: bool = False
    sealed: bool = False
    deny_delete: bool = False
    deny_purge: bool = False
    allow_rollup_hdrs: bool = False
    consumer_limits: ConsumerLimits = ConsumerLimits()
    allow_msg_ttl: bool = False
    subject_delete_marker_ttl: Signed = 0
    allow_msg_counter: bool = False
    allow_atomic: bool = False
    allow_msg_schedules: bool = False
    persist_mode: Literal["", "default", "async"] = ""
    allow_batched: bool = False
    metadata: dict[str, str] = msgspec.field(default_factory=dict)


class StreamConfigRequest(StreamConfig, frozen=True, kw_only=True):
    """`pedantic`: values that the server would correct are refused."""

    pedantic: bool = False


_OMITTED_IF_EMPTY = (
    "description",
    "no_ack",
    "duplicate_window",
    "placement",
    "mirror",
    "sources",
    "first_seq",
    "subject_transform",
    "republish",
    "discard_new_per_subject",
    "subject_delete_marker_ttl",
    "allow_msg_counter",
    "allow_atomic",
    "allow_msg_schedules",
    "persist_mode",
    "allow_batched",
)
_UNSUPPORTED: dict[str, str] = {
    "mirror": "mirrors",
    "sources": "sources",
    "subject_transform": "subject transforms",
    "republish": "republishing",
    "mirror_direct": "mirrors",
    "subject_delete_marker_ttl": "subject delete markers",
    "allow_msg_counter": "message counters",
    "allow_atomic": "atomic batches",
    "allow_msg_schedules": "message schedules",
    "allow_batched": "batched publishing",
}


def is_shown(name: str) -> bool:
    """Whether the API has a stream of this name: its subjects have no room for a dot."""
    return "." not in name and not is_internal(name)


# ---- checks ----


def checked(config: StreamConfigRequest) -> StreamConfig:
    """The configuration with defaults filled in, as the server does it.

    Raises:
        ApiError: the first thing that is wrong with it.
    """
    _check_texts(config)
    config = _with_numbers(config)
    _check_ages(config)
    if config.deny_purge and config.allow_rollup_hdrs:
        raise invalid_config("roll-ups require the purge permission")
    if config.discard_new_per_subject:
        _check_discard_per_subject(config)
    subjects = config.subjects or (config.name,)
    _check_subjects(config, subjects)
    _check_supported(config)
    changes: dict[str, Any] = {field: getattr(config, field) for field in StreamConfig.__struct_fields__}
    ages = {field: _to_ns(getattr(config, field) / 1e9) for field in ("max_age", "duplicate_window")}
    return StreamConfig(**changes | ages | {"subjects": subjects, "metadata": stored_metadata(config)})


def _check_texts(config: StreamConfig) -> None:
    if not config.name or _NOT_IN_NAMES & set(config.name):
        raise invalid_config("stream name is required and can not contain '.', '*', '>', '\\', '/'")
    if len(config.name.encode()) > MAX_NAME_BYTES:
        raise invalid_config(f"stream name is too long, maximum allowed is {MAX_NAME_BYTES}")
    if len(config.description.encode()) > MAX_DESCRIPTION_BYTES:
        raise invalid_config(f"stream description is too long, maximum allowed is {MAX_DESCRIPTION_BYTES}")
    if sum(len(name.encode()) + len(value.encode()) for name, value in config.metadata.items()) > MAX_METADATA_BYTES:
        raise invalid_config(f"stream metadata exceeds maximum size of {MAX_METADATA_BYTES} bytes")


def _with_numbers(config: StreamConfigRequest) -> StreamConfigRequest:
    if config.num_replicas > MAX_REPLICAS:
        raise invalid_config(f"maximum replicas is {MAX_REPLICAS}")
    if config.num_replicas < 0:
        raise api_error("negative_replicas")
    changes: dict[str, Any] = {"num_replicas": config.num_replicas or 1}
    for field in ("max_msgs", "max_msgs_per_subject", "max_bytes", "max_msg_size", "max_consumers"):
        if config.pedantic and getattr(config, field) < -1:
            raise pedantic(f"{field} must be set to -1")
        changes[field] = max(-1, getattr(config, field)) or -1
    return msgspec.structs.replace(config, **changes | {"duplicate_window": _window(config)})


def _window(config: StreamConfigRequest) -> int:
    if config.duplicate_window or config.max_age < 0:
        return config.duplicate_window
    if 0 < config.max_age < _DEFAULT_WINDOW_NS:
        if config.pedantic:
            raise pedantic("duplicate window cannot be bigger than max age")
        return config.max_age
    return _DEFAULT_WINDOW_NS


def _check_ages(config: StreamConfig) -> None:
    age, window = config.max_age, config.duplicate_window
    if age < 0:
        raise invalid_config("max age can not be negative")
    if 0 < age < _LEAST_AGE_NS:
        raise invalid_config("max age needs to be >= 100ms")
    if window < 0:
        raise invalid_config("duplicates window can not be negative")
    if age and window > age:
        raise invalid_config("duplicates window can not be larger then max age")
    if 0 < window < _LEAST_AGE_NS:
        raise invalid_config("duplicates window needs to be >= 100ms")


def _check_discard_per_subject(config: StreamConfig) -> None:
    if config.discard != "new":
        raise invalid_config("discard new per subject requires discard new policy to be set")
    if config.max_msgs_per_subject <= 0:
        raise invalid_config("discard new per subject requires max msgs per subject > 0")


def _check_subjects(config: StreamConfig, subjects: tuple[str, ...]) -> None:
    if len(subjects) > MAX_SUBJECTS:
        raise invalid_config(f"natslog streams have at most {MAX_SUBJECTS} subjects; combine them with wildcards")
    for at, subject in enumerate(subjects):
        try:
            check_subject(subject, wildcards=True)
        except InvalidRequest as error:
            raise invalid_config("invalid subject") from error
        if not config.no_ack:
            _check_acked_subject(subject)
        if subject == ">" and config.num_replicas != 1:
            raise invalid_config("capturing all subjects requires replicas of 1")
        for other in subjects[at + 1 :]:
            if overlap(subject, other):
                raise invalid_config(f'subject "{subject}" overlaps with "{other}"')


def _check_acked_subject(subject: str) -> None:
    if subject == ">":
        raise invalid_config("capturing all subjects requires no-ack to be true")
    is_event = includes("$JS.EVENT.>", subject)
    if not is_event and any(overlap(subject, reserved) for reserved in _RESERVED):
        raise invalid_config("subjects that overlap with jetstream api require no-ack to be true")
    if overlap(subject, "$SYS.>") and not includes("$SYS.ACCOUNT.>", subject):
        raise invalid_config("subjects that overlap with system api require no-ack to be true")


def _check_supported(config: StreamConfig) -> None:
    """What the server accepts, and natslog does not."""
    placement = config.placement or Placement()
    if placement.preferred:
        raise invalid_config("preferred server not permitted in placement")
    if placement.cluster:
        raise invalid_config("natslog does not support clusters in placement: use tags")
    for tag in placement.tags:
        try:
            check_name(tag, "placement tag")
        except InvalidRequest as error:
            raise invalid_config(error.message) from error
    for field in unsupported_fields(config):
        raise invalid_config(f"natslog does not support {_UNSUPPORTED[field]}")
    if config.first_seq > MAX_FIRST_SEQ:
        raise invalid_config(f"natslog supports at most {MAX_FIRST_SEQ} as first_seq")
    if config.persist_mode == "async":
        raise invalid_config("natslog stores messages before it acks them, and does not support the persist mode async")
    if config.max_msgs_per_subject > MAX_PER_SUBJECT:
        raise invalid_config(f"natslog supports at most {MAX_PER_SUBJECT} as max_msgs_per_subject; -1 is no limit")
    for subject in config.subjects:
        if subject.split(".")[0] in OF_NATS:
            raise invalid_config(f"natslog does not record the subject {subject!r}: it is of NATS itself")
    try:
        check_name(config.name)
    except InvalidRequest as error:
        raise invalid_config(error.message) from error


def unsupported_fields(config: StreamConfig) -> list[str]:
    """Those that are set, and stand for what the server does and natslog does not."""
    return [field for field in _UNSUPPORTED if getattr(config, field)]


def stored_metadata(config: StreamConfig) -> dict[str, str]:
    """With the API level that the stream requires, and without what is only in answers."""
    kept = {name: value for name, value in config.metadata.items() if name not in _DYNAMIC}
    level = 1 if config.allow_msg_ttl or config.subject_delete_marker_ttl > 0 else 0
    return kept | {REQUIRED_LEVEL: str(level)}


def require_updatable(was: StreamConfig, now: StreamConfig) -> StreamConfig:
    """The configuration after an update. Raises ApiError: a field that cannot be changed that way."""
    if now.storage != was.storage:
        raise invalid_config("stream configuration update can not change storage type")
    if now.retention != was.retention and "workqueue" in (now.retention, was.retention):
        raise invalid_config("stream configuration update can not change retention policy to/from workqueue")
    if was.sealed and not now.sealed:
        raise invalid_config("stream configuration update can not unseal a sealed stream")
    if was.deny_delete and not now.deny_delete:
        raise invalid_config("stream configuration update can not cancel deny message deletes")
    if was.deny_purge and not now.deny_purge:
        raise invalid_config("stream configuration update can not cancel deny purge")
    if was.allow_msg_ttl and not now.allow_msg_ttl:
        raise invalid_config("message TTL status can not be disabled")
    if now.sealed:
        sealed = {"max_age": 0, "discard": "new", "deny_delete": True, "deny_purge": True, "allow_rollup_hdrs": False}
        now = msgspec.structs.replace(now, **sealed)
    return now


# ---- to settings, and back ----


def settings_of(config: StreamConfig, base: StreamSettings = _DEFAULT) -> StreamSettings:
    """Of a stream that is created with this configuration, which is checked. What the API does not have is as in
    `base`.

    `max_age` becomes `ttl`, from which messages may be exempt; natslog's `max_age` concerns all of them.
    """
    limits = config.consumer_limits
    return msgspec.structs.replace(
        base,
        subject=config.subjects[0],
        more_subjects=config.subjects[1:],
        replicas=config.num_replicas,
        min_isr=default_min_isr(config.num_replicas),
        max_messages=_or_none(config.max_msgs),
        max_bytes=_or_none(config.max_bytes),
        max_age_s=None,
        ttl_s=config.max_age / 1e9 if config.max_age else None,
        max_messages_per_subject=_or_none(config.max_msgs_per_subject),
        max_message_bytes=_or_none(config.max_msg_size),
        discard=config.discard,
        acks="never" if config.no_ack else "any",
        dedupe_window_s=config.duplicate_window / 1e9,
        compression="lz4" if config.compression == "s2" else "none",
        deny_delete=config.deny_delete,
        deny_purge=config.deny_purge,
        allow_rollup=config.allow_rollup_hdrs,
        allow_ttl=config.allow_msg_ttl,
        placement_tags=config.placement.tags if config.placement is not None else (),
        jetstream=JetStreamSettings(
            description=config.description,
            storage=config.storage,
            max_consumers=config.max_consumers,
            allow_direct=config.allow_direct,
            discard_new_per_subject=config.discard_new_per_subject,
            first_seq=config.first_seq,
            inactive_threshold_ns=limits.inactive_threshold,
            max_ack_pending=limits.max_ack_pending,
            metadata=config.metadata,
            retention=config.retention,
        ),
    )


def updated_settings(was: StreamSettings, config: StreamConfig) -> StreamSettings:
    """Of a stream that has these settings, after an update. What the API does not have stays as it is."""
    now = settings_of(config, was)
    is_same_age = config.max_age == _to_ns(_age_s(was))
    age = {"ttl_s": was.ttl_s, "max_age_s": was.max_age_s} if is_same_age else {}
    is_compressed_alike = (was.compression == "none") == (now.compression == "none")
    return msgspec.structs.replace(
        now,
        **age,
        min_isr=was.min_isr if was.replicas == now.replicas else now.min_isr,
        compression=was.compression if is_compressed_alike else now.compression,
        acks=now.acks if (was.acks == "never") != config.no_ack else was.acks,
    )


def first_offset_of(config: StreamConfig) -> Offset:
    return Offset(max(0, config.first_seq - 1))


def config_of(record: StreamRecord, replicas: int | None = None) -> StreamConfig:
    """Of a stream, whichever API created it. `replicas`: how many there will be, while that changes."""
    settings = record.settings
    extra = settings.jetstream or JetStreamSettings()
    return StreamConfig(
        name=record.name,
        description=extra.description,
        subjects=settings.subjects,
        retention=extra.retention,
        max_consumers=extra.max_consumers,
        max_msgs=settings.max_messages or -1,
        max_bytes=settings.max_bytes or -1,
        max_age=_to_ns(_age_s(settings)),
        max_msgs_per_subject=settings.max_messages_per_subject or -1,
        max_msg_size=settings.max_message_bytes or -1,
        discard=settings.discard,
        storage=extra.storage,
        num_replicas=replicas or settings.replicas,
        placement=Placement(tags=settings.placement_tags) if settings.placement_tags else None,
        no_ack=settings.acks == "never",
        duplicate_window=_to_ns(settings.dedupe_window_s),
        compression="none" if settings.compression == "none" else "s2",
        first_seq=extra.first_seq,
        allow_direct=extra.allow_direct,
        discard_new_per_subject=extra.discard_new_per_subject,
        sealed=record.sealed,
        deny_delete=settings.deny_delete,
        deny_purge=settings.deny_purge,
        allow_rollup_hdrs=settings.allow_rollup,
        allow_msg_ttl=settings.allow_ttl,
        consumer_limits=ConsumerLimits(
            inactive_threshold=extra.inactive_threshold_ns, max_ack_pending=extra.max_ack_pending
        ),
        metadata=extra.metadata,
    )


def shown(config: StreamConfig, dynamic: dict[str, str]) -> dict[str, Any]:
    """As JSON. `dynamic`: metadata that states the version and level of the API."""
    body = msgspec.to_builtins(config)
    limits = {name: value for name, value in body["consumer_limits"].items() if value}
    body |= {"consumer_limits": limits, "metadata": config.metadata | dynamic}
    if config.placement is not None:
        body["placement"] = {name: value for name, value in body["placement"].items() if value}
    empty = [name for name in _OMITTED_IF_EMPTY if not body[name]]
    if not body["metadata"]:
        empty.append("metadata")
    return {name: value for name, value in body.items() if name not in empty}


def are_equal(one: StreamConfig, other: StreamConfig) -> bool:
    """But for metadata that natslog sets."""
    return _comparable(one) == _comparable(other)


def _comparable(config: StreamConfig) -> StreamConfig:
    metadata = {name: value for name, value in config.metadata.items() if name != REQUIRED_LEVEL}
    placement = None if config.placement == Placement() else config.placement
    return msgspec.structs.replace(config, metadata=metadata, placement=placement, persist_mode="")


def _age_s(settings: StreamSettings) -> float:
    """After which messages go, by either setting; 0: never."""
    return min((age for age in (settings.ttl_s, settings.max_age_s) if age is not None), default=0.0)


def _or_none(limit: int) -> int | None:
    return limit if limit > 0 else None


def _to_ns(seconds: float) -> int:
    """Exact to the microsecond."""
    return min(round(seconds * 1e6) * _US, 2**63 - 1)


__all__ = ["MAX_NAME_CHARS", "StreamConfig", "StreamConfigRequest", "checked", "config_of", "settings_of", "shown"]
