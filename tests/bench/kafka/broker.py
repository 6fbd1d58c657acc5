"""One Kafka broker with its controller in the same process (KRaft), as it comes, on loopback ports.

Its jars come from Maven Central (`jars`). It has no logging backend, so it logs nothing; what it prints is in
`kafka.log` of its folder.
"""

from __future__ import annotations

import base64
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from natslog.nats_server import free_port, is_listening
from tests.bench.jars import java, resolve
from tests.harness import eventually

KAFKA_VERSION = "4.3.1"
PARTITIONS = 2
_START_WITHIN_S = 60.0
_STOP_WITHIN_S = 30.0
_WITHIN_S = 30.0
PRODUCED_AT_ONCE = 5_000
_QUEUED = 100_000  # messages, librdkafka's default
_FULL_POLL_S = 0.002
QUIET = {"log_level": 3}  # errors only
_SINGLY = {"linger.ms": 0, "batch.num.messages": 1}
# Those of Kafka's own start script.
_JVM = [
    "-Xmx1G",
    "-Xms1G",
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
]


def properties(folder: Path, port: int, controller_port: int) -> str:
    """A single node's `server.properties`: only what one node on one machine must set."""
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "log.dirs": str(folder / "data"),
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())


class KafkaBroker:
    """Runs from `start` to `stop`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self.servers = f"127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "Kafka was started"
        return self._process.pid

    def start(self) -> KafkaBroker:
        """Returns when it answers clients.

        Raises:
            RuntimeError: its jars cannot be had.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        jars = resolve("org.apache.kafka", "kafka_2.13", KAFKA_VERSION)
        config = self._folder / "server.properties"
        config.write_text(properties(self._folder, self._port, free_port()))
        command = [java(), *_JVM, "-cp", ":".join(map(str, jars))]
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        tool = [
            "kafka.tools.StorageTool",
            "format",
            f"--cluster-id={cluster}",
            "-c",
            str(config),
        ]  # it may begin with -
        with open(self._folder / "kafka.log", "ab") as log:
            done = subprocess.run([*command, *tool], stdout=log, stderr=log, check=False, timeout=_START_WITHIN_S)
            assert done.returncode == 0, f"Kafka's folder could not be formatted: {self._output()}"
            self._process = subprocess.Popen(
                [*command, "kafka.Kafka", str(config)], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        eventually(self._answers, _START_WITHIN_S, "Kafka answers", every_s=0.1)
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"Kafka ended: {self._output()}"
        if not is_listening(self._port):
            return False
        try:
            return bool(self._admin().list_topics(timeout=5).brokers)
        except KafkaException:
            return False

    def _output(self) -> str:
        return (self._folder / "kafka.log").read_text(errors="replace")[-2000:]

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.servers, **QUIET})

    def stop(self) -> None:
        """Its data is no longer needed: it may take its time to leave, but not long."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def create_topic(self, name: str, partitions: int = PARTITIONS, **config: str) -> None:
        """A topic.

        Args:
            config: its settings, with `_` for `.`: `flush_messages="1"`.
        """
        settings = {key.replace("_", "."): value for key, value in config.items()}
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=settings)
        admin = self._admin()  # must live until the answer is here
        admin.create_topics([topic])[name].result(_WITHIN_S)

    def stored(self, name: str) -> int:
        """Rows of a topic, by the offsets at the ends of its partitions."""
        consumer = Consumer({"bootstrap.servers": self.servers, "group.id": "natslog-bench", **QUIET})
        try:
            ends = [
                consumer.get_watermark_offsets(TopicPartition(name, partition), timeout=_WITHIN_S)
                for partition in range(PARTITIONS)
            ]
        finally:
            consumer.close()
        return sum(high - low for low, high in ends)

    def fill(self, name: str, values: list[bytes], rows: int, *, is_singly: bool = False) -> None:
        """Produces `values`, over and over, until the topic has `rows` more, with librdkafka's defaults.

        Args:
            is_singly: each record is a batch and a request of its own.
        """
        before = self.stored(name)
        producer = Producer({"bootstrap.servers": self.servers, **QUIET, **(_SINGLY if is_singly else {})})
        messages = [{"value": value} for value in values] * -(-PRODUCED_AT_ONCE // len(values))
        sent = 0
        while sent < rows:
            at = sent % len(messages)
            sent += produce(producer, name, messages[at : at + min(PRODUCED_AT_ONCE, rows - sent)])
        assert producer.flush(_WITHIN_S) == 0, "Kafka acked every row"
        stored = self.stored(name) - before
        assert stored == rows, f"{stored} rows are stored of {rows}"


def produce(producer: Producer, topic: str, messages: list[dict[str, bytes]]) -> int:
    """Waits until librdkafka's queue has room for all of them; returns how many there are."""
    while len(producer) > _QUEUED - len(messages):
        producer.poll(_FULL_POLL_S)
    queued = int(producer.produce_batch(topic, messages))
    assert queued == len(messages), f"{queued} messages of {len(messages)} were queued"
    return queued


@contextmanager
def kafka_side(folder: Path) -> Iterator[KafkaBroker]:
    """A Kafka broker without topics."""
    broker = KafkaBroker(folder)
    try:
        yield broker.start()
    finally:
        broker.stop()
