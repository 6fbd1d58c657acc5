"""The same user's program (`program.py`) wherever natslog is to run: a standalone cluster, Spark Connect, Spark 4.2;
and what one is told where it is too old.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, all_values, publish_acked
from tests.spark.places import (
    ROOT,
    NotToBeHad,
    Python,
    another_spark,
    connect_server,
    copied_connector,
    python_without_natslog,
    run_program,
    spark_home,
    standalone_cluster,
)

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(600)]

CHECKOUT = (ROOT / "broker", ROOT / "connector")
ROWS = 100
ALL = list(range(ROWS))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that finds natslog by `PYTHONPATH` or not at all."""
    python = python_without_natslog(tmp_path_factory.mktemp("python") / "environment")
    command = [str(python), "-c", "import pyarrow, urllib3, pyspark, natslog"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={})
    assert "No module named 'natslog'" in done.stderr
    return python


@pytest.fixture
def arguments(shared: tuple[NatsServer, BrokerProcess], name: str, folder: Path) -> Iterator[list[str]]:
    """Of the program: a stream of 100 messages, and where rows may go. What it wrote is right in the end."""
    nats, broker = shared
    client = broker.client()
    client.create_stream(name, f"{name}.>")
    client.create_stream(f"{name}-out", f"out.{name}")
    for at in range(20):
        subject = f"{name}.{'odd' if at % 2 else 'even'}"
        publish_acked(nats.url, subject, [b"%d" % (5 * at + row) for row in range(5)])
    given = {
        "servers": broker.url,
        "nats": nats.url,
        "stream": name,
        "subject": f"out.{name}",
        "folder": folder / "own",
    }
    yield [text for flag, value in given.items() for text in (f"--{flag}", str(value))]
    assert sorted(map(int, all_values(client, f"{name}-out"))) == sorted(ALL + ALL), (
        "stored once each, batch and stream"
    )


def check_reads(found: dict[str, Any]) -> None:
    assert found["batch"] == {"offsets": ALL, "values": [str(at) for at in ALL], "last": ALL[95:]}
    assert found["stream"] == {"portions": [30, 60, 90, 100], "offsets": ALL}


def check_mistakes(said: list[str]) -> None:
    expected = [
        "unknown option 'startingofsets'; did you mean 'startingOffsets'",
        "option columns: unknown column 'valeu'; did you mean 'value'",
        "option endingOffsets is for batch reads",
        "the sink requires a column value",
    ]
    for words, text in zip(expected, said, strict=True):
        assert words in text


def check_filters(found: dict[str, Any], said: str) -> None:
    """Right in every order, and nothing is left out by the source: with what Spark makes of one that does, it would."""
    assert found["filters"] == {
        "in turn": [10, 100, 7, 100, 7, 10],
        "together": [15, 105, 210],
        "joined": 10,
        "subquery": 21,
        "switched off": 10,
    }
    assert said.count("filterPushdown has no effect") == 4, "once for each DataFrame that asks for it"


def check_hazard(found: dict[str, Any]) -> None:
    """The canary. It turns red where Spark plans the scans of a DataFrame one by one: then pruning can be offered (ADR
    7), and right would be [10, 100] and 15.
    """
    assert found["hazard"] == {"in turn": [10, 10], "together": 10}


def test_standalone_cluster_whose_workers_have_the_connector_on_their_path_only(
    python: Path, arguments: list[str], folder: Path
) -> None:
    """Two workers, one core each. They compile what the sink needs in the middle of the job, as new machines do."""
    driver, workers = (Python(python, (copied_connector(folder / name),)) for name in ("driver", "workers"))
    with standalone_cluster(folder / "cluster", workers) as master:
        parts = ["--master", master, "--parts", "imported,batch,stream,sink"]
        found, _ = run_program(driver, spark_home(), [*parts, *arguments])
    assert found["imported"] == [str(folder / "workers" / "pyspark_natslog" / "__init__.py")]
    check_reads(found)


def test_spark_connect(python: Path, arguments: list[str], folder: Path) -> None:
    """A server of its own; the client does not have the connector at all."""
    with connect_server(folder / "connect", Python(python, CHECKOUT)) as remote:
        parts = ["--remote", remote, "--parts", "batch,stream,sink,mistakes"]
        found, _ = run_program(Python(python, ()), spark_home(), [*parts, *arguments])
    assert found["session"] == "pyspark.sql.connect.session"
    check_reads(found)
    check_mistakes(found["mistakes"])


@pytest.mark.extended
def test_filters_here_and_what_spark_makes_of_a_source_that_prunes(python: Path, arguments: list[str]) -> None:
    parts = ["--master", "local[2]", "--parts", "mistakes,sink,filters,hazard"]
    found, said = run_program(Python(python, CHECKOUT), spark_home(), [*parts, *arguments])
    check_mistakes(found["mistakes"])
    check_filters(found, said)
    check_hazard(found)


def spark_of_version(version: str) -> Path:
    try:
        return another_spark(version)
    except NotToBeHad as reason:
        pytest.skip(str(reason))


@pytest.mark.extended
def test_oldest_spark_that_will_do(python: Path, arguments: list[str]) -> None:
    spark = spark_of_version("4.2.1")
    parts = ["--master", "local[2]", "--parts", "batch,stream,sink,hazard"]
    found, _ = run_program(Python(python, (spark, *CHECKOUT)), spark / "pyspark", [*parts, *arguments])
    assert found["version"] == "4.2.1"
    check_reads(found)
    check_hazard(found)


TOO_OLD = """
import json
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader


class Other(DataSource):
    def schema(self):
        return "number bigint"

    def reader(self, schema):
        return OtherReader()


class OtherReader(DataSourceReader):
    def read(self, partition):
        return iter([(1,), (2,)])


def said(attempt):
    try:
        attempt()
    except Exception as error:
        return str(error)
    return ""


spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
spark.dataSource.register(Other)
print(json.dumps([
    spark.read.format("Other").load().count(),
    said(lambda: spark.read.format("natslog").load("orders")),
    said(lambda: spark.readStream.format("natslog").load("orders")),
    said(lambda: spark.range(1).write.format("natslog").mode("append").save()),
]))
"""


@pytest.mark.extended
def test_spark_that_is_too_old_says_so_and_keeps_its_other_sources(python: Path) -> None:
    spark = spark_of_version("4.1.4")
    given = Python(python, (spark, *CHECKOUT))
    done = subprocess.run(
        [str(python), "-c", TOO_OLD],
        capture_output=True,
        text=True,
        check=False,
        env=given.environment(spark / "pyspark"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    count, *said = json.loads(done.stdout.splitlines()[-1])
    assert count == 2
    assert len(said) == 3
    for text in said:
        assert re.search("ConfigError: natslog needs Spark 4.2 or newer; this is 4.1.4: run pip install", text), text


def test_spark_without_python_sources_is_told_by_the_import(python: Path, folder: Path) -> None:
    """As in 3.5: a `pyspark` that has no `pyspark.sql.datasource`."""
    package = folder / "old" / "pyspark" / "sql"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("__version__ = '3.5.9'\n")
    (package / "__init__.py").touch()
    environment = Python(python, (folder / "old", *CHECKOUT)).environment(folder)
    command = [str(python), "-c", "import pyspark_natslog"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "ConfigError: natslog needs Spark 4.2 or newer; this is 3.5.9: run pip install" in done.stderr
