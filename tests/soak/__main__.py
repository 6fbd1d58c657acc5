"""`python -m tests.soak --minutes 10 --seed N`: Spark at work on a stream while everything is killed; then counted.

Publishers send unique messages and note which were acked. Two jobs of `spark_jobs/`, run as a supervisor runs them,
read the stream: `stream_to_parquet.py` writes a table, `enrich_stream.py` another stream that deduplicates. A third
one, `changing_job.py`, publishes to a stream and appends to another one, and is redeployed in other versions and set
back to earlier checkpoints. `real_time_job.py` copies the stream in real time. Brokers, the NATS server and the drivers
are killed (SIGKILL) and paused, one after another, in the end all at once; each start of a driver reads with the other
reader for Spark. Then all is started again and drained, and every acked message must be once in the table, read through
Spark's own file log as a user reads it, and once in the streams of `enrich_stream.py` and `real_time_job.py`. What
`changing_job.py` published must be there at least once; what it appended exactly once, in each stream up to where its
query ended with the reason, and in the last one completely. The
same seed picks the same faults in the same order.
"""

from __future__ import annotations

import argparse
import random
import secrets
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from natslog.client import NatslogClient
from natslog.errors import NatslogError
from tests.chaos.history import FaultEvent, History
from tests.chaos.recorders import BatchPublisher, Sampler
from tests.chaos.scene import Kind
from tests.cluster_harness import Cluster, ClusterOptions
from tests.harness import eventually
from tests.soak import report
from tests.soak.changing_job import original
from tests.soak.checkers import Count, count, gaps
from tests.soak.drivers import APPENDED, CHANGED, ChangingDriver, Driver
from tests.soak.faults import SoakScene, kill_everything, kinds
from tests.spark.job_processes import job_environment

STREAM, OUTPUT, LIVE = "orders", "copies", "live"
CHANGING_JOB, REAL_TIME_JOB = (Path(__file__).with_name(f"{name}_job.py") for name in ("changing", "real_time"))
_SETTINGS = {"segment_bytes": "1MiB", "min_free_bytes": "16MiB", "retention_interval": "2s"}
_FIRST_BATCH_WITHIN_S = 400.0
_DRAINED_WITHIN_S = 300.0
_SYNC_WITHIN_S = 60.0
_OVERTIME_S = 900


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults; each kind comes once, however short")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--brokers", type=int, default=3)
    parser.add_argument("--publishers", type=int, default=2)
    parser.add_argument("--only", default="", help="fault kinds, comma-separated: 'kill nats,kill driver table'")
    parser.add_argument("--out", type=Path, default=None, help="folder for logs, table and report; build/soak/SEED")
    return parser.parse_args()


