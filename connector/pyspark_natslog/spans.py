"""Tracing in the processes of Spark that execute the connector."""

from __future__ import annotations

from typing import Any

from pyspark import TaskContext

from natslog import tracing

FLUSH_WITHIN_S = 0.5
_QUERY_ID = "spark.streaming.query.id"
_EXPORTED_AFTER_MS = 500  # Spark ends its processes without notice


def begin() -> bool:
    """Whether there is tracing in this process."""
    return tracing.begin("natslog-spark", delay_ms=_EXPORTED_AFTER_MS)


def task_attributes() -> dict[str, Any]:
    """Of the task that runs here: Spark states query and batch to tasks only. Empty outside of a task."""
    context = TaskContext.get()
    if context is None:
        return {}
    facts: dict[str, Any] = {"spark.stage.id": context.stageId(), "spark.partition.id": context.partitionId()}
    query = context.getLocalProperty("sql.streaming.queryId")
    batch = context.getLocalProperty("streaming.sql.batchId")
    if query is None or batch is None:
        return facts
    return facts | {_QUERY_ID: query, "spark.streaming.batch.id": int(batch)}


def task_ended() -> None:
    """Exports the spans of a batch read or write: Spark may end its processes soon. That of a query executes the next
    batches, too.
    """
    if _QUERY_ID not in task_attributes():
        tracing.flush(FLUSH_WITHIN_S)
