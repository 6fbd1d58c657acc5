"""Payloads as text: `value string`, on the buffers of the stored column, without a copy."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from natslog.arrow.payloads import Payloads
from pyspark_natslog.payload import native
from pyspark_natslog.payload.rows import Decoded


class StringDecoder:
    """A payload that is not UTF-8 is malformed."""

    def decode(self, payloads: Payloads) -> Decoded:
        usable = np.empty(len(payloads), np.uint8)
        bad = native.rows_are_utf8(payloads.text, payloads.offsets, usable)
        bitmap = pa.py_buffer(np.packbits(usable, bitorder="little")) if bad else None
        buffers = [bitmap, pa.py_buffer(payloads.offsets), pa.py_buffer(payloads.text)]
        values = pa.Array.from_buffers(pa.string(), len(payloads), buffers, bad)
        return Decoded({"value": values}, malformed=usable == 0, reason=lambda _row: "it is not valid UTF-8")
