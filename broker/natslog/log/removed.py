"""The offsets of a stream whose messages are hidden from readers, as compressed bitmaps (Roaring).

Theory of operation. An offset is hidden for one of two reasons. It was *recorded*: a record of the companion log names
it, so every replica has it on stable storage. Or it is *derived*: a rule of the stream (a limit per subject, compaction
by key) hides it because of newer messages in the log. Both sets only grow, until the log start passes them. Files are
rewritten only without recorded offsets: they are the same on all replicas, whatever each of them holds.

Every method is one call of the bitmaps' library, or a few whose order does not matter to a reader: sets only grow, so a
lookup that runs beside an addition sees an earlier state, or a later one. Callers add from one thread at a time.

Source: S. Chambi et al., "Better bitmap performance with Roaring bitmaps", 2016.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from natslog.errors import CorruptLog

Offsets = npt.NDArray[np.int64]

_FIRST_WINDOW = 1 << 16
_LARGEST_WINDOW = 1 << 26
_FEW = 8


def offset_set(offsets: Offsets) -> BitMap64:
    """Of offsets in any order."""
    values = array("Q")
    values.frombytes(np.ascontiguousarray(offsets, np.uint64).tobytes())
    return BitMap64(values)


def offset_range(start: int, end: int) -> BitMap64:
    """`[start, end)`."""
    found = BitMap64()
    if start < end:
        found.add_range(start, end)
    return found


def to_array(offsets: BitMap64) -> Offsets:
    """In ascending order."""
    return np.frombuffer(offsets.to_array(), np.uint64).astype(np.int64)


def marks_among(offsets: Offsets, chosen: Offsets) -> npt.NDArray[np.bool_]:
    """Which of some offsets are among the chosen ones. Both ascend."""
    marks = np.zeros(len(offsets), np.bool_)
    if not len(offsets):
        return marks
    chosen = chosen[np.searchsorted(chosen, offsets[0]) : np.searchsorted(chosen, offsets[-1], "right")]
    if int(offsets[-1]) - int(offsets[0]) == len(offsets) - 1:
        marks[chosen - offsets[0]] = True
    else:
        at = np.searchsorted(offsets, chosen)
        marks[at[offsets[at] == chosen]] = True
    return marks


def to_bytes(offsets: BitMap64) -> bytes:
    """In the portable format of Roaring bitmaps of 64 bits; see docs/FORMATS.md."""
    offsets.run_optimize()
    return bytes(offsets.serialize())


def from_bytes(data: bytes, source: str) -> BitMap64:
    """Raises CorruptLog: these are not the bytes of a bitmap."""
    try:
        return BitMap64.deserialize(data)
    except (ValueError, IndexError) as error:
        raise CorruptLog(f"{source}: the bitmap of removed offsets is damaged ({error})", source=source) from error


class Hidden:
    """Which offsets readers do not get. `_hidden`: the set of them."""

    _hidden: BitMap64

    def __bool__(self) -> bool:
        return bool(self._hidden)

    def count(self, start: int, end: int) -> int:
        """How many offsets in `[start, end)` are hidden."""
        return int(self._hidden.range_cardinality(start, end)) if start < end else 0

    def hidden_within(self, start: int, end: int) -> BitMap64:
        """The hidden offsets in `[start, end)`."""
        return self._hidden & offset_range(start, end)

    def offsets_within(self, start: int, end: int) -> Offsets:
        """The same in ascending order."""
        return to_array(self.hidden_within(start, end))

    def marks(self, offsets: Offsets) -> npt.NDArray[np.bool_]:
        """Of ascending offsets: which are hidden."""
        if not len(offsets):
            return np.zeros(0, np.bool_)
        return marks_among(offsets, self.offsets_within(int(offsets[0]), int(offsets[-1]) + 1))

    def marks_of(self, offsets: Offsets) -> npt.NDArray[np.bool_]:
        """Of offsets in any order, also negative ones, which are not hidden: however many lie between them."""
        if len(offsets) <= _FEW:
            return np.array([one >= 0 and one in self._hidden for one in offsets.tolist()], np.bool_)
        known = offsets[offsets >= 0]
        if not self._hidden or not len(known):
            return np.zeros(len(offsets), np.bool_)
        found = offset_set(known) & self._hidden
        return np.isin(offsets, to_array(found)) if found else np.zeros(len(offsets), np.bool_)

    def next_visible(self, start: int, end: int) -> int:
        """The first offset in `[start, end)` that is not hidden; `end` if all are."""
        window = _FIRST_WINDOW
        while start < end:
            upto = min(end, start + window)
            if self.count(start, upto) < upto - start:
                return int((offset_range(start, upto) - self._hidden).min())
            start, window = upto, min(2 * window, _LARGEST_WINDOW)
        return end


class HiddenThen(Hidden):
    """What was hidden at some time. `hidden` is not changed any more."""

    def __init__(self, hidden: BitMap64) -> None:
        self._hidden = hidden


class AllBut(Hidden):
    """All offsets below an end are hidden but these."""

    def __init__(self, visible: BitMap64, end: int) -> None:
        self.visible, self.end = visible, end
        self._hidden = offset_range(0, end) - visible


class RemovedOffsets(Hidden):
    """See the module. Of one log; empty for most.

    Attributes:
        recorded: named by records of the companion log. `uncounted`: those of them that do not count for rules, because
            they were recorded before these.
    """

    def __init__(self) -> None:
        self.recorded = BitMap64()
        self.uncounted = BitMap64()
        self._hidden = BitMap64()

    @property
    def all(self) -> BitMap64:
        """Not to be changed."""
        return self._hidden

    def record(self, offsets: BitMap64) -> None:
        """A record of the companion log names these offsets; it is committed."""
        self.recorded |= offsets
        self._hidden |= offsets

    def derive(self, offsets: BitMap64) -> None:
        """A rule of the stream hides these offsets."""
        self._hidden |= offsets

    def count_anew(self) -> None:
        """What is recorded does not count for rules from now on."""
        self.uncounted = BitMap64(self.recorded)

    def forget_derived(self) -> None:
        """The rules are to be applied again."""
        self._hidden = BitMap64(self.recorded)

    def drop_below(self, log_start_offset: int) -> None:
        """What lies below is no longer in the log."""
        if log_start_offset > 0:
            self.recorded.remove_range(0, log_start_offset)
            self.uncounted.remove_range(0, log_start_offset)
            self._hidden.remove_range(0, log_start_offset)

    def derived(self, start: int, end: int) -> BitMap64:
        """The hidden offsets in `[start, end)` that no record names."""
        return (self._hidden & offset_range(start, end)) - self.recorded

    def first_derived(self, start: int) -> int | None:
        """The first hidden offset from `start` on that no record names; None if there is none."""
        derived = self._hidden - self.recorded
        derived.remove_range(0, start)
        return int(derived.min()) if derived else None

    def is_hidden(self, offset: int) -> bool:
        return offset in self._hidden

    def visible_from(self, start: int, end: int, count: int) -> int:
        """The offset behind the first `count` visible ones in `[start, end)`; `end` if there are fewer."""
        if not self.count(start, end):
            return min(start + count, end)
        low, high = start, end
        while low < high:  # the least end with so many
            middle = (low + high) // 2
            if middle - start - self.count(start, middle) >= count:
                high = middle
            else:
                low = middle + 1
        return low
