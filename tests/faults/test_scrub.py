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


@pytest.mark.long
def test_damaged_replicas_are_found_and_repaired(cluster: Cluster) -> None:
    with cluster.client() as client:
        stream_id, values = filled(cluster, client, "copied", 3)
        leader = cluster.leader_of("copied")
        assert leader is not None
        follower = next(one for one in cluster.brokers if one is not leader)
        assert all(one["scrubbed_at"] for one in scrubbed(client, "copied"))
        for broker, at in ((leader, 1), (follower, 2)):
            damage.flip_bit(damage.files_of_kind(broker, stream_id, "sealed")[at], random.Random(at))
        before = client.stream("copied")
        scrubbed(client, "copied")
        eventually(lambda: not any(one["damaged"] for one in client.scrub("copied")["replicas"]), 40, "repairs")
        after = client.stream("copied")
        assert (after["leader_epoch"], sorted(after["isr"])) == (before["leader_epoch"], [1, 2, 3])
        cluster.wait_replicated("copied")
        for broker in (leader, follower):
            counted = [
                value for name, value in broker.metrics().items() if name.startswith("natslog_scrub_repaired_total")
            ]
            assert sum(counted) >= 1, broker.number
            assert "was repaired: offsets" in broker.output()
            assert "fetched again from the leader" not in broker.output(), "nothing is truncated"
        told = {"activity.replica.damaged", "activity.replica.repaired"}
        eventually(lambda: {(broker.number, kind) for broker in (leader, follower) for kind in told} <= events(client))
        for broker in cluster.brokers:
            assert served_copy(broker, "copied").values() == values
            assert all(one.problems == () for one in damage_reports(broker, stream_id))


def events(client: NatslogClient) -> set[tuple[int, str]]:
    """(broker, kind) of what was reported about replicas."""
    with client.consume("__activity", start="earliest", follow=False, subject="activity.replica.*") as consumer:
        rows = [row for batch in consumer for row in batch.record_batch.to_pylist()]
    return {(json.loads(row["value"])["broker"], row["subject"]) for row in rows}


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
        assert f"offsets {start} to {end - 1} are damaged" in shown["problem"]["message"]
        assert shown["scrub"]["scrubbed_at"] == state["scrubbed_at"]
        told = natslog("stream", "info", "alone", url=broker.url)
        assert f"offsets {start} to {end - 1}" in told.stdout.replace("\n", " ")
        told = natslog("stream", "scrub", "alone", "--json", url=broker.url, check=False)
        assert told.returncode == 1
        assert json.loads(told.stdout)["replicas"][0]["damaged"] == [{"start": start, "end": end}]
        read = [
            batch.column("value").to_pylist()
            for part in ((0, start), (end, 300))
            for batch in client.read("alone", *part)
        ]
        assert [value for values in read for value in values] == values[:start] + values[end:]
        with pytest.raises(CorruptLog, match=f"offsets {start} to {end - 1}"):
            list(client.read("alone", start, end))
        assert broker.output().count("stream alone: scrubbing found damage") == 1, "it is reported once"
        eventually(lambda: (broker.number, "activity.replica.damaged") in events(client))
        publish_acked(cluster.nats.url, "alone.x", [b"more"])
        accept_loss_of_alone(client, broker, values, start, end)


def accept_loss_of_alone(
    client: NatslogClient, broker: ClusterBroker, values: list[bytes], start: int, end: int
) -> None:
    """Of the single replica, by the command line."""
    told = natslog("repair", "alone", url=broker.url, check=False)
    assert told.returncode == 1
    assert f"offsets {start} to {end - 1} damaged" in told.stdout.replace("\n", " ")
    refused = natslog("repair", "alone", "--accept-loss", url=broker.url, check=False, input="")
    assert (refused.returncode, "stream alone was not changed" in refused.stderr) == (1, True)
    with pytest.raises(CorruptLog):
        list(client.read("alone", start, end))
    natslog("repair", "alone", "--accept-loss", "--yes", url=broker.url)
    read = [value for batch in client.read("alone", 0, 300) for value in batch.column("value").to_pylist()]
    assert read == values[:start] + values[end:]
    assert "problem" not in client.stream("alone")
    assert f"{start} to {end - 1}" in natslog("stream", "info", "alone", url=broker.url).stdout
    assert natslog("repair", "alone", url=broker.url).returncode == 0
    assert broker.metrics()['natslog_lost_offsets_total{stream="alone"}'] == end - start
    assert client.stream("alone")["messages"] == len(read) + 1
    assert client.lag("alone", 0)["rows"] == len(read) + 1
    eventually(lambda: "activity.replica.lost" in told_of(client, "alone"), 30, "the loss is in __activity")
    assert "activity.replica.repaired" not in told_of(client, "alone")


def told_of(client: NatslogClient, stream: str) -> set[str]:
    """The kinds of all events of a stream."""
    rows = [row for batch in client.read("__activity") for row in batch.to_pylist()]
    return {row["subject"] for row in rows if json.loads(row["value"]).get("stream") == stream}


@pytest.mark.long
def test_loss_on_all_replicas_is_accepted_and_equal_on_all(cluster: Cluster) -> None:
    with cluster.client() as client:
        stream_id, values = filled(cluster, client, "unlucky", 3)
        cluster.wait_replicated("unlucky")
        for broker in cluster.brokers:
            file = damage.files_of_kind(broker, stream_id, "sealed")[1]
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        found = scrubbed(client, "unlucky")
        assert all(one["damaged"] for one in found)
        eventually(lambda: all("damaged on every replica" in one.output() for one in cluster.brokers), 60, "reports")
        body = client.accept_loss("unlucky")
        ((start, end), *others) = [
            (one["start"], one["end"]) for replica in body["replicas"] for one in replica["lost"]
        ]
        assert start < end
        assert all(start <= first <= last <= end for first, last in others)
        assert not any(one["damaged"] for one in client.scrub("unlucky")["replicas"])
        copies = [served_copy(broker, "unlucky").values() for broker in cluster.brokers]
        assert copies[0] == copies[1] == copies[2] == values[:start] + values[end:]
        assert client.stream("unlucky")["leader_epoch"] == 1, "no replica was truncated"