class Run:
    """From the first message to the verdict."""

    def __init__(self, arguments: argparse.Namespace, seed: int, folder: Path) -> None:
        self.arguments, self.seed, self.folder = arguments, seed, folder
        self.chance = random.Random(seed)
        self.cluster = Cluster(folder / "cluster", ClusterOptions(brokers=arguments.brokers, settings=_SETTINGS))
        self.history = History()
        self.recorders: list[BatchPublisher | Sampler] = []
        servers = ",".join(broker.url for broker in self.cluster.brokers)
        environment = job_environment(servers, self.cluster.nats_url)
        self.table = folder / "table"
        common = ["--stream", STREAM, "--max-offsets-per-trigger", "4000"]
        to_table = ["stream_to_parquet.py", *common, "--output", str(self.table), "--every", "500ms"]
        to_stream = ["enrich_stream.py", *common, "--fields", "n int", "--to-subject", f"{OUTPUT}.>"]
        self.drivers = [
            Driver("table", to_table, folder / "checkpoint-table", environment, self._table_files),
            Driver("copy", [*to_stream, "--ack-timeout", "15s"], folder / "checkpoint-copy", environment, self._copies),
        ]
        changing = [str(CHANGING_JOB), "--stream", STREAM, "--published", CHANGED, "--appended", APPENDED]
        self.changing = ChangingDriver("changing", changing, folder / "changing", environment, self._changed)
        self.drivers.append(self.changing)
        live = [str(REAL_TIME_JOB), "--stream", STREAM, "--target", LIVE]
        checkpoint = folder / "checkpoint-live"
        self.drivers.append(Driver("live", live, checkpoint, environment, self._live, needs_jar=True))

    def _table_files(self) -> int:
        return sum(1 for _ in self.table.glob("day=*/*.parquet"))

    def _copies(self) -> int | None:
        return self._high_watermark(OUTPUT)

    def _live(self) -> int | None:
        return self._high_watermark(LIVE)

    def _changed(self) -> int | None:
        return self._high_watermark(CHANGED)

    def _high_watermark(self, stream: str) -> int | None:
        found = self.cluster.stream(stream)
        return None if found is None else found.get("high_watermark")

    def close(self) -> None:
        for recorder in self.recorders:
            recorder.stopping.set()
        for driver in self.drivers:
            driver.close()
        self.cluster.close()

    # ---- from beginning to end ----

    def run(self) -> bool:
        """Whether every promise was kept."""
        self._create_streams()
        scene = SoakScene(self.cluster, self.history, STREAM, self.chance, self.drivers)
        self._start_recorders(scene)
        for driver in self.drivers:
            driver.start()
        for driver in self.drivers:
            driver.wait_for_batches(1, _FIRST_BATCH_WITHIN_S)
        self._break_things(scene)
        counts = self._check_end_state(scene)
        found = report.summary(self.seed, self.history, self.drivers, counts, self.changing.conflicts)
        report.write(self.folder, found)
        report.show(found)
        return not self.history.violations and all(one.is_exact for one in counts)

    def _create_streams(self) -> None:
        brokers = self.arguments.brokers
        settings = {"replicas": brokers, "min_isr": brokers // 2 + 1, "dedupe_window": "12h"}
        with self.cluster.start().client() as client:
            client.create_stream(STREAM, f"{STREAM}.>", **settings)
            client.create_stream(OUTPUT, f"{OUTPUT}.>", **settings)
            client.create_stream(CHANGED, f"{CHANGED}.>", **settings)
            client.create_stream(LIVE, LIVE, **settings)
        self.cluster.wait_in_sync()

    def _start_recorders(self, scene: SoakScene) -> None:
        run = secrets.token_hex(4)
        self.history.started_s = time.monotonic()
        self.recorders = [
            BatchPublisher(self.history, self.cluster.nats_url, run, STREAM) for _ in range(self.arguments.publishers)
        ]
        self.recorders.append(Sampler(self.history, self.cluster, STREAM, scene.unexpected_ends))
        for recorder in self.recorders:
            recorder.start()
        eventually(lambda: self.history.acked > 100, 60, "100 acked messages")

    def _break_things(self, scene: SoakScene) -> None:
        wanted = {name.strip() for name in self.arguments.only.split(",") if name.strip()}
        all_kinds = kinds(self.arguments.brokers, self.drivers)
        chosen = [kind for kind in all_kinds if not wanted or kind.name in wanted]
        assert chosen, f"no such fault; there are: {', '.join(kind.name for kind in all_kinds)}"
        until = time.monotonic() + self.arguments.minutes * 60
        bag = self.chance.sample(chosen, len(chosen))
        while bag:
            time.sleep(self.chance.uniform(0.5, 4.0))
            self._one_fault(scene, bag.pop())
            if not bag and time.monotonic() < until:
                bag = self.chance.sample(chosen, len(chosen))
        self._one_fault(scene, Kind(kill_everything))

    def _one_fault(self, scene: SoakScene, kind: Kind) -> None:
        event = FaultEvent(kind.name, "", time.monotonic(), True)
        self.history.faults.append(event)
        try:
            fault = kind.begin(scene)
            event.place, event.keeps_majority = fault.place, fault.keeps_majority
            print(f"{event.began_s - self.history.started_s:7.1f} s  {kind.name}: {fault.place}", flush=True)
            time.sleep(fault.hold_s)
            fault.heal()
            self.cluster.wait_in_sync(_SYNC_WITHIN_S)
        except (AssertionError, NatslogError, OSError) as error:
            self.history.violate("harness", f"{kind.name} {event.place}: {error}")
        event.healed_s = time.monotonic()

    # ---- all whole, all quiet ----

    def _check_end_state(self, scene: SoakScene) -> list[Count]:
        for recorder in self.recorders:
            recorder.finish()
            if recorder.is_alive():
                self.history.violate("harness", f"{recorder.name} does not end")
        scene.unexpected_ends()
        with self.cluster.client() as client:
            end = int(client.position(STREAM)["high_watermark"])
            for driver in self.drivers:
                self._drain(driver, end)
            copies, live = values_of(client, OUTPUT), values_of(client, LIVE)
            changed = originals(values_of(client, CHANGED))
            ended = len(self.changing.conflicts)
            appended = [originals(values_of(client, f"{APPENDED}-{number}")) for number in range(ended + 1)]
        rows = read_table(self.table)
        if problem := gaps(rows.column("offset").to_pylist(), end):
            self.history.violate("offsets of the table", problem)
        published = self.history.published
        return [
            count("table", published, rows.column("value").to_pylist()),
            count("stream", published, copies),
            count("real time", published, live),
            count("published", published, set(changed)),  # once or several times
            *(count(f"ended {at}", published, values, up_to_an_end=True) for at, values in enumerate(appended[:-1])),
            count("appended", published, appended[-1]),
        ]

    def _drain(self, driver: Driver, end: int) -> None:
        eventually(lambda: driver.position(STREAM) >= end, _DRAINED_WITHIN_S, f"{driver.name} read up to {end}")
        if code := driver.terminate():
            self.history.violate("an orderly end", f"{driver.name} ended with {code} on SIGTERM: {driver.log_path}")


def values_of(client: NatslogClient, stream: str) -> list[bytes]:
    return [value for batch in client.read(stream) for value in batch.column("value").to_pylist()]


def originals(values: list[bytes]) -> list[bytes]:
    """The messages in rows of `changing_job.py`."""
    return [message for message in map(original, values) if message is not None]


def read_table(table: Path) -> Any:
    """Offsets and values as a user of Spark sees them: by `_spark_metadata`, not by what lies in the folder."""
    from pyspark.sql import SparkSession

    assert (table / "_spark_metadata").is_dir(), "without its log, the table is a heap of files"
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    try:
        return spark.read.parquet(str(table)).select("offset", "value").toArrow()
    finally:
        spark.stop()


def _out_of_time(*_: object) -> None:
    raise TimeoutError("the run took far too long")


def main() -> int:
    arguments = _arguments()
    seed = arguments.seed if arguments.seed is not None else secrets.randbelow(1_000_000)
    folder = arguments.out or Path("build") / "soak" / str(seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"seed {seed}; logs, table and report in {folder}", flush=True)
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.alarm(int(arguments.minutes * 60) + _OVERTIME_S)
    run = Run(arguments, seed, folder.resolve())
    try:
        is_kept = run.run()
    finally:
        signal.alarm(0)
        run.close()
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
