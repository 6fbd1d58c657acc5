"""Hashes of rows: what they cover, and digests of many rows."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow.schema import HEADERS_TYPE
from natslog.wire.row_hashes import as_ids, content_digest, position_starts, row_hashes, sum_digests

Row = tuple[str, bytes | None, list[tuple[str, str]] | None, bytes | None]

texts = st.text("ab", max_size=9)
some_bytes = st.binary(max_size=20)
some_rows = st.tuples(
    texts, st.none() | some_bytes, st.none() | st.lists(st.tuples(texts, texts), max_size=3), st.none() | some_bytes
)


def hashed(rows: list[Row], **options: Any) -> Any:
    subjects, keys, headers, values = zip(*rows, strict=True) if rows else ((), (), (), ())
    pairs = [None if one is None else [{"key": key, "value": value} for key, value in one] for one in headers]
    return row_hashes(
        pa.array(subjects, pa.string()),
        pa.array(values, pa.binary()),
        pa.array(keys, pa.binary()),
        pa.array(pairs, HEADERS_TYPE),
        **options,
    )


def as_numbers(hashes: Any) -> list[tuple[int, int]]:
    return [tuple(pair) for pair in hashes.tolist()]


@settings(max_examples=60, deadline=None)
@given(st.lists(some_rows, max_size=12))
def test_rows_have_equal_hashes_exactly_if_they_are_equal(rows: list[Row]) -> None:
    found = as_numbers(hashed(rows))
    for one, of_one in zip(rows, found, strict=True):
        for other, of_other in zip(rows, found, strict=True):
            assert (of_one == of_other) == (one == other), (one, other)
    assert len({first for first, _ in found}) == len({second for _, second in found}) == len(set(found))


@pytest.mark.parametrize(
    "other",
    [
        ("b", b"k", [("h", "1")], b"value of more than eight bytes"),
        ("a", b"", [("h", "1")], b"value of more than eight bytes"),
        ("a", None, [("h", "1")], b"value of more than eight bytes"),
        ("a", b"k", [("h", "2")], b"value of more than eight bytes"),
        ("a", b"k", [("h", "1"), ("h", "1")], b"value of more than eight bytes"),
        ("a", b"k", [], b"value of more than eight bytes"),
        ("a", b"k", None, b"value of more than eight bytes"),
        ("a", b"k", [("h1", "")], b"value of more than eight bytes"),
        ("a", b"k", [("h", "1")], b"value of more than eight bytez"),
        ("a", b"k", [("h", "1")], b"value of more than eight bytes\0"),
        ("a", b"k", [("h", "1")], b""),
        ("a", b"k", [("h", "1")], None),
        ("ak", b"", [("h", "1")], b"value of more than eight bytes"),
    ],
)
def test_every_part_of_a_row_counts(other: Row) -> None:
    one: Row = ("a", b"k", [("h", "1")], b"value of more than eight bytes")
    first, second = as_numbers(hashed([one, other]))
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_columns_that_are_left_out_count_as_nulls() -> None:
    subjects, values = pa.array(["a", "b"]), pa.array([b"1", b"2"])
    assert as_numbers(row_hashes(subjects, values, None, None)) == as_numbers(
        hashed([("a", None, None, b"1"), ("b", None, None, b"2")])
    )


def test_slices_have_the_hashes_of_their_rows() -> None:
    rows: list[Row] = [(f"s{at}", b"k%d" % at if at % 2 else None, [("h", str(at))] * (at % 4), b"v" * at)
                       for at in range(30)]  # fmt: skip
    columns = pa.RecordBatch.from_pylist(
        [
            {
                "subject": subject,
                "key": key,
                "headers": [{"key": name, "value": text} for name, text in pairs or []],
                "value": value,
            }
            for subject, key, pairs, value in rows
        ],
        pa.schema([("subject", pa.string()), ("key", pa.binary()), ("headers", HEADERS_TYPE), ("value", pa.binary())]),
    )
    part = columns.slice(7, 11)
    found = row_hashes(part["subject"], part["value"], part["key"], part["headers"])
    assert as_numbers(found) == as_numbers(hashed(rows))[7:18]


@settings(max_examples=60, deadline=None)
@given(st.lists(some_rows, max_size=20), st.randoms(use_true_random=False), st.integers(0, 20))
def test_digest_is_the_same_in_any_order_and_partition(rows: list[Row], chance: random.Random, cut: int) -> None:
    whole = content_digest(hashed(rows))
    shuffled = list(rows)
    chance.shuffle(shuffled)
    assert content_digest(hashed(shuffled)) == whole
    parts = [content_digest(hashed(part)) for part in (shuffled[:cut], shuffled[cut:])]
    assert sum_digests(parts) == whole
    assert 0 <= whole < 2**128


def test_digest_of_other_rows_is_another() -> None:
    one, two = ("a", None, None, b"1"), ("a", None, None, b"2")
    digests = [content_digest(hashed(rows)) for rows in ([], [one], [two], [one, one], [one, two], [two, two])]
    assert len(set(digests)) == len(digests)


def test_the_same_row_has_another_id_at_another_position_or_in_another_context() -> None:
    row: Row = ("a", None, None, b"same")
    ids = [
        text
        for context in ("query:0:0:", "query:0:1:", "other:0:0:")
        for text in as_ids(hashed([row] * 500, start=position_starts(context, 0, 500))).to_pylist()
    ]
    assert len(set(ids)) == 1500
    assert all(re.fullmatch(r"~[A-Za-z0-9_-]{16}", text) for text in ids)
    again = as_ids(hashed([row] * 100, start=position_starts("query:0:0:", 400, 100))).to_pylist()
    assert again == ids[400:500], "wherever the batches of a task are cut"


@pytest.mark.long
def test_ids_of_a_million_rows_differ_in_every_word() -> None:
    values = pa.array(np.arange(1_000_000) % 1000).cast(pa.string()).cast(pa.binary())
    subjects = pa.repeat(pa.scalar("a"), len(values))
    hashes = row_hashes(subjects, values, None, None, position_starts("q", 0, len(values)))
    assert len(np.unique(hashes[:, 0])) == len(np.unique(hashes[:, 1])) == len(values)
    assert len(as_ids(hashes).unique()) == len(values)
