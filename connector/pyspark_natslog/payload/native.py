"""The kernels that decode payloads, as everybody calls them: see `natslog.wire.native`."""

from __future__ import annotations

from natslog.wire.native import BYTES, INTEGER, LONGS, OFFSETS, REALS, ROWS, WORDS, Array, Group, Kernel
from pyspark_natslog.payload.layout import Columns, Words

_COLUMNS = Group((ROWS, BYTES, LONGS, REALS, BYTES), Columns)
_WORDS = Group((WORDS, Array("uint32"), REALS, Array("float32")), Words)
_BITS, _HARD = Group((LONGS, REALS)), Group((LONGS, OFFSETS, REALS))
_HERE = "pyspark_natslog.payload."

rows_are_utf8 = Kernel(_HERE + "kernels", "rows_are_utf8", BYTES, OFFSETS, BYTES, results=1)
decode_avro = Kernel(
    _HERE + "kernels_avro", "decode_avro", _COLUMNS, ROWS, BYTES, BYTES, OFFSETS, BYTES, ROWS, ROWS, _WORDS
)
decode_flat = Kernel(
    _HERE + "kernels_flat", "decode_flat", BYTES, OFFSETS, ROWS, BYTES, BYTES, LONGS, REALS, BYTES, OFFSETS, INTEGER,
    ROWS, BYTES, results=1,
)  # fmt: skip
decode_json = Kernel(
    _HERE + "kernels_json", "decode_json", _COLUMNS, BYTES, OFFSETS, BYTES, BYTES, ROWS, ROWS, BYTES, BYTES, ROWS
)
rescue_json = Kernel(
    _HERE + "kernels_rescued", "rescue_json", _COLUMNS, BYTES, OFFSETS, BYTES, BYTES, OFFSETS, ROWS, BYTES, BYTES
)
variants_of_json = Kernel(
    _HERE + "kernels_variant", "variants_of_json", BYTES, OFFSETS, BYTES, BYTES, BYTES, LONGS, BYTES, LONGS, ROWS, ROWS,
    BYTES, LONGS, ROWS, _BITS, _HARD,
)  # fmt: skip
