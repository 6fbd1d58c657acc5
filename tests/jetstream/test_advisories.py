"""Advisories about streams and consumers: what both servers publish, and who publishes it in a cluster."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import nats
import pytest

from tests.cluster_harness import ClusterBroker
from tests.harness import eventually, flushed
from tests.jetstream.both import Api, Both, Publish
from tests.jetstream.consuming import Ack, Advisories, Pull, Subscribe
from tests.jetstream.three_brokers import (
    asked,
    create_stream,
    in_background,
    leader_of,
    led_by_another,
    three_brokers,
)

STREAM = {"name": "ORDERS", "subjects": ["orders.>"]}
OF_STREAMS = Subscribe("streams", "$JS.EVENT.ADVISORY.STREAM.>")
OF_CONSUMERS = Subscribe("consumers", "$JS.EVENT.ADVISORY.CONSUMER.>")


def consumer(name: str, **config: Any) -> Api:
    config = {"durable_name": name, "ack_policy": "explicit"} | config
    return Api(f"CONSUMER.CREATE.ORDERS.{name}", {"stream_name": "ORDERS", "config": config})


@pytest.mark.long
def test_streams_that_are_created_updated_and_deleted(both: Both) -> None:
    found = both.compare(
        [
            OF_STREAMS,
            Api("STREAM.CREATE.ORDERS", STREAM),
            Advisories("streams", 1),
            Api("STREAM.CREATE.ORDERS", STREAM),  # there already
            Api("STREAM.CREATE.ORDERS", STREAM | {"max_msgs": 5}),  # refused
            Api("STREAM.UPDATE.ORDERS", STREAM | {"max_msgs": 5}),
            Advisories("streams", 1),
            Api("STREAM.UPDATE.ORDERS", STREAM | {"max_msgs": 5}),  # as it is
            Advisories("streams", 1),
            Api("STREAM.UPDATE.ORDERS", STREAM | {"storage": "memory"}),  # refused
            Publish("orders.a"),
            Api("STREAM.PURGE.ORDERS"),
            Api("STREAM.UPDATE.ORDERS", STREAM | {"sealed": True, "max_msgs": 7}),
            Advisories("streams", 1),
            Api("STREAM.DELETE.ORDERS"),
            Advisories("streams", 1),
            Api("STREAM.DELETE.ORDERS"),
            Api("STREAM.CREATE.OTHER", {"name": "OTHER", "subjects": ["other"]}),
            Advisories("streams", 1),  # nothing came in between
        ]
    )
    stated = [(subject, body["action"]) for step in found if isinstance(step, list) for subject, _, body in step]
    assert stated == [
        ("$JS.EVENT.ADVISORY.STREAM.CREATED.ORDERS", "create"),
        ("$JS.EVENT.ADVISORY.STREAM.UPDATED.ORDERS", "modify"),
        ("$JS.EVENT.ADVISORY.STREAM.UPDATED.ORDERS", "modify"),
        ("$JS.EVENT.ADVISORY.STREAM.UPDATED.ORDERS", "modify"),
        ("$JS.EVENT.ADVISORY.STREAM.DELETED.ORDERS", "delete"),
        ("$JS.EVENT.ADVISORY.STREAM.CREATED.OTHER", "create"),
    ]


@pytest.mark.long
def test_consumers_that_are_created_used_and_deleted(both: Both) -> None:
    found = both.compare(
        [
            OF_CONSUMERS,
            Api("STREAM.CREATE.ORDERS", STREAM),
            Publish("orders.a"),
            Publish("orders.b"),
            consumer("worker"),
            Advisories("consumers", 1),
            consumer("worker"),  # there already
            Api("CONSUMER.CREATE.ORDERS", {"stream_name": "ORDERS", "config": {"ack_policy": "none"}}),
            Advisories("consumers", 1),
            Pull("ORDERS", "worker", {"batch": 2, "expires": 5_000_000_000}),
            Ack(0, b"-NAK", is_request=False),
            Advisories("consumers", 1),
            Ack(1, b"+TERM too old", is_request=False),
            Advisories("consumers", 1),
            Api("CONSUMER.DELETE.ORDERS.worker"),
            Advisories("consumers", 1),
            consumer("other"),
            Advisories("consumers", 1),
            Api("STREAM.DELETE.ORDERS"),
            Advisories("consumers", 2),
        ]
    )
    advisories = [step for step in found if isinstance(step, list) and isinstance(step[0][-1], dict)]
    assert [subject.split(".")[4] for step in advisories for subject, _, _ in step] == [
        "CREATED",
        "CREATED",
        "MSG_NAKED",
        "MSG_TERMINATED",
        "DELETED",
        "CREATED",
        "DELETED",
        "DELETED",
    ]


def test_message_that_was_delivered_too_often_is_stated_with_the_request_that_skips_it(both: Both) -> None:
    """No time that the consumer waits for ends before."""
    one = {"batch": 1, "expires": 3600_000_000_000}
    found = both.compare(
        [
            Api("STREAM.CREATE.ORDERS", STREAM),
            *(Publish(f"orders.{letter}") for letter in "abc"),
            consumer("worker", max_deliver=2, ack_wait=3600_000_000_000),
            Subscribe("exceeded", "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>"),
            Pull("ORDERS", "worker", one),
            Ack(-1, b"-NAK", is_request=False),
            Pull("ORDERS", "worker", one),
            Ack(-1, b"-NAK", is_request=False),
            Pull("ORDERS", "worker", one),
            Advisories("exceeded", 1),
        ]
    )
    (advisory,) = found[-1]
    assert (advisory[2]["stream_seq"], advisory[2]["deliveries"]) == (1, 2)


# ---- several brokers ----


class Received:
    """Advisories about streams, as (event, stream, action or leader)."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.has_begun = self.has_ended = False
        self.found: list[tuple[str, str, str]] = []
        self.bodies: list[dict[str, Any]] = []

    async def run(self) -> None:
        connection = await nats.connect(self._url)
        try:
            await connection.subscribe("$JS.EVENT.ADVISORY.STREAM.>", cb=self._note)
            await flushed(connection)
            self.has_begun = True
            while not self.has_ended:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        finally:
            await connection.close()

    async def _note(self, message: Any) -> None:
        body = json.loads(message.data)
        event = message.subject.split(".")[4]
        self.bodies.append(body)
        self.found.append((event, message.subject.split(".")[5], body.get("action") or body["leader"]))

    def of(self, stream: str) -> list[tuple[str, str]]:
        return [(event, what) for event, of, what in self.found if of == stream]

    def leaders_of(self, stream: str) -> list[str]:
        return [what for event, what in self.of(stream) if event == "LEADER_ELECTED"]


