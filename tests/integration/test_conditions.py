"""Conditions of publishes (`Nats-Expected-…`) and `Nats-TTL`: the answers of JetStream, and no lost update."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from natslog.client import NatslogClient
from natslog.nats_server import NatsServer
from tests.cluster_harness import running_cluster
from tests.harness import all_values, eventually, publish_acked, with_nats
from tests.integration.jetstream import created, jetstream, played, shown  # noqa: F401

LAST = "Nats-Expected-Last-Sequence"
LAST_OF_SUBJECT = "Nats-Expected-Last-Subject-Sequence"
LAST_ID = "Nats-Expected-Last-Msg-Id"
STREAM = "Nats-Expected-Stream"
ID, TTL = "Nats-Msg-Id", "Nats-TTL"

SCRIPT: list[tuple[str, dict[str, str]]] = [
    ("a", {LAST: "0"}),
    ("a", {LAST: "0"}),
    ("a", {LAST: "1"}),
    ("b", {LAST_OF_SUBJECT: "0", ID: "one"}),
    ("b", {LAST_OF_SUBJECT: "0"}),
    ("b", {LAST_OF_SUBJECT: "3", LAST: "3"}),
    ("a", {LAST_OF_SUBJECT: "2", LAST_ID: "one"}),
    ("a", {LAST_OF_SUBJECT: "2"}),
    ("a", {LAST_ID: "one"}),
    ("a", {ID: "two"}),
    ("a", {LAST_ID: "one"}),
    ("a", {LAST_ID: "two"}),
    ("a", {STREAM: "other"}),
    ("a", {STREAM: "{stream}"}),
    ("a", {STREAM: ""}),
    ("a", {LAST: "99", LAST_OF_SUBJECT: "1"}),
    ("c", {LAST_OF_SUBJECT: "7"}),
    ("c", {LAST_OF_SUBJECT: "0", LAST: "0"}),
    ("a", {TTL: "1h"}),
    ("a", {TTL: "never"}),
    ("a", {TTL: "soon"}),
    ("a", {TTL: "0"}),
    ("a", {TTL: ""}),
]


@pytest.mark.parametrize("allows", [False, True])
def test_answers_are_those_of_jetstream(
    jetstream: NatsServer,  # noqa: F811
    client: NatslogClient,
    nats_url: str,
    name: str,
    allows: bool,
) -> None:
    script = [*SCRIPT, *[("a", {TTL: text}) for text in ("500ms", "-1", "2s", "+3s", "1.5s", "NEVER", "0s")]]

    async def other(nats: Any) -> list[Any]:
        await created(nats, name, allow_msg_ttl=allows)
        return await played(nats, name, name, script)

    client.create_stream(name, f"{name}.>", allow_ttl=allows)
    expected = with_nats(jetstream.url, other)
    found = with_nats(nats_url, lambda nats: played(nats, name, name, script))
    differing = [one for one in zip(script, found, expected, strict=True) if one[1] != one[2]]
    assert not differing, differing


def test_a_removed_message_is_not_the_last_of_its_subject(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, f"{name}.>")
    publish_acked(nats_url, f"{name}.a", [b"0", b"1"])
    publish_acked(nats_url, f"{name}.b", [b"2"])

    def last(subject: str) -> Any:
        [answer] = publish_acked(nats_url, f"{name}.{subject}", [b"x"], {LAST_OF_SUBJECT: "99"})
        return answer["error"]["description"]

    assert (last("a"), last("b")) == ("wrong last sequence: 2", "wrong last sequence: 3")
    client.delete_message(name, 1)
    assert last("a") == "wrong last sequence: 1", "an older one is the last then, as in JetStream"
    client.delete_message(name, 0)
    assert last("a") == "wrong last sequence: 0"
    publish_acked(nats_url, f"{name}.a", [b"3"], {LAST_OF_SUBJECT: "0"})
    assert last("a") == "wrong last sequence: 4"
    client.purge(name)
    assert (last("a"), last("b")) == ("wrong last sequence: 0", "wrong last sequence: 0")


def test_a_repeated_message_is_acked_although_its_condition_is_not_met_any_more(
    client: NatslogClient, nats_url: str, name: str
) -> None:
    """So that a publisher whose ack was lost learns the outcome; JetStream refuses it."""
    client.create_stream(name, name)
    answers = [publish_acked(nats_url, name, [b"x"], {LAST_OF_SUBJECT: "0", ID: "one"})[0] for _ in range(2)]
    assert [shown(answer) for answer in answers] == [(1, False), (1, True)]
    [refused] = publish_acked(nats_url, name, [b"x"], {LAST_OF_SUBJECT: "0", ID: "two"})
    [stored] = publish_acked(nats_url, name, [b"x"], {LAST_OF_SUBJECT: "1", ID: "two"})
    assert (shown(refused)[1], shown(stored)) == (10071, (2, False)), "a refused id is not remembered"


def test_unknown_expectation_is_not_acked(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    [refused] = publish_acked(nats_url, name, [b"x"], {"Nats-Expected-Weather": "fair"})
    assert (refused["error"]["code"], refused["error"]["err_code"]) == (400, 10500)
    assert all_values(client, name) == []


async def incremented(nats: Any, subject: str, count: int, done: list[tuple[int, int]], worker: int) -> None:
    """Compare-and-set: each value is that of the last message, and one more. An answer that is missing is resolved by a
    message id.
    """
    last = 0
    for turn in range(count):
        while True:
            headers = {LAST_OF_SUBJECT: str(last), ID: f"{worker}-{turn}"}
            try:
                answer = json.loads((await nats.request(subject, b"%d" % worker, timeout=2, headers=headers)).data)
            except Exception:  # no leader now, or no answer
                await asyncio.sleep(0.05)
                continue
            if "error" not in answer:
                done.append((answer["seq"], last))
                last = answer["seq"]
                break
            if answer["error"]["err_code"] == 10071:
                last = int(answer["error"]["description"].rpartition(" ")[2])


def no_update_is_lost(done: list[tuple[int, int]]) -> bool:
    """Each acked message was based on the one before it."""
    stored = sorted(set(done))
    return len({sequence for sequence, _ in stored}) == len(done) and len({last for _, last in stored}) == len(done)


def test_publishers_at_once_lose_no_update(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, f"{name}.>")
    done: list[tuple[int, int]] = []

    async def work(nats: Any) -> None:
        noise = [nats.publish(f"{name}.other", b"x") for _ in range(500)]
        await asyncio.gather(*noise, *(incremented(nats, f"{name}.one", 12, done, at) for at in range(8)))

    with_nats(nats_url, work)
    assert len(done) == 96
    assert no_update_is_lost(done)
    assert sorted(sequence for sequence, _ in done)[:-1] == sorted(last for _, last in done)[1:]


@pytest.mark.long
def test_no_update_is_lost_when_the_leader_fails(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "own") as cluster:
        cluster.client().create_stream("s", "s.>", replicas=3)
        cluster.wait_in_sync()
        done: list[tuple[int, int]] = []

        async def kill() -> None:
            while len(done) < 60:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            leader = cluster.leader_of("s")
            assert leader is not None
            await asyncio.to_thread(leader.kill)

        async def work(nats: Any) -> None:
            await asyncio.gather(kill(), *(incremented(nats, "s.one", 60, done, at) for at in range(4)))

        with_nats(cluster.nats.url, work)
        assert len(done) == 240
        stored = eventually(lambda: len(all_values(cluster.client(), "s")), within_s=30)
        assert len({sequence for sequence, _ in done}) == len(done) == stored
