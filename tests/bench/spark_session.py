"""One Spark for a bench: local, two cores, quiet."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from tests.bench.scan_sources import JsonRowsSource, MappedSource, TupleSource
from tests.bench.sides import ROOT


@contextmanager
def spark_session() -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(ROOT)
    session = (
        SparkSession.builder.master("local[2]")
        .appName("natslog-bench")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "3g")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    for source in (MappedSource, TupleSource, JsonRowsSource):
        session.dataSource.register(source)
    try:
        yield session
    finally:
        session.stop()
