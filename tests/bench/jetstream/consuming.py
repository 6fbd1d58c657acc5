"""Consumers beside JetStream: pull with acks, push with flow control, and a work queue of four members."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from tests.bench.jetstream.connection import Api
from tests.bench.jetstream.relayed import RELAY, relayed
from tests.bench.jetstream.sides import OURS, PEER, SIDES, Figures, Side, fill, in_pairs, line, load
from tests.bench.pairs import Comparison
from tests.bench.sides import STREAM
from tests.harness import eventually

_MEMBERS = 4


def pulled(pairs: int, messages: int) -> list[Comparison]:
    """The last ack is confirmed before the clock stops."""
    title = "pull consumer, 128 B, batches of 500, acked"
    return _compared(title, 1.0, pairs, lambda side: _pull(side, messages), lambda: relayed(messages, batch=500))


def pulled_singly(pairs: int, messages: int) -> list[Comparison]:
    """The same after publishers that wait for each ack: a commit has few messages."""
    title = "pull consumer, 128 B, batches of 500, acked, published singly"
    relay = partial(relayed, messages, batch=500)
    return _compared(title, 1.0, pairs, lambda side: _pull(side, messages, is_singly=True), relay)


def pushed(pairs: int, messages: int) -> list[Comparison]:
    title = "push consumer with flow control, 128 B"
    return _compared(title, 1.0, pairs, lambda side: _push(side, messages), lambda: relayed(messages))


def queued(pairs: int, messages: int) -> list[Comparison]:
    """An ack deletes the message."""
    title = f"work queue, {_MEMBERS} members, 128 B, batches of 100"
    relay = partial(relayed, messages, batch=100, members=_MEMBERS)
    return _compared(title, 0.8, pairs, lambda side: _share(side, messages), relay)


def _pull(side: Side, messages: int, *, is_singly: bool = False) -> Figures:
    fill(side, messages, is_singly=is_singly)
    return load(side, "pull", messages=messages, batch=500)


def _push(side: Side, messages: int) -> Figures:
    fill(side, messages)
    return load(side, "push", messages=messages)


def _share(side: Side, messages: int) -> Figures:
    fill(side, messages, retention="workqueue")
    found = load(side, "queue", messages=messages, batch=100, members=_MEMBERS)
    api = Api(side.server.port)
    eventually(lambda: _is_empty(api), 30, "acked messages of a work queue are deleted")
    return found


def _is_empty(api: Api) -> bool:
    return bool(api.request(f"STREAM.INFO.{STREAM}")["state"]["messages"] == 0)


def _compared(
    title: str, bar: float, pairs: int, run: Callable[[Side], Figures], relay: Callable[[], Figures]
) -> list[Comparison]:
    """Each run has a server, and a broker, of its own. The other lines compare with the limit of both."""

    def started(side: Callable[[], AbstractContextManager[Side]]) -> Figures:
        with side() as running:
            return run(running)

    sides = {name: lambda side=side: started(side) for name, side in SIDES.items()}
    runs = in_pairs(title, sides | {RELAY: relay}, pairs)
    lines = [line(title, "messages/s", bar, runs, "rate")]
    for one, other, what in [(OURS, RELAY, "natslog and the limit"), (RELAY, PEER, "the limit and JetStream")]:
        more = Comparison(f"{title}: {what}", "messages/s", 0, other)
        more.ours, more.theirs = ([run["rate"] for run in runs[name]] for name in (one, other))
        more.our_cpu_us, more.their_cpu_us = ([run["rate_cpu_us"] for run in runs[name]] for name in (one, other))
        lines.append(more)
    return lines
