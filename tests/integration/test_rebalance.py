"""`natslog cluster rebalance` and the plan behind it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster_harness import Cluster, running_cluster
from tests.harness import eventually, natslog, publish_acked
from tests.pages import runs
from tests.readme import Block

STREAMS = 9


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("rebalance")) as found:
        client = found.client()
        for at in range(STREAMS):
            client.create_stream(f"s{at}", f"s{at}")
        yield found


@pytest.fixture
def uneven(cluster: Cluster) -> Cluster:
    """All streams have their replica on broker 1."""
    client = cluster.client()
    for at in range(STREAMS):
        client.move_stream(f"s{at}", [1])
    eventually(lambda: set(places(cluster)) == {(1,)}, 60, "all are on broker 1", every_s=0.2)
    return cluster


def places(cluster: Cluster) -> list[tuple[int, ...]]:
    streams = cluster.client().streams()
    return [tuple(one["replica_ids"]) if "target_replica_ids" not in one else () for one in streams]


def counts(cluster: Cluster) -> list[int]:
    return sorted(Counter(broker for replicas in places(cluster) for broker in replicas).values())


@pytest.mark.long
@runs("OPERATIONS.md", block="Even out the loads")
def test_streams_are_moved_until_the_loads_are_even(uneven: Cluster, block: Block) -> None:
    url = uneven.brokers[0].url
    for at in range(STREAMS):
        publish_acked(uneven.nats_url, f"s{at}", [b"x"] * 100)
    planned = json.loads(natslog("cluster", "rebalance", "--dry-run", "--json", url=url).stdout)
    assert len(planned["moves"]) == 6
    assert [one["replicas"] for one in planned["brokers"]] == [9, 0, 0]
    assert [one["replicas_after"] for one in planned["brokers"]] == [3, 3, 3]
    assert all(one["copied_bytes"] > 0 for one in planned["moves"])
    (shown,) = block.commands
    printed = natslog(*shown.text.split()[1:], url=url).stdout
    assert shown.is_answered_by(printed), printed
    assert counts(uneven) == [9], "a dry run moves nothing"
    done = natslog("cluster", "rebalance", url=url)
    assert "6 streams were moved, 0 were not" in done.stdout
    assert counts(uneven) == [3, 3, 3]
    assert all(uneven.client().stream(f"s{at}")["high_watermark"] >= 100 for at in range(STREAMS))
    assert "nothing is to be moved" in natslog("cluster", "rebalance", url=url).stdout


@pytest.mark.long
def test_a_run_that_was_stopped_is_continued_by_the_next_one(uneven: Cluster) -> None:
    command = [sys.executable, "-m", "natslog", "--server", uneven.brokers[1].url, "cluster", "rebalance"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "streams to go" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.wait(20)
    natslog("cluster", "rebalance", url=uneven.brokers[2].url)
    assert counts(uneven) == [3, 3, 3]


@pytest.mark.long
def test_the_plan_of_a_drain_is_what_a_drain_does(uneven: Cluster) -> None:
    client = uneven.client()
    plan = client.plan(drain=1)
    assert plan["problem"] is None
    assert {one["stream"]: one["before"] for one in plan["moves"]} == {f"s{at}": [1] for at in range(STREAMS)}
    client.drain_broker(1)
    wanted = {one["stream"]: tuple(one["after"]) for one in plan["moves"]}

    def moved() -> dict[str, Any]:
        return {one["name"]: tuple(one["replica_ids"]) for one in client.streams()}

    eventually(lambda: moved() == wanted, 60, "the streams are where the plan said", every_s=0.2)
    client.drain_broker(1, False)


@pytest.mark.long
def test_a_drain_that_cannot_be_done_says_why(cluster: Cluster) -> None:
    client = cluster.client()
    client.create_stream("wide", "wide", replicas=3)
    assert "no other broker is available" in client.plan(drain=2)["problem"]
    client.delete_stream("wide")
    done = natslog("cluster", "drain", "9", url=cluster.brokers[0].url, check=False)
    assert done.returncode == 1


@pytest.mark.long
def test_a_stream_that_was_moved_meanwhile_is_not_moved_again(uneven: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from natslog.cli import rebalancing

    client = uneven.client()
    plan = client.plan()
    first = plan["moves"][0]["stream"]
    other = next(one for one in (2, 3) if [one] != plan["moves"][0]["after"])
    client.move_stream(first, [other])
    eventually(lambda: client.stream(first)["replica_ids"] == [other], 40)
    client.delete_stream(plan["moves"][1]["stream"])
    skipped = rebalancing._run(client, plan, shows=False)
    assert {one["stream"]: one["reason"].split(":")[0] for one in skipped} == {
        first: "its replicas were moved meanwhile",
        plan["moves"][1]["stream"]: "it was deleted",
    }
    assert client.stream(first)["replica_ids"] == [other]
    client.create_stream(plan["moves"][1]["stream"], plan["moves"][1]["stream"])
