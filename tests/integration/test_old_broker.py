"""A source of this version reads from a broker as it was released first, which lacks the calls for many streams."""

from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from natslog.client import SplitRange
from natslog.client import streams as streams_module
from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, publish_acked
from tests.integration.test_many_streams import reader_of
from tests.released import use_release


@pytest.mark.long
@pytest.mark.timeout(900)  # a release may have to be installed first
def test_broker_of_0_1_0_is_asked_for_one_stream_after_the_other(tmp_path: Path) -> None:
    server = NatsServer(0, tmp_path / "nats.log").start()
    broker = use_release(BrokerProcess(tmp_path / "data", server.url), "0.1.0")
    try:
        client = broker.start().client()
        for name in ("a", "b"):
            client.create_stream(name, name)
            publish_acked(server.url, name, [b"x"] * 5)
        assert [(one["name"], one["high_watermark"]) for one in client.positions(names=["a", "b"])] == [
            ("a", 5),
            ("b", 5),
        ]
        assert client.servers in streams_module._without_positions_until_s
        assert client.splits_of_several([SplitRange("a", client.stream("a")["id"], 0, 5)]) == {}
        reader = reader_of(broker.url, stream="a,b")
        start = reader.initialOffset()
        end = reader.latestOffset(start, ReadAllAvailable())
        rows = sum(batch.num_rows for task in reader.partitions(start, end) for batch in reader.read(task))
        assert rows == 10
        assert [reader.latestOffset(end, ReadAllAvailable()) for _ in range(3)] == [end] * 3
    finally:
        broker.kill()
        server.stop()
