"""Both sides in one Spark session: natslog with its NATS server, and Kafka with Spark's connector for it.

`kafka` in the name of a side is the connector with its defaults, `tuned` with `TUNED_CONSUMER` or `TUNED_PRODUCER`.
Kafka does not fsync, as it comes; natslog does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from natslog.nats_server import NatsServer
from pyspark_natslog.jar import jar_path
from tests.bench.jars import module_of, resolve, version_of, without_those_of_spark
from tests.bench.kafka.broker import KAFKA_VERSION, KafkaBroker, kafka_side
from tests.bench.kafka.mapped import mapped_jar
from tests.bench.pairs import Comparison, Measured, against, in_turn, processor_times
from tests.bench.processor_time import measured
from tests.bench.raw_nats import payload
from tests.bench.sides import STREAM, SUBJECT, natslog_side, raw_publish, scratch
from tests.bench.spark_scan import is_sealed
from tests.bench.spark_session import spark_session
from tests.harness import BrokerProcess, eventually

VALUE_BYTES = 128
TUNED_CONSUMER = {
    "kafka.max.poll.records": "20000",
    "kafka.max.partition.fetch.bytes": str(8 << 20),
    "kafka.receive.buffer.bytes": str(1 << 20),
}
TUNED_PRODUCER = {"kafka.linger.ms": "5", "kafka.batch.size": str(256 << 10)}
OURS, DEFAULT, TUNED, MAPPED = "natslog", "Kafka", "Kafka tuned", "mapped Arrow file"
COLUMNAR = "natslog's columnar reader"
DROPPING = "sink that drops rows"
_CONNECTOR = "spark-sql-kafka-0-10_2.13"
_WARM_UPS = 1
MAPPED_SHARE = 0.9
_MOST_CPU = 1.1
_WINDOW = 40_000
_FILL_SECONDS = 100.0
_STORED_WITHIN_S = 300.0
_SEALED_SOON: dict[str, Any] = {"segment_bytes": "64MiB", "segment_age": "1s", "retention_interval": "500ms"}


def connector_jars() -> list[Path]:
    """Spark's connector for Kafka in the installed version of pyspark, or the newest before it with the same major."""
    installed = version("pyspark")
    jars = resolve("org.apache.spark", _CONNECTOR, f"[{installed.split('.')[0]}.0,{installed}]")
    return without_those_of_spark(jars)


def versions() -> dict[str, str]:
    """Of what is downloaded."""
    (connector,) = (version_of(jar) for jar in connector_jars() if module_of(jar) == _CONNECTOR)
    return {"kafka": KAFKA_VERSION, _CONNECTOR: connector, "confluent-kafka": version("confluent-kafka")}


def different_rows(spark: SparkSession, rows: int) -> DataFrame:
    """Column `value`, 128 bytes, in two partitions."""
    value = f"cast(rpad(cast(id AS string), {VALUE_BYTES}, 'x') AS binary) AS value"
    return spark.range(rows, numPartitions=2).selectExpr(value)


