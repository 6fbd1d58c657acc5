"""A NATS server with JetStream, and a plain one with a broker of natslog beside it; runs of both in turn."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from natslog.nats_server import NatsServer
from tests.bench.jetstream.connection import Api
from tests.bench.pairs import Comparison, console
from tests.bench.processor_time import processor_seconds
from tests.bench.sides import ROOT, STREAM, SUBJECT, publish_singly, raw_publish, scratch
from tests.harness import BrokerProcess, eventually

OURS, PEER = "natslog", "nats-server -js, lazy sync"
MESSAGE_BYTES = 128
_AT_REST_CORE_SHARE = 0.05

Figures = dict[str, float]
"""What one run of a side has measured."""


class Side(NamedTuple):
    """A server, all processes of its side, and the URL of the broker, if there is one."""

    server: NatsServer
    pids: tuple[int, ...]
    broker_url: str = ""


@contextmanager
def jetstream_server() -> Iterator[Side]:
    """File storage, fsynced every 2 minutes: the default."""
    with scratch() as folder:
        arguments = ("--jetstream", "--store_dir", str(folder / "store"))
        server = NatsServer(0, folder / "nats.log", arguments=arguments).start()
        try:
            eventually(Api(server.port).is_served, 30, "JetStream answers")
            yield Side(server, (server.pid,))
        finally:
            server.stop()


@contextmanager
def natslog_beside(**settings: Any) -> Iterator[Side]:
    """A plain NATS server, and one broker that serves the JetStream API, unless `settings` say otherwise."""
    with scratch() as folder:
        server = NatsServer(0, folder / "nats.log").start()
        broker = BrokerProcess(folder / "data", server.url, **settings)
        is_api_on = settings.get("jetstream") != "off"
        broker.environment = {"NATSLOG_NATS_LEAF_URL": server.leaf_url} if is_api_on else {}
        try:
            broker.start()
            if is_api_on:
                eventually(Api(server.port).is_served, 30, "natslog serves the JetStream API")
            yield Side(server, (server.pid, broker.pid), broker.url)
        finally:
            broker.kill()
            server.stop()


SIDES: dict[str, Callable[[], AbstractContextManager[Side]]] = {OURS: natslog_beside, PEER: jetstream_server}


def fill(side: Side, messages: int, *, is_singly: bool = False, **config: Any) -> None:
    """A stream with so many messages of 128 bytes, all on one subject: published in windows of 4,000, or by eight
    publishers that wait for the ack of each message.
    """
    api = Api(side.server.port)
    given = {"name": STREAM, "subjects": [SUBJECT], "storage": "file", "num_replicas": 1, **config}
    api.request(f"STREAM.CREATE.{STREAM}", given)
    if is_singly:
        asyncio.run(publish_singly(side.server.url, SUBJECT, messages))
    else:
        raw_publish(side.server, "acked", bytes=MESSAGE_BYTES, window=4000, seconds=100, warm=0, count=messages)
    stored = api.request(f"STREAM.INFO.{STREAM}")["state"]["messages"]
    assert stored == messages, f"{stored} messages are stored of {messages}"
    _await_rest(side)


def _await_rest(side: Side) -> None:
    """What follows publishing, such as compression of what is stored, is not a part of the next measurement."""

    def is_at_rest() -> bool:
        before = processor_seconds(side.pids)
        time.sleep(1.0)
        return processor_seconds(side.pids) - before < _AT_REST_CORE_SHARE

    eventually(is_at_rest, 60, "the server side is at rest after messages were stored")


def load(side: Side, how: str, **options: float) -> Figures:
    """Runs the load generator, a process of its own, against this side; see `load`."""
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    pids = ",".join(map(str, side.pids))
    command = [sys.executable, "-m", "tests.bench.jetstream.load", how, str(side.server.port), pids, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    assert done.returncode == 0, f"the load generator failed: {done.stderr[-2000:]}"
    return dict(json.loads(done.stdout))


def in_pairs(title: str, sides: Mapping[str, Callable[[], Figures]], pairs: int) -> dict[str, list[Figures]]:
    """Runs each side `pairs` times, every other time in the reverse order."""
    found: dict[str, list[Figures]] = {name: [] for name in sides}
    for number in range(pairs):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            found[name].append(sides[name]())
        console.print(f"  {title}: pair {number + 1} of {pairs}")
        for name, runs in found.items():
            console.print(f"    {name}: {', '.join(f'{key} {value:,.2f}' for key, value in runs[-1].items())}")
    return found


def line(title: str, unit: str, bar: float, runs: dict[str, list[Figures]], figure: str, **more: Any) -> Comparison:
    """One figure of both sides; where they were measured for it, the processor time of a message, and the share of a
    core that the load generator used itself.
    """

    def values(side: str, name: str) -> list[float]:
        return [run[name] for run in runs[side] if name in run]

    found = Comparison(title, unit, bar, PEER, values(OURS, figure), values(PEER, figure), **more)
    cpu, share = f"{figure}_cpu_us", f"{figure}_load_core_share"
    found.our_cpu_us, found.their_cpu_us = values(OURS, cpu), values(PEER, cpu)
    if values(OURS, share):
        found.notes["load_core_share"] = {side: values(side, share) for side in (OURS, PEER)}
    return found
