"""The cluster secret is rotated on three running brokers, while a publisher waits for acks: no link is lost."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from natslog.client.publisher import Publisher, Rows
from tests.cluster_harness import Cluster, running_cluster
from tests.harness import all_values, eventually, write_secret

_LOADED = re.compile(r"cluster_secret_file was changed: .*")


class Files:
    """A secret file for each broker."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._paths = {broker.number: folder / f"secret-{broker.number}" for broker in cluster.brokers}

    def write(self, *lines: str) -> None:
        """On one broker after another; returns when each uses them."""
        for broker in self._cluster.brokers:
            before = len(_LOADED.findall(broker.output()))
            write_secret(self._paths[broker.number], "\n".join(lines) + "\n")
            eventually(
                lambda broker=broker, before=before: len(_LOADED.findall(broker.output())) > before,
                30,
                f"broker {broker.number} uses the changed secrets",
            )

    def use(self, line: str) -> None:
        for broker in self._cluster.brokers:
            broker.settings["cluster_secret_file"] = write_secret(self._paths[broker.number], line + "\n")


@contextmanager
def published_all_the_time(url: str, sent: list[bytes]) -> Iterator[None]:
    """Publishes with acks until the end; `sent` is what was acked. Raises what publishing raised."""
    stop, errors = threading.Event(), list[BaseException]()

    def publish() -> None:
        try:
            with Publisher(url, ack_timeout_s=10) as publisher:
                while not stop.wait(0.02):
                    values = [b"%d" % (len(sent) + at) for at in range(20)]
                    publisher.publish(Rows(pa.array(["orders"] * 20), pa.array(values)), "stored")
                    sent.extend(values)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not errors, errors


def _lost_links(cluster: Cluster) -> list[str]:
    return [
        line for broker in cluster.brokers for line in re.findall(r".*the link to broker \d is down", broker.output())
    ]


@pytest.mark.long
def test_secret_is_rotated_without_a_restart_while_messages_are_acked(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "cluster")
    files = Files(cluster, tmp_path)
    old, new = secrets.token_hex(32), secrets.token_hex(32)
    files.use(old)
    for broker in cluster.brokers:
        broker.settings["log_level"] = "debug"
    sent: list[bytes] = []
    try:
        cluster.start()
        cluster.client().create_stream("orders", "orders", replicas=3, min_isr=2)
        cluster.wait_in_sync()
        before, pids = _lost_links(cluster), [broker.pid for broker in cluster.brokers]
        with published_all_the_time(cluster.nats.url, sent):
            eventually(lambda: len(sent) > 100, 30, "messages are acked")
            for lines in ((old, new), (new, old), (new,)):
                files.write(*lines)
                count = len(sent)
                eventually(lambda count=count: len(sent) > count + 200, 30, f"messages are acked, {len(lines)} secrets")
        assert _lost_links(cluster) == before, "no link was lost"
        assert [broker.pid for broker in cluster.brokers] == pids
        assert all_values(cluster.client(), "orders") == sent
        assert all("another cluster secret" not in broker.output() for broker in cluster.brokers)
        # A new link needs the new secret: a broker that has it rejoins, and one with the old one does not.
        again = cluster.brokers[2]
        again.terminate()
        again.spawn()
        cluster.wait_in_sync()
        write_secret(tmp_path / "old", old)
        again.settings["cluster_secret_file"] = tmp_path / "old"
        again.terminate()
        again.spawn()
        eventually(lambda: "another cluster secret" in again.output(), 30, "the old secret is refused")
        assert not again.ready()
    finally:
        cluster.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("short\n", 0o600, "at least 16 characters"),
        pytest.param("x" * 40, 0o644, "chmod 600", marks=pytest.mark.long),
        pytest.param(None, 0o600, "cannot read", marks=pytest.mark.long),
    ],
)
def test_changed_file_that_cannot_be_used_changes_nothing_and_is_logged_once(
    tmp_path: Path, text: str | None, mode: int, said: str
) -> None:
    with running_cluster(tmp_path / "cluster", brokers=2) as cluster:
        path = tmp_path / "cluster" / "secret"
        good = path.read_text()
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
            path.chmod(mode)
        for broker in cluster.brokers:
            eventually(lambda broker=broker: said in broker.output(), 30, said)
        again = cluster.brokers[1]
        assert cluster.in_sync()
        path.unlink(missing_ok=True)
        write_secret(path, good)
        again.terminate()
        again.spawn()
        cluster.wait_in_sync()
        for broker in cluster.brokers:
            assert broker.output().count("the changed cluster_secret_file is not used") == 1
            assert good.strip() not in broker.output()
