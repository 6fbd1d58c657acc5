"""Which batch each producer of direct appends committed last: what makes a repeated commit a duplicate.

Theory of operation. The table follows from the marks in the log, on leader and followers alike. A mark is noted when
the last batch of its run is on stable storage; it stands in `_uncertain` until the high watermark has passed it: until
then it may be cut, and what stood in the table before counts again. `producers` in the stream's folder holds the table
as of some offset (a boundary of runs); opening reads the marks from there on. It is written with every new segment
but the first, though nobody has appended a run yet: so what is read stays about a segment.

Where that file is damaged, or missing in a log of several segments (of a version that wrote none without a run), the
table is *partial*: it knows what was noted since this start. It is completed from the headers of the whole log when
somebody first asks.

Invariant: a producer's batch ids only rise. The number of producers is bounded: the least recently used go.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path

from natslog.arrow.run_marks import RunMark
from natslog.errors import CorruptLog
from natslog.log.checked_file import read_checked, write_checked

logger = logging.getLogger("natslog.log")

MOST_PRODUCERS = 10_000
_FILE = "producers"

Marks = Callable[[int, int], Iterator[RunMark]]
"""The marks of the batches that cover `[start, end)` of the log, in order."""


class ProducerTable:
    """Thread-safe. Args: `marks` reads them from the log."""

    def __init__(self, folder: Path, marks: Marks, *, most: int = MOST_PRODUCERS) -> None:
        self._path = folder / _FILE
        self._marks = marks
        self._most = most
        self._lock = threading.RLock()
        self._settled: OrderedDict[str, RunMark] = OrderedDict()
        self._uncertain: deque[RunMark] = deque()
        self._unread_below: int | None = None  # the log below was not looked through; None: the table is whole
        self._stored_as_of = -1

    def open(self, log_start_offset: int, log_end_offset: int, *, is_short: bool) -> None:
        """From the file and the marks behind it; of a short log from its marks. Raises DataDirError: a newer format."""
        try:
            content = read_checked(self._path, _FILE, 1)
        except CorruptLog as error:
            logger.error("%s. What producers committed is read from the log when it is needed", error.message)
            content = None
        if content is None and not is_short:
            self._unread_below = log_end_offset
            return
        known_below = log_start_offset
        if content is not None:
            self._stored_as_of = as_of = min(int(content["as_of"]), log_end_offset)
            marks = [RunMark(name, *numbers) for name, numbers in content["producers"]]
            self._settled = OrderedDict((mark.producer, mark) for mark in marks if mark.end <= as_of)
            known_below = max(as_of, log_start_offset)
        try:
            for mark in self._marks(known_below, log_end_offset):
                self.note(mark, log_end_offset)
        except CorruptLog as error:
            logger.error("what producers committed is known as far as the log can be read: %s", error.message)

    def note(self, mark: RunMark, end_offset: int) -> None:
        """A batch of this run was stored, and ends at `end_offset`; counts where it is the run's last one."""
        if end_offset < mark.end:
            return
        with self._lock:
            self._uncertain.append(mark)

    def settle(self, high_watermark: int) -> None:
        """What ends at or below HW will not be cut."""
        with self._lock:
            while self._uncertain and self._uncertain[0].end <= high_watermark:
                mark = self._uncertain.popleft()
                self._settled[mark.producer] = mark
                self._settled.move_to_end(mark.producer)
            while len(self._settled) > self._most:
                self._settled.popitem(last=False)

    def find(self, producer: str, log_start_offset: int) -> RunMark | None:
        """The run it appended last, committed or not; reads the log's headers where they were not read yet.

        Raises:
            CorruptLog: they cannot be read, so nobody knows.
        """
        with self._lock:
            for mark in reversed(self._uncertain):
                if mark.producer == producer:
                    return mark
            if producer not in self._settled and self._unread_below is not None:
                self._read_all(log_start_offset)
            return self._settled.get(producer)

    def _read_all(self, log_start_offset: int) -> None:
        assert self._unread_below is not None, "there is something to read"
        logger.info("%s: reading the log's headers for what producers committed", self._path.parent)
        found: OrderedDict[str, RunMark] = OrderedDict()
        for mark in self._marks(log_start_offset, self._unread_below):
            found[mark.producer] = mark
            found.move_to_end(mark.producer)
        self._settled, newer = found, self._settled
        for mark in newer.values():
            self._settled[mark.producer] = mark
            self._settled.move_to_end(mark.producer)
        self._unread_below = None

    def cut(self, end_offset: int) -> None:
        """The log ends here now; what comes again from a leader is noted again."""
        with self._lock:
            while self._uncertain and self._uncertain[-1].end > end_offset:
                self._uncertain.pop()
            for producer in [name for name, mark in self._settled.items() if mark.end > end_offset]:
                del self._settled[producer]
            if self._unread_below is not None:
                self._unread_below = min(self._unread_below, end_offset)

    def store(self, high_watermark: int, *, though_empty: bool = False) -> None:
        """Writes the table as of HW, where it is whole and not on disk yet. Raises OSError."""
        with self._lock:
            self.settle(high_watermark)
            if self._unread_below is not None or high_watermark == self._stored_as_of:
                return
            if not self._settled and self._stored_as_of < 0 and not though_empty:
                return
            entries = [(name, (mark.batch, mark.start, mark.end)) for name, mark in self._settled.items()]
            write_checked(self._path, _FILE, 1, {"as_of": high_watermark, "producers": entries})
            self._stored_as_of = high_watermark
