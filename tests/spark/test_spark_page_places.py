"""The blocks of docs/SPARK.md under "Where it runs": in a session that found no natslog, and on a worker."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.readme import Block
from tests.spark.page import Reader, runs
from tests.spark.places import (
    Python,
    SparkProcess,
    copied_connector,
    python_without_natslog,
    run_program,
    spark_home,
    standalone_master,
)

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(600)]

INSTALLED_LATER = """
import json, shutil, sys
from pathlib import Path
from pyspark.sql import SparkSession

source, site, url = sys.argv[1:]
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.host", "127.0.0.1").config("spark.log.level", "OFF").getOrCreate()

def read():
    try:
        return spark.read.format("natslog").option("servers", url).load("orders").count()
    except Exception as error:
        return "not found" if "DATA_SOURCE_NOT_FOUND" in str(error) else str(error)

found = [read()]
for package in Path(source).iterdir():
    shutil.copytree(package, Path(site) / package.name)
found.append(read())
# the block of the page
found.append(read())
print(json.dumps(found))
"""


@runs(block="Where it runs")
def test_session_that_searched_before_natslog_was_installed_reads_once_it_is_registered_by_hand(
    reader: Reader, block: Block
) -> None:
    reader.create("orders", "orders")
    reader.publish("orders", [b"x"] * 3)
    python = python_without_natslog(reader.folder / "environment")
    (site,) = (reader.folder / "environment").glob("lib/python*/site-packages")
    program = reader.folder / "program.py"
    program.write_text(INSTALLED_LATER.replace("# the block of the page\n", reader.code(block)))
    arguments = [str(copied_connector(reader.folder / "package")), str(site), reader.broker.url]
    done = subprocess.run(
        [str(python), str(program), *arguments],
        capture_output=True, text=True, check=False, env=Python(python, ()).environment(spark_home()),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["not found", "not found", 3]


@runs(block="What workers need")
def test_worker_that_is_started_as_the_page_says_finds_natslog_in_a_folder(reader: Reader, block: Block) -> None:
    reader.create("orders", "orders")
    reader.publish("orders", [b"%d" % at for at in range(100)])
    folder = reader.folder
    python = python_without_natslog(folder / "environment")
    driver = Python(python, (copied_connector(folder / "driver"),))
    shared = copied_connector(folder / "shared")
    plain = Python(python, ()).environment(spark_home()) | {
        "PATH": f"{spark_home() / 'bin'}:{os.environ['PATH']}",
        "SPARK_WORKER_CORES": "1", "SPARK_WORKER_MEMORY": "1g", "SPARK_WORKER_DIR": str(folder / "work"),
        "SPARK_WORKER_WEBUI_PORT": "0",
    }  # fmt: skip
    del plain["PYSPARK_PYTHON"], plain["PYTHONPATH"]  # the block sets them
    with standalone_master(folder / "cluster", driver.environment(spark_home())) as master:
        here = {"/shared/natslog": shared, "/opt/python/bin/python": python, "spark://host:7077": master.url}
        command = reader.code(block, {printed: str(value) for printed, value in here.items()})
        worker = SparkProcess(["bash", "-c", command], folder / "worker.log", plain)
        try:
            master.wait_for_workers(1)
            arguments = {"master": master.url, "parts": "imported,batch", "servers": reader.broker.url}
            arguments |= {"nats": reader.nats_url, "stream": "orders", "subject": "none", "folder": str(folder / "own")}
            given = [text for name, value in arguments.items() for text in (f"--{name}", value)]
            found, _ = run_program(driver, spark_home(), given)
        finally:
            worker.stop()
    assert found["imported"] == [str(shared / "pyspark_natslog" / "__init__.py")]
    assert found["batch"]["offsets"] == list(range(100))
