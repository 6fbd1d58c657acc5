"""`stream_to_table.py`; and the jars of Delta and Iceberg beside the columnar reader, in Sparks that have such jars."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from natslog.client import NatslogClient
from natslog.nats_server import NatsServer
from pyspark_natslog.jar import jar_path
from tests.bench.jars import resolve
from tests.columnar.test_versions import installed
from tests.harness import BrokerProcess, natslog, publish_acked
from tests.spark.job_processes import JOBS

pytestmark = pytest.mark.timeout(900)

JARS = {
    ("delta", "3.5"): ("io.delta", "delta-spark_2.12", "3.3.3"),
    ("delta", "4.0"): ("io.delta", "delta-spark_4.0_2.13", "4.4.0"),
    ("delta", "4.1"): ("io.delta", "delta-spark_4.1_2.13", "4.4.0"),
    ("delta", "4.2"): ("io.delta", "delta-spark_4.2_2.13", "4.4.0"),
    ("iceberg", "3.5"): ("org.apache.iceberg", "iceberg-spark-runtime-3.5_2.12", "1.12.0"),
    ("iceberg", "4.0"): ("org.apache.iceberg", "iceberg-spark-runtime-4.0_2.13", "1.11.0"),
    ("iceberg", "4.1"): ("org.apache.iceberg", "iceberg-spark-runtime-4.1_2.13", "1.12.0"),
}
"""By format and line of Spark. There are none for newer lines."""
OLDEST = [("delta", "3.5"), ("iceberg", "3.5")]
"""The other tests have the newest. A job takes a quarter of a minute: to try another line, add it here."""
_OF_SPARK = ("scala-library", "slf4j-api", "log4j-slf4j2-impl", "log4j-api", "log4j-core", "antlr4-runtime", "jackson-")


@dataclass
class Lake:
    """One stream and one table, written by the job in one line of Spark."""

    broker: BrokerProcess
    nats_url: str
    stream: str
    folder: Path
    format: str
    line: str

    @property
    def target(self) -> str:
        return f"delta:{self.folder}/orders" if self.format == "delta" else "iceberg:lake.db.orders"

    def publish(self, *values: Any, headers: dict[str, str] | None = None) -> None:
        encoded = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in values]
        publish_acked(self.nats_url, f"{self.stream}.x", encoded, headers)

    def job(self, *arguments: str, code: int = 0) -> str:
        jars = [
            jar_path(),
            *(one for one in resolve(*JARS[self.format, self.line]) if not one.name.startswith(_OF_SPARK)),
        ]
        settings = {"spark.ui.enabled": "false", "spark.sql.warehouse.dir": f"{self.folder}/spark"}
        if self.format == "iceberg":
            settings |= {
                "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
                "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
                "spark.sql.catalog.lake.type": "hadoop",
                "spark.sql.catalog.lake.warehouse": f"{self.folder}/warehouse",
            }
        submit = " ".join(f"--conf {name}={value}" for name, value in settings.items())
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
        environment |= {
            "PYTHONPATH": str(installed(self.line)),
            "PYSPARK_PYTHON": sys.executable,
            "NATSLOG_SERVER": self.broker.url,
            "PYSPARK_SUBMIT_ARGS": f"--master local[2] --jars {','.join(map(str, jars))} {submit} "
            "--driver-java-options '-XX:TieredStopAtLevel=1 -XX:+UseSerialGC' pyspark-shell",
        }
        command = [sys.executable, str(JOBS / "stream_to_table.py"), "--stream", self.stream, "--table", self.target]
        command += ["--checkpoint", f"{self.folder}/checkpoint", "--available-now", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout + done.stderr

    def rows(self, suffix: str = "") -> pl.DataFrame:
        if self.format == "delta":
            return pl.read_delta(f"{self.folder}/orders{suffix}").sort("_offset")
        from pyiceberg.table import StaticTable

        newest = max(
            (self.folder / "warehouse/db" / f"orders{suffix}" / "metadata").glob("v*.metadata.json"), key=version
        )
        found = StaticTable.from_metadata(str(newest)).scan().to_arrow()
        return pl.DataFrame(pl.from_arrow(found)).sort("_offset")


def version(path: Path) -> int:
    return int(path.name.removeprefix("v").partition(".")[0])


@pytest.fixture
def lake(
    request: pytest.FixtureRequest,
    shared: tuple[NatsServer, BrokerProcess],
    client: NatslogClient,
    name: str,
    folder: Path,
) -> Lake:
    client.create_stream(name, f"{name}.>")
    format, line = request.param
    return Lake(shared[1], shared[0].url, name, folder, format, line)


@pytest.mark.parametrize(
    "lake", [OLDEST[0], pytest.param(OLDEST[1], marks=pytest.mark.extended)], indirect=True, ids="-".join
)
def test_jar_reads_beside_the_jars_of_table_formats(lake: Lake) -> None:
    lake.publish(b"a", b"b", b"c")
    lake.job()
    frame = lake.rows()
    assert (frame["_offset"].to_list(), frame["value"].to_list()) == ([0, 1, 2], [b"a", b"b", b"c"])


@pytest.mark.parametrize("lake", [("delta", "4.2")], indirect=True, ids="-".join)
def test_typed_rows_grow_and_what_does_not_fit_is_kept(lake: Lake) -> None:
    options = ["--payload-format", "json", "--event-time", "at", "--late", "1h", "--partition-by", "_day"]
    lake.publish({"id": 1, "at": "2026-01-02T00:00:00Z"}, b"no json", {"id": 2, "at": "2026-01-02T02:00:00Z"})
    lake.job(*options, "--payload-schema", "id BIGINT, at TIMESTAMP")
    lake.publish({"id": 3, "at": "2026-01-02T00:30:00Z"}, {"id": 4, "at": "2026-01-03T00:00:00Z", "city": "Oslo"})
    lake.job(*options, "--payload-schema", "id BIGINT, at TIMESTAMP, city STRING", "--compact-every", "1")
    frame = lake.rows()
    assert frame["id"].to_list() == [1, 2, 4]
    assert frame["city"].to_list() == [None, None, "Oslo"]
    assert [str(day) for day in frame["_day"].to_list()] == ["2026-01-02", "2026-01-02", "2026-01-03"]
    letters = lake.rows("_dead_letters")
    assert letters["reason"].to_list() == [
        "the payload is malformed", "its event time is older than the watermark allows",
    ]  # fmt: skip
    assert letters["value"].to_list()[0] == b"no json"
    assert json.loads(letters["value"].to_list()[1])["id"] == 3

    lake.publish({"id": 5, "city": "Rome"})  # the command continues a Delta table of the job
    natslog("table", "run", lake.stream, lake.target, "--payload-format", "json", "--once", url=lake.broker.url)
    assert lake.rows()["id"].to_list() == [1, 2, 4, 5]
    lake.publish({"id": 6, "city": "Bern"})
    shutil.rmtree(lake.folder / "checkpoint")  # the position is in the table
    lake.job(*options, "--payload-schema", "id BIGINT, at TIMESTAMP, city STRING")
    assert lake.rows()["id"].to_list() == [1, 2, 4, 5, 6]


@pytest.mark.parametrize(
    "lake",
    [("delta", "4.2"), pytest.param(("iceberg", "4.1"), marks=pytest.mark.extended)],
    indirect=True,
    ids="-".join,
)
def test_merge_keeps_one_row_for_each_key_of_one_stream(lake: Lake, client: NatslogClient) -> None:
    for key, value in (("a", b"1"), ("b", b"2"), ("a", b"3")):
        lake.publish(value, headers={"Natslog-Key": key})
    lake.job("--merge")
    lake.publish(b"4", headers={"Natslog-Key": "c"})
    lake.publish(b"", headers={"Natslog-Key": "b", "Natslog-Tombstone": "1"})
    lake.job("--merge")
    frame = lake.rows()
    assert sorted(zip(frame["_key"], frame["value"], strict=True)) == [(b"a", b"3"), (b"c", b"4")]

    if lake.format == "delta":
        client.create_stream(f"{lake.stream}-b", f"{lake.stream}b.>")
        lake.stream += "-b"
        shutil.rmtree(lake.folder / "checkpoint")
        assert "has the messages of stream" in lake.job(code=1)
