"""The memory of tasks is counted by Spark, and what it does not grant is an error that says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from natslog.client import NatslogClient
from natslog.nats_server import NatsServer
from pyspark_natslog.jar import jar_path
from tests.columnar.test_switching import PROGRAM
from tests.harness import BrokerProcess, publish_acked

_MIB = 1024 * 1024
LITTLE = f"spark.testing.memory={450 * _MIB} spark.memory.fraction=0.003"
"""Half a MiB for all tasks: Spark reserves 300 MiB for itself."""


@pytest.mark.parametrize(("compression", "granted"), [("none", False), ("zstd", False), ("none", True)])
def test_batch_that_does_not_fit_is_an_error(
    shared: tuple[NatsServer, BrokerProcess], client: NatslogClient, name: str, compression: str, granted: bool
) -> None:
    client.create_stream(name, name, compression=compression)
    publish_acked(shared[0].url, name, [b"x" * 900_000])
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "JAR": str(jar_path())}
    environment["SETTINGS"] = "spark.unsafe.exceptionOnMemoryLeak=true" if granted else LITTLE
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "read", shared[1].url, name],
        env=environment, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    if granted:
        assert done.stdout.split()[:3] == ["1", "0", "900000"], done.stderr[-3000:]
    else:
        assert "MiB for a batch of messages, and Spark grants it" in done.stderr
        assert "raise spark.executor.memory" in done.stderr
