"""The peers of the scan: the same Arrow batches from a mapped file, as tuples, and their JSON decoded row by row. And
a sink that drops its rows: the least that a sink in Python takes.

Importable by Spark's workers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from pyspark_natslog import DefaultSource
from pyspark_natslog.source.options import SOURCE_COLUMNS
from pyspark_natslog.source.schema import spark_schema

BENCH_COLUMNS = SOURCE_COLUMNS


class PythonSource(DefaultSource):
    """The Python source by another name, where the columnar reader has the usual one."""

    @classmethod
    def name(cls) -> str:
        return "natslog_in_python"


class _FilePart(InputPartition):
    def __init__(self, path: str, first: int, last: int) -> None:
        super().__init__((path, first, last))
        self.path, self.first, self.last = path, first, last


class _MappedReader(DataSourceReader):
    def __init__(self, path: str, parts: int, as_tuples: bool, columns: Sequence[str] = BENCH_COLUMNS) -> None:
        self._path, self._parts, self._as_tuples, self._columns = path, parts, as_tuples, list(columns)

    def partitions(self) -> Sequence[InputPartition]:
        with pa.memory_map(self._path) as source:
            count = pa.ipc.open_file(source).num_record_batches
        edges = [count * at // self._parts for at in range(self._parts + 1)]
        return [_FilePart(self._path, low, high) for low, high in zip(edges, edges[1:], strict=False)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, _FilePart)
        with pa.memory_map(partition.path) as source:
            file = pa.ipc.open_file(source)
            for at in range(partition.first, partition.last):
                batch = file.get_batch(at).select(self._columns)
                if self._as_tuples:
                    yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
                else:
                    yield batch


class _MappedStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The same rows as one micro-batch. Its positions are numbers of batches of the file."""

    def __init__(self, batch_reader: _MappedReader, path: str) -> None:
        self._batch_reader, self._path = batch_reader, path

    def initialOffset(self) -> dict[str, Any]:
        return {"batch": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """The file does not change."""

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        with pa.memory_map(self._path) as source:
            return {"batch": pa.ipc.open_file(source).num_record_batches}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return self._batch_reader.partitions() if start["batch"] < end["batch"] else []

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self._batch_reader.read(partition)


class MappedSource(DataSource):
    """Arrow batches of a mapped file, as they lie there. Option `fields`: DDL of those columns that are read."""

    as_tuples = False

    @classmethod
    def name(cls) -> str:
        return "benchmapped"

    def schema(self) -> StructType | str:
        return self.options.get("fields") or spark_schema(BENCH_COLUMNS)

    def reader(self, schema: StructType) -> DataSourceReader:
        return _MappedReader(self.options["path"], int(self.options["parts"]), self.as_tuples, schema.names)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        reader = _MappedReader(self.options["path"], int(self.options["parts"]), self.as_tuples, schema.names)
        return _MappedStreamReader(reader, self.options["path"])


class TupleSource(MappedSource):
    """The same rows one by one, as most Python sources yield them."""

    as_tuples = True

    @classmethod
    def name(cls) -> str:
        return "benchtuples"


class _JsonRowsReader(_MappedReader):
    def __init__(self, path: str, parts: int, names: Sequence[str]) -> None:
        super().__init__(path, parts, as_tuples=False)
        self._names = tuple(names)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        for batch in super().read(partition):
            offsets, values = batch.column("offset").to_pylist(), batch.column("value").to_pylist()
            for offset, value in zip(offsets, values, strict=True):
                found = json.loads(value)
                yield (offset, *(found.get(name) for name in self._names))


class JsonRowsSource(DataSource):
    """JSON decoded row by row, into tuples: as Python sources usually do it. Option `fields`: DDL of the columns."""

    @classmethod
    def name(cls) -> str:
        return "benchjsonrows"

    def schema(self) -> str:
        return f"offset LONG, {self.options['fields']}"

    def reader(self, schema: StructType) -> DataSourceReader:
        return _JsonRowsReader(self.options["path"], int(self.options["parts"]), schema.names[1:])


class _DroppingWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class DroppingSink(DataSource):
    """Receives Arrow batches, as natslog's sink does, and drops them."""

    @classmethod
    def name(cls) -> str:
        return "benchdropping"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return _DroppingWriter()
