"""When a request is repeated: rounds over all servers, the pauses between them, and the problem that is reported in the
end. The clock is handed in.

Theory of operation. A round sends the request to one server after the other until one gives a valid response. There are
so many rounds as the client's options state; more of them, for a limited time, while what is missing comes by itself: a
leader is being elected, or the broker that has staged parts is starting again.
"""

from __future__ import annotations

from natslog.errors import MetadataUnavailable, NatslogError, NoLeader, NotLeader, NotMetadataLeader, PartsUnavailable

_LONGEST_WAIT = 8  # times the retry interval
_MOST_WAIT_S = 30.0
_LEADERLESS = (NoLeader, NotLeader, NotMetadataLeader, MetadataUnavailable)


class Rounds:
    """Of one request.

    Args:
        retries: rounds after the first. retry_interval_s: the first pause; each one is twice as long as the one before.
        patience_s: rounds are begun for at least this time. leader_within_s: where a leader is missing.
        parts_within_s: where the broker that has staged parts is missing.
        now_s: of a clock that never jumps, as for the methods.

    Attributes:
        problem: of the last round. has_answer: whether a broker has stated it.
        count: of the rounds that were begun.
    """

    def __init__(
        self,
        *,
        retries: int,
        retry_interval_s: float,
        patience_s: float,
        leader_within_s: float,
        parts_within_s: float,
        now_s: float,
    ) -> None:
        self.problem, self.has_answer, self.count = "", False, 0
        self._most, self._interval_s = retries + 1, retry_interval_s
        self._patient_until_s = now_s + patience_s
        self._leader_until_s = now_s + leader_within_s
        self._parts_until_s = now_s + parts_within_s
        self._unreachable = self._answered = ""
        self._requested_pause_s = 0.0

    def pause_s(self, now_s: float) -> float | None:
        """How long to wait before the next round; None: there is none."""
        if self.count >= self._most and now_s >= self._patient_until_s:
            return None
        if not self.count:
            return 0.0
        return max(self._requested_pause_s, self._interval_s * min(1 << (self.count - 1), _LONGEST_WAIT))

    def begin(self) -> None:
        self.count += 1
        self._requested_pause_s, self._answered = 0.0, ""

    def end(self) -> None:
        """What a broker answers states more than that another one cannot be reached."""
        self.problem, self.has_answer = self._answered or self._unreachable or self.problem, bool(self._answered)

    # ---- what the servers of a round have done ----

    def unreachable(self, problem: str) -> None:
        self._unreachable = problem
        self._wait_until(self._parts_until_s)

    def redirect_failed(self, problem: str) -> None:
        """The leader failed: another one is being chosen."""
        self._unreachable = problem
        self._wait_until(self._leader_until_s, self._parts_until_s)

    def token_replaced(self, problem: str) -> None:
        """The next round has the new token."""
        self._unreachable = problem
        self._most += 1

    def refused(self, server: str, error: NatslogError, *, status: int) -> None:
        """With a retriable error. Args: status: of HTTP; 0 where there was no whole response."""
        self._answered = f"{server}: {error.message}"
        self._requested_pause_s = max(self._requested_pause_s, _pause_of(error))
        if 0 < status < 400 or isinstance(error, _LEADERLESS):
            self._wait_until(self._leader_until_s, self._parts_until_s)
        elif isinstance(error, PartsUnavailable):
            self._wait_until(self._parts_until_s)

    def _wait_until(self, *times_s: float) -> None:
        self._patient_until_s = max(self._patient_until_s, *times_s)


def _pause_of(error: NatslogError) -> float:
    """How long the broker asks this client to wait before it repeats the request, in seconds."""
    stated = error.facts.get("retry_after_s")
    return min(float(stated), _MOST_WAIT_S) if isinstance(stated, int | float) and stated > 0 else 0.0
