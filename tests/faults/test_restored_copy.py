"""A data folder is put back as it was some lives ago: a member of a cluster is refused, a broker alone accepts it.

Operators restore copies. What such a copy of a member does not hold was acked with that member's help, and the votes
that it gave meanwhile are gone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import nats.errors
import pytest

from tests.cluster_harness import Cluster, ClusterBroker, running_cluster
from tests.harness import BrokerProcess, all_values, eventually, natslog, publish_acked, running

STREAM = "orders"
FIRST = [b"first %d" % at for at in range(300)]
LATER = [b"later %d" % at for at in range(2200)]
LAST = [b"last %d" % at for at in range(100)]


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The parameter, if there is one: whether requests need a token."""
    settings, is_secured = {"retention_interval": "500ms"}, getattr(request, "param", False)
    with running_cluster(tmp_path / "cluster", settings=settings, is_secured=is_secured) as cluster:
        yield cluster


def set_up(cluster: Cluster, min_isr: int) -> ClusterBroker:
    """A stream with messages on all replicas; returns its leader."""
    with cluster.client() as client:
        client.create_stream(STREAM, STREAM, replicas=3, min_isr=min_isr)
    publish(cluster, FIRST)
    cluster.wait_replicated(STREAM)
    return eventually(lambda: cluster.leader_of(STREAM), 30, "a leader")


def follower(cluster: Cluster, leader: ClusterBroker) -> ClusterBroker:
    return next(broker for broker in cluster.brokers if broker is not leader)


def publish(cluster: Cluster, values: list[bytes]) -> None:
    """As soon as a leader takes messages; each is acked once."""

    def is_taken() -> bool:
        try:
            return "error" not in publish_acked(cluster.nats_url, STREAM, values[:1])[0]
        except nats.errors.NoRespondersError:
            return False

    eventually(is_taken, 30, "a leader takes messages")
    assert all("error" not in answer for answer in publish_acked(cluster.nats_url, STREAM, values[1:]))


def copy_of(broker: BrokerProcess, name: str = "copy") -> Path:
    """Of the folder of a broker that is stopped."""
    target = broker.folder.with_name(f"{broker.folder.name}.{name}")
    shutil.copytree(broker.folder, target)
    return target


def put_back(copy: Path, broker: BrokerProcess) -> None:
    shutil.rmtree(broker.folder)
    shutil.copytree(copy, broker.folder)


def restore(cluster: Cluster, broker: ClusterBroker, copy: Path) -> None:
    """While all brokers are down at the same moment, so that the stream's leader and replicas stay recorded."""
    for one in cluster.brokers:
        one.kill()
    put_back(copy, broker)
    for one in cluster.brokers:
        one.spawn()


def restart(cluster: Cluster, broker: ClusterBroker) -> None:
    if broker.is_up:
        broker.terminate()
    broker.spawn()
    cluster.wait_ready()
    cluster.wait_in_sync()


def not_ready_because(broker: ClusterBroker) -> str:
    answer = broker.ask("GET", "/readyz")
    return "" if answer is None or answer.status == 200 else answer.data.decode()


def check_refused(cluster: Cluster, outdated: ClusterBroker) -> None:
    """The others serve all that was acked and take more; the outdated one takes part in nothing, and says why."""
    others = [broker for broker in cluster.brokers if broker is not outdated]
    for broker in others:
        eventually(lambda broker=broker: broker.ready() or broker._must_live(), 60, f"{broker.url} is ready")
    found = eventually(lambda: (one := cluster.stream(STREAM)) and one["leader"] and one, 30, "a leader")
    with cluster.client() as client:
        assert all_values(client, STREAM) == FIRST + LATER, f"nothing is lost: {cluster.troubles()}"
        publish(cluster, LAST)
        assert all_values(client, STREAM) == FIRST + LATER + LAST, "nothing is reassigned"
    assert outdated.number not in found["isr"]
    assert found["leader"] != outdated.number
    assert outdated.high_watermark(STREAM) is None, "the outdated broker serves nothing"
    eventually(lambda: "older copy" in not_ready_because(outdated), 30, "the outdated broker says what is wrong")
    assert f"natslog cluster remove {outdated.number}" in not_ready_because(outdated)
    assert "older copy" in outdated.output(), "it is in its log"
    assert any("older copy" in broker.output() for broker in others), "it is in the logs of the others"


def check_can_be_replaced(cluster: Cluster, outdated: ClusterBroker) -> None:
    cluster.replace(outdated)
    cluster.wait_ready()
    cluster.wait_replicated(STREAM, 60)
    assert all_values(outdated.client(), STREAM) == FIRST + LATER + LAST


