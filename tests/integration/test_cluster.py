"""Three brokers as one: any of them takes any request; growing, shrinking, moving; and who is not let in."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from nats.errors import NoRespondersError

from natslog.client import ClientOptions, NatslogClient
from natslog.client.appending import PartUploader
from natslog.errors import (
    ClusterMismatch,
    DataDirError,
    InvalidRequest,
    NatslogError,
    NotEnoughBrokers,
    PartsMissing,
    StreamConflict,
)
from natslog.log.checked_file import read_checked, write_checked
from natslog.model import Appended
from natslog.nats_server import free_port
from natslog.node.data_dir import DataDir
from tests.cluster_harness import Cluster, ClusterBroker, running_cluster
from tests.harness import (
    BrokerProcess,
    all_values,
    eventually,
    natslog,
    publish_acked,
    running,
    stream_folder,
    with_nats,
    write_secret,
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(
        tmp_path_factory.mktemp("cluster") / "own", settings={"retention_interval": "500ms"}
    ) as cluster:
        yield cluster


def client_of(broker: BrokerProcess) -> NatslogClient:
    """Asks this broker only, and follows where it points."""
    return NatslogClient(broker.url, ClientOptions(retries=0, timeout_s=15))


@pytest.fixture
def filled(cluster: Cluster, name: str) -> str:
    """A stream of three replicas and 100 messages."""
    cluster.client().create_stream(name, name, replicas=3)
    publish_acked(cluster.nats.url, name, [b"%d" % at for at in range(100)])
    return name


def test_any_broker_creates_shows_and_deletes(cluster: Cluster, name: str) -> None:
    first, second, third = map(client_of, cluster.brokers)
    assert first.create_stream(name, name, replicas=3)["min_isr"] == 2
    assert second.create_stream(name, name, replicas=3)["id"] == third.stream(name)["id"]
    with pytest.raises(StreamConflict, match="max_age"):
        second.create_stream(name, name, replicas=3, max_age="7d")
    assert third.edit_stream(name, max_age="7d")["max_age"] == "7d"
    assert [body["max_age"] for body in first.streams() if body["name"] == name] == ["7d"]
    third.delete_stream(name)
    for client in (first, second, third):
        assert name not in [body["name"] for body in client.streams()]


def test_followers_delete_what_the_leaders_retention_has_deleted(cluster: Cluster, name: str) -> None:
    """They have no retention of their own: their log starts follow the leader's."""
    stream = cluster.client().create_stream(name, name, replicas=3, max_messages=800)
    folders = [stream_folder(broker.folder, stream["id"]) for broker in cluster.brokers]
    for _ in range(12):
        publish_acked(cluster.nats.url, name, [b"x" * 100] * 200)

    def first_offsets() -> list[int]:
        return [min(int(path.stem) for path in folder.iterdir() if path.stem.isdigit()) for folder in folders]

    eventually(lambda: min(first_offsets()) > 0, 30, "every replica has deleted its oldest segment")
    assert cluster.client().stream(name)["log_start_offset"] > 0


def test_change_sent_twice_is_applied_once(cluster: Cluster, filled: str) -> None:
    broker = cluster.brokers[0]
    answers = [
        broker._pool.request(
            "DELETE", f"{broker.url}/v1/streams/{filled}", headers={"Natslog-Request-Id": "one-and-the-same"}
        )
        for _ in range(2)
    ]
    assert [answer.status for answer in answers] == [204, 204], "the retry has the outcome of the first"


@pytest.mark.long
def test_drain_that_is_sent_again_does_not_undo_what_was_asked_for_later(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "own", brokers=2) as cluster:
        leader = eventually(cluster.metadata_leader, 30)
        assert leader is not None

        def drain(is_draining: bool, request_id: str) -> int:
            headers = {"Natslog-Request-Id": request_id, "Content-Type": "application/json"}
            body = json.dumps({"draining": is_draining}).encode()
            url = f"{leader.url}/v1/cluster/brokers/{leader.number}"
            return leader._pool.request("PATCH", url, body=body, headers=headers).status

        def is_draining() -> bool:
            (found,) = (one for one in leader.json("/v1/cluster")["brokers"] if one["id"] == leader.number)
            return bool(found["draining"])

        assert (drain(True, "the-first-one"), is_draining()) == (200, True)
        assert (drain(False, "a-later-one"), is_draining()) == (200, False)
        assert (drain(True, "the-first-one"), is_draining()) == (200, False)


