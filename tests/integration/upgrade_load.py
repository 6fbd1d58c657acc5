"""The clients of a cluster whose brokers change their version, and a comparison of their results.

Publishers with acks and message ids, one without acks, a reader of everything, a consumer with a cursor, a consumer of
the JetStream API, and two Spark queries that copy the stream: one of this version with the Python source, one of a
release with its columnar reader.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import nats
import nats.errors

from natslog.nats_server import end_with_parent
from tests.chaos.history import History, name_of, value_of
from tests.chaos.recorders import BatchPublisher, Reader, Recorder
from tests.cluster_harness import Cluster
from tests.harness import all_values, eventually, publish_acked
from tests.jetstream.three_brokers import create_consumer
from tests.released import release
from tests.spark_start import QUICK_JVM

ACKED, PLAIN = "acked", "plain"
QUERY = Path(__file__).with_name("upgrade_query.py")
_EVERY_S = 0.03
_EACH = 5
"""Messages that are published at once without acks; the last of them asks for one."""
_PROGRESS_WITHIN_S = 300.0
_ENDS_WITHIN_S = 90.0
_FETCHED = 200


class WithoutAcks(Recorder):
    """Numbered messages on one connection, each sent once. Every `_EACH`-th asks for an ack with the leader epoch.

    Attributes: `epochs`: of acks. `refusals`: what a leader answered instead. Both by number.
    """

    def __init__(self, history: History, url: str) -> None:
        super().__init__(history, "publisher without acks")
        self._url = url
        self.sent_s: list[float] = []
        self.epochs: dict[int, int] = {}
        self.refusals: dict[int, str] = {}

    def work(self) -> None:
        asyncio.run(self._publish())

    async def _publish(self) -> None:
        connection = await nats.connect(self._url, connect_timeout=5)
        try:
            inbox = connection.new_inbox()
            await connection.subscribe(f"{inbox}.*", cb=self._on_ack)
            while not self.stopping.is_set():
                for _ in range(_EACH):
                    number = len(self.sent_s)
                    self.sent_s.append(time.monotonic())
                    is_last = number % _EACH == _EACH - 1
                    reply, headers = (f"{inbox}.{number}", {"Natslog-Ack": "full"}) if is_last else ("", None)
                    await connection.publish(PLAIN, b"%d" % number, reply=reply, headers=headers)
                await asyncio.sleep(_EVERY_S)
            await asyncio.sleep(2.0)  # for the last acks
        finally:
            await connection.close()

    async def _on_ack(self, message: Any) -> None:
        answer = json.loads(message.data) if message.data else {}
        number = int(message.subject.rpartition(".")[2])
        if "epoch" in answer:
            self.epochs[number] = answer["epoch"]
        elif "error" in answer:
            self.refusals[number] = answer["error"]["description"]


@dataclass(frozen=True, slots=True)
class Losses:
    """What became of messages without acks.

    Attributes:
        lost: how many are not stored. unexplained: numbers of those that were sent between two messages that were acked
            in one leader epoch: their leader must have received them. doubled: numbers that are stored twice.
        without_leader_s: the sum of the times between two acked messages of different epochs.
    """

    sent: int
    lost: int
    unexplained: list[int]
    doubled: list[int]
    without_leader_s: float


def count_losses(sent_s: Sequence[float], epochs: Mapping[int, int], stored: Sequence[int]) -> Losses:
    """Judges numbered messages, of which some asked for acks.

    Args:
        sent_s: when each was sent, by number. epochs: of the acks, by number. stored: the numbers in the stream.
    """
    counts, acked = Counter(stored), sorted(epochs)
    had_leader, without_leader_s = set(acked), 0.0
    for before, after in pairwise(acked):
        if epochs[before] == epochs[after]:
            had_leader |= set(range(before, after))
        else:
            without_leader_s += sent_s[after] - sent_s[before]
    if acked and epochs[acked[0]] == min(epochs.values()):
        had_leader |= set(range(acked[0]))  # the stream had its first leader before they were sent
    lost = [number for number in range(len(sent_s)) if number not in counts]
    return Losses(
        sent=len(sent_s),
        lost=len(lost),
        unexplained=[number for number in lost if number in had_leader],
        doubled=[number for number, count in counts.items() if count > 1],
        without_leader_s=without_leader_s,
    )


class CursorConsumer(Recorder):
    """Consumes with a cursor; begins again there after an error. `seen`: how often each offset came."""

    def __init__(self, history: History, cluster: Cluster) -> None:
        super().__init__(history, "consumer with a cursor")
        self._cluster = cluster
        self.seen: Counter[int] = Counter()

    def work(self) -> None:
        with self._cluster.client() as client, client.consume(ACKED, cursor="upgraded", wait_ms=500) as consumer:
            for batch in consumer:
                self.seen.update(batch.record_batch.column("offset").to_pylist())
                if self.stopping.is_set():
                    return


class JetStreamConsumer(Recorder):
    """Pulls and acks each message. `seen`: how often each sequence came."""

    def __init__(self, history: History, url: str) -> None:
        super().__init__(history, "consumer of JetStream")
        self._url = url
        self.seen: Counter[int] = Counter()

    def work(self) -> None:
        asyncio.run(self._consume())

    async def _consume(self) -> None:
        connection = await nats.connect(self._url, connect_timeout=5)
        try:
            js = connection.jetstream(timeout=5)
            worker = await js.pull_subscribe_bind(consumer="worker", stream=ACKED)
            while not self.stopping.is_set():
                for message in await worker.fetch(_FETCHED, timeout=2):
                    self.seen[message.metadata.sequence.stream] += 1
                    await message.ack()
        finally:
            await connection.close()


class Query:
    """A process that copies `ACKED` into a stream of its own."""

    def __init__(self, cluster: Cluster, folder: Path, target: str, version: str | None) -> None:
        self.target, self._log = target, folder / f"{target}.log"
        python, variables, jar = sys.executable, {}, []
        if version is not None:
            found = release(version)
            python, variables = str(found.python), found.environment
            jar = [str(found.folder / "connector" / "pyspark_natslog" / "jars" / "natslog-spark.jar")]
        servers = ",".join(broker.url for broker in cluster.brokers)
        command = [python, str(QUERY), servers, ACKED, target, str(folder / f"checkpoint-{target}"), *jar]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_HOME", "PYTHONPATH"))}
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=kept | {"SPARK_SUBMIT_OPTS": QUICK_JVM} | variables,
                preexec_fn=end_with_parent,
                start_new_session=True,
            )

    def must_run(self) -> None:
        assert self._process.poll() is None, f"{self.target} ended: {self._log.read_text(errors='replace')[-3000:]}"

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class UpgradeLoad:
    """Begins with it; `finish` ends it, and returns what is wrong."""

    def __init__(self, cluster: Cluster, folder: Path, released: str) -> None:
        self.cluster, self.history = cluster, History()
        self._targets = {"copied-here": None, f"copied-{released.replace('.', '-')}": released}
        with cluster.client() as client:
            for name in (ACKED, PLAIN, *self._targets):
                subject = f"{name}.>" if name == ACKED else name
                client.create_stream(name, subject, replicas=3, min_isr=2, dedupe_window="1h")
        create_consumer(cluster, ACKED, "worker", ack_wait=30 * 10**9)
        url = cluster.nats_url
        self.publishers: list[BatchPublisher] = [
            BatchPublisher(self.history, url, "upgrade", ACKED, 60.0, every_s=0.2) for _ in range(2)
        ]
        self.without_acks = WithoutAcks(self.history, url)
        self.cursor, self.worker = CursorConsumer(self.history, cluster), JetStreamConsumer(self.history, url)
        reader = Reader(self.history, cluster, ACKED, seed=1)
        self._readers: list[Recorder] = [self.cursor, self.worker, reader]
        self._all: list[Recorder] = [*self.publishers, self.without_acks, *self._readers]
        self.queries = [Query(cluster, folder, target, version) for target, version in self._targets.items()]

    def __enter__(self) -> UpgradeLoad:
        for recorder in self._all:
            recorder.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for recorder in self._all:
            recorder.stopping.set()
        for query in self.queries:
            query.stop()

    def wait_for_progress(self) -> None:
        """Returns when each of them has gone on."""
        before = self._counts()

        def has_progressed() -> bool:
            for query in self.queries:
                query.must_run()
            now = self._counts()
            return all(now[name] > count for name, count in before.items())

        eventually(has_progressed, _PROGRESS_WITHIN_S, f"all go on after {before}", every_s=0.25)

    def _counts(self) -> dict[str, int]:
        found = {
            "acked": self.history.acked,
            "without acks": len(self.without_acks.epochs),
            "cursor": self.cursor.seen.total(),
            "worker": self.worker.seen.total(),
            "reader": len(self.history.read),
        }
        with self.cluster.client() as client:
            return found | {name: int(client.position(name)["high_watermark"]) for name in self._targets}

    def finish(self) -> tuple[list[str], Losses]:
        """Ends the publishers, waits until all others have everything, and compares."""
        self._end([*self.publishers, self.without_acks])
        for name in (ACKED, PLAIN):
            self.cluster.wait_replicated(name, 120)
        with self.cluster.client() as client:
            end = int(client.position(ACKED)["high_watermark"])
            self._wait_until_all_have(end)
            stored = all_values(client, ACKED)
            copies = {name: all_values(client, name) for name in self._targets}
            plain = [int(value) for value in all_values(client, PLAIN)]
            losses = count_losses(self.without_acks.sent_s, self.without_acks.epochs, plain)
        for reader in self._readers:
            reader.stopping.set()
        publish_acked(self.cluster.nats_url, f"{ACKED}.end", [value_of(0, 0)])  # which ends the wait of the consumers
        self._end(self._readers)
        return self._wrong(stored, copies, losses), losses

    def _end(self, recorders: Sequence[Recorder]) -> None:
        for recorder in recorders:
            recorder.stopping.set()
        for recorder in recorders:
            recorder.join(_ENDS_WITHIN_S)
            assert not recorder.is_alive(), f"{recorder.name} ends"

    def _wait_until_all_have(self, end: int) -> None:
        deadline = time.monotonic() + _PROGRESS_WITHIN_S
        while True:
            for query in self.queries:
                query.must_run()
            reached = self._counts() | {"cursor": len(self.cursor.seen), "worker": len(self.worker.seen)}
            late = {
                name: reached[name] for name in ("cursor", "worker", "reader", *self._targets) if reached[name] < end
            }
            if not late:
                return
            assert time.monotonic() < deadline, f"of {end} messages: {late}; {self.history.errors.most_common(5)}"
            time.sleep(0.25)

    def _wrong(self, stored: list[bytes], copies: dict[str, list[bytes]], losses: Losses) -> list[str]:
        end, wrong = len(stored), [f"{one.promise}: {one.text}" for one in self.history.violations]
        names = Counter(map(name_of, stored))
        for publisher in self.publishers:
            one = publisher.published
            lost = [n for n, acked_s in enumerate(one.acked_s) if acked_s is not None and (one.number, n) not in names]
            wrong += [f"publisher {one.number}: {len(lost)} acked messages are lost, {lost[:5]}"] if lost else []
        doubled = [name for name, count in names.items() if count > 1]
        wrong += [f"{len(doubled)} messages with ids are stored twice, {doubled[:5]}"] if doubled else []
        for name, seen in (("cursor", set(self.cursor.seen)), ("worker", {one - 1 for one in self.worker.seen})):
            wrong += (
                [f"{name} did not get offsets {sorted(missing)[:5]}"] if (missing := set(range(end)) - seen) else []
            )
        for name, values in copies.items():
            is_equal = sorted(values) == sorted(stored)
            wrong += [] if is_equal else [f"{name} has {len(values)} rows, not the {end} of its source"]
        wrong += [f"without acks, stored twice: {losses.doubled[:5]}"] if losses.doubled else []
        if losses.unexplained:
            wrong.append(f"without acks, lost while there was a leader: {losses.unexplained[:5]}")
        if refusals := self.without_acks.refusals:
            wrong.append(f"without acks, refused by a leader: {dict(list(refusals.items())[:5])}")
        return wrong
