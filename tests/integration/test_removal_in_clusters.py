"""Removed messages of replicated streams: every replica hides the same ones, also after failures."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from natslog.client import NatslogClient
from tests.cluster_harness import Cluster, running_cluster
from tests.harness import eventually, publish_acked


def values(client: NatslogClient, stream: str) -> list[int]:
    return [int(one) for batch in client.read(stream) for one in batch.column("value").to_pylist()]


def at_every_replica(cluster: Cluster, stream: str) -> list[list[int]]:
    """The offsets that each broker serves of what is committed: numeric ranges are answered by the broker asked."""
    position = cluster.client().position(stream)
    query = f"start={position['log_start_offset']}&end={position['high_watermark']}"
    return [_offsets(f"{broker.url}/v1/streams/{stream}/messages?{query}") for broker in cluster.up]


def _offsets(url: str) -> list[int]:
    """Empty where the broker redirects, because it does not have the range yet."""
    request = urllib.request.Request(url, headers={"Accept": "application/x-ndjson"})
    with urllib.request.urlopen(request, timeout=30) as response:
        lines = response.read().splitlines() if response.url == url else []
        return [json.loads(line)["offset"] for line in lines]


def everywhere(cluster: Cluster, stream: str, expected: list[int]) -> None:
    """Followers receive what was committed a moment after the leader."""
    eventually(lambda: at_every_replica(cluster, stream) == [expected] * len(cluster.up))


@pytest.mark.long
def test_replicas_hide_the_same_messages_whatever_fails(tmp_path: Path) -> None:
    settings = {"retention_interval": "500ms", "segment_bytes": "256KiB"}
    with running_cluster(tmp_path / "own", settings=settings) as cluster:
        client = cluster.client()
        client.create_stream("s", "s.>", replicas=3, max_messages_per_subject=2, dedupe_window=0)
        url = cluster.nats.url
        for at in range(20):
            publish_acked(url, f"s.{at % 4}", [b"%d" % at])
        kept = list(range(12, 20))
        everywhere(cluster, "s", kept)

        client.delete_message("s", 13)
        client.purge("s", subject="s.3")
        kept = [at for at in kept if at != 13 and at % 4 != 3]
        assert values(client, "s") == kept, "the leader hides them when the request is answered"
        everywhere(cluster, "s", kept)

        leader = cluster.leader_of("s")
        assert leader is not None
        leader.kill()
        eventually(lambda: cluster.leader_of("s") not in (None, leader), within_s=30)
        assert values(client, "s") == kept, "the next leader hides them too"
        publish_acked(url, "s.1", [b"20"])
        client.delete_message("s", 18)
        kept = [at for at in [*kept, 20] if at != 18]
        everywhere(cluster, "s", kept)  # the client may read from the follower
        leader.start()
        cluster.wait_in_sync()
        everywhere(cluster, "s", kept)

        client.edit_stream("s", max_messages_per_subject=1)
        everywhere(cluster, "s", [16, 20])  # 18 was removed, and hides the older ones of its subject all the same


@pytest.mark.long
def test_a_replica_that_was_away_while_segments_were_rewritten(tmp_path: Path) -> None:
    settings = {"retention_interval": "500ms", "segment_bytes": "256KiB"}
    with running_cluster(tmp_path / "own", settings=settings) as cluster:
        client, url = cluster.client(), cluster.nats.url
        client.create_stream("s", "s.>", replicas=3, compact=True, dedupe_window=0)
        leader = cluster.leader_of("s")
        away = next(broker for broker in cluster.brokers if broker is not leader)
        publish_acked(url, "s.a", [b"0"], {"Natslog-Key": "first"})
        away.kill()
        padding = b" " * 1000
        for first in range(1, 2001, 200):
            publish_acked(url, "s.a", [b"%d" % at + padding for at in range(first, first + 200)], {"Natslog-Key": "k"})
        publish_acked(url, "s.a", [b"2001"], {"Natslog-Key": "first"})
        client.roll("s")
        eventually(lambda: client.stream("s")["bytes"] < 600_000, within_s=40)
        assert values(client, "s") == [2000, 2001]
        away.start()
        cluster.wait_in_sync()
        everywhere(cluster, "s", [2000, 2001])
        leader.kill()
        eventually(lambda: cluster.leader_of("s") not in (None, leader), within_s=30)
        assert values(client, "s") == [2000, 2001]
