"""Acks and request and reply: what is no request for an ack gets none, and no ack goes where it must not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import nats.errors
import pytest

from natslog.client import NatslogClient
from natslog.errors import InvalidRequest
from tests.harness import BrokerProcess, all_values, eventually, flushed, natslog, running, with_nats


async def service(connection: Any, subject: str) -> None:
    async def answer(message: Any) -> None:
        await asyncio.sleep(0.05)  # an ack would come first
        await message.respond(b"the answer to " + message.data)

    await connection.subscribe(subject, cb=answer)
    await flushed(connection)


def answers_of(nats_url: str, subject: str, headers: dict[str, str] | None = None) -> list[bytes]:
    async def work(connection: Any) -> list[bytes]:
        await service(connection, subject)
        asks = [connection.request(subject, b"%d" % at, timeout=30, headers=headers) for at in range(5)]
        return [answer.data for answer in await asyncio.gather(*asks)]

    return with_nats(nats_url, work)


ANSWERS = [b"the answer to %d" % at for at in range(5)]


@pytest.mark.parametrize("acks", ["header", "never"])
@pytest.mark.long
def test_requester_and_service_on_a_recorded_subject_exchange_their_answers(
    client: NatslogClient, nats_url: str, name: str, acks: str
) -> None:
    client.create_stream(name, name, acks=acks)
    assert answers_of(nats_url, name) == ANSWERS
    eventually(lambda: client.position(name)["high_watermark"] == 5)
    assert all_values(client, name) == [b"%d" % at for at in range(5)]


@pytest.mark.long
def test_setting_is_edited_live(client: NatslogClient, nats_url: str, broker: BrokerProcess, name: str) -> None:
    assert client.create_stream(name, name)["acks"] == "reply"
    assert all(b'"seq"' in answer and b'"error"' not in answer for answer in answers_of(nats_url, name))
    natslog("stream", "edit", name, "--acks", "never", url=broker.url)
    assert client.stream(name)["acks"] == "never"
    assert answers_of(nats_url, name) == ANSWERS
    natslog("stream", "edit", name, "--acks", "reply", url=broker.url)
    assert all(b'"seq"' in answer and b'"error"' not in answer for answer in answers_of(nats_url, name))
    with pytest.raises(InvalidRequest, match="must be reply, any, header or never"):
        client.edit_stream(name, acks="sometimes")


def acks_at(
    nats_url: str, subject: str, inbox: str, headers: dict[str, str] | None, *, reply: str = "", wait_s: float = 10
) -> list[dict[str, Any]]:
    """What comes to `inbox` after one message on the subject; nothing where no ack comes in time."""

    async def work(connection: Any) -> list[dict[str, Any]]:
        subscription = await connection.subscribe(inbox)
        await flushed(connection)
        await connection.publish(subject, b"x", reply=reply, headers=headers)
        try:
            return [json.loads((await subscription.next_msg(wait_s)).data)]
        except nats.errors.TimeoutError:
            return []

    return with_nats(nats_url, work)


@pytest.mark.long
def test_header_names_where_the_ack_goes(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name, acks="header")
    (ack,) = acks_at(nats_url, name, f"_INBOX.{name}", {"Natslog-Ack-To": f"_INBOX.{name}", "Other": "x"})
    assert ack["seq"] == 1
    (ack,) = acks_at(nats_url, name, f"_INBOX.{name}", {"Other": "x", "Natslog-Ack-To": f"  _INBOX.{name} "})
    assert ack["seq"] == 2
    for header in (f"_INBOX.{name} 5", f"_INBOX.\tx.{name}", f"elsewhere.{name}", "", "_INBOX.", "_INBOX"):
        inbox = f"elsewhere.{name}" if header.startswith("elsewhere") else "_INBOX.>"
        assert acks_at(nats_url, name, inbox, {"Natslog-Ack-To": header}, wait_s=0.3) == [], header
    assert client.position(name)["high_watermark"] == 8
    assert acks_at(nats_url, name, f"_INBOX.{name}", None, reply=f"_INBOX.{name}", wait_s=0.3) == []


def test_subject_of_the_ack_is_not_stored(client: NatslogClient, nats_url: str, name: str) -> None:
    """It says nothing about the message, and rows without headers are faster to read."""
    client.create_stream(name, name, acks="header")
    to = {"Natslog-Ack-To": f"_INBOX.{name}"}
    own_id = "~abcdefghijklmnop"
    for headers in (to, to | {"A": "b"}, to | {"Nats-Msg-Id": own_id}, to | {"Nats-Msg-Id": "17"}, {"A": "b"}):
        acks_at(nats_url, name, f"_INBOX.{name}", headers, wait_s=5 if headers != {"A": "b"} else 0.3)
    stored = [row["headers"] for batch in client.read(name) for row in batch.to_pylist()]
    pair = [{"key": "A", "value": "b"}]
    assert stored == [None, pair, None, [{"key": "Nats-Msg-Id", "value": "17"}], pair]


def test_no_ack_goes_beyond_the_prefixes(client: NatslogClient, nats_url: str, name: str) -> None:
    """A client that may publish to one stream must not be able to make the broker publish to another one."""
    client.create_stream(name, f"{name}.>")
    client.create_stream(f"{name}-other", f"other-{name}.>")
    assert acks_at(nats_url, f"{name}.a", f"other-{name}.evil", None, reply=f"other-{name}.evil", wait_s=0.5) == []
    eventually(lambda: client.position(name)["high_watermark"] == 1)
    assert client.position(f"{name}-other")["high_watermark"] == 0


@pytest.mark.long
def test_prefixes_of_clients_are_a_setting(tmp_path: Path) -> None:
    with running(tmp_path / "own", ack_reply_prefixes="_INBOX.,replies.eu.") as (nats, broker):
        client = broker.client()
        client.create_stream("orders", "orders")
        for reply in ("replies.eu.7", "_INBOX.a.b"):
            assert len(acks_at(nats.url, "orders", reply, None, reply=reply)) == 1
        assert acks_at(nats.url, "orders", "replies.us", None, reply="replies.us", wait_s=0.5) == []
        for subject in ("replies.eu.>", "replies.>", "replies.*.x", "replies.eu.x"):
            with pytest.raises(InvalidRequest, match="ack_reply_prefixes"):
                client.create_stream("replies", subject)
        client.create_stream("replies", "replies.us.>")
        with pytest.raises(InvalidRequest, match="ack_reply_prefixes"):
            client.edit_stream("replies", subject="replies.eu.>")
        with pytest.raises(InvalidRequest, match="cannot record 'replies.eu.x'"):
            client.edit_stream("replies", subjects=["replies.us.>", "replies.eu.x"])


@pytest.mark.long
@pytest.mark.parametrize("prefix", ["_INBOX", "a b.", "$JS.", "*.", ">.", "_INBOX.,x"])
def test_prefix_that_cannot_be_is_refused(tmp_path: Path, prefix: str) -> None:
    arguments = ("--data-dir", str(tmp_path), "--http-port", "0", "--ack-reply-prefixes", prefix)
    done = natslog("server", *arguments, check=False)
    assert done.returncode != 0
    assert "ack_reply_prefixes" in done.stderr


@pytest.mark.parametrize("subject", ["$SYS.>", "$JS.API.>", "_INBOX.>", "_INBOX.a", "$JS"])
def test_internal_subjects_are_not_recorded(client: NatslogClient, name: str, subject: str) -> None:
    with pytest.raises(InvalidRequest, match="are not recorded"):
        client.create_stream(name, subject)


@pytest.mark.long
def test_stream_on_everything_needs_no_acks_and_leaves_internal_subjects_out(tmp_path: Path) -> None:
    with running(tmp_path / "own") as (nats, broker):
        client = broker.client()
        for subject in (">", "*", "*.a", "*.>"):
            with pytest.raises(InvalidRequest, match="choose acks header or never"):
                client.create_stream("all", subject)
        client.create_stream("all", ">", acks="never")
        assert answers_of(nats.url, "service") == ANSWERS

        async def work(connection: Any) -> None:
            for subject in ("$KV.bucket.key", "$other", "_INBOX.x.y", "_INBOXES.x", "plain"):
                await connection.publish(subject, subject.encode())
            await flushed(connection)

        with_nats(nats.url, work)
        values = [b"%d" % at for at in range(5)] + [b"_INBOXES.x", b"plain"]
        eventually(lambda: client.position("all")["high_watermark"] == len(values))
        assert all_values(client, "all") == values
        with pytest.raises(InvalidRequest, match="choose acks header or never"):
            client.edit_stream("all", acks="reply")
