"""The last run of each producer of direct appends, by which a repeated commit is recognised as a duplicate.

Theory of operation. The table follows from the run marks in the log, so leader and followers have the same one. A run
is recorded when its last batch is on stable storage. It is uncommitted until the high watermark (HW) has passed it:
until then it may be truncated, and the producer's previous run is valid again. The file `producers` in the stream's
folder has the committed runs as of some HW; opening reads the marks from there on. It is written with every new segment
but the first, even without any run, so that a start reads about one segment.

Where the file is damaged, or missing in a log of several segments (versions that wrote none without a run), the table
is *partial*: it has the runs that were recorded since this start. The first query that finds nothing completes it from
the headers of the whole log.

Invariant. The number of producers is bounded: the least recently used are dropped. Those of one-off writes, which have
names of their own (`ONE_OFF_PRODUCERS`), have a table of their own, so they evict no others.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from natslog.arrow.run_marks import RunMark
from natslog.errors import CorruptLog
from natslog.log.checked_file import read_checked, write_checked
from natslog.log_events import event
from natslog.model import ONE_OFF_PRODUCERS

logger = logging.getLogger("natslog.log")

MOST_PRODUCERS = 10_000
_FILE = "producers"

Marks = Callable[[int, int], Iterator[RunMark]]
"""The marks of the runs whose last batch is in `[start, end)`, in order. Raises CorruptLog."""


class ProducerTable:
    """Thread-safe. Every call with the high watermark moves runs that it has passed to the table.

    Attributes:
        is_partial: the next call may read the headers of the whole log.

    Args:
        marks: reads them from the log. `most`: producers that are kept, and one-off ones in addition.
    """

    def __init__(self, folder: Path, marks: Marks, *, most: int = MOST_PRODUCERS) -> None:
        self._path = folder / _FILE
        self._marks = marks
        self._lock = threading.Lock()
        self._committed = _Committed(most)
        self._uncommitted: deque[RunMark] = deque()
        self.is_partial = False
        self._stored_as_of = -1

    def open(self, log_start_offset: int, high_watermark: int, log_end_offset: int, *, is_short: bool) -> None:
        """Reads the file and the marks behind it; without a file, a short log. Raises DataDirError: a newer format."""
        read_from = log_start_offset if is_short else high_watermark
        try:
            content = read_checked(self._path, _FILE, 1)
        except CorruptLog as error:
            logger.error(
                f"{error.message}. The batches of producers are read from the log when they are needed",
                extra=event("log.file_damaged", path=self._path),
            )
            content = None
        if content is not None:
            read_from = self._stored_as_of = min(int(content["as_of"]), log_end_offset)
            for mark in (_mark_of(*entry) for entry in content["producers"]):
                if mark.end <= read_from:
                    self._committed.put(mark)
        self.is_partial = content is None and not is_short
        try:
            for mark in self._marks(max(read_from, log_start_offset), log_end_offset):
                self.note(mark, high_watermark)
        except CorruptLog as error:
            logger.error(
                f"the batches of producers are known only for the readable part of the log: {error.message}",
                extra=event("log.producers_partial", path=self._path.parent),
            )

    def note(self, run: RunMark, high_watermark: int) -> None:
        """The whole run is on stable storage."""
        with self._lock:
            self._uncommitted.append(run)
            self._pass_high_watermark(high_watermark)

    def last_run(
        self, producer: str, log_start_offset: int, high_watermark: int, *, is_committed: bool
    ) -> RunMark | None:
        """The producer's last run, or its last committed one.

        Raises:
            CorruptLog: the table is partial, and the log cannot be read.
        """
        with self._lock:
            self._pass_high_watermark(high_watermark)
            if not is_committed:
                for run in reversed(self._uncommitted):
                    if run.producer == producer:
                        return run
            if self.is_partial and self._committed.find(producer) is None:
                self._read_all(log_start_offset, high_watermark)
            return self._committed.find(producer)

    def last_runs(self, prefix: str, log_start_offset: int, high_watermark: int) -> list[RunMark]:
        """The last committed runs of the producers whose names begin so. Raises as `last_run`."""
        with self._lock:
            self._pass_high_watermark(high_watermark)
            if self.is_partial:
                self._read_all(log_start_offset, high_watermark)
            return [run for run in self._committed.runs() if run.producer.startswith(prefix)]

    def cut(self, end_offset: int) -> None:
        """The log ends here now; runs that are received again from a leader are recorded again."""
        with self._lock:
            while self._uncommitted and self._uncommitted[-1].end > end_offset:
                self._uncommitted.pop()
            self._committed.cut(end_offset)

    def store(self, high_watermark: int, *, is_short: bool) -> None:
        """Writes the table as of HW, unless it is partial, stored already, or empty for a short log. Raises OSError."""
        with self._lock:
            self._pass_high_watermark(high_watermark)
            runs = self._committed.runs()
            is_needed = runs or self._stored_as_of >= 0 or not is_short
            if self.is_partial or high_watermark == self._stored_as_of or not is_needed:
                return
            entries = [_entry_of(run) for run in runs]
            write_checked(self._path, _FILE, 1, {"as_of": high_watermark, "producers": entries})
            self._stored_as_of = high_watermark

    def _pass_high_watermark(self, high_watermark: int) -> None:
        """Runs at or below HW are committed and will not be cut."""
        while self._uncommitted and self._uncommitted[0].end <= high_watermark:
            self._committed.put(self._uncommitted.popleft())

    def _read_all(self, log_start_offset: int, high_watermark: int) -> None:
        logger.info(
            f"{self._path.parent}: reading the headers of the whole log to find the last batch of each producer",
            extra=event("log.producers_read", path=self._path.parent),
        )
        found = _Committed(self._committed.most)
        for run in self._marks(log_start_offset, high_watermark):
            found.put(run)
        self._committed, self.is_partial = found, False


class _Committed:
    """The last committed run of each producer, in two tables of at most `most` producers each."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lasting: OrderedDict[str, RunMark] = OrderedDict()  # the least recently used first
        self._one_off: OrderedDict[str, RunMark] = OrderedDict()

    def _table_of(self, producer: str) -> OrderedDict[str, RunMark]:
        return self._one_off if producer.startswith(ONE_OFF_PRODUCERS) else self._lasting

    def find(self, producer: str) -> RunMark | None:
        return self._table_of(producer).get(producer)

    def runs(self) -> list[RunMark]:
        return [*self._lasting.values(), *self._one_off.values()]

    def put(self, run: RunMark) -> None:
        table = self._table_of(run.producer)
        table[run.producer] = run
        table.move_to_end(run.producer)
        if len(table) > self.most:
            table.popitem(last=False)

    def cut(self, end_offset: int) -> None:
        for table in (self._lasting, self._one_off):
            for producer in [name for name, run in table.items() if run.end > end_offset]:
                del table[producer]


def _entry_of(run: RunMark) -> tuple[str, tuple[int | str, ...]]:
    """In the file. Runs of natslog 0.1.0 have no digest."""
    digest = () if run.digest is None else (f"{run.digest:032x}",)
    return run.producer, (run.batch, run.start, run.end, *digest)


def _mark_of(producer: str, entry: Sequence[Any]) -> RunMark:
    batch, start, end, *digest = entry
    return RunMark(producer, batch, start, end, int(digest[0], 16) if digest else None)
