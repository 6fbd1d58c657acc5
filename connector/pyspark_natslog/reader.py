"""Batch reads: `spark.read.format("natslog")`. The range is fixed when partitions are planned."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from natslog.errors import ConfigError
from pyspark_natslog.positions import resolve_end, resolve_start
from pyspark_natslog.schema import checked_columns
from pyspark_natslog.source_options import SourceOptions
from pyspark_natslog.splits import plan_range, read_range


class BatchReader(DataSourceReader):
    """Reads `[start, end)` of each stream, as the options say; by default all that is committed now."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._columns = checked_columns(schema, options.payload.types)

    def partitions(self) -> Sequence[InputPartition]:
        options, planned = self._options, []
        with options.client() as client:
            for name in options.streams:
                info = client.position(name)
                end = resolve_end(client, options.end, info)
                start = resolve_start(client, options, options.start, info, end)
                if start > end:
                    raise ConfigError(f"stream {name!r}: the start, offset {start}, is beyond the end, offset {end}")
                planned += plan_range(client, options, name, info["id"], start, end, os.cpu_count() or 1)
        return planned

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_range(self._options, self._columns, partition)
