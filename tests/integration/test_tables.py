"""`natslog table run`: streams as tables of Delta Lake and Iceberg, read back by DuckDB and Polars."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog

from natslog.client import NatslogClient
from natslog.errors import (
    ConfigError,
    DataLoss,
    InvalidRequest,
    MalformedPayload,
    StreamNotFound,
    StreamRecreated,
    TableConflict,
    TableFailed,
)
from natslog.tables import copying
from natslog.tables.committing import DEAD_LETTERS
from natslog.tables.copying import Committed, copy_stream
from natslog.tables.delta import DeltaLakeTable
from natslog.tables.iceberg import IcebergTable
from natslog.tables.options import TableOptions, parse_column
from natslog.tables.read_ahead import Reader
from natslog.tables.rows import first_schema
from natslog.tables.table import Target, parse_target
from tests.harness import BrokerProcess, eventually, natslog, publish_acked

FORMATS = ["delta", "iceberg"]


@dataclass
class Lake:
    """One stream, and tables of one format in a folder."""

    client: NatslogClient
    nats_url: str
    stream: str
    format: str
    folder: Path

    @property
    def target(self) -> Target:
        text = f"delta:{self.folder}/orders" if self.format == "delta" else "iceberg:lake.orders"
        return parse_target(text, warehouse=str(self.folder / "warehouse"))

    def publish(self, *payloads: Any, headers: dict[str, str] | None = None, subject: str = "x") -> None:
        values = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in payloads]
        publish_acked(self.nats_url, f"{self.stream}.{subject}", values, headers)

    def copy(self, **options: Any) -> list[Committed]:
        """Up to the present end."""
        reports: list[Committed] = []
        chosen = {"payload_format": "json", "follow": False, "patience_s": 5.0} | options
        copy_stream(
            self.client, self.stream, self.target, TableOptions(**chosen), report=reports.append,
            stopping=threading.Event(),
        )  # fmt: skip
        return reports

    def table(self, suffix: str = "") -> pa.Table:
        """As an Arrow table, in the order of offsets."""
        target = self.target.beside(suffix)
        if self.format == "delta":
            found = pl.read_delta(target.place).to_arrow(compat_level=pl.CompatLevel.oldest())
        else:
            found = catalog(self.folder).load_table(target.place).scan().to_arrow()
        return found.sort_by("_offset")

    def column(self, name: str, suffix: str = "") -> list[Any]:
        return list(self.table(suffix).column(name).to_pylist())

    def files(self) -> int:
        if self.format == "delta":
            return len(DeltaTable(self.target.place).file_uris())
        return len(list(catalog(self.folder).load_table(self.target.place).scan().plan_files()))


def catalog(folder: Path) -> Any:
    warehouse = folder / "warehouse"
    return load_catalog("natslog", type="sql", uri=f"sqlite:///{warehouse}/catalog.db", warehouse=warehouse.as_uri())


@pytest.fixture(params=FORMATS)
def lake(request: pytest.FixtureRequest, client: NatslogClient, nats_url: str, name: str, tmp_path: Path) -> Lake:
    client.create_stream(name, f"{name}.>")
    return Lake(client, nats_url, name, request.param, tmp_path)


def test_rows_are_appended_once_and_columns_grow(lake: Lake) -> None:
    lake.publish({"id": 1, "city": "Oslo"}, {"id": 2, "city": "Rome"})
    (first,) = lake.copy()
    assert (first.rows, first.dead_letters, first.start, first.end, first.behind) == (2, 0, 0, 2, 0)
    assert lake.copy() == []
    lake.publish({"id": 3, "price": 1.5, "user": {"name": "x"}})
    lake.publish({"id": 4, "user": {"name": "y", "age": 5}})
    (second,) = lake.copy()
    assert (second.rows, second.start, second.end) == (2, 2, 4)
    table = lake.table()
    assert table.column("_offset").to_pylist() == [0, 1, 2, 3]
    assert table.column("id").to_pylist() == [1, 2, 3, 4]
    assert table.column("city").to_pylist() == ["Oslo", "Rome", None, None]
    assert table.column("price").to_pylist() == [None, None, 1.5, None]
    assert table.column("user").to_pylist()[2:] == [{"name": "x", "age": None}, {"name": "y", "age": 5}]
    assert set(table.column("_subject").to_pylist()) == {f"{lake.stream}.x"}


def test_duckdb_and_polars_read_the_table(lake: Lake) -> None:
    lake.publish(*({"id": at, "price": at / 2} for at in range(100)))
    lake.copy()
    orders = lake.table()
    assert duckdb.sql("SELECT count(*), sum(id), max(price) FROM orders").fetchall() == [(100, 4950, 49.5)]
    if lake.format == "delta":
        frame = pl.read_delta(lake.target.place)
    else:
        frame = pl.scan_iceberg(catalog(lake.folder).load_table(lake.target.place)).collect()
    assert frame["id"].sum() == 4950
    assert len(orders) == 100


@pytest.mark.long
def test_what_does_not_fit_is_a_dead_letter_with_its_reason(lake: Lake) -> None:
    lake.publish({"id": 1}, b"no json", {"id": "x"}, {"ID": 2}, {"id": 3})
    (done,) = lake.copy()
    assert (done.rows, done.dead_letters) == (2, 3)
    assert lake.column("_offset") == [0, 4]
    letters = lake.table(DEAD_LETTERS)
    assert letters.column("_offset").to_pylist() == [1, 2, 3]
    assert letters.column("value").to_pylist() == [b"no json", b'{"id": "x"}', b'{"ID": 2}']
    assert all(letters.column("reason").to_pylist())
    lake.publish(b"no json either")
    (done,) = lake.copy()
    assert (done.rows, done.dead_letters, done.end) == (0, 1, 6)
    assert lake.copy() == []


def test_a_misfit_ends_the_copy_where_it_is_not_a_dead_letter(lake: Lake) -> None:
    lake.publish({"id": 1}, {"id": "x"})
    with pytest.raises(MalformedPayload, match="offset 1: the message does not fit the table: column id is bigint"):
        lake.copy(on_misfit="fail")
    assert lake.column("_offset") == []


def test_columns_that_were_declared_have_their_types(lake: Lake) -> None:
    lake.publish({"at": "2026-01-02T03:04:05Z", "price": 12.3, "n": 1})
    lake.copy(columns=dict(map(parse_column, ["at=timestamp", "price=decimal(10,2)", "n=int"])))
    row = lake.table().to_pylist()[0]
    assert (row["at"].isoformat(), str(row["price"]), row["n"]) == ("2026-01-02T03:04:05+00:00", "12.30", 1)


def test_values_headers_and_keys_as_they_were_published(lake: Lake) -> None:
    headers = {"Natslog-Key": "k", "trace": "t"}
    lake.publish(b"\x00\xff", headers=headers)
    lake.copy(payload_format="binary", headers=True)
    row = lake.table().to_pylist()[0]
    assert (row["value"], row["_key"]) == (b"\x00\xff", b"k")
    assert {"key": "trace", "value": "t"} in row["_headers"]


def test_text_that_is_no_text_is_a_dead_letter(lake: Lake) -> None:
    lake.publish(b"plain", b"\xff")
    lake.copy(payload_format="string")
    assert lake.column("value") == ["plain"]
    assert lake.column("reason", DEAD_LETTERS) == ["it is not valid UTF-8"]


def test_partitions_by_day_of_the_event_time_and_late_rows(lake: Lake) -> None:
    options: dict[str, Any] = {
        "columns": dict([parse_column("at=timestamp")]), "event_time": "at", "late_s": 3600.0, "partition_by": ["_day"],
    }  # fmt: skip
    lake.publish({"at": "2026-01-01T23:00:00Z"}, {"at": "2026-01-02T01:00:00Z"}, {"id": 7})
    lake.copy(**options)
    lake.publish({"at": "2026-01-02T00:30:00Z"}, {"at": "2026-01-01T23:30:00Z"}, {"at": "2026-01-03T00:00:00Z"})
    (done,) = lake.copy(**options)
    assert (done.rows, done.dead_letters) == (2, 1)
    days = list(map(str, lake.column("_day")))
    assert days[:2] == ["2026-01-01", "2026-01-02"]
    assert days[3:] == ["2026-01-02", "2026-01-03"]
    assert lake.column("reason", DEAD_LETTERS) == ["its event time is older than the watermark allows"]
    with pytest.raises(ConfigError, match="partitioned by _day, which --partition-by cannot change"):
        lake.copy(partition_by=["id"], event_time="at")


@pytest.mark.long
def test_merge_keeps_one_row_for_each_key(lake: Lake) -> None:
    for key, row in (("a", {"n": 1}), ("b", {"n": 2}), ("a", {"n": 3})):
        lake.publish(row, headers={"Natslog-Key": key})
    lake.publish({"n": 9})
    (done,) = lake.copy(merge=True)
    assert (done.rows, done.dead_letters) == (2, 1)
    assert sorted(zip(lake.column("_key"), lake.column("n"), strict=True)) == [(b"a", 3), (b"b", 2)]
    lake.publish({"n": 4, "more": "x"}, headers={"Natslog-Key": "a"})
    lake.publish(b"", headers={"Natslog-Key": "b", "Natslog-Tombstone": "1"})
    lake.publish({"n": 5}, headers={"Natslog-Key": "c"})
    lake.publish(b"", headers={"Natslog-Key": "never", "Natslog-Tombstone": "1"})
    lake.copy(merge=True)
    assert sorted(zip(lake.column("_key"), lake.column("n"), lake.column("more"), strict=True)) == [
        (b"a", 4, "x"), (b"c", 5, None),
    ]  # fmt: skip


@pytest.mark.long
def test_small_files_are_compacted_by_the_same_process(lake: Lake) -> None:
    for at in range(20):
        lake.publish({"id": at})
        lake.copy(compact_every=0)
    assert lake.files() == 20
    lake.publish({"id": 20})
    (done,) = lake.copy(compact_every=1)
    assert (done.removed_files, done.added_files) == (21, 1)
    assert lake.files() == 1
    assert lake.column("id") == list(range(21))
    lake.publish({"id": 21})
    lake.copy()
    assert lake.column("id") == list(range(22))


@pytest.mark.long
def test_tombstone_with_a_value_and_merges_that_change_nothing(lake: Lake) -> None:
    gone = {"Natslog-Tombstone": "1"}
    lake.publish({"n": 1}, headers={"Natslog-Key": "a"})
    lake.copy(merge=True)
    lake.publish(b"deleted", headers={"Natslog-Key": "a"} | gone)
    lake.copy(merge=True)
    assert lake.column("_key") == []
    for values, headers in ((b"", {"Natslog-Key": "never"} | gone), (b"no json", {"Natslog-Key": "b"})):
        lake.publish(values, headers=headers)
        lake.copy(merge=True)
        assert lake.copy(merge=True) == []


def test_messages_that_no_format_can_store_do_not_stop_the_copy(lake: Lake) -> None:
    deep = b'{"a":' * 45 + b"1" + b"}" * 45
    lists = b'{"l":' + b"[" * 140 + b"1" + b"]" * 140 + b"}"
    lake.publish(deep, lists, b'{"l":[[{"x":1,"X":2}]]}', b'{"id":1,"_day":"monday"}', b'{"_headers":1}', b'{"id":2}')
    (done,) = lake.copy()
    assert (done.rows, done.dead_letters) == (1, 5)
    lake.publish(b'{"a":{"b":1}}', b'{"a.b":2}')
    lake.copy()
    assert lake.column("id")[0] == 2
    lake.publish({"id": 3})
    lake.copy(headers=False)
    assert lake.column("id")[-1] == 3


def test_a_run_of_which_no_message_fits_ends_with_an_error(lake: Lake) -> None:
    """Its messages are dead letters, and a run after it continues behind them."""
    lake.publish(b'{"id":"a"}', b'{"id":"b"}')
    with pytest.raises(MalformedPayload, match="none of 2 messages fits .*_dead_letters.*--column") as refused:
        lake.copy(payload_format="json", columns={"id": pa.int64()})
    assert 'at offset 0, does not because: column id is bigint, and "a" is not' in str(refused.value)
    assert lake.column("_offset", DEAD_LETTERS) == [0, 1]
    lake.publish(b'{"id":3}')
    (done,) = lake.copy(payload_format="json")
    assert (done.rows, done.dead_letters, done.start) == (1, 0, 2)
    lake.publish(b'{"id":"c"}')
    (done,) = lake.copy(payload_format="json")
    assert (done.rows, done.dead_letters) == (0, 1), "a table with rows takes single misfits"


def test_partitions_are_checked_and_long_values_are_dead_letters(lake: Lake) -> None:
    with pytest.raises(
        ConfigError, match="--partition-by city: a new table can be partitioned by _day, and by declared"
    ):
        lake.copy(partition_by=["city"])
    with pytest.raises(ConfigError, match="--partition-by price"):
        lake.copy(partition_by=["price"], columns={"price": pa.float64()})
    lake.publish({"city": "Oslo"}, {"city": "x" * 300}, {"id": 1})
    (done,) = lake.copy(partition_by=["city"], columns={"city": pa.string()})
    assert (done.rows, done.dead_letters) == (2, 1)


@pytest.mark.long
def test_watermark_is_kept_whatever_other_programs_commit(lake: Lake) -> None:
    options: dict[str, Any] = {"columns": dict([parse_column("at=timestamp")]), "event_time": "at", "late_s": 3600.0}
    lake.publish({"at": "2026-01-02T00:00:00Z"})
    lake.copy(**options)
    for number in range(25):
        if lake.format == "delta":
            DeltaTable(lake.target.place).alter.set_table_properties({"x.y": str(number)}, raise_if_not_exists=False)
        else:
            with catalog(lake.folder).load_table(lake.target.place).transaction() as change:
                change.set_properties({"x.y": str(number)})
    lake.publish({"at": "2026-01-01T00:00:00Z"})
    (done,) = lake.copy(**options)
    assert (done.rows, done.dead_letters) == (0, 1)


@pytest.mark.parametrize("lake", ["delta"], indirect=True)
def test_required_columns_and_times_without_a_zone_are_refused(lake: Lake) -> None:
    for name, kind, nullable in (("req", pa.int64(), False), ("at", pa.timestamp("us"), True)):
        lake.folder = lake.folder / name
        DeltaTable.create(lake.target.place, pa.schema([*first_schema(TableOptions()), pa.field(name, kind, nullable)]))
        expected = "its columns req are NOT NULL" if name == "req" else "has no column at of type timestamp"
        with pytest.raises(ConfigError, match=expected):
            lake.copy(payload_format="binary" if name == "req" else "json", event_time=None if name == "req" else "at")


# ---- the position ----


def test_position_moves_over_what_a_filter_leaves_out(lake: Lake) -> None:
    lake.publish({"id": 1})
    lake.copy(subject="*.x")
    for _ in range(5):
        lake.publish({"id": 2}, subject="y")
    (done,) = lake.copy(subject="*.x")
    assert (done.rows, done.start, done.end) == (0, 1, 6)
    lake.client.purge(lake.stream, 4)
    assert lake.copy(subject="*.x") == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"subject": "*.us"}, "--subject"),
        ({"merge": True}, "--merge"),
        ({"event_time": "at"}, "--event-time"),
    ],
)
def test_options_that_choose_the_rows_stay_as_they_were(lake: Lake, options: dict[str, Any], named: str) -> None:
    """Otherwise messages would be passed over for good, or rows of two meanings stand side by side."""
    lake.publish({"id": 1, "at": "2026-01-01T00:00:00Z"}, headers={"Natslog-Key": "a"}, subject="us")
    columns = {"columns": dict([parse_column("at=timestamp")])}
    lake.copy(**columns)
    lake.publish({"id": 2}, headers={"Natslog-Key": "a"}, subject="eu")
    with pytest.raises(ConfigError, match=rf"was written without {named}"):
        lake.copy(**columns, **options)
    lake.copy(**columns)
    assert lake.column("id") == [1, 2]


def test_a_filtered_table_needs_its_filter(lake: Lake) -> None:
    lake.publish({"id": 1}, subject="us")
    lake.copy(subject=f"{lake.stream}.us")
    lake.publish({"id": 2}, subject="eu")
    lake.publish({"id": 3}, subject="us")
    with pytest.raises(ConfigError, match=rf"was written with --subject {lake.stream}\.us"):
        lake.copy()
    with pytest.raises(ConfigError, match="was written with --subject"):
        lake.copy(subject=f"{lake.stream}.eu")
    lake.copy(subject=f"{lake.stream}.us")
    assert lake.column("id") == [1, 3]


def test_dead_letters_of_a_deleted_stream_are_not_those_of_the_new_one(lake: Lake) -> None:
    lake.publish({"id": 1}, b"old misfit")
    lake.copy()
    if lake.format == "delta":
        shutil.rmtree(lake.target.place)
    else:
        catalog(lake.folder).drop_table(lake.target.place)
    lake.client.delete_stream(lake.stream)
    lake.client.create_stream(lake.stream, f"{lake.stream}.>")
    lake.publish(b"new misfit")
    with pytest.raises(ConfigError, match="has dead letters of stream .* move or delete that table"):
        lake.copy()


@pytest.mark.long
def test_a_table_that_was_deleted_is_made_again_in_commits_of_the_usual_size(lake: Lake) -> None:
    for at in range(6):
        lake.publish({"id": at}, b"misfit")
        lake.copy()
    if lake.format == "delta":
        shutil.rmtree(lake.target.place)
    else:
        catalog(lake.folder).drop_table(lake.target.place)
    reports = lake.copy(commit_bytes=1)
    assert sum(one.rows for one in reports) == 6
    assert sum(one.dead_letters for one in reports) == 0
    assert lake.column("_offset", DEAD_LETTERS) == list(range(1, 12, 2))


@pytest.mark.long
def test_stream_that_was_restored_from_an_export_continues(lake: Lake, broker: BrokerProcess) -> None:
    lake.publish({"id": 1}, b"misfit")
    lake.copy()
    natslog("export", lake.stream, str(lake.folder / "export"), url=broker.url)
    lake.client.delete_stream(lake.stream)
    natslog("import", str(lake.folder / "export"), url=broker.url)
    natslog("stream", "resume", lake.stream, url=broker.url)
    lake.publish({"id": 2}, b"misfit")
    (done,) = lake.copy()
    assert (done.rows, done.dead_letters, done.start) == (1, 1, 2)
    assert lake.column("id") == [1, 2]
    assert lake.column("_offset", DEAD_LETTERS) == [1, 3]


@pytest.mark.long
def test_what_was_read_is_committed_when_the_stream_fails(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.publish({"id": 1})
    original = Reader.next

    def fails(self: Any, *arguments: Any) -> Any:
        found = original(self, *arguments)
        if found is None:
            raise StreamNotFound("it was deleted")
        return found

    monkeypatch.setattr(Reader, "next", fails)
    with pytest.raises(StreamNotFound):
        lake.copy()
    assert lake.column("id") == [1]


def test_what_was_read_is_committed_when_the_stream_is_created_again(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.publish({"id": 1})
    lake.copy(start="latest")
    lake.publish({"id": 2}, {"id": 3})
    check, calls = copying._Copying._check, []

    def second_is_of_another(self: Any, batch: Any) -> None:
        calls.append(batch)
        check(self, replace(batch, stream_id="another") if len(calls) == 2 else batch)

    original = Reader.next

    def twice(self: Any, *arguments: Any) -> Any:
        return original(self, *arguments) or calls[0]

    monkeypatch.setattr(copying._Copying, "_check", second_is_of_another)
    monkeypatch.setattr(Reader, "next", twice)
    with pytest.raises(StreamRecreated, match="created again or restored while it was copied"):
        lake.copy()
    assert lake.column("id") == [2, 3]


def test_start_that_the_stream_does_not_have_creates_no_table(lake: Lake) -> None:
    lake.publish({"id": 1})
    with pytest.raises(InvalidRequest, match="has offsets 0 to 0, and 1000 is not one of them"):
        lake.copy(start="1000")
    lake.copy()
    assert lake.column("id") == [1]


def test_columns_that_another_program_adds_meanwhile_are_known(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.publish({"id": 1})
    check = copying._Copying._check

    def adds(self: Any, batch: Any) -> None:
        check(self, batch)
        schema = pa.schema([("note", pa.string())])
        if lake.format == "delta":
            write_deltalake(lake.target.place, schema.empty_table(), mode="append", schema_mode="merge")
        else:
            with catalog(lake.folder).load_table(lake.target.place).update_schema() as update:
                update.union_by_name(schema)

    monkeypatch.setattr(copying._Copying, "_check", adds)
    lake.publish({"note": 5})
    (done,) = lake.copy()
    assert (done.rows, done.dead_letters) == (1, 1)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_command_that_waits_for_a_broker(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "natslog", "--server", "http://127.0.0.1:1", "table", "run", "x", "t"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=tmp_path)
    time.sleep(3)
    process.send_signal(number)
    try:
        assert process.wait(10) != 0
    finally:
        process.kill()


@pytest.mark.long
def test_a_killed_process_adds_nothing_twice_and_skips_nothing(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each of the two commits, and with an outcome that it could not read."""
    lake.publish({"id": 1}, b"misfit")
    kind: Any = DeltaLakeTable if lake.format == "delta" else IcebergTable
    append, calls, stop_at = kind.append, [], 0

    def stops(self: Any, rows: Any, position: Any) -> None:
        append(self, rows, position)
        calls.append(self.name)
        if len(calls) == stop_at:
            raise KeyboardInterrupt

    for at in (2, 1, 1):  # the first commit of a new table states where it begins
        stop_at = at
        monkeypatch.setattr(kind, "append", stops)
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            lake.copy()
        lake.publish(b"misfit too", {"id": 2})
    monkeypatch.setattr(kind, "append", append)
    lake.copy()
    lake.copy()
    assert lake.column("_offset") == [0, 3, 5, 7]
    assert lake.column("_offset", DEAD_LETTERS) == [1, 2, 4, 6]


