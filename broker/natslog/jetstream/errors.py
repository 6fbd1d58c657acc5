"""Errors of the JetStream API, with the numbers and texts of the server.

Source: nats-server, `server/errors.json`.
"""

from __future__ import annotations

from typing import Any

from natslog.errors import (
    BrokerUnavailable,
    MetadataUnavailable,
    NatslogError,
    NatsUnavailable,
    NoLeader,
    NotEnoughBrokers,
    RemovalDenied,
    ShuttingDown,
    StorageQuotaExceeded,
    StreamConflict,
    StreamNotFound,
    StreamSealed,
)


class ApiError(Exception):
    """The answer to a request that is refused.

    Attributes:
        code: as an HTTP status. err_code: what exactly; clients compare it.
    """

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(description)
        self.code, self.err_code, self.description = code, err_code, description

    def to_json(self) -> dict[str, Any]:
        return {"code": self.code, "err_code": self.err_code, "description": self.description}


def bad_request() -> ApiError:
    return ApiError(400, 10003, "bad request")


def invalid_json(why: str) -> ApiError:
    return ApiError(400, 10025, f"invalid JSON: {why}")


def not_empty() -> ApiError:
    return ApiError(400, 10038, "expected an empty request payload")


def unavailable() -> ApiError:
    return ApiError(503, 10008, "JetStream system temporarily unavailable")


def level_required() -> ApiError:
    return ApiError(412, 10185, "JetStream minimum api level required")


def stream_not_found() -> ApiError:
    return ApiError(404, 10059, "stream not found")


def consumer_not_found() -> ApiError:
    return ApiError(404, 10014, "consumer not found")


def limits_violate(consumers: list[str]) -> ApiError:
    return ApiError(500, 10069, f"change to limits violates consumers: {', '.join(consumers)}")


def no_leaf_link() -> ApiError:
    return ApiError(
        500,
        10012,
        "natslog delivers to consumers over a leafnode connection: give the NATS server a leafnodes block, and the "
        "broker the setting nats_leaf_url",
    )


_CONSUMER_ERRORS: dict[str, tuple[int, int, str]] = {
    "ack_wait_negative": (400, 10183, "consumer ack wait needs to be positive"),
    "already_exists": (400, 10148, "consumer already exists"),
    "backoff_negative": (400, 10184, "consumer backoff needs to be positive"),
    "bad_durable_name": (400, 10103, "durable name can not contain '.', '*', '>'"),
    "create": (500, 10012, "{}"),
    "deliver_cycle": (400, 10081, "consumer deliver subject forms a cycle"),
    "deliver_to_wildcards": (400, 10079, "consumer deliver subject has wildcards"),
    "description_too_long": (400, 10107, "consumer description is too long, maximum allowed is {}"),
    "direct_requires_ephemeral": (400, 10091, "consumer direct requires an ephemeral consumer"),
    "direct_requires_push": (400, 10090, "consumer direct requires a push based consumer"),
    "does_not_exist": (400, 10149, "consumer does not exist"),
    "duplicate_filter_subjects": (400, 10136, "consumer cannot have both FilterSubject and FilterSubjects specified"),
    "durable_and_name_mismatch": (400, 10132, "Consumer Durable and Name have to be equal if both are provided"),
    "durable_name_not_match_subject": (
        400,
        10017,
        "consumer name in subject does not match durable name in request",
    ),
    "durable_name_not_set": (400, 10018, "consumer expected to be durable but a durable name was not set"),
    "empty_filter": (400, 10139, "consumer filter in FilterSubjects cannot be empty"),
    "ephemeral_with_durable_name": (
        400,
        10020,
        "consumer expected to be ephemeral but a durable name was set in request",
    ),
    "fc_requires_push": (400, 10089, "consumer flow control requires a push based consumer"),
    "filter_subject_mismatch": (
        400,
        10131,
        "Consumer create request did not match filtered subject from create subject",
    ),
    "flow_control_needs_heartbeats": (400, 10108, "consumer with flow control also needs heartbeats"),
    "hb_requires_push": (400, 10088, "consumer idle heartbeat requires a push based consumer"),
    "inactive_threshold_excess": (400, 10153, "consumer inactive threshold exceeds system limit of {}"),
    "invalid_deliver_subject": (400, 10112, "invalid push consumer deliver subject"),
    "invalid_policy": (400, 10094, "{}"),
    "invalid_sampling": (400, 10095, "failed to parse consumer sampling configuration: {}"),
    "max_deliver_backoff": (400, 10116, "max deliver is required to be > length of backoff values"),
    "max_pending_ack_excess": (400, 10121, "consumer max ack pending exceeds system limit of {}"),
    "max_pending_ack_policy_required": (400, 10082, "consumer requires ack policy for max ack pending"),
    "max_request_expires_too_small": (400, 10115, "consumer max request expires needs to be >= 1ms"),
    "maximum_consumers_limit": (400, 10026, "maximum consumers limit reached"),
    "metadata_length": (400, 10135, "consumer metadata exceeds maximum size of {}"),
    "multiple_filters_not_allowed": (
        400,
        10137,
        "consumer with multiple subject filters cannot use subject based API",
    ),
    "name_contains_path_separators": (400, 10127, "Consumer name can not contain path separators"),
    "name_exist": (400, 10013, "consumer name already in use"),
    "name_too_long": (400, 10102, "consumer name is too long, maximum allowed is {}"),
    "overlapping_subject_filters": (400, 10138, "consumer subject filters cannot overlap"),
    "pull_requires_ack": (400, 10084, "consumer in pull mode requires explicit ack policy on workqueue stream"),
    "pull_with_rate_limit": (400, 10086, "consumer in pull mode can not have rate limit set"),
    "ack_fc_requires_fc": (400, 10219, "flow control ack policy requires flow control"),
    "ack_fc_requires_max_ack_pending": (400, 10220, "flow control ack policy requires max ack pending"),
    "ack_fc_requires_no_ack_wait": (400, 10221, "flow control ack policy requires unset ack wait"),
    "ack_fc_requires_no_max_deliver": (400, 10222, "flow control ack policy requires unset max deliver"),
    "ack_fc_requires_push": (400, 10218, "flow control ack policy requires a push based consumer"),
    "empty_group_name": (400, 10161, "Group name cannot be an empty string"),
    "invalid_group_name": (
        400,
        10162,
        "Valid priority group name must match A-Z, a-z, 0-9, -_/=)+ and may not exceed 16 characters",
    ),
    "pinned_ttl_without_policy": (400, 10197, "PinnedTTL cannot be set when PriorityPolicy is none"),
    "priority_group_with_policy_none": (400, 10196, "consumer can not have priority groups when policy is none"),
    "priority_policy_without_group": (
        400,
        10159,
        "Setting PriorityPolicy requires at least one PriorityGroup to be set",
    ),
    "push_with_priority_group": (400, 10178, "priority groups can not be used with push consumers"),
    "push_max_waiting": (400, 10080, "consumer in push mode can not set max waiting"),
    "replicas_exceeds_stream": (400, 10126, "consumer config replica count exceeds parent stream"),
    "replicas_should_match_stream": (
        400,
        10134,
        "consumer config replicas must match interest retention stream's replicas",
    ),
    "small_heartbeat": (400, 10083, "consumer idle heartbeat needs to be >= 100ms"),
    "wq_consumer_not_deliver_all": (400, 10101, "consumer must be deliver all on workqueue stream"),
    "wq_consumer_not_unique": (400, 10100, "filtered consumer not unique on workqueue stream"),
    "wq_multiple_unfiltered": (400, 10099, "multiple non-filtered consumers not allowed on workqueue stream"),
    "wq_requires_explicit_ack": (400, 10098, "workqueue stream requires explicit ack"),
}
"""By the names of the server's constants, without `JSConsumer` and `Err`."""


