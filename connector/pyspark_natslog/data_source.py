"""The class that Spark loads: it creates readers and writers."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from pyspark_natslog.versions import check_spark

logger = logging.getLogger("pyspark_natslog")


class DefaultSource(DataSource):
    """Registered as `natslog`. Imports the rest on first use: Spark imports this package for any Python source."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        check_spark()
        super().__init__(options)
        self._options = dict(options)
        if str(options.get("filterPushdown", "")).lower() == "true":  # here: it runs once for each DataFrame
            logger.warning(
                "option filterPushdown has no effect: Spark has one plan for all scans of a DataFrame, so rows that "
                "one scan filters would be missing in the others. Spark filters the rows. To read less, set "
                "startingOffsets and endingOffsets, startingTimestamp and endingTimestamp, or subjectFilter"
            )

    @classmethod
    def name(cls) -> str:
        return "natslog"

    def schema(self) -> StructType:
        from pyspark_natslog.source.options import SourceOptions
        from pyspark_natslog.source.schema import spark_schema

        options = SourceOptions.parse(self._options)
        return spark_schema(options.selected_columns(), options.types)

    def reader(self, schema: StructType) -> DataSourceReader:
        from pyspark_natslog.source.options import SourceOptions
        from pyspark_natslog.source.reader import BatchReader

        options = SourceOptions.parse(self._options, streaming=False)
        options.check_schema(schema)
        return BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from pyspark_natslog.source.options import SourceOptions
        from pyspark_natslog.source.watched_reader import WatchedStreamReader

        options = SourceOptions.parse(self._options, streaming=True)
        options.check_schema(schema)
        return WatchedStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from pyspark_natslog.sink.options import SinkOptions, goes_over_http

        if goes_over_http(self._options):
            from pyspark_natslog.sink.http_options import HttpSinkOptions
            from pyspark_natslog.sink.http_writer import HttpBatchWriter

            return HttpBatchWriter(HttpSinkOptions.parse(self._options), schema, overwrite)
        from pyspark_natslog.sink.writer import BatchWriter

        return BatchWriter(SinkOptions.parse(self._options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from pyspark_natslog.sink.options import SinkOptions, goes_over_http

        if goes_over_http(self._options):
            from pyspark_natslog.sink.http_options import HttpSinkOptions
            from pyspark_natslog.sink.http_writer import HttpStreamWriter

            return HttpStreamWriter(HttpSinkOptions.parse(self._options), schema, overwrite)
        from pyspark_natslog.sink.writer import StreamWriter

        return StreamWriter(SinkOptions.parse(self._options), schema, overwrite)