@pytest.mark.long
def test_removal_that_is_sent_again_has_the_outcome_of_the_first(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "own", brokers=3) as cluster:
        leader = eventually(cluster.metadata_leader, 30)
        assert leader is not None
        other = next(broker for broker in cluster.brokers if broker is not leader)
        url, headers = f"{leader.url}/v1/cluster/brokers/{other.number}", {"Natslog-Request-Id": "remove-it-once"}
        cluster.client().drain_broker(other.number)
        eventually(lambda: not _replicas_on(cluster.client(), other.number), 60, "no replica is left there")
        answers = [leader._pool.request("DELETE", url, headers=headers) for _ in range(2)]
        assert [answer.status for answer in answers] == [204, 204], answers[1].data


def _replicas_on(client: NatslogClient, number: int) -> int:
    (found,) = (one for one in client.cluster()["brokers"] if one["id"] == number)
    return int(found["replicas"])


def test_broker_that_was_pointed_to_and_does_not_lead_says_who_does(cluster: Cluster, filled: str) -> None:
    leader = cluster.broker(cluster.client().stream(filled)["leader"])
    follower = next(broker for broker in cluster.brokers if broker is not leader)
    asked = {"Natslog-Redirected": "true"}
    url = f"{follower.url}/v1/streams/{filled}/offsets?timestamp=0"
    answer = follower._pool.request("GET", url, headers=asked, redirect=False)
    error = json.loads(answer.data)["error"]
    assert (answer.status, error["code"], error["url"]) == (421, "not_leader", leader.url)
    metadata = eventually(cluster.metadata_leader, 30)
    other = next(broker for broker in cluster.brokers if broker is not metadata)
    answer = other._pool.request(
        "POST", f"{other.url}/v1/cluster/transfer", body=b'{"to": 1}', headers=asked, redirect=False
    )
    error = json.loads(answer.data)["error"]
    assert (answer.status, error["code"], error["leader"]) == (421, "not_metadata_leader", metadata.number)


def test_every_replica_serves_what_is_committed(cluster: Cluster, filled: str) -> None:
    for broker in cluster.brokers:
        path = f"/v1/streams/{filled}/messages?start=0&end=100"

        def served(broker: ClusterBroker = broker, path: str = path) -> bool:
            answer = broker.ask("GET", path)
            return answer is not None and answer.status == 200 and answer.headers["Natslog-Next-Offset"] == "100"

        eventually(served, what=f"{broker.url} serves all, without a redirect")
    with pytest.raises(NatslogError, match="not in the log"):
        list(client_of(cluster.brokers[1]).read(filled, 500, 600))


def test_reader_of_a_known_range_never_meets_its_end_too_early(cluster: Cluster, filled: str) -> None:
    """A follower receives the new high watermark a moment later than the leader's readers."""
    leader = cluster.client().stream(filled)["leader"]
    followers = [broker for broker in cluster.brokers if broker.number != leader]
    for at in range(100, 130):
        offset = publish_acked(cluster.nats.url, filled, [b"%d" % at])[0]["offset"]
        reader = client_of(followers[at % 2])
        assert sum(batch.num_rows for batch in reader.read(filled, offset, offset + 1)) == 1


def test_splits_name_the_replicas_in_turn(cluster: Cluster, filled: str) -> None:
    splits = cluster.client().splits(filled, 0, 100, max_rows=10)
    urls = {broker.url for broker in cluster.brokers}
    assert all(set(split.urls) == urls for split in splits)
    assert {split.urls[0] for split in splits} == urls, "each split begins with another one"


def test_long_poll_at_a_follower_sees_the_next_message(cluster: Cluster, filled: str) -> None:
    leader = cluster.client().stream(filled)["leader"]
    follower = next(broker for broker in cluster.brokers if broker.number != leader)
    eventually(lambda: client_of(follower).fetch(filled, 0).high_watermark == 100)
    publish_acked(cluster.nats.url, filled, [b"next"])
    fetched = client_of(follower).fetch(filled, 100, wait_ms=5000)
    assert [value for batch in fetched.batches for value in batch.column("value").to_pylist()] == [b"next"]


@pytest.mark.long
def test_number_of_replicas_is_edited_while_messages_come(cluster: Cluster, name: str) -> None:
    client = cluster.client()
    client.create_stream(name, name)
    sent = [b"%d" % at for at in range(50)]
    publish_acked(cluster.nats.url, name, sent)
    shown = json.loads(natslog("stream", "edit", name, "--replicas", "3", "--json", url=cluster.brokers[0].url).stdout)
    assert (shown["replicas"], len(shown["target_replica_ids"])) == (1, 3)
    sent += [b"%d" % at for at in range(50, 100)]
    publish_acked(cluster.nats.url, name, sent[50:])
    eventually(lambda: client.stream(name)["replicas"] == 3, 30, what="three replicas are in sync")
    grown = client.stream(name)
    assert (grown["min_isr"], sorted(grown["isr"])) == (2, [1, 2, 3])
    assert "target_replica_ids" not in grown
    assert client.edit_stream(name, min_isr=3)["min_isr"] == 3
    client.edit_stream(name, min_isr=2)
    sent += [b"%d" % at for at in range(100, 150)]
    publish_acked(cluster.nats.url, name, sent[100:])
    told = natslog("stream", "edit", name, "--replicas", "1", url=cluster.brokers[1].url).stdout
    assert "being moved to brokers" in told or "changed: replicas" in told
    eventually(lambda: client.stream(name)["replicas"] == 1, 30, what="one replica is left")
    assert client.stream(name)["min_isr"] == 1
    publish_acked(cluster.nats.url, name, [b"150"])
    assert all_values(client, name) == [*sent, b"150"]


