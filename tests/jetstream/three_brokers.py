"""Three brokers that serve consumers, beside one NATS server, and what is done to the leader of a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nats.errors

from tests.chaos.network import NATS
from tests.cluster_harness import Cluster, ClusterBroker, ClusterOptions
from tests.harness import eventually, with_nats

RESUMES_WITHIN_S = 40.0
_UNAVAILABLE = 10008


@contextmanager
def three_brokers(folder: Path, *, network: bool = False) -> Iterator[Cluster]:
    """With leafnodes. `network`: each on a host of its own."""
    cluster = Cluster(folder, ClusterOptions(network=network, has_leafnodes=True))
    try:
        cluster.start()
        asked(cluster, "INFO")
        yield cluster
    finally:
        cluster.close()


@contextmanager
def in_background(work: Coroutine[Any, Any, None]) -> Iterator[None]:
    """It runs in an event loop of a thread of its own, and has ended afterwards; its error is raised.

    Faults stay in the main thread, because a broker ends with the thread that has started it.
    """
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(asyncio.run, work)
        yield
    running.result()


def asked(cluster: Cluster, call: str, body: Any = None) -> dict[str, Any]:
    """The answer to a request of the API, which is repeated until there is one that does not ask for that."""

    async def work(connection: Any) -> dict[str, Any] | None:
        payload = b"" if body is None else json.dumps(body).encode()
        try:
            found = dict(json.loads((await connection.request(f"$JS.API.{call}", payload, timeout=3)).data))
            return None if found.get("error", {}).get("err_code") == _UNAVAILABLE else found
        except (nats.errors.TimeoutError, nats.errors.NoRespondersError):  # there is no leader now
            return None

    return eventually(lambda: with_nats(cluster.nats_url, work), RESUMES_WITHIN_S, f"{call} is answered")


def create_stream(cluster: Cluster, name: str, **config: Any) -> None:
    found = asked(cluster, f"STREAM.CREATE.{name}", {"name": name, "num_replicas": 3} | config)
    assert "error" not in found, found
    cluster.wait_in_sync()


def create_consumer(cluster: Cluster, stream: str, name: str, **config: Any) -> None:
    wanted = {"durable_name": name, "ack_policy": "explicit"} | config
    found = asked(cluster, f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": wanted})
    assert "error" not in found, found


def consumer_info(cluster: Cluster, stream: str, name: str) -> dict[str, Any]:
    found = asked(cluster, f"CONSUMER.INFO.{stream}.{name}")
    assert "error" not in found, found
    return found


def leader_of(cluster: Cluster, stream: str) -> ClusterBroker:
    return eventually(lambda: cluster.leader_of(stream), RESUMES_WITHIN_S, f"{stream} has a leader")


def led_by_another(cluster: Cluster, stream: str, former: ClusterBroker) -> ClusterBroker:
    """The leader, as soon as it is another one."""

    def found() -> ClusterBroker | None:
        leader = cluster.leader_of(stream)
        return leader if leader is not former else None

    return eventually(found, RESUMES_WITHIN_S, f"{stream} has another leader")


def kill_leader(cluster: Cluster, stream: str, meanwhile: Callable[[], object] = lambda: None) -> None:
    """SIGKILL; another one leads, `meanwhile`, and it is started again."""
    former = leader_of(cluster, stream)
    former.kill()
    led_by_another(cluster, stream, former)
    meanwhile()
    former.start()
    cluster.wait_in_sync()


def pause_leader(cluster: Cluster, stream: str, meanwhile: Callable[[], object] = lambda: None) -> None:
    """SIGSTOP until another one leads, and `meanwhile`."""
    former = leader_of(cluster, stream)
    former.pause()
    try:
        led_by_another(cluster, stream, former)
        meanwhile()
    finally:
        former.resume()
    cluster.wait_in_sync()


def cut_off_leader(cluster: Cluster, stream: str, meanwhile: Callable[[], object], *, with_nats: bool) -> None:
    """Nothing arrives from and at the other brokers until another one leads, and `meanwhile`; with_nats: from and at
    the NATS server neither.
    """
    former, network = leader_of(cluster, stream), cluster.network
    assert network is not None, "they have hosts"
    others = [broker.number for broker in cluster.brokers if broker is not former]
    network.separate(former.number, [*others, NATS] if with_nats else others)
    try:
        led_by_another_of(cluster, others, stream, former)
        meanwhile()
    finally:
        network.heal()
    cluster.wait_in_sync()


def led_by_another_of(cluster: Cluster, others: list[int], stream: str, former: ClusterBroker) -> None:
    """As these brokers state it."""

    def found() -> bool:
        shown = [cluster.broker(number).json(f"/v1/streams/{stream}") for number in others]
        return any(one is not None and one["leader"] not in (None, former.number) for one in shown)

    eventually(found, RESUMES_WITHIN_S, f"{stream} has another leader")