def consumer_error(what: str, detail: object = "") -> ApiError:
    """Args: detail: what stands in its text."""
    code, err_code, text = _CONSUMER_ERRORS[what]
    return ApiError(code, err_code, text.format(detail))


def name_mismatch() -> ApiError:
    return ApiError(400, 10056, "stream name in subject does not match request")


def name_in_use() -> ApiError:
    return ApiError(400, 10058, "stream name already in use with a different configuration")


def path_separators() -> ApiError:
    return ApiError(400, 10128, "Stream name can not contain path separators")


def invalid_config(why: str) -> ApiError:
    return ApiError(500, 10052, why)


def pedantic(why: str) -> ApiError:
    return ApiError(400, 10157, f"pedantic mode: {why}")


def subjects_overlap(stream: str) -> ApiError:
    return ApiError(400, 10065, f"subjects overlap with an existing stream: {stream}")


def no_snapshots() -> ApiError:
    return ApiError(501, 10064, "natslog has no snapshots of streams: copy this one with `natslog export`")


def no_restores() -> ApiError:
    return ApiError(501, 10062, "natslog restores no snapshots: copy a stream with `natslog export`, `natslog import`")


def too_many_replicas() -> ApiError:
    return ApiError(500, 10074, "replicas > 1 not supported in non-clustered mode")


def no_suitable_brokers(tags: tuple[str, ...]) -> ApiError:
    return ApiError(400, 10005, f"no suitable peers for placement, tags not matched {list(tags)}")


def negative_replicas() -> ApiError:
    return ApiError(400, 10133, "replicas count cannot be negative")


def no_message() -> ApiError:
    return ApiError(404, 10037, "no message found")


def sequence_not_found(sequence: int) -> ApiError:
    return ApiError(400, 10043, f"sequence {sequence} not found")


def nothing_to_delete(*, is_past_end: bool) -> ApiError:
    return ApiError(500, 10057, "stream store EOF" if is_past_end else "no message found")


def sealed() -> ApiError:
    return ApiError(400, 10109, "invalid operation on sealed stream")


def delete_denied() -> ApiError:
    return ApiError(500, 10057, "message delete not permitted")


def purge_denied() -> ApiError:
    return ApiError(500, 10110, "stream purge not permitted")


def answer_too_large(size_bytes: int, most_bytes: int) -> ApiError:
    return ApiError(
        500,
        10051,
        f"the answer has {size_bytes} bytes, and the NATS server permits {most_bytes} (max_payload): raise its limit, "
        "or request less",
    )


def request_too_large(most_bytes: int) -> ApiError:
    return invalid_json(f"a request has at most {most_bytes} bytes")


def internal() -> ApiError:
    return ApiError(500, 10051, "internal error: the log of the broker has the details")


def of_error(error: NatslogError) -> ApiError:
    """What the API answers where an operation of natslog fails."""
    match error:
        case StreamNotFound():
            return stream_not_found()
        case StreamConflict(facts=facts):
            return subjects_overlap(facts["overlaps"]) if "overlaps" in facts else name_in_use()
        case StreamSealed():
            return sealed()
        case RemovalDenied():  # of a whole stream
            return ApiError(500, 10050, error.message)
        case NotEnoughBrokers():
            return too_many_replicas()
        case StorageQuotaExceeded():
            return ApiError(400, 10002, "resource limits exceeded for account")
        case MetadataUnavailable() | NoLeader() | ShuttingDown() | BrokerUnavailable() | NatsUnavailable():
            return unavailable()
    if error.status == 400:
        return invalid_config(error.message)
    return ApiError(500, 10051, error.message)
