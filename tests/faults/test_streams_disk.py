"""The folder `streams` on a disk of its own: a broker on which only that disk is full hands its leaderships over."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from natslog.cli.health import problems_of
from tests.cluster_harness import Cluster
from tests.harness import all_values, eventually, publish_acked

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")

_DISK_MIB = 160


@pytest.mark.long
def test_disk_that_messages_have_filled_hands_leadership_over(tmp_path: Path) -> None:
    """It stays above `min_free_bytes`, by less than the next message needs."""
    cluster = Cluster(tmp_path)
    folder = cluster.brokers[0].folder / "streams"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(folder)], check=True)
    try:
        with cluster.start().client() as client:
            client.create_stream("orders", "orders", replicas=3, min_isr=2)
            small = cluster.brokers[0]
            client.transfer_stream("orders", small.number)
            assert cluster.leader_of("orders") is small
            for _ in range(300):
                answers = publish_acked(cluster.nats_url, "orders", [os.urandom(100_000)])
                if "error" in answers[0]:
                    break
            assert answers[0]["error"]["code"] == 503
            assert small.metrics()["natslog_disk_free_bytes"] >= 64 * 2**20, "it is above the limit"
            eventually(lambda: cluster.leader_of("orders") not in (None, small), 30, "another broker leads")

            def codes() -> list[str]:
                return [one["code"] for one in client.overview()["findings"]]

            assert "disk_full" in codes()
            assert small.metrics()["natslog_disk_full"] == 1
            assert (client.readiness(small.url) or {})["has_disk_room"] is False
            assert any("is full" in one for one in problems_of(client, client.cluster(), client.streams()))
            publish_acked(cluster.nats_url, "orders", [b"after"])
            client.purge("orders")
            publish_acked(cluster.nats_url, "orders", [b"more"])
            eventually(lambda: "disk_full" not in codes(), 60, "it has room again")
    finally:
        cluster.close()
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.long
def test_full_disk_of_streams_alone_hands_leadership_over(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    folders = [broker.folder / "streams" for broker in cluster.brokers]
    for folder in folders:
        folder.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs", str(folder)], check=True)
    try:
        with cluster.start().client() as client:
            client.create_stream("orders", "orders", replicas=3, min_isr=2)
            cluster.wait_in_sync()
            publish_acked(cluster.nats_url, "orders", [b"before"])
            full = cluster.leader_of("orders")
            assert full is not None
            ballast = full.folder / "streams" / "ballast"
            ballast.write_bytes(bytes((_DISK_MIB - 40) * 2**20))
            eventually(lambda: cluster.leader_of("orders") not in (None, full), 30, "another broker leads")
            publish_acked(cluster.nats_url, "orders", [b"after"])
            assert full.metrics()["natslog_disk_free_bytes"] < 64 * 2**20
            findings = client.overview()["findings"]
            assert any(str(full.number) in one["where"] for one in findings), findings
            ballast.unlink()
            eventually(lambda: cluster.leader_of("orders") is full, 60, "it leads again")
            assert all_values(client, "orders") == [b"before", b"after"]
    finally:
        cluster.close()
        for folder in folders:
            subprocess.run(["umount", "-l", str(folder)], check=True)
