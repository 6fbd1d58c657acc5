"""`payloadSchema=infer` and `payloadSchema=subject:NAME`: a schema takes the place of these words, before the options
are parsed. See `payload.inferring` and `payload.avro_registry`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping

from pyspark.sql.types import StringType, StructType

from natslog.client import NatslogClient
from natslog.errors import ConfigError
from pyspark_natslog.options import Given
from pyspark_natslog.payload import PAYLOAD_OPTIONS
from pyspark_natslog.payload.inferring import schema_of
from pyspark_natslog.payload.options import registry_of
from pyspark_natslog.source.buckets import BUCKET_METADATA
from pyspark_natslog.source.options import FIRST_ANSWER_WITHIN_S, SourceOptions
from pyspark_natslog.source.schema import METADATA_COLUMNS
from pyspark_natslog.source.selection import StreamState

_LOWER_PAYLOAD = {name.lower() for name in PAYLOAD_OPTIONS}
logger = logging.getLogger("pyspark_natslog")

_INFER, _SUBJECT = "infer", "subject:"
_MOST_STREAMS = 16
_ROWS, _FURTHER_ROWS = 1_000, 100_000
"""The newest ones of each stream; the second where a subject filter matches none of the first."""
_MOST_BYTES = 16 * 1024 * 1024


def with_schema(options: Mapping[str, str], schema: StructType | None = None) -> dict[str, str]:
    """The options, with a schema where they have `infer` or `subject:NAME`.

    Args:
        schema: the columns that Spark passes to a reader: they have been inferred before. None: a sample is read, and
            a schema registry must answer.

    Raises:
        ConfigError: another format than JSON, or no message is an object; the registry has no such subject.
        StreamNotFound, BrokerUnavailable, RegistryUnavailable.
    """
    given = {name.lower(): value for name, value in options.items()}
    if given.get("schemaregistry"):
        return _by_registry(given, is_first=schema is None)
    if given.get("payloadschema", "").strip().lower() != _INFER:
        return dict(options)
    if given.get("payloadformat", "").strip().lower() != "json":
        raise ConfigError("option payloadSchema: infer requires payloadFormat json", option="payloadSchema")
    if given.get("columns") and (given.get("rescuedcolumn") or given.get("columnnameofcorruptrecord")):
        raise ConfigError(
            "option columns: with payloadSchema=infer, rescuedColumn and columnNameOfCorruptRecord need all columns: "
            "leave out columns, and select from the DataFrame",
            option="columns",
        )
    found = _sampled(given) if schema is None else _passed(given, schema)
    if not found.fields:  # only the source's own columns are read
        return {name: value for name, value in given.items() if name not in _LOWER_PAYLOAD}
    return given | {"payloadschema": found.json()}


def _by_registry(given: dict[str, str], *, is_first: bool) -> dict[str, str]:
    own = {name: value for name, value in given.items() if name in _LOWER_PAYLOAD}
    registry = registry_of(Given(own, PAYLOAD_OPTIONS))
    assert registry is not None, "it is given"
    text = given.get("payloadschema", "").strip()
    if text.startswith(_SUBJECT):
        return given | {"payloadschema": registry.latest(text.removeprefix(_SUBJECT))}
    if is_first:
        registry.answers()
    return given


def _passed(given: Mapping[str, str], schema: StructType) -> StructType:
    """The payload's part of the columns."""
    column = given.get("payloadcolumn")
    if column is not None:
        inner = next((field.dataType for field in schema.fields if field.name == column), None)
        fields = list(inner.fields) if isinstance(inner, StructType) else []
        corrupt = given.get("columnnameofcorruptrecord")
        return StructType([*fields, *(field for field in schema.fields if field.name == corrupt)])
    others = {*(METADATA_COLUMNS if "bucket" not in given else BUCKET_METADATA), given.get("rescuedcolumn")}
    return StructType([field for field in schema.fields if field.name not in others])


def _sampled(given: Mapping[str, str]) -> StructType:
    payload = _LOWER_PAYLOAD | {"columns"}
    options = SourceOptions.parse({name: value for name, value in given.items() if name not in payload})
    with options.client(FIRST_ANSWER_WITHIN_S) as client:
        states = options.selection.states(client)
        options.selection.require_all(states)
        found = schema_of(_payloads(client, options, list(states.values())[:_MOST_STREAMS]))
    if not found.fields:
        raise ConfigError(
            f"option payloadSchema: {options.selection} has no message with a JSON object to infer a schema from: give "
            'the schema, .option("payloadSchema", "id BIGINT, user STRING")',
            option="payloadSchema",
        )
    corrupt = given.get("columnnameofcorruptrecord")
    if corrupt is not None and corrupt not in found.names:
        found = found.add(corrupt, StringType())
    logger.info("inferred payloadSchema: %s", found.simpleString().removeprefix("struct<").removesuffix(">"))
    return found


def _payloads(client: NatslogClient, options: SourceOptions, states: list[StreamState]) -> Iterator[bytes]:
    left_bytes = _MOST_BYTES
    for state in states:
        for rows in (_ROWS, _FURTHER_ROWS):
            count = 0
            for payload in deque(_newest(client, options, state, rows), _ROWS):
                count, left_bytes = count + 1, left_bytes - len(payload)
                yield payload
                if left_bytes < 0:
                    return
            if count or options.subject_filter is None:
                break


def _newest(client: NatslogClient, options: SourceOptions, state: StreamState, rows: int) -> Iterator[bytes]:
    start = max(state.log_start_offset, state.high_watermark - rows)
    batches = client.read(
        state.name, start, state.high_watermark, subject=options.subject_filter, columns=["value"], expected_id=state.id
    )
    for batch in batches:
        yield from batch.column("value").to_pylist()
