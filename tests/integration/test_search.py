"""Searching a stream at the brokers: `GET /v1/streams/{name}/search`, the client, and `natslog cat --grep`."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import nats
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.arrow.searching import Pattern
from natslog.client import NatslogClient
from natslog.errors import InvalidRequest, OffsetOutOfRange, StreamNotFound
from tests.harness import BrokerProcess, natslog, publish_acked, with_nats


def offsets(batches: Any) -> list[int]:
    return [offset for batch in batches for offset in batch.column("offset").to_pylist()]


def publish(nats_url: str, subject: str, *messages: tuple[bytes, dict[str, str]]) -> None:
    async def sent(connection: nats.NATS) -> None:
        for value, headers in messages:
            await connection.request(subject, value, headers=headers or None, timeout=30)

    with_nats(nats_url, sent)


@pytest.fixture
def words(client: NatslogClient, nats_url: str, name: str) -> str:
    """Offsets: 0 alpha; 1 Alpha; 2 a key; 3 a header; 4 bytes that are not UTF-8; 5 a long value; 6 nothing of it."""
    client.create_stream(name, [name, f"{name}.>"])
    publish(nats_url, name, (b"it is alpha", {}), (b"it is Alpha", {}))
    publish(nats_url, f"{name}.key", (b"by key", {"Natslog-Key": "alpha"}))
    publish(nats_url, f"{name}.header", (b"by header", {"A": "x", "B": "alphabet"}))
    publish(nats_url, name, (b"\xff\xfealpha\0", {}), (b"x" * 200_000 + b"alpha", {}), (b"beta", {"A": "b"}))
    return name


def test_messages_with_a_text_are_found_in_each_column(client: NatslogClient, words: str) -> None:
    assert offsets(client.search(words, "alpha")) == [0, 2, 3, 4, 5]
    assert offsets(client.search(words, "alpha", columns=["value"])) == [0, 4, 5]
    assert offsets(client.search(words, "alpha", columns=["key"])) == [2]
    assert offsets(client.search(words, "alpha", columns=["headers"])) == [2, 3], "a key is a header, too"
    assert offsets(client.search(words, "header", columns=["subject"])) == [3]
    assert offsets(client.search(words, "alpha", ignores_case=True)) == [0, 1, 2, 3, 4, 5]
    assert offsets(client.search(words, "^it .*[aA]lpha$", is_regex=True)) == [0, 1]
    assert offsets(client.search(words, "^it .*[aA]lpha$")) == [], "a text is no expression"
    assert offsets(client.search(words, "alpha", subject=f"{words}.*")) == [2, 3]
    assert offsets(client.search(words, "alpha", start=3, end=5)) == [3, 4]
    assert offsets(client.search(words, "alpha", start="latest")) == []


def test_found_messages_are_whole(client: NatslogClient, words: str) -> None:
    """As `read` returns them, long values too."""
    found = pa.Table.from_batches(client.search(words, "a", columns=["value", "key", "headers"]))
    everything = pa.Table.from_batches(client.read(words))
    assert found.num_rows == 7
    assert found.to_pylist() == everything.to_pylist()


def test_previews_are_cut_and_bytes_are_in_base64(client: NatslogClient, words: str) -> None:
    page = client._ask("GET", f"/v1/streams/{words}/search", query={"value_bytes": 7})
    shown = json.loads(page.data)["messages"]
    assert [one["value_bytes"] for one in shown] == [11, 11, 6, 9, 8, 200_005, 4]
    assert (shown[0]["value"], shown[0]["is_cut"]) == ("it is a", True)
    assert (shown[4]["value_base64"], shown[6]["value"]) == (base64.b64encode(b"\xff\xfealpha").decode(), "beta")
    assert shown[2]["key"] == "alpha"
    assert shown[3]["headers"] == [{"key": "A", "value": "x"}, {"key": "B", "value": "alphabet"}]


def test_cut_text_ends_before_an_incomplete_character(client: NatslogClient, nats_url: str) -> None:
    client.create_stream("umlauts", "umlauts")
    publish_acked(nats_url, "umlauts", ["aäb".encode()])
    shown = [client.search_page("umlauts", value_bytes=size).messages[0].value for size in range(5)]
    assert shown == ["", "a", "a", "aä", "aäb"]


def test_a_search_goes_on_where_its_budget_ended(client: NatslogClient, filled: str) -> None:
    found, at, pages = [], 0, 0
    while True:
        page = client.search_page(filled, start=at, end=100, max_bytes=1, limit=7)
        found += [one.offset for one in page.messages]
        assert page.next_offset > at
        at, pages = page.next_offset, pages + 1
        if page.is_complete:
            break
    assert (found, at) == (list(range(100)), 100)
    assert pages > 1
    assert offsets(client.search(filled, "7")) == [at for at in range(100) if "7" in str(at)]


def test_newest_messages(client: NatslogClient, filled: str) -> None:
    assert [one.offset for one in client.search_page(filled, newest=3).messages] == [97, 98, 99]
    assert len(client.search_page(filled, newest=10**6).messages) == 100
    client.delete_message(filled, 98)
    assert [one.offset for one in client.search_page(filled, newest=3).messages] == [96, 97, 99]


def test_removed_messages_are_not_found(client: NatslogClient, filled: str) -> None:
    client.delete_message(filled, 7)
    client.purge(filled, 5)
    assert 7 not in offsets(client.search(filled, "7"))
    with pytest.raises(OffsetOutOfRange):
        client.search_page(filled, start=0)
    assert client.search_page(filled, limit=1).messages[0].offset == 5


@pytest.mark.long
def test_large_keys_and_headers_count_for_the_size_of_a_page(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    publish(nats_url, name, *[(b"x", {"Large": "y" * 400_000})] * 60)
    page = client.search_page(name, limit=1000)
    assert 10 < len(page.messages) < 60
    assert not page.is_complete
    assert offsets(client.search(name, "x")) == list(range(60))


@pytest.mark.long
def test_a_search_looks_at_the_clock_within_a_batch(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    publish_acked(nats_url, name, [b"a" * 1000] * 20_000)
    client.roll(name)
    page = client.search_page(name, grep="(a.{20}a.*)+z", regex=True, max_ms=1)
    assert 0 < page.next_offset < 20_000
    assert not page.is_complete


@pytest.mark.long
@pytest.mark.parametrize(
    ("query", "error"),
    [
        ({"grep": ""}, "must have 1 to 1000 characters"),
        ({"grep": "a" * 1001}, "must have 1 to 1000 characters"),
        ({"grep": "(", "regex": "true"}, "is not a regular expression"),
        ({"grep": "[ab].{0,999}z", "regex": "true"}, "use \\* or \\+ instead"),
        ({"grep": "((a{9}){9}){9}", "regex": "true"}, "use \\* or \\+ instead"),
        ({"grep": "a", "in": "value,value"}, "named twice"),
        ({"regex": "true"}, "has no effect without grep"),
        ({"grep": "a", "in": "offset"}, "cannot be searched"),
        ({"grep": "a", "regex": "yes"}, "must be true or false"),
        ({"start": 5, "newest": 3}, "cannot be combined"),
        ({"start": 5, "end": 3}, "is beyond end"),
        ({"limit": 0}, "must be a whole number"),
        ({"max_bytes": 2**60}, "must be a whole number"),
        ({"subject": "a..b"}, "subject"),
        ({"gerp": "a"}, "did you mean"),
    ],
)
def test_wrong_questions_are_refused(client: NatslogClient, filled: str, query: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        client._ask("GET", f"/v1/streams/{filled}/search", query=query)


def test_searches_of_what_does_not_exist(client: NatslogClient, filled: str) -> None:
    with pytest.raises(StreamNotFound):
        client.search_page("none")
    with pytest.raises(OffsetOutOfRange):
        client.search_page(filled, start=101)


@pytest.mark.long
def test_cat_grep(words: str, broker: BrokerProcess) -> None:
    def cat(*arguments: str) -> str:
        return natslog("cat", words, *arguments, url=broker.url).stdout

    assert cat("--grep", "is alpha") == "it is alpha\n"
    assert cat("--grep", "IS ALPHA", "-i") == "it is alpha\nit is Alpha\n"
    assert cat("--grep", "^by", "--regex", "--in", "value", "--count", "1") == "by key\n"
    lines = [json.loads(line) for line in cat("--grep", "alpha", "--json", "--from", "2").splitlines()]
    assert [one["offset"] for one in lines] == [2, 3, 4, 5]
    assert lines == [json.loads(line) for line in cat("--json", "--from", "2", "--count", "4").splitlines()]


_TEXTS = some.text(alphabet="abAB.é\n", max_size=6)


@pytest.mark.long
@settings(deadline=None, max_examples=200)
@given(
    rows=some.lists(
        some.tuples(_TEXTS, some.none() | _TEXTS, some.none() | some.lists(some.tuples(_TEXTS, _TEXTS), max_size=3))
    ),
    text=some.text(alphabet="abA.é", min_size=1, max_size=3),
    is_regex=some.booleans(),
    columns=some.lists(some.sampled_from(["value", "key", "headers"]), unique=True, min_size=1),
)
def test_rows_match_as_one_by_one(
    rows: list[tuple[str, str | None, list[tuple[str, str]] | None]], text: str, is_regex: bool, columns: list[str]
) -> None:
    batch = pa.RecordBatch.from_pylist(
        [
            {
                "offset": at,
                "timestamp": at,
                "subject": "a",
                "key": None if key is None else key.encode(),
                "headers": None if headers is None else [{"key": name, "value": one} for name, one in headers],
                "value": value.encode(),
            }
            for at, (value, key, headers) in enumerate(rows)
        ],
        schema=MESSAGE_SCHEMA,
    )
    wanted = re.compile((text if is_regex else re.escape(text)).encode())

    def parts(value: str, key: str | None, headers: list[tuple[str, str]] | None) -> list[str]:
        found = {"value": [value], "key": [] if key is None else [key]}
        found["headers"] = [part for header in headers or [] for part in header]
        return [part for name in columns for part in found[name]]

    expected = [any(wanted.search(part.encode()) for part in parts(*row)) for row in rows]
    assert Pattern(text, is_regex, False, tuple(columns)).rows(batch).to_pylist() == expected