def test_min_isr_that_is_edited_during_a_resize_is_that_of_the_new_replicas(cluster: Cluster, name: str) -> None:
    client = cluster.client()
    client.create_stream(name, name)
    client.edit_stream(name, replicas=3, min_isr=2)
    client.edit_stream(name, min_isr=1)
    eventually(lambda: client.stream(name)["replicas"] == 3, 30, what="three replicas are in sync")
    assert client.stream(name)["min_isr"] == 1


def test_changes_through_a_follower_that_copies_are_answered(cluster: Cluster, filled: str) -> None:
    """Whoever waits for the replica to be as its record says is told when a copy has ended."""
    leader = cluster.client().stream(filled)["leader"]
    follower = next(broker for broker in cluster.brokers if broker.number != leader)
    has_ended = threading.Event()

    def publish() -> None:
        while not has_ended.is_set():
            publish_acked(cluster.nats.url, filled, [b"." * 10_000] * 200)

    with ThreadPoolExecutor(2) as threads:
        publishing = [threads.submit(publish) for _ in range(2)]
        try:
            for seconds in range(60, 80):
                assert client_of(follower).edit_stream(filled, max_age=f"{seconds}h")["max_age"]
        finally:
            has_ended.set()
    for one in publishing:
        one.result()


def test_nothing_is_added_once_a_seal_was_answered_by_any_broker(cluster: Cluster, filled: str) -> None:
    leader = cluster.client().stream(filled)["leader"]
    follower = next(broker for broker in cluster.brokers if broker.number != leader)
    acked: list[int] = []

    async def publish(connection: Any) -> None:
        """Until the stream answers no more."""
        while True:
            try:
                answers = await asyncio.gather(*(connection.request(filled, b"x", timeout=1.0) for _ in range(50)))
            except (TimeoutError, NoRespondersError):
                return
            acked.extend(body["seq"] - 1 for answer in answers if "error" not in (body := json.loads(answer.data)))

    with ThreadPoolExecutor(1) as threads:
        publishing = threads.submit(with_nats, cluster.nats.url, publish)
        eventually(lambda: len(acked) > 100, what="messages are acked")
        sealed = client_of(follower).seal(filled)
        publishing.result()
    assert sealed["high_watermark"] == cluster.client().stream(filled)["high_watermark"] > max(acked)


@pytest.mark.long
def test_purge_is_asked_of_any_broker_and_reaches_every_replica(cluster: Cluster, filled: str) -> None:
    stream = cluster.client().stream(filled)
    follower = next(broker for broker in cluster.brokers if broker.number != stream["leader"])
    assert client_of(follower).purge(filled)["purged"] == 100

    assert all_values(cluster.client(), filled) == []
    publish_acked(cluster.nats.url, filled, [b"next"])  # a follower begins another segment with it

    def are_removed() -> bool:
        folders = [stream_folder(broker.folder, stream["id"]) for broker in cluster.brokers]
        return not any(path.stat().st_size for folder in folders for path in folder.glob(f"{0:020d}.*"))

    eventually(are_removed, 30, what="every replica has removed its files")
    natslog("cluster", "transfer", str(follower.number), "--stream", filled, url=cluster.brokers[0].url)
    assert publish_acked(cluster.nats.url, filled, [b"on"])[0]["offset"] == 101
    assert all_values(cluster.client(), filled) == [b"next", b"on"]


def test_leadership_is_handed_over_in_order(cluster: Cluster, filled: str) -> None:
    before = cluster.client().stream(filled)
    to = next(number for number in before["isr"] if number != before["leader"])
    done = natslog("cluster", "transfer", str(to), "--stream", filled, url=cluster.brokers[0].url)
    assert f"broker {to} leads stream {filled}" in done.stdout
    after = cluster.client().stream(filled)
    assert (after["leader"], after["leader_epoch"]) == (to, before["leader_epoch"] + 1)
    (ack,) = publish_acked(cluster.nats.url, filled, [b"on"], {"Natslog-Ack": "full"})
    assert ack["epoch"] == after["leader_epoch"]
    assert all_values(cluster.client(), filled)[-1] == b"on"


