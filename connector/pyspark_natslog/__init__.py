"""Spark source and sink `natslog`: `spark.readStream.format("natslog")`, `df.write.format("natslog")`, and the rest.

Spark finds this package by its name and registers `DefaultSource`; nothing else is to be done. Where that discovery is
off (`spark.sql.planner.pythonDataSource…`) or the package came later than the session:
`spark.dataSource.register(pyspark_natslog.DefaultSource)`. It must be installed on executors too.
"""

from pyspark_natslog.source import DefaultSource

__all__ = ["DefaultSource"]