def serves(broker: ClusterBroker) -> bool:
    return bool(broker.client().cluster()["jetstream"] == "on")


@pytest.mark.long
def test_each_change_is_stated_once_whoever_makes_it_and_each_leader_states_that_it_leads(tmp_path: Path) -> None:
    with three_brokers(tmp_path) as cluster:
        received = Received(cluster.nats_url)
        with in_background(received.run()):
            try:
                eventually(lambda: received.has_begun, what="it is subscribed")
                eventually(lambda: all(serves(one) for one in cluster.brokers), what="all brokers serve the API")
                create_stream(cluster, "ORDERS", subjects=["orders"])
                asked(cluster, "STREAM.UPDATE.ORDERS", {"name": "ORDERS", "subjects": ["more"], "num_replicas": 3})
                eventually(lambda: len(received.of("ORDERS")) >= 3, what="it is stated")
                leader = leader_of(cluster, "ORDERS")
                epoch = cluster.client().stream("ORDERS")["leader_epoch"]
                assert [one for one in received.of("ORDERS") if one[0] != "LEADER_ELECTED"] == [
                    ("CREATED", "create"),
                    ("UPDATED", "modify"),
                ]
                leaders = received.leaders_of("ORDERS")
                assert leaders[-1] == f"natslog-{leader.number}"
                assert len(leaders) <= epoch, "once each, and not again when subjects are edited"
                body = next(one for one in received.bodies if "leader" in one and one["stream"] == "ORDERS")
                assert body["type"] == "io.nats.jetstream.advisory.v1.stream_leader_elected"
                assert [one["name"] for one in body["replicas"]] == ["natslog-1", "natslog-2", "natslog-3"]
                assert [one["peer"] for one in body["replicas"]] == ["1", "2", "3"]

                for number, broker in enumerate(cluster.brokers):
                    name, client = f"plain{number}", broker.client()
                    client.create_stream(name, name)
                    client.edit_stream(name, max_messages=5)
                    client.edit_stream(name, paused=True)  # not shown in the API
                    client.seal(name)
                    client.delete_stream(name)
                    eventually(lambda name=name: len(received.of(name)) >= 4, what="it is stated")
                    assert received.of(name) == [
                        ("CREATED", "create"),
                        ("UPDATED", "modify"),
                        ("UPDATED", "modify"),
                        ("DELETED", "delete"),
                    ]

                leader.kill()
                following = led_by_another(cluster, "ORDERS", leader)
                name = f"natslog-{following.number}"
                eventually(
                    lambda: name in received.leaders_of("ORDERS")[len(leaders) :], what="the next leader states it"
                )
            finally:
                received.has_ended = True