def test_metadata_leadership_is_handed_over(cluster: Cluster) -> None:
    leader = cluster.client().cluster()["metadata_leader"]
    to = leader % 3 + 1
    natslog("cluster", "transfer", str(to), url=cluster.brokers[0].url)
    assert cluster.client().cluster()["metadata_leader"] == to


def test_metadata_leader_hands_over_before_it_stops(cluster: Cluster) -> None:
    stopped = cluster.broker(cluster.client().cluster()["metadata_leader"])
    others = [broker for broker in cluster.brokers if broker is not stopped]
    terms = {broker.number: broker.json("/v1/cluster")["metadata_term"] for broker in others}
    stopped.terminate()
    try:
        for broker in others:
            body = broker.json("/v1/cluster")  # at once: an election by time-out takes a second or more
            assert body["metadata_leader"] in [other.number for other in others]
            assert body["metadata_term"] == terms[broker.number] + 1
    finally:
        stopped.start()
    cluster.wait_in_sync()


@pytest.mark.long
def test_stopping_broker_gets_no_leadership_back(cluster: Cluster) -> None:
    """The metadata leader, another broker, would transfer every stream back to its preferred leader."""
    client = cluster.client()
    for at in range(6):
        client.create_stream(f"stopped-{at}", f"stopped.{at}", replicas=3, min_isr=2)
    stopped = cluster.broker(client.stream("stopped-0")["leader"])
    others = [broker for broker in cluster.brokers if broker is not stopped]
    client.transfer_metadata(others[0].number)
    led = [one["name"] for one in client.streams() if one["leader"] == stopped.number and one["name"][:8] == "stopped-"]
    epochs = {name: client.stream(name)["leader_epoch"] for name in led}
    stopped.terminate()
    try:
        remaining = client_of(others[1])
        for name in led:
            body = remaining.stream(name)
            assert body["leader"] != stopped.number
            assert body["leader_epoch"] == epochs[name] + 1, "leadership moved once"
        (row,) = [one for one in remaining.cluster()["brokers"] if one["id"] == stopped.number]
        assert row["stopping"]
        assert "DOWN, stopped" in natslog("cluster", "status", url=others[1].url, check=False).stdout
    finally:
        stopped.start()
    cluster.wait_in_sync()
    (row,) = [one for one in client.cluster()["brokers"] if one["id"] == stopped.number]
    assert not row["stopping"]
    eventually(lambda: client.stream(led[0])["leader"] == stopped.number, 30, "its next life is the preferred leader")


@pytest.mark.long
def test_status_is_a_table_and_json(cluster: Cluster, filled: str) -> None:
    text = natslog("cluster", "status", url=cluster.brokers[2].url).stdout
    assert "metadata leader" in text
    assert filled in text
    body = json.loads(natslog("cluster", "status", "--json", url=cluster.brokers[2].url).stdout)
    assert [one["role"] for one in body["brokers"]] == ["voter"] * 3
    assert filled in [one["name"] for one in body["streams"]]


def test_metrics_tell_the_state_of_every_replica(cluster: Cluster, filled: str) -> None:
    leader = cluster.client().stream(filled)["leader"]
    metrics = cluster.broker(leader).metrics()
    of = f'{{stream="{filled}"}}'
    assert metrics[f"natslog_stream_leader{of}"] == 1
    assert metrics[f"natslog_stream_isr_size{of}"] == 3
    assert metrics[f"natslog_stream_under_replicated{of}"] == 0
    assert metrics[f"natslog_stream_leader_epoch{of}"] >= 1
    assert metrics["natslog_links_up"] == 2
    assert sum(broker.metrics()["natslog_metadata_leader"] for broker in cluster.brokers) == 1


# ---- growing and shrinking ----


def newcomer(cluster: Cluster, number: int, folder: Path, **settings: object) -> ClusterBroker:
    first = cluster.brokers[0]
    wanted = first.settings | settings
    del wanted["http_host"], wanted["broker_id"]
    return ClusterBroker(number, folder, cluster.nats.url, "127.0.0.1", free_port(), **wanted)


