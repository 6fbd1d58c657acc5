"""A source of this version reads from a broker of 0.2.0, which lacks calls of this version."""

from pathlib import Path

import pytest

from natslog.nats_server import NatsServer
from pyspark_natslog.source import older_brokers
from tests.harness import BrokerProcess, publish_acked
from tests.integration.test_many_streams import reader_of
from tests.released import use_release


@pytest.mark.long
@pytest.mark.timeout(900)
def test_broker_of_0_2_0_plans_by_positions_and_splits(tmp_path: Path) -> None:
    """Limits hold, and a batch that is repeated has the same tasks."""
    server = NatsServer(0, tmp_path / "nats.log").start()
    broker = use_release(BrokerProcess(tmp_path / "data", server.url), "0.2.0")
    try:
        client = broker.start().client()
        for name, count in (("a", 60), ("b", 20)):
            client.create_stream(name, name)
            publish_acked(server.url, name, [b"x" * 100] * count)
        total_bytes = sum(client.extent(name, 0, count)[1] or 0 for name, count in (("a", 60), ("b", 20)))
        for options, batches in (
            ({"maxOffsetsPerTrigger": "40"}, 2),
            ({"maxBytesPerTrigger": str(total_bytes // 3)}, 3),
            ({"minPartitions": "4"}, 1),
        ):
            reader = reader_of(broker.url, stream="a,b", **options)
            at, found, ends = reader.initialOffset(), list[tuple[str, int]](), []
            while (end := reader.latestOffset(at, reader.getDefaultReadLimit())) != at:
                tasks = reader.partitions(at, end)
                again = reader_of(broker.url, stream="a,b").partitions(at, end)
                assert [task.value for task in again] == [task.value for task in tasks]
                rows = [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]
                found += [(row["stream"], row["offset"]) for row in rows]
                at, ends = end, [*ends, len(tasks)]
            assert sorted(found) == [("a", offset) for offset in range(60)] + [("b", offset) for offset in range(20)]
            assert batches <= len(ends) <= batches + 2, options
            assert ("minPartitions" in options) == (max(ends) >= 4)
            assert reader.latestOffset(at, reader.getDefaultReadLimit()) == at, "the second one waits"
        assert client.servers in older_brokers._older_until_s
    finally:
        broker.kill()
        server.stop()
