"""The cursors that the stream `__cursors` holds: the newest row of each key counts. Pure.

Theory of operation. `Changes` is one group of calls: each call is checked against the table and the calls before it,
and is made as a whole or refused as a whole. Its rows are appended to the stream as one batch; when that is committed,
`CursorTable.adopt` makes them visible. A table is built again by adopting all rows of the stream in their order.

A row: its key is `consumer/stream`, its value the JSON of a `CursorRow`.

Invariant. The table has only what is committed. A cursor of a stream that was deleted, or created again, is not shown,
and its row is replaced by one without a cursor.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from natslog.cluster.commands import DropCursor, SetCursor
from natslog.cluster.cursors import CursorRecord, cursor_key, moved, of_present_stream
from natslog.cluster.metadata import Metadata
from natslog.cluster.storage_quotas import require_cursor
from natslog.errors import CursorNotFound, NatslogError, TooManyCursors
from natslog.security.records import Quota, quota_of

STREAM = "__cursors"
SUBJECT = "cursors.>"
ROW_SUBJECT = "cursors.changed"
MOST_CURSORS = 10_000
"""In a cluster."""
_REQUESTS_KEPT = 10_000

Change: TypeAlias = SetCursor | DropCursor


class CursorRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of a row. `cursor`: None: it was deleted. `request`: the id of the request; "": none."""

    cursor: CursorRecord | None = None
    request: str = ""


Row: TypeAlias = tuple[str, CursorRow]
"""Key and value."""


class CursorTable:
    """Attributes: `cursors`: by `cursor_key`. `rows`: how many were adopted since the table was last written whole."""

    def __init__(self) -> None:
        self.cursors: dict[str, CursorRecord] = {}
        self.rows = 0
        self._requests: OrderedDict[str, None] = OrderedDict()

    def adopt(self, rows: Iterable[Row]) -> None:
        """Rows that are committed, in their order."""
        for key, row in rows:
            self.rows += 1
            if row.cursor is None:
                self.cursors.pop(key, None)
            else:
                self.cursors[key] = row.cursor
            if row.request:
                self._requests[row.request] = None
                if len(self._requests) > _REQUESTS_KEPT:
                    self._requests.popitem(last=False)

    def was_made(self, request: str) -> bool:
        """Whether the changes of this request were made lately."""
        return bool(request) and request in self._requests

    def shown(self, state: Metadata, *, consumer: str | None = None, stream: str | None = None) -> list[CursorRecord]:
        """The cursors on streams that exist, by key."""
        if consumer is not None and stream is not None:
            cursor = self.cursors.get(cursor_key(consumer, stream))
            return [cursor] if cursor is not None and _exists(state, cursor) else []
        return [
            cursor
            for _, cursor in sorted(self.cursors.items())
            if (consumer is None or cursor.consumer == consumer)
            and (stream is None or cursor.stream == stream)
            and _exists(state, cursor)
        ]

    def stale(self, state: Metadata) -> list[Row]:
        """Rows that delete the cursors of streams that are gone."""
        return [(key, CursorRow()) for key, cursor in self.cursors.items() if not _exists(state, cursor)]

    def whole(self) -> list[Row]:
        """Rows that hold the whole table: all earlier ones may be removed once these are committed."""
        return [(key, CursorRow(cursor=cursor)) for key, cursor in self.cursors.items()]


def _exists(state: Metadata, cursor: CursorRecord) -> bool:
    record = state.streams.get(cursor.stream)
    return record is not None and record.id == cursor.stream_id


class Changes:
    """A group of calls on a table. `rows`: what is to be appended for those that were not refused."""

    def __init__(self, table: CursorTable, state: Metadata) -> None:
        self._table, self._state = table, state
        self._pending: dict[str, CursorRecord | None] = {}
        self._count = len(table.cursors)
        self._owned: Counter[str] | None = None  # cursors of each owner, where a quota needs them
        self._made: set[str] = set()
        self.rows: list[Row] = []

    def add(self, changes: Sequence[Change], request: str) -> list[CursorRecord | None]:
        """Adds one call. Returns each cursor as it is afterwards.

        Args:
            request: its id. Repeated, it changes nothing.

        Raises:
            StreamNotFound, StreamRecreated, CursorNotFound, TooManyCursors, StorageQuotaExceeded: the whole call is
                refused.
        """
        if self._table.was_made(request) or (request and request in self._made):
            return [self._known(cursor_key(one.consumer, one.stream)) for one in changes]
        before = dict(self._pending), self._count
        try:
            found = [self._changed(change) for change in changes]
        except NatslogError:
            self._pending, self._count = before
            self._owned = None
            raise
        keys = [cursor_key(one.consumer, one.stream) for one in changes]
        self.rows += [(key, CursorRow(cursor=one, request=request)) for key, one in zip(keys, found, strict=True)]
        self._made.add(request)
        return found

    def _known(self, key: str) -> CursorRecord | None:
        found = self._raw(key)
        return found if found is not None and _exists(self._state, found) else None

    def _changed(self, change: Change) -> CursorRecord | None:
        record, key = self._state.stream(change.stream), cursor_key(change.consumer, change.stream)
        known = self._known(key)
        if isinstance(change, DropCursor):
            if known is None:
                raise not_found(change.consumer, change.stream)
            self._replace(key, None)
            return None
        change = of_present_stream(change, record)
        if known is None:
            self._require_room(change)
        after = moved(known, change)
        self._replace(key, after)
        return after

    def _raw(self, key: str) -> CursorRecord | None:
        """Also one of a stream that is gone."""
        return self._pending[key] if key in self._pending else self._table.cursors.get(key)

    def _replace(self, key: str, cursor: CursorRecord | None) -> None:
        former = self._raw(key)
        self._pending[key] = cursor
        self._count += (cursor is not None) - (former is not None)
        if self._owned is not None:
            self._owned.update(one.owner for one in (cursor,) if one is not None)
            self._owned.subtract(one.owner for one in (former,) if one is not None)

    def _require_room(self, change: SetCursor) -> None:
        """Raises TooManyCursors, StorageQuotaExceeded."""
        if self._count >= MOST_CURSORS:
            raise TooManyCursors(
                f"there are {MOST_CURSORS} cursors already, and no more are kept: natslog cursor ls shows those that "
                "have not been moved for a long time, natslog cursor rm removes one",
                limit=MOST_CURSORS,
            )
        security = self._state.security
        quota = Quota() if security is None or not change.owner else quota_of(security, change.owner)
        if quota.cursors is not None:
            require_cursor(quota, change.owner, self._owned_by(change.owner))

    def _owned_by(self, owner: str) -> int:
        if self._owned is None:
            keys = {*self._table.cursors, *self._pending}
            self._owned = Counter(one.owner for key in keys if (one := self._raw(key)) is not None)
        return self._owned[owner]


def not_found(consumer: str, stream: str) -> CursorNotFound:
    return CursorNotFound(f"consumer {consumer!r} has no cursor on stream {stream!r}", consumer=consumer, stream=stream)
