"""Tables of Delta Lake and Iceberg as `stream_to_table.py` writes them: created, appended to, merged into, compacted.

What a table has of its stream is read from its own rows: `_offset` ascends, and a commit adds whole ranges of offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from natslog.errors import ConfigError

STREAM, STREAM_ID = "natslog.stream", "natslog.stream-id"
_OFFSET = "natslog.offset"
_DELTA_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
_DELTA_CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a table is.

    Attributes:
        format: `delta` or `iceberg`. name: folder or URL of a Delta table; CATALOG.NAMESPACE.NAME of an Iceberg table.
    """

    format: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Place:
        """`delta:lake/orders`, `iceberg:lake.db.orders`; without a word in front a Delta table. Raises ConfigError."""
        format, colon, name = text.partition(":")
        if not colon or format not in ("delta", "iceberg") or name.startswith("//"):
            format, name = "delta", text
        if not name or (format == "iceberg" and name.count(".") < 2):
            raise ConfigError(f"--table {text!r} is not delta:FOLDER or iceberg:CATALOG.NAMESPACE.NAME")
        return cls(format, name)

    @property
    def dead_letters(self) -> Place:
        return Place(self.format, self.name.rstrip("/") + "_dead_letters")

    @property
    def settings(self) -> dict[str, str]:
        """Of a Spark session that is created for it."""
        if self.format == "iceberg":
            return {}
        return {"spark.sql.extensions": _DELTA_EXTENSION, "spark.sql.catalog.spark_catalog": _DELTA_CATALOG}


class LakeTable:
    """A table, which is created with the first rows."""

    def __init__(self, spark: SparkSession, place: Place, partition_by: Sequence[str] = ()) -> None:
        self._spark, self._place, self._partition_by = spark, place, tuple(partition_by)

    @property
    def _sql_name(self) -> str:
        return f"delta.`{self._place.name}`" if self._place.format == "delta" else self._place.name

    def exists(self) -> bool:
        if self._place.format == "iceberg":
            return self._spark.catalog.tableExists(self._place.name)
        jvm: Any = self._spark._jvm
        return bool(jvm.io.delta.tables.DeltaTable.isDeltaTable(self._spark._jsparkSession, self._place.name))

    def rows(self) -> DataFrame:
        if self._place.format == "delta":
            return self._spark.read.format("delta").load(self._place.name)
        return self._spark.table(self._place.name)

    def end(self) -> int:
        """The offset behind the newest row; 0 without rows."""
        if not self.exists():
            return 0
        newest = self.rows().agg(f.max("_offset")).collect()[0][0]
        return 0 if newest is None else int(newest) + 1

    def properties(self) -> dict[str, str]:
        if not self.exists():
            return {}
        shown = self._spark.sql(f"SHOW TBLPROPERTIES {self._sql_name}").collect()
        return {str(row["key"]): str(row["value"]) for row in shown}

    def check(self, stream: str, stream_id: str) -> None:
        """Raises ConfigError: the table has the messages of another stream, or another program keeps its position."""
        stated = self.properties()
        if _OFFSET in stated and self._place.format == "iceberg":
            raise ConfigError(f"table {self._place.name} is written by natslog table run: use that, or another table")
        found = (stated.get(STREAM, stream), stated.get(STREAM_ID, stream_id))
        if found != (stream, stream_id):
            raise ConfigError(
                f"table {self._place.name} has the messages of stream {found[0]!r} with the id {found[1]}, and not of "
                f"{stream!r} with {stream_id}: use another table"
            )

    def create(self, schema: DataFrame, stream: str, stream_id: str, *, grows: bool = True) -> None:
        """An empty table with these columns, if there is none.

        Args:
            grows: by appends that have more columns. Spark resolves no MERGE into an Iceberg table that does.
        """
        if self.exists():
            return
        if self._place.format == "delta":
            writer = schema.limit(0).write.format("delta").mode("ignore")
            (writer.partitionBy(*self._partition_by) if self._partition_by else writer).save(self._place.name)
        else:
            namespace = self._place.name.rpartition(".")[0]
            self._spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {namespace}")
            creator = schema.limit(0).writeTo(self._place.name).using("iceberg")
            if grows:
                creator = creator.tableProperty("write.spark.accept-any-schema", "true")
            if self._partition_by:
                creator = creator.partitionedBy(*(f.col(name) for name in self._partition_by))
            creator.create()
        self._spark.sql(
            f"ALTER TABLE {self._sql_name} SET TBLPROPERTIES ('{STREAM}' = '{stream}', '{STREAM_ID}' = '{stream_id}')"
        )

    def append(self, rows: DataFrame, stream: str, end: int) -> None:
        """Adds rows, and columns that the table lacks. Delta refuses a second job that does the same at this time."""
        if self._place.format == "delta":
            writer = rows.write.format("delta").mode("append").option("mergeSchema", "true")
            writer.option("txnAppId", f"natslog:{stream}").option("txnVersion", str(end)).save(self._place.name)
        else:
            writer_to = rows.writeTo(self._place.name).option("mergeSchema", "true")
            writer_to.option(f"snapshot-property.{_OFFSET}", str(end)).append()

    def merge(self, rows: DataFrame) -> None:
        """A row replaces the one with the same `_key`, or deletes it where `_gone` is true. Each key occurs once."""
        columns = [name for name in rows.columns if name != "_gone"]
        held = self.rows().columns
        if missing := [name for name in columns if name not in held]:
            raise ConfigError(
                f"table {self._place.name} has no column {', '.join(missing)}: add it (ALTER TABLE … ADD COLUMN)"
            )
        rows.createOrReplaceTempView("natslog_changes")
        assigned = ", ".join(f"t.`{name}` = s.`{name}`" for name in columns)
        names, values = ", ".join(f"`{name}`" for name in columns), ", ".join(f"s.`{name}`" for name in columns)
        rows.sparkSession.sql(
            f"MERGE INTO {self._sql_name} t USING natslog_changes s ON t.`_key` = s.`_key` "
            f"WHEN MATCHED AND s.`_gone` THEN DELETE WHEN MATCHED THEN UPDATE SET {assigned} "
            f"WHEN NOT MATCHED AND NOT s.`_gone` THEN INSERT ({names}) VALUES ({values})"
        )

    def compact(self) -> None:
        if self._place.format == "delta":
            self._spark.sql(f"OPTIMIZE {self._sql_name}")
        else:
            catalog, _, name = self._place.name.partition(".")
            self._spark.sql(f"CALL {catalog}.system.rewrite_data_files('{name}')")
