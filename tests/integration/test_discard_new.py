"""Streams that refuse new messages at their limits: JetStream's answers, and no message above a limit."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from natslog.client import NatslogClient
from natslog.client.publisher import Publisher, Rows
from natslog.errors import LimitReached, PublishFailed
from natslog.nats_server import NatsServer
from tests.cluster_harness import running_cluster
from tests.harness import all_values, eventually, publish_acked, with_nats
from tests.integration.jetstream import created, jetstream, played  # noqa: F401
from tests.integration.test_append import appended

SCRIPT: list[tuple[str, dict[str, str]]] = [
    ("a", {}),
    ("b", {}),
    ("b", {"Nats-Msg-Id": "one"}),
    ("c", {}),
    ("c", {"Nats-Msg-Id": "two"}),
    ("b", {"Nats-Msg-Id": "one"}),
    ("a", {"Nats-Expected-Last-Sequence": "7"}),
    ("c", {"Nats-Expected-Last-Sequence": "3"}),
    ("a", {}),
    ("b", {}),
    ("d", {}),
]


@pytest.mark.parametrize("limits", [{"max_msgs": 3}, {"max_msgs": 3, "max_msgs_per_subject": 1}, {}])
def test_answers_are_those_of_jetstream(
    jetstream: NatsServer,  # noqa: F811
    client: NatslogClient,
    nats_url: str,
    name: str,
    limits: dict[str, int],
) -> None:
    async def other(nats: Any) -> list[Any]:
        await created(nats, name, discard="new", **limits)
        return await played(nats, name, name, SCRIPT)

    settings = {one.replace("msgs", "messages"): count for one, count in limits.items()}
    client.create_stream(name, f"{name}.>", discard="new", **settings)
    expected = with_nats(jetstream.url, other)
    found = with_nats(nats_url, lambda nats: played(nats, name, name, SCRIPT))
    differing = [one for one in zip(SCRIPT, found, expected, strict=True) if one[1] != one[2]]
    assert not differing, differing
    if "max_msgs" in limits:
        assert (503, 10077, "maximum messages exceeded") in found


def test_answers_at_the_limit_of_bytes_are_those_of_jetstream(
    jetstream: NatsServer,  # noqa: F811
    client: NatslogClient,
    nats_url: str,
    name: str,
) -> None:
    """Two messages fit, by far: what a message takes beside its value differs."""

    async def all_played(nats: Any) -> list[Any]:
        too_large = await played(nats, name, name, [("a", {})], 120_000)
        return [*too_large, *await played(nats, name, name, SCRIPT, 40_000)]

    async def other(nats: Any) -> list[Any]:
        await created(nats, name, discard="new", max_bytes=100_000)
        return await all_played(nats)

    client.create_stream(name, f"{name}.>", discard="new", max_bytes=100_000)
    expected, found = with_nats(jetstream.url, other), with_nats(nats_url, all_played)
    assert found == expected
    refused = (503, 10077, "maximum bytes exceeded")
    assert [found[at] for at in (0, 3, 4, 9)] == [refused] * 4
    assert found[1:3] == [(1, False), (2, False)]


@pytest.mark.parametrize("acks", ["reply", "header"])
def test_removed_messages_make_room_at_once(client: NatslogClient, nats_url: str, name: str, acks: str) -> None:
    client.create_stream(name, f"{name}.>", discard="new", max_messages=3, acks=acks)

    def stored(count: int) -> list[bool]:
        async def work(nats: Any) -> list[bool]:
            inbox = nats.new_inbox()
            answers = await nats.subscribe(inbox)
            for _ in range(count):
                to = {"reply": inbox} if acks == "reply" else {"headers": {"Natslog-Ack-To": inbox}}
                await nats.publish(f"{name}.a", b"x", **to)
            return ["error" not in json.loads((await answers.next_msg(timeout=30)).data) for _ in range(count)]

        return with_nats(nats_url, work)

    assert stored(5) == [True] * 3 + [False] * 2
    client.delete_message(name, 1)
    assert stored(2) == [True, False]
    client.purge(name, subject=f"{name}.a", keep=1)
    assert stored(3) == [True, True, False]
    client.purge(name)
    assert stored(4) == [True] * 3 + [False]
    client.edit_stream(name, max_messages=4)
    assert stored(2) == [True, False]
    client.edit_stream(name, discard="old")
    assert stored(1) == [True]
    assert client.stream(name)["messages"] == 4


def test_expired_messages_make_room(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name, discard="new", max_messages=1, allow_ttl=True)
    assert "seq" in publish_acked(nats_url, name, [b"x"], {"Nats-TTL": "1s"})[0]
    assert publish_acked(nats_url, name, [b"x"])[0]["error"]["err_code"] == 10077
    eventually(lambda: "seq" in publish_acked(nats_url, name, [b"x"])[0], within_s=30)


def test_bytes_are_limited(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name, discard="new", max_bytes="20KB")
    [large] = publish_acked(nats_url, name, [bytes(25_000)])
    assert (large["error"]["code"], large["error"]["err_code"]) == (503, 10077)
    assert large["error"]["description"] == "maximum bytes exceeded"
    answers = [publish_acked(nats_url, name, [bytes(4_000)])[0] for _ in range(5)]
    assert ["seq" in answer for answer in answers] == [True, True, True, False, False]
    client.delete_message(name, 0)
    assert "seq" in publish_acked(nats_url, name, [bytes(4_000)])[0]
    assert client.stream(name)["bytes"] <= 20_000 + 5_000, "the file still has the removed message"


def test_direct_append_that_would_exceed_the_limit_is_refused_as_a_whole(client: NatslogClient, name: str) -> None:
    client.create_stream(name, name, discard="new", max_messages=3)
    appended(client, name, "q", 0, [b"x", b"y"])
    with pytest.raises(LimitReached, match="2 of 3 messages \\(max_messages\\).* none of the 2 rows"):
        appended(client, name, "q", 1, [b"x", b"y"])
    assert appended(client, name, "q", 1, [b"z"]).end == 3
    assert all_values(client, name) == [b"x", b"y", b"z"]


@pytest.mark.long
@pytest.mark.parametrize("envelope", [False, True])
def test_publisher_is_told(client: NatslogClient, nats_url: str, name: str, envelope: bool) -> None:
    client.create_stream(name, name, discard="new", max_messages=3)
    rows = Rows(pa.array([name] * 4), pa.array([b"%d" % at for at in range(4)]))
    with (
        pytest.raises(PublishFailed, match="maximum messages exceeded"),
        Publisher(nats_url, envelope=envelope, ack_timeout_s=5) as publisher,
    ):
        publisher.publish(rows, "stored")
    assert len(all_values(client, name)) == (0 if envelope else 3), "an envelope is refused as a whole"


def test_discard_without_a_limit_has_no_effect_as_in_jetstream(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name, discard="new")
    assert [answer["seq"] for answer in publish_acked(nats_url, name, [b"x"] * 20)] == list(range(1, 21))


@pytest.mark.long
def test_limit_holds_when_the_leader_fails(tmp_path: Path) -> None:
    """Every acked message is stored, and never are there more than the limit."""
    with running_cluster(tmp_path / "own") as cluster:
        client = cluster.client()
        client.create_stream("s", "s.>", replicas=3, discard="new", max_messages=100)
        cluster.wait_in_sync()
        acked: list[str] = []
        refused = asyncio.Event()

        async def publish(nats: Any, worker: int) -> None:
            at = 0
            while not refused.is_set():
                value = f"{worker}-{at}"
                try:
                    answer = json.loads(
                        (await nats.request("s.a", value.encode(), timeout=2, headers={"Nats-Msg-Id": value})).data
                    )
                except Exception:  # no leader now, or no answer
                    await asyncio.sleep(0.05)
                    continue
                if "error" not in answer:
                    acked.append(value)
                    at += 1
                elif answer["error"]["err_code"] == 10077:
                    refused.set()

        async def kill() -> None:
            while len(acked) < 40:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            leader = cluster.leader_of("s")
            assert leader is not None
            await asyncio.to_thread(leader.kill)

        async def work(nats: Any) -> None:
            await asyncio.gather(kill(), *(publish(nats, at) for at in range(4)))

        with_nats(cluster.nats.url, work)
        values = {value.decode() for value in all_values(client, "s")}
        assert len(values) == 100
        assert set(acked) <= values
