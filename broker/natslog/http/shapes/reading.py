"""What is read of streams: positions, messages, ranges, subjects."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from natslog.arrow.schema import COLUMNS
from natslog.arrow.searching import MOST_CHARS, SEARCHED
from natslog.errors import InvalidRequest
from natslog.http.shapes.common import (
    AnyProblem,
    Bound,
    Count,
    CursorText,
    Name,
    Offset,
    Positive,
    Range,
    Subject,
    Time,
    require_columns,
)
from natslog.model import Fork
from natslog.planning import Wait
from natslog.subjects import MAX_NAME_CHARS, check_subject

MAX_SPLITS = 100_000
_MAX_ANSWER_BYTES = 1024 * 1024 * 1024
_FOUND_OF_A_PAGE, _MAX_FOUND_OF_A_PAGE = 100, 1_000
_PREVIEW_BYTES, _MAX_PREVIEW_BYTES = 4_096, 1024 * 1024
_SEARCHED_BYTES, _MAX_SEARCHED_BYTES = 256 * 1024 * 1024, 4 * 1024**3
_SEARCHED_MS, _MAX_SEARCHED_MS = 2_000, 20_000
_SUBJECTS_OF_A_PAGE, _MAX_SUBJECTS_OF_A_PAGE = 1_000, 10_000

_Column = Annotated[str, Meta(extra_json_schema={"enum": list(COLUMNS)})]
_Columns = Annotated[
    Annotated[tuple[_Column, ...], Meta(extra_json_schema={"uniqueItems": True})],
    Meta(description="comma-separated names; the other columns are not sent"),
]
_SearchedColumn = Annotated[str, Meta(extra_json_schema={"enum": list(SEARCHED)})]


ReadFrom = Literal["nearest", "leader", "any"]


class Position(msgspec.Struct, kw_only=True):
    """The position of a stream as its leader states it; without one there is a `problem`."""

    name: Name
    id: str
    leader_epoch: Count
    lineage: list[Fork] | UnsetType = UNSET
    log_start_offset: Offset | UnsetType = UNSET
    high_watermark: Offset | UnsetType = UNSET
    messages: Count | UnsetType | None = UNSET
    bytes: Count | UnsetType | None = UNSET
    segments: Count | UnsetType | None = UNSET
    problem: AnyProblem | UnsetType = UNSET


class AskedPositions(msgspec.Struct, forbid_unknown_fields=True):
    """Which streams (all, if nothing is given); `seen`: id and high watermark of each, as the reader has them."""

    streams: frozenset[str] | None = None
    pattern: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    group: str | None = None
    seen: dict[str, tuple[str, int]] = {}
    wait_ms: Wait = 0


class SubjectCount(msgspec.Struct):
    """A subject: how many visible messages it has, and the offsets of the first and the last of them."""

    subject: Subject
    count: Count
    first: Offset
    last: Offset


class SubjectPage(msgspec.Struct):
    """Subjects of the messages that were visible when `as_of` was the high watermark. `total`: of all pages."""

    name: Name
    as_of: Offset
    total: Count
    subjects: list[SubjectCount]


class Header(msgspec.Struct):
    """A header of a message. `key`: its name."""

    key: str
    value: str


class FoundMessage(msgspec.Struct, kw_only=True):
    """A message, and the first bytes of its value. Bytes that are not UTF-8 are in base64, under `key_base64` and
    `value_base64`. `value_bytes`: size of the whole value; `is_cut`: it is longer than what is shown.
    """

    offset: Offset
    timestamp: Time
    subject: str
    key: str | UnsetType | None = UNSET
    key_base64: str | UnsetType = UNSET
    headers: list[Header]
    value: str | UnsetType = UNSET
    value_base64: str | UnsetType = UNSET
    value_bytes: Count
    is_cut: bool


class Found(msgspec.Struct, kw_only=True):
    """A page of a search, in the order of offsets. All messages below `next_offset` were searched; with `is_complete`
    it is the end of the range, otherwise a request with it as `start` goes on. `bytes_searched`, `rows_searched`: what
    was read for this page; missing if the identity may not read all subjects.
    """

    messages: list[FoundMessage]
    next_offset: Offset
    high_watermark: Offset
    is_complete: bool
    bytes_searched: Count | UnsetType = UNSET
    rows_searched: Count | UnsetType = UNSET


class OffsetAt(msgspec.Struct):
    """An offset and the time of its message; the high watermark and null, if there is no such message."""

    offset: Offset
    timestamp: Time | None


class Extent(msgspec.Struct):
    """About how many bytes a range takes, and exactly how many messages it has."""

    start: Offset
    end: Offset
    bytes: Count | None
    rows: Count | None


class Split(msgspec.Struct):
    """A part of a range; `urls` of brokers that have it, nearest first."""

    start: Offset
    end: Offset
    rows: Count | None
    bytes: Count | None
    urls: tuple[str, ...]


class AskedRange(msgspec.Struct, forbid_unknown_fields=True):
    """Offsets `[start, end)` of the stream with this id."""

    stream: str
    id: str
    start: int
    end: int
    min_splits: Annotated[int, Meta(ge=1, le=MAX_SPLITS)] = 1


class AskedSplits(msgspec.Struct, forbid_unknown_fields=True):
    """As the parameters of `/v1/streams/{name}/splits`, of several streams."""

    ranges: list[AskedRange]
    max_bytes: Annotated[int, Meta(ge=1)] | None = None
    max_rows: Annotated[int, Meta(ge=1)] | None = None
    read_from: ReadFrom = "nearest"
    rack: str | None = None

    def __post_init__(self) -> None:
        if any(count > 1 for count in Counter(one.stream for one in self.ranges).values()):
            raise InvalidRequest("a stream is named twice: name each stream once", field="ranges")
        most = sum(max(one.min_splits, (one.end - one.start) // (self.max_rows or 2**62)) for one in self.ranges)
        if most > MAX_SPLITS:
            raise InvalidRequest(f"this would divide the ranges into more than {MAX_SPLITS} splits", field="ranges")


class SplitsOfSeveral(msgspec.Struct):
    """Splits by stream. `elsewhere`: streams without a replica here, by the URL of their leader."""

    splits: dict[str, list[Split]]
    elsewhere: dict[str, list[str]]


# ---- parameters ----


class MessagesOf(Range, frozen=True):
    """Which messages, and in what form."""

    max_bytes: Annotated[
        Annotated[int, Meta(ge=1, le=_MAX_ANSWER_BYTES)] | None,
        Meta(
            description="limit on the size of the batches, both stored and uncompressed; at least one batch is returned"
        ),
    ] = None
    exact: Annotated[
        bool | None,
        Meta(description="false: stored batches are returned whole and may begin before start and end after end"),
    ] = None
    wait_ms: Annotated[Wait, Meta(description="wait for new messages")] = 0
    subject: Annotated[Subject | None, Meta(description="NATS wildcard")] = None
    columns: _Columns | None = None
    view: Annotated[
        Literal["latest"] | None, Meta(description="latest: only the newest message of each key or subject")
    ] = None
    as_of: Annotated[Offset | None, Meta(description="of a view: the Natslog-As-Of of its first response")] = None

    def __post_init__(self) -> None:
        if self.subject is not None:
            check_subject(self.subject, wildcards=True)
        require_columns("columns", self.columns or (), COLUMNS, "is an unknown column")
        if self.view is not None and self.wait_ms:
            raise InvalidRequest("a view is of what is committed now: wait_ms has no effect on it", parameter="wait_ms")


class TailOf(msgspec.Struct, frozen=True):
    """Which messages that are there, and that follow."""

    start: Annotated[Offset, Meta(description="first offset: at most the high watermark")]
    subject: Annotated[Subject | None, Meta(description="NATS wildcard")] = None
    columns: _Columns | None = None

    def __post_init__(self) -> None:
        if self.subject is not None:
            check_subject(self.subject, wildcards=True)
        require_columns("columns", self.columns or (), COLUMNS, "is an unknown column")


class SubjectsOf(msgspec.Struct, frozen=True):
    """Which subjects."""

    pattern: Annotated[Subject | None, Meta(description="NATS wildcard")] = None
    after: Annotated[str | None, Meta(description="the last subject of the page before")] = None
    limit: Annotated[
        int, Meta(ge=1, le=_MAX_SUBJECTS_OF_A_PAGE, description="of subjects in a page; default 1,000")
    ] = _SUBJECTS_OF_A_PAGE
    as_of: Annotated[Offset | None, Meta(description="that of the page before: the next page of the same result")] = (
        None
    )

    def __post_init__(self) -> None:
        if self.pattern is not None:
            check_subject(self.pattern, wildcards=True)
        if self.after is not None:
            check_subject(self.after, wildcards=False)


class SearchOf(Range, frozen=True, rename={"within_columns": "in"}):
    """What is searched for, where, and how much of it."""

    newest: Annotated[Positive | None, Meta(description="instead of start: begin at the newest so many messages")] = (
        None
    )
    subject: Annotated[Subject | None, Meta(description="NATS wildcard")] = None
    grep: Annotated[
        str | None,
        Meta(
            description="text that a message must contain",
            extra_json_schema={"minLength": 1, "maxLength": MOST_CHARS},
        ),
    ] = None
    regex: Annotated[bool | None, Meta(description="true: grep is a regular expression of RE2")] = None
    ignore_case: Annotated[bool | None, Meta(description="true: capital and small letters are the same")] = None
    within_columns: Annotated[
        Annotated[tuple[_SearchedColumn, ...], Meta(extra_json_schema={"uniqueItems": True})] | None,
        Meta(description="comma-separated columns to search; default value,key,headers"),
    ] = None
    limit: Annotated[int, Meta(ge=1, le=_MAX_FOUND_OF_A_PAGE, description="of messages in a page; default 100")] = (
        _FOUND_OF_A_PAGE
    )
    value_bytes: Annotated[int, Meta(ge=0, le=_MAX_PREVIEW_BYTES, description="of each value; default 4,096")] = (
        _PREVIEW_BYTES
    )
    max_bytes: Annotated[
        int, Meta(ge=1, le=_MAX_SEARCHED_BYTES, description="stored bytes to search; default 256 MiB")
    ] = _SEARCHED_BYTES
    max_ms: Annotated[int, Meta(ge=1, le=_MAX_SEARCHED_MS, description="time to search; default 2,000")] = _SEARCHED_MS

    def __post_init__(self) -> None:
        if self.newest is not None and self.start is not None:
            raise InvalidRequest("start and newest cannot be combined: give one of them", parameter="newest")
        if self.subject is not None:
            check_subject(self.subject, wildcards=True)
        how = {"regex": self.regex, "ignore_case": self.ignore_case, "in": self.within_columns}
        if self.grep is None and (used := [name for name, given in how.items() if given is not None]):
            raise InvalidRequest(f"{used[0]} has no effect without grep: give the text to search for", parameter="grep")
        if self.within_columns is not None:
            require_columns("in", self.within_columns or ("",), SEARCHED, "cannot be searched")


class OffsetsOf(msgspec.Struct, frozen=True):
    """Of which message: at a time, or on a subject."""

    timestamp: Annotated[str | None, Meta(description="ISO-8601 or epoch ms; this or subject")] = None
    subject: Annotated[Subject | None, Meta(description="without wildcards")] = None
    start: Annotated[Offset | None, Meta(description="with subject: the first offset that counts; default 0")] = None

    def __post_init__(self) -> None:
        has_start_only = self.start is not None and self.subject is None
        if (self.timestamp is None) == (self.subject is None) or has_start_only:
            raise InvalidRequest(
                "give a time, ?timestamp=2026-11-20T10:30:00Z or epoch milliseconds; or a subject, ?subject=orders.eu, "
                "and perhaps from which offset on, &start=5000"
            )
        if self.subject is not None:
            check_subject(self.subject, wildcards=False)


class LagOf(msgspec.Struct, frozen=True):
    """Of which position."""

    offset: Annotated[Bound | None, Meta(description="the next offset of the reader; or earliest, latest")] = None
    cursor: Annotated[
        CursorText | None, Meta(description="instead of offset: the position of this consumer's cursor")
    ] = None

    def __post_init__(self) -> None:
        if (self.offset is None) == (self.cursor is None):
            raise InvalidRequest("give a position: ?offset=42 or ?cursor=CONSUMER")


class SplitsOf(Range, frozen=True):
    """A range, and how it is divided."""

    max_bytes: Annotated[Positive | None, Meta(description="per split")] = None
    max_rows: Annotated[Positive | None, Meta(description="per split")] = None
    min_splits: Annotated[int, Meta(ge=1, le=MAX_SPLITS, description="minimum number of splits")] = 1
    read_from: Annotated[ReadFrom, Meta(description="the order of each split's urls")] = "nearest"
    rack: Annotated[str | None, Meta(description="rack of the client")] = None


class ExtentOf(Range, frozen=True):
    """A range, and how large it may be."""

    max_bytes: Annotated[Positive | None, Meta(description="limit on the size")] = None
