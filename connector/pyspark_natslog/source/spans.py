"""Spans of reads: one for each micro-batch in the process that plans, and one for each range in the tasks.

Theory of operation. The span of a micro-batch lasts from the trigger that finds rows until its tasks are planned. Spark
does not state to this process when a batch has ended, and ends the process without notice when the query stops. The
context goes to the tasks with their ranges: their spans are children. Spark states the id of query and batch to tasks
only, so these spans have them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from natslog import tracing
from pyspark_natslog.source.offsets import from_json
from pyspark_natslog.source.splits import OffsetRange, Task
from pyspark_natslog.spans import FLUSH_WITHIN_S, begin, task_attributes


class BatchSpans:
    """The spans of the micro-batches of a query. Args: `cursor`: the option, which names the query for operators."""

    def __init__(self, cursor: str | None) -> None:
        self._cursor = cursor
        self._begun_ns: int | None = None
        self._planned: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._traceparent = ""

    def triggered(self) -> None:
        """Spark asks how far the next batch goes."""
        self._begun_ns = time.time_ns()

    def planned(self, start: dict[str, Any], end: dict[str, Any], tasks: Sequence[Task]) -> None:
        """The tasks get the context. Spark may plan a batch again, which then keeps its span."""
        if tasks and self._planned != (start, end):
            self._planned, self._traceparent = (start, end), self._span(start, end)
        for task in tasks:
            task.traceparent = self._traceparent

    def _span(self, start: dict[str, Any], end: dict[str, Any]) -> str:
        """Makes the span. Returns its context."""
        if not begin():
            return ""
        before, after = from_json(start), from_json(end)
        firsts = {name: before[name].offset if name in before else at.start or 0 for name, at in after.items()}
        moved = {name: (firsts[name], at.offset - 1) for name, at in after.items() if at.offset > firsts[name]}
        attributes = tracing.messaging("micro-batch", "receive") | tracing.offsets(moved)
        attributes["messaging.batch.message_count"] = sum(last + 1 - first for first, last in moved.values())
        if self._cursor is not None:
            attributes["natslog.cursor"] = self._cursor
        begun_ns, self._begun_ns = self._begun_ns, None
        span = tracing.start("micro-batch", "consumer", attributes, parent={}, start_ns=begun_ns)
        traceparent = span.traceparent
        span.end()
        tracing.flush(0.0)  # while the tasks run: if it is the last batch, Spark kills this process afterwards
        return traceparent


@contextmanager
def batch_read() -> Iterator[tracing.Span]:
    """The span in which a batch read is planned; those of its tasks are its children."""
    begin()
    with tracing.span("read", "consumer", tracing.messaging("read", "receive")) as span:
        yield span
    tracing.flush(FLUSH_WITHIN_S)


@contextmanager
def range_span(task: Task, part: OffsetRange) -> Iterator[tracing.Span]:
    """Of the requests for one range of a task."""
    begin()
    attributes = tracing.messaging("fetch", "receive", part.stream) | task_attributes()
    attributes |= {"natslog.first_offset": part.start, "natslog.last_offset": part.end - 1}
    span = tracing.start(f"fetch {part.stream}", "client", attributes, parent={tracing.TRACEPARENT: task.traceparent})
    try:
        yield span
    except Exception as error:  # not GeneratorExit: Spark needs no more rows
        span.fail(error)
        raise
    finally:
        span.end()
