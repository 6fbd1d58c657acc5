"""Checks the version of Spark, and reports one that is too old in one sentence.

Spark imports this package when any Python source is used for the first time, and an exception in that import makes all
of them fail. So the import requires nothing that an older Spark with Python sources (4.0, 4.1) lacks; the error is
raised when natslog itself is used. Spark 3.5 has no Python sources and does not import the package: there, the import
by the program raises the error.
"""

from __future__ import annotations

from importlib.util import find_spec

from natslog.errors import ConfigError

try:
    import pyspark
except ModuleNotFoundError as error:
    if error.name != "pyspark":
        raise
    raise ModuleNotFoundError("pyspark_natslog needs pyspark: pip install 'natslog[spark]'", name="pyspark") from None

SPARK_NEEDED = "4.2"


def check_python_sources() -> None:
    """Raises ConfigError if Spark has no Python sources (3.5 and older)."""
    _check_module("pyspark.sql.datasource")


def check_spark() -> None:
    """Raises ConfigError if Spark does not tell Python sources how much to read (4.1 and older)."""
    _check_module("pyspark.sql.streaming.datasource")


def _check_module(name: str) -> None:
    """Looks for a module, not at the version number: vendors number their Sparks differently."""
    if find_spec(name) is None:
        raise ConfigError(
            f"natslog needs Spark {SPARK_NEEDED} or newer; this is {pyspark.__version__}: run pip install "
            f"'pyspark>={SPARK_NEEDED}', also on the cluster; or read with the jar that "
            "`python -m pyspark_natslog jar` prints",
            needed=SPARK_NEEDED,
            found=pyspark.__version__,
        )
