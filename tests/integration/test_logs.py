"""The logs of real brokers: JSON, request ids that are carried from broker to broker, levels that are changed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from natslog.client import NatslogClient
from tests.cluster_harness import Cluster, ClusterBroker, running_cluster
from tests.harness import BrokerProcess, eventually, natslog

pytestmark = pytest.mark.long
OF_REQUESTS = {"audit.change", "audit.refused", "log.level_changed"}
HOSTILE = "orders%0A2026-11-27%2006:31:39,123%20CRITICAL%20natslog:%20forged%1B[2J"


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two brokers that log JSON."""
    settings = {"log_format": "json", "retention_interval": "1s"}
    with running_cluster(tmp_path_factory.mktemp("logs"), brokers=2, settings=settings) as cluster:
        yield cluster


def lines_of(broker: BrokerProcess) -> list[dict[str, Any]]:
    """All that the process has printed: each line is a JSON object."""
    return [json.loads(line) for line in broker.output().splitlines()]


def found(broker: BrokerProcess, code: str, **fields: Any) -> dict[str, Any]:
    """The first line with this code and these fields, which may still have to be written."""

    def look() -> dict[str, Any] | None:
        wanted = {"code": code} | fields
        return next((line for line in lines_of(broker) if line.items() >= wanted.items()), None)

    line = eventually(look, 30, f"{code} {fields}")
    assert line is not None
    return line


def change_level(asked: BrokerProcess, request_id: str, **body: Any) -> requests.Response:
    headers = {"Natslog-Request-Id": request_id}
    return requests.put(f"{asked.url}/v1/cluster/log-level", json=body, headers=headers, timeout=30)


def led_by(cluster: Cluster) -> tuple[ClusterBroker, ClusterBroker]:
    """The metadata leader, and the other broker."""
    state = cluster.state()
    assert state is not None
    leader = cluster.broker(state["metadata_leader"])
    return leader, next(one for one in cluster.brokers if one is not leader)


def test_all_output_is_json_lines_with_the_number_of_the_broker(logged: Cluster) -> None:
    for broker in logged.brokers:
        ready = found(broker, "broker.ready", address=broker.url)
        assert ready["path"] == str(broker.folder)
        for line in lines_of(broker):
            assert list(line)[:6] == ["time", "level", "code", "message", "logger", "broker"]
            assert line["broker"] == broker.number


def test_a_forwarded_request_keeps_its_id(logged: Cluster) -> None:
    leader, other = led_by(logged)
    url, headers = f"{other.url}/v1/cluster/brokers/{other.number}", {"Natslog-Forward": "true"}
    answer = requests.patch(url, json={"draining": False}, headers=headers, timeout=30)
    made = answer.headers["Natslog-Request-Id"]
    assert (answer.status_code, len(made)) == (200, 32)
    assert found(leader, "audit.change", request_id=made)["audit"]["request_id"] == made

    given = headers | {"Natslog-Request-Id": "forwarded-once-1"}
    answer = requests.patch(url, json={"draining": False}, headers=given, timeout=30)
    assert (answer.status_code, answer.headers["Natslog-Request-Id"]) == (200, "forwarded-once-1")
    assert found(leader, "audit.change", request_id="forwarded-once-1")["audit"]["path"].endswith(str(other.number))


@pytest.mark.parametrize("hostile", ["short", "x" * 65, "request 0001", '","code":"forged', "[2J[2J[2J[2J"])
def test_a_hostile_id_is_refused_for_changes_and_replaced_for_reads(logged: Cluster, hostile: str) -> None:
    leader, other = led_by(logged)
    headers = {"Natslog-Request-Id": hostile, "Natslog-Forward": "true"}
    answer = requests.get(f"{other.url}/v1/cluster", headers=headers, timeout=30)
    assert (answer.status_code, len(answer.headers["Natslog-Request-Id"])) == (200, 32)
    url = f"{other.url}/v1/cluster/brokers/{other.number}"
    for of, forwards in ((url, "the other broker answers"), (url.replace(other.url, leader.url), "this one answers")):
        answer = requests.patch(of, json={"draining": False}, headers=headers, timeout=30)
        assert answer.status_code == 400, forwards
        assert "must be 8 to 64 letters, digits and dashes" in answer.json()["error"]["message"]
        assert answer.headers["Natslog-Request-Id"] != hostile
    assert not any(hostile in json.dumps(line) for line in [*lines_of(leader), *lines_of(other)])


def test_a_level_is_set_at_every_broker_and_each_logs_the_id_of_the_request(logged: Cluster) -> None:
    first, second = logged.brokers
    answer = change_level(first, "levels-of-all-1", level="warning")
    assert answer.json() == {
        "brokers": [{"broker": broker.number, "level": "warning", "loggers": {}} for broker in logged.brokers]
    }
    for broker in logged.brokers:
        line = found(broker, "log.level_changed", request_id="levels-of-all-1")
        assert (line["level"], line["log_level"]) == ("warning", "warning")
    assert found(first, "audit.change", request_id="levels-of-all-1")["level"] == "info", "the audit log has its own"
    change_level(second, "levels-as-started-1", level="default")
    shown = requests.get(f"{first.url}/v1/cluster/log-level", timeout=30).json()["brokers"]
    assert [one["level"] for one in shown] == ["info", "info"]


