"""Roll-ups (`Nats-Rollup`): JetStream's answers and remaining messages; the same ones on every replica."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from natslog.arrow.schema import HEADERS_TYPE
from natslog.client import NatslogClient
from natslog.errors import InvalidRequest
from natslog.nats_server import NatsServer
from tests.cluster_harness import ClusterBroker, running_cluster
from tests.harness import BrokerProcess, natslog, publish_acked, with_nats
from tests.integration.jetstream import Script, created, jetstream, played  # noqa: F401
from tests.integration.test_append import staged, table
from tests.integration.test_removal_in_clusters import everywhere

ROLLUP, ID = "Nats-Rollup", "Nats-Msg-Id"
LAST_OF_SUBJECT = "Nats-Expected-Last-Subject-Sequence"

SCRIPT: Script = [
    ("a", {}),
    ("b", {}),
    ("a", {}),
    ("a", {ROLLUP: "sub"}),
    ("c", {ROLLUP: "SUB"}),
    ("b", {ROLLUP: "other"}),
    ("b", {ROLLUP: ""}),
    ("a", {}),
    ("b", {ROLLUP: "sub"}),
    ("c", {ROLLUP: "All"}),
    ("a", {LAST_OF_SUBJECT: "99"}),
    ("a", {LAST_OF_SUBJECT: "0"}),
    ("a", {ROLLUP: "sub", ID: "one"}),
    ("a", {}),
    ("a", {ROLLUP: "sub", ID: "one"}),
    ("b", {}),
]


@pytest.mark.parametrize(
    "setting",
    [{"allow_rollup_hdrs": True}, {"deny_purge": True}, {"allow_rollup_hdrs": True, "max_msgs_per_subject": 2}],
)
def test_answers_and_remaining_messages_are_those_of_jetstream(
    jetstream: NatsServer,  # noqa: F811
    client: NatslogClient,
    nats_url: str,
    name: str,
    setting: dict[str, Any],
) -> None:
    async def other(nats: Any) -> tuple[list[Any], list[int]]:
        await created(nats, name, **setting)
        answers = await played(nats, name, name, SCRIPT)
        asked = json.dumps({"deleted_details": True}).encode()
        state = json.loads((await nats.request(f"$JS.API.STREAM.INFO.{name}", asked)).data)["state"]
        sequences = set(range(state["first_seq"], state["last_seq"] + 1)) - set(state.get("deleted") or ())
        return answers, sorted(sequences)

    names = {"allow_rollup_hdrs": "allow_rollup", "max_msgs_per_subject": "max_messages_per_subject"}
    client.create_stream(name, f"{name}.>", **{names.get(one, one): value for one, value in setting.items()})
    expected, remaining = with_nats(jetstream.url, other)
    found = with_nats(nats_url, lambda nats: played(nats, name, name, SCRIPT))
    differing = [one for one in zip(SCRIPT, found, expected, strict=True) if one[1] != one[2]]
    assert not differing, differing
    assert [offset + 1 for offset in offsets(client, name)] == remaining


def offsets(client: NatslogClient, name: str) -> list[int]:
    return [offset for batch in client.read(name) for offset in batch.column("offset").to_pylist()]


def test_settings_that_contradict_each_other_are_refused(client: NatslogClient, name: str) -> None:
    with pytest.raises(InvalidRequest, match="roll-ups require the purge permission"):
        client.create_stream(name, name, allow_rollup=True, deny_purge=True)
    client.create_stream(name, name, deny_purge=True)
    with pytest.raises(InvalidRequest, match="roll-ups require the purge permission"):
        client.edit_stream(name, allow_rollup=True)


def test_roll_ups_are_in_force_for_messages_after_the_edit(
    client: NatslogClient, broker: BrokerProcess, nats_url: str, name: str
) -> None:
    client.create_stream(name, name)
    publish_acked(nats_url, name, [b"0", b"1"])
    headers = pa.array([[(ROLLUP, "all")]], HEADERS_TYPE)
    client.commit_append(name, "q", 0, staged(client, name, "q", 0, table([b"2"], headers=headers)))
    [refused] = publish_acked(nats_url, name, [b"x"], {ROLLUP: "all"})
    assert (refused["error"]["code"], refused["error"]["err_code"]) == (500, 10111)
    assert natslog("stream", "edit", name, "--allow-rollup", url=broker.url).returncode == 0
    publish_acked(nats_url, name, [b"3"])
    assert offsets(client, name) == [0, 1, 2, 3], "the header had no effect when the row was stored"
    assert publish_acked(nats_url, name, [b"4"], {ROLLUP: "sub"})[0]["seq"] == 5
    assert offsets(client, name) == [4]
    publish_acked(nats_url, name, [b"5"])
    client.commit_append(name, "q", 1, staged(client, name, "q", 1, table([b"6"], headers=headers)))
    assert offsets(client, name) == [6], "rows of direct appends roll up, too"
    client.edit_stream(name, allow_rollup=False)
    [refused] = publish_acked(nats_url, name, [b"x"], {ROLLUP: "all"})
    assert refused["error"]["description"] == "rollup not permitted"
    publish_acked(nats_url, name, [b"7"])
    assert offsets(client, name) == [6, 7]


@pytest.mark.long
def test_removed_messages_do_not_return_after_a_restart(
    client: NatslogClient, broker: BrokerProcess, nats_url: str, name: str
) -> None:
    client.create_stream(name, f"{name}.>", allow_rollup=True)
    for turn in range(3):
        publish_acked(nats_url, f"{name}.a", [b"x"] * 5)
        publish_acked(nats_url, f"{name}.b", [b"y"])
        client.roll(name)
        publish_acked(nats_url, f"{name}.a", [b"%d" % turn], {ROLLUP: "sub"})
    before = offsets(client, name)
    assert before == [5, 12, 19, 20]
    broker.kill()
    broker.start()
    assert offsets(client, name) == before


@pytest.mark.long
def test_replicas_hide_the_same_messages_when_the_leader_fails(tmp_path: Path) -> None:
    """Of each subject exactly what follows its last acked roll-up remains, on every replica."""
    with running_cluster(tmp_path / "own") as cluster:
        client = cluster.client()
        client.create_stream("s", "s.>", replicas=3, allow_rollup=True)
        cluster.wait_in_sync()
        stored: dict[str, list[int]] = {f"s.{at}": [] for at in range(4)}
        acked, killed = [0], list[ClusterBroker]()

        async def publish(nats: Any, subject: str) -> None:
            for turn in range(80):
                headers = {ID: f"{subject}-{turn}"} | ({ROLLUP: "sub"} if turn % 5 == 4 else {})
                while True:
                    try:
                        answer = json.loads((await nats.request(subject, b"x", timeout=2, headers=headers)).data)
                    except Exception:  # no leader now, or no answer
                        await asyncio.sleep(0.05)
                        continue
                    if "error" not in answer:
                        break
                if turn % 5 == 4:
                    stored[subject].clear()
                stored[subject].append(answer["seq"] - 1)
                acked[0] += 1

        async def kill() -> None:
            while acked[0] < 100:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            leader = cluster.leader_of("s")
            assert leader is not None
            killed.append(leader)
            await asyncio.to_thread(leader.kill)

        async def work(nats: Any) -> None:
            await asyncio.gather(kill(), *(publish(nats, subject) for subject in stored))

        with_nats(cluster.nats.url, work)
        killed[0].start()
        cluster.wait_in_sync()
        everywhere(cluster, "s", sorted(offset for several in stored.values() for offset in several))
