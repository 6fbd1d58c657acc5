"""A table of Delta Lake, by the library `deltalake` (no Spark, no Java).

The position is the version of the transaction `natslog:STREAM` (Delta's own means for this): Delta refuses a commit
with it if another process has committed one meanwhile. The watermark is the version of `natslog-watermark:STREAM`.
Stream and id are properties of the table; a commit also states all of them in its own metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import DeltaError

from natslog.errors import TableFailed
from natslog.tables.json_columns import plain_type
from natslog.tables.table import OFFSET, OPTIONS, STREAM, STREAM_ID, WATERMARK, Compacted, Position, Target, first_line


class DeltaLakeTable:
    """See `Table`."""

    has_dots = True

    def __init__(self, name: str, table: DeltaTable) -> None:
        self.name, self._table = name, table
        self._read_schema()

    @classmethod
    def open(cls, target: Target) -> DeltaLakeTable | None:
        with _failing(target.name):
            if not DeltaTable.is_deltatable(target.place, storage_options=_storage(target)):
                return None
            return cls(target.name, DeltaTable(target.place, storage_options=_storage(target)))

    @classmethod
    def create(cls, target: Target, columns: pa.Schema, partitions: tuple[str, ...]) -> DeltaLakeTable:
        """Where another process was faster, its table is opened."""
        with _failing(target.name):
            table = DeltaTable.create(
                target.place, columns, mode="ignore", partition_by=list(partitions), storage_options=_storage(target)
            )
            return cls(target.name, table)

    def _read_schema(self) -> None:
        found = pa.schema(self._table.schema().to_arrow())
        self.schema = pa.schema([pa.field(one.name, plain_type(one.type), one.nullable) for one in found])
        self.partitions = tuple(self._table.metadata().partition_columns)

    def reload(self) -> Position | None:
        with _failing(self.name):
            self._table.update_incremental()
            self._read_schema()
            stated = self._table.metadata().configuration
            stream = stated.get(STREAM)
            if stream is None:
                return None
            offset = self._table.transaction_version(_transaction(stream))
            if offset is None:  # killed between the table's properties and its first commit
                return None
            watermark_us = self._table.transaction_version(_watermark(stream))
            return Position(stream, stated.get(STREAM_ID, ""), offset, watermark_us, stated.get(OPTIONS, ""))

    def append(self, rows: pa.Table, position: Position) -> None:
        with _failing(self.name):
            self._state(position)
            write_deltalake(
                self._table, rows, mode="append", schema_mode="merge", commit_properties=_properties(position)
            )

    def merge(self, rows: pa.Table, removed: pa.Table, key: str, position: Position) -> None:
        with _failing(self.name):
            self._state(position)
            self._add_columns(rows.schema)
            gone = "natslog removed"
            source = pa.concat_tables(
                [
                    table.append_column(gone, pa.repeat(pa.scalar(flag), table.num_rows))
                    for table, flag in ((rows, False), (removed, True))
                ],
                promote_options="default",
            )
            columns = {_quoted(name): f"s.{_quoted(name)}" for name in rows.schema.names}
            flag = f"s.{_quoted(gone)}"
            merger = self._table.merge(
                source,
                f"t.{_quoted(key)} = s.{_quoted(key)}",
                source_alias="s",
                target_alias="t",
                commit_properties=_properties(position),
            )
            merger = merger.when_matched_delete(flag)
            merger = merger.when_matched_update(columns)
            merger.when_not_matched_insert(columns, predicate=f"NOT {flag}").execute()
            self._table.update_incremental()
            if self._table.transaction_version(_transaction(position.stream)) != position.offset:
                self.append(rows.slice(0, 0), position)  # a merge that changes nothing is no commit

    def _add_columns(self, wanted: pa.Schema) -> None:
        """A merge adds none."""
        new = [one for one in wanted if one.name not in self.schema.names]
        known = {one.name: one.type for one in self.schema}
        if new or any(known[one.name] != one.type for one in wanted):
            write_deltalake(self._table, wanted.empty_table(), mode="append", schema_mode="merge")

    def _state(self, position: Position) -> None:
        """States the stream in the table's properties, where they say otherwise."""
        stated = self._table.metadata().configuration
        wanted = {STREAM: position.stream, STREAM_ID: position.stream_id, OPTIONS: position.options}
        if any(stated.get(name) != value for name, value in wanted.items()):
            self._table.alter.set_table_properties(wanted, raise_if_not_exists=False)

    def compact(self, target_bytes: int) -> Compacted | None:
        with _failing(self.name):
            done = self._table.optimize.compact(target_size=target_bytes)
            removed, added = int(done["numFilesRemoved"]), int(done["numFilesAdded"])
            return Compacted(removed, added) if removed else None

    def offsets(self, start: int, end: int) -> set[int]:
        with _failing(self.name):
            rows = pa.table(self._table.scan(["_offset"], f'"_offset" >= {start} AND "_offset" < {end}'))
            return set(rows.column("_offset").to_pylist())

    def row_count(self) -> int:
        with _failing(self.name):
            return int(self._table.count())


def _storage(target: Target) -> dict[str, str] | None:
    return dict(target.storage or {}) or None


def _transaction(stream: str) -> str:
    return f"natslog:{stream}"


def _watermark(stream: str) -> str:
    return f"natslog-watermark:{stream}"


def _properties(position: Position) -> CommitProperties:
    stated = {STREAM: position.stream, STREAM_ID: position.stream_id, OFFSET: str(position.offset)}
    if position.watermark_us is not None:
        stated[WATERMARK] = str(position.watermark_us)
    transactions = [Transaction(_transaction(position.stream), position.offset)]
    if position.watermark_us is not None:
        transactions.append(Transaction(_watermark(position.stream), position.watermark_us))
    return CommitProperties(custom_metadata=stated, app_transactions=transactions)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@contextmanager
def _failing(name: str) -> Iterator[None]:
    try:
        yield
    except (DeltaError, OSError) as error:
        raise TableFailed(f"table {name}: {first_line(error)}", table=name) from error
    except Exception as error:
        if type(error) is not Exception:  # the library raises plain ones for what its engine refuses
            raise
        raise TableFailed(f"table {name}: {first_line(error)}", table=name) from error