def test_the_level_of_one_logger_of_one_broker(logged: Cluster) -> None:
    first, second = logged.brokers
    command = ["cluster", "log-level", "debug", "--logger", "natslog.metadata", "--broker", str(second.number)]
    changed = json.loads(natslog(*command, "--json", url=first.url).stdout)
    assert changed == [{"broker": second.number, "level": "info", "loggers": {"natslog.metadata": "debug"}}]
    with NatslogClient(first.url) as client:
        client.create_stream("levels", "levels.>", replicas=2)
    assert found(second, "other", logger="natslog.metadata", level="debug")
    for broker, loggers in ((first, set()), (second, {"natslog.metadata"})):
        assert {line["logger"] for line in lines_of(broker) if line["level"] == "debug"} == loggers
    shown = natslog("cluster", "log-level", url=first.url).stdout
    assert "natslog.metadata: debug" in shown
    natslog("cluster", "log-level", "default", url=first.url)
    assert "debug" not in natslog("cluster", "log-level", url=first.url).stdout


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"level": "loud"}, "level 'loud' must be debug, info, warning, error, default"),
        ({"level": "info", "logger": "natslog.nod"}, "did you mean 'natslog.node'"),
        ({"level": "info", "logger": "natslog.audit"}, "the level of natslog.audit cannot be changed"),
        ({"level": "info", "logger": "root"}, "there is no logger 'root'"),
        ({"level": "info", "broker": 9}, "there is no broker 9; there are [1, 2]"),
        ({}, "state a level"),
        ({"level": "info", "loger": "x"}, "state a level"),
    ],
)
def test_a_change_that_is_invalid_changes_nothing(logged: Cluster, body: dict[str, Any], said: str) -> None:
    answer = change_level(logged.brokers[0], "invalid-level-1", **body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    shown = requests.get(f"{logged.brokers[0].url}/v1/cluster/log-level", timeout=30).json()["brokers"]
    assert all((one["level"], one["loggers"]) == ("info", {}) for one in shown)


def test_text_of_a_client_forges_no_line(logged: Cluster) -> None:
    first = logged.brokers[0]
    before = len(lines_of(first))
    answer = requests.delete(f"{first.url}/v1/streams/{HOSTILE}", timeout=30)
    assert answer.status_code in (400, 404)
    found(first, "audit.change", request_id=answer.headers["Natslog-Request-Id"])
    assert all(line["code"] != "forged" and "forged" not in line["level"] for line in lines_of(first)[before:])


def test_only_lines_about_requests_have_an_id(logged: Cluster) -> None:
    """Links to brokers and tasks that a request began carry none, though they begin in a request."""
    leader, other = led_by(logged)
    with NatslogClient(leader.url) as client:
        client.create_stream("moved", "moved.>", replicas=2)
        client.transfer_metadata(other.number)
    eventually(lambda: logged.metadata_leader() is other, what="the metadata is led by the other broker")
    found(other, "metadata.led", peer=other.number)
    for broker in logged.brokers:
        assert {line["code"] for line in lines_of(broker) if "request_id" in line} <= OF_REQUESTS


def test_a_broker_that_is_down_is_stated_and_starts_with_its_own_level(logged: Cluster) -> None:
    first, second = logged.brokers
    change_level(first, "before-restart-1", level="debug", logger="natslog.http", broker=second.number)
    second.terminate()
    done = natslog("cluster", "log-level", "error", "--broker", str(second.number), url=first.url, check=False)
    assert done.returncode == 1
    assert "broker 2 is not connected" in " ".join(done.stdout.split())
    second.start()
    eventually(lambda: "problem" not in _levels(first)[1], what="the brokers are connected")
    assert _levels(first)[1] == {"broker": 2, "level": "info", "loggers": {}}


def _levels(broker: BrokerProcess) -> list[dict[str, Any]]:
    levels: list[dict[str, Any]] = requests.get(f"{broker.url}/v1/cluster/log-level", timeout=30).json()["brokers"]
    return levels


def test_a_start_that_fails_is_a_line(logged: Cluster, tmp_path: Path) -> None:
    taken = str(logged.brokers[0].http_port)
    command = ["server", "--data-dir", str(tmp_path), "--http-port", taken, "--log-format", "json"]
    done = natslog(*command, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    (*_, line) = [json.loads(line) for line in done.stderr.splitlines()]
    assert (line["level"], line["code"], line["reason"]) == ("critical", "broker.failed", "config")
    assert f"HTTP port {taken} on 127.0.0.1 is used by another program" in line["message"]


def test_what_python_prints_is_a_line_too() -> None:
    program = """
import logging, threading, warnings
from natslog.log_events import write_log
write_log("info", "json", 7)
warnings.warn("careful\\nforged")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start(); thread.join()
raise ValueError("the end\\nforged")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["code"] for line in lines] == ["other", "process.error", "process.error"]
    assert "ZeroDivisionError" in lines[1]["error"]
    assert "the end\nforged" in lines[2]["error"]
    assert done.returncode == 1
