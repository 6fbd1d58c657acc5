"""The options of a process that copies a stream into a table, checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import pyarrow as pa

from natslog.errors import ConfigError

PayloadFormat = Literal["binary", "string", "json"]
NewColumns = Literal["add", "reject"]
OnMisfit = Literal["dead-letter", "fail"]

_TYPES = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
_DECIMAL = re.compile(r"decimal\((\d{1,2}),(\d{1,2})\)")
_MOST_LATE_S = 36_500 * 86_400
_MOST_DIGITS = 15  # a number in JSON is read as a double


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """Raises ConfigError: one of them is wrong, or two exclude each other.

    Attributes:
        payload_format: `json`: members of objects are columns. columns: types of members, by name; others are inferred.
        new_columns: `reject`: a message with a member that is no column does not fit. on_misfit: what is done with
            messages that do not fit. most_columns: of a table that grows.
        partition_by: names of columns of a new table; `_day` among them is computed. headers: store them, too.
        event_time: a timestamp column: `_day` is its day; with `late_s`, a message that is so much older than the
            newest one before it does not fit.
        merge: the table has one row for each key, the newest.
        start: where a table without a position begins: earliest, latest, an offset or a time.
        commit_bytes, commit_every_s: a commit is made when so much (as stored in the stream) was read, or so much time
            has passed since its first message was read.
        compact_every: commits; 0: never. file_bytes: that a compaction aims at.
        follow: False: end at the present end of the stream. subject: only messages whose subject this wildcard covers.
        cursor: follows the table, to show its lag. patience_s: for which brokers and the table may be away.
    """

    payload_format: PayloadFormat = "binary"
    columns: Mapping[str, Any] = field(default_factory=dict)
    new_columns: NewColumns = "add"
    on_misfit: OnMisfit = "dead-letter"
    most_columns: int = 1_000
    partition_by: Sequence[str] = ()
    headers: bool = False
    event_time: str | None = None
    late_s: float | None = None
    merge: bool = False
    start: str = "earliest"
    commit_bytes: int = 64 * 1024 * 1024
    commit_every_s: float = 60.0
    compact_every: int = 64
    file_bytes: int = 128 * 1024 * 1024
    follow: bool = True
    subject: str | None = None
    cursor: str | None = None
    on_data_loss: Literal["fail", "skip"] = "fail"
    patience_s: float = 120.0

    @property
    def stated(self) -> str:
        """The options that decide which rows a table has, as JSON: another run must have the same."""
        found = {"--subject": self.subject, "--merge": self.merge or None, "--event-time": self.event_time}
        return json.dumps({name: value for name, value in found.items() if value is not None}, sort_keys=True)

    def __post_init__(self) -> None:
        _check_choice("--payload-format", self.payload_format, PayloadFormat)
        _check_choice("--new-columns", self.new_columns, NewColumns)
        _check_choice("--on-misfit", self.on_misfit, OnMisfit)
        _check_choice("--on-data-loss", self.on_data_loss, Literal["fail", "skip"])
        if self.columns and self.payload_format != "json":
            raise ConfigError("--column requires --payload-format json: other payloads are one column, `value`")
        own = [name for name in self.columns if name.startswith("_")]
        if own:
            raise ConfigError(f"--column {own[0]}: names that begin with _ are for columns of natslog")
        if self.late_s is not None and self.late_s > _MOST_LATE_S:
            raise ConfigError("--late must be at most 36500d")
        if self.late_s is not None and self.event_time is None:
            raise ConfigError("--late requires --event-time: lateness is measured in event time")
        if self.merge and self.partition_by:
            raise ConfigError(
                "--merge and --partition-by exclude each other: the new row of a key may have another day"
            )


def parse_column(text: str) -> tuple[str, Any]:
    """`price=double`: name and Arrow type.

    Raises:
        ConfigError: there is no such type.
    """
    name, equals, kind = (part.strip() for part in text.partition("="))
    known = kind.lower().replace(" ", "")
    if not name or not equals:
        raise ConfigError(f"--column {text!r} is not NAME=TYPE, as in price=double")
    if known in _TYPES:
        return name, _TYPES[known]
    if (found := _DECIMAL.fullmatch(known)) is not None:
        precision, scale = int(found[1]), int(found[2])
        if not 1 <= precision <= _MOST_DIGITS or scale > precision:
            raise ConfigError(
                f"--column {text}: decimals have 1 to {_MOST_DIGITS} digits here, because numbers in JSON are read as "
                "double; with more digits use string, or the Spark source"
            )
        return name, pa.decimal128(precision, scale)
    raise ConfigError(f"--column {text}: there is no type {kind!r}; there are {', '.join(_TYPES)}, decimal(P,S)")


def type_name(kind: Any) -> str:
    """As `parse_column` takes it; Arrow's name of other types."""
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return next((name for name, known in _TYPES.items() if known == kind), str(kind))


def _check_choice(name: str, value: str, choices: Any) -> None:
    allowed = cast(tuple[str, ...], get_args(choices))
    if value not in allowed:
        raise ConfigError(f"{name} {value!r} must be {' or '.join(allowed)}")
