"""Trace contexts in columns of headers, compared with lists of Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.arrow.schema import HEADERS_TYPE
from natslog.arrow.trace_contexts import is_traceparent, sampled_contexts, with_traceparent

CONTEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
NAMES = st.sampled_from(["traceparent", "Traceparent", "k", "tracesource", ""])
VALUES = st.sampled_from(["v", "", CONTEXT, None])
ROWS = st.lists(st.none() | st.lists(st.tuples(NAMES, VALUES), max_size=3), max_size=8)

Row = list[tuple[str, str | None]] | None


def column(rows: list[Row]) -> Any:
    return pa.array([None if row is None else [{"key": k, "value": v} for k, v in row] for row in rows], HEADERS_TYPE)


def context(number: int, flags: str = "01") -> str:
    return f"00-{number + 1:032x}-{number + 1:016x}-{flags}"


def expected_row(row: Row) -> Row:
    if any(name.lower() == "traceparent" for name, _ in row or ()):
        return row
    return [*(row or ()), ("traceparent", CONTEXT)]


@settings(deadline=None)
@given(ROWS, st.integers(0, 3), st.integers(0, 255))
def test_header_is_added_to_each_marked_row_that_has_none(rows: list[Row], skipped: int, marks: int) -> None:
    given, where = (
        column(rows).slice(skipped),
        np.array([marks >> at & 1 for at in range(len(rows))][skipped:], np.bool_),
    )
    found = with_traceparent(given, len(given), CONTEXT, where)
    found.validate(full=True)
    expected = [
        row
        if not is_marked or any(name.lower() == "traceparent" for name, _ in row or ())
        else [*(row or ()), ("traceparent", CONTEXT)]
        for row, is_marked in zip(rows[skipped:], where, strict=True)
    ]
    assert found.equals(column(expected))


def test_rows_without_a_column_get_one() -> None:
    assert with_traceparent(None, 2, CONTEXT).equals(column([[("traceparent", CONTEXT)]] * 2))
    assert len(with_traceparent(None, 0, CONTEXT)) == 0


def rows_with(headers: list[Row]) -> RowBuffers:
    count = len(headers)
    columns = [pa.array(["s"] * count), pa.nulls(count, pa.binary()), column(headers), pa.array([b""] * count)]
    return RowBuffers.of(pa.RecordBatch.from_arrays(columns, schema=PAYLOAD_SCHEMA))


def test_different_sampled_contexts_are_found_in_order() -> None:
    headers: list[Row] = [
        None,
        [("k", "v"), ("Traceparent", context(1))],
        [("traceparent", context(2, "00"))],
        [("traceparent", context(3, "03"))],
        [("traceparent", context(1))],
        [("tracesource", context(4))],
        [("traceparent", CONTEXT.upper())],
        [("traceparent", f"00-{0:032x}-{1:016x}-01")],
        [("traceparent", "short")],
    ]
    assert sampled_contexts(rows_with(headers), 16) == [context(1), context(3, "03")]
    assert sampled_contexts(rows_with(headers), 1) == [context(1)]
    assert sampled_contexts(rows_with([None, []]), 16) == []


def test_search_is_bounded_and_spread_over_the_batch() -> None:
    many = rows_with([[("traceparent", context(at))] for at in range(20_000)])
    found = [int(one.split("-")[1], 16) for one in sampled_contexts(many, 1000)]
    assert len(found) == 64
    assert (found[0], found[-1]) == (1, 16 * 1024)
    assert max(np.diff(found)) <= 16 * 1024 // 63 + 1


def test_form_of_a_context() -> None:
    assert is_traceparent(CONTEXT)
    for wrong in ("", CONTEXT[:-1], CONTEXT + "\n", "ff" + CONTEXT[2:], CONTEXT.upper(), context(-1)):
        assert not is_traceparent(wrong), wrong
