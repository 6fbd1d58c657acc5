"""A query in a Spark of its own, which the tests end and start again with another reader, or with another Spark.

    python program.py read URL STREAM                      prints rows, sum of offsets, sum of the lengths of values
    python program.py drain URL STREAM FOLDER ROWS [MOST]  appends to Parquet files until the end is reached, ROWS a
                                                           batch; ends after MOST batches
    python program.py live URL STREAM                      reads in real time until there are 1,000 rows, and prints
                                                           rows and sum of offsets
    python program.py follow URL STREAM FOLDER READERS     appends offsets to a file in real time, for ever
    python program.py copy URL STREAM FOLDER READERS NATS  copies to the stream `STREAM-out` in real time, for ever:
                                                           exactly once, or with NATS over it
    python program.py write URL STREAM NATS                writes three rows through the sink
    python program.py publish URL STREAM NATS FOLDER       publishes to `out.STREAM`, slowly, until the end is reached
    python program.py typed URL STREAM                     reads JSON

Several of these may be named, separated by commas: what fails is printed, and does not keep the others from running.

The environment variable `JAR` is given to Spark as `spark.jars`; `MASTER` is the master, and `REMOTE` that of a server
of Spark Connect; `SETTINGS` are further ones of Spark (`name=value`, separated by blanks). Nothing of natslog is
imported: Sparks older than 4.2 run this, too.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

from pyspark.sql import DataFrame, SparkSession


def main() -> None:
    kinds, url, stream, *rest = sys.argv[1:]
    remote, master = os.environ.get("REMOTE"), os.environ.get("MASTER", "local[2]")
    builder = SparkSession.builder.remote(remote) if remote else SparkSession.builder.master(master)
    builder = (
        builder.config("spark.jars", os.environ.get("JAR", ""))
        .config("spark.executor.memory", "600m")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
    )
    for setting in os.environ.get("SETTINGS", "").split():
        builder = builder.config(*setting.split("=", 1))
    spark = builder.getOrCreate()
    if not remote:
        spark.sparkContext.setLogLevel("OFF")
    has_failed = False
    for how in kinds.split(","):
        try:
            run(how, spark, {"servers": url, "stream": stream}, rest, is_remote=bool(remote))
        except Exception:  # of whatever kind Spark makes of it
            has_failed = True
            traceback.print_exc()
    spark.stop()
    sys.exit(int(has_failed))


def run(how: str, spark: SparkSession, options: dict[str, str], rest: list[str], *, is_remote: bool) -> None:
    match how:
        case "read":
            read = spark.read.format("natslog").options(**options, includeHeaders="true").load()
            columns = ("count(*)", "sum(offset)", "sum(length(value))", "count(headers)", "count(distinct subject)")
            where = "" if is_remote else "JVM" if is_in_jvm(read) else "Python"
            print(*read.selectExpr(*columns).collect()[0], spark.version, where)
        case "drain":
            drain(spark, options, *rest)
        case "live":
            live(spark, options)
        case "follow":
            follow(spark, options, *rest)
        case "copy":
            copy(spark, options, *rest)
        case "write":
            rows = spark.range(3).selectExpr("cast(id as string) value", "map('a', 'b') headers", "'k' key")
            sink = {"servers": options["servers"], "natsServers": rest[-1], "subject": options["stream"]}
            rows.write.format("natslog").options(**sink).mode("append").save()
        case "publish":
            publish(spark, options, *rest)
        case "typed":
            spark.read.format("natslog").options(**options, payloadFormat="json", payloadSchema="a int").load().show()


def is_in_jvm(read: DataFrame) -> bool:
    """Whether the plan reads columns in the JVM: then no Python process is in it."""
    plan: Any = read._jdf.queryExecution().executedPlan().toString()  # type: ignore[operator]
    return "BatchScan natslog" in plan and "ColumnarToRow" in plan


def drain(spark: SparkSession, options: dict[str, str], folder: str, rows: str, most: str = "1000000") -> None:
    read = spark.readStream.format("natslog").options(**options, maxOffsetsPerTrigger=rows).load()
    done = 0

    def append(batch: DataFrame, number: int) -> None:
        nonlocal done
        batch.write.mode("overwrite").parquet(f"{folder}/rows/batch={number}")
        done += 1
        if done == int(most):
            os._exit(7)  # before Spark has noted that the batch is complete

    query = (
        read.writeStream.foreachBatch(append)
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    print(spark.read.parquet(f"{folder}/rows").selectExpr("count(*)", "count(distinct offset)").collect()[0])


def publish(spark: SparkSession, options: dict[str, str], nats: str, folder: str) -> None:
    read = spark.readStream.format("natslog").options(**options, minPartitions="2").load()
    slow = read.where("java_method('java.lang.Thread', 'sleep', 2L) is not null")
    rows = slow.selectExpr("value", "cast(offset as string) key", "map('Stream', stream, 'Empty', '') headers")
    sink = {"servers": options["servers"], "natsServers": nats, "subject": f"out.{options['stream']}"}
    writer = rows.writeStream.format("natslog").options(**sink, checkpointLocation=f"{folder}/checkpoint")
    writer.trigger(availableNow=True).start().awaitTermination()


def allow_short_batches(spark: SparkSession) -> None:
    for setting, value in (("minBatchDuration", "500ms"), ("allowlistCheck", "false")):
        spark.conf.set(f"spark.sql.streaming.realTimeMode.{setting}", value)


def follow(spark: SparkSession, options: dict[str, str], folder: str, readers: str) -> None:
    allow_short_batches(spark)
    read = spark.readStream.format("natslog").options(**options, realTimeReaders=readers).load()

    def append(row: Any) -> None:
        with open(f"{folder}/offsets", "a") as file:
            file.write(f"{row.offset}\n")

    writer = read.writeStream.foreach(append).outputMode("update").option("checkpointLocation", f"{folder}/checkpoint")
    writer.trigger(realTime="1 seconds").start().awaitTermination()


def copy(spark: SparkSession, options: dict[str, str], folder: str, readers: str, nats: str = "") -> None:
    allow_short_batches(spark)
    read = spark.readStream.format("natslog").options(**options, realTimeReaders=readers).load()
    target = {"stream": f"{options['stream']}-out", "exactlyOnce": "true"}
    writer = read.select("stream", "offset", "value", "key").writeStream.format("natslog").outputMode("update")
    writer = writer.options(servers=options["servers"], subject="out", **({"natsServers": nats} if nats else target))
    writer = writer.option("asyncProgressTrackingEnabled", "false").option("checkpointLocation", f"{folder}/checkpoint")
    writer.trigger(realTime="2 seconds").start().awaitTermination()


def live(spark: SparkSession, options: dict[str, str]) -> None:
    allow_short_batches(spark)
    read = spark.readStream.format("natslog").options(**options).load()
    writer = read.writeStream.format("memory").queryName("live").outputMode("update")
    trigger: Any = spark._jvm.org.apache.spark.sql.streaming.Trigger.RealTime("1 seconds")  # type: ignore[union-attr]
    writer._jwrite = writer._jwrite.trigger(trigger)  # as PySpark's `trigger(realTime=…)` does, which 4.1 does not have
    query = writer.start()
    for _ in range(120):
        rows, offsets = spark.sql("select count(*), sum(offset) from live").collect()[0]
        if rows >= 1000:
            break
        query.awaitTermination(0.5)
    print(rows, offsets)
    query.stop()


if __name__ == "__main__":
    main()
