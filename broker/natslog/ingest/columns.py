"""Arrow columns of variable length under construction, and the arrays that they consist of: used again and again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.row_buffers import offsets_of
from natslog.wire import native

Array = npt.NDArray[Any]

_SMALLEST = 64


@dataclass(frozen=True, slots=True)
class Texts:
    """An Arrow variable-length column without nulls: `rows + 1` int32 offsets into bytes."""

    offsets: npt.NDArray[np.int32]
    data: npt.NDArray[np.uint8]

    @property
    def size_bytes(self) -> int:
        return int(self.offsets[-1])

    @classmethod
    def of(cls, values: list[bytes]) -> Texts:
        offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
        return cls(offsets, np.frombuffer(b"".join(values), np.uint8))

    def filter(self, keep: npt.NDArray[np.bool_]) -> Texts:
        """Copies of the texts that are marked."""
        kept = self.to_arrow(pa.binary()).filter(pa.array(keep))
        return Texts(offsets_of(kept), np.frombuffer(kept.buffers()[2] or b"", np.uint8))

    def to_arrow(self, kind: pa.DataType) -> pa.Array[Any]:
        buffers = [None, pa.py_buffer(self.offsets), pa.py_buffer(self.data)]
        return pa.Array.from_buffers(kind, len(self.offsets) - 1, buffers)


class Growing:
    """A numpy array that grows by doubling and is used again."""

    __slots__ = ("_array", "count")

    def __init__(self, kind: Any, width: int | None = None) -> None:
        shape = (_SMALLEST,) if width is None else (_SMALLEST, width)
        self._array = np.zeros(shape, kind)
        self.count = 0

    @property
    def values(self) -> Array:
        return self._array[: self.count]

    @property
    def capacity(self) -> int:
        return len(self._array)

    def room_for(self, count: int) -> Array:
        """The whole array, with room for so many more; `count` is the caller's to raise."""
        if self.count + count > len(self._array):
            larger = np.empty(
                (max(self.count + count, 2 * len(self._array)), *self._array.shape[1:]), self._array.dtype
            )
            larger[: self.count] = self.values
            self._array = larger
        return self._array

    def extend(self, values: Array) -> None:
        self.room_for(len(values))[self.count : self.count + len(values)] = values
        self.count += len(values)

    def extend_with_zeros(self, count: int) -> None:
        self.room_for(count)[self.count : self.count + count] = 0
        self.count += count


class Column:
    """A variable-length column under construction."""

    __slots__ = ("_data", "_offsets")

    def __init__(self) -> None:
        self._offsets = Growing(np.int32)
        self._data = Growing(np.uint8)
        self._offsets.count = 1  # the first offset is 0

    @property
    def rows(self) -> int:
        return self._offsets.count - 1

    @property
    def size_bytes(self) -> int:
        return self._data.count

    @property
    def capacity_bytes(self) -> int:
        return self._data.capacity

    def room_for(self, count: int, size_bytes: int) -> tuple[Array, Array]:
        """Data and offsets to be filled from row `rows` on."""
        return self._data.room_for(size_bytes), self._offsets.room_for(count)

    def filled(self, count: int, size_bytes: int) -> None:
        self._data.count += size_bytes
        self._offsets.count += count

    def extend(self, buffer: Array, starts: Array, lengths: Array) -> None:
        """Adds `buffer[start : start + length]` of each row."""
        count, size_bytes = len(starts), int(lengths.sum())
        native.gather(buffer, starts, lengths, *self.room_for(count, size_bytes), self.rows)
        self.filled(count, size_bytes)

    def extend_with(self, offsets: npt.NDArray[np.int32], data: Array) -> None:
        """Adds texts of another column: `data[offsets[i] : offsets[i + 1]]`."""
        count, first = len(offsets) - 1, int(offsets[0])
        size_bytes = int(offsets[-1]) - first
        target, target_offsets = self.room_for(count, size_bytes)
        target[self.size_bytes : self.size_bytes + size_bytes] = data[first : first + size_bytes]
        np.add(
            offsets[1:], self.size_bytes - first,
            out=target_offsets[self._offsets.count : self._offsets.count + count],
        )  # fmt: skip
        self.filled(count, size_bytes)

    def extend_with_one(self, text: Array, count: int) -> None:
        """Adds the same text so many times."""
        edges = np.arange(count + 1, dtype=np.int32) * len(text)
        self.extend_with(edges, np.tile(text, count))

    def extend_with_empty(self, count: int) -> None:
        self._offsets.room_for(count)[self._offsets.count : self._offsets.count + count] = self.size_bytes
        self._offsets.count += count

    @property
    def texts(self) -> Texts:
        return Texts(self._offsets.values, self._data.values)

    def buffers(self, validity: Array | None = None) -> list[Any]:
        return [validity, self._offsets.values, self._data.values]

    def clear(self) -> None:
        self._offsets.count, self._data.count = 1, 0


def edges_and_data(texts: pa.Array[Any]) -> tuple[npt.NDArray[np.int32], Array]:
    """Offsets, and the bytes that they count in, of a column that may be a slice; null is empty."""
    texts = pc.fill_null(texts, b"" if texts.type == pa.binary() else "")
    return offsets_of(texts), np.frombuffer(texts.buffers()[2] or b"", np.uint8)


def bitmap(valid: Array) -> Array | None:
    return None if valid.all() else np.packbits(valid, bitorder="little")
