"""Publishing to natslog with the JetStream API on, and off."""

from __future__ import annotations

from natslog.client import NatslogClient
from tests.bench.jetstream.sides import MESSAGE_BYTES, natslog_beside
from tests.bench.pairs import Comparison, Measured, against, in_turn
from tests.bench.processor_time import processor_seconds
from tests.bench.sides import STREAM, SUBJECT, raw_publish

_SECONDS, _WARM = 4.0, 0.7
_BAR = 0.95
"""No slower: medians of runs of the same side differ by as much."""


def published(pairs: int) -> list[Comparison]:
    """The same publisher, and the same stream."""
    found = []
    for window in (4000, 40_000):
        title = f"acked publish, 128 B, window {window:,}, JetStream API on"
        sides = {name: lambda name=name, window=window: _rate(name, window) for name in ("on", "off")}
        runs = in_turn(title, sides, pairs)
        found.append(against(title, "messages/s", _BAR, runs["on"], "the same, API off", runs["off"]))
    return found


def _rate(jetstream: str, window: int) -> Measured:
    with natslog_beside(jetstream=jetstream) as side:
        NatslogClient(side.broker_url).create_stream(STREAM, SUBJECT)
        before = processor_seconds(side.pids)
        done = raw_publish(side.server, "acked", bytes=MESSAGE_BYTES, window=window, seconds=_SECONDS, warm=_WARM)
        return Measured(done["rate"], (processor_seconds(side.pids) - before) / done["sent"] * 1e6)
