"""The companion log in processes: an answered record survives kill -9, and reaches every replica."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_harness import Cluster, ClusterBroker
from tests.companion_broker import ask
from tests.harness import eventually, stream_folder

ORDERS = "orders"
SETTLED_S = 40.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("companion") / "own")
    for broker in cluster.brokers:
        broker.module = "tests.companion_broker"
    try:
        cluster.start()
        cluster.operate("POST", "/v1/streams", {"name": ORDERS, "subject": "orders.>", "replicas": 3})
        cluster.wait_in_sync()
        yield cluster
    finally:
        cluster.close()


def append(cluster: Cluster, value: str) -> int:
    """Repeats it until it is answered, as a client does."""
    answers: list[int] = []

    def answered() -> bool:
        leader = cluster.leader_of(ORDERS)
        if leader is None or not leader.is_up:
            return False
        try:
            answer = ask(leader.folder, "append", ORDERS, value)
        except (OSError, ValueError):
            return False
        assert "end" in answer or answer["error"]["retriable"], answer
        answers.extend([answer["end"]] if "end" in answer else [])
        return bool(answers)

    eventually(answered, SETTLED_S, f"{value} is answered")
    return answers[0]


def given(broker: ClusterBroker) -> list[str]:
    try:
        found: list[Any] = ask(broker.folder, "show", ORDERS)["given"]
    except (OSError, ValueError, KeyError):
        return []
    assert [offset for offset, *_ in found] == list(range(len(found))), "out of order"
    return [value for *_, value in found]


def folder_of(cluster: Cluster, broker: ClusterBroker) -> Path:
    stream = eventually(lambda: cluster.stream(ORDERS), SETTLED_S, "the stream is shown")
    return stream_folder(broker.folder, stream["id"])


def all_are_given(cluster: Cluster, *values: str) -> None:
    """In one order on all replicas; one that was repeated may be there twice."""

    def same() -> bool:
        shown = [given(broker) for broker in cluster.replicas_of(ORDERS)]
        return all(one == shown[0] for one in shown) and set(values) <= set(shown[0])

    eventually(same, SETTLED_S, f"{values} are given everywhere")


@pytest.mark.long
def test_answered_record_survives_kill_of_its_leader_and_reaches_all(cluster: Cluster) -> None:
    append(cluster, "first")
    leader = cluster.leader_of(ORDERS)
    assert leader is not None
    leader.kill()
    append(cluster, "second")
    other = cluster.leader_of(ORDERS)
    assert other is not None
    assert other is not leader
    assert given(other)[:1] == ["first"], "it leads without the answered record"
    leader.start()
    cluster.wait_in_sync()
    all_are_given(cluster, "first", "second")


@pytest.mark.long
def test_follower_that_was_killed_catches_up(cluster: Cluster) -> None:
    append(cluster, "before")
    leader = cluster.leader_of(ORDERS)
    follower = next(broker for broker in cluster.replicas_of(ORDERS) if broker is not leader)
    follower.kill()
    append(cluster, "while it was down")
    follower.start()
    cluster.wait_in_sync()
    all_are_given(cluster, "before", "while it was down")


@pytest.mark.long
def test_lost_companion_folder_is_fetched_again(cluster: Cluster) -> None:
    append(cluster, "held")
    leader = cluster.leader_of(ORDERS)
    follower = next(broker for broker in cluster.replicas_of(ORDERS) if broker is not leader)
    folder = folder_of(cluster, follower)
    follower.kill()
    shutil.rmtree(folder / "companion")
    follower.start()
    eventually((folder / "companion").is_dir, SETTLED_S, "the loss is found")
    cluster.wait_in_sync()
    all_are_given(cluster, "held")


@pytest.mark.long
def test_all_are_killed_and_start_with_every_answered_record(cluster: Cluster) -> None:
    append(cluster, "durable")
    for broker in cluster.brokers:
        broker.kill()
    for broker in cluster.brokers:
        broker.spawn()
    cluster.wait_alive()
    append(cluster, "after")
    cluster.wait_in_sync()
    all_are_given(cluster, "durable", "after")


@pytest.mark.long
def test_stream_is_deleted_with_its_companion_log(cluster: Cluster) -> None:
    """At the end of its grace period; until then the folder stays as a whole."""
    append(cluster, "last")
    folders = [folder_of(cluster, broker) for broker in cluster.replicas_of(ORDERS)]
    assert all((folder / "companion").is_dir() for folder in folders)
    for broker in cluster.brokers:
        broker.terminate()
        broker.settings["tombstone_grace"] = "1s"
        broker.settings["retention_interval"] = "200ms"
        broker.spawn()
    cluster.wait_alive()
    cluster.operate("DELETE", f"/v1/streams/{ORDERS}")
    eventually(lambda: not any(folder.exists() for folder in folders), SETTLED_S, "the folders are removed")
