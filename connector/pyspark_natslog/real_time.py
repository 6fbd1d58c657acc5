"""The sink for Spark's real-time mode, where Spark accepts only the sinks of a list.

Theory of operation. The list names classes of Spark's own, and one of them is that of its `ForeachWriter`. The jar has
the sink as such a writer: rows go from Spark's task to NATS in the JVM, as with `format("natslog")`.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.streaming.readwriter import DataStreamWriter

from natslog.errors import ConfigError

_CLASS = "natslog.RealTimeWriter"


def real_time_writer(rows: DataFrame, **options: str) -> DataStreamWriter:
    """A writer of the rows to NATS whose sink Spark allows in real-time mode, without a change of settings.

    It is used like `rows.writeStream`: set `outputMode("update")`, `trigger(realTime=…)` and `checkpointLocation`, and
    start it. Spark then keeps its log of batches up to date before the next batch begins
    (`asyncProgressTrackingEnabled=false`): a batch that is repeated begins with the same row.

    Args:
        options: those of the sink over NATS (`natsServers`, `subject`, `ack`, …).

    Raises:
        ConfigError: Spark has no jar of natslog, or this is Spark Connect. IllegalArgumentException (of PySpark): an
            option or a column is wrong.
    """
    session: Any = rows.sparkSession
    if not hasattr(session, "_jvm"):
        raise ConfigError("real_time_writer needs a session that runs in this process: Spark Connect has none")
    sink = getattr(session._jvm, _CLASS)
    if not callable(sink):
        raise ConfigError(
            "real_time_writer needs the jar of natslog on the class path of Spark: "
            '.config("spark.jars", pyspark_natslog.jar.jar_path()) before the session is created'
        )
    given: Any = {name: str(value) for name, value in options.items()}
    jvm_rows: Any = rows._jdf
    made = sink(jvm_rows.schema(), given)
    writer = rows.writeStream
    of_jvm: Any = writer
    of_jvm._jwrite = of_jvm._jwrite.foreach(made)
    return writer.option("asyncProgressTrackingEnabled", "false")
