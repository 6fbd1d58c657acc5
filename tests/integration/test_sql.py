"""`natslog sql` and `natslog.sql`: what a query reads, what it returns, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.client import Fetched, NatslogClient
from natslog.client.publisher import Publisher, Rows
from natslog.errors import BrokerUnavailable
from natslog.nats_server import NatsServer
from natslog.sql import Reads, connect, open_streams
from natslog.sql.stream_table import TABLE_SCHEMA
from tests.harness import BrokerProcess, eventually, natslog, on_terminal, publish_acked

ROWS, BATCH = 6_000, 2_000
ALL = None


class Watched(NatslogClient):
    """Records what is requested."""

    asked: list[tuple[int, int | None, tuple[str, ...] | None, str | None]]

    def fetch(self, name: str, start: int, end: int | None = None, **options: Any) -> Fetched:
        columns = options.get("columns")
        self.asked.append((start, end, columns and tuple(columns), options.get("subject")))
        return super().fetch(name, start, end, **options)


def rows(first: int) -> Rows:
    numbers = range(first, first + BATCH)
    return Rows(
        pa.array([f"shop.{('eu', 'us')[number % 2]}.{number % 3}" for number in numbers]),
        pa.array([b'{"id": %d, "city": "c%d"}' % (number, number % 5) for number in numbers]),
        keys=pa.array([None if number % 4 else b"k%d" % number for number in numbers], pa.binary()),
    )


@pytest.fixture(scope="module", autouse=True)
def streams(shared: tuple[NatsServer, BrokerProcess]) -> list[int]:
    """`shop`, in three commits, and others. Returns the times of the commits' first messages, in µs."""
    nats, broker = shared
    with broker.client() as client:
        client.create_stream("shop", ["shop.>", "unused"])
        client.create_stream("a-b.c", "abc")
        client.create_stream("empty", "empty")
        with Publisher(nats.url) as publisher:
            for first in range(0, ROWS, BATCH):
                publisher.publish(rows(first), "stored")
        publish_acked(nats.url, "abc", [b"\xff\x00", "grün".encode(), b'{"id": 17}'])
        times = pa.Table.from_batches(client.read("shop", columns=["timestamp"]))["timestamp"].cast(pa.int64())
        return [times[first].as_py() for first in range(0, ROWS, BATCH)]


@pytest.fixture
def watched(broker: BrokerProcess) -> Iterator[Watched]:
    with Watched(broker.url) as client:
        client.asked = []
        yield client


def test_a_table_has_the_columns_of_the_spark_source(watched: Watched) -> None:
    described = connect(watched).sql("DESCRIBE shop").fetchall()
    assert [row[0] for row in described] == ["stream", "offset", "timestamp", "subject", "key", "value", "headers"]
    types = {row[0]: row[1] for row in described}
    assert types.pop("headers").startswith("STRUCT(")
    assert types == {
        "stream": "VARCHAR",
        "offset": "BIGINT",
        "timestamp": "TIMESTAMP WITH TIME ZONE",
        "subject": "VARCHAR",
        "key": "BLOB",
        "value": "BLOB",
    }
    assert {"shop", "a-b.c", "empty", "__activity"} <= {
        row[0] for row in connect(watched).sql("SHOW TABLES").fetchall()
    }


