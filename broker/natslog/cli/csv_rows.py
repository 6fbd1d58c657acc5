"""CSV input of `natslog pub`: rows become JSON objects, whose members have the types of the columns.

Types are inferred from all rows of a file, which is read once more for this, or from the first rows of another input. A
column has a type if all its cells have it that are not empty; otherwise it is STRING. Numbers with leading zeros, and
integers of more than 18 digits, are identifiers rather than numbers: STRING.

| type | cells | in JSON |
|---|---|---|
| BIGINT, DOUBLE | decimal numbers, with exponents | the same digits |
| BOOLEAN | `true`, `True`, `TRUE`, and the same of false | `true`, `false` |
| DATE, TIMESTAMP | `2024-01-31`, `2024-01-31T10:00:00.123Z` (also with a blank, or an offset) | the same text |
| STRING | all | the same text |

An empty cell is null, in a column of STRING the empty text.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from json.encoder import encode_basestring

from natslog.errors import InvalidRequest

STRING = "STRING"
_INTEGER = r"[+-]?(?:0|[1-9][0-9]{0,17})"
_REAL = r"[+-]?(?:(?:0|[1-9][0-9]{0,17})(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?(?:[12][0-7][0-9]|[0-9]{1,2}))?"
_DAY = "(?:0[1-9]|[12][0-9])"
_DATE = rf"[0-9]{{4}}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-30|(?:0[13578]|1[02])-31)"
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9](?:\.[0-9]+)?)?(?:Z|[+-](?:0[0-9]|1[0-7])(?::?[0-5][0-9])?)?"
_FORMS = {
    "BIGINT": _INTEGER,
    "DOUBLE": _REAL,
    "BOOLEAN": "true|false|True|False|TRUE|FALSE",
    "DATE": _DATE,
    "TIMESTAMP": f"{_DATE}(?:[T ]{_CLOCK})?",
}
"""By type, the first that fits is taken: what a cell looks like, without blanks around it."""
_WIDER = {"INT": "BIGINT", "FLOAT": "DOUBLE"}
_JSON_FORMS = {
    "BIGINT": re.compile(r"-?(?:0|[1-9][0-9]{0,17})").fullmatch,
    "DOUBLE": re.compile(r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]+)?(?:[eE][+-]?(?:[12][0-7][0-9]|[0-9]{1,2}))?").fullmatch,
    "BOOLEAN": re.compile("true|false").fullmatch,
}
"""Matchers of cells that are their own JSON."""
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_DECLARED = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([^\s`,]+))\s+(\w+)\s*(\(\s*\d+\s*,\s*\d+\s*\))?\s*(?:,|$)")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CHUNK_ROWS, _CHUNK_CHARS = 4000, 8 * 1024 * 1024

Row = tuple[int, list[str]]
"""The number of its last line, and its cells."""


def rows_of(lines: Iterable[str], limit_bytes: int) -> Iterator[Row]:
    """The header line, and all rows with cells. Raises InvalidRequest, with the number of the line."""
    csv.field_size_limit(limit_bytes)
    reader = csv.reader(lines, strict=True)
    try:
        names = next(reader, None)
        if not names:
            raise InvalidRequest("the file is empty: csv needs a header line")
        if len(set(names)) < len(names):
            raise InvalidRequest(f"the header line names a field twice: {', '.join(names)}")
        yield reader.line_num, names
        for cells in reader:
            if cells and len(cells) != len(names):
                raise InvalidRequest(f"line {reader.line_num} has {len(cells)} fields, the header {len(names)}")
            if cells:
                yield reader.line_num, cells
    except csv.Error as error:
        raise InvalidRequest(f"line {reader.line_num} is not CSV: {error}") from error


def next_chunk(rows: Iterator[Row]) -> list[Row]:
    """The next rows, in bounded memory; none at the end."""
    taken: list[Row] = []
    size_chars = 0
    for row in islice(rows, _CHUNK_ROWS):
        taken.append(row)
        if (size_chars := size_chars + sum(map(len, row[1]))) >= _CHUNK_CHARS:
            break
    return taken


def declared_types(text: str) -> dict[str, str]:
    """`"magnitude DOUBLE, depth STRING"`: types by name. Raises InvalidRequest."""
    found, at = {}, 0
    while at < len(text):
        match = _DECLARED.match(text, at)
        kind = "" if match is None else match[3].upper()
        kind = "DOUBLE" if kind == "DECIMAL" else _WIDER.get(kind, kind)
        if match is None or (kind != STRING and kind not in _FORMS):
            raise InvalidRequest(
                f"--types: {text[at:].strip()[:100]!r} is not a list of names and types, as in 'magnitude DOUBLE, code "
                f"STRING'; the types are {', '.join([STRING, *_FORMS])}"
            )
        name = match[2] or match[1].replace("``", "`")
        if name in found:
            raise InvalidRequest(f"--types names the column {name!r} twice")
        found[name] = kind
        at = match.end()
    return found


def shown_types(types: dict[str, str]) -> str:
    """As `declared_types` and `payloadSchema` take it."""
    quoted = {name: name if _PLAIN_NAME.fullmatch(name) else "`" + name.replace("`", "``") + "`" for name in types}
    return ", ".join(f"{quoted[name]} {kind}" for name, kind in types.items())


def inferred_types(rows: Iterable[Row], names: Sequence[str], declared: dict[str, str]) -> dict[str, str]:
    """The type of each column. Raises InvalidRequest: a declared one does not exist."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if unknown := [name for name in declared if name not in names]:
        raise InvalidRequest(f"--types: there is no column {unknown[0]!r}; there are {', '.join(names)}")
    open_kinds = {at: list(_FORMS) for at, name in enumerate(names) if name not in declared}
    has_values: set[int] = set()
    rows = iter(rows)
    while open_kinds and (chunk := [cells for _, cells in next_chunk(rows)]):
        for at, kinds in list(open_kinds.items()):
            cells = pc.utf8_trim_whitespace(pa.array([row[at] for row in chunk]))
            cells = cells.filter(pc.not_equal(cells, ""))
            if len(cells):
                has_values.add(at)
            kinds[:] = [
                kind for kind in kinds if pc.all(pc.match_substring_regex(cells, _whole(kind)), min_count=0).as_py()
            ]
            if not kinds:
                del open_kinds[at]
    inferred = {names[at]: kinds[0] for at, kinds in open_kinds.items() if at in has_values}
    return {name: declared.get(name) or inferred.get(name, STRING) for name in names}