@pytest.mark.long
def test_broker_is_added_takes_replicas_and_is_removed(cluster: Cluster, filled: str, tmp_path: Path) -> None:
    fourth, url = newcomer(cluster, 4, tmp_path / "fourth"), cluster.brokers[0].url
    fourth.spawn()
    try:
        eventually(lambda: "natslog --server" in fourth.output(), what="it says how it is added")
        natslog("cluster", "add", fourth.url, url=url)
        eventually(lambda: fourth.ready(), 30, "the newcomer is ready")
        eventually(lambda: [one["role"] for one in cluster.client().cluster()["brokers"]] == ["voter"] * 4)
        natslog("cluster", "move", filled, "4,1,2", url=url)
        eventually(lambda: cluster.client().stream(filled)["replica_ids"] == [4, 1, 2], 30, "it has moved")
        eventually(lambda: cluster.client().stream(filled)["leader"] == 4, 40, "the preferred leader leads")
        assert all_values(client_of(fourth), filled) == [b"%d" % at for at in range(100)]
        natslog("cluster", "transfer", "4", url=url)
        eventually(lambda: cluster.client().cluster()["metadata_leader"] == 4, 30, "it leads the metadata, too")
        natslog("cluster", "remove", "4", url=fourth.url)
        body = cluster.client().stream(filled)
        assert sorted(body["replica_ids"]) == [1, 2, 3]
        assert [one["id"] for one in cluster.client().cluster()["brokers"]] == [1, 2, 3]
        assert all_values(cluster.client(), filled) == [b"%d" % at for at in range(100)]
        assert publish_acked(cluster.nats.url, filled, [b"on"])[0]["offset"] == 100
    finally:
        fourth.kill()


def test_more_replicas_than_brokers_are_refused(cluster: Cluster, name: str) -> None:
    with pytest.raises(NotEnoughBrokers, match="only 3 are available"):
        cluster.client(retries=0, patience_s=0).create_stream(name, name, replicas=4)
    with pytest.raises(InvalidRequest, match="min_isr 3 is more than the number of replicas, 2"):
        cluster.client().create_stream(name, name, replicas=2, min_isr=3)


def test_broker_that_others_cannot_replace_is_not_drained(cluster: Cluster, filled: str) -> None:
    with pytest.raises(NotEnoughBrokers, match="add one first"):
        cluster.client(retries=0, patience_s=0).drain_broker(3)
    with pytest.raises(InvalidRequest, match="drain it first"):
        cluster.client(retries=0, patience_s=0).remove_broker(3)
    with pytest.raises(InvalidRequest, match="there is no broker 9"):
        cluster.client(retries=0, patience_s=0).remove_broker(9)


@pytest.mark.long
def test_last_broker_is_not_removed(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "own", brokers=1) as alone:
        done = natslog("cluster", "remove", "1", url=alone.brokers[0].url, check=False)
        assert done.returncode == 1
        assert "the last one" in done.stderr
        done = natslog("cluster", "remove", "1", "--force", url=alone.brokers[0].url, check=False)
        assert done.returncode == 1
        assert "voter" in done.stderr


@pytest.mark.long
def test_lost_broker_that_kept_replicas_is_removed_and_forgotten_when_they_are_elsewhere(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "own") as cluster:
        client = cluster.client()
        client.create_stream("orders", "orders", replicas=2)
        publish_acked(cluster.nats.url, "orders", [b"%d" % at for at in range(50)])
        leader = cluster.leader_of("orders")
        (lost,) = set(client.stream("orders")["replica_ids"]) - {leader.number}
        cluster.brokers[lost - 1].kill()
        natslog("cluster", "remove", str(lost), "--force", url=leader.url)

        def left() -> list[int]:
            return [one["id"] for one in client_of(leader).cluster()["brokers"]]

        eventually(lambda: left() == sorted({1, 2, 3} - {lost}), 60, "the broker is forgotten")
        assert sorted(client_of(leader).stream("orders")["replica_ids"]) == left()
        assert all_values(client_of(leader), "orders") == [b"%d" % at for at in range(50)]


@pytest.mark.long
def test_brokers_stop_within_five_seconds_one_after_another_and_all_at_once(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "own") as cluster:
        for at in range(6):
            cluster.client().create_stream(f"s{at}", f"s{at}", replicas=3)
            publish_acked(cluster.nats.url, f"s{at}", [b"x"] * 10)
        took = []
        for broker in cluster.brokers:
            took.append(broker.terminate())
            broker.start()
            cluster.wait_in_sync()
        with ThreadPoolExecutor(3) as pool:
            took += pool.map(lambda broker: broker.terminate(), cluster.brokers)
        assert max(took) < 5, took


