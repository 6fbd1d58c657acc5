"""The data of a log beside its messages: its high watermark and its start, each in a small checked file.

    hw-checkpoint   {"high_watermark": 38094, "log_start_offset": 8192, "limited_below": 9000}
    log-start       {"log_start_offset": 8192}                           always of the same length

Theory of operation. The log start is stored before any file below it is removed. A first segment that begins above the
stored start is therefore lost, and files below the stored start are what an interrupted removal left. The start is
stored twice, one file after the other: if one file is lost or damaged, it is rebuilt from the other. On a full disk
`log-start` is written in place: retention, which makes room, needs none.

`limited_below` is where the log starts for readers because of limits of messages or bytes; it is left out where there
was no limit. It is stored with the high watermark, and before files that it was computed of are written again: so a
restart does not return messages that were past a limit.

`merged`: from where to where segments became one file last. It is stored before that file takes the place of the first
of them: the removal of the others can be completed after a crash.

natslog 0.1.0 ignores `log-start` and writes `hw-checkpoint` without a log start. A checkpoint of that form means that
the stored start may be outdated: it is then taken from the files.
"""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path
from typing import Any

from natslog.errors import CorruptLog
from natslog.log.checked_file import overwrite_checked, read_checked, write_checked
from natslog.log_events import event

logger = logging.getLogger("natslog.log")

HIGH_WATERMARK_FILE = "hw-checkpoint"
LOG_START_FILE = "log-start"
_LOG_START_WIDTH = 48
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class Checkpoints:
    """Thread-safe.

    Attributes:
        high_watermark: on stable storage; 0 where it is not known.
        log_start_offset: likewise; None if the files of the log decide.
        limited_below: likewise; 0 where there was no limit.
        merged: likewise the offsets of the segments that became one last; None: none did.
        has_high_watermark: whether a file says so.

    Raises:
        CorruptLog: the high watermark cannot be read. DataDirError: a newer format.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        content = read_checked(folder / HIGH_WATERMARK_FILE, HIGH_WATERMARK_FILE, 1)
        self.has_high_watermark = content is not None
        self.high_watermark: int = content["high_watermark"] if content else 0
        self.limited_below: int = content.get("limited_below", 0) if content else 0
        self.merged: tuple[int, int] | None = tuple(content["merged"]) if content and "merged" in content else None
        self._starts = (self._start_in_file(), content.get("log_start_offset") if content else None)
        is_of_0_1 = content is not None and self._starts[1] is None
        known = [start for start in self._starts if start is not None]
        # Every log begins at 0, and every later start is stored twice.
        self.log_start_offset: int | None = None if is_of_0_1 else max(known, default=0)

    def _start_in_file(self) -> int | None:
        try:
            content = read_checked(self._folder / LOG_START_FILE, LOG_START_FILE, 1)
        except CorruptLog as error:
            logger.error(
                f"{error.message}. The log start offset is read from {HIGH_WATERMARK_FILE}",
                extra=event("log.file_damaged"),
            )
            return None
        return int(content["log_start_offset"]) if content else None

    def create(self) -> None:
        """Writes both files of a log that begins at 0; the caller makes their names durable. Raises OSError."""
        with self._lock:
            self.log_start_offset = 0
            self._write_start(0, sync_name=False)
            self._write_high_watermark(0, sync_name=False)

    def complete(self, log_start_offset: int, high_watermark: int) -> None:
        """Writes what is missing or different once the log's files were read. Raises OSError."""
        with self._lock:
            if self._starts != (log_start_offset, log_start_offset) or not self.has_high_watermark:
                if not self.has_high_watermark:
                    logger.warning(
                        f"{self._folder}: {HIGH_WATERMARK_FILE} is missing; it was rebuilt from the log as "
                        f"{high_watermark}",
                        extra=event("log.file_rebuilt", path=self._folder / HIGH_WATERMARK_FILE),
                    )
                    self.high_watermark = high_watermark
                self.log_start_offset = log_start_offset
                self._write_start(log_start_offset)
                self._write_high_watermark(self.high_watermark)

    def advance(self, high_watermark: int, limited_below: int) -> None:
        """Stores both where one of them is above the stored one. Raises OSError."""
        with self._lock:
            if high_watermark > self.high_watermark or limited_below > self.limited_below:
                self._write_high_watermark(max(high_watermark, self.high_watermark), limited_below=limited_below)

    def store_merged(self, high_watermark: int, limited_below: int, merged: tuple[int, int]) -> None:
        """Durable when this returns: the file of these offsets may take the place of others. Raises OSError."""
        with self._lock:
            self.merged = merged
            self._write_high_watermark(max(high_watermark, self.high_watermark), limited_below=limited_below)

    def lower_high_watermark(self, high_watermark: int) -> None:
        """Stores it if it is below the stored one: messages above it are about to be dropped. Raises OSError."""
        with self._lock:
            if high_watermark < self.high_watermark:
                self._write_high_watermark(high_watermark)

    def store_log_start(self, log_start_offset: int) -> None:
        """Durable when this returns: files below may be removed.

        Raises:
            OSError: it is not stored; nothing may be removed. A full disk causes this only if the start goes back.
        """
        with self._lock:
            former = self.log_start_offset or 0
            if log_start_offset == self.log_start_offset:
                return
            try:
                self._write_start(log_start_offset)
            except OSError as error:
                if error.errno not in NO_ROOM or log_start_offset < former:
                    raise
                content = {"log_start_offset": log_start_offset}
                path = self._folder / LOG_START_FILE
                overwrite_checked(path, LOG_START_FILE, 1, content, width=_LOG_START_WIDTH)
            self.log_start_offset = log_start_offset
            try:
                self._write_high_watermark(self.high_watermark)
            except OSError as error:
                if error.errno not in NO_ROOM or log_start_offset < former:
                    self.log_start_offset = former  # tried again; the greater of the two files counts until then
                    raise

    def _write_start(self, log_start_offset: int, *, sync_name: bool = True) -> None:
        path, content = self._folder / LOG_START_FILE, {"log_start_offset": log_start_offset}
        write_checked(path, LOG_START_FILE, 1, content, width=_LOG_START_WIDTH, sync_name=sync_name)

    def _write_high_watermark(self, high_watermark: int, *, limited_below: int = 0, sync_name: bool = True) -> None:
        content: dict[str, Any] = {"high_watermark": high_watermark, "log_start_offset": self.log_start_offset or 0}
        limited_below = max(limited_below, self.limited_below)
        content |= {"limited_below": limited_below} if limited_below else {}
        if self.merged is not None:
            content["merged"] = self.merged
        path = self._folder / HIGH_WATERMARK_FILE
        write_checked(path, HIGH_WATERMARK_FILE, 1, content, sync_name=sync_name)
        self.high_watermark, self.has_high_watermark = high_watermark, True
        self.limited_below = limited_below
