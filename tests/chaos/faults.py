"""What is broken, where, and how it is made whole again. `begin` breaks; the `Fault` it returns knows how to heal.

Each maker picks its own place at random: the stream's leader, a follower, the metadata leader, or several.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from natslog.nats_server import end_with_parent
from tests.chaos import damage
from tests.chaos.history import History
from tests.chaos.network import NATS
from tests.cluster_harness import Cluster, ClusterBroker

_READY_WITHIN_S = 90.0


@dataclass(slots=True)
class Fault:
    """`heal` returns when nothing is broken any more; `hold_s` is how long it stays broken."""

    place: str
    keeps_majority: bool
    heal: Callable[[], None]
    hold_s: float
    notes: list[str] = field(default_factory=list)


class Scene:
    """Where faults happen: the cluster, the stream they aim at, and chance."""

    def __init__(self, cluster: Cluster, history: History, stream: str, chance: random.Random) -> None:
        self.cluster, self.history, self.stream, self.chance = cluster, history, stream, chance
        found = cluster.stream(stream)
        assert found is not None, "the stream was created"
        self.stream_id = str(found["id"])
        self.may_end: set[int] = set()
        self.alive_s = 0.0  # when all processes last answered after a start

    def pick(self, *roles: str) -> tuple[ClusterBroker, str]:
        """A broker in one of these roles, and what to call it."""
        role = self.chance.choice(roles or ("leader", "follower", "metadata leader"))
        leader, metadata = self.cluster.leader_of(self.stream), self.cluster.metadata_leader()
        brokers = self.cluster.brokers
        chosen = metadata if role == "metadata leader" else leader
        if role == "follower" or chosen is None:
            chosen = self.chance.choice([broker for broker in brokers if broker is not leader])
        return chosen, self.name_of(chosen)

    def name_of(self, broker: ClusterBroker) -> str:
        """With the roles that it has now."""
        holders = (("leader", self.cluster.leader_of(self.stream)), ("metadata leader", self.cluster.metadata_leader()))
        roles = [name for name, one in holders if one is broker]
        return f"broker {broker.number} ({', '.join(roles) or 'follower'})"

    def others(self, broker: ClusterBroker) -> list[int]:
        return [one.number for one in self.cluster.brokers if one is not broker]

    def hold(self, low_s: float = 2.0, high_s: float = 9.0) -> float:
        return self.chance.uniform(low_s, high_s)

    def start(self, *brokers: ClusterBroker) -> None:
        """Those that are down; returns when all are ready; `alive_s` is when all processes answered."""
        for broker in brokers:
            if not broker.is_up:
                broker.kill()
                broker.spawn()
        self.cluster.wait_alive(_READY_WITHIN_S)
        self.alive_s = time.monotonic()
        self.cluster.wait_ready(_READY_WITHIN_S)

    def unexpected_ends(self) -> None:
        """Called twice a second: a broker that ended though nobody wanted it to."""
        for broker in self.cluster.brokers:
            if broker.is_wanted and broker.exit_code is not None:
                broker.is_wanted = False
                last = " | ".join(broker.output().strip().splitlines()[-3:])
                if broker.number not in self.may_end:
                    self.history.violate("5 ended by itself", f"broker {broker.number}: {last[-600:]}")


# ---- processes ----


def kill_one(scene: Scene) -> Fault:
    broker, place = scene.pick()
    broker.kill()
    return Fault(place, True, lambda: scene.start(broker), scene.hold(0.0, 8.0))


def kill_both_leaders(scene: Scene) -> Fault:
    (leader, _), (metadata, _) = scene.pick("leader"), scene.pick("metadata leader")
    for broker in {leader.number: leader, metadata.number: metadata}.values():
        broker.kill()
    place = f"leader {leader.number}, metadata leader {metadata.number}"
    return Fault(place, leader is metadata, lambda: scene.start(leader, metadata), scene.hold(0.0, 5.0))


def kill_all(scene: Scene) -> Fault:
    for broker in scene.cluster.brokers:
        broker.kill()
    return Fault("all", False, lambda: scene.start(*scene.cluster.brokers), scene.hold(0.0, 2.0))


def pause_one(scene: Scene) -> Fault:
    broker, place = scene.pick()
    broker.pause()
    return Fault(place, True, broker.resume, scene.hold(1.0, 12.0))


def pause_all(scene: Scene) -> Fault:
    for broker in scene.cluster.brokers:
        broker.pause()
    return Fault("all", False, lambda: [one.resume() for one in scene.cluster.brokers] and None, scene.hold(1.0, 6.0))


def rolling_restart(scene: Scene) -> Fault:
    """Each in its turn, when all are in sync."""

    def roll() -> None:
        for broker in scene.cluster.brokers:
            broker.terminate(20)
            scene.start(broker)
            scene.cluster.wait_in_sync(60)

    return Fault("all in turn", True, roll, 0.0)


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
    broker, place = scene.pick()
    assert scene.cluster.network is not None, "cuts need a network"
    scene.cluster.network.separate(broker.number, scene.others(broker))
    if with_nats := scene.chance.random() < 0.5:
        _cut_nats(scene, broker)
    return Fault(place + (", NATS too" if with_nats else ""), True, heal, scene.hold(2.0, 12.0))


def partition_one_way(scene: Scene) -> Fault:
    heal = _healed(scene)
    broker, place = scene.pick()
    assert scene.cluster.network is not None, "cuts need a network"
    is_mute = scene.chance.random() < 0.5
    for other in scene.others(broker):
        scene.cluster.network.cut(*((broker.number, other) if is_mute else (other, broker.number)))
    return Fault(place + (" is not heard" if is_mute else " hears nobody"), True, heal, scene.hold(2.0, 12.0))


def partition_bridge(scene: Scene) -> Fault:
    """Two do not hear each other; the third hears both."""
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
    return Fault(place, True, heal, scene.hold(2.0, 14.0))


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


# ---- disks and clocks ----


def power_one(scene: Scene) -> Fault:
    broker, place = scene.pick()
    scene.cluster.lose_power([broker])
    return Fault(place, True, lambda: scene.start(broker), scene.hold(0.0, 5.0))


def power_all(scene: Scene) -> Fault:
    scene.cluster.lose_power(scene.cluster.brokers)
    return Fault("all", False, lambda: scene.start(*scene.cluster.brokers), 0.0)


def fill_disk(scene: Scene) -> Fault:
    broker, place = scene.pick()
    disk = broker.disk
    assert disk is not None, "filling needs a disk"
    leave_bytes = scene.chance.choice((0, 1024 * 1024, 8 * 1024 * 1024))
    scene.may_end.add(broker.number)  # the metadata log is on that disk too: where it cannot be written, it stops
    disk.fill(leave_bytes)

    def heal() -> None:
        disk.free()
        _restart_where_needed(scene, broker, fault)

    fault = Fault(f"{place}, {leave_bytes} bytes left", True, heal, scene.hold(3.0, 10.0))
    return fault


def hang_disk(scene: Scene) -> Fault:
    broker, place = scene.pick()
    assert broker.disk is not None, "hanging needs a disk"
    broker.disk.freeze()
    return Fault(place, True, broker.disk.thaw, scene.hold(2.0, 14.0))


def fail_fsync(scene: Scene) -> Fault:
    broker, place = scene.pick()
    scene.may_end.add(broker.number)
    command = ["strace", "-f", "-q", "-o", "/dev/null", "-e", "trace=fsync,fdatasync"]
    command += ["-e", "inject=fsync,fdatasync:error=EIO", "-p", str(broker.pid)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=end_with_parent) as strace:
        time.sleep(scene.hold(0.5, 2.0))
        strace.send_signal(signal.SIGINT)
        strace.wait(10)
    fault = Fault(place, True, lambda: _restart_where_needed(scene, broker, fault), 8.0)
    return fault


def _restart_where_needed(scene: Scene, broker: ClusterBroker, fault: Fault) -> None:
    """What an operator does who has mended the disk: a broker that ended, or that does not come back, is restarted."""
    deadline = time.monotonic() + 15.0
    while broker.exit_code is None and time.monotonic() < deadline and not scene.cluster.in_sync():
        time.sleep(0.3)
    if broker.exit_code is not None:
        fault.notes.append(f"it ended by itself: {broker.output().strip().splitlines()[-1][-300:]}")
        scene.start(broker)
    elif not scene.cluster.in_sync():
        fault.notes.append("not in sync by itself within 15 s: restarted by hand")
        broker.kill()
        scene.start(broker)
    scene.may_end.discard(broker.number)


def jump_clock(scene: Scene) -> Fault:
    broker = scene.cluster.broker(scene.chance.choice(scene.cluster.options.clocks))
    ahead_s = scene.chance.choice((-3600, 3600, -86400, 40))
    scene.cluster.set_clock(broker.number, ahead_s)
    return Fault(
        f"{scene.name_of(broker)} {ahead_s:+d} s",
        True,
        lambda: scene.cluster.set_clock(broker.number, 0),
        scene.hold(3.0, 8.0),
    )


# ---- damage ----


def damage_stream_file(scene: Scene) -> Fault:
    """Must be mended by itself; until then, reads of it are right or refused."""
    kind = scene.chance.choice(damage.STREAM_KINDS)
    broker, place = scene.pick()
    _stop(scene, broker)
    paths = damage.files_of_kind(broker, scene.stream_id, kind)
    change = scene.chance.choice((damage.flip_bit, damage.truncate))
    what = change(scene.chance.choice(paths), scene.chance) if paths else f"no {kind} file"
    return Fault(f"{place}: {what}", True, lambda: scene.start(broker), 0.0)


def _stop(scene: Scene, broker: ClusterBroker) -> None:
    if scene.chance.random() < 0.5:
        broker.kill()
    else:
        broker.terminate(20)


def damage_broker_file(scene: Scene) -> Fault:
    """It must not start, and say what to do; then it is done."""
    kind = scene.chance.choice(damage.BROKER_KINDS)
    broker, place = scene.pick()
    _stop(scene, broker)
    paths = damage.files_of_kind(broker, scene.stream_id, kind)
    change = scene.chance.choice((damage.flip_bit, damage.truncate))
    what = change(scene.chance.choice(paths), scene.chance) if paths else f"no {kind} file"
    has_started, said = damage.starts(broker)

    def heal() -> None:
        if not has_started:
            scene.cluster.replace(broker)
            scene.start(broker)

    if has_started and paths and kind != "raft-log":  # a log's unnamed tail may be cut off
        scene.history.violate("5 halt rather than lie", f"{place} started with damage: {what}")
    if not has_started and not damage.refusal_is_clear(said):
        scene.history.violate("5 halt rather than lie", f"{place}: {what}: no clear refusal: {said}")
    return Fault(f"{place}: {what}", True, heal, 0.0, [said[-400:]])


@dataclass(frozen=True, slots=True)
class Kind:
    """`needs`: network, disks or clocks. `may_overlap`: the next fault may come before all is in sync again."""

    begin: Callable[[Scene], Fault]
    needs: str = ""
    may_overlap: bool = False

    @property
    def name(self) -> str:
        return self.begin.__name__.replace("_", " ")


KINDS = (
    Kind(kill_one, may_overlap=True),
    Kind(kill_both_leaders, may_overlap=True),
    Kind(kill_all, may_overlap=True),
    Kind(pause_one, may_overlap=True),
    Kind(pause_all, may_overlap=True),
    Kind(rolling_restart),
    Kind(transfer),
    Kind(restart_nats),
    Kind(partition_whole, "network", may_overlap=True),
    Kind(partition_one_way, "network", may_overlap=True),
    Kind(partition_bridge, "network", may_overlap=True),
    Kind(partition_all, "network", may_overlap=True),
    Kind(cut_from_nats, "network"),
    Kind(lose_packets, "network"),
    Kind(power_one, "disks", may_overlap=True),
    Kind(power_all, "disks", may_overlap=True),
    Kind(fill_disk, "disks"),
    Kind(hang_disk, "disks"),
    Kind(fail_fsync, "disks"),
    Kind(jump_clock, "clocks"),
    Kind(damage_stream_file),
    Kind(damage_broker_file),
)
