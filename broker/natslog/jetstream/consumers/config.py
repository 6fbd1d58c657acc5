"""The configuration of a consumer, and how it is checked: as the server checks it, in the same order.

Source: nats-server, `setConsumerConfigDefaults`, `checkConsumerCfg` and `checkNewConsumerConfig` in
`server/consumer.go`.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from natslog.errors import InvalidRequest
from natslog.jetstream.errors import ApiError, api_error, consumer_error, invalid_config, pedantic
from natslog.jetstream.requests import ApiRequest, Signed, Unsigned
from natslog.jetstream.stream_config import REQUIRED_LEVEL, StreamConfig
from natslog.jetstream.stream_state import NO_TIME, time_of
from natslog.subjects import has_wildcard, includes, overlap
from natslog.times import parse_timestamp_us

MAX_NAME_BYTES = 255
MAX_DESCRIPTION_BYTES = 4096
MAX_METADATA_BYTES = 128 * 1024
MAX_WAITING = 10_000
MAX_ACK_PENDING = 1_000_000

_MS = 1_000_000
_ACK_WAIT_NS = 30_000 * _MS
_WAITING, _ACK_PENDING = 512, 1000
_INACTIVE_NS = 5_000 * _MS
_LEAST_HEARTBEAT_NS = 100 * _MS
_NOT_IN_NAMES = frozenset(" \t\r\n\f.*>\\/")
_FLOW_HEARTBEAT_NS = 1_000 * _MS
_GROUP_NAME = re.compile(r"[a-zA-Z0-9/_=-]{1,16}")
_FRACTION = re.compile(r"\.([0-9]*)")
_MOST_TIME_CHARS = 100
MAX_FILTERS = 500
_MOST_SUBJECT_BYTES = 1024
_BLANKS = frozenset(" \t\r\n\f\0")
_DYNAMIC = ("_nats.ver", "_nats.level")


DeliverPolicy = Literal["all", "last", "new", "by_start_sequence", "by_start_time", "last_per_subject", "undefined"]


class ConsumerConfig(ApiRequest, frozen=True, kw_only=True):
    """As the API has it: durations in nanoseconds, sizes in bytes."""

    durable_name: str = ""
    name: str = ""
    description: str = ""
    deliver_policy: DeliverPolicy = "all"
    opt_start_seq: Unsigned = 0
    opt_start_time: str = ""
    ack_policy: Literal["none", "all", "explicit", "flow_control"] = "none"
    ack_wait: Signed = 0
    max_deliver: Signed = 0
    backoff: tuple[Signed, ...] = ()
    filter_subject: str = ""
    filter_subjects: tuple[str, ...] = ()
    replay_policy: Literal["instant", "original"] = "instant"
    rate_limit_bps: Unsigned = 0
    sample_freq: str = ""
    max_waiting: Signed = 0
    max_ack_pending: Signed = 0
    flow_control: bool = False
    headers_only: bool = False
    max_batch: Signed = 0
    max_expires: Signed = 0
    max_bytes: Signed = 0
    deliver_subject: str = ""
    deliver_group: str = ""
    idle_heartbeat: Signed = 0
    inactive_threshold: Signed = 0
    num_replicas: Signed = 0
    mem_storage: bool = False
    direct: bool = False
    sourcing: bool = False
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    pause_until: str = ""
    priority_groups: tuple[str, ...] = ()
    priority_policy: Literal["none", "overflow", "pinned_client", "prioritized"] = "none"
    priority_timeout: Signed = 0

    @property
    def is_push(self) -> bool:
        return bool(self.deliver_subject)

    @property
    def filters(self) -> tuple[str, ...]:
        """The subjects that it reads; all where there are none."""
        return self.filter_subjects or ((self.filter_subject,) if self.filter_subject else ())


class ConsumerPauseRequest(ApiRequest, frozen=True, kw_only=True):
    """Until when nothing is delivered; a time in the past, or none, resumes."""

    pause_until: str = ""


class ConsumerCreateRequest(ApiRequest, frozen=True, kw_only=True):
    """`pedantic`: values that would be corrected are refused."""

    stream_name: str = ""
    config: ConsumerConfig = ConsumerConfig()
    action: Literal["", "create", "update"] = ""
    pedantic: bool = False


_ALWAYS_SHOWN = ("deliver_policy", "ack_policy", "replay_policy", "num_replicas")


def shown(config: ConsumerConfig, dynamic: dict[str, str]) -> dict[str, Any]:
    """As JSON. `dynamic`: metadata that states the version and level of the API."""
    body: dict[str, Any] = msgspec.to_builtins(config)
    body["metadata"] = config.metadata | dynamic
    if body["priority_policy"] == "none":
        body["priority_policy"] = ""
    return {name: value for name, value in body.items() if value or name in _ALWAYS_SHOWN}


# ---- defaults ----


def with_defaults(config: ConsumerConfig, stream: StreamConfig, *, is_pedantic: bool) -> ConsumerConfig:
    """Raises ApiError: a value that would be corrected, in pedantic mode."""
    changes = _corrected(config, is_pedantic)
    if not config.deliver_subject and not changes.get("max_waiting", config.max_waiting):
        changes["max_waiting"] = _WAITING
    if config.ack_wait == 0 and config.ack_policy in ("explicit", "all"):
        changes["ack_wait"] = _ACK_WAIT_NS
    if config.backoff:
        if is_pedantic and changes.get("ack_wait", config.ack_wait) != config.backoff[0]:
            raise pedantic("first backoff value has to equal batch AckWait")
        changes["ack_wait"] = config.backoff[0]
    limits = stream.consumer_limits
    for field in ("max_ack_pending", "inactive_threshold"):
        if not changes.get(field, getattr(config, field)):
            limit = getattr(limits, field)
            if is_pedantic and limit > 0:
                raise pedantic(f"{field} must be set if it's configured in stream limits")
            changes[field] = limit
    if not changes.get("max_ack_pending", config.max_ack_pending) and config.ack_policy != "none":
        changes["max_ack_pending"] = _ACK_PENDING
    return msgspec.structs.replace(config, **changes)


_CORRECTED = (
    ("max_waiting", 0, 0, "max_waiting must not be negative"),
    ("max_ack_pending", -1, -1, "max_ack_pending must be set to -1"),
    ("max_batch", 0, 0, "max_batch must not be negative"),
    ("max_expires", 0, 0, "max_expires must not be negative"),
    ("max_bytes", 0, 0, "max_bytes must not be negative"),
    ("idle_heartbeat", 0, 0, "idle_heartbeat must not be negative"),
    ("inactive_threshold", 0, 0, "inactive_threshold must not be negative"),
    ("priority_timeout", 0, 0, "priority_timeout must not be negative"),
)
"""Field, its least value, what a lower one becomes, and why pedantic mode refuses that."""


def _corrected(config: ConsumerConfig, is_pedantic: bool) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if config.max_deliver == 0 or config.max_deliver < -1:
        if is_pedantic and config.max_deliver < -1:
            raise pedantic("max_deliver must be set to -1")
        changes["max_deliver"] = -1
    for field, least, becomes, why in _CORRECTED:
        if getattr(config, field) < least:
            if is_pedantic:
                raise pedantic(why)
            changes[field] = becomes
    return changes


# ---- checks ----


def check(config: ConsumerConfig, stream: StreamConfig) -> None:
    """Raises ApiError: the first thing that is wrong with it."""
    _check_names(config)
    _check_replicas(config, stream)
    if any(one < 0 for one in config.backoff):
        raise consumer_error("backoff_negative")
    if config.ack_wait < 0:
        raise consumer_error("ack_wait_negative")
    if config.ack_policy == "flow_control":
        _check_ack_by_flow_control(config)
    if config.backoff and config.max_deliver != -1 and len(config.backoff) > config.max_deliver:
        raise consumer_error("max_deliver_backoff")
    if len(config.description.encode()) > MAX_DESCRIPTION_BYTES:
        raise consumer_error("description_too_long", MAX_DESCRIPTION_BYTES)
    (_check_push if config.is_push else _check_pull)(config, stream)
    _check_limits(config, stream)
    _check_filters(config)
    _check_start(config)
    _check_sampling(config)
    if config.flow_control and not config.idle_heartbeat:
        raise consumer_error("flow_control_needs_heartbeats")
    if config.durable_name and config.name and config.durable_name != config.name:
        raise consumer_error("durable_and_name_mismatch")
    if sum(len(name.encode()) + len(value.encode()) for name, value in config.metadata.items()) > MAX_METADATA_BYTES:
        raise consumer_error("metadata_length", f"{MAX_METADATA_BYTES // 1024}KB")
    _check_priority(config)
    _check_supported(config)


def _check_ack_by_flow_control(config: ConsumerConfig) -> None:
    if not config.is_push:
        raise consumer_error("ack_fc_requires_push")
    if not config.flow_control:
        raise consumer_error("ack_fc_requires_fc")
    if config.idle_heartbeat != _FLOW_HEARTBEAT_NS:
        raise invalid_config("flow control ack policy heartbeat needs to be 1s")
    if config.max_ack_pending <= 0:
        raise consumer_error("ack_fc_requires_max_ack_pending")
    if config.ack_wait or config.backoff:
        raise consumer_error("ack_fc_requires_no_ack_wait")
    if config.max_deliver > 0:
        raise consumer_error("ack_fc_requires_no_max_deliver")


def _check_names(config: ConsumerConfig) -> None:
    if config.name and _NOT_IN_NAMES & set(config.name):
        raise invalid_config("consumer name can not contain '.', '*', '>', '\\', '/'")
    if config.durable_name and _NOT_IN_NAMES & set(config.durable_name):
        raise invalid_config("consumer durable name can not contain '.', '*', '>', '\\', '/'")


def _check_replicas(config: ConsumerConfig, stream: StreamConfig) -> None:
    if config.num_replicas > 0 and config.num_replicas > stream.num_replicas:
        raise consumer_error("replicas_exceeds_stream")
    if config.num_replicas < 0:
        raise api_error("negative_replicas")
    if stream.retention != "limits" and config.num_replicas not in (0, stream.num_replicas):
        raise consumer_error("replicas_should_match_stream")


def _check_push(config: ConsumerConfig, stream: StreamConfig) -> None:
    if has_wildcard(config.deliver_subject):
        raise consumer_error("deliver_to_wildcards")
    if not _is_subject(config.deliver_subject):
        raise consumer_error("invalid_deliver_subject")
    if any(includes(subject, config.deliver_subject) for subject in stream.subjects):
        raise consumer_error("deliver_cycle")
    if config.max_waiting:
        raise consumer_error("push_max_waiting")
    if config.max_ack_pending > 0 and config.ack_policy == "none":
        raise consumer_error("max_pending_ack_policy_required")
    if 0 < config.idle_heartbeat < _LEAST_HEARTBEAT_NS:
        raise consumer_error("small_heartbeat")


def _check_pull(config: ConsumerConfig, stream: StreamConfig) -> None:
    if config.ack_policy == "none" and stream.retention == "workqueue":
        raise consumer_error("pull_requires_ack")
    if config.rate_limit_bps:
        raise consumer_error("pull_with_rate_limit")
    if config.idle_heartbeat > 0:
        raise consumer_error("hb_requires_push")
    if config.flow_control:
        raise consumer_error("fc_requires_push")
    if 0 < config.max_expires < _MS:
        raise consumer_error("max_request_expires_too_small")


def _check_limits(config: ConsumerConfig, stream: StreamConfig) -> None:
    limits = stream.consumer_limits
    if 0 < limits.max_ack_pending < config.max_ack_pending:
        raise consumer_error("max_pending_ack_excess", limits.max_ack_pending)
    if 0 < limits.inactive_threshold < config.inactive_threshold:
        raise consumer_error("inactive_threshold_excess", go_duration(limits.inactive_threshold))
    if config.direct and not config.is_push:
        raise consumer_error("direct_requires_push")
    if config.direct and config.durable_name:
        raise consumer_error("direct_requires_ephemeral")


def _check_filters(config: ConsumerConfig) -> None:
    if config.filter_subject and config.filter_subjects:
        raise consumer_error("duplicate_filter_subjects")
    if config.filter_subject and not _is_subject(config.filter_subject):
        raise invalid_config("invalid subject")
    if any(not one for one in config.filter_subjects):
        raise consumer_error("empty_filter")
    filters = config.filters
    if len(filters) > MAX_FILTERS:
        raise invalid_config(f"a consumer can have at most {MAX_FILTERS} filter subjects, not {len(filters)}")
    for at, one in enumerate(filters):
        if not _is_subject(one):
            raise invalid_config("invalid subject")
        if any(at != number and includes(other, one) for number, other in enumerate(filters)):
            raise consumer_error("overlapping_subject_filters")


_POLICIES = {
    "all": "all",
    "last": "last",
    "new": "new",
    "last_per_subject": "last per subject",
    "by_start_sequence": "by start sequence",
    "by_start_time": "by start time",
}


def _check_start(config: ConsumerConfig) -> None:
    policy, by_sequence, by_time = config.deliver_policy, bool(config.opt_start_seq), bool(config.opt_start_time)

    def not_set(what: str) -> ApiError:
        name = _POLICIES[policy]
        return consumer_error(
            "invalid_policy", f"consumer delivery policy is deliver {name}, but optional {what} is not set"
        )

    def is_set(what: str) -> ApiError:
        return consumer_error(
            "invalid_policy",
            f"consumer delivery policy is deliver {_POLICIES[policy]}, but optional start {what} is also set",
        )

    match policy:
        case "by_start_sequence":
            if not by_sequence:
                raise not_set("start sequence")
            if by_time:
                raise is_set("time")
        case "by_start_time":
            if not by_time:
                raise not_set("start time")
            if by_sequence:
                raise consumer_error(
                    "invalid_policy",
                    "consumer delivery policy is deliver by start time, but optional start start sequence is also set",
                )
        case _:
            if by_sequence:
                raise is_set("sequence")
            if by_time:
                raise is_set("time")
            if policy == "last_per_subject" and not config.filters:
                raise not_set("filter subject")


def _check_sampling(config: ConsumerConfig) -> None:
    text = config.sample_freq.removesuffix("%")
    if config.sample_freq and not re.fullmatch(r"[+]?[0-9]{1,18}", text):
        is_number = re.fullmatch(r"-[0-9]{1,18}", text)
        why = "<nil>" if is_number else f'strconv.Atoi: parsing "{text}": invalid syntax'
        raise consumer_error("invalid_sampling", why)


def _check_priority(config: ConsumerConfig) -> None:
    if config.priority_policy == "none":
        if config.priority_groups:
            raise consumer_error("priority_group_with_policy_none")
        if config.priority_timeout > 0:
            raise consumer_error("pinned_ttl_without_policy")
        return
    if config.is_push:
        raise consumer_error("push_with_priority_group")
    if not config.priority_groups:
        raise consumer_error("priority_policy_without_group")
    for group in config.priority_groups:
        if not group:
            raise consumer_error("empty_group_name")
        if not _GROUP_NAME.fullmatch(group):
            raise consumer_error("invalid_group_name")


def _check_supported(config: ConsumerConfig) -> None:
    """What the server accepts, and natslog does not."""
    if config.ack_policy == "flow_control":
        raise invalid_config("natslog does not support the ack policy flow_control")
    if config.priority_policy != "none":
        raise invalid_config("natslog does not support priority groups")
    if config.max_waiting > MAX_WAITING:
        raise invalid_config(f"natslog supports at most {MAX_WAITING} as max_waiting")
    if config.max_ack_pending > MAX_ACK_PENDING:
        raise invalid_config(f"natslog supports at most {MAX_ACK_PENDING} as max_ack_pending")


def _is_subject(subject: str) -> bool:
    """As the server has it: `*` and `>` in a longer token are letters."""
    tokens = subject.split(".")
    return len(subject.encode()) <= _MOST_SUBJECT_BYTES and all(
        token and not _BLANKS & set(token) and (token != ">" or at == len(tokens) - 1)
        for at, token in enumerate(tokens)
    )


def stored(config: ConsumerConfig) -> ConsumerConfig:
    """As it is kept: metadata with the API level that it requires, and the time of a start in one form.

    Raises:
        ApiError: the start time is none.
    """
    metadata = {name: value for name, value in config.metadata.items() if name not in _DYNAMIC}
    needs_level_1 = config.priority_policy != "none" or config.priority_timeout or config.priority_groups
    pause_until = time_in_utc(config.pause_until) if config.pause_until else ""
    level = 4 if config.ack_policy == "flow_control" else 1 if needs_level_1 or pause_until else 0
    changes: dict[str, Any] = {"metadata": metadata | {REQUIRED_LEVEL: str(level)}}
    if config.deliver_policy == "undefined":
        changes["deliver_policy"] = "all"
    if config.opt_start_time:
        _time_us("opt_start_time", config.opt_start_time)
        changes["opt_start_time"] = _FRACTION.sub(_shortened, config.opt_start_time)
    if config.pause_until:
        changes["pause_until"] = pause_until or NO_TIME
    return msgspec.structs.replace(config, **changes)


def time_in_utc(text: str) -> str:
    """As Go writes it; empty if it is Go's zero. Raises ApiError: it is no time."""
    if text == NO_TIME:
        return ""
    return time_of(_time_us("pause_until", text))


