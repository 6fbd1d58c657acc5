"""The jar where executors are other processes, and at a server of Spark Connect: `spark.jars` brings it there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from natslog.client import NatslogClient
from natslog.nats_server import NatsServer
from pyspark_natslog.jar import jar_path
from tests.columnar.test_switching import PROGRAM
from tests.harness import BrokerProcess, publish_acked

ROWS = 500


@pytest.mark.parametrize("place", [{"MASTER": "local-cluster[2,1,1024]"}, {"REMOTE": "local[2]"}], ids=str)
def test_jar_reads_in_other_processes(
    shared: tuple[NatsServer, BrokerProcess], client: NatslogClient, name: str, folder: Path, place: dict[str, str]
) -> None:
    client.create_stream(name, name)
    publish_acked(shared[0].url, name, [b"%d" % number for number in range(ROWS)])
    environment = os.environ | place | {"JAR": str(jar_path()), "SPARK_HOME": str(Path(pyspark.__file__).parent)}

    def run(how: str, *arguments: str) -> str:
        """Without natslog for Python on the path: so the jar has read, and no Python source."""
        command = [sys.executable, str(PROGRAM), how, shared[1].url, name, *arguments]
        given = environment | {"PYSPARK_PYTHON": "/usr/bin/python3"}
        done = subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=180)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    if "MASTER" in place:
        read, drained = run("read,drain", str(folder), "200").splitlines()
        assert drained == f"Row(count(1)={ROWS}, count(DISTINCT offset)={ROWS})"
    else:  # with Connect, the sink of this program is a process of Python
        read = run("read")
    assert read.split()[:2] == [str(ROWS), str(sum(range(ROWS)))]
