"""What a table is to the process that writes it, and how its name is written: `delta:lake/orders`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from natslog.errors import ConfigError

_FORMAT = re.compile(r"[A-Za-z]{2,}")
STREAM, STREAM_ID, OFFSET, WATERMARK = "natslog.stream", "natslog.stream-id", "natslog.offset", "natslog.watermark-us"
OPTIONS = "natslog.options"
"""Names of what a commit, or the table's properties, state about the stream."""


@dataclass(frozen=True, slots=True)
class Position:
    """How much of a stream a table contains: every message below `offset`.

    Attributes:
        watermark_us: the newest event time in the table, in µs since 1970; None where event times are not used.
        options: those that decide which rows the table has (`TableOptions.stated`); empty where it states none.
    """

    stream: str
    stream_id: str
    offset: int
    watermark_us: int | None = None
    options: str = ""


@dataclass(frozen=True, slots=True)
class Compacted:
    """Files of data before and after a compaction."""

    removed: int
    added: int


class Table(Protocol):
    """A table that exists. Its methods raise TableFailed where the storage, or the library for it, refuses.

    Attributes:
        name: as the user gave it.
        schema: all columns, in Arrow's types, as of the last `reload`.
        partitions: names of the partition columns. has_dots: whether names of columns may have dots.
    """

    has_dots: bool
    name: str
    schema: pa.Schema
    partitions: tuple[str, ...]

    def reload(self) -> Position | None:
        """Reads the newest state; what the table states about a stream, or None."""
        ...

    def append(self, rows: pa.Table, position: Position) -> None:
        """Adds rows, columns that the table lacks, and the position, in one commit.

        Raises:
            TableFailed: nothing was added, or the outcome is unknown (`reload` tells).
        """
        ...

    def merge(self, rows: pa.Table, removed: pa.Table, key: str, position: Position) -> None:
        """As `append`; a row replaces the one with the same key, and rows with a key of `removed` are deleted. No key
        occurs twice.
        """
        ...

    def compact(self, target_bytes: int) -> Compacted | None:
        """Replaces small files by larger ones with the same rows, in one commit; None: there was nothing to do."""
        ...

    def offsets(self, start: int, end: int) -> set[int]:
        """The values of `_offset` in `[start, end)`."""
        ...

    def row_count(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Target:
    """Where a table is.

    Attributes:
        format: `delta` or `iceberg`. place: folder or URL of a Delta table; `NAMESPACE.NAME` of an Iceberg table.
        catalog: of Iceberg tables: its name in PyIceberg's configuration; None: an SQLite file in `warehouse`.
        storage: options of the object store, for Delta (`AWS_REGION`, …).
    """

    format: str
    place: str
    catalog: str | None = None
    warehouse: str = "warehouse"
    storage: Mapping[str, str] | None = None

    @property
    def name(self) -> str:
        return f"{self.format}:{self.place}"

    def beside(self, suffix: str) -> Target:
        """The table whose name has this suffix."""
        place = self.place.rstrip("/") + suffix
        return Target(self.format, place, self.catalog, self.warehouse, self.storage)

    def open(self, columns: pa.Schema, partitions: tuple[str, ...]) -> Table:
        """Opens the table, or creates it with these columns.

        Raises:
            ConfigError: the extra `table` is not installed, or the catalog is not configured. TableFailed.
        """
        found: Table = self.existing() or self._kind().create(self, columns, partitions)
        return found

    def existing(self) -> Table | None:
        """The table, or None. Raises as `open`."""
        found: Table | None = self._kind().open(self)
        return found

    def _kind(self) -> Any:
        try:
            if self.format == "delta":
                from natslog.tables.delta import DeltaLakeTable

                return DeltaLakeTable
            from natslog.tables.iceberg import IcebergTable

            return IcebergTable
        except ImportError as error:
            raise ConfigError(f"tables need natslog[table]: pip install 'natslog[table]' ({error})") from error


def parse_target(
    text: str, *, catalog: str | None = None, warehouse: str = "warehouse", storage: Mapping[str, str] | None = None
) -> Target:
    """`delta:lake/orders`, `delta:s3://lake/orders`, `iceberg:lake.orders`; without a word in front a Delta table.

    Raises:
        ConfigError: it is empty, or the name of an Iceberg table has no namespace.
    """
    format, colon, place = text.partition(":")
    if not colon or format.lower() not in ("delta", "iceberg") or place.startswith("//"):
        if _FORMAT.fullmatch(format) and colon and not place.startswith("//"):
            raise ConfigError(f"{text!r}: there is no format {format!r}: write delta:FOLDER or iceberg:NAMESPACE.NAME")
        format, place = "delta", text
    format = format.lower()
    if format == "iceberg" and not all(part.strip() for part in (place.split(".") if "." in place else [""])):
        raise ConfigError(f"the Iceberg table {place!r} has no namespace: write iceberg:NAMESPACE.NAME")
    if not place.strip():
        raise ConfigError("the name of the table is empty: write delta:FOLDER, a URL, or iceberg:NAMESPACE.NAME")
    return Target(format, place, catalog, warehouse, storage)


def first_line(error: BaseException) -> str:
    """The reason in an error of a library."""
    text: Any = str(error).strip()
    return text.partition("\n")[0] or type(error).__name__
