"""Faults of disks, clocks and files."""

from __future__ import annotations

import signal
import subprocess
import time

from natslog.nats_server import end_with_parent
from tests.chaos import damage
from tests.chaos.scene import Fault, Kind, Scene
from tests.cluster_harness import ClusterBroker

# ---- disks and clocks ----


def power_one(scene: Scene) -> Fault:
    broker, place = scene.pick()
    scene.cluster.lose_power([broker])
    return Fault(place, True, lambda: scene.start(broker), scene.hold(0.0, 5.0), hit=(broker.number,))


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

    place = f"{place}, {leave_bytes} bytes left"
    fault = Fault(place, True, heal, scene.hold(3.0, 10.0), hit=(broker.number,))
    return fault


def fill_streams_disk(scene: Scene) -> Fault:
    """Of the broker whose streams are on a disk of their own: its metadata goes on, so it does not end."""
    broker = next(one for one in scene.cluster.brokers if one.streams_disk is not None)
    assert broker.streams_disk is not None
    leave_bytes = scene.chance.choice((0, 1024 * 1024, 8 * 1024 * 1024))
    broker.streams_disk.fill(leave_bytes)
    place = f"{scene.name_of(broker)}, {leave_bytes} bytes left"
    return Fault(place, True, broker.streams_disk.free, scene.hold(3.0, 10.0), hit=(broker.number,))


def hang_disk(scene: Scene) -> Fault:
    broker, place = scene.pick()
    assert broker.disk is not None, "hanging needs a disk"
    broker.disk.freeze()
    return Fault(place, True, broker.disk.thaw, scene.hold(2.0, 14.0), hit=(broker.number,))


def slow_disk(scene: Scene) -> Fault:
    """It does everything, late: writes go on, on this broker or on another one."""
    broker, place = scene.pick()
    assert broker.disk is not None, "slowing down needs a disk"
    writes = scene.chance.choice((4, 15, 50))
    broker.disk.slow_down(broker.pid, writes)
    return Fault(f"{place}, {writes} writes a second", True, broker.disk.speed_up, scene.hold(4.0, 12.0))


def fail_fsync(scene: Scene) -> Fault:
    broker, place = scene.pick()
    scene.may_end.add(broker.number)
    command = ["strace", "-f", "-q", "-o", "/dev/null", "-e", "trace=fsync,fdatasync"]
    command += ["-e", "inject=fsync,fdatasync:error=EIO", "-p", str(broker.pid)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=end_with_parent) as strace:
        time.sleep(scene.hold(0.5, 2.0))
        strace.send_signal(signal.SIGINT)
        try:
            strace.wait(10)
        except subprocess.TimeoutExpired:  # seen where the broker ends at the same moment: it waits for ever
            strace.kill()
    fault = Fault(place, True, lambda: _restart_where_needed(scene, broker, fault), 8.0, hit=(broker.number,))
    return fault


def _restart_where_needed(scene: Scene, broker: ClusterBroker, fault: Fault) -> None:
    """The action of an operator after a repair of the disk: a broker that ended, or that does not rejoin, is
    restarted.
    """
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
    """Must be repaired by itself; until then, reads of it are right or refused."""
    broker, place = scene.pick()
    _stop(scene, broker)
    what = _damage(scene, broker, scene.stream_id)
    return Fault(f"{place}: {what}", True, lambda: scene.start(broker), 0.0, hit=(broker.number,))


def damage_two_replicas(scene: Scene) -> Fault:
    """At the same time, of a stream that tolerates two; of any other stream, one of them at most."""
    scene.cluster.wait_in_sync(60)
    brokers = scene.chance.sample(scene.cluster.brokers, 2)
    place = scene.names_of(brokers)
    tolerated = {name: _tolerated(scene, name) for name in scene.ids}
    for broker in brokers:
        _stop(scene, broker)
    done = []
    for broker in brokers:
        for name, stream_id in scene.ids.items():
            if tolerated[name] > 0 and damage.files_of_kind(broker, stream_id, "active"):
                tolerated[name] -= 1
                done.append(f"{broker.number} {name}: {_damage(scene, broker, stream_id)}")
    hit = [broker.number for broker in brokers]
    return Fault(f"{place}: {'; '.join(done)}", True, lambda: scene.start(*brokers), 0.0, hit=hit)


def _tolerated(scene: Scene, name: str) -> int:
    """How many damaged replicas: one that is whole holds every acked message."""
    found = scene.cluster.stream(name)
    return 0 if found is None else int(found["min_isr"]) - 1


def _damage(scene: Scene, broker: ClusterBroker, stream_id: str) -> str:
    kind = scene.chance.choice(damage.STREAM_KINDS)
    paths = damage.files_of_kind(broker, stream_id, kind)
    change = scene.chance.choice((damage.flip_bit, damage.truncate))
    return change(scene.chance.choice(paths), scene.chance) if paths else f"no {kind} file"


