"""From 0.2.0 to this version, back, and here again: on data folders that it wrote, with its real code, and broker by
broker, under load. What is at level 1, as 0.1.0 left it, is refused until 0.2.0 has finalized its upgrade.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from natslog.cluster.encoding import decode_state
from natslog.cluster.features import LATEST_LEVEL
from natslog.errors import NatslogError, UpgradeBlocked, natslog_version
from natslog.log.verify import check_file, files_of
from natslog.nats_server import NatsServer, free_port
from natslog.node.metadata.raft_store import RaftStore
from tests.cluster_harness import Cluster, ClusterBroker, ClusterOptions
from tests.golden.make_data_dir import SMALL, answers_of
from tests.harness import BrokerProcess, all_values, eventually, natslog, on_terminal, publish_acked, with_nats
from tests.integration.upgrade_load import UpgradeLoad
from tests.pages import runs
from tests.readme import Block
from tests.released import GOLDEN, V0_2_0, use_release

SINGLE, THREE = GOLDEN / "data-dir-v0.1.0", GOLDEN / "cluster-v0.1.0"
SINGLE_0_2_0, THREE_0_2_0 = GOLDEN / "data-dir-v0.2.0", GOLDEN / "cluster-v0.2.0"

pytestmark = pytest.mark.timeout(900)  # a release may have to be installed first


@contextmanager
def broker_on(folder: Path, tmp_path: Path) -> Iterator[tuple[NatsServer, BrokerProcess]]:
    """A broker on a copy of a golden folder; it does not run yet."""
    shutil.copytree(folder / "data", tmp_path / "data")
    server = NatsServer(0, tmp_path / "nats.log").start()
    broker = BrokerProcess(tmp_path / "data", server.url, **SMALL)
    try:
        yield server, broker
    finally:
        broker.kill()
        server.stop()


def expected(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    return found


def level_of(broker: BrokerProcess) -> tuple[int, int, bool, list[int]]:
    body = broker.client().cluster()
    names = ("feature_level", "supported_level", "upgrade_waits", "upgrade_waits_for")
    return tuple(body[name] for name in names)  # type: ignore[return-value]


def version_of(broker: BrokerProcess) -> str:
    with urllib.request.urlopen(f"{broker.url}/healthz", timeout=30) as answer:
        return str(json.load(answer)["version"])


def use_it(broker: BrokerProcess, nats_url: str, mark: str) -> None:
    """Every kind of change: metadata, messages, cursors."""
    with broker.client() as client:
        client.create_stream(f"made-by-{mark}", f"made.{mark}")
        publish_acked(nats_url, f"made.{mark}", [mark.encode()])
        publish_acked(nats_url, f"orders.{mark}", [b"%d" % row for row in range(5)])
        client.set_cursor(mark, "orders", 3)
        client.edit_stream("events", paused=False)
        publish_acked(nats_url, "events", [mark.encode()], {"Nats-Msg-Id": f"of-{mark}"})
        client.edit_stream("events", paused=True)
        client.create_stream("short-lived", "short.lived")
        client.delete_stream("short-lived")


def check_all_is_there(broker: BrokerProcess, marks: list[str]) -> None:
    """What the golden folder holds, and what was added under these marks since."""
    before, now = expected(SINGLE), answers_of(broker.url)
    assert set(now["streams"]) == set(before["streams"]) | {f"made-by-{mark}" for mark in marks}
    for name, stream in before["streams"].items():
        messages = now["streams"][name]["messages"]
        assert messages[: len(stream["messages"])] == stream["messages"]
        added = 5 if name == "orders" else 1
        assert len(messages) == len(stream["messages"]) + added * len(marks)
        kept = ("id", "subject", "compression", "dedupe_window", "paused", "replicas", "min_isr", "log_start_offset")
        assert {field: now["streams"][name][field] for field in kept} == {field: stream[field] for field in kept}
    assert [one for one in now["cursors"] if one["consumer"] not in marks] == before["cursors"]
    assert {one["consumer"] for one in now["cursors"]} == {"audit", "reader", *marks}
    assert now["last_append"] == before["last_append"]
    with broker.client() as client:
        for mark in marks:
            assert all_values(client, f"made-by-{mark}") == [mark.encode()]


# ---- level 1 ----


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_is_refused(broker: BrokerProcess, problem: str) -> None:
    """It does not start, nor is another cluster made of it, and no byte of its folder is changed."""
    before = contents(broker.folder)
    assert use_release(broker, None).spawn().wait(60) == 1
    assert problem in broker.output()
    recovered = natslog("cluster", "recover", str(broker.folder), "--yes", check=False)
    assert recovered.returncode == 1
    assert problem in recovered.stderr.replace("\n", " ")
    assert contents(broker.folder) == before


def test_data_of_0_1_0_are_refused(tmp_path: Path) -> None:
    with broker_on(SINGLE, tmp_path) as (_, broker):
        check_is_refused(broker, "feature level 1, but this version of natslog supports levels from 2 on")
        assert (
            "Run natslog 0.2.0 on all brokers of the cluster, then natslog cluster finalize-upgrade" in broker.output()
        )


@pytest.mark.long
@runs("OPERATIONS.md", block="Upgrade from 0.1.0")
def test_data_of_0_1_0_are_served_when_0_2_0_has_finalized_their_upgrade(tmp_path: Path, block: Block) -> None:
    with broker_on(SINGLE, tmp_path) as (server, broker):
        use_release(broker, V0_2_0).start()
        use_it(broker, server.url, "upgraded")
        assert level_of(broker)[0] == 1
        broker.terminate()
        check_is_refused(broker, "feature level 1, but this version of natslog supports levels from 2 on")

        use_release(broker, V0_2_0).start()
        broker.client().finalize_upgrade()
        use_it(broker, server.url, "finalized")
        broker.terminate()
        check_is_refused(broker, "has the format of feature level 1")

        use_release(broker, V0_2_0).start()
        environment = os.environ | {"NATSLOG_SERVER": broker.url}
        script = block.text.replace("http://localhost:9292", broker.url)
        script = script.replace("natslog stream", f"{sys.executable} -m natslog stream")
        subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=environment, check=True, timeout=600)
        broker.kill()
        use_release(broker, None).start()
        check_all_is_there(broker, ["upgraded", "finalized"])
        assert level_of(broker) == (2, LATEST_LEVEL, True, [])
        use_it(broker, server.url, "afterwards")
        broker.client().finalize_upgrade()
        broker.kill()
        broker.start()
        check_all_is_there(broker, ["upgraded", "finalized", "afterwards"])
        broker.terminate()
        assert [problem for path in files_of(broker.folder) for problem in check_file(path).problems] == []


@pytest.mark.long
def test_a_broker_does_not_join_a_cluster_at_level_1(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ClusterOptions(settings=SMALL))
    settings = {name: cluster.brokers[0].settings[name] for name in ("seeds", "cluster_secret_file", "log_level")}
    newcomer = ClusterBroker(4, tmp_path / "broker-4", cluster.nats_url, "127.0.0.1", free_port(), **settings)
    try:
        for broker in cluster.brokers:
            shutil.copytree(THREE / f"broker-{broker.number}", broker.folder)
            use_release(broker, V0_2_0)
        cluster.start().wait_in_sync()
        newcomer.spawn()
        refusal = f"natslog {natslog_version()} of broker 4 at {newcomer.url} supports levels 2 to {LATEST_LEVEL}"
        eventually(lambda: refusal in newcomer.output(), 60, "the refusal is logged")
        assert "the cluster is at feature level 1" in newcomer.output()
        with cluster.client() as client, pytest.raises(NatslogError, match="feature level 1.*finalize-upgrade"):
            client.add_broker(newcomer.url)
        cluster.broker(3).terminate()
        check_is_refused(cluster.broker(3), "feature level 1, but this version of natslog supports levels from 2 on")
    finally:
        newcomer.kill()
        cluster.close()


# ---- from 0.2.0 on: broker by broker ----


def comparable(cursors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the times of consumers, of which ages are stored, by the clock of the leader."""
    return [one | ({"timestamp": ""} if one["consumer"].startswith("jetstream:") else {}) for one in cursors]


