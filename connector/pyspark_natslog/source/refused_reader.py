"""A streaming read whose options are wrong: its first call raises the error.

PySpark stops a reader in a `finally` that also runs where none was made. The error of the user's options would be
followed by an `UnboundLocalError`, which is then the last line that the user sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit

from natslog.errors import NatslogError
from pyspark_natslog.plain_errors import plain_errors


@plain_errors("initialOffset", "getDefaultReadLimit", "latestOffset", "partitions", "read")
class RefusedStreamReader(DataSourceStreamReader):
    """Raises the error wherever Spark begins: at a new query or at one with a checkpoint."""

    def __init__(self, error: NatslogError) -> None:
        self._error = error

    def initialOffset(self) -> NoReturn:
        raise self._error

    def getDefaultReadLimit(self) -> NoReturn:
        raise self._error

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> NoReturn:
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> NoReturn:
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        raise self._error
