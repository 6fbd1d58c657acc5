"""Commits to the table of rows and to that of dead letters, each made once, also where its outcome is unknown."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from natslog.errors import ConfigError, TableConflict, TableFailed
from natslog.log_events import event
from natslog.tables.rows import DEAD_LETTER_SCHEMA
from natslog.tables.table import Position, Table, Target

logger = logging.getLogger("natslog.tables")

Result = TypeVar("Result")

_RETRY_S = 1.0
DEAD_LETTERS = "_dead_letters"


class Retrying:
    """Repeats what failed in the storage of a table, for a time, until the process is to stop."""

    def __init__(self, patience_s: float, stopping: threading.Event) -> None:
        self._patience_s, self._stopping = patience_s, stopping

    def call(self, table: Table, work: Callable[[], Result]) -> Result:
        """Raises TableFailed: for `patience_s`, or when the process is to stop."""
        until_s, is_first = time.monotonic() + self._patience_s, True
        while True:
            try:
                return work()
            except TableFailed as error:
                if time.monotonic() >= until_s or self._stopping.is_set():
                    raise
                if is_first:
                    logger.warning(
                        f"{error}; it is repeated for {self._patience_s:.0f} s", extra=event("client.request_repeated")
                    )
                is_first = False
            time.sleep(_RETRY_S)


def commit(
    table: Table, expected: Position | None, position: Position, write: Callable[[], None], retrying: Retrying
) -> Position:
    """Executes `write`, again if it fails, until the table has the position.

    Args:
        expected: what the table states before; if it states something else, another process writes to it.

    Raises:
        TableConflict. TableFailed.
    """

    def attempt() -> Position:
        found = table.reload()
        if _offset(found) != position.offset:
            if _offset(found) != _offset(expected):
                raise TableConflict(
                    f"table {table.name} was at offset {_offset(expected)} of the stream, and is now at "
                    f"{_offset(found)}: another process writes to it. Nothing was added twice; run one process for a "
                    "table",
                    table=table.name,
                )
            write()
            found = table.reload()
        if found is None or found.offset != position.offset:
            raise TableFailed(f"table {table.name} has not taken the commit up to offset {position.offset}")
        return found

    return retrying.call(table, attempt)


def _offset(position: Position | None) -> int | None:
    return None if position is None else position.offset


class DeadLetters:
    """The table of messages that do not fit, which is created with the first of them.

    Args:
        ids: of the stream, and of those that it was restored from.
    """

    def __init__(self, target: Target, ids: set[str], stream: str) -> None:
        self._target = target.beside(DEAD_LETTERS)
        self._table = self._target.existing()
        self._stored = None if self._table is None else self._table.reload()
        if self._stored is not None and (self._stored.stream != stream or self._stored.stream_id not in ids):
            raise ConfigError(
                f"table {self._target.name} has dead letters of stream {self._stored.stream!r} with the id "
                f"{self._stored.stream_id}, and not of {stream!r} as it is now: move or delete that table, or use "
                "another target"
            )

    @property
    def name(self) -> str:
        return self._target.name

    @property
    def offset(self) -> int:
        return 0 if self._stored is None else self._stored.offset

    def commit(self, rows: pa.Table, start: int, position: Position, retrying: Retrying) -> int:
        """Adds those of the range `[start, position.offset)` that are not there; their number."""
        if not rows.num_rows:
            return 0
        if self._table is None:
            self._table = self._target.open(DEAD_LETTER_SCHEMA, ())
            self._stored = self._table.reload()
        table, position = self._table, replace(position, watermark_us=None)
        if self.offset > start:
            return retrying.call(table, lambda: self._add_missing(table, rows, start, position))
        self._stored = commit(table, self._stored, position, partial(table.append, rows, position), retrying)
        return int(rows.num_rows)

    def _add_missing(self, table: Table, rows: pa.Table, start: int, position: Position) -> int:
        """Of a range that was taken before: nearly always all of them are there."""
        table.reload()
        there = pa.array(sorted(table.offsets(start, position.offset)), pa.int64())
        rows = rows.filter(pc.invert(pc.is_in(rows.column("_offset"), value_set=there)))
        end = replace(position, offset=max(position.offset, self.offset))
        if rows.num_rows:
            table.append(rows, end)
        self._stored = end
        return int(rows.num_rows)
