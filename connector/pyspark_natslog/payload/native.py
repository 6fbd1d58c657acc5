"""The kernels that decode payloads, as everybody calls them: see `natslog.wire.native`."""

from __future__ import annotations

from natslog.wire.native import BYTES, INTEGER, LONGS, OFFSETS, REALS, WORDS, Array, Group, Kernel
from pyspark_natslog.payload.layout import FIELDS, Columns, Words

_TABLE, _PAIRS, _TRIPLES, _FOURS = (Array("int64", width) for width in (FIELDS, 2, 3, 4))
_COLUMNS = Group((_TABLE.out, BYTES, LONGS.out, REALS.out, BYTES.out), Columns)
_NAMES = Group((_TABLE.out, BYTES, LONGS, REALS, BYTES), Columns)
_WORDS = Group((WORDS.out, Array("uint32").out, REALS, Array("float32")), Words)
_BITS, _HARD = Group((LONGS, REALS.out)), Group((LONGS.out, OFFSETS.out, REALS))
_HERE = "pyspark_natslog.payload."

rows_are_utf8 = Kernel(_HERE + "kernels", "rows_are_utf8", BYTES, OFFSETS, BYTES.out, results=1)
decode_avro = Kernel(
    _HERE + "kernels_avro", "decode_avro", _COLUMNS, Array("int64", 5), BYTES, BYTES, OFFSETS, BYTES.out, _PAIRS.out,
    _TRIPLES.out, _WORDS,
)  # fmt: skip
decode_flat = Kernel(
    _HERE + "kernels_flat", "decode_flat", BYTES, OFFSETS, Array("int64", 6), BYTES, BYTES.out, LONGS.out, REALS.out,
    BYTES.out, OFFSETS.out, INTEGER, _TRIPLES.out, BYTES.out, results=1,
)  # fmt: skip
decode_json = Kernel(
    _HERE + "kernels_json", "decode_json", _COLUMNS, BYTES, OFFSETS, BYTES, BYTES.out, _PAIRS.out, _TRIPLES.out,
    BYTES.out, BYTES.out, _FOURS.out,
)  # fmt: skip
rescue_json = Kernel(
    _HERE + "kernels_rescued", "rescue_json", _NAMES, BYTES, OFFSETS, BYTES, BYTES.out, OFFSETS.out, _FOURS.out,
    BYTES.out, BYTES.out,
)  # fmt: skip
variants_of_json = Kernel(
    _HERE + "kernels_variant", "variants_of_json", BYTES, OFFSETS, BYTES, BYTES.out, BYTES.out, LONGS.out, BYTES.out,
    LONGS.out, _FOURS.out, _PAIRS.out, BYTES.out, LONGS.out, _PAIRS.out, _BITS, _HARD,
)  # fmt: skip
