"""From stored batches to the columns asked for: the one place that knows modes and the corrupt-record column."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructField, StructType

from natslog.errors import MalformedPayload
from pyspark_natslog.payload.options import PayloadOptions
from pyspark_natslog.payload.rows import Decoded, Decoder, Payloads
from pyspark_natslog.source.schema import METADATA_COLUMNS, to_spark

logger = logging.getLogger("pyspark_natslog")

_CHUNK_BYTES = 2 * 1024 * 1024  # payload decoded at once: small enough for caches, large enough for Arrow
_CHUNK_ROWS = 64 * 1024
_WORTH_LEAVING_OUT = 0.25  # of the bytes: below, batches as they lie in the file cost less than batches made anew


class Shaper:
    """Turns stored batches into what Spark expects: these columns in this order.

    Args:
        payload: how payloads are read. `columns`: metadata and payload columns, in the order wanted.
    """

    def __init__(self, payload: PayloadOptions, columns: Sequence[str]) -> None:
        self._payload = payload
        self._columns = tuple(columns)
        self._metadata = [name for name in columns if name in METADATA_COLUMNS]
        self._typed = [name for name in columns if name not in METADATA_COLUMNS]
        self._decoder = None if payload.format == "binary" or not self._typed else _decoder(payload, self._typed)

    @property
    def needed_columns(self) -> list[str]:
        """The stored columns that the wanted ones are made of; `offset` to name rows by."""
        stored = (name for name in self._metadata if name != "stream")
        return list(dict.fromkeys(["offset", *stored, *(["value"] if self._typed else [])]))

    @property
    def is_payload_needed(self) -> bool:
        return bool(self._typed)

    def needs_little_of(self, batch: Any) -> bool:
        """Whether much of these stored bytes is in columns that are not read: long headers, say."""
        needed = sum(batch.column(name).nbytes for name in self.needed_columns)
        return bool(batch.nbytes - needed > batch.nbytes * _WORTH_LEAVING_OUT)

    def shape(self, batch: Any, stream: str) -> Iterator[Any]:
        """A stored batch's rows.

        Raises:
            MalformedPayload: with mode FAILFAST.
        """
        if self._decoder is None:
            yield to_spark(batch, stream, self._columns)
            return
        for chunk in _chunks(batch):
            yield self._decoded(self._decoder, chunk, stream)

    def _decoded(self, decoder: Decoder, chunk: Any, stream: str) -> Any:
        payloads = Payloads.of(chunk.column("value"))
        decoded = decoder.decode(payloads)
        metadata = to_spark(chunk, stream, self._metadata)
        parents = decoded.parents
        if self._payload.mode == "FAILFAST" and decoded.malformed.any():
            raise _failure(decoded, chunk, stream)
        shaped = {name: decoded.arrays.get(name) for name in self._typed}
        if self._payload.corrupt_column in shaped:
            shaped[self._payload.corrupt_column] = self._corrupt(decoded, payloads)
        if parents is not None:
            taken = pa.array(parents)
            metadata = metadata.take(taken)
        by_name = dict(zip(self._metadata, metadata.columns, strict=True)) | shaped
        found = pa.RecordBatch.from_arrays([by_name[name] for name in self._columns], names=list(self._columns))
        if self._payload.mode == "DROPMALFORMED" and decoded.malformed.any():
            malformed = decoded.malformed if parents is None else decoded.malformed[parents]
            return found.filter(pa.array(~malformed))
        return found

    def _corrupt(self, decoded: Decoded, payloads: Payloads) -> Any:
        """The column of malformed payloads: as text, or where the format is binary in base64; null for all others."""
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
        if self._payload.format == "json":
            return payload.decode("utf-8", "replace")
        return base64.b64encode(payload).decode()


def _failure(decoded: Decoded, chunk: Any, stream: str) -> MalformedPayload:
    row = int(np.flatnonzero(decoded.malformed)[0])
    offset = chunk.column("offset")[row].as_py()
    return MalformedPayload(
        f"stream {stream!r}, offset {offset}: the payload is malformed: {decoded.reason(row)}. Read it with "
        '.option("mode", "PERMISSIVE") (nulls, and the payload in the corrupt-record column) or "DROPMALFORMED"',
        stream=stream,
        offset=offset,
    )


def _warn_without_numba() -> None:
    from natslog.wire.compiled import HAVE_NUMBA  # takes as long as all the rest; untyped reads do without

    if not HAVE_NUMBA:
        logger.warning(
            'numba is not installed here: payloads are decoded slowly; pip install "natslog[spark]" cures it'
        )


def _decoder(payload: PayloadOptions, wanted: Sequence[str]) -> Decoder:
    """The format's decoder of the columns wanted; of all, where only the corrupt-record column is."""
    from pyspark_natslog.payload.string_rows import StringDecoder

    if payload.format == "string":
        return StringDecoder()
    schema = payload.schema
    assert schema is not None, "typed formats have a schema"
    if payload.format != "arrow":
        _warn_without_numba()
    names = [name for name in payload.columns.names if name != payload.corrupt_column]
    chosen = [name for name in names if name in wanted] or names
    columns = StructType([StructField(name, payload.types[name]) for name in chosen])
    if payload.format == "json":
        from pyspark_natslog.payload.json_rows import JsonDecoder

        return JsonDecoder(columns)
    if payload.format == "avro":
        from pyspark_natslog.payload.avro_rows import AvroDecoder

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
