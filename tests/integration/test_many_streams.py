"""Many streams in one request: positions, with and without waiting for news, and splits; requests are counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMinRows

from natslog.client import NatslogClient, SplitRange
from natslog.errors import BrokerUnavailable, InvalidRequest, PayloadTooLarge
from pyspark_natslog.source import older_brokers, stream_reader
from pyspark_natslog.source.options import SourceOptions
from pyspark_natslog.source.schema import spark_schema
from pyspark_natslog.source.splits import Task
from pyspark_natslog.source.stream_reader import StreamReader
from tests.cluster_harness import Cluster, running_cluster
from tests.harness import BrokerProcess, eventually, publish_acked

FOREVER_S = 60.0


def requests_at(*brokers: BrokerProcess) -> int:
    """So far; not those for metrics."""
    return sum(
        int(count)
        for broker in brokers
        for name, count in broker.metrics().items()
        if name.startswith("natslog_http_requests_total{") and "/metrics" not in name and "/readyz" not in name
    )


def reader_of(url: str, **options: Any) -> StreamReader:
    parsed = SourceOptions.parse({"servers": url} | options, streaming=True)
    return StreamReader(parsed, spark_schema(parsed.selected_columns()))


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    return thread, found


@pytest.fixture
def family(client: NatslogClient, nats_url: str, name: str) -> list[str]:
    """Forty streams, every second one with rows."""
    names = [f"{name}-{at:02d}" for at in range(40)]
    for at, one in enumerate(names):
        client.create_stream(one, one)
        if at % 2 == 0:
            publish_acked(nats_url, one, [b"x" * 50] * (at + 1))
    return names


@pytest.mark.long
def test_named_streams_are_planned_with_as_many_requests_as_one(
    broker: BrokerProcess, client: NatslogClient, family: list[str]
) -> None:
    reader = reader_of(broker.url, stream=",".join(family))
    start = reader.initialOffset()
    before = requests_at(broker)
    end = reader.latestOffset(start, ReadAllAvailable())
    (task,) = reader.partitions(start, end)
    assert requests_at(broker) - before == 1
    assert {name: at["offset"] for name, at in end.items()} == {
        name: client.stream(name)["high_watermark"] for name in family
    }
    assert isinstance(task, Task)
    for one in task.ranges:
        (split,) = client.splits(one.stream, one.start, one.end, max_bytes=64 << 20, read_from="nearest")
        assert (one.start, one.end, one.bytes, one.urls) == (split.start, split.end, split.bytes, split.urls)
    assert sum(batch.num_rows for batch in reader.read(task)) == sum(range(1, 40, 2))


@pytest.mark.long
def test_streams_that_are_too_many_for_one_request_are_requested_one_by_one(
    broker: BrokerProcess, client: NatslogClient, family: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    new = reader_of(broker.url, streamPattern=f"{family[0][:-3]}-*")
    start = new.initialOffset()
    end = new.latestOffset(start, ReadAllAvailable())
    send = NatslogClient._ask

    def too_large(self: NatslogClient, method: str, path: str, **asked: Any) -> Any:
        if path in ("/v1/plans", "/v1/positions", "/v1/splits"):
            raise PayloadTooLarge("the body is too large")
        return send(self, method, path, **asked)

    monkeypatch.setattr(NatslogClient, "_ask", too_large)
    monkeypatch.setattr(older_brokers, "_older_until_s", {})
    for selection in ({"stream": ",".join(family)}, {"streamPattern": f"{family[0][:-3]}-*"}):
        old = reader_of(broker.url, **selection)
        assert old.latestOffset(start, ReadAllAvailable()) == end
        assert [part.value for part in old.partitions(start, end)] == [
            part.value for part in new.partitions(start, end)
        ]
        assert old.latestOffset(end, ReadAllAvailable()) == end
        assert old.latestOffset(end, ReadAllAvailable()) == end, "the second one would wait"


@pytest.mark.long
def test_streams_that_do_not_exist_are_omitted(client: NatslogClient, family: list[str]) -> None:
    found = client.positions(names=[family[0], "no-such", family[2]])
    assert [(one["name"], one["high_watermark"]) for one in found] == [(family[0], 1), (family[2], 3)]
    assert client.positions(names=["no-such"]) == []
    assert client.positions(group="no-such") == []
    ranges = [SplitRange(family[4], client.stream(family[4])["id"], 0, 5)]
    wrong = [SplitRange("no-such", "x", 0, 1), SplitRange(family[2], "x", 0, 1), SplitRange(family[6], "x", 0, 99)]
    assert list(client.splits_of_several(ranges + wrong)) == [family[4]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/positions", []),
        ("/v1/positions", {"stream": ["a"]}),
        ("/v1/positions", {"wait_ms": -1}),
        ("/v1/positions", {"wait_ms": 10**9}),
        ("/v1/positions", {"seen": {"a": 1}}),
        ("/v1/positions", {"pattern": "*" * 1000}),
        ("/v1/splits", {}),
        ("/v1/splits", {"ranges": [{"stream": "a"}]}),
        ("/v1/splits", {"ranges": [], "max_bytes": 0}),
        ("/v1/splits", {"ranges": [], "read_from": "moon"}),
        ("/v1/splits", {"ranges": [{"stream": "a", "id": "b", "start": 0, "end": 10**9}], "max_rows": 1}),
        ("/v1/splits", {"ranges": [{"stream": "a", "id": "b", "start": 0, "end": 1}] * 2}),
        ("/v1/plans", {"stream": ["a"]}),
        ("/v1/plans", {"wait_ms": 10**9}),
        ("/v1/plans", {"positions": {"a": {"id": "b", "start": -1}}}),
        ("/v1/plans", {"positions": {"a": {"id": "b", "start": 0, "tasks": [[2**40, 1]]}}}),
        ("/v1/plans", {"limits": {"max_rows": 0}}),
        ("/v1/plans", {"tasks": {"cores": 10**9}}),
        ("/v1/plans", {"tasks": {"read_from": "moon"}}),
    ],
)
def test_wrong_requests_are_refused(client: NatslogClient, path: str, body: Any) -> None:
    with pytest.raises(InvalidRequest):
        client._ask("POST", path, body=body)


def idle(reader: StreamReader, position: dict[str, Any]) -> None:
    """The next trigger at this position waits."""
    assert reader.latestOffset(position, ReadAllAvailable()) == position


@pytest.mark.long
def test_idle_trigger_waits_at_the_broker_and_a_row_ends_the_wait(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, family: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_reader, "_IDLE_WAIT_S", FOREVER_S)
    reader = reader_of(broker.url, streamPattern=f"{family[0][:-3]}-*")
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    idle(reader, end)
    before = requests_at(broker)
    thread, found = in_thread(lambda: reader.latestOffset(end, ReadAllAvailable()))
    eventually(lambda: requests_at(broker) == before + 1)
    publish_acked(nats_url, family[7], [b"new"])
    thread.join(FOREVER_S / 2)
    assert {name: at["offset"] - end[name]["offset"] for name, at in found[0].items() if at != end[name]} == {
        family[7]: 1
    }
    idle(reader, found[0])
    thread, found = in_thread(lambda: reader.latestOffset(found[0], ReadAllAvailable()))
    client.create_stream(f"{family[0][:-3]}-new", f"{family[0]}.new")
    thread.join(FOREVER_S / 2)
    assert not thread.is_alive(), "a new stream ends the wait too"


@pytest.mark.long
def test_idle_trigger_returns_the_same_text_when_the_wait_is_over(
    broker: BrokerProcess, family: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_reader, "_IDLE_WAIT_S", 0.05)
    reader = reader_of(broker.url, stream=",".join(family))
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert [reader.latestOffset(end, ReadAllAvailable()) for _ in range(4)] == [end] * 4


@pytest.mark.long
def test_nothing_waits_where_rows_or_others_wait(
    broker: BrokerProcess, nats_url: str, family: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First triggers, triggers with waiting rows, runs with an end, minimums that are due, sources beside another."""
    monkeypatch.setattr(stream_reader, "_IDLE_WAIT_S", FOREVER_S)
    reader = reader_of(broker.url, stream=family[1])
    start = reader.initialOffset()
    assert reader._wait_for_news(start) == ({}, 0)
    idle(reader, start)
    assert reader._wait_for_news(start)[1] == FOREVER_S * 1000
    reader.commit(start)
    reader.commit(start)  # a batch with rows of another source only
    assert reader._wait_for_news(start) == ({}, 0)
    ending = reader_of(broker.url, stream=family[1])
    ending.prepareForTriggerAvailableNow()
    idle(ending, start)
    assert ending._wait_for_news(start) == ({}, 0)
    hurried = reader_of(broker.url, stream=family[4], minOffsetsPerTrigger="100", maxTriggerDelay="30s")
    first = hurried.latestOffset(hurried.initialOffset(), ReadMinRows(100))
    publish_acked(nats_url, family[4], [b"x"])
    assert hurried.latestOffset(first, ReadMinRows(100)) == first, "one row waits for a minimum"
    assert 0 < hurried._wait_for_news(first)[1] <= 30_000, "not beyond the delay"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("many")) as cluster:
        cluster.wait_in_sync()
        client = cluster.client()
        for at in range(9):
            client.create_stream(f"s{at}", f"s{at}", replicas=1 if at < 6 else 3)
            publish_acked(cluster.nats_url, f"s{at}", [b"x" * 20] * (10 + at))
        eventually(lambda: len({client.stream(f"s{at}")["leader"] for at in range(6)}) == 3)
        yield cluster


