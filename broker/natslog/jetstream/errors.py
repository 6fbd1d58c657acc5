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


def consumers_not_supported() -> ApiError:
    return ApiError(
        500,
        10012,
        "natslog does not support consumers yet: read the stream by HTTP, Spark, natslog cat or natslog.client",
    )


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


def subjects_overlap() -> ApiError:
    return ApiError(400, 10065, "subjects overlap with an existing stream")


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
            return subjects_overlap() if "overlaps" in facts else name_in_use()
        case StreamSealed():
            return sealed()
        case NotEnoughBrokers():
            return too_many_replicas()
        case StorageQuotaExceeded():
            return ApiError(400, 10002, "resource limits exceeded for account")
        case MetadataUnavailable() | NoLeader() | ShuttingDown() | BrokerUnavailable() | NatsUnavailable():
            return unavailable()
    if error.status == 400:
        return invalid_config(error.message)
    return ApiError(500, 10051, error.message)
