"""The streaming reader with what operators see of it: lag in its progress, a cursor at the brokers, and spans.

Spark calls `latestOffset` at every trigger with the end of the last completed batch; it calls `commit` a batch later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from pyspark_natslog.plain_errors import plain_errors
from pyspark_natslog.source.cursor_mirror import CursorMirror
from pyspark_natslog.source.lag import NOTHING_BEHIND, LagReport
from pyspark_natslog.source.offsets import from_json
from pyspark_natslog.source.options import SourceOptions
from pyspark_natslog.source.spans import BatchSpans
from pyspark_natslog.source.splits import Task
from pyspark_natslog.source.stream_reader import StreamReader


@plain_errors("initialOffset", "getDefaultReadLimit", "latestOffset", "partitions")
class WatchedStreamReader(StreamReader):
    """Reads as `StreamReader` does. Neither a report nor a cursor can fail or delay the query."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        servers, asking = options.servers, options.client_options
        self._lag = LagReport(servers, asking) if options.reports_lag else None
        self._mirror = None if options.cursor is None else CursorMirror(options.cursor, servers, asking)
        self._spans = BatchSpans(options.cursor)
        self._end: dict[str, Any] = {}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        self._spans.triggered()
        self._end = super().latestOffset(start, limit)
        self._note(start)
        return self._end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[Task]:
        tasks = super().partitions(start, end)
        self._spans.planned(start, end, tasks)
        return tasks

    def reportLatestOffset(self) -> dict[str, Any] | None:
        latest = super().reportLatestOffset()
        if latest is None or self._lag is None:
            return latest
        found = self._lag.added_to(latest, self._end)
        for name in self._gone.keys() - found.keys():  # nothing of it is unread; what was lost is shown all the same
            found[name] = {"id": self._gone[name].id, "offset": self._gone[name].offset} | NOTHING_BEHIND
        return {name: found[name] | {"rows_lost": self._options.losses.rows_of(name)} for name in sorted(found)}

    def commit(self, end: dict[str, Any]) -> None:
        super().commit(end)
        self._note(end)

    def stop(self) -> None:
        super().stop()
        if self._mirror is not None:
            self._mirror.close()
        if self._lag is not None:
            self._lag.close()

    def _note(self, position: dict[str, Any]) -> None:
        if self._mirror is not None:
            at = from_json(position)
            self._mirror.note({name: at[name] for name in at if name not in self._left})
