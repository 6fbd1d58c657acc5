"""A table of Apache Iceberg, by the library `pyiceberg` (no Spark, no Java).

The catalog is the one that PyIceberg's configuration names, or an SQLite file in the warehouse's folder. The position
is in properties of the table, which change in the same commit as its rows. Commits of other processes since `reload`
make one fail (PyIceberg would repeat it on top of them): whoever commits then reads the position again.

Compaction. Each commit has files of its own, for a range of offsets. When there are 16 or more since the last
compaction they are read and written as one, in one commit; when there are 16 of these they are again, and so on for
three levels, unless they are large. So a row is written at most four times, and a small table is not read as a whole
each time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import CommitFailedException, NoSuchNamespaceError, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.expressions import And, BooleanExpression, GreaterThanOrEqual, In, LessThan
from pyiceberg.io.pyarrow import schema_to_pyarrow

from natslog.errors import ConfigError, TableFailed
from natslog.tables.json_columns import plain_type
from natslog.tables.table import OFFSET, OPTIONS, STREAM, STREAM_ID, WATERMARK, Compacted, Position, Target, first_line

_COMPACTED = "natslog.compacted-to"
_LEVELS, _FILES = 3, 16
_RETRIES = "commit.retry.num-retries"
_EXPIRY, _EXPIRY_MS = "history.expire.max-snapshot-age-ms", 5 * 86_400_000
_NEW = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
    "commit.manifest-merge.enabled": "true",
}
"""Properties of a new table, so that a commit costs the same however many there were."""


class IcebergTable:
    """See `Table`."""

    has_dots = False  # a path in Iceberg: `a.b` is also the member b of a

    def __init__(self, name: str, table: Any) -> None:
        self.name, self._table = name, table
        self._read_schema()

    @classmethod
    def open(cls, target: Target) -> IcebergTable | None:
        with _failing(target.name):
            try:
                return cls(target.name, _catalog(target).load_table(target.place))
            except (NoSuchTableError, NoSuchNamespaceError):
                return None

    @classmethod
    def create(cls, target: Target, columns: pa.Schema, partitions: tuple[str, ...]) -> IcebergTable:
        """Where another process was faster, its table is opened."""
        with _failing(target.name):
            return cls(target.name, _created(_catalog(target), target, columns, partitions))

    def _read_schema(self) -> None:
        found = schema_to_pyarrow(self._table.schema(), include_field_ids=False)
        self.schema = pa.schema([pa.field(one.name, plain_type(one.type), one.nullable) for one in found])
        spec = self._table.spec()
        self.partitions = tuple(self._table.schema().find_column_name(one.source_id) for one in spec.fields)

    def reload(self) -> Position | None:
        with _failing(self.name):
            self._refresh()
            self._read_schema()
            stated = self._table.properties
            if not {STREAM, OFFSET} <= stated.keys():
                return None
            watermark = stated.get(WATERMARK)
            return Position(
                stated[STREAM],
                stated.get(STREAM_ID, ""),
                int(stated[OFFSET]),
                None if watermark is None else int(watermark),
                stated.get(OPTIONS, ""),
            )

    def _refresh(self) -> None:
        self._table.refresh()
        self._table.metadata.properties[_RETRIES] = "0"  # of this process: it is not stored

    def append(self, rows: pa.Table, position: Position) -> None:
        with _failing(self.name), self._table.transaction() as change:
            self._prepare(change, rows.schema, position)
            change.append(rows, snapshot_properties=_stated(position))

    def merge(self, rows: pa.Table, removed: pa.Table, key: str, position: Position) -> None:
        with _failing(self.name), self._table.transaction() as change:
            self._prepare(change, rows.schema, position)
            keys = rows.column(key).to_pylist() + removed.column(key).to_pylist()
            if keys and self._table.current_snapshot() is not None:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Delete operation did not match any records")
                    change.delete(In(key, keys), snapshot_properties=_stated(position))
            change.append(rows, snapshot_properties=_stated(position))

    def _prepare(self, change: Any, wanted: pa.Schema, position: Position) -> None:
        known = {one.name: one.type for one in self.schema}
        if any(known.get(one.name) != one.type for one in wanted):
            with change.update_schema() as update:
                update.union_by_name(wanted)
        change.set_properties(_stated(position))

    def compact(self, target_bytes: int) -> Compacted | None:
        with _failing(self.name):
            end = int(self._table.properties.get(OFFSET, 0))
            marks = _marks(self._table.properties.get(_COMPACTED))
            done: Compacted | None = None
            for level in reversed(range(_LEVELS)):
                files = [task.file for task in self._table.scan(row_filter=_since(marks[level])).plan_files()]
                if len(files) < _FILES:
                    continue
                is_small = sum(one.file_size_in_bytes for one in files) < target_bytes
                start, marks = marks[level], [end] * (level + 1) + marks[level + 1 :]
                if not is_small:  # they have the size, or the next level's compaction would read too much at once
                    self._mark(marks)
                    continue
                done = self._rewrite(start, marks, len(files))
                break
            self._expire()
            return done

    def _rewrite(self, start: int, marks: list[int], before: int) -> Compacted:
        rows = self._table.scan(row_filter=_since(start)).to_arrow()
        with self._table.transaction() as change:
            change.overwrite(rows, overwrite_filter=_since(start))
            change.set_properties({_COMPACTED: ",".join(map(str, marks))})
        return Compacted(before, len(list(self._table.scan(row_filter=_since(start)).plan_files())))

    def _mark(self, marks: list[int]) -> None:
        with self._table.transaction() as change:
            change.set_properties({_COMPACTED: ",".join(map(str, marks))})
        self._refresh()

    def _expire(self) -> None:
        """Snapshots that are older than the table's own limit."""
        age_ms = int(self._table.properties.get(_EXPIRY, _EXPIRY_MS))
        limit = datetime.now(UTC) - timedelta(milliseconds=age_ms)
        if any(one.timestamp_ms < limit.timestamp() * 1000 for one in self._table.snapshots()):
            self._table.maintenance.expire_snapshots().older_than(limit).commit()

    def offsets(self, start: int, end: int) -> set[int]:
        with _failing(self.name):
            wanted = And(_since(start), LessThan("_offset", end))
            rows = self._table.scan(row_filter=wanted, selected_fields=("_offset",)).to_arrow()
            return set(rows.column("_offset").to_pylist())

    def row_count(self) -> int:
        with _failing(self.name):
            return int(self._table.scan().count())


