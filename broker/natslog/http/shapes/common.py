"""Types that all bodies and parameters share, and how a body is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from natslog.cluster.cursors import CONSUMER_PREFIX
from natslog.consensus import MAX_BROKER_ID
from natslog.errors import KINDS, InvalidRequest
from natslog.log import StreamLog
from natslog.model import MAX_SUBJECTS
from natslog.subjects import MAX_NAME_CHARS, MAX_SUBJECT_BYTES, NAME_PATTERN

Shape = TypeVar("Shape")

MAX_OFFSET = 2**62
MAX_CURSOR_CHARS = MAX_NAME_CHARS + len(CONSUMER_PREFIX)
_SHOWN_CHARS = 40

Name = Annotated[str, Meta(pattern=f"^{NAME_PATTERN}$", max_length=MAX_NAME_CHARS)]
NameText = Annotated[str, Meta(extra_json_schema={"pattern": f"^{NAME_PATTERN}$", "maxLength": MAX_NAME_CHARS})]
"""Checked by `check_name`, which states the remedy."""
CURSOR_PATTERN = rf"({NAME_PATTERN}|{CONSUMER_PREFIX}[^\s.*>/]+)"
CursorName = Annotated[str, Meta(pattern=f"^{CURSOR_PATTERN}$", max_length=MAX_CURSOR_CHARS)]
CursorText = Annotated[str, Meta(extra_json_schema={"pattern": f"^{CURSOR_PATTERN}$", "maxLength": MAX_CURSOR_CHARS})]
"""Checked where it is looked up."""
Subject = Annotated[str, Meta(min_length=1, max_length=MAX_SUBJECT_BYTES)]
Subjects = Annotated[list[Subject], Meta(min_length=1, max_length=MAX_SUBJECTS)]
Offset = Annotated[int, Meta(ge=0, le=MAX_OFFSET)]
Positive = Annotated[int, Meta(ge=1, le=MAX_OFFSET)]
Bound = Offset | Literal["earliest", "latest"]
Count = Annotated[int, Meta(ge=0)]
BrokerNumber = Annotated[int, Meta(ge=1, le=MAX_BROKER_ID)]
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
AnyProblem = Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/Problem"})]
"""A `Problem` with its facts."""


class Answer(web.Response, Generic[Shape]):
    """A response with a JSON body of this type."""


def shape_response(body: Shape, *, status: int = 200, headers: Mapping[str, str] = {}) -> Answer[Shape]:
    """A response with this JSON body: a struct of this package, or a list or dict of them."""
    try:
        text = msgspec.json.encode(body)
    except UnicodeEncodeError:  # a path that is not valid Unicode
        text = json.dumps(msgspec.to_builtins(body)).encode()
    return Answer(body=text, status=status, headers={**headers, "Content-Type": "application/json; charset=utf-8"})


class Problem(msgspec.Struct):
    """What is wrong and what to do. Further fields are facts for programs, such as `stream` or `high_watermark`."""

    code: Annotated[str, Meta(extra_json_schema={"enum": sorted(KINDS)})]
    message: str
    retriable: Annotated[bool, Meta(description="whether the same request may succeed later")]


class Error(msgspec.Struct):
    """The body of every response with a status of 400 or more."""

    error: Problem


class OffsetRange(msgspec.Struct):
    """Offsets from `start` to `end`, exclusive."""

    start: Offset
    end: Offset


# ---- parameters ----


class Range(msgspec.Struct, frozen=True):
    """A range of offsets."""

    start: Annotated[Bound | None, Meta(description="first offset, or earliest, latest")] = None
    end: Annotated[Bound | None, Meta(description="exclusive; or earliest, latest")] = None

    def within(self, log: StreamLog) -> tuple[int, int]:
        """Its bounds: by default the first offset of the log that can be read, and the high watermark."""
        return offset_of(self.start, log, log.first_readable_offset), offset_of(self.end, log, log.high_watermark)


def offset_of(bound: Bound | None, log: StreamLog, default: int) -> int:
    """The offset that a bound names in this log; None: the default."""
    if bound is None:
        return default
    if isinstance(bound, int):
        return bound
    return log.first_readable_offset if bound == "earliest" else log.high_watermark


def require_columns(parameter: str, names: Sequence[str], known: Sequence[str], refusal: str) -> None:
    """Raises InvalidRequest: one is not known, or named twice."""
    for name in names:
        if name not in known:
            shown = name[:_SHOWN_CHARS]
            raise InvalidRequest(
                f"{parameter}: {shown!r} {refusal}; choose of {', '.join(known)}", parameter=parameter, column=shown
            )
    if len(set(names)) < len(names):
        raise InvalidRequest(f"{parameter}: a column is named twice: name each column once", parameter=parameter)
