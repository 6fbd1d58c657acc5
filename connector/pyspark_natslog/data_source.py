"""The class that Spark loads: it creates readers and writers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from natslog.errors import NatslogError
from pyspark_natslog.plain_errors import plain_errors
from pyspark_natslog.versions import check_spark

if TYPE_CHECKING:
    from pyspark_natslog.sink.writing import Write

logger = logging.getLogger("pyspark_natslog")


@plain_errors("__init__", "schema", "reader", "writer", "streamWriter")
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
        from pyspark_natslog.source.sampling import with_schema
        from pyspark_natslog.source.schema import spark_schema
        from pyspark_natslog.tables import is_creation, table_schema

        if is_creation(self._options):
            return table_schema(self._options)
        options = SourceOptions.parse(with_schema(self._options))
        if options.selection.looks_like_regex:  # here: Spark asks once for each DataFrame
            logger.warning(
                "option streamPattern %r looks like a regular expression; it is a glob, in which * stands for any text "
                'and a dot for itself: "orders-*" matches the names that begin with "orders-"',
                options.selection.pattern,
            )
        return spark_schema(options.selected_columns(), options.types)

    def reader(self, schema: StructType) -> DataSourceReader:
        from pyspark_natslog.source.options import SourceOptions
        from pyspark_natslog.source.reader import BatchReader
        from pyspark_natslog.source.sampling import with_schema
        from pyspark_natslog.tables import source_options

        given = with_schema(source_options(self._options, schema), schema)
        options = SourceOptions.parse(given, streaming=False)
        options.check_schema(schema)
        return BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from pyspark_natslog.source.options import SourceOptions
        from pyspark_natslog.source.refused_reader import RefusedStreamReader
        from pyspark_natslog.source.sampling import with_schema
        from pyspark_natslog.source.watched_reader import WatchedStreamReader
        from pyspark_natslog.tables import source_options

        try:
            given = with_schema(source_options(self._options, schema), schema)
            options = SourceOptions.parse(given, streaming=True)
            options.check_schema(schema)
            return WatchedStreamReader(options, schema)
        except NatslogError as error:  # PySpark would end with an UnboundLocalError of its own after this one
            return RefusedStreamReader(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from pyspark_natslog.sink.writing import BatchWriter
        from pyspark_natslog.tables import sink_options

        return BatchWriter(_write(sink_options(self._options, schema), schema, overwrite, of_query=False))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from pyspark_natslog.sink.writing import StreamWriter

        # Spark passes no options of a table here
        return StreamWriter(_write(self._options, schema, overwrite, of_query=True))


def _write(options: Mapping[str, str], schema: StructType, overwrite: bool, *, of_query: bool) -> Write:
    """Raises ConfigError: an option or column is missing or wrong."""
    from pyspark_natslog.options import refuse
    from pyspark_natslog.sink.options import JVM_ONLY, SinkOptions, goes_over_http

    refuse(options, JVM_ONLY, "is for queries in real time, by the sink in the jar (pyspark_natslog.jar.jar_path())")
    if goes_over_http(options):
        from pyspark_natslog.sink.http_options import HttpSinkOptions
        from pyspark_natslog.sink.http_writer import HttpWrite

        return HttpWrite(HttpSinkOptions.parse(options), schema, overwrite, of_query=of_query)
    from pyspark_natslog.sink.writer import NatsWrite

    return NatsWrite(SinkOptions.parse(options), schema, overwrite, of_query=of_query)
