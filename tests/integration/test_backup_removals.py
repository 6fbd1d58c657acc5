"""What is removed between two exports: the export states it, imports leave it out, and erased bytes are in no file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.errors import NoRespondersError

from natslog.backup.exporting import ExportOptions, export_stream
from natslog.backup.importing import checked_export, import_stream
from natslog.backup.manifest import MANIFEST
from natslog.client import NatslogClient
from natslog.errors import DamagedExport, InvalidRequest, StreamConflict
from tests.cluster_harness import running_cluster
from tests.harness import BrokerProcess, eventually, natslog, publish_acked, running
from tests.integration.test_backup import imported, rows
from tests.integration.test_erasure import completed, in_files
from tests.integration.test_removal import numbers
from tests.integration.test_removal_in_clusters import everywhere

SMALL = ExportOptions(file_bytes=8 * 1024)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("other"), retention_interval="200ms") as (_, broker):
        yield broker


@pytest.fixture
def there(other: BrokerProcess) -> Iterator[NatslogClient]:
    with other.client() as client:
        yield client


@pytest.mark.long
def test_removals_between_two_increments_are_carried(
    broker: BrokerProcess, client: NatslogClient, there: NatslogClient, filled: str, tmp_path: Path
) -> None:
    folder = tmp_path / "x"
    client.edit_stream(filled, max_messages_per_subject=45)
    export_stream(client, filled, folder, SMALL)
    imported(there, folder, filled)
    assert numbers(there, filled) == numbers(client, filled)
    before = {path.name for path in folder.glob("*.arrow")}

    client.delete_message(filled, 42)
    client.purge(filled, 60, subject=f"{filled}.odd.>")
    client.purge(filled, 20)
    publish_acked(broker.nats_url, f"{filled}.even.x", [b"%d" % at for at in range(100, 110)])
    expected = numbers(client, filled)
    exported = export_stream(client, filled, folder, SMALL)
    assert (exported.messages, exported.added_messages) == (len(expected), 10)
    assert exported.removed_messages == 90 - (len(expected) - 10)
    assert exported.rewritten_files == 0
    assert before < {path.name for path in folder.glob("*.arrow")}, "files of an export stay as they are"
    again = export_stream(client, filled, folder, SMALL)
    assert (again.messages, again.added_messages, again.removed_messages) == (len(expected), 0, 0)

    imported(there, folder, f"{filled}-new")
    assert numbers(there, f"{filled}-new") == expected, "without what was removed since it was exported"
    assert rows(there, f"{filled}-new") == rows(client, filled)
    assert imported(there, folder, filled).added_messages == 10
    assert numbers(there, filled) == expected, "removed from what was imported before, too"
    for name in (filled, f"{filled}-new"):
        assert there.stream(name)["messages"] == len(expected)

    client.delete_message(filled, 105)
    export_stream(client, filled, folder, SMALL)
    assert imported(there, folder, filled).added_messages == 0
    assert numbers(there, filled) == [at for at in expected if at != 105], "a removal alone is imported"
    epoch = there.stream(filled)["settings_version"]
    assert imported(there, folder, filled).added_messages == 0
    assert there.stream(filled)["settings_version"] == epoch


@pytest.mark.long
def test_erased_bytes_leave_the_export_and_what_was_imported_from_it(
    broker: BrokerProcess, client: NatslogClient, there: NatslogClient, other: BrokerProcess, name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "x"
    client.create_stream(name, f"{name}.>", compression="zstd")
    for at in range(40):
        subject = f"{name}.anna" if at % 10 == 3 else f"{name}.bob"
        headers = {"Natslog-Key": "key-carl"} if at % 10 == 7 else None
        publish_acked(broker.nats_url, subject, [b"secret-%d-" % at if at % 10 in (3, 7) else b"%d" % at], headers)
    export_stream(client, name, folder, SMALL)
    imported(there, folder, name)
    bodies = [client.erase(name, subject=f"{name}.anna"), client.erase(name, key="key-carl")]
    for body in bodies:
        completed(client, name, body)
    assert in_files(folder, b"secret-"), "the former export has them until the next one"
    done = natslog("export", name, str(folder), url=broker.url)
    assert "8 were removed since the last export" in " ".join(done.stdout.split())
    assert "files had erased messages and were replaced" in " ".join(done.stdout.split())
    secrets = (b"secret-", f"{name}.anna".encode(), b"key-carl")
    assert in_files(folder, *secrets) == []
    assert natslog("verify", str(folder)).returncode == 0
    assert export_stream(client, name, folder, SMALL).rewritten_files == 0

    imported(there, folder, f"{name}-new")
    expected = [at for at in range(40) if at % 10 not in (3, 7)]
    assert numbers(there, f"{name}-new") == expected
    imported(there, folder, name)
    assert numbers(there, name) == expected
    for stream in other.folder.glob(f"streams/{name}*"):
        eventually(lambda stream=stream: not in_files(stream, *secrets))
    assert in_files(folder / MANIFEST, *secrets) == []


def test_an_interrupted_export_with_erased_messages_leaves_the_former_one(
    broker: BrokerProcess, client: NatslogClient, filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "x"
    export_stream(client, filled, folder, SMALL)
    client.erase(filled, subject=f"{filled}.odd.x")
    publish_acked(broker.nats_url, f"{filled}.even.x", [b"100"])

    def fails(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(NatslogClient, "stored_batches", fails)
    with pytest.raises(KeyboardInterrupt):
        export_stream(client, filled, folder, SMALL)
    assert checked_export(folder).rows == 100, "the former export is intact"
    monkeypatch.undo()
    assert export_stream(client, filled, folder, SMALL).messages == 51
    assert in_files(folder, b".odd.x") == []
    assert checked_export(folder).rows == 51
    again = {path.name.partition("-")[0] for path in folder.glob("*-1.arrow")}
    assert again
    assert not any((folder / f"{one}.arrow").exists() for one in again), "the former files are gone"


def is_stored(nats_url: str, subject: str, value: bytes) -> bool:
    """A paused stream has no subscription; its leader subscribes a moment after the edit."""
    try:
        (ack,) = publish_acked(nats_url, subject, [value])
    except NoRespondersError:
        return False
    return "error" not in ack


@pytest.mark.long
def test_gaps_of_an_imported_stream_are_removed_messages_on_all_replicas(
    client: NatslogClient, filled: str, tmp_path: Path
) -> None:
    client.purge(filled, subject=f"{filled}.odd.x")
    client.delete_message(filled, 4)
    expected = [at for at in range(100) if at // 5 % 2 == 0 and at != 4]
    export_stream(client, filled, tmp_path / "x", SMALL)
    with running_cluster(tmp_path / "own", settings={"retention_interval": "500ms"}) as cluster:
        there = cluster.client()
        import_stream(there, tmp_path / "x", checked_export(tmp_path / "x"), filled)
        there.edit_stream(filled, replicas=3)
        eventually(lambda: len(there.stream(filled)["isr"]) == 3, 60)
        everywhere(cluster, filled, expected)
        assert there.stream(filled)["messages"] == len(expected)
        assert sum(split.rows or 0 for split in there.splits(filled, 0, 100)) == len(expected)
        assert there.lag(filled, 0)["rows"] == len(expected)
        leader = cluster.leader_of(filled)
        assert leader is not None
        leader.kill()
        eventually(lambda: cluster.leader_of(filled) not in (None, leader), within_s=30)
        assert there.stream(filled)["messages"] == len(expected)
        assert numbers(there, filled) == expected
        leader.start()
        cluster.wait_in_sync()
        there.edit_stream(filled, paused=False)
        eventually(lambda: is_stored(cluster.nats.url, f"{filled}.new", b"100"), what="the leader has subscribed")
        assert numbers(there, filled) == [*expected, 100]
        for broker in cluster.brokers:
            broker.terminate()
            assert "all CRCs are correct" in natslog("verify", str(broker.folder)).stdout


def test_removals_that_are_not_valid_are_refused(
    client: NatslogClient, there: NatslogClient, filled: str, tmp_path: Path
) -> None:
    export_stream(client, filled, tmp_path / "x")
    imported(there, tmp_path / "x", filled)
    stream_id = there.stream(filled)["id"]
    with pytest.raises(StreamConflict, match="not being imported"):
        there.remove_imported(filled, stream_id, {"removed": ""})
    with pytest.raises(InvalidRequest, match="at once"):
        client.removals(filled, 0, 10**12)
    text = (tmp_path / "x" / MANIFEST).read_text()
    (tmp_path / "x" / MANIFEST).write_text(text.replace('"rows": 100', '"rows": 100, "removed": 101'))
    with pytest.raises(DamagedExport):
        checked_export(tmp_path / "x")
