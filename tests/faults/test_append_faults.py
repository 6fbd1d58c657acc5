"""Direct appends through crashes: the broker killed before each system call of a commit, a leader killed at any moment.

Whatever dies, a batch that is staged and committed again is there once, and no reader ever sees a part of it.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from natslog.client import ClientOptions, NatslogClient
from natslog.client.appending import Appended, PartUploader
from natslog.errors import BrokerUnavailable, NatslogError, PartsMissing
from tests.cluster_harness import Cluster, running_cluster
from tests.harness import eventually, running

ROWS = 150_000  # three batches of a run, as a log stores them

CRASHES = '''
"""Imported by every Python that has this folder on its path: kills it before the system call that a file names."""
import os, signal, sys
if "server" in sys.argv or os.environ.get("CRASH_FILE"):
    from natslog.log import run_log
    where, counted = os.environ["CRASH_FILE"], None
    append_run = run_log.RunLog.append_run

    def watched(name):
        real = getattr(os, name)

        def call(*arguments, **options):
            global counted
            if counted is not None:
                counted -= 1
                if counted == 0:
                    os.unlink(where) if name != "unlink" else None
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(os, name, call)

    for name in ("writev", "fdatasync", "fsync", "replace", "unlink"):
        watched(name)

    def announced(*arguments, **options):
        global counted
        if os.path.exists(where):
            counted = int(open(where).read())
        return append_run(*arguments, **options)

    run_log.RunLog.append_run = announced
'''


def crashing(folder: Path) -> dict[str, str]:
    """The environment of a broker that crashes where the file `folder/at` says; counting begins with a commit."""
    (folder / "sitecustomize.py").write_text(CRASHES)
    return {"PYTHONPATH": str(folder), "CRASH_FILE": str(folder / "at")}


def values_of(batch: int) -> pa.Array[Any]:
    return pa.array([b"%d:%d" % (batch, row) for row in range(ROWS)], pa.binary())


def staged(client: NatslogClient, batch: int, attempt: int = 0) -> Any:
    uploader = PartUploader(client, "orders", "query", batch, attempt=attempt)
    uploader.add(pa.RecordBatch.from_arrays([values_of(batch)], names=["value"]))
    return uploader.finish()


def once_each(client: NatslogClient, batches: int) -> None:
    """Every row of every batch, once, in order."""
    found = pa.chunked_array([batch.column("value") for batch in client.read("orders", columns=["value"])])
    expected = pa.concat_arrays([values_of(batch) for batch in range(batches)])
    assert len(found) == len(expected)
    assert found.combine_chunks().equals(expected) or found.equals(pa.chunked_array([expected]))


@pytest.mark.long
def test_broker_killed_before_any_system_call_of_a_commit(tmp_path: Path) -> None:
    with running(tmp_path / "own", retention_interval="1h") as (_, broker):
        broker.kill()
        broker.environment = crashing(tmp_path)
        broker.start()
        client = broker.client()
        impatient = NatslogClient(broker.url, ClientOptions(retries=0))
        client.create_stream("orders", "orders")
        batch, outcomes = 0, []
        for step in (1, 4, 5, 6, 7):
            parts = staged(client, batch)
            (tmp_path / "at").write_text(str(step))
            try:
                impatient.commit_append("orders", "query", batch, parts)
            except BrokerUnavailable:
                broker.kill()
                (tmp_path / "at").unlink(missing_ok=True)
                broker.start()
            else:
                pytest.fail(f"there are fewer than {step} system calls")
            stored = client.stream("orders")["high_watermark"]
            assert stored in (batch * ROWS, (batch + 1) * ROWS), "all of it or nothing"
            try:
                again = client.commit_append("orders", "query", batch, parts)
            except PartsMissing:
                again = client.commit_append("orders", "query", batch, staged(client, batch))
            assert again == Appended(batch * ROWS, (batch + 1) * ROWS, stored == (batch + 1) * ROWS)
            outcomes.append(again.duplicate)
            batch += 1
        assert outcomes == [False, False, False, True, True], "from the last batch's write on it is all there"
        once_each(client, batch)


class Watching(threading.Thread):
    """Asks every broker all the time how far it serves the stream: never inside a run."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self.cluster = cluster
        self.stopping = threading.Event()
        self.inside: list[tuple[int, int]] = []
        self.seen: set[tuple[int, int]] = set()

    def run(self) -> None:
        while not self.stopping.is_set():
            for broker in self.cluster.brokers:
                answer = broker.ask("GET", "/v1/streams/orders/messages?start=0&end=0&columns=offset", timeout_s=0.5)
                if answer is not None and answer.status == 200:
                    high_watermark = int(answer.headers["Natslog-High-Watermark"])
                    self.seen.add((broker.number, high_watermark))
                    if high_watermark % ROWS:
                        self.inside.append((broker.number, high_watermark))
            time.sleep(0.005)


@pytest.mark.long
def test_leader_killed_at_any_moment_of_a_commit(tmp_path: Path) -> None:
    chance = random.Random(5)
    with running_cluster(tmp_path / "cluster") as cluster:
        client = cluster.client(retries=8)
        client.create_stream("orders", "orders", replicas=3, min_isr=2)
        watching = Watching(cluster)
        watching.start()
        kills = (0.06, 0.15, 0.35)
        outcomes = []
        for batch, after_s in enumerate(kills):
            leader = eventually(lambda: cluster.leader_of("orders"), what="a leader")
            parts = staged(client, batch)
            killer = threading.Timer(after_s * chance.uniform(0.8, 1.2), leader.kill)
            killer.start()
            attempt = 0
            while True:
                try:
                    outcomes.append(client.commit_append("orders", "query", batch, parts, parts_within_s=1))
                    break
                except (PartsMissing, BrokerUnavailable):
                    attempt += 1
                    assert attempt < 5, "a batch that is staged again is committed"
                    parts = restaged(client, batch, attempt)
            killer.join()
            leader.spawn()
            cluster.wait_ready()
            cluster.wait_in_sync()
        eventually(lambda: len({number for number, at in watching.seen if at == len(kills) * ROWS}) == 3)
        watching.stopping.set()
        watching.join()
        assert not watching.inside, "nobody is shown a part of a run"
        assert [one.start for one in outcomes] == [batch * ROWS for batch in range(len(kills))]
        once_each(client, len(kills))


def restaged(client: NatslogClient, batch: int, attempt: int) -> Any:
    """As Spark does: the whole batch once more, where its leader is lost on the way too."""
    for _ in range(5):
        try:
            return staged(client, batch, attempt)
        except NatslogError as error:
            problem = error
    pytest.fail(f"could not be staged: {problem}")
