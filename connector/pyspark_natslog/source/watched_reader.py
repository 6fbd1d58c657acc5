"""The streaming reader with what operators see of it: lag in its progress, and a cursor at the brokers.

Spark calls `latestOffset` at every trigger with the end of the last completed batch; it calls `commit` a batch later.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from pyspark_natslog.source.cursor_mirror import CursorMirror
from pyspark_natslog.source.lag import LagReport
from pyspark_natslog.source.offsets import from_json
from pyspark_natslog.source.options import SourceOptions
from pyspark_natslog.source.stream_reader import StreamReader


class WatchedStreamReader(StreamReader):
    """Reads as `StreamReader` does. Neither a report nor a cursor can fail or delay the query."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        servers, asking = options.servers, options.client_options
        self._report = LagReport(servers, asking) if options.reports_lag else None
        self._mirror = None if options.cursor is None else CursorMirror(options.cursor, servers, asking)
        self._end: dict[str, Any] = {}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        self._end = super().latestOffset(start, limit)
        self._note(start)
        return self._end

    def reportLatestOffset(self) -> dict[str, Any] | None:
        latest = super().reportLatestOffset()
        return latest if latest is None or self._report is None else self._report.added_to(latest, self._end)

    def commit(self, end: dict[str, Any]) -> None:
        super().commit(end)
        self._note(end)

    def stop(self) -> None:
        super().stop()
        if self._mirror is not None:
            self._mirror.close()
        if self._report is not None:
            self._report.close()

    def _note(self, position: dict[str, Any]) -> None:
        if self._mirror is not None:
            self._mirror.note(from_json(position))
