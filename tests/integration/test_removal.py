"""Removed messages are gone for every reader, at once and after a restart; offsets and all other messages stay."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from natslog.client import NatslogClient
from natslog.errors import InvalidRequest, MessageNotFound, StreamSealed, ViewExpired
from tests.harness import BrokerProcess, eventually, natslog, publish_acked, running


def values(client: NatslogClient, stream: str) -> list[bytes]:
    return [value for batch in client.read(stream) for value in batch.column("value").to_pylist()]


def numbers(client: NatslogClient, stream: str) -> list[int]:
    return [int(value) for value in values(client, stream)]


def in_every_form(client: NatslogClient, stream: str) -> list[int]:
    """What all kinds of readers get, which must be the same."""
    found = numbers(client, stream)
    position = client.position(stream)
    start, end = position["log_start_offset"], position["high_watermark"]
    by_columns = [
        int(value)
        for batch in client.read(stream, columns=["value", "offset"])
        for value in batch.column("value").to_pylist()
    ]
    one_column = [
        int(value) for batch in client.read(stream, columns=["value"]) for value in batch.column("value").to_pylist()
    ]
    subjects = [int(one) for batch in client.read(stream, subject=">") for one in batch.column("value").to_pylist()]
    url = f"{client.servers[0]}/v1/streams/{stream}/messages?start={start}&end={end}"
    lines = urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": "application/x-ndjson"})).read()
    assert by_columns == one_column == subjects == found
    assert [json.loads(line)["offset"] for line in lines.splitlines()] == found
    assert sum(split.rows or 0 for split in client.splits(stream, start, end)) == len(found)
    assert client.stream(stream)["messages"] == len(found)
    for offset in (start, "earliest", end):
        lag = client.lag(stream, offset)
        rows = 0 if offset == end else len(found)
        assert (lag["rows"], lag["lost_rows"], lag["beyond_rows"]) == (rows, 0, 0)
    printed = natslog("cat", stream, url=client.servers[0]).stdout
    assert printed == "".join(f"{number}\n" for number in found)
    return found


@pytest.mark.long
def test_a_deleted_message_is_gone_for_every_reader(client: NatslogClient, filled: str, broker: BrokerProcess) -> None:
    assert client.delete_message(filled, 42)["offset"] == 42
    client.delete_message(filled, 0)
    client.delete_message(filled, 99)
    kept = [at for at in range(100) if at not in (0, 42, 99)]
    assert in_every_form(client, filled) == kept
    for offset in (42, 100, 10**15):
        with pytest.raises(MessageNotFound, match=f"no message at offset {offset}"):
            client.delete_message(filled, offset)
    assert client.position(filled)["high_watermark"] == 100
    (folder,) = broker.folder.glob(f"streams/{filled}.*")
    files = json.loads(natslog("verify", str(folder), "--json").stdout)["files"]
    (segment,) = [one for one in files if Path(one["file"]).parent == folder and one["batches"]]
    assert (segment["messages"], segment["removed"]) == (100, 3)


@pytest.mark.long
def test_purge_of_a_subject_and_all_but_the_newest(client: NatslogClient, filled: str) -> None:
    odd = [at for at in range(100) if at // 5 % 2]
    assert client.purge(filled, 50, subject=f"{filled}.odd.>")["purged"] == 25
    assert in_every_form(client, filled) == [at for at in range(100) if at not in odd or at >= 50]
    assert client.purge(filled, subject="*.odd.x", keep=3)["purged"] == 22
    assert in_every_form(client, filled) == [at for at in range(100) if at not in odd[:-3]]
    assert client.purge(filled, keep=10)["purged"] == 43
    assert in_every_form(client, filled) == [83, 84, *range(90, 95), 97, 98, 99]
    with pytest.raises(InvalidRequest, match="below and keep exclude each other"):
        client.purge(filled, 5, keep=3)
    with pytest.raises(InvalidRequest, match="whole number"):
        client.purge(filled, keep=-1)


@pytest.mark.long
def test_the_command_line_deletes_and_purges(client: NatslogClient, filled: str) -> None:
    refused = natslog("stream", "delete-message", filled, "7", url=client.servers[0], check=False)
    assert refused.returncode != 0
    assert "was not deleted" in refused.stderr
    natslog("stream", "delete-message", filled, "7", "--yes", url=client.servers[0])
    natslog("stream", "purge", filled, "--subject", f"{filled}.even.x", "--keep", "5", "--yes", url=client.servers[0])
    odd = {at for at in range(100) if at // 5 % 2 and at != 7}
    assert set(numbers(client, filled)) == odd | {90, 91, 92, 93, 94}


def test_a_limit_per_subject_holds_at_once(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, f"{name}.>", max_messages_per_subject=2)
    for at in range(10):
        publish_acked(nats_url, f"{name}.{at % 3}", [b"%d" % at])
        newest = [[one for one in range(at + 1) if one % 3 == subject][-2:] for subject in range(3)]
        assert numbers(client, name) == sorted(one for kept in newest for one in kept)
    client.edit_stream(name, max_messages_per_subject=1)
    assert in_every_form(client, name) == [7, 8, 9]
    client.edit_stream(name, max_messages_per_subject=3)
    assert in_every_form(client, name) == [7, 8, 9], "what is hidden stays hidden"
    eventually(lambda: client.stream(name)["leader_epoch"] == 2)
    publish_acked(nats_url, f"{name}.0", [b"10", b"11", b"12"])
    assert in_every_form(client, name) == [7, 8, 10, 11, 12]


def test_limits_of_messages_and_bytes_are_exact(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name, max_messages=7)
    for at in range(20):
        publish_acked(nats_url, name, [b"%d" % at])
        assert numbers(client, name) == list(range(max(0, at - 6), at + 1))
    client.delete_message(name, 18)
    assert in_every_form(client, name) == [13, 14, 15, 16, 17, 19], "nothing returns"
    publish_acked(nats_url, name, [b"20"])
    assert in_every_form(client, name) == [13, 14, 15, 16, 17, 19, 20]


def latest(client: NatslogClient, stream: str, **asked: object) -> list[int]:
    batches = client.read(stream, view="latest", **asked)  # type: ignore[arg-type]
    return [int(value) for batch in batches for value in batch.column("value").to_pylist()]


def viewed(client: NatslogClient, stream: str, as_of: int) -> list[int]:
    """The offsets of a view that has begun."""
    answers = client.answers(stream, 0, as_of, as_of=as_of)
    return [offset for answer in answers for batch in answer.batches for offset in batch.column("offset").to_pylist()]


def test_the_latest_view_has_the_newest_message_of_each_subject(
    client: NatslogClient, filled: str, nats_url: str
) -> None:
    assert latest(client, filled) == [94, 99]
    publish_acked(nats_url, f"{filled}.even.x", [b"100"])
    publish_acked(nats_url, f"{filled}.new", [b"101"])
    assert latest(client, filled) == [99, 100, 101]
    assert latest(client, filled, columns=["value"]) == [99, 100, 101]
    assert latest(client, filled, subject="*.new") == [101]
    client.delete_message(filled, 100)
    assert latest(client, filled) == [94, 99, 101], "the newest one that is visible"
    assert numbers(client, filled) == [*range(100), 101]


def test_the_latest_view_stays_as_of_its_beginning(client: NatslogClient, filled: str, nats_url: str) -> None:
    as_of = client.latest_as_of(filled)
    publish_acked(nats_url, f"{filled}.even.x", [b"100"])
    fetched = client.fetch(filled, 0, as_of, as_of=as_of)
    assert [int(one) for batch in fetched.batches for one in batch.column("value").to_pylist()] == [94, 99]
    with pytest.raises(ViewExpired, match="begin to read again"):
        client.fetch(filled, 0, as_of - 1, as_of=as_of - 1)
    for query, why in (
        ({"view": "oldest"}, "must be latest"),
        ({"view": "latest", "wait_ms": 5}, "wait_ms"),
        ({"view": "latest", "as_of": 10**9}, "above the high watermark"),
        ({"view": "latest", "end": 101, "as_of": as_of}, "offsets below 100"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            client._ask("GET", f"/v1/streams/{filled}/messages", query=query)


def test_a_compacted_stream_keeps_the_newest_message_of_each_key(
    client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, name, compact=True, tombstone_retention="2s")
    for at in range(12):
        key = {} if at % 4 == 3 else {"Natslog-Key": f"k{at % 4}"}
        publish_acked(nats_url, name, [b"%d" % at], {"X": "y"} | key)
    assert in_every_form(client, name) == [3, 7, 8, 9, 10, 11], "messages without a key stay"
    assert latest(client, name) == [8, 9, 10]
    publish_acked(nats_url, name, [b"12"], {"Natslog-Key": "k1", "Natslog-Tombstone": ""})
    assert numbers(client, name) == [3, 7, 8, 10, 11, 12]
    assert latest(client, name) == [8, 10], "a tombstone stands for a deleted key"
    eventually(lambda: numbers(client, name) == [3, 7, 8, 10, 11])


@pytest.mark.parametrize("limit", [None, 1, 3])
def test_the_latest_view_has_the_newest_visible_message_of_each_subject(
    client: NatslogClient, nats_url: str, name: str, limit: int | None
) -> None:
    client.create_stream(name, f"{name}.>", max_messages_per_subject=limit)
    for at in range(6):
        publish_acked(nats_url, f"{name}.{at % 2}", [b"%d" % at])
    assert latest(client, name) == [4, 5]
    client.delete_message(name, 4)
    assert latest(client, name) == ([5] if limit == 1 else [2, 5]), "what a limit has hidden does not return"


def test_messages_deleted_before_a_limit_was_set_do_not_count_for_it(
    client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, name)
    for at in range(5):
        publish_acked(nats_url, name, [b"%d" % at])
    client.delete_message(name, 4)
    client.edit_stream(name, max_messages_per_subject=2)
    eventually(lambda: numbers(client, name) == [2, 3])
    client.delete_message(name, 3)
    assert numbers(client, name) == [2], "it counts: older ones do not return"
    publish_acked(nats_url, name, [b"5"])
    assert in_every_form(client, name) == [5]


def test_the_latest_view_of_a_compacted_stream_without_keys_is_refused(
    client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, name, compact=True)
    assert latest(client, name) == []
    publish_acked(nats_url, name, [b"0"])
    with pytest.raises(InvalidRequest, match="none of its messages has a key"):
        latest(client, name)
    assert numbers(client, name) == [0]
    client.edit_stream(name, compact=False)
    assert latest(client, name) == [0]


@pytest.mark.long
def test_messages_with_a_time_to_live_expire(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name, allow_ttl=True)
    publish_acked(nats_url, name, [b"0"])
    publish_acked(nats_url, name, [b"1"], {"Nats-TTL": "1s"})
    publish_acked(nats_url, name, [b"2"], {"Nats-TTL": "1h"})
    publish_acked(nats_url, name, [b"3"], {"Nats-TTL": "never"})
    assert numbers(client, name) == [0, 1, 2, 3]
    eventually(lambda: numbers(client, name) == [0, 2, 3])
    client.edit_stream(name, ttl="1s")
    eventually(lambda: numbers(client, name) == [2, 3])
    assert in_every_form(client, name) == [2, 3]


def test_a_sealed_stream_keeps_its_messages(client: NatslogClient, filled: str) -> None:
    client.seal(filled)
    with pytest.raises(StreamSealed):
        client.delete_message(filled, 3)
    with pytest.raises(StreamSealed):
        client.purge(filled, subject=">")


@pytest.mark.long
def test_removed_messages_stay_removed_and_their_space_is_freed(own: Path) -> None:
    settings = {"retention_interval": "1s", "segment_bytes": "1MiB"}
    with running(own, **settings) as (server, broker):
        client = NatslogClient(broker.url)
        client.create_stream("s", "s.>", max_messages_per_subject=1, dedupe_window=0)
        value = b"x" * 1000
        for _ in range(30):
            publish_acked(server.url, "s.a", [b"1" + value] * 200)
        publish_acked(server.url, "s.b", [b"2" + value])
        client.delete_message("s", 6000)
        assert len(values(client, "s")) == 1
        client.roll("s")
        eventually(lambda: client.stream("s")["bytes"] < 1_500_000, within_s=30)
        assert values(client, "s") == [b"1" + value]
        broker.kill()
        broker.start()
        assert values(client, "s") == [b"1" + value]
        publish_acked(server.url, "s.a", [b"3"])
        assert values(client, "s") == [b"3"]


@pytest.mark.long
def test_a_view_that_is_being_read_keeps_its_messages_while_files_are_rewritten(own: Path) -> None:
    settings = {"retention_interval": "1s", "segment_bytes": "1MiB"}
    with running(own, **settings) as (server, broker):
        client = NatslogClient(broker.url)
        client.create_stream("s", "s.*", max_messages_per_subject=1, dedupe_window=0)
        value = b"x" * 1000
        for _ in range(30):
            publish_acked(server.url, "s.a", [value] * 100)
        publish_acked(server.url, "s.b", [b"first"])
        as_of = client.latest_as_of("s")
        publish_acked(server.url, "s.b", [b"second"])
        publish_acked(server.url, "s.a", [value] * 100)
        client.roll("s")
        eventually(lambda: client.stream("s")["bytes"] < 100_000, within_s=30)
        assert viewed(client, "s", as_of) == [2999, 3000]
        assert [len(one) for one in client.read("s", view="latest")] == [2]


def test_a_view_ends_when_messages_are_erased(client: NatslogClient, filled: str, nats_url: str) -> None:
    as_of = client.latest_as_of(filled)
    assert viewed(client, filled, as_of) == [94, 99]
    client.erase(filled, subject=f"{filled}.odd.x")
    assert viewed(client, filled, as_of) == [94]
    publish_acked(nats_url, f"{filled}.even.x", [b"100"])
    assert viewed(client, filled, as_of) == [94]
    client.erase(filled, subject=f"{filled}.even.x")
    with pytest.raises(ViewExpired, match="erased"):
        viewed(client, filled, as_of)


def test_a_limit_takes_effect_that_is_added_when_nothing_is_removed_any_more(tmp_path: Path) -> None:
    """Messages were removed, and all files with them are gone."""
    with running(tmp_path, retention_interval="100ms") as (nats, broker):
        client = broker.client()
        client.create_stream("s", "s.*")
        publish_acked(nats.url, "s.a", [b"1", b"2", b"3"])
        client.delete_message("s", 1)
        client.roll("s")
        client.purge("s")
        eventually(lambda: client.stream("s")["log_start_offset"] == 3)
        publish_acked(nats.url, "s.a", [b"4", b"5", b"6"])
        client.edit_stream("s", max_messages_per_subject=1)
        eventually(lambda: client.stream("s")["messages"] == 1)
