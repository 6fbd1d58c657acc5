"""A query in real time in a Spark of its own: `python -m tests.bench.real_time_query SIDE SERVERS NATS TRIGGER FOLDER`.

It copies the stream or topic `in` to `out`, prints a line when its first batch runs, and ends with its input.
"""

from __future__ import annotations

import sys
import time

from pyspark.sql import SparkSession

from pyspark_natslog.jar import jar_path
from tests.bench.kafka.sides import connector_jars

READY = "@ready"


def main() -> None:
    side, servers, nats_url, trigger, folder = sys.argv[1:]
    jars = connector_jars() if side == "kafka" else [jar_path()]
    spark = (
        SparkSession.builder.master("local[4]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "3g")
        .config("spark.sql.streaming.realTimeMode.allowlistCheck", "false")
        .config("spark.jars", ",".join(map(str, jars)))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    if side == "kafka":
        options = {"kafka.bootstrap.servers": servers}
        read = spark.readStream.format("kafka").options(**options, subscribe="in", **{"kafka.fetch.max.wait.ms": "1"})
        writer = read.load().selectExpr("key", "value").writeStream.format("kafka")
        writer = writer.options(**options, topic="out", **{"kafka.linger.ms": "0"})
    else:
        read = spark.readStream.format("natslog").options(servers=servers, stream="in")
        writer = read.load().selectExpr("key", "value").writeStream.format("natslog")
        writer = writer.options(
            servers=servers, natsServers=nats_url, subject="out", asyncProgressTrackingEnabled=False
        )
    writer = writer.outputMode("update").option("checkpointLocation", folder)
    query = writer.trigger(realTime=trigger).start()
    while query.isActive and not spark.sparkContext.statusTracker().getActiveStageIds():
        time.sleep(0.1)
    print(READY, flush=True)
    sys.stdin.read()
    if query.exception() is not None:
        print(str(query.exception())[:2000], file=sys.stderr)
    query.stop()
    spark.stop()


if __name__ == "__main__":
    main()
