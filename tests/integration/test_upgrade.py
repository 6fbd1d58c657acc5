"""From each released version to this one, back, and here again: on data folders that it wrote, with its real code; from
0.2.0 on broker by broker, under load.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from natslog.cluster.encoding import decode_state
from natslog.cluster.features import LATEST_LEVEL
from natslog.errors import UpgradeBlocked, natslog_version
from natslog.log.verify import check_file, files_of
from natslog.nats_server import NatsServer
from natslog.node.metadata.raft_store import RaftStore
from tests.cluster_harness import Cluster, ClusterBroker, ClusterOptions
from tests.golden.make_data_dir import SMALL, answers_of
from tests.harness import BrokerProcess, all_values, eventually, natslog, on_terminal, publish_acked, with_nats
from tests.integration.upgrade_load import UpgradeLoad
from tests.released import GOLDEN, V0_1_0, V0_2_0, use_release

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


@pytest.fixture
def single(tmp_path: Path) -> Iterator[tuple[NatsServer, BrokerProcess]]:
    with broker_on(SINGLE, tmp_path) as both:
        yield both


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


def identity_version(folder: Path) -> bytes:
    return (folder / "broker").read_bytes().split(b" ")[2]


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


@pytest.mark.long
def test_upgrade_downgrade_upgrade_and_finalize(single: tuple[NatsServer, BrokerProcess]) -> None:
    server, broker = single
    broker.start()
    check_all_is_there(broker, [])
    assert level_of(broker) == (1, LATEST_LEVEL, True, [])
    use_it(broker, server.url, "upgraded")
    check_all_is_there(broker, ["upgraded"])
    broker.terminate()
    assert identity_version(broker.folder) == b"v2"

    use_release(broker, V0_1_0).start()
    check_all_is_there(broker, ["upgraded"])
    use_it(broker, server.url, "downgraded")
    broker.terminate()

    use_release(broker, None).start()
    check_all_is_there(broker, ["upgraded", "downgraded"])
    assert level_of(broker) == (1, LATEST_LEVEL, True, [])
    status = natslog("cluster", "status", url=broker.url).stdout
    assert (
        f"feature level 1, supported by all brokers: {LATEST_LEVEL}; to complete the upgrade, run natslog cluster "
        "finalize-upgrade" in status
    )
    refused = natslog("cluster", "finalize-upgrade", url=broker.url, check=False, stdin=subprocess.DEVNULL)
    assert refused.returncode != 0
    assert "--yes" in refused.stderr
    assert level_of(broker)[0] == 1
    edit = ("stream", "edit", "made-by-upgraded", "--acks", "never")
    two = ("--subject", "one", "--subject", "two")
    of_level_2 = (two, ("--allow-rollup",), ("--discard", "new"))
    edits = [("stream", "edit", "made-by-upgraded", *options) for options in of_level_2]
    for refused_now in (edit, ("stream", "create", "several", *two), *edits):
        assert "requires feature level 2" in natslog(*refused_now, url=broker.url, check=False).stderr
    export = str(broker.folder.with_name("export"))
    natslog("export", "made-by-upgraded", export, url=broker.url)
    load = ("import", export, "--as", "made-by-import")
    assert "requires feature level 2" in natslog(*load, url=broker.url, check=False).stderr
    done = natslog("cluster", "finalize-upgrade", "--yes", "--json", url=broker.url)
    assert json.loads(done.stdout) == {"feature_level": LATEST_LEVEL, "raised": True}
    assert identity_version(broker.folder) == b"v3"
    assert level_of(broker) == (LATEST_LEVEL, LATEST_LEVEL, False, [])
    again = natslog("cluster", "finalize-upgrade", "--yes", url=broker.url)
    assert again.stdout.strip() == f"the feature level is {LATEST_LEVEL} already"
    natslog(*edit, url=broker.url)
    natslog(*load, url=broker.url)
    with broker.client() as client:
        assert all_values(client, "made-by-import") == all_values(client, "made-by-upgraded")
        client.delete_stream("made-by-import")
    use_it(broker, server.url, "finalized")
    broker.kill()

    use_release(broker, V0_1_0).spawn()
    assert broker.wait(60) != 0
    assert "is of format version 3; this natslog knows up to 2: upgrade natslog" in broker.output()

    use_release(broker, None).start()
    check_all_is_there(broker, ["upgraded", "downgraded", "finalized"])
    assert level_of(broker) == (LATEST_LEVEL, LATEST_LEVEL, False, [])
    broker.terminate()
    assert [problem for path in files_of(broker.folder) for problem in check_file(path).problems] == []


@pytest.mark.long
def test_a_compacted_state_of_level_1_is_read_by_0_1_0(single: tuple[NatsServer, BrokerProcess]) -> None:
    """More than a thousand changes: what 0.1.0 opens is a snapshot of the state, as this version writes it."""
    server, broker = single
    with broker.start().client() as client:
        for at in range(1_100):
            client.set_cursor("busy", "orders", at % 150)
    use_it(broker, server.url, "upgraded")
    eventually(lambda: snapshot_index(broker.folder) > 1_000, what="a snapshot")
    with broker.client() as client:
        client.delete_cursor("busy", "orders")
    broker.terminate()
    use_release(broker, V0_1_0).start()
    check_all_is_there(broker, ["upgraded"])
    broker.terminate()


def snapshot_index(folder: Path) -> int:
    return int(json.loads((folder / "raft" / "snapshot").read_bytes().split(b"\n", 1)[1])["index"])


@pytest.mark.long
def test_a_new_cluster_begins_at_the_newest_level_and_old_code_refuses_it(tmp_path: Path) -> None:
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
        state = decode_state(RaftStore(broker.folder / "raft").snapshot.data)
        assert state.feature_level == LATEST_LEVEL
        use_release(broker, V0_1_0).spawn()
        assert broker.wait(60) != 0
        assert "upgrade natslog" in broker.output()
    finally:
        broker.kill()
        server.stop()


def cursors_of(broker: ClusterBroker) -> list[dict[str, Any]]:
    """The first answer. While cursors are moved to their stream, there is none."""
    (shown,) = eventually(lambda: [found] if (found := broker.json("/v1/cursors")) is not None else None)
    return [{name: one[name] for name in one if name not in ("lag", "stopped")} for one in shown]


@pytest.mark.long
def test_three_brokers_are_upgraded_together_and_finalized_once_all_are_there(tmp_path: Path) -> None:
    with_old = Cluster(tmp_path, ClusterOptions(settings=SMALL))
    try:
        for broker in with_old.brokers:
            shutil.copytree(THREE / f"broker-{broker.number}", broker.folder)
        with_old.start().wait_in_sync()
        before = expected(THREE)
        for name in before["streams"]:
            with_old.wait_replicated(name)
        assert answers_of(with_old.broker(2).url) == before
        with with_old.client() as client:
            assert client.cluster()["feature_level"] == 1
            with_old.broker(3).kill()
            eventually(lambda: client.cluster()["upgrade_waits_for"] == [3], what="broker 3 is missed")
            with pytest.raises(UpgradeBlocked, match=r"broker 3 is not connected: start it, or remove it.*again"):
                client.finalize_upgrade()
            with_old.broker(3).start()
            with_old.wait_in_sync()
            eventually(lambda: client.cluster()["upgrade_waits_for"] == [])
            code, said = on_terminal("cluster", "finalize-upgrade", url=with_old.broker(2).url, types="n\n")
            assert code != 0
            assert "No broker" in said or "no broker" in said
            assert client.cluster()["feature_level"] == 1
            code, said = on_terminal("cluster", "finalize-upgrade", url=with_old.broker(2).url, types="y\n")
            assert code == 0, said
            assert f"the feature level is {LATEST_LEVEL}" in said
        for broker in with_old.brokers:
            eventually(lambda broker=broker: broker.json("/v1/cluster")["feature_level"] == LATEST_LEVEL)
            assert identity_version(broker.folder) == b"v3"
        assert [cursors_of(broker) for broker in with_old.brokers] == [before["cursors"]] * 3
        with with_old.client() as client:
            assert client.stream("__cursors")["high_watermark"] == len(before["cursors"]), "they were moved there"
            client.set_cursor("reader", "orders", 120)
        audit, reader = before["cursors"]
        for broker in with_old.brokers:
            kept, moved = cursors_of(broker)
            assert kept == audit
            assert (moved["offset"], moved["id"], moved["rewound"]) == (120, reader["id"], reader["rewound"])
        assert publish_acked(with_old.nats_url, "orders.new", [b"at level 2"])[0]["offset"] == 151
    finally:
        with_old.close()


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


@pytest.mark.long
def test_cluster_of_0_2_0_is_served_by_this_version(tmp_path: Path) -> None:
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
