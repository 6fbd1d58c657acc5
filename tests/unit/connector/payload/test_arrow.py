"""Arrow payloads: rows exploded, columns found by name and fitted, what is unsound refused."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow.payloads import Payloads
from pyspark_natslog.payload.arrow_rows import ArrowDecoder
from pyspark_natslog.payload.ddl import parse_ddl


def stream(*batches: Any) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_stream(out, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return out.getvalue()


def decode(ddl: str, payloads: list[bytes]) -> tuple[list[dict[str, Any]], list[int], list[str | None]]:
    """(rows, the payload of each, reasons of the malformed payloads)."""
    decoded = ArrowDecoder(parse_ddl(ddl)).decode(Payloads.of(pa.array(payloads, pa.binary())))
    for array in decoded.arrays.values():
        array.validate(full=True)
    table = pa.table(decoded.arrays)
    reasons = [decoded.reason(row) if decoded.malformed[row] else None for row in range(len(payloads))]
    return table.to_pylist(), decoded.parents.tolist(), reasons


def test_rows_of_several_batches_and_none() -> None:
    batch = pa.record_batch({"a": pa.array([1, 2], pa.int32()), "b": ["x", None]})
    found, parents, reasons = decode("b string, a bigint, c double", [stream(batch, batch), stream(batch.slice(0, 0))])
    assert found == [{"b": "x", "a": 1, "c": None}, {"b": None, "a": 2, "c": None}] * 2
    assert (parents, reasons) == ([0, 0, 0, 0], [None, None])


def test_types_are_fitted_where_nothing_is_lost() -> None:
    at = datetime(2024, 1, 2, 3, 4, 5, 678901, UTC)
    inner = pa.struct([("l", pa.large_list(pa.int8())), ("k", pa.uint8())])
    nested = pa.array([{"k": 1, "l": [1, None]}, None], inner)
    batch = pa.record_batch(
        {
            "d": pa.array(["x", "y"]).dictionary_encode(),
            "s": pa.array(["x", None], pa.large_string()),
            "t": pa.array([at, None], pa.timestamp("ns", "Europe/Berlin")),
            "n": nested,
            "m": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int8())),
            "b": pa.array([b"xy", None], pa.binary(2)),
            "z": pa.nulls(2),
        }
    )  # fmt: skip
    ddl = "d string, s string, t timestamp, n struct<k: int, l: array<int>, j: string>, m map<string, bigint>, b binary"
    found, _, reasons = decode(f"{ddl}, z int", [stream(batch)])
    assert reasons == [None]
    assert found[0] == {
        "d": "x", "s": "x", "t": at, "n": {"k": 1, "l": [1, None], "j": None}, "m": [("a", 1)], "b": b"xy", "z": None,
    }  # fmt: skip
    assert found[1] == {"d": "y"} | dict.fromkeys(["s", "t", "n", "m", "b", "z"])


def test_payload_that_claims_more_rows_than_its_bytes_can_hold_is_malformed_and_takes_no_memory() -> None:
    many = pa.nulls(2**30)
    nested = pa.ListArray.from_arrays(pa.array([0, 2**30], pa.int32()), many)
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2**30], pa.int32()), pa.array([7]))
    batches = [pa.record_batch([column], names=["a"]) for column in (many, nested, runs)]
    batches.append(pa.record_batch([pa.StructArray.from_arrays([many], names=["x"])], names=["a"]))
    for ddl in ("a bigint", "a array<bigint>", "b bigint", "a struct<x: bigint>"):
        found, parents, reasons = decode(ddl, [stream(batch) for batch in batches])
        assert parents == [0, 1, 2, 3]
        assert all("claims more than" in str(reason) for reason in reasons), reasons
        assert [list(row.values()) for row in found] == [[None]] * 4
    fits = pa.record_batch([pa.nulls(50_000)], names=["a"])
    assert len(decode("a bigint", [stream(fits)])[0]) == 50_000


def test_value_that_would_be_written_out_many_times_is_malformed() -> None:
    once, rows = pa.array(["x" * 500_000]), 60_000
    encoded = [
        pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), once),
        pa.RunEndEncodedArray.from_arrays(pa.array([rows], pa.int32()), once),
    ]
    _, _, reasons = decode("a string", [stream(pa.record_batch([column], names=["a"])) for column in encoded])
    assert all("would take 30000000000 bytes when it is expanded" in str(reason) for reason in reasons), reasons
    few = pa.DictionaryArray.from_arrays(pa.array([0] * 3, pa.int32()), pa.array(["x"]))
    assert decode("a string", [stream(pa.record_batch([few], names=["a"]))])[0] == [{"a": "x"}] * 3


def test_misfits_are_malformed_and_named() -> None:
    columns = {"a": pa.array([2**40]), "n": pa.array([{"x": "text"}]), "t": pa.array([datetime(2024, 1, 1)])}
    payload = stream(pa.record_batch(columns))
    for ddl, words in [
        ("a int", "column a does not fit int32"),
        ("a string", "column a is int64, which does not fit string"),
        ("n struct<x: int>", "column n.x is string, which does not fit int32"),
        ("t timestamp", "column t is timestamp[us], which does not fit timestamp[us, tz=UTC]"),
    ]:
        found, parents, reasons = decode(ddl, [payload, payload])
        assert [list(row.values()) for row in found] == [[None], [None]]
        assert parents == [0, 1]
        assert all(reason is not None and reason.startswith(words) for reason in reasons), reasons


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_streams_are_refused_or_sound(data: st.DataObject) -> None:
    """Whatever bytes are changed: no crash, no array that is unsound, and the neighbours are as they were."""
    batch = pa.record_batch(
        {"a": pa.array([1, 2, None], pa.int32()), "s": ["x", None, "long text"], "l": [[1], [], None]}
    )
    good = stream(batch)
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(bad)))
    found, parents, reasons = decode("a int, s string, l array<bigint>", [good, bytes(bad[:cut]), good])
    expected = batch.to_pylist()
    assert (reasons[0], reasons[2]) == (None, None)
    assert [row for row, parent in zip(found, parents, strict=True) if parent in (0, 2)] == expected * 2
