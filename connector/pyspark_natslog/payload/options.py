"""What the source is told of payloads: `payloadFormat`, `payloadSchema`, `mode`, `columnNameOfCorruptRecord`."""

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

PAYLOAD_OPTIONS = ("payloadFormat", "payloadSchema", "mode", "columnNameOfCorruptRecord")
_FORMATS = ("binary", "string", "json", "avro", "arrow")
_MODES = ("permissive", "dropmalformed", "failfast")
_VALUE = StructType().add("value", BinaryType())
_CORRUPT = "_corrupt_record"
_EXAMPLE = '.option("payloadSchema", "id BIGINT, user STRING")'


@dataclass(frozen=True, slots=True)
class PayloadOptions:
    """How payloads become columns. Picklable: a schema's file was read by whoever parsed the options.

    Attributes:
        columns: what a payload gives, in order; the corrupt-record column among them where it was asked for.
        schema: of the typed formats. `corrupt_column`: its name, None where there is none.
    """

    format: Format = "binary"
    mode: Mode = "PERMISSIVE"
    columns: StructType = _VALUE
    schema: PayloadSchema | None = None
    corrupt_column: str | None = None

    @classmethod
    def parse(cls, given: Given, metadata: Sequence[str]) -> PayloadOptions:
        """Checked options.

        Args:
            metadata: the source's own columns, which a payload's must not be named like.

        Raises:
            ConfigError: which option is wrong, and what to write.
        """
        format = cast(Format, given.one_of("payloadFormat", "binary", _FORMATS))
        for name in PAYLOAD_OPTIONS[1:]:
            if given.has(name) and (format == "binary" or (format == "string" and name != "mode")):
                raise ConfigError(
                    f"option {name} says nothing with payloadFormat {format}: leave it out, or give the payloadFormat "
                    "it is for",
                    option=name,
                )
        if format == "binary":
            return cls()
        mode = cast(Mode, given.one_of("mode", "permissive", _MODES).upper())
        if format == "string":
            return cls("string", mode, StructType().add("value", StringType()))
        return cls._typed(given, format, mode, metadata)

    @classmethod
    def _typed(cls, given: Given, format: Format, mode: Mode, metadata: Sequence[str]) -> PayloadOptions:
        text = given.text("payloadSchema")
        if not text:
            raise ConfigError(
                f"option payloadSchema is missing: {format} needs one, {_EXAMPLE}", option="payloadSchema"
            )
        with naming("payloadSchema"):
            schema = parse_payload_schema(text)
        if format == "avro" and schema.avro is None:
            raise ConfigError(
                "option payloadSchema: payloadFormat avro needs the Avro schema (JSON, or the path of an .avsc file) "
                "that the payloads were written with",
                option="payloadSchema",
            )
        columns = cast(StructType, as_nullable(schema.columns))
        corrupt = given.text("columnNameOfCorruptRecord") or _CORRUPT
        if format == "json":
            _check_corrupt(columns, corrupt)
            corrupt_column = corrupt if corrupt in columns.names else None
        else:  # an Avro or Arrow schema says what is in a payload: this column is not
            corrupt_column = corrupt if given.has("columnNameOfCorruptRecord") else None
            if corrupt_column is not None:
                columns = StructType([*columns.fields]).add(corrupt_column, StringType())
        _check_clashes(columns, metadata)
        return cls(format, mode, columns, schema, corrupt_column)

    def replace_value(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """These columns with the payload's instead of `value`."""
        at = columns.index("value")
        return (*columns[:at], *self.columns.names, *columns[at + 1 :])

    @property
    def types(self) -> dict[str, DataType]:
        """Types of the payload's columns by name."""
        return {inner.name: inner.dataType for inner in self.columns.fields}


def _check_corrupt(columns: StructType, name: str) -> None:
    if name in columns.names and not isinstance(columns[name].dataType, StringType):
        raise ConfigError(
            f"option columnNameOfCorruptRecord: column {name!r} is {columns[name].dataType.simpleString()} in "
            "payloadSchema; it must be string, as it takes the payload as it came",
            option="columnNameOfCorruptRecord",
        )


def _check_clashes(columns: StructType, metadata: Sequence[str]) -> None:
    lower = [name.lower() for name in columns.names]
    for at, name in enumerate(columns.names):
        if name.lower() in metadata:
            raise ConfigError(
                f"option payloadSchema: column {name!r} is named like the source's own column {name.lower()!r}; read "
                "the payload with payloadFormat string (or binary), and from_json (or from_avro) under another name",
                option="payloadSchema",
                column=name,
            )
        if name.lower() in lower[:at]:
            raise ConfigError(f"option payloadSchema: column {name!r} is there twice", option="payloadSchema")
