"""A short run of everything: its checkers find nothing, and what they are about has happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.network import missing_for_network

FAULTS = "flip sealed bits,kill one"


@pytest.mark.long
@pytest.mark.timeout(720)
@pytest.mark.skipif(missing_for_network() is not None, reason=str(missing_for_network()))
def test_short_run_holds_every_promise(tmp_path: Path) -> None:
    out = tmp_path / "chaos"
    command = [sys.executable, "-m", "tests.chaos", "--minutes", "0.4", "--seed", "2", "--brokers", "3"]
    command += ["--only", FAULTS, "--publishers", "1", "--resume-within", "20", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = json.loads((out / "report.json").read_text())
    for name in ("newest", "states", "fading"):
        stream = found["streams"][name]
        assert stream["removals"]["delete done"] > 0, name
        assert 0 < stream["visible"] < stream["acked"], name
    assert found["flips"]["repaired ranges"] > 0, found["flips"]
