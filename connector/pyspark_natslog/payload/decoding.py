"""From stored batches to the requested columns. Modes and the corrupt-record column are implemented here only."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import StructType

from natslog.arrow.payloads import Payloads
from natslog.arrow.schema import COLUMNS
from natslog.errors import MalformedPayload
from natslog.wire import library
from pyspark_natslog.payload.options import PayloadOptions
from pyspark_natslog.payload.rows import Decoded, Decoder
from pyspark_natslog.source.buckets import BUCKET_METADATA, Bucket
from pyspark_natslog.source.schema import METADATA_COLUMNS, to_spark

if TYPE_CHECKING:
    from pyspark_natslog.payload.rescued import Rescuer

logger = logging.getLogger("pyspark_natslog")

_CHUNK_BYTES = 2 * 1024 * 1024  # payload decoded at once: small enough for caches, large enough for Arrow
_CHUNK_ROWS = 64 * 1024
_WORTH_LEAVING_OUT = 0.25  # of the bytes: below it, sending batches as stored costs less than building new ones


class Shaper:
    """Turns stored batches into batches of these columns in this order.

    Args:
        payload: how payloads are read. `columns`: metadata and payload columns, in the requested order. bucket: whose
            columns these are; None: those of a stream.
    """

    def __init__(
        self,
        payload: PayloadOptions,
        columns: Sequence[str],
        bucket: Bucket | None = None,
        *,
        headers_as_map: bool = False,
    ) -> None:
        self._payload, self._bucket = payload, bucket
        self._headers_as_map = headers_as_map
        self._columns = tuple(columns)
        metadata = METADATA_COLUMNS if bucket is None else BUCKET_METADATA
        self._metadata = [name for name in columns if name in metadata]
        self._typed = [name for name in columns if name not in metadata]
        self._rescuer = _rescuer(payload, self._typed)
        self._decoder = None if payload.format == "binary" or not self._typed else _decoder(payload, self._typed)

    @property
    def needed_columns(self) -> list[str]:
        """The stored columns that the requested ones are made of; and `offset`, which errors name."""
        stored = [name for name in self._metadata if name != "stream"]
        if self._bucket is not None:
            stored = self._bucket.stored_columns(stored)
        return list(dict.fromkeys(["offset", *stored, *(["value"] if self._typed else [])]))

    @cached_property
    def _spare_columns(self) -> list[str]:
        needed = self.needed_columns
        return [name for name in COLUMNS if name not in needed]

    @property
    def is_payload_needed(self) -> bool:
        return bool(self._typed)

    def needs_little_of(self, batch: Any) -> bool:
        """Whether many of these stored bytes are in columns that are not read, for example in long headers."""
        spare = sum(batch.column(name).nbytes for name in self._spare_columns)
        return bool(spare > batch.get_total_buffer_size() * _WORTH_LEAVING_OUT)

    def shape(self, batch: Any, stream: str) -> Iterator[Any]:
        """A stored batch's rows.

        Raises:
            MalformedPayload: with mode FAILFAST.
        """
        if self._bucket is not None:
            batch = self._bucket.rows(batch)
        if self._decoder is None:
            yield to_spark(batch, stream, self._columns, headers_as_map=self._headers_as_map)
            return
        for chunk in _chunks(batch):
            yield self._decoded(self._decoder, chunk, stream)

    def _decoded(self, decoder: Decoder, chunk: Any, stream: str) -> Any:
        payloads = Payloads.of(chunk.column("value"))
        decoded = decoder.decode(payloads)
        metadata = to_spark(chunk, stream, self._metadata, headers_as_map=self._headers_as_map)
        parents = decoded.parents
        if self._payload.mode == "FAILFAST" and decoded.malformed.any():
            raise _failure(decoded, chunk, stream)
        shaped = self._payload_columns(decoded, payloads)
        if parents is not None:
            taken = pa.array(parents)
            metadata = metadata.take(taken)
        by_name = dict(zip(self._metadata, metadata.columns, strict=True)) | shaped
        found = pa.RecordBatch.from_arrays([by_name[name] for name in self._columns], names=list(self._columns))
        if self._payload.mode == "DROPMALFORMED" and decoded.malformed.any():
            malformed = decoded.malformed if parents is None else decoded.malformed[parents]
            return found.filter(pa.array(~malformed))
        return found

    def _payload_columns(self, decoded: Decoded, payloads: Payloads) -> dict[str, Any]:
        """The wanted columns that are made of payloads, by name."""
        column, corrupt = self._payload.column, self._payload.corrupt_column
        shaped = {name: decoded.arrays.get(name) for name in self._typed}
        if column is not None and column in shaped:
            shaped[column] = _nested(self._payload.fields, decoded, payloads)
        if corrupt is not None and corrupt in shaped:
            shaped[corrupt] = self._corrupt(decoded, payloads)
        if self._rescuer is not None:
            assert self._payload.rescued_column is not None, "of this column"
            shaped[self._payload.rescued_column] = self._rescuer.rescued(payloads)
        return shaped

    def _corrupt(self, decoded: Decoded, payloads: Payloads) -> Any:
        """The column of malformed payloads: JSON as text, others in base64; null for the other payloads."""
        rows = len(payloads) if decoded.parents is None else len(decoded.parents)
        if not decoded.malformed.any():
            return pa.nulls(rows, pa.string())
        bad = np.flatnonzero(decoded.malformed)
        texts = pa.array([self._as_text(payloads[int(row)]) for row in bad], pa.string())
        places = np.full(len(payloads), -1, np.int64)
        places[bad] = np.arange(len(bad))
        places = places if decoded.parents is None else places[decoded.parents]
        return texts.take(pa.array(places, mask=places < 0))

    def _as_text(self, payload: bytes) -> str:
        if self._payload.format in ("json", "variant"):
            return payload.decode("utf-8", "replace")
        return base64.b64encode(payload).decode()


def _nested(fields: StructType, decoded: Decoded, payloads: Payloads) -> Any:
    """The decoded fields as one struct column, on the same buffers; null where a payload holds nothing."""
    kind = to_arrow_type(fields, timezone="UTC")
    blank = payloads.are_empty if decoded.blank is None else decoded.blank
    blank = blank if decoded.parents is None else blank[decoded.parents]
    return pa.StructArray.from_arrays(
        [decoded.arrays[name] for name in fields.names],
        fields=[kind.field(at) for at in range(kind.num_fields)],
        mask=pa.array(blank) if blank.any() else None,
    )


def _failure(decoded: Decoded, chunk: Any, stream: str) -> MalformedPayload:
    row = int(np.flatnonzero(decoded.malformed)[0])
    offset = chunk.column("offset")[row].as_py()
    return MalformedPayload(
        f"stream {stream!r}, offset {offset}: the payload is malformed: {decoded.reason(row)}. Read it with "
        '.option("mode", "PERMISSIVE") (nulls, and the payload in the corrupt-record column) or "DROPMALFORMED"',
        stream=stream,
        offset=offset,
    )


def _warn_if_slow() -> None:
    if (reason := library.reason()) is not None:
        logger.warning("payloads are decoded slowly, because there is no library of compiled kernels: %s", reason)


def _rescuer(payload: PayloadOptions, wanted: Sequence[str]) -> Rescuer | None:
    if payload.rescued_column not in wanted:
        return None
    from pyspark_natslog.payload.rescued import Rescuer  # a slow import, which most reads do not need

    return Rescuer(payload.fields)


def _decoder(payload: PayloadOptions, wanted: Sequence[str]) -> Decoder:
    """The format's decoder for the requested columns; for all, if only the corrupt-record column is requested."""
    if payload.format == "string":
        from pyspark_natslog.payload.string_rows import StringDecoder

        return StringDecoder()
    if payload.format == "variant":
        _warn_if_slow()
        from pyspark_natslog.payload.variant_rows import VariantDecoder

        return VariantDecoder()
    schema = payload.schema
    names = payload.fields.names
    is_all = payload.column is not None  # one column has all fields, whatever their names are
    chosen = names if is_all else [name for name in names if name in wanted] or names
    columns = StructType([payload.fields[name] for name in chosen])
    if payload.message is not None:
        from pyspark_natslog.payload.protobuf_rows import ProtobufDecoder

        return ProtobufDecoder(payload.message, chosen, is_framed=payload.is_framed)
    assert schema is not None, "the other typed formats have a schema"
    if payload.format == "json":
        _warn_if_slow()
        from pyspark_natslog.payload.json_paths import JsonPaths

        return JsonPaths(columns)
    if payload.format == "avro":
        _warn_if_slow()
        from pyspark_natslog.payload.avro_rows import AvroDecoder

        if payload.registry is not None:
            from pyspark_natslog.payload.avro_framed import FramedAvroDecoder

            return FramedAvroDecoder(schema, chosen, payload.registry)
        assert schema.avro is not None, "avro has an Avro schema"
        return AvroDecoder(schema.avro, schema.fingerprint, chosen)
    from pyspark_natslog.payload.arrow_rows import ArrowDecoder

    return ArrowDecoder(columns)


def _chunks(batch: Any) -> Iterator[Any]:
    """The batch in slices of about `_CHUNK_BYTES` of payload; a larger payload is one of its own."""
    if batch.num_rows == 0:
        return
    offsets = Payloads.of(batch.column("value")).offsets
    start = 0
    while start < batch.num_rows:
        limit = int(offsets[start]) + _CHUNK_BYTES
        end = min(max(int(np.searchsorted(offsets, limit, side="right")) - 1, start + 1), start + _CHUNK_ROWS)
        yield batch.slice(start, end - start)
        start = end
