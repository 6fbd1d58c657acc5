"""The cluster at a glance, its last hour, and the same as a stream of events: what the console shows.

Theory of operation. Each broker states its statistics: its newest sample (`node.history`), and the positions of the
streams that it leads. The broker that is asked gathers those of all brokers. `/v1/live` does so every `LIVE_EVERY_S` as
long as there are listeners, once for all of them: each event has what differs from the one before. A listener that
reads too slowly loses events, and gets a whole one next.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from contextvars import Context
from typing import Any

import msgspec
from aiohttp import web

from natslog.errors import Overloaded
from natslog.http.access import polling
from natslog.http.cluster import shown_cluster
from natslog.http.context import BROKER, OWNER, broker_of
from natslog.http.endpoint import Call, PlainCall
from natslog.http.findings import findings
from natslog.http.shapes import cluster as shapes
from natslog.http.shapes.common import Answer, shape_response
from natslog.log_events import event
from natslog.model import BrokerId, StreamRecord
from natslog.node.broker import Broker
from natslog.node.clock import now_us, wait_for_at_most
from natslog.node.history import EVERY_S, OF_BROKER
from natslog.node.lag_history import LAG_EVERY_S
from natslog.subjects import is_internal
from natslog.times import format_timestamp_us
from natslog.units import format_duration

logger = logging.getLogger("natslog.http")
LIVE_EVERY_S = 2.0
_LEAST_PAUSE_S = 0.25
_STREAMS_AT_ONCE = 200
_MOST_SUBJECTS = 4
MOST_LISTENERS, MOST_OF_ONE = 100, 30
_WRITTEN_WITHIN_S = 30.0

Row = tuple[Any, ...]
"""The values of a stream, in the order of `StreamTable`, without its name."""


async def overview(call: PlainCall) -> Answer[shapes.Overview]:
    """What is wrong in the cluster, each broker now, and all streams as a table"""
    broker = broker_of(call.request)
    found, rows = await _gathered(broker)
    found.streams = _table(rows)
    return shape_response(found)


async def history(call: Call[shapes.HistoryOf, None]) -> Answer[shapes.History]:
    """The last hour of each broker, or of a stream at its leader"""
    broker = broker_of(call.request)
    if call.parameters.stream is not None:
        record = await broker.record(call.parameters.stream)
        series, lags = await asyncio.gather(
            broker.history.at_leader(record.name), broker.lag_history.at_leader(record.name)
        )
        shown = {consumer: shapes.LagSeries(**units) for consumer, units in lags.items()}
        return shape_response(shapes.History(EVERY_S, stream=series, lags_every_s=LAG_EVERY_S, lags=shown))
    brokers = await broker.history.everywhere()
    return shape_response(shapes.History(EVERY_S, brokers={str(one): series for one, series in brokers.items()}))


# ---- one moment ----


async def _gathered(broker: Broker) -> tuple[shapes.Overview, dict[str, Row]]:
    is_current, broker_stats = await asyncio.gather(broker.up_to_date(), broker.history.stats_of_all())
    cluster = shown_cluster(broker, is_current=is_current)
    behind, dedupe_short, stopped = Counter[str](), dict[str, float](), dict[str, list[str]]()
    streams = broker.state.streams
    for number, stats in broker_stats.items():
        behind.update(stats.get("behind", {}))
        dedupe_short |= stats.get("dedupe_short", {})
        of_stopped = stats.get("stopped_consumers", {}).items()
        stopped |= {name: one for name, one in of_stopped if name in streams and streams[name].leader == number}
    shown = [_shown_stats(one, stats, behind[str(one)]) for one, stats in sorted(broker_stats.items())]
    rows = await _rows(broker, broker_stats)
    return shapes.Overview(
        at=format_timestamp_us(now_us()),
        cluster=cluster,
        findings=findings(broker, cluster, shown, dedupe_short, stopped),
        broker_stats=shown,
        streams=_table({}),
    ), rows


def _shown_stats(number: BrokerId, stats: Mapping[str, Any], behind: int) -> shapes.BrokerStats:
    values = stats.get("broker", {})
    return shapes.BrokerStats(
        id=number,
        **{name: values.get(name, 0.0) for name in _STATS_VALUES},
        disk_full_s=stats.get("disk_full_s"),
        has_disk_room=stats.get("has_disk_room", True),
        kernels_problem=stats.get("kernels_problem"),
        nats_connections=stats.get("nats_connections"),
        behind=behind,
        problem=stats.get("problem"),
    )


_STATS_VALUES = [one for one in shapes.BrokerStats.__struct_fields__ if one in OF_BROKER]


async def _rows(broker: Broker, broker_stats: Mapping[BrokerId, Mapping[str, Any]]) -> dict[str, Row]:
    led = {number: stats.get("streams", {}) for number, stats in broker_stats.items()}
    found: dict[str, Row] = {}
    for at, record in enumerate(list(broker.state.streams.values())):
        if at % _STREAMS_AT_ONCE == _STREAMS_AT_ONCE - 1:
            await asyncio.sleep(0)  # what else the broker does has its turn
        if not is_internal(record.name):
            found[record.name] = _row(record, led.get(record.leader, {}).get(record.name))
    return found


def _row(record: StreamRecord, position: list[float] | None) -> Row:
    settings = record.settings
    state = "importing" if record.import_state == "importing" else "sealed" if record.sealed else ""
    return (
        record.settings.subjects[:_MOST_SUBJECTS],
        record.leader,
        len(record.replicas),
        len(record.isr),
        "paused" if record.paused and not state else state,
        settings.group,
        None if settings.max_age_s is None else format_duration(settings.max_age_s),
        *([None] * 6 if position is None else position),
    )


def _table(rows: Mapping[str, Row]) -> shapes.StreamTable:
    columns = zip(*rows.values(), strict=True) if rows else [[]] * (len(shapes.StreamTable.__struct_fields__) - 1)
    return shapes.StreamTable(list(rows), *map(list, columns))


# ---- as it goes on ----


class Live:
    """The events of one broker, for all who listen."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._listeners: dict[asyncio.Queue[bytes], bool] = {}  # with whether it needs a whole event next
        self._owners: Counter[str] = Counter()
        self._joined = asyncio.Event()
        self._recent: tuple[float, shapes.Overview, dict[str, Row]] | None = None
        self._task: asyncio.Task[None] | None = None

    def listen(self, owner: str) -> asyncio.Queue[bytes]:
        """Args: `owner`: identity or address. Raises Overloaded."""
        if len(self._listeners) >= MOST_LISTENERS or self._owners[owner] >= MOST_OF_ONE:
            raise Overloaded(
                f"at most {MOST_OF_ONE} pages of one identity or address, and {MOST_LISTENERS} together, receive the "
                "events of a broker: close some of them"
            )
        self._owners[owner] += 1
        queue: asyncio.Queue[bytes] = asyncio.Queue(1)
        self._listeners[queue] = True
        if self._recent is not None and time.monotonic() - self._recent[0] < LIVE_EVERY_S:
            queue.put_nowait(_event(self._recent[1], {}, self._recent[2], is_whole=True))
            self._listeners[queue] = False
        self._joined.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="live events", context=Context())
        return queue

    def leave(self, queue: asyncio.Queue[bytes], owner: str) -> None:
        del self._listeners[queue]
        self._owners[owner] -= 1
        if not self._owners[owner]:
            del self._owners[owner]

    async def _run(self) -> None:
        before = {} if self._recent is None else self._recent[2]
        while self._listeners:
            self._joined.clear()
            try:
                found, rows = await _gathered(self._broker)
            except Exception:  # one event is missing; the listeners would otherwise wait for ever
                logger.exception("no live event was sent; the next one follows", extra=event("live.event_failed"))
            else:
                self._recent = time.monotonic(), found, rows
                self._send(found, before, rows)
                before = rows
            await asyncio.sleep(_LEAST_PAUSE_S)
            await wait_for_at_most(LIVE_EVERY_S - _LEAST_PAUSE_S, self._joined.wait())  # a new page waits for no round

    def _send(self, found: shapes.Overview, before: dict[str, Row], rows: dict[str, Row]) -> None:
        events: dict[bool, bytes] = {}
        for queue, needs_whole in list(self._listeners.items()):
            if queue.full():
                self._listeners[queue] = True
                continue
            if needs_whole not in events:
                events[needs_whole] = _event(found, {} if needs_whole else before, rows, is_whole=needs_whole)
            queue.put_nowait(events[needs_whole])
            self._listeners[queue] = False


def _event(found: shapes.Overview, before: dict[str, Row], rows: dict[str, Row], *, is_whole: bool) -> bytes:
    found.is_whole = is_whole
    found.streams = _table({name: row for name, row in rows.items() if before.get(name) != row})
    found.removed = [name for name in before if name not in rows]
    return b"event: overview\ndata: " + msgspec.json.encode(found) + b"\n\n"


LIVE = web.AppKey("live", Live)


async def live(call: Call[shapes.Events, None]) -> web.StreamResponse:
    """The overview as server-sent events of the kind `overview`, every two seconds: the first one whole, the others
    with the streams that have changed
    """
    request = call.request
    left = call.parameters.events or math.inf
    broker_of(request)
    events = request.app[LIVE]
    owner = request[OWNER] or request.remote or ""
    queue = events.listen(owner)
    try:
        with polling(request):
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
            await response.prepare(request)
            while left > 0 and not request.app[BROKER].stopping:
                event = await queue.get()
                async with asyncio.timeout(_WRITTEN_WITHIN_S):
                    await response.write(event)
                left -= 1
            return response
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client reads no events") from error
    finally:
        events.leave(queue, owner)
