"""Cursors in the stream `__cursors`: many at once, and none lost when brokers fail."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import urllib3

from natslog.client import ClientOptions, NatslogClient
from natslog.errors import InvalidRequest, NatslogError, StreamNotFound
from tests.cluster_harness import running_cluster
from tests.harness import BrokerProcess, eventually, natslog, running

http = urllib3.PoolManager()


@pytest.mark.long
def test_many_cursors_are_set_in_one_request(client: NatslogClient, name: str) -> None:
    client.create_stream(name, name)
    wanted = {f"c{at}": at for at in range(500)}
    assert client.set_cursors((consumer, name, offset) for consumer, offset in wanted.items()) == 500
    assert {one["consumer"]: one["offset"] for one in client.cursors(stream=name)} == wanted
    assert client.set_cursors([]) == 0
    for at in range(500):
        client.delete_cursor(f"c{at}", name)
    assert client.cursors(stream=name) == []


def test_one_wrong_cursor_refuses_the_whole_request(broker: BrokerProcess, client: NatslogClient, name: str) -> None:
    client.create_stream(name, name)
    with pytest.raises(StreamNotFound):
        client.set_cursors([("a", name, 1), ("a", "no-such-stream", 1)])
    with pytest.raises(InvalidRequest, match="named twice"):
        client.set_cursors([("a", name, 1), ("a", name, 2)])
    for body, message in (
        ({"cursors": [{"consumer": "a b", "stream": name, "offset": 1}]}, "matching regex"),
        ({"cursors": [{"consumer": "a", "stream": name, "offset": -1}]}, ">= 0"),
        ({"cursors": [{"consumer": "a", "stream": name}]}, "missing required field `offset`"),
        ({"cursors": 1}, "cursors 1 must be a list"),
        ([], "the body must be"),
    ):
        answer = http.request("POST", broker.url + "/v1/cursors", body=json.dumps(body), retries=False)
        assert (answer.status, message in answer.json()["error"]["message"]) == (400, True), answer.data
    assert client.cursors(stream=name) == []


def test_stream_of_cursors_is_read_like_any_other(broker: BrokerProcess, client: NatslogClient, name: str) -> None:
    client.create_stream(name, name)
    client.set_cursor("reader", name, 7)
    client.delete_cursor("reader", name)
    printed = natslog("cat", "__cursors", "--json", url=broker.url).stdout.splitlines()
    rows = [json.loads(line) for line in printed]
    values = [json.loads(row["value"]) for row in rows if row["key"] == f"reader/{name}"]
    assert [value.get("cursor", {}).get("offset") for value in values] == [7, None]


@pytest.mark.long
def test_no_answered_cursor_is_lost_by_a_kill(own: Path) -> None:
    with running(own) as (_, broker):
        broker.client().create_stream("orders", "orders")
        answered = _set_until_killed(broker)
        broker.start()
        found = {one["consumer"]: one["offset"] for one in broker.client().cursors()}
        for consumer, offset in answered.items():
            assert found[consumer] >= offset, consumer


@pytest.mark.long
def test_stream_of_cursors_stays_short_and_complete(own: Path) -> None:
    with running(own) as (_, broker):
        client = broker.client()
        client.create_stream("orders", "orders")
        client.set_cursor("still", "orders", 5)
        for offset in range(56):
            client.set_cursors((f"c{at}", "orders", offset) for at in range(1000))
        start = eventually(lambda: client.stream("__cursors")["log_start_offset"])
        assert client.stream("__cursors")["high_watermark"] - start < 10_000
        broker.kill()
        broker.start()
        found = {one["consumer"]: one["offset"] for one in broker.client().cursors()}
        assert found == {"still": 5} | {f"c{at}": 55 for at in range(1000)}


def _set_until_killed(broker: BrokerProcess) -> dict[str, int]:
    """The newest answered offset of each of several consumers, set at once until the broker is killed."""
    answered: dict[str, int] = {}

    def work(consumer: str) -> None:
        with NatslogClient(broker.url, ClientOptions(retries=0, patience_s=0)) as client:
            for offset in range(1, 10_000):
                try:
                    client.set_cursors([(consumer, "orders", offset)])
                except NatslogError:
                    return
                answered[consumer] = offset

    threads = [threading.Thread(target=work, args=(f"c{at}",)) for at in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(answered) == 4 and min(answered.values()) > 20)
    broker.kill()
    for thread in threads:
        thread.join()
    return answered


@pytest.mark.long
def test_cursors_of_a_deleted_stream_are_removed_from_the_stream_of_cursors(
    client: NatslogClient, broker: BrokerProcess, name: str
) -> None:
    client.create_stream(name, name)
    client.set_cursor("reader", name, 7)
    client.delete_stream(name)

    def is_removed() -> bool:
        rows = natslog("cat", "__cursors", "--json", url=broker.url).stdout.splitlines()
        values = [json.loads(json.loads(row)["value"]) for row in rows if f'"reader/{name}"' in row]
        return values[-1] == {}

    eventually(is_removed, every_s=0.3)


@pytest.mark.long
def test_no_answered_cursor_is_lost_when_the_leader_of_the_cursors_is_killed(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        with NatslogClient([one.url for one in cluster.brokers]) as client:
            client.create_stream("orders", "orders", replicas=3)
            client.set_cursor("first", "orders", 1)
            eventually(lambda: (found := cluster.stream("__cursors")) is not None and len(found["isr"]) == 3)
            for round_number in range(1):
                leader = cluster.leader_of("__cursors")
                assert leader is not None
                answered: dict[str, int] = {}
                stop = threading.Event()

                def work(answered: dict[str, int] = answered, stop: threading.Event = stop) -> None:
                    options = ClientOptions(patience_s=20)
                    with NatslogClient([one.url for one in cluster.brokers], options) as other:
                        for offset in range(1, 100_000):
                            if stop.is_set():
                                return
                            other.set_cursors([("a", "orders", offset), ("b", "orders", offset)])
                            answered["a"] = answered["b"] = offset

                thread = threading.Thread(target=work)
                thread.start()
                eventually(lambda answered=answered: answered.get("a", 0) > 20)
                leader.kill()
                known = dict(answered)
                eventually(lambda answered=answered, known=known: answered["a"] > known["a"] + 20, 40)
                stop.set()
                thread.join()
                for broker in cluster.up:
                    shown = {one["consumer"]: one["offset"] for one in broker.client().cursors()}
                    assert shown == {"first": 1} | answered, round_number
                leader.start()
                cluster.wait_ready()
                cluster.wait_in_sync()
                eventually(lambda: len((cluster.stream("__cursors") or {"isr": []})["isr"]) == 3)
