"""Reading what services published one message at a time, beside the same messages published in windows: a commit, and
so a stored batch, has few rows then, for as long as its segment is not sealed.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from pyspark.sql import SparkSession

from pyspark_natslog.jar import jar_path
from tests.bench.pairs import Comparison, compare
from tests.bench.sides import STREAM as WINDOWS
from tests.bench.sides import natslog_side, publish_singly, raw_publish
from tests.bench.spark_scan import rows_per_second
from tests.bench.spark_session import spark_session
from tests.harness import BrokerProcess

_MESSAGES = 100_000
_VALUE_BYTES = 128
SINGLY = "singly"


def _scan(spark: SparkSession, broker: BrokerProcess, source: str, stream: str) -> float:
    reader = spark.read.format(source).options(servers=broker.url, stream=stream)
    return rows_per_second(reader.load(), _MESSAGES)


def _read(broker: BrokerProcess, stream: str) -> float:
    started = time.perf_counter()
    with broker.client() as client:
        assert sum(batch.num_rows for batch in client.read(stream)) == _MESSAGES
    return _MESSAGES / (time.perf_counter() - started)


def singly(pairs: int) -> list[Comparison]:
    with natslog_side() as (server, broker), spark_session([jar_path()]) as spark:
        broker.client().create_stream(SINGLY, "singly.events")
        asyncio.run(publish_singly(server.url, "singly.events", _MESSAGES))
        raw_publish(server, "acked", bytes=_VALUE_BYTES, window=4000, seconds=100, warm=0, count=_MESSAGES)
        sides = {
            "batch scan by the columnar reader": partial(_scan, spark, broker, "natslog"),
            "batch scan by the Python source": partial(_scan, spark, broker, "natslog_in_python"),
            "natslog's own client": partial(_read, broker),
        }
        for scan in sides.values():
            scan(SINGLY), scan(WINDOWS)  # Spark's own warm-up
        return [
            compare(
                f"{title}, published singly",
                "rows/s",
                0.7,
                ours=partial(scan, SINGLY),
                peer="the same, published in windows",
                theirs=partial(scan, WINDOWS),
                pairs=pairs,
            )
            for title, scan in sides.items()
        ]