def check_all_of_0_2_0(broker: BrokerProcess, folder: Path) -> None:
    """What the golden folder holds is served as it was."""
    before, now = expected(folder), answers_of(broker.url)
    assert now["streams"].keys() == before["streams"].keys()
    for name, stream in before["streams"].items():
        assert now["streams"][name] == stream, name
    assert now["last_append"] == before["last_append"]
    wanted = comparable(before["cursors"])
    eventually(lambda: comparable(answers_of(broker.url)["cursors"]) == wanted, what="all cursors are as they were")


def check_state_beside_the_messages(nats_url: str) -> None:
    """What a consumer has acked, values of a bucket, and the sequence that a condition names."""

    async def work(connection: Any) -> None:
        js = connection.jetstream(timeout=20)
        worker = await js.pull_subscribe_bind(consumer="worker", stream="WORK")
        found: set[int] = set()
        while not found >= {4, 5, 6}:
            found |= {message.metadata.sequence.stream for message in await worker.fetch(3, timeout=30)}
        assert not found & {1, 2}, "they are acked; 3 is pending, and delivered again when that is over"
        bucket = await js.key_value("settings")
        assert (await bucket.get("name")).value == "grün".encode()
        expecting = {"Nats-Expected-Last-Subject-Sequence": "5"}
        assert "error" in json.loads((await connection.request("work.5", b"x", headers=expecting)).data)

    with_nats(nats_url, work)


