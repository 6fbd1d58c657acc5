"""JSON payloads as variants: `value variant`, as Spark's `parse_json` makes them; the kernel: `kernels_variant`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import VariantType

from natslog.arrow.payloads import Payloads
from pyspark_natslog.payload import native
from pyspark_natslog.payload.json_rows import reals
from pyspark_natslog.payload.kernels_tokens import MOST_NESTED
from pyspark_natslog.payload.kernels_variant import (
    BLANK,
    BROKEN,
    CHILD_FIELDS,
    GOOD,
    HARD_COUNT,
    LEVEL_FIELDS,
    TRAILING,
    TWICE,
)
from pyspark_natslog.payload.rows import Decoded

_REASONS = {
    BROKEN: "it is not valid JSON",
    TWICE: "an object has a member twice",
    TRAILING: "the value is followed by more bytes",
}
_TYPE = to_arrow_type(VariantType())
_GROWTH, _MORE = 8, 64
"""A value takes at most so many bytes for a byte of its text, and so many more: a list of digits takes 3 for 1."""


class VariantDecoder:
    """A payload that is not JSON is malformed; so is an object with two members of one name. Blank ones are null."""

    def decode(self, payloads: Payloads) -> Decoded:
        text = payloads.text
        state = np.zeros(2, np.int64)
        spans = np.empty(len(text) // 2 + 4, np.int32)  # of numbers of three bytes or more
        found = _variants(payloads, (state, spans, np.empty(0)))
        if count := int(state[HARD_COUNT]):
            exact = _numbers(text, spans[: 2 * count])
            found = _variants(payloads, (np.array([0, 1]), spans, exact))
        results, values = found
        return Decoded(
            arrays={"value": values},
            malformed=(results != GOOD) & (results != BLANK),
            reason=lambda row: _REASONS[int(results[row])],
            blank=results == BLANK,
        )


def _variants(payloads: Payloads, hard: tuple[Any, Any, Any]) -> tuple[Any, Any]:
    """(result of each payload, its variant as Arrow has it)."""
    rows, text, offsets = len(payloads), payloads.text, payloads.offsets
    longest = int(np.diff(offsets).max(initial=0)) + 1
    usable, results = np.ones(rows, np.uint8), np.empty(rows, np.uint8)
    native.rows_are_utf8(text, offsets, usable)
    values, metadata = (np.empty(_GROWTH * len(text) + _MORE * (rows + 1), np.uint8) for _ in range(2))
    value_ends, metadata_ends = np.zeros(rows + 1, np.int64), np.zeros(rows + 1, np.int64)
    bits = np.zeros(1, np.int64)
    native.variants_of_json(
        text,
        offsets,
        usable,
        results,
        values,
        value_ends,
        metadata,
        metadata_ends,
        np.empty((MOST_NESTED, LEVEL_FIELDS), np.int64),
        np.empty((longest, CHILD_FIELDS), np.int64),
        np.empty(longest, np.uint8),
        np.empty(longest + 1, np.int64),
        np.zeros((1 << longest.bit_length(), 2), np.int64),
        (bits, bits.view(np.float64)),
        hard,
    )
    parts = [_binary(values, value_ends), _binary(metadata, metadata_ends)]
    return results, pa.StructArray.from_arrays(parts, fields=list(_TYPE), mask=pa.array(results != GOOD))


def _numbers(text: Any, spans: Any) -> Any:
    """The numbers between these bytes, exactly rounded: float64."""
    edges = np.append(spans, spans[-1]).astype(np.int32)  # each number, and each gap behind it
    buffers = [None, pa.py_buffer(edges), pa.py_buffer(np.ascontiguousarray(text))]
    both = pa.Array.from_buffers(pa.string(), len(edges) - 1, buffers)
    return reals(both.take(pa.array(np.arange(0, len(edges) - 1, 2))), np.float64)


def _binary(text: Any, ends: Any) -> Any:
    buffers = [None, pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(text[: ends[-1]])]
    return pa.Array.from_buffers(pa.binary(), len(ends) - 1, buffers)
