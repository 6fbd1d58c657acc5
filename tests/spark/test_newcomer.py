"""A newcomer's first minutes: README's ten lines of Spark, copied from README, with nothing activated."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import publish_acked, running

README = Path(__file__).parents[2] / "README.md"


def ten_lines() -> str:
    """README's first Python block; it ends when the streaming query has taken what there is."""
    match = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert match is not None
    return match.group(1)


def other_python(folder: Path) -> Path:
    """A `python3` that has no package of this environment, first in PATH."""
    folder.mkdir()
    real = Path(sys.base_prefix) / "bin" / "python3"
    script = folder / "python3"
    script.write_text(f'#!/bin/sh\nexec "{real}" -I "$@"\n')
    script.chmod(0o755)
    return folder


@pytest.mark.long
def test_ten_lines_of_spark_run_without_an_activated_environment(tmp_path: Path) -> None:
    end = (
        '\nfor query in spark.streams.active:\n    query.processAllAvailable()\n    query.stop()\nprint("to the end")\n'
    )
    program = tmp_path / "first.py"
    program.write_text(ten_lines().replace("/tmp/large", str(tmp_path / "checkpoint")) + end)
    kept = {name: os.environ[name] for name in ("HOME", "JAVA_HOME", "LANG") if name in os.environ}
    path = f"{other_python(tmp_path / 'bin')}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    with running(tmp_path / "own") as (nats, broker):
        broker.client().create_stream("orders", "orders.>")
        publish_acked(nats.url, "orders.eu", [b"x" * 10, b"y" * 2000])
        publish_acked(nats.url, "orders.us", [b"z"])
        done = subprocess.run(
            [sys.executable, str(program)],
            capture_output=True,
            text=True,
            env=kept | {"PATH": path, "NATSLOG_SERVER": broker.url, "NATS_URL": nats.url},
            cwd=tmp_path,
            timeout=180,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"orders\.eu\|\s+2\|", done.stdout), done.stdout
    assert "to the end" in done.stdout
