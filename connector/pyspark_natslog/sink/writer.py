"""The sink: rows of a DataFrame published to NATS, streaming and batch.

Theory of operation. Each task opens one connection and publishes its Arrow batches in order, each one while the acks of
those before are on their way. The message id of a row is a hash of its position (query, batch, partition, row) and of
its content, so a retried task or batch sends the same ids and is stored once by a stream that deduplicates. A retry
that yields another row at the same position sends another id: such a row may be stored beside the one of the first
attempt, and is never lost as its duplicate. Where a retry may yield the same rows in another order, as after a shuffle,
`msgIdColumn` should name an id that belongs to the row. A batch write has no query: an id made on the driver takes its
place.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from natslog.arrow.schema import HEADERS_TYPE
from natslog.errors import ConfigError
from pyspark_natslog import spans
from pyspark_natslog.sink.options import SinkOptions
from pyspark_natslog.sink.tombstones import as_tombstones
from pyspark_natslog.sink.writing import Write, batch_of_query, check_columns, check_mode

if TYPE_CHECKING:
    from natslog.wire.outgoing_rows import Rows
    from pyspark_natslog.sink.sending import Sender

logger = logging.getLogger("pyspark_natslog")


class Published(WriterCommitMessage):
    """How many rows a task published, and how many of them as dead letters."""

    def __init__(self, rows: int, dead_letters: int) -> None:
        self.rows = rows
        self.dead_letters = dead_letters


class NatsWrite(Write):
    """`path=nats`: each task publishes its rows."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool, *, of_query: bool) -> None:
        check_mode(overwrite, options.transaction, of_query=of_query, why="published messages cannot be replaced")
        columns = check_columns(schema, tombstones=options.tombstones, id_column=options.message_id_column)
        if options.subject is None and "subject" not in columns:
            raise ConfigError(
                'the sink requires a subject: set .option("subject", "alerts.quakes"), or add a column subject'
            )
        self.options = options
        self._run_id = None if of_query else _run_id(options)

    def of_task(self, batches: Iterator[pa.RecordBatch]) -> Published:
        from natslog.client.publisher import Publisher  # here: planning, on the driver, needs neither NATS nor kernels
        from pyspark_natslog.sink.sending import Sender

        options, sent, dead, prefix = self.options, 0, 0, self._id_prefix()
        publisher = Publisher(
            options.nats_url,
            credentials=options.credentials,
            name="natslog-spark-sink",
            ack_timeout_s=options.ack_timeout_s,
            max_in_flight=options.max_in_flight,
            streams=options.ack_streams,
            span_attributes=spans.task_attributes() if spans.begin() else {},
        )
        with publisher, Sender(options, publisher) as sender:
            for batch in batches:
                rows, letters = self._rows(batch, prefix, sent, sender)
                sender.send(rows, first_row=sent)
                if letters is not None:
                    sender.send(letters)
                    dead += len(letters)
                sent += batch.num_rows
            sender.wait_for_acks()
        spans.task_ended()
        return Published(sent, dead)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing is staged: rows were published by the tasks."""
        dead = sum(message.dead_letters for message in messages if isinstance(message, Published))
        if dead:
            subject = self.options.dead_letter_subject
            logger.warning(f"{dead} rows could not be sent; they were published to {subject!r} as dead letters")

    def _id_prefix(self) -> str:
        """Query and batch; for a batch write its transaction, or an id of its own, also within `foreachBatch`, which
        may write several frames of a batch.
        """
        task = TaskContext.get()
        assert task is not None, "Spark calls write inside a task"
        run = self._run_id or ":".join(batch_of_query(task))
        return f"{run}:{task.partitionId()}:"

    def _rows(self, batch: pa.RecordBatch, prefix: str, first: int, sender: Sender) -> tuple[Rows, Rows | None]:
        """What is to be sent, and the dead letters, where rows that cannot be sent become such."""
        from natslog.wire.outgoing_rows import Rows
        from natslog.wire.row_hashes import as_ids, position_starts, row_hashes
        from pyspark_natslog.sink.dead_letters import split_dead

        options, names = self.options, batch.schema.names
        count = batch.num_rows
        if options.subject is not None:
            subjects: Any = pa.repeat(pa.scalar(options.subject), count)
        else:
            subjects = _as(batch.column("subject"), pa.string())
        values = _as(batch.column("value"), pa.binary())
        keys = _as(batch.column("key"), pa.binary()) if "key" in names else None
        headers = batch.column("headers").cast(HEADERS_TYPE) if "headers" in names else None
        if options.tombstones:
            values, headers = as_tombstones(values, keys, headers)
        own_ids = ids = None
        if options.message_id_column is not None:
            ids = _as(batch.column(options.message_id_column), pa.string())
        if ids is None or options.dead_letter_subject is not None:
            own_ids = as_ids(row_hashes(subjects, values, keys, headers, position_starts(prefix, first, count)))
        rows = Rows(subjects, values, keys, headers, own_ids if ids is None else ids)
        if options.dead_letter_subject is None:
            return rows, None
        limit_bytes = sender.max_payload_bytes(subjects)
        return split_dead(
            rows, batch, subject=options.dead_letter_subject, max_payload_bytes=limit_bytes, own_ids=own_ids
        )


def _run_id(options: SinkOptions) -> str:
    """The same one in each repetition of a transaction."""
    if options.transaction is None:
        return secrets.token_hex(16)
    return f"{options.transaction.app_id}:{options.transaction.version}"


def _as(column: Any, kind: pa.DataType) -> Any:
    return column if column.type == kind else column.cast(kind)
