"""Disks of a cluster that are full to the last byte, on one broker, on two, on all, until they are enlarged or files
are removed from them: nothing that was acked is lost, no broker stops, and all replicas are in sync again unaided; also
of streams whose messages are removed.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import nats
import pytest

from natslog.client import NatslogClient
from natslog.errors import NatslogError
from tests.chaos.checkers import check_files, served_copy
from tests.cluster_harness import Cluster, ClusterBroker, running_cluster
from tests.disks import GrowingDisk
from tests.harness import eventually, publish_acked

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root"),
]

SETTINGS = {"segment_bytes": "256KiB", "min_free_bytes": "1", "retention_interval": "500ms"}
DISK_BYTES = 48 * 1024 * 1024
SUBJECTS, KEPT = 10, 2
PADDING = b"." * 1000


class Written:
    """What was acked: `orders` in the order of the acks, and of each subject of `newest` offset → value."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.orders: list[bytes] = []
        self.newest: defaultdict[int, dict[int, bytes]] = defaultdict(dict)
        self.refusals: list[dict[str, Any]] = []
        self.removed: set[int] = set()
        self._count = 0

    def publish(self, count: int) -> int:
        """So many messages to each stream. Returns how many were acked."""
        values = [b"%d" % at + PADDING for at in range(self._count, self._count + count)]
        self._count += count
        stored = self._publish("orders.x", values)
        self.orders += [value for _, value in stored]
        acked = len(stored)
        for subject in range(SUBJECTS):
            stored = self._publish(f"newest.{subject}", values[subject::SUBJECTS])
            self.newest[subject] |= dict(stored)
            acked += len(stored)
        return acked

    def _publish(self, subject: str, values: list[bytes]) -> list[tuple[int, bytes]]:
        """Offset and value of those that were acked. While the leader changes, there may be none."""
        try:
            acks = publish_acked(self.cluster.nats_url, subject, values)
        except (nats.errors.Error, TimeoutError):
            return []
        self.refusals += [ack["error"] for ack in acks if "error" in ack]
        return [(ack["offset"], value) for ack, value in zip(acks, values, strict=True) if "error" not in ack]

    def kept(self, subject: int) -> int:
        """The newest message of this subject that was not removed."""
        return max(set(self.newest[subject]) - self.removed)

    def remove(self, client: NatslogClient, subject: int) -> NatslogError | None:
        """The newest message of a subject. Returns why it was refused."""
        offset = self.kept(subject)
        try:
            client.delete_message("newest", offset)
        except NatslogError as error:
            return error
        self.removed.add(offset)
        return None

    def check(self, broker: ClusterBroker) -> None:
        """This replica has all that was acked, and hides all that was removed. What was refused may be stored."""
        served = iter(served_copy(broker, "orders").values())
        assert all(value in served for value in self.orders), f"broker {broker.number}: in order, and nothing lost"
        copy = served_copy(broker, "newest")
        found = dict(zip(copy.offsets(), copy.values(), strict=True))
        assert not self.removed & found.keys()
        for subject, messages in self.newest.items():
            newest = sorted(messages)[-KEPT:]
            for offset in set(newest) - self.removed:
                assert found.get(offset, messages[offset]) == messages[offset]
            assert sum(offset in found for offset in messages) <= KEPT, f"newest.{subject}"


