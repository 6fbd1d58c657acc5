"""JSON payloads by one of three paths with equal results: the kernel for usual JSON, Arrow's parser, and the kernel for
everything, which is the reference.

Which path is taken. A schema with a type that a path does not support never goes to it. A chunk goes to the first path
that does not refuse it; the last one refuses nothing. Where a path refuses a chunk, it is left out for the next chunk,
after two refused ones in a row for the next two, then 4, 8, … up to 64: where payloads that it refuses are frequent,
few chunks are read twice. An accepted chunk resets this. The rule holds for a task, which has its own decoder.

Kernels are loaded, and compiled if this machine has not done so, when they are needed: the reference when the first
chunk goes to it, the one for usual JSON when this process has decoded so many bytes by Arrow's parser that loading it
pays off (a quarter of a second, 3 CPU-s for compiling it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pyspark.sql.types import StructType

from natslog.arrow.payloads import Payloads
from natslog.wire import library
from pyspark_natslog.payload.json_arrow import ArrowJson, supports
from pyspark_natslog.payload.rows import Decoded, Decoder

_MOST_SKIPPED = 64
_FLAT_FROM_BYTES = 256 * 1024 * 1024


class _FastDecoder(Protocol):
    def decode(self, payloads: Payloads) -> Decoded | None: ...


class _FastPath:
    """Leaves out its decoder for a while where that refuses."""

    def __init__(self, decoder: _FastDecoder) -> None:
        self._decoder = decoder
        self._to_skip = self._skipped_last = 0

    def decode(self, payloads: Payloads) -> Decoded | None:
        if self._to_skip:
            self._to_skip -= 1
            return None
        found = self._decoder.decode(payloads)
        if found is not None:
            self._skipped_last = 0
        else:
            self._to_skip = self._skipped_last = min(max(1, 2 * self._skipped_last), _MOST_SKIPPED)
        return found


class JsonPaths:
    """Decodes into the columns of `schema`.

    Args:
        schema: nullable throughout, of types that `tree.is_decodable` accepts.
        load_kernel: returns the reference's decoder for the same schema. It is called when the first chunk goes to it.

    Attributes:
        parsed_bytes: by Arrow's parser, of all tasks of this process.
    """

    parsed_bytes = 0

    def __init__(self, schema: StructType, load_kernel: Callable[[], Decoder]) -> None:
        self._schema, self._load_kernel = schema, load_kernel
        self._arrow = _FastPath(ArrowJson(schema, self._reason)) if supports(schema) else None
        self._flat: _FastPath | None = None
        self._has_looked_for_flat = self._arrow is None
        self._kernel: Decoder | None = None

    def decode(self, payloads: Payloads) -> Decoded:
        if not self._has_looked_for_flat and JsonPaths.parsed_bytes >= _FLAT_FROM_BYTES:
            self._has_looked_for_flat = True
            self._flat = _flat_path(self._schema)
        if self._flat is not None and (found := self._flat.decode(payloads)) is not None:
            return found
        if self._arrow is not None and (found := self._arrow.decode(payloads)) is not None:
            JsonPaths.parsed_bytes += len(payloads.text)
            return found
        return self._by_kernel(payloads)

    def _by_kernel(self, payloads: Payloads) -> Decoded:
        if self._kernel is None:
            self._kernel = self._load_kernel()
        return self._kernel.decode(payloads)

    def _reason(self, payloads: Payloads, row: int) -> str:
        return self._by_kernel(payloads.only(row)).reason(0)


def _flat_path(schema: StructType) -> _FastPath | None:
    """None where a column's type is not supported, or nothing compiles the kernel."""
    from pyspark_natslog.payload.json_flat import FlatJson, supports

    return _FastPath(FlatJson(schema)) if library.library() is not None and supports(schema) else None
