"""Roll-ups: messages that remove all older ones, of their subject or of the whole stream.

A row with the header `Nats-Rollup: sub` or `all` does so where its stream allows it. What it removes follows from the
log, so every replica hides the same messages, with the commit of the row.

Source: JetStream's `Nats-Rollup` (nats-server, `server/stream.go`): the value may have any case; the first header of
the name counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.log.expiry import header_values

ROLLUP_HEADER = "Nats-Rollup"
SUBJECT, ALL = "sub", "all"

Rows = npt.NDArray[np.int64]


def rollup_of(text: str) -> str:
    """The value of a header `Nats-Rollup`, which may be none of `SUBJECT` and `ALL`."""
    return text.strip(" \t").lower()


def rollups_of(headers: pa.Array[Any]) -> tuple[Rows, Rows]:
    """The rows that remove all older messages of their subject, and those that remove all older ones."""
    rows, values = header_values(headers, ROLLUP_HEADER)
    kinds = np.array([rollup_of(text) for text in values.to_pylist()], np.str_)
    return rows[kinds == SUBJECT], rows[kinds == ALL]
