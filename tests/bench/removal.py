"""What limits per subject cost a publisher, and how fast a stream is compacted and its latest view read."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from natslog.client import NatslogClient
from natslog.client.publisher import Publisher
from natslog.nats_server import NatsServer
from natslog.wire.outgoing_rows import Rows
from tests.bench.pairs import Comparison, compare
from tests.bench.sides import ROOT, resident_mib, scratch
from tests.harness import BrokerProcess, eventually, running

_SUBJECTS = 100_000
_ROWS = 2_000_000
_UPDATES = 5_000_000
_CHUNK = 50_000
_VALUE_BYTES = 128
_COMPACTED_BYTES = 30_000_000  # 200 a row, and less than half as much again


def removal(pairs: int) -> list[Comparison]:
    return [_limit_per_subject(pairs), *_publishing(min(pairs, 3)), *_compaction()]


@contextmanager
def _side() -> Iterator[tuple[NatsServer, BrokerProcess]]:
    with scratch() as folder, running(folder / "natslog", retention_interval="1s") as both:
        yield both


def _chunks(rows: int, seed: int, *, keys: bool) -> list[Rows]:
    """Updates of random subjects or keys, as a publisher sends them."""
    random, found = np.random.default_rng(seed), []
    value = b"x" * _VALUE_BYTES
    for _ in range(rows // _CHUNK):
        numbers = random.integers(0, _SUBJECTS, _CHUNK)
        names = pa.array([f"k{number:06d}" for number in numbers])
        subjects = pa.array(["t.updates"] * _CHUNK) if keys else pa.array([f"t.{number:06d}" for number in numbers])
        found.append(
            Rows(subjects, pa.array([value] * _CHUNK, pa.binary()), keys=names.cast(pa.binary()) if keys else None)
        )
    return found


def _limit_per_subject(pairs: int) -> Comparison:
    chunks = _chunks(_ROWS, 1, keys=False)
    with _side() as (server, broker):
        numbers = iter(range(1000))

        def rate(**settings: Any) -> float:
            name = f"s{next(numbers)}"
            client = broker.client()
            client.create_stream(name, "t.*", **settings)
            with Publisher(server.url) as publisher:
                started = time.perf_counter()
                for chunk in chunks:
                    publisher.send(chunk, "stored")
                publisher.wait_for_ack("stored")
                if settings:  # a reader finds the limit applied to all of them
                    assert client.stream(name)["messages"] <= _SUBJECTS
                taken_s = time.perf_counter() - started
            client.delete_stream(name)
            return _ROWS / taken_s

        return compare(
            "publishing to 100,000 subjects, the newest message of each kept",
            "messages/s",
            0.85,
            ours=lambda: rate(max_messages_per_subject=1),
            peer="without a limit per subject",
            theirs=rate,
            pairs=pairs,
        )


def _publishing(pairs: int) -> list[Comparison]:
    """While another process reads; and the memory of the broker meanwhile. The dedupe window would put off the
    rewriting of segments.
    """
    peaks: dict[bool, list[float]] = {True: [], False: []}

    def rate(*, compact: bool) -> float:
        with _side() as (server, broker):
            broker.client().create_stream("s", "t.*", dedupe_window=0, compact=compact)
            with _reading(broker.url, "s"):
                taken_s = _publish(server)
            peaks[compact].append(resident_mib(broker.pid))
        return _UPDATES / taken_s

    published = compare(
        "publishing 5 million updates of 100,000 keys while they are compacted and read",
        "messages/s",
        0.7,
        ours=lambda: rate(compact=True),
        peer="without compaction",
        theirs=lambda: rate(compact=False),
        pairs=pairs,
    )
    more_mib = median(peaks[True]) - median(peaks[False])
    memory = Comparison(
        "memory of compaction meanwhile, more than without", "MiB", 100.0, ours=[more_mib], is_bound=True
    )
    memory.notes = {"with, in MiB": peaks[True], "without, in MiB": peaks[False]}
    return [published, memory]


@contextmanager
def _reading(url: str, stream: str) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.bench.removal", url, stream]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            process.terminate()


def _read_on(url: str, stream: str) -> None:
    """All of the stream, again and again, until the process is ended."""
    with NatslogClient(url) as client:
        print("ready", flush=True)
        for _ in range(100_000):
            for _ in client.read(stream):
                time.sleep(0.001)
            time.sleep(0.1)


def _compaction() -> list[Comparison]:
    """5 million updates of 100,000 keys."""
    with _side() as (server, broker):
        client = broker.client()
        client.create_stream("plain", "t.*")
        _publish(server)
        whole = [_read_s(client, "plain") for _ in range(3)]
    with _side() as (server, broker):
        client = broker.client()
        client.create_stream("kept", "t.*", compact=True, dedupe_window=0)
        published_s = _publish(server)
        views = [_read_s(client, "kept", view="latest") for _ in range(3)]
        client.roll("kept")
        started = time.perf_counter()
        eventually(lambda: client.stream("kept")["bytes"] < _COMPACTED_BYTES, 600, "the stream is compacted")
        compacted_s = time.perf_counter() - started
        compacted_views = [_read_s(client, "kept", view="latest") for _ in range(3)]
        assert client.stream("kept")["messages"] == len(_keys(client, "kept"))
    title = "the latest view of 5 million updates of 100,000 keys"
    early = Comparison(f"{title}, before segments are rewritten", "s", 0.0, "reading the whole log")
    early.ours, early.theirs, early.lower_is_better = views, whole, True
    view = Comparison(title, "s", 10.0, "reading the whole log")
    view.ours, view.theirs, view.lower_is_better = compacted_views, whole, True
    rate = Comparison("5 million updates of 100,000 keys, until all segments are rewritten", "updates/s", 0.0)
    rate.peer, rate.ours, rate.theirs = (
        "publishing them",
        [_UPDATES / (published_s + compacted_s)],
        [_UPDATES / published_s],
    )
    rate.notes = {"published in s": published_s, "until rewritten in s": compacted_s}
    return [early, view, rate]


def _publish(server: NatsServer) -> float:
    chunks = _chunks(_UPDATES // 5, 2, keys=True)
    with Publisher(server.url) as publisher:
        started = time.perf_counter()
        for _ in range(5):
            for chunk in chunks:
                publisher.send(chunk, "stored")
        publisher.wait_for_ack("stored")
        return time.perf_counter() - started


def _read_s(client: Any, stream: str, **asked: Any) -> float:
    started = time.perf_counter()
    rows = sum(len(batch) for batch in client.read(stream, **asked))
    assert rows >= _SUBJECTS * 0.99
    return time.perf_counter() - started


def _keys(client: Any, stream: str) -> set[bytes]:
    return {key for batch in client.read(stream, columns=["key"]) for key in batch.column("key").to_pylist()}


if __name__ == "__main__":
    _read_on(*sys.argv[1:])