def test_data_of_0_2_0_are_served_and_changed(tmp_path: Path) -> None:
    with broker_on(SINGLE_0_2_0, tmp_path) as (server, broker):
        broker.settings["nats_leaf_url"] = server.leaf_url
        broker.start()
        check_all_of_0_2_0(broker, SINGLE_0_2_0)
        assert level_of(broker)[0] == 2
        check_state_beside_the_messages(server.url)
        use_it(broker, server.url, "upgraded")
        broker.kill()
        broker.start()
        with broker.client() as client:
            assert all_values(client, "made-by-upgraded") == [b"upgraded"]
        broker.terminate()
        assert [problem for path in files_of(broker.folder) for problem in check_file(path).problems] == []


@pytest.mark.long
def test_data_of_0_2_0_return_to_it_and_come_back(tmp_path: Path) -> None:
    with broker_on(SINGLE_0_2_0, tmp_path) as (server, broker):
        broker.start()
        use_it(broker, server.url, "upgraded")
        broker.terminate()
        use_release(broker, V0_2_0).start()
        with broker.client() as client:
            assert all_values(client, "made-by-upgraded") == [b"upgraded"]
        assert version_of(broker) == V0_2_0
        use_it(broker, server.url, "downgraded")
        broker.terminate()
        use_release(broker, None).start()
        with broker.client() as client:
            assert all_values(client, "made-by-downgraded") == [b"downgraded"]
        assert level_of(broker) == (2, LATEST_LEVEL, True, [])
        status = natslog("cluster", "status", url=broker.url).stdout
        assert (
            f"feature level 2, supported by all brokers: {LATEST_LEVEL}; to complete the upgrade, run natslog cluster "
            "finalize-upgrade" in status
        )
        refused = natslog("cluster", "finalize-upgrade", url=broker.url, check=False, stdin=subprocess.DEVNULL)
        assert refused.returncode != 0
        assert "--yes" in refused.stderr
        assert level_of(broker)[0] == 2
        done = natslog("cluster", "finalize-upgrade", "--yes", "--json", url=broker.url)
        assert json.loads(done.stdout) == {"feature_level": LATEST_LEVEL, "raised": True}
        assert level_of(broker) == (LATEST_LEVEL, LATEST_LEVEL, False, [])
        again = natslog("cluster", "finalize-upgrade", "--yes", url=broker.url)
        assert again.stdout.strip() == f"the feature level is {LATEST_LEVEL} already"
        use_it(broker, server.url, "finalized")
        broker.kill()
        check_is_refused_by_0_2_0(broker)
        use_release(broker, None).start()
        with broker.client() as client:
            assert all_values(client, "made-by-finalized") == [b"finalized"]
        assert level_of(broker) == (LATEST_LEVEL, LATEST_LEVEL, False, [])


def check_is_refused_by_0_2_0(broker: BrokerProcess) -> None:
    assert use_release(broker, V0_2_0).spawn().wait(60) != 0
    assert f"is at feature level {LATEST_LEVEL}, but this version of natslog supports levels up to 2" in broker.output()


