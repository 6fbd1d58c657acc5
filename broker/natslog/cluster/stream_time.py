"""Stream time: the timestamp that a stream's next message would get, and the time by which its messages expire.

Theory of operation. No single wall clock decides. A stream's time starts at its newest timestamp and advances with the
monotonic clock. It may outrun that only to the time that a majority of the cluster's brokers agrees on: the latest time
that so many clocks have reached. A single clock that is ahead therefore has no effect, and one that is behind does not
slow down the others. Where every clock is behind the newest timestamp (an earlier leader's was ahead), stream time
advances at half the speed until they meet, so that windows still end and timestamps become right again.

A broker that is the whole cluster has no other clock to compare with. Its wall clock is followed where it is ahead by
less than it has advanced steadily, in step with the monotonic clock; an hour of steadiness is enough for any distance.
One start with a wrong clock therefore has no immediate effect, and a stream that was idle for a week is not delayed
permanently.

What expires is hidden by `ExpiryClock`, which does not follow a jump of stream time at once: a wrong majority does not
hide everything before somebody can correct it.

Invariants. Stream time never goes back. Between two readings it advances by at most the elapsed monotonic time, unless
a majority of the clocks (alone: the broker's own, steady for long enough) has reached the result.

Times are microseconds: `wall_us` since 1970, `elapsed_us` of a clock that never jumps, since any moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

SAMPLE_HOLDS_US = 5_000_000
"""A sample of another broker's clock is valid for this time."""
STEADY_ENOUGH_US = 3_600_000_000
"""The clock of a single broker that has not jumped for this time is followed, however far ahead it is."""
_JUMP_US = 1_000_000
JUMP_FOLLOWED_WITHIN_US = 300_000_000
"""What expires because stream time has jumped is hidden in the course of this time."""


class ClockSample(NamedTuple):
    """Another broker's wall clock had reached `wall_us` when this broker's elapsed time was `elapsed_us`."""

    wall_us: int
    elapsed_us: int


def agreed_us(samples: Iterable[ClockSample], own_wall_us: int, elapsed_us: int, brokers: int) -> int | None:
    """The latest time that a majority of the cluster's clocks has reached, by fresh samples and the own clock.

    Args:
        samples: one of each other broker that is known, of any age.
        brokers: how many the cluster has, this one included.

    Returns:
        None where fewer than a majority are known.
    """
    clocks, majority = _latest_first(samples, own_wall_us, elapsed_us), brokers // 2 + 1
    return clocks[majority - 1] if len(clocks) >= majority else None


