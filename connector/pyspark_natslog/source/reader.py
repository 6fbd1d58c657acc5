"""Batch reads: `spark.read.format("natslog")`. The range is fixed when partitions are planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from natslog.client import NatslogClient
from natslog.errors import ConfigError
from natslog.planning import AskedPlan, ReadPosition
from pyspark_natslog.plain_errors import plain_errors
from pyspark_natslog.source.options import CURSOR, FIRST_ANSWER_WITHIN_S, SourceOptions
from pyspark_natslog.source.parallelism import default_parallelism
from pyspark_natslog.source.positions import begins_with_log, resolve_end, resolve_start
from pyspark_natslog.source.read_plans import planned, report_losses, task_limits
from pyspark_natslog.source.schema import checked_columns
from pyspark_natslog.source.selection import StreamState
from pyspark_natslog.source.spans import batch_read
from pyspark_natslog.source.splits import Task, tasks_of


@plain_errors("partitions")
class BatchReader(DataSourceReader):
    """Reads `[start, end)` of each stream, as the options say; by default all that is committed now.

    It accepts no pushed filters, and so has no `pushFilters`: Spark applies the filters that one scan of a DataFrame
    pushes to all its scans (ADR 7).
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._columns = checked_columns(schema, options.types)

    def partitions(self) -> Sequence[InputPartition]:
        with batch_read() as span:
            tasks = self._tasks()
            for task in tasks:
                task.traceparent = span.traceparent
        return tasks

    def _tasks(self) -> Sequence[Task]:
        options = self._options
        with options.client(FIRST_ANSWER_WITHIN_S) as client:
            states = options.selection.states(client)
            options.selection.require_all(states)
            as_of = {name: client.latest_as_of(name) for name in states} if options.is_latest_view else {}
            ranges = {name: self._range(client, state, states, as_of.get(name)) for name, state in states.items()}
            return self._planned(client, {name: one for name, one in ranges.items() if one.start != one.end}, as_of)

    def _planned(
        self, client: NatslogClient, positions: dict[str, ReadPosition], as_of: Mapping[str, int]
    ) -> Sequence[Task]:
        if not positions:
            return []
        limits = task_limits(self._options.cutting, default_parallelism())
        plan = planned(client, AskedPlan(streams=frozenset(positions), positions=positions, tasks=limits))
        report_losses(self._options, plan, positions)
        return tasks_of(plan, {name for name, one in positions.items() if one.is_open}, as_of)

    def _range(
        self, client: NatslogClient, state: StreamState, states: Mapping[str, StreamState], as_of: int | None
    ) -> ReadPosition:
        options = self._options
        end = resolve_end(client, options.end, state) if as_of is None else as_of
        start = resolve_start(client, options, options.start, state, end, selected=states.keys())
        if start > end and self._may_cross(state.name):
            start = end
        if start > end:
            raise ConfigError(f"stream {state.name!r}: the start, offset {start}, is above the end, offset {end}")
        return ReadPosition(state.id, start, end, begins_with_log(options.start, state.name))

    def _may_cross(self, stream: str) -> bool:
        """The end is resolved before the start; if the start is a time or a cursor, messages may have been recorded
        meanwhile.
        """
        first_us, last_us = self._options.start.time_us_of(stream), self._options.end.time_us_of(stream)
        if first_us is None:
            is_cursor = str(self._options.start.of(stream)).startswith(CURSOR)
            return is_cursor and last_us is None and self._options.end.of(stream) == "latest"
        return self._options.end.of(stream) == "latest" if last_us is None else first_us <= last_us

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from pyspark_natslog.source.range_reader import read_task  # not needed by the process that plans

        return read_task(self._options, self._columns, partition)
