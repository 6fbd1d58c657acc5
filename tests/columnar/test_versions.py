"""The jar in each line of Spark that it is for: 3.5 (Scala 2.12) to the one that is installed.

PySpark of the other lines is installed into a folder of its own, once on a machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from natslog.client import NatslogClient
from natslog.nats_server import NatsServer
from pyspark_natslog.jar import jar_path
from tests.columnar.test_switching import PROGRAM
from tests.harness import BrokerProcess, all_values, publish_acked
from tests.spark.places import NotToBeHad, another_spark

LINES = {"3.5": "3.5.9", "4.0": "4.0.5", "4.1": "4.1.4", "4.2": "4.2.1"}
"""With the version that is tested."""
ROWS = 1000

pytestmark = pytest.mark.timeout(600)


def installed(line: str) -> Path:
    """The folder that has PySpark of this line."""
    try:
        return another_spark(LINES[line])
    except NotToBeHad as reason:
        pytest.skip(str(reason))


def run(line: str, how: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    environment |= {"PYTHONPATH": str(installed(line)), "JAR": str(jar_path()), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, str(PROGRAM), how, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=180)


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=() if line in ("3.5", "4.2") else pytest.mark.extended) for line in LINES]
)
def test_jar_reads_in_other_lines_of_spark(
    shared: tuple[NatsServer, BrokerProcess], client: NatslogClient, name: str, folder: Path, line: str
) -> None:
    client.create_stream(name, name)
    values = [b"%d" % number for number in range(ROWS)]
    publish_acked(shared[0].url, name, values, headers={"a": "b"})
    url = shared[1].url

    has_python_sources = line == "4.2"  # that are told how much to read
    client.create_stream(f"{name}-out", f"out.{name}")
    written = run(line, "write", url, f"out.{name}", shared[0].url)
    assert written.returncode == 0, written.stderr[-3000:]
    assert sorted(all_values(client, f"{name}-out")) == [b"0", b"1", b"2"]

    has_real_time = line in ("4.1", "4.2")
    kinds = ["read", "drain", *(["live"] if has_real_time else []), *([] if has_python_sources else ["typed"])]
    done = run(line, ",".join(kinds), url, name, str(folder), "300")
    read, drained, *live = done.stdout.splitlines()
    size, offsets = sum(map(len, values)), sum(range(ROWS))
    assert read.split()[:5] == [str(ROWS), str(offsets), str(size), str(ROWS), "1"], done.stderr[-3000:]
    assert read.split()[5] == LINES[line]
    assert read.split()[6] == "JVM"
    assert live == ([f"{ROWS} {offsets}"] if has_real_time else []), done.stderr[-3000:]
    assert drained == f"Row(count(1)={ROWS}, count(DISTINCT offset)={ROWS})", done.stderr[-3000:]

    if has_python_sources:
        assert done.returncode == 0, done.stderr[-3000:]
    else:
        needed = "option payloadFormat needs the Python source of natslog, which needs Spark 4.2 or newer"
        assert needed in done.stderr
        assert "foreachBatch" in done.stderr
