"""How long a service waits for an ack when the leader of its stream changes, unplanned and planned.

The service is one plain NATS connection that publishes one message after another by requests, with 5 ms between, each
until it is acked.
Three brokers and all that measures share one machine, whose own pauses are part of each figure: `at rest` has the
longest waits of intervals in which nothing happens.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import nats
import numpy as np
from nats.errors import NoRespondersError

from natslog.client import NatslogClient
from natslog.nats_server import NatsServer
from tests.bench.cluster_sides import natslog_cluster_side
from tests.bench.pairs import Comparison, console
from tests.bench.sides import STREAM, SUBJECT
from tests.harness import BrokerProcess, eventually

_ANSWER_WITHIN_S, _PAUSE_S = 0.25, 0.005
_AFTERWARDS_S = 0.5
_REST_S = 2.0
_BOUNDS_MS = (10, 20, 50, 100, 200, 300, 500, 750, 1000, 1500, 2000, 2500, 3000, 5000)


class Service(threading.Thread):
    """Publishes until `stop`.

    Attributes:
        acked_at: when each message was acked. troubles: what the publisher saw instead of an ack, with its time.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.acked_at: list[float] = []
        self.troubles: list[tuple[float, str]] = []
        self.stop = False

    def run(self) -> None:
        asyncio.run(self._publish())

    async def _publish(self) -> None:
        connection = await nats.connect(self.url)
        number = 0
        while not self.stop:
            headers = {"Nats-Msg-Id": str(number)}
            try:
                answer = await connection.request(SUBJECT, b"v" * 128, timeout=_ANSWER_WITHIN_S, headers=headers)
                trouble = "" if "seq" in (body := json.loads(answer.data)) else str(body)
            except (NoRespondersError, TimeoutError) as error:
                trouble = type(error).__name__
            if trouble:
                self.troubles.append((time.monotonic(), trouble))
            else:
                self.acked_at.append(time.monotonic())
                number += 1
            await asyncio.sleep(_PAUSE_S)
        await connection.close()

    def longest_wait_s(self, since: int) -> float:
        """Between two acks, from the one before number `since` on."""
        times = self.acked_at[max(0, since - 1) :]
        return max(later - earlier for earlier, later in zip(times, times[1:], strict=False))


@dataclass
class Scene:
    """The cluster with its service."""

    server: NatsServer
    brokers: list[BrokerProcess]
    client: NatslogClient
    service: Service

    def leader(self) -> int:
        return int(self.client.position(STREAM)["leader"])

    def settle(self) -> None:
        """All replicas are in sync, and messages are acked."""
        eventually(lambda: len(self.client.position(STREAM)["isr"]) == 3, 60, "three replicas in sync")
        eventually(self.is_whole, 60, "all brokers have a session")
        acked = len(self.service.acked_at)
        eventually(lambda: len(self.service.acked_at) > acked + 20, 60, "messages are acked")

    def is_whole(self) -> bool:
        cluster = self.client.cluster()
        return bool(cluster["is_current"]) and all(one["alive"] for one in cluster["brokers"])

    def lead(self, *, metadata_too: bool) -> int:
        """Makes the leader of the stream lead the metadata, or another broker; returns the leader of the stream."""
        leader = self.leader()
        wanted = leader if metadata_too else leader % 3 + 1
        if self.client.cluster()["metadata_leader"] != wanted:
            self.client.transfer_metadata(wanted)
            eventually(lambda: self.client.cluster()["metadata_leader"] == wanted, 30, "the metadata is led there")
        self.settle()
        return leader

    def waited(self, deed: Callable[[], object]) -> float:
        """The longest wait for an ack from before the deed until it is done and acks come again."""
        before = len(self.service.acked_at)
        deed()
        acked = len(self.service.acked_at)
        eventually(lambda: len(self.service.acked_at) > acked + 3, 60, "publishing goes on")
        time.sleep(_AFTERWARDS_S)
        return self.service.longest_wait_s(before)