@pytest.mark.long
def test_streams_of_several_leaders_are_planned_with_few_requests(cluster: Cluster) -> None:
    client = cluster.client()
    names = [f"s{at}" for at in range(9)]
    for broker in cluster.up:
        reader = reader_of(broker.url, stream=",".join(names))
        start = reader.initialOffset()
        before = requests_at(*cluster.up)
        end = reader.latestOffset(start, ReadAllAvailable())
        tasks = reader.partitions(start, end)
        assert requests_at(*cluster.up) - before == 1, "the broker asks the other leaders"
        assert {name: at["offset"] for name, at in end.items()} == {f"s{at}": 10 + at for at in range(9)}
        single = {name: client.splits(name, 0, end[name]["offset"]) for name in names}
        planned = {one.stream: one for task in tasks for one in task.ranges}  # type: ignore[attr-defined]
        assert {name: (one.start, one.end, one.bytes, set(one.urls)) for name, one in planned.items()} == {
            name: (one.start, one.end, one.bytes, set(one.urls)) for name, (one,) in single.items()
        }
        assert sum(batch.num_rows for task in tasks for batch in reader.read(task)) == sum(range(10, 19))


@pytest.mark.long
def test_a_row_at_any_leader_ends_the_wait_at_any_broker(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_reader, "_IDLE_WAIT_S", FOREVER_S)
    reader = reader_of(cluster.broker(1).url, streamPattern="s*")
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    for name in ("s0", "s1", "s2", "s7"):
        idle(reader, end)
        before = requests_at(cluster.broker(1))
        thread, found = in_thread(lambda end=end: reader.latestOffset(end, ReadAllAvailable()))  # type: ignore[misc]
        eventually(lambda before=before: requests_at(cluster.broker(1)) == before + 1)  # type: ignore[misc]
        publish_acked(cluster.nats_url, name, [b"new"])
        thread.join(FOREVER_S / 2)
        assert [one for one in end if found[0][one] != end[one]] == [name]
        end = found[0]