def flip_sealed_bits(scene: Scene) -> Fault:
    """In sealed segments of one running replica: it is found, and fetched from another one."""
    scene.cluster.wait_in_sync(60)
    broker = scene.chance.choice(scene.cluster.replicas_of(scene.stream))
    paths = damage.wait_sealed(broker, scene.stream_id)
    chosen = scene.chance.sample(paths, min(len(paths), scene.chance.randint(1, 3)))
    counted = damage.repaired_ranges(broker, scene.stream)
    done = [damage.flip_bit(path, scene.chance) for path in chosen]
    scene.history.flips["flipped"] += len(done)
    if done and scene.chance.random() < 0.7:
        broker.ask("POST", f"/v1/streams/{scene.stream}/scrub", timeout_s=10)

    def heal() -> None:
        if not damage.wait_intact(chosen):
            scene.history.flips["left"] += 1
            text = f"broker {broker.number} of {scene.stream}: {'; '.join(done)}: not repaired in time"
            scene.history.violate("5 damage is repaired", text)
        repaired = damage.wait_counted(broker, scene.stream, counted) if done and scene.keeps_files else 0.0
        scene.history.flips["repaired ranges"] += int(repaired)
        if done and repaired <= 0 and scene.keeps_files:
            text = f"broker {broker.number} of {scene.stream}: {'; '.join(done)}: no repair was counted"
            scene.history.violate("5 damage is repaired", text)

    return Fault(f"{scene.name_of(broker)}: {'; '.join(done) or 'no sealed file'}", True, heal, 0.0)


def tear_writes(scene: Scene) -> Fault:
    """What was being written when a broker was killed, or lost its power, is there in part: nothing of it was acked."""
    brokers = scene.some()
    place = scene.names_of(brokers)
    if all(broker.disk is not None for broker in brokers) and scene.chance.random() < 0.5:
        scene.cluster.lose_power(brokers)
    for broker in brokers:
        broker.kill()
    done = [
        f"{broker.number}: {damage.tear(path, scene.chance)}"
        for broker in brokers
        for stream_id in scene.ids.values()
        for kind in ("active", "companion")
        for path in damage.files_of_kind(broker, stream_id, kind)[-1:]
    ]
    hit = [broker.number for broker in brokers]
    return Fault(f"{place}: {'; '.join(done)}", True, lambda: scene.start(*brokers), 0.0, hit=hit)


def _stop(scene: Scene, broker: ClusterBroker) -> None:
    if scene.chance.random() < 0.5:
        broker.kill()
    else:
        broker.terminate()


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
    return Fault(f"{place}: {what}", True, heal, 0.0, [said[-400:]], hit=(broker.number,))


def restore_folder(scene: Scene) -> Fault:
    """An older copy of a broker's folder is put back: it takes part in nothing, and says so; then it is replaced."""
    scene.cluster.wait_in_sync(60)
    broker, place = scene.pick()
    broker.terminate()
    copy = damage.copy_folder(broker)
    scene.start(broker)
    scene.cluster.wait_in_sync(60)
    time.sleep(scene.hold(1.0, 3.0))  # messages are acked that the copy does not hold
    again_s = time.monotonic()
    _stop(scene, broker)
    damage.put_back(broker, copy)
    broker.spawn()
    broker.is_wanted = False  # it may end
    said = damage.outdated_says(broker)
    if said is None:
        text = f"{place}: it does not say that its folder is an older copy: {damage.readiness(broker)}"
        scene.history.violate("5 halt rather than lie", text)
    if any((broker.high_watermark(name) is not None) for name in scene.ids):
        scene.history.violate("5 halt rather than lie", f"{place}: an older copy is served")

    def heal() -> None:
        scene.cluster.replace(broker)
        scene.start(broker)

    notes = [(said or "")[-300:]]
    return Fault(place, True, heal, 0.0, notes, hit=(broker.number,), broken_s=[again_s])


KINDS = (
    Kind(power_one, "disks", may_overlap=True),
    Kind(power_all, "disks", may_overlap=True),
    Kind(fill_disk, "disks"),
    Kind(fill_streams_disk, "a disk of streams"),
    Kind(hang_disk, "disks"),
    Kind(slow_disk, "slow disks"),
    Kind(fail_fsync, "disks"),
    Kind(jump_clock, "clocks"),
    Kind(damage_stream_file),
    Kind(flip_sealed_bits),
    Kind(damage_two_replicas, "five brokers"),
    Kind(tear_writes, may_overlap=True),
    Kind(damage_broker_file),
    Kind(restore_folder),
)
