"""Copies a stream into a table until it is stopped, or up to the present end: `natslog table run`.

Theory of operation. A thread reads the stream ahead, at most a few responses. The main one gathers what was read; when
it is enough (`commit_bytes`) or old enough (`commit_every_s`), it becomes rows, which one commit adds to the table
together with the offset behind them. A process that starts reads that offset from the table: there is no other state.

Exactly once. Rows and offset are one commit, and a commit is made only on top of the position that this process has
read; if another process has committed meanwhile, this one ends (`TableConflict`). Where the outcome of a commit is
unknown, the table's position tells.

A process of which no message fits ends with an error, with the dead letters committed: after `_MOST_WITHOUT_ROW`, or at
its end if the table has no rows (with `merge` they may have been deleted: it goes on). So the mistake is seen at once,
and a start after it continues behind them.

Dead letters are a table of their own with a position of its own, and are committed first. A process that finds it ahead
(the one before was killed between the two commits) commits up to there, and adds only what is not there.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.client import NatslogClient
from natslog.client.consuming import ConsumedBatch
from natslog.client.lineage import lineage_in
from natslog.errors import (
    ConfigError,
    MalformedPayload,
    NatslogError,
    StreamRecreated,
    TableFailed,
)
from natslog.log_events import event
from natslog.tables.beginning import check_start, first_position, start_offset
from natslog.tables.committing import DeadLetters, Retrying, commit
from natslog.tables.options import TableOptions
from natslog.tables.read_ahead import Gathered, Reader
from natslog.tables.rows import RowMaker, Rows, check_partitions, first_schema, newest_by_key
from natslog.tables.table import Position, Table, Target

logger = logging.getLogger("natslog.tables")

_MOST_WITHOUT_ROW = 1_000  # messages of which none fits


@dataclass(frozen=True, slots=True)
class Committed:
    """One commit.

    Attributes:
        rows: that were added (with `merge`: written or deleted). start, end: the offsets that it covers, `[start,
            end)`. behind: messages of the stream that are not in the table, when the last of these was read.
    """

    stream: str
    table: str
    rows: int
    dead_letters: int
    start: int
    end: int
    behind: int
    took_s: float
    removed_files: int = 0
    added_files: int = 0


def copy_stream(
    client: NatslogClient,
    stream: str,
    target: Target,
    options: TableOptions,
    *,
    report: Callable[[Committed], None],
    stopping: threading.Event,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Copies until `stopping` is set (what was read is committed then), or with `follow=False` up to the present end.

    Args:
        report: called after each commit. started: called when the table and the stream are found.

    Raises:
        ConfigError: an option is wrong, or the table belongs to another stream. StreamNotFound, StreamRecreated.
        DataLoss: messages behind the table's position were removed. MalformedPayload: with `on_misfit="fail"`.
        TableConflict, TableFailed, BrokerUnavailable.
    """
    info = client.position(stream)
    columns = first_schema(options)
    existing = target.existing()
    if existing is None:
        check_partitions(options, columns)
        check_start(start_offset(client, stream, options.start, info), stream, info)
    table = existing or target.open(columns, tuple(options.partition_by))
    stored = table.reload()
    if stored is None and existing is not None and "_offset" in table.schema.names and table.row_count():
        raise ConfigError(
            f"table {target.name} has rows of a stream and states no position, so natslog table run did not write it: "
            "use another table"
        )
    position = first_position(client, stream, options, stored, info, target.name)
    if options.partition_by and table.partitions != tuple(options.partition_by):
        raise ConfigError(
            f"table {target.name} is partitioned by {', '.join(table.partitions) or 'nothing'}, which --partition-by "
            f"cannot change: leave it out, or use another table"
        )
    dead_letters = DeadLetters(target, {position.stream_id, *lineage_in(info)}, position.stream)
    copying = _Copying(client, table, options, position, dead_letters, report, stopping)
    started()
    copying.run()


