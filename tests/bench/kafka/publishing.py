"""Acked publishing of 128-byte messages, beside a Kafka that fsyncs each append and one that does not.

Each run has an empty stream or topic. Processor time is that of the servers and of the publisher from its first
message to its last ack, so that the start of its interpreter does not count. What the disk takes is measured in turn
with them: pieces of 4 MiB to the end of one file, each followed by an fdatasync.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from itertools import count

from tests.bench.kafka.broker import KafkaBroker, kafka_side
from tests.bench.kafka.sides import VALUE_BYTES
from tests.bench.pairs import Comparison, Measured, against, in_turn
from tests.bench.processor_time import processor_seconds
from tests.bench.sides import ROOT, STREAM, SUBJECT, natslog_side, raw_publish, scratch

_SECONDS, _WARM_S = 3.0, 1.0
_WINDOW = 40_000
_WITHIN_S = 120
_RAW, _PUBLISHER, _ENVELOPES = "raw frames", "Publisher", "Publisher with envelopes"
_FSYNC, _LAZY = "Kafka, fsync of each append", "Kafka, no fsync"
_DISK = "the disk, MB/s"
_PIECE_BYTES = 4 * 1024 * 1024


def _client(how: str, server: str, name: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.bench.kafka.clients", how, server, name]
    command += ["--bytes", str(VALUE_BYTES), "--seconds", str(_SECONDS), "--warm", str(_WARM_S)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, timeout=_WITHIN_S)
    return dict(json.loads(done.stdout))


def _measured(servers: Collection[int], publish: Callable[[], dict[str, float]], stored: Callable[[], int]) -> Measured:
    before = processor_seconds(servers)
    done = publish()
    cpu_s = processor_seconds(servers) - before + done["cpu_s"]
    assert stored() == done["sent"], f"{stored()} messages are stored of {done['sent']}"
    return Measured(done["rate"], cpu_s / done["sent"] * 1e6)


def _natslog(how: str, row_bytes: list[float] | None = None) -> Measured:
    """`row_bytes` gets what a message takes in the log."""
    with natslog_side() as (server, broker):
        options = {"window": _WINDOW, "seconds": _SECONDS, "warm": _WARM_S}
        done = _measured(
            [server.pid, broker.pid],
            lambda: (
                raw_publish(server, "acked", bytes=VALUE_BYTES, **options)
                if how == "raw"
                else _client(how, server.url, SUBJECT)
            ),
            lambda: int(broker.client().stream(STREAM)["high_watermark"]),
        )
        if row_bytes is not None:
            messages = int(broker.client().stream(STREAM)["high_watermark"])
            _, size_bytes = broker.client().extent(STREAM, 0, messages)
            row_bytes.append(size_bytes / messages)
        return done


def _disk() -> Measured:
    """MB written and fsynced a second."""
    data = os.urandom(_PIECE_BYTES)
    with scratch() as folder, open(folder / "written", "wb", buffering=0) as file:
        written, started, started_cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() < started + _SECONDS:
            written += file.write(data)
            os.fdatasync(file.fileno())
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    return Measured(written / seconds / 1e6, cpu_s / written * 1e6)


def _kafka(kafka: KafkaBroker, topic: str, **config: str) -> Measured:
    kafka.create_topic(topic, **config)
    return _measured([kafka.pid], lambda: _client("librdkafka", kafka.servers, topic), lambda: kafka.stored(topic))


def publishes(pairs: int) -> list[Comparison]:
    number = count()
    row_bytes: list[float] = []
    with scratch() as folder, kafka_side(folder / "kafka") as kafka:
        runs: dict[str, Callable[[], Measured]] = {
            _RAW: lambda: _natslog("raw"),
            _PUBLISHER: lambda: _natslog("natslog"),
            _ENVELOPES: lambda: _natslog("envelopes", row_bytes),
            _DISK: _disk,
            _FSYNC: lambda: _kafka(kafka, f"fsync-{next(number)}", flush_messages="1"),
            _LAZY: lambda: _kafka(kafka, f"lazy-{next(number)}"),
        }
        for name in (_FSYNC, _LAZY, _PUBLISHER):  # warm-up: of Kafka's JVM, and the kernels of the publisher
            runs[name]()
        done = in_turn("publish, 128 B, acked", runs, pairs)
    title = "publish, 128 B, acked: "
    unit = "messages/s"
    sized = zip(done[_ENVELOPES], row_bytes, strict=True)
    written = [Measured(run.rate * size / 1e6, run.cpu_us) for run, size in sized]
    of_the_disk = against(title + _ENVELOPES + ", bytes of the log", "MB/s", 0.8, written, _DISK, done[_DISK])
    envelopes = against(title + _ENVELOPES, unit, 1.5, done[_ENVELOPES], _FSYNC, done[_FSYNC])
    envelopes.alternative = of_the_disk
    return [
        against(title + _PUBLISHER, unit, 0.9, done[_PUBLISHER], _RAW, done[_RAW]),
        envelopes,
        of_the_disk,
        *(
            against(title + ours, unit, 0, done[ours], theirs, done[theirs])
            for ours in (_PUBLISHER, _RAW)
            for theirs in (_FSYNC, _LAZY)
        ),
    ]
