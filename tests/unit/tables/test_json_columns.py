"""Objects into columns that grow. The oracle is Python's parser, a message at a time."""

from __future__ import annotations

import datetime
import json
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.tables import json_columns
from natslog.tables.json_columns import JsonColumns, Typed

OWN = frozenset({"_offset", "_subject"})
TIME = pa.timestamp("us", tz="UTC")


def reader(known: dict[str, Any] | None = None, **options: Any) -> JsonColumns:
    return JsonColumns(pa.schema(list((known or {}).items())), OWN, **options)


def read(columns: JsonColumns, *payloads: bytes) -> Typed:
    return columns.read(pa.array(payloads, pa.binary()))


def rows(typed: Typed) -> list[dict[str, Any]]:
    return typed.columns.to_pylist()


def test_members_become_columns_in_the_order_in_which_they_are_seen() -> None:
    columns = reader()
    found = read(columns, b'{"id":1,"tags":["a"]}', b'{"id":2,"user":{"name":"x"}}', b'{"ok":true,"id":3}')
    assert columns.schema == pa.schema(
        [
            ("id", pa.int64()),
            ("tags", pa.list_(pa.field("element", pa.string()))),
            ("user", pa.struct([("name", pa.string())])),
            ("ok", pa.bool_()),
        ]
    )
    assert found.misfits == {}
    assert rows(found)[1] == {"id": 2, "tags": None, "user": {"name": "x"}, "ok": None}


def test_columns_grow_within_structs_and_lists() -> None:
    columns = reader()
    read(columns, b'{"a":{"x":1},"l":[{"x":1}]}')
    found = read(columns, b'{"a":{"y":"q"},"l":[{"x":2,"z":true},{"x":3}]}', b'{"a":null,"l":[]}')
    assert rows(found) == [
        {"a": {"x": None, "y": "q"}, "l": [{"x": 2, "z": True}, {"x": 3, "z": None}]},
        {"a": None, "l": []},
    ]


def test_times_are_text_unless_the_column_says_otherwise() -> None:
    columns = reader({"at": TIME, "day": pa.date32()})
    found = read(columns, b'{"at":"2026-01-02T03:04:05Z","day":"2026-01-02","when":"2026-01-02T03:04:05Z"}')
    row = rows(found)[0]
    assert (row["at"].isoformat(), str(row["day"]), row["when"]) == (
        "2026-01-02T03:04:05+00:00", "2026-01-02", "2026-01-02T03:04:05Z",
    )  # fmt: skip