@pytest.mark.long
def test_a_commit_with_an_unknown_outcome_is_not_repeated(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.copy()
    lake.publish({"id": 1})
    kind: Any = DeltaLakeTable if lake.format == "delta" else IcebergTable
    append, calls = kind.append, []

    def lost(self: Any, rows: Any, position: Any) -> None:
        append(self, rows, position)
        calls.append(position.offset)
        raise TableFailed("the answer was lost")

    monkeypatch.setattr(kind, "append", lost)
    lake.copy()
    assert calls == [1]
    assert lake.column("_offset") == [0]


@pytest.mark.long
def test_two_processes_on_one_table(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one commits between the other's look at the position and its commit."""
    lake.copy()
    lake.publish({"id": 1})
    kind: Any = DeltaLakeTable if lake.format == "delta" else IcebergTable
    append, calls = kind.append, []

    def late(self: Any, rows: Any, position: Any) -> None:
        monkeypatch.setattr(kind, "append", append)
        lake.copy()
        lake.publish({"id": 2})
        lake.copy()
        calls.append(self.name)
        append(self, rows, position)

    monkeypatch.setattr(kind, "append", late)
    with pytest.raises(TableConflict, match="was at offset 0 of the stream, and is now at 2: another process writes"):
        lake.copy()
    assert len(calls) == 1
    assert lake.column("_offset") == [0, 1]


@pytest.mark.long
def test_table_of_another_stream_and_streams_created_again_are_refused(lake: Lake) -> None:
    lake.publish({"id": 1})
    lake.copy()
    lake.client.create_stream(f"{lake.stream}-b", f"{lake.stream}b.>")
    other = Lake(lake.client, lake.nats_url, f"{lake.stream}-b", lake.format, lake.folder)
    with pytest.raises(ConfigError, match=f"has the messages of stream '{lake.stream}' up to offset 1, and not those"):
        other.copy()
    lake.client.delete_stream(lake.stream)
    lake.client.create_stream(lake.stream, f"{lake.stream}.>")
    lake.publish({"id": 2})
    with pytest.raises(StreamRecreated, match="was deleted and created again .* use another table"):
        lake.copy()
    assert lake.column("id") == [1]


def test_messages_that_retention_removed_are_an_error_or_skipped(lake: Lake) -> None:
    lake.publish({"id": 1})
    lake.copy()
    lake.publish({"id": 2}, {"id": 3})
    lake.client.purge(lake.stream, 2)
    with pytest.raises(DataLoss, match="offsets 1 to 1 were removed before they were copied"):
        lake.copy()
    lake.copy(on_data_loss="skip")
    assert lake.column("id") == [1, 3]


def test_an_existing_table_keeps_its_columns(lake: Lake) -> None:
    """Of another program, with a column of its own."""
    lake.copy()
    schema = pa.schema([("note", pa.string())])
    if lake.format == "delta":
        write_deltalake(lake.target.place, schema.empty_table(), mode="append", schema_mode="merge")
    else:
        with catalog(lake.folder).load_table(lake.target.place).update_schema() as update:
            update.union_by_name(schema)
    lake.publish({"id": 1, "note": "n"}, {"id": 2, "note": 5})
    (done,) = lake.copy()
    assert (done.rows, done.dead_letters) == (1, 1)
    assert lake.column("note") == ["n"]
    with pytest.raises(ConfigError, match="its column note is string, not int64"):
        lake.copy(columns={"note": pa.int64()})
    with pytest.raises(ConfigError, match="it has no column value"):
        lake.copy(payload_format="binary")


@pytest.mark.long
def test_rows_without_a_position_are_not_continued(lake: Lake) -> None:
    """As of a copy of a table, or of a Spark job."""
    lake.publish({"id": 1})
    lake.copy()
    if lake.format == "delta":
        lake.folder = lake.folder / "copy"
        write_deltalake(lake.target.place, DeltaTable(str(lake.folder.parent / "orders")).scan())
    else:
        with catalog(lake.folder).load_table(lake.target.place).transaction() as change:
            change.remove_properties("natslog.offset")
    with pytest.raises(ConfigError, match="has rows of a stream and states no position"):
        lake.copy()


def test_start_and_subject(lake: Lake) -> None:
    lake.publish({"id": 1})
    lake.publish({"id": 2}, subject="y")
    lake.publish({"id": 3})
    lake.copy(start="1", subject="*.x")
    assert lake.column("id") == [3]


def test_a_new_table_keeps_where_it_began(lake: Lake) -> None:
    lake.publish({"id": 1})
    assert lake.copy(start="latest") == []
    lake.publish({"id": 2})
    lake.copy(start="latest")
    assert lake.column("id") == [2]


# ---- the command ----


def arguments(lake: Lake) -> list[str]:
    target = ["--warehouse", str(lake.folder / "warehouse")]
    return ["table", "run", lake.stream, lake.target.name, *target, "--payload-format", "json"]


def cursors_of(lake: Lake) -> dict[str, int]:
    return {cursor["consumer"]: cursor["offset"] for cursor in lake.client.cursors(stream=lake.stream)}


@pytest.mark.long
def test_command_prints_commits_and_ends_cleanly_on_sigterm(lake: Lake, broker: BrokerProcess) -> None:
    lake.publish({"id": 1})
    done = natslog(*arguments(lake), "--once", "--json", url=broker.url)
    shown = json.loads(done.stdout)
    assert (shown["rows"], shown["end"]) == (1, 1)
    command = [sys.executable, "-m", "natslog", "--server", broker.url, *arguments(lake), "--cursor", "lake"]
    process = subprocess.Popen([*command, "--commit-every", "1s"], stdout=subprocess.PIPE, text=True)
    try:
        lake.publish({"id": 2})
        eventually(lambda: lake.column("id") == [1, 2], 60, "the commit by time", every_s=0.5)
        eventually(lambda: cursors_of(lake) == {"lake": 2}, 30, "the cursor follows the commit")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert f"{lake.stream} to {lake.target.name}: offsets 1 to 1, 1 rows, " in output


@pytest.mark.long
def test_rows_of_a_process_that_is_killed_again_and_again(lake: Lake, broker: BrokerProcess) -> None:
    """While messages arrive, some of which do not fit."""
    total = 3_000
    command = [sys.executable, "-m", "natslog", "--server", broker.url, *arguments(lake), "--commit-every", "50ms"]
    command += ["--compact-every", "5"]
    publishing = threading.Thread(target=lambda: publish_slowly(lake, total))
    publishing.start()
    for at in range(8):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(2.0 + 0.17 * at)
        process.kill()
        process.wait()
    publishing.join()
    natslog(*arguments(lake), "--once", url=broker.url)
    misfits = [at for at in range(total) if at % 50 == 7]
    assert lake.column("_offset") == [at for at in range(total) if at % 50 != 7]
    assert lake.column("_offset", DEAD_LETTERS) == misfits


def publish_slowly(lake: Lake, total: int) -> None:
    for start in range(0, total, 25):
        lake.publish(*({"id": at} if at % 50 != 7 else b"?" for at in range(start, start + 25)))
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["delta:"], "empty"),
        (["parquet:lake/x"], "there is no format 'parquet'"),
        (["iceberg:orders"], "has no namespace"),
        (["t", "--column", "a"], "is not NAME=TYPE"),
        (["t", "--column", "a=blob"], "there is no type 'blob'"),
        (["t", "--column", "a=decimal(30,2)"], "1 to 15 digits"),
        (["t", "--payload-format", "avro"], "must be binary or string or json"),
        (["t", "--column", "a=int"], "requires --payload-format json"),
        (["t", "--late", "1h"], "requires --event-time"),
        (["t", "--merge", "--partition-by", "_day"], "exclude each other"),
        (["t", "--commit-bytes", "0"], "is not a size"),
        (["t", "--storage-option", "x"], "is not NAME=VALUE"),
        (["/proc/no/where"], "table delta:/proc/no/where: "),
    ],
)
def test_wrong_options_are_named(
    given: list[str], message: str, filled: str, broker: BrokerProcess, tmp_path: Path
) -> None:
    done = natslog("table", "run", filled, *given, "--once", url=broker.url, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr


def test_a_stream_that_does_not_exist(broker: BrokerProcess, tmp_path: Path) -> None:
    done = natslog("table", "run", "missing", "t", "--once", url=broker.url, check=False, cwd=tmp_path)
    assert (done.returncode, "missing" in done.stderr) == (1, True)
    assert not (tmp_path / "t").exists()
