"""The newest rows of each subject, or of each key: what a limit per subject, compaction and lookups are based on.

Theory of operation. A hash table of texts; each has a queue of its newest offsets, as many as the limit. Rows are added
in the order of the log, a batch at a time, by a kernel without Python code for each row; it returns the offsets that
newer rows have superseded. Rows that were removed on request count like all others, so the result follows from the log
alone.

Memory: some 90 bytes and the text for each distinct text, and 12 bytes for each offset that a text keeps, where it may
keep several. A table with more than a million texts is in files without a name, which the system keeps in memory as far
as it can.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap64

from natslog.log.removed import offset_set, to_array
from natslog.wire import native
from natslog.wire.newest_layout import COUNT, ENTRIES, FREE_NODE, HEAD, LENGTH, NEWEST, NODES, START, TAIL, TEXT_BYTES
from natslog.wire.outgoing import texts_of

Offsets = npt.NDArray[np.int64]

_FEWEST_ENTRIES, _FEWEST_TEXT_BYTES, _FEWEST_SLOTS = 256, 8192, 1024
_FIELDS = 6
_TEXTS_AT_ONCE = 100_000
_IN_MEMORY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of an Arrow array. `present`: marks of those that are not null; empty: all."""

    offsets: npt.NDArray[np.int32]
    data: npt.NDArray[np.uint8]
    present: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, column: pa.Array[Any]) -> Texts:
        offsets, data = texts_of(column)
        present = np.ones(0, np.bool_)
        if column.null_count:
            present = np.asarray(column.is_valid())
        return cls(offsets, data, present)


