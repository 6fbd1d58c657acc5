"""Tables in Spark's catalog: `CREATE TABLE … USING natslog OPTIONS (…)`.

Theory of operation. Spark passes the OPTIONS of a table to a Python source only when the table is created: as
`option.NAME`, with properties of the catalog (`provider`, `owner`, …) beside them. Later it passes the table's schema,
and the options of the statement (`WITH (…)`). So the source keeps the OPTIONS in the metadata of the first column,
which the catalog stores. Both readers create tables in this way; the jar gets the OPTIONS from Spark as well.

Every DataFrame that is made of the table's columns has their metadata, too. So they count only where all columns are
those of a table, and the statement does not say itself what is read, or where rows are sent.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from natslog.errors import ConfigError
from natslog.urls import without_secrets
from pyspark_natslog.options import Given

_METADATA = "natslog"
_PREFIX = "option."
_SINK_COLUMNS = StructType(
    [StructField("subject", StringType()), StructField("key", BinaryType()), StructField("value", BinaryType())]
)
_SINK_PATHS = ("nats", "http")
_SOURCES = ("stream", "streampattern", "group", "bucket", "path")
_DESTINATIONS = ("natsservers", "servers", "subject", "stream", "path")
_URLS = ("servers", "natsServers")


def is_creation(options: Mapping[str, str]) -> bool:
    """Whether Spark creates a table: only then it passes the table's provider."""
    return "provider" in {name.lower() for name in options}


def table_schema(options: Mapping[str, str]) -> StructType:
    """The schema of a new table, with its options in the metadata. A table can be read, written, or both.

    Raises:
        ConfigError: an option is wrong or unknown, or is a secret, which the catalog would store.
    """
    from pyspark_natslog.sink.http_options import HttpSinkOptions
    from pyspark_natslog.sink.options import SINK_OPTIONS, SinkOptions, goes_over_http
    from pyspark_natslog.source.options import SELECTORS, SOURCE_OPTIONS, SourceOptions
    from pyspark_natslog.source.sampling import with_schema
    from pyspark_natslog.source.schema import spark_schema

    by_lower = {name.lower(): value for name, value in options.items()}
    given = {name.removeprefix(_PREFIX): value for name, value in by_lower.items() if name.startswith(_PREFIX)}
    if "location" in by_lower:
        given["path"] = by_lower["location"]
    Given(given, (*SOURCE_OPTIONS, *SINK_OPTIONS, *_http_options()))
    if "token" in given:
        raise ConfigError(
            "option token: the catalog would store it with the table: use tokenFile, or give it in a statement, "
            "WITH ('token' = …)",
            option="token",
        )
    for name in _URLS:
        if any(without_secrets(url.strip()) != url.strip() for url in given.get(name.lower(), "").split(",")):
            raise ConfigError(
                f"option {name}: the catalog would store the password in the URL with the table: use files (tokenFile, "
                "natsUserFile, natsPasswordFile)",
                option=name,
            )
    of_source, of_sink = _of_source(given), _of_sink(given)
    is_read = any(name.lower() in of_source for name in (*SELECTORS, "path"))
    if goes_over_http(of_sink):
        HttpSinkOptions.parse(of_sink)
    elif not is_read or of_sink.keys() - of_source.keys():
        SinkOptions.parse(of_sink)
    if not is_read:
        schema = StructType([*_SINK_COLUMNS.fields])
    else:
        parsed = SourceOptions.parse(with_schema(of_source))
        schema = spark_schema(parsed.selected_columns(), parsed.types)
    stored = [{_METADATA: given if at == 0 else {}} for at in range(len(schema.fields))]
    fields = [
        StructField(field.name, field.dataType, field.nullable, metadata)
        for field, metadata in zip(schema.fields, stored, strict=True)
    ]
    return StructType(fields)


def source_options(options: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """Options of a read: those of its table, if there is one, and of the statement, which take precedence."""
    table = _stored(schema)
    if table is None and not options:
        raise ConfigError(
            'option stream is missing: set .option("stream", "orders"). A table that was created with a list of '
            "columns has lost its OPTIONS, because Spark does not pass them: create it without, or add WITH (…)",
            option="stream",
        )
    statement = _lower(options)
    if table is None or any(name in statement for name in _SOURCES):
        return dict(options)
    return _of_source(table) | statement


def sink_options(options: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """Options of a batch write: those of its table, if there is one, and of the statement, which take precedence. None
    of the table, where the statement says itself where rows are sent.

    Raises:
        ConfigError: it says so in part: nothing tells whether the table's server is meant, or the default one.
    """
    table = _stored(schema)
    statement = _lower(options)
    if table is None or not any(name in statement for name in _DESTINATIONS):
        return dict(options) if table is None else _of_sink(table) | statement
    server = "servers" if statement.get("path") == "http" else "natsServers"
    if server.lower() not in statement:
        raise ConfigError(
            f"the rows have the columns of a natslog table, and the write has a destination of its own: set {server} "
            "too, or remove the options of the destination to write to the table",
            option=server,
        )
    return dict(options)


def _lower(options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in options.items()}


def _stored(schema: StructType) -> dict[str, str] | None:
    """The options of the table, if all columns are those of one."""
    if not all(_METADATA in column.metadata for column in schema.fields):
        return None
    return next((column.metadata[_METADATA] for column in schema.fields if column.metadata[_METADATA]), None)


def _of_source(options: Mapping[str, str]) -> dict[str, str]:
    from pyspark_natslog.sink.options import SINK_OPTIONS
    from pyspark_natslog.source.options import SOURCE_OPTIONS

    chosen = _without(options, (*SINK_OPTIONS, *_http_options()), SOURCE_OPTIONS)
    if chosen.get("path") in _SINK_PATHS:
        del chosen["path"]
    if "bucket" not in chosen:
        chosen.pop("tombstones", None)  # of the sink
    return chosen


def _of_sink(options: Mapping[str, str]) -> dict[str, str]:
    from pyspark_natslog.sink.options import SINK_OPTIONS
    from pyspark_natslog.source.options import SOURCE_OPTIONS

    is_http = options.get("path") == "http"
    chosen = _without(options, SOURCE_OPTIONS, _http_options() if is_http else SINK_OPTIONS)
    if chosen.get("path") not in _SINK_PATHS:
        chosen.pop("path", None)  # the name of a stream
    return chosen


def _without(options: Mapping[str, str], others: tuple[str, ...], own: tuple[str, ...]) -> dict[str, str]:
    """Without what is only for the other direction; what is unknown stays, and is an error."""
    own_lower, others_lower = {name.lower() for name in own}, {name.lower() for name in others}
    return {name: value for name, value in options.items() if name in own_lower or name not in others_lower}


def _http_options() -> tuple[str, ...]:
    from pyspark_natslog.sink.http_options import HTTP_OPTIONS

    return HTTP_OPTIONS