def test_a_member_without_a_value_is_no_column_until_it_has_one() -> None:
    columns = reader()
    read(columns, b'{"id":1,"later":null,"empty":{},"none":[]}')
    assert columns.schema.names == ["id"]
    read(columns, b'{"later":"x"}')
    assert columns.schema.field("later").type == pa.string()


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"text", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b'{"id":"x"}', 'column id is bigint, and "x" is not'),
        (b'{"id":1.5}', "int64"),
        (b'{"id":9223372036854775808}', "int64"),
        (b'{"ID":3}', "has the name of the column 'id'"),
        (b'{"_offset":3}', "names that begin with _"),
        (b'{"_day":"monday"}', "names that begin with _"),
        (b'{"l":[[{"x":1,"X":2}]]}', "has the name of the column 'x'"),
        (b'{"l":[[{"a b":1}]]}', "cannot be a column"),
        (b'{"a\\u0000":1}', "cannot be a column"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "nested more than 30 deep"),
        (b'{"a":' * 600 + b"1" + b"}" * 600, "nested"),
        (b'{"a":' + b"[" * 140 + b"1" + b"]" * 140 + b"}", "nested more than 30 deep"),
        (b'{"a b":1}', "cannot be a column"),
        (b'{"":1}', "cannot be a column"),
        (b'{"id":NaN}', "int64"),
        (b'{"x":-Inf}', "not valid JSON"),
        (b'{"id":4}null', "not a JSON object"),
        (b'{"id":4}null{}', "not valid JSON"),
        (b'{"id":4} null {}', "not valid JSON"),
        (b'{"id":4}\r\n\t null\n{}', "not valid JSON"),
        (b'{"id":4}%bnull{}' % (b" " * 1000), "not valid JSON"),
        (b'{"id":4}{"id":5}', "not one JSON object"),
        (b'{"id":4,"id":5}', "twice"),
        (b'{"at":"yesterday"}', "is timestamp"),
        (b'{"price":123456789.1}', "decimal(10,2)"),
        (b'{"price":"a few"}', 'column price is decimal(10,2), and "a few" is not'),
        (b'{"x":"\xff"}', "UTF-8"),
        (b'{"x":' + b"[" * 1001 + b"]" * 1001 + b"}", "nested"),
        (b'{"blob":"AA=="}', "binary"),
    ],
)
def test_what_does_not_fit_is_named_and_the_rows_beside_it_are_read(payload: bytes, reason: str) -> None:
    known = {"id": pa.int64(), "at": TIME, "price": pa.decimal128(10, 2), "blob": pa.binary()}
    columns = reader(known)
    found = read(columns, b'{"id":1}', payload, b'{"id":2,"price":12.30}')
    assert list(found.misfits) == [1]
    assert reason in found.misfits[1]
    assert found.kept.tolist() == [0, 2]
    assert [row["id"] for row in rows(found)] == [1, 2]
    assert rows(found)[1]["price"] == Decimal("12.30")
    assert columns.schema.names == list(known), "a misfit adds no column"


def test_words_that_only_look_like_trouble_are_read() -> None:
    found = read(reader(), b'{"s":"}null Inf, -NaN"}', b'{"s":"x}\\n"}')
    assert [row["s"] for row in rows(found)] == ["}null Inf, -NaN", "x}\n"]


def test_numbers_that_are_none_are_read() -> None:
    found = read(reader(), b'{"x":NaN}', b'{"x":-Infinity}')
    assert str([row["x"] for row in rows(found)]) == "[nan, -inf]"


def test_blank_payloads_are_rows_of_nulls() -> None:
    found = read(reader({"id": pa.int64()}), b"", b" \n", b'{"id":1}')
    assert [row["id"] for row in rows(found)] == [None, None, 1]


def test_new_members_are_refused_where_the_table_may_not_grow() -> None:
    found = read(reader({"id": pa.int64()}, adds_columns=False), b'{"id":1}', b'{"id":2,"x":1}')
    assert list(found.misfits) == [1]
    found = read(reader({"id": pa.int64()}, most_columns=2), b'{"id":1,"a":1}', b'{"id":2,"b":1}', b'{"id":3}')
    assert list(found.misfits) == [1]
    assert "more than 2" in found.misfits[1]
    found = read(reader({}, most_columns=3), b'{"u":{"k0":1,"k1":1,"k2":1,"k3":1}}')
    assert "this would be 4" in found.misfits[0]


def test_columns_of_other_programs_with_odd_names_and_types_stay_beside() -> None:
    known = {"order id": pa.int64(), "_x": pa.string(), "uuid": pa.binary(16), "time": pa.time64("us")}
    columns = reader(known, has_dots=False)
    found = read(columns, b'{"id":1}', b'{"a.b":1}', b'{"uuid":"x"}')
    assert sorted(found.misfits) == [1, 2]
    assert rows(found) == [{"order id": None, "_x": None, "uuid": None, "time": None, "id": 1}]


def test_layouts_of_other_libraries_are_read_as_the_usual_ones() -> None:
    known = {"s": pa.string_view(), "l": pa.large_list(pa.large_string())}
    assert rows(read(reader(known), b'{"s":"x","l":["y"]}')) == [{"s": "x", "l": ["y"]}]


