"""Bit flips in sealed segments of running brokers: scrubbing finds them, replicas are repaired, and nothing is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from natslog.client import NatslogClient
from natslog.errors import CorruptLog
from natslog.log.verify import FileReport, check_file
from tests.chaos import damage
from tests.chaos.checkers import served_copy
from tests.cluster_harness import Cluster, ClusterBroker, running_cluster
from tests.harness import eventually, natslog, publish_acked

SETTINGS = {"segment_bytes": "64KiB", "retention_interval": "1s", "scrub_max_bytes_per_s": "64MiB"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), settings=SETTINGS) as cluster:
        yield cluster


def filled(cluster: Cluster, client: NatslogClient, name: str, replicas: int) -> tuple[str, list[bytes]]:
    """Its id, and its values: several sealed segments on each replica."""
    stream_id = client.create_stream(name, f"{name}.>", replicas=replicas)["id"]
    values = [random.Random(at).randbytes(2000) for at in range(300)]
    for at in range(0, 300, 20):
        publish_acked(cluster.nats.url, f"{name}.x", values[at : at + 20])
    for broker in cluster.replicas_of(name):
        eventually(lambda broker=broker: len(damage.files_of_kind(broker, stream_id, "sealed")) > 3, 30, "segments")
    return stream_id, values


def scrubbed(client: NatslogClient, name: str) -> list[dict[str, Any]]:
    """The state of all replicas after a pass."""
    client.scrub(name, begin=True)

    def state() -> list[dict[str, Any]] | None:
        found: list[dict[str, Any]] = client.scrub(name)["replicas"]
        is_done = all("problem" not in one and one["scrub_progress"] is None for one in found)
        return found if is_done else None

    found: list[dict[str, Any]] = eventually(state, 60, "all replicas are scrubbed")
    return found


def test_damaged_replicas_are_found_and_repaired(cluster: Cluster) -> None:
    with cluster.client() as client:
        stream_id, values = filled(cluster, client, "copied", 3)
        leader = cluster.leader_of("copied")
        assert leader is not None
        follower = next(one for one in cluster.brokers if one is not leader)
        assert all(one["scrubbed_at"] for one in scrubbed(client, "copied"))
        for broker, at in ((leader, 1), (follower, 2)):
            damage.flip_bit(damage.files_of_kind(broker, stream_id, "sealed")[at], random.Random(at))
        assert [one["damaged"] for one in scrubbed(client, "copied")] == [[], [], []]
        cluster.wait_replicated("copied")
        for broker in (leader, follower):
            counted = [
                value for name, value in broker.metrics().items() if name.startswith("natslog_scrub_damaged_total")
            ]
            assert sum(counted) >= 1, broker.number
        for broker in cluster.brokers:
            assert served_copy(broker, "copied").values() == values
            assert all(one.problems == () for one in damage_reports(broker, stream_id))


def damage_reports(broker: ClusterBroker, stream_id: str) -> list[FileReport]:
    return [check_file(path) for path in damage.files_of_kind(broker, stream_id, "sealed")]


def test_a_single_replica_names_the_lost_offsets_and_serves_the_others(cluster: Cluster) -> None:
    with cluster.client() as client:
        stream_id, values = filled(cluster, client, "alone", 1)
        (broker,) = cluster.replicas_of("alone")
        file = damage.files_of_kind(broker, stream_id, "sealed")[1]
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        (state,) = scrubbed(client, "alone")
        ((start, end),) = [(one["start"], one["end"]) for one in state["damaged"]]
        assert int(file.stem) <= start < end
        shown = client.stream("alone")
        assert f"offsets {start} to {end} are damaged" in shown["problem"]["message"]
        assert shown["scrub"]["scrubbed_at"] == state["scrubbed_at"]
        told = natslog("stream", "info", "alone", url=broker.url)
        assert f"offsets {start} to {end}" in told.stdout.replace("\n", " ")
        told = natslog("stream", "scrub", "alone", "--json", url=broker.url, check=False)
        assert told.returncode == 1
        assert json.loads(told.stdout)["replicas"][0]["damaged"] == [{"start": start, "end": end}]
        read = [
            batch.column("value").to_pylist()
            for part in ((0, start), (end, 300))
            for batch in client.read("alone", *part)
        ]
        assert [value for values in read for value in values] == values[:start] + values[end:]
        with pytest.raises(CorruptLog, match=f"offsets {start} to {end}"):
            list(client.read("alone", start, end))
        assert broker.output().count("stream alone: scrubbing found damage") == 1, "it is reported once"
        publish_acked(cluster.nats.url, "alone.x", [b"more"])
