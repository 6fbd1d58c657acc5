"""The message ids of one log: those in its rows, and those that are kept of rows that were removed."""

from __future__ import annotations

import logging

from natslog.errors import CorruptLog
from natslog.log.chain import Segment
from natslog.log.checkpoints import NO_ROOM
from natslog.log.shared import SharedLog
from natslog.log.stored_ids import KeptIds, NewestIds, StoredIds, as_damage, ids_in, is_older, newest_ids
from natslog.log_events import event

logger = logging.getLogger("natslog.log")


class MessageIds:
    """Thread-safe. `kept`: those of removed rows."""

    def __init__(self, shared: SharedLog) -> None:
        self._shared, self.kept = shared, KeptIds(shared.folder)

    @property
    def _oldest_us(self) -> int:
        """Ids of older messages are not needed."""
        return self._shared.newest_timestamp_us - int(self._shared.settings.dedupe_window_s * 1_000_000)

    def newest(self, window_s: float) -> NewestIds:
        """To fill a deduplication window of this length; committed or not."""
        shared = self._shared
        oldest_us = shared.newest_timestamp_us - int(window_s * 1_000_000)
        return newest_ids(shared.chain, shared.reader, self.kept, oldest_us)

    def from_offset(self, offset: int) -> tuple[StoredIds, CorruptLog | None]:
        """Those of the rows from this offset on, also of rows that were removed since, and the first damage that hid
        some.
        """
        chain = self._shared.chain
        found, damage = ids_in(chain, self._shared.reader, offset, chain.log_end_offset)
        try:
            kept = self.kept.read()  # at last, as in `newest_ids`
        except (CorruptLog, OSError) as error:
            return found, damage or as_damage(error)
        later = kept.offsets >= offset
        removed = StoredIds(kept.ids[later], kept.offsets[later], kept.times_us[later])
        return StoredIds.joined([found, removed]), damage

    def adopt(self, found: StoredIds) -> None:
        """Those that the leader keeps. Raises OSError: they could not be stored."""
        self.kept.add(found, self._oldest_us)

    def expire(self) -> None:
        """Removes the kept ids that no window needs any more. Raises OSError."""
        self.kept.expire(self._oldest_us + int(self._shared.idle_s * 1_000_000))

    def keep_of(self, segment: Segment, end_offset: int) -> None:
        """Before rows of a segment are removed: their message ids, while a repeated message may be recognised by them.

        Raises:
            OSError: they could not be stored, for another reason than a full disk.
        """
        shared, oldest_us = self._shared, self._oldest_us
        if not shared.settings.dedupe_window_s or is_older(segment, oldest_us):
            return
        found, damage = ids_in(shared.chain, shared.reader, segment.base_offset, end_offset)
        if damage is not None:
            self._report_lost(damage)
        try:
            self.kept.add(found, oldest_us)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._report_lost(error)  # what is removed makes room

    def _report_lost(self, error: Exception) -> None:
        folder = self._shared.folder
        logger.error(
            f"{folder}: message ids of rows that are removed could not be kept, so that a repeated message may be "
            f"stored again: {error}",
            extra=event("log.ids_lost", path=folder),
        )
