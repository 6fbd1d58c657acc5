"""Spark source and sink `natslog`: `spark.readStream.format("natslog")`, `df.write.format("natslog")`, and the rest.

Spark finds this package by its name and registers `DefaultSource`; nothing else is to be done. Where that discovery is
off (`spark.sql.planner.pythonDataSource…`) or the package came later than the session:
`spark.dataSource.register(pyspark_natslog.DefaultSource)`. It must be installed on executors too.

Imported before the session is created, it makes Spark use the Python that runs the program (`use_this_python`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark_natslog.this_python import use_this_python
from pyspark_natslog.versions import check_python_sources

use_this_python()
check_python_sources()  # before the line that needs them

from pyspark_natslog.data_source import DefaultSource  # noqa: E402

if TYPE_CHECKING:
    from pyspark_natslog.lag_listener import LagListener

__all__ = ["DefaultSource", "LagListener"]


def __getattr__(name: str) -> Any:
    """What not every program needs is imported when it is named: Spark imports this package for any Python source."""
    if name == "LagListener":
        from pyspark_natslog.lag_listener import LagListener

        return LagListener
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
