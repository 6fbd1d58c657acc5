"""A user's program, run in every place that natslog promises: it reads a stream as a table and as a stream, writes to
NATS, makes mistakes, filters, and prints as its last line, in JSON, what came of it. It knows nothing of the tests.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, GreaterThanOrEqual, InputPartition
from pyspark.sql.types import StructType


class PrunesWhatItIsTold(DataSource):
    """The smallest source that prunes by pushed filters: 100 numbers. Right by Spark's contract: a reader answers for
    the filters pushed into it, and for no others.
    """

    @classmethod
    def name(cls) -> str:
        return "prunes_what_it_is_told"

    def schema(self) -> str:
        return "number bigint"

    def reader(self, schema: StructType) -> DataSourceReader:
        return _PruningReader()


class _PruningReader(DataSourceReader):
    def __init__(self) -> None:
        self._low = 0

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        for one in filters:
            if isinstance(one, GreaterThanOrEqual):
                self._low = max(self._low, int(one.value))
            else:
                yield one

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition((self._low, 100))]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        return ((number,) for number in range(*partition.value))


def main() -> None:
    arguments = _arguments()
    spark = _session(arguments)
    parts: dict[str, Callable[[SparkSession, argparse.Namespace], Any]] = {
        "imported": _imported,
        "batch": _batch,
        "stream": _stream,
        "sink": _sink,
        "mistakes": _mistakes,
        "filters": _filters,
        "hazard": _hazard,
    }
    found: dict[str, Any] = {"version": pyspark.__version__, "session": type(spark).__module__}
    found |= {name: parts[name](spark, arguments) for name in arguments.parts.split(",")}
    spark.stop()
    print(json.dumps(found))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--master", help="of Spark classic: local[2], spark://…")
    parser.add_argument("--remote", help="of Spark Connect: sc://…, local[2]")
    parser.add_argument("--servers", required=True)
    parser.add_argument("--nats", required=True)
    parser.add_argument("--stream", required=True)
    parser.add_argument("--subject", required=True, help="of rows that are written")
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--parts", required=True)
    return parser.parse_args()


def _session(arguments: argparse.Namespace) -> SparkSession:
    if arguments.remote is not None:
        return SparkSession.builder.remote(arguments.remote).getOrCreate()
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(arguments.folder / "warehouse"),
        "spark.log.level": "OFF",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master(arguments.master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _read(spark: SparkSession, arguments: argparse.Namespace, **options: str) -> DataFrame:
    given = {"servers": arguments.servers, "stream": arguments.stream} | options
    return spark.read.format("natslog").options(**given).load()


def _offsets(frame: DataFrame) -> list[int]:
    return sorted(row["offset"] for row in frame.select("offset").collect())


def _imported(spark: SparkSession, _: argparse.Namespace) -> list[str]:
    """Where tasks found the connector."""

    def where(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyspark_natslog

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"file": [pyspark_natslog.__file__]})

    rows = spark.range(0, 8, 1, 4).mapInArrow(where, "file string").distinct().collect()
    return sorted(row["file"] for row in rows)


def _batch(spark: SparkSession, arguments: argparse.Namespace) -> dict[str, Any]:
    rows = _read(spark, arguments, minPartitions="4", includeHeaders="true").orderBy("offset").collect()
    return {
        "offsets": [row["offset"] for row in rows],
        "values": [bytes(row["value"]).decode() for row in rows],
        "last": _offsets(_read(spark, arguments, startingOffsets=json.dumps({arguments.stream: 95}))),
    }


def _stream(spark: SparkSession, arguments: argparse.Namespace) -> dict[str, Any]:
    """To Parquet, by portions, and once more from the checkpoint."""
    frame = spark.readStream.format("natslog").options(
        servers=arguments.servers, stream=arguments.stream, maxOffsetsPerTrigger="30"
    )
    out = str(arguments.folder / "out")
    writer = frame.load().writeStream.format("parquet").option("path", out)
    writer = writer.option("checkpointLocation", str(arguments.folder / "checkpoint")).trigger(availableNow=True)
    for _ in range(2):
        query = writer.start()
        query.awaitTermination()
    logged = arguments.folder / "checkpoint" / "offsets"
    reached = [json.loads(file.read_text().splitlines()[-1]) for file in sorted(logged.glob("[0-9]"))]
    return {
        "portions": [one[arguments.stream]["offset"] for one in reached],
        "offsets": _offsets(spark.read.parquet(out)),
    }


def _sink(spark: SparkSession, arguments: argparse.Namespace) -> None:
    """The stream's values once as a batch and once as a stream."""
    options = {"natsServers": arguments.nats, "subject": arguments.subject, "ack": "stored"}
    _read(spark, arguments).select("value").write.format("natslog").options(**options).mode("append").save()
    frame = spark.readStream.format("natslog").options(servers=arguments.servers, stream=arguments.stream).load()
    writer = frame.select("value").writeStream.format("natslog").options(**options)
    writer = writer.option("checkpointLocation", str(arguments.folder / "sink-checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()


def _mistakes(spark: SparkSession, arguments: argparse.Namespace) -> list[str]:
    """What the user is told: of the source as a table, as a stream, and of the sink."""
    values = spark.range(1).selectExpr("cast(id as string) as valeu")
    stream = spark.readStream.format("natslog").options(servers=arguments.servers, endingOffsets="latest")
    target = str(arguments.folder / "mistaken")
    tries: list[Callable[[], object]] = [
        lambda: _read(spark, arguments, startingOfsets="earliest").count(),
        lambda: _read(spark, arguments, columns="offset,valeu").count(),
        lambda: (
            stream.load(arguments.stream)
            .writeStream.format("noop")
            .option("checkpointLocation", target)
            .trigger(availableNow=True)
            .start()
            .awaitTermination()
        ),
        lambda: values.write.format("natslog").option("subject", arguments.subject).mode("append").save(),
    ]
    return [_said(attempt) for attempt in tries]


def _said(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except Exception as error:  # of whatever kind Spark makes of it; what is wanted is its words
        return str(error)
    return ""


def _filters(spark: SparkSession, arguments: argparse.Namespace) -> dict[str, Any]:
    """`filterPushdown`, with scans of one frame in every order, and several in one query."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    counts: list[int] = []
    for order in ("fpg", "pgf"):
        frame = _read(spark, arguments, filterPushdown="true")
        scans = {"f": frame.filter("offset >= 90"), "p": frame, "g": frame.filter("offset < 7")}
        counts += [scans[one].count() for one in order]
    frame = _read(spark, arguments, filterPushdown="true")
    high, low = frame.filter("offset >= 90"), frame.filter(F.col("subject").endswith(".even") & (F.col("offset") < 7))
    together = [high.union(low).count(), low.union(frame).count(), frame.union(high).union(frame).count()]
    joined = frame.alias("a").join(high.alias("b"), F.col("a.offset") == F.col("b.offset") - 90).count()
    frame.createOrReplaceTempView("messages")
    within = "select count(*) from messages where offset < (select max(offset) from messages where offset < 20)"
    within += " or offset in (select offset from messages where offset > 97)"
    return {
        "in turn": counts,
        "together": together,
        "joined": joined,
        "subquery": spark.sql(within).collect()[0][0],
        "switched off": _without_the_switch(spark, arguments),
    }


def _without_the_switch(spark: SparkSession, arguments: argparse.Namespace) -> int:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    return _read(spark, arguments, filterPushdown="true").filter("offset >= 90").count()


def _hazard(spark: SparkSession, _: argparse.Namespace) -> dict[str, Any]:
    """What becomes of a source that does prune by the filters it is told: right are 10, 100, 10, and 10 + 5."""
    spark.dataSource.register(PrunesWhatItIsTold)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    frame = spark.read.format(PrunesWhatItIsTold.name()).load()
    in_turn = [frame.filter("number >= 90").count(), frame.count()]
    other = spark.read.format(PrunesWhatItIsTold.name()).load()
    together = other.filter("number >= 90").union(other.filter("number >= 95")).count()
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    return {"in turn": in_turn, "together": together}


if __name__ == "__main__":
    logging.basicConfig()
    main()
