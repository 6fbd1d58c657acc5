"""Erasure by subject and by key: afterwards no file of any broker has the bytes, and all other messages are there."""

from __future__ import annotations

import base64
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from natslog.client import NatslogClient
from natslog.errors import ErasureNotFound, InvalidRequest, RemovalDenied, StreamNotFound, StreamSealed
from tests.cluster_harness import running_cluster
from tests.harness import BrokerProcess, eventually, natslog, publish_acked, running
from tests.integration.asking import ask, error
from tests.integration.test_removal import numbers


def in_files(folder: Path, *texts: bytes) -> list[str]:
    """Files of the data folder that have one of these bytes."""
    found = []
    for path in sorted(folder.rglob("*")):
        try:
            data = path.read_bytes() if path.is_file() else b""
        except FileNotFoundError:  # renamed meanwhile
            continue
        found += [f"{path.relative_to(folder)}: {text!r}" for text in texts if text in data]
    return found


def completed(client: NatslogClient, stream: str, body: dict[str, Any], within_s: float = 30.0) -> dict[str, Any]:
    """The receipt when all replicas have finished."""

    def found() -> dict[str, Any] | None:
        receipt = client.erasure(stream, body["id"])
        return receipt if receipt["complete"] else None

    return eventually(found, within_s, "the erasure is complete")  # type: ignore[return-value]


def keyed(url: str, subject: str, key: str, values: list[bytes]) -> None:
    publish_acked(url, subject, values, {"Natslog-Key": key})


@pytest.mark.long
def test_a_subject_is_gone_from_all_files(tmp_path: Path) -> None:
    with running(tmp_path / "own", retention_interval="200ms") as (nats, broker):
        client = broker.client()
        client.create_stream("s", "s.>", compression="zstd", max_messages_per_subject=3)
        for at in range(20):
            publish_acked(nats.url, f"s.user.{at % 4}", [b"secret-%d" % at if at % 4 == 1 else b"%d" % at])
        client.roll("s")
        publish_acked(nats.url, "s.user.1", [b"secret-20"])
        client.delete_message("s", 8)
        body = client.erase("s", subject="s.user.1")
        assert (body["messages"], body["erases"]) == (6, "subject"), "also those that the limit had hidden"
        kept = [at for at in range(9, 20) if at % 4 != 1]
        assert numbers(client, "s") == kept
        receipt = completed(client, "s", body)
        (replica,) = receipt["replicas"]
        assert [file["rows"] for file in replica["files"]] == [5, 1]
        assert replica["remaining"] == []
        assert in_files(broker.folder, b"secret-", b"s.user.1") == []
        assert numbers(client, "s") == kept
        broker.terminate()
        assert in_files(broker.folder, b"secret-", b"s.user.1") == []
        broker.start()
        assert numbers(client, "s") == kept
        assert client.erasure("s", body["id"]) == receipt
        publish_acked(nats.url, "s.user.1", [b"21"])
        assert numbers(client, "s") == [*kept, 21], "the subject may be used again"


@pytest.mark.long
def test_a_key_is_gone_from_all_files_and_what_it_hid_stays_hidden(tmp_path: Path) -> None:
    with running(tmp_path / "own", retention_interval="200ms") as (nats, broker):
        client = broker.client()
        client.create_stream("s", "s.>", compact=True)
        for at in range(12):
            keyed(nats.url, f"s.{at % 2}", f"key-{at % 3}", [b"%d" % at])
        keyed(nats.url, "s.1", "key-0", [b"12"])
        client.roll("s")
        body = client.erase("s", key=b"key-0")
        assert numbers(client, "s") == [10, 11]
        receipt = completed(client, "s", body)
        assert (receipt["erases"], receipt["messages"]) == ("key", 5)
        assert in_files(broker.folder, b"key-0") == []
        broker.terminate()
        assert in_files(broker.folder, b"key-0") == []
        for newest in broker.folder.glob("streams/s.*/newest"):
            newest.unlink()
        broker.start()
        assert numbers(client, "s") == [10, 11]
        keyed(nats.url, "s.0", "key-0", [b"13"])
        assert numbers(client, "s") == [10, 11, 13]
        (logged,) = [line for line in broker.output().splitlines() if body["id"] in line]
        assert "(not logged)" in logged
        assert "key-0" not in broker.output()


