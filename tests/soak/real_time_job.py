"""A query in real time that copies a stream to another one, each message exactly once.

python real_time_job.py --stream orders --target live --checkpoint FOLDER
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading

from pyspark.sql import SparkSession

_BATCH = "5 seconds"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--stream", "--target", "--checkpoint"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    spark.conf.set("spark.sql.streaming.realTimeMode.allowlistCheck", "false")
    rows = (
        spark.readStream.format("natslog").options(stream=arguments.stream).load().select("stream", "offset", "value")
    )
    sink = rows.writeStream.format("natslog").options(exactlyOnce="true", stream=arguments.target)
    sink = sink.outputMode("update").option("checkpointLocation", arguments.checkpoint)
    query = sink.option("asyncProgressTrackingEnabled", "false").trigger(realTime=_BATCH).start()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    while not stopping.is_set() and not query.awaitTermination(1):
        pass
    query.stop()
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
