"""A follower that restarts while producers append as fast as they can is in sync again, and they never stop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from natslog.client.appending import PartUploader
from tests.cluster_harness import Cluster, running_cluster
from tests.harness import eventually

STREAM = "orders"
ROWS = 60_000
BEHIND_ROWS = 10 * ROWS
IN_SYNC_WITHIN_S = 150.0
"""On two cores it took 47 s; without a pause of the producers, 240 s were not enough."""

pytestmark = [pytest.mark.timeout(400), pytest.mark.extended]


class Producer(threading.Thread):
    """Appends one batch of 60 MB after another."""

    def __init__(self, cluster: Cluster, name: str, stopping: threading.Event) -> None:
        super().__init__(name=name)
        self.cluster, self.stopping, self.batches = cluster, stopping, 0
        self.error: Exception | None = None

    def run(self) -> None:
        rows = pa.record_batch({"value": pa.array([b"%08d" % at + b"x" * 1000 for at in range(ROWS)], pa.binary())})
        try:
            with self.cluster.client() as client:
                while not self.stopping.is_set():
                    uploader = PartUploader(client, STREAM, self.name, self.batches)
                    uploader.add(rows)
                    client.commit_append(STREAM, self.name, self.batches, uploader.finish())
                    self.batches += 1
        except Exception as error:
            self.error = error


@contextmanager
def producing(cluster: Cluster) -> Iterator[list[Producer]]:
    stopping = threading.Event()
    producers = [Producer(cluster, name, stopping) for name in ("one", "other")]
    for producer in producers:
        producer.start()
    try:
        yield producers
    finally:
        stopping.set()
        for producer in producers:
            producer.join()
    assert [producer.error for producer in producers] == [None, None]


def test_follower_that_restarts_under_full_load_of_direct_appends_is_in_sync_again(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "own") as cluster:
        with cluster.client() as client:
            client.create_stream(STREAM, STREAM, replicas=3, min_isr=2, max_bytes="1GiB")

        def in_sync() -> int:
            found = cluster.stream(STREAM)
            return 0 if found is None else len(found["isr"])

        with producing(cluster) as producers:
            eventually(lambda: all(one.batches for one in producers), 60, "both producers have begun")
            leader = cluster.leader_of(STREAM)
            follower = next(one for one in cluster.brokers if one not in (leader, cluster.metadata_leader()))
            follower.kill()
            eventually(lambda: in_sync() == 2, 30, "it leaves the in-sync replicas")
            end = sum(one.batches for one in producers) * ROWS + BEHIND_ROWS
            eventually(lambda: sum(one.batches for one in producers) * ROWS > end, 60, "it is far behind")
            before = [one.batches for one in producers]
            follower.spawn()
            eventually(lambda: in_sync() == 3, IN_SYNC_WITHIN_S, "it is in sync again")
            assert all(one.batches > number for one, number in zip(producers, before, strict=True)), "they went on"
