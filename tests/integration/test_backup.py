"""Exports and imports through the command line and the client: equal streams in another cluster, and their lineage."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from natslog.backup.exporting import ExportOptions, export_stream
from natslog.backup.importing import ImportOptions, checked_export, import_stream
from natslog.backup.manifest import CLUSTER, MANIFEST, PARTIAL, StreamManifest, read_manifest
from natslog.client import ClientOptions, NatslogClient
from natslog.client.appending import PartUploader
from natslog.errors import (
    DamagedExport,
    ExportFailed,
    InvalidRequest,
    NatslogError,
    StreamConflict,
    StreamImporting,
    StreamPaused,
    StreamRecreated,
)
from natslog.model import Fork, Offset, StreamId
from tests.cluster_harness import running_cluster
from tests.gaps import remove_offsets
from tests.harness import BrokerProcess, all_values, eventually, natslog, publish_acked, running
from tests.integration.asking import ask, error
from tests.integration.test_access import admin_token

SMALL = ExportOptions(file_bytes=8 * 1024)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """The cluster that is imported into, with a NATS server of its own."""
    with running(tmp_path_factory.mktemp("other")) as (_, broker):
        yield broker


@pytest.fixture
def there(other: BrokerProcess) -> Iterator[NatslogClient]:
    with other.client() as client:
        yield client


def rows(client: NatslogClient, stream: str) -> list[dict[str, Any]]:
    """Every column of every message."""
    return pa.Table.from_batches(list(client.read(stream))).to_pylist()


def imported(client: NatslogClient, folder: Path, name: str, **options: Any) -> Any:
    return import_stream(client, folder, checked_export(folder), name, ImportOptions(**options))


def more(broker: BrokerProcess, stream: str, first: int, count: int) -> None:
    publish_acked(broker.nats_url, f"{stream}.odd.x", [b"%d" % at for at in range(first, first + count)])


# ---- equal streams ----


@pytest.mark.long
@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_settings_of_jetstream_are_kept_as_far_as_no_message_is_lost(
    broker: BrokerProcess,
    client: NatslogClient,
    there: NatslogClient,
    other: BrokerProcess,
    name: str,
    tmp_path: Path,
    retention: str,
) -> None:
    """Consumers are not in an export: without them, a resumed stream of interest would remove its messages."""
    jetstream = {"retention": retention, "description": "jobs", "allow_direct": True}
    lineage = [Fork(id=StreamId(f"jetstream:{name}:x"), offset=Offset(0))]
    kept = {"settings": {"subject": f"{name}.>"}, "first_offset": 0, "subjects": [f"{name}.>"]}
    begun = client.begin_import(name, lineage=lineage, jetstream=jetstream, **kept)
    client.finish_import(name, begun["id"], lineage=lineage, resume=True)
    assert client.stream(name)["jetstream"] == jetstream
    publish_acked(broker.nats_url, f"{name}.a", [b"1", b"2"])
    natslog("export", name, str(tmp_path / "x"), url=broker.url)
    said = natslog("import", str(tmp_path / "x"), "--resume", url=other.url).stdout
    is_interest = retention == "interest"
    assert ("its retention is limits instead of interest" in said) == is_interest
    expected = {key: value for key, value in jetstream.items() if not (is_interest and key == "retention")}
    assert there.stream(name)["jetstream"] == expected
    shown = natslog("stream", "info", name, url=other.url).stdout
    assert re.search(rf"retention\W+{'limits' if is_interest else retention}", shown)
    assert all_values(there, name) == [b"1", b"2"]


def test_restored_stream_equals_the_original(
    broker: BrokerProcess, client: NatslogClient, there: NatslogClient, other: BrokerProcess, name: str, tmp_path: Path
) -> None:
    """Values, offsets, times, keys, headers; a log start above 0; runs of direct appends; message ids."""
    client.create_stream(name, f"{name}.>", dedupe_window="10m")
    publish_acked(broker.nats_url, f"{name}.a", [b"%d" % at for at in range(50)])
    publish_acked(broker.nats_url, f"{name}.a", [b"once"], {"Nats-Msg-Id": "m1", "Trace": "t", "Natslog-Key": "k"})
    keys = pa.array([b"k1", None])
    uploader = PartUploader(client, name, "producer", 7, subject=f"{name}.b")
    uploader.add(pa.RecordBatch.from_pydict({"value": [b"x", b""], "key": keys}))
    client.commit_append(name, "producer", 7, uploader.finish())
    client.purge(name, 7)
    done = natslog("export", name, str(tmp_path / "x"), "--json", url=broker.url)
    assert json.loads(done.stdout) | {"bytes": 0, "added_bytes": 0, "id": ""} == {
        "stream": name, "id": "", "first_offset": 7, "end_offset": 53, "messages": 46, "bytes": 0, "files": 1,
        "added_messages": 46, "added_bytes": 0, "removed_messages": 0, "rewritten_files": 0,
    }  # fmt: skip
    shown = natslog("import", str(tmp_path / "x"), url=other.url).stdout
    assert "46 messages were imported, offsets 7 to 52; it is paused" in shown
    assert f"until: natslog stream resume {name}" in shown
    assert rows(there, name) == rows(client, name)
    was, info = client.stream(name), there.stream(name)
    assert (info["log_start_offset"], info["high_watermark"]) == (7, 53)
    assert (info["subjects"], info["dedupe_window"], info["paused"]) == ([f"{name}.>"], "10m", True)
    assert info["lineage"] == [{"id": was["id"], "offset": 53}]
    assert info["id"] != was["id"]
    last = there.last_append(name, "producer")
    assert (last.batch, last.start, last.end) == (7, 51, 53)
    shown = natslog("stream", "info", name, url=other.url).stdout
    assert f"{was['id']} up to offset 53" in shown
    assert "imported" in natslog("stream", "ls", url=other.url).stdout
    there.edit_stream(name, paused=False)
    again = publish_acked(other.nats_url, f"{name}.a", [b"once", b"new"], {"Nats-Msg-Id": "m1"})
    assert [(one["offset"], one.get("duplicate")) for one in again] == [(50, True), (50, True)]
    assert publish_acked(other.nats_url, f"{name}.a", [b"new"])[0]["offset"] == 53
    assert rows(there, name)[:-1] == rows(client, name)


def test_stored_batches_are_exported_byte_for_byte_into_files_that_any_arrow_reader_opens(
    client: NatslogClient, filled: str, tmp_path: Path
) -> None:
    stream_id = client.stream(filled)["id"]
    export_stream(client, filled, tmp_path / "x", SMALL)
    manifest = checked_export(tmp_path / "x")
    assert len(manifest.files) > 1
    assert all(file.bytes < 40 * 1024 for file in manifest.files)
    tables = [pa.ipc.open_file(tmp_path / "x" / file.name).read_all() for file in manifest.files]
    assert pa.concat_tables(tables).to_pylist() == rows(client, filled)
    data = b"".join((tmp_path / "x" / file.name).read_bytes() for file in manifest.files)
    for _, message in client.stored_batches(filled, 0, 100, expected_id=stream_id):
        assert bytes(message) in data
    verified = natslog("verify", str(tmp_path / "x"))
    assert "all CRCs are correct" in verified.stdout


@pytest.mark.long
@pytest.mark.parametrize("compression", [pytest.param("none", marks=pytest.mark.long), "zstd"])
def test_removed_offsets_stay_removed(
    compression: str, there: NatslogClient, other: BrokerProcess, name: str, tmp_path: Path
) -> None:
    removed = {0, 3, *range(10, 17), 30, 39}
    with running(tmp_path / "own", retention_interval="200ms") as (nats, broker):
        with broker.client() as client:
            client.create_stream(name, name, compression=compression)
        for first in range(0, 40, 5):
            publish_acked(nats.url, name, [b"%d" % at for at in range(first, first + 5)])
        broker.terminate()
        (active,) = broker.folder.glob(f"streams/{name}.*/*.active")
        remove_offsets(active, removed)
        broker.start()
        with broker.client() as client:
            if compression == "zstd":
                client.roll(name)
                assert list(broker.folder.glob(f"streams/{name}.*/*.arrow"))
            export_stream(client, name, tmp_path / "x")
            expected = rows(client, name)
        imported(there, tmp_path / "x", name)
        assert [row["offset"] for row in expected] == [at for at in range(40) if at not in removed]
        assert rows(there, name) == expected
        assert there.stream(name)["high_watermark"] == 40
        other.kill()  # recovery reads what the import wrote
        other.start()
        assert rows(there, name) == expected


# ---- again, and more ----


def test_incremental_export_and_import_add_what_is_new(
    broker: BrokerProcess, client: NatslogClient, there: NatslogClient, filled: str, tmp_path: Path
) -> None:
    folder = tmp_path / "x"
    assert export_stream(client, filled, folder).added_messages == 100
    before = {path.name: path.read_bytes() for path in folder.glob("*.arrow")}
    assert export_stream(client, filled, folder).added_messages == 0
    assert imported(there, folder, filled).added_messages == 100
    assert imported(there, folder, filled).added_messages == 0
    more(broker, filled, 100, 7)
    exported = export_stream(client, filled, folder)
    assert (exported.messages, exported.added_messages, exported.files) == (107, 7, 2)
    assert before.items() <= {path.name: path.read_bytes() for path in folder.glob("*.arrow")}.items()
    assert imported(there, folder, filled).added_messages == 7
    assert there.stream(filled)["lineage"] == [{"id": client.stream(filled)["id"], "offset": 107}]
    assert rows(there, filled) == rows(client, filled)
    there.edit_stream(filled, paused=False)
    assert imported(there, folder, filled).resumed  # complete: nothing to be done
    more(broker, filled, 107, 1)
    export_stream(client, filled, folder)
    with pytest.raises(StreamConflict, match="resumed or sealed since"):
        imported(there, folder, filled)
    assert len(rows(there, filled)) == 107


def test_export_of_a_restored_stream_has_the_whole_lineage(
    broker: BrokerProcess,
    client: NatslogClient,
    there: NatslogClient,
    other: BrokerProcess,
    filled: str,
    tmp_path: Path,
) -> None:
    export_stream(client, filled, tmp_path / "first")
    imported(there, tmp_path / "first", filled, resume=True)
    more(other, filled, 100, 5)
    export_stream(there, filled, tmp_path / "second")
    imported(client, tmp_path / "second", f"{filled}-again")
    assert client.stream(f"{filled}-again")["lineage"] == [
        {"id": client.stream(filled)["id"], "offset": 100},
        {"id": there.stream(filled)["id"], "offset": 105},
    ]
    assert rows(client, f"{filled}-again") == rows(there, filled)


def test_interrupted_export_continues(
    broker: BrokerProcess, client: NatslogClient, filled: str, tmp_path: Path
) -> None:
    folder = tmp_path / "x"

    def interrupt(done: int, total: int) -> None:
        if done >= 90:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_stream(client, filled, folder, ExportOptions(file_bytes=8 * 1024, progress=interrupt))
    assert not list(folder.glob("*.tmp"))
    with pytest.raises(DamagedExport, match="was not completed"):
        checked_export(folder)
    partial = read_manifest(folder / PARTIAL, StreamManifest)
    assert partial is not None
    assert 0 < partial.end_offset < 100
    (folder / f"{partial.end_offset:020d}.arrow.tmp").write_bytes(b"of a killed export")
    first = folder / partial.files[0].name
    inode = first.stat().st_ino
    export_stream(client, filled, folder, SMALL)
    assert first.stat().st_ino == inode
    assert checked_export(folder).rows == 100
    assert not (folder / PARTIAL).exists()
    assert not list(folder.glob("*.tmp"))


@pytest.mark.long
def test_interrupted_import_continues_and_is_not_served_before(
    client: NatslogClient, there: NatslogClient, other: BrokerProcess, filled: str, tmp_path: Path
) -> None:
    export_stream(client, filled, tmp_path / "x")
    manifest = checked_export(tmp_path / "x")
    origin = {"lineage": manifest.lineage, "first_offset": 0, "subjects": manifest.subjects}
    begun = there.begin_import(filled, settings=manifest.settings, **origin)
    batches = client.stored_batches(filled, 0, 100, expected_id=manifest.id)
    half = b"".join(message for _, message in batches[: len(batches) // 2])
    end = batches[len(batches) // 2 - 1][0].end_offset
    assert there.append_import(filled, begun["id"], half) == end
    assert there.append_import(filled, begun["id"], half) == end  # a repeated request
    assert re.search(rf"{filled}.*importing", natslog("stream", "ls", url=other.url).stdout)
    shown = json.loads(natslog("cluster", "status", "--json", url=other.url, check=False).stdout)
    assert not any(filled in problem for problem in shown["problems"]), "it may be like this for days"
    with NatslogClient(other.url, ClientOptions(retries=0)) as impatient:
        with pytest.raises(StreamImporting, match="is being imported"):
            impatient.position(filled)
    for path in ("/messages?start=0&end=5", "/offsets?timestamp=0", "/lag?offset=0"):
        answer = ask(other, "GET", f"/v1/streams/{filled}{path}")
        assert (answer.status, error(answer)["code"]) == (503, "stream_importing")
    assert error(ask(other, "PATCH", f"/v1/streams/{filled}", {"paused": False}))["code"] == "stream_importing"
    with pytest.raises(StreamConflict, match=f"ends at offset {end}, but the export at 100"):
        there.finish_import(filled, begun["id"], lineage=manifest.lineage)
    other.kill()
    other.start()
    assert imported(there, tmp_path / "x", filled).added_messages == 100 - end
    assert rows(there, filled) == rows(client, filled)


@pytest.mark.long
def test_two_imports_at_once_make_one_stream(
    client: NatslogClient, other: BrokerProcess, there: NatslogClient, filled: str, tmp_path: Path
) -> None:
    export_stream(client, filled, tmp_path / "x")
    command = [sys.executable, "-m", "natslog", "--server", other.url, "import", str(tmp_path / "x")]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ended = [process.communicate(timeout=60) for process in both]
    assert 0 in [process.returncode for process in both], ended
    assert rows(there, filled) == rows(client, filled)


# ---- identity ----


def test_imported_stream_beside_the_original_acks_nothing_before_it_is_resumed(
    broker: BrokerProcess, client: NatslogClient, filled: str, tmp_path: Path
) -> None:
    """On the same NATS: an ack, or a refusal, of the copy could come before the original's."""
    export_stream(client, filled, tmp_path / "x")
    copy = f"{filled}-copy"
    imported(client, tmp_path / "x", copy)
    answers = publish_acked(broker.nats_url, f"{filled}.odd.x", [b"%d" % at for at in range(50)])
    assert {answer["stream"] for answer in answers} == {filled}
    assert client.position(copy)["high_watermark"] == 100
    uploader = PartUploader(client, copy, "p", 1, subject=f"{filled}.odd.x")
    uploader.add(pa.RecordBatch.from_pydict({"value": [b"x"]}))
    with pytest.raises(NatslogError) as refused:
        NatslogClient(broker.url, ClientOptions(retries=0)).commit_append(copy, "p", 1, uploader.finish())
    assert isinstance(refused.value, StreamPaused) or "paused" in str(refused.value)


