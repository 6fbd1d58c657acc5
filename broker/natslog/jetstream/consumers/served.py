"""One consumer at the leader of its stream: what it receives, reads and sends.

Theory of operation. Acks, pull requests and confirmations come over the connection of the stream, as columns, in the
order in which a client sent them; the machine takes them at once. One task, the pump, delivers as long as the machine
wants messages: it reads them in a thread, lets the machine assign them, and sends them on the leafnode connection.
Nothing is assigned while the connection is down or does not accept more, and no task runs between assigning and
sending. Where the connection ends before the kernel has taken what was sent, messages that wait for no ack are taken
back; others are delivered again when their time to be acked ends.

A reply subject whose subscription is not known here yet may be on its way: then the leafnode connection is asked, and
the request waits for that answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from typing import Any, Protocol

import numpy as np

from natslog.errors import CorruptLog, NatslogError
from natslog.jetstream.consumers.deliveries import Delivery, Wanted
from natslog.jetstream.consumers.machine import Consumer, Reached
from natslog.jetstream.consumers.nak import delay_us_of
from natslog.jetstream.consumers.pending import Longs
from natslog.jetstream.consumers.pulls import Status, status
from natslog.jetstream.consumers.reading import ConsumerReader, Window
from natslog.jetstream.consumers.state import ConsumerRecord
from natslog.jetstream.requests import API_LEVEL, required_level
from natslog.log import StreamLog
from natslog.log_events import event
from natslog.node.begun import begin
from natslog.node.clock import now_us as wall_clock_us
from natslog.node.replicas.stream import HostedStream
from natslog.times import parse_timestamp_us
from natslog.wire.deliveries import ACK, NAK, NEXT, OTHER, PROGRESS, TERM, acks_of, status_frame
from natslog.wire.frames import Frames
from natslog.wire.layout import HEADER_LEN, PAYLOAD, PAYLOAD_LEN, REPLY, REPLY_LEN, SUBJECT, SUBJECT_LEN
from natslog.wire.leaf import LeafLink
from natslog.wire.leaf_protocol import text_of

logger = logging.getLogger("natslog.jetstream")

_MOST_ASKED = 1000
_NO_SESSION_S = 0.2
_NO_RECEIVER = "503"  # as the NATS server states that a subject has no subscriber
_NEXT = b"+NXT"
_NAK = b"-NAK"
_TERM = b"+TERM"


class Owner(Protocol):
    """Where a consumer is served; see `leading.LedConsumers`."""

    stream: HostedStream
    leaf: LeafLink
    readers: Any
    pushing: set[ServedConsumer]

    @property
    def may_deliver(self) -> bool: ...

    def now_us(self) -> int: ...

    def changed(self, served: ServedConsumer) -> None: ...

    def note_window(self, served: ServedConsumer) -> None: ...

    def answer_when_stored(self, served: ServedConsumer, reply: str) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]: ...

    def advise(self, kind: str, served: ServedConsumer, **facts: Any) -> None: ...


class ServedConsumer:
    """See the module. `close` ends it.

    Attributes:
        is_hungry: it takes messages, and there were none: the stream wakes it when there are more.
        is_closed: nothing is received or sent any more. reading: taken while its reader is used.
    """

    __slots__ = (
        "_asked",
        "_has_begun",
        "_is_delivering",
        "_owner",
        "_prefix",
        "_pump",
        "_unsent",
        "_wakes",
        "ack_prefix",
        "flow_prefix",
        "handle",
        "id",
        "is_closed",
        "is_hungry",
        "machine",
        "name",
        "next_subject",
        "reader",
        "reading",
        "record",
        "scheduled_us",
    )

    def __init__(self, owner: Owner, name: str, consumer_id: str, record: ConsumerRecord, machine: Consumer) -> None:
        self.name, self.id, self.record, self.machine = name, consumer_id, record, machine
        self.is_hungry = self.is_closed = False
        self.reading = asyncio.Lock()
        self.handle: object | None = None
        self.scheduled_us = 0  # of the alarm
        stream = owner.stream.name
        self.next_subject = f".CONSUMER.MSG.NEXT.{stream}.{name}"
        self.ack_prefix = f"$JS.ACK.{stream}.{name}."
        self.flow_prefix = f"$JS.FC.{stream}.{name}."
        self._prefix = self.ack_prefix.encode()
        self._owner = owner
        self.reader = self._reader_of(record)
        self._pump: asyncio.Task[None] | None = None
        self._wakes = self._has_begun = self._is_delivering = False
        self._asked = 0
        self._unsent: deque[tuple[int, Reached]] = deque()  # written bytes, where it was before what ends there

    def subjects(self, api_prefix: str) -> tuple[str, ...]:
        """What it receives."""
        found = [f"{self.ack_prefix}*.*.*.*.*", api_prefix + self.next_subject]
        if self.record.config.flow_control:
            found.append(f"{self.flow_prefix}*")
        return tuple(found)

    def begin(self) -> None:
        """Delivers from now on, unless its leadership has ended meanwhile."""
        if self.is_closed:
            return
        self._has_begun = True
        if self.record.config.is_push:
            self._owner.pushing.add(self)
        self.check_interest()
        self.wake()

    def change(self, record: ConsumerRecord) -> None:
        """To an updated configuration."""
        was, now = self.record.config, record.config
        if (now.filters, now.headers_only) != (was.filters, was.headers_only):
            self.reader = self._reader_of(record)
        self.record = record
        self.machine.change(record.config, self._owner.now_us())
        self.note_pause()

    def _reader_of(self, record: ConsumerRecord) -> ConsumerReader:
        return ConsumerReader(record.config.filters, f"consumer {self.name} of stream {self._owner.stream.name}")

    def note_pause(self) -> None:
        """Until when it is paused, by the clock of the machine."""
        until = self.record.config.pause_until
        left_us = parse_timestamp_us(until) - wall_clock_us() if until else 0
        self.machine.paused_us = self._owner.now_us() + left_us if left_us > 0 else 0

    def close(self, line: str) -> None:
        """Waiting requests get this status."""
        if self.is_closed:
            return
        self.send(self.machine.pulls.end(line))
        self.is_closed = True
        self._owner.pushing.discard(self)
        if self._pump is not None:
            self._pump.cancel()

    async def closed(self) -> None:
        if self._pump is not None:
            await asyncio.wait([self._pump])
        if self.handle is not None:
            handle, self.handle = self.handle, None
            await self._owner.stream.nats.detach(handle)

    # ---- what comes in ----

    def receive(self, frames: Frames) -> None:
        """Acks, pull requests, and confirmations of flow control."""
        if self.is_closed:
            return
        acks, runs = acks_of(frames, self._prefix)
        start, now_us = 0, self._owner.now_us()
        for end, kind, replies in runs:
            if kind == ACK:
                self._acked(frames, acks, start, end, replies, now_us)
            else:
                for row, ack in zip(frames.rows[start:end].tolist(), acks[start:end].tolist(), strict=True):
                    self._receive_one(frames, row, ack, now_us)
            start = end
        self.wake()

    def _acked(self, frames: Frames, acks: Longs, start: int, end: int, replies: int, now_us: int) -> None:
        """Args: replies: how many of these acks have a reply subject."""
        if self.machine.config.ack_policy == "none":
            rows = frames.rows[start:end]
            replied = rows[rows[:, REPLY_LEN] > 0].tolist() if replies else []
            self._state_no_receiver([_text(frames, row[REPLY], row[REPLY_LEN]) for row in replied])
            return
        if self.machine.config.sample_freq:
            self._sample(acks[start:end], now_us)
        answered = self.machine.ack(acks[start:end, 2], acks[start:end, 3], now_us)
        if replies:
            rows = frames.rows[start:end]
            for row in rows[(rows[:, REPLY_LEN] > 0) & np.broadcast_to(answered, end - start)].tolist():
                self._owner.answer_when_stored(self, _text(frames, row[REPLY], row[REPLY_LEN]))

    def _state_no_receiver(self, replies: list[str]) -> None:
        """Of acks to a consumer without acks. Never to a subject that begins with `$`: it could be a request."""
        self.send([status(reply, _NO_RECEIVER) for reply in replies if reply and not reply.startswith("$")])

    def _sample(self, acks: Longs, now_us: int) -> None:
        for kind, times, seq, delivered_as in acks.tolist():
            assert kind == ACK
            self._owner.advise("ack", self, times=times, seq=seq, delivered_as=delivered_as, now_us=now_us)

    def _receive_one(self, frames: Frames, row: list[int], ack: list[int], now_us: int) -> None:
        reply = _text(frames, row[REPLY], row[REPLY_LEN])
        payload = frames.buffer[row[PAYLOAD] : row[PAYLOAD] + row[PAYLOAD_LEN]].tobytes()
        kind, times, seq, delivered_as = ack
        if kind == OTHER:
            subject = _text(frames, row[SUBJECT], row[SUBJECT_LEN])
            if subject.startswith(self.flow_prefix):
                self.machine.confirm_flow(subject)
            elif reply:
                self.pull(reply, payload, frames.buffer[row[PAYLOAD] - row[HEADER_LEN] : row[PAYLOAD]].tobytes())
            return
        machine, is_known = self.machine, True
        if machine.config.ack_policy == "none":
            self._state_no_receiver([reply])
            return
        if kind == NAK:
            if machine.nak(seq, delivered_as, delay_us_of(payload[len(_NAK) :], self.name), now_us):
                self._owner.advise("nak", self, times=times, seq=seq, delivered_as=delivered_as)
        elif kind in (TERM, NEXT):
            one, other = np.array([seq], np.int64), np.array([delivered_as], np.int64)
            is_known = bool(np.all(machine.ack(one, other, now_us)))
            if kind == TERM:
                reason = payload[len(_TERM) :].strip().decode(errors="replace")
                self._owner.advise("term", self, times=times, seq=seq, delivered_as=delivered_as, reason=reason)
        elif kind == PROGRESS:
            machine.progress(seq, now_us)
        if kind == NEXT:
            if reply:
                self.pull(reply, payload[len(_NEXT) :])
        elif reply and is_known and seq:
            self._owner.answer_when_stored(self, reply)

    def pull(self, reply: str, payload: bytes, headers: bytes = b"") -> None:
        """A request for messages."""
        if reply.startswith("$"):
            return  # what is sent there could be a request
        if required_level(headers) > API_LEVEL:
            self.send([status(reply, "412 Required Api Level")])
            return
        if self._owner.leaf.interest.has(reply):
            self.send(self.machine.pull(reply, payload, self._owner.now_us()))
        elif self._asked < _MOST_ASKED:
            self._asked += 1
            self._owner.spawn(self._pull_when_known(reply, payload), "a pull request")
        else:  # as many wait until their subscriptions are known
            self.send([status(reply, "409 Exceeded MaxWaiting")])

    async def _pull_when_known(self, reply: str, payload: bytes) -> None:
        try:
            await self._owner.leaf.quiesced()
        finally:
            self._asked -= 1
        if not self.is_closed and self._owner.leaf.interest.has(reply):
            self.send(self.machine.pull(reply, payload, self._owner.now_us()))
            self.wake()

    def check_interest(self) -> None:
        """Of a push consumer: whether its deliver subject has a subscriber."""
        config = self.machine.config
        if config.is_push:
            interest = self._owner.leaf.interest
            is_there = interest.has(config.deliver_subject, config.deliver_group or None)
            if is_there != self.machine.push.active:
                self.machine.interest(is_there, self._owner.now_us())
                self.wake()

    def tick(self) -> None:
        """The time that the machine has waited for."""
        now_us = self._owner.now_us()
        self.send([*self.machine.tick(now_us), *self.machine.due_statuses(now_us, at_end=self.is_hungry)])
        self.note_exceeded()
        self.wake()

    def note_exceeded(self) -> None:
        exceeded, self.machine.exceeded_now = self.machine.exceeded_now, []
        for seq, times in exceeded:
            self._owner.advise("max_deliver", self, seq=seq, times=times)

    # ---- what goes out ----

    def send(self, statuses: list[Status]) -> None:
        """On the leafnode connection, so that they come in order with messages."""
        if statuses:
            self._owner.leaf.send_now(b"".join(map(self._status, statuses)))

    def _status(self, one: Status) -> bytes:
        return status_frame(one.to, one.headers, one.reply, self._groups(one.to))

    def _groups(self, to: str) -> list[str]:
        return sorted(self._owner.leaf.interest.groups(to))

    def wake(self) -> None:
        """Delivers, if there is something to deliver; called after all that may have changed that. What is in memory is
        sent within this call: a task continues where a read, or the server, has to be waited for.
        """
        self._wakes = True
        if not self._is_delivering and self._has_begun and not self.is_closed and self.machine.has_takers:
            self._is_delivering = True
            begin(self._deliver_all(), f"consumer {self.name}", self._go_on)
        self._owner.changed(self)

    def _go_on(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._pump = self._owner.spawn(work, name)

    async def _deliver_all(self) -> None:
        try:
            while self._wakes and not self.is_closed:
                self._wakes = False
                await self._deliver_some()
        except (NatslogError, OSError) as error:
            if isinstance(error, CorruptLog):
                self._owner.stream.note_damage(error)
            logger.warning(
                "consumer %s of stream %s: %s",
                self.name,
                self._owner.stream.name,
                error,
                extra=event("consumer.delivery_failed", stream=self._owner.stream.name, consumer=self.name),
            )
            asyncio.get_running_loop().call_later(1.0, self.wake)
        finally:
            self._pump, self._is_delivering = None, False

    async def _deliver_some(self) -> None:
        """Until the machine takes no more messages, or there are none."""
        owner, machine, log = self._owner, self.machine, self._owner.stream.usable_log()
        self.is_hungry = may_deliver = has_delivered = False
        while not self.is_closed and owner.leaf.is_up:
            now_us = owner.now_us()
            if machine.resumes_us > now_us or (wanted := machine.wanted()) is None:
                break
            self.note_exceeded()  # before anything is waited for: an ack may come meanwhile
            end = log.high_watermark
            if may_deliver and not len(wanted.seqs) and wanted.start > end:
                self.is_hungry = True
                break
            if has_delivered:  # there is more: others have their turn
                has_delivered = False
                await asyncio.sleep(0)
                continue
            window, left = self._ready(log, wanted) or await self._read(log, wanted)
            if self.is_closed:
                return
            if not owner.leaf.is_writable:  # the connection was lost meanwhile, or others have filled it
                await owner.leaf.drain()
                continue
            may_deliver = owner.may_deliver
            if not may_deliver:  # looks again later
                asyncio.get_running_loop().call_later(_NO_SESSION_S, self.wake)
                break
            is_empty = not left and not len(wanted.seqs) and machine.pulls.none_waits
            if is_empty or not self._deliver(log, wanted, window, left):
                is_at_end = is_empty or (not len(wanted.seqs) and machine.next_seq > end)
                if is_at_end and log.high_watermark == end:
                    self.is_hungry = True
                    break
            if machine.resumes_us > owner.now_us():
                break
            await owner.leaf.drain()
            has_delivered = True
        owner.note_window(self)
        self.note_exceeded()
        is_paused = machine.paused_us > owner.now_us()
        self.send(machine.due_statuses(owner.now_us(), at_end=self.is_hungry or is_paused))
        owner.changed(self)

    async def _read(self, log: StreamLog, wanted: Wanted) -> tuple[Window, int]:
        """What is wanted, and how many messages are left."""
        most_bytes = self._most_bytes

        def read() -> tuple[Window, int]:
            left = self.count_left(log)
            return self.reader.read(log, wanted, most_bytes), left

        async with self.reading:
            return await asyncio.get_running_loop().run_in_executor(self._owner.readers, read)

    @property
    def _most_bytes(self) -> int | None:
        return None if self.machine.config.headers_only else self._owner.leaf.max_payload_bytes

    def _ready(self, log: StreamLog, wanted: Wanted) -> tuple[Window, int] | None:
        """As `_read`, if nothing is to be read for it."""
        if self.reading.locked() or (known := self.known_left(log)) is None:
            return None
        window = self.reader.ready(log, wanted, self._most_bytes)
        return None if window is None else (window, known)

    def count_left(self, log: StreamLog) -> int:
        """How many messages are still to be delivered. Blocks; `reading` is taken. Raises CorruptLog."""
        return self.reader.count_left(log, self._counted_from) + len(self.machine.skip)

    def count_until(self, log: StreamLog, deadline_s: float) -> int | None:
        """As `count_left`, or None if it is not known at `deadline_s` of `time.monotonic`."""
        found = self.reader.count_until(log, self._counted_from, deadline_s)
        return None if found is None else found + len(self.machine.skip)

    def known_left(self, log: StreamLog) -> int | None:
        """As `count_left`, if it is known without reading; does not block."""
        known = self.reader.known_left(log, self._counted_from)
        return None if known is None else known + len(self.machine.skip)

    @property
    def _counted_from(self) -> int:
        """Messages from this sequence on are still to be delivered, besides those to which it skips."""
        return self.machine.resume if len(self.machine.skip) else self.machine.next_seq

    def _deliver(self, log: StreamLog, wanted: Wanted, window: Window, left: int) -> bool:
        """Whether messages were delivered, or found to be gone, so that there may be more to do."""
        machine = self.machine
        if len(wanted.seqs):
            return self._deliver_chosen(wanted, window, left)
        if machine.next_seq != wanted.start:  # purged meanwhile
            return True
        first = int(np.searchsorted(window.seqs, wanted.start))
        count = min(len(window) - first, wanted.most)
        delivered = self._assign(window, first, count, left, is_again=False) if count else 0
        if first + delivered == len(window):
            machine.read_to(window.upto)
        self.reader.delivered(log, machine.next_seq, delivered)
        return delivered > 0

    def _deliver_chosen(self, wanted: Wanted, window: Window, left: int) -> bool:
        machine = self.machine
        missing = np.setdiff1d(wanted.seqs, window.seqs)
        if wanted.is_again:
            machine.missing(missing, self._owner.now_us())
            still = machine.pending.find(window.seqs) >= 0  # not acked while they were read
            window = window if still.all() else window.only(still)
            self._assign(window, 0, len(window), left, is_again=True)
            return True
        delivered = self._assign(window, 0, len(window), left, is_again=False)
        if delivered == len(window):
            machine.read_to(int(wanted.seqs[-1]) + 1)
        return True

    def _assign(self, window: Window, first: int, count: int, left: int, *, is_again: bool) -> int:
        """Returns how many of these messages were sent."""
        machine, now_us = self.machine, self._owner.now_us()
        reached = machine.reached
        batch = window.batch(first, count, headers_only=machine.config.headers_only)
        found = machine.deliver(batch, is_again=is_again, now_us=now_us, num_pending=left)
        start, frames = 0, list[bytes | memoryview]()
        for before, one in found.statuses:
            frames += (self._messages(window, first, found, start, before), self._status(one))
            start = before
        frames.append(self._messages(window, first, found, start, found.count))
        # Together: nats.js makes its next request if it has messages to be processed when it gets the status.
        if sent := frames[0] if len(frames) == 1 else b"".join(frames):
            self._owner.leaf.send_now(sent)
        if found.count and machine.config.ack_policy == "none":
            self._note_unsent(reached)
        return found.count

    def _note_unsent(self, reached: Reached) -> None:
        leaf = self._owner.leaf
        sent_bytes = leaf.written_bytes - leaf.unsent_bytes
        while self._unsent and self._unsent[0][0] <= sent_bytes:
            self._unsent.popleft()
        if not leaf.is_up or leaf.unsent_bytes:
            self._unsent.append((leaf.written_bytes, reached))

    def link_is_down(self) -> None:
        """What the kernel had not taken when this was last looked at is lost."""
        if self._unsent:
            self.machine.take_back(self._unsent[0][1])
            self._unsent.clear()
        if self.machine.config.is_push:
            self.machine.interest(False, self._owner.now_us())
        self._owner.changed(self)

    def _messages(self, window: Window, first: int, found: Delivery, start: int, end: int) -> bytes | memoryview:
        if start == end:
            return b""
        part = slice(first + start, first + end)
        numbers = np.empty((5, end - start), np.int64)
        numbers[0], numbers[1] = found.times[start:end], window.seqs[part]
        numbers[2], numbers[3] = found.delivered_as[start:end], window.times_us[part] * 1000
        numbers[4] = found.pending[start:end]
        return window.messages.frames(
            first + start,
            end - start,
            prefix=self._prefix,
            numbers=numbers,
            replies=found.replies,
            reply_of=found.reply_of[start:end],
            groups=self._groups(found.replies[0]) if len(found.replies) == 1 else (),
            headers_only=self.machine.config.headers_only,
        )


def _text(frames: Frames, start: int, length: int) -> str:
    return text_of(frames.buffer[start : start + length].tobytes())
