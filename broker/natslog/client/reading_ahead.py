"""Reads a stream part by part; while the caller works on one part, the next one is fetched or decoded in a thread.

Two parts are in memory at most, and two answers as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from threading import Thread
from typing import TypeAlias

from natslog.client.answers import Fetched, Rest
from natslog.errors import CorruptAnswer, OffsetOutOfRange

Fetch: TypeAlias = Callable[[int], Fetched]
"""The answer from this offset on."""


def fetch_what_is_left(fetch: Fetch, end: int, start: int) -> Fetched:
    """As `fetch`, from where the log begins now if that is behind `start`; nothing if it is behind `end`.

    Raises:
        What `fetch` raises.
    """
    while True:
        try:
            return fetch(start)
        except OffsetOutOfRange as error:
            first, high_watermark = (error.facts.get(name) for name in ("log_start_offset", "high_watermark"))
            if not isinstance(first, int) or not isinstance(high_watermark, int) or first <= start:
                raise
            if first >= end:
                return Fetched([], end, high_watermark, first, "")
            start = first


class ReadAhead:
    """The parts of `[start, end)`, one after another. The first one is requested at once.

    Args:
        end: None: without end; then a part may have no rows and end where it starts, after a long poll without news.
        max_decoded_bytes: of one part that is decoded from the rest of an answer.

    Attributes:
        coming: the next part; None behind the last one. The process and the reader may end without waiting for it.
    """

    def __init__(self, fetch: Fetch, stream: str, start: int, end: int | None, max_decoded_bytes: int) -> None:
        self._fetch, self._stream, self._at, self._end = fetch, stream, start, end
        self._max_decoded_bytes = max_decoded_bytes
        self.coming: Future[Fetched] | None = None
        if end is None or start < end:
            self.coming = _in_background(partial(fetch, start))

    def take(self) -> Fetched:
        """Waits for the next part, and requests the one after it.

        Raises:
            OffsetOutOfRange: the log ends before `end`, or before the position. What `fetch` raises.
        """
        assert self.coming is not None, "there is no part behind the last one"
        fetched, self.coming = self.coming.result(), None
        if fetched.next_offset < self._at or (self._end is not None and fetched.next_offset == self._at):
            upto = "" if self._end is None else f", before {self._end}"
            raise OffsetOutOfRange(
                f"stream {self._stream!r} ends at offset {fetched.next_offset}{upto}: the log is shorter than it was",
                offset=self._at,
                log_start_offset=fetched.log_start_offset,
                high_watermark=fetched.high_watermark,
            )
        self._at = fetched.next_offset
        if self._end is None or self._at < self._end:
            fetch = partial(self._fetch, self._at)
            self.coming = _in_background(partial(_next_part, fetched.rest, fetch, self._max_decoded_bytes))
        return fetched


def _next_part(rest: Rest | None, fetch: Callable[[], Fetched], max_decoded_bytes: int) -> Fetched:
    """From the rest of the last answer, or from another one if there is none, or if it cannot be decoded."""
    if rest is None:
        return fetch()
    try:
        return rest.decoded(max_decoded_bytes)
    except CorruptAnswer:
        return fetch()


def _in_background(work: Callable[[], Fetched]) -> Future[Fetched]:
    """Runs it in a thread, in the context of the caller. The process and the reader may end without waiting for the
    thread.
    """
    future: Future[Fetched] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=copy_context().run, args=(run,), name="natslog-read-ahead", daemon=True).start()
    return future
