"""Avro payloads of several schemas: each names the schema that it was written with, by a header.

    00 | schema id, 4 bytes, big endian | datum          as Confluent's serializers write it
    C3 01 | fingerprint, 8 bytes | datum                 single-object encoding
    datum                                                of exactly payloadSchema

Theory of operation. The payloads of a chunk are grouped by their headers. Each group is decoded by the compiled decoder
of its schema, as if it were a stream of its own, and resolved to `payloadSchema`; then the groups are put back into the
order of the stream. So there is work for each group and each column, and none for each payload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type

from natslog.arrow.payloads import Payloads
from natslog.errors import InvalidRequest
from pyspark_natslog.payload.avro_registry import SchemaRegistry
from pyspark_natslog.payload.avro_resolution import Resolution
from pyspark_natslog.payload.avro_rows import MAGIC, AvroDecoder
from pyspark_natslog.payload.rows import Decoded
from pyspark_natslog.payload.schema_text import PayloadSchema
from pyspark_natslog.payload.tree import as_nullable

_PLAIN, _BY_ID, _BY_FINGERPRINT, _CUT = range(4)
_ID_BYTES, _HEADER_BYTES = 5, 10


@dataclass(slots=True)
class _Group:
    """Payloads of one schema: their rows, and what became of them."""

    rows: Any
    decoded: Decoded | None
    columns: dict[str, Any]
    problem: str = ""


class FramedAvroDecoder:
    """Args: reader: `payloadSchema`. columns: the fields that are wanted. registry: of the writers' schemas."""

    def __init__(self, reader: PayloadSchema, columns: Sequence[str], registry: SchemaRegistry) -> None:
        assert reader.avro is not None, "avro has an Avro schema"
        self._reader, self._avro, self._registry = reader, reader.avro, registry
        self._wanted = tuple(columns)
        self._types = {
            name: to_arrow_type(as_nullable(reader.columns[name].dataType), timezone="UTC") for name in columns
        }
        self._decoders: dict[tuple[int, int], tuple[AvroDecoder, Resolution | None]] = {}

    def decode(self, payloads: Payloads) -> Decoded:
        kinds, keys = _headers(payloads)
        groups = [
            self._group(payloads, kind, key, np.flatnonzero((kinds == kind) & (keys == key)))
            for kind, key in sorted(set(zip(kinds.tolist(), keys.tolist(), strict=True)))
        ]
        order = np.argsort(np.concatenate([group.rows for group in groups]) if groups else np.zeros(0, np.int64))
        arrays = {
            name: pa.concat_arrays([group.columns[name] for group in groups]).take(pa.array(order))
            if groups
            else pa.nulls(0, kind)
            for name, kind in self._types.items()
        }
        malformed = np.zeros(len(payloads), bool)
        for group in groups:
            malformed[group.rows] = True if group.decoded is None else group.decoded.malformed
        return Decoded(arrays=arrays, malformed=malformed, reason=_reasons(groups))

    def _group(self, payloads: Payloads, kind: int, key: int, rows: Any) -> _Group:
        """Raises RegistryUnavailable."""
        if kind == _CUT:
            return self._unreadable(rows, "the header (00 and a schema id of 4 bytes) is cut short")
        try:
            schema = self._schema(kind, key)
        except InvalidRequest as error:
            return self._unreadable(rows, str(error))
        if schema is None:
            what = f"schema id {key}" if kind == _BY_ID else f"fingerprint {key:016x}"
            return self._unreadable(rows, f"{what} is not known to {self._registry.shown}")
        try:
            decoder, resolution = self._decoder(kind, key, schema)
        except InvalidRequest as error:
            return self._unreadable(rows, f"it was written with another schema: {error}")
        decoded = decoder.decode(_chosen(payloads, rows, _ID_BYTES if kind == _BY_ID else 0))
        columns = decoded.arrays if resolution is None else resolution.resolved(decoded.arrays, len(rows))
        if decoded.malformed.any():  # a malformed datum has no defaults
            none = pa.array(np.where(decoded.malformed, -1, np.arange(len(rows))), mask=decoded.malformed)
            columns = {name: column.take(none) for name, column in columns.items()}
        return _Group(rows, decoded, columns)

    def _unreadable(self, rows: Any, problem: str) -> _Group:
        return _Group(rows, None, {name: pa.nulls(len(rows), kind) for name, kind in self._types.items()}, problem)

    def _schema(self, kind: int, key: int) -> PayloadSchema | None:
        if kind == _PLAIN or (kind == _BY_FINGERPRINT and key == self._reader.fingerprint):
            return self._reader
        found = self._registry.by_id(key) if kind == _BY_ID else self._registry.by_fingerprint(key)
        if found is not None and found.avro is None:
            raise InvalidRequest("the schema that it was written with is no Avro schema")
        return found

    def _decoder(self, kind: int, key: int, schema: PayloadSchema) -> tuple[AvroDecoder, Resolution | None]:
        """Raises InvalidRequest: the schemas do not match."""
        assert schema.avro is not None, "it was checked"
        found = self._decoders.get((kind, key))
        if found is None:
            header = None if kind == _BY_ID else schema.fingerprint
            if schema is self._reader:
                found = AvroDecoder(schema.avro, header, self._wanted), None
            else:
                resolution = Resolution(schema.avro, self._avro, self._wanted)
                fields = resolution.writer_fields or [schema.avro.names[0]]
                found = AvroDecoder(schema.avro, header, fields), resolution
            self._decoders[kind, key] = found
        return found


