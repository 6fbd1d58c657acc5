"""The messages of neighbouring offsets by subject: a part of a log's index of subjects.

Theory of operation. The distinct subjects in ascending order, and for each the offsets of its messages, one subject
after the other. A search is a binary search for the subject and another one for the offset. A part never changes; that
of a sealed segment is a file beside it, which is mapped into memory, and which is made again if it does not belong to
the segment file as it is now.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from natslog.log.removed import Hidden
from natslog.log.segment import SUBJECTS_SUFFIX
from natslog.log.subject_counts import COUNTS_SCHEMA
from natslog.wire import native
from natslog.wire.outgoing import TextBuffers

Offsets = npt.NDArray[np.int64]

_HEADER_BYTES = 128
_HEADER = re.compile(
    rb"natslog subjects v1 segment=(\d+\.\d+\.\d+) offsets=(\d+)-(\d+) bytes=(\d+) crc32c=([0-9a-f]{8}) *\n"
)
_FIRST_WINDOW = 64
_MOST_MARKED = 1 << 28


class SubjectPart:
    """See the module. Of the messages in `[start, end)`.

    Args:
        subjects: ascending, each once. `ends`: where the rows of each end in `rows`. `rows`: offsets, less `start`;
            ascending for each subject.
    """

    __slots__ = ("_data", "_texts", "end", "ends", "rows", "start", "subjects")

    def __init__(self, start: int, end: int, subjects: Any, ends: npt.NDArray[Any], rows: npt.NDArray[Any]) -> None:
        self.start, self.end = start, end
        self.subjects, self.ends, self.rows = subjects, ends, rows
        _, texts, data = subjects.buffers()
        at = subjects.offset
        self._texts = np.frombuffer(texts, np.int32)[at : at + len(subjects) + 1] if len(subjects) else np.zeros(1)
        self._data = memoryview(data if data is not None else b"")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        return int(self.subjects.nbytes + self.ends.nbytes + self.rows.nbytes)

    def offsets_of(self, subject: bytes, start: int, end: int) -> Offsets:
        """Of the messages on this subject in `[start, end)`, hidden ones too."""
        at = bisect_left(range(len(self.subjects)), subject, key=self._text)
        if at == len(self.subjects) or self._text(at) != subject:
            return _NONE
        begin = int(self.ends[at - 1]) if at else 0
        rows = self.rows[begin : int(self.ends[at])]
        if start > self.start or end < self.end:
            low, high = np.searchsorted(rows, [max(start - self.start, 0), max(end - self.start, 0)])
            rows = rows[low:high]
        return rows.astype(np.int64) + self.start

    def last_of(self, subjects: TextBuffers, start: int, end: int) -> Offsets:
        """The newest offset in `[start, end)` on each of these subjects, hidden ones too; -1 where there is none."""
        found = np.empty(len(subjects[0]) - 1, np.int64)
        if not len(self.subjects):
            found[:] = -1
            return found
        texts = np.frombuffer(self._data, np.uint8) if len(self._data) else _NO_BYTES
        native.find_sorted(*subjects, self._texts, texts, found)
        last: Offsets = self.rows[self.ends[np.maximum(found, 0)] - 1].astype(np.int64) + self.start
        last[found < 0] = -1
        for row in np.flatnonzero(last >= end).tolist():  # what is not committed yet
            offsets = self.offsets_of(text_at(subjects, row), start, end)
            last[row] = offsets[-1] if len(offsets) else -1
        last[last < start] = -1
        return last

    def _codes(self) -> npt.NDArray[np.int32]:
        """For each row, the number of its subject."""
        return np.repeat(np.arange(len(self.ends), dtype=np.int32), np.diff(self.ends, prepend=0))

    def _text(self, at: int) -> bytes:
        return bytes(self._data[self._texts[at] : self._texts[at + 1]])

    def counts(self, hidden: Hidden, start: int, end: int) -> pa.Table:
        """`subject`, `count`, `first`, `last` of the messages in `[start, end)` that are not hidden."""
        keep = self._kept(hidden, start, end)
        begins = np.concatenate([np.zeros(1, np.int64), self.ends])
        rows = self.rows
        if keep is not None:
            rows = rows[keep]
            begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(keep)])[begins]
        counts = np.diff(begins)
        present = np.flatnonzero(counts)
        first, last = rows[begins[present]], rows[begins[present + 1] - 1]
        columns: list[Any] = [
            self.subjects if len(present) == len(self.subjects) else self.subjects.take(pa.array(present)),
            counts[present],
            first.astype(np.int64) + self.start,
            last.astype(np.int64) + self.start,
        ]
        return pa.Table.from_arrays([columns[0], *map(pa.array, columns[1:])], schema=COUNTS_SCHEMA)

    def _kept(self, hidden: Hidden, start: int, end: int) -> npt.NDArray[np.bool_] | None:
        """Marks of the rows; None: all of them."""
        keep = None
        if start > self.start or end < self.end:
            keep = (self.rows >= max(start - self.start, 0)) & (self.rows < max(end - self.start, 0))
        if hidden.count(self.start, self.end):
            gone = hidden.offsets_within(self.start, self.end) - self.start
            if self.end - self.start <= _MOST_MARKED:
                marks = np.zeros(self.end - self.start, np.bool_)
                marks[gone] = True
                visible = ~marks[self.rows]
            else:
                visible = ~np.isin(self.rows, gone)
            keep = visible if keep is None else keep & visible
        return keep

    # ---- making ----

    @classmethod
    def of_rows(cls, start: int, end: int, batches: Iterable[pa.RecordBatch]) -> SubjectPart:
        """Of batches in the order of the log, with the columns `offset` and `subject`, in `[start, end)`."""
        texts, offsets = list[Any](), list[Offsets]()
        for batch in batches:
            texts.append(batch.column("subject").cast(pa.string()).dictionary_encode())
            offsets.append(batch.column("offset").to_numpy())
        return cls._of_texts(start, end, texts, offsets)

    @classmethod
    def joined(cls, parts: Sequence[SubjectPart]) -> SubjectPart:
        """Of parts that follow each other."""
        texts = [pa.DictionaryArray.from_arrays(one._codes(), one.subjects) for one in parts]
        return cls._of_texts(
            parts[0].start, parts[-1].end, texts, [one.rows.astype(np.int64) + one.start for one in parts]
        )

    @classmethod
    def _of_texts(cls, start: int, end: int, texts: list[Any], offsets: list[Offsets]) -> SubjectPart:
        """Args: texts: encoded as dictionaries, of the same rows as `offsets`."""
        if not texts:
            return cls(start, end, pa.nulls(0, pa.string()), np.zeros(0, np.int32), np.zeros(0, np.uint32))
        chunks = pa.chunked_array(texts).unify_dictionaries().chunks
        subjects = chunks[0].dictionary
        order = pc.sort_indices(subjects)
        ranks = np.empty(len(order), np.int32)
        ranks[order.to_numpy()] = np.arange(len(order), dtype=np.int32)
        codes = [chunk.indices.to_numpy() for chunk in chunks]
        counts = np.zeros(len(order), np.int64)
        for some in codes:
            native.count_subjects(some, ranks, counts)
        rows, ends = np.empty(sum(map(len, codes)), np.int64), np.cumsum(counts) - counts
        for some, at in zip(codes, offsets, strict=True):
            native.place_rows(some, ranks, at, start, ends, rows)
        kind = np.uint32 if end - start < 1 << 32 else np.int64
        return cls(start, end, subjects.take(order), ends.astype(np.int32), rows.astype(kind))

    # ---- files ----

    def store(self, segment: Path, identity: bytes) -> None:
        """Beside this segment file. It is not fsynced: what is damaged is made again.

        Args:
            identity: of the segment file whose messages it has.

        Raises:
            OSError: as the system says.
        """
        sink = pa.BufferOutputStream()
        columns = {"subject": self.subjects, "end": pa.array(self.ends)}
        for table in (pa.table(columns), pa.table({"row": pa.array(self.rows)})):
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        content = sink.getvalue()
        facts = (identity, self.start, self.end, content.size, crc32c(content))
        header = b"natslog subjects v1 segment=%s offsets=%d-%d bytes=%d crc32c=%08x" % facts
        path = segment.with_suffix(SUBJECTS_SUFFIX)
        beside = path.with_name(path.name + ".new")
        try:
            with open(beside, "wb") as file:
                file.write(header.ljust(_HEADER_BYTES - 1) + b"\n")
                file.write(content)
            os.replace(beside, path)
        except OSError:
            with contextlib.suppress(OSError):  # the first error is the one to report
                beside.unlink()
            raise

    @classmethod
    def stored(cls, segment: Path, start: int, end: int) -> SubjectPart | None:
        """That of a segment file. None: there is none, or it is damaged, or the segment was written again since.

        Raises:
            OSError: as the system says.
        """
        try:
            with open(segment.with_suffix(SUBJECTS_SUFFIX), "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            identity = file_identity(segment)
        except (FileNotFoundError, ValueError):  # an empty file cannot be mapped
            return None
        found = _HEADER.fullmatch(mapped[:_HEADER_BYTES])
        content = pa.py_buffer(mapped).slice(min(_HEADER_BYTES, len(mapped)))
        if found is None or found[1] != identity or (int(found[2]), int(found[3])) != (start, end):
            return None
        if content.size != int(found[4]) or crc32c(content) != int(found[5], 16):
            return None
        source = pa.BufferReader(content)
        (by_subject,), (rows,) = (pa.ipc.open_stream(source).read_all().to_batches() or [None] for _ in range(2))
        if by_subject is None or rows is None:
            return cls.of_rows(start, end, [])
        ends, places = by_subject.column("end").to_numpy(), rows.column("row").to_numpy()
        if (int(ends[-1]) if len(ends) else 0) != len(places):
            return None
        return cls(start, end, by_subject.column("subject"), ends, places)


_NONE: Offsets = np.zeros(0, np.int64)
_NO_BYTES = np.zeros(0, np.uint8)


def text_at(texts: TextBuffers, row: int) -> bytes:
    offsets, data = texts
    return data[offsets[row] : offsets[row + 1]].tobytes()


def file_identity(segment: Path) -> bytes:
    """Of a file as it is now."""
    stat = segment.stat()
    return b"%d.%d.%d" % (stat.st_ino, stat.st_size, stat.st_mtime_ns)


def newest_visible(offsets: Offsets, hidden: Hidden) -> int:
    """The last of ascending offsets that is not hidden; -1 if there is none."""
    end, window = len(offsets), _FIRST_WINDOW
    while end > 0:
        some = offsets[max(0, end - window) : end]
        visible = some[~hidden.marks(some)]
        if len(visible):
            return int(visible[-1])
        end, window = end - window, 4 * window
    return -1


def oldest_visible(offsets: Offsets, hidden: Hidden) -> int:
    """The first of ascending offsets that is not hidden; -1 if there is none."""
    start, window = 0, _FIRST_WINDOW
    while start < len(offsets):
        some = offsets[start : start + window]
        visible = some[~hidden.marks(some)]
        if len(visible):
            return int(visible[0])
        start, window = start + window, 4 * window
    return -1