@pytest.mark.long
def test_old_messages_do_not_expire_before_the_stream_is_resumed(
    there: NatslogClient, other: BrokerProcess, name: str, tmp_path: Path
) -> None:
    with running(tmp_path / "own", retention_interval="200ms") as (nats, broker), broker.client() as client:
        client.create_stream(name, name)
        publish_acked(nats.url, name, [b"%d" % at for at in range(20)])
        export_stream(client, name, tmp_path / "x")
        client.delete_stream(name)
        imported(client, tmp_path / "x", name, settings={"max_age": "1ms", "max_messages": 1})
        client.roll(name)
        assert len(rows(client, name)) == 20
        client.edit_stream(name, paused=False)
        publish_acked(nats.url, name, [b"new"])
        eventually(lambda: client.position(name)["log_start_offset"] >= 20, what="retention applies now")


# ---- positions ----


def test_position_of_the_original_continues_up_to_the_fork(
    broker: BrokerProcess,
    client: NatslogClient,
    there: NatslogClient,
    other: BrokerProcess,
    filled: str,
    tmp_path: Path,
) -> None:
    origin = client.stream(filled)["id"]
    export_stream(client, filled, tmp_path / "x")
    imported(there, tmp_path / "x", filled, resume=True)
    more(other, filled, 1000, 20)
    shown = there.set_cursor("billing", filled, 60, expected_id=origin)
    assert (shown["id"], shown["offset"]) == (there.stream(filled)["id"], 60)
    there.set_cursor("at-fork", filled, 100, expected_id=origin)
    with pytest.raises(StreamRecreated, match=r"export that ends at offset 100 .* The position 101 is beyond it"):
        there.set_cursor("beyond", filled, 101, expected_id=origin)
    with there.consume(filled, cursor="billing", follow=False) as consumer:
        values = [value for batch in consumer for value in batch.record_batch.column("value").to_pylist()]
    assert values == [b"%d" % at for at in (*range(60, 100), *range(1000, 1020))]


