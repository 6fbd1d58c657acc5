"""Where the kernels of `kernels_newest` have what in their arrays: `state`, and a row of `entries`."""

from __future__ import annotations

ENTRIES, TEXT_BYTES, NODES, FREE_NODE = 0, 1, 2, 3
START, LENGTH, COUNT, NEWEST, HEAD, TAIL = 0, 1, 2, 3, 4, 5
FIELDS = 6
