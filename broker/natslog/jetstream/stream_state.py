"""The state of a stream in the JetStream API: counts, sequences and times of its visible messages.

A sequence is an offset plus one. Of a stream without messages `first_seq` is the next sequence, or 0 if the stream has
never had a message. Source: nats-server, `FastState` in `server/filestore.go`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET, UnsetType

from natslog.arrow.covered import covered
from natslog.errors import OffsetOutOfRange
from natslog.log import StreamLog

NO_TIME = "0001-01-01T00:00:00Z"
MAX_SUBJECT_DETAILS = 100_000
_DETAIL_BYTES = len('"":,') + 19


class StreamState(msgspec.Struct, kw_only=True):
    """As the API has it. `bytes`: see `log.message_bytes`."""

    messages: int
    bytes: int
    first_seq: int
    first_ts: str
    last_seq: int
    last_ts: str
    num_subjects: int | UnsetType = UNSET
    subjects: dict[str, int] | UnsetType = UNSET
    num_deleted: int | UnsetType = UNSET
    deleted: list[int] | UnsetType = UNSET
    consumer_count: int = 0


def time_of(timestamp_us: int) -> str:
    """RFC 3339 as Go writes it: without zeros at the end of the fraction."""
    moment = datetime.fromtimestamp(timestamp_us // 1_000_000, UTC)
    fraction = f".{timestamp_us % 1_000_000:06d}".rstrip("0").rstrip(".")
    return f"{moment.year:04d}-{moment:%m-%dT%H:%M:%S}{fraction}Z"


def state_of(log: StreamLog, *, deleted: bool = False) -> StreamState:
    """Reads the log; for a reader's thread.

    Raises:
        CorruptLog: a part of the log is damaged.
    """
    view, subjects = log.subjects.number()
    start, end, hidden = view.start, view.end, view.hidden
    first = hidden.next_visible(start, end)
    messages = end - first - hidden.count(first, end)
    last_us = _last_us(log, end)
    state = StreamState(
        messages=messages,
        bytes=log.message_bytes.total(first, end),
        first_seq=first + 1 if messages or end else 0,
        first_ts=_first_time(log, first, end) if messages else NO_TIME,
        last_seq=end,
        last_ts=time_of(last_us) if last_us else NO_TIME,
    )
    if subjects:
        state.num_subjects = subjects
    if messages and (gone := hidden.count(first, end)):
        state.num_deleted = gone
        if deleted:
            state.deleted = (hidden.offsets_within(first, end) + 1).tolist()
    return state


class SubjectsPage(NamedTuple):
    """How many messages each subject has; None if the page is empty. `total`: of all pages. `limit`: of each."""

    counts: dict[str, int] | None
    total: int
    limit: int


def subjects_of(log: StreamLog, pattern: str, offset: int, most_bytes: int) -> SubjectsPage:
    """The subjects that `pattern` covers, from `offset` on in the order of the alphabet. A page has as many as fit into
    an answer if all are as long as the longest one, so that all pages have the same size: clients multiply by it.
    Raises CorruptLog.
    """
    _, counts = log.subjects.counts()
    table = counts.table
    if pattern != ">":
        table = table.filter(covered(table.column("subject"), (pattern,)))
    if not len(table):
        return SubjectsPage(None, 0, 0)
    longest = pc.max(pc.binary_length(table.column("subject"))).as_py() + _DETAIL_BYTES
    limit = max(1, most_bytes // longest)
    if len(table) <= limit or limit > MAX_SUBJECT_DETAILS:
        limit = MAX_SUBJECT_DETAILS  # as the server states it
    page: pa.Table = table.slice(min(offset, len(table)), limit)
    found = dict(zip(page.column("subject").to_pylist(), page.column("count").to_pylist(), strict=True))
    return SubjectsPage(found or None, len(table), limit)


def _first_time(log: StreamLog, first: int, end: int) -> str:
    """When the first message was stored; if it was removed meanwhile, that which is the first now."""
    first = max(first, log.first_readable_offset)
    while first < end:
        try:
            found = log.reader.time_us_of(first)
        except OffsetOutOfRange:
            found = None
        if found is not None:
            return time_of(found)
        if log.first_readable_offset <= first:
            break
        first = log.first_readable_offset
    return NO_TIME


def _last_us(log: StreamLog, end: int) -> int:
    """When the newest message was stored, also if it is deleted; 0 if there was none."""
    if log.log_end_offset == end:
        return max(0, log.newest_timestamp_us)
    found = log.reader.time_us_of(end - 1)
    return max(0, log.newest_timestamp_us) if found is None else found
