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

import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.client import NatslogClient
from natslog.client.consuming import ConsumedBatch, Consumer
from natslog.client.lineage import lineage_in
from natslog.errors import (
    ConfigError,
    DataLoss,
    InvalidRequest,
    MalformedPayload,
    NatslogError,
    StreamRecreated,
    TableConflict,
    TableFailed,
)
from natslog.log_events import event
from natslog.model import beyond_fork
from natslog.tables.options import TableOptions
from natslog.tables.rows import DEAD_LETTER_SCHEMA, RowMaker, Rows, check_partitions, first_schema, newest_by_key
from natslog.tables.table import Position, Table, Target
from natslog.units import offsets_between

logger = logging.getLogger("natslog.tables")

Result = TypeVar("Result")

_READ_AHEAD = 2
_RETRY_S = 1.0
_POLL_S = 0.2
_MOST_WITHOUT_ROW = 1_000  # messages of which none fits
DEAD_LETTERS = "_dead_letters"


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
        _check_start(_start(client, stream, options.start, info), stream, info)
    table = existing or target.open(columns, tuple(options.partition_by))
    stored = table.reload()
    if stored is None and existing is not None and "_offset" in table.schema.names and table.row_count():
        raise ConfigError(
            f"table {target.name} has rows of a stream and states no position, so natslog table run did not write it: "
            "use another table"
        )
    position = _first_position(client, stream, options, stored, info, target.name)
    if options.partition_by and table.partitions != tuple(options.partition_by):
        raise ConfigError(
            f"table {target.name} is partitioned by {', '.join(table.partitions) or 'nothing'}, which --partition-by "
            f"cannot change: leave it out, or use another table"
        )
    dead_letters = _DeadLetters(target, {position.stream_id, *lineage_in(info)}, position.stream)
    copying = _Copying(client, table, options, position, dead_letters, report, stopping)
    started()
    copying.run()


def _check_start(start: int, stream: str, info: dict[str, object]) -> None:
    low, high = int(str(info["log_start_offset"])), int(str(info["high_watermark"]))
    if not low <= start <= high:
        raise InvalidRequest(
            f"--from: stream {stream!r} has {offsets_between(low, high)}, and {start} is not one of them: give another "
            "one, a time, earliest or latest"
        )


def _first_position(
    client: NatslogClient,
    stream: str,
    options: TableOptions,
    stored: Position | None,
    info: dict[str, object],
    name: str,
) -> Position:
    """Where the table begins or continues. Raises as `copy_stream`."""
    stream_id, log_start = str(info["id"]), int(str(info["log_start_offset"]))
    if stored is None:
        return Position(stream, stream_id, _start(client, stream, options.start, info), options=options.stated)
    if stored.stream != stream:
        raise ConfigError(
            f"table {name} has the messages of stream {stored.stream!r} up to offset {stored.offset}, and not those of "
            f"{stream!r}: use another table"
        )
    _check_options(options, stored, name)
    if stored.stream_id != stream_id:
        fork = lineage_in(info).get(stored.stream_id)
        if fork is None:
            raise StreamRecreated(
                f"stream {stream!r} was deleted and created again (its id is {stream_id}; table {name} has messages of "
                f"{stored.stream_id} up to offset {stored.offset}): use another table for the new stream",
                stream=stream,
                id=stream_id,
            )
        if stored.offset > fork:
            raise beyond_fork(stream, stored.stream_id, stream_id, stored.offset, fork)
    if stored.offset < log_start and options.on_data_loss == "fail":
        raise DataLoss(
            f"stream {stream!r}: {offsets_between(stored.offset, log_start)} were removed before they were copied to "
            f"table {name}: --on-data-loss skip continues at {log_start}; a longer retention (natslog stream edit "
            "--max-age) prevents further losses",
            stream=stream,
            start=stored.offset,
            end=log_start,
        )
    if stored.offset < log_start:
        logger.warning(
            "stream %s: %s are lost, and not in the table",
            stream,
            offsets_between(stored.offset, log_start),
            extra=event("table.offsets_lost", stream=stream, offset=stored.offset, end_offset=log_start),
        )
    offset = max(stored.offset, log_start)
    return replace(stored, stream_id=stream_id, offset=offset, options=options.stated)


def _check_options(options: TableOptions, stored: Position, name: str) -> None:
    """Raises ConfigError: with these options the table would lack messages, or have rows of another meaning."""
    if not stored.options:  # written by a former version, or by the Spark job
        return
    before, now = json.loads(stored.options), json.loads(options.stated)
    for option in sorted(before.keys() | now.keys()):
        if before.get(option) == now.get(option):
            continue
        was = f"with {option}" if option in before else f"without {option}"
        was += f" {before[option]}" if isinstance(before.get(option), str) else ""
        raise ConfigError(
            f"table {name} was written {was}: with another choice messages would be missing, or rows would have two "
            "meanings. Give the same option, or use another table"
        )


