"""Writes a query's progress to the brokers as a cursor, which operators see in `natslog cursor ls`.

Theory of operation. `note` takes a position of the query and returns at once. A thread writes the newest position, at
most once a second for each stream and at most ten times a second in all. Spark ends the source's process with SIGTERM,
without calling the source: so the first note installs a handler that writes the last position.

Invariant. Nothing here fails the query or makes it wait. A write that fails is retried, with a warning once a minute.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from types import FrameType
from typing import Any, TypeAlias

from natslog.client import ClientOptions, NatslogClient
from natslog.errors import NatslogError, StreamNotFound, StreamRecreated
from pyspark_natslog.options import in_passing
from pyspark_natslog.source.offsets import Offsets

logger = logging.getLogger("pyspark_natslog")

_EVERY_S = 1.0
_APART_S = 0.1
_AGAIN_AFTER_S = 5.0
_LOG_EVERY_S = 60.0
_LAST_WITHIN_S = 2.0


class _Close:
    """The last note."""


_Notes: TypeAlias = "queue.SimpleQueue[Offsets | _Close]"


class CursorMirror:
    """Writes the cursor `consumer` on each stream. Picklable (a copy has no notes)."""

    def __init__(self, consumer: str, servers: tuple[str, ...], options: ClientOptions) -> None:
        self._consumer, self._servers, self._options = consumer, servers, options
        # SimpleQueue, because a signal handler may put into it while the same thread is doing so.
        self._notes: _Notes = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return CursorMirror, (self._consumer, self._servers, self._options)

    def note(self, position: Offsets) -> None:
        """The query has completed everything below this position."""
        if self._thread is None:
            writer = _Writer(self._consumer, NatslogClient(self._servers, in_passing(self._options)), self._notes)
            self._thread = threading.Thread(target=writer.run, name="cursor", daemon=True)
            self._thread.start()
            self._close_on_sigterm()
        self._notes.put(position)

    def close(self) -> None:
        """Returns when the last note is written, or after two seconds."""
        if self._thread is not None:
            self._notes.put(_Close())
            self._thread.join(_LAST_WITHIN_S)

    def _close_on_sigterm(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, _: FrameType | None) -> None:
        """Spark may send it twice: then this waits within itself."""
        self.close()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class _Writer:
    """Runs in the thread: takes notes, and writes the newest when a write is due."""

    def __init__(self, consumer: str, client: NatslogClient, notes: _Notes) -> None:
        self._consumer, self._client, self._notes = consumer, client, notes
        self._wanted: Offsets = {}
        self._written: Offsets = {}
        self._not_before_s = self._logged_until_s = float("-inf")
        self._is_closing = False

    def run(self) -> None:
        while not self._is_closing:
            self._take_notes()
            pending = {name: at for name, at in self._wanted.items() if self._written.get(name) != at}
            if pending and (self._is_closing or time.monotonic() >= self._not_before_s):
                self._write(pending)
        self._client.close()

    def _take_notes(self) -> None:
        """Waits for a note, or until pending positions may be written; then takes all notes."""
        has_pending = self._wanted != self._written
        wait_s = max(0.0, self._not_before_s - time.monotonic()) if has_pending else None
        try:
            note = self._notes.get(timeout=wait_s)
            while True:
                if isinstance(note, _Close):
                    self._is_closing = True
                else:
                    self._wanted = note
                    self._written = {name: at for name, at in self._written.items() if name in self._wanted}
                note = self._notes.get_nowait()
        except queue.Empty:
            return

    def _write(self, pending: Offsets) -> None:
        wait_s = max(_EVERY_S, _APART_S * len(pending))
        for name, at in pending.items():
            try:
                self._client.set_cursor(self._consumer, name, at.offset, expected_id=at.id)
            except (StreamNotFound, StreamRecreated) as error:  # the query fails with it too: it is not retried
                self._warn(name, error)
            except (NatslogError, ValueError, TypeError) as error:  # unavailable, or an unexpected answer
                self._warn(name, error)
                if not isinstance(error, NatslogError) or error.retriable:
                    wait_s = _AGAIN_AFTER_S
                    break
            self._written[name] = at
        self._not_before_s = time.monotonic() + wait_s

    def _warn(self, stream: str, error: Exception) -> None:
        if time.monotonic() >= self._logged_until_s:
            self._logged_until_s = time.monotonic() + _LOG_EVERY_S
            logger.warning(
                f"cursor {self._consumer} on stream {stream} is not up to date; the query continues: {error}"
            )
