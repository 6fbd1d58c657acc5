"""Messages past their age are hidden from readers soon after it, whatever limits it, and not with the next second."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from natslog.client import NatslogClient
from tests.cluster_harness import Cluster, running_cluster
from tests.harness import publish_acked

AGE_S = 1.0
MEDIAN_LATE_S = 0.3  # on a machine that other tests keep busy
READS_FOR_S = 4.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@contextmanager
def publishing(nats_url: str, subject: str, headers: dict[str, str]) -> Iterator[None]:
    """A message each 20 ms."""
    ends = threading.Event()

    def publish() -> None:
        while not ends.is_set():
            publish_acked(nats_url, subject, [b"x"], headers)
            ends.wait(0.02)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def late_s(client: NatslogClient, stream: str) -> Iterator[float]:
    """Of reads from the earliest message: how long ago it was past its age when it was requested."""
    deadline_s = time.monotonic() + READS_FOR_S
    while time.monotonic() < deadline_s:
        asked_s = time.time()
        first = next(iter(client.read(stream)), None)
        if first is not None:
            yield asked_s - first.column("timestamp")[0].as_py().timestamp() - AGE_S
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("settings", "headers"),
    [
        ({"max_age": "1s", "dedupe_window": "1s"}, {}),
        pytest.param({"ttl": "1s"}, {}, marks=pytest.mark.long),
        pytest.param({"ttl": "1s", "allow_ttl": True}, {}, marks=pytest.mark.long),
        ({"allow_ttl": True}, {"Nats-TTL": "1s"}),
    ],
    ids=["max_age", "ttl", "ttl-beside-own", "own"],
)
def test_no_reader_of_any_replica_gets_a_message_long_after_its_time(
    cluster: Cluster, name: str, settings: dict[str, object], headers: dict[str, str]
) -> None:
    cluster.client().create_stream(name, name, replicas=3, **settings)
    late = []
    with publishing(cluster.nats_url, name, headers):
        time.sleep(AGE_S + 0.5)
        for broker in cluster.brokers:
            with broker.client() as client:
                late += [list(late_s(client, name))]
    for of_broker in late:
        assert len(of_broker) > 20
        median_s = statistics.median(of_broker)
        assert median_s <= MEDIAN_LATE_S, "it would be half a second if messages were hidden once a second"
        assert median_s > -0.3, "nor hidden long before its time"
