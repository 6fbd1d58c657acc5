"""`python -m tests.chaos --minutes 5 --seed N`: random faults under load, then every promise is judged.

A cluster of real brokers with two streams, one on all of them (up to five) and one on three, and three streams whose
messages are removed (`removal_history`): by a limit per subject, by key, by age, and on request; each broker with a
host (network namespace) and a disk (ext4 on a loop device) of its own where this machine allows it; publishers, readers
(one bound to each broker among them) and metadata clients that go on all the time; one fault after another, sometimes
before the last one is over; all logs are scrubbed meanwhile. In the end all is healed, every replica is read, and the
checkers speak. The same seed picks the same faults; what the processes make of them differs from run to run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from natslog.errors import NatslogError
from tests.chaos import damage, report
from tests.chaos.checkers import (
    Copy,
    check_orderly,
    end_all,
    goes_on,
    judge_cluster,
    judge_stream,
    served_copies,
    stored_copies,
)
from tests.chaos.faults import KINDS
from tests.chaos.history import FaultEvent, History, Violation
from tests.chaos.network import missing_for_network
from tests.chaos.recorders import BatchPublisher, BoundReader, MetadataClient, Probe, Reader, Recorder, Sampler
from tests.chaos.removal_checkers import check_stored, judge_removals, settled_copies
from tests.chaos.removal_history import RULES, SETTINGS, RemovalHistory
from tests.chaos.removal_recorders import KeyedPublisher, LeaderReader, Remover
from tests.chaos.scene import Kind, Scene
from tests.cluster_harness import Cluster, ClusterOptions
from tests.disks import can_slow_down
from tests.harness import eventually

STREAMS = {"orders": 5, "returns": 3}  # replicas; `min_isr` is the majority of them
_DISK_BYTES = 192 * 1024 * 1024
_DISK_BYTES_PER_MINUTE = 20 * 1024 * 1024  # what is published stays to the end, to be checked
_SETTINGS = {
    "segment_bytes": "256KiB",
    "min_free_bytes": "16MiB",
    "retention_interval": "2s",
    "scrub_interval": "10s",
    "scrub_max_bytes_per_s": "64MiB",
}
_OVERTIME_S = 400
_BATCH_EVERY_S = 0.05
_READ_TO_THE_END_WITHIN_S = 60.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--brokers", type=int, default=5)
    parser.add_argument("--publishers", type=int, default=2, help="of each stream")
    parser.add_argument("--only", default="", help="fault kinds, comma-separated: 'kill one,pause one'")
    parser.add_argument("--resume-within", type=float, default=10.0, help="seconds")
    parser.add_argument("--sync-within", type=float, default=60.0, help="seconds")
    parser.add_argument(
        "--secured",
        action=argparse.BooleanOptionalAction,
        help="access rules and tokens; by default where the seed is odd",
    )
    parser.add_argument(
        "--orderly-within", type=float, default=1.0, help="seconds: the most that an orderly stop costs an ack"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for the report; build/chaos/SEED")
    return parser.parse_args()


class Run:
    """One cluster, from the first message to the verdict."""

    def __init__(self, arguments: argparse.Namespace, seed: int, folder: Path) -> None:
        self.arguments, self.seed, self.folder = arguments, seed, folder
        self.chance = random.Random(seed)
        self.is_secured = seed % 2 == 1 if arguments.secured is None else arguments.secured
        print(f"requests {'need' if self.is_secured else 'do not need'} a token")
        lacking = missing_for_network()
        clocks = find_spec("libfaketime") is not None
        is_root = os.geteuid() == 0
        needs = (
            ("network", lacking is None, lacking),
            ("disks", is_root, "loop devices need root"),
            ("slow disks", is_root and can_slow_down(), "no cgroup v1 with blkio that can be written"),
            ("clocks", clocks, "no libfaketime"),
            ("five brokers", arguments.brokers >= 5, f"there are {arguments.brokers}"),
            ("a spare broker", arguments.brokers > max(STREAMS.values()), "a stream is on all of them: --brokers 6"),
            ("a disk of streams", is_root, "loop devices need root"),
        )
        self.can = {"": True} | {what: can for what, can, _ in needs}
        for what, can, reason in needs:
            if not can:
                print(f"skipped: faults that need {what}: {reason}")
        options = ClusterOptions(
            brokers=arguments.brokers,
            disks=is_root,
            disk_bytes=_DISK_BYTES + int(arguments.minutes * _DISK_BYTES_PER_MINUTE),
            network=lacking is None,
            clocks=(seed % arguments.brokers + 1,) if clocks else (),
            streams_disks=((seed + 1) % arguments.brokers + 1,) if is_root else (),
            is_secured=self.is_secured,
            settings=_SETTINGS,
        )
        self.cluster = Cluster(folder / "cluster", options)
        self.history = History()
        self.streams = [History(name) for name in STREAMS]
        self.removing = [RemovalHistory(name) for name in RULES]
        self.recorders: list[Recorder] = []
        self.readers: list[BoundReader] = []
        self.is_interrupted = False

    def interrupt(self, *_: object) -> None:
        """What was seen so far is judged, too."""
        self.is_interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("ending after this fault; once more to end at once", flush=True)

    def close(self) -> None:
        for recorder in (*self.recorders, *self.readers):
            recorder.stopping.set()
        self.cluster.close()
        for image in self.cluster.folder.glob("*.img"):
            image.unlink()

    # ---- from beginning to end ----

    def run(self) -> tuple[dict[str, Any], bool]:
        cluster = self.cluster.start()
        with cluster.client() as client:
            for name, wanted in STREAMS.items():
                replicas = min(wanted, self.arguments.brokers)
                isr = replicas // 2 + 1
                client.create_stream(name, f"{name}.>", replicas=replicas, min_isr=isr, dedupe_window="2h")
            for name, rules in RULES.items():
                replicas = min(rules.replicas, self.arguments.brokers)
                isr = replicas // 2 + 1
                client.create_stream(name, f"{name}.>", replicas=replicas, min_isr=isr, **SETTINGS[name])
        cluster.wait_in_sync()
        scene = Scene(cluster, self.history, self.streams[0].stream, self.chance)
        for one in (*self.streams, *self.removing):
            scene.aim(one.stream)
        self._start_recorders(scene)
        all_streams = (*self.streams, *self.removing)
        eventually(lambda: all(one.acked > 100 for one in all_streams), 60, "100 acked messages of each stream")
        self._break_things(scene)
        copies, violations = self._check_end_state(scene)
        found = report.summary(
            self.seed, self.arguments.brokers, self.history, self.streams, self.removing, copies, violations
        )
        report.write(self.folder, found, self.streams)
        report.show(found)
        return found, bool(violations)

    def _start_recorders(self, scene: Scene) -> None:
        cluster, history, run = self.cluster, self.history, secrets.token_hex(4)
        history.started_s = time.monotonic()
        for one in self.streams:
            one.started_s, name = history.started_s, one.stream
            watch = scene.unexpected_ends if one is self.streams[0] else lambda: None
            self.recorders += [
                *(
                    BatchPublisher(one, cluster.nats_url, f"{run}-{name}", name, every_s=_BATCH_EVERY_S)
                    for _ in range(self.arguments.publishers)
                ),
                Probe(one, cluster.nats_url, name),
                Reader(one, cluster, name, self.seed),
                Sampler(one, cluster, name, watch),
            ]
            self.readers += [BoundReader(one, broker, name) for broker in cluster.brokers]
        for kept in self.removing:
            kept.started_s = history.started_s
            self.recorders += [
                KeyedPublisher(kept, cluster.nats_url, f"{run}-{kept.stream}", self.seed),
                Remover(kept, cluster, self.seed),
                LeaderReader(kept, cluster, self.seed),
            ]
        self.recorders += [MetadataClient(history, cluster, number, self.seed) for number in (1, 2)]
        for recorder in (*self.recorders, *self.readers):
            recorder.start()

    def _break_things(self, scene: Scene) -> None:
        wanted = {name.strip() for name in self.arguments.only.split(",") if name.strip()}
        kinds = [kind for kind in KINDS if self.can[kind.needs] and (not wanted or kind.name in wanted)]
        assert kinds, f"no such fault; there are: {', '.join(kind.name for kind in KINDS)}"
        until = time.monotonic() + self.arguments.minutes * 60
        bag: list[Kind] = []
        while time.monotonic() < until and not self.is_interrupted:
            if not bag:
                bag = self.chance.sample(kinds, len(kinds))
            time.sleep(self.chance.uniform(0.5, 3.0))
            scene.aim(self.chance.choice((*self.streams, *self.removing)).stream)
            self._one_fault(scene, bag.pop())

    def _one_fault(self, scene: Scene, kind: Kind) -> None:
        history = self.history
        event = FaultEvent(kind.name, "", time.monotonic(), True)
        fault = None
        placed = {
            one.stream: [broker.number for broker in self.cluster.replicas_of(one.stream)] for one in self.streams
        }
        try:
            fault = kind.begin(scene)
            event.place, event.notes = f"{scene.stream}: {fault.place}", fault.notes
            event.hit, event.broken_s, event.orderly_s = frozenset(fault.hit), fault.broken_s, fault.orderly_s
            event.keeps_majority = fault.keeps_majority and goes_on(event.hit, len(self.cluster.brokers), (), 0)
            history.faults.append(event)
            print(f"{event.began_s - history.started_s:7.1f} s  {kind.name}: {event.place}", flush=True)
            time.sleep(fault.hold_s)
            healing_s = time.monotonic()
            fault.heal()
            # writes that had stopped are due from the moment the cause is gone and all processes answer
            event.resumes_s = scene.alive_s if scene.alive_s > healing_s else healing_s
        except (AssertionError, NatslogError, OSError) as error:
            history.violate("harness", f"{kind.name} {event.place}: {error!r}")
            if fault is None:
                history.faults.append(event)
        event.healed_s = time.monotonic()
        self._make_whole(scene)
        for one in self.streams:
            one.faults.append(self._for_stream(event, one.stream, placed[one.stream]))
        if kind.may_overlap and self.chance.random() < 0.25:
            event.is_awaited = False
            return
        self._await_sync(scene, event)
        for one in self.streams:
            one.faults[-1].in_sync_s = event.in_sync_s

    def _for_stream(self, event: FaultEvent, stream: str, replicas: list[int]) -> FaultEvent:
        """The fault as this stream sees it: it may have left fewer than `min_isr` of its replicas."""
        min_isr = min(STREAMS[stream], self.arguments.brokers) // 2 + 1
        goes_on_here = goes_on(event.hit, len(self.cluster.brokers), replicas, min_isr) if replicas else False
        return dataclasses.replace(
            event,
            keeps_majority=event.keeps_majority and goes_on_here,
            healed_s=event.healed_s if event.keeps_majority and goes_on_here else event.resumes_s or event.healed_s,
        )

    def _make_whole(self, scene: Scene) -> None:
        """Whatever a fault left behind: brokers that ended, cuts."""
        if self.cluster.network is not None:
            self.cluster.network.heal()
        for broker in self.cluster.brokers:
            if broker.is_paused:
                broker.resume()
        try:
            scene.start(*(broker for broker in self.cluster.brokers if not broker.is_up))
        except AssertionError as error:
            self.history.violate("6 back in time", f"a broker does not become ready: {error}")

    def _await_sync(self, scene: Scene, event: FaultEvent) -> None:
        deadline = time.monotonic() + self.arguments.sync_within
        while not self.cluster.in_sync():
            if time.monotonic() > deadline:
                event.notes.append(self.cluster.troubles())
                print(f"           not in sync, restarting all: {event.notes[-1]}", flush=True)
                for broker in self.cluster.brokers:
                    broker.kill()
                self._make_whole(scene)
                return
            time.sleep(0.1)
        event.in_sync_s = time.monotonic()

    def _check_end_state(self, scene: Scene) -> tuple[dict[str, list[Copy]], list[Violation]]:
        """All healed, all quiet: what the replicas hold, and what is wrong with it."""
        self._make_whole(scene)
        try:
            self.cluster.wait_in_sync(self.arguments.sync_within)
        except AssertionError as error:
            self.history.violate("6 back in sync", f"in the end: {error}")
        time.sleep(3.0)  # some traffic in peace
        self._finish(self.recorders)
        for one in (*self.streams, *self.removing):
            try:
                self.cluster.wait_replicated(one.stream, self.arguments.sync_within)
            except AssertionError as error:
                one.violate("6 back in sync", f"after the last message: {error}")
        self._read_to_the_end()
        self._finish(self.readers)
        for one in (*self.streams, *self.removing):
            if not damage.scrub_all(self.cluster.replicas_of(one.stream), one.stream, scene.ids[one.stream]):
                one.violate("5 damage is repaired", "a sealed segment is still damaged in the end")
        return self._judge(scene)

    def _finish(self, recorders: Sequence[Recorder]) -> None:
        for recorder in recorders:
            recorder.stopping.set()
        for recorder in recorders:
            recorder.finish()
            if recorder.is_alive():
                self.history.violate("harness", f"{recorder.name} does not end")

    def _read_to_the_end(self) -> None:
        """Where a reader does not come there in time, its checker says so."""
        deadline = time.monotonic() + _READ_TO_THE_END_WITHIN_S
        for reader in self.readers:
            end = reader.broker.high_watermark(reader.stream) or max(one.next_offset for one in reader.history.followed)
            while reader.followed.next_offset < end and time.monotonic() < deadline:
                time.sleep(0.1)

    def _judge(self, scene: Scene) -> tuple[dict[str, list[Copy]], list[Violation]]:
        cluster, arguments = self.cluster, self.arguments
        copies: dict[str, list[Copy]] = {}
        found: list[Violation] = []
        all_streams = (*self.streams, *self.removing)
        holders = {one.stream: cluster.replicas_of(one.stream) for one in all_streams}
        for one in self.streams:
            copies[one.stream], more = served_copies(cluster, one.stream)
            found += more
        for kept in self.removing:
            copies[kept.stream], more = settled_copies(cluster, kept.stream)
            judged = judge_removals(kept, copies[kept.stream], time.time()) if copies[kept.stream] else []
            found += more + [Violation(broken.promise, f"{kept.stream}: {broken.text}") for broken in judged]
        found += end_all(cluster, {scene.ids[name]: brokers for name, brokers in holders.items()})
        for one in all_streams:
            stored, more = stored_copies(holders[one.stream], scene.ids[one.stream])
            found += more
            if isinstance(one, RemovalHistory):
                served = copies[one.stream]
                judged = check_stored(one, served[0], stored, time.time()) if served else []
                wanted = one.rules.replicas
            else:
                together = copies[one.stream] + stored
                judged = judge_stream(one, together, arguments.resume_within) if together else []
                judged += one.violations + check_orderly(one, arguments.orderly_within)
                wanted = STREAMS[one.stream]
            copies[one.stream] += stored
            found += [Violation(broken.promise, f"{one.stream}: {broken.text}") for broken in judged]
            if len(stored) != min(wanted, arguments.brokers):
                found.append(Violation("6 back in sync", f"{one.stream} has {len(stored)} copies in the end"))
        return copies, found + judge_cluster(self.history, arguments.sync_within)


def _out_of_time(*_: object) -> None:
    raise TimeoutError("the run took far too long")


def main() -> int:
    arguments = _arguments()
    seed = arguments.seed if arguments.seed is not None else secrets.randbelow(1_000_000)
    folder = arguments.out or Path("build") / "chaos" / str(seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"seed {seed}; logs and report in {folder}")
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.alarm(int(arguments.minutes * 60) + _OVERTIME_S)
    run = Run(arguments, seed, folder.resolve())
    signal.signal(signal.SIGINT, run.interrupt)
    try:
        _, is_broken = run.run()
    finally:
        signal.alarm(0)
        run.close()
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main())
