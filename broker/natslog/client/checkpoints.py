"""Stores how far a consumer has processed a stream: as a cursor at the brokers.

Invariants. A position is stored only after everything below it was processed, and positions that this object stores
ascend. Cursors are not locked: where another program sets the same one, the last write is kept, and a warning is
logged.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from threading import RLock

from natslog.client.cursors import CursorCalls
from natslog.errors import CursorNotFound, NatslogError, StreamNotFound, StreamRecreated
from natslog.log_events import event

logger = logging.getLogger("natslog.client")

_AGAIN_AFTER_S = 5.0
_WARN_EVERY_S = 60.0


class Checkpoints:
    """The cursor `consumer` on a stream. Thread-safe.

    Args:
        every_rows, interval_s: a position is due when so many messages were processed since the last one that was
            stored, or so much time has passed. None: it never is for that reason.
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self,
        client: CursorCalls,
        consumer: str,
        stream: str,
        *,
        every_rows: int | None,
        interval_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._consumer, self._stream = client, consumer, stream
        self._every_rows, self._interval_s, self._clock = every_rows, interval_s, clock
        self._lock = RLock()
        self._stored: int | None = None
        self._own: set[int] = set()  # what may be stored: a call that failed may have been applied
        self._rows = 0
        self._stored_at_s = clock()
        self._not_before_s = self._warn_after_s = -math.inf

    def load(self) -> tuple[str, int] | None:
        """Id of the stream and offset, as they are stored; None where the consumer has no cursor.

        Raises:
            StreamNotFound, BrokerUnavailable.
        """
        try:
            shown = self._client.cursor(self._consumer, self._stream)
        except CursorNotFound:
            return None
        self._stored = int(shown["offset"])
        self._own = {self._stored}
        return str(shown["id"]), self._stored

    def forget(self) -> None:
        """The stream was created again: its cursor was deleted with it."""
        self._stored, self._own = None, set()

    def note(self, rows: int) -> None:
        """So many more messages were processed."""
        self._rows += rows

    def due_at_s(self, processed: int) -> float:
        """When this position is to be stored, by the clock; infinite where nothing requires it."""
        if processed == self._stored:
            return math.inf
        by_rows = -math.inf if self._every_rows is not None and self._rows >= self._every_rows else math.inf
        by_time = math.inf if self._interval_s is None else self._stored_at_s + self._interval_s
        return max(self._not_before_s, min(by_rows, by_time))

    def store_if_due(self, processed: int, stream_id: str) -> None:
        """Stores it if it is due. If that fails for a while, the consumer continues, and it is repeated later.

        Raises:
            NatslogError: it can never succeed, as without the permission for it.
        """
        if self._clock() < self.due_at_s(processed):
            return
        try:
            self.store(processed, stream_id)
        except NatslogError as error:
            is_reported_by_fetch = isinstance(error, StreamNotFound | StreamRecreated)
            if not (error.retriable or is_reported_by_fetch):
                raise
            self._not_before_s = self._clock() + _AGAIN_AFTER_S
            logger.warning(
                f"cursor {self._consumer} on stream {self._stream} was not set to {processed}; the consumer "
                f"continues, and repeats this after {_AGAIN_AFTER_S:.0f} s: {error}",
                extra=event("cursor.not_set", cursor=self._consumer, stream=self._stream, offset=processed),
            )

    def store(self, processed: int, stream_id: str) -> None:
        """Stores the position, unless this one or a later one is stored.

        Raises:
            StreamNotFound, StreamRecreated, TooManyCursors, BrokerUnavailable. InvalidRequest: the name is wrong.
        """
        with self._lock:
            if self._stored is not None and processed <= self._stored:
                return
            found = None if self._stored is None else self._found()
            is_moved = self._stored is not None and found not in self._own
            self._own.add(processed)
            self._client.set_cursor(self._consumer, self._stream, processed, expected_id=stream_id)
            if is_moved:
                self._warn_moved(found, processed)
            self._stored, self._own = processed, {processed}
            self._rows, self._stored_at_s = 0, self._clock()

    def _found(self) -> int | None:
        """Where the cursor is now; None if it was deleted."""
        try:
            return int(self._client.cursor(self._consumer, self._stream)["offset"])
        except CursorNotFound:
            return None

    def _warn_moved(self, found: int | None, processed: int) -> None:
        """At most once a minute."""
        if self._clock() < self._warn_after_s:
            return
        self._warn_after_s = self._clock() + _WARN_EVERY_S
        logger.warning(
            "cursor %s on stream %s was %s by another program; this consumer had set it to %s, and sets it to %d now. "
            "If two consumers use this cursor, give each one its own",
            self._consumer,
            self._stream,
            "deleted" if found is None else f"set to {found}",
            self._stored,
            processed,
            extra=event("cursor.moved_by_another", cursor=self._consumer, stream=self._stream, offset=processed),
        )
