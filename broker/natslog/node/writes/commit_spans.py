"""A span for each commit of messages, with links to the traces of its messages.

Theory of operation. The span is made when the commit is over, from what was noted: nothing of it is on the path to the
ack. Two things must have happened, in either order and in any thread. The messages are committed, which is when their
acks are sent; and the writer has looked for trace contexts in their headers, after it has passed on the acks and before
it uses the buffers again. Whichever is later makes the span.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from natslog import tracing
from natslog.arrow.row_buffers import RowBuffers
from natslog.arrow.trace_contexts import sampled_contexts
from natslog.tracing.failures import note_failure

if TYPE_CHECKING:
    from opentelemetry.trace import Link

MOST_LINKS = 16


class CommitSpan:
    """That of one commit. Args: `begun_ns`: when its first message was received, since 1970."""

    __slots__ = ("_attributes", "_begun_ns", "_end_ns", "_error", "_links", "_lock", "_missing", "_rows", "_stream")

    def __init__(self, stream: str, rows: RowBuffers, begun_ns: int) -> None:
        self._stream, self._begun_ns = stream, begun_ns
        self._rows: RowBuffers | None = rows
        self._links: Sequence[Link] = ()
        self._attributes: tracing.Attributes = {}
        self._error: Exception | None = None
        self._end_ns = 0
        self._lock = threading.Lock()
        self._missing = 2

    def find_contexts(self) -> None:
        """Reads the buffers of the rows, which are not used afterwards. In the writer."""
        assert self._rows is not None, "it is called once"
        try:
            self._links = [_link(context) for context in sampled_contexts(self._rows, MOST_LINKS)]
        except Exception as failure:  # the commit is complete, and the writer must go on
            note_failure(failure)
        self._rows = None
        self._make_if_complete()

    def ended(self, attributes: tracing.Attributes, error: Exception | None = None) -> None:
        """The messages are committed, or refused. In the event loop."""
        self._end_ns, self._attributes, self._error = time.time_ns(), attributes, error
        self._make_if_complete()

    def _make_if_complete(self) -> None:
        with self._lock:
            self._missing -= 1
            if self._missing:
                return
        attributes = {**tracing.messaging("commit", "process", self._stream), **self._attributes}
        span = tracing.start(
            f"commit {self._stream}", "consumer", attributes, parent={}, links=self._links, start_ns=self._begun_ns
        )
        if self._error is not None:
            span.fail(self._error)
        span.end(self._end_ns)


def _link(traceparent: str) -> Link:
    from opentelemetry.trace import Link, SpanContext, TraceFlags

    _, trace_id, span_id, flags = traceparent.split("-")
    return Link(
        SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    )
