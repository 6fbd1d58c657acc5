"""A query goes on with either reader and either sink: both write the same positions, and send the same message ids."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from natslog.client import NatslogClient
from natslog.nats_server import NatsServer
from pyspark_natslog.jar import jar_path
from tests.harness import BrokerProcess, all_values, eventually, publish_acked

PROGRAM = Path(__file__).with_name("program.py")
ROWS, BATCH = 20_000, 1_500
_KILLED = 7
_PUBLISHED = 2_000


def run(how: str, *arguments: str, jar: bool) -> subprocess.CompletedProcess[str]:
    command, environment = started_by(how, *arguments, jar=jar)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=180)


def started_by(how: str, *arguments: str, jar: bool) -> tuple[list[str], dict[str, str]]:
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "JAR": str(jar_path()) if jar else ""}
    return [sys.executable, str(PROGRAM), how, *arguments], environment


def positions(folder: Path) -> list[dict[str, Any]]:
    """Of each batch, as the checkpoint has them."""
    files = sorted((folder / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    return [json.loads(path.read_text().splitlines()[-1]) for path in files]


@pytest.fixture
def filled(shared: tuple[NatsServer, BrokerProcess], client: NatslogClient, name: str) -> str:
    client.create_stream(name, name)
    publish_acked(shared[0].url, name, [b"%d" % number for number in range(ROWS)])
    return name


def test_query_goes_on_with_the_other_reader_after_it_was_killed(
    broker: BrokerProcess, filled: str, folder: Path
) -> None:
    """Each reader repeats the batch that the other one has begun, and begins one that the other one repeats."""
    for turn in range(4):
        ended = run("drain", broker.url, filled, str(folder), str(BATCH), "3", jar=turn % 2 == 0)
        assert ended.returncode == _KILLED, ended.stderr[-3000:]
    ended = run("drain", broker.url, filled, str(folder), str(BATCH), jar=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    offsets = ds.dataset(folder / "rows").to_table(columns=["offset"]).column("offset").to_pylist()
    assert sorted(offsets) == list(range(ROWS)), "every offset exactly once"
    ends = [at[filled]["offset"] for at in positions(folder)]
    assert ends == [*range(BATCH, ROWS, BATCH), ROWS], "a repeated batch has the same end"


def test_both_readers_write_the_same_text_for_a_position(broker: BrokerProcess, filled: str, folder: Path) -> None:
    texts = []
    for jar in (True, False):
        place = folder / str(jar)
        assert run("drain", broker.url, filled, str(place), str(BATCH), jar=jar).returncode == 0
        texts.append(
            [path.read_text().splitlines()[-1] for path in sorted((place / "checkpoint/offsets").glob("[0-9]*"))]
        )
    assert texts[0] == texts[1]
    assert len(texts[0]) == ROWS // BATCH + 1


@pytest.mark.parametrize("jar", [True, False])
def test_batch_that_one_sink_has_begun_is_completed_by_the_other_one_without_a_doubled_row(
    shared: tuple[NatsServer, BrokerProcess], client: NatslogClient, name: str, folder: Path, jar: bool
) -> None:
    """The first one is killed when a part of the batch is stored."""
    client.create_stream(name, name)
    client.create_stream(f"{name}-out", f"out.{name}")
    publish_acked(shared[0].url, name, [b"%d" % number for number in range(_PUBLISHED)])
    arguments = ("publish", shared[1].url, name, shared[0].url, str(folder))

    command, environment = started_by(*arguments, jar=jar)
    environment["SETTINGS"] = "spark.sql.execution.arrow.maxRecordsPerBatch=50"  # of the Python sink
    first = subprocess.Popen(command, env=environment, process_group=0, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: client.stream(f"{name}-out")["high_watermark"] >= _PUBLISHED // 4, within_s=120)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    begun = len(all_values(client, f"{name}-out"))
    assert begun < _PUBLISHED, "the batch was not complete"

    ended = run(*arguments, jar=not jar)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert sorted(int(value) for value in all_values(client, f"{name}-out")) == list(range(_PUBLISHED))