def _headers(payloads: Payloads) -> tuple[Any, Any]:
    """(kind, id or fingerprint) of each payload; both numpy."""
    text, starts = payloads.text, payloads.offsets[:-1].astype(np.int64)
    lengths = np.diff(payloads.offsets)
    kinds, keys = np.zeros(len(payloads), np.int64), np.zeros(len(payloads), np.uint64)

    def byte(at: int, rows: Any) -> Any:
        return text[starts[rows] + at].astype(np.uint64)

    short = np.flatnonzero((lengths > 0) & (lengths < _ID_BYTES))
    kinds[short[byte(0, short) == 0]] = _CUT
    by_id = np.flatnonzero(lengths >= _ID_BYTES)
    by_id = by_id[byte(0, by_id) == 0]
    kinds[by_id] = _BY_ID
    for at in range(1, _ID_BYTES):
        keys[by_id] = keys[by_id] << np.uint64(8) | byte(at, by_id)
    single = np.flatnonzero(lengths >= _HEADER_BYTES)
    single = single[(byte(0, single) == MAGIC[0]) & (byte(1, single) == MAGIC[1])]
    kinds[single] = _BY_FINGERPRINT
    for at in range(_HEADER_BYTES - 1, len(MAGIC) - 1, -1):
        keys[single] = keys[single] << np.uint64(8) | byte(at, single)
    return kinds, keys


def _chosen(payloads: Payloads, rows: Any, header_bytes: int) -> Payloads:
    """Some of the payloads, without their headers. All of them, without one, are not copied."""
    if len(rows) == len(payloads) and not header_bytes:
        return payloads
    starts, ends = payloads.offsets[rows] + header_bytes, payloads.offsets[rows + 1]
    edges = np.empty(2 * len(rows) + 1, np.int32)  # each payload, and each gap behind it
    edges[0:-1:2], edges[1::2] = starts, ends
    edges[-1] = edges[-2] if len(rows) else 0
    spans = pa.Array.from_buffers(
        pa.binary(), len(edges) - 1, [None, pa.py_buffer(edges), pa.py_buffer(np.ascontiguousarray(payloads.text))]
    )
    return Payloads.of(spans.take(pa.array(np.arange(0, len(edges) - 1, 2))))


def _reasons(groups: list[_Group]) -> Callable[[int], str]:
    def reason(row: int) -> str:
        for group in groups:
            place = int(np.searchsorted(group.rows, row))
            if place < len(group.rows) and group.rows[place] == row:
                return group.problem if group.decoded is None else group.decoded.reason(place)
        raise AssertionError("each payload is in a group")

    return reason
