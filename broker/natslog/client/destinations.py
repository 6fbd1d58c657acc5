"""Which streams record the subjects of rows that are to be published, and how they ack.

The brokers are asked once per subject and minute; what they said is kept in a table of bounded size for the whole
process, because each task of a Spark job has a client of its own.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from natslog.client.client import NatslogClient
from natslog.subjects import covers
from natslog.wire.outgoing import BY_HEADER, BY_REPLY

_KEPT_S = 60.0
_MOST_SUBJECTS = 10_000
_MOST_QUESTIONS = 32
"""For more new subjects at once, the list of all streams is requested instead."""

_BITS = {"reply": BY_REPLY, "header": BY_HEADER}


@dataclass(frozen=True, slots=True)
class Destination:
    """Where messages of one subject are recorded.

    Attributes:
        streams: the names of all streams that record it. `ack_to`: how those of them that ack have to be asked for an
            ack: bits of `BY_REPLY` and `BY_HEADER`; 0: none of them acks.
    """

    streams: tuple[str, ...] = ()
    ack_to: int = 0


class Destinations:
    """Thread-safe.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._known: OrderedDict[tuple[tuple[str, ...], str], tuple[float, Destination]] = OrderedDict()

    def of(self, client: NatslogClient, subjects: Iterable[str]) -> dict[str, Destination]:
        """By subject.

        Raises:
            NatslogError: no broker answers.
        """
        wanted, now = list(subjects), self._clock()
        with self._lock:
            known = {subject: self._known.get((client.servers, subject)) for subject in wanted}
        found = {subject: one[1] for subject, one in known.items() if one is not None and now - one[0] < _KEPT_S}
        unknown = [subject for subject in wanted if subject not in found]
        if unknown:
            asked = _asked(client, unknown)
            self._keep(client.servers, asked, now)
            found |= asked
        return found

    def _keep(self, servers: tuple[str, ...], asked: dict[str, Destination], now: float) -> None:
        with self._lock:
            for subject, destination in asked.items():
                self._known[servers, subject] = now, destination
                self._known.move_to_end((servers, subject))
            while len(self._known) > _MOST_SUBJECTS:
                self._known.popitem(last=False)


def _asked(client: NatslogClient, subjects: list[str]) -> dict[str, Destination]:
    if len(subjects) <= _MOST_QUESTIONS:
        return {subject: _of_one(client, subject) for subject in subjects}
    listed = client.streams(current=True)
    plain: dict[str, list[dict[str, Any]]] = {}
    patterns = []
    for body in listed:
        if any(token in ("*", ">") for token in body["subject"].split(".")):
            patterns.append(body)
        else:
            plain.setdefault(body["subject"], []).append(body)
    return {
        subject: _destination(
            [*plain.get(subject, ()), *(body for body in patterns if covers(body["subject"], subject))]
        )
        for subject in subjects
    }


def _of_one(client: NatslogClient, subject: str) -> Destination:
    """That no stream acks is concluded only from a broker that has received all changes."""
    found = _destination(client.streams(subject=subject))
    return found if found.ack_to else _destination(client.streams(subject=subject, current=True))


def _destination(recording: list[dict[str, Any]]) -> Destination:
    """Of the streams that record a subject. A broker of natslog 0.1.0 states no `acks`: its streams ack replies."""
    ack_to = 0
    for body in recording:
        if not body.get("sealed"):
            ack_to |= _BITS.get(body.get("acks", "reply"), 0)
    return Destination(tuple(sorted(body["name"] for body in recording)), ack_to)


destinations = Destinations()
"""Of this process."""
