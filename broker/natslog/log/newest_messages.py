"""The newest visible message of each subject or key of one log."""

from __future__ import annotations

import numpy as np
from pyroaring import BitMap64

from natslog.log.chain import SegmentChain
from natslog.log.log_reader import LogReader
from natslog.log.newest import NewestRows, Offsets, Texts
from natslog.log.removed import offset_set
from natslog.log.subject_index import SubjectIndex
from natslog.log.visibility import UNKNOWN, Visibility
from natslog.wire.outgoing import taken


class NewestMessages:
    """Thread-safe. Calls that end in `_now` do not block: they return None where the log must be read."""

    def __init__(self, chain: SegmentChain, visibility: Visibility, reader: LogReader, subjects: SubjectIndex) -> None:
        self._chain, self._visibility, self._reader, self._subjects = chain, visibility, reader, subjects

    def all(self) -> tuple[BitMap64, int]:
        """The newest visible message of each key, where the stream is compacted, else of each subject; without
        tombstones. Returns their offsets and the high watermark that they are of.

        Raises:
            InvalidRequest: the stream is compacted, and none of its messages has a key. CorruptLog: a part of the log
                is damaged.
        """
        at, visibility = self._chain.positions(), self._visibility
        if visibility.keeps_newest_only:
            return visibility.newest_only(at.high_watermark, at.log_start_offset)
        if visibility.rule.compacts:
            return self._of_keys(at.high_watermark)
        state, counts = self._subjects.counts()
        return offset_set(counts.table.column("last").to_numpy()), state.end

    def _of_keys(self, end: int) -> tuple[BitMap64, int]:
        """The same where compaction does not apply to messages of older leader epochs: all messages are read."""
        table = NewestRows()
        for batch in self._reader.visible_rows(self._chain.first_readable_offset, end):
            table.add(Texts.of(batch.column("key")), batch.column("offset").to_numpy())
        return self._visibility.without_tombstones(offset_set(table.newest())), end

    def of_subjects(self, subjects: Texts) -> Offsets:
        """The newest visible message of each subject; -1 where there is none. Raises CorruptLog."""
        end, visibility = self._chain.high_watermark, self._visibility
        visibility.removed_below(end)
        found = visibility.newest_of_subjects(subjects, end, may_wait=True)
        if found is None:
            return self._subjects.last_of((subjects.offsets, subjects.data))
        if len(unknown := np.flatnonzero(found == UNKNOWN)):
            found[unknown] = self._subjects.last_of(taken((subjects.offsets, subjects.data), unknown))
        return self._readable(found)

    def of_subjects_now(self, subjects: Texts) -> Offsets | None:
        found = self._visibility.newest_of_subjects(subjects, self._chain.high_watermark, may_wait=False)
        return None if found is None or found.min(initial=0) == UNKNOWN else self._readable(found)

    def visible(self, offsets: Offsets) -> Offsets:
        """-1 in place of offsets that are not visible. Raises CorruptLog."""
        end = self._chain.high_watermark
        removed = self._visibility.removed_below(end)
        return self._readable(np.where(removed.marks_of(offsets) | (offsets >= end), -1, offsets))

    def visible_now(self, offsets: Offsets) -> Offsets | None:
        end, visibility = self._chain.high_watermark, self._visibility
        if not visibility.is_applied(end):
            return None
        return self._readable(np.where(visibility.removed.marks_of(offsets) | (offsets >= end), -1, offsets))

    def _readable(self, offsets: Offsets) -> Offsets:
        start = self._chain.first_readable_offset
        if start:
            offsets[offsets < start] = -1
        return offsets
