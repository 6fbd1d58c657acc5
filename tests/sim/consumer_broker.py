"""The leader of a stream with a consumer, in virtual time: `LedConsumers` and all that it uses are those of the broker.

Around them are a log on a file system in memory, a companion log that takes its time and may fail, a leafnode
connection that may be lost, threads that are slow, and clients. A crash loses everything but what was committed;
another life of the leader continues from that. The machine is watched at its doors: what it is asked, and what it
answers, is what `Checker` compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from natslog.errors import FileUnavailable, NoLeader, StorageFull
from natslog.jetstream.consumers.deliveries import Batch, Delivery, Wanted
from natslog.jetstream.consumers.leading import LedConsumers
from natslog.jetstream.consumers.machine import Consumer
from natslog.jetstream.consumers.pending import SEQ, Longs, Marks
from natslog.jetstream.consumers.pulls import Refusal, Status, pull_request_of
from natslog.jetstream.consumers.served import ServedConsumer
from natslog.jetstream.consumers.state import ConsumerRecord, packed
from natslog.log.removed import from_bytes, to_bytes
from natslog.node.replicas import consumer_records
from natslog.node.replicas.companion_records import REMOVED, Record
from natslog.wire.frames import FrameParser
from tests.sim.consumer_checker import Lineage, Violation, require
from tests.sim.world_loop import WorldLoop, WorldThreads

if TYPE_CHECKING:
    from tests.sim.consumer_world import Scene

NAME = "c"
PREFIX = f"$JS.ACK.s.{NAME}."
_READ_FAILS, _STORE_FAILS = 0.02, 0.03
_ANSWERED_WITHIN_MS = 100.0
_TRIED_AGAIN_US = 1_200_000
_LOOK_MS, _MOST_LOOKS = 50.0, 400
_MANY = 1 << 30

Ack = tuple[str, int, int, str, int]
"""Kind, stream sequence, consumer sequence, reply subject, delay of a negative ack (microseconds; -1: none)."""


class Watched(Consumer):
    """A machine whose doors are watched."""

    host: Host

    def begin(self, now_us: int, last_seq: int) -> None:
        self.host.restored(self)
        super().begin(now_us, last_seq)

    def wanted(self) -> Wanted | None:
        found = super().wanted()
        if found is not None:
            self.host.scene.checker.wants(self, found, self.host.us)
        return found

    def deliver(self, batch: Batch, *, is_again: bool, now_us: int, num_pending: int) -> Delivery:
        found = super().deliver(batch, is_again=is_again, now_us=now_us, num_pending=num_pending)
        host, every = self.host, self.host.scene.stream.every
        messages = [every[seq] for seq in batch.seqs.tolist()]
        host.is_again = is_again
        host.scene.checker.delivered(self, messages, found, host.expected, host.us, is_again=is_again)
        return found

    def pull(self, reply: str, payload: bytes, now_us: int) -> list[Status]:
        found, checker = super().pull(reply, payload, now_us), self.host.scene.checker
        try:
            request = pull_request_of(payload)
        except Refusal:
            return found
        ended = [one.to for one in found if not _code(one).startswith("100")]
        if reply not in ended and len(self.pulls) and not self.config.is_push:
            checker.opened(reply, request, self.host.us)
            if not any(pull.reply == reply for pull in self.pulls._waiting):
                checker.closed(reply)  # refused without a status: it asked for heartbeats
        return found

    def ack(self, seqs: Longs, delivered_as: Longs, now_us: int) -> bool | Marks:
        answered = super().ack(seqs, delivered_as, now_us)
        for seq, is_answered in zip(seqs.tolist(), np.broadcast_to(answered, len(seqs)).tolist(), strict=True):
            self.host.scene.checker.acked(self, seq, is_answered)
        return answered

    def nak(self, seq: int, delivered_as: int, delay_us: int | None, now_us: int) -> bool:
        checker = self.host.scene.checker
        self.host.note_exceeded()
        is_due = checker.is_nakable(self, seq, delivered_as)
        is_done = super().nak(seq, delivered_as, delay_us, now_us)
        checker.naked(seq, delay_us or 0, self.host.us, is_done=is_done, is_due=is_due)
        return is_done

    def progress(self, seq: int, now_us: int) -> None:
        self.host.scene.checker.progressed(self, seq, self.host.us)
        super().progress(seq, now_us)

    def confirm_flow(self, reply: str) -> None:
        super().confirm_flow(reply)
        self.host.scene.checker.flow.confirmed(reply)

    def purged(self, start: int, gone: Longs, now_us: int) -> None:
        self.host.note_exceeded()
        self.host.scene.checker.compare(self)
        super().purged(start, gone, now_us)
        require(not (self.pending.column(SEQ) < start).any(), "what was purged is pending")
        self.host.scene.checker.purged(self)

    def take_acked(self) -> Longs:
        found = super().take_acked()
        self.host.scene.checker.taken(found.tolist())
        return found


class Served(ServedConsumer):
    """Notes how many messages are left by the model when they are counted."""

    __slots__ = ("host",)

    def count_left(self, log: Any) -> int:
        self.host.expected = len(self.host.scene.checker.undelivered())
        return super().count_left(log)

    def known_left(self, log: Any) -> int | None:
        found = super().known_left(log)
        if found is not None:
            self.host.expected = len(self.host.scene.checker.undelivered())
        return found


class Led(LedConsumers):
    """With machines that are watched, and the clock of the world."""

    host: Host

    def now_us(self) -> int:
        return self.host.now_us

    def _served(self, name: str, consumer_id: str, record: ConsumerRecord) -> ServedConsumer:
        served = Served(self, name, consumer_id, record, self._machine(name, record))
        served.host = self.host
        return served

    def _machine(self, name: str, record: ConsumerRecord) -> Consumer:
        machine = super()._machine(name, record)
        made = Watched(
            name,
            record.config,
            record.start,
            has_interest=self._has_interest,
            flow_prefix=f"$JS.FC.s.{name}.{self.host.life}-",
            size_of_ack=machine._size_of_ack,
        )
        made.host = self.host
        made.skip, made.resume = machine.skip, machine.resume
        return made

    def advise(self, kind: str, served: ServedConsumer, **facts: Any) -> None:
        if kind == "max_deliver":
            self.host.scene.checker.exceeded(served.machine, [(facts["seq"], facts["times"])])

    def answer_when_stored(self, served: ServedConsumer, reply: str) -> None:
        super().answer_when_stored(served, reply)
        self.host.numbered += 1
        self.host.unanswered.append((self.host.numbered, reply))

    def _state_of(self, served: ServedConsumer) -> Record:
        served.note_exceeded()
        checker = self.host.scene.checker
        checker.compare(served.machine)
        checker.removable(served.machine)
        record = super()._state_of(served)
        self.host.lineages[record[1]] = checker.lineage.copy()
        return record


class Leaf:
    """The connection on which messages and statuses go out."""

    def __init__(self, host: Host) -> None:
        self._host, self._client = host, host.scene.client
        self.is_up = True
        self.max_payload_bytes = _MANY
        self.written_bytes = self.unsent_bytes = 0
        self.interest = SimpleNamespace(has=self._has, groups=lambda subject: frozenset[str]())

    def _has(self, subject: str, group: str | None = None) -> bool:
        return self.is_up and subject in self._client.interest

    @property
    def is_writable(self) -> bool:
        return self.is_up

    async def quiesced(self) -> bool:
        await self._host.pause(0.0, 5.0)
        return True

    async def drain(self) -> None:
        await self._host.pause(0.0, 0.0)

    def send_now(self, protocol: bytes | memoryview) -> bool:
        data = bytes(protocol)
        if not self.is_up:
            require(b"LMSG " not in data, "messages are assigned while there is no connection")
            return False
        at = 0
        while at < len(data):
            end = data.index(b"\r\n", at)
            verb, *words = data[at:end].decode().split()
            size = int(words[-1])
            payload = data[end + 2 : end + 2 + size]
            at = end + 2 + size + 2
            if verb == "LMSG":
                require(self._host.has_session, "messages are delivered although another broker may lead")
                self._host.hand_over(words[0], words[1].partition("@")[0])
            else:
                self._host.told(Status(words[0], payload, words[1] if len(words) == 4 else ""))
        return True


@dataclass(slots=True)
class Committed:
    """Of the companion log. `lineage`: that of the last state of the consumer."""

    records: consumer_records.ConsumerRecords
    lineage: Lineage


class Stream:
    """The stream, as far as `LedConsumers` sees it; also its connection, and its companion log."""

    name = "s"

    def __init__(self, host: Host) -> None:
        self._host = host
        self.consumers = host.committed.records
        self.watchers: set[Any] = set()
        self.nats = self.companion = self

    @property
    def record(self) -> Any:
        return self._host.scene.stream.record

    def usable_log(self) -> Any:
        return self._host.scene.stream.log

    async def attach(self, subjects: tuple[str, ...], receiver: Callable[[Any], None]) -> object:
        await self._host.pause(0.0, 0.0)
        return subjects

    async def detach(self, handle: object) -> None:
        await self._host.pause(0.0, 2.0)

    def note_damage(self, error: Exception) -> None:
        raise error

    async def send(self, protocol: bytes) -> bool:
        replies = [line.split()[1].decode() for line in protocol.splitlines() if line]
        self._host.answered(replies)
        return True

    async def append(self, records: list[Record]) -> None:
        """What is committed stays, also if the leader crashes meanwhile, or gets an error."""
        host, chance = self._host, self._host.world.random
        states = any(kind == consumer_records.STATE for kind, _ in records)
        if host.deletes_at_store and states:
            host.deletes_at_store = False
            host.world.after(0.0, host.scene.client.ack_at_once)
            host.world.after(0.0, host.delete)
        is_full = self._host.us < self._host.full_until_us
        fails = is_full or (not host.scene.is_healed and chance.random() < _STORE_FAILS)
        is_committed = not is_full and (not fails or chance.random() < 0.5)
        taken = host.unanswered[: len(host.unanswered) - len(host.led._answers)] if states else []  # later ones are not
        is_damaged, done = host.undamaged is not None, host.loop.create_future()

        def commit() -> None:
            is_lost = host.loop.is_dead and chance.random() < 0.5
            if is_committed and not is_lost:
                host.commit(records, may_remove=not is_damaged)
            if not host.loop.is_dead:
                host.loop.within(partial(finish, done))

        def finish(done: Any) -> None:
            if done.done():
                return  # who waited was cancelled
            if fails:
                done.set_exception(
                    StorageFull("the disk is full") if is_full else NoLeader("the leadership is changing")
                )
                return
            host.expect_answers(taken)
            done.set_result(None)

        host.world.after(chance.uniform(1.0, 20.0), commit)
        await done


class Host:
    """One life of a leader after another.

    Attributes:
        expected: how many messages were left when they were counted last. is_again: whether what is sent now was
            delivered before. unanswered: replies of acks that are to be answered. lineages: by the record of a state.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene, self.world = scene, scene.world
        self.life = 0
        self.is_up = self.is_leaving = False
        self.seqs: dict[str, int] = {}
        self.lineages: dict[bytes, Lineage] = {}
        self.committed = Committed(consumer_records.ConsumerRecords(), self._first_lineage)
        self.created = 0
        self.full_until_us = 0
        self.undamaged: consumer_records.StoredConsumer | None = None  # while what is stored is damaged
        self.damaged: consumer_records.StoredConsumer | None = None
        self.is_damaged = False
        self.create()
        self.start()

    @property
    def id(self) -> str:
        """Of the consumer that was created last."""
        return f"id{self.created}"

    @property
    def is_deleted(self) -> bool:
        return NAME not in self.committed.records.consumers

    @property
    def _first_lineage(self) -> Lineage:
        return Lineage(floor=(0, self.scene.start - 1))

    @property
    def us(self) -> int:
        """The time of the world."""
        return int(self.world.now_ms * 1000)

    @property
    def now_us(self) -> int:
        """Of the clock of this broker."""
        return self.us + self.zero_us

    # ---- life ----

    def create(self) -> None:
        """The consumer, which the next leader serves."""
        scene = self.scene
        skip = packed(np.array(scene.skip, np.int64).reshape(1, -1))
        self.record = ConsumerRecord(
            created_us=1, config=scene.config, start=scene.start, resume=scene.resume, skip=skip
        )
        self.created += 1
        self._apply(consumer_records.consumer(NAME, self.id, self.record.to_bytes()))
        self.committed.lineage = self._first_lineage

    def _apply(self, record: Record) -> None:
        kind, data = record
        self.committed.records.apply(kind, data, "the companion log")

    def start(self) -> None:
        if self.is_up:
            return
        if self.is_leaving:  # the next one leads when this one has ended
            self.world.after(5.0, self.start)
            return
        self.life += 1
        self.expected, self.is_again = 0, False
        self.unanswered: list[tuple[int, str]] = []
        self.numbered = 0
        self.zero_us = self.world.random.randrange(1, 10**12)
        if self.is_deleted:  # the last leader has crashed before the next one was created
            self.scene.begin_again()
            self.create()
        self._damage_or_restore()
        self.loop = WorldLoop(self.world, lambda: self.world.random.choice((0.0, 0.0, 0.0, 20.0)))
        self.leaf = Leaf(self)
        self.stream = Stream(self)
        self.has_session = True
        self.kept_until_us = 0
        self.deletes_at_store = False
        self.lost_at_read_ms: float | None = None
        self.led = Led(
            self.stream,  # type: ignore[arg-type]
            self.leaf,  # type: ignore[arg-type]
            WorldThreads(self.world, self._read_ms, self._read_failure),
            api_prefix="$JS.API",
            records_of=lambda stream, removed: [(REMOVED, to_bytes(removed))],
            is_led_here=lambda stream: self.has_session,
            pushing=set(),
            spawn=self.loop.spawn,
        )
        self.led.host = self
        self.is_up = True
        self.loop.within(lambda: self.loop.spawn(self.led.begin(), "beginning"))

    def fill_disk(self, for_ms: float) -> None:
        """Nothing is stored for a while."""
        self.full_until_us = self.us + int(for_ms * 1000)

    def damage(self) -> None:
        """What is stored of the consumer cannot be read by the next life of the leader; the one after that has it as it
        was: from another replica, or restored.
        """
        self.is_damaged = True

    def _damage_or_restore(self) -> None:
        records = self.committed.records.consumers
        if self.undamaged is not None:
            now, was, damaged = records.get(NAME), self.undamaged, self.damaged
            if now is not None and damaged is not None and now.id == was.id:  # what was stored since stays
                config = was.config if now.config == damaged.config else now.config
                state = was.state if now.state == damaged.state else now.state
                records[NAME] = replace(now, config=config, state=state)
            self.undamaged = None
        elif self.is_damaged:
            known = self.undamaged = records[NAME]
            part = {"state": known.state[:-1]} if known.state else {"config": known.config[:-1]}
            records[NAME] = self.damaged = replace(known, **part)  # type: ignore[arg-type]
        self.is_damaged = False

    def _read_ms(self) -> float:
        chance = self.world.random
        if self.lost_at_read_ms is not None:
            back_ms, self.lost_at_read_ms = self.lost_at_read_ms, None
            self.world.after(chance.uniform(0.0, 2.0), partial(self.lose_link, back_ms))
            return 2.0
        return 0.0 if chance.random() < 0.7 else chance.uniform(0.0, 3.0)

    def _read_failure(self) -> Exception | None:
        if self.scene.is_healed or self.world.random.random() >= _READ_FAILS:
            return None
        self.kept_until_us = self.us + _TRIED_AGAIN_US
        return FileUnavailable("too many open files")

    @property
    def is_served(self) -> bool:
        """Whether nothing keeps it from answering at once."""
        return self.has_session and self.leaf.is_up and self.us >= self.kept_until_us

    @property
    def served(self) -> ServedConsumer | None:
        return self.led.consumers.get(NAME)

    @property
    def machine(self) -> Any:
        served = self.served
        return None if served is None else served.machine

    def restored(self, machine: Consumer) -> None:
        """Another leader continues from what was stored, if anything was."""
        self.scene.checker.restored(self.committed.lineage, self.us)

    def crash(self) -> None:
        self.is_up = False
        self.loop.die()

    def leave(self) -> None:
        """Another broker is to lead."""
        if not self.led.has_begun:
            self.crash()
            return
        self.is_up, self.is_leaving = False, True

        async def end() -> None:
            await self.led.end("409 Leadership Change")
            self.is_leaving = False
            self.loop.die()

        self.loop.within(lambda: self.loop.spawn(end(), "ending"))

    async def pause(self, least_ms: float, most_ms: float) -> None:
        future = self.loop.create_future()
        delay_s = self.world.random.uniform(least_ms, most_ms) / 1000
        self.loop.call_later(delay_s, lambda: None if future.done() else future.set_result(None))
        await future

    def _do(self, work: Callable[[ServedConsumer], Any]) -> None:
        """While the consumer is served."""
        served = self.served if self.is_up else None
        if served is not None and not served.is_closed:
            self.loop.within(lambda: work(served))

    # ---- what comes in ----

    def _receive(self, served: ServedConsumer, messages: list[tuple[str, str, bytes]]) -> None:
        """Subjects, reply subjects, payloads."""
        parser = FrameParser()
        for subject, reply, payload in messages:
            to = f"{subject} 1 {reply}" if reply else f"{subject} 1"
            parser.receive_data(b"MSG %b %d\r\n%b\r\n" % (to.encode(), len(payload), payload))
        for frames in parser.frames():
            served.receive(frames)

    def pull(self, reply: str, payload: bytes) -> None:
        self._do(lambda served: self._receive(served, [(f"$JS.API{served.next_subject}", reply, payload)]))

    def acks(self, acks: list[Ack]) -> None:
        self._do(lambda served: self._receive(served, list(map(self._as_message, acks))))

    def _as_message(self, ack: Ack) -> tuple[str, str, bytes]:
        kind, seq, delivered_as, reply, delay_us = ack
        payload = {"ack": b"+ACK", "nak": b"-NAK", "term": b"+TERM", "progress": b"+WPI", "next": b"+NXT"}[kind]
        if kind == "nak" and delay_us >= 0:
            payload = b'-NAK {"delay": %d}' % (delay_us * 1000)
        if kind == "next":
            payload = b'+NXT {"batch":2,"expires":200000000}'
            seen = self.scene.checker.seen
            reply = "" if reply in seen else reply
            seen.add(reply)
        elif reply:
            self.seqs[reply] = seq
        return f"{PREFIX}1.{seq}.{delivered_as}.1.0", reply, payload

    def confirm_flow(self, reply: str) -> None:
        self._do(lambda served: self._receive(served, [(reply, "", b"")]))

    def check_interest(self) -> None:
        if self.scene.config.is_push:
            self._do(lambda served: served.check_interest())

    def published(self) -> None:
        if self.is_up:
            self.loop.within(self._advanced)

    def _advanced(self) -> None:
        for watcher in self.stream.watchers:
            watcher.set()

    def purged(self) -> None:
        """The stream was: the metadata state it."""
        self.published()

    def reconcile(self) -> None:
        """As a request for information does."""
        self._do(lambda served: self.loop.spawn(self._settle(served), "settling"))

    async def _settle(self, served: ServedConsumer) -> None:
        try:
            await self.led.reconcile(served)
        except FileUnavailable:
            return

    def change(self) -> None:
        """To the configuration of the scene."""
        self.record = msgspec.structs.replace(self.record, config=self.scene.config)
        if self.is_deleted:
            return
        self._apply(consumer_records.consumer(NAME, self.id, self.record.to_bytes()))

        def changed(served: ServedConsumer) -> None:
            served.change(self.record)
            served.check_interest()
            served.wake()

        self._do(changed)

    def delete(self) -> None:
        """Another consumer takes its place when nothing that it has acked is left."""
        self._do(lambda served: self.loop.spawn(self._delete(served), "deleting"))

    def delete_at_store(self) -> None:
        """While a state is stored, and acks come that are not in it."""
        self.deletes_at_store = True

    async def _delete(self, served: ServedConsumer) -> None:
        led = self.led
        async with led.changing:
            if led.consumers.get(NAME) is not served:
                return
            try:
                await self.stream.companion.append([consumer_records.deleted(NAME, self.id)])
            except (NoLeader, StorageFull):
                if not self.is_deleted:
                    return
            served.note_exceeded()
            acked = set(self.scene.checker.lineage.acked)
            await led.remove(served, "409 Consumer Deleted")
            for _ in range(_MOST_LOOKS):
                await self.pause(_LOOK_MS, _LOOK_MS)
                if led.retention.is_complete:
                    break
            else:
                raise Violation("messages that no consumer needs are not removed")
            left = [seq for seq in self.scene.stream.order if seq in acked]
            require(not left, f"{left[:5]} were acked, and are kept although the consumer is deleted")
            self.scene.begin_again()
            self.create()
            stored = self.committed.records.consumers[NAME]
            (await led.add(NAME, stored)).begin()

    def note_exceeded(self) -> None:
        if (served := self.served) is not None:
            served.note_exceeded()

    # ---- the connections ----

    def lose_link(self, back_ms: float) -> None:
        """Clients notice it, too: they go."""
        if not (self.is_up and self.leaf.is_up):
            return
        leaf, loop = self.leaf, self.loop
        leaf.is_up = False
        self.scene.client.leave()
        loop.within(self.led.link_is_down)

        def back() -> None:
            if not loop.is_dead:
                leaf.is_up = True
                loop.within(self.led.link_is_up)

        self.world.after(back_ms, back)

    def lose_link_at_read(self, back_ms: float) -> None:
        """While messages are read."""
        self.lost_at_read_ms = back_ms

    def lose_session(self, back_ms: float) -> None:
        """It is not known whether another broker leads by now."""
        self.has_session = False
        life = self.life

        def back() -> None:
            if self.life == life:
                self.has_session = True
                self.kept_until_us = max(self.kept_until_us, self.us + _TRIED_AGAIN_US)

        self.world.after(back_ms, back)

    # ---- storing ----

    def commit(self, records: list[Record], *, may_remove: bool) -> None:
        for kind, data in records:
            if kind == REMOVED:
                for offset in from_bytes(data, "the companion log"):
                    seq, stream = int(offset) + 1, self.scene.stream
                    require(may_remove or not stream.has(seq), f"{seq} is removed: its consumer is damaged")
                    stream.remove(seq)
            else:
                self._apply((kind, data))
                if kind == consumer_records.STATE:
                    self.committed.lineage = self.lineages[data]

    def answered(self, replies: list[str]) -> None:
        for reply in replies:
            at = next((at for at, (_, one) in enumerate(self.unanswered) if one == reply), None)
            require(at is not None, f"{reply} is answered although it was not to be")
            assert at is not None
            del self.unanswered[at]
        stored = None if self.is_deleted else self.committed.lineage  # nothing of a deleted one is stored any more
        self.scene.answered([(reply, self.seqs[reply]) for reply in replies], stored)

    def expect_answers(self, replies: list[tuple[int, str]]) -> None:
        """The acks are stored now."""
        life = self.life

        def check() -> None:
            if self.life == life and self.is_up:
                left = sorted(set(replies) & set(self.unanswered))
                require(not left, f"the acks {left[:3]} are stored, and not answered")

        if replies:
            self.world.after(_ANSWERED_WITHIN_MS, check)

    # ---- what goes out ----

    def told(self, status: Status) -> None:
        checker, client = self.scene.checker, self.scene.client
        if self.scene.config.is_push or status.to in checker.pulls or status.to in checker.completed:
            self.scene.told(status)
        else:
            client.ended(status.to)

    def hand_over(self, reply: str, ack_reply: str) -> None:
        """A message to a request, or to the deliver subject."""
        scene, checker = self.scene, self.scene.checker
        _, seq, delivered_as, *_ = map(int, ack_reply.removeprefix(PREFIX).split("."))
        message = scene.stream.every[seq]
        size_bytes = message.size_bytes + len(ack_reply)
        if self.machine.config.is_push:
            require(bool(scene.client.interest), "a message without a subscriber")
            checker.pushed(self.machine, message, size_bytes, self.us, is_again=self.is_again)
        else:
            checker.sent(reply, size_bytes, self.us)
        scene.client.receive(seq, delivered_as)


def _code(one: Status) -> str:
    return one.headers.decode().split()[1]
