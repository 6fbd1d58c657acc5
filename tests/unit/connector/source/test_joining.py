"""Small stored batches are joined; rows, their order and large batches stay as they are."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_natslog.source import joining
from pyspark_natslog.source.joining import joined


def batch_of(first: int, rows: int) -> pa.RecordBatch:
    values = pa.array([b"x" * (at % 7) if at % 3 else None for at in range(first, first + rows)], pa.binary())
    return pa.RecordBatch.from_pydict({"offset": pa.array(range(first, first + rows)), "value": values})


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 600), st.integers(1, 2000))
def test_rows_stay_in_order(sizes: list[int], small_bytes: int, joined_bytes: int) -> None:
    batches, first = [], 0
    for rows in sizes:
        batches.append(batch_of(first, rows))
        first += rows
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(joining, "_SMALL_BYTES", small_bytes)
        patched.setattr(joining, "_JOINED_BYTES", joined_bytes)
        found = list(joined(batches))
    expected = pa.Table.from_batches(batches, batch_of(0, 1).schema)
    assert pa.Table.from_batches(found, expected.schema).equals(expected)
    for batch in found:
        is_same = any(batch is one for one in batches)
        assert is_same or batch.nbytes <= joined_bytes + 16 * len(sizes), "only as much is copied"
    for one in batches:
        assert one.nbytes <= small_bytes or any(one is batch for batch in found), "large ones are not copied"


def test_slices_of_a_batch_are_joined_as_they_are() -> None:
    whole = batch_of(0, 100)
    [found] = joined([whole.slice(3, 5), whole.slice(50, 10)])
    assert found.column("offset").to_pylist() == [*range(3, 8), *range(50, 60)]
