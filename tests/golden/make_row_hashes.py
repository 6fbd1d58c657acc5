"""Made the golden file of rows with their hashes and message ids: `python -m tests.golden.make_row_hashes FOLDER`.

The Spark sinks in Python and in the JVM both have to give these ids: a batch that both have sent is stored once.
Add a file for a new version; never edit the old one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from natslog.arrow.schema import HEADERS_TYPE
from natslog.wire.row_hashes import as_ids, content_digest, position_starts, row_hashes

CONTEXTS = ("", "3f0c8d1e-6a0b-4d58-9f5e-2f9d0d6f7a11:7:0:", "nightly:12:199:", "x" * 128, "ü" * 200)
"""Of one block of BLAKE2b, and of several."""

Row = tuple[str | None, str | None, list[list[str | None]] | None, str | None]
"""Subject, key (hexadecimal), headers, value (hexadecimal)."""


def rows() -> list[Row]:
    """Texts of each length around the words of eight bytes, and each kind of missing text."""
    made: list[Row] = [
        ("orders.new", None, None, b"\x00\xff".hex()),
        ("orders.grün", "", [], ""),
        (None, "6b31", [["Trace", "a"], ["Trace", "b"], ["", ""]], None),
        ("a", None, [["Empty", None], [None, "x" * 31]], "00" * 1000),
    ]
    for length in range(18):
        text = bytes(range(250 - length, 250))
        made.append(("s" * (length + 1), text.hex(), [["h" * length, "v" * (17 - length)]], text[::-1].hex()))
    return made


def hashes_of(made: list[Row], context: str | None, first: int) -> Any:
    subjects, keys, headers, values = zip(*made, strict=True)
    pairs = [None if one is None else [{"key": name, "value": value} for name, value in one] for one in headers]
    binary = [pa.array([None if one is None else bytes.fromhex(one) for one in column], pa.binary())
              for column in (values, keys)]  # fmt: skip
    start = None if context is None else position_starts(context, first, len(made))
    return row_hashes(pa.array(subjects, pa.string()), *binary, pa.array(pairs, HEADERS_TYPE), start)


def vectors() -> dict[str, Any]:
    made = rows()
    return {
        "rows": made,
        "digest": f"{content_digest(hashes_of(made, None, 0)):032x}",
        "ids": [
            {"context": context, "first": first, "ids": as_ids(hashes_of(made, context, first)).to_pylist()}
            for context, first in zip(CONTEXTS, (0, 0, 5, 2**31, 2**40), strict=True)
        ],
    }


if __name__ == "__main__":
    text = json.dumps(vectors(), indent=1, ensure_ascii=False)
    Path(sys.argv[1], "row-hashes-v1.json").write_text(text + "\n")
