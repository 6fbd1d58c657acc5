"""Sources with names (`spark.readStream.name(…)`): a query gets others, loses some and changes their order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from natslog.client import NatslogClient
from tests.harness import BrokerProcess, publish_acked

pytestmark = pytest.mark.timeout(180)
SETTINGS = {
    "spark.sql.streaming.queryEvolution.enableSourceEvolution": "true",
    "spark.sql.streaming.offsetLog.formatVersion": "2",
}


@pytest.fixture(autouse=True)
def evolution(spark: SparkSession) -> Iterator[None]:
    for name, value in SETTINGS.items():
        spark.conf.set(name, value)
    yield
    for name in SETTINGS:
        spark.conf.unset(name)


def test_sources_are_added_removed_and_reordered_on_one_checkpoint(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, client: NatslogClient, name: str, folder: Path
) -> None:
    streams = {source: f"{name}-{source}" for source in ("a", "b", "c")}
    for stream in streams.values():
        client.create_stream(stream, stream)
    found: list[tuple[str, int]] = []

    def run(*sources: str) -> None:
        for stream in streams.values():
            publish_acked(nats_url, stream, [b"1", b"2"])
        reads = [
            spark.readStream.format("natslog").name(source).options(servers=broker.url, stream=streams[source]).load()
            for source in sources
        ]

        def take(batch: DataFrame, _: int) -> None:
            found.extend((row.stream, row.offset) for row in batch.select("stream", "offset").collect())

        writer = reduce(DataFrame.union, reads).writeStream.foreachBatch(take)
        query = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
        assert query.awaitTermination(90)

    run("a", "b")
    run("c", "b")  # a is removed, c is added
    run("b", "a", "c")  # a comes back, and goes on where it was; another order
    expected = [(stream, offset) for stream in streams.values() for offset in range(6)]
    assert sorted(found) == expected, "each row once"
    newest = max((folder / "checkpoint/offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    assert [line[:2] for line in newest.read_text().splitlines()[2:]] == ["a:", "b:", "c:"], (
        "positions have these names"
    )
