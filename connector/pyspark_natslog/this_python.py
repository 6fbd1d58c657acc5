"""Which Python Spark starts for Python sources: by default `python3` from PATH, which may know nothing of natslog."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def use_this_python() -> None:
    """Has Spark start this Python, where the program runs in an environment that is not activated (from an IDE, cron
    or Jupyter): Spark would report that there is no source `natslog`. Sets the variable `PYSPARK_PYTHON`, which Spark
    reads when the session is created.

    Nothing is changed where the variable is set, where `python3` from PATH belongs to this environment, and in a
    program that spark-submit started: there the cluster's settings say which Python the executors have.
    """
    if "PYSPARK_PYTHON" in os.environ or "PYSPARK_GATEWAY_PORT" in os.environ or not sys.executable:
        return
    found = shutil.which("python3")
    if found is None or Path(found).parent != Path(sys.executable).parent:
        os.environ["PYSPARK_PYTHON"] = sys.executable