def _time_us(field: str, text: str) -> int:
    """Raises ApiError: it is no time."""
    if len(text) > _MOST_TIME_CHARS:
        raise api_error("invalid_json", f"{field}: a time has at most {_MOST_TIME_CHARS} characters, not {len(text)}")
    try:
        return parse_timestamp_us(text)
    except InvalidRequest as error:
        raise api_error("invalid_json", f"{field}: {error.message}") from error


def _shortened(fraction: re.Match[str]) -> str:
    """Of a time, as Go writes it."""
    digits = fraction[1].rstrip("0")
    return f".{digits}" if digits else ""


def with_threshold(config: ConsumerConfig, *, is_durable: bool) -> ConsumerConfig:
    """A consumer without a durable name is deleted when it is not in use."""
    if is_durable or config.inactive_threshold > 0:
        return config
    return msgspec.structs.replace(config, inactive_threshold=_INACTIVE_NS)


_FIXED = (
    ("deliver_policy", "deliver policy can not be updated"),
    ("mem_storage", "storage type can not be updated"),
    ("direct", "direct can not be updated"),
    ("sourcing", "sourcing can not be updated"),
    ("opt_start_seq", "start sequence can not be updated"),
    ("opt_start_time", "start time can not be updated"),
    ("ack_policy", "ack policy can not be updated"),
    ("replay_policy", "replay policy can not be updated"),
    ("idle_heartbeat", "heart beats can not be updated"),
    ("flow_control", "flow control can not be updated"),
)


