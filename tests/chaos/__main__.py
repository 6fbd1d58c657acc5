"""`python -m tests.chaos --minutes 5 --seed N`: random faults under load, then every promise is judged.

A cluster of real brokers, each with a host (network namespace) and a disk (ext4 on a loop device) of its own where
this machine allows it; publishers, readers and metadata clients that go on all the time; one fault after another,
sometimes before the last one is over. In the end all is healed, every replica is read, and the checkers speak. The same
seed picks the same faults; what the processes make of them differs from run to run.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import shutil
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from natslog.errors import NatslogError
from tests.chaos import report
from tests.chaos.checkers import Copy, final_copies, judge
from tests.chaos.faults import KINDS, Kind, Scene
from tests.chaos.history import FaultEvent, History, Violation
from tests.chaos.network import missing_for_network
from tests.chaos.recorders import BatchPublisher, MetadataClient, Probe, Reader, Recorder, Sampler
from tests.cluster_harness import Cluster, ClusterOptions
from tests.harness import eventually

STREAM = "orders"
_DISK_BYTES = 192 * 1024 * 1024
_DISK_BYTES_PER_MINUTE = 10 * 1024 * 1024  # what is published stays to the end, to be checked
_SETTINGS = {"segment_bytes": "256KiB", "min_free_bytes": "16MiB", "retention_interval": "2s"}
_OVERTIME_S = 300


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--brokers", type=int, default=3)
    parser.add_argument("--publishers", type=int, default=3)
    parser.add_argument("--only", default="", help="fault kinds, comma-separated: 'kill one,pause one'")
    parser.add_argument("--resume-within", type=float, default=10.0, help="seconds")
    parser.add_argument("--sync-within", type=float, default=60.0, help="seconds")
    parser.add_argument("--out", type=Path, default=None, help="folder for the report; build/chaos/SEED")
    return parser.parse_args()


class Run:
    """One cluster, from the first message to the verdict."""

    def __init__(self, arguments: argparse.Namespace, seed: int, folder: Path) -> None:
        self.arguments, self.seed, self.folder = arguments, seed, folder
        self.chance = random.Random(seed)
        lacking = missing_for_network()
        clocks = find_spec("libfaketime") is not None
        is_root = os.geteuid() == 0
        self.can = {"": True, "network": lacking is None, "disks": is_root, "clocks": clocks}
        for what, reason in (("network", lacking), ("disks", "loop devices need root"), ("clocks", "no libfaketime")):
            if not self.can[what]:
                print(f"skipped: faults of {what}: {reason}")
        options = ClusterOptions(
            brokers=arguments.brokers,
            disks=is_root,
            disk_bytes=_DISK_BYTES + int(arguments.minutes * _DISK_BYTES_PER_MINUTE),
            network=lacking is None,
            clocks=(seed % arguments.brokers + 1,) if clocks else (),
            settings=_SETTINGS,
        )
        self.cluster = Cluster(folder / "cluster", options)
        self.history = History()
        self.recorders: list[Recorder] = []
        self.is_interrupted = False

    def interrupt(self, *_: object) -> None:
        """What was seen so far is judged, too."""
        self.is_interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("ending after this fault; once more to end at once", flush=True)

    def close(self) -> None:
        for recorder in self.recorders:
            recorder.stopping.set()
        self.cluster.close()
        for image in self.cluster.folder.glob("*.img"):
            image.unlink()

    # ---- from beginning to end ----

    def run(self) -> tuple[dict[str, Any], bool]:
        cluster = self.cluster.start()
        with cluster.client() as client:
            client.create_stream(STREAM, f"{STREAM}.>", replicas=3, min_isr=2, dedupe_window="30m")
        cluster.wait_in_sync()
        scene = Scene(cluster, self.history, STREAM, self.chance)
        self._start_recorders(scene)
        eventually(lambda: self.history.acked > 100, 30, "100 acked messages")
        self._break_things(scene)
        copies, violations = self._settle(scene)
        found = report.summary(self.seed, self.history, copies, violations)
        report.write(self.folder, found, self.history)
        report.show(found)
        return found, bool(violations)

    def _start_recorders(self, scene: Scene) -> None:
        cluster, history, run = self.cluster, self.history, secrets.token_hex(4)
        history.started_s = time.monotonic()
        publishers = range(self.arguments.publishers)
        self.recorders = [BatchPublisher(history, cluster.nats_url, run, STREAM) for _ in publishers]
        self.recorders += [
            Probe(history, cluster.nats_url, STREAM),
            Reader(history, cluster, STREAM, self.seed),
            MetadataClient(history, cluster, 1, self.seed),
            MetadataClient(history, cluster, 2, self.seed),
            Sampler(history, cluster, STREAM, scene.unexpected_ends),
        ]
        for recorder in self.recorders:
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
            self._one_fault(scene, bag.pop())

    def _one_fault(self, scene: Scene, kind: Kind) -> None:
        history = self.history
        event = FaultEvent(kind.name, "", time.monotonic(), True)
        fault = None
        try:
            fault = kind.begin(scene)
            event.place, event.keeps_majority, event.notes = fault.place, fault.keeps_majority, fault.notes
            history.faults.append(event)
            print(f"{event.began_s - history.started_s:7.1f} s  {kind.name}: {fault.place}", flush=True)
            time.sleep(fault.hold_s)
            healing_s = time.monotonic()
            fault.heal()
            if not event.keeps_majority:  # writes are due from the moment the cause is gone and all processes answer
                event.healed_s = scene.alive_s if scene.alive_s > healing_s else healing_s
        except (AssertionError, NatslogError, OSError) as error:
            history.violate("harness", f"{kind.name} {event.place}: {error}")
            if fault is None:
                history.faults.append(event)
        event.healed_s = event.healed_s or time.monotonic()
        self._make_whole(scene)
        if kind.may_overlap and self.chance.random() < 0.25:
            event.is_awaited = False
            return
        self._await_sync(scene, event)

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

    def _settle(self, scene: Scene) -> tuple[list[Copy], list[Violation]]:
        """All healed, all quiet: what the replicas hold, and what is wrong with it."""
        self._make_whole(scene)
        try:
            self.cluster.wait_in_sync(self.arguments.sync_within)
        except AssertionError as error:
            self.history.violate("6 back in sync", f"in the end: {error}")
        time.sleep(3.0)  # some traffic in peace
        for recorder in self.recorders:
            recorder.finish()
            if recorder.is_alive():
                self.history.violate("harness", f"{recorder.name} does not end")
        try:
            self.cluster.wait_settled(STREAM, self.arguments.sync_within)
        except AssertionError as error:
            self.history.violate("6 back in sync", f"after the last message: {error}")
        copies, found = final_copies(self.cluster, STREAM)
        arguments = self.arguments
        return copies, found + judge(self.history, copies, arguments.resume_within, arguments.sync_within)


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
