"""Which streams record the subjects of rows that are to be published, and how they ack.

The list of all streams is requested from the brokers once a minute and kept for the whole process, because each task of
a Spark job has a client of its own. Subjects are compared with it as columns: rows may each have a subject of their
own. That no stream acks a subject is concluded only from a list that is requested for this conclusion, of a broker with
all changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.client.client import NatslogClient
from natslog.errors import ConfigError
from natslog.model import subjects_of
from natslog.subjects import cover, has_wildcard, wildcard_regex
from natslog.wire.outgoing import BY_HEADER, BY_REPLY

_KEPT_S = 60.0
_PATTERNS_AT_ONCE = 100
"""In one regular expression, so that its automaton stays small."""

_BITS = {"reply": BY_REPLY, "any": BY_REPLY, "header": BY_HEADER}

Mask = npt.NDArray[np.bool_]


class Destinations:
    """Thread-safe.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._lists: dict[tuple[str, ...], _Streams] = {}

    def ways(
        self, client: NatslogClient, subjects: Any, required: Iterable[str] = (), *, envelopes: bool = False
    ) -> npt.NDArray[np.uint8]:
        """How each subject has to be asked for acks: bits of `BY_REPLY` and `BY_HEADER`, 0 where no stream acks it.

        Args:
            subjects: string array of plain subjects.
            required: names of streams that must ack every subject.
            envelopes: whether all streams of these subjects must store envelopes as rows.

        Raises:
            ConfigError: a required stream does not, or a stream does not store envelopes as rows. NatslogError: no
                broker answers.
        """
        names = tuple(required)
        with self._lock:
            kept = self._lists.get(client.servers)
            if kept is not None and self._clock() - kept.as_of < _KEPT_S:
                ways = kept.ways(subjects)
                understood = not (envelopes and kept.unaware.cover(subjects).any())
                if understood and ways.all() and all(kept.acked_by(name, subjects).all() for name in names):
                    return ways
            streams = self._request(client)
        for name in names:
            unacked = np.flatnonzero(~streams.acked_by(name, subjects))
            if len(unacked):
                raise ConfigError(streams.why_unacked(name, subjects[int(unacked[0])].as_py()))
        unaware = np.flatnonzero(streams.unaware.cover(subjects))
        if envelopes and len(unaware):
            raise ConfigError(
                f"a stream that records the subject {subjects[int(unaware[0])].as_py()!r} does not store envelopes as "
                "rows: upgrade the brokers, or send without envelopes"
            )
        return streams.ways(subjects)

    def forget(self, servers: tuple[str, ...]) -> None:
        """The streams may have changed: the next question is put to the brokers again."""
        with self._lock:
            self._lists.pop(servers, None)

    def _request(self, client: NatslogClient) -> _Streams:
        as_of = self._clock()
        streams = self._lists[client.servers] = _Streams(as_of, client.streams(current=True))
        return streams


class _Streams:
    """What a broker listed at a time."""

    def __init__(self, as_of: float, listed: list[dict[str, Any]]) -> None:
        self.as_of = as_of
        self._subjects = {body["name"]: subjects_of(body) for body in listed}
        self._bits = {body["name"]: 0 if body["sealed"] else _BITS.get(body["acks"], 0) for body in listed}
        self.unaware = _Patterns(one for body in listed if not body["envelopes"] for one in subjects_of(body))
        self._acking = {
            bit: _Patterns(one for name, acks in self._bits.items() if acks == bit for one in self._subjects[name])
            for bit in _BITS.values()
        }

    def ways(self, subjects: Any) -> npt.NDArray[np.uint8]:
        ways = np.zeros(len(subjects), np.uint8)
        for bit, patterns in self._acking.items():
            ways[patterns.cover(subjects)] |= bit
        return ways

    def acked_by(self, stream: str, subjects: Any) -> Mask:
        return _Patterns(self._subjects[stream] if self._bits.get(stream) else []).cover(subjects)

    def why_unacked(self, stream: str, subject: str) -> str:
        recording = sorted(name for name, recorded in self._subjects.items() if cover(recorded, subject))
        if stream in recording:
            return f"stream {stream!r} does not ack the subject {subject!r}: it is sealed, or its setting acks is never"
        return (
            f"stream {stream!r} does not record the subject {subject!r}; streams that do: "
            f"{', '.join(recording) or 'none'}"
        )


class _Patterns:
    """Subjects of streams, with and without wildcards."""

    def __init__(self, patterns: Iterable[str]) -> None:
        every = list(patterns)
        wildcards = list(filter(has_wildcard, every))
        self._plain = pa.array([pattern for pattern in every if pattern not in set(wildcards)], pa.string())
        self._wildcards = [
            "|".join(map(wildcard_regex, wildcards[first : first + _PATTERNS_AT_ONCE]))
            for first in range(0, len(wildcards), _PATTERNS_AT_ONCE)
        ]

    def cover(self, subjects: Any) -> Mask:
        """Marks the subjects that one of the patterns covers."""
        covered = pc.is_in(subjects, value_set=self._plain)
        for expression in self._wildcards:
            covered = pc.or_(covered, pc.match_substring_regex(subjects, expression))
        return np.asarray(covered, np.bool_)


destinations = Destinations()
"""Of this process."""