@dataclass(frozen=True)
class Sides:
    """What runs during a bench, and its queries."""

    spark: SparkSession
    server: NatsServer
    broker: BrokerProcess
    kafka: KafkaBroker
    folder: Path

    @property
    def spark_pid(self) -> int:
        """The JVM's; Spark's Python workers are its descendants."""
        return int(self.spark.sparkContext._gateway.proc.pid)

    def measured(self, side: str, rows: int, run: Callable[[], object]) -> Measured:
        """One run, with the processor time of the processes that take part on this side."""
        ours = [self.server.pid, self.broker.pid]
        servers = {OURS: ours, COLUMNAR: ours, MAPPED: [], DROPPING: []}.get(side, [self.kafka.pid])
        return measured(rows, [self.spark_pid, *servers], run)

    def stored(self, stream: str) -> int:
        return int(self.broker.client().stream(stream)["high_watermark"])

    def stream(self, name: str, source: str = "natslog_in_python", **options: str) -> DataFrame:
        """Args:
        source: `natslog`: the columnar reader, of which the jar is on the class path.
        """
        reader = self.spark.read.format(source).options(servers=self.broker.url, stream=name, **options)
        return reader.option("endingOffsets", json.dumps({name: self.stored(name)})).load()

    def topic(self, name: str, consumer: Mapping[str, str]) -> DataFrame:
        options = {"kafka.bootstrap.servers": self.kafka.servers, "subscribe": name, **consumer}
        return self.spark.read.format("kafka").options(**options).load()

    def mapped(self, name: str, fields: str = "") -> DataFrame:
        """Args:
        fields: DDL of the file's columns that are read; natslog's columns by default.
        """
        reader = self.spark.read.format("benchmapped").options(path=str(self.folder / name), parts="2")
        return (reader.option("fields", fields) if fields else reader).load()

    def mapped_stream(self, name: str) -> DataFrame:
        """As `mapped`, as a stream of one micro-batch."""
        return self.spark.readStream.format("benchmapped").options(path=str(self.folder / name), parts="2").load()

    def to_stream(self, frame: DataFrame, subject: str, **options: str) -> None:
        """By natslog's sink; with its defaults acked when stored."""
        writer = frame.write.format("natslog").mode("append").options(servers=self.broker.url, subject=subject)
        writer.options(**options).save()

    def to_topic(self, frame: DataFrame, topic: str, producer: Mapping[str, str]) -> None:
        options = {"kafka.bootstrap.servers": self.kafka.servers, "topic": topic, **producer}
        frame.write.format("kafka").options(**options).save()

    def publish_plainly(self, rows: int) -> None:
        """To the stream of `natslog_side` and to the topic of the same name, by clients without Spark.

        The topic is created if there is none yet.
        """
        before = self.stored(STREAM)
        options = {"window": _WINDOW, "seconds": _FILL_SECONDS, "warm": 0, "count": rows}
        raw_publish(self.server, "acked", bytes=VALUE_BYTES, **options)
        assert self.stored(STREAM) - before == rows, f"{self.stored(STREAM) - before} rows are stored of {rows}"
        self.kafka.fill(SUBJECT, [payload(VALUE_BYTES)], rows)

    def wait_until_sealed(self) -> None:
        """Streams are read as they are a moment after they were written."""
        eventually(lambda: is_sealed(self.broker.folder), _STORED_WITHIN_S, "every segment is sealed", every_s=0.2)


@contextmanager
def both_sides(settings: Mapping[str, Any] = _SEALED_SOON) -> Iterator[Sides]:
    """natslog with one stream, and Kafka with one topic, both of them empty, and Spark.

    Args:
        settings: of the broker.
    """
    with (
        scratch() as folder,
        natslog_side(**settings) as (server, broker),
        kafka_side(folder / "kafka") as kafka,
        spark_session([*connector_jars(), jar_path(), mapped_jar(folder)]) as spark,
    ):
        kafka.create_topic(SUBJECT)
        yield Sides(spark, server, broker, kafka, folder)


def compared(
    title: str,
    bar: float,
    runs: dict[str, Callable[[], Measured]],
    rounds: int,
    *,
    warm_ups: int = _WARM_UPS,
    notes: Mapping[str, Any] = {},
    is_limited_by_mapped: bool = True,
) -> list[Comparison]:
    """The runs of all sides in turn, natslog's against each other one.

    Args:
        bar: against Kafka tuned; 0 for none.
        runs: by side.
        is_limited_by_mapped: whether natslog must reach nine tenths of a mapped file or `bar`, and may take at most 1.1
            times its processor time, where there is a run of one. Not if that file has the decoded payloads.
    """
    for run in list(runs.values()) * warm_ups:
        run()
    done = in_turn(title, runs, rounds)
    found = [
        against(title, "rows/s", bars, done[OURS], peer, done[peer])
        for peer, bars in ((TUNED, bar), (DEFAULT, 0), (MAPPED, 0), (DROPPING, 0))
        if peer in runs
    ]
    found[0].notes |= notes
    if MAPPED in runs and is_limited_by_mapped:
        alternative = against(title, "rows/s", MAPPED_SHARE, done[OURS], MAPPED, done[MAPPED])
        found[0].alternative = alternative
        found.append(processor_times(title, round(1 / _MOST_CPU, 3), done[OURS], MAPPED, done[MAPPED]))
    return found
