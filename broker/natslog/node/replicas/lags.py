"""Lags of readers of streams with leaders on any broker; and of the cursors on streams led here.

Files are read, so it is done in a reader's thread. A lag is stated by the stream's leader alone, and only with a
session (`Positions`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, TypeAlias

from natslog.cluster.cursors import CursorRecord
from natslog.errors import NatslogError
from natslog.log import Lag, StreamLog
from natslog.log_events import event
from natslog.model import BrokerId
from natslog.node.clock import now_us
from natslog.node.cluster_node import ClusterNode
from natslog.node.replicas.consumer_records import ConsumerNumbers
from natslog.node.replicas.positions import Positions
from natslog.node.replicas.stream import HostedStream

logger = logging.getLogger("natslog.node")

_ASK_WITHIN_S = 2.0
_STOPPED_AFTER_S = 60.0

LagJson: TypeAlias = dict[str, Any]
CursorLag: TypeAlias = tuple[CursorRecord, LagJson]


def lag_json(lag: Lag, stream_id: str) -> LagJson:
    """As the API shows it. `seconds`: since the oldest unread message was sequenced, 0 where there is none."""
    seconds = 0.0 if lag.oldest_us is None else max(0.0, (now_us() - lag.oldest_us) / 1e6)
    return {
        "offset": lag.offset,
        "rows": lag.rows,
        "bytes": lag.bytes,
        "seconds": round(seconds, 3),
        "lost_rows": lag.lost_rows,
        "beyond_rows": lag.beyond_rows,
        "log_start_offset": lag.log_start_offset,
        "high_watermark": lag.high_watermark,
        "id": stream_id,
    }


def has_stopped(unread_s: float, set_us: int, numbers: ConsumerNumbers | None = None, pace_s: float = 0.0) -> bool:
    """Whether a consumer has had something to read for a while, and has not moved.

    Args:
        unread_s: the age of the oldest unread message. set_us: when the position last changed. numbers: of a JetStream
            consumer, where they are known: a client waits for messages, or there are none for it. pace_s: between the
            last changes of its position; it may take three times as long.
    """
    if numbers is not None and (numbers.num_waiting or (numbers.num_pending == 0 and not numbers.num_ack_pending)):
        return False
    return min(unread_s, (now_us() - set_us) / 1e6) > max(_STOPPED_AFTER_S, 3 * pace_s)


class Lags:
    """Also answers the request `lags` of other brokers."""

    def __init__(self, cluster: ClusterNode, positions: Positions, readers: Executor) -> None:
        self._cluster, self._positions, self._readers = cluster, positions, readers

    async def of(self, stream: HostedStream, offset: int) -> LagJson:
        """At a stream led here. The caller checks afterwards that it still is.

        Raises:
            CorruptLog, OSError: its files cannot be read.
        """
        log = stream.usable_log()
        lag = await asyncio.get_running_loop().run_in_executor(self._readers, log.reader.lag, offset)
        return lag_json(lag, stream.record.id)

    async def on_this_broker(self, positions: Mapping[str, Sequence[int]]) -> dict[str, list[LagJson]]:
        """Of several offsets at each of several streams; those that are not led here, or have no known lag, are
        omitted.
        """
        led = {name: stream for name in positions if (stream := self._positions.led(name)) is not None}
        logs = [(name, stream.record.id, stream.usable_log(), positions[name]) for name, stream in led.items()]
        found = await asyncio.get_running_loop().run_in_executor(self._readers, _lags_of_all, logs)
        return {name: lags for name, lags in found.items() if self._positions.led(name) is led[name]}

    async def everywhere(self, positions: Mapping[str, Sequence[int]]) -> dict[str, list[LagJson]]:
        """The same, of every stream whose leader answers."""
        by_leader: dict[BrokerId, dict[str, Sequence[int]]] = {}
        for name, offsets in positions.items():
            record = self._cluster.state.streams.get(name)
            if record is not None and record.leader is not None:
                by_leader.setdefault(record.leader, {})[name] = offsets
        found = await self.on_this_broker(by_leader.pop(self._cluster.me, {}))
        asked = {leader: {"positions": theirs} for leader, theirs in by_leader.items()}
        for answer in (await self._cluster.requests.ask_others("lags", _ASK_WITHIN_S, asked)).values():
            found |= answer
        return found

    async def of_cursors(self, cursors: Sequence[CursorRecord]) -> list[LagJson | None]:
        """Each one's, in order; None where the stream's leader does not answer."""
        found = await self.everywhere(_offsets_by_stream(cursors))
        return list(_in_order(cursors, found))

    async def of_cursors_led_here(self, cursors: Sequence[CursorRecord]) -> list[CursorLag]:
        """Of those on streams that are led here."""
        found = await self.on_this_broker(_offsets_by_stream(cursors))
        pairs = zip(cursors, _in_order(cursors, found), strict=True)
        return [(cursor, lag) for cursor, lag in pairs if lag is not None]


def _offsets_by_stream(cursors: Sequence[CursorRecord]) -> dict[str, list[int]]:
    offsets: dict[str, list[int]] = {}
    for cursor in cursors:
        offsets.setdefault(cursor.stream, []).append(cursor.offset)
    return offsets


def _in_order(cursors: Sequence[CursorRecord], found: Mapping[str, Sequence[LagJson]]) -> Iterator[LagJson | None]:
    """The results by stream, assigned to the cursors one after another."""
    lags = {stream: iter(answers) for stream, answers in found.items()}
    for cursor in cursors:
        yield next(lags[cursor.stream]) if cursor.stream in lags else None


def _lags_of_all(logs: Sequence[tuple[str, str, StreamLog, Sequence[int]]]) -> dict[str, list[LagJson]]:
    """In a thread."""
    found = {}
    for name, stream_id, log, offsets in logs:
        try:
            lags = {offset: lag_json(log.reader.lag(offset), stream_id) for offset in set(offsets)}
        except (NatslogError, OSError) as error:
            logger.warning(
                "stream %s: the lag of its readers is unknown: %s",
                name,
                error,
                extra=event("stream.lag_unknown", stream=name),
            )
        else:
            found[name] = [lags[offset] for offset in offsets]  # many consumers are at the same one
    return found
