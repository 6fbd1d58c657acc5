"""Spark source and sink `natslog`: `spark.readStream.format("natslog")`, `df.write.format("natslog")`, and the rest.

Spark finds this package by its name and registers `DefaultSource`; nothing else is to be done. Where that discovery is
off (`spark.sql.planner.pythonDataSource…`) or the package came later than the session:
`spark.dataSource.register(pyspark_natslog.DefaultSource)`. It must be installed on executors too.
"""

from pyspark_natslog.versions import check_python_sources

check_python_sources()  # before the line that needs them

from pyspark_natslog.source import DefaultSource  # noqa: E402

__all__ = ["DefaultSource"]
