"""A streaming query that copies a stream into another one, for as long as it is not ended: run by `test_upgrade.py` in
the environment of a release, or of this version.

    python upgrade_query.py SERVERS SOURCE TARGET CHECKPOINT [JAR]
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession


def main(servers: str, source: str, target: str, checkpoint: str, jar: str = "") -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
    spark = (builder.config("spark.jars", jar) if jar else builder).getOrCreate()
    rows = spark.readStream.format("natslog").options(servers=servers, stream=source).load()
    writer = rows.select("value").writeStream.format("natslog").options(path="http", servers=servers, stream=target)
    writer.option("checkpointLocation", checkpoint).trigger(processingTime="1 second").start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
