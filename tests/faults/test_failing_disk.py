"""The disk of a leader fails: no client receives a final error while another replica can become leader."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pyarrow as pa
import pytest

from natslog.client import ClientOptions, NatslogClient
from natslog.client.appending import PartUploader
from natslog.errors import NatslogError, PartsMissing
from natslog.nats_server import end_with_parent
from tests.cluster_harness import ClusterBroker, running_cluster
from tests.harness import eventually, publish_acked, stream_folder

STREAM = "orders"
TAKEN_OVER_WITHIN_S = 30.0

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("strace") is None, reason="failing syncs needs strace"),
]


@contextmanager
def failing_syncs(broker: ClusterBroker, stream_id: str) -> Iterator[None]:
    """Syncs of the stream's newest file end with EIO; the metadata's do not."""
    folder = stream_folder(broker.folder, stream_id)
    (newest,) = folder.glob("*.active*")
    command = ["strace", "-f", "-q", "-o", "/dev/null", "-P", str(newest), "-e", "trace=fsync,fdatasync"]
    command += ["-e", "inject=fsync,fdatasync:error=EIO", "-p", str(broker.pid)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=end_with_parent) as strace:
        try:
            time.sleep(0.5)  # until it is attached
            yield
        finally:
            strace.send_signal(signal.SIGINT)
            strace.wait(10)


def refusals_of(work: Callable[[], Any], until: Event) -> list[NatslogError]:
    """Of all errors until then, those that say it is of no use to ask again."""
    found = []
    while not until.is_set():
        try:
            work()
        except NatslogError as error:
            if not error.retriable:
                found.append(error)
        time.sleep(0.005)
    return found


@dataclass
class Appender:
    """One producer, batch by batch; a batch that was not confirmed is sent again."""

    client: NatslogClient
    batch: int = 0

    def __call__(self) -> None:
        uploader = PartUploader(self.client, STREAM, "loader", self.batch)
        uploader.add(pa.record_batch({"value": pa.array([b"appended"], pa.binary())}))
        try:
            self.client.commit_append(STREAM, "loader", self.batch, uploader.finish())
        except PartsMissing:
            return  # staged at the leader before
        self.batch += 1


@pytest.mark.long
def test_a_reader_and_a_writer_of_a_leader_whose_disk_fails_are_told_to_ask_again(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "own") as cluster:
        with cluster.client() as client:
            client.create_stream(STREAM, STREAM, replicas=3)
        publish_acked(cluster.nats_url, STREAM, [b"%d" % at for at in range(100)])
        leader = eventually(lambda: cluster.leader_of(STREAM), 30)
        assert leader is not None, "there is one"
        until, refusals = Event(), []
        with NatslogClient(leader.url, ClientOptions(retries=0, timeout_s=4)) as bound:
            stream_id = bound.position(STREAM)["id"]
            asks = (
                lambda: bound.fetch(STREAM, bound.position(STREAM)["high_watermark"]),
                lambda: bound.stream(STREAM),
                Appender(bound),
            )
            threads = [Thread(target=lambda one=one: refusals.extend(refusals_of(one, until))) for one in asks]
            with failing_syncs(leader, stream_id):
                for thread in threads:
                    thread.start()
                try:
                    eventually(
                        lambda: cluster.leader_of(STREAM) not in (None, leader),
                        TAKEN_OVER_WITHIN_S,
                        "another one leads",
                    )
                finally:
                    until.set()
                    for thread in threads:
                        thread.join()
        assert [error.message for error in refusals] == []
