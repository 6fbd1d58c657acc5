"""Which Spark this is, and the one sentence for those that are too old.

Spark imports this package when any Python source is used for the first time, and an exception in that import ends all
of them. So nothing here is imported that an older Spark with Python sources (4.0, 4.1) has not; it is told when natslog
itself is used. Spark 3.5 has no Python sources and imports nothing by itself: there, importing the package tells.
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
    """Raises ConfigError where Spark knows no Python sources (3.5 and older)."""
    _check_module("pyspark.sql.datasource")


def check_spark() -> None:
    """Raises ConfigError where sources cannot be told how much to read (4.1 and older)."""
    _check_module("pyspark.sql.streaming.datasource")


def _check_module(name: str) -> None:
    """By what it has, not by its number: vendors number their Sparks otherwise."""
    if find_spec(name) is None:
        raise ConfigError(
            f"natslog needs Spark {SPARK_NEEDED} or newer; this is {pyspark.__version__}: pip install "
            f"'pyspark>={SPARK_NEEDED}', on the cluster as well",
            needed=SPARK_NEEDED,
            found=pyspark.__version__,
        )