@pytest.mark.parametrize(
    ("query", "answer", "asked"),
    [
        ("SELECT count(*) FROM shop", ROWS, [(0, ROWS, {"offset"}, ALL)]),
        ("SELECT max(subject) FROM shop", "shop.us.2", [(0, ROWS, {"subject"}, ALL)]),
        ('SELECT count(key) FROM shop WHERE "offset" BETWEEN 5 AND 12', 2, [(5, 13, {"offset", "key"}, ALL)]),
        ('SELECT count(*) FROM shop WHERE "offset" = 8 OR "offset" = 11', 2, [(8, 12, {"offset"}, ALL)]),
        ('SELECT count(*) FROM shop WHERE "offset" IN (40, 20, 30)', 3, [(20, 41, {"offset"}, ALL)]),
        ('SELECT count(*) FROM shop WHERE "offset" >= 9000', 0, []),
        ("SELECT count(*) FROM shop WHERE stream = 'other'", 0, []),
        ("SELECT count(*) FROM shop WHERE subject = 'shop.eu.0'", 1000, [(0, ROWS, {"subject"}, "shop.eu.0")]),
        ("SELECT count(*) FROM shop WHERE under(subject, 'shop.eu')", 3000, [(0, ROWS, {"subject"}, "shop.eu.>")]),
        (
            "SELECT count(*) FROM shop WHERE subject IN ('shop.us.1', 'shop.us.2')",
            2000,
            [(0, ROWS, {"subject"}, "shop.us.>")],
        ),
        ('SELECT count(*) FROM shop WHERE value = \'{"id": 7, "city": "c2"}\'::BLOB', 1, [(0, ROWS, {"value"}, ALL)]),
        (
            'SELECT count(*) FROM shop a JOIN shop b ON a."offset" = b."offset" + 100 '
            "WHERE a.\"offset\" < 150 AND b.subject = 'shop.eu.0'",
            9,
            None,
        ),
    ],
)
def test_columns_and_bounds_are_requested_from_the_broker(
    watched: Watched, query: str, answer: Any, asked: list[Any] | None
) -> None:
    assert connect(watched).sql(query).fetchall() == [(answer,)]
    if asked is not None:
        found = [
            (start, end, set(columns or MESSAGE_SCHEMA.names), subject)
            for start, end, columns, subject in watched.asked
        ]
        assert found == asked


def test_times_become_offsets(watched: Watched, streams: list[int]) -> None:
    second, third = (f"make_timestamptz({at}::BIGINT)" for at in streams[1:])
    query = f"SELECT count(*) FROM shop WHERE timestamp >= {second} AND timestamp < {third}"
    assert connect(watched).sql(query).fetchall() == [(BATCH,)]
    assert [one[:2] for one in watched.asked] == [(BATCH, 2 * BATCH)]
    query = "SELECT count(*) FROM shop WHERE timestamp < now() - INTERVAL 1 YEAR"
    assert connect(watched).sql(query).fetchall() == [(0,)]
    assert len(watched.asked) == 1, "nothing is requested"


def test_the_broker_sends_only_what_a_query_needs(watched: Watched, broker: BrokerProcess) -> None:
    def sent(query: str) -> float:
        before = broker.metrics()['natslog_sent_bytes_total{stream="shop"}']
        connect(watched).sql(query).fetchall()
        return broker.metrics()['natslog_sent_bytes_total{stream="shop"}'] - before

    connect(watched).sql("FROM shop").fetchall()
    everything = sent("FROM shop")
    assert everything > 40 * ROWS
    assert 8 * ROWS <= sent("SELECT count(*) FROM shop") < everything / 4
    assert sent("FROM shop WHERE subject = 'shop.eu.0'") < everything / 3
    one_batch = sent('FROM shop WHERE "offset" < 10')
    assert 0 < one_batch < everything / 2, "stored batches are sent whole"


def oracle(client: NatslogClient) -> duckdb.DuckDBPyConnection:
    """The same tables, as they are in memory."""
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    for name in ("shop", "a-b.c"):
        table = pa.Table.from_batches(client.read(name))
        table = table.append_column("stream", pa.repeat(name, table.num_rows))
        connection.register(name, table.select(TABLE_SCHEMA.names))
    return connection


def test_queries_of_all_kinds_return_what_they_return_over_tables_in_memory(client: NatslogClient) -> None:
    over_streams, over_tables = connect(client), oracle(client)
    for query in (
        'SELECT * FROM shop ORDER BY "offset" LIMIT 50',
        'SELECT * FROM shop WHERE "offset" >= 1990 LIMIT 20',
        'SELECT value, "offset", subject FROM shop WHERE key IS NOT NULL AND "offset" % 7 = 1 ORDER BY 2',
        "SELECT decode(value)->>'city' AS city, count(*) FROM shop GROUP BY 1 ORDER BY 1",
        "WITH eu AS (SELECT * FROM shop WHERE subject LIKE 'shop.eu.%') "
        'SELECT count(*) FROM eu WHERE "offset" < 500 UNION ALL SELECT count(*) FROM shop WHERE "offset" = 3',
        'SELECT a."offset", b.subject FROM shop a JOIN shop b USING ("offset") '
        'WHERE a."offset" < 40 AND b."offset" > 20 AND b.subject <> \'shop.us.1\' ORDER BY 1',
        'SELECT count(*) FROM shop WHERE "offset" IN (SELECT "offset" + 1 FROM "a-b.c")',
        'SELECT s."offset", x.value FROM shop s JOIN "a-b.c" x ON s."offset" = x."offset" ORDER BY 1',
        'SELECT (SELECT max("offset") FROM shop), (SELECT min("offset") FROM shop WHERE "offset" > 4)',
        "SELECT stream, count(*) FROM (FROM shop UNION ALL FROM \"a-b.c\") WHERE stream <> 'shop' GROUP BY 1",
        'CREATE OR REPLACE TEMP VIEW late AS FROM shop WHERE "offset" > 5990; '
        'SELECT count(*), min(subject) FROM late WHERE "offset" < 5995',
        "SELECT count(*) FROM shop WHERE NOT (subject >= 'shop.us') AND timestamp IS NOT NULL",
    ):
        assert over_streams.sql(query).fetchall() == over_tables.sql(query).fetchall(), query


