"""Options of payloads: `payloadFormat`, `payloadSchema`, `payloadColumn`, `mode` and names of columns beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from pyspark.sql.types import BinaryType, DataType, StringType, StructType, VariantType

from natslog.errors import ConfigError
from pyspark_natslog.options import Given, naming
from pyspark_natslog.payload.avro_registry import SchemaRegistry
from pyspark_natslog.payload.protobuf_schema import MessageType, read_files
from pyspark_natslog.payload.schema_text import PayloadSchema, parse_payload_schema
from pyspark_natslog.payload.tree import as_nullable

Format: TypeAlias = Literal["binary", "string", "variant", "json", "avro", "arrow", "protobuf"]
Mode: TypeAlias = Literal["PERMISSIVE", "DROPMALFORMED", "FAILFAST"]

REGISTRY_OPTIONS = ("schemaRegistry", "schemaRegistryAuthFile", "schemaRegistryCaFile")
PROTOBUF_OPTIONS = ("descriptorFile", "messageName", "payloadFraming")
PAYLOAD_OPTIONS = (
    "payloadFormat", "payloadSchema", "payloadColumn", "mode", "columnNameOfCorruptRecord", "rescuedColumn",
    *REGISTRY_OPTIONS, *PROTOBUF_OPTIONS,
)  # fmt: skip
_FORMATS = ("binary", "string", "variant", "json", "avro", "arrow", "protobuf")
_WITH_FIELDS = _FORMATS[3:]
_OF_SOME = {
    "mode": _FORMATS[1:],
    "rescuedColumn": ("json",),
    "columnNameOfCorruptRecord": _FORMATS[2:],
    "payloadSchema": _FORMATS[3:6],
    **dict.fromkeys(REGISTRY_OPTIONS, ("avro",)),
    **dict.fromkeys(PROTOBUF_OPTIONS, ("protobuf",)),
}
"""Options that not every typed format has."""
_MODES = ("permissive", "dropmalformed", "failfast")
_VALUE = StructType().add("value", BinaryType())
_CORRUPT = "_corrupt_record"
_SCHEMA_EXAMPLE = '.option("payloadSchema", "id BIGINT, user STRING")'
_COLUMN_EXAMPLE = '.option("payloadColumn", "payload")'


@dataclass(frozen=True, slots=True)
class PayloadOptions:
    """How payloads become columns. Picklable: the process that parsed the options has read a schema's file.

    Attributes:
        columns: the top-level columns of a payload, in order; the corrupt-record column and the rescued column among
            them if there are any.
        fields: of the typed formats, what is decoded from a payload: without these two.
        column: the struct column that has all `fields`; None where each field is a top-level column.
        registry: of the schemas that Avro payloads were written with; None: all were written with `schema`.
        message: of Protobuf payloads; `is_framed`: whether they have Confluent's header.
        schema: of the other typed formats. `corrupt_column`, `rescued_column`: their names, None where there is none.
    """

    format: Format = "binary"
    mode: Mode = "PERMISSIVE"
    columns: StructType = _VALUE
    fields: StructType = _VALUE
    column: str | None = None
    schema: PayloadSchema | None = None
    corrupt_column: str | None = None
    rescued_column: str | None = None
    registry: SchemaRegistry | None = None
    message: MessageType | None = None
    is_framed: bool = False

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
        if format == "variant":
            return cls._variant(given, mode, metadata)
        return cls._typed(given, format, mode, metadata)

    @classmethod
    def _variant(cls, given: Given, mode: Mode, metadata: Sequence[str]) -> PayloadOptions:
        value = StructType().add("value", VariantType())
        corrupt = given.text("columnNameOfCorruptRecord")
        if corrupt is None:
            return cls("variant", mode, value, value)
        _check_corrupt_name(corrupt, metadata, value)
        columns = StructType([*value.fields]).add(corrupt, StringType())
        return cls("variant", mode, columns, value, corrupt_column=corrupt)

    @classmethod
    def _typed(cls, given: Given, format: Format, mode: Mode, metadata: Sequence[str]) -> PayloadOptions:
        message = _message(given) if format == "protobuf" else None
        schema = _schema(given, format) if message is None else None
        found = message.columns if schema is None and message is not None else cast(PayloadSchema, schema).columns
        fields = cast(StructType, as_nullable(found))
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
        rescued = _rescued(given, metadata, columns)
        if rescued is not None:
            columns = StructType([*columns.fields]).add(rescued, StringType())
        kept = corrupt if has_corrupt else None
        is_framed = given.one_of("payloadFraming", "none", ("none", "confluent")) == "confluent"
        return cls(format, mode, columns, fields, column, schema, kept, rescued, registry_of(given), message, is_framed)

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
        formats = _OF_SOME.get(name, _WITH_FIELDS)
        if given.has(name) and format not in formats:
            expected = " or ".join(filter(None, (", ".join(formats[:-1]), formats[-1])))
            raise ConfigError(
                f"option {name} requires payloadFormat {expected}, and payloadFormat "
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


def _rescued(given: Given, metadata: Sequence[str], columns: StructType) -> str | None:
    """`rescuedColumn`, a name that no other column has."""
    if not given.has("rescuedColumn"):
        return None
    name = given.text("rescuedColumn") or ""
    taken = name.lower() in (*metadata, *(other.lower() for other in columns.names))
    if not name or taken:
        why = f"there is a column {name!r} already" if taken else "it is empty"
        raise ConfigError(
            f'option rescuedColumn: {why}: choose a name, .option("rescuedColumn", "_rescued")', option="rescuedColumn"
        )
    return name


def _message(given: Given) -> MessageType:
    """Raises ConfigError: the file or the message cannot be found."""
    file, name = given.text("descriptorFile"), given.text("messageName")
    for option, value in (("descriptorFile", file), ("messageName", name)):
        if not value:
            raise ConfigError(
                f"option {option} is missing: payloadFormat protobuf requires a descriptor set (protoc "
                "--include_imports --descriptor_set_out=FILE) and the name of a message in it",
                option=option,
            )
    return MessageType.find(read_files(str(file)), str(name))


def registry_of(given: Given) -> SchemaRegistry | None:
    """Raises ConfigError: the options about the registry are wrong."""
    place = given.text("schemaRegistry")
    if not place:
        for name in REGISTRY_OPTIONS:
            if given.has(name):
                raise ConfigError(
                    "option schemaRegistry is missing: give the URL of a schema registry, or a folder with .avsc files",
                    option="schemaRegistry",
                )
        return None
    registry = SchemaRegistry(place, given.text("schemaRegistryAuthFile"), given.text("schemaRegistryCaFile"))
    registry.check()
    return registry


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