# ---- random documents ----

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)  # fmt: skip
NAMES = st.sampled_from(["a", "b", "c", "d", "A"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)
PAYLOADS = st.one_of(
    st.dictionaries(NAMES, VALUES, max_size=4).map(lambda one: json.dumps(one).encode()),
    st.dictionaries(NAMES, VALUES, max_size=4).map(lambda one: json.dumps(one, ensure_ascii=False).encode()),
    st.sampled_from([b"", b" ", b"x", b"{", b'{"a":1}}', b'{"a":NaN}', b"null", b'{"a":1}\n{"a":2}', b'{"a":"\xc3"}']),
)


@pytest.mark.long
@settings(deadline=None, max_examples=120)
@given(payloads=st.lists(PAYLOADS, max_size=12), block_bytes=st.sampled_from([1, 40, 2**20]))
def test_every_payload_is_a_row_with_its_values_or_a_misfit(payloads: list[bytes], block_bytes: int) -> None:
    before, json_columns._BLOCK_BYTES = json_columns._BLOCK_BYTES, block_bytes
    try:
        columns = reader()
        found = read(columns, *payloads)
    finally:
        json_columns._BLOCK_BYTES = before
    kept = found.kept.tolist()
    assert sorted([*kept, *found.misfits]) == list(range(len(payloads)))
    assert found.columns.num_rows == len(kept) or not columns.schema.names
    assert found.columns.schema == columns.schema
    read_rows = rows(found) if columns.schema.names else [{}] * len(kept)
    for row, values in zip(kept, read_rows, strict=True):
        text = payloads[row].strip()
        document = json.loads(text) if text else {}
        for name, value in document.items():
            assert same(values.get(name), value), (payloads[row], values)


def same(found: Any, value: Any) -> bool:
    """Whether a column has the value; what has none (null, an empty object, lists of such) may be null."""
    if found is None:
        return is_void(value)
    if isinstance(value, dict):
        return all(same(found.get(name), inner) for name, inner in value.items())
    if isinstance(value, list):
        return len(found) == len(value) and all(map(same, found, value))
    if isinstance(value, bool) or isinstance(found, bool):
        return found is value
    if isinstance(value, int | float) and isinstance(found, float):
        return math.isclose(found, value, rel_tol=1e-15) or repr(found) == repr(float(value))
    return bool(found == value)


def is_void(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(is_void, value.values()))
    if isinstance(value, list):
        return all(map(is_void, value))
    return value is None


UTC = datetime.UTC


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["2024-01-01T10:00:00.123456789Z", "2024-01-01T10:00:00.1234567Z"], [(10, 123456), (10, 123456)]),
        (["2024-01-01T10:00:00+0200", "2024-01-01T10:00:00+02"], [(8, 0), (8, 0)]),
        (["2024-01-01", "20240101T100000Z", "2024-01-01T10:00"], [(0, 0), (10, 0), (10, 0)]),
    ],
)
def test_times_as_programs_write_them_are_values(texts: list[str], expected: list[tuple[int, int]]) -> None:
    columns = reader({"at": TIME, "l": pa.list_(pa.struct([("at", TIME)]))})
    found = read(columns, *(b'{"at":"%b","l":[{"at":"%b"},{}]}' % (text.encode(), text.encode()) for text in texts))
    times = [datetime.datetime(2024, 1, 1, hour, microsecond=us, tzinfo=UTC) for hour, us in expected]
    assert found.misfits == {}
    assert rows(found) == [{"at": time, "l": [{"at": time}, {"at": None}]} for time in times]


def test_whole_numbers_are_the_seconds_of_a_time() -> None:
    found = read(
        reader({"at": TIME}), b'{"at":1704103200}', b'{"at":-1}', b'{"at":null}', b'{"at":9223372036854775807}'
    )
    assert [row["at"] and row["at"].timestamp() for row in rows(found)] == [1704103200, -1, None]
    assert list(found.misfits) == [3]


