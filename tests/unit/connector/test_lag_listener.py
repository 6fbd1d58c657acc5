"""The listener without a Spark: what it makes of progresses, when it logs, and whose series it keeps."""

from __future__ import annotations

import json
import logging
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pyspark.sql.streaming.listener import StreamingQueryProgress

from natslog.errors import ConfigError
from pyspark_natslog.lag_listener import LagListener, query_lag

NATSLOG = {"orders": {"id": "a", "offset": 9, "rows_behind": 5, "bytes_behind": 700, "seconds_behind": 1.5}}
UNKNOWN = {"orders": {"id": "a", "offset": 9, "rows_behind": 5, "bytes_behind": None, "seconds_behind": None}}


QUERY = str(uuid.UUID(int=7))


def uuid_of(run: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, run))


def progress(*latest: Any, run_id: str = "run", name: str | None = "daily", batch: int = 3) -> Any:
    sources = [
        {
            "description": "natslog",
            "startOffset": {},
            "endOffset": {},
            "latestOffset": one,
            "numInputRows": 1,
            "inputRowsPerSecond": 10.0,
            "processedRowsPerSecond": 20.0,
        }
        for one in latest
    ]
    return StreamingQueryProgress.fromJson(
        {
            "id": QUERY,
            "runId": uuid_of(run_id),
            "name": name,
            "timestamp": "2026-11-21T10:00:00.000Z",
            "batchId": batch,
            "batchDuration": 250,
            "durationMs": {},
            "eventTime": {},
            "stateOperators": [],
            "sources": sources,
            "sink": {"description": "noop", "numOutputRows": 1},
            "numInputRows": 1,
            "inputRowsPerSecond": 10.0,
            "processedRowsPerSecond": float("inf"),
        }
    )


def hear(listener: LagListener, *latest: Any, **about: Any) -> None:
    listener.onQueryProgress(SimpleNamespace(progress=progress(*latest, **about)))


def values(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("natslog_query_"), *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


@pytest.mark.parametrize(
    "latest", ["null", "None", "", "7", "[]", '{"0": 42}', {"topic": {"0": 42}}, {"orders": {"id": "a", "offset": 9}}]
)
def test_progress_of_other_sources_passes_by(latest: Any) -> None:
    assert query_lag(progress(latest)) is None
    assert query_lag(progress(latest, NATSLOG)).streams.keys() == {"orders"}


def test_gauges_of_a_query_and_what_is_unknown_is_left_out() -> None:
    registry = CollectorRegistry()
    listener = LagListener(registry=registry)
    hear(listener, NATSLOG)
    assert values(registry) == {
        ("rows_behind", "daily", "orders"): 5,
        ("bytes_behind", "daily", "orders"): 700,
        ("seconds_behind", "daily", "orders"): 1.5,
        ("rows_lost_total", "daily", "orders"): 0,
        ("input_rows_per_second", "daily"): 10,
        ("processed_rows_per_second", "daily"): 0,  # Spark divided by nothing
        ("batch_duration_seconds", "daily"): 0.25,
    }
    hear(listener, UNKNOWN, name=None)
    assert [name for name in values(registry) if "orders" in name] == [
        ("rows_behind", QUERY, "orders"),
        ("rows_lost_total", QUERY, "orders"),
    ]
    listener.onQueryIdle(SimpleNamespace(runId=uuid_of("run")))
    found = values(registry)
    assert (found["input_rows_per_second", QUERY], found["rows_behind", QUERY, "orders"]) == (0, 5)


def test_series_end_with_their_run_and_not_with_a_former_one_of_that_name() -> None:
    registry = CollectorRegistry()
    listener = LagListener(registry=registry)
    hear(listener, NATSLOG, run_id="first")
    hear(listener, {"orders": NATSLOG["orders"] | {"rows_behind": 1}}, run_id="second")
    assert values(registry)["rows_behind", "daily", "orders"] == 1, "one series a name: the later run's"
    listener.onQueryTerminated(SimpleNamespace(runId=uuid_of("first")))
    assert values(registry)["rows_behind", "daily", "orders"] == 1
    listener.onQueryTerminated(SimpleNamespace(runId=uuid_of("second")))
    assert values(registry) == {}
    listener.onQueryTerminated(SimpleNamespace(runId=uuid_of("never heard of")))


def test_stream_that_is_not_read_any_more_has_no_series() -> None:
    registry = CollectorRegistry()
    listener = LagListener(registry=registry)
    hear(listener, NATSLOG | {"returns": NATSLOG["orders"]})
    hear(listener, NATSLOG)
    assert not [labels for labels in values(registry) if "returns" in labels]


def test_log_says_it_first_at_once_and_then_not_too_often(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pyspark_natslog.lag")
    now_s = 100.0
    listener = LagListener(log_every_s=30, clock=lambda: now_s)
    for step_s in (0, 1, 28, 2, 1):
        now_s += step_s
        hear(listener, NATSLOG)
    hear(listener, UNKNOWN, run_id="another", batch=8)
    assert [record.getMessage() for record in caplog.records] == [
        "query=daily stream=orders rows_behind=5 bytes_behind=700 seconds_behind=1.5 batch=3"
    ] * 2 + ["query=daily stream=orders rows_behind=5 bytes_behind=unknown seconds_behind=unknown batch=8"]
    record = caplog.records[0]
    assert json.dumps([record.query, record.stream, record.rows_behind, record.seconds_behind]) == (
        '["daily", "orders", 5, 1.5]'
    )
    caplog.clear()
    quiet = LagListener(log_every_s=None)
    hear(quiet, NATSLOG)
    assert not caplog.records


def test_without_prometheus_client_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    listener = LagListener()
    hear(listener, NATSLOG)  # logging needs none of it
    assert listener.queries()[0].streams["orders"].rows == 5
    with pytest.raises(ConfigError, match=r"pip install 'natslog\[spark\]'"):
        listener.start_http_server(0)
    with pytest.raises(ConfigError, match="prometheus_client"):
        LagListener(registry=object())


def test_second_server_of_one_listener_is_refused_and_close_frees_the_port() -> None:
    listener = LagListener()
    port = listener.start_http_server(0)
    with pytest.raises(ConfigError, match="already serves metrics"):
        listener.start_http_server(0)
    listener.close()
    assert listener.start_http_server(port) == port
    listener.close()
    listener.close()
