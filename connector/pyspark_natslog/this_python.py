"""Which Python Spark starts for Python sources: by default `python3` from PATH, which may lack natslog."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path

logger = logging.getLogger("pyspark_natslog")


def use_this_python() -> None:
    """Makes Spark start the Python that runs this program, by the variable `PYSPARK_PYTHON`, which Spark reads when the
    session is created. In an environment that is not activated (an IDE, cron or Jupyter) Spark would otherwise start a
    Python without natslog, and report that there is no source `natslog`.

    Nothing is changed if the variable is set, if `python3` from PATH belongs to this environment, or if spark-submit
    started the program: then the settings of the cluster determine the Python of the executors.
    """
    if "PYSPARK_PYTHON" in os.environ or "PYSPARK_GATEWAY_PORT" in os.environ or not sys.executable:
        return
    found = shutil.which("python3")
    if found is None or Path(found).parent != Path(sys.executable).parent:
        os.environ["PYSPARK_PYTHON"] = sys.executable
        if _has_session():
            logger.warning(
                "pyspark_natslog was imported after Spark was started, so that Spark runs Python sources with "
                f"{found or 'python3'} instead of {sys.executable}. If it does not find the source natslog there: "
                f"import pyspark_natslog before the session is created, or set PYSPARK_PYTHON={sys.executable}"
            )


def _has_session() -> bool:
    """Without importing PySpark."""
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    return getattr(context, "_active_spark_context", None) is not None