def require_updatable(was: ConsumerConfig, now: ConsumerConfig, *, is_bound: bool) -> None:
    """Args: is_bound: the deliver subject has a subscriber. Raises ApiError."""
    if was == now:
        return
    for field, why in _FIXED:
        if _instant_of(field, was) != _instant_of(field, now):
            raise consumer_error("create", why)
    if was.deliver_subject != now.deliver_subject:
        if not was.deliver_subject:
            raise consumer_error("create", "can not update pull consumer to push based")
        if not now.deliver_subject:
            raise consumer_error("create", "can not update push consumer to pull based")
        if is_bound:
            raise consumer_error("name_exist")
    if was.max_waiting != now.max_waiting:
        raise consumer_error("create", "max waiting can not be updated")


def _instant_of(field: str, config: ConsumerConfig) -> Any:
    """A field, so that two texts for one time are equal."""
    value = getattr(config, field)
    return parse_timestamp_us(value) if field == "opt_start_time" and value else value


def are_equal(one: ConsumerConfig, other: ConsumerConfig) -> bool:
    """But for metadata that natslog sets."""
    return _comparable(one) == _comparable(other)


def _comparable(config: ConsumerConfig) -> ConsumerConfig:
    metadata = {name: value for name, value in config.metadata.items() if name != REQUIRED_LEVEL}
    return msgspec.structs.replace(config, metadata=metadata)


