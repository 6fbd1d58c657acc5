"""Texts that Spark hands to the connector: offsets of a checkpoint, options, schemas of payloads."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pyspark.sql.types import StructType

from natslog.errors import ConfigError, InvalidRequest
from pyspark_natslog.payload.avro_rows import AvroDecoder
from pyspark_natslog.payload.schema_text import _is_path, parse_payload_schema
from pyspark_natslog.payload.tree import Tree, as_nullable
from pyspark_natslog.sink.options import SinkOptions
from pyspark_natslog.source.offsets import from_json, to_json
from pyspark_natslog.source.options import SourceOptions
from tests.fuzz.target import target
from tests.golden.test_golden import HERE as GOLDEN
from tests.unit.connector.payload.test_avro import record

# ---- offsets ----


def _offsets() -> Iterator[bytes]:
    yield (GOLDEN / "spark-offsets-v1.json").read_bytes()
    yield (GOLDEN / "spark-offsets-v1-epoch.json").read_bytes()
    yield b'{"orders": {"id": "3e", "offset": 42, "epoch": 5}, "returns": {"id": "9a", "offset": 7, "start": 0}}'
    yield b'{"orders": {"id": "3e", "offset": 90000, "epoch": 5, "tasks": [[1, 40000], [0, 90000]]}}'
    yield b'{"orders": {"id": "3e", "offset": 1e3}}'
    yield b'{"topic": {"0": 23}}'


_OFFSET_WORDS = [
    b'"id": "3e"', b'"offset": 42', b'"start": ', b'"epoch": ', b'"tasks": [[', b"Infinity", b"-1", b"NaN", b"true",
    b"null",
    b"1e400", b'"7"', b"[", b"{", b"4.5",
]  # fmt: skip


@target("offsets", _offsets, _OFFSET_WORDS)
def check_offsets(data: bytes) -> None:
    """A position in a checkpoint is refused (ConfigError), or it is what the text states, in the form in which it is
    written: whole numbers of at least 0, with all fields that natslog has.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):  # Spark reads the JSON before
        return
    try:
        positions = from_json(body)
    except ConfigError:
        return
    written = to_json(positions)
    assert from_json(json.loads(json.dumps(written))) == positions
    for name, at in body.items():
        mine = written[name]
        for field in ("id", "offset", "tasks"):
            stated = at.get(field, [] if field == "tasks" else None)
            kept = mine.get(field, [] if field == "tasks" else None)
            assert json.dumps(stated) == json.dumps(kept), f"{field} {stated!r} is read as {kept!r}"
        assert mine["offset"] >= 0
        assert at.get("start") == mine.get("start")
        assert (at.get("epoch") or 0) == mine.get("epoch", 0)


# ---- options ----


def _options() -> Iterator[bytes]:
    def lines(**options: str) -> bytes:
        return "\n".join(f"{name}={value}" for name, value in options.items()).encode()

    servers = {"servers": "http://log1:9292,http://log2:9292"}
    yield b"\0" + lines(**servers, stream="orders, returns", startingOffsets='{"orders": 42, "returns": "latest"}')
    yield b"\1" + lines(
        **servers, stream="orders", startingTimestamp='{"orders": "2026-11-20T10:30:00Z"}', endingOffsets="latest"
    )
    yield b"\2" + lines(
        **servers,
        streamPattern="orders-*",
        maxOffsetsPerTrigger="1000",
        minOffsetsPerTrigger="10",
        maxTriggerDelay="1m",
    )
    yield b"\0" + lines(
        **servers,
        stream="orders",
        payloadFormat="json",
        payloadSchema="id BIGINT, user STRUCT<a: STRING>",
        mode="FAILFAST",
    )
    yield b"\1" + lines(
        **servers, group="g", minPartitions="8", maxBytesPerPartition="64MB", readFrom="any", columns="offset,value"
    )
    yield b"\2" + lines(**servers, stream="orders", maxOffsetsPerTrigger="9" * 5000)
    yield b"\3" + lines(natsUrl="nats://localhost:4222", subject="orders.new", ack="stored", servers="http://log1:9292")


