"""Spark starts in half the time: what the phases set before they run tests that start many.

    python -m tests.spark_start FILE        runs a small session, and writes the archive of its classes

Theory of operation. Most JVMs of the tests live for seconds, so they need neither the second compiler nor a parallel
collector. Without the second compiler, the JVM reserves only 48 MB for compiled code. The tests of one session fill
these, and the JVM interprets everything after that, so it is told to reserve as much as with both. The JVM maps classes
from an archive (CDS) instead of reading them from hundreds of jars. Spark takes the options from variables, and prints
nothing about them. (A folder of settings would be in the class path, where CDS allows none.) A JVM that does not fit
the archive, because it has another version or class path, ignores it.

Spark has its Python workers import PySpark from a zip file in its home, which holds no compiled modules: each of them
compiles what it imports, half a second of a core. Here Spark has a home without that file, so they import the installed
package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

_WITHIN_S = 300.0
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"


def quick_sparks(folder: Path) -> dict[str, str]:
    """Variables for all processes that start Spark. Makes the archive, where there is none."""
    archive = folder / "spark.jsa"
    home = {"SPARK_HOME": str(_home_without_zip(folder / "spark-home"))}
    if not archive.exists():
        made = archive.with_suffix(f".{os.getpid()}")  # incomplete, if this is interrupted
        command = [sys.executable, "-m", "tests.spark_start", str(made)]
        try:
            why = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_WITHIN_S, env=os.environ | home
            ).stderr
        except subprocess.TimeoutExpired as error:
            why = str(error)
        if made.exists():
            made.rename(archive)
        else:
            print(f"no archive of Spark's classes, so that Spark starts slower: {why[-500:]}", file=sys.stderr)
    options = f"{QUICK_JVM} -XX:SharedArchiveFile={archive} -Xlog:disable"
    return home | {
        "SPARK_SUBMIT_OPTS": options,
        "SPARK_LAUNCHER_OPTS": QUICK_JVM,
        "SPARK_DAEMON_JAVA_OPTS": QUICK_JVM,
    }


def _home_without_zip(folder: Path) -> Path:
    """Spark's home, the installed PySpark, with all but its zip files."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    for name in ("bin", "jars", "sbin"):
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(Path(spec.origin).parent / name)
    return folder


def _write(archive: Path) -> None:
    """Does a little of what tests do: the archive has the classes that were loaded."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    options = f"{QUICK_JVM} -XX:ArchiveClassesAtExit={archive} -Xlog:cds=off"  # among hundreds of lines, nothing of use
    builder = SparkSession.builder.master("local[2]").config("spark.driver.extraJavaOptions", options)
    spark = builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    place = archive.parent / "spark-start"
    numbers = spark.range(100).selectExpr("id", "cast(id % 3 AS string) AS key")
    numbers.write.mode("overwrite").parquet(str(place / "in"))
    rows = spark.read.parquet(str(place / "in"))
    rows.groupBy("key").count().orderBy("key").collect()
    stream = spark.readStream.schema(rows.schema).parquet(str(place / "in"))
    writer = stream.writeStream.option("checkpointLocation", str(place / "checkpoint")).trigger(availableNow=True)
    writer.start(format="parquet", path=str(place / "out")).awaitTermination()
    gateway = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()  # the JVM ends, and writes the archive
    gateway.proc.wait(_WITHIN_S)
    shutil.rmtree(place)


if __name__ == "__main__":
    _write(Path(sys.argv[1]).resolve())
