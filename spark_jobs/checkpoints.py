"""What a job may know of a checkpoint, and of a table written by a streaming query, before it starts the query.

Paths are Spark's (`hdfs://`, `s3a://`, local ones), so Hadoop's own file system is asked.
"""

from __future__ import annotations

import time
from typing import Any

from pyspark.sql import SparkSession

from natslog.errors import ConfigError

_TABLE_LOG = "_spark_metadata"


class Folder:
    """A folder in Spark's reach."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.path = path
        jvm: Any = spark._jvm
        self._path_of = jvm.org.apache.hadoop.fs.Path
        self._root = self._path_of(path)
        self._files = self._root.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())

    def has(self, name: str) -> bool:
        return bool(self._files.exists(self._path_of(self._root, name)))

    def numbered_files(self, name: str) -> dict[int, float]:
        """Files of the subfolder with a number for a name → when each was written, in seconds since 1970."""
        folder = self._path_of(self._root, name)
        if not self._files.exists(folder):
            return {}
        found = [(str(one.getPath().getName()), one.getModificationTime()) for one in self._files.listStatus(folder)]
        return {int(text): written_ms / 1000 for text, written_ms in found if text.isdecimal()}

    def names(self) -> list[str]:
        """What is in it; nothing where it is not there."""
        if not self._files.exists(self._root):
            return []
        return [str(one.getPath().getName()) for one in self._files.listStatus(self._root)]

    def rename(self, name: str, to: str) -> None:
        """Raises ConfigError where that fails, or something has the name already."""
        if self.has(to) or not self._files.rename(self._path_of(self._root, name), self._path_of(self._root, to)):
            raise ConfigError(f"{self.path}/{name} could not be renamed to {to}: is another job at work there?")

    def delete(self, name: str) -> None:
        self._files.delete(self._path_of(self._root, name), True)


def unfinished_for_s(checkpoint: Folder) -> float | None:
    """Since when the last batch of a query has been under way; None where there is none, or all are done."""
    begun = checkpoint.numbered_files("offsets")
    if not begun or max(begun) in checkpoint.numbered_files("commits"):
        return None
    return max(0.0, time.time() - begun[max(begun)])


def check_table(checkpoint: Folder, table: Folder) -> None:
    """Refuses a table that another query began.

    Spark's file sink notes in the table which batches it has, by number. A query that begins anew counts from 0 again,
    and what it writes under the numbers that are noted already would be dropped without a word.

    Raises:
        ConfigError: the table has a log and the checkpoint has no query, or the other way round.
    """
    has_query, has_log = bool(checkpoint.numbered_files("commits")), table.has(_TABLE_LOG)
    if has_log and not checkpoint.numbered_files("offsets"):
        raise ConfigError(
            f"--output {table.path} was written by a query whose checkpoint is not in {checkpoint.path}: Spark would "
            "drop new batches in silence; give that query's --checkpoint, or another --output"
        )
    if has_query and not has_log:
        raise ConfigError(
            f"the query of --checkpoint {checkpoint.path} has written batches that are not in --output {table.path}: "
            "give its own output, or a new checkpoint"
        )


def check_is_streaming_table(table: Folder) -> None:
    """Raises ConfigError where no streaming query wrote it."""
    if not table.has(_TABLE_LOG):
        raise ConfigError(f"{table.path} is no table of a streaming query: it has no {_TABLE_LOG}")
