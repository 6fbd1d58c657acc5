"""Streams with `standby`: what publishers without acks send while the leader is killed is stored once and in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from natslog.client import NatslogClient
from tests.cluster_harness import Cluster, running_cluster
from tests.harness import all_values, eventually, with_nats
from tests.plain_publisher import Found, PlainPublisher

pytestmark = pytest.mark.timeout(300)

SUBJECT = "plain"
WHOLE = Found(0, 0, 0)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path) as cluster:
        with cluster.client() as client:
            client.create_stream("standby", f"{SUBJECT}.>", replicas=3, standby=True)
        wait_until_standing_by(cluster)
        yield cluster


def wait_until_standing_by(cluster: Cluster) -> None:
    """Both followers."""

    def standing_by() -> float:
        return sum(broker.metrics()['natslog_stream_standing_by{stream="standby"}'] for broker in cluster.brokers)

    cluster.wait_in_sync()
    eventually(lambda: standing_by() == 2, 30, "both followers stand by")


def kill_leader(cluster: Cluster) -> int:
    """Returns when another broker leads."""
    victim = cluster.leader_of("standby")
    assert victim is not None
    victim.kill()
    eventually(lambda: cluster.leader_of("standby") not in (None, victim), 30, "another broker leads")
    return victim.number


def found(client: NatslogClient, publisher: PlainPublisher) -> Found:
    """When nothing more is appended."""
    ends = [-1]

    def is_whole() -> bool:
        position = client.position("standby")
        ends.append(position["high_watermark"])
        return ends[-1] >= publisher.sent or ends[-40:] == 40 * ends[-1:]

    eventually(is_whole, 60, "all is stored, or nothing more comes")
    return Found.of(all_values(client, "standby"), publisher.sent)


def test_plain_messages_survive_a_killed_leader(cluster: Cluster) -> None:
    publisher = PlainPublisher(cluster.nats_url, SUBJECT, 2000)
    publisher.start()
    time.sleep(1.0)
    kill_leader(cluster)
    time.sleep(0.5)
    publisher.stop()
    with cluster.client() as client:
        assert found(client, publisher) == WHOLE
