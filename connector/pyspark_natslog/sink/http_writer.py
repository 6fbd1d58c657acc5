"""The sink that appends to a stream (`path=http`): tasks stage their rows at the stream's leader, the driver commits.

Theory of operation. A task sends its Arrow batches as parts of bounded size, and returns their names together with
query and batch, because only tasks get the query's id. The driver's commit names the parts of the attempts that Spark
counts, and the broker appends them as one run, once for each (query, batch): if Spark runs a batch again after a crash,
the broker finds it there, and proves by a digest that the rows are the same. A batch write is a producer of its own,
with one batch.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from natslog import tracing
from natslog.arrow.schema import HEADERS_TYPE
from natslog.client.appending import PartUploader
from natslog.model import ONE_OFF_PRODUCERS, PartReceipt
from natslog.units import offsets_between
from pyspark_natslog import spans
from pyspark_natslog.sink.http_options import HttpSinkOptions
from pyspark_natslog.sink.tombstones import as_tombstones
from pyspark_natslog.sink.writing import Write, batch_of_query, check_columns, check_mode

logger = logging.getLogger("pyspark_natslog")

_BROKER_BACK_WITHIN_S = 120.0
"""The driver cannot stage rows again: it waits while the broker that has them restarts."""


@dataclass
class Staged(WriterCommitMessage):
    """The parts that a task staged, with producer and batch."""

    producer: str
    batch: int
    parts: list[PartReceipt]


class HttpWrite(Write):
    """`path=http`: tasks stage their rows, and the driver has them appended."""

    def __init__(self, options: HttpSinkOptions, schema: StructType, overwrite: bool, *, of_query: bool) -> None:
        check_mode(overwrite, options.transaction, of_query=of_query, why="rows of a stream are never replaced")
        columns = check_columns(schema, tombstones=options.tombstones)
        self._options = options
        self._columns = [name for name in columns if name != "subject" or options.subject is None]
        self._write_id = None if of_query else f"{ONE_OFF_PRODUCERS}{secrets.token_hex(16)}"
        options.check_stream("subject" in self._columns)

    def of_task(self, batches: Iterator[pa.RecordBatch]) -> Staged:
        task = TaskContext.get()
        assert task is not None, "Spark calls write inside a task"
        producer, batch = self._batch_of(task)
        with self._options.client() as client:
            uploader = PartUploader(
                client,
                self._options.stream,
                producer,
                batch,
                label=str(task.partitionId()),
                attempt=task.taskAttemptId(),
                subject=self._options.subject,
            )
            for rows in batches:
                uploader.add(self._selected(rows))
            return Staged(producer, batch, uploader.finish())

    def _batch_of(self, task: TaskContext) -> tuple[str, int]:
        """Query and batch; for a batch write its transaction, or an id of its own and batch 0, also within
        `foreachBatch`: it may write several frames, and a second one must not be taken for a repetition of the first.
        """
        transaction = self._options.transaction
        if transaction is not None:
            return transaction.app_id, transaction.version
        if self._write_id is not None:
            return self._write_id, 0
        query, batch = batch_of_query(task)
        return query, int(batch)

    def _selected(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The sink's columns; the option `subject` takes precedence over the column, as over NATS."""
        columns: dict[str, Any] = {name: rows.column(name) for name in self._columns}
        if "headers" in columns:
            columns["headers"] = columns["headers"].cast(HEADERS_TYPE)
        if self._options.tombstones:
            tombstones = as_tombstones(columns["value"], columns["key"], columns.get("headers"))
            columns["value"], columns["headers"] = tombstones
        return pa.RecordBatch.from_pydict(columns)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        staged = [message for message in messages if isinstance(message, Staged)]
        parts = [part for message in staged for part in message.parts]
        if not parts:
            return
        (key,) = {(message.producer, message.batch) for message in staged}
        spans.begin()
        options = self._options
        with options.client() as client:
            appended = client.commit_append(
                options.stream, *key, parts, on_conflict=options.on_conflict, parts_within_s=_BROKER_BACK_WITHIN_S
            )
        tracing.flush(spans.FLUSH_WITHIN_S)
        if appended.duplicate:
            logger.warning(
                f"stream {options.stream}: batch {key[1]} of {key[0]} was stored before, as "
                f"{offsets_between(appended.start or 0, appended.end or 0)}: its rows were not appended again"
            )

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Parts of a failed task are deleted with the rest of its batch, or by the broker after an hour."""
        keys = {(message.producer, message.batch) for message in messages if isinstance(message, Staged)}
        with self._options.client() as client:
            for producer, batch in keys:
                client.abort_append(self._options.stream, producer, batch)