NUMBERS = st.builds(
    '"offset" {} {}'.format, st.sampled_from(("<", "<=", ">", ">=", "=", "<>")), st.integers(-5, ROWS + 5)
)
NUMBER_SETS = st.lists(st.integers(0, ROWS), min_size=1, max_size=3).map(
    lambda found: f'"offset" IN ({str(found)[1:-1]})'
)
TEXTS = st.builds(
    "subject {} '{}'".format,
    st.sampled_from(("<", ">=", "=", "<>", "LIKE")),
    st.sampled_from(("shop.eu.1", "shop.eu.%", "shop.u", "x")),
)
OTHERS = st.sampled_from(
    (
        "under(subject, 'shop.eu')",
        "subject IN ('shop.eu.2', 'shop.us.2')",
        "key IS NULL",
        "value > '{\"id\": 5'::BLOB",
        "stream = 'shop'",
    )
)
CONDITIONS = st.recursive(
    NUMBERS | NUMBER_SETS | TEXTS | OTHERS,
    lambda inner: st.one_of(
        st.builds("({} AND {})".format, inner, inner),
        st.builds("({} OR {})".format, inner, inner),
        st.builds("(NOT {})".format, inner),
    ),
    max_leaves=5,
)


def test_any_condition_keeps_the_rows_that_it_keeps_in_memory(client: NatslogClient) -> None:
    over_streams, over_tables = connect(client), oracle(client)
    over_tables.execute("CREATE TEMP MACRO under(subject, prefix) AS starts_with(subject, prefix || '.')")

    @settings(deadline=None, max_examples=60, database=None)
    @given(CONDITIONS)
    def check(condition: str) -> None:
        query = f'SELECT count(*), sum("offset"), min(value) FROM shop WHERE {condition}'
        assert over_streams.sql(query).fetchall() == over_tables.sql(query).fetchall()

    check()