def _whole(kind: str) -> str:
    return f"^(?:{_FORMS[kind]})$"


@dataclass(frozen=True, slots=True)
class _Column:
    """`is_json`: matches a cell that is its own JSON; None if none is."""

    name: str
    kind: str
    is_json: Callable[[str], object] | None
    encode: Callable[[str], str | None]


class JsonRows:
    """Encodes rows as JSON objects, a column at a time. Args: types: of all columns, in their order."""

    def __init__(self, types: dict[str, str]) -> None:
        self._columns = [_Column(name, kind, _JSON_FORMS.get(kind), _encoder(kind)) for name, kind in types.items()]
        members = (encode_basestring(name).replace("%", "%%") + ":%s" for name in types)
        self._object = "{" + ",".join(members) + "}"

    def encode(self, rows: Sequence[Row]) -> list[bytes]:
        """Raises InvalidRequest: a cell does not have the type of its column."""
        columns = zip(self._columns, zip(*(cells for _, cells in rows), strict=True), strict=True)
        shown = [self._shown(column, cells, rows) for column, cells in columns]
        return [(self._object % row).encode() for row in zip(*shown, strict=True)]

    def _shown(self, column: _Column, cells: Sequence[str], rows: Sequence[Row]) -> Sequence[str | None]:
        if column.is_json is not None and all(map(column.is_json, cells)):
            return cells
        values = list(map(column.encode, cells))
        if None in values:
            at = values.index(None)
            raise InvalidRequest(
                f"line {rows[at][0]}: field {column.name!r} is {cells[at][:100]!r}, which is no {column.kind}: give "
                f"another type, --types {shown_types({column.name: STRING})!r}, or --strings"
            )
        return values


def _encoder(kind: str) -> Callable[[str], str | None]:
    """Of a cell; its result is None where the cell is not of this type."""
    if kind == STRING:
        return encode_basestring
    fits = re.compile(_FORMS[kind]).fullmatch
    shown = {"BOOLEAN": str.lower, "DATE": encode_basestring, "TIMESTAMP": encode_basestring}.get(kind, _number)

    def encode(cell: str) -> str | None:
        cell = cell.strip()
        if not cell:
            return "null"
        return shown(cell) if fits(cell) else None

    return encode


def _number(text: str) -> str:
    """With the digits that JSON requires and CSV does not: `+.5` is `0.5`."""
    if _JSON_NUMBER.fullmatch(text):
        return text
    sign, text = "-" if text.startswith("-") else "", text.lstrip("+-")
    whole, point, rest = text.partition(".")
    digits = re.match("[0-9]*", rest)
    assert digits is not None
    return f"{sign}{whole or '0'}{point}{digits[0] or ('0' if point else '')}{rest[digits.end() :]}"
