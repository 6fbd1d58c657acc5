"""The subjects of a stream: counts and offsets of the visible messages, in pages of one moment."""

from __future__ import annotations

import json
from typing import Any

import pytest

from natslog.client import NatslogClient
from natslog.errors import InvalidRequest, ViewExpired
from natslog.times import format_timestamp_us
from tests.harness import natslog, publish_acked


def shown(client: NatslogClient, stream: str, pattern: str | None = None) -> list[tuple[Any, ...]]:
    return [tuple(one.values()) for one in client.subjects(stream, pattern=pattern)]


def test_subjects_are_counted_without_removed_messages(client: NatslogClient, filled: str, nats_url: str) -> None:
    even, odd = f"{filled}.even.x", f"{filled}.odd.x"
    assert shown(client, filled) == [(even, 50, 0, 94), (odd, 50, 5, 99)]
    assert client.subject_page(filled)["as_of"] == 100
    client.delete_message(filled, 0)
    client.purge(filled, subject=odd, keep=1)
    assert shown(client, filled) == [(even, 49, 1, 94), (odd, 1, 99, 99)]
    client.purge(filled, 50)
    assert shown(client, filled, "*.even.>") == [(even, 25, 50, 94)]
    assert shown(client, filled, "*.none") == []
    publish_acked(nats_url, odd, [b"100"])
    assert shown(client, filled)[1] == (odd, 2, 99, 100)


def test_single_subjects_are_looked_up(client: NatslogClient, filled: str, nats_url: str) -> None:
    even, odd = f"{filled}.even.x", f"{filled}.odd.x"
    assert shown(client, filled, odd) == [(odd, 50, 5, 99)]
    assert shown(client, filled, "no.such") == []
    assert (client.next_on_subject(filled, odd), client.next_on_subject(filled, odd, 10)) == (5, 15)
    assert client.next_on_subject(filled, even, 95) is None
    client.delete_message(filled, 15)
    assert client.next_on_subject(filled, odd, 10) == 16
    publish_acked(nats_url, even, [b"100"])
    assert client.next_on_subject(filled, even, 95) == 100
    assert shown(client, filled, even) == [(even, 51, 0, 100)]
    found = client._ask("GET", f"/v1/streams/{filled}/offsets", query={"subject": even, "start": 95})
    row = next(iter(client.read(filled, 100, 101)))
    assert json.loads(found.data)["timestamp"] == format_timestamp_us(row.column("timestamp")[0].value)


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"timestamp": 0, "subject": "a"},
        {"start": 3},
        {"timestamp": 0, "start": 3},
        {"subject": "a.*"},
        {"subject": ""},
    ],
)
def test_bad_lookups_are_named(client: NatslogClient, filled: str, query: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="subject"):
        client._ask("GET", f"/v1/streams/{filled}/offsets", query=query)


def test_a_limit_per_subject_counts(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, f"{name}.>", max_messages_per_subject=2)
    for at in range(9):
        publish_acked(nats_url, f"{name}.{at % 2}", [b"%d" % at])
    assert shown(client, name) == [(f"{name}.0", 2, 6, 8), (f"{name}.1", 2, 5, 7)]


def test_pages_are_of_one_moment_and_read_once(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, f"{name}.>")
    subjects = [f"{name}.{at:02}" for at in range(25)]
    for one in subjects:
        publish_acked(nats_url, one, [b"x"])
    page = client.subject_page(name, limit=10)
    publish_acked(nats_url, f"{name}.03a", [b"x"])
    publish_acked(nats_url, f"{name}.99", [b"x"])
    found = [one["subject"] for one in page["subjects"]]
    while len(page["subjects"]) == 10:
        page = client.subject_page(name, limit=10, after=found[-1], as_of=page["as_of"])
        assert (page["total"], page["as_of"]) == (25, 25)
        found += [one["subject"] for one in page["subjects"]]
    assert found == subjects
    assert client.subject_page(name)["total"] == 27
    with pytest.raises(ViewExpired, match="begin again"):
        client.subject_page(name, as_of=7)


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ({"limit": 10_001}, "limit"),
        ({"limit": 0}, "limit"),
        ({"pattern": "a..b"}, "a..b"),
        ({"after": "a b"}, "a b"),
        ({"last": "x"}, "unknown parameter"),
    ],
)
def test_bad_queries_are_named(client: NatslogClient, filled: str, query: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        client._ask("GET", f"/v1/streams/{filled}/subjects", query=query)


@pytest.mark.long
def test_the_command_line_shows_subjects(client: NatslogClient, filled: str) -> None:
    url = client.servers[0]
    table = natslog("stream", "info", filled, "--subjects", url=url).stdout
    assert f"{filled}.even.x" in table
    assert f"{filled}.odd.x" in table
    asked = natslog("stream", "info", filled, "--subjects", "--pattern", "*.odd.x", "--json", url=url).stdout
    assert json.loads(asked) == [{"subject": f"{filled}.odd.x", "count": 50, "first": 5, "last": 99}]
    refused = natslog("stream", "info", filled, "--pattern", "x", url=url, check=False)
    assert refused.returncode != 0
    assert "--subjects" in refused.stderr