def test_a_connection_sees_the_streams_as_they_were(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    publish_acked(nats_url, name, [b"1", b"2"])
    before = connect(client)
    publish_acked(nats_url, name, [b"3"])
    count = f'SELECT count(*), max("offset") FROM {name}'
    assert (before.sql(count).fetchall(), connect(client).sql(count).fetchall()) == ([(2, 1)], [(3, 2)])
    assert connect(client).sql("SELECT count(*), max(value) FROM empty").fetchall() == [(0, None)]


def test_messages_that_are_removed_meanwhile_fail_the_query(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    publish_acked(nats_url, name, [b"1", b"2", b"3"])
    before = connect(client)
    client.purge(name, below=2)
    with pytest.raises(duckdb.Error, match="were removed.*repeat the query"):
        before.sql(f"SELECT count(*) FROM {name}").fetchall()
    assert before.sql(f'SELECT value FROM {name} WHERE "offset" = 2').fetchall() == [(b"3",)]
    client.delete_stream(name)
    client.create_stream(name, name)
    publish_acked(nats_url, name, [b"4", b"5", b"6"])
    with pytest.raises(duckdb.Error, match="deleted and created again"):
        before.sql(f'SELECT value FROM {name} WHERE "offset" = 2').fetchall()


@pytest.mark.long
def test_output_as_a_table_and_as_json(broker: BrokerProcess) -> None:
    shown = natslog("sql", 'SELECT "offset", value, key FROM "a-b.c"', url=broker.url).stdout
    lines = [line.split() for line in shown.splitlines()]
    assert lines == [
        ["offset", "value", "key"],
        ["0", "0xff00", "NULL"],
        ["1", "grün", "NULL"],
        ["2", '{"id":', "17}", "NULL"],
    ]
    as_cat = natslog("cat", "a-b.c", "--json", url=broker.url).stdout
    columns = '"offset", timestamp, subject, key, headers, value'
    assert natslog("sql", "--json", f'SELECT {columns} FROM "a-b.c"', url=broker.url).stdout == as_cat
    cut = natslog("sql", "--rows", "2", 'SELECT "offset" FROM shop', url=broker.url)
    assert cut.stdout.split() == ["offset", "0", "1"]
    assert "5,998 more rows are not shown" in cut.stderr


@pytest.mark.long
def test_output_as_arrow(broker: BrokerProcess) -> None:
    command = [sys.executable, "-m", "natslog", "--server", broker.url, "sql", "--arrow", "FROM shop"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    table = pa.ipc.open_stream(done.stdout).read_all()
    assert (table.num_rows, table.schema.names) == (ROWS, TABLE_SCHEMA.names)
    code, output = on_terminal("sql", "--arrow", "FROM shop", url=broker.url)
    assert code == 1
    assert "redirect it" in output


@pytest.mark.long
def test_the_query_comes_from_a_file_or_standard_input(broker: BrokerProcess, tmp_path: Path) -> None:
    (tmp_path / "cities.csv").write_text("city,name\nc1,Oslo\n")
    file = tmp_path / "report.sql"
    file.write_text(
        "SET threads = 1;\n"
        "SELECT name, count(*) AS n FROM shop JOIN 'cities.csv' ON city = (decode(value)->>'city') GROUP BY 1;"
    )
    done = natslog("sql", "--json", "-f", str(file), url=broker.url, cwd=tmp_path)
    assert json.loads(done.stdout) == {"name": "Oslo", "n": 1200}
    assert natslog("sql", url=broker.url, input="SELECT 1 AS one").stdout.split() == ["one", "1"]
    assert not natslog("sql", "FROM shop", "-f", str(file), url=broker.url, check=False).stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT count(*) FROM shpo", ["LINE 1:", "^", 'Did you mean "shop"?']),
        ("SELECT valeu FROM shop", ["LINE 1:", "^", "value"]),
        ("SELECT offset FROM shop", ["LINE 1:", "^", 'write "offset" with quotes']),
        ("FROM 'http://127.0.0.1:1/x.csv'", ["httpfs"]),
        ("SELECT 1; SELECT count(*) FROM sys", ["sys"]),
    ],
)
def test_errors_say_what_is_wrong_and_where(broker: BrokerProcess, query: str, said: list[str]) -> None:
    done = natslog("sql", query, url=broker.url, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    for text in said:
        assert text in done.stderr, done.stderr


@pytest.mark.long
def test_a_pressed_interrupt_key_ends_the_command_within_a_second(broker: BrokerProcess, tmp_path: Path) -> None:
    sent = 'natslog_sent_bytes_total{stream="shop"}'
    before = broker.metrics().get(sent, 0)
    query = "SELECT count(*) FROM shop, range(1000000000000)"
    command = [sys.executable, "-m", "natslog", "--server", broker.url, "sql", query]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as process:
        eventually(lambda: broker.metrics().get(sent, 0) > before, 60, "the query reads")
        assert list(tmp_path.glob("natslog-sql-*"))
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert time.monotonic() - started < 2.0, "it takes 0.7 s at most; the machine may be busy"
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert not list(tmp_path.glob("natslog-sql-*"))


class Silent(NatslogClient):
    """Its brokers do not answer requests for messages."""

    def fetch(self, *_: Any, **__: Any) -> Fetched:
        self.is_asked.set()
        self.ends.wait(60)
        raise BrokerUnavailable("the test is over")

    is_asked, ends = threading.Event(), threading.Event()


def test_a_scan_that_waits_for_a_broker_can_be_stopped(broker: BrokerProcess) -> None:
    errors: list[Exception] = []
    with Silent(broker.url) as client:
        reads = Reads(client)
        connection = open_streams(reads, memory_limit="100MB", temp_directory=None, uses_variables=False)

        def run() -> None:
            try:
                connection.sql("SELECT count(*) FROM shop").fetchall()
            except duckdb.Error as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            assert client.is_asked.wait(20)
            reads.stop()
            thread.join(5)
            assert not thread.is_alive()
        finally:
            client.ends.set()
    assert len(errors) == 1
