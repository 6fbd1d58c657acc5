"""All consumers of a stream, at its leader.

Theory of operation. The companion log of the stream has the records of its consumers, and their states. This broker
serves them from the moment in which it leads: it makes a machine of each record, and subscribes to what it receives.
States are stored in groups, at the latest `_STORE_WITHIN_S` after a change, and at once if an ack waits for its
answer: an answered ack is fsynced on all in-sync replicas. After a change of the leader, what was not stored is
delivered again.

One alarm wakes the consumers whose time has come. New messages wake those that wait for some. If messages are kept only
as long as consumers need them, what needs no longer be kept is removed with the states that say so, in one commit.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import secrets
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

from natslog.errors import CorruptLog, NatslogError
from natslog.jetstream.consumers.advisories import Advisories
from natslog.jetstream.consumers.config import ConsumerConfig
from natslog.jetstream.consumers.machine import Consumer
from natslog.jetstream.consumers.pending import Longs
from natslog.jetstream.consumers.pulls import FOREVER_US
from natslog.jetstream.consumers.reading import missing_of, start_after_purge
from natslog.jetstream.consumers.retention import Retention
from natslog.jetstream.consumers.served import ServedConsumer
from natslog.jetstream.consumers.state import ConsumerRecord, consumer_record, restore, state_of, state_record, unpacked
from natslog.jetstream.stream_config import config_of
from natslog.log_events import event
from natslog.model import Offset
from natslog.node.clock import elapsed_us
from natslog.node.replicas import consumer_records
from natslog.node.replicas.companion_records import Record
from natslog.node.replicas.stream import HostedStream
from natslog.node.threads import in_thread, in_thread_before, seconds_until
from natslog.wire.leaf import LeafLink
from natslog.wire.leaf_protocol import bytes_of

logger = logging.getLogger("natslog.jetstream")

_STORE_WITHIN_S = 0.1
_WINDOWS_BYTES = 64 * 1024 * 1024
_RETRY_S = 1.0
_MOST_ANSWERS = 256 * 1024
_END_WITHIN_S = 1.0
_LEAST_WAIT_US = 1000
_FEW = 1000  # messages that are looked for in memory, in the event loop
_ACK_NUMBERS = 4 + 19  # dots, and the time of a message


class LedConsumers:
    """Of one stream. `begin` and `end` it in the event loop.

    Args:
        api_prefix: of the subjects of the API. records_of: records that remove offsets (see `Removing.records_of`).
        is_led_here: whether no other broker can lead it by now. pushing: has those that deliver to a subject, of all
            streams.

    Attributes:
        consumers: by name. changing: taken while one is created, changed or deleted. has_begun: all that there are are
            served.
    """

    def __init__(
        self,
        stream: HostedStream,
        leaf: LeafLink,
        readers: Executor,
        *,
        api_prefix: str,
        records_of: Callable[[HostedStream, Any], list[Record]],
        is_led_here: Callable[[HostedStream], bool],
        pushing: set[ServedConsumer],
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        self.stream, self.leaf, self.readers, self.spawn = stream, leaf, readers, spawn
        self.consumers: dict[str, ServedConsumer] = {}
        self.pushing = pushing
        self.changing = asyncio.Lock()
        self.has_begun = False
        self.advisories = Advisories(stream)
        self.retention = Retention(self)
        self._api_prefix, self._records_of, self._is_led_here = api_prefix, records_of, is_led_here
        self._changed: set[ServedConsumer] = set()
        self._answers: list[str] = []
        self._store_soon = asyncio.Event()
        self._alarms: list[tuple[int, int, ServedConsumer]] = []
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_us = FOREVER_US
        self._number = 0
        self._windows: dict[ServedConsumer, int] = {}  # the one that was used last is the last one
        self._storing = asyncio.Lock()
        self._moves_start = False  # messages were removed, and the start of the log does not show it yet
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ending = False
        self._purged_below = stream.record.purged_below

    # ---- life ----

    async def begin(self) -> None:
        """Serves the consumers that there are. Where it fails it may be called again."""
        for name, stored in list(self.stream.consumers.consumers.items()):
            if name in self.consumers:
                continue
            try:
                (await self.add(name, stored)).begin()
            except CorruptLog as error:
                logger.error(
                    "stream %s: consumer %s cannot be served: %s",
                    self.stream.name,
                    name,
                    error.message,
                    extra=event("consumer.unavailable", stream=self.stream.name, consumer=name, reason=error.code),
                )
        self.retention.begin_again()
        self.has_begun = True
        self._tasks = [
            self.spawn(self._store_all(), f"states of the consumers of {self.stream.name}"),
            self.spawn(self._watch(), f"messages for the consumers of {self.stream.name}"),
        ]

    async def end(self, line: str, *, is_deleted: bool = False) -> None:
        """Waiting requests get this status. What has changed is stored, if that is possible soon, unless the stream was
        deleted.
        """
        self._is_ending = True
        if self._alarm is not None:
            self._alarm.cancel()
        for served in self.consumers.values():
            served.close(line)
            if is_deleted:
                self.advise("deleted", served)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if not is_deleted and (self._changed or self._answers):
            try:
                async with asyncio.timeout(_END_WITHIN_S):
                    await self._store()
            except (TimeoutError, NatslogError) as error:
                logger.debug("stream %s: the last states of consumers were not stored: %s", self.stream.name, error)
        await asyncio.gather(*(served.closed() for served in self.consumers.values()))

    async def add(self, name: str, stored: consumer_records.StoredConsumer) -> ServedConsumer:
        """Serves a consumer from now on; it delivers when it begins.

        Raises:
            CorruptLog: its record cannot be read. NatsUnavailable.
        """
        source = f"companion log of stream {self.stream.name!r}"
        record = consumer_record(stored.config, source)
        served = self._served(name, stored.id, record)
        machine, now_us = served.machine, self.now_us()
        if stored.state:
            restore(machine, state_record(stored.state, source), now_us, source)
        served.note_pause()
        machine.begin(now_us, self.stream.usable_log().high_watermark)
        self.consumers[name] = served
        try:
            served.handle = await self.stream.nats.attach(served.subjects(self._api_prefix), served.receive)
        except BaseException:
            del self.consumers[name]
            raise
        self.changed(served)
        self.retention.check_again()
        return served

    def _served(self, name: str, consumer_id: str, record: ConsumerRecord) -> ServedConsumer:
        return ServedConsumer(self, name, consumer_id, record, self._machine(name, record))

    def _machine(self, name: str, record: ConsumerRecord) -> Consumer:
        prefix = f"$JS.ACK.{self.stream.name}.{name}."
        machine = Consumer(
            name,
            record.config,
            record.start,
            has_interest=self._has_interest,
            flow_prefix=f"$JS.FC.{self.stream.name}.{name}.{secrets.token_hex(4)}-",  # not those of a former leader
            size_of_ack=len(prefix) + _ACK_NUMBERS,
        )
        machine.skip = unpacked(record.skip, 1, "the record of a consumer")[0]
        machine.resume = record.resume
        return machine

    def _has_interest(self, reply: str) -> bool:
        """Whether a reply subject has a subscriber, or that is not known now."""
        return not self.leaf.is_up or self.leaf.interest.has(reply)

    async def remove(self, served: ServedConsumer, line: str) -> None:
        """It was deleted."""
        served.close(line)
        if self.consumers.get(served.name) is served:
            del self.consumers[served.name]
        self._changed.discard(served)
        self._windows.pop(served, None)
        await served.closed()
        self.retention.take_acked(served)
        self.retention.begin_again()

    # ---- as the owner of a served consumer ----

    def now_us(self) -> int:
        """Of a clock that does not jump."""
        return elapsed_us()

    @property
    def may_deliver(self) -> bool:
        """A broker without a metadata session may have been replaced: what it would deliver may be acked elsewhere."""
        return self._is_led_here(self.stream)

    def changed(self, served: ServedConsumer) -> None:
        """Its state, or when its time comes, may have changed."""
        if served.is_closed:
            return
        machine = served.machine
        if machine.is_changed:
            self._changed.add(served)
            self._store_soon.set()
        due_us = min(machine.due_us, machine.resumes_us if machine.resumes_us > self.now_us() else FOREVER_US)
        if (threshold_ns := served.record.config.inactive_threshold) > 0:
            due_us = min(due_us, max(machine.idle_since_us(self.now_us()), 0) + threshold_ns // 1000)
        now_us = self.now_us()
        if due_us < FOREVER_US and not now_us < served.scheduled_us <= due_us:
            due_us = served.scheduled_us = max(due_us, now_us + _LEAST_WAIT_US)
            self._number += 1
            heapq.heappush(self._alarms, (due_us, self._number, served))
            self._set_alarm()

    def note_window(self, served: ServedConsumer) -> None:
        """What a consumer has read ahead is kept, but not of too many."""
        self._windows.pop(served, None)
        if served.reader.window is not None and served.reader.window.size_bytes:
            self._windows[served] = served.reader.window.size_bytes
        while len(self._windows) > 1 and sum(self._windows.values()) > _WINDOWS_BYTES:
            oldest = next(iter(self._windows))
            del self._windows[oldest]
            oldest.reader.window = None

    def store_soon(self) -> None:
        """There is something to store, or to remove."""
        self._store_soon.set()

    def answer_when_stored(self, served: ServedConsumer, reply: str) -> None:
        """An ack is answered when it is stored."""
        if reply.startswith("$") or len(self._answers) >= _MOST_ANSWERS:
            return  # a client that gets no answer sends its ack again
        self._answers.append(reply)
        self._store_soon.set()

    def advise(self, kind: str, served: ServedConsumer, **facts: Any) -> None:
        """Publishes an advisory."""
        self.advisories.publish(kind, served.name, served.record.config, served.machine, facts)

    # ---- time ----

    def _set_alarm(self) -> None:
        if not self._alarms or self._is_ending:
            return
        due_us = self._alarms[0][0]
        if due_us < self._alarm_us:
            if self._alarm is not None:
                self._alarm.cancel()
            delay_s = max(0, due_us - self.now_us()) / 1e6
            self._alarm_us = due_us
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _ring(self) -> None:
        self._alarm, self._alarm_us = None, FOREVER_US
        now_us = self.now_us()
        while self._alarms and self._alarms[0][0] <= now_us:
            due_us, _, served = heapq.heappop(self._alarms)
            if served.scheduled_us != due_us or served.is_closed:
                continue  # it was set anew
            served.scheduled_us = 0
            if self._is_inactive(served, now_us):
                self.spawn(self.delete_inactive(served), f"deleting the inactive consumer {served.name}")
            else:
                served.tick()
        self._set_alarm()

    def _is_inactive(self, served: ServedConsumer, now_us: int) -> bool:
        threshold_ns = served.record.config.inactive_threshold
        if threshold_ns <= 0:
            return False
        served.send(served.machine.due_statuses(now_us, at_end=served.is_hungry))
        return served.machine.idle_since_us(now_us) + threshold_ns // 1000 <= now_us

    async def delete_inactive(self, served: ServedConsumer) -> None:
        """It has not been in use for so long as its configuration states."""
        async with self.changing:
            if served.is_closed or not self._is_inactive(served, self.now_us()):
                return
            try:
                await self.stream.companion.append([consumer_records.deleted(served.name, served.id)])
            except NatslogError as error:
                logger.warning(
                    "stream %s: %s is deleted later: %s",
                    self.stream.name,
                    served.name,
                    error.message,
                    extra=event(
                        "consumer.not_deleted", stream=self.stream.name, consumer=served.name, reason=error.code
                    ),
                )
                served.scheduled_us = 0
                asyncio.get_running_loop().call_later(_RETRY_S, self.changed, served)
                return
            logger.info(
                "stream %s: consumer %s was not in use, and is deleted",
                self.stream.name,
                served.name,
                extra=event("consumer.expired", stream=self.stream.name, consumer=served.name),
            )
            await self.remove(served, "409 Consumer Deleted")
            self.advise("deleted", served)

    # ---- messages ----

    async def _watch(self) -> None:
        """Wakes the consumers that wait for messages, when there are some."""
        advanced = asyncio.Event()
        self.stream.watchers.add(advanced)
        try:
            while True:
                await advanced.wait()
                advanced.clear()
                self._find_purge()
                for served in list(self.consumers.values()):
                    if served.is_hungry:
                        served.wake()
                self.retention.check_again()
        finally:
            self.stream.watchers.discard(advanced)

    def _find_purge(self) -> None:
        below = self.stream.record.purged_below
        if below > self._purged_below and not self._is_ending:
            self._purged_below = below
            self.spawn(self._apply_purge(), f"consumers of the purged stream {self.stream.name}")

    async def _apply_purge(self) -> None:
        """Again, where the log cannot be read now."""
        try:
            await self.purged("")
        except NatslogError as error:
            logger.warning(
                "stream %s: a purge is applied to its consumers later: %s",
                self.stream.name,
                error.message,
                extra=event("consumer.purge_waits", stream=self.stream.name, reason=error.code),
            )
            self._purged_below = Offset(0)
            asyncio.get_running_loop().call_later(_RETRY_S, self._find_purge)

    async def purged(self, pattern: str) -> None:
        """Messages on subjects that this pattern covers were purged, or, if it is empty, the oldest ones. Raises
        CorruptLog.
        """
        log, loop = self.stream.usable_log(), asyncio.get_running_loop()
        self._purged_below = self.stream.record.purged_below
        for served in list(self.consumers.values()):
            filters, tracked = served.record.config.filters, served.machine.tracked

            def read_missing(filters: tuple[str, ...] = filters, tracked: Any = tracked) -> tuple[int | None, Any]:
                return start_after_purge(log, pattern, filters), missing_of(log, tracked)

            start, gone = await loop.run_in_executor(self.readers, read_missing)
            if start is not None:
                served.machine.purged(start, gone, self.now_us())
                self.changed(served)
                served.wake()

    async def reconcile(self, served: ServedConsumer) -> int:
        """Messages that are gone need no ack any more, and requests that have expired end. Returns how many messages
        are left to be delivered. Raises CorruptLog.
        """
        left = await self._reconcile(served, math.inf)
        assert left is not None, "it does not end before"
        return left

    async def reconcile_until(self, served: ServedConsumer, deadline_s: float) -> int | None:
        """As `reconcile`, until `deadline_s` of `time.monotonic`. None: how many are left is not known. Raises
        CorruptLog.
        """
        log, machine = self.stream.usable_log(), served.machine
        left = served.known_left(log)
        if time.monotonic() > deadline_s:
            return left
        if left is None or len(machine.pending) + len(machine.exceeded) > _FEW:
            return await self._reconcile(served, deadline_s)
        self._note_reconciled(served, missing_of(log, machine.tracked), left)
        return left

    async def _reconcile(self, served: ServedConsumer, deadline_s: float) -> int | None:
        log, tracked = self.stream.usable_log(), served.machine.tracked

        def read_missing() -> tuple[Any, int | None]:
            return missing_of(log, tracked), served.count_until(log, deadline_s)

        try:
            async with asyncio.timeout(seconds_until(deadline_s)):
                await served.reading.acquire()
        except TimeoutError:  # much is being read to deliver messages
            return None
        try:
            looked = await in_thread_before(deadline_s, self.readers, read_missing)
        finally:
            served.reading.release()
        if looked is None:
            return None
        gone, left = looked
        self._note_reconciled(served, gone, left)
        return left

    def _note_reconciled(self, served: ServedConsumer, gone: Longs, left: int | None) -> None:
        machine, now_us = served.machine, self.now_us()
        if len(gone):
            machine.missing(gone, now_us)
        if left is not None:
            machine.num_pending = left
        if not served.is_closed:
            served.send(machine.due_statuses(now_us, at_end=served.is_hungry))
            self.changed(served)

    # ---- storing ----

    async def _store_all(self) -> None:
        while True:
            await self._store_soon.wait()
            self._store_soon.clear()
            if not self._answers:  # more changes come, and are stored with these
                try:
                    async with asyncio.timeout(_STORE_WITHIN_S):
                        while not self._answers:
                            await self._store_soon.wait()
                            self._store_soon.clear()
                except TimeoutError:
                    pass
            try:
                await self._store()
            except NatslogError as error:
                logger.warning(
                    "stream %s: states of consumers are stored later: %s",
                    self.stream.name,
                    error.message,
                    extra=event("consumer.states_not_stored", stream=self.stream.name, reason=error.code),
                )
                await asyncio.sleep(_RETRY_S)
                self._store_soon.set()

    async def quiesced(self) -> None:
        """Returns when messages that are not needed any more are removed. Raises NatslogError."""
        if self.retention.policy != "limits":
            while self._changed or not self.retention.is_complete:
                await self._store()

    async def remove_unneeded(self) -> None:
        """Looks at all messages. Raises NatslogError."""
        self.retention.begin_again()
        while not self.retention.is_complete:
            await self._store()

    async def _store(self) -> None:
        """Raises NatslogError: they may be stored or not. What is cancelled is stored by the next call as well."""
        async with self._storing:  # a later state must not be stored before an earlier one
            await self._store_now()

    async def _store_now(self) -> None:
        answers, self._answers = self._answers, []
        changed, self._changed = self._changed, set()
        records: list[Record] = []
        records += map(self._state_of, changed)
        try:
            if removed := await self.retention.removable(changed):
                records += self._records_of(self.stream, removed)
                self._moves_start = True
            if records:
                await self.stream.companion.append(records)
        except (NatslogError, asyncio.CancelledError):
            self._changed |= {served for served in changed if self.consumers.get(served.name) is served}
            self._answers = answers + self._answers
            self.retention.not_recorded()
            raise
        self.retention.recorded()
        if answers:
            await self.stream.nats.send(b"".join(b"PUB %b 0\r\n\r\n" % bytes_of(reply) for reply in answers))
        if self._moves_start:  # also if that has failed before
            await in_thread(self.readers, self.retention.move_start)
            self._moves_start = False

    def _state_of(self, served: ServedConsumer) -> Record:
        """As it is now; what changes from now on is stored by the next call."""
        served.machine.is_changed = False
        return consumer_records.state(served.name, served.id, state_of(served.machine, self.now_us()).to_bytes())

    # ---- what the API shows ----

    def configs(self) -> dict[str, ConsumerConfig]:
        return {name: served.record.config for name, served in self.consumers.items()}

    def stream_config(self) -> Any:
        return config_of(self.stream.record)

    def link_is_up(self) -> None:
        for served in self.consumers.values():
            served.check_interest()
            served.wake()

    def link_is_down(self) -> None:
        for served in self.consumers.values():
            served.link_is_down()