def fill(broker: ClusterBroker) -> None:
    """To the last byte: a process of root may also use what a file system keeps for it."""
    assert broker.disk is not None
    with open(broker.disk.mounted / "filler", "ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(65536))
    with open(broker.disk.mounted / "filler", "ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(512))


def enlarge(broker: ClusterBroker) -> None:
    """What fills it stays."""
    assert isinstance(broker.disk, GrowingDisk)
    broker.disk.enlarge(2 * DISK_BYTES)
    assert (broker.disk.mounted / "filler").stat().st_size > DISK_BYTES // 3


def free(broker: ClusterBroker) -> None:
    assert broker.disk is not None
    broker.disk.free()


@pytest.mark.parametrize("make_room", [enlarge, free])
@pytest.mark.parametrize("full", [1, 2, 3])
def test_full_disks_lose_nothing_and_all_goes_on_when_there_is_room(
    tmp_path: Path, full: int, make_room: Callable[[ClusterBroker], None]
) -> None:
    options = {"disks": True, "disks_grow": make_room is enlarge, "disk_bytes": DISK_BYTES, "settings": SETTINGS}
    with running_cluster(tmp_path / "own", **options) as cluster:
        client, written = cluster.client(timeout_s=5, retries=0, patience_s=0), Written(cluster)
        common = {"replicas": 3, "min_isr": 2, "dedupe_window": 0}
        client.create_stream("orders", "orders.>", **common)
        client.create_stream("newest", "newest.>", max_messages_per_subject=KEPT, **common)
        cluster.wait_in_sync()
        written.publish(1500)  # so many hidden messages that segments are rewritten
        assert written.refusals == []
        assert written.remove(client, 0) is None
        leader = cluster.leader_of("newest")
        assert leader is not None
        brokers = [leader, *(one for one in cluster.brokers if one is not leader)][:full]
        for broker in brokers:
            fill(broker)
        while_full(cluster, client, written, goes_on=full == 1)
        pids = [broker.pid for broker in cluster.brokers]
        for broker in brokers:
            make_room(broker)
        after(cluster, client, written, pids)


def while_full(cluster: Cluster, client: NatslogClient, written: Written, *, goes_on: bool) -> None:
    """Messages are acked where two replicas have room, and else refused with the reason; reads continue."""
    if goes_on:
        eventually(lambda: written.publish(10) == 20, 60, "messages are acked")
        eventually(lambda: written.remove(client, 1) is None, 60, "a message is removed")
    else:
        eventually(lambda: written.publish(10) == 0, 60, "messages are refused")
        codes = {(one["code"], one.get("err_code")) for one in written.refusals}
        assert {code for code, _ in codes} == {503}, codes
        refused = eventually(lambda: written.remove(client, 1), 60, "a removal is refused")
        assert refused.retriable, refused
    for broker in cluster.brokers:
        assert broker.is_up, broker.output()[-2000:]
    leader = eventually(lambda: cluster.leader_of("orders"))
    written.check(leader)


def after(cluster: Cluster, client: NatslogClient, written: Written, pids: list[int]) -> None:
    """All is in sync again, without a restart, and goes on; files are rewritten."""
    cluster.wait_in_sync(90)
    assert [broker.pid for broker in cluster.brokers] == pids
    eventually(lambda: written.publish(10) == 20, 30, "messages are acked")
    eventually(lambda: written.remove(client, 2) is None, 30, "a message is removed")
    written.publish(1500)
    for broker in cluster.brokers:
        eventually(lambda broker=broker: is_rewritten(broker, written), 60, "segments are rewritten", every_s=0.5)
    for name in ("orders", "newest"):
        cluster.wait_replicated(name)
    for broker in cluster.brokers:
        assert broker.exit_code is None, broker.output()[-2000:]
        eventually(lambda broker=broker: shows_all(written, broker), 30, "removals reach every replica")
    for broker in cluster.brokers:
        broker.terminate()
        assert check_files(broker.folder, broker.number, set()) == []


def is_rewritten(broker: ClusterBroker, written: Written) -> bool:
    """Hidden messages are dropped when there are a thousand of them, so more are published until then."""
    written.publish(100)
    size_bytes = 0
    for path in broker.folder.glob("streams/newest.*/0*"):
        with suppress(FileNotFoundError):  # it has just been replaced
            size_bytes += path.stat().st_size
    return size_bytes < 1_000_000


def shows_all(written: Written, broker: ClusterBroker) -> bool:
    written.check(broker)
    return True
