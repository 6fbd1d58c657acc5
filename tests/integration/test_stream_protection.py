"""Limits of the size of a message, protection against removal, edits with a version; the ratio of compression."""

from __future__ import annotations

import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from natslog.client import NatslogClient
from natslog.client.publisher import Publisher, Rows
from natslog.errors import (
    InvalidRequest,
    MessageTooLarge,
    NatslogError,
    PublishFailed,
    RemovalDenied,
    SettingsConflict,
    StreamRecreated,
)
from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, all_values, eventually, natslog, publish_acked, with_nats
from tests.integration.asking import ask, error
from tests.integration.jetstream import created, jetstream, played  # noqa: F401
from tests.integration.test_append import staged, table


@pytest.mark.parametrize("headers", [{}, {"A": "bcde"}])
def test_answers_to_larger_messages_are_those_of_jetstream(
    jetstream: NatsServer,  # noqa: F811
    client: NatslogClient,
    nats_url: str,
    name: str,
    headers: dict[str, str],
) -> None:
    """At every size near the limit; natslog adds the sizes to the description."""
    most = 100

    async def all_played(nats: Any) -> list[Any]:
        sizes = range(most - 25, most + 3)
        return [answer for size in sizes for answer in await played(nats, name, name, [("a", headers)], size)]

    async def other(nats: Any) -> list[Any]:
        await created(nats, name, max_msg_size=most)
        return await all_played(nats)

    client.create_stream(name, f"{name}.>", max_message_bytes=most)
    expected, found = with_nats(jetstream.url, other), with_nats(nats_url, all_played)
    refused = (400, 10054, "message size exceeds maximum allowed")
    assert expected.count(refused) == 2 + len("NATS/1.0\r\nA: bcde\r\n\r\n") * bool(headers)
    assert [(*one[:2], one[2].partition(":")[0]) if len(one) == 3 else one for one in found] == expected


@pytest.mark.long
def test_larger_messages_are_refused_as_by_jetstream(client: NatslogClient, nats_url: str, name: str) -> None:
    assert client.create_stream(name, name, max_message_bytes="100B")["max_message_bytes"] == 100
    answers = publish_acked(nats_url, name, [b"a" * 100, b"b" * 101, b"c"])
    assert [answer.get("seq") for answer in answers] == [1, None, 2]
    refused = answers[1]["error"]
    assert (refused["code"], refused["err_code"]) == (400, 10054)
    assert refused["description"].startswith("message size exceeds maximum allowed: ")
    block_bytes = len("NATS/1.0\r\nA: bcde\r\n\r\n")
    values = [b"d" * (100 - block_bytes), b"d" * (101 - block_bytes)]
    fitting, larger = publish_acked(nats_url, name, values, headers={"A": "bcde"})
    assert (fitting["seq"], larger["error"]["err_code"]) == (3, 10054)
    client.edit_stream(name, max_message_bytes=None)
    assert publish_acked(nats_url, name, [b"b" * 5000])[0]["seq"] == len(all_values(client, name))


@pytest.mark.parametrize("envelope", [False, True])
@pytest.mark.long
def test_publisher_is_told_of_a_larger_row(client: NatslogClient, nats_url: str, name: str, envelope: bool) -> None:
    client.create_stream(name, name, max_message_bytes=200)
    values = [b"small", b"x" * 201, b"small"]
    rows = Rows(pa.array([name] * 3), pa.array(values))
    with (
        pytest.raises(PublishFailed, match="message size exceeds maximum allowed"),
        Publisher(nats_url, envelope=envelope, ack_timeout_s=5) as publisher,
    ):
        publisher.publish(rows, "stored")
    assert b"x" * 201 not in all_values(client, name)


def test_direct_append_names_the_larger_row(client: NatslogClient, name: str) -> None:
    client.create_stream(name, name, max_message_bytes=50)
    with pytest.raises(MessageTooLarge, match="row 2 has 51 bytes") as refused:
        staged(client, name, "q", 0, table([b"a" * 50, b"b"]), table([b"c" * 51]))
    assert refused.value.facts["row"] == 2
    parts = staged(client, name, "q", 0, table([b"a" * 50]))
    client.commit_append(name, "q", 0, parts)
    assert all_values(client, name) == [b"a" * 50]


