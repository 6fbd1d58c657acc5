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
_HOW = {False: "", True: ", published singly"}


def pulled(pairs: int, messages: int, *, is_singly: bool = False) -> list[Comparison]:
    """The last ack is confirmed before the clock stops. `is_singly`: after publishers that wait for each ack, so that a
    commit has few messages; so for the others.
    """
    title = "pull consumer, 128 B, batches of 500, acked" + _HOW[is_singly]
    run = partial(_pull, messages=messages, is_singly=is_singly)
    return _compared(title, 1.0, pairs, run, lambda: relayed(messages, batch=500))


def pushed(pairs: int, messages: int, *, is_singly: bool = False) -> list[Comparison]:
    title = "push consumer with flow control, 128 B" + _HOW[is_singly]
    run = partial(_push, messages=messages, is_singly=is_singly)
    return _compared(title, 1.0, pairs, run, lambda: relayed(messages))


def queued(pairs: int, messages: int, *, is_singly: bool = False) -> list[Comparison]:
    """An ack deletes the message."""
    title = f"work queue, {_MEMBERS} members, 128 B, batches of 100" + _HOW[is_singly]
    run = partial(_share, messages=messages, is_singly=is_singly)
    return _compared(title, 0.8, pairs, run, lambda: relayed(messages, batch=100, members=_MEMBERS))


def _pull(side: Side, messages: int, *, is_singly: bool) -> Figures:
    fill(side, messages, is_singly=is_singly)
    return load(side, "pull", messages=messages, batch=500)


def _push(side: Side, messages: int, *, is_singly: bool) -> Figures:
    fill(side, messages, is_singly=is_singly)
    return load(side, "push", messages=messages)


def _share(side: Side, messages: int, *, is_singly: bool) -> Figures:
    fill(side, messages, is_singly=is_singly, retention="workqueue")
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
