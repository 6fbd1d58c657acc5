"""Inspects a checkpoint, and a table written by a streaming query, before a job starts the query.

Paths are Spark's (`hdfs://`, `s3a://`, local ones), so they are accessed through Hadoop's file system.
"""

from __future__ import annotations

import time
from typing import Any

from pyspark.sql import SparkSession

from natslog.errors import ConfigError

_TABLE_LOG = "_spark_metadata"


class Folder:
    """A folder that Spark can access."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.path = path
        jvm: Any = spark._jvm
        self._path_of = jvm.org.apache.hadoop.fs.Path
        self._root = self._path_of(path)
        self._files = self._root.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())

    def has(self, name: str) -> bool:
        return bool(self._files.exists(self._path_of(self._root, name)))

    def numbered_files(self, name: str) -> dict[int, float]:
        """Files of the subfolder whose names are numbers → when each was written, in seconds since 1970."""
        folder = self._path_of(self._root, name)
        if not self._files.exists(folder):
            return {}
        found = [(str(one.getPath().getName()), one.getModificationTime()) for one in self._files.listStatus(folder)]
        return {int(text): written_ms / 1000 for text, written_ms in found if text.isdecimal()}

    def names(self) -> list[str]:
        """The names in the folder; empty if it does not exist."""
        if not self._files.exists(self._root):
            return []
        return [str(one.getPath().getName()) for one in self._files.listStatus(self._root)]

    def rename(self, name: str, to: str) -> None:
        """Raises ConfigError if the rename fails, or the name exists already."""
        if self.has(to) or not self._files.rename(self._path_of(self._root, name), self._path_of(self._root, to)):
            raise ConfigError(
                f"{self.path}/{name} could not be renamed to {to}: check that no other job uses this folder"
            )

    def delete(self, name: str) -> None:
        self._files.delete(self._path_of(self._root, name), True)


def unfinished_for_s(checkpoint: Folder) -> float | None:
    """How long ago the unfinished last batch of a query was started; None if every batch is complete."""
    begun = checkpoint.numbered_files("offsets")
    if not begun or max(begun) in checkpoint.numbered_files("commits"):
        return None
    return max(0.0, time.time() - begun[max(begun)])


def check_table(checkpoint: Folder, table: Folder) -> None:
    """Refuses a table that another query began.

    Spark's file sink records the numbers of its batches in the table. A query with a new checkpoint counts from 0
    again, and Spark would drop batches whose numbers are recorded already, without an error.

    Raises:
        ConfigError: the table has a log and the checkpoint has no query, or the other way round.
    """
    has_query, has_log = bool(checkpoint.numbered_files("commits")), table.has(_TABLE_LOG)
    if has_log and not checkpoint.numbered_files("offsets"):
        raise ConfigError(
            f"--output {table.path} was written by a query whose checkpoint is not in {checkpoint.path}: Spark would "
            "drop new batches without an error; give that query's --checkpoint, or another --output"
        )
    if has_query and not has_log:
        raise ConfigError(
            f"the query of --checkpoint {checkpoint.path} has written batches that are not in --output {table.path}: "
            "give its own output, or a new checkpoint"
        )


def check_is_streaming_table(table: Folder) -> None:
    """Raises ConfigError if no streaming query wrote the table."""
    if not table.has(_TABLE_LOG):
        raise ConfigError(f"{table.path} is not a table of a streaming query: it has no {_TABLE_LOG}")
