"""A large range has as many tasks as Spark runs at once, whatever the number of processors of the machine."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest

from natslog.client import NatslogClient
from natslog.client.appending import PartUploader
from tests.harness import BrokerProcess

pytestmark = pytest.mark.spark

JOB = """
import sys
import pyspark_natslog
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[5]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
read = spark.read.format("natslog").options(servers=sys.argv[1], stream=sys.argv[2]).load()
print("TASKS", read.rdd.getNumPartitions(), read.count())
"""


@pytest.mark.long
def test_range_has_as_many_tasks_as_the_local_master_has_threads(
    broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    client.create_stream(name, name)
    parts = PartUploader(client, name, "fill", 1, subject=name)
    parts.add(pa.RecordBatch.from_pydict({"value": [b"x" * 20] * 200_000}))
    client.commit_append(name, "fill", 1, parts.finish())
    job = subprocess.run(
        [sys.executable, "-c", JOB, broker.url, name], capture_output=True, text=True, timeout=200, check=True
    )
    assert "TASKS 5 200000" in job.stdout
