"""How far consumers were behind in the last hour: cursors and durable JetStream consumers of the streams that a broker
leads, in bounded memory.

Theory of operation. Every half minute the positions of the consumers are compared with the high watermarks of their
streams: a subtraction each. Bytes and seconds of those that are behind are looked up in a reader's thread, as that may
read files; of `MOST_READ` at most, those that are furthest behind. A consumer is known by the ids of its stream and its
name; where there are more than there is room for, those that were seen first keep theirs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from natslog.cluster.cursors import CONSUMER_PREFIX
from natslog.errors import NatslogError
from natslog.node.cluster_node import ClusterNode
from natslog.node.internal.cursors import Cursors
from natslog.node.replicas.consumer_cursors import COUNT_WITHIN_S, ConsumerCursors
from natslog.node.replicas.consumer_records import ConsumerNumbers
from natslog.node.replicas.lags import Lags, has_stopped
from natslog.node.replicas.positions import Positions

logger = logging.getLogger("natslog.node")

LAG_EVERY_S = 30
LAG_SAMPLES = 120
"""One hour."""
MOST_CONSUMERS = 2_000
"""About 3 KiB each."""
MOST_READ = 500
UNITS = ("rows", "bytes", "seconds")
_ASK_WITHIN_S = 2.0
_UNKNOWN = -1

LagSeries: TypeAlias = dict[str, dict[str, list[int | None]]]
"""By consumer and unit, the oldest first; None: not known then."""
_Key: TypeAlias = tuple[str, str, str]  # stream, its id, consumer
_Consumer: TypeAlias = tuple[str, str]  # stream, name


class LagHistory:
    """Of one broker. Also answers the request `lag_history` of other brokers.

    Attributes:
        stopped: names of the consumers that had stopped at both of the newest samples, by stream that is led here.
    """

    def __init__(
        self, cluster: ClusterNode, positions: Positions, lags: Lags, cursors: Cursors, consumers: ConsumerCursors
    ) -> None:
        self._cluster, self._positions, self._lags = cluster, positions, lags
        self._cursors, self._consumers = cursors, consumers
        self._rings: dict[_Key, npt.NDArray[np.int64]] = {}
        self.stopped: dict[str, list[str]] = {}
        self._suspects = set[_Consumer]()
        self._moves: dict[_Consumer, tuple[int, int]] = {}  # when each last moved, and how long after the time before
        self._tick = 0

    async def run(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(LAG_EVERY_S)

    async def sample(self) -> None:
        """Notes the lags of this moment."""
        ends = {
            name: (str(stream.record.id), stream.log.high_watermark)
            for name, stream in self._positions.led_here()
            if stream.log is not None
        }
        positions, kept = dict(self._of_consumers()), set[_Consumer]()
        if ends:
            try:
                found = await self._cursors.find(within_s=_ASK_WITHIN_S)
                positions |= {
                    (one.stream, one.consumer): (one.offset, one.set_us) for one in found if one.stream in ends
                }
            except NatslogError as error:  # their leader is being chosen
                logger.debug("the lags of cursors are unknown now: %s", error)
                kept = {one for one in self._suspects if not one[1].startswith(CONSUMER_PREFIX)}
        at = {
            (stream, ends[stream][0], consumer): (offset, max(0, ends[stream][1] - offset))
            for (stream, consumer), (offset, _) in positions.items()
            if stream in ends
        }
        read = await self._read(at)
        self._tick += 1
        unread_s: dict[_Consumer, int] = {}
        for key, (offset, rows) in at.items():
            size_bytes, seconds = read.get((key[0], offset), (_UNKNOWN, _UNKNOWN)) if rows else (0, 0)
            self._note(key, (rows, size_bytes, seconds))
            unread_s[key[0], key[2]] = seconds
        for key in self._rings.keys() - at.keys():
            self._note(key, (_UNKNOWN,) * len(UNITS))
        await self._note_stopped(unread_s, {one: set_us for one, (_, set_us) in positions.items()}, kept)

    async def _note_stopped(
        self, unread_s: Mapping[_Consumer, int], set_us: Mapping[_Consumer, int], kept: set[_Consumer]
    ) -> None:
        """Args: kept: of those that were not looked at, the ones that had stopped."""
        before = self._moves
        self._moves = {
            one: before[one] if one in before and before[one][0] == now else (now, now - before.get(one, (now, 0))[0])
            for one, now in set_us.items()
        }

        def stopped(one: _Consumer, numbers: ConsumerNumbers | None = None) -> bool:
            return has_stopped(unread_s[one], set_us[one], numbers, self._moves[one][1] / 1e6)

        suspects = {one for one in unread_s if stopped(one)}
        of_jetstream = sorted({stream for stream, name in suspects if name.startswith(CONSUMER_PREFIX)})
        for stream, found in (
            await self._consumers.on_this_broker(of_jetstream, count_within_s=COUNT_WITHIN_S)
        ).items():
            for position in found:
                one = stream, CONSUMER_PREFIX + position.name
                if one in suspects and not stopped(one, position.numbers):
                    suspects.remove(one)
        suspects |= kept
        self.stopped = {}
        for stream, consumer in sorted(suspects & self._suspects):
            self.stopped.setdefault(stream, []).append(consumer)
        self._suspects = suspects

    async def _read(self, at: Mapping[_Key, tuple[int, int]]) -> dict[tuple[str, int], tuple[int, int]]:
        """Bytes and seconds, by stream and offset. Args: `at`: offset and rows behind."""
        behind = sorted((key for key in at if at[key][1]), key=lambda key: -at[key][1])[:MOST_READ]
        offsets: dict[str, list[int]] = {}
        for key in behind:
            offsets.setdefault(key[0], []).append(at[key][0])
        found = await self._lags.on_this_broker(offsets) if offsets else {}
        return {
            (name, offset): (lag["bytes"], round(lag["seconds"]))
            for name, lags in found.items()
            for offset, lag in zip(offsets[name], lags, strict=True)
        }

    def _of_consumers(self) -> Iterator[tuple[_Consumer, tuple[int, int]]]:
        for stream, positions in self._consumers.led_here().items():
            for one in positions:
                if one.is_durable:
                    yield (stream, CONSUMER_PREFIX + one.name), (one.offset, one.set_us)

    def _note(self, key: _Key, lag: tuple[int, ...]) -> None:
        ring = self._rings.get(key)
        if ring is None:
            if len(self._rings) >= MOST_CONSUMERS:
                return
            ring = self._rings[key] = np.full((len(UNITS), LAG_SAMPLES), _UNKNOWN, np.int64)
        ring[:, self._tick % LAG_SAMPLES] = lag
        if lag[0] == _UNKNOWN and not (ring[0] != _UNKNOWN).any():
            del self._rings[key]  # it, its stream or the leadership here is gone for an hour

    async def on_this_broker(self, stream: str) -> LagSeries:
        """Of a stream that is led here."""
        first = max(1, self._tick - LAG_SAMPLES + 1)
        at = np.arange(first, self._tick + 1) % LAG_SAMPLES
        record = self._cluster.state.streams.get(stream)
        of = (stream, "" if record is None else str(record.id))  # not of a former stream with this name
        return {
            key[2]: {unit: _shown(values) for unit, values in zip(UNITS, ring[:, at].tolist(), strict=True)}
            for key, ring in self._rings.items()
            if key[:2] == of
        }

    async def at_leader(self, name: str) -> LagSeries:
        """Of a stream, at its leader; empty where it does not answer."""
        leader = self._cluster.state.stream(name).leader
        if leader is None:
            return await self.on_this_broker(name)
        return await self._cluster.requests.ask_if_up(leader, "lag_history", _ASK_WITHIN_S, stream=name) or {}


def _shown(values: Iterable[int]) -> list[int | None]:
    return [None if value == _UNKNOWN else value for value in values]