@pytest.mark.parametrize(("position", "on_data_loss"), [(40, "fail"), (100, "fail"), (105, "fail"), (105, "skip")])
@pytest.mark.long
def test_consumer_whose_stream_is_replaced_by_a_restored_one(
    position: int, on_data_loss: str, broker: BrokerProcess, client: NatslogClient, filled: str, tmp_path: Path
) -> None:
    export_stream(client, filled, tmp_path / "x")
    more(broker, filled, 100, 10)
    options: dict[str, Any] = {"on_data_loss": on_data_loss, "wait_ms": 200, "start": 0, "max_bytes": 1}
    consumer = client.consume(filled, cursor="c", **options)
    values: list[bytes] = []
    while consumer.position < position:
        values += next(consumer).record_batch.column("value").to_pylist()
    at = consumer.position
    consumer._ahead = None  # a part that was requested before would be returned
    client.delete_stream(filled)
    imported(client, tmp_path / "x", filled, resume=True)
    publish_acked(broker.nats_url, f"{filled}.odd.x", [b"own"])
    if at > 100 and on_data_loss == "fail":
        with pytest.raises(StreamRecreated, match=f"The position {at} is beyond it"):
            next(consumer)
        return
    wanted = [b"%d" % one for one in range(min(at, 100), 100)] + [b"own"]
    found: list[bytes] = []
    while len(found) < len(wanted):
        found += next(consumer).record_batch.column("value").to_pylist()
    assert found == wanted
    consumer.checkpoint()
    assert client.cursor("c", filled)["offset"] == 101