@pytest.mark.long
def test_a_new_cluster_begins_at_the_newest_level_and_0_2_0_refuses_it(tmp_path: Path) -> None:
    server = NatsServer(0, tmp_path / "nats.log").start()
    broker = BrokerProcess(tmp_path / "data", server.url)
    try:
        broker.start()
        assert level_of(broker) == (LATEST_LEVEL, LATEST_LEVEL, False, [])
        levels = f"feature level {LATEST_LEVEL}, supported by all brokers: {LATEST_LEVEL}\n"
        assert levels in natslog("cluster", "status", url=broker.url).stdout
        with broker.client() as client:
            client.create_stream("orders", "orders")
            client.delete_stream("orders")
        broker.terminate()
        assert decode_state(RaftStore(broker.folder / "raft").snapshot.data).feature_level == LATEST_LEVEL
        check_is_refused_by_0_2_0(broker)
    finally:
        broker.kill()
        server.stop()


def finalize_once_all_are_there(cluster: Cluster) -> None:
    """While a broker is missing it is refused; then an operator is asked, and may decline."""
    with cluster.client() as client:
        assert client.cluster()["feature_level"] == 2
        cluster.broker(3).kill()
        eventually(lambda: client.cluster()["upgrade_waits_for"] == [3], what="broker 3 is missed")
        with pytest.raises(UpgradeBlocked, match=r"broker 3 is not connected: start it, or remove it.*again"):
            client.finalize_upgrade()
        cluster.broker(3).start()
        cluster.wait_in_sync()
        eventually(lambda: client.cluster()["upgrade_waits_for"] == [])
        code, printed = on_terminal("cluster", "finalize-upgrade", url=cluster.broker(2).url, types="n\n")
        assert code != 0
        assert "no broker" in printed.lower()
        assert client.cluster()["feature_level"] == 2
        code, printed = on_terminal("cluster", "finalize-upgrade", url=cluster.broker(2).url, types="y\n")
        assert code == 0, printed
        assert f"the feature level is {LATEST_LEVEL}" in printed


@pytest.mark.long
def test_cluster_of_0_2_0_is_served_by_this_version_and_finalized(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ClusterOptions(settings=SMALL, has_leafnodes=True))
    try:
        for broker in cluster.brokers:
            shutil.copytree(THREE_0_2_0 / f"broker-{broker.number}", broker.folder)
        cluster.start().wait_in_sync()
        for name in expected(THREE_0_2_0)["streams"]:
            cluster.wait_replicated(name)
        for broker in cluster.brokers:
            check_all_of_0_2_0(broker, THREE_0_2_0)
        check_state_beside_the_messages(cluster.nats_url)
        finalize_once_all_are_there(cluster)
        for broker in cluster.brokers:
            eventually(lambda broker=broker: broker.json("/v1/cluster")["feature_level"] == LATEST_LEVEL)
            orders = expected(THREE_0_2_0)["streams"]["orders"]["messages"]
            assert answers_of(broker.url)["streams"]["orders"]["messages"] == orders
    finally:
        cluster.close()


@pytest.mark.long
def test_brokers_change_their_version_one_by_one_under_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Upgrade, downgrade, upgrade."""
    cluster = Cluster(tmp_path, ClusterOptions(has_leafnodes=True))
    try:
        for broker in cluster.brokers:
            use_release(broker, V0_2_0)
        cluster.start().wait_in_sync()
        with UpgradeLoad(cluster, tmp_path, V0_2_0) as load:
            load.wait_for_progress()
            for version in (None, V0_2_0, None):
                for broker in cluster.brokers:
                    broker.terminate()
                    use_release(broker, version).start()
                    cluster.wait_in_sync(120)
                    load.wait_for_progress()
                versions = {version_of(broker) for broker in cluster.brokers}
                assert versions == {version or natslog_version()}
            wrong, losses = load.finish()
    finally:
        cluster.close()
    with capsys.disabled():
        print(
            f"\nupgrade under load: {load.history.acked} messages acked; without acks {losses.lost} of {losses.sent} "
            f"lost, {len(losses.unexplained)} of them while there was a leader; {losses.without_leader_s:.1f} s without"
        )
    assert wrong == []
