"""`make demo TLS=1`, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.readme import ROOT
from tests.spark.job_processes import JOBS

pytestmark = [pytest.mark.spark, pytest.mark.extended, pytest.mark.timeout(400)]

WITHIN_S = 180 + 120  # three minutes on a machine that does nothing else


def test_the_demo_with_tls_runs_end_to_end_and_leaves_nothing(tmp_path: Path) -> None:
    variables = {"TMPDIR": str(tmp_path), "NATSLOG_TOKEN_FILE": "/nowhere", "NATSLOG_INSECURE": "true", "COLUMNS": "80"}
    image = tmp_path / "plots" / "demo.png"
    done = subprocess.run(
        [sys.executable, str(JOBS / "demo.py"), "--tls", "--plot", str(image)],
        capture_output=True, text=True, check=False, timeout=WITHIN_S, env=os.environ | variables,
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
    check_end(done.stdout, image)
    assert [path for path in tmp_path.iterdir() if path.name.startswith("natslog-demo-")] == []


def check_end(printed: str, image: Path) -> None:
    """Plots of what was recorded, in 80 columns and without a terminal, and where to look next."""
    plot, _, after = printed.partition("[8/8] ")[2].partition("look next at\n")
    header, *rows = [line for line in plot.splitlines()[1:] if not line.startswith(("      as an image", "done in"))]
    assert header.split() == ["from", "messages", "mean", "percent", "mean", "highest", "reached"]
    assert 1 < len(rows) <= 12
    assert sum(int(row.split()[1]) for row in rows) > 50, "messages were recorded"
    assert any("alert" in row for row in rows)
    assert any("\u2588" in row or "#" in row for row in rows)
    assert image.read_bytes().startswith(b"\x89PNG")
    places = [line.split("  ")[1] for line in after.splitlines()]
    assert places == [
        ".venv/bin/natslog dev",
        "make demo KEEP=1",
        "README.md",
        "notebooks/",
        "docs/SPARK.md",
        "docs/OPERATIONS.md",
    ]
    assert all((ROOT / place).exists() for place in places[2:])
    assert all(len(line) <= 80 for line in [header, *rows, *after.splitlines()])
