"""JetStream consumers as cursors: shown by HTTP, client, command line and metrics, and not changed there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import urllib3
from nats.js.api import ConsumerInfo

from natslog.cli import main
from natslog.client import ClientOptions, NatslogClient
from natslog.errors import CursorNotFound, InvalidRequest
from natslog.nats_server import NatsServer
from natslog.times import parse_timestamp_us
from tests.harness import BrokerProcess, eventually, flushed, natslog, publish_acked, with_nats
from tests.integration.test_access import admin_token
from tests.jetstream.three_brokers import create_consumer, create_stream, kill_leader, three_brokers

http = urllib3.PoolManager()

BEGINS_AFTER_S = 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(0, tmp_path_factory.mktemp("nats") / "nats.log").start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def broker(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(tmp_path_factory.mktemp("broker"), server.url, nats_leaf_url=server.leaf_url).start()
    eventually(lambda: "serving the JetStream API" in broker.output(), what="the JetStream API is served")
    yield broker
    broker.terminate()


@pytest.fixture
def client(broker: BrokerProcess) -> NatslogClient:
    return broker.client()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return "of_" + request.node.name.removeprefix("test_")[:60]


@pytest.fixture
def stream(server: NatsServer, name: str) -> str:
    """With 50 messages."""
    asked(server.url, f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"]})
    publish_acked(server.url, f"{name}.a", [b"." * 100] * 50)
    return name


def asked(url: str, call: str, body: Any = None) -> dict[str, Any]:
    async def work(connection: Any) -> dict[str, Any]:
        payload = b"" if body is None else json.dumps(body).encode()
        return dict(json.loads((await connection.request(f"$JS.API.{call}", payload, timeout=30)).data or b"{}"))

    answer = with_nats(url, work)
    assert "error" not in answer, answer
    return answer


def add_consumer(url: str, stream: str, name: str, **config: Any) -> None:
    config = {"durable_name": name, "ack_policy": "explicit"} | config
    asked(url, f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": config})


def use(url: str, stream: str, consumer: str, pulled: int, acked: int, refused: int = 0) -> None:
    """Pulls so many messages, acks the first ones of them, and refuses the following ones."""

    async def work(connection: Any) -> None:
        inbox = connection.new_inbox()
        subscription = await connection.subscribe(inbox)
        body = json.dumps({"batch": pulled, "expires": 10_000_000_000}).encode()
        await connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", body, reply=inbox)
        replies = [(await subscription.next_msg(timeout=30)).reply for _ in range(pulled)]
        for reply in replies[:acked]:
            await connection.request(reply, b"+ACK", timeout=30)
        for reply in replies[acked:][:refused]:
            await connection.request(reply, b"-NAK", timeout=30)

    with_nats(url, work)


def lags(client: NatslogClient, stream: str) -> dict[str, tuple[int, int]]:
    """Offset and rows of each cursor."""
    return {one["consumer"]: (one["offset"], one["lag"]["rows"]) for one in client.cursors(stream=stream)}


def ask(broker: BrokerProcess, method: str, path: str, body: Any = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body)
    answer = http.request(method, broker.url + path, body=data, retries=False)
    return answer.status, answer.json()["error"]["message"] if answer.status >= 400 else ""


# ---- positions ----


@pytest.mark.long
def test_consumer_is_shown_with_the_lag_of_its_ack_floor(
    server: NatsServer, client: NatslogClient, stream: str
) -> None:
    add_consumer(server.url, stream, "slow")
    add_consumer(server.url, stream, "new", deliver_policy="new")
    client.set_cursor("slow", stream, 7)  # another one than that of the consumer
    assert lags(client, stream) == {"slow": (7, 43), "jetstream:new": (50, 0), "jetstream:slow": (0, 50)}
    use(server.url, stream, "slow", pulled=20, acked=15)
    shown = client.cursor("jetstream:slow", stream)
    info = asked(server.url, f"CONSUMER.INFO.{stream}.slow")
    assert shown["offset"] == info["ack_floor"]["stream_seq"] == 15
    assert (shown["lag"]["rows"], shown["id"], shown["rewound"]) == (35, client.stream(stream)["id"], None)
    assert shown["lag"]["bytes"] > 35 * 100
    assert shown["lag"]["seconds"] > 0
    acked_us = parse_timestamp_us(info["ack_floor"]["last_active"])
    assert abs(parse_timestamp_us(shown["timestamp"]) - acked_us) < 1_000_000
    assert client.lag(stream, cursor="jetstream:slow")["rows"] == 35
    assert [one["offset"] for one in client.cursors(consumer="jetstream:slow", stream=stream)] == [15]
    assert [one["offset"] for one in client.cursors(consumer="slow", stream=stream)] == [7]
    with pytest.raises(CursorNotFound, match="'jetstream:fast' has no cursor on stream"):
        client.cursor("jetstream:fast", stream)
    asked(server.url, f"CONSUMER.DELETE.{stream}.slow")
    assert lags(client, stream) == {"slow": (7, 43), "jetstream:new": (50, 0)}


def test_consumer_that_has_read_everything_is_at_the_end_if_its_filter_leaves_messages_out(
    server: NatsServer, client: NatslogClient, stream: str
) -> None:
    publish_acked(server.url, f"{stream}.b", [b"x"])
    publish_acked(server.url, f"{stream}.a", [b"x"] * 9)
    add_consumer(server.url, stream, "filtered", filter_subject=f"{stream}.b")
    use(server.url, stream, "filtered", pulled=1, acked=0)
    assert client.cursor("jetstream:filtered", stream)["offset"] == 0
    asked(server.url, f"CONSUMER.DELETE.{stream}.filtered")
    add_consumer(server.url, stream, "filtered", filter_subject=f"{stream}.b")
    use(server.url, stream, "filtered", pulled=1, acked=1)
    publish_acked(server.url, f"{stream}.a", [b"x"] * 5)
    asked(server.url, f"CONSUMER.MSG.NEXT.{stream}.filtered", {"no_wait": True})
    assert asked(server.url, f"CONSUMER.INFO.{stream}.filtered")["ack_floor"]["stream_seq"] == 51
    assert lags(client, stream) == {"jetstream:filtered": (65, 0)}


@pytest.mark.long
def test_consumers_of_a_work_queue_are_not_behind_its_start(tmp_path: Path) -> None:
    server = NatsServer(0, tmp_path / "nats.log").start()
    settings = {"segment_bytes": "64KiB", "retention_interval": "100ms", "nats_leaf_url": server.leaf_url}
    broker = BrokerProcess(tmp_path / "data", server.url, **settings).start()
    try:
        eventually(lambda: "serving the JetStream API" in broker.output(), what="the JetStream API is served")
        asked(server.url, "STREAM.CREATE.jobs", {"name": "jobs", "subjects": ["jobs.>"], "retention": "workqueue"})
        add_consumer(server.url, "jobs", "a", filter_subject="jobs.a")
        add_consumer(server.url, "jobs", "b", filter_subject="jobs.b")
        for _ in range(6):
            publish_acked(server.url, "jobs.a", [b"." * 1000] * 100)
        use(server.url, "jobs", "a", pulled=600, acked=600)
        client = broker.client()
        eventually(lambda: client.stream("jobs")["log_start_offset"] > 0, what="files are removed")
        found = {one["consumer"]: one["lag"] for one in client.cursors(stream="jobs")}
        assert {name: (one["rows"], one["lost_rows"]) for name, one in found.items()} == {
            "jetstream:a": (0, 0),
            "jetstream:b": (0, 0),
        }
        broker.terminate()
    finally:
        broker.kill()
        server.stop()


def test_cursor_of_a_consumer_does_not_keep_messages(server: NatsServer, client: NatslogClient, stream: str) -> None:
    add_consumer(server.url, stream, "slow")
    client.purge(stream, 30)
    shown = client.cursor("jetstream:slow", stream)
    assert client.stream(stream)["log_start_offset"] == shown["lag"]["log_start_offset"] == 30
    assert shown["lag"]["rows"] == 20


@pytest.mark.long
def test_positions_are_those_that_were_stored_while_consumers_are_not_served(tmp_path: Path) -> None:
    server = NatsServer(0, tmp_path / "nats.log").start()
    broker = BrokerProcess(tmp_path / "data", server.url, nats_leaf_url=server.leaf_url).start()
    try:
        eventually(lambda: "serving the JetStream API" in broker.output(), what="the JetStream API is served")
        asked(server.url, "STREAM.CREATE.orders", {"name": "orders", "subjects": ["orders"]})
        publish_acked(server.url, "orders", [b"x"] * 30)
        add_consumer(server.url, "orders", "partly")
        add_consumer(server.url, "orders", "wholly")
        add_consumer(server.url, "orders", "never", opt_start_seq=11, deliver_policy="by_start_sequence")
        use(server.url, "orders", "partly", pulled=20, acked=15)
        use(server.url, "orders", "wholly", pulled=20, acked=20)
        before = lags(broker.client(), "orders")
        assert {name: offset for name, (offset, _) in before.items()} == {
            "jetstream:partly": 15,
            "jetstream:wholly": 20,
            "jetstream:never": 10,
        }
        broker.terminate()
        del broker.settings["nats_leaf_url"]
        broker.start()
        assert lags(broker.client(), "orders") == before
        assert [one["jetstream"] for one in broker.client().cursors()] == [None] * 3, "they are not served"
        broker.terminate()
    finally:
        broker.kill()
        server.stop()


# ---- numbers ----

NUMBERS = ("num_pending", "num_ack_pending", "num_redelivered", "num_waiting")


def numbers_of(url: str, stream: str, consumer: str) -> dict[str, Any]:
    """As nats-py reads them from CONSUMER.INFO."""

    async def work(connection: Any) -> ConsumerInfo:
        return cast("ConsumerInfo", await connection.jetstream().consumer_info(stream, consumer))

    info = with_nats(url, work)
    pairs = {"delivered": info.delivered, "ack_floor": info.ack_floor}
    return {name: getattr(info, name) or 0 for name in NUMBERS} | {
        name: {"consumer_seq": pair.consumer_seq, "stream_seq": pair.stream_seq} for name, pair in pairs.items()
    }


def test_numbers_of_a_consumer_are_those_of_its_info(
    server: NatsServer, broker: BrokerProcess, client: NatslogClient, stream: str
) -> None:
    publish_acked(server.url, f"{stream}.b", [b"x"] * 5)
    add_consumer(server.url, stream, "partly")
    add_consumer(server.url, stream, "filtered", filter_subject=f"{stream}.b")
    add_consumer(server.url, stream, "wild", filter_subjects=[f"{stream}.b.>", f"{stream}.*"])
    add_consumer(server.url, stream, "last", deliver_policy="last_per_subject", filter_subject=f"{stream}.>")
    use(server.url, stream, "partly", pulled=20, acked=15, refused=5)
    use(server.url, stream, "partly", pulled=5, acked=0)  # the same again
    use(server.url, stream, "filtered", pulled=2, acked=1)
    publish_acked(server.url, f"{stream}.b", [b"x"] * 3)

    async def while_a_request_waits(connection: Any) -> None:
        inbox = connection.new_inbox()
        await connection.subscribe(inbox)
        body = json.dumps({"batch": 10, "expires": 30_000_000_000}).encode()
        add = {"stream_name": stream, "config": {"durable_name": "new", "deliver_policy": "new"}}
        await connection.request(f"$JS.API.CONSUMER.CREATE.{stream}.new", json.dumps(add).encode())
        await connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.new", body, reply=inbox)
        await flushed(connection)
        names = ["filtered", "last", "new", "partly", "wild"]

        def are_equal() -> bool:
            expected = {f"jetstream:{one}": numbers_of(server.url, stream, one) for one in names}
            listed = {one["consumer"]: one["jetstream"] for one in client.cursors(stream=stream)}
            single = {one: client.cursor(one, stream)["jetstream"] for one in expected}
            return expected == listed == single and expected["jetstream:new"]["num_waiting"] == 1

        await asyncio.to_thread(eventually, are_equal)

    with_nats(server.url, while_a_request_waits)
    partly, wild = (client.cursor(f"jetstream:{one}", stream)["jetstream"] for one in ("partly", "wild"))
    assert (partly["ack_floor"]["stream_seq"], partly["num_ack_pending"], partly["num_pending"]) == (15, 5, 38)
    assert partly["num_redelivered"] == 5
    assert wild["num_pending"] == 58
    client.set_cursor("report", stream, 3)
    assert "jetstream" not in client.cursor("report", stream)
    client.purge(stream, 18)  # messages that are pending are gone
    listed = {one["consumer"]: one.get("jetstream") for one in client.cursors(stream=stream)}
    assert listed["jetstream:partly"]["num_ack_pending"] == 2
    assert listed["jetstream:partly"] == numbers_of(server.url, stream, "partly")


@pytest.mark.long
def test_identity_limited_to_subjects_gets_no_numbers(tmp_path: Path) -> None:
    server = NatsServer(0, tmp_path / "nats.log").start()
    broker = BrokerProcess(tmp_path / "data", server.url, nats_leaf_url=server.leaf_url, jetstream="on")
    broker.environment = {"NATSLOG_SECURITY": "true"}
    try:
        broker.start()
        eventually(lambda: "serving the JetStream API" in broker.output(), what="the JetStream API is served")
        asked(server.url, "STREAM.CREATE.orders", {"name": "orders", "subjects": ["orders.>"]})
        publish_acked(server.url, "orders.us", [b"theirs"] * 3)
        add_consumer(server.url, "orders", "worker")
        admin = admin_token(broker)

        def as_shown(token: str) -> Any:
            headers = {"Authorization": f"Bearer {token}"}
            (listed,) = http.request("GET", f"{broker.url}/v1/cursors", headers=headers).json()
            single = http.request("GET", f"{broker.url}/v1/cursors/jetstream:worker/orders", headers=headers).json()
            assert listed["jetstream"] == single["jetstream"]
            return single["jetstream"]

        def made(path: str, body: Any) -> Any:
            headers = {"Authorization": f"Bearer {admin}"}
            answer = http.request("POST", broker.url + path, json=body, headers=headers)
            assert answer.status == 201
            return answer.json()

        made("/v1/acl", {"who": "part", "action": "read", "stream": "orders", "subject": "orders.eu"})
        assert as_shown(admin)["num_pending"] == 3
        assert as_shown(made("/v1/tokens", {"identity": "part"})["token"]) is None
        broker.terminate()
    finally:
        broker.kill()
        server.stop()


# ---- read only ----


def test_changing_the_cursor_of_a_consumer_is_refused_and_names_the_call(
    server: NatsServer, broker: BrokerProcess, client: NatslogClient, stream: str
) -> None:
    add_consumer(server.url, stream, "worker")
    path, body = f"/v1/cursors/jetstream:worker/{stream}", {"offset": 40}
    many = {"cursors": [{"consumer": "jetstream:worker", "stream": stream, "offset": 40}]}
    for status, message in (
        ask(broker, "PUT", path, body),
        ask(broker, "PUT", path.replace(":", "%3A"), body),
        ask(broker, "DELETE", path),
        ask(broker, "POST", "/v1/cursors", many),
    ):
        assert status == 400
        assert f"'jetstream:worker' is the JetStream consumer 'worker' of stream '{stream}'" in message
        assert f"CONSUMER.DELETE.{stream}.worker" in message
    with pytest.raises(InvalidRequest, match="is not allowed"):
        client.consume(stream, cursor="jetstream:worker")
    assert lags(client, stream) == {"jetstream:worker": (0, 50)}
    for wrong in ("jetstream", "jetstream:", "a:b"):
        assert ask(broker, "GET", f"/v1/cursors/{wrong}/{stream}")[0] in (400, 404)


@pytest.mark.long
def test_cursor_commands_show_consumers(
    server: NatsServer, broker: BrokerProcess, stream: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            main(["--server", broker.url, "cursor", *arguments])
        shown = capsys.readouterr()
        return shown.out + shown.err

    add_consumer(server.url, stream, "worker")
    use(server.url, stream, "worker", pulled=20, acked=20)
    line = run("ls", "--stream", stream).splitlines()[1]
    assert line.split()[:3] == ["jetstream:worker", stream, "20"]
    assert "behind" in line
    (listed,) = json.loads(run("ls", "--stream", stream, "--json"))
    assert (listed["consumer"], listed["lag"]["rows"]) == ("jetstream:worker", 30)
    assert listed["jetstream"] == numbers_of(server.url, stream, "worker")
    header, row = run("ls", "--stream", stream).splitlines()
    assert "pending  ack pending  redelivered" in header
    assert row.split()[-4:] == ["30", "0", "0", "behind"]
    assert "consumer sequence 20, stream sequence 20" in run("get", "jetstream:worker", stream)
    assert json.loads(run("get", "jetstream:worker", stream, "--json"))["offset"] == 20
    assert "CONSUMER.DELETE" in run("rm", "jetstream:worker", stream)
    assert "CONSUMER.CREATE" in run("set", "jetstream:worker", stream, "earliest")


def test_backup_of_a_cluster_has_no_cursors_of_consumers(
    server: NatsServer, broker: BrokerProcess, client: NatslogClient, stream: str, tmp_path: Path
) -> None:
    add_consumer(server.url, stream, "worker")
    client.set_cursor("report", stream, 5)
    natslog("export", "--all", str(tmp_path / "all"), url=broker.url)
    manifest = json.loads((tmp_path / "all" / "cluster.json").read_text())
    assert [one["consumer"] for one in manifest["cursors"] if one["stream"] == stream] == ["report"]


# ---- metrics ----


def test_metrics_have_the_lag_of_durable_consumers(server: NatsServer, broker: BrokerProcess, stream: str) -> None:
    add_consumer(server.url, stream, "first")
    add_consumer(server.url, stream, "second")
    asked(server.url, f"CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": {"ack_policy": "none"}})
    use(server.url, stream, "first", pulled=20, acked=20)
    use(server.url, stream, "second", pulled=10, acked=10)
    metrics = broker.metrics()
    label = f'stream="{stream}"'
    assert metrics[f'natslog_cursor_lag_rows{{consumer="jetstream:first",{label}}}'] == 30
    assert metrics[f'natslog_cursor_lag_bytes{{consumer="jetstream:second",{label}}}'] > 40 * 100
    assert len([one for one in metrics if label in one and one.startswith("natslog_cursor_lag_rows")]) == 2
    assert metrics[f"natslog_stream_consumers{{{label}}}"] == 3
    assert metrics[f"natslog_stream_consumer_lag_rows{{{label}}}"] == 40
    assert metrics[f"natslog_stream_consumer_lag_bytes{{{label}}}"] > 40 * 100
    assert metrics[f"natslog_stream_consumer_lag_seconds{{{label}}}"] > 0


# ---- several brokers ----


@pytest.mark.long
def test_every_broker_shows_the_consumers_and_the_next_leader_continues(tmp_path: Path) -> None:
    with three_brokers(tmp_path / "own") as cluster:
        create_stream(cluster, "orders", subjects=["orders"])
        publish_acked(cluster.nats_url, "orders", [b"x"] * 30)
        create_consumer(cluster, "orders", "worker")
        use(cluster.nats_url, "orders", "worker", pulled=20, acked=20)
        clients = [NatslogClient(one.url, ClientOptions(retries=3, patience_s=10)) for one in cluster.brokers]
        assert [lags(one, "orders") for one in clients] == [{"jetstream:worker": (20, 10)}] * 3
        assert [one.cursor("jetstream:worker", "orders")["offset"] for one in clients] == [20] * 3
        info = numbers_of(cluster.nats_url, "orders", "worker")
        assert (info["num_pending"], info["ack_floor"]["stream_seq"]) == (10, 20)
        for one in clients:
            assert one.cursor("jetstream:worker", "orders")["jetstream"] == info
            assert [found["jetstream"] for found in one.cursors()] == [info]
        series = [name for one in cluster.brokers for name in one.metrics() if "consumer_lag_rows" in name]
        assert len(series) == 1, "at the leader of the stream only"

        def is_shown() -> bool:
            found = cluster.client(retries=0).cursors(consumer="jetstream:worker")
            return [(one["offset"], one["lag"] and one["lag"]["rows"]) for one in found] == [(20, 10)]

        kill_leader(cluster, "orders", lambda: eventually(is_shown, 30, "the next leader states it"))


@pytest.mark.long
def test_metrics_have_what_the_server_does_not_accept_from_the_leafnode_connection(tmp_path: Path) -> None:
    server = NatsServer(0, tmp_path / "nats.log").start()
    broker = BrokerProcess(tmp_path / "data", server.url, nats_leaf_url=server.leaf_url).start()
    unsent, connected = "natslog_nats_leaf_unsent_bytes", "natslog_nats_leaf_connected"
    try:
        eventually(lambda: "serving the JetStream API" in broker.output(), what="the JetStream API is served")
        asked(server.url, "STREAM.CREATE.orders", {"name": "orders", "subjects": ["orders"]})
        publish_acked(server.url, "orders", [b"." * 500_000] * 60)

        async def work(connection: Any) -> None:
            received = asyncio.Queue[Any]()
            await connection.subscribe("pushed", cb=received.put, pending_bytes_limit=2**30)
            assert broker.metrics()[unsent] == 0
            begins = (datetime.now(UTC) + timedelta(seconds=BEGINS_AFTER_S)).isoformat()
            config = {
                "durable_name": "worker",
                "deliver_subject": "pushed",
                "ack_policy": "none",
                "pause_until": begins,
            }
            body = {"stream_name": "orders", "config": config}
            await connection.request("$JS.API.CONSUMER.CREATE.orders.worker", json.dumps(body).encode(), timeout=30)
            os.kill(server.pid, signal.SIGSTOP)  # before it begins
            eventually(lambda: broker.metrics()[unsent] > 0, what="data waits")
            eventually(lambda: broker.metrics()[connected] == 0, what="the server does not respond")
            os.kill(server.pid, signal.SIGCONT)
            for _ in range(60):
                await asyncio.wait_for(received.get(), 20)

        with_nats(server.url, work)
        eventually(lambda: broker.metrics()[unsent] == 0 and broker.metrics()[connected] == 1, what="it is sent")
        broker.terminate()
    finally:
        broker.kill()
        server.stop()