@pytest.mark.long
def test_one_broker_that_is_left_begins_a_new_cluster(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "own") as old:
        old.client().create_stream("orders", "orders", replicas=3)
        old.client().create_stream("elsewhere", "elsewhere", replicas=1)
        publish_acked(old.nats.url, "orders", [b"%d" % at for at in range(50)])
        keeper = old.leader_of("orders")
        assert keeper is not None
        eventually(lambda: "__activity" in old.client().stream("__activity")["name"], what="events are recorded")
        streams = [*old.client().streams(), old.client().stream("__activity")]
        had = {body["name"] for body in streams if keeper.number in body["replica_ids"]}
        running = natslog("cluster", "recover", str(keeper.folder), "--yes", check=False)
        assert "in use by a running broker" in running.stderr
        for broker in old.brokers:
            broker.kill()
        done = natslog("cluster", "recover", str(keeper.folder), "--yes", "--json")
        body = json.loads(done.stdout)
        assert set(body["kept"]) == had
        assert set(body["lost"]) == {"orders", "elsewhere", "__activity"} - had
        keeper.start()
        client = client_of(keeper)
        assert client.cluster()["cluster_id"] == body["cluster_id"] != body["former_cluster_id"]
        assert all_values(client, "orders") == [b"%d" % at for at in range(50)]
        assert publish_acked(old.nats.url, "orders", [b"on"])[0]["offset"] == 50
        former = next(broker for broker in old.brokers if broker is not keeper)
        former.spawn()
        eventually(lambda: "belongs to cluster" in former.output(), what="an old broker is refused with its old folder")


@pytest.mark.long
def test_founding_and_recovery_that_were_cut_short_are_finished(tmp_path: Path) -> None:
    with running(tmp_path / "own") as (server, broker):
        broker.client().create_stream("orders", "orders")
        publish_acked(server.url, "orders", [b"%d" % at for at in range(10)])
        broker.terminate()
        identity = read_checked(broker.folder / "broker", "broker", 3)
        write_checked(broker.folder / "broker", "broker", 3, identity | {"cluster_id": ""})
        broker.start()
        assert broker.client().cluster()["cluster_id"] == identity["cluster_id"]
        broker.terminate()
        shutil.copytree(broker.folder / "raft", broker.folder / "raft.new")
        (broker.folder / "raft").rename(broker.folder / "raft.before-7")
        with pytest.raises(DataDirError, match="cluster recover .* again"):
            DataDir(broker.folder, 1)
        done = natslog("cluster", "recover", str(broker.folder), "--yes", "--json")
        assert json.loads(done.stdout)["kept"] == ["__activity", "orders"]
        broker.start()
        assert all_values(broker.client(), "orders") == [b"%d" % at for at in range(10)]


@pytest.mark.long
def test_metadata_log_that_is_missing_in_whole_or_in_part_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """It holds this broker's vote: a blank one in its place would vote again."""
    with running(tmp_path / "own") as (_, broker):
        broker.terminate()
        kept = tmp_path / "kept"
        shutil.copytree(broker.folder / "raft", kept)
        names = {path.name for path in kept.iterdir()} - {"pulse", "reserve"}
        assert len(names) == 2
        for missing in [*([name] for name in names), [*names], []]:
            shutil.rmtree(broker.folder / "raft")
            if missing:
                shutil.copytree(kept, broker.folder / "raft")
            for name in missing:
                (broker.folder / "raft" / name).unlink()
            said_before = len(broker.output())
            broker.spawn()
            assert broker.wait() == 1
            said = broker.output()[said_before:]
            assert "missing" in said or "is empty" in said
            assert "natslog cluster remove ID" in said
        shutil.rmtree(broker.folder / "raft")
        shutil.copytree(kept, broker.folder / "raft")
        broker.start()


# ---- who is not let in ----


@pytest.mark.long
def test_second_broker_of_one_id_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    double = newcomer(cluster, 2, tmp_path / "double").spawn()
    try:
        eventually(lambda: "two brokers have the id 2" in double.output(), what="it says what is wrong")
        assert "broker_id" in double.output()
    finally:
        double.kill()


@pytest.mark.long
def test_broker_with_another_secret_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    secret = write_secret(tmp_path / "secret", "not the one that the others have")
    stranger = newcomer(cluster, 5, tmp_path / "stranger", cluster_secret_file=secret).spawn()
    try:
        eventually(lambda: "another cluster secret" in stranger.output(), what="it says what is wrong")
        assert "cluster_secret_file" in stranger.output()
    finally:
        stranger.kill()


def staged_rows(client: NatslogClient, stream: str, batch: int, count: int = 20_000) -> Any:
    """Of a batch of the producer `query`, in two tasks."""
    parts = []
    for task in range(2):
        uploader = PartUploader(client, stream, "query", batch, label=str(task))
        values = [b"%d %d %s" % (batch, row, b"x" * 300) for row in range(task, count, 2)]
        uploader.add(pa.record_batch({"value": pa.array(values, pa.binary())}))
        parts += uploader.finish()
    return parts


