"""The time that this broker may use: its own clock and those of the others, compared once a second.

Theory of operation. `ClusterNode` requests the clock of every other broker and records the answers here. Callers that
need the time take a reading of all clocks; `cluster.stream_time` computes the result. The time for which the own clock
has not jumped is kept across restarts of the process, as long as the machine is not restarted: a single broker that was
stopped for an hour continues with the correct time at once.

Threads. `note` and `refresh` are for the event loop; readings may be taken in any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec

from natslog.cluster.stream_time import (
    ClockReading,
    ClockSample,
    ExpiryClock,
    Steadiness,
    StreamClock,
    agreed_us,
    beginning_us,
)
from natslog.errors import DataDirError, NatslogError
from natslog.log.checked_file import read_checked, write_checked
from natslog.log_events import event
from natslog.model import BrokerId
from natslog.node.clock import elapsed_us, now_us

logger = logging.getLogger("natslog.cluster")

CLOCKS_APART_S = 30.0
"""Brokers whose clocks differ by more are reported to operators."""
_READING_HOLDS_US = 10_000
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _StoredClock(msgspec.Struct, frozen=True, kw_only=True):
    """As `Steadiness`, in the time since the machine's start that `boot` names."""

    boot: str
    offset_us: int
    since_us: int


class ClusterClock:
    """Args: `path`: the file with the time for which the own clock has not jumped.

    Attributes:
        is_alone: whether this broker is the whole cluster.
        apart_s: how far each other broker's clock was ahead of this one's, when it last answered.
    """

    def __init__(self, me: BrokerId, path: Path) -> None:
        self.apart_s: dict[BrokerId, float] = {}
        self._me, self._path = me, path
        self._boot = _boot_id()
        self._samples: dict[BrokerId, ClockSample] = {}
        self._brokers: frozenset[BrokerId] = frozenset()
        self.is_alone = False
        self._member_samples: tuple[ClockSample, ...] = ()
        self._last: ClockReading | None = None
        self._steadiness = self._stored() or Steadiness(now_us() - elapsed_us(), elapsed_us())
        self._is_stored = False

    # ---- own clock ----

    def _stored(self) -> Steadiness | None:
        """The result of the last process on this machine; None if the machine has restarted since."""
        try:
            found = read_checked(self._path, "clock", 1)
            stored = None if found is None else msgspec.convert(found, _StoredClock)
        except (NatslogError, DataDirError, msgspec.ValidationError) as error:
            logger.warning(
                "%s is ignored and will be rewritten: %s",
                self._path,
                error,
                extra=event("file.ignored", path=self._path),
            )
            return None
        if stored is None or not self._boot or stored.boot != self._boot or stored.since_us > elapsed_us():
            return None
        return Steadiness(stored.offset_us, stored.since_us).observed(now_us(), elapsed_us())

    def store(self) -> None:
        """Where it has changed; in a thread. Best effort: without the file, steadiness counts from the next start."""
        steadiness, self._is_stored = self._steadiness, True
        if not self._boot:
            return
        stored = _StoredClock(boot=self._boot, offset_us=steadiness.offset_us, since_us=steadiness.since_us)
        try:
            write_checked(self._path, "clock", 1, stored)
        except OSError as error:
            logger.warning(
                "%s could not be written: %s", self._path, error, extra=event("file.not_written", path=self._path)
            )

    def refresh(self, brokers: Iterable[BrokerId]) -> bool:
        """Once a second: reads the own clock, and counts these as the cluster. Whether `store` has work."""
        self._brokers = frozenset(brokers)
        self.is_alone = self._brokers == {self._me}
        self._select_samples()
        steadiness, wall_us = self._steadiness, now_us()
        self._steadiness = steadiness.observed(wall_us, elapsed_us())
        if self._steadiness is not steadiness:
            jump_s = (self._steadiness.offset_us - steadiness.offset_us) / 1e6
            logger.warning(
                "the wall clock of this machine jumped by %+.1f s",
                jump_s,
                extra=event("clock.jumped", seconds=round(jump_s, 1)),
            )
            self._is_stored = False
        return not self._is_stored

    # ---- the others' clocks ----

    def note(self, broker: BrokerId, wall_us: int, asked_us: int) -> None:
        """Another broker's clock, requested when this one's elapsed time was `asked_us`, and just received."""
        if broker == self._me:
            return
        answered_us = elapsed_us()
        self._samples[broker] = ClockSample(wall_us, answered_us)  # the other clock had reached that value by then
        self._select_samples()
        apart_s = (wall_us + (answered_us - asked_us) // 2 - now_us()) / 1e6
        known_s = self.apart_s.get(broker, 0.0)
        self.apart_s[broker] = apart_s
        if abs(apart_s) > CLOCKS_APART_S >= abs(known_s):
            logger.warning(
                "the clocks of broker %d and of this broker differ by %.0f s: correct them (NTP). Timestamps and "
                "expiry of messages follow the time that a majority of the brokers agrees on",
                broker,
                apart_s,
                extra=event("broker_clock", peer=broker, seconds=round(apart_s, 1)),
            )

    def _select_samples(self) -> None:
        self._last = None
        is_member = self._me in self._brokers
        self._member_samples = tuple(
            one for broker, one in self._samples.items() if is_member and broker in self._brokers
        )

    # ---- what follows: any thread ----

    def reading(self) -> ClockReading:
        """All clocks now. Those that were compared a moment ago are not compared again: they have advanced since."""
        last = self._last
        passed_us = elapsed_us()
        if last is None or not 0 <= passed_us - last.elapsed_us < _READING_HOLDS_US:
            last = self._last = self._compared(passed_us)
        return last.after(passed_us - last.elapsed_us) if passed_us != last.elapsed_us else last

    def _compared(self, passed_us: int) -> ClockReading:
        wall_us = now_us()
        if self.is_alone:
            return ClockReading(wall_us, passed_us, None, self._steadiness.steady_us(wall_us, passed_us))
        known, brokers = self._member_samples, len(self._brokers)
        if not known:
            return ClockReading(wall_us, passed_us)
        agreed = agreed_us(known, wall_us, passed_us, brokers)
        return ClockReading(wall_us, passed_us, agreed, 0, beginning_us(known, wall_us, passed_us, brokers))

    def steady_us(self) -> int:
        """For how long the own wall clock has not jumped."""
        return self._steadiness.steady_us(now_us(), elapsed_us())

    @property
    def has_time(self) -> bool:
        """Whether a majority's clocks are known, or there is only this one."""
        return self.is_alone or self.reading().agreed_us is not None

    def latest_us(self) -> int:
        """For data that must not expire early: the later one of the own clock and the time that a majority agrees
        on.
        """
        reading = self.reading()
        return max(reading.wall_us, reading.agreed_us or 0)

    def trusted_us(self, steady_us: int) -> int | None:
        """What a majority agrees on; the own clock where this broker is the whole cluster and the clock has been steady
        for so long. None if neither is known.
        """
        reading = self.reading()
        if reading.agreed_us is not None:
            return reading.agreed_us
        return reading.wall_us if self.is_alone and reading.steady_us >= steady_us else None


class StreamTime:
    """The time of one stream that this broker leads. From any thread.

    Args:
        newest_us: the newest timestamp of its log, 0 where there is none; `idle_s`: how long ago it was written here,
            or the log was opened.
    """

    def __init__(self, clock: ClusterClock, newest_us: int, idle_s: float) -> None:
        self._cluster = clock
        written_us = elapsed_us() - int(idle_s * 1e6)
        self._clock, self._expiry = StreamClock(newest_us, written_us), ExpiryClock(newest_us, written_us)
        self._lock = threading.Lock()

    def now_us(self) -> int:
        """The timestamp that the next message gets."""
        with self._lock:
            return self._clock.advance(self._cluster.reading())

    def expiry_us(self) -> int:
        """The time by which messages expire: what `now_us` gives, or earlier for some minutes after a jump of it. It
        stands still while the clocks of a majority are not known.
        """
        with self._lock:
            reading = self._cluster.reading()
            stream_us = self._clock.advance(reading)
            if reading.agreed_us is None and not self._cluster.is_alone:
                return self._expiry.time_us
            return self._expiry.advance(stream_us, reading, self._cluster.steady_us())

    def behind_s(self) -> float:
        """How far it is behind this machine's wall clock."""
        return (now_us() - self.now_us()) / 1e6


def _boot_id() -> str:
    """Identifies the current start of the machine; "" if the system does not provide it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
