"""Requests of the JetStream API: their types, and how their JSON is read.

Theory of operation. The server reads JSON as Go does: a field that is null is as if it were missing, an empty body is a
request without fields, and a field that it does not know is an error. Sequences are unsigned; natslog has those below
2**63.

Source: nats-server, `server/jetstream_api.go`, `server/stream.go`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from natslog.jetstream.errors import api_error

API_LEVEL = 5
_LEVEL_HEADER = "nats-required-api-level"
Unsigned = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Signed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

Request = TypeVar("Request", bound="ApiRequest")

_UNKNOWN = re.compile(r"unknown field `([^`]*)`")


class ApiRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every request has a default for each of its fields."""


class PagedRequest(ApiRequest, frozen=True, kw_only=True):
    offset: Signed = 0


class StreamsRequest(PagedRequest, frozen=True, kw_only=True):
    """NAMES and LIST. `subject`: streams whose subjects overlap with it."""

    subject: str = ""


class StreamInfoRequest(PagedRequest, frozen=True, kw_only=True):
    deleted_details: bool = False
    subjects_filter: str = ""


class MessageGetRequest(ApiRequest, frozen=True, kw_only=True):
    """Of one message. `start_time`: RFC 3339. `batch`, `max_bytes`, and what follows: of direct requests only."""

    seq: Unsigned = 0
    last_by_subj: str = ""
    next_by_subj: str = ""
    batch: Signed = 0
    max_bytes: Signed = 0
    start_time: str = ""
    multi_last: tuple[str, ...] = ()
    up_to_seq: Unsigned = 0
    up_to_time: str = ""
    no_hdr: bool = False


class MessageDeleteRequest(ApiRequest, frozen=True, kw_only=True):
    seq: Unsigned = 0
    no_erase: bool = False


class PurgeRequest(ApiRequest, frozen=True, kw_only=True):
    """`seq`: messages below it; `keep`: all but so many of the newest."""

    seq: Unsigned = 0
    filter: str = ""
    keep: Unsigned = 0


def required_level(headers: bytes) -> int:
    """The level of the API that a request names; 0 if it names none. What is no number is more than any level."""
    for line in headers.decode(errors="replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == _LEVEL_HEADER:
            text = value.strip()
            if not text:
                return 0
            return int(text) if text.isdecimal() and len(text) < 10 else API_LEVEL + 1
    return 0


def is_empty(payload: bytes) -> bool:
    """Whether a request has no fields."""
    if payload in (b"", b"{}"):
        return True
    try:
        return bool(msgspec.json.decode(payload) == {})
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def has_fields(payload: bytes) -> bool:
    """Whether a payload, which may be missing, is meant as JSON."""
    return payload.lstrip(b" \t\r\n")[:1] in (b"{", b"[")


def decoded(payload: bytes, kind: type[Request], *, ignores_unknown: bool = False) -> Request:
    """Raises ApiError: it is not JSON, has an unknown field, or one of another type."""
    if not payload.strip():
        return kind()
    try:
        fields = _without_nulls(msgspec.json.decode(payload))
        if fields is None:
            return kind()
        if not isinstance(fields, dict):
            raise api_error("invalid_json", f"a request is an object, not {_shown(payload)}")
        if ignores_unknown:
            fields = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
        return msgspec.convert(fields, kind)
    except RecursionError as error:
        raise api_error("invalid_json", "exceeded max depth") from error
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN.search(str(error))
        why = f'json: unknown field "{unknown[1]}"' if unknown else str(error)
        raise api_error("invalid_json", why) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise api_error("invalid_json", str(error)) from error


def _shown(payload: bytes) -> str:
    return payload[:40].decode(errors="replace")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
