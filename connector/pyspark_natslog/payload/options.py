"""Options of payloads: `payloadFormat`, `payloadSchema`, `payloadColumn`, `mode`, `columnNameOfCorruptRecord`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from pyspark.sql.types import BinaryType, DataType, StringType, StructType

from natslog.errors import ConfigError
from pyspark_natslog.options import Given, naming
from pyspark_natslog.payload.schema_text import PayloadSchema, parse_payload_schema
from pyspark_natslog.payload.tree import as_nullable

Format: TypeAlias = Literal["binary", "string", "json", "avro", "arrow"]
Mode: TypeAlias = Literal["PERMISSIVE", "DROPMALFORMED", "FAILFAST"]

PAYLOAD_OPTIONS = ("payloadFormat", "payloadSchema", "payloadColumn", "mode", "columnNameOfCorruptRecord")
_FORMATS = ("binary", "string", "json", "avro", "arrow")
_MODES = ("permissive", "dropmalformed", "failfast")
_VALUE = StructType().add("value", BinaryType())
_CORRUPT = "_corrupt_record"
_SCHEMA_EXAMPLE = '.option("payloadSchema", "id BIGINT, user STRING")'
_COLUMN_EXAMPLE = '.option("payloadColumn", "payload")'


@dataclass(frozen=True, slots=True)
class PayloadOptions:
    """How payloads become columns. Picklable: the process that parsed the options has read a schema's file.

    Attributes:
        columns: the top-level columns of a payload, in order; the corrupt-record column among them if there is one.
        fields: of the typed formats, what is decoded from a payload: without the corrupt-record column.
        column: the struct column that has all `fields`; None where each field is a top-level column.
        schema: of the typed formats. `corrupt_column`: its name, None where there is none.
    """

    format: Format = "binary"
    mode: Mode = "PERMISSIVE"
    columns: StructType = _VALUE
    fields: StructType = _VALUE
    column: str | None = None
    schema: PayloadSchema | None = None
    corrupt_column: str | None = None

    @classmethod
    def parse(cls, given: Given, metadata: Sequence[str]) -> PayloadOptions:
        """Checked options.

        Args:
            metadata: lower-case names of the source's own columns, which a payload's columns must not have.

        Raises:
            ConfigError: which option is wrong, and what to write.
        """
        format = cast(Format, given.one_of("payloadFormat", "binary", _FORMATS))
        _check_is_for(given, format)
        if format == "binary":
            return cls()
        mode = cast(Mode, given.one_of("mode", "permissive", _MODES).upper())
        if format == "string":
            value = StructType().add("value", StringType())
            return cls("string", mode, value, value)
        return cls._typed(given, format, mode, metadata)

    @classmethod
    def _typed(cls, given: Given, format: Format, mode: Mode, metadata: Sequence[str]) -> PayloadOptions:
        schema = _schema(given, format)
        fields = cast(StructType, as_nullable(schema.columns))
        corrupt = given.text("columnNameOfCorruptRecord") or _CORRUPT
        column = _column(given, metadata, corrupt)
        if format == "json":  # the schema names the corrupt-record column among the fields, as from_json's does
            _check_corrupt_type(fields, corrupt)
            columns, has_corrupt = fields, corrupt in fields.names
            fields = StructType([field for field in fields.fields if field.name != corrupt])
        else:  # an Avro or Arrow schema says what is in a payload: this column is not
            columns, has_corrupt = fields, given.has("columnNameOfCorruptRecord")
            if has_corrupt:
                columns = StructType([*fields.fields]).add(corrupt, StringType())
        if has_corrupt:
            _check_corrupt_name(corrupt, metadata, fields if column is None else StructType())
        if column is None:
            _check_clashes(fields, metadata)
        else:
            columns = _nested(fields, column, corrupt if has_corrupt else None)
        return cls(format, mode, columns, fields, column, schema, corrupt if has_corrupt else None)

    def replace_value(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """These columns with the payload's instead of `value`."""
        at = columns.index("value")
        return (*columns[:at], *self.columns.names, *columns[at + 1 :])

    @property
    def types(self) -> dict[str, DataType]:
        """Types of the payload's columns by name."""
        return {inner.name: inner.dataType for inner in self.columns.fields}


