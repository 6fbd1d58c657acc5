"""kill -9 of the broker while a publisher waits for acks: everything acked is there, once, offsets dense."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from natslog.client.publisher import Publisher, Rows
from natslog.errors import PublishFailed
from tests.harness import all_values, eventually, running

ROWS_PER_KILL = 11_000  # at 4,000 a second: longer than a kill and a start take


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.long)])
def test_everything_acked_is_there_once_after_kills(tmp_path: Path, kills: int) -> None:
    rows = ROWS_PER_KILL * kills
    source = tmp_path / "rows.ndjson"
    source.write_text("".join(json.dumps({"n": at, "pad": "x" * 200}) + "\n" for at in range(rows)))
    with running(tmp_path / "own", segment_bytes="2MiB") as (server, broker):
        client = broker.client()
        client.create_stream("orders", "orders.>")
        command = [sys.executable, "-m", "natslog", "pub", "orders.new", "--file", str(source), "--format", "ndjson"]
        command += ["--ack", "--json", "--rate", "4000", "--nats-url", server.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as publisher:
            chance = random.Random(1)
            for _ in range(kills):
                before = client.stream("orders")["high_watermark"]
                eventually(lambda before=before: client.stream("orders")["high_watermark"] > before + 500)
                time.sleep(chance.random() * 0.2)
                broker.kill()
                broker.start()
            output, _ = publisher.communicate(timeout=120)
        assert publisher.returncode == 0
        assert json.loads(output)["acked"] == rows
        stored = [json.loads(value)["n"] for value in all_values(client, "orders")]
        assert sorted(stored) == list(range(rows)), "each acked message is there, once"


def test_publisher_is_told_when_no_stream_listens(tmp_path: Path) -> None:
    with running(tmp_path / "own") as (server, _), Publisher(server.url, ack_timeout_s=1) as publisher:
        with pytest.raises(PublishFailed, match="no stream receives messages"):
            publisher.publish(Rows(pa.array(["nobody.here"]), pa.array([b"x"])), "stored")