def _catalog(target: Target) -> Catalog:
    if target.catalog is not None:
        try:
            return load_catalog(target.catalog)
        except ValueError as error:
            raise ConfigError(
                f"catalog {target.catalog!r} cannot be loaded: {first_line(error)}. Name one of PyIceberg's "
                "configuration (~/.pyiceberg.yaml), or leave out --catalog"
            ) from error
    folder = Path(target.warehouse).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return load_catalog("natslog", type="sql", uri=f"sqlite:///{folder}/catalog.db", warehouse=folder.as_uri())


def _created(catalog: Catalog, target: Target, columns: pa.Schema, partitions: tuple[str, ...]) -> Any:
    catalog.create_namespace_if_not_exists(target.place.rpartition(".")[0])
    try:
        with catalog.create_table_transaction(target.place, schema=columns, properties=_NEW) as creation:
            if partitions:
                with creation.update_spec() as spec:
                    for name in partitions:
                        spec.add_identity(name)
    except (TableAlreadyExistsError, CommitFailedException):  # another process was faster
        pass
    return catalog.load_table(target.place)


def _since(offset: int) -> BooleanExpression:
    return GreaterThanOrEqual("_offset", offset)


def _marks(text: str | None) -> list[int]:
    """The offset up to which files were compacted, for each level."""
    return [0] * _LEVELS if text is None else [int(one) for one in text.split(",")]


def _stated(position: Position) -> dict[str, str]:
    stated = {STREAM: position.stream, STREAM_ID: position.stream_id, OFFSET: str(position.offset)}
    stated |= {OPTIONS: position.options} if position.options else {}
    return stated if position.watermark_us is None else stated | {WATERMARK: str(position.watermark_us)}


@contextmanager
def _failing(name: str) -> Iterator[None]:
    try:
        yield
    except (TableFailed, ConfigError):
        raise
    except Exception as error:  # PyIceberg's errors have no common base, and its catalogs raise those of their drivers
        raise TableFailed(f"table {name}: {first_line(error)}", table=name) from error
