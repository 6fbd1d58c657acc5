"""Writing a DataFrame of 128-byte rows: natslog fsyncs before it acks, and Kafka, as it comes, does not. Kafka's side
has a JVM of its own (see `writer`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.bench.kafka.sides import (
    DEFAULT,
    DROPPING,
    OURS,
    TUNED,
    TUNED_PRODUCER,
    Sides,
    both_sides,
    compared,
    different_rows,
)
from tests.bench.kafka.writer import KafkaWriter, kafka_writer
from tests.bench.pairs import Comparison, Measured
from tests.bench.processor_time import measured
from tests.bench.sides import STREAM, SUBJECT


def _runs(sides: Sides, kafka: KafkaWriter, rows: int, options: Mapping[str, str]) -> dict[str, Callable[[], Measured]]:
    frame = different_rows(sides.spark, rows)

    def ours() -> Measured:
        before = sides.stored(STREAM)
        done = sides.measured(OURS, rows, lambda: sides.to_stream(frame, SUBJECT, **options))
        stored = sides.stored(STREAM) - before
        assert stored == rows, f"{stored} rows are stored of {rows}"
        return done

    def dropped() -> None:
        frame.write.format("benchdropping").mode("append").save()

    def theirs(producer: Mapping[str, str]) -> Measured:
        before = sides.kafka.stored(SUBJECT)
        done = measured(rows, [kafka.pid, sides.kafka.pid], lambda: kafka.write(rows, SUBJECT, producer))
        stored = sides.kafka.stored(SUBJECT) - before
        assert stored == rows, f"{stored} rows are stored of {rows}"
        return done

    return {
        OURS: ours,
        TUNED: lambda: theirs(TUNED_PRODUCER),
        DEFAULT: lambda: theirs({}),
        DROPPING: lambda: sides.measured(DROPPING, rows, dropped),
    }


def writes(pairs: int, rows: int) -> list[Comparison]:
    with both_sides() as sides, kafka_writer(sides.kafka.servers) as kafka:
        ways: list[tuple[str, float, dict[str, str]]] = [
            ("sink, ack=stored", 0.4, {"ack": "stored", "natsServers": sides.server.url}),
            (
                "sink, ack=stored, envelope=true",
                0.7,
                {"ack": "stored", "natsServers": sides.server.url, "servers": sides.broker.url, "envelope": "true"},
            ),
            ("sink, path=http", 1.0, {"path": "http", "stream": STREAM}),
        ]
        return [
            line
            for title, bar, options in ways
            for line in compared(title, bar, _runs(sides, kafka, rows, options), pairs)
        ]
