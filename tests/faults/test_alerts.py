"""Each alert of `deploy/prometheus/alerts.yml` fires by a real fault, in a real Prometheus that scrapes a real cluster;
without one, none does. The dashboard has data, and docs/OPERATIONS.md lists what the brokers expose.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js.api import ConsumerConfig

from natslog.security.certificates import make_certificates
from tests.chaos import damage
from tests.chaos.network import missing_for_network
from tests.cluster_harness import Cluster, ClusterBroker, ClusterOptions
from tests.harness import BrokerProcess, eventually, with_nats
from tests.prometheus import Prometheus, panels, quick_rules

pytestmark = [
    pytest.mark.long,
    pytest.mark.alone,  # a broker that waits for a core is late, as one with a slow disk is
    pytest.mark.timeout(240),
    pytest.mark.skipif(missing_for_network() is not None, reason=str(missing_for_network())),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus (Debian: apt-get install prometheus)"),
]

OPERATIONS = Path(__file__).parents[2] / "docs" / "OPERATIONS.md"
BEHIND_S = 4
STORE_BYTES = 24 * 2**20
SETTINGS = {
    "segment_bytes": "64KiB",
    "retention_interval": "500ms",
    "min_free_bytes": "4MiB",
    "max_store_bytes": str(STORE_BYTES),
    "scrub_max_bytes_per_s": "64MiB",
}
WITHOUT_DATA = {"Firing alerts", "Messages refused", "Certificates"}
"""Panels that have data only if something is wrong, or with TLS."""


async def _ignore(error: Exception) -> None:
    """The publisher reconnects by itself when the NATS server was stopped."""


class Load:
    """Publishes to three streams without a pause, and consumes one of them, until `stop`."""

    def __init__(self, cluster: Cluster) -> None:
        self._url, self._client = cluster.nats_url, cluster.client()
        self._consumer = self._client.consume("orders", cursor="reader", checkpoint_interval_s=0.5)
        self._has_ended = threading.Event()
        self._threads = [threading.Thread(target=target) for target in (self._publish, self._consume)]
        for thread in self._threads:
            thread.start()

    def _publish(self) -> None:
        asyncio.run(self._publishing())

    async def _publishing(self) -> None:
        connection = await nats.connect(self._url, max_reconnect_attempts=-1, reconnect_time_wait=0.2, error_cb=_ignore)
        inbox = connection.new_inbox()
        while not self._has_ended.is_set():
            for subject in ("orders", "strict", "alone"):
                with suppress(nats.errors.Error):  # while the NATS server is stopped
                    await connection.publish(subject, b"x" * 1000, reply=inbox)
            await asyncio.sleep(0.02)
        await connection.close()

    def _consume(self) -> None:
        with self._consumer as consumer:
            for _ in consumer:
                pass

    def stop_consumer(self) -> None:
        self._consumer.close()
        self._threads[1].join()

    def stop(self) -> None:
        self._has_ended.set()
        self.stop_consumer()
        self._threads[0].join()
        self._client.close()


class Watched:
    """A cluster under load, the Prometheus that watches it, and what is started beside it."""

    def __init__(self, cluster: Cluster, prometheus: Prometheus, load: Load, folder: Path) -> None:
        self.cluster, self.prometheus, self.load, self.folder = cluster, prometheus, load, folder
        self.started_s = time.time()

    def found(self, alert: str, **labels: str) -> dict[str, Any] | None:
        wanted = labels | {"alertname": alert}
        return next((one for one in self.prometheus.firing() if wanted.items() <= one["labels"].items()), None)

    @contextmanager
    def fires(self, *alerts: str, **labels: str) -> Iterator[None]:
        """What the block breaks lets each alert fire, with these labels; none of them fires before."""
        for alert in alerts:
            assert self.found(alert, **labels) is None, f"{alert} fires already"
        yield
        for alert in alerts:
            self.wait(alert, **labels)

    def wait(self, alert: str, **labels: str) -> None:
        found = eventually(lambda: self.found(alert, **labels), 30, f"{alert} fires: {labels}", every_s=0.2)
        shown = found["annotations"]["summary"] + found["annotations"]["description"]
        assert "<no value>" not in shown, shown
        assert "{{" not in shown, shown

    def wait_until_over(self, alert: str, **labels: str) -> None:
        eventually(lambda: self.found(alert, **labels) is None, 30, f"{alert} ends", every_s=0.2)

    def other_than(self, *brokers: ClusterBroker | None) -> ClusterBroker:
        return next(one for one in self.cluster.brokers if one not in brokers)


def instance(broker: BrokerProcess) -> str:
    return broker.url.partition("//")[2]


@contextmanager
def hanging(broker: ClusterBroker) -> Iterator[None]:
    """No write to its disk returns. That includes those of the tests: they would wait without an end."""
    assert broker.disk is not None
    broker.disk.freeze()
    try:
        yield
    finally:
        broker.disk.thaw()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("alerts")
    make_certificates(folder / "tls", ["127.0.0.1"], [], days=7)
    options = ClusterOptions(
        disks=True,
        disk_bytes=96 * 2**20,
        network=True,
        has_leafnodes=True,
        clocks=(3,),
        settings=SETTINGS,
    )
    cluster = Cluster(folder / "cluster", options)
    with ExitStack() as steps:
        steps.callback(cluster.close)
        cluster.start()
        with cluster.client() as client:
            for name, settings in {
                "orders": {"replicas": 3},
                "strict": {"replicas": 3},
                "alone": {"replicas": 1},
                "bulk": {"replicas": 1},
                "jobs": {"replicas": 3},
            }.items():
                client.create_stream(name, name, **settings)
        cluster.wait_in_sync()
        eventually(lambda: with_nats(cluster.nats_url, _adds_consumer), 30, "the JetStream API is served")
        load = Load(cluster)
        steps.callback(load.stop)
        eventually(
            lambda: (cluster.brokers[0].high_watermark("orders") or 0) > 200, 40, "code is compiled, files exist"
        )
        prometheus = Prometheus(folder / "prometheus", quick_rules(BEHIND_S), folder / "tls" / "ca.pem")
        steps.callback(prometheus.stop)
        prometheus.scrape("natslog", "main", [instance(broker) for broker in cluster.brokers])
        yield Watched(cluster, prometheus, load, folder)


def _is_warm(cluster: Cluster) -> bool:
    """The first commits take longer, of which one alone is more than one in 100 of a few."""
    counts = [cluster.broker(number).high_watermark(name) or 0 for number in (1, 2, 3) for name in ("orders", "strict")]
    return min(counts) > 150


async def _adds_consumer(connection: Any) -> bool:
    """Whether the JetStream API is served already."""
    with suppress(nats.errors.Error):
        await connection.jetstream().add_consumer("jobs", ConsumerConfig(durable_name="worker"))
        return True
    return False


def test_each_alert_fires_by_a_real_fault_and_none_without_one(watched: Watched) -> None:
    """One test, as the faults share a cluster: each step but the last one heals what it broke."""
    healthy_cluster_under_load(watched)
    disk_that_hangs(watched)
    broker_that_reaches_no_other(watched)
    damaged_segment(watched)
    consumer_that_has_stopped_and_clock_that_is_wrong(watched)
    brokers_that_are_partitioned_and_a_leafnode_connection_that_is_cut(watched)
    nats_server_that_is_stopped(watched)
    disk_that_is_full_and_store_that_is_full(watched)
    broker_without_kernels(watched)
    second_cluster_in_the_account_with_a_certificate_that_expires(watched)
    brokers_that_are_killed(watched)
    assert watched.prometheus.ever_fired() == watched.prometheus.rules()
    every_panel_has_had_data(watched)
    docs_list_every_metric_with_its_labels_and_no_other(watched)


def healthy_cluster_under_load(watched: Watched) -> None:
    prometheus = watched.prometheus
    rounds = 'min(count_over_time(natslog_ready{cluster="main"}[1m]))'
    eventually(lambda: [one for one in prometheus.query(rounds) if one[1] >= 6], 40, "six rounds", every_s=0.2)
    assert prometheus.ever_fired() == set()
    assert prometheus.query("sum(increase(natslog_messages_committed_total[5s]))")[0][1] > 0
    empty = {title for title, expression in panels() if not has_data(prometheus, expression)}
    assert empty == WITHOUT_DATA


def has_data(prometheus: Prometheus, expression: str) -> bool:
    return any(not math.isnan(value) for _, value in prometheus.query(expression))


def disk_that_hangs(watched: Watched) -> None:
    """Of a follower: its leaders wait for it, and then it is out of sync. Its event loop waits in a write, or its pulse
    does only: one of two alerts fires, and its log states the cause.
    """
    cluster = watched.cluster
    broker = watched.other_than(cluster.leader_of("orders"), cluster.metadata_leader())
    of_broker = [("NatslogBrokerDown", "broker_down"), ("NatslogBrokerNotReady", "broker_not_ready")]
    with (
        ExitStack() as steps,
        watched.fires("NatslogCommitsSlow", code="commits_slow"),
        watched.fires("NatslogStreamUnderReplicated", cluster="main", code="stream_under_replicated"),
    ):
        steps.enter_context(hanging(broker))
        eventually(
            lambda: any(watched.found(alert, instance=instance(broker), code=code) for alert, code in of_broker),
            30,
            "an alert of the broker fires",
            every_s=0.2,
        )
        assert "the disk does not complete writes" in broker.log_path.read_text()
    cluster.wait_in_sync()
    for alert, _ in of_broker:
        watched.wait_until_over(alert)


def broker_that_reaches_no_other(watched: Watched) -> None:
    cluster = watched.cluster
    broker = watched.other_than(cluster.metadata_leader())
    assert cluster.network is not None
    with watched.fires("NatslogBrokerNotReady", instance=instance(broker), code="broker_not_ready"):
        cluster.network.separate(broker.number, [one.number for one in cluster.brokers if one is not broker])
    cluster.network.heal()
    cluster.wait_in_sync()
    watched.wait_until_over("NatslogBrokerNotReady")


def damaged_segment(watched: Watched) -> None:
    cluster = watched.cluster
    broker = cluster.leader_of("orders")
    assert broker is not None
    stream = cluster.stream("orders")
    assert stream is not None
    sealed = eventually(lambda: damage.files_of_kind(broker, stream["id"], "sealed")[1:], what="sealed segments")
    with watched.fires("NatslogDamage", instance=instance(broker), stream="orders", code="stream_damaged"):
        damage.flip_bit(sealed[0], random.Random(1))
        with cluster.client() as client:
            client.scrub("orders", begin=True)


def consumer_that_has_stopped_and_clock_that_is_wrong(watched: Watched) -> None:
    cluster = watched.cluster
    with (
        watched.fires("NatslogConsumerBehind", consumer="reader", stream="orders", code="consumer_behind"),
        watched.fires("NatslogClockDiffers", broker="3", code="broker_clock"),
    ):
        watched.load.stop_consumer()
        cluster.set_clock(3, 100)
    cluster.set_clock(3, 0)
    watched.wait_until_over("NatslogClockDiffers")
    with cluster.client() as client:
        client.delete_cursor("reader", "orders")
    watched.wait_until_over("NatslogConsumerBehind")


def brokers_that_are_partitioned_and_a_leafnode_connection_that_is_cut(watched: Watched) -> None:
    cluster = watched.cluster
    leader = cluster.metadata_leader()
    one = watched.other_than(leader)
    other = watched.other_than(leader, one)
    assert leader is not None
    assert cluster.network is not None
    with (
        watched.fires("NatslogBrokersApart", instance=instance(one), code="broker_down"),
        watched.fires("NatslogBrokersApart", instance=instance(other)),
        watched.fires("NatslogLeafDown", instance=instance(leader), code="nats_leaf_down"),
    ):
        cluster.network.separate(one.number, [other.number])
        port = cluster.leaf_url.rpartition(":")[2]
        cluster.network.refuse(leader.number, int(port))
    assert watched.found("NatslogBrokerDown") is None
    cluster.network.heal()
    cluster.wait_in_sync()
    watched.wait_until_over("NatslogLeafDown")


def nats_server_that_is_stopped(watched: Watched) -> None:
    cluster = watched.cluster
    with watched.fires("NatslogNatsDisconnected", code="broker_not_ready"):
        cluster.nats.stop()
    for broker in cluster.brokers:
        watched.wait("NatslogNatsDisconnected", instance=instance(broker))
    assert watched.found("NatslogLeafDown") is None, "one cause has one alert"
    assert watched.found("NatslogBrokerNotReady") is None
    cluster.nats.start()
    cluster.wait_ready()
    watched.wait("NatslogNatsConnectionLost", code="nats_connection_lost")


def disk_that_is_full_and_store_that_is_full(watched: Watched) -> None:
    cluster = watched.cluster
    (holder,) = cluster.replicas_of("bulk")
    broker = watched.other_than(holder)
    assert broker.disk is not None
    with (
        watched.fires("NatslogDiskFull", instance=instance(broker), code="disk_full"),
        watched.fires("NatslogDiskFullSoon", instance=instance(broker), code="disk_full_soon"),
        watched.fires("NatslogStoreFullSoon", instance=instance(holder), code="store_full_soon"),
        watched.fires("NatslogMessagesRefused", stream="bulk", reason="storage_full", code="messages_refused"),
    ):
        broker.disk.fill(2**20)
        with_nats(cluster.nats_url, _fill_store)
    broker.disk.free()
    with cluster.client() as client:
        client.purge("bulk")  # files of a deleted stream take their room for ten minutes more
        client.delete_stream("bulk")
    watched.wait_until_over("NatslogDiskFull")
    watched.wait_until_over("NatslogStoreFullSoon")
    cluster.wait_in_sync()


def broker_without_kernels(watched: Watched) -> None:
    cluster = watched.cluster
    broker = watched.other_than(cluster.metadata_leader())
    with watched.fires("NatslogNotCompiled", instance=instance(broker), code="broker_not_compiled"):
        broker.terminate()
        broker.environment["NATSLOG_KERNELS_FILE"] = ""
        broker.start()
    broker.terminate()
    del broker.environment["NATSLOG_KERNELS_FILE"]
    broker.start()
    watched.wait_until_over("NatslogNotCompiled")
    cluster.wait_in_sync()


async def _fill_store(connection: Any) -> None:
    while "error" not in json.loads((await connection.request("bulk", bytes(500_000), timeout=30)).data):
        pass


def brokers_that_are_killed(watched: Watched) -> None:
    """The last step: one of them is removed from the cluster as after the loss of its disk, and not added again."""
    cluster = watched.cluster
    (broker,) = cluster.replicas_of("alone")
    with cluster.client() as client:
        client.edit_stream("strict", min_isr=3)
    with (
        watched.fires("NatslogBrokerDown", instance=instance(broker), code="broker_down"),
        watched.fires("NatslogStreamUnavailable", cluster="main", code="stream_unavailable"),
        watched.fires("NatslogStreamRefusesWrites", cluster="main", code="stream_refuses_writes"),
    ):
        broker.kill()
    assert watched.found("NatslogBrokersApart") is None
    assert watched.found("NatslogMetadataUnavailable") is None
    other = watched.other_than(broker)
    with watched.fires("NatslogMetadataUnavailable", cluster="main", code="metadata_unavailable"):
        other.kill()
    other.spawn()
    watched.wait_until_over("NatslogMetadataUnavailable")
    with watched.fires("NatslogBrokerNotVoter", cluster="main", code="broker_not_voter"):
        cluster.operate("DELETE", f"/v1/cluster/brokers/{broker.number}?force=true")


def second_cluster_in_the_account_with_a_certificate_that_expires(watched: Watched) -> None:
    """One of the two clusters has the conflict: the second one, if the first one answers in time."""
    tls, nats_url = watched.folder / "tls", watched.cluster.nats_url
    files = {"tls_cert_file": tls / "broker.pem", "tls_key_file": tls / "broker-key.pem", "tls_ca_file": tls / "ca.pem"}
    second = BrokerProcess(watched.folder / "second", nats_url, **{name: str(path) for name, path in files.items()})
    try:
        second.start()
        with (
            watched.fires("NatslogJetStreamConflict", code="jetstream_conflict"),
            watched.fires("NatslogCertificateExpires", instance=instance(second), code="certificate_expires"),
        ):
            watched.prometheus.scrape("natslog-tls", "second", [instance(second)])
    finally:
        second.kill()


def every_panel_has_had_data(watched: Watched) -> None:
    for title, expression in panels():
        if title in WITHOUT_DATA:
            assert watched.prometheus.values_since(expression, watched.started_s), title


def docs_list_every_metric_with_its_labels_and_no_other(watched: Watched) -> None:
    exposed: dict[str, set[str]] = {}
    for labels in watched.prometheus.series():
        name = re.sub(r"(commit_latency_seconds)_(bucket|count|sum)$", r"\1", labels["__name__"])
        exposed.setdefault(name, set()).update(labels.keys() - {"__name__", "job", "instance", "cluster", "le"})
    assert documented() == exposed


def documented() -> dict[str, set[str]]:
    cells = re.findall(r"^\| (`(?:natslog|process)_[^|]+`) \| [^|]+ \| [^|]+ \|$", OPERATIONS.read_text(), re.MULTILINE)
    found = [name for cell in cells for name in re.findall(r"`(\w+)(?:\{([\w,]+)\})?`", cell)]
    return {name: set(filter(None, labels.split(","))) for name, labels in found}
