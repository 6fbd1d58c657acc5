"""`make demo TLS=1`, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.job_processes import JOBS

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(400)]

WITHIN_S = 180 + 120  # three minutes on a machine that does nothing else


def test_the_demo_with_tls_runs_end_to_end_and_leaves_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path), "NATSLOG_TOKEN_FILE": "/nowhere", "NATSLOG_INSECURE": "true"}
    done = subprocess.run(
        [sys.executable, str(JOBS / "demo.py"), "--tls"],
        capture_output=True, text=True, check=False, timeout=WITHIN_S, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "a request without a token: refused (unauthorized)",
        "spark on stream alerts: refused (forbidden)",
        "NATS without a user: refused (nats_login_refused)",
        "spark may read events; viewer may read events and alerts",
    ):
        assert line in done.stdout
    assert "tls://127.0.0.1:" in done.stdout
    assert "https://127.0.0.1:" in done.stdout
    assert "nlt_" not in done.stdout + done.stderr
    assert done.stderr == ""
    assert [path for path in tmp_path.iterdir() if path.name.startswith("natslog-demo-")] == []