class _Copying:
    """One table and its stream."""

    def __init__(
        self,
        client: NatslogClient,
        table: Table,
        options: TableOptions,
        position: Position,
        dead_letters: DeadLetters,
        report: Callable[[Committed], None],
        stopping: threading.Event,
    ) -> None:
        self._client, self._table, self._options = client, table, options
        self._position, self._dead_letters, self._report, self._stopping = position, dead_letters, report, stopping
        self._retrying = Retrying(options.patience_s, stopping)
        self._stored = table.reload()
        self._rows = self._row_maker()
        self._commits = self._written = self._refused = 0
        self._first_refused: pa.Table | None = None
        self._is_new = self._stored is None
        if self._stored is None:  # a process that is killed before its first commit begins here again
            self._write(first_schema(options).empty_table(), MESSAGE_SCHEMA.empty_table(), position)

    def _row_maker(self) -> RowMaker:
        self._schema = self._table.schema
        return RowMaker(self._options, self._schema, self._table.partitions, has_dots=self._table.has_dots)

    def run(self) -> None:
        options, stopping = self._options, self._stopping
        consumer = self._client.consume(
            self._position.stream,
            start="earliest" if self._is_new and options.start == "earliest" else self._position.offset,
            follow=options.follow,
            on_data_loss=options.on_data_loss,
            subject=options.subject,
            patience_s=options.patience_s,
        )
        reader = Reader(consumer)
        try:
            gathered = Gathered(self._position.offset)
            while True:
                passed = consumer.processed  # all below it are in the queue by now, or left out by the filter
                try:
                    batch = reader.next(self._wait_s(gathered), stopping)
                    if batch is not None:
                        self._check(batch)
                except NatslogError:
                    if gathered.messages:  # the stream may not have them any more
                        self._commit(gathered)
                    raise
                if batch is not None:
                    gathered.add(batch)
                elif not stopping.is_set():
                    gathered.pass_over(passed if not reader.is_over else consumer.position)
                is_last = batch is None and (reader.is_over or stopping.is_set())
                if gathered.end > self._position.offset and (is_last or self._is_due(gathered)):
                    gathered = self._commit(gathered)
                elif is_last:
                    if not stopping.is_set() and self._refused and not self._written:
                        had_rows = self._options.merge or self._retrying.call(self._table, self._table.row_count) > 0
                        self._check_fit(_MOST_WITHOUT_ROW if had_rows else 1)
                    return
        finally:
            reader.close()

    def _check(self, batch: ConsumedBatch) -> None:
        if batch.stream_id != self._position.stream_id:
            raise StreamRecreated(
                f"stream {batch.stream!r} was created again or restored while it was copied (its id is "
                f"{batch.stream_id}): start the command again",
                stream=batch.stream,
                id=batch.stream_id,
            )

    # ---- when ----

    def _wait_s(self, gathered: Gathered) -> float:
        if gathered.since_s == math.inf:
            return self._options.commit_every_s
        return max(0.0, gathered.since_s + self._options.commit_every_s - time.monotonic())

    def _is_due(self, gathered: Gathered) -> bool:
        edge = self._dead_letters.offset
        if self._position.offset < edge <= gathered.end:  # the same range again
            return True
        return gathered.bytes >= self._options.commit_bytes or self._wait_s(gathered) == 0

    # ---- a commit ----

    def _commit(self, gathered: Gathered) -> Gathered:
        """What is left to commit."""
        started_s, start = time.monotonic(), self._position.offset
        edge = self._dead_letters.offset
        end = edge if start < edge < gathered.end else gathered.end
        messages, rest = gathered.cut(end)
        self._retrying.call(self._table, self._table.reload)
        if self._table.schema != self._schema:  # this process has added columns, or another one
            self._rows = self._row_maker()
        made = self._rows.make(messages, self._position.watermark_us)
        if made.dead_letters.num_rows and self._options.on_misfit == "fail":
            raise _malformed(self._position.stream, made.dead_letters)
        position = self._after(made, end)
        refused = self._dead_letters.commit(made.dead_letters, self._position.offset, position, self._retrying)
        written = self._write(made.table, messages, position)
        self._position = position
        self._written, self._refused = self._written + written, self._refused + made.dead_letters.num_rows
        if self._first_refused is None and made.dead_letters.num_rows:
            self._first_refused = made.dead_letters.slice(0, 1)
        compacted = self._compact()
        self._set_cursor()
        self._report(
            Committed(
                position.stream,
                self._table.name,
                written,
                refused,
                start,
                end,
                max(0, gathered.high_watermark - end),
                time.monotonic() - started_s,
                *compacted,
            )
        )
        self._check_fit(_MOST_WITHOUT_ROW)
        return rest

    def _check_fit(self, limit: int) -> None:
        """Raises MalformedPayload: so many messages were read, and none of them is a row."""
        if self._written or self._refused < limit or self._first_refused is None:
            return
        stream, first = self._position.stream, self._first_refused.to_pylist()[0]
        raise MalformedPayload(
            f"stream {stream!r}: none of {self._refused} messages fits table {self._table.name}; the first of them, at "
            f"offset {first['_offset']}, does not because: {first['reason']}. They are in table "
            f"{self._dead_letters.name}. If columns have the wrong types, delete both tables, and start again with "
            "others (--column NAME=TYPE); otherwise the same command continues behind these messages",
            stream=stream,
            offset=first["_offset"],
        )

    def _after(self, made: Rows, end: int) -> Position:
        known = [one for one in (self._position.watermark_us, made.newest_us) if one is not None]
        return replace(self._position, offset=end, watermark_us=max(known, default=None))

    def _write(self, rows: pa.Table, messages: pa.Table, position: Position) -> int:
        """The number of rows that were written or deleted."""
        if not self._options.merge:
            append = partial(self._table.append, rows, position)
            self._stored = commit(self._table, self._stored, position, append, self._retrying)
            return int(rows.num_rows)
        kept, removed = newest_by_key(rows, messages)
        merge = partial(self._table.merge, kept, removed, "_key", position)
        self._stored = commit(self._table, self._stored, position, merge, self._retrying)
        return int(kept.num_rows + removed.num_rows)

    def _compact(self) -> tuple[int, int]:
        """Files before and after. A compaction that fails is repeated after as many commits again."""
        self._commits += 1
        if not self._options.compact_every or self._commits % self._options.compact_every:
            return 0, 0
        try:
            self._table.reload()
            done = self._table.compact(self._options.file_bytes)
        except TableFailed as error:
            logger.warning(
                f"{error}; the table is not compacted now, and its rows are as they were",
                extra=event("table.not_compacted"),
            )
            return 0, 0
        return (0, 0) if done is None else (done.removed, done.added)

    def _set_cursor(self) -> None:
        if self._options.cursor is None:
            return
        position = self._position
        try:
            self._client.set_cursor(
                self._options.cursor, position.stream, position.offset, expected_id=position.stream_id
            )
        except NatslogError as error:
            if not error.retriable:
                raise
            logger.warning(
                f"cursor {self._options.cursor} was not set to {position.offset}: {error}",
                extra=event("cursor.not_set", cursor=self._options.cursor, offset=position.offset),
            )


def _malformed(stream: str, dead_letters: pa.Table) -> MalformedPayload:
    first = dead_letters.slice(0, 1).to_pylist()[0]
    return MalformedPayload(
        f"stream {stream!r}, offset {first['_offset']}: the message does not fit the table: {first['reason']}. "
        "--on-misfit dead-letter stores such messages in a table of their own",
        stream=stream,
        offset=first["_offset"],
    )
