"""Producers and consumers of `real_time`, each a process of its own: what one of them does must not delay another.

    python -m tests.bench.real_time_clients produce nats|kafka SERVERS TO RATE SECONDS
    python -m tests.bench.real_time_clients consume nats|kafka SERVERS FROM COUNT WARM_S

Messages have a key and 130 bytes, which begin with the time in ns at which they were made. The consumer prints a line
when it is ready, and at the end the quantiles of the time until it had a message, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import nats
from confluent_kafka import Consumer, Producer

VALUE_BYTES, KEYS = 130, 100
READY = "@ready"
_NOTHING_FOR_S = 20.0
_TICK_S = 0.001


def value() -> bytes:
    return b"%019d" % time.time_ns() + b"x" * (VALUE_BYTES - 19)


def key(number: int) -> str:
    return f"key-{number % KEYS}"


class Times:
    """Of the messages that were made after the first `warm_s`."""

    def __init__(self, count: int, warm_s: float) -> None:
        self._count, self._warm_ns = count, int(warm_s * 1e9)
        self._first_ns = self.seen = 0
        self._found: list[int] = []

    def take(self, message: bytes) -> None:
        now_ns, made_ns = time.time_ns(), int(message[:19])
        self._first_ns = self._first_ns or made_ns
        self.seen += 1
        if made_ns - self._first_ns >= self._warm_ns:
            self._found.append(now_ns - made_ns)

    @property
    def are_complete(self) -> bool:
        return self.seen >= self._count

    def summary(self) -> dict[str, float]:
        times = sorted(self._found)
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
        quantiles = {name: times[int(share * len(times))] / 1e6 for name, share in shares.items()} if times else {}
        return {"messages": self.seen, "measured": len(times), **quantiles}


async def paced(rate: int, seconds: float, send: Callable[[int], Any]) -> None:
    """Calls `send` with rising numbers, `rate` times a second."""
    started, sent = time.monotonic(), 0
    while sent < rate * seconds:
        due = min(int((time.monotonic() - started) * rate), int(rate * seconds))
        while sent < due:
            done = send(sent)
            if done is not None:
                await done
            sent += 1
        await asyncio.sleep(_TICK_S)


async def produce_nats(url: str, subject: str, rate: int, seconds: float) -> None:
    connection = await nats.connect(url)

    async def send(number: int) -> None:
        await connection.publish(subject, value(), headers={"Natslog-Key": key(number)})
        await connection._flush_pending()  # nats-py would gather messages

    await paced(rate, seconds, send)
    await connection.close()


def produce_kafka(servers: str, topic: str, rate: int, seconds: float) -> None:
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 0, "log_level": 3})

    def send(number: int) -> None:
        producer.produce(topic, value(), key(number))
        producer.poll(0)

    asyncio.run(paced(rate, seconds, send))
    producer.flush(30)


async def consume_nats(url: str, stream: str, times: Times) -> None:
    connection = await nats.connect(url)
    news = asyncio.Event()

    async def take(message: Any) -> None:
        times.take(message.data)
        news.set()

    subject = (await connection.jetstream().stream_info(stream)).config.subjects[0]
    config = nats.js.api.ConsumerConfig(ack_policy=nats.js.api.AckPolicy.NONE)
    await connection.jetstream().subscribe(subject, stream=stream, cb=take, config=config)
    print(READY, flush=True)
    while not times.are_complete:
        news.clear()
        await asyncio.wait_for(news.wait(), 60 if not times.seen else _NOTHING_FOR_S)
    await connection.close()


def consume_kafka(servers: str, topic: str, times: Times) -> None:
    """One message at a time: a call that waits for many would measure itself."""
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": "real-time", "auto.offset.reset": "earliest", "fetch.wait.max.ms": 1}
        | {"log_level": 3}
    )
    consumer.subscribe([topic])
    while not consumer.assignment():
        consumer.poll(0.1)
    print(READY, flush=True)
    while not times.are_complete:
        message = consumer.poll(60 if not times.seen else _NOTHING_FOR_S)
        if message is None:
            break
        if message.error() is None:
            times.take(message.value())
    consumer.close()


def main() -> None:
    what, kind, servers, name, first, second = sys.argv[1:]
    if what == "produce":
        rate, seconds = int(first), float(second)
        if kind == "nats":
            asyncio.run(produce_nats(servers, name, rate, seconds))
        else:
            produce_kafka(servers, name, rate, seconds)
        return
    times = Times(int(first), float(second))
    try:
        if kind == "nats":
            asyncio.run(consume_nats(servers, name, times))
        else:
            consume_kafka(servers, name, times)
    except TimeoutError:
        print("no message for some time", file=sys.stderr)
    print(json.dumps(times.summary()), flush=True)


if __name__ == "__main__":
    main()