@pytest.mark.long
def test_batch_survives_a_change_of_the_leader_between_staging_and_commit(cluster: Cluster, name: str) -> None:
    """The new leader copies what is staged at the former one; also where that one was restarted meanwhile."""
    client = cluster.client()
    client.create_stream(name, name, replicas=3)
    for batch in range(3):
        leader = cluster.leader_of(name)
        assert leader is not None, "there is one"
        parts = staged_rows(client, name, batch)
        assert {part.broker for part in parts} == {leader.number}
        to = next(number for number in (1, 2, 3) if number != leader.number)
        natslog("cluster", "transfer", str(to), "--stream", name, url=cluster.brokers[0].url)
        eventually(lambda to=to: (now := cluster.leader_of(name)) is not None and now.number == to)
        if batch == 2:
            leader.kill()
            leader.spawn()  # it is not ready before the commit is requested
        appended = client.commit_append(name, "query", batch, parts, parts_within_s=60)
        assert appended == Appended(batch * 20_000, (batch + 1) * 20_000, False)
        assert client.commit_append(name, "query", batch, parts).duplicate
    cluster.wait_in_sync()
    assert len(set(all_values(client, name))) == 60_000


@pytest.mark.long
def test_part_whose_broker_is_away_or_has_lost_it(cluster: Cluster, name: str) -> None:
    client = cluster.client()
    client.create_stream(name, name, replicas=3)
    leader = cluster.leader_of(name)
    assert leader is not None, "there is one"
    parts = staged_rows(client, name, 0, 100)
    to = next(number for number in (1, 2, 3) if number != leader.number)
    natslog("cluster", "transfer", str(to), "--stream", name, url=cluster.brokers[0].url)
    eventually(lambda: (now := cluster.leader_of(name)) is not None and now.number == to)
    leader.kill()
    with pytest.raises(NatslogError, match=f"is staged at broker {leader.number}, which does not respond"):
        client.commit_append(name, "query", 0, parts, parts_within_s=0)
    shutil.rmtree(leader.folder / "staged")
    leader.start()
    with pytest.raises(PartsMissing, match="Stage the batch again"):
        client.commit_append(name, "query", 0, parts, parts_within_s=60)
    unknown = [msgspec.structs.replace(part, broker=77) for part in parts]
    with pytest.raises(PartsMissing):
        client.commit_append(name, "query", 0, unknown, parts_within_s=60)
    cluster.wait_in_sync()


@pytest.mark.long
def test_broker_of_another_cluster_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    other = newcomer(cluster, 6, tmp_path / "other", seeds="")
    other.start()  # founds a cluster of its own
    try:
        with pytest.raises((ClusterMismatch, NatslogError), match="belongs to"):
            cluster.client(retries=0, patience_s=0).add_broker(other.url)
    finally:
        other.kill()


@pytest.mark.long
def test_seeds_that_nobody_answers_at_are_named(tmp_path: Path, cluster: Cluster) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    lonely = newcomer(cluster, 7, tmp_path / "lonely", seeds=nobody).spawn()
    try:
        eventually(lambda: f"not reached: {nobody}" in lonely.output(), 30, "it names who is missing")
        assert not lonely.ready()
        assert lonely.terminate(15) < 15, "it stops in order also while it waits"
    finally:
        lonely.kill()


@pytest.mark.long
def test_address_without_a_broker_is_not_added(cluster: Cluster) -> None:
    with pytest.raises(NatslogError, match="no broker could be reached"):
        cluster.client(retries=0, patience_s=0).add_broker(f"http://127.0.0.1:{free_port()}")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://127.0.0.1:9292", "http:// or https://"),
        ("http://", "names no host"),
        ("http://user:secret@127.0.0.1:9292", "must not contain credentials"),
        ("http://127.0.0.1:99999", "host or port is wrong"),
        ("http://127.0.0.1:9292/?x", "must end after host"),
    ],
)
@pytest.mark.long
def test_what_is_no_address_is_not_added(cluster: Cluster, url: str, reason: str) -> None:
    done = natslog("cluster", "add", url, url=cluster.brokers[0].url, check=False)
    assert done.returncode != 0
    assert reason in done.stderr.replace("\n", " ")
    assert "secret@" not in done.stderr


def test_numbers_that_cannot_be_stored_are_refused_and_harm_nobody(cluster: Cluster, filled: str) -> None:
    """They would travel to the metadata leader, and stop the link or every broker."""
    for broker in cluster.brokers:
        for method, path, body in (
            ("PUT", f"/v1/cursors/c/{filled}", {"offset": 2**64}),
            ("PUT", f"/v1/cursors/c/{filled}", {"offset": 2**63}),
            ("PUT", f"/v1/streams/{filled}/replicas", {"brokers": [1, 2**64]}),
            ("PUT", f"/v1/streams/{filled}/replicas", {"brokers": [1, 0]}),
            ("POST", f"/v1/streams/{filled}/leader", {"to": 2**64}),
            ("POST", "/v1/streams", {"name": "huge", "subject": "huge", "max_messages": 2**64}),
            ("DELETE", f"/v1/cluster/brokers/{'9' * 40}", None),
            ("DELETE", f"/v1/cluster/brokers/{1:020d}{'9' * 5000}", None),
        ):
            answer = broker._pool.request(
                method, broker.url + path, body=None if body is None else json.dumps(body).encode()
            )
            assert answer.status in (400, 307), f"{method} {path} {body}: {answer.status} {answer.data.decode()}"
    cluster.wait_in_sync()


