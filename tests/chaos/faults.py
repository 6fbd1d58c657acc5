"""Faults of processes and of the network; and all kinds of faults, with what each of them needs."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable

from tests.chaos import disk_faults
from tests.chaos.network import NATS
from tests.chaos.scene import Fault, Kind, Scene
from tests.cluster_harness import ClusterBroker

_STAYS_DOWN_S = 4.0

# ---- processes ----


def kill_one(scene: Scene) -> Fault:
    broker, place = scene.pick()
    broker.kill()
    return Fault(place, True, lambda: scene.start(broker), scene.hold(0.0, 8.0), hit=(broker.number,))


def pause_and_kill(scene: Scene) -> Fault:
    """A minority, one soon after the other: each is paused or killed, or paused first and killed then."""
    brokers = scene.some()
    if len(brokers) == 1 and len(scene.cluster.brokers) > 3:
        brokers.append(scene.chance.choice([one for one in scene.cluster.brokers if one is not brokers[0]]))
    done, broken_s = [], []
    for broker in brokers:
        how = scene.chance.choice(("paused", "killed", "paused and killed"))
        broken_s.append(time.monotonic())
        if how != "killed":
            broker.pause()
            time.sleep(scene.hold(0.0, 4.0))
        if how != "paused":
            broker.kill()
        done.append(f"{scene.name_of(broker)} {how}")

    def heal() -> None:
        for broker in scene.chance.sample(brokers, len(brokers)):
            if broker.is_paused:
                broker.resume()
            time.sleep(scene.hold(0.0, 2.0))
        scene.start(*brokers)

    hit = [broker.number for broker in brokers]
    return Fault("; ".join(done), True, heal, scene.hold(1.0, 8.0), hit=hit, broken_s=broken_s)


def kill_both_leaders(scene: Scene) -> Fault:
    (leader, _), (metadata, _) = scene.pick("leader"), scene.pick("metadata leader")
    for broker in {leader.number: leader, metadata.number: metadata}.values():
        broker.kill()
    place = f"leader {leader.number}, metadata leader {metadata.number}"
    hit = {leader.number, metadata.number}
    return Fault(place, True, lambda: scene.start(leader, metadata), scene.hold(0.0, 5.0), hit=hit)


def kill_all(scene: Scene) -> Fault:
    for broker in scene.cluster.brokers:
        broker.kill()
    return Fault("all", False, lambda: scene.start(*scene.cluster.brokers), scene.hold(0.0, 2.0))


def pause_one(scene: Scene) -> Fault:
    broker, place = scene.pick()
    broker.pause()
    return Fault(place, True, broker.resume, scene.hold(1.0, 12.0), hit=(broker.number,))


def pause_all(scene: Scene) -> Fault:
    for broker in scene.cluster.brokers:
        broker.pause()
    return Fault("all", False, lambda: [one.resume() for one in scene.cluster.brokers] and None, scene.hold(1.0, 6.0))


def rolling_restart(scene: Scene) -> Fault:
    """Each in its turn, when all are in sync."""
    broken_s: list[float] = []
    orderly_s: list[float] = []

    def roll() -> None:
        for broker in scene.cluster.brokers:
            scene.cluster.wait_in_sync(60)
            broken_s.append(time.monotonic())
            orderly_s.append(broken_s[-1])
            broker.terminate()
            time.sleep(_STAYS_DOWN_S)
            scene.start(broker)

    return Fault("all in turn", True, roll, 0.0, broken_s=broken_s, orderly_s=orderly_s)


def stop_in_order(scene: Scene) -> Fault:
    """One, when all are in sync; sometimes the metadata has another leader since a moment."""
    scene.cluster.wait_in_sync(60)
    broker, place = scene.pick()
    if scene.chance.random() < 0.5:
        to = scene.chance.choice(scene.others(broker))
        scene.cluster.operate("POST", "/v1/cluster/transfer", {"metadata": True, "to": to})
        place += f", metadata to {to}"
    stopped_s = time.monotonic()
    broker.terminate()
    hold_s = scene.hold(_STAYS_DOWN_S, 8.0)
    return Fault(place, True, lambda: scene.start(broker), hold_s, hit=(broker.number,), orderly_s=[stopped_s])


def drain_one(scene: Scene) -> Fault:
    """Its replicas and leaderships move to others, as far as there are others; then they may return."""
    scene.cluster.wait_in_sync(60)
    broker, place = scene.pick()
    path = f"/v1/cluster/brokers/{broker.number}"
    scene.cluster.operate("PATCH", path, {"draining": True})

    def heal() -> None:
        scene.cluster.operate("PATCH", path, {"draining": False})

    return Fault(place, True, heal, scene.hold(3.0, 10.0))


def exhaust_descriptors(scene: Scene) -> Fault:
    """A broker may open no more files: it goes on, or says why not, and goes on when it may again."""
    broker, place = scene.pick()
    was = resource.prlimit(broker.pid, resource.RLIMIT_NOFILE)
    spare = scene.chance.choice((0, 3, 10))
    most = len(os.listdir(f"/proc/{broker.pid}/fd")) + spare
    resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, (most, was[1]))

    def heal() -> None:
        if broker.exit_code is None:
            resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, was)

    return Fault(f"{place}, {spare} more", True, heal, scene.hold(2.0, 8.0), hit=(broker.number,))


def change_members(scene: Scene) -> Fault:
    """A broker's folder is lost: it is removed, and added again with an empty one."""
    scene.cluster.wait_in_sync(60)
    broker, place = scene.pick()

    def heal() -> None:
        scene.cluster.replace(broker)
        scene.start(broker)

    broker.kill()
    return Fault(place, True, heal, scene.hold(0.0, 4.0), hit=(broker.number,))


