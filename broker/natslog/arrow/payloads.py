"""The payloads of many messages as the buffers of their column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from natslog.arrow.row_buffers import offsets_of


@dataclass(frozen=True, slots=True)
class Payloads:
    """Payload `r` is `text[offsets[r]:offsets[r + 1]]`: the value column's own buffers.

    Attributes:
        text: uint8. `offsets`: int32, one more than there are payloads.
    """

    text: Any
    offsets: Any

    @classmethod
    def of(cls, values: Any) -> Payloads:
        """Of a binary Arrow array without nulls, or a slice of one."""
        edges, held = offsets_of(values), values.buffers()[2]
        start, end = int(edges[0]), int(edges[-1])
        text = np.zeros(1, np.uint8) if held is None else np.frombuffer(held, np.uint8)[start:end]
        return cls(text, edges - edges[0])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> bytes:
        return bytes(self.text[self.offsets[row] : self.offsets[row + 1]])

    @property
    def are_empty(self) -> Any:
        """A bool per payload (numpy): it has no bytes."""
        return np.diff(self.offsets) == 0

    def buffer(self, row: int) -> Any:
        """The payload as an Arrow buffer, not copied."""
        return pa.py_buffer(self.text[self.offsets[row] : self.offsets[row + 1]])
