"""Spark with credentials in files: identities limited to subjects, and tokens that change while a query runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from natslog.client import ClientOptions, NatslogClient
from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, eventually, publish_acked, running
from tests.integration.test_access import admin_token

EU, US = [b"eu%d" % number for number in range(300)], [b"us%d" % number for number in range(300)]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NatsServer, BrokerProcess, NatslogClient]]:
    """With streams `orders` of both regions, and `secret`."""
    with running(tmp_path_factory.mktemp("secured"), environment={"NATSLOG_SECURITY": "true"}) as (server, broker):
        admin = NatslogClient(broker.url, ClientOptions(token=admin_token(broker)))
        admin.create_stream("orders", "orders.>")
        admin.create_stream("secret", "secret")
        for at in range(0, 300, 100):
            publish_acked(server.url, "orders.eu.x", EU[at : at + 100])
            publish_acked(server.url, "orders.us.x", US[at : at + 100])
        yield server, broker, admin


def token_in(path: Path, admin: NatslogClient, name: str, *rules: tuple[str, str, str]) -> Path:
    """A file with a token of this identity, which may do this."""
    path.touch(mode=0o600)
    path.write_text(admin.create_token(name)["token"])
    for action, stream, subject in rules:
        admin.add_rule(name, action, stream, subject)
    return path


def options(broker: BrokerProcess, token: Path, **more: Any) -> dict[str, Any]:
    return {"servers": broker.url, "tokenFile": str(token), "fetchRetries": "0"} | more


def values(frame: DataFrame) -> list[bytes]:
    return sorted(bytes(row.value) for row in frame.select("value").collect())


@pytest.mark.long
def test_a_limited_identity_reads_its_rows_in_batches_and_streams(
    spark: SparkSession, secured: tuple[NatsServer, BrokerProcess, NatslogClient], tmp_path: Path
) -> None:
    _, broker, admin = secured
    token = token_in(tmp_path / "token", admin, "spark-eu", ("read", "orders", "orders.eu.>"))
    given = options(broker, token, stream="orders", minPartitions=4)
    assert values(spark.read.format("natslog").options(**given).load()) == sorted(EU)
    filtered = spark.read.format("natslog").options(**given, subjectFilter="orders.us.>").load()
    assert values(filtered) == []
    few = spark.read.format("natslog").options(**given, columns="offset,subject").load()
    assert {row.subject for row in few.collect()} == {"orders.eu.x"}
    for selection in ({"stream": "orders"}, {"streamPattern": "*"}):
        more = options(broker, token, maxOffsetsPerTrigger=70, **selection)
        rows: list[bytes] = []
        query = (
            spark.readStream.format("natslog")
            .options(**more)
            .load()
            .writeStream.foreachBatch(lambda batch, _, rows=rows: rows.extend(values(batch)))
            .option("checkpointLocation", str(tmp_path / f"checkpoint-{len(selection)}-{'stream' in selection}"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        assert sorted(rows) == sorted(EU)


@pytest.mark.long
def test_a_stream_that_may_not_be_read_is_an_error_that_says_so(
    spark: SparkSession, secured: tuple[NatsServer, BrokerProcess, NatslogClient], tmp_path: Path
) -> None:
    _, broker, admin = secured
    token = token_in(tmp_path / "token", admin, "spark-orders", ("read", "orders", ">"))
    with pytest.raises(Exception, match="spark-orders may not read stream 'secret'"):
        spark.read.format("natslog").options(**options(broker, token, stream="secret")).load().collect()
    token.write_text("nlt_000000000000_" + "A" * 43)
    with pytest.raises(Exception, match="unknown or was revoked"):
        spark.read.format("natslog").options(**options(broker, token, stream="orders")).load().collect()


@pytest.mark.long
def test_a_query_continues_when_its_token_is_replaced_and_ends_when_it_is_revoked(
    spark: SparkSession, secured: tuple[NatsServer, BrokerProcess, NatslogClient], tmp_path: Path
) -> None:
    server, broker, admin = secured
    admin.create_stream("live", "live")
    token = token_in(tmp_path / "token", admin, "spark-live", ("read", "live", ">"))
    first = token.read_text().split("_")[1]
    rows: list[bytes] = []
    query = (
        spark.readStream.format("natslog")
        .options(**options(broker, token, stream="live"))
        .load()
        .writeStream.foreachBatch(lambda batch, _: rows.extend(values(batch)))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        publish_acked(server.url, "live", [b"before"])
        eventually(lambda: rows == [b"before"], 60, every_s=0.2)
        another = admin.create_token("spark-live")
        token.write_text(another["token"])
        admin.revoke_token(first)
        publish_acked(server.url, "live", [b"after"])
        eventually(lambda: rows == [b"before", b"after"], 60, "the query uses the new token", every_s=0.2)
        admin.revoke_token(another["id"])
        eventually(lambda: not query.isActive, 60, "the query ends with an error", every_s=0.2)
        assert "revoked" in str(query.exception())
        assert another["token"] not in str(query.exception())
    finally:
        query.stop()
