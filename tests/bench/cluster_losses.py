"""What clusters cost others: publishers while a broker that is far behind catches up, and publishers without acks when
the leader changes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from natslog.client import NatslogClient
from natslog.client.publisher import Publisher, Rows
from natslog.nats_server import NatsServer
from tests.bench.cluster_sides import three_brokers
from tests.bench.pairs import Comparison, console
from tests.bench.processor_time import processor_seconds
from tests.bench.sides import STREAM, SUBJECT, raw_publish, scratch
from tests.harness import BrokerProcess, eventually

Act = Callable[[NatslogClient, list[BrokerProcess], int], None]
"""Does something to the leader, whose number is given."""

_WINDOW_SECONDS = 4.0
_RATE_PER_S = 20_000
_EVERY_S = 0.01
_CATCH_UP_S = 3.0


def catching_up(behind_bytes: int, pairs: int) -> list[Comparison]:
    """The rate of acked publishing with two replicas while the third one fetches what it missed, and while it is
    stopped (SIGSTOP), in turn; then the rest, until it is in sync.
    """
    found = Comparison(
        "acked publish while a replica catches up", "messages/s", 0.7, "the same, while that broker is stopped"
    )
    with scratch() as folder, three_brokers(folder) as (server, brokers):
        client, late = brokers[0].client(), brokers[2]
        client.create_stream(STREAM, SUBJECT, replicas=3)
        if client.position(STREAM)["leader"] == 3:
            client.transfer_stream(STREAM, 1)
        late.kill()
        eventually(lambda: len(client.position(STREAM)["isr"]) == 2, 30)
        _fill(server.url, client, behind_bytes)
        rate, speeds, rest = partial(_rate, server), [], []
        late.spawn()
        eventually(late.ready, 60)
        started = time.monotonic()
        while len(found.ours) < pairs:
            had, at = _fetched_bytes(late), time.monotonic()
            meanwhile = rate()
            assert len(client.position(STREAM)["isr"]) == 2, f"{behind_bytes} bytes are too few for {pairs} pairs"
            speeds.append((_fetched_bytes(late) - had) / (time.monotonic() - at))
            os.kill(late.pid, signal.SIGSTOP)
            found.ours.append(meanwhile)
            found.theirs.append(rate())
            os.kill(late.pid, signal.SIGCONT)
            had = _fetched_bytes(late)
            eventually(lambda had=had: _fetched_bytes(late) > had, 30, "it goes on")
            console.print(f"  {meanwhile:,.0f}/s at {speeds[-1] / 1e6:.0f} MB/s, {found.theirs[-1]:,.0f}/s without")
        while len(client.position(STREAM)["isr"]) < 3:
            rest.append(rate())
            console.print(f"  {time.monotonic() - started:.0f} s: {rest[-1]:,.0f}/s", end="\r")
        found.notes = {
            "behind_bytes": behind_bytes,
            "seconds": time.monotonic() - started,
            "fetched_bytes_per_s": float(np.median(speeds)),
            "the_rest": rest,
            "three_in_sync": [rate() for _ in range(2)],
        }
    return [found]


def _fetched_bytes(broker: BrokerProcess) -> float:
    return sum(value for name, value in broker.metrics().items() if name.startswith("natslog_fetched_bytes_total"))


def _rate(server: NatsServer) -> float:
    return raw_publish(server, "acked", bytes=128, window=4000, seconds=_WINDOW_SECONDS, warm=0.5)["rate"]


def _fill(url: str, client: NatslogClient, behind_bytes: int) -> None:
    count, sent = 500, 0
    values, subjects = pa.array([bytes(4096)] * count), pa.array([SUBJECT] * count)
    with Publisher(url, ack_timeout_s=120) as publisher:
        while (stored := client.position(STREAM)["bytes"]) < behind_bytes:
            for _ in range(64):
                ids = pa.array([f"{number}" for number in range(sent, sent + count)])
                publisher.send(Rows(subjects, values, ids=ids), "stored")
                sent += count
            console.print(f"  {stored / 2**30:.1f} GiB", end="\r")
        publisher.wait_for_ack("stored")


class _Ticker(threading.Thread):
    """Publishes numbered messages without acks, at an even rate; `sent` counts them."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.sent = 0
        self.stop = False

    def run(self) -> None:
        count = int(_RATE_PER_S * _EVERY_S)
        subjects = pa.array([SUBJECT] * count)
        with Publisher(self.url) as publisher:
            at = time.monotonic()
            while not self.stop:
                numbers = np.arange(self.sent, self.sent + count)
                publisher.send(Rows(subjects, pa.array(numbers).cast(pa.string()).cast(pa.binary())), "none")
                self.sent += count
                at += _EVERY_S
                time.sleep(max(0.0, at - time.monotonic()))
            publisher.wait_for_ack("flush")