def test_protected_streams_are_not_purged(broker: BrokerProcess, client: NatslogClient, filled: str) -> None:
    done = natslog("stream", "edit", filled, "--deny-purge", "--deny-delete", url=broker.url)
    assert "deny_delete, deny_purge" in done.stdout or "deny_purge" in done.stdout
    with pytest.raises(RemovalDenied, match="deny_purge"):
        client.purge(filled, 10)
    assert ask(broker, "POST", f"/v1/streams/{filled}/purge", {}).status == 409
    for setting in ("deny_purge", "deny_delete"):
        with pytest.raises(InvalidRequest, match=f"{setting} .*cannot be turned off"):
            client.edit_stream(filled, **{setting: False})
    assert len(all_values(client, filled)) == 100


def test_of_two_editors_at_once_one_wins_and_the_other_gets_the_present_settings(
    broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    client.create_stream(name, name)
    for version in range(5):
        assert client.stream(name)["settings_version"] == version

        def edit(most: int, version: int = version) -> NatslogError | int:
            try:
                return int(client.edit_stream(name, max_messages=most, if_version=version)["max_messages"])
            except SettingsConflict as error:
                return error

        with ThreadPoolExecutor(2) as both:
            outcomes = list(both.map(edit, (100 + version, 200 + version)))
        won = [one for one in outcomes if isinstance(one, int)]
        (lost,) = [one for one in outcomes if isinstance(one, SettingsConflict)]
        assert len(won) == 1
        assert client.stream(name)["max_messages"] == won[0] == lost.facts["settings"]["max_messages"]
        assert lost.facts["settings_version"] == version + 1
    refused = natslog("stream", "edit", name, "--max-age", "7d", "--if-version", "0", url=broker.url, check=False)
    assert refused.returncode != 0
    assert "are of version 5, not 0" in refused.stderr
    shown = json.loads(
        natslog("stream", "edit", name, "--max-age", "7d", "--if-version", "5", "--json", url=broker.url).stdout
    )
    assert (shown["settings_version"], shown["max_age"]) == (6, "7d")
    assert client.edit_stream(name, paused=True, if_version=6)["settings_version"] == 7
    with pytest.raises(SettingsConflict):
        client.edit_stream(name, paused=False, if_version=6)


def test_an_edit_of_a_former_stream_changes_nothing(client: NatslogClient, name: str) -> None:
    former = client.create_stream(name, name)
    client.delete_stream(name)
    client.create_stream(name, name)
    with pytest.raises(StreamRecreated):
        client.edit_stream(name, max_messages=7, id=former["id"])
    assert client.stream(name)["max_messages"] is None
    client.edit_stream(name, max_messages=7, id=client.stream(name)["id"])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"if_version": -1, "max_messages": 1}, "if_version -1 must be the settings_version"),
        ({"if_version": True, "max_messages": 1}, "must be the settings_version"),
        ({"id": 7, "max_messages": 1}, "id 7 must be the id"),
        ({"if_version": 0, "max_messages": 1, "paused": True}, "request of its own"),
        ({"max_message_bytes": "2MiB", "max_bytes": "1MiB"}, "could not keep such a message"),
        ({"dedupe_window": "2h", "max_age": "1h"}, "is more than max_age"),
        ({"min_isr": 2}, "more than the number of replicas"),
    ],
)
def test_edits_that_cannot_be_are_refused(
    broker: BrokerProcess, client: NatslogClient, name: str, body: dict[str, object], words: str
) -> None:
    before = client.create_stream(name, name)
    answer = ask(broker, "PATCH", f"/v1/streams/{name}", body)
    assert (answer.status, words in error(answer)["message"]) == (400, True), answer.data
    assert client.stream(name)["settings_version"] == before["settings_version"] == 0


def test_ratio_of_compressed_segments_is_shown(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, name, compression="zstd")
    publish_acked(nats_url, name, [b"a" * 1000 + secrets.token_bytes(8) for _ in range(100)])
    assert "compressed" not in client.stream(name)
    client.roll(name)
    shown = eventually(lambda: client.stream(name).get("compressed"))
    assert shown["uncompressed_bytes"] > 100_000 > 5 * shown["bytes"]
    assert shown["ratio"] == round(shown["uncompressed_bytes"] / shown["bytes"], 3)
    assert f"ratio {shown['ratio']:.2f}" in natslog("stream", "info", name, url=broker.url).stdout
