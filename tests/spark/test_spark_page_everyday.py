"""The blocks of docs/SPARK.md about new checkpoints, SQL, schemas and output modes, run as they stand in the page."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.readme import Block
from tests.spark.page import Reader, rows_of, runs, wait_for_rows
from tests.unit.connector.payload.test_protobuf import FILES, Order

pytestmark = pytest.mark.spark


@pytest.mark.long
@runs(shown="Continue in a new checkpoint", block="Continue in a new checkpoint (2)")
def test_query_continues_in_a_new_checkpoint(reader: Reader, shown: Block, block: Block) -> None:
    (command,) = shown.commands
    (printed,) = command.output
    for stream, count in (("orders", 38), ("returns", 12)):
        reader.create(stream, f"{stream}.>")
        reader.publish(f"{stream}.new", [b"old"] * count)
    source = reader.spark.readStream.format("natslog").option("servers", reader.broker.url)
    old = source.option("stream", "orders,returns").load().writeStream.trigger(availableNow=True)
    old = old.option("checkpointLocation", str(reader.folder / "checkpoints" / "orders"))
    old.start(format="noop").awaitTermination()
    position = reader.shell(command.text.replace("/checkpoints", f"{reader.folder}/checkpoints")).strip()
    assert position == '{"orders":38,"returns":12}', "in the form that the page shows"
    reader.publish("orders.new", [b"new"] * 5)
    (query,) = reader.run(block, {printed: position}).values
    wait_for_rows(query, 5)
    rows = reader.spark.read.parquet(str(reader.folder / "lake" / "orders-2")).collect()
    assert sorted((row["stream"], row["offset"]) for row in rows) == [("orders", at) for at in range(38, 43)]


@pytest.fixture
def catalog(spark: SparkSession) -> Iterator[SparkSession]:
    yield spark
    spark.sql("DROP TABLE IF EXISTS orders")
    spark.sql("DROP VIEW IF EXISTS latest_orders")


@pytest.mark.long
@runs(block="SQL")
def test_statements(catalog: SparkSession, reader: Reader, block: Block) -> None:
    reader.create("orders", "orders.>")
    reader.publish("orders.new", [b"%d" % number for number in range(6)])
    statements = [one.strip() for one in reader.code(block).split(";\n")]
    created, by_subject, from_four, *_ = [catalog.sql(statement).collect() for statement in statements if statement]
    assert not created
    assert by_subject == [("orders.new", 6)]
    assert sorted(row["offset"] for row in from_four) == [4, 5]
    last = [
        (row["subject"], json.loads(row["value"])) for row in catalog.table("orders").orderBy("offset").collect()[6:]
    ]
    assert last == [("orders.new", {"id": 1}), ("orders.eu", {"id": 2})]
    view = catalog.table("latest_orders")
    assert (view.columns, view.count()) == (["offset", "value"], 8)
    assert len(rows_of(catalog.readStream.table("orders"))) == 8
    assert "id" in catalog.table("orders").selectExpr("max(cast(value AS string))").first()[0]  # type: ignore[index]


@pytest.mark.long
@runs(block="Variant")
def test_members_of_variants(reader: Reader, block: Block) -> None:
    reader.create("events", "events")
    reader.publish("events", [b'{"user":{"id":7},"page":"home"}', b'{"page":5}', b"no json"])
    clicks = reader.run(block).names["clicks"]
    assert rows_of(clicks) == [(7, "home"), (None, "5"), (None, None)]


@pytest.mark.long
@runs(block="Protobuf")
def test_protobuf_messages_become_columns(reader: Reader, block: Block) -> None:
    (reader.folder / "shop.desc").write_bytes(FILES)
    reader.create("orders", "orders.>")
    reader.publish("orders.new", [Order(f_int32=number, state=1).SerializeToString() for number in range(3)])
    frame = reader.run(block, {"/schemas/shop.desc": str(reader.folder / "shop.desc")}).names["orders"]
    rows = sorted(rows_of(frame), key=lambda row: row["offset"])
    assert [(row["f_int32"], row["state"]) for row in rows] == [(0, "PAID"), (1, "PAID"), (2, "PAID")]


@pytest.mark.long
@runs(block="Output modes, and writes within `foreachBatch`")
def test_update_mode_within_foreach_batch_stores_each_batch_once(reader: Reader, block: Block) -> None:
    reader.create("counts", "counts")
    reader.create("orders", "orders.>")
    reader.publish("orders.new", [b"de", b"fr", b"de"])
    orders = reader.spark.readStream.format("natslog").option("servers", reader.broker.url).option("stream", "orders")
    frame = orders.load().selectExpr("cast(value AS string) AS country")
    ran = reader.run(block, orders=frame)
    wait_for_rows(ran.values[0], 3)
    ran.values[0].processAllAvailable()

    def counts() -> dict[str, str]:
        stored = reader.spark.read.format("natslog").options(servers=reader.broker.url, stream="counts").load()
        rows = stored.selectExpr("offset", "cast(key AS string) AS key", "cast(value AS string) AS value").collect()
        assert len(rows) == 2, "each count once"
        return {row["key"]: row["value"] for row in rows}

    assert counts() == {"de": "2", "fr": "1"}
    again = reader.spark.createDataFrame([("de", 2), ("fr", 1)], "country string, count long").orderBy("country")
    publish = ran.names["publish"]
    publish(again, 7)
    before = reader.client.stream("counts")["high_watermark"]
    publish(again, 7)
    assert reader.client.stream("counts")["high_watermark"] == before, "the repetition of a write"


@pytest.mark.long
@runs(block="Schemas that change")
def test_schema_is_inferred_and_members_beside_it_are_counted(reader: Reader, block: Block) -> None:
    reader.create("sensors", "sensors.>")
    reader.publish("sensors.a", [b'{"id": 1}', b'{"id": 2}'])
    frame = reader.run(block).names["readings"]
    reader.publish("sensors.a", [b'{"id": 3, "unit": "C"}'])
    query = frame.writeStream.format("noop").trigger(availableNow=True).start()
    query.awaitTermination()
    assert [one.observedMetrics["unnamed"]["rows"] for one in query.recentProgress if one.numInputRows] == [1]
    assert frame.columns[-2:] == ["id", "_rescued"]
