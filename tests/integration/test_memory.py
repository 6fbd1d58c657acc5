"""What a broker takes that has nothing to do: memory, as an operator sees it (RSS), and open files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from natslog.client.appending import PartUploader
from tests.forked import AS_USERS_START_IT
from tests.harness import BrokerProcess, all_values, eventually, publish_acked, running

OWN_BYTES = 85_000_000
WITH_LIBRARIES_BYTES = 175_000_000
"""How much of its libraries is mapped is the kernel's choice: 60 MB, and 90 MB where they were just installed, because
their pages are then in large pieces in the page cache.
"""


def is_small(broker: BrokerProcess) -> bool:
    taken = psutil.Process(broker.pid).memory_info()
    return bool(taken.rss - taken.shared < OWN_BYTES and taken.rss < WITH_LIBRARIES_BYTES)


@pytest.mark.long
def test_idle_broker_with_one_stream_is_small(own: Path) -> None:
    with running(own, environment=AS_USERS_START_IT, retention_interval="200ms") as (nats, broker):
        client = broker.client()
        client.create_stream("orders", "orders")
        eventually(lambda: is_small(broker), what="a broker that has just started is small")
        for _ in range(10):
            publish_acked(nats.url, "orders", [b"x"] * 100)
        assert len(all_values(client, "orders")) == 1000
        assert broker.metrics()
        taken = psutil.Process(broker.pid).memory_info()
        assert is_small(broker), f"{taken} once it has done a little of everything"
        mapped = Path(f"/proc/{broker.pid}/maps").read_text()
        assert "numba" not in mapped, "the compiler is not loaded"


@pytest.mark.long
def test_stream_keeps_one_file_open(own: Path) -> None:
    with running(own) as (nats, broker), broker.client() as client:
        process = psutil.Process(broker.pid)
        client.create_stream("s0", "s.0")
        recorded = 'natslog_messages_committed_total{stream="__activity"}'
        eventually(lambda: broker.metrics().get(recorded, 0) > 0, what="the stream of events is open")
        before = process.num_fds()
        for at in range(1, 50):
            client.create_stream(f"s{at}", f"s.{at}")
            publish_acked(nats.url, f"s.{at}", [b"x"])
            assert all_values(client, f"s{at}") == [b"x"]
        eventually(lambda: process.num_fds() == before + 49, what="what reading and publishing opened is closed")


READER_BYTES = 250 * 1024 * 1024

READER = """
import json, re, sys
from pyspark_natslog.source.options import SourceOptions
from pyspark_natslog.source.reader import BatchReader
from pyspark_natslog.source.schema import spark_schema

options = SourceOptions.parse({"servers": sys.argv[1], "stream": "orders", "minPartitions": "1"}, streaming=False)
reader = BatchReader(options, spark_schema(options.selected_columns()))
rows = sum(batch.num_rows for task in reader.partitions() for batch in reader.read(task))
peak_kib = re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read()).group(1)
print(json.dumps([rows, int(peak_kib) * 1024]))
"""


@pytest.mark.long
def test_task_that_reads_compressed_batches_takes_less_than_250_mib(own: Path) -> None:
    """600 MB of rows in less than 1 MB of stored batches: brokers and the client limit what is decoded at once."""
    rows = pa.RecordBatch.from_pydict({"value": [b"x" * 1000] * 20_000})
    with running(own, segment_bytes="256MiB") as (_, broker), broker.client() as client:
        client.create_stream("orders", "orders", compression="zstd")
        for number in range(1, 11):
            parts = PartUploader(client, "orders", "test", number, subject="orders")
            for _ in range(3):
                parts.add(rows)
            client.commit_append("orders", "test", number, parts.finish())
        client.roll("orders")
        eventually(lambda: client.stream("orders")["bytes"] < 20_000_000, what="it is sealed and compressed")
        done = subprocess.run([sys.executable, "-c", READER, broker.url], capture_output=True, text=True, check=True)
    count, taken = json.loads(done.stdout)
    assert count == 600_000
    assert taken < READER_BYTES, f"{taken / 2**20:.0f} MiB"