@pytest.mark.long
@pytest.mark.parametrize("min_isr", [1, 2])
def test_member_with_a_copy_of_the_life_before_is_refused_until_it_is_replaced(cluster: Cluster, min_isr: int) -> None:
    leader = set_up(cluster, min_isr)
    leader.terminate()
    copy = copy_of(leader)
    restart(cluster, leader)
    natslog("cluster", "transfer", str(leader.number), "--stream", STREAM, url=cluster.up[0].url)
    publish(cluster, LATER)
    cluster.wait_replicated(STREAM)
    restore(cluster, leader, copy)
    check_refused(cluster, leader)
    check_can_be_replaced(cluster, leader)


@pytest.mark.long
@pytest.mark.parametrize("cluster", [False, True], indirect=True, ids=["open", "secured"])
def test_member_with_a_copy_of_an_earlier_life_is_refused_and_says_so(cluster: Cluster) -> None:
    """Not the life right before the registered one, as in the test above: that number is registered for a copy, too."""
    outdated = follower(cluster, set_up(cluster, 2))
    outdated.terminate()
    copy = copy_of(outdated)
    restart(cluster, outdated)
    restart(cluster, outdated)
    publish(cluster, LATER)
    cluster.wait_replicated(STREAM)
    outdated.terminate()
    newest = copy_of(outdated, "newest")
    put_back(copy, outdated)
    outdated.spawn()
    check_refused(cluster, outdated)
    outdated.terminate()
    put_back(newest, outdated)
    outdated.spawn()
    cluster.wait_ready()
    cluster.wait_replicated(STREAM)


@pytest.mark.long
def test_member_that_lost_its_identity_or_its_life_rebuilds_the_one_and_is_refused_without_the_other(
    cluster: Cluster,
) -> None:
    broker = follower(cluster, set_up(cluster, 2))
    broker.terminate()
    (broker.folder / "broker").unlink()
    restart(cluster, broker)
    assert "the file is written again" in broker.output()
    cluster.wait_replicated(STREAM)
    broker.terminate()
    newest = copy_of(broker, "newest")

    (broker.folder / "life").unlink()
    for _ in range(2):  # the second start finds nothing that the first one made up
        broker.spawn()
        assert broker.wait() != 0
    assert "life is missing" in broker.output()
    assert "natslog cluster remove" in broker.output()
    (broker.folder / "broker").unlink()
    broker.spawn()
    assert broker.wait() != 0
    assert "broker is missing" in broker.output()

    put_back(newest, broker)
    shutil.rmtree(broker.folder / "raft")
    (broker.folder / "broker").unlink()
    said_before = len(broker.output())
    broker.spawn()
    assert broker.wait() != 0
    assert "broker is missing" in broker.output()[said_before:]
    put_back(newest, broker)
    broker.spawn()
    cluster.wait_ready()
    cluster.wait_replicated(STREAM)


@pytest.mark.long
def test_member_restored_from_a_copy_goes_on_alone_after_recover(cluster: Cluster) -> None:
    keeper = set_up(cluster, 2)
    keeper.terminate()
    copy = copy_of(keeper)
    restart(cluster, keeper)
    publish(cluster, LATER)
    for broker in cluster.brokers:
        broker.kill()
    put_back(copy, keeper)
    natslog("cluster", "recover", str(keeper.folder), "--yes")
    keeper.start()
    assert all_values(keeper.client(), STREAM) == FIRST, "what the copy held"
    publish(cluster, LAST)
    assert all_values(keeper.client(), STREAM) == FIRST + LAST


@pytest.mark.long
@pytest.mark.parametrize("has_life", [True, False])
def test_broker_alone_goes_on_from_a_restored_copy(tmp_path: Path, has_life: bool) -> None:
    """The documented backup: stop the broker and copy the folder. Also where the copy lost its `life`."""
    with running(tmp_path / "own") as (server, broker):
        broker.client().create_stream(STREAM, STREAM)
        publish_acked(server.url, STREAM, FIRST)
        broker.terminate()
        copy = copy_of(broker)
        for _ in range(2):
            broker.start()
            publish_acked(server.url, STREAM, LAST)
            broker.terminate()
        put_back(copy, broker)
        if not has_life:
            (broker.folder / "life").unlink()
        broker.start()
        assert all_values(broker.client(), STREAM) == FIRST
        publish_acked(server.url, STREAM, LAST)
        broker.terminate()
        broker.start()
        assert all_values(broker.client(), STREAM) == FIRST + LAST
