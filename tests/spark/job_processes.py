"""Jobs of `spark_jobs/` as processes: run to their end, or in the background."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness import BrokerProcess

JOBS = Path(__file__).resolve().parents[2] / "spark_jobs"
RUN_WITHIN_S = 200
QUICK_JVM = "-XX:TieredStopAtLevel=1"


def environment(broker: BrokerProcess) -> dict[str, str]:
    return job_environment(broker.url, broker.nats_url)


def job_environment(servers: str, nats_url: str) -> dict[str, str]:
    """What a job takes from its environment: where natslog and NATS are, and how Spark is started."""
    return os.environ | {
        "NATSLOG_SERVER": servers,
        "NATS_URL": nats_url,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_SUBMIT_ARGS": f"--conf spark.ui.enabled=false --driver-java-options {QUICK_JVM} pyspark-shell",
    }


def run(broker: BrokerProcess, job: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """A job from start to its end, which must have this exit code."""
    command = [sys.executable, str(JOBS / job), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=RUN_WITHIN_S, env=environment(broker)
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@contextmanager
def running_job(broker: BrokerProcess, log: Path, job: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A job in the background; killed at the end where it still runs."""
    with open(log, "wb") as output:
        child = subprocess.Popen(
            [sys.executable, str(JOBS / job), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(broker),
        )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
