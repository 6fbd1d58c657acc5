"""Publishers that keep a queue full for some seconds, each in a process of its own.

    python -m tests.bench.kafka.clients librdkafka 127.0.0.1:9092 TOPIC --bytes 128 --seconds 3
    python -m tests.bench.kafka.clients natslog nats://127.0.0.1:4222 SUBJECT --bytes 128 --seconds 3
    python -m tests.bench.kafka.clients envelopes nats://127.0.0.1:4222 SUBJECT --bytes 128 --seconds 3

Prints one line of JSON, as `raw_nats` does: acked messages a second, messages sent, and seconds of processor time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import pyarrow as pa
from confluent_kafka import Producer

from natslog.client.publisher import Publisher, Rows
from tests.bench.kafka.broker import PRODUCED_AT_ONCE, QUIET, produce
from tests.bench.raw_nats import payload

_AT_ONCE = 10_000
_WINDOW = 40_000
_FLUSH_WITHIN_S = 60.0


def run(
    send: Callable[[], int], acked: Callable[[], int], finish: Callable[[], None], seconds: float, warm_s: float
) -> dict[str, float]:
    """Calls `send`, which returns how many messages it sent, until the time is up; counts acks after `warm_s`."""
    started, started_cpu = time.perf_counter(), time.process_time()
    sent, counted_from, counted_at = 0, 0, started
    is_warm = False
    while (now := time.perf_counter()) < started + warm_s + seconds:
        if not is_warm and now >= started + warm_s:
            is_warm, counted_from, counted_at = True, acked(), now
        sent += send()
    rate = (acked() - counted_from) / (time.perf_counter() - counted_at)
    finish()
    assert acked() == sent, f"{acked()} messages are acked of {sent}"
    return {"rate": rate, "sent": sent, "cpu_s": time.process_time() - started_cpu}


def by_librdkafka(servers: str, topic: str, size: int, seconds: float, warm_s: float) -> dict[str, float]:
    """With its defaults, messages made once. A message that has left its queue was acked, or an error is reported."""
    failed: list[str] = []
    options = {"bootstrap.servers": servers, "error_cb": lambda error: failed.append(str(error)), **QUIET}
    producer = Producer(options)
    messages = [{"value": payload(size)} for _ in range(PRODUCED_AT_ONCE)]
    sent = 0

    def send() -> int:
        nonlocal sent
        sent += produce(producer, topic, messages)
        return len(messages)

    def finish() -> None:
        producer.flush(_FLUSH_WITHIN_S)
        assert not failed, failed[:3]

    return run(send, lambda: sent - len(producer), finish, seconds, warm_s)


def by_natslog(
    url: str, subject: str, size: int, seconds: float, warm_s: float, *, envelope: bool = False
) -> dict[str, float]:
    rows = Rows(pa.array([subject] * _AT_ONCE), pa.array([payload(size)] * _AT_ONCE))
    with Publisher(url, max_in_flight=_WINDOW, envelope=envelope) as publisher:

        def send() -> int:
            publisher.send(rows, "stored")
            return len(rows)

        return run(send, lambda: publisher.acked, lambda: publisher.wait_for_ack("stored"), seconds, warm_s)


_WAYS = {"librdkafka": by_librdkafka, "natslog": by_natslog, "envelopes": partial(by_natslog, envelope=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=list(_WAYS))
    parser.add_argument("server")
    parser.add_argument("name", help="of the topic or subject")
    parser.add_argument("--bytes", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warm", type=float, default=1.0)
    given = parser.parse_args()
    print(json.dumps(_WAYS[given.how](given.server, given.name, given.bytes, given.seconds, given.warm)))


if __name__ == "__main__":
    main()