def _check_is_for(given: Given, format: Format) -> None:
    """Raises ConfigError where an option is given that another payloadFormat has."""
    for name in PAYLOAD_OPTIONS[1:]:
        formats = _FORMATS[1:] if name == "mode" else _FORMATS[2:]
        if given.has(name) and format not in formats:
            raise ConfigError(
                f"option {name} requires payloadFormat {', '.join(formats[:-1])} or {formats[-1]}, and payloadFormat "
                f"is {format}{'' if given.has('payloadFormat') else ' by default'}: set payloadFormat, or remove "
                f"{name}",
                option=name,
            )


def _schema(given: Given, format: Format) -> PayloadSchema:
    text = given.text("payloadSchema")
    if not text:
        raise ConfigError(
            f"option payloadSchema is missing: payloadFormat {format} requires it, {_SCHEMA_EXAMPLE}",
            option="payloadSchema",
        )
    with naming("payloadSchema"):
        schema = parse_payload_schema(text)
    if format == "avro" and schema.avro is None:
        raise ConfigError(
            "option payloadSchema: payloadFormat avro requires the Avro schema (JSON, or the path of an .avsc file) "
            "that the payloads were written with",
            option="payloadSchema",
        )
    return schema


def _column(given: Given, metadata: Sequence[str], corrupt: str) -> str | None:
    """`payloadColumn`. Spark compares the names of columns without regard to case."""
    if not given.has("payloadColumn"):
        return None
    name = given.text("payloadColumn")
    if not name:
        raise ConfigError(
            f"option payloadColumn is empty: give the column a name, {_COLUMN_EXAMPLE}", option="payloadColumn"
        )
    if name.lower() in metadata:
        raise ConfigError(
            f"option payloadColumn: natslog has a column {name.lower()!r} of its own: choose another name, "
            f"{_COLUMN_EXAMPLE}",
            option="payloadColumn",
        )
    if name.lower() == corrupt.lower():
        raise ConfigError(
            f"option payloadColumn: {name!r} is the name of the corrupt-record column: choose another name, "
            f"{_COLUMN_EXAMPLE}",
            option="payloadColumn",
        )
    return name


def _nested(fields: StructType, column: str, corrupt: str | None) -> StructType:
    """The fields as one column; the corrupt-record column stays beside it."""
    if not fields.fields:
        raise ConfigError(
            f"option payloadSchema has only the corrupt-record column {corrupt!r}: payloadColumn requires at least one "
            "field of the payload",
            option="payloadSchema",
        )
    nested = StructType().add(column, fields)
    return nested if corrupt is None else nested.add(corrupt, StringType())


def _check_corrupt_type(columns: StructType, name: str) -> None:
    if name in columns.names and not isinstance(columns[name].dataType, StringType):
        raise ConfigError(
            f"option columnNameOfCorruptRecord: column {name!r} is {columns[name].dataType.simpleString()} in "
            "payloadSchema; it must be string, because it gets the text of malformed payloads",
            option="columnNameOfCorruptRecord",
        )


def _check_corrupt_name(name: str, metadata: Sequence[str], fields: StructType) -> None:
    if name.lower() in metadata:
        raise ConfigError(
            f"option columnNameOfCorruptRecord: natslog has a column {name.lower()!r} of its own: choose another name",
            option="columnNameOfCorruptRecord",
        )
    if name.lower() in (field.lower() for field in fields.names):
        raise ConfigError(
            f"option columnNameOfCorruptRecord: payloadSchema has a field {name!r} too: choose another name",
            option="columnNameOfCorruptRecord",
        )


def _check_clashes(fields: StructType, metadata: Sequence[str]) -> None:
    clashing = [name for name in fields.names if name.lower() in metadata]
    if clashing:
        names = ", ".join(map(repr, clashing))
        said = f"fields {names} have the names" if len(clashing) > 1 else f"field {names} has the name"
        raise ConfigError(
            f"option payloadSchema: {said} of natslog's own columns. Add {_COLUMN_EXAMPLE}: all fields of the payload "
            f"are then read as one struct column, and this one is payload.{clashing[0]}",
            option="payloadSchema",
            columns=clashing,
        )
