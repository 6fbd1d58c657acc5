"""Which streams record the subjects of rows that are to be published, and how they ack.

The list of all streams is requested from the brokers once a minute and kept for the whole process, because each task of
a Spark job has a client of its own; what it means for each subject is kept in a table of bounded size. That no stream
acks a subject is concluded only from a list that is requested for this conclusion, of a broker with all changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from natslog.client.client import NatslogClient
from natslog.wire.outgoing import BY_HEADER, BY_REPLY

_KEPT_S = 60.0
_MOST_SUBJECTS = 100_000

_BITS = {"reply": BY_REPLY, "header": BY_HEADER}


@dataclass(frozen=True, slots=True)
class Destination:
    """Where messages of one subject are recorded.

    Attributes:
        streams: the streams that record it, by name, and how each has to be asked for an ack: `BY_REPLY`, `BY_HEADER`,
            or 0 where it acks nothing.
    """

    streams: tuple[tuple[str, int], ...] = ()

    @property
    def ack_to(self) -> int:
        """Of all of them: bits of `BY_REPLY` and `BY_HEADER`; 0 where no stream acks."""
        bits = 0
        for _, one in self.streams:
            bits |= one
        return bits

    def acks_of(self, stream: str) -> int | None:
        """How this stream acks; None where it does not record the subject."""
        return dict(self.streams).get(stream)


class Destinations:
    """Thread-safe.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._lists: dict[tuple[str, ...], _Streams] = {}

    def of(
        self, client: NatslogClient, subjects: Iterable[str], required: Iterable[str] = ()
    ) -> dict[str, Destination]:
        """By subject.

        Args:
            required: names of streams that should ack every subject.

        Raises:
            NatslogError: no broker answers.
        """
        wanted, names = list(subjects), list(required)
        with self._lock:
            kept = self._lists.get(client.servers)
            if kept is not None and self._clock() - kept.as_of < _KEPT_S:
                found = {subject: kept.destination(subject) for subject in wanted}
                if all(_suffices(one, names) for one in found.values()):
                    return found
            streams = self._request(client)
            return {subject: streams.destination(subject) for subject in wanted}

    def forget(self, servers: tuple[str, ...]) -> None:
        """The streams may have changed: the next question is put to the brokers again."""
        with self._lock:
            self._lists.pop(servers, None)

    def _request(self, client: NatslogClient) -> _Streams:
        as_of = self._clock()
        streams = self._lists[client.servers] = _Streams(as_of, client.streams(current=True))
        return streams


def _suffices(destination: Destination, required: list[str]) -> bool:
    return destination.ack_to != 0 and all(destination.acks_of(name) for name in required)


@dataclass(slots=True)
class _Node:
    """Of the tree of subjects, by token: the streams whose subject ends here, and the longer ones."""

    streams: list[tuple[str, int]] = field(default_factory=list)
    longer: dict[str, _Node] = field(default_factory=dict)


class _Streams:
    """What a broker listed at a time."""

    def __init__(self, as_of: float, listed: list[dict[str, Any]]) -> None:
        self.as_of = as_of
        self._root = _Node()
        self._known: dict[str, Destination] = {}
        for body in listed:
            node = self._root
            for token in body["subject"].split("."):
                node = node.longer.setdefault(token, _Node())
            # A broker of natslog 0.1.0 states no `acks`: its streams ack replies.
            acks = 0 if body.get("sealed") else _BITS.get(body.get("acks", "reply"), 0)
            node.streams.append((body["name"], acks))

    def destination(self, subject: str) -> Destination:
        if (known := self._known.get(subject)) is None:
            if len(self._known) >= _MOST_SUBJECTS:
                self._known.clear()
            known = self._known[subject] = Destination(tuple(sorted(_matching(self._root, subject.split("."), 0))))
        return known


def _matching(node: _Node, tokens: list[str], at: int) -> Iterator[tuple[str, int]]:
    if at == len(tokens):
        yield from node.streams
        return
    if (rest := node.longer.get(">")) is not None:
        yield from rest.streams
    for token in (tokens[at], "*"):
        if (longer := node.longer.get(token)) is not None:
            yield from _matching(longer, tokens, at + 1)


destinations = Destinations()
"""Of this process."""
