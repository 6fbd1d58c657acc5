"""Power loss by a real kernel: ext4 on a loop device is shut down without flushing, killed, and mounted again.

What was not fsynced is gone, names of files included. Nothing that was acked may be. The last test takes the fsync out
of a broker and shows that this file would notice.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import pyarrow as pa
import pytest

from natslog.client.publisher import Publisher, Rows
from natslog.errors import NatslogError
from tests.disks import Disk
from tests.harness import BrokerProcess, all_values, eventually, running

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a loop device needs root")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.close()


class AckedPublisher(threading.Thread):
    """Publishes numbers one small batch after another and remembers which were acked."""

    def __init__(self, url: str, first: int) -> None:
        super().__init__(daemon=True)
        self.url, self.first = url, first
        self.acked: list[bytes] = []
        self.stop = False

    def run(self) -> None:
        number = self.first
        with Publisher(self.url, ack_timeout_s=2) as publisher, suppress(NatslogError):  # the power goes in the middle
            for count in cycle((1, 1, 1, 1, 50)):  # most commits are of one message
                if self.stop:
                    break
                values = [b"%d" % at for at in range(number, number + count)]
                publisher.publish(Rows(pa.array(["orders"] * count), pa.array(values)), "stored")
                self.acked += values
                number += count


def lose_power_while_publishing(disk: Disk, url: str, broker: BrokerProcess, first: int) -> list[bytes]:
    """Returns what was acked before the power went."""
    publisher = AckedPublisher(url, first)
    publisher.start()
    eventually(lambda: len(publisher.acked) > 500, what="500 acked messages")
    broker.halt()
    disk.cut_power()
    publisher.stop = True
    broker.kill()
    publisher.join(30)
    disk.unmount()
    disk.mount()
    return publisher.acked


@pytest.mark.parametrize("cycles", [1, pytest.param(3, marks=pytest.mark.long)])
def test_power_loss_while_publishing_loses_nothing_acked(disk: Disk, tmp_path: Path, cycles: int) -> None:
    with running(tmp_path / "own", segment_bytes="16KiB", retention_interval="1s") as (server, broker):
        broker.kill()
        broker.folder = disk.mounted / "data"
        broker.start()
        client = broker.client()
        client.create_stream("orders", "orders")
        acked: list[bytes] = []
        for cycle in range(cycles):
            acked += lose_power_while_publishing(disk, server.url, broker, 1_000_000 * cycle)
            broker.start()
            stored = set(all_values(client, "orders"))
            lost = [value for value in acked if value not in stored]
            assert not lost, f"cycle {cycle}: {len(lost)} of {len(acked)} acked messages lost, the first is {lost[0]!r}"
        broker.kill()


WITHOUT_FSYNC = """
import os
os.fsync = os.fdatasync = lambda fd: None
from natslog.cli import main
main()
"""


class LazyBroker(BrokerProcess):
    """A broker whose fsync does nothing, as JetStream's does by default for two minutes."""

    def command(self) -> list[str]:
        interpreter, _, _, *arguments = super().command()
        return [interpreter, "-c", WITHOUT_FSYNC, *arguments]


@pytest.mark.long
def test_without_fsync_the_same_test_finds_acked_messages_lost(disk: Disk, tmp_path: Path) -> None:
    with running(tmp_path / "own") as (server, broker):
        broker.kill()
        lazy = LazyBroker(disk.mounted / "data", server.url)
        lazy.log_path = tmp_path / "lazy.log"
        lazy.start()
        lazy.client().create_stream("orders", "orders")
        os.sync()  # the stream itself is there afterwards; what is published from now on is not synced by anyone
        acked = lose_power_while_publishing(disk, server.url, lazy, 0)
        lazy.start()
        stored = set(all_values(lazy.client(), "orders"))
        lazy.kill()
        assert [value for value in acked if value not in stored], "taking the fsync out was not noticed"
