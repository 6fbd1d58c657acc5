"""Key-value buckets beside JetStream: puts and gets in flight, and single ones beside a subscriber that answers at
once.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from natslog.nats_server import NatsServer
from tests.bench.jetstream.bucket_load import BUCKET_STREAM, KEYS, bucket_config
from tests.bench.jetstream.connection import Api
from tests.bench.jetstream.sides import SIDES, Figures, Side, in_pairs, line, load
from tests.bench.pairs import Comparison
from tests.bench.sides import ROOT, SUBJECT, scratch

_WINDOW = 1000
_AT_ONCE = "a subscriber that answers at once"


def buckets(pairs: int, messages: int) -> list[Comparison]:
    """natslog fsyncs a put before its ack. The bars of JetStream's single requests are not set: one more trip."""
    sides = {name: lambda side=side: _run(side, messages) for name, side in SIDES.items()}
    title = f"KV, 128 B, {KEYS:,} keys, {_WINDOW:,} requests in flight"
    runs = in_pairs(title, {**sides, _AT_ONCE: _answered_at_once}, pairs)
    return [
        line(f"{title}: put", "messages/s", 1.0, runs, "put"),
        line(f"{title}: get", "messages/s", 0.7, runs, "get"),
        *(found for kind in ("get", "put") for share in ("p50", "p99") for found in _singles(runs, kind, share)),
    ]


def _run(side: Callable[[], AbstractContextManager[Side]], messages: int) -> Figures:
    with side() as running:
        Api(running.server.port).request(f"STREAM.CREATE.{BUCKET_STREAM}", bucket_config())
        return load(running, "bucket", messages=messages, window=_WINDOW)


@contextmanager
def answering() -> Iterator[Side]:
    """A plain NATS server, and the subscriber that answers at once."""
    with scratch() as folder:
        server = NatsServer(0, folder / "nats.log").start()
        command = [sys.executable, "-m", "tests.bench.jetstream.answering", str(server.port), SUBJECT]
        subscriber = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        try:
            assert subscriber.stdout is not None
            assert subscriber.stdout.readline() == b"ready\n"
            yield Side(server, (server.pid, subscriber.pid))
        finally:
            subscriber.kill()
            subscriber.wait()
            server.stop()


def _answered_at_once() -> Figures:
    with answering() as side:
        return load(side, "single")


def _singles(runs: dict[str, list[Figures]], kind: str, share: str) -> list[Comparison]:
    """The latency of one request after another, beside both."""
    title = f"KV {kind}, one at a time: {share}"
    beside_jetstream = line(title, "µs", 0.0, runs, f"{kind}_{share}_us", lower_is_better=True)
    ours, at_once = beside_jetstream.ours, [run[f"at_once_{share}_us"] for run in runs[_AT_ONCE]]
    return [beside_jetstream, Comparison(title, "µs", 0.0, _AT_ONCE, ours, at_once, lower_is_better=True)]