# ---- refused ----


def test_export_into_a_folder_that_it_does_not_continue_changes_nothing(
    broker: BrokerProcess, client: NatslogClient, filled: str, name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "x"
    export_stream(client, filled, folder, SMALL)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "letter.txt").write_text("dear")
    with pytest.raises(ExportFailed, match="has other files"):
        export_stream(client, filled, foreign)
    client.create_stream(f"{filled}-b", "b")
    with pytest.raises(ExportFailed, match="name another folder"):
        export_stream(client, f"{filled}-b", folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    client.purge(filled, 100)
    more(broker, filled, 100, 3)
    client.purge(filled, 102)
    with pytest.raises(ExportFailed, match="offsets 0 to 99 .* now begins at 102"):
        export_stream(client, filled, folder)
    victim = max(folder.glob("*.arrow"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    done = natslog("export", filled, str(folder), url=broker.url, check=False)
    assert done.returncode == 1
    assert "is damaged: its CRC32C does not match" in done.stderr
    before[victim.name] = bytes(data)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_damaged_or_half_export_is_refused_before_anything_is_created(
    client: NatslogClient, there: NatslogClient, other: BrokerProcess, filled: str, tmp_path: Path
) -> None:
    folder = tmp_path / "x"
    export_stream(client, filled, folder, SMALL)
    names = sorted(path.name for path in folder.glob("*.arrow"))

    def refused(change: Any) -> str:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        change(copy)
        with pytest.raises(DamagedExport) as found:
            imported(there, copy, filled)
        assert filled not in [body["name"] for body in there.streams()]
        return found.value.message

    def edit(path: Path, was: str, now: str) -> None:
        assert was in path.read_text()
        path.write_text(path.read_text().replace(was, now))

    assert "cannot be read" in refused(lambda copy: (copy / names[1]).unlink())
    assert "cut short" in refused(lambda copy: os.truncate(copy / names[1], 1000))
    assert "CRC32C does not match" in refused(
        lambda copy: (copy / names[1]).write_bytes((copy / names[1]).read_bytes()[:-1] + b"X")
    )
    assert "was not completed" in refused(lambda copy: (copy / MANIFEST).rename(copy / PARTIAL))
    assert "was changed" in refused(lambda copy: edit(copy / MANIFEST, '"max_age": null', '"max_age": "1d"'))
    assert "format version 9" in refused(
        lambda copy: edit(copy / MANIFEST, '"format_version": 1', '"format_version": 9')
    )
    assert "not a manifest" in refused(lambda copy: (copy / MANIFEST).write_text('{"format_version": "x"'))
    assert "not a manifest" in refused(lambda copy: (copy / MANIFEST).write_bytes(b"\xff" * 100))
    done = natslog("import", str(tmp_path / "copy"), url=other.url, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_import_over_another_stream_is_refused(client: NatslogClient, filled: str, name: str, tmp_path: Path) -> None:
    export_stream(client, filled, tmp_path / "x")
    with pytest.raises(StreamConflict, match="was not imported from this export"):
        imported(client, tmp_path / "x", filled)
    assert len(rows(client, filled)) == 100
    client.create_stream(f"{filled}-b", f"{filled}b.>")
    export_stream(client, f"{filled}-b", tmp_path / "b")
    imported(client, tmp_path / "b", f"{filled}-c")  # an empty stream
    assert client.position(f"{filled}-c")["high_watermark"] == 0
    with pytest.raises(StreamConflict, match="was not imported from this export"):
        imported(client, tmp_path / "x", f"{filled}-c")


def test_batches_that_cannot_be_in_the_stream_are_refused(
    client: NatslogClient, other: BrokerProcess, there: NatslogClient, filled: str, name: str, tmp_path: Path
) -> None:
    from natslog.arrow import ipc

    export_stream(client, filled, tmp_path / "x")
    manifest = checked_export(tmp_path / "x")
    origin = {"lineage": manifest.lineage, "first_offset": 0, "subjects": manifest.subjects}
    begun = there.begin_import(filled, settings=manifest.settings, **origin)
    batches = [message for _, message in client.stored_batches(filled, 0, 100, expected_id=manifest.id)]
    damaged = bytearray(batches[0])
    damaged[-1] ^= 1
    header = ipc.proven_header(batches[0])
    assert header is not None
    batch = ipc.decode_batch(batches[0])
    stated = {"base_offset": 0, "epoch": 1, "max_timestamp_us": header.max_timestamp_us}
    subjects = pa.array(["other"] * batch.num_rows)
    offsets = pa.array([5] * batch.num_rows)
    for body in (
        b"",
        b"nothing of Arrow",
        bytes(damaged),
        bytes(batches[0])[:-8],
        b"".join([batches[0], batches[2]]),
        bytes(ipc.encode_batch(batch.set_column(2, batch.schema.field(2), subjects), **stated)),
        bytes(ipc.encode_batch(batch.set_column(0, batch.schema.field(0), offsets), **stated)),
        bytes(ipc.encode_batch(batch, **(stated | {"max_timestamp_us": 5}))),
    ):
        with pytest.raises(InvalidRequest):
            there.append_import(filled, begun["id"], body)
    with pytest.raises(NatslogError, match="import the batches from there on"):
        there.append_import(filled, begun["id"], bytes(batches[1]))
    with pytest.raises(StreamRecreated):
        there.append_import(filled, "0" * 32, bytes(batches[0]))
    assert there.import_state(filled)["next_offset"] == 0
    assert imported(there, tmp_path / "x", filled).added_messages == 100
    with pytest.raises(StreamConflict, match="not being imported"):
        there.append_import(filled, begun["id"], bytes(batches[0]))
    there.delete_stream(filled)


def test_begin_of_an_import_checks_what_it_is_given(other: BrokerProcess, filled: str) -> None:
    path = f"/v1/streams/{filled}-new/import"
    good = {"settings": {"subject": "x"}, "lineage": [{"id": "a", "offset": 5}], "first_offset": 0, "subjects": ["x"]}
    for change in (
        {"lineage": []},
        {"lineage": [{"id": "a", "offset": -5}]},
        {"lineage": [{"id": "a", "offset": 2**70}]},
        {"lineage": [{"id": "a", "offset": 5}, {"id": "b", "offset": 4}]},
        {"lineage": [{"id": "a", "offset": 5}, {"id": "a", "offset": 5}]},
        {"first_offset": 6},
        {"first_offset": "0"},
        {"settings": {}},
        {"settings": {"subject": "x", "replicas": 100}},
        {"subjects": ["a b"]},
        {"subjects": []},
        {"more": 1},
    ):
        assert ask(other, "POST", path, good | change).status == 400, change
    assert ask(other, "POST", "/v1/streams/..%2Fx/import", good).status in (400, 404)


def test_full_disk_leaves_the_export_intact_and_the_next_one_continues(
    client: NatslogClient, broker: BrokerProcess, filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "x"
    export_stream(client, filled, folder, SMALL)
    more(broker, filled, 100, 50)
    real, left = os.fsync, [3]

    def fsync(fd: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ExportFailed, match=r"No space left on device\. What was exported before is intact"):
        export_stream(client, filled, folder, SMALL)
    assert not list(folder.glob("*.tmp"))
    assert checked_export(folder).rows == 100, "as it was before"
    assert export_stream(client, filled, folder, SMALL).messages == 150
    assert checked_export(folder).rows == 150


@pytest.mark.long
def test_import_into_a_broker_without_space_continues_when_there_is_some(
    client: NatslogClient, broker: BrokerProcess, name: str, tmp_path: Path
) -> None:
    client.create_stream(name, name)
    publish_acked(broker.nats_url, name, [b"." * 20_000 for _ in range(60)])
    export_stream(client, name, tmp_path / "x")
    with running(tmp_path / "own", max_store_bytes="1MiB") as (_, small), small.client() as there:
        with pytest.raises(NatslogError, match="max_store_bytes"):
            imported(NatslogClient(small.url, ClientOptions(retries=0)), tmp_path / "x", name)
        assert there.import_state(name)["state"] == "importing"
        small.terminate()
        small.settings["max_store_bytes"] = "1GiB"
        small.start()
        imported(there, tmp_path / "x", name)
        assert rows(there, name) == rows(client, name)


def test_export_that_begins_and_ends_inside_of_a_stored_batch(
    client: NatslogClient, broker: BrokerProcess, there: NatslogClient, filled: str, tmp_path: Path
) -> None:
    """Sealing has merged what was exported with what came later."""
    export_stream(client, filled, tmp_path / "x")
    more(broker, filled, 100, 30)
    client.roll(filled)
    stream_id = client.stream(filled)["id"]
    assert client.stored_batches(filled, 0, 130, expected_id=stream_id)[0][0].end_offset == 130
    assert export_stream(client, filled, tmp_path / "x").added_messages == 30
    imported(there, tmp_path / "x", filled)
    assert rows(there, filled) == rows(client, filled)


# ---- tar ----


@pytest.mark.long
def test_export_and_import_as_a_tar_stream(
    broker: BrokerProcess,
    client: NatslogClient,
    other: BrokerProcess,
    there: NatslogClient,
    filled: str,
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "natslog", "--server", broker.url, "export", filled, "-", "--file-size", "16KiB"]
    data = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    (tmp_path / "x.tar").write_bytes(data)
    with tarfile.open(tmp_path / "x.tar") as tar:
        assert tar.getnames()[-1] == MANIFEST
        assert len(tar.getnames()) > 2
    load = [sys.executable, "-m", "natslog", "--server", other.url, "import", "-"]
    cut = subprocess.run(load, input=data[: len(data) // 2], capture_output=True, check=False, timeout=60)
    assert cut.returncode == 1, cut
    assert b"Traceback" not in cut.stderr
    subprocess.run(load, input=data, capture_output=True, check=True, timeout=60)
    assert rows(there, filled) == rows(client, filled)


@pytest.mark.long
def test_interrupted_command_leaves_a_folder_that_the_next_one_continues(
    broker: BrokerProcess, client: NatslogClient, filled: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "natslog", "--server", broker.url, "export", filled, str(tmp_path / "x")]
    process = subprocess.Popen([*command, "--file-size", "1KiB"], stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    eventually(lambda: list((tmp_path / "x").glob("*.arrow")) or process.poll() is not None, every_s=0.001)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert b"Traceback" not in errors
    assert process.returncode in (130, 0)
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert checked_export(tmp_path / "x").rows == 100


# ---- a whole cluster ----


@pytest.mark.long
def test_whole_cluster_is_exported_and_imported(tmp_path: Path) -> None:
    with running(tmp_path / "a") as (nats, broker), running(tmp_path / "b") as (_, other):
        with broker.client() as client, other.client() as there:
            for name in ("orders", "returns"):
                client.create_stream(name, f"{name}.>", max_age="90d")
                publish_acked(nats.url, f"{name}.x", [b"%d" % at for at in range(10)])
            client.set_cursor("billing", "orders", 4)
            client.set_cursor("audit", "orders", 10)
            client.set_cursor("beyond", "orders", 999)
            there_folder = str(tmp_path / "x")
            shown = natslog("export", "--all", there_folder, url=broker.url).stdout
            assert "3 cursors; holds: streams with their settings, cursors" in shown
            assert "does not hold: secrets of tokens" in shown
            publish_acked(nats.url, "orders.x", [b"10"])
            body = json.loads(natslog("export", "--all", there_folder, "--json", url=broker.url).stdout)
            assert [one["added_messages"] for one in body["streams"]] == [1, 0]
            partly = natslog("import", there_folder, "--all", url=other.url, check=False)
            assert (partly.returncode, "the cursor of 'beyond' on orders was not set" in partly.stderr) == (1, True)
            assert "2 cursors were set" in partly.stdout
            client.delete_cursor("beyond", "orders")
            natslog("export", "--all", there_folder, url=broker.url)
            for name in ("orders", "returns"):
                assert rows(there, name) == rows(client, name)
            found = {one["consumer"]: (one["offset"], one["id"]) for one in there.cursors()}
            assert found == {"billing": (4, there.stream("orders")["id"]), "audit": (10, there.stream("orders")["id"])}
            there.set_cursor("billing", "orders", 8)
            again = json.loads(natslog("import", there_folder, "--json", url=other.url).stdout)
            assert (again["cursors"], again["cursors_left"]) == (0, 2)
            assert there.cursor("billing", "orders")["offset"] == 8
            base = [sys.executable, "-m", "natslog", "--server"]
            command = [*base, broker.url, "export", "--all", "-"]
            tar = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
            for name in ("orders", "returns"):
                there.delete_stream(name)
            subprocess.run([*base, other.url, "import", "-"], input=tar, capture_output=True, check=True, timeout=60)
            assert rows(there, "orders") == rows(client, "orders")
            assert there.cursor("billing", "orders")["offset"] == 4


@pytest.mark.long
def test_import_into_too_few_brokers_creates_nothing_and_names_the_option(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "three") as cluster:
        there = NatslogClient([one.url for one in cluster.brokers])
        there.create_stream("alone", "alone.>")
        there.create_stream("everywhere", "everywhere.>", replicas=3)
        publish_acked(cluster.nats.url, "everywhere.x", [b"1"])
        natslog("export", "--all", str(tmp_path / "x"), url=cluster.brokers[0].url)
    with running(tmp_path / "one") as (_, broker), broker.client() as client:
        refused = natslog("import", str(tmp_path / "x"), "--all", url=broker.url, check=False)
        text = refused.stderr.replace("\n", " ")
        assert refused.returncode == 1
        assert "everywhere has 3" in text
        assert "--replicas 1. Nothing was imported" in text
        assert [one["name"] for one in client.streams()] == []
        natslog("import", str(tmp_path / "x"), "--all", "--replicas", "1", url=broker.url)
        assert all_values(client, "everywhere") == [b"1"]


@pytest.mark.long
def test_access_rules_are_exported_and_restored(tmp_path: Path) -> None:
    """Programs use the tokens that they have; what exists in the other cluster stays."""
    secured = {"NATSLOG_SECURITY": "true"}
    with (
        running(tmp_path / "a", environment=secured) as (nats, broker),
        running(tmp_path / "b", environment=secured) as (_, other),
        running(tmp_path / "c") as (_, open_to_all),
    ):
        client = NatslogClient(broker.url, ClientOptions(token=admin_token(broker)))
        client.create_stream("orders", "orders.>")
        publish_acked(nats.url, "orders.x", [b"1"])
        alice = client.create_token("alice", roles=["readers"], expires="never", note="a program")["token"]
        client.add_rule("role:readers", "read", "orders")
        client.set_quota("alice", {"polls": 3})
        as_alice = ["--server", broker.url, "--token", alice]
        folder = tmp_path / "x"
        refused = natslog(*as_alice, "export", "--all", str(folder), check=False)
        assert refused.returncode == 1
        assert "admin" in refused.stderr
        shown = natslog("export", "--all", str(folder), url=broker.url, env=_environment(admin_token(broker))).stdout
        assert "tokens, roles, rules, quotas" in shown.split("does not hold")[0]
        assert alice.split("_", 2)[2] not in (folder / CLUSTER).read_text()
        there = {"url": other.url, "env": _environment(admin_token(other))}
        body = json.loads(natslog("import", str(folder), "--json", **there).stdout)
        assert body["access"] == {"tokens": 2, "roles": 1, "rules": 1, "quotas": 1}
        with NatslogClient(other.url, ClientOptions(token=alice)) as restored:
            assert restored.whoami()["identity"] == "alice"
            assert restored.whoami()["quota"]["polls"] == 3
            assert [row["value"] for row in rows(restored, "orders")] == [b"1"]
        again = json.loads(natslog("import", str(folder), "--json", **there).stdout)
        assert set(again["access"].values()) == {0}
        assert whoami(other, admin_token(other)) == "admin"
        without = natslog("import", str(folder), url=open_to_all.url, check=False)
        assert "security is not enabled in this cluster" in without.stderr
        assert open_to_all.client().streams() == []
        natslog("import", str(folder), "--no-access", url=open_to_all.url)
        assert [one["name"] for one in open_to_all.client().streams()] == ["orders"]


def _environment(token: str) -> dict[str, str]:
    return os.environ | {"NATSLOG_TOKEN": token}


def whoami(broker: BrokerProcess, token: str) -> str:
    return str(NatslogClient(broker.url, ClientOptions(token=token)).whoami()["identity"])


@pytest.mark.long
def test_import_into_a_cluster_of_three_is_replicated_and_survives_its_leader(
    client: NatslogClient, filled: str, broker: BrokerProcess, tmp_path: Path
) -> None:
    uploader = PartUploader(client, filled, "producer", 3, subject=f"{filled}.odd.x")
    for first in range(0, 60_000, 20_000):
        uploader.add(pa.RecordBatch.from_pydict({"value": [b"%0400d" % at for at in range(first, first + 20_000)]}))
    client.commit_append(filled, "producer", 3, uploader.finish())
    client.purge(filled, 20)
    export_stream(client, filled, tmp_path / "x", ExportOptions(file_bytes=4 * 1024 * 1024))
    manifest = checked_export(tmp_path / "x")
    assert any(file.first_offset > 100 for file in manifest.files), "a file begins within the run"
    with running_cluster(tmp_path / "cluster") as cluster:
        there = NatslogClient([one.url for one in cluster.brokers], ClientOptions(retries=5, patience_s=60))
        killed: list[int] = []

        def kill_leader(done: int, total: int) -> None:
            if done > total // 2 and not killed:
                killed.append(there_leader())
                cluster.brokers[killed[0] - 1].kill()

        def there_leader() -> int:
            return int(next(one["leader"] for one in there.streams() if one["name"] == filled))

        options = ImportOptions(settings={"replicas": 3}, progress=kill_leader)
        import_stream(there, tmp_path / "x", manifest, filled, options)
        assert killed
        assert rows(there, filled) == rows(client, filled)
        cluster.brokers[killed[0] - 1].start()
        eventually(lambda: len(there.stream(filled)["isr"]) == 3, 60, "all replicas are in sync")
        for one in cluster.brokers:
            with NatslogClient(one.url) as reader:
                fetched = reader.fetch(filled, 20, 60_100)
                assert fetched.batches[0].column("offset")[0].as_py() == 20
        assert there.last_append(filled, "producer").end == 60_100
        there.edit_stream(filled, paused=False)
        assert publish_acked(cluster.nats.url, f"{filled}.odd.x", [b"own"])[0]["offset"] == 60_100
