"""The last hour of a broker, for people who watch it: sampled every few seconds, in bounded memory.

Theory of operation. A sample reads counters that exist anyway: of the broker, and the high watermark and size of each
stream that it leads. A stream gets a ring of samples when it first changes after the broker started, and the ring is
written only when the stream changes: an idle stream costs the comparison of two numbers, and no memory. Where more
streams change than there are rings, the one that has not changed for the longest time loses its ring.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from natslog.log import StreamLog, fullest_disk
from natslog.model import BrokerId
from natslog.node.clock import now_us
from natslog.node.cluster_node import ClusterNode
from natslog.node.lag_history import LagHistory
from natslog.node.replicas.hosting import Hosting
from natslog.node.replicas.positions import Positions
from natslog.node.replicas.stream import HostedStream
from natslog.wire import library

logger = logging.getLogger("natslog.node")

EVERY_S = 5
SAMPLES = 720
"""One hour."""
MOST_STREAMS = 1_000
"""With a ring of their own: 12 KiB each."""
_TREND_S = 1800
"""Less history shows no trend."""
_NEW_S = 2 * EVERY_S
"""A stream that is younger when it is first seen had no message at the sample before."""
_ASK_WITHIN_S = 2.0
_STREAMS_AT_ONCE = 200
_BUSY_TICKS = 60  # a ring is given to another stream if its own has not changed for five minutes
_NO_RATES = (0.0, 0.0)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

OF_BROKER = (
    "messages_per_s",
    "stored_bytes_per_s",
    "sent_bytes_per_s",
    "commits_per_s",
    "commit_ms",
    "ack_ms",
    "disk_free_bytes",
    "store_bytes",
    "memory_bytes",
    "cpu_share",
)
"""Series of a broker, each value of one interval. `commit_ms`: mean time of a commit; `ack_ms`: of a commit, mean time
from its first message to the acks, when it was replicated. Both are 0 without a commit. `cpu_share`: of one core.
"""

Series: TypeAlias = dict[str, list[float]]


class _Ring:
    """Of one stream: its high watermark and size at each tick. Between two changes nothing is written."""

    def __init__(self, tick: int, end: int, size_bytes: int) -> None:
        self.tick, self.since = tick, tick
        self._values = np.empty((2, SAMPLES), np.int64)
        self._values[:, tick % SAMPLES] = end, size_bytes

    def write(self, tick: int, end: int, size_bytes: int) -> None:
        if tick > self.tick + 1:
            self._fill(tick)
        self._values[:, tick % SAMPLES] = end, size_bytes
        self.tick = tick

    def _fill(self, tick: int) -> None:
        last = self._values[:, self.tick % SAMPLES].copy()
        for missing in range(max(self.tick, tick - SAMPLES) + 1, tick + 1):
            self._values[:, missing % SAMPLES] = last
        self.tick = tick

    def newest(self, tick: int) -> npt.NDArray[np.int64]:
        """Oldest first, of shape (2, at most SAMPLES)."""
        self._fill(tick)
        first = max(self.since, tick - SAMPLES + 1)
        return self._values[:, np.arange(first, tick + 1) % SAMPLES]


class History:
    """Also answers the requests `history` and `stats` of other brokers."""

    def __init__(
        self,
        cluster: ClusterNode,
        hosting: Hosting,
        positions: Positions,
        lag_history: LagHistory,
        *,
        folder: Path,
        problem: Callable[[], str | None],
        nats_connections: Callable[[], tuple[int, int]],
    ) -> None:
        """Args: `folder`: of the data. `problem`: why this broker is not ready. `nats_connections`: how many are up, of
        how many.
        """
        self._cluster, self._hosting, self._positions = cluster, hosting, positions
        self._folder, self._problem, self._nats_connections = folder, problem, nats_connections
        self._lag_history = lag_history
        self._tick, self._free_bytes = 0, 0
        self._broker = np.zeros((len(OF_BROKER), SAMPLES))
        self._seen: dict[str, tuple[str, int, int]] = {}
        self._rings: OrderedDict[str, _Ring] = OrderedDict()
        self._rates: dict[str, tuple[float, float]] = {}  # messages/s and bytes/s of streams that changed last
        self._counters: npt.NDArray[np.float64] | None = None
        self._counted_s = 0.0
        self._gathered: asyncio.Future[dict[BrokerId, Series]] | None = None
        self._gathered_s = 0.0

    # ---- life ----

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                self._free_bytes = (await loop.run_in_executor(None, fullest_disk, self._folder)).free_bytes
            except OSError as error:  # of a disk that fails, which the broker notices elsewhere
                logger.debug("the free space of the disk is unknown: %s", error)
            self._sample()
            await asyncio.sleep(EVERY_S)

    # ---- samples ----

    def _sample(self) -> None:
        self._tick += 1
        messages = grown_bytes = 0
        led: dict[str, tuple[str, int, int]] = {}
        rates: dict[str, tuple[float, float]] = {}
        for name, stream in self._hosting.streams.items():
            if (log := stream.log) is None or not stream.is_leading:
                continue
            now = led[name] = (stream.record.id, log.high_watermark, log.chain.size_bytes)
            before = self._seen.get(name)
            if before == now:
                continue
            if before is None or before[0] != now[0]:
                self._rings.pop(name, None)  # it is led here from now on, or is another stream
                is_new = now[1] > 0 and now_us() - stream.record.created_us < _NEW_S * 1e6
                before = (now[0], 0, 0) if is_new else None
            if before is not None:
                more, larger = max(0, now[1] - before[1]), max(0, now[2] - before[2])
                messages += more
                grown_bytes += larger
                rates[name] = (more / EVERY_S, larger / EVERY_S)
                self._write(name, before, now)
        self._seen, self._rates = led, rates
        self._broker[:, self._tick % SAMPLES] = self._of_broker(messages, grown_bytes)

    def _write(self, name: str, before: tuple[str, int, int], now: tuple[str, int, int]) -> None:
        ring = self._rings.get(name)
        if ring is None:
            if len(self._rings) >= MOST_STREAMS:
                oldest = next(iter(self._rings))
                if self._rings[oldest].tick > self._tick - _BUSY_TICKS:
                    return  # all of them change: those that are there stay whole
                del self._rings[oldest]
            ring = self._rings[name] = _Ring(self._tick - 1, *before[1:])
        ring.write(self._tick, *now[1:])
        self._rings.move_to_end(name)

    def _of_broker(self, messages: int, grown_bytes: int) -> list[float]:
        """The values of `OF_BROKER`."""
        now_s = time.monotonic()
        counters = self._counted()
        elapsed_s = max(now_s - self._counted_s, 0.001)
        before = counters if self._counters is None else self._counters
        sent, commits, commit_s, acked, ack_s, cpu_s = counters - before
        self._counters, self._counted_s = counters, now_s
        return [
            messages / elapsed_s,
            grown_bytes / elapsed_s,
            sent / elapsed_s,
            commits / elapsed_s,
            1000 * commit_s / commits if commits > 0 else 0.0,
            1000 * ack_s / acked if acked > 0 else 0.0,
            self._free_bytes,
            self._hosting.services.store.used_bytes,
            _memory_bytes(),
            cpu_s / elapsed_s,
        ]

    def _counted(self) -> npt.NDArray[np.float64]:
        streams = self._hosting.streams.values()
        used = os.times()
        return np.array(
            [
                sum(stream.sent_bytes for stream in streams),
                sum(stream.stats.commits + stream.stats.runs for stream in streams),
                sum(stream.stats.commit_seconds + stream.stats.run_seconds for stream in streams),
                sum(stream.stats.acked_commits for stream in streams),
                sum(stream.stats.ack_seconds for stream in streams),
                used.user + used.system,
            ]
        )

    # ---- what is asked ----

    def of_broker(self) -> Series:
        """Of this broker, oldest first; the last value is at most `EVERY_S` old."""
        first = max(1, self._tick - SAMPLES + 1)
        rows = self._broker[:, np.arange(first, self._tick + 1) % SAMPLES]
        return {name: np.round(row, 3).tolist() for name, row in zip(OF_BROKER, rows, strict=True)}

    def of_stream(self, name: str) -> Series:
        """Of a stream that is led here; empty if it has not changed since the broker started."""
        if (ring := self._rings.get(name)) is None:
            return {}
        ends, sizes = ring.newest(self._tick)
        rates = np.diff(ends, prepend=ends[:1]) / EVERY_S
        return {"messages_per_s": np.round(np.maximum(rates, 0), 3).tolist(), "bytes": sizes.tolist()}

    async def on_this_broker(self, stream: str | None = None) -> Series:
        return self.of_broker() if stream is None else self.of_stream(stream)

    async def stats(self) -> dict[str, Any]:
        """This broker now: `broker`, the newest value of each series; `problem`: why it is not ready, or None;
        `disk_full_s`: when its disk is full if it is filled as in the last hour, or None; `has_disk_room`;
        `kernels_problem`: why it has no compiled kernels, or None; `streams` that it leads, by name: high watermark,
        log start, visible messages, bytes, messages/s, bytes/s. `behind`: how many messages of these streams the other
        brokers lack, for replicas that are not in sync. `dedupe_short`: as the property. `stopped_consumers`: as
        `LagHistory.stopped`.
        """
        series = {name: float(self._broker[at, self._tick % SAMPLES]) for at, name in enumerate(OF_BROKER)}
        led, behind = {}, Counter[BrokerId]()
        for at, (name, stream) in enumerate(list(self._positions.led_here())):
            if at % _STREAMS_AT_ONCE == _STREAMS_AT_ONCE - 1:
                await asyncio.sleep(0)  # what else the broker does has its turn
            if stream.log is not None:
                led[name] = self._row(name, stream.log)
                behind.update(_behind(stream))
        return {
            "broker": series,
            "problem": self._problem(),
            "disk_full_s": self._disk_full_s(),
            "has_disk_room": self._hosting.around.has_disk_room,
            "kernels_problem": library.reason(),
            "nats_connections": self._nats_connections(),
            "streams": led,
            "behind": {str(broker): messages for broker, messages in behind.items()},
            "dedupe_short": self.dedupe_short,
            "stopped_consumers": self._lag_history.stopped,
        }

    @property
    def dedupe_short(self) -> dict[str, float]:
        """For how many seconds message ids are recognised, by name of the streams that are led here and recognise them
        for less time than configured.
        """
        led = [(name, stream.ingest, stream.record) for name, stream in self._hosting.streams.items()]
        return {
            name: ingest.dedupe_window_s
            for name, ingest, record in led
            if ingest is not None and ingest.dedupe_window_s < record.settings.dedupe_window_s
        }

    def _disk_full_s(self) -> float | None:
        first = max(1, self._tick - SAMPLES + 1)
        free = self._broker[OF_BROKER.index("disk_free_bytes")]
        before, now = float(free[first % SAMPLES]), float(free[self._tick % SAMPLES])
        elapsed_s = (self._tick - first) * EVERY_S
        return None if elapsed_s < _TREND_S or now >= before else now / ((before - now) / elapsed_s)

    def _row(self, name: str, log: StreamLog) -> list[float]:
        counts = log.high_watermark, log.first_readable_offset, log.reader.known_count(), log.chain.size_bytes
        return [*counts, *self._rates.get(name, _NO_RATES)]

    # ---- of the cluster ----

    async def everywhere(self) -> dict[BrokerId, Series]:
        """The history of each broker that answers: that of the last `EVERY_S`, in which at most one sample is added."""
        if self._gathered is None or time.monotonic() - self._gathered_s > EVERY_S:
            self._gathered_s = time.monotonic()
            self._gathered = asyncio.ensure_future(self._of_each("history", self.of_broker()))
        return await asyncio.shield(self._gathered)  # others may wait for it, too

    async def stats_of_all(self) -> dict[BrokerId, dict[str, Any]]:
        """The statistics of each broker that answers."""
        return await self._of_each("stats", await self.stats())

    async def at_leader(self, name: str) -> Series:
        """The history of a stream, at its leader; empty where it does not answer."""
        leader = self._cluster.state.stream(name).leader
        if leader is None:
            return self.of_stream(name)
        return await self._cluster.requests.ask_if_up(leader, "history", _ASK_WITHIN_S, stream=name) or {}

    async def _of_each(self, what: str, own: Any) -> dict[BrokerId, Any]:
        others: dict[BrokerId, dict[str, Any]] = {one: {} for one in self._cluster.state.brokers}
        others.pop(self._cluster.me, None)
        return {self._cluster.me: own} | await self._cluster.requests.ask_others(what, _ASK_WITHIN_S, others)


def _behind(stream: HostedStream) -> dict[BrokerId, int]:
    """How many messages each replica lacks that is not in sync."""
    if (leader := stream.leading) is None or len(stream.record.isr) == len(stream.record.replicas):
        return {}
    copies = leader.messages.copies.items()
    missing = {broker: copy.end_offset or 0 for broker, copy in copies if broker not in stream.record.isr}
    return {broker: max(0, leader.log_end_offset - end) for broker, end in missing.items()}


def _memory_bytes() -> float:
    """Resident memory of this process; 0 where the system does not state it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return float(int(file.read().split()[1]) * _PAGE_BYTES)
    except OSError:
        return 0.0