def beginning_us(samples: Iterable[ClockSample], own_wall_us: int, elapsed_us: int, brokers: int) -> int:
    """The time that a stream without messages begins at: what is agreed on, where all clocks are known. Before, the
    latest of them: a stream that began with a clock that is behind would jump to the time of the majority as soon as
    more clocks are known, and message ids written before it would expire too early.

    Args:
        samples, brokers: as for `agreed_us`.
    """
    clocks = _latest_first(samples, own_wall_us, elapsed_us)
    return clocks[brokers // 2] if len(clocks) >= brokers else clocks[0]


def _latest_first(samples: Iterable[ClockSample], own_wall_us: int, elapsed_us: int) -> list[int]:
    ages = ((sample.wall_us, elapsed_us - sample.elapsed_us) for sample in samples)
    return sorted([own_wall_us, *(wall_us + age_us for wall_us, age_us in ages if age_us <= SAMPLE_HOLDS_US)])[::-1]


@dataclass(frozen=True, slots=True)
class Steadiness:
    """The wall clock has been `offset_us` ahead of elapsed time, within a second, since `since_us`."""

    offset_us: int
    since_us: int

    def steady_us(self, wall_us: int, elapsed_us: int) -> int:
        """For how long the wall clock has not jumped; 0 where it has now."""
        has_jumped = abs(wall_us - elapsed_us - self.offset_us) > _JUMP_US
        return 0 if has_jumped else max(0, elapsed_us - self.since_us)

    def observed(self, wall_us: int, elapsed_us: int) -> Steadiness:
        """After one more reading, from which on it counts anew if the clock has jumped."""
        offset_us = wall_us - elapsed_us
        return self if abs(offset_us - self.offset_us) <= _JUMP_US else Steadiness(offset_us, elapsed_us)


class ClockReading(NamedTuple):
    """All clocks at one moment; taken for every commit.

    Attributes:
        agreed_us: what a majority of several brokers has reached, where it is known.
        steady_us: where this broker is the whole cluster: for how long its wall clock has not jumped. Else 0.
        beginning_us: for a stream without messages, where other clocks are known; else 0.
    """

    wall_us: int
    elapsed_us: int
    agreed_us: int | None = None
    steady_us: int = 0
    beginning_us: int = 0

    def after(self, passed_us: int) -> ClockReading:
        """The same clocks so much later, if none of them has jumped."""
        wall_us, elapsed_us, agreed_us, steady_us, beginning_us = self
        return ClockReading(
            wall_us + passed_us,
            elapsed_us + passed_us,
            None if agreed_us is None else agreed_us + passed_us,
            steady_us + passed_us if steady_us else 0,
            beginning_us + passed_us if beginning_us else 0,
        )


class StreamClock:
    """One stream's time, at the broker that leads it.

    Args:
        newest_us: the newest timestamp of its log; 0 where there is none.
        elapsed_us: when that was written here, or the log was opened if that was later.
    """

    def __init__(self, newest_us: int, elapsed_us: int) -> None:
        self._time_us = newest_us
        self._elapsed_us = elapsed_us

    def advance(self, reading: ClockReading) -> int:
        """Stream time now: at least what it returned before."""
        passed_us = max(0, reading.elapsed_us - self._elapsed_us)
        self._time_us = self._next_us(reading, passed_us)
        self._elapsed_us = max(self._elapsed_us, reading.elapsed_us)
        return self._time_us

    def _next_us(self, reading: ClockReading, passed_us: int) -> int:
        wall_us, held_us = reading.wall_us, self._time_us + passed_us
        if not self._time_us:
            return reading.beginning_us or wall_us
        slowest_us = self._time_us + passed_us // 2
        if reading.agreed_us is not None:
            return max(slowest_us, reading.agreed_us, min(wall_us, held_us))
        is_followed = reading.steady_us >= min(wall_us - held_us, STEADY_ENOUGH_US)
        return max(slowest_us, wall_us if is_followed else min(wall_us, held_us))


class ExpiryClock:
    """The time by which messages of one stream expire: stream time, or less for a while after that has jumped.

    Stream time that advances in step with elapsed time, within a second, is followed at once. What it jumps ahead is
    followed evenly, over `JUMP_FOLLOWED_WITHIN_US`, and no further from the moment that the clocks are corrected. It
    never goes back, and is never ahead of stream time.

    Args:
        newest_us, elapsed_us: as of `StreamClock`.

    Attributes:
        time_us: the last result.
    """

    def __init__(self, newest_us: int, elapsed_us: int) -> None:
        self.time_us = newest_us
        self._elapsed_us = elapsed_us
        self._is_first, self._jump_us = True, 0

    def advance(self, stream_us: int, reading: ClockReading, steady_us: int) -> int:
        """The time now.

        Args:
            stream_us: stream time, which stays ahead when clocks were ahead. reading: the clocks now. steady_us: for
                how long this broker's wall clock has not jumped. So much time, as far as that clock shows it, may have
                passed before this broker had the stream.
        """
        target_us = min(stream_us, reading.wall_us if reading.agreed_us is None else reading.agreed_us)
        passed_us = max(0, reading.elapsed_us - self._elapsed_us)
        held_us = self.time_us + passed_us
        ahead_us = target_us - held_us
        has_passed_here = ahead_us <= steady_us and target_us <= reading.wall_us + _JUMP_US
        is_known = self._is_first and (not self.time_us or has_passed_here)
        if ahead_us <= _JUMP_US or is_known:
            self._jump_us = 0
            self.time_us = max(self.time_us, target_us)
        else:
            self.time_us = min(target_us, held_us + self._jump_us * passed_us // JUMP_FOLLOWED_WITHIN_US)
            self._jump_us = max(self._jump_us, ahead_us)  # followed from now on
        self._elapsed_us, self._is_first = max(self._elapsed_us, reading.elapsed_us), False
        return self.time_us
