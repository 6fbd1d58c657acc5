"""Made the data folders of natslog 0.1.0 in this folder, by running it: `python -m tests.golden.make_data_dir FOLDER`.

`data-dir-v0.1.0` is of a broker alone, `cluster-v0.1.0/broker-N` of three; `expected.json` beside each holds what its
brokers answered. For another version add a function and folders; never edit what is there.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa

from natslog.client import NatslogClient
from natslog.client.appending import PartUploader
from natslog.nats_server import NatsServer
from tests.cluster_harness import Cluster, ClusterOptions
from tests.harness import BrokerProcess, eventually, publish_acked
from tests.released import V0_1_0, use_release

SMALL = {"segment_bytes": "8KiB", "retention_interval": "300ms"}


def make(folder: Path) -> None:
    """Both sets, new."""
    with tempfile.TemporaryDirectory() as scratch:
        _make_single(Path(scratch), folder / "data-dir-v0.1.0")
        _make_cluster(Path(scratch) / "three", folder / "cluster-v0.1.0")


def _make_single(scratch: Path, target: Path) -> None:
    nats = NatsServer(0, scratch / "nats.log").start()
    broker = use_release(BrokerProcess(scratch / "data", nats.url, **SMALL), V0_1_0)
    try:
        with broker.start().client() as client:
            _fill(client, nats.url, replicas=1)
        expected = answers_of(broker.url)
        broker.terminate()
    finally:
        broker.kill()
        nats.stop()
    _keep(scratch / "data", target / "data")
    (target / "expected.json").write_text(json.dumps(expected))


def _make_cluster(scratch: Path, target: Path) -> None:
    cluster = Cluster(scratch, ClusterOptions(settings=SMALL))
    try:
        for broker in cluster.brokers:
            use_release(broker, V0_1_0)
        cluster.start()
        with cluster.client() as client:
            _fill(client, cluster.nats_url, replicas=3)
        cluster.wait_in_sync()
        for name in ("orders", "events"):
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


def answers_of(url: str) -> dict[str, Any]:
    """What a broker serves: messages of each stream, its settings, cursors."""
    streams = {one["name"]: one for one in _get(url, "/v1/streams")}
    settings = ("id", "subject", "compression", "dedupe_window", "paused", "replicas", "min_isr")
    positions = ("log_start_offset", "high_watermark")
    return {
        "streams": {
            name: {field: one[field] for field in (*settings, *positions)} | {"messages": _messages(url, name)}
            for name, one in sorted(streams.items())
        },
        "cursors": [{name: one[name] for name in one if name != "lag"} for one in _get(url, "/v1/cursors")],
        "last_append": {name: _get(url, "/v1/streams/orders/appends/nightly")[name] for name in ("batch", "start")},
    }


def _messages(url: str, name: str) -> list[Any]:
    asked = urllib.request.Request(
        f"{url}/v1/streams/{name}/messages?start=earliest&end=latest", headers={"Accept": "application/x-ndjson"}
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return [json.loads(line) for line in answer.read().decode().splitlines()]


def _get(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=10) as answer:
        return json.load(answer)


def _keep(folder: Path, target: Path) -> None:
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("lock", "pulse", "staged"))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