def test_a_text_of_which_no_row_is_left_is_erased_too(tmp_path: Path) -> None:
    """The table of the newest messages has the keys of deleted ones."""
    with running(tmp_path / "own", retention_interval="200ms") as (nats, broker):
        client = broker.client()
        client.create_stream("s", "s.>", compact=True, dedupe_window=0)
        keyed(nats.url, "s.a", "key-anna", [b"0"])
        keyed(nats.url, "s.a", "key-bob", [b"1"])
        client.roll("s")
        client.delete_message("s", 0)
        (folder,) = broker.folder.glob("streams/s.*")
        eventually(lambda: not in_files(folder, b"key-anna"))  # rewritten, as any segment of which so much is removed
        body = client.erase("s", key="key-anna")
        assert body["messages"] == 0
        completed(client, "s", body)
        broker.terminate()
        assert in_files(broker.folder, b"key-anna") == []


@pytest.mark.long
def test_the_command_line_waits_and_prints_the_receipt(client: NatslogClient, filled: str) -> None:
    url = client.servers[0]
    refused = natslog("stream", "erase", filled, "--subject", f"{filled}.odd.x", url=url, check=False)
    assert refused.returncode != 0
    assert "were not erased: confirmation is required" in refused.stderr
    neither = natslog("stream", "erase", filled, "--yes", url=url, check=False)
    assert "--subject or --key" in neither.stderr
    done = natslog("stream", "erase", filled, "--subject", f"{filled}.odd.x", "--yes", url=url)
    assert "50 messages: complete on all replicas" in done.stdout.replace("\n", " ")
    assert "00000000000000000000.arrow" in done.stdout
    assert numbers(client, filled) == [at for at in range(100) if at // 5 % 2 == 0]
    nothing = natslog("stream", "erase", filled, "--key", "nobody", "--yes", url=url)
    assert "nothing was erased" in nothing.stdout
    begun = natslog("stream", "erase", filled, "--subject", ">", "--yes", "--no-wait", "--json", url=url)
    body = json.loads(begun.stdout)
    assert body["messages"] == 50
    completed(client, filled, body)
    shown = natslog("stream", "erase", filled, "--receipt", body["id"], "--json", url=url)
    assert json.loads(shown.stdout)["complete"]


@pytest.mark.long
def test_what_cannot_be_erased_is_refused(broker: BrokerProcess, client: NatslogClient, filled: str, name: str) -> None:
    for body, why in (
        ({}, "one of them"),
        ({"subject": "a", "key": "b"}, "one of them"),
        ({"subject": "a..b"}, "subject"),
        ({"key": 7}, "must be a string"),
        ({"key_base64": "%"}, "key_base64 is not valid"),
        ({"key_base64": "ä"}, "key_base64 is not valid"),
        ({"offset": 7}, "one of them"),
    ):
        answer = ask(broker, "POST", f"/v1/streams/{filled}/erase", body)
        assert (answer.status, error(answer)["code"]) == (400, "invalid_request")
        assert why in error(answer)["message"]
    assert client.erase(filled, key=base64.b64decode("AP8="))["id"] is None
    with pytest.raises(ErasureNotFound, match="no erasure"):
        client.erasure(filled, "abc")
    with pytest.raises(InvalidRequest, match="id of an erasure"):
        client.erasure(filled, "../x")
    with pytest.raises(StreamNotFound):
        client.erase("nothing", subject="a")
    with pytest.raises(InvalidRequest, match="written by natslog itself"):
        client.erase("__activity", subject=">")
    for setting in ("deny_delete", "deny_purge"):
        client.create_stream(f"{name}-{setting}", f"{name}-{setting}", **{setting: True})
        with pytest.raises(RemovalDenied):
            client.erase(f"{name}-{setting}", subject=">")
    client.seal(filled)
    with pytest.raises(StreamSealed):
        client.erase(filled, subject=">")
    assert len(numbers(client, filled)) == 100


def test_publishers_continue_and_two_erasures_at_once_are_complete(
    broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    client.create_stream(name, f"{name}.>")
    stops, sent = threading.Event(), 0

    def publish() -> None:
        nonlocal sent
        while not stops.is_set():
            publish_acked(broker.nats_url, f"{name}.a", [b"a%d-x" % at for at in range(sent, sent + 20)])
            publish_acked(broker.nats_url, f"{name}.b", [b"b"] * 20)
            sent += 20

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        eventually(lambda: sent >= 40)
        before = sent
        bodies = [client.erase(name, subject=f"{name}.{one}") for one in "ab"]
        for body in bodies:
            completed(client, name, body)
        eventually(lambda: sent > before + 40)
    finally:
        stops.set()
        publisher.join()
    found = [value for batch in client.read(name, subject=f"{name}.a") for value in batch.column("value").to_pylist()]
    assert found == [b"a%d-x" % at for at in range(sent - len(found), sent)], "only the oldest are gone"
    assert len(found) <= sent - before
    (folder,) = broker.folder.glob(f"streams/{name}.*")
    eventually(lambda: not in_files(folder, *[b"a%d-x" % at for at in range(before)]))


@pytest.mark.long
def test_no_replica_has_the_bytes_after_a_kill_during_the_erasure(tmp_path: Path) -> None:
    settings = {"retention_interval": "500ms", "segment_bytes": "256KiB"}
    with running_cluster(tmp_path / "own", settings=settings) as cluster:
        client, url = cluster.client(), cluster.nats.url
        client.create_stream("s", "s.>", replicas=3, compression="zstd", max_messages_per_subject=1000)
        padding = bytes(range(256)) * 4
        for first in range(0, 4000, 200):
            subject = "s.anna" if first % 1000 == 0 else "s.bob"
            values = [b"secret-%d" % at + padding for at in range(first, first + 200)]
            publish_acked(url, subject, values, {"Natslog-Key": f"key-of-{subject}"})
        follower = next(one for one in cluster.brokers if one is not cluster.leader_of("s"))
        body = client.erase("s", subject="s.anna")
        follower.kill()
        later = client.erase("s", key="key-of-s.bob")
        receipt = client.erasure("s", later["id"])
        assert not receipt["complete"]
        assert [one for one in receipt["replicas"] if "problem" in one]
        leader = cluster.leader_of("s")
        follower.start()
        cluster.wait_in_sync()
        assert leader is not None
        leader.kill()
        eventually(lambda: cluster.leader_of("s") not in (None, leader), within_s=30)
        leader.start()
        cluster.wait_in_sync()
        for one in (body, later):
            receipt = completed(client, "s", one, within_s=60)
            assert all(replica["files"] for replica in receipt["replicas"])
        for broker in cluster.brokers:
            assert in_files(broker.folder, b"secret-", b"key-of-s.", b"s.anna") == []
        assert not list(client.read("s")) or not sum(batch.num_rows for batch in client.read("s"))


@pytest.mark.long
def test_an_erasure_while_the_leader_changes_is_done_or_refused(tmp_path: Path) -> None:
    """An error may be retried: what was erased already is erased again, without harm."""
    with running_cluster(tmp_path / "own", settings={"retention_interval": "500ms"}) as cluster:
        client, url = cluster.client(), cluster.nats.url
        client.create_stream("s", "s.>", replicas=3)
        for at in range(50):
            publish_acked(url, f"s.{at % 5}", [b"secret-%d-" % at if at % 5 == 2 else b"%d" % at])
        leader = cluster.leader_of("s")
        assert leader is not None
        killer = threading.Timer(0.05, leader.kill)
        killer.start()
        bodies = [client.erase("s", subject="s.2") for _ in range(4)]
        killer.join()
        eventually(lambda: cluster.leader_of("s") not in (None, leader), within_s=30)
        leader.start()
        cluster.wait_in_sync()
        for body in bodies:
            if body["id"] is not None:
                completed(client, "s", body)
        assert numbers(client, "s") == [at for at in range(50) if at % 5 != 2]
        for broker in cluster.brokers:
            assert in_files(broker.folder, b"secret-", b"s.2") == []


@pytest.mark.long
def test_an_idle_follower_rolls_its_open_segment(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "own", settings={"retention_interval": "500ms"}) as cluster:
        client, url = cluster.client(), cluster.nats.url
        client.create_stream("s", "s.>", replicas=3)
        publish_acked(url, "s.anna", [b"secret"])
        publish_acked(url, "s.bob", [b"1"])
        receipt = completed(client, "s", client.erase("s", subject="s.anna"))
        assert [len(one["files"]) for one in receipt["replicas"]] == [1, 1, 1]
        for broker in cluster.brokers:
            assert in_files(broker.folder, b"secret", b"s.anna") == []
        assert numbers(client, "s") == [1]
        publish_acked(url, "s.bob", [b"2"])
        assert numbers(client, "s") == [1, 2]
