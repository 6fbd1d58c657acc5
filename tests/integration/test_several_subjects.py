"""Streams with several subjects: created, found, edited while a publisher runs, restarted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from natslog.client import NatslogClient
from natslog.client.appending import PartUploader
from natslog.errors import ConfigError, InvalidRequest, StreamConflict
from pyspark_natslog.sink.http_options import HttpSinkOptions
from tests.harness import (
    BrokerProcess,
    all_values,
    eventually,
    flushed,
    natslog,
    publish_acked,
    running,
    with_nats,
)


def recorded(client: NatslogClient, stream: str) -> list[tuple[str, bytes]]:
    return [
        (row["subject"], row["value"])
        for batch in client.read(stream)
        for row in batch.select(["subject", "value"]).to_pylist()
    ]


@pytest.mark.long
def test_messages_of_all_subjects_are_stored_in_the_order_in_which_they_came(
    client: NatslogClient, nats_url: str, name: str
) -> None:
    """A wildcard and plain subjects; the publisher changes the subject with each message."""
    body = client.create_stream(name, [f"{name}.a.>", f"{name}.b", f"{name}.c"])
    assert (body["subject"], body["subjects"]) == (f"{name}.a.>", [f"{name}.a.>", f"{name}.b", f"{name}.c"])
    sent = [(f"{name}.{('a.x', 'c', 'b', 'a.y.z')[at % 4]}", b"%d" % at) for at in range(2000)]

    async def work(connection: Any) -> None:
        for subject, value in sent:
            await connection.publish(subject, value)
        await connection.publish(f"{name}.d", b"of another subject")
        await flushed(connection)

    with_nats(nats_url, work)
    eventually(lambda: client.position(name)["high_watermark"] >= len(sent))
    assert recorded(client, name) == sent
    assert publish_acked(nats_url, f"{name}.c", [b"last"])[0]["offset"] == len(sent)


def test_creation_again_compares_the_set(client: NatslogClient, name: str) -> None:
    client.create_stream(name, [f"{name}.a", f"{name}.b"])
    assert client.create_stream(name, [f"{name}.b", f"{name}.a"])["subjects"] == [f"{name}.a", f"{name}.b"]
    with pytest.raises(StreamConflict, match=f"subjects is .*, not .'{name}.a'."):
        client.create_stream(name, f"{name}.a")


def test_streams_of_a_subject_are_found_by_each_of_theirs(client: NatslogClient, name: str) -> None:
    client.create_stream(name, [f"{name}.a", f"{name}.b.*"])
    for subject, found in ((f"{name}.a", [name]), (f"{name}.b.x", [name]), (f"{name}.b", [])):
        assert [body["name"] for body in client.streams(subject=subject)] == found


def test_subjects_that_overlap_or_are_of_acks_are_refused(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, [f"{name}.a", f"{name}.b"])
    for subjects, error in (
        ([f"{name}.a", f"{name}.*"], f"'{name}.a' and '{name}.\\*' overlap"),
        ([f"{name}.a", "_INBOX.x"], "are not recorded"),
        ([], "must be a list of 1 to 64 subjects"),
    ):
        with pytest.raises(InvalidRequest, match=error):
            client.edit_stream(name, subjects=subjects)
    assert client.stream(name)["subjects"] == [f"{name}.a", f"{name}.b"]
    assert [publish_acked(nats_url, f"{name}.{one}", [b"x"])[0]["offset"] for one in "ab"] == [0, 1]


def test_edit_neither_loses_nor_doubles_messages_of_a_subject_that_stays(
    client: NatslogClient, nats_url: str, name: str
) -> None:
    """The publisher requests no acks: a message that the broker is not subscribed to would be missing."""
    client.create_stream(name, [f"{name}.left", f"{name}.stays"])
    versions = [
        [f"{name}.stays"],
        [f"{name}.new.>", f"{name}.stays", f"{name}.other"],
        [f"{name}.stays", f"{name}.left"],
        [f"{name}.left", f"{name}.stays"],
    ]

    async def work(connection: Any) -> int:
        async def publish() -> int:
            sent = 0
            while not editing.done():
                for _ in range(50):
                    await connection.publish(f"{name}.stays", b"%d" % sent)
                    sent += 1
                await flushed(connection)
            await flushed(connection)
            return sent

        def edit() -> None:
            for subjects in versions * 5:
                assert client.edit_stream(name, subjects=subjects)["subjects"] == subjects

        editing = asyncio.create_task(asyncio.to_thread(edit))
        sent = await publish()
        await editing
        return sent

    sent = with_nats(nats_url, work)
    eventually(lambda: client.position(name)["high_watermark"] >= sent)
    assert all_values(client, name) == [b"%d" % at for at in range(sent)]


@pytest.mark.long
def test_edit_takes_effect_and_keeps_what_is_stored(
    client: NatslogClient, broker: BrokerProcess, nats_url: str, name: str
) -> None:
    client.create_stream(name, f"{name}.a")
    publish_acked(nats_url, f"{name}.a", [b"1"])
    edited = natslog("stream", "edit", name, "--subject", f"{name}.b.>", "--subject", f"{name}.a", url=broker.url)
    assert edited.stdout == f"stream {name} changed: subjects\n"
    for subject, value in ((f"{name}.b.x", b"2"), (f"{name}.a", b"3")):
        publish_acked(nats_url, subject, [value])
    natslog("stream", "edit", name, "--subject", f"{name}.b.>", url=broker.url)
    with_nats(nats_url, lambda connection: _publish(connection, f"{name}.a", b"recorded no longer"))
    publish_acked(nats_url, f"{name}.b.y", [b"4"])
    assert recorded(client, name) == [
        (f"{name}.a", b"1"),
        (f"{name}.b.x", b"2"),
        (f"{name}.a", b"3"),
        (f"{name}.b.y", b"4"),
    ]


async def _publish(connection: Any, subject: str, value: bytes) -> None:
    await connection.publish(subject, value)
    await flushed(connection)


@pytest.mark.long
def test_command_line_creates_and_shows_all_subjects(broker: BrokerProcess, nats_url: str, name: str) -> None:
    two = ("--subject", f"{name}.a", "--subject", f"{name}.b")
    created = natslog("stream", "create", name, *two, url=broker.url).stdout
    assert created == f"stream {name} records {name}.a, {name}.b\n"
    assert json.loads(natslog("stream", "info", name, "--json", url=broker.url).stdout)["subjects"] == list(two[1::2])
    shown = natslog("stream", "info", name, url=broker.url).stdout
    assert f"{name}.a, {name}.b" in shown
    assert "subjects" not in shown
    pub = ("pub", f"{name}.b", "x", "--ack", "--nats-url", nats_url)
    natslog(*pub, url=broker.url)
    assert recorded(broker.client(), name) == [(f"{name}.b", b"x")]
    overlapping = natslog("stream", "edit", name, *two, "--subject", f"{name}.>", url=broker.url, check=False)
    assert overlapping.returncode != 0
    assert "overlap" in overlapping.stderr


def test_direct_append_takes_rows_on_all_subjects(client: NatslogClient, name: str) -> None:
    client.create_stream(name, [f"{name}.a", f"{name}.b.*"])

    def append(batch: int, values: list[bytes], subjects: list[str] | None, **options: Any) -> None:
        columns: dict[str, Any] = {"value": pa.array(values, pa.binary())}
        columns |= {"subject": pa.array(subjects, pa.string())} if subjects else {}
        uploader = PartUploader(client, name, "loader", batch, **options)
        uploader.add(pa.RecordBatch.from_pydict(columns))
        client.commit_append(name, "loader", batch, uploader.finish())

    append(0, [b"1", b"2"], [f"{name}.b.x", f"{name}.a"])
    append(1, [b"3"], None, subject=f"{name}.a")
    assert recorded(client, name) == [(f"{name}.b.x", b"1"), (f"{name}.a", b"2"), (f"{name}.a", b"3")]
    what = f"the stream records '{name}.a', '{name}.b.\\*'"
    with pytest.raises(InvalidRequest, match=f"{what}: give one subject"):
        append(2, [b"4"], None)
    with pytest.raises(InvalidRequest, match=f"{what}, not the subject '{name}.c'"):
        append(2, [b"4"], None, subject=f"{name}.c")
    with pytest.raises(InvalidRequest, match=f"{what}, not the subject: row 1"):
        append(2, [b"4", b"5"], [f"{name}.a", f"{name}.b"])


def test_streams_of_one_group_share_all_their_subjects(client: NatslogClient, nats_url: str, name: str) -> None:
    both, subjects = (f"{name}-1", f"{name}-2"), [f"{name}.a", f"{name}.b.*"]
    for stream in both:
        client.create_stream(stream, subjects, group=name)
    sent = [b"%d" % at for at in range(40)]
    publish_acked(nats_url, f"{name}.a", sent[:20])
    publish_acked(nats_url, f"{name}.b.x", sent[20:])
    assert sorted(value for stream in both for value in all_values(client, stream)) == sorted(sent)


def test_http_sink_requires_a_choice_among_several_subjects(
    client: NatslogClient, broker: BrokerProcess, name: str
) -> None:
    client.create_stream(name, [f"{name}.a", f"{name}.b"])
    options = HttpSinkOptions.parse({"servers": broker.url, "stream": name})
    with pytest.raises(ConfigError, match=f"has the subjects '{name}.a', '{name}.b': choose one with .option"):
        options.check_stream(has_subjects=False)
    options.check_stream(has_subjects=True)
    client.edit_stream(name, subject=f"{name}.a")
    options.check_stream(has_subjects=False)


@pytest.mark.long
def test_all_subjects_are_recorded_after_restarts_of_the_broker_and_of_nats(tmp_path: Path) -> None:
    with running(tmp_path / "own") as (server, broker):
        client = broker.client()
        client.create_stream("orders", ["orders.>", "returns"])
        client.edit_stream("orders", subjects=["refunds.*", "orders.>"])

        def publish(round_: bytes) -> None:
            for subject in ("orders.a", "refunds.b"):
                publish_acked(server.url, subject, [round_])

        publish(b"0")
        broker.kill()
        broker.start()
        publish(b"1")
        server.stop()
        eventually(lambda: not broker.ready())
        server.start()
        eventually(broker.ready)
        publish(b"2")
        assert client.stream("orders")["subjects"] == ["refunds.*", "orders.>"]
        assert all_values(client, "orders") == [b"0", b"0", b"1", b"1", b"2", b"2"]


@pytest.mark.long
def test_group_is_edited_while_messages_arrive(
    client: NatslogClient, broker: BrokerProcess, nats_url: str, name: str
) -> None:
    """Streams of a group share their subject: each message is stored in one of them."""
    streams = [f"{name}-1", f"{name}-2"]
    for stream in streams:
        client.create_stream(stream, name)

    def stored(count: int) -> list[int]:
        """How many of the next messages each of the streams has; each message is acked once at least."""
        before = [client.position(stream)["high_watermark"] for stream in streams]
        publish_acked(nats_url, name, [b"%d" % at for at in range(count)])
        eventually(lambda: sum(ends()) - sum(before) >= count)
        return [end - start for start, end in zip(before, ends(), strict=True)]

    def ends() -> list[int]:
        return [client.position(stream)["high_watermark"] for stream in streams]

    publish_acked(nats_url, name, [b"both"])
    eventually(lambda: ends() == [1, 1])
    for stream in streams:
        natslog("stream", "edit", stream, "--group", f"g-{name}", url=broker.url)
        assert client.stream(stream)["group"] == f"g-{name}"
    eventually(lambda: sum(stored(60)) == 60)
    first, second = stored(300)
    assert first + second == 300
    assert min(first, second) > 50
    for stream in streams:
        natslog("stream", "edit", stream, "--group", "none", url=broker.url)
        assert client.stream(stream)["group"] is None
    eventually(lambda: stored(10) == [10, 10])
