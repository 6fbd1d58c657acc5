"""One Spark for a bench: local, two cores, quiet."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from tests.bench.scan_sources import DroppingSink, JsonRowsSource, MappedSource, PythonSource, TupleSource
from tests.bench.sides import ROOT


@contextmanager
def spark_session(jars: Sequence[Path] = ()) -> Iterator[SparkSession]:
    """Args:
    jars: for the driver and the executors. Only the first session of a process can have them: they are given to the
        JVM when it starts.
    """
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
        .config("spark.jars", ",".join(map(str, jars)))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    for source in (MappedSource, TupleSource, JsonRowsSource, DroppingSink, PythonSource):
        session.dataSource.register(source)
    try:
        yield session
    finally:
        session.stop()
