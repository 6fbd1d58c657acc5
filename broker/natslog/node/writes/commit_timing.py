"""When a small commit of a stream with several replicas begins. Pure.

Theory of operation. A follower requests the next messages when it has stored the last ones. A commit that begins before
that is copied no sooner, and costs as much processor time as one of many messages, so it waits: until the high
watermark has passed everything, at most `COPIES_WITHIN_S`.

Publishers that keep a number of messages in flight send as many as were acked. If the first of them began a commit, the
rest would be in the next one, and from then on two groups would take turns. So a commit also waits for as many messages
as were acked just now, at most 1 ms or half of the time that their copies took. Where most of them do not come, because
publishers do not wait for acks, the next acks are followed by no such pause, and after each failure by twice as many.
"""

from __future__ import annotations

COPIES_WITHIN_S = 0.005
_RETURN_WITHIN_S, _RETURN_SHARE, _MOST_RETURNED = 0.001, 0.5, 0.75
_MOST_SKIPPED = 64


class CommitTiming:
    """Of one stream. Times are seconds of a clock that never goes back."""

    def __init__(self) -> None:
        self._copying_until_s = self._copied_from_s = 0.0
        self._expected_rows = 0
        self._expected_until_s = 0.0
        self._skipped = self._left_to_skip = 0

    def copying(self, now_s: float) -> None:
        """A commit is stored here; copies of it are awaited."""
        if now_s >= self._copying_until_s:
            self._copied_from_s = now_s
        self._copying_until_s = now_s + COPIES_WITHIN_S

    def acked(self, rows: int, gathered_rows: int, now_s: float, *, is_last: bool) -> None:
        """Copies of so many rows exist, and their acks are sent.

        Args:
            gathered_rows: those that wait for a commit. is_last: no copies of other commits are awaited.
        """
        if is_last:
            self._copying_until_s = 0.0
        if self._left_to_skip:
            self._left_to_skip -= 1
            return
        self._expected_rows = gathered_rows + rows
        took_s = min(now_s - self._copied_from_s, COPIES_WITHIN_S)
        self._expected_until_s = now_s + max(_RETURN_WITHIN_S, _RETURN_SHARE * took_s)

    def pause_s(self, rows: int, now_s: float) -> float:
        """How long a commit of so many rows has to wait, if no more come; 0: it begins now, which ends what was
        expected.
        """
        if now_s < self._copying_until_s:
            return self._copying_until_s - now_s
        expected_rows, left_s = self._expected_rows, self._expected_until_s - now_s
        if rows < expected_rows and left_s > 0:
            return left_s
        if expected_rows:
            has_failed = rows < _MOST_RETURNED * expected_rows
            self._skipped = min(2 * self._skipped + 1, _MOST_SKIPPED) if has_failed else 0
            self._left_to_skip, self._expected_rows = self._skipped, 0
        return 0.0
