"""A published message gets the trace context of its request only where that refuses nothing."""

from __future__ import annotations

import pyarrow as pa
import pytest

from natslog.http.publishing import traced
from natslog.wire.outgoing_rows import Rows

CONTEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ROWS = Rows(pa.array(["orders"]), pa.array([b"x" * 18]))


def test_message_gets_the_context_where_it_fits() -> None:
    with_context = traced(ROWS, CONTEXT, most_bytes=1000)
    assert with_context.headers.to_pylist() == [[{"key": "traceparent", "value": CONTEXT}]]
    size_bytes = with_context.sent_bytes()[0].as_py()
    assert traced(ROWS, CONTEXT, most_bytes=size_bytes) == with_context
    assert traced(ROWS, CONTEXT, most_bytes=size_bytes - 1) is ROWS


@pytest.mark.parametrize("header", ["", "nonsense", "\udcff", CONTEXT + "\udcff", "é" * 55])
def test_what_is_no_context_changes_nothing(header: str) -> None:
    assert traced(ROWS, header, most_bytes=1000) is ROWS
