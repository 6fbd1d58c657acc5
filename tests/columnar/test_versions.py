"""The jar in each line of Spark that it is for: 3.5 (Scala 2.12) to the one that is installed.

PySpark of the other lines is installed into a folder of its own, once on a machine (`~/.cache/natslog-spark`).
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
from tests.harness import BrokerProcess, publish_acked

CACHE = Path.home() / ".cache" / "natslog-spark"
ROWS = 1000

pytestmark = pytest.mark.timeout(600)


def installed(line: str) -> Path:
    """The folder that has PySpark of this line."""
    target = CACHE / line
    if not (target / "done").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
        subprocess.run([*command, "--target", str(target), f"pyspark=={line}.*"], check=True, timeout=400)
        (target / "done").touch()
    return target


def run(line: str, how: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    environment |= {"PYTHONPATH": str(installed(line)), "JAR": str(jar_path()), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, str(PROGRAM), how, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=180)


@pytest.mark.parametrize("line", ["3.5", "4.0", "4.1", "4.2"])
def test_jar_reads_in_other_lines_of_spark(
    shared: tuple[NatsServer, BrokerProcess], client: NatslogClient, name: str, folder: Path, line: str
) -> None:
    client.create_stream(name, name)
    values = [b"%d" % number for number in range(ROWS)]
    publish_acked(shared[0].url, name, values, headers={"a": "b"})
    url = shared[1].url

    read = run(line, "read", url, name)
    size, offsets = sum(map(len, values)), sum(range(ROWS))
    assert read.stdout.split()[:5] == [str(ROWS), str(offsets), str(size), str(ROWS), "1"], read.stderr[-3000:]
    assert read.stdout.split()[5].startswith(line)
    assert read.stdout.split()[6] == "JVM"

    drained = run(line, "drain", url, name, str(folder), "300")
    assert f"Row(count(1)={ROWS}, count(DISTINCT offset)={ROWS})" in drained.stdout, drained.stderr[-3000:]

    if line != "4.2":  # where there are Python sources, they are told how much to read
        for how, what in (("write", "writing"), ("typed", "option payloadFormat")):
            refused = run(line, how, url, name)
            assert f"{what} needs the Python source of natslog, which needs Spark 4.2 or newer" in refused.stderr
            assert "foreachBatch" in refused.stderr
