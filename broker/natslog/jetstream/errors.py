"""Errors of the JetStream API, with the numbers and texts of the server. `errors.toml` has all of them."""

from __future__ import annotations

import tomllib
from pathlib import Path
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

ERRORS: dict[str, tuple[int, int, str, str]] = {
    name: tuple(row) for name, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
}
"""By name: status, number, description, and when it is the answer."""

_OF_ERRORS: tuple[tuple[type[NatslogError], str], ...] = (
    (StreamNotFound, "stream_not_found"),
    (StreamConflict, "name_in_use"),
    (StreamSealed, "sealed"),
    (RemovalDenied, "stream_not_deleted"),
    (NotEnoughBrokers, "too_many_replicas"),
    (StorageQuotaExceeded, "resources_exceeded"),
    *((kind, "unavailable") for kind in (MetadataUnavailable, NoLeader, ShuttingDown, BrokerUnavailable)),
    (NatsUnavailable, "unavailable"),
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


def api_error(name: str, *values: object) -> ApiError:
    """The error of this name. Args: values: what stands in its description."""
    code, err_code, description, _ = ERRORS[name]
    return ApiError(code, err_code, description.format(*values))


def consumer_error(what: str, detail: object = "") -> ApiError:
    return api_error(f"consumer_{what}", detail)


def invalid_config(why: str) -> ApiError:
    return api_error("invalid_config", why)


def pedantic(why: str) -> ApiError:
    return api_error("pedantic", why)


def of_error(error: NatslogError) -> ApiError:
    """What the API answers where an operation of natslog fails."""
    if "overlaps" in error.facts and isinstance(error, StreamConflict):
        return api_error("subjects_overlap", error.facts["overlaps"])
    name = next((name for kind, name in _OF_ERRORS if isinstance(error, kind)), None)
    return api_error(name or ("invalid_config" if error.status == 400 else "general"), error.message)