def test_link_without_the_secret_hears_nothing(cluster: Cluster) -> None:
    """A client of the brokers' own endpoint that does not prove the secret gets an error, and no WebSocket."""
    import asyncio

    import aiohttp

    from natslog.node.peers.handshake import LINK_HEADER, PROOF_HEADER, Dialling, Hello
    from natslog.node.peers.keys import KeyRing

    address = cluster.brokers[0].url + "/internal/link"
    hello = Hello(
        protocol=2,
        version="0.2.0",
        broker=9,
        url="http://x",
        directory="d",
        life=1,
        cluster_id="",
        min_level=2,
        max_level=3,
        wall_us=0,
        dialled=cluster.brokers[0].url,
    )
    dialling = Dialling(KeyRing([b"guessed, and sixteen"]), hello)

    async def knock() -> None:
        async with aiohttp.ClientSession() as session:
            for proof in (dialling.proof, "", "nonsense"):
                async with session.post(address, data=dialling.body, headers={PROOF_HEADER: proof}) as answer:
                    error = (await answer.json())["error"]
                    assert (answer.status, error["code"]) == (403, "cluster_mismatch")
                    assert "another cluster secret" in error["message"]
                    assert PROOF_HEADER not in answer.headers
            async with session.post(address, data=bytes(65 * 1024)) as answer:
                assert answer.status == 413
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await session.ws_connect(address, headers={LINK_HEADER: f"{hello.nonce}:{'0' * 64}"})
            assert refused.value.status == 403

    asyncio.run(knock())


@pytest.mark.long
def test_status_names_what_is_wrong_and_waits_until_it_is_over(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "own") as cluster:
        cluster.client().create_stream("orders", "orders.>", replicas=3)
        urls = ("--server", ",".join(broker.url for broker in cluster.brokers))
        healthy = natslog(*urls, "cluster", "status", "--wait", "60").stdout
        said = "healthy: 3 of 3 brokers, 1 of 1 streams with a leader, all replicas in sync"
        assert healthy.splitlines()[-1] == said
        cluster.nats.stop()
        eventually(lambda: natslog(*urls, "cluster", "status", check=False).returncode == 1, every_s=0.5)
        without_nats = natslog(*urls, "cluster", "status", "--json", check=False)
        assert without_nats.returncode == 1
        body = json.loads(without_nats.stdout)
        assert not body["healthy"]
        assert sum("no connection to NATS" in problem for problem in body["problems"]) == 3
        cluster.nats.start()
        assert said in natslog(*urls, "cluster", "status", "--wait", "60").stdout
        for broker in cluster.brokers[:2]:
            broker.kill()
        last = cluster.brokers[2]
        eventually(lambda: not last.json("/v1/cluster")["is_current"])
        status = natslog("cluster", "status", "--wait", "1", url=last.url, check=False)
        assert status.returncode == 1
        assert "problem: the metadata is unavailable because no majority of the brokers is connected" in status.stdout
        for broker in cluster.brokers[:2]:
            assert f"problem: broker {broker.number} at {broker.url} is down" in status.stdout
        assert " ok" not in status.stdout
        wrong = natslog("cluster", "status", "1", url=last.url, check=False)
        assert (wrong.returncode, wrong.stderr) == (1, "error: SECONDS requires --wait\n")


@pytest.mark.long
def test_pub_whose_stream_has_no_leader_says_so(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "own") as cluster:
        cluster.client().create_stream("orders", "orders.>", replicas=1)
        leader = cluster.leader_of("orders")
        assert leader is not None
        other = next(broker for broker in cluster.brokers if broker is not leader)
        leader.kill()
        eventually(lambda: any("problem" in stream for stream in other.json("/v1/streams") or []))
        command = ("pub", "orders.new", "x", "--ack", "--ack-timeout", "1", "--nats-url", cluster.nats.url)
        said = natslog(*command, url=other.url, check=False).stderr
        assert "Stream orders records this subject but cannot accept messages now: " in said
        assert "leader" in said
        assert "Create one" not in said
        unasked = natslog(*command, url="http://127.0.0.1:1", check=False).stderr
        assert "The cause could not be determined: no broker answered" in unasked
        none = natslog("pub", "nobody.here", *command[2:], url=other.url, check=False).stderr
        assert "No stream records 'nobody.here'. Create one: natslog stream create" in none
