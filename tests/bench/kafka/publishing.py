"""Acked publishing of 128-byte messages, beside a Kafka that fsyncs each append and one that does not.

Each run has an empty stream or topic. Processor time is that of the servers and of the publisher from its first
message to its last ack, so that the start of its interpreter does not count.
"""

from __future__ import annotations

import json
import subprocess
import sys
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


def _natslog(how: str) -> Measured:
    with natslog_side() as (server, broker):
        options = {"window": _WINDOW, "seconds": _SECONDS, "warm": _WARM_S}
        return _measured(
            [server.pid, broker.pid],
            lambda: (
                raw_publish(server, "acked", bytes=VALUE_BYTES, **options)
                if how == "raw"
                else _client(how, server.url, SUBJECT)
            ),
            lambda: int(broker.client().stream(STREAM)["high_watermark"]),
        )


def _kafka(kafka: KafkaBroker, topic: str, **config: str) -> Measured:
    kafka.create_topic(topic, **config)
    return _measured([kafka.pid], lambda: _client("librdkafka", kafka.servers, topic), lambda: kafka.stored(topic))


def publishes(pairs: int) -> list[Comparison]:
    number = count()
    with scratch() as folder, kafka_side(folder / "kafka") as kafka:
        runs: dict[str, Callable[[], Measured]] = {
            _RAW: lambda: _natslog("raw"),
            _PUBLISHER: lambda: _natslog("natslog"),
            _ENVELOPES: lambda: _natslog("envelopes"),
            _FSYNC: lambda: _kafka(kafka, f"fsync-{next(number)}", flush_messages="1"),
            _LAZY: lambda: _kafka(kafka, f"lazy-{next(number)}"),
        }
        for name in (_FSYNC, _LAZY, _PUBLISHER):  # warm-up: of Kafka's JVM, and the kernels of the publisher
            runs[name]()
        done = in_turn("publish, 128 B, acked", runs, pairs)
    title = "publish, 128 B, acked: "
    unit = "messages/s"
    return [
        against(title + _PUBLISHER, unit, 0.9, done[_PUBLISHER], _RAW, done[_RAW]),
        against(title + _ENVELOPES, unit, 1.5, done[_ENVELOPES], _FSYNC, done[_FSYNC]),
        *(
            against(title + ours, unit, 0, done[ours], theirs, done[theirs])
            for ours in (_PUBLISHER, _RAW)
            for theirs in (_FSYNC, _LAZY)
        ),
    ]