def transfer(scene: Scene) -> Fault:
    broker, _ = scene.pick("follower")
    if scene.chance.random() < 0.5:
        scene.cluster.operate("POST", "/v1/cluster/transfer", {"metadata": True, "to": broker.number})
        return Fault(f"metadata to broker {broker.number}", True, lambda: None, 2.0)
    leader = scene.cluster.leader_of(scene.stream)
    answer = (
        None
        if leader is None
        else leader.ask("POST", f"/v1/streams/{scene.stream}/leader", {"to": broker.number}, timeout_s=10)
    )
    said = "no answer" if answer is None else f"{answer.status} {answer.data.decode(errors='replace')[:200]}"
    return Fault(f"stream to broker {broker.number}", True, lambda: None, 2.0, [said])


# ---- network ----


def _healed(scene: Scene) -> Callable[[], None]:
    assert scene.cluster.network is not None, "cuts need a network"
    return scene.cluster.network.heal


def partition_whole(scene: Scene) -> Fault:
    heal = _healed(scene)
    brokers = scene.some()
    hit = [broker.number for broker in brokers]
    with_nats = scene.chance.random() < 0.5
    assert scene.cluster.network is not None, "cuts need a network"
    for broker in brokers:
        others = [number for number in scene.others(broker) if number not in hit]
        scene.cluster.network.separate(broker.number, others)
        if with_nats:
            _cut_nats(scene, broker)
    place = scene.names_of(brokers) + (", NATS too" if with_nats else "")
    return Fault(place, True, heal, scene.hold(2.0, 12.0), hit=hit)


def partition_one_way(scene: Scene) -> Fault:
    heal = _healed(scene)
    broker, place = scene.pick()
    assert scene.cluster.network is not None, "cuts need a network"
    is_mute = scene.chance.random() < 0.5
    for other in scene.others(broker):
        scene.cluster.network.cut(*((broker.number, other) if is_mute else (other, broker.number)))
    place += " is not heard" if is_mute else " hears nobody"
    return Fault(place, True, heal, scene.hold(2.0, 12.0), hit=(broker.number,))


def partition_bridge(scene: Scene) -> Fault:
    """Two brokers are partitioned from each other; the others can reach both."""
    heal = _healed(scene)
    broker, place = scene.pick()
    assert scene.cluster.network is not None, "cuts need a network"
    other = scene.chance.choice(scene.others(broker))
    scene.cluster.network.separate(broker.number, [other])
    return Fault(f"{place} and broker {other}", True, heal, scene.hold(2.0, 12.0))


def partition_all(scene: Scene) -> Fault:
    heal = _healed(scene)
    assert scene.cluster.network is not None, "cuts need a network"
    for broker in scene.cluster.brokers:
        scene.cluster.network.separate(broker.number, scene.others(broker))
    return Fault("everyone alone", False, heal, scene.hold())


def _cut_nats(scene: Scene, broker: ClusterBroker) -> None:
    assert scene.cluster.network is not None, "cuts need a network"
    scene.cluster.network.cut(NATS, broker.number)
    scene.cluster.network.cut(broker.number, NATS)


def cut_from_nats(scene: Scene) -> Fault:
    heal = _healed(scene)
    broker, place = scene.pick()
    _cut_nats(scene, broker)
    return Fault(place, True, heal, scene.hold(2.0, 14.0), hit=(broker.number,))


def lose_packets(scene: Scene) -> Fault:
    """A bad cable: what is lost comes again, late, and holds up what comes behind it."""
    heal = _healed(scene)
    broker, place = scene.pick()
    assert scene.cluster.network is not None, "packets are lost on a network"
    scene.cluster.network.lose_packets(broker.number)
    return Fault(place, True, heal, scene.hold(2.0, 12.0))


def restart_nats(scene: Scene) -> Fault:
    scene.cluster.nats.stop()
    return Fault("NATS", False, lambda: scene.cluster.nats.start() and None, scene.hold(0.0, 5.0))


KINDS = (
    Kind(kill_one, may_overlap=True),
    Kind(kill_both_leaders, may_overlap=True),
    Kind(kill_all, may_overlap=True),
    Kind(pause_one, may_overlap=True),
    Kind(pause_all, may_overlap=True),
    Kind(pause_and_kill, may_overlap=True),
    Kind(rolling_restart),
    Kind(stop_in_order),
    Kind(drain_one, "a spare broker"),
    Kind(exhaust_descriptors),
    Kind(transfer),
    Kind(change_members),
    Kind(restart_nats),
    Kind(partition_whole, "network", may_overlap=True),
    Kind(partition_one_way, "network", may_overlap=True),
    Kind(partition_bridge, "network", may_overlap=True),
    Kind(partition_all, "network", may_overlap=True),
    Kind(cut_from_nats, "network"),
    Kind(lose_packets, "network"),
    *disk_faults.KINDS,
)
