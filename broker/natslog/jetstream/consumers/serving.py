"""The consumers of all streams that a broker leads, and its leafnode connection."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from natslog.errors import NatslogError
from natslog.jetstream.consumers.importing import import_consumers
from natslog.jetstream.consumers.leading import LedConsumers
from natslog.jetstream.consumers.positions import chosen, positions_of
from natslog.jetstream.consumers.served import ServedConsumer
from natslog.jetstream.errors import api_error
from natslog.log_events import event
from natslog.node.broker import Broker
from natslog.node.replicas.consumer_records import ConsumerOrigin, ConsumerPosition
from natslog.node.replicas.stream import HostedStream
from natslog.node.supervisor import Supervisor

logger = logging.getLogger("natslog.jetstream")

_BEGUN_WITHIN_S = 2.0
_BEGIN_AGAIN_S, _BEGIN_AGAIN_AT_LEAST_EVERY_S = 1.0, 30.0
_BEGUN_POLL_S = 0.02
_AT_ONCE = 100  # consumers, before others get the event loop


class ConsumerServing:
    """Of one broker. `api_prefix`: of the subjects of the API; None while it is not served."""

    def __init__(self, broker: Broker) -> None:
        self.api_prefix: str | None = None
        self._broker = broker
        self._led: dict[HostedStream, LedConsumers] = {}
        self._pushing: set[ServedConsumer] = set()  # those that deliver to a subject
        self._tasks = Supervisor(broker.halt, on_failure=_log_failure)
        self._turn = asyncio.Lock()

    def of(self, stream: HostedStream) -> LedConsumers | None:
        """None: they are not served here, or there is no leafnode connection in the settings."""
        return self._led.get(stream)

    async def begun(self, stream: HostedStream) -> LedConsumers | None:
        """As `of`, as soon as all consumers that there are are served: before, one of them would seem not to exist.

        Raises:
            ApiError: that takes too long.
        """
        deadline_s = time.monotonic() + _BEGUN_WITHIN_S
        while self._broker.leaf is not None and "." not in stream.name:
            if (led := self._led.get(stream)) is not None and led.has_begun:
                return led
            if time.monotonic() > deadline_s:
                raise api_error("unavailable")
            await asyncio.sleep(_BEGUN_POLL_S)
        return None

    @property
    def count(self) -> int:
        return sum(len(led.consumers) for led in self._led.values())

    def positions(self, stream: HostedStream) -> list[ConsumerPosition]:
        led = self._led.get(stream)
        return positions_of(stream, {} if led is None else led.consumers)

    async def numbers(self, stream: HostedStream, name: str | None, deadline_s: float) -> list[ConsumerPosition]:
        names, found = chosen(stream, name), list[ConsumerPosition]()
        for first in range(0, len(names), _AT_ONCE):
            if first:
                await asyncio.sleep(0)
            some = names[first : first + _AT_ONCE]
            left = await self._reconciled(stream, some, deadline_s)
            led = self._led.get(stream)
            found += positions_of(stream, {} if led is None else led.consumers, some, left)
        return found

    async def _reconciled(self, stream: HostedStream, names: list[str], deadline_s: float) -> dict[str, int | None]:
        """How many messages are left for each of these consumers, as far as they are served and it is known: by id."""
        left: dict[str, int | None] = {}
        for name in names:
            led = self._led.get(stream)  # reads take time, in which another broker may become the leader
            if led is not None and (served := led.consumers.get(name)) is not None:
                try:
                    left[served.id] = await led.reconcile_until(served, deadline_s)
                except (NatslogError, OSError) as error:
                    logger.debug("consumer %s of stream %s: what is left is unknown: %s", name, stream.name, error)
        return left

    async def lead(self, stream: HostedStream) -> None:
        """This broker serves the consumers of this stream from now on."""
        leaf = self._broker.leaf
        if self.api_prefix is None or leaf is None or "." in stream.name:
            return
        async with self._turn:
            if stream in self._led:
                return
            led = LedConsumers(
                stream,
                leaf,
                self._broker.readers,
                api_prefix=self.api_prefix,
                records_of=self._broker.removing.records_of,
                is_led_here=self._broker.positions.is_led_here,
                pushing=self._pushing,
                spawn=self._tasks.start,
            )
            self._led[stream] = led
            self._tasks.start(self._begin(stream, led), f"the consumers of {stream.name}")

    async def _begin(self, stream: HostedStream, led: LedConsumers) -> None:
        """As soon as this broker has all committed records of the companion log: the last ones state what was acked.
        What could not be read, or attached, is tried again.
        """
        pause_s = _BEGIN_AGAIN_S
        while self._led.get(stream) is led:
            if not stream.has_companion_records:
                await asyncio.sleep(_BEGUN_POLL_S)
            elif await self._has_begun(stream, led):
                return
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _BEGIN_AGAIN_AT_LEAST_EVERY_S)

    async def _has_begun(self, stream: HostedStream, led: LedConsumers) -> bool:
        """False: it has to be tried again."""
        async with self._turn:
            if self._led.get(stream) is not led:
                return True  # another broker leads it
            try:
                await led.begin()
            except NatslogError as error:
                logger.error(
                    "stream %s: its consumers are not served%s: %s",
                    stream.name,
                    " yet" if error.retriable else "",
                    error.message,
                    extra=event("consumer.unavailable", stream=stream.name, reason=error.code),
                )
                return not error.retriable
            return True

    async def end(self, stream: HostedStream) -> None:
        """Another broker leads the stream, or it was deleted."""
        async with self._turn:
            led = self._led.pop(stream, None)
        if led is not None:
            led.leaf.drop_unreceived()
            record = self._broker.state.streams.get(stream.name)
            is_deleted = record is None or record.id != stream.id
            line = "409 Consumer Deleted" if is_deleted else "409 Leadership Change"
            await led.end(line, is_deleted=is_deleted)

    async def import_consumers(self, stream: HostedStream, origins: Sequence[ConsumerOrigin]) -> list[tuple[str, str]]:
        """See `importing`."""
        return await import_consumers(stream, origins)

    async def serve(self, api_prefix: str | None) -> None:
        """The API is served at other subjects, or not any more."""
        if api_prefix == self.api_prefix:
            return
        await self.end_all("409 Leadership Change")
        self.api_prefix = api_prefix
        for stream in list(self._broker.streams.values()):
            if stream.is_subscribed:
                await self.lead(stream)

    async def end_all(self, line: str) -> None:
        self.api_prefix = None
        led, self._led = self._led, {}
        await asyncio.gather(*(one.end(line) for one in led.values()))
        await self._tasks.stop()

    def interest_changed(self, subject: str) -> None:
        """Subscribers of this subject, which may have wildcards, have come or gone."""
        for served in list(self._pushing):
            served.check_interest()

    def link_changed(self, is_up: bool) -> None:
        """Of the leafnode connection."""
        for led in self._led.values():
            (led.link_is_up if is_up else led.link_is_down)()


def _log_failure(task: str, error: NatslogError) -> None:
    logger.warning("%s ended: %s", task, error.message, extra=event("consumer.task_ended", reason=error.code))
