"""What both paths of the sink share: the columns that they accept, and the writers that Spark calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from natslog.errors import ConfigError, did_you_mean
from pyspark_natslog.sink.options import Transaction, refuse_transaction
from pyspark_natslog.sink.tombstones import check_key_column

_TEXT_OR_BYTES = ("string", "binary")
_COLUMN_TYPES = {
    "value": _TEXT_OR_BYTES,
    "subject": ("string",),
    "key": _TEXT_OR_BYTES,
    "headers": ("array<struct<key:string,value:string>>", "map<string,string>"),
}


class Write(ABC):
    """The work of tasks and driver; pickled to executors."""

    @abstractmethod
    def of_task(self, batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Sends the rows of a task."""

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:  # noqa: B027
        """On the driver, with what the tasks returned."""

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:  # noqa: B027
        """On the driver, after a failure. Messages that were published remain; a retry sends the same ids."""


class BatchWriter(DataSourceArrowWriter):
    """`df.write.format("natslog")`."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._write.of_task(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._write.commit(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._write.abort(messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream.format("natslog")`."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._write.of_task(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        self._write.commit(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        self._write.abort(messages)


def check_mode(overwrite: bool, transaction: Transaction | None, *, of_query: bool, why: str) -> None:
    """Raises ConfigError: rows would be replaced, or a query has a transaction.

    Args:
        why: rows cannot be replaced.
    """
    if overwrite and not of_query:  # of a query: output mode complete, whose rows are written by each batch
        raise ConfigError(f'the sink can only append, mode("append"): {why}')
    if of_query:
        refuse_transaction(transaction)


def check_columns(schema: StructType, *, tombstones: bool, id_column: str | None = None) -> tuple[str, ...]:
    """The columns of messages in `schema`, checked before the job starts.

    Args:
        id_column: the one that option msgIdColumn names.

    Raises:
        ConfigError: a column is missing, or of a wrong type.
    """
    types = {column.name: column.dataType.simpleString() for column in schema.fields}
    if "value" not in types:
        raise ConfigError(f"the sink requires a column value (string or binary){did_you_mean('value', tuple(types))}")
    if tombstones:
        check_key_column(tuple(types))
    allowed = dict(_COLUMN_TYPES)
    if id_column is not None:
        allowed[id_column] = ("string",)
        if id_column not in types:
            raise ConfigError(
                f"option msgIdColumn: there is no column {id_column!r}{did_you_mean(id_column, tuple(types))}"
            )
    for name, kinds in allowed.items():
        if name in types and types[name] not in kinds:
            raise ConfigError(f"column {name!r} is {types[name]}; the sink accepts {' or '.join(kinds)}: cast it")
    return tuple(name for name in _COLUMN_TYPES if name in types)


def batch_of_query(task: TaskContext) -> tuple[str, str]:
    """The ids of the streaming query and of the batch that the task belongs to."""
    query, batch = task.getLocalProperty("sql.streaming.queryId"), task.getLocalProperty("streaming.sql.batchId")
    assert query, "tasks of a query get its id"
    assert batch is not None, "tasks of a query get the id of the batch"
    return query, batch
