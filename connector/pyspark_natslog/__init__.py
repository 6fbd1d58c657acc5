"""Spark source and sink `natslog`: `format("natslog")` with `spark.read`, `readStream`, `df.write` and `writeStream`.

Spark finds this package by its name and registers `DefaultSource`. If that discovery is disabled
(`spark.sql.planner.pythonDataSource…`), or the package was installed after the session was created, call
`spark.dataSource.register(pyspark_natslog.DefaultSource)`. The package must be installed on executors too.

If a program imports it before it creates the session, Spark uses the Python that runs the program
(`use_this_python`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pyspark_natslog.this_python import use_this_python

use_this_python()
if "-m" not in sys.argv[:1]:  # `python -m pyspark_natslog jar` needs no PySpark, or an old one
    from pyspark_natslog.versions import check_python_sources

    check_python_sources()  # before the line that needs them

    from pyspark_natslog.data_source import DefaultSource

if TYPE_CHECKING:
    from pyspark_natslog.lag_listener import LagListener
    from pyspark_natslog.real_time import real_time_writer

__all__ = ["DefaultSource", "LagListener", "real_time_writer"]


def __getattr__(name: str) -> Any:
    """Imports on first use what few programs need: Spark imports this package for any Python source."""
    if name == "LagListener":
        from pyspark_natslog.lag_listener import LagListener

        return LagListener
    if name == "real_time_writer":
        from pyspark_natslog.real_time import real_time_writer

        return real_time_writer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
