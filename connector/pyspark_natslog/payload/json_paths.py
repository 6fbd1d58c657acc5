"""JSON payloads by one of two kernels with equal results: the one for usual JSON (`json_flat`), and the one for
everything (`json_rows`), which is the reference.

Which path is taken. A schema with a type that the kernel for usual JSON does not support never goes to it; without
compiled kernels none does. A chunk that it refuses goes to the reference, which refuses nothing, and then it is left
out for the next chunk, after two refused ones in a row for the next two, then 4, 8, … up to 64: where payloads that it
refuses are frequent, few chunks are read twice. An accepted chunk resets this. The rule holds for a task, which has its
own decoder.
"""

from __future__ import annotations

from pyspark.sql.types import StructType

from natslog.arrow.payloads import Payloads
from natslog.wire import library
from pyspark_natslog.payload.json_flat import FlatJson, supports
from pyspark_natslog.payload.json_rows import JsonDecoder
from pyspark_natslog.payload.rows import Decoded

_MOST_SKIPPED = 64


class JsonPaths:
    """Decodes into the columns of `schema`: nullable throughout, of types that `tree.is_decodable` accepts."""

    def __init__(self, schema: StructType) -> None:
        self._reference = JsonDecoder(schema)
        self._flat = FlatJson(schema) if library.library() is not None and supports(schema) else None
        self._to_skip = self._skipped_last = 0

    def decode(self, payloads: Payloads) -> Decoded:
        found = self._usual(payloads)
        return self._reference.decode(payloads) if found is None else found

    def _usual(self, payloads: Payloads) -> Decoded | None:
        if self._flat is None:
            return None
        if self._to_skip:
            self._to_skip -= 1
            return None
        found = self._flat.decode(payloads)
        if found is not None:
            self._skipped_last = 0
        else:
            self._to_skip = self._skipped_last = min(max(1, 2 * self._skipped_last), _MOST_SKIPPED)
        return found
