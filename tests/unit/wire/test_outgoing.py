"""Frames for many rows from one kernel, against a model that writes them one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow.schema import HEADERS_TYPE
from natslog.wire.outgoing import sent_bytes
from natslog.wire.outgoing_rows import Rows

texts = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1, max_size=12)
pairs = st.fixed_dictionaries({"key": texts, "value": texts})
row_values = st.fixed_dictionaries(
    {
        "subject": texts,
        "value": st.binary(max_size=200),
        "key": st.none() | st.binary(max_size=8),
        "headers": st.none() | st.lists(pairs, max_size=3),
        "id": st.none() | texts,
    }
)


def modelled(row: dict[str, Any], reply: bytes) -> tuple[bytes, int]:
    """One frame as the protocol says, and what counts against the server's limit."""
    lines = [b"Natslog-Key: " + row["key"]] if row["key"] is not None else []
    lines += [f"{pair['key']}: {pair['value']}".encode() for pair in row["headers"] or []]
    if row["id"] is not None:
        lines.append(f"Nats-Msg-Id: {row['id']}".encode())
    head = row["subject"].encode() + b" " + reply
    if not lines:
        return b"PUB %s%d\r\n%s\r\n" % (head, len(row["value"]), row["value"]), len(row["value"])
    block = b"NATS/1.0\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"
    total = len(block) + len(row["value"])
    return b"HPUB %s%d %d\r\n%s%s\r\n" % (head, len(block), total, block, row["value"]), total


def columns(content: list[dict[str, Any]], which: set[str]) -> Rows:
    return Rows(
        pa.array([row["subject"] for row in content]),
        pa.array([row["value"] for row in content], pa.binary()),
        pa.array([row["key"] for row in content], pa.binary()) if "key" in which else None,
        pa.array([row["headers"] for row in content], HEADERS_TYPE) if "headers" in which else None,
        pa.array([row["id"] for row in content], pa.string()) if "id" in which else None,
    )


@settings(deadline=None, max_examples=80)
@given(
    st.lists(row_values, min_size=1, max_size=12),
    st.sets(st.sampled_from(["key", "headers", "id"])),
    st.none() | st.integers(0, 10**12),
    st.integers(0, 5),
)
def test_frames_are_those_of_the_model(
    content: list[dict[str, Any]], which: set[str], first: int | None, skipped: int
) -> None:
    skipped = min(skipped, len(content) - 1)
    rows = columns(content, which).slice(skipped, len(content) - skipped)  # columns that begin in mid-buffer
    kept = [row | dict.fromkeys({"key", "headers", "id"} - which) for row in content[skipped:]]
    sequences = None if first is None else np.arange(first, first + len(kept))
    replies = [b"" if first is None else b"_INBOX.x.~%d " % (first + at) for at in range(len(kept))]
    expected = [modelled(row, reply) for row, reply in zip(kept, replies, strict=True)]
    assert bytes(rows.frames("_INBOX.x", sequences)) == b"".join(frame for frame, _ in expected)
    counted = sent_bytes(rows.values, rows.lines(), rows.ids).to_pylist()
    assert all(bound >= size for bound, (_, size) in zip(counted, expected, strict=True)), "never less than is sent"


def test_no_rows_no_bytes() -> None:
    rows = Rows(pa.array([], pa.string()), pa.array([], pa.binary()))
    assert bytes(rows.frames()) == b""


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.integers(1, 10), st.integers(1, 100))
def test_parts_cover_all_rows_within_both_limits(sizes: list[int], max_rows: int, max_bytes: int) -> None:
    rows = Rows(pa.array(["s"] * len(sizes)), pa.array([b"x" * size for size in sizes], pa.binary()))
    parts = rows.slice(0, len(sizes)).parts(max_rows, max_bytes)
    assert [len(value) for part in parts for value in part.values.to_pylist()] == sizes
    for part in parts:
        assert len(part) <= max_rows
        assert len(part) == 1 or sum(len(value) for value in part.values.to_pylist()) <= max_bytes
