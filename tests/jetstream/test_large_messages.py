"""Messages larger than the NATS server permits, which only a direct append can store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js.api import ConsumerConfig

from natslog.client import NatslogClient
from natslog.nats_server import NatsServer, free_port
from tests.harness import BrokerProcess, eventually, with_nats
from tests.integration.test_append import staged, table

MAX_PAYLOAD = 2000


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[NatsServer, BrokerProcess, NatslogClient]]:
    port = free_port()
    path = tmp_path / "nats.conf"
    path.write_text(f"max_payload: {MAX_PAYLOAD}\nleafnodes {{ host: 127.0.0.1, port: {port} }}\n")
    arguments = ("--config", str(path))
    server = NatsServer(0, tmp_path / "nats.log", arguments=arguments, has_leafnodes=False).start()
    broker = BrokerProcess(tmp_path / "data", server.url, nats_leaf_url=f"nats-leaf://127.0.0.1:{port}").start()
    eventually(lambda: "serving the JetStream API" in broker.output(), what="the JetStream API is served")
    with broker.client() as client:
        yield server, broker, client
    broker.terminate()
    server.stop()


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"filter_subjects": ["kept.x"]}, {"headers_only": True}], ids=str)
def test_larger_messages_are_logged_and_the_others_delivered(
    running: tuple[NatsServer, BrokerProcess, NatslogClient], settings: dict[str, Any]
) -> None:
    server, broker, client = running
    client.create_stream("kept", "kept.>")
    appended_rows(client, [b"a", b"b" * MAX_PAYLOAD, b"c" * (MAX_PAYLOAD + 1), b"d"])

    async def work(connection: nats.NATS) -> list[tuple[int, bytes]]:
        jetstream = connection.jetstream()
        config = ConsumerConfig(durable_name="all", ack_policy="explicit", **settings)
        subscription = await jetstream.pull_subscribe("", durable="all", stream="kept", config=config)
        found: list[tuple[int, bytes]] = []
        wanted = 4 if settings.get("headers_only") else 3
        while len(found) < wanted:
            for message in await subscription.fetch(wanted - len(found), timeout=10):
                await message.ack_sync()
                found.append((message.metadata.sequence.stream, message.data))
        return found

    found = with_nats(server.url, work)
    if settings.get("headers_only"):
        assert [seq for seq, _ in found] == [1, 2, 3, 4]
        return
    assert found == [(1, b"a"), (2, b"b" * MAX_PAYLOAD), (4, b"d")]
    said = f"are larger than the {MAX_PAYLOAD} bytes that the NATS server permits (max_payload): sequences 3"
    said = f"consumer all of stream kept: messages are not delivered, because they {said}"
    eventually(lambda: said in broker.output(), what="it is logged")
    assert "was lost" not in broker.output(), "a larger message would end the leafnode connection"


def appended_rows(client: NatslogClient, values: list[bytes]) -> None:
    """One run of direct appends, on the subject `kept.x`."""
    parts = staged(client, "kept", "writer", 1, table(values, subject=["kept.x"] * len(values)))
    client.commit_append("kept", "writer", 1, parts)
