"""Made the data folders of released versions in this folder, by running them: `python -m tests.golden.make_data_dir
VERSION FOLDER`.

`data-dir-v0.1.0` is of a broker alone, `cluster-v0.1.0/broker-N` of three; `expected.json` beside each holds what its
brokers answered. For another version add to what is stored, and folders; never edit what is there.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from natslog.client import NatslogClient
from natslog.client.appending import PartUploader
from natslog.client.publisher import Publisher, Rows
from natslog.nats_server import NatsServer
from natslog.wire.row_hashes import as_ids, position_starts, row_hashes
from tests.cluster_harness import Cluster, ClusterOptions
from tests.harness import BrokerProcess, eventually, publish_acked, with_nats
from tests.released import V0_1_0, use_release

SMALL = {"segment_bytes": "8KiB", "retention_interval": "300ms"}
_OF_NOW = ("lag", "stopped")  # of a cursor: how it is at this moment; 0.2.0 does not state the second
_CREATED_AT_START = ("lock", "pulse", "staged", "reserve")


def make(version: str, folder: Path) -> None:
    """Both sets, new."""
    with tempfile.TemporaryDirectory() as scratch:
        _make_single(version, Path(scratch), folder / f"data-dir-v{version}")
        _make_cluster(version, Path(scratch) / "three", folder / f"cluster-v{version}")


def _make_single(version: str, scratch: Path, target: Path) -> None:
    nats = NatsServer(0, scratch / "nats.log").start()
    settings = SMALL if version == V0_1_0 else SMALL | {"nats_leaf_url": nats.leaf_url}
    broker = use_release(BrokerProcess(scratch / "data", nats.url, **settings), version)
    try:
        with broker.start().client() as client:
            _fill(client, nats.url, replicas=1)
            if version != V0_1_0:
                fill_level_2(client, nats.url, replicas=1)
        expected = answers_of(broker.url)
        broker.terminate()
    finally:
        broker.kill()
        nats.stop()
    _keep(scratch / "data", target / "data")
    (target / "expected.json").write_text(json.dumps(expected))


def _make_cluster(version: str, scratch: Path, target: Path) -> None:
    cluster = Cluster(scratch, ClusterOptions(settings=SMALL, has_leafnodes=version != V0_1_0))
    try:
        for broker in cluster.brokers:
            use_release(broker, version)
        cluster.start()
        with cluster.client() as client:
            _fill(client, cluster.nats_url, replicas=3)
            if version != V0_1_0:
                fill_level_2(client, cluster.nats_url, replicas=3)
        cluster.wait_in_sync()
        expected = answers_of(cluster.broker(1).url)
        for name in expected["streams"]:
            cluster.wait_replicated(name)
        expected = answers_of(cluster.broker(1).url)
        for broker in cluster.brokers:
            broker.kill()  # an unclean end is part of it
    finally:
        cluster.close()
    for number in (1, 2, 3):
        _keep(scratch / f"broker-{number}", target / f"broker-{number}")
    (target / "expected.json").write_text(json.dumps(expected))


def _fill(client: NatslogClient, nats_url: str, replicas: int) -> None:
    client.create_stream("orders", "orders.>", compression="zstd", replicas=replicas)
    client.create_stream("events", "events", dedupe_window="1h", replicas=replicas)
    client.create_stream("gone", "gone", replicas=replicas)
    publish_acked(nats_url, "gone", [b"soon deleted"])
    for at in range(6):
        values = [b"%d of %d " % (row, at) + b"." * 150 for row in range(20)]
        publish_acked(nats_url, f"orders.{at}", values, {"Trace": f"t{at}"})
    uploader = PartUploader(client, "orders", "nightly", 7, subject="orders.bulk")
    uploader.add(pa.record_batch({"value": pa.array([b"run %d" % row for row in range(30)], pa.binary())}))
    client.commit_append("orders", "nightly", 7, uploader.finish())
    publish_acked(nats_url, "orders.last", [b"after the run"])
    for at in range(3):
        publish_acked(nats_url, "events", [b"event %d" % at], {"Nats-Msg-Id": f"event-{at}"})
    eventually(lambda: client.stream("orders")["segments"] >= 3, what="the log has sealed segments")
    client.set_cursor("reader", "orders", 100)
    client.set_cursor("reader", "orders", 17)
    client.set_cursor("audit", "events", 2)
    client.edit_stream("events", paused=True)
    client.delete_stream("gone")
    time.sleep(1.5)  # rolled segments are sealed, checkpoints are written


def fill_level_2(client: NatslogClient, nats_url: str, replicas: int) -> None:
    """What natslog stores from feature level 2 on: removal, companion logs, conditions, packed ids, envelopes, the
    JetStream API with a consumer and a bucket.
    """
    create = partial(client.create_stream, replicas=replicas)
    create("several", ["several.a", "several.b.>"], max_messages_per_subject=2)
    for at in range(4):
        for subject in ("several.a", "several.b.c"):
            publish_acked(nats_url, subject, [b"%d" % at])
    create("table", "table.>", compact=True)
    for at in range(4):
        publish_acked(nats_url, f"table.{at}", [b"version %d" % at], {"Natslog-Key": f"key-{at % 2}"})
    create("shortened", "shortened.>", allow_rollup=True)
    for at in range(8):
        publish_acked(nats_url, f"shortened.{at % 4}", [b"%d" % at])
    publish_acked(nats_url, "shortened.3", [b"rolled up"], {"Nats-Rollup": "sub"})
    client.delete_message("shortened", 2)
    client.erase("shortened", subject="shortened.1")
    create("sealed", "sealed", max_messages=5, discard="new")
    publish_acked(nats_url, "sealed", [b"%d" % at for at in range(7)])
    client.seal("sealed")
    subjects, values = pa.array(["orders.rows"] * 50), pa.array([b"row %d" % at for at in range(50)])
    ids = as_ids(row_hashes(subjects, values, None, None, position_starts("golden", 0, 50)))
    with Publisher(nats_url) as publisher:
        publisher.publish(Rows(subjects, values, ids=ids), "stored")
    with Publisher(nats_url, envelope=True) as publisher:
        publisher.publish(Rows(subjects, values), "stored")
    with_nats(nats_url, lambda connection: _use_jetstream(connection, replicas))
    time.sleep(1.5)  # positions of consumers are stored


async def _use_jetstream(connection: Any, replicas: int) -> None:
    js = connection.jetstream(timeout=20)
    await js.add_stream(name="WORK", subjects=["work.>"], num_replicas=replicas)
    for at in range(6):
        await js.publish(f"work.{at}", b"job %d" % at)
    worker = await js.pull_subscribe("work.>", durable="worker")
    for message in (await worker.fetch(3, timeout=10))[:2]:
        await message.ack_sync()
    bucket = await js.create_key_value(bucket="settings", history=2, replicas=replicas)
    for at in range(3):
        await bucket.put("limit", b"%d" % at)
    await bucket.delete("limit")
    await bucket.put("name", "grün".encode())


def answers_of(url: str) -> dict[str, Any]:
    """What a broker serves: messages of each stream, its settings, cursors."""
    streams = {one["name"]: one for one in _get(url, "/v1/streams") if not one["name"].startswith("__")}
    settings = ("id", "subject", "compression", "dedupe_window", "paused", "replicas", "min_isr")
    positions = ("log_start_offset", "high_watermark")
    return {
        "streams": {
            name: {field: one[field] for field in (*settings, *positions)} | {"messages": _messages(url, name)}
            for name, one in sorted(streams.items())
        },
        "cursors": [{name: one[name] for name in one if name not in _OF_NOW} for one in _get(url, "/v1/cursors")],
        "last_append": {name: _get(url, "/v1/streams/orders/appends/nightly")[name] for name in ("batch", "start")},
    }


def _messages(url: str, name: str) -> list[Any]:
    asked = urllib.request.Request(
        f"{url}/v1/streams/{name}/messages?start=earliest&end=latest", headers={"Accept": "application/x-ndjson"}
    )
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return [json.loads(line) for line in answer.read().decode().splitlines()]


def _get(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=30) as answer:
        return json.load(answer)


def _keep(folder: Path, target: Path) -> None:
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*_CREATED_AT_START))


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
