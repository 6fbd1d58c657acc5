"""Arrow payloads into typed columns: each an IPC stream of any number of rows, found by column name.

A column that a payload lacks is null, and one that is not requested is skipped. A column of another type is converted
if nothing is lost (a smaller integer, another unit of time, a dictionary, large and view types). Otherwise the payload
is malformed, as it is if Arrow cannot read or validate it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import StructType

from natslog.arrow.payloads import Payloads
from pyspark_natslog.payload.rows import Decoded

_FAMILIES = (
    ("integer", pa.types.is_integer),
    ("floating", pa.types.is_floating),
    ("decimal", pa.types.is_decimal),
    ("boolean", pa.types.is_boolean),
    ("date", pa.types.is_date),
    ("timestamp", lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None),
    ("timestamp_ntz", lambda kind: pa.types.is_timestamp(kind) and kind.tz is None),
    ("text", lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)),
    (
        "bytes",
        lambda kind: (
            pa.types.is_binary(kind)
            or pa.types.is_large_binary(kind)
            or pa.types.is_fixed_size_binary(kind)
            or pa.types.is_binary_view(kind)
        ),
    ),
    (
        "list",
        lambda kind: pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind),
    ),
    ("map", pa.types.is_map),
    ("struct", pa.types.is_struct),
)


_FEW_ROWS = 64 * 1024
_ROWS_A_BYTE = 8  # no type takes less than a bit
_MOST_BYTES = 256 * 1024 * 1024


class _Misfit(Exception):
    """A column does not have the requested type."""


class ArrowDecoder:
    """Decodes into the columns of `schema`."""

    def __init__(self, schema: StructType) -> None:
        self._wanted = [(inner.name, to_arrow_type(inner.dataType, timezone="UTC")) for inner in schema.fields]

    def decode(self, payloads: Payloads) -> Decoded:
        """Calls Arrow once per payload: a payload is itself a batch of rows."""
        parts: dict[str, list[Any]] = {name: [] for name, _ in self._wanted}
        reasons: dict[int, str] = {}
        lengths = np.ones(len(payloads), np.int64)
        for row in range(len(payloads)):
            try:
                lengths[row], columns = self._read(payloads.buffer(row))
            except (pa.ArrowException, OSError, _Misfit, ValueError, OverflowError) as error:
                reasons[row] = (
                    str(error) if isinstance(error, _Misfit) else f"it is not a valid Arrow IPC stream: {error}"
                )
                columns = {name: pa.nulls(1, kind) for name, kind in self._wanted}
            for name, column in columns.items():
                parts[name].append(column)
        arrays = {name: pa.concat_arrays([pa.nulls(0, kind), *parts[name]]) for name, kind in self._wanted}
        malformed = np.isin(np.arange(len(payloads)), list(reasons))
        return Decoded(arrays, malformed, reasons.__getitem__, np.repeat(np.arange(len(payloads)), lengths))

    def _read(self, payload: Any) -> tuple[int, dict[str, Any]]:
        """(rows, columns by name) of one payload."""
        # Columns of nulls and of runs take no bytes until they are expanded.
        most = max(_FEW_ROWS, _ROWS_A_BYTE * payload.size)
        batches, rows = [], 0
        with pa.ipc.open_stream(payload) as reader:
            for batch in reader:
                batch.validate(full=True)  # invalid offsets would be read beyond the payload
                rows += max([batch.num_rows, *(_longest(column) for column in batch.columns)])
                if rows > most:
                    raise _Misfit(f"it has {payload.size} bytes and claims more than {most} rows or items")
                batches.append(batch)
        rows = sum(batch.num_rows for batch in batches)
        columns = {}
        for name, kind in self._wanted:
            fitted = [self._column(batch, name, kind) for batch in batches]
            columns[name] = pa.concat_arrays([pa.nulls(0, kind), *fitted])
        return rows, columns

    def _column(self, batch: Any, name: str, kind: Any) -> Any:
        found = batch.schema.get_all_field_indices(name)
        if len(found) > 1:
            raise _Misfit(f"it has {len(found)} columns named {name}")
        return fit(batch.column(found[0]), kind, name) if found else pa.nulls(batch.num_rows, kind)


def _longest(array: Any) -> int:
    """The greatest length of the array and of all arrays nested in it."""
    kind = array.type
    if pa.types.is_struct(kind):
        children = [array.field(at) for at in range(kind.num_fields)]
    elif pa.types.is_map(kind):
        children = [array.keys, array.items]
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        children = [array.values]
    else:
        children = []
    return max([len(array), *(_longest(child) for child in children)])


def fit(array: Any, kind: Any, path: str) -> Any:
    """The array as the requested type, if nothing is lost. Raises _Misfit."""
    if pa.types.is_dictionary(array.type):
        _check_spread(array.dictionary, len(array), path)
        array = array.dictionary_decode()
    if pa.types.is_run_end_encoded(array.type):
        _check_spread(array.values, len(array), path)
        array = pa.compute.run_end_decode(array)
    if pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type):
        _check_spread(array, len(array), path)
    if array.type == kind:
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), kind)
    family = next((name for name, belongs in _FAMILIES if belongs(kind)), "")
    if not dict(_FAMILIES)[family](array.type):
        raise _Misfit(f"column {path} is {array.type}, which does not fit {kind}")
    if family == "struct":
        by_name = {array.type.field(at).name: part for at, part in enumerate(array.flatten())}
        fields = [kind.field(at) for at in range(kind.num_fields)]
        parts = [
            fit(by_name[inner.name], inner.type, f"{path}.{inner.name}")
            if inner.name in by_name
            else pa.nulls(len(array), inner.type)
            for inner in fields
        ]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=array.is_null())
    if family == "list":
        plain = array.cast(pa.list_(array.type.value_type))
        items = fit(plain.values, kind.value_type, f"{path}.element")
        return _rebuilt(plain, kind, items)
    if family == "map":
        keys = fit(array.keys, kind.key_type, f"{path}.key")
        items = fit(array.items, kind.item_type, f"{path}.value")
        return _rebuilt(
            array, kind, pa.StructArray.from_arrays([keys, items], fields=[kind.key_field, kind.item_field])
        )
    return _cast(array, kind, path)


def _check_spread(values: Any, rows: int, path: str) -> None:
    """Raises _Misfit if a few bytes would be expanded to very many."""
    kind = values.type
    if kind.num_fields or pa.types.is_dictionary(kind):
        raise _Misfit(f"column {path} has {kind} in a dictionary or in runs, which is not supported")
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    longest = (pa.compute.max(pa.compute.binary_length(values)).as_py() or 0) if is_text or is_bytes else 16
    if rows * longest > _MOST_BYTES:
        raise _Misfit(f"column {path} would take {rows * longest} bytes when it is expanded")


def _rebuilt(array: Any, kind: Any, items: Any) -> Any:
    """A list or map with other items."""
    validity, offsets = array.buffers()[:2]
    return pa.Array.from_buffers(
        kind, len(array), [validity, offsets], array.null_count, offset=array.offset, children=[items]
    )


def _cast(array: Any, kind: Any, path: str) -> Any:
    finer = pa.types.is_timestamp(kind) and array.type.unit == "ns"  # what lies below the µs is cut
    try:
        return array.cast(kind, safe=not finer)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise _Misfit(f"column {path} does not fit {kind}: {error}") from error
