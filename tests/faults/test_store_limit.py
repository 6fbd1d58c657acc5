"""`max_store_bytes`: the limit of all streams of a broker, enforced as a full disk is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from natslog.client import NatslogClient
from natslog.config import load_config
from natslog.errors import ConfigError
from tests.cluster_harness import running_cluster
from tests.harness import BrokerProcess, all_values, eventually, publish_acked, running
from tests.integration.test_activity import events, found

LIMIT = 2 * 1024 * 1024
MESSAGE = b"x" * 50_000


def isr_changes(client: NatslogClient) -> list[list[int]]:
    """The ISRs of `orders`, as events state them."""
    isr = [one for one in events(client) if (one["event"], one.get("stream")) == ("activity.stream.isr", "orders")]
    return [sorted(one["after"]["isr"]) for one in isr]


def publish_until_refused(nats_url: str, subject: str, most: int = 100) -> tuple[int, dict[str, Any]]:
    """How many messages were stored, and the first refusal."""
    for stored in range(most):
        (ack,) = publish_acked(nats_url, subject, [MESSAGE])
        if "error" in ack:
            return stored, ack["error"]
    raise AssertionError(f"{most} messages were stored")


def used_bytes(broker: BrokerProcess) -> int:
    return sum(file.stat().st_size for file in broker.folder.glob("streams/*/*"))


def room_events(client: NatslogClient) -> list[str]:
    """`disk_low` and `disk_writable` in the order in which they are stored."""
    kinds = [one["event"].rpartition(".")[2] for one in events(client) if one["event"].startswith("activity.broker.")]
    return [kind for kind in kinds if kind.startswith("disk_")]


def wait_for_events(client: NatslogClient, *expected: str) -> None:
    """The events are small: they are stored although a message was refused."""
    eventually(lambda: room_events(client) == list(expected), what=f"the events {expected}")


@pytest.mark.long
def test_messages_are_refused_at_the_limit_and_accepted_when_streams_take_less(tmp_path: Path) -> None:
    with running(tmp_path, max_store_bytes=LIMIT, retention_interval="200ms", tombstone_grace="1s") as (nats, broker):
        client = broker.client()
        for name in ("a", "b"):
            client.create_stream(name, name)
        assert all("error" not in ack for ack in publish_acked(nats.url, "a", [MESSAGE] * 20))
        stored, refusal = publish_until_refused(nats.url, "b")
        assert 10 <= stored <= 22, "both streams count"
        assert (refusal["code"], refusal["err_code"]) == (503, 10047)
        assert "max_store_bytes is 2097152" in refusal["description"]
        assert used_bytes(broker) <= LIMIT
        assert len(all_values(client, "b")) == stored, "reads continue"
        wait_for_events(client, "disk_low")

        broker.kill()
        broker.start()
        assert "error" in publish_acked(nats.url, "b", [MESSAGE])[0], "what was there at the start counts"
        wait_for_events(client, "disk_low", "disk_low")

        client.delete_stream("a")
        assert "error" in publish_acked(nats.url, "b", [MESSAGE])[0], "the files of a deleted stream are still there"
        eventually(lambda: "error" not in publish_acked(nats.url, "b", [MESSAGE])[0], 30, "writes resume")
        wait_for_events(client, "disk_low", "disk_low", "disk_writable")
        assert found(client, "broker.disk_writable", broker=1)["after"]["free_bytes"] > 0
        stored, _ = publish_until_refused(nats.url, "b")
        assert used_bytes(broker) <= LIMIT
        client.edit_stream("b", max_bytes=LIMIT // 4)
        eventually(lambda: "error" not in publish_acked(nats.url, "b", [MESSAGE])[0], 30, "retention continues")


def test_limit_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_store_bytes"):
        load_config(None, {"max_store_bytes": "1000"}, {})


@pytest.mark.long
def test_a_broker_at_its_limit_leads_no_more_and_is_in_sync_again_when_there_is_space(tmp_path: Path) -> None:
    settings = {"retention_interval": "200ms", "segment_bytes": LIMIT // 8}  # space is freed with whole segments
    with running_cluster(tmp_path / "own", settings=settings) as cluster:
        client = cluster.client()
        client.create_stream("orders", "orders", replicas=3, min_isr=2)
        limited = eventually(lambda: cluster.leader_of("orders"))
        limited.terminate()
        limited.settings["max_store_bytes"] = LIMIT
        limited.start()
        cluster.wait_in_sync()
        acked = 0
        while acked < 3 * LIMIT // len(MESSAGE):  # refused while the leadership is transferred
            (ack,) = publish_acked(cluster.nats.url, "orders", [MESSAGE])
            acked += "error" not in ack
        stream = client.stream("orders")
        assert stream["leader"] != limited.number
        assert limited.number not in stream["isr"]
        assert used_bytes(limited) <= LIMIT
        found(client, "broker.disk_low", broker=limited.number)
        eventually(
            lambda: isr_changes(client)[-1:] == [sorted({1, 2, 3} - {limited.number})], what="an event of the ISR"
        )
        assert len(all_values(client, "orders")) == acked, "no acked message is lost"
        client.edit_stream("orders", max_bytes=LIMIT // 4)
        eventually(lambda: limited.number in client.stream("orders")["isr"], 60, "the broker is in sync again")
        eventually(lambda: isr_changes(client)[-1:] == [[1, 2, 3]], what="an event of the ISR")
