"""One Spark, one broker, one NATS for the tests that need nothing special: `tests/conftest.py` keeps these together."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from natslog.client import NatslogClient
from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, running
from tests.spark.page import Reader
from tests.spark_start import QUICK_JVM

# Spark's workers take `python3` from PATH, which in a fresh clone is not the environment that has natslog.
os.environ["PYSPARK_PYTHON"] = sys.executable


@contextmanager
def session(warehouse: Path, **settings: str) -> Iterator[SparkSession]:
    builder = (
        SparkSession.builder.master("local[2]")
        .appName("natslog-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.extraJavaOptions", QUICK_JVM)
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(warehouse))
        .config("spark.sql.streaming.stopTimeout", "30s")
    )
    for name, value in settings.items():
        builder = builder.config(name, value)
    found = builder.getOrCreate()
    found.sparkContext.setLogLevel("OFF")
    yield found
    found.stop()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with session(tmp_path_factory.mktemp("warehouse")) as found:
        yield found


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NatsServer, BrokerProcess]]:
    with running(tmp_path_factory.mktemp("shared"), segment_bytes="64KiB", retention_interval="500ms") as both:
        yield both


@pytest.fixture
def reader(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, client: NatslogClient, folder: Path
) -> Iterator[Reader]:
    """Of docs/SPARK.md; what it leaves running is ended."""
    reader = Reader(spark, broker, nats_url, folder, client)
    yield reader
    reader.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
