"""JSON payloads by one of two paths with equal results: Arrow's parser, and the compiled kernel for what it refuses.

Which path is taken: a schema with a type that Arrow's parser does not support goes to the kernel. Otherwise a chunk
goes to Arrow's parser; if it refuses the chunk, to the kernel. After a refused chunk the next chunk goes to the kernel
at once, after two refused ones in a row the next two, then 4, 8, … up to 64: where malformed payloads are frequent,
few chunks are decoded twice. An accepted chunk resets this. The rule holds for a task, which has its own decoder.

The kernel is imported, and so compiled or loaded, only when a chunk goes to it.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql.types import StructType

from pyspark_natslog.payload.json_arrow import ArrowJson, supports
from pyspark_natslog.payload.rows import Decoded, Decoder, Payloads

_MOST_SKIPPED = 64


class JsonPaths:
    """Decodes into the columns of `schema`.

    Args:
        schema: nullable throughout, of types that `tree.is_decodable` accepts.
        load_kernel: returns the kernel's decoder for the same schema. It is called when the first chunk goes to it.
    """

    def __init__(self, schema: StructType, load_kernel: Callable[[], Decoder]) -> None:
        self._load_kernel = load_kernel
        self._fast = ArrowJson(schema, self._reason) if supports(schema) else None
        self._kernel: Decoder | None = None
        self._to_skip = self._skipped_last = 0

    def decode(self, payloads: Payloads) -> Decoded:
        if self._fast is None:
            return self._by_kernel(payloads)
        if self._to_skip:
            self._to_skip -= 1
            return self._by_kernel(payloads)
        found = self._fast.decode(payloads)
        if found is not None:
            self._skipped_last = 0
            return found
        self._to_skip = self._skipped_last = min(max(1, 2 * self._skipped_last), _MOST_SKIPPED)
        return self._by_kernel(payloads)

    def _by_kernel(self, payloads: Payloads) -> Decoded:
        if self._kernel is None:
            self._kernel = self._load_kernel()
        return self._kernel.decode(payloads)

    def _reason(self, payloads: Payloads, row: int) -> str:
        return self._by_kernel(payloads.only(row)).reason(0)