class NewestRows:
    """See the module. Not thread-safe.

    Args:
        limit: how many of the newest offsets of a text are kept.
    """

    def __init__(self, limit: int = 1) -> None:
        self.limit = limit
        self._slots = np.zeros((_FEWEST_SLOTS, 2), np.uint64)
        self._entries = np.zeros((_FEWEST_ENTRIES, _FIELDS), np.int64)
        self._texts = np.zeros(_FEWEST_TEXT_BYTES, np.uint8)
        self._node_offsets, self._node_nexts = np.zeros(0, np.int64), np.zeros(0, np.int32)
        self._state = np.array([0, 0, 0, -1], np.int64)
        self._word = np.zeros(1, np.uint64)

    def __len__(self) -> int:
        return int(self._state[ENTRIES])

    @property
    def memory_bytes(self) -> int:
        arrays = (self._slots, self._entries, self._texts, self._node_offsets, self._node_nexts)
        return sum(one.nbytes for one in arrays)

    def add(self, texts: Texts, rows: Offsets) -> Offsets:
        """Rows with ascending offsets, newer than all before. Returns the offsets that are superseded by now."""
        self._make_room(texts, len(rows))
        superseded = np.empty(len(rows), np.int64)
        count = native.note_rows(
            texts.offsets, texts.data, texts.present, rows, self.limit,
            self._slots, self._entries, self._texts, self._node_offsets, self._node_nexts,
            self._state, self._word, self._word.view(np.uint8), superseded,
        )  # fmt: skip
        return superseded[:count]

    def change_limit(self, limit: int) -> Offsets:
        """Each text keeps `limit` offsets from now on. Returns the offsets that are superseded by that."""
        was, self.limit = self.limit, limit
        if was == limit:
            return np.empty(0, np.int64)
        if was == 1:
            self._reserve_nodes(len(self))
            native.make_queues(self._entries, self._node_offsets, self._node_nexts, self._state)
            return np.empty(0, np.int64)
        superseded = np.empty(int(self._state[NODES]), np.int64)
        count = native.shorten_queues(
            limit, self._entries, self._node_offsets, self._node_nexts, self._state, superseded
        )
        if limit == 1:
            self._node_offsets, self._node_nexts = np.zeros(0, np.int64), np.zeros(0, np.int32)
            self._state[NODES], self._state[FREE_NODE] = 0, -1
        return superseded[:count]

    def newest(self) -> Offsets:
        """The newest offset of each text, in ascending order."""
        return np.sort(self._entries[: len(self), NEWEST])

    def kept(self) -> Offsets:
        """All offsets that a text keeps, in ascending order."""
        if self.limit == 1:
            return self.newest()
        used = np.ones(int(self._state[NODES]), np.bool_)
        node = int(self._state[FREE_NODE])
        while node >= 0:
            used[node] = False
            node = int(self._node_nexts[node])
        return np.sort(self._node_offsets[: len(used)][used])

    def newest_of(self, texts: Texts) -> Offsets:
        """The newest offset of each of these texts; -1 where it has none."""
        return self._of_each(native.newest_of_texts, texts)

    def oldest_of(self, texts: Texts) -> Offsets:
        """The oldest offset that each of these texts keeps; -1 where it has none."""
        if self.limit == 1 or not self._state[NODES]:
            return self.newest_of(texts)
        found = self._find(texts)
        at = np.maximum(found, 0)
        has_any = (found >= 0) & (self._entries[at, COUNT] > 0)
        return np.where(has_any, self._node_offsets[np.where(has_any, self._entries[at, HEAD], 0)], -1)

    def newest_of_text(self, text: str) -> int:
        """The newest offset of this text; -1 if it has none."""
        return int(self.newest_of(Texts.of(pa.array([text])))[0])

    def queue_of(self, text: str | bytes) -> list[int]:
        """The offsets that this text keeps, in ascending order."""
        texts = Texts.of(pa.array([text]))
        found = int(self._find(texts)[0])
        if found < 0:
            return []
        if self.limit == 1:
            return [int(self._entries[found, NEWEST])]
        count, node = int(self._entries[found, COUNT]), int(self._entries[found, HEAD])
        queue = []
        for _ in range(count):
            queue.append(int(self._node_offsets[node]))
            node = int(self._node_nexts[node])
        return queue

    # ---- its texts ----

    def offsets_where(self, chosen: Callable[[pa.Array[Any]], Any]) -> Offsets:
        """All offsets that the texts keep for which `chosen` is true.

        Args:
            chosen: of an array of texts, as binaries: marks.
        """
        marks = np.zeros(len(self), np.bool_)
        for start in range(0, len(self), _TEXTS_AT_ONCE):
            part = np.arange(start, min(start + _TEXTS_AT_ONCE, len(self)))
            marks[part] = chosen(self._texts_of(part))
        entries, rows = self._kept_pairs()
        return rows[marks[entries]]

    def without(self, erased: BitMap64) -> NewestRows:
        """The table without the texts whose newest offset is one of these; itself if there are none."""
        newest = self._entries[: len(self), NEWEST]
        gone = np.isin(newest, to_array(offset_set(newest) & erased))
        if not gone.any():
            return self
        entries, rows = self._kept_pairs()
        kept = ~gone[entries]
        entries, rows = entries[kept], rows[kept]
        order = np.argsort(rows, kind="stable")
        made = NewestRows(self.limit)
        for start in range(0, len(order), _TEXTS_AT_ONCE):
            part = order[start : start + _TEXTS_AT_ONCE]
            made.add(Texts.of(self._texts_of(entries[part])), rows[part])
        return made

    def _kept_pairs(self) -> tuple[Offsets, Offsets]:
        """Each offset that is kept, as the number of its entry and the offset."""
        entries = np.arange(len(self))
        if self.limit == 1 or not self._state[NODES]:
            return entries, self._entries[: len(self), NEWEST]
        found = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        left, nodes = self._entries[: len(self), COUNT].copy(), self._entries[: len(self), HEAD].copy()
        while len(entries := entries[left[entries] > 0]):
            found.append((entries, self._node_offsets[nodes[entries]]))
            nodes[entries] = self._node_nexts[nodes[entries]]
            left[entries] -= 1
        return np.concatenate([one for one, _ in found]), np.concatenate([one for _, one in found])

    def _texts_of(self, entries: npt.NDArray[np.int64]) -> pa.Array[Any]:
        starts, lengths = self._entries[entries, START], self._entries[entries, LENGTH]
        data = [self._texts[start : start + length].tobytes() for start, length in zip(starts, lengths, strict=True)]
        return pa.array(data, pa.binary())

    def _find(self, texts: Texts) -> npt.NDArray[np.int64]:
        return self._of_each(native.look_up_texts, texts)

    def _of_each(self, kernel: Callable[..., Any], texts: Texts) -> npt.NDArray[np.int64]:
        found = np.empty(len(texts.offsets) - 1, np.int64)
        kernel(
            texts.offsets, texts.data, self._slots, self._entries, self._texts,
            self._word, self._word.view(np.uint8), found,
        )  # fmt: skip
        return found

    def _make_room(self, texts: Texts, rows: int) -> None:
        """For as many new texts and offsets as there are rows."""
        entries = len(self) + rows
        if entries > len(self._entries):
            self._entries = _grown(self._entries, max(len(self._entries) * 3 // 2, entries))
        text_bytes = int(self._state[TEXT_BYTES]) + int(texts.offsets[-1] - texts.offsets[0])
        if text_bytes > len(self._texts):
            self._texts = _grown(self._texts, max(len(self._texts) * 3 // 2, text_bytes))
        if self.limit > 1:
            self._reserve_nodes(int(self._state[NODES]) + rows)
        if 3 * entries > 2 * len(self._slots):
            self._place(1 << (3 * entries // 2).bit_length())

    def _reserve_nodes(self, nodes: int) -> None:
        if nodes > len(self._node_nexts):
            size = max(len(self._node_nexts) * 3 // 2, nodes)
            self._node_offsets, self._node_nexts = _grown(self._node_offsets, size), _grown(self._node_nexts, size)

    def _place(self, size: int) -> None:
        self._slots = _empty((size, 2), np.uint64)
        native.place_texts(self._texts, self._entries, len(self), self._slots, self._word, self._word.view(np.uint8))

    # ---- stored ----

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Of which it can be made again."""
        entries, text_bytes, nodes, _ = self._state.tolist()
        return {
            "entries": self._entries[:entries],
            "texts": self._texts[:text_bytes],
            "node_offsets": self._node_offsets[:nodes],
            "node_nexts": self._node_nexts[:nodes],
            "state": self._state,
        }

    @classmethod
    def from_arrays(cls, limit: int, arrays: Mapping[str, bytes]) -> NewestRows:
        """Of the bytes of `to_arrays`. Raises ValueError, KeyError: these are not the arrays of a table."""
        made = cls(limit)
        made._entries = _held(np.frombuffer(arrays["entries"], np.int64).reshape(-1, _FIELDS), _FEWEST_ENTRIES)
        made._texts = _held(np.frombuffer(arrays["texts"], np.uint8), _FEWEST_TEXT_BYTES)
        made._node_offsets = _held(np.frombuffer(arrays["node_offsets"], np.int64))
        made._node_nexts = _held(np.frombuffer(arrays["node_nexts"], np.int32))
        made._state = np.frombuffer(arrays["state"], np.int64).reshape(4).copy()
        stored = [len(arrays["entries"]) // (8 * _FIELDS), len(arrays["texts"]), len(arrays["node_offsets"]) // 8]
        if made._state[:FREE_NODE].tolist() != stored or not made._is_within():
            raise ValueError("the parts of the table do not belong together")
        made._place(max(_FEWEST_SLOTS, 1 << (3 * len(made) // 2).bit_length()))
        return made

    def _is_within(self) -> bool:
        """Whether what is stored leads into the arrays only: kernels follow it without a check."""
        entries, (_, text_bytes, nodes, free) = self._entries[: len(self)], self._state.tolist()
        starts, lengths, counts = entries[:, START], entries[:, LENGTH], entries[:, COUNT]
        is_within = (
            len(self._node_nexts) == nodes
            and ((starts >= 0) & (starts <= text_bytes)).all()
            and ((lengths >= 0) & (lengths <= text_bytes - starts)).all()
            and ((counts >= 0) & (counts <= max(nodes, 1))).all()
            and -1 <= free < nodes
            and ((self._node_nexts >= -1) & (self._node_nexts < nodes)).all()
        )
        return bool(is_within and (self.limit == 1 or self._has_whole_queues(entries[counts > 0], nodes)))

    def _has_whole_queues(self, entries: npt.NDArray[np.int64], nodes: int) -> bool:
        """Whether each of these entries has a queue of as many nodes as it counts."""
        at: npt.NDArray[Any] = entries[:, HEAD]
        left = entries[:, COUNT]
        ends = np.concatenate([at, entries[:, TAIL]])
        if left.sum() > nodes or ((ends < 0) | (ends >= nodes)).any():
            return False
        while len(at) and at.min() >= 0:
            at, left = self._node_nexts[at][left > 1], left[left > 1] - 1
        return not len(at)


def _empty(shape: tuple[int, ...], kind: Any) -> npt.NDArray[Any]:
    """Zeros: in memory, or in a file without a name where there are many."""
    size_bytes = int(np.prod(shape)) * np.dtype(kind).itemsize
    if size_bytes <= _IN_MEMORY_BYTES:
        return np.zeros(shape, kind)
    with tempfile.TemporaryFile() as file:
        file.truncate(size_bytes)
        return np.asarray(np.memmap(file, kind, mode="r+", shape=shape))


def _grown(old: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    new = _empty((size, *old.shape[1:]), old.dtype)
    new[: len(old)] = old
    return new


def _held(stored: npt.NDArray[Any], fewest: int = 0) -> npt.NDArray[Any]:
    """A copy that can be changed, with room for as many rows at least."""
    return _grown(stored, max(len(stored), fewest))