def failover(kills: int, transfers: int) -> list[Comparison]:
    """Args: kills: of each kind. transfers: planned changes of each kind."""
    found: list[Comparison] = []
    with _scene(3) as scene:
        for role, is_metadata_leader in (("", False), (", which also leads the metadata", True)):
            for how, bound_s, end in (
                ("killed", 2.5 if is_metadata_leader else 1.5, BrokerProcess.kill),
                ("silent", 3.0, _silence),
            ):
                once = partial(_ended, scene, end, metadata_too=is_metadata_leader)
                found.append(_measured(f"leader {how}{role}: wait for an ack, p99", bound_s, kills, once))
        found += [
            _planned("at rest", scene, transfers, _rested),
            _planned("leadership transferred", scene, transfers, _transferred),
            _planned("leader stopped and started", scene, transfers, _restarted),
        ]
    with _scene(4) as scene:  # one more than replicas, which takes over those of the broker that is drained
        found.append(_planned("leader drained", scene, transfers, _drained))
    return found


@contextmanager
def _scene(brokers: int) -> Iterator[Scene]:
    with natslog_cluster_side(count=brokers) as (server, processes):
        client = processes[0].client()
        client.servers = tuple(broker.url for broker in processes)
        service = Service(server.url)
        service.start()
        scene = Scene(server, processes, client, service)
        scene.settle()
        yield scene
        service.stop = True
        service.join(60)
        assert client.position(STREAM)["high_watermark"] == len(service.acked_at), "each message is stored once"


def _planned(how: str, scene: Scene, times: int, act: Callable[[Scene], float]) -> Comparison:
    troubles = len(scene.service.troubles)
    line = _measured(f"{how}: wait for an ack, p99", 0.05, times, partial(act, scene))
    line.notes["troubles"] = [text for _, text in scene.service.troubles[troubles:]]
    console.print(f"  {how}: {len(line.notes['troubles'])} requests were not acked: {line.notes['troubles'][:5]}")
    return line


def _measured(title: str, bound_s: float, times: int, once: Callable[[], float]) -> Comparison:
    line = Comparison(title, "s", bound_s, is_bound=True, quantile=0.99)
    for number in range(times):
        line.ours.append(once())
        console.print(f"  {title}: {number + 1} of {times}: {line.ours[-1]:.3f} s")
    line.notes["histogram_ms"] = histogram(line.ours)
    for bound, count in line.notes["histogram_ms"].items():
        console.print(f"  {bound:>8} ms {count:5} {'▏' if not count else '█' * max(1, round(60 * count / times))}")
    return line


def histogram(waits_s: list[float]) -> dict[str, int]:
    """How many waits are at most so long, and longer than the bound before; without empty ends."""
    places = np.searchsorted(_BOUNDS_MS, np.array(waits_s) * 1000)
    counts = np.bincount(places, minlength=len(_BOUNDS_MS) + 1)
    names = [*(f"≤ {bound}" for bound in _BOUNDS_MS), f"> {_BOUNDS_MS[-1]}"]
    return {names[at]: int(counts[at]) for at in range(int(places.min()), int(places.max()) + 1)}


def _ended(scene: Scene, end: Callable[[BrokerProcess], object], *, metadata_too: bool) -> float:
    leader = scene.lead(metadata_too=metadata_too)
    victim = scene.brokers[leader - 1]
    waited_s = scene.waited(lambda: _end(scene, victim, end))
    victim.kill()
    victim.start()
    return waited_s


def _end(scene: Scene, victim: BrokerProcess, end: Callable[[BrokerProcess], object]) -> None:
    end(victim)
    acked = len(scene.service.acked_at)
    eventually(lambda: len(scene.service.acked_at) > acked + 3, 60, "publishing goes on")


def _silence(broker: BrokerProcess) -> None:
    """Its connections stay open, and nothing comes from them: as of a machine that has vanished."""
    os.kill(broker.pid, signal.SIGSTOP)


def _rested(scene: Scene) -> float:
    scene.settle()
    return scene.waited(lambda: time.sleep(_REST_S))


def _transferred(scene: Scene) -> float:
    scene.settle()
    to = scene.leader() % 3 + 1

    def transfer() -> None:
        scene.client.transfer_stream(STREAM, to)
        eventually(lambda: scene.leader() == to, 30, "it leads")

    return scene.waited(transfer)


def _drained(scene: Scene) -> float:
    scene.settle()
    leader = scene.leader()

    def drain() -> None:
        scene.client.drain_broker(leader)
        eventually(lambda: leader not in scene.client.position(STREAM)["replica_ids"], 60, "no replica is left there")

    waited_s = scene.waited(drain)
    scene.client.drain_broker(leader, draining=False)
    return waited_s


def _restarted(scene: Scene) -> float:
    scene.settle()
    victim = scene.brokers[scene.leader() - 1]

    def restart() -> None:
        victim.terminate()
        victim.start()

    return scene.waited(restart)
