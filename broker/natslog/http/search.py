"""`GET /v1/streams/{name}/search`: messages of a range that contain a text, a page at a time, and previews of them.

Theory of operation. The stored batches are decoded and searched in a reader's thread, a few MiB at a time, until the
page is full, the range ends, or the budget of bytes or of time is used: then the response states how far it is, and a
further request goes on from there. Each step takes a slot (`Answers.slot`), as what is made in memory for others does:
they have their turn between two steps, and a search ends with the step in which its client leaves.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET, UnsetType

from natslog.arrow import ipc
from natslog.arrow.covered import covered
from natslog.arrow.searching import USUALLY_SEARCHED, Pattern
from natslog.errors import InvalidRequest, OffsetOutOfRange
from natslog.http.access import LIMITS, limits_of, require_still, rights_of
from natslog.http.context import (
    ANSWERS,
    OWNER,
    confirmed_out_of_range,
    leading,
    stated,
)
from natslog.http.endpoint import Call
from natslog.http.shapes import reading as shapes
from natslog.http.shapes.common import Answer
from natslog.http.shapes.reading import SearchOf
from natslog.log import ReadPlan, StreamLog
from natslog.node.threads import in_thread
from natslog.security.decisions import Patterns
from natslog.times import format_timestamp_us

_STEP_BYTES = 4 * 1024 * 1024
_SLICE_BYTES = 512 * 1024
_MOST_PAGE_BYTES = 16 * 1024 * 1024
"""Of the previews in one response."""
_USUAL_BYTES = 200  # of a message in JSON, besides its value


@dataclass(frozen=True, slots=True)
class _Search:
    """One page of a search: of `[start, end)`, on `subjects` (lists of wildcards, one of each must cover)."""

    start: int
    end: int
    pattern: Pattern | None
    subjects: tuple[Patterns, ...]
    limit: int
    value_bytes: int
    max_bytes: int
    max_ms: int


async def search(call: Call[SearchOf, None]) -> Answer[shapes.Found]:
    """Messages with a text in them, or all messages of a range, a page at a time, with the first bytes of their values.
    The page ends when it is full, or the budget of bytes or time is used
    """
    request, given = call.request, call.parameters
    stream = await leading(request)
    log, allowed = stream.usable_log(), limits_of(request, "read", stream.record)
    start, end = given.within(log)
    asked = _Search(
        start=start,
        end=end,
        pattern=_pattern(given),
        subjects=tuple(one for one in ((given.subject,) if given.subject else None, allowed) if one),
        limit=given.limit,
        value_bytes=given.value_bytes,
        max_bytes=given.max_bytes,
        max_ms=given.max_ms,
    )
    if given.end is not None and start > end:
        raise InvalidRequest(f"start {start} is beyond end {end}", start=start, end=end)
    page = _Page(log, asked, given.newest)
    owner = request[OWNER] or request.remote or ""
    try:
        while not page.is_done:
            async with request.app[ANSWERS].slot(owner) as threads:
                await in_thread(threads, page.step)
    except OffsetOutOfRange as error:
        raise await confirmed_out_of_range(request, stream, error) from error
    finally:
        page.is_wanted = False
    require_still(request)
    found = page.shown()
    if allowed is not None:
        found.rows_searched = found.bytes_searched = UNSET  # they would include messages of others
    limits, rights = request.app[LIMITS], rights_of(request)
    response = stated(request, stream, found)
    limits.charge(rights, len(response.body) if isinstance(response.body, bytes) else 0)
    await limits.sent(rights)
    return response


def _pattern(given: SearchOf) -> Pattern | None:
    """Raises InvalidRequest."""
    if given.grep is None:
        return None
    columns = given.within_columns or USUALLY_SEARCHED
    pattern = Pattern(given.grep, bool(given.regex), bool(given.ignore_case), columns)
    pattern.check()
    return pattern


# ---- in a thread ----


class _Page:
    """As it fills, step by step. Args: `newest`: begin at the newest so many messages, instead of at the start."""

    def __init__(self, log: StreamLog, asked: _Search, newest: int | None) -> None:
        self._log, self._asked, self._newest = log, asked, newest
        self._high_watermark = log.high_watermark
        self._end = min(asked.end, self._high_watermark)
        self._at: int | None = None  # not yet begun
        self._until_s = time.monotonic() + asked.max_ms / 1000
        self._room_bytes = _MOST_PAGE_BYTES
        self.is_wanted = True  # set to False by the event loop when the request has ended
        self._messages: list[shapes.FoundMessage] = []
        self._bytes_searched = self._rows_searched = 0

    @property
    def is_done(self) -> bool:
        if self._at is None:
            return False
        if self._at >= self._end or self._is_full:
            return True
        return self._bytes_searched > 0 and (self._bytes_searched >= self._asked.max_bytes or self._is_late)

    @property
    def _is_late(self) -> bool:
        return not self.is_wanted or time.monotonic() >= self._until_s

    @property
    def _is_full(self) -> bool:
        return len(self._messages) >= self._asked.limit or self._room_bytes <= 0

    def step(self) -> None:
        """Raises OffsetOutOfRange, CorruptLog, OSError."""
        reader = self._log.reader
        if self._at is None:
            self._at = self._asked.start if self._newest is None else reader.start_of_newest(self._newest)
            reader.plan_read(self._at, max_bytes=1).close()  # raises where the start is not in the log
        if not self.is_done:
            with reader.plan_read(self._at, self._end, max_bytes=min(_STEP_BYTES, self._asked.max_bytes)) as plan:
                self._at = self._take(plan)

    def _take(self, plan: ReadPlan) -> int:
        """The messages of the plan that match, as far as there is room and time; the offset where to go on."""
        self._bytes_searched += plan.length
        for header, batch in plan.rows():
            rows = ipc.rows_within(header, batch, plan.start, plan.next_offset)
            for stored in _slices(batch.slice(rows.start, rows.stop - rows.start)):
                if self._rows_searched and self._is_late:  # at least one slice, or a search would not go on
                    return int(stored.column("offset")[0].as_py())
                self._rows_searched += stored.num_rows
                for found in _previews(_matching(stored, self._asked), self._asked.value_bytes):
                    if self._is_full:
                        return found.offset
                    self._messages.append(found)
                    self._room_bytes -= _size(found)
        return plan.next_offset

    def shown(self) -> shapes.Found:
        assert self._at is not None, "it has begun"
        return shapes.Found(
            messages=self._messages,
            next_offset=self._at,
            high_watermark=self._high_watermark,
            is_complete=self._at >= self._end,
            bytes_searched=self._bytes_searched,
            rows_searched=self._rows_searched,
        )


def _matching(messages: pa.RecordBatch, asked: _Search) -> pa.RecordBatch:
    for patterns in asked.subjects:
        messages = messages.filter(covered(messages.column("subject"), patterns))
    return messages if asked.pattern is None else messages.filter(asked.pattern.rows(messages))


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Rows of about `_SLICE_BYTES`, at least one: what is searched without a look at the clock."""
    rows = max(1, batch.num_rows * _SLICE_BYTES // max(1, batch.get_total_buffer_size()))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _size(found: shapes.FoundMessage) -> int:
    """About, as JSON."""
    texts = [found.value, found.value_base64, found.key, found.key_base64]
    in_headers = sum(len(one.key) + len(one.value) for one in found.headers)
    return _USUAL_BYTES + in_headers + sum(len(one) for one in texts if isinstance(one, str))


def _previews(messages: pa.RecordBatch, value_bytes: int) -> Iterator[shapes.FoundMessage]:
    values = messages.column("value")
    sizes = pc.binary_length(values).to_pylist()
    shown = messages.set_column(
        messages.schema.get_field_index("value"), "value", pc.binary_slice(values, 0, value_bytes)
    )
    timestamps = shown.column("timestamp").cast(pa.int64()).to_pylist()
    for row, size, timestamp in zip(shown.drop_columns("timestamp").to_pylist(), sizes, timestamps, strict=True):
        value, value_base64 = _text(row["value"], is_cut=size > value_bytes)
        key, key_base64 = (None, UNSET) if row["key"] is None else _text(row["key"])
        yield shapes.FoundMessage(
            offset=row["offset"],
            timestamp=format_timestamp_us(timestamp),
            subject=row["subject"],
            key=key,
            key_base64=key_base64,
            headers=[shapes.Header(one["key"], one["value"]) for one in row["headers"] or ()],
            value=value,
            value_base64=value_base64,
            value_bytes=size,
            is_cut=size > value_bytes,
        )


def _text(data: bytes, *, is_cut: bool = False) -> tuple[str | UnsetType, str | UnsetType]:
    """As text, or in base64 if it is not UTF-8. Of bytes that were cut, the last character may be incomplete."""
    try:
        return data.decode(), UNSET
    except UnicodeDecodeError as error:
        if is_cut and error.reason == "unexpected end of data":
            return data[: error.start].decode(), UNSET
        return UNSET, base64.b64encode(data).decode()