@pytest.mark.long
def test_a_leader_change_ends_the_wait_and_no_row_is_missed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_reader, "_IDLE_WAIT_S", FOREVER_S)
    client = cluster.client()
    was = client.stream("s8")["leader"]
    other = next(broker for broker in cluster.up if broker.number != was)
    reader = reader_of(",".join(broker.url for broker in cluster.up), stream="s8")
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    idle(reader, end)
    before = requests_at(cluster.up[0])
    thread, found = in_thread(lambda: reader.latestOffset(end, ReadAllAvailable()))
    eventually(lambda: requests_at(cluster.up[0]) > before)
    client.transfer_stream("s8", other.number)
    thread.join(FOREVER_S / 2)
    assert not thread.is_alive()
    assert found[0]["s8"]["offset"] == end["s8"]["offset"]
    publish_acked(cluster.nats_url, "s8", [b"after"])
    after = reader.latestOffset(found[0], ReadAllAvailable())
    assert after["s8"]["offset"] == end["s8"]["offset"] + 1


def test_a_broker_that_is_down_is_no_reason_to_wait_forever() -> None:
    """The wait is the broker's: without one, the client's patience ends the request as before."""
    client = NatslogClient("http://127.0.0.1:1", impatient())
    with pytest.raises(BrokerUnavailable):
        client.positions(names=["a"], seen={"a": ("x", 1)}, wait_ms=50)


def impatient() -> Any:
    return SourceOptions.parse({"stream": "a", "fetchTimeout": "200ms", "fetchRetries": "0"}).client_options
