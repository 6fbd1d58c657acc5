"""Those who use the cluster all the time, each a thread that writes down what it sees: publishers, readers, clients.

None of them ends for an error: refusals, timeouts and lost connections are counted, and it goes on.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import nats
import pyarrow as pa

from natslog.client import Fetched, NatslogClient
from natslog.client.publisher import Publisher, Rows
from natslog.errors import NatslogError
from tests.chaos.history import Followed, History, MetadataChange, Sample, value_of
from tests.cluster_harness import Cluster, ClusterBroker

_SIZES = (1, 1, 1, 20)
"""Of the batches of a publisher, in turn: most commits are of one message, as those of services."""
_BATCH_EVERY_S = 0.04
_PROBE_EVERY_S = 0.02
_READ_EVERY_S = 0.05
_FOLLOW_EVERY_S = 0.2
_JOIN_WITHIN_S = 40.0
_REFUSED_BEFOREHAND = (b'"not_ready"', b'"not_enough_brokers"')  # nothing was proposed: no change, then or later


class Recorder(threading.Thread, ABC):
    """Runs until told to stop."""

    def __init__(self, history: History, name: str) -> None:
        super().__init__(daemon=True, name=name)
        self.history = history
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.is_set():
            try:
                self.work()
            except (NatslogError, OSError, nats.errors.Error, TimeoutError) as error:
                self.history.note_error(self.name, error)
                self.stopping.wait(0.2)
            except Exception as error:
                self.history.violate("harness", f"{self.name} ended: {error!r}")
                raise

    @abstractmethod
    def work(self) -> None:
        """Until `stopping`, or an error after which it is called again."""

    def finish(self) -> None:
        self.stopping.set()
        self.join(_JOIN_WITHIN_S)


class BatchPublisher(Recorder):
    """Batches with message ids, one after another: a batch that fails is sent again with its ids until it is acked.

    `errors`: what `publish` raised; a Publisher hides failures that it can correct by sending again.
    """

    def __init__(
        self,
        history: History,
        url: str,
        run: str,
        stream: str,
        ack_timeout_s: float = 5.0,
        every_s: float = _BATCH_EVERY_S,
    ) -> None:
        self.published = history.new_publisher(has_ids=True)
        super().__init__(history, f"{history.stream} publisher {self.published.number}".strip())
        self.url, self.run_name, self.stream, self.ack_timeout_s = url, run, stream, ack_timeout_s
        self.every_s = every_s
        self.errors: list[str] = []
        self._batch = 0

    def work(self) -> None:
        with Publisher(self.url, ack_timeout_s=self.ack_timeout_s) as publisher:
            while not self.stopping.is_set():
                started = time.monotonic()
                self._publish(publisher)
                self.stopping.wait(max(0.0, started + self.every_s - time.monotonic()))

    def _publish(self, publisher: Publisher) -> None:
        one = self.published
        self._batch += 1
        count = _SIZES[self._batch % len(_SIZES)]
        first = one.begin(count, self._batch, time.monotonic())
        numbers = range(first, first + count)
        rows = Rows(
            pa.array([f"{self.stream}.p{one.number}"] * count),
            pa.array([value_of(one.number, number) for number in numbers]),
            ids=pa.array([f"{self.run_name}-{one.number}-{number}" for number in numbers]),
        )
        resent, tries = publisher.resent, 0
        while True:
            try:
                tries += 1
                publisher.publish(rows, "stored")
                break
            except NatslogError as error:
                self.errors.append(str(error))
                self.history.note_error(self.name, error)
                if self.stopping.wait(0.1):
                    return
        one.acked_s[first : first + count] = [time.monotonic()] * count
        if tries > 1 or publisher.resent != resent:
            one.batch[first : first + count] = [-1] * count


class Probe(Recorder):
    """Single messages without ids at an even pace, each sent once, whatever becomes of others: shows when acks come."""

    def __init__(self, history: History, url: str, stream: str) -> None:
        self.published = history.new_publisher(has_ids=False)
        super().__init__(history, "probe")
        self.url, self.stream = url, stream

    def work(self) -> None:
        asyncio.run(self._probe())

    async def _probe(self) -> None:
        one = self.published
        connection = await nats.connect(
            self.url, connect_timeout=2, reconnect_time_wait=0.1, max_reconnect_attempts=-1, error_cb=self._on_error
        )
        try:
            inbox = connection.new_inbox()
            await connection.subscribe(f"{inbox}.*", cb=self._on_ack)
            while not self.stopping.is_set():
                if connection.is_connected:
                    number = one.begin(1, -1, time.monotonic())
                    value = value_of(one.number, number)
                    await connection.publish(f"{self.stream}.probe", value, reply=f"{inbox}.{number}")
                await asyncio.sleep(_PROBE_EVERY_S)
            await asyncio.sleep(2.0)  # for the last acks
        finally:
            await connection.close()

    async def _on_error(self, error: Exception) -> None:
        self.history.note_error(self.name, repr(error))

    async def _on_ack(self, message: Any) -> None:
        number = int(message.subject.rpartition(".")[2])
        answer = json.loads(message.data) if message.data else {"error": {"description": "no responders"}}
        if "error" in answer:
            self.history.note_error(self.name, answer["error"]["description"])
            return
        if self.published.acked_s[number] is None:
            self.published.acked_s[number] = time.monotonic()
            self.published.acked_offset[number] = answer["seq"] - 1
        # acked twice is stored twice: two leaders received it; the last checker counts those


class Reader(Recorder):
    """Follows the stream through random brokers; at times looks back. Whatever was read once must stay."""

    def __init__(self, history: History, cluster: Cluster, stream: str, seed: int) -> None:
        super().__init__(history, "reader")
        self.cluster, self.stream = cluster, stream
        self._chance = random.Random(seed)
        self._next = 0

    def work(self) -> None:
        broker = self._chance.choice(self.cluster.brokers)
        if broker.is_paused:
            return
        looks_back = self._next > 0 and self._chance.random() < 0.2
        start = self._chance.randrange(self._next) if looks_back else self._next
        columns = ("offset", "value") if self._chance.random() < 0.3 else None
        with broker.client(retries=0, timeout_s=4) as client:
            fetched = client.fetch(self.stream, start, max_bytes=256 * 1024, columns=columns)
        self.history.reads += 1
        for batch in fetched.batches:
            offsets, values = batch.column("offset").to_pylist(), batch.column("value").to_pylist()
            for offset, value in zip(offsets, values, strict=True):
                self._note(offset, value, fetched.high_watermark, broker.number)
        if not looks_back:
            self._next = max(self._next, fetched.next_offset)
        self.stopping.wait(_READ_EVERY_S)

    def _note(self, offset: int, value: bytes, high_watermark: int, broker: int) -> None:
        if offset >= high_watermark:
            self.history.violate("4 nothing uncommitted", f"broker {broker}: offset {offset} ≥ HW {high_watermark}")
        known = self.history.read.setdefault(offset, hash(value))
        if known != hash(value):
            self.history.violate("2 one history", f"broker {broker}: offset {offset} reads otherwise than before")


class BoundReader(Recorder):
    """Follows the stream through one broker, from the beginning: it must get every offset once and in order.

    A broker may redirect it, or answer with a retriable error; it must not state an end below the offsets that were
    read.
    """

    def __init__(self, history: History, broker: ClusterBroker, stream: str) -> None:
        super().__init__(history, f"{stream} reader at broker {broker.number}")
        self.broker, self.stream = broker, stream
        self.followed = Followed(broker.number)
        history.followed.append(self.followed)

    def work(self) -> None:
        with self.broker.client(retries=0, timeout_s=4) as client:
            while not self.stopping.is_set():
                self.note(self._fetch(client))
                self.stopping.wait(_FOLLOW_EVERY_S)

    def _fetch(self, client: NatslogClient) -> Fetched:
        try:
            return client.fetch(self.stream, self.followed.next_offset, max_bytes=256 * 1024, wait_ms=500)
        except NatslogError as error:
            self.refused(error)
            raise

    def refused(self, error: NatslogError) -> None:
        if not error.retriable:
            at = f"broker {self.followed.broker} at offset {self.followed.next_offset}"
            self.history.violate("4 once and in order", f"{at}: {error.code}: {error}")

    def note(self, fetched: Fetched) -> None:
        one = self.followed
        for batch in fetched.batches:
            offsets, values = batch.column("offset").to_pylist(), batch.column("value").to_pylist()
            if offsets != list(range(one.next_offset, one.next_offset + len(offsets))):
                text = f"broker {one.broker}: offsets {offsets[0]} to {offsets[-1]}, not from {one.next_offset} on"
                self.history.violate("4 once and in order", text)
            for offset, value in zip(offsets, values, strict=True):
                if self.history.read.setdefault(offset, hash(value)) != hash(value):
                    text = f"broker {one.broker}: offset {offset} reads otherwise than before"
                    self.history.violate("2 one history", text)
            one.next_offset = offsets[-1] + 1 if offsets else one.next_offset
        if fetched.next_offset != one.next_offset:
            text = f"broker {one.broker}: sent on to {fetched.next_offset} from {one.next_offset}"
            self.history.violate("4 once and in order", text)
            one.next_offset = max(one.next_offset, fetched.next_offset)


class MetadataClient(Recorder):
    """Creates and deletes streams at random brokers. A name is used for a while by all clients, then the next one."""

    _NAME_FOR_S = 10.0

    def __init__(self, history: History, cluster: Cluster, number: int, seed: int) -> None:
        super().__init__(history, f"metadata client {number}")
        self.cluster = cluster
        self._chance = random.Random(seed * 1000 + number)

    def work(self) -> None:
        broker = self._chance.choice(self.cluster.brokers)
        name = f"register-{int((time.monotonic() - self.history.started_s) / self._NAME_FOR_S)}"
        kind = self._chance.choice(("create", "delete"))
        began = time.monotonic()
        if kind == "create":
            body = {"name": name, "subject": f"{name}.>", "replicas": 3}
            answer = broker.ask("POST", "/v1/streams", body, timeout_s=5)
        else:
            answer = broker.ask("DELETE", f"/v1/streams/{name}", timeout_s=5)
        outcomes = {201: "made", 200: "found"} if kind == "create" else {204: "gone", 404: "missing"}
        outcome = "unknown" if answer is None else outcomes.get(answer.status, "unknown")
        if answer is not None and outcome == "unknown":
            self.history.note_error(self.name, f"{kind}: {answer.status} {answer.data[:90]!r}")
            if any(code in answer.data for code in _REFUSED_BEFOREHAND):
                return
        self.history.changes.append(MetadataChange(name, kind, outcome, began, time.monotonic(), broker.number))
        self.stopping.wait(self._chance.random() * 0.6)


class Sampler(Recorder):
    """The size of the ISR and the leader, twice a second; tells at once of a broker that ended by itself."""

    def __init__(self, history: History, cluster: Cluster, stream: str, on_look: Callable[[], None]) -> None:
        super().__init__(history, "sampler")
        self.cluster, self.stream, self.on_look = cluster, stream, on_look

    def work(self) -> None:
        self.on_look()
        shown = [one for broker in self.cluster.up if (one := broker.json(f"/v1/streams/{self.stream}", 1)) is not None]
        if shown:
            newest = max(shown, key=lambda one: one["leader_epoch"])
            sample = Sample(time.monotonic(), len(newest["isr"]), newest["leader"], newest["leader_epoch"])
            self.history.samples.append(sample)
        self.stopping.wait(0.5)
