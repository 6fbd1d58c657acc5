"""CSV rows as JSON objects with types."""

from __future__ import annotations

import json

import pytest

from natslog.cli.csv_rows import JsonRows, declared_types, inferred_types, rows_of, shown_types
from natslog.errors import InvalidRequest


def inferred(*cells: str) -> str:
    return inferred_types([(at, [cell]) for at, cell in enumerate(cells)], ["c"], {})["c"]


@pytest.mark.parametrize(
    ("kind", "cells"),
    [
        ("BIGINT", ["1", "-7", "+3", "", "999999999999999999", " 5 "]),
        ("DOUBLE", ["1", "2.5", "-.5", "3.", "1e5", "+1.5E-200", "-0.0"]),
        ("BOOLEAN", ["true", "FALSE", "True", ""]),
        ("DATE", ["2024-01-31", "0001-12-01"]),
        ("TIMESTAMP", ["2024-01-31", "2024-01-31T10:00:00Z", "2024-01-31 10:00:00.123456789+0200", "2024-01-31T10:00"]),
        ("STRING", ["007", "1"]),
        ("STRING", ["1234567890123456789"]),
        ("STRING", ["1.5", "n/a"]),
        ("STRING", ["1,5"]),
        ("STRING", ["true", "1"]),
        ("STRING", ["NaN"]),
        ("STRING", ["1e999"]),
        ("STRING", ["2024-13-01"]),
        ("STRING", ["2024-04-31"]),
        ("STRING", ["2024-01-01T00:00+19:00"]),
        ("STRING", ["2024-01-31T25:00"]),
        ("STRING", ["1\n2"]),
        ("STRING", ["", ""]),
        ("STRING", []),
    ],
)
def test_a_column_has_the_type_of_all_its_cells(kind: str, cells: list[str]) -> None:
    assert inferred(*cells) == kind


def test_a_type_is_that_of_all_rows_and_not_only_of_the_first() -> None:
    assert inferred(*["1"] * 20_000, "x") == "STRING"
    assert inferred(*["1"] * 20_000, "1.5") == "DOUBLE"


@pytest.mark.parametrize(
    ("cell", "number"),
    [("+5", "5"), (".5", "0.5"), ("-.5", "-0.5"), ("1.", "1.0"), ("+1.e5", "1.0e5"), ("1.50", "1.50"), (" 7 ", "7")],
)
def test_numbers_keep_their_digits_in_json(cell: str, number: str) -> None:
    (encoded,) = JsonRows({"a": "DOUBLE"}).encode([(2, [cell])])
    assert encoded == b'{"a":%b}' % number.encode()
    assert json.loads(encoded)["a"] == float(cell)


def test_cells_of_each_type_in_json() -> None:
    kinds = ["STRING", "BIGINT", "BOOLEAN", "DATE", "TIMESTAMP", "BIGINT", "STRING"]
    types = dict(zip(['a"%s', "n", "o", "d", "t", "e", "s"], kinds, strict=True))
    cells = ['say "hü"\n', "12", "TRUE", "2024-01-31", "2024-01-31 10:00", "", ""]
    expected = ['say "hü"\n', 12, True, "2024-01-31", "2024-01-31 10:00", None, ""]
    (encoded,) = JsonRows(types).encode([(2, cells)])
    assert json.loads(encoded) == dict(zip(types, expected, strict=True))


def test_a_cell_that_is_not_of_its_type_is_named() -> None:
    with pytest.raises(InvalidRequest, match="line 9: field 'n' is 'x', which is no BIGINT: give another type"):
        JsonRows({"n": "BIGINT"}).encode([(8, ["1"]), (9, ["x"]), (10, ["y"])])


def test_types_are_read_as_they_are_shown() -> None:
    types = {"a": "STRING", "b c": "DOUBLE", "d`e": "BIGINT", "f,g": "DATE"}
    assert declared_types(shown_types(types)) == types
    assert declared_types(" x int ,y  Decimal(12, 2), z float") == {"x": "BIGINT", "y": "DOUBLE", "z": "DOUBLE"}
    assert declared_types("") == {}


@pytest.mark.parametrize(
    "text", ["x", "x INTERVAL", "x BIGINT y DOUBLE", ", x BIGINT", "x BIGINT(", "`x BIGINT", "x INT, x DOUBLE"]
)
def test_types_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a list of names and types|twice"):
        declared_types(text)


def test_types_of_columns_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="there is no column 'y'; there are x"):
        inferred_types([], ["x"], {"y": "DOUBLE"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "the file is empty"), ("a,a\n", "twice"), ("a,b\n1\n", "line 2 has 1 fields"), ('a\n"x', "is not CSV")],
)
def test_files_that_are_no_csv_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        list(rows_of(text.splitlines(keepends=True), 1000))
