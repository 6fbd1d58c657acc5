"""The span of a commit is made once, whichever comes last: its end, or the search in its headers."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from natslog import tracing
from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.arrow.schema import HEADERS_TYPE
from natslog.errors import StorageFull
from natslog.node.writes import commit_spans
from natslog.node.writes.commit_spans import MOST_LINKS, CommitSpan


def rows(count: int) -> RowBuffers:
    headers = [[{"key": "traceparent", "value": f"00-{at:032x}-{at:016x}-01"}] for at in range(1, count + 1)]
    columns = [pa.array(["s"] * count), pa.nulls(count, pa.binary()), pa.array(headers, HEADERS_TYPE)]
    return RowBuffers.of(pa.RecordBatch.from_arrays([*columns, pa.array([b""] * count)], schema=PAYLOAD_SCHEMA))


@pytest.mark.parametrize("is_found_first", [True, False])
def test_span_is_made_by_what_comes_last(is_found_first: bool, spans: InMemorySpanExporter) -> None:
    commit = CommitSpan("orders", rows(100), begun_ns=1_000)
    with tracing.span("unrelated", "internal"):
        if is_found_first:
            commit.find_contexts()
        else:
            commit.ended({"natslog.first_offset": 7})
        assert spans.get_finished_spans() == ()
        if is_found_first:
            commit.ended({"natslog.first_offset": 7})
        else:
            commit.find_contexts()
        (span,) = spans.get_finished_spans()
    assert (span.name, span.kind.name, span.parent, span.start_time) == ("commit orders", "CONSUMER", None, 1_000)
    assert (span.attributes or {})["natslog.first_offset"] == 7
    assert len(span.links) == MOST_LINKS
    assert len({link.context.trace_id for link in span.links}) == MOST_LINKS
    assert all(link.context.is_remote for link in span.links)


def test_refused_commit_has_a_span_that_failed(spans: InMemorySpanExporter) -> None:
    commit = CommitSpan("orders", rows(1), begun_ns=1_000)
    commit.ended({}, StorageFull("the disk is full"))
    commit.find_contexts()
    (span,) = spans.get_finished_spans()
    assert not span.status.is_ok
    assert (span.attributes or {})["error.type"] == StorageFull.code


@pytest.mark.parametrize("name", ["sampled_contexts", "_link"])
def test_error_in_the_search_costs_links_and_neither_span_nor_commit(
    name: str, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*args: Any) -> None:
        raise ZeroDivisionError("an error in the search")

    monkeypatch.setattr(commit_spans, name, raising)
    commit = CommitSpan("orders", rows(3), begun_ns=1_000)
    commit.find_contexts()
    commit.ended({})
    (span,) = spans.get_finished_spans()
    assert span.links == ()
