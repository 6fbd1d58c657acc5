"""Cursors and lag as clients, operators and Prometheus see them; also when a broker dies."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import urllib3

from natslog.cli import main
from natslog.client import ClientOptions, NatslogClient
from natslog.errors import CursorNotFound, InvalidRequest, StreamNotFound, StreamRecreated
from tests.cluster_harness import running_cluster
from tests.harness import BrokerProcess, eventually, natslog, publish_acked, running

http = urllib3.PoolManager()


@pytest.fixture
def stream(client: NatslogClient, nats_url: str, name: str) -> str:
    client.create_stream(name, name)
    publish_acked(nats_url, name, [b"." * 100] * 50)
    return name


def ask(broker: BrokerProcess, method: str, path: str, body: Any = None, **headers: str) -> urllib3.BaseHTTPResponse:
    data = None if body is None else json.dumps(body)
    return http.request(method, broker.url + path, body=data, headers=headers, retries=False)


# ---- HTTP ----


@pytest.mark.long
def test_cursor_is_put_shown_listed_and_deleted(client: NatslogClient, stream: str) -> None:
    put = client.set_cursor("report", stream, 20)
    assert (put["offset"], put["id"], put["rewound"]) == (20, client.stream(stream)["id"], None)
    client.set_cursor("report", stream, 40)
    client.set_cursor("report", stream, 30)
    client.set_cursor("another", stream, 50)
    shown = client.cursor("report", stream)
    assert (shown["offset"], shown["rewound"]["from"], shown["lag"]["rows"]) == (30, 40, 20)
    listed = client.cursors(stream=stream)
    assert [(one["consumer"], one["lag"]["rows"]) for one in listed] == [("another", 0), ("report", 20)]
    assert [one["stream"] for one in client.cursors(consumer="another", stream=stream)] == [stream]
    client.delete_cursor("report", stream)
    with pytest.raises(CursorNotFound, match="'report' has no cursor on stream"):
        client.cursor("report", stream)
    with pytest.raises(CursorNotFound):
        client.delete_cursor("report", stream)


@pytest.mark.long
def test_what_is_shown_of_a_cursor_can_be_put_back(broker: BrokerProcess, stream: str) -> None:
    path = f"/v1/cursors/report/{stream}"
    put = ask(broker, "PUT", path, {"offset": 20, "timestamp": "2026-11-20T10:30:00Z"})
    assert (put.status, put.json()["timestamp"][:19]) == (200, "2026-11-20T10:30:00")
    shown = ask(broker, "GET", path).json()
    again = ask(broker, "PUT", path, shown)
    assert again.status == 200, again.data
    assert ask(broker, "GET", path).json() | {"lag": None} == shown | {"lag": None}


def test_cursor_goes_with_its_stream_and_an_old_position_is_refused(client: NatslogClient, stream: str) -> None:
    former = client.set_cursor("report", stream, 20)["id"]
    client.delete_stream(stream)
    assert stream not in [one["stream"] for one in client.cursors()]
    with pytest.raises(StreamNotFound):
        client.set_cursor("report", stream, 20)
    client.create_stream(stream, stream)
    with pytest.raises(StreamRecreated, match="deleted and created again"):
        client.set_cursor("report", stream, 20, expected_id=former)
    with pytest.raises(CursorNotFound):
        client.lag(stream, cursor="report")


WRONG = [
    ("PUT", "/v1/cursors/re%20port/{}", {"offset": 1}, 400, "consumer name 're port' is not allowed"),
    ("PUT", "/v1/cursors/report/{}", {"offset": -1}, 400, "offset -1 must be a whole number"),
    ("PUT", "/v1/cursors/report/{}", {"offset": True}, 400, "offset True must be a whole number"),
    ("PUT", "/v1/cursors/report/{}", {"offset": 2**63}, 400, "must be a whole number from 0"),
    ("PUT", "/v1/cursors/report/{}", {"offset": 1, "idd": "x"}, 400, "unknown field 'idd'; did you mean 'id'?"),
    ("PUT", "/v1/cursors/report/{}", {"offset": 1, "id": 7}, 400, "must be the id of the stream"),
    ("PUT", "/v1/cursors/report/{}", [1], 400, "must be a JSON object"),
    (
        "PUT",
        "/v1/cursors/report/{}",
        {"offset": 1, "consumer": "x"},
        400,
        "consumer 'x' differs from 'report' in the path",
    ),
    ("PUT", "/v1/cursors/report/{}", {"offset": 1, "timestamp": "noon"}, 400, "timestamp 'noon' is not a time"),
    ("PUT", "/v1/cursors/report/nosuch", {"offset": 1}, 404, "there is no stream 'nosuch'"),
    ("POST", "/v1/lags", {"orders": "x"}, 400, "offset 'x' must be a whole number"),
    ("POST", "/v1/lags", {"or ders": 1}, 400, "stream name 'or ders' is not allowed"),
    ("GET", "/v1/cursors?consumr=x", None, 400, "did you mean 'consumer'?"),
    ("GET", "/v1/streams/{}/lag", None, 400, "give a position"),
    ("GET", "/v1/streams/{}/lag?offset=1&cursor=a", None, 400, "give a position"),
    ("GET", "/v1/streams/{}/lag?offset=-1", None, 400, "offset '-1' must be a whole number"),
    ("GET", "/v1/streams/{}/lag?cursor=nobody", None, 404, "'nobody' has no cursor"),
    ("GET", "/v1/streams/nosuch/lag?offset=1", None, 404, "there is no stream 'nosuch'"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "message"), WRONG)
def test_wrong_request_says_what_is_wrong(
    broker: BrokerProcess, stream: str, method: str, path: str, body: Any, status: int, message: str
) -> None:
    answer = ask(broker, method, path.format(stream), body)
    assert answer.status == status
    assert message in answer.json()["error"]["message"]


def test_retried_put_is_applied_once(broker: BrokerProcess, client: NatslogClient, stream: str) -> None:
    path = f"/v1/cursors/report/{stream}"
    again = {"Natslog-Request-Id": "one-and-the-same"}
    assert ask(broker, "PUT", path, {"offset": 1}, **again).status == 200
    assert ask(broker, "PUT", path, {"offset": 2}).status == 200
    assert ask(broker, "PUT", path, {"offset": 1}, **again).status == 200
    assert client.cursor("report", stream)["offset"] == 2


def test_lag_counts_rows_bytes_and_age(client: NatslogClient, nats_url: str, stream: str) -> None:
    time.sleep(0.3)
    publish_acked(nats_url, stream, [b"." * 100] * 10)
    nearly, behind = client.lag(stream, 50), client.lag(stream, 0)  # in this order: time passes between them
    assert (behind["rows"], nearly["rows"]) == (60, 10)
    assert behind["bytes"] > nearly["bytes"] > 10 * 100
    assert behind["seconds"] - nearly["seconds"] >= 0.3
    assert 0 < nearly["seconds"] < 60
    none = client.lag(stream, "latest")
    assert (none["rows"], none["bytes"], none["seconds"]) == (0, 0, 0)
    beyond = client.lag(stream, 75)
    assert (beyond["rows"], beyond["beyond_rows"], beyond["high_watermark"]) == (0, 15, 60)
    assert client.lag(stream, "earliest")["rows"] == 60
    several = client.lags({stream: 50, "nosuch": 1})
    assert several["nosuch"] is None
    assert several[stream]["rows"] == 10


@pytest.mark.long
def test_lag_below_the_log_start_counts_from_there_and_says_so(tmp_path: Path) -> None:
    settings = {"segment_bytes": "64KiB", "retention_interval": "100ms"}
    with running(tmp_path / "own", **settings) as (server, broker):
        client = broker.client()
        client.create_stream("orders", "orders", max_bytes=600_000)
        client.set_cursor("report", "orders", 5)
        for _ in range(12):
            publish_acked(server.url, "orders", [b"." * 1000] * 100)
        eventually(lambda: client.stream("orders")["log_start_offset"] > 100)
        lag = client.lag("orders", cursor="report")
        assert lag["lost_rows"] == lag["log_start_offset"] - 5 > 0
        assert lag["rows"] == 1200 - lag["log_start_offset"]
        assert lag["bytes"] >= 1000 * lag["rows"]
        assert " deleted by retention" in natslog("cursor", "ls", url=broker.url).stdout


def test_metrics_tell_the_lag_of_each_cursor(broker: BrokerProcess, client: NatslogClient, stream: str) -> None:
    client.set_cursor("report", stream, 20)
    labels = f'{{consumer="report",stream="{stream}"}}'
    metrics = broker.metrics()
    assert metrics[f"natslog_cursor_lag_rows{labels}"] == 30
    assert metrics[f"natslog_cursor_lag_bytes{labels}"] > 3000
    assert metrics[f"natslog_cursor_lag_seconds{labels}"] > 0
    client.delete_cursor("report", stream)
    assert f"natslog_cursor_lag_rows{labels}" not in broker.metrics()


def test_openapi_describes_cursors(broker: BrokerProcess) -> None:
    paths = ask(broker, "GET", "/openapi.json").json()["paths"]
    assert set(paths["/v1/cursors/{consumer}/{stream}"]) == {"get", "put", "delete"}
    names = [one["name"] for one in paths["/v1/cursors/{consumer}/{stream}"]["put"]["parameters"]]
    assert names[:2] == ["consumer", "stream"]
    assert {"name", "offset", "cursor"} <= {one["name"] for one in paths["/v1/streams/{name}/lag"]["get"]["parameters"]}


# ---- command line ----


@pytest.mark.long
def test_cursor_commands(broker: BrokerProcess, stream: str, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> str:
        """In this process: a new one for each costs a second."""
        with pytest.raises(SystemExit):
            main(["--server", broker.url, "cursor", *arguments])
        shown = capsys.readouterr()
        return shown.out + shown.err

    assert f"cursor report on {stream} is at offset 20" in run("set", "report", stream, "20")
    assert json.loads(run("set", "whole", stream, "latest", "--json"))["offset"] == 50
    assert "is at offset 0" in run("set", "whole", stream, "2020-01-01T00:00:00Z")
    table = run("ls", "--stream", stream).splitlines()
    assert [line.split()[:3] for line in table[1:]] == [["report", stream, "20"], ["whole", stream, "0"]]
    assert "moved back from 50" in table[2]
    listed = json.loads(run("ls", "--consumer", "report", "--stream", stream, "--json"))
    assert [one["lag"]["rows"] for one in listed] == [30]
    assert "lag: rows" in run("get", "report", stream)
    assert json.loads(run("get", "report", stream, "--json"))["offset"] == 20
    assert "was deleted" in run("rm", "report", stream)
    assert f"error: consumer 'report' has no cursor on stream '{stream}'" in run("rm", "report", stream)
    assert 'option("cursor", NAME)' in run("ls", "--consumer", "nobody")


# ---- several brokers ----


@pytest.mark.long
def test_cursors_and_lag_are_the_same_at_every_broker_and_survive_a_death(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "own") as cluster:
        clients = [NatslogClient(one.url, ClientOptions(retries=3, patience_s=10)) for one in cluster.brokers]
        cluster.client().create_stream("orders", "orders", replicas=3)
        cluster.client().create_stream("returns", "returns", replicas=3)
        publish_acked(cluster.nats.url, "orders", [b"x"] * 30)
        for number, client in enumerate(clients):
            client.set_cursor(f"report{number}", "orders", 10 * number)
            client.set_cursor(f"report{number}", "returns", 0)
        for client in clients:
            lags = {one["consumer"]: one["lag"]["rows"] for one in client.cursors(stream="orders")}
            assert lags == {"report0": 30, "report1": 20, "report2": 10}
            assert client.lag("orders", cursor="report1")["rows"] == 20
            assert len(client.cursors()) == 6
            assert {one["rows"] for one in client.lags({"orders": 5, "returns": 0}).values()} == {25, 0}
        dead = cluster.leader_of("orders")
        assert dead is not None
        series = [name for one in cluster.brokers for name in one.metrics() if name.startswith("natslog_cursor_lag_r")]
        assert len(series) == 6, "each cursor at the leader of its stream only"
        dead.kill()
        left = cluster.client(retries=0)
        assert left.cursor("report1", "orders")["offset"] == 10
        left.set_cursor("report1", "orders", 25)
        assert left.lag("orders", cursor="report1")["rows"] == 5
        dead.start()
        assert clients[cluster.brokers.index(dead)].cursor("report1", "orders")["offset"] == 25


def test_cursors_survive_a_restart(tmp_path: Path) -> None:
    with running(tmp_path / "own") as (_, broker):
        broker.client().create_stream("orders", "orders")
        for offset in range(40):
            broker.client().set_cursor("report", "orders", offset)
        broker.kill()
        broker.start()
        assert broker.client().cursor("report", "orders")["offset"] == 39
        with pytest.raises(InvalidRequest):
            broker.client().set_cursor("", "orders", 1)
