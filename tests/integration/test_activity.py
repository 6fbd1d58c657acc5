"""The stream `__activity`: its events, who may read it, and that no event is lost or stored twice when brokers fail."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import urllib3

from natslog.client import NatslogClient
from natslog.errors import InvalidRequest, NatslogError
from tests.cluster_harness import Cluster, running_cluster
from tests.harness import BrokerProcess, eventually, flushed, natslog, running

http = urllib3.PoolManager()


def events(client: NatslogClient) -> list[dict[str, Any]]:
    """All that are stored."""
    try:
        with client.consume("__activity", start="earliest", follow=False) as consumer:
            return [json.loads(value) for batch in consumer for value in batch.record_batch.column("value").to_pylist()]
    except NatslogError:
        return []


def found(client: NatslogClient, kind: str, **fields: Any) -> dict[str, Any]:
    """The first event of this kind with these fields, once it is there."""

    def find() -> dict[str, Any] | None:
        matching = (
            one
            for one in events(client)
            if one["event"] == f"activity.{kind}" and all(one.get(name) == value for name, value in fields.items())
        )
        return next(matching, None)

    return eventually(find, what=f"{kind} {fields}")  # type: ignore[return-value]


@pytest.mark.long
def test_changes_of_a_stream_are_events_with_their_origin(client: NatslogClient, name: str) -> None:
    client.create_stream(name, name)
    client.edit_stream(name, max_bytes=1 << 30)
    client.delete_stream(name)
    created = found(client, "stream.created", stream=name)
    assert (created["address"], created["after"]["settings"]["subject"]) == ("127.0.0.1", name)
    assert found(client, "stream.edited", stream=name)["after"] == {"max_bytes": 1 << 30}
    found(client, "stream.deleted", stream=name)
    request = found(client, "operator.request", request=created["request"])
    assert (request["after"]["method"], request["after"]["path"], request["after"]["status"]) == (
        "POST",
        "/v1/streams",
        201,
    )
    assert len(request["after"]["request_id"]) >= 8
    found(client, "broker.joined", broker=1)


@pytest.mark.long
def test_internal_stream_is_hidden_and_readable(broker: BrokerProcess, client: NatslogClient) -> None:
    found(client, "broker.started", broker=1)
    assert not [one for one in client.streams() if one["name"].startswith("__")]
    assert [one["name"] for one in client.streams(internal=True) if one["name"].startswith("__")] == ["__activity"]
    assert not [one for one in client.positions(pattern="*") if one["name"].startswith("__")]
    assert "__activity" not in natslog("stream", "ls", url=broker.url).stdout
    assert "__activity" in natslog("stream", "ls", "--internal", url=broker.url).stdout
    assert '"activity.broker.started"' in natslog("cat", "__activity", url=broker.url).stdout
    assert "broker.started  broker 1" in natslog("activity", url=broker.url).stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/streams", {"name": "__activity", "subject": "x"}),
        ("POST", "/v1/streams", {"name": "__mine", "subject": "x"}),
        ("PATCH", "/v1/streams/__activity", {"max_bytes": 1}),
        ("PATCH", "/v1/streams/__activity", {"paused": True}),
        ("POST", "/v1/streams/__activity/purge", {}),
        ("POST", "/v1/streams/__activity/seal", None),
        ("DELETE", "/v1/streams/__activity", None),
        ("PUT", "/v1/streams/__activity/appends/me/1/parts/0?attempt=0", None),
        ("POST", "/v1/streams/__activity/appends/me/1", {"parts": []}),
    ],
)
def test_users_cannot_change_an_internal_stream(
    broker: BrokerProcess, client: NatslogClient, method: str, path: str, body: Any
) -> None:
    found(client, "broker.started", broker=1)
    before = client.stream("__activity")
    data = None if body is None else json.dumps(body)
    answer = http.request(method, broker.url + path, body=data, retries=False)
    assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_request")
    after = client.stream("__activity")
    assert (after["id"], after["max_bytes"], after["paused"], after["sealed"]) == (
        before["id"],
        before["max_bytes"],
        False,
        False,
    )


def test_internal_stream_receives_nothing_from_nats(client: NatslogClient, nats_url: str) -> None:
    from tests.harness import with_nats

    found(client, "broker.started", broker=1)

    async def publish(connection: Any) -> None:
        await connection.publish("activity.stream.created", b"forged")
        await flushed(connection)

    with_nats(nats_url, publish)
    client.create_stream("after_forged", "after_forged")
    found(client, "stream.created", stream="after_forged")  # reported after the other message had arrived
    assert all(one["id"] for one in events(client))


@pytest.mark.long
def test_events_before_a_kill_are_there_after_it_once(own: Path) -> None:
    with running(own) as (_, broker):
        client = broker.client()
        for at in range(20):
            client.create_stream(f"s{at}", f"s{at}")
        found(client, "stream.created", stream="s0")
        broker.kill()
        broker.start()
        client = broker.client()

        def stored() -> list[dict[str, Any]] | None:
            present = events(client)
            starts = [one for one in present if one["event"] == "activity.broker.started"]
            return present if len(starts) >= 2 else None  # the second one follows all that was before

        present = eventually(stored)
        assert present is not None
        created = Counter(one["stream"] for one in present if one["event"] == "activity.stream.created")
        assert {name: count for name, count in created.items() if name in {f"s{at}" for at in range(20)}} == {
            f"s{at}": 1 for at in range(20)
        }
        assert max(Counter(one["id"] for one in present).values()) == 1


@pytest.mark.long
def test_new_metadata_leader_reports_what_follows(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        with NatslogClient([one.url for one in cluster.brokers]) as client:
            client.create_stream("before", "before", replicas=3)
            found(client, "stream.created", stream="before")
            assert client.stream("__activity")["replicas"] == 3
            leader = cluster.metadata_leader()
            assert leader is not None
            leader.kill()
            eventually(lambda: cluster.metadata_leader() is not None)
            client.create_stream("after", "after", replicas=1)
            found(client, "stream.created", stream="after")
            stopped = found(client, "broker.stopped", broker=leader.number)
            assert stopped["before"]["incarnation"]
            leader.start()
            found(client, "broker.started", broker=leader.number, after=_started(client, leader.number))
            cluster.wait_in_sync()
            reported = Counter(one["id"] for one in events(client) if one["id"].startswith("m"))
            assert max(reported.values()) == 1


def _started(client: NatslogClient, broker: int) -> Any:
    starts = [one for one in events(client) if one["event"] == "activity.broker.started" and one["broker"] == broker]
    return eventually(lambda: starts)[-1]["after"]


@pytest.mark.long
def test_broker_can_be_drained_although_internal_streams_are_everywhere(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        with NatslogClient([one.url for one in cluster.brokers]) as client:
            client.create_stream("one", "one", replicas=1)
            found(client, "stream.created", stream="one")
            eventually(lambda: len(_replicas(cluster)) == 3)
            urls = ",".join(one.url for one in cluster.brokers)
            natslog("cluster", "remove", "3", url=urls.split(",")[0])
            assert set(_replicas(cluster)) == {1, 2}
            found(client, "broker.left", broker=3)


def _replicas(cluster: Cluster) -> list[int]:
    shown = cluster.stream("__activity")
    return [] if shown is None else list(shown["replica_ids"])


def test_change_without_a_level_2_cluster_is_refused(client: NatslogClient) -> None:
    with pytest.raises(InvalidRequest, match="reserved"):
        client.create_stream("__other", "other")