_OPTION_WORDS = [
    b"startingOffsets=", b"endingOffsets={", b"startingTimestamp={", b"maxOffsetsPerTrigger=", b"minPartitions=", b"\n",
    b"payloadSchema=", b"payloadFormat=avro", b"payloadColumn=", b"columns=", b"subjectFilter=", b"cursor=",
    b"[" * 3000,
    b"array<" * 500, b"9" * 4400, b'{"a":' * 3000, b"\xd9\xa3", b"decimal(", b"fetchRetries=", b"natsUrl=", b"ack=",
]  # fmt: skip


@target("options", _options, _OPTION_WORDS)
def check_options(data: bytes) -> None:
    """Options of source and sink are refused (ConfigError), or they are checked: streams are named or selected, bounds
    are offsets or times, limits are above 0.
    """
    kind = (data[0] if data else 0) % 4
    text = data[1:].decode("utf-8", "replace")
    options = dict(line.split("=", 1) for line in text.split("\n") if "=" in line)
    if any(name.lower() == "payloadschema" and _is_path(value.strip()) for name, value in options.items()):
        return  # names a file
    try:
        if kind == 3:
            SinkOptions.parse(options)
            return
        source = SourceOptions.parse(options, streaming=(None, False, True)[kind])
    except ConfigError:
        return
    assert source.servers
    assert source.selection.names or source.selection.pattern or source.selection.group
    for bound in (source.start, source.end):
        for position in bound.positions.values():
            assert position in ("earliest", "latest") or (isinstance(position, int) and position >= 0)
    for limit in (source.admission.max_rows, source.admission.max_bytes, source.cutting.max_bytes):
        assert limit is None or limit > 0
    source.selected_columns()


# ---- schemas ----


def _schemas() -> Iterator[bytes]:
    yield b"id BIGINT, user STRUCT<name: STRING, tags: ARRAY<STRING>> NOT NULL COMMENT 'x', `a b` decimal(10, 2)"
    yield b"struct<m: map<string, array<int>>, t: timestamp_ntz>"
    fields = '[{"name": "a", "type": "long", "nullable": true, "metadata": {}}]'
    yield f'{{"type": "struct", "fields": {fields}}}'.encode()
    array = {"type": "array", "items": "string"}
    fixed = {"type": "fixed", "name": "F", "size": 4, "logicalType": "decimal", "precision": 6}
    enum = {"type": "enum", "name": "E", "symbols": ["A"]}
    yield json.dumps(record(("a", ["null", "long"]), ("b", array))).encode()
    yield json.dumps(record(("e", enum), ("f", fixed))).encode()
    yield b'[{"type":"record"}]'


_SCHEMA_WORDS = [
    b"array<", b"map<string,", b"struct<", b">", b"decimal(", b"BIGINT", b" NOT NULL", b" COMMENT ", b"`", b"'", b", ",
    b'{"type":"record","name":"R","fields":[', b'"type":', b'"items":', b'"symbols":', b'"size":', b'"precision":',
    b'"logicalType":"decimal"', b'"name":', b"null", b"[" * 2000, b"array<" * 400, b'{"type":' * 1000, b"9" * 4400,
    b"\xc2\xb2",
    b'"namespace":', b'"fields":',
]  # fmt: skip


@target("schemas", _schemas, _SCHEMA_WORDS)
def check_schemas(data: bytes) -> None:
    """A schema of payloads is refused (InvalidRequest), or it has columns for which a decoder can be made."""
    text = data.decode("utf-8", "replace").strip()
    if _is_path(text):
        return
    try:
        schema = parse_payload_schema(text)
    except InvalidRequest:
        return
    assert isinstance(schema.columns, StructType)
    assert schema.columns.fields
    nullable = as_nullable(schema.columns)
    Tree.of(nullable)
    if schema.avro is not None:
        AvroDecoder(schema.avro, schema.fingerprint, schema.columns.names)
