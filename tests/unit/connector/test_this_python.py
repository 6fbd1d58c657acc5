"""Which Python Spark starts for Python sources."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_AFTER = """
import pyspark
pyspark.SparkContext._active_spark_context = object()  # as while a session runs
import pyspark_natslog
"""


@pytest.mark.parametrize(("code", "is_late"), [(_AFTER, True), ("import pyspark_natslog, pyspark", False)])
def test_an_import_after_the_session_states_the_remedy(code: str, is_late: bool) -> None:
    given = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=given | {"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert (f"set PYSPARK_PYTHON={sys.executable}" in done.stderr) == is_late
    assert ("import pyspark_natslog before the session is created" in done.stderr) == is_late