def test_decimals_are_texts_or_numbers_rounded_half_up() -> None:
    columns = reader({"price": pa.decimal128(12, 2), "tax": pa.decimal128(12, 2), "wide": pa.decimal128(38, 10)})
    for payloads in (
        [b'{"price":"12.30","tax":1.005,"wide":"1e3"}', b'{"price":"1.005","tax":-1.005}', b'{"price":"-7","tax":2}'],
        [b'{"price":1.005,"tax":"12.30"}', b'{"price":12,"tax":"1e2"}', b'{"tax":null}'],
        [b'{"price":"12.30"}', b'{"price":12.3}', b'{"price":"12"}'],
    ):
        assert read(columns, *payloads).misfits == {}, "the texts of one block, and the numbers of the next"
    found = read(columns, b'{"price":"1.005"}', b'{"price":"-12.345"}', b'{"price":1.005}')
    assert [row["price"] for row in rows(found)] == [Decimal("1.01"), Decimal("-12.35"), Decimal("1.01")]


@pytest.mark.parametrize("value", [b'"2.8"', b"true", b'"x"'])
def test_a_block_of_which_no_value_fits_is_parsed_a_few_times(value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = json_columns._read
    monkeypatch.setattr(json_columns, "_read", lambda *given: calls.append(1) or real(*given))
    found = read(reader({"x": pa.float64()}), *([b'{"x":%b}' % value] * 5000))
    assert len(found.misfits) == 5000
    assert len(calls) < 10


def test_misfits_among_times_are_found_without_parsing_their_neighbours_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    real = json_columns._read
    monkeypatch.setattr(json_columns, "_read", lambda *given: calls.append(1) or real(*given))
    payloads = [b'{"at":"%b","new%d":1}' % (b"soon" if row % 3 == 0 else b"2024-01-01", row % 3) for row in range(3000)]
    found = read(reader({"at": TIME}), *payloads)
    assert list(found.misfits) == list(range(0, 3000, 3))
    assert found.misfits[0] == 'column at is timestamp, and "soon" is not'
    assert found.columns.num_rows == 2000
    assert found.columns.schema.names == ["at", "new1", "new2"], "a misfit adds no column"
    assert len(calls) < 10


def test_empty_arrays_before_the_first_with_a_value_stay_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_columns, "_BLOCK_BYTES", 1)
    payloads = [b'{"a":[]}', b'{"s":{"l":[]}}', b"oops", b'{"a":null}', b'{"a":["x"]}', b'{"s":{"l":[1]}}', b'{"a":[]}']
    found = [(row["a"], row["s"] and row["s"]["l"]) for row in rows(read(reader(), *payloads))]
    assert found == [([], None), (None, []), (None, None), (["x"], None), (None, [1]), ([], None)]


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (TIME, b'{"x":1704103200000}'),
        (TIME, b'{"x":"+12345-01-01T00:00:00Z"}'),
        (TIME, b'{"x":"0000-12-31T23:59:59Z"}'),
        (TIME, b'{"x":"400000-01-01T00:00:00Z"}'),
        (TIME, b'{"x":"-292275-01-01T00:00:00Z"}'),
        (pa.date32(), b'{"x":"+12345-01-01"}'),
        (pa.timestamp("ns", tz="UTC"), b'{"x":"2500-01-01T00:00:00Z"}'),
        (pa.timestamp("ns", tz="UTC"), b'{"x":"2500-01-01T00:00:00.1234567Z"}'),
        (pa.decimal128(20, 2), b'{"x":12345678901234567.89}'),
    ],
)
def test_values_that_a_table_does_not_have_are_misfits(kind: Any, payload: bytes) -> None:
    """Milliseconds as a time, years that Python and Iceberg do not have, and digits that a double loses."""
    found = read(reader({"x": kind}), b'{"x":null}', payload)
    assert list(found.misfits) == [1]
    assert rows(found) == [{"x": None}]


def test_decimals_of_many_digits_are_exact_as_texts() -> None:
    found = read(reader({"x": pa.decimal128(20, 2)}), b'{"x":"12345678901234567.89"}')
    assert rows(found) == [{"x": Decimal("12345678901234567.89")}]
