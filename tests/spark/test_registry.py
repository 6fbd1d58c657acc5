"""Avro payloads of several schemas, with a real schema registry."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import pytest
from pyspark.sql import SparkSession

from natslog.client import NatslogClient
from natslog.nats_server import free_port
from tests.harness import BrokerProcess, publish_acked
from tests.readme import Block
from tests.registry import Registry, running_registry
from tests.spark.page import Reader, rows_of, runs

pytestmark = [pytest.mark.spark, pytest.mark.long]

OLD = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}, {"name": "user", "type": "string"}]}
NEW = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "customer", "aliases": ["user"], "type": "string"},
        {"name": "price", "type": ["null", "double"], "default": None},
    ],
}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as registry:
        yield registry


def framed(schema_id: int, schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return b"\0" + schema_id.to_bytes(4, "big") + out.getvalue()


def published(registry: Registry, nats_url: str, subject: str) -> list[tuple[int, str, float | None]]:
    """Orders of two schemas; what they are by the newer one."""
    ids = [registry.register("orders-value", schema) for schema in (OLD, NEW)]
    payloads = [framed(ids[0], OLD, {"id": at, "user": f"u{at}"}) for at in range(3)]
    payloads += [framed(ids[1], NEW, {"id": at, "customer": f"c{at}", "price": at / 2}) for at in range(3, 5)]
    publish_acked(nats_url, subject, [payloads[at] for at in (0, 3, 1, 4, 2)])
    return [(0, "u0", None), (3, "c3", 1.5), (1, "u1", None), (4, "c4", 2.0), (2, "u2", None)]


@runs(block="Avro payloads of several schemas")
def test_orders_of_both_schemas_are_read_by_the_newest(reader: Reader, block: Block, registry: Registry) -> None:
    reader.create("orders", "orders.>")
    expected = published(registry, reader.nats_url, "orders.new")
    frame = reader.run(block, {"http://registry:8081": registry.url}).names["orders"]
    rows = sorted(rows_of(frame), key=lambda row: row["offset"])
    assert [(row["id"], row["customer"], row["price"]) for row in rows] == expected


def test_unknown_schemas_are_malformed_and_a_registry_that_is_away_is_an_error(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, registry: Registry
) -> None:
    client.create_stream(name, name)
    expected = published(registry, nats_url, name)
    publish_acked(nats_url, name, [framed(9999, OLD, {"id": 1, "user": "u"})])
    options = {"servers": broker.url, "stream": name, "payloadFormat": "avro", "payloadSchema": "subject:orders-value"}
    options |= {"schemaRegistry": registry.url, "columnNameOfCorruptRecord": "_corrupt"}
    rows = spark.read.format("natslog").options(**options).load().orderBy("offset").collect()
    assert [(row["id"], row["customer"], row["price"]) for row in rows[:-1]] == expected
    assert (rows[-1]["id"], rows[-1]["_corrupt"] is None) == (None, False)
    with pytest.raises(Exception, match=f"stream '{name}', offset 5: .*schema id 9999 is not known to {registry.url}"):
        spark.read.format("natslog").options(**options, mode="FAILFAST").load().collect()
    with pytest.raises(Exception, match="has no subject 'nosuch'"):
        spark.read.format("natslog").options(**options | {"payloadSchema": "subject:nosuch"}).load()
    away = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(Exception, match=f"the schema registry {away} cannot be read"):
        spark.read.format("natslog").options(**options | {"schemaRegistry": away}).load()


def test_schemas_of_a_folder(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, folder: Path
) -> None:
    client.create_stream(name, name)
    (folder / "7.avsc").write_text(json.dumps(OLD))
    (folder / "8.avsc").write_text(json.dumps(NEW))
    publish_acked(nats_url, name, [framed(7, OLD, {"id": 1, "user": "u"}), framed(8, NEW, {"id": 2, "customer": "c"})])
    options = {"servers": broker.url, "stream": name, "payloadFormat": "avro", "schemaRegistry": str(folder)}
    frame = spark.read.format("natslog").options(**options, payloadSchema=str(folder / "8.avsc")).load()
    assert [(row["id"], row["customer"]) for row in frame.orderBy("offset").collect()] == [(1, "u"), (2, "c")]