def without_acks(times: int) -> list[Comparison]:
    """What a change of leader does to messages published without acks, without and with `standby`: how many are lost,
    in seconds of a steady flow, and how many are doubled; and what the flow costs meanwhile.
    """
    ways: dict[str, Act] = {
        "handed over (natslog cluster transfer)": lambda client, _, leader: client.transfer_stream(
            STREAM, leader % 3 + 1
        ),
        "leader stopped in order (SIGTERM)": lambda _, brokers, leader: brokers[leader - 1].terminate(),
        "leader killed": lambda _, brokers, leader: brokers[leader - 1].kill(),
    }
    return [_lost(how, act, times, standby=standby) for standby in (False, True) for how, act in ways.items()]


def _lost(how: str, act: Act, times: int, *, standby: bool) -> Comparison:
    title = f"publishing without acks{', with standby' if standby else ''}: {how}: lost"
    found = Comparison(title, "s of the flow", 0.0 if standby else 10.0, is_bound=True, quantile=1.0)
    doubled, microseconds = list[float](), list[float]()
    found.notes = {"rate_per_s": _RATE_PER_S, "doubled_share": doubled, "processor_us_per_message": microseconds}
    with scratch() as folder, three_brokers(folder / "natslog") as (server, brokers):
        client = brokers[0].client()
        client.servers = tuple(broker.url for broker in brokers)
        client.create_stream(STREAM, SUBJECT, replicas=3, standby=standby)
        for _ in range(times):
            once = _lost_once(server, client, brokers, act)
            found.ours.append(once.lost / _RATE_PER_S)
            doubled.append(once.doubled / once.sent)
            microseconds.append(once.processor_us)
            console.print(f"  {title}: {found.ours[-1]:.3f} s of the flow; {once}")
            for broker in brokers:
                if not broker.ready():
                    broker.start()
    return found


@dataclass(frozen=True, slots=True)
class _Once:
    """`processor_us`: of brokers and NATS server, for a message of the flow before the change."""

    sent: int
    lost: int
    doubled: int
    processor_us: float


def _lost_once(server: NatsServer, client: NatslogClient, brokers: list[BrokerProcess], act: Act) -> _Once:
    eventually(lambda: len(client.position(STREAM)["isr"]) == 3, 60)
    start = client.position(STREAM)["high_watermark"]
    ticker = _Ticker(server.url)
    ticker.start()
    eventually(lambda: client.position(STREAM)["high_watermark"] > start + _RATE_PER_S, 30)
    processes = [server.pid, *(broker.pid for broker in brokers)]
    seconds, sent = processor_seconds(processes), ticker.sent
    time.sleep(_CATCH_UP_S)
    seconds, sent = processor_seconds(processes) - seconds, ticker.sent - sent
    leader = client.position(STREAM)["leader"]
    act(client, brokers, leader)
    eventually(lambda: client.position(STREAM)["leader"] != leader, 30)
    time.sleep(_CATCH_UP_S)
    ticker.stop = True
    ticker.join(30)
    time.sleep(_CATCH_UP_S)
    stored, distinct = _stored(client, start)
    return _Once(ticker.sent, ticker.sent - distinct, stored - distinct, seconds / sent * 1e6)


def _stored(client: NatslogClient, start: int) -> tuple[int, int]:
    """How many messages, and how many different ones."""
    batches = client.read(STREAM, start, columns=["value"])
    values = [value for batch in batches for value in batch.column("value").to_pylist()]
    return len(values), len(set(values))
