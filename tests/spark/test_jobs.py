"""The programs in `spark_jobs/` as a user runs them: real processes, a real broker, a real Spark in each."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from natslog.client import NatslogClient
from natslog.client.publisher import Publisher, Rows
from natslog.nats_server import free_port
from natslog.times import format_timestamp_us
from tests.harness import BrokerProcess, all_values, eventually, publish_acked
from tests.spark.job_processes import RUN_WITHIN_S, run, running_job

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def publish(broker: BrokerProcess, subject: str, payloads: list[dict[str, Any]]) -> None:
    values = pa.array([json.dumps(payload).encode() for payload in payloads], pa.binary())
    with Publisher(broker.nats_url) as publisher:
        publisher.publish(Rows(pa.array([subject] * len(payloads)), values), "stored")


def recorded_us(client: NatslogClient, stream: str) -> list[int]:
    """When each message was recorded."""
    batches = client.read(stream)
    return [moment for batch in batches for moment in batch.column("timestamp").cast(pa.int64()).to_pylist()]


def alerts_of(client: NatslogClient, stream: str) -> list[dict[str, Any]]:
    return [json.loads(value) for value in all_values(client, stream)]


# ---- backfill_to_parquet ----


@pytest.mark.long
def test_backfill_of_a_time_range_writes_exactly_its_rows_with_every_byte(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, folder: Path
) -> None:
    client.create_stream(name, f"{name}.>")
    parts = [[b"%d:%d \x00\xff" % (part, row) for row in range(10)] for part in range(3)]
    for part, values in enumerate(parts):
        publish_acked(nats_url, f"{name}.part{part}", values)
    times = recorded_us(client, name)
    start, end = format_timestamp_us(times[10]), format_timestamp_us(times[20])

    done = run(
        broker, "backfill_to_parquet.py", "--stream", name, "--from", start, "--to", end,
        "--output", str(folder / "out"), "--partition-by", "subject",
    )  # fmt: skip

    table = pq.read_table(folder / "out").sort_by("offset")
    assert table.column("value").to_pylist() == parts[1]
    assert table.column("offset").to_pylist() == list(range(10, 20))
    assert {str(subject) for subject in table.column("subject").to_pylist()} == {f"{name}.part1"}
    assert f"wrote 10 rows of stream {name} (offsets 10 to 19)" in done.stdout


# ---- stream_to_console ----


@pytest.mark.long
def test_stream_to_console_available_now_shows_what_is_there_and_ends(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, f"{name}.>")
    publish_acked(nats_url, f"{name}.x", [b"first value", b"second value"])
    done = run(broker, "stream_to_console.py", "--stream", name, "--available-now")
    assert "first value" in done.stdout
    assert "second value" in done.stdout


# ---- detect_and_publish ----


@pytest.mark.long
def test_detect_early_publishes_each_window_at_the_threshold_with_its_numbers(
    broker: BrokerProcess, client: NatslogClient, name: str, folder: Path
) -> None:
    client.create_stream(name, f"{name}.>")
    client.create_stream(f"{name}-alerts", f"{name}-alerts.>")
    publish(broker, f"{name}.x", [{"Magnitude": str(value), "Source": "us"} for value in (1.5, 7.25, 3.25)])
    publish(broker, f"{name}.x", [{"Magnitude": str(value), "Source": "ak"} for value in (2, 4.9)])
    publish(broker, f"{name}.x", [{"Magnitude": "5.0", "Source": "nc"}, {"Magnitude": "n/a", "Source": "nc"}])
    publish(broker, f"{name}.x", [{"Magnitude": "NaN", "Source": "ak"}, {"Source": "us"}, {"Magnitude": "9"}])

    done = run(
        broker, "detect_and_publish.py", "--stream", name, "--field", "Magnitude", "--group-field", "Source",
        "--threshold", "5", "--window", "36500d", "--emit", "early", "--alert-subject", f"{name}-alerts.high",
        "--ack", "stored", "--checkpoint", str(folder / "checkpoint"), "--available-now",
    )  # fmt: skip

    found = {alert["source"]: alert for alert in alerts_of(client, f"{name}-alerts")}
    assert {source: (alert["count"], alert["avg"], alert["max"]) for source, alert in found.items()} == {
        "us": (3, 4.0, 7.25),
        "nc": (1, 5.0, 5.0),
    }
    alert = found["us"]
    assert (alert["stream"], alert["field"], alert["on"], alert["threshold"]) == (name, "Magnitude", "max", 5.0)
    assert "10 messages (4 without a measurement skipped), 2 alerts published" in done.stdout


@pytest.mark.long
def test_detect_final_publishes_complete_windows_while_it_runs_and_ends_cleanly_on_sigterm(
    broker: BrokerProcess, client: NatslogClient, name: str, folder: Path
) -> None:
    client.create_stream(name, f"{name}.>")
    client.create_stream(f"{name}-alerts", f"{name}-alerts.>")
    publish(broker, f"{name}.hot", [{"value": value} for value in (10, 95.5, 20)])
    publish(broker, f"{name}.cold", [{"value": 5}])
    log = folder / "detect.log"

    def alerted_while_time_goes_on() -> bool:
        assert job.poll() is None, log.read_text()
        publish(broker, f"{name}.cold", [{"value": 1}])
        return bool(client.stream(f"{name}-alerts")["high_watermark"])

    with running_job(
        broker, log, "detect_and_publish.py", "--stream", name, "--threshold", "90", "--window", "1s",
        "--late", "100ms",
        "--alert-subject", f"{name}-alerts.high", "--ack", "stored", "--checkpoint", str(folder / "checkpoint"),
    ) as job:  # fmt: skip
        eventually(alerted_while_time_goes_on, RUN_WITHIN_S, "an alert is recorded")
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 0, log.read_text()

    assert "max of value per subject" in log.read_text()
    expected = windows_of(client, name, f"{name}.hot")
    for alert in alerts_of(client, f"{name}-alerts"):
        assert alert["source"] == f"{name}.hot"
        assert [alert["count"], alert["max"]] == expected[alert["window_start"]]


def windows_of(client: NatslogClient, stream: str, subject: str) -> dict[str, list[float]]:
    """Count and maximum per second of the recorded messages, computed without Spark."""
    values: dict[str, list[float]] = defaultdict(list)
    for batch in client.read(stream, subject=subject):
        times = batch.column("timestamp").cast(pa.int64()).to_pylist()
        for moment, value in zip(times, batch.column("value").to_pylist(), strict=True):
            start = format_timestamp_us(moment // 1_000_000 * 1_000_000)
            values[f"{start[:-4]}Z"].append(json.loads(value)["value"])
    return {start: [len(numbers), max(numbers)] for start, numbers in values.items()}


# ---- what goes wrong is said in one sentence, before Spark starts ----


def detect_arguments(stream: str, **changed: str) -> list[str]:
    given = {"stream": stream, "threshold": "1", "alert-subject": "elsewhere", "checkpoint": "unused"} | changed
    return [text for name, value in given.items() for text in (f"--{name}", value)]


@pytest.mark.long
def test_job_on_a_missing_stream_says_so_in_one_sentence(broker: BrokerProcess, folder: Path) -> None:
    for job, arguments in [
        ("stream_to_console.py", ["--stream", "nowhere"]),
        ("backfill_to_parquet.py", ["--stream", "nowhere", "--output", str(folder / "out")]),
        ("detect_and_publish.py", detect_arguments("nowhere")),
    ]:
        said = "error: there is no stream 'nowhere'\n"
        assert run(broker, job, *arguments, code=1).stderr == said


@pytest.mark.long
def test_job_without_a_broker_names_it(broker: BrokerProcess) -> None:
    server = f"http://127.0.0.1:{free_port()}"
    said = run(broker, "stream_to_console.py", "--stream", "any", "--servers", server, code=1).stderr
    assert said.startswith("error: no broker answered")
    assert server in said


@pytest.mark.long
def test_backfill_of_an_empty_or_wrong_range_is_refused(broker: BrokerProcess, folder: Path) -> None:
    base = ["--stream", "any", "--output", str(folder / "out")]
    said = run(broker, "backfill_to_parquet.py", *base, "--from", "2026-02-01", "--to", "2026-01-01", code=1).stderr
    assert said == "error: the range is empty: --from 2026-02-01 is not before --to 2026-01-01\n"
    said = run(broker, "backfill_to_parquet.py", *base, "--from", "yesterday", code=1).stderr
    assert "'yesterday' is not a time" in said


@pytest.mark.long
def test_detect_refuses_what_cannot_work(broker: BrokerProcess, client: NatslogClient, name: str) -> None:
    client.create_stream(name, f"{name}.>")
    cases = [
        (detect_arguments(name, **{"alert-subject": f"{name}.alerts"}), "alerts would be read as messages"),
        (detect_arguments(name), "the first 0 messages of stream"),
        (detect_arguments(name, field="x", window="soon"), "--window 'soon' is not a duration"),
        (detect_arguments(name, field="x", nats=f"nats://127.0.0.1:{free_port()}"), "NATS"),
    ]
    for arguments, reason in cases:
        *_, last_line = run(broker, "detect_and_publish.py", *arguments, code=1).stderr.splitlines()
        assert last_line.startswith("error: ")
        assert reason in last_line


@pytest.mark.parametrize(
    "job",
    [
        "stream_to_console", "backfill_to_parquet", "detect_and_publish", "enrich_stream", "stream_to_parquet",
        "compact_parquet", "replay_range", "demo",
    ],
)  # fmt: skip
@pytest.mark.long
def test_job_help_explains_it(broker: BrokerProcess, job: str) -> None:
    assert run(broker, f"{job}.py", "--help").stdout.startswith(f"usage: {job}.py")