def require_work_queue(config: ConsumerConfig, name: str, others: dict[str, ConsumerConfig], *, is_new: bool) -> None:
    """Of a stream whose messages are each for one consumer. Raises ApiError."""
    if is_new and config.ack_policy != "explicit":
        raise consumer_error("wq_requires_explicit_ack")
    if is_new and config.deliver_policy != "all":
        raise consumer_error("wq_consumer_not_deliver_all")
    if is_new and others and not config.filters:
        raise consumer_error("wq_multiple_unfiltered")
    for other_name, other in others.items():
        if other_name == name:
            continue
        if config.filters and (
            not other.filters or any(overlap(one, theirs) for one in config.filters for theirs in other.filters)
        ):
            raise consumer_error("wq_consumer_not_unique")


def go_duration(nanoseconds: int) -> str:
    """As Go writes durations: 1h2m3.5s, 150ms."""
    if nanoseconds < 1000 * _MS:
        for unit, size in (("ms", _MS), ("µs", 1000)):
            if nanoseconds >= size:
                return f"{_trimmed(nanoseconds / size)}{unit}"
        return f"{nanoseconds}ns" if nanoseconds else "0s"
    minutes, rest = divmod(nanoseconds, 60_000 * _MS)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{_trimmed(rest / (1000 * _MS))}s"
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds


def _trimmed(number: float) -> str:
    return f"{number:.9f}".rstrip("0").rstrip(".")