def _start(client: NatslogClient, stream: str, start: str, info: dict[str, object]) -> int:
    if start.isdecimal():
        return int(start)
    if start == "earliest":
        return int(str(info["log_start_offset"]))
    if start == "latest":
        return int(str(info["high_watermark"]))
    return client.offset_at(stream, start)[0]


class _Copying:
    """One table and its stream."""

    def __init__(
        self,
        client: NatslogClient,
        table: Table,
        options: TableOptions,
        position: Position,
        dead_letters: _DeadLetters,
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
        reader = _Reader(consumer)
        try:
            gathered = _Gathered(self._position.offset)
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

    def _wait_s(self, gathered: _Gathered) -> float:
        if gathered.since_s == math.inf:
            return self._options.commit_every_s
        return max(0.0, gathered.since_s + self._options.commit_every_s - time.monotonic())

    def _is_due(self, gathered: _Gathered) -> bool:
        edge = self._dead_letters.offset
        if self._position.offset < edge <= gathered.end:  # the same range again
            return True
        return gathered.bytes >= self._options.commit_bytes or self._wait_s(gathered) == 0

    # ---- a commit ----

    def _commit(self, gathered: _Gathered) -> _Gathered:
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
                "%s; the table is not compacted now, and its rows are as they were",
                error,
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
                "cursor %s was not set to %d: %s",
                self._options.cursor,
                position.offset,
                error,
                extra=event("cursor.not_set", cursor=self._options.cursor, offset=position.offset),
            )


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
                        "%s; it is repeated for %.0f s", error, self._patience_s, extra=event("client.request_repeated")
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


def _malformed(stream: str, dead_letters: pa.Table) -> MalformedPayload:
    first = dead_letters.slice(0, 1).to_pylist()[0]
    return MalformedPayload(
        f"stream {stream!r}, offset {first['_offset']}: the message does not fit the table: {first['reason']}. "
        "--on-misfit dead-letter stores such messages in a table of their own",
        stream=stream,
        offset=first["_offset"],
    )


class _DeadLetters:
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


# ---- reading ----


class _Gathered:
    """Messages that were read and not committed."""

    def __init__(self, start: int) -> None:
        self.messages: list[pa.RecordBatch] = []
        self.end, self.high_watermark = start, start
        self.bytes, self.since_s = 0, math.inf

    def add(self, batch: ConsumedBatch) -> None:
        if not self.messages:
            self.since_s = time.monotonic()
        self.messages.append(batch.record_batch)
        self.bytes += batch.record_batch.get_total_buffer_size()
        self.end, self.high_watermark = batch.next_offset, batch.high_watermark

    def pass_over(self, end: int) -> None:
        """There are no other messages below this offset that the filter has not left out."""
        if end > self.end:
            self.end, self.high_watermark = end, max(end, self.high_watermark)
            if self.since_s == math.inf:
                self.since_s = time.monotonic()

    def cut(self, end: int) -> tuple[pa.Table, _Gathered]:
        """(the messages below this offset, the others)."""
        whole = pa.Table.from_batches(self.messages, MESSAGE_SCHEMA)
        rest = _Gathered(end)
        if end >= self.end:
            return whole, rest
        below = int(pc.sum(pc.less(whole.column("offset"), end)).as_py() or 0)
        rest.messages = whole.slice(below).to_batches()
        rest.bytes = sum(one.nbytes for one in rest.messages)
        rest.end, rest.high_watermark, rest.since_s = self.end, self.high_watermark, self.since_s
        return whole.slice(0, below), rest


class _Reader:
    """Reads ahead in a thread."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._batches: queue.Queue[ConsumedBatch | BaseException | None] = queue.Queue(_READ_AHEAD)
        self._is_closed = threading.Event()
        self.is_over = False
        self._thread = threading.Thread(target=self._read, name="natslog-table-reader", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for batch in self._consumer:
                if not self._put(batch):
                    return
            self._put(None)
        except BaseException as error:  # the main thread raises it
            self._put(error)

    def _put(self, one: ConsumedBatch | BaseException | None) -> bool:
        while not self._is_closed.is_set():
            with suppress(queue.Full):
                self._batches.put(one, timeout=_POLL_S)
                return True
        return False

    def next(self, within_s: float, stopping: threading.Event) -> ConsumedBatch | None:
        """None: there is none in time, it is the end, or the process is to stop. Raises what the consumer raised."""
        until_s = time.monotonic() + within_s
        while not (self.is_over or stopping.is_set()):
            left_s = until_s - time.monotonic()
            try:
                found = self._batches.get(timeout=max(0.0, min(_POLL_S, left_s)))
            except queue.Empty:
                if left_s <= 0:
                    return None
                continue
            if isinstance(found, BaseException):
                raise found
            self.is_over = found is None
            return found
        return None

    def close(self) -> None:
        self._is_closed.set()
        self._consumer.close()
        self._thread.join()
