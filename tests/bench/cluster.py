"""Three brokers: acked publish with three replicas, 1,000 idle streams, a dead broker."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from tests.bench.cluster_sides import jetstream_cluster_side, natslog_cluster_side, three_brokers
from tests.bench.pairs import Comparison, compare
from tests.bench.sides import STREAM, jetstream_stored, raw_publish, scratch
from tests.bench.standing import cpu_seconds
from tests.harness import BrokerProcess, eventually

_SECONDS, _WARM = 3.0, 1.0
_STREAMS = 1000
_IDLE_SECONDS = 20.0
_ROWS = 200


def _natslog_rate() -> float:
    with natslog_cluster_side() as (server, brokers):
        done = raw_publish(server, "acked", bytes=128, window=4000, seconds=_SECONDS, warm=_WARM)
        stream = brokers[0].client().position(STREAM)
        assert stream["high_watermark"] == done["sent"], "what was answered is committed"
        assert len(stream["isr"]) == 3, "by all three"
        return done["rate"]


def _jetstream_rate() -> float:
    with jetstream_cluster_side() as server:
        done = raw_publish(server, "acked", bytes=128, window=4000, seconds=_SECONDS, warm=_WARM)
        assert jetstream_stored(server) == done["sent"], "what was answered is stored"
        return done["rate"]


def replicated(pairs: int) -> list[Comparison]:
    """Fsynced on three brokers, against three servers that fsync every two minutes."""
    return [
        compare(
            "acked publish, three replicas, 128 B, window 4,000",
            "messages/s",
            1.5,
            ours=_natslog_rate,
            peer="JetStream R3, default (fsync every 2 minutes)",
            theirs=_jetstream_rate,
            pairs=pairs,
        )
    ]


def idle_replicas() -> list[Comparison]:
    """1,000 streams of three replicas: what they cost at rest, and how soon others lead those of a dead broker."""
    with scratch() as folder, three_brokers(folder / "natslog") as (_, brokers):
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda at: _create(brokers[at % 3], at), range(_STREAMS)))
        client = brokers[0].client()
        eventually(lambda: client.cluster()["under_replicated"] == 0, 60)
        time.sleep(10)
        before = [cpu_seconds(broker.pid) for broker in brokers]
        time.sleep(_IDLE_SECONDS)
        used = [cpu_seconds(broker.pid) - was for broker, was in zip(brokers, before, strict=True)]
        started = time.monotonic()
        brokers[2].kill()
        eventually(lambda: all(one["leader"] != 3 and "high_watermark" in one for one in client.streams()), 60)
        took_s = time.monotonic() - started
    title = f"{_STREAMS} idle streams of three replicas"
    idle = [statistics.fmean(used) / _IDLE_SECONDS * 100, max(used) / _IDLE_SECONDS * 100]
    return [
        Comparison(f"{title}: CPU of the busiest broker", "% of a core", 10.0, ours=[idle[1]], is_bound=True),
        Comparison(f"{title}: all led again after a broker died", "s", 15.0, ours=[took_s], is_bound=True),
    ]


def _create(broker: BrokerProcess, at: int) -> None:
    with broker.client() as client:
        client.create_stream(f"idle{at}", f"idle.{at}.>", replicas=3)
