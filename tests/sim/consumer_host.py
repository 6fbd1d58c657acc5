"""The broker around a consumer of the simulation: what `jetstream.consumers.served` and `leading` do, in virtual time.

It reads what the machine wants, which takes a while in which acks and requests come; it stores states in groups, and
answers acks when they are stored; it sets an alarm for the time at which the machine is to be called. A crash loses
everything but the last state that was stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from natslog.jetstream.consumers.machine import FOREVER_US, Wanted
from natslog.jetstream.consumers.pending import SEQ, Longs
from natslog.jetstream.consumers.pulls import Refusal, Status, pull_request_of
from natslog.jetstream.consumers.state import restore, state_of, state_record
from tests.sim.consumer_checker import Lineage, require
from tests.sim.consumer_stream import Message, Window

if TYPE_CHECKING:
    from tests.sim.consumer_world import Scene

PREFIX = "$JS.ACK.s.c."
_DOTS_AND_TIME = 4 + 19
_STORE_MS = 100.0
_RETRY_MS = 1000.0
_LEAST_WAIT_US = 1000
_WINDOW = 30

Ack = tuple[str, int, int, str, int]
"""Kind, stream sequence, consumer sequence, reply subject, delay of a negative ack (microseconds; -1: none)."""


@dataclass(slots=True)
class Stored:
    state: bytes
    lineage: Lineage


class Host:
    """One life of a leader after another."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.world = scene, scene.world
        self.life = 0
        self.is_up = False
        self.stored: Stored | None = None
        self.start()

    # ---- life ----

    def start(self) -> None:
        scene, chance = self.scene, self.world.random
        self.life += 1
        self.is_up, self.is_hungry, self.is_pumping, self.wakes = True, False, False, False
        self.is_storing = self.is_store_due = False
        self.scheduled_us = 0
        self.answers: list[tuple[str, int]] = []
        self.zero_us = chance.randrange(1, 10**12)
        self.machine = machine = scene.rules.consumer(
            "c",
            scene.config,
            scene.start,
            has_interest=lambda reply: reply in scene.client.interest,
            flow_prefix=f"$JS.FC.s.c.{self.life}-",
            size_of_ack=len(PREFIX) + _DOTS_AND_TIME,
        )
        machine.skip, machine.resume = np.array(scene.skip, np.int64), scene.resume
        stored = self.stored
        if stored is not None:
            restore(machine, state_record(stored.state, "a state"), self.now_us, "a state")
        scene.checker.restored(stored.lineage if stored is not None else Lineage(floor=(0, scene.start - 1)), self.us)
        machine.begin(self.now_us, scene.stream.last)
        self.look_at_interest()
        self.went_on()

    def crash(self) -> None:
        self.is_up = False

    def leave(self) -> None:
        """Another broker is to lead: what has changed is stored, if nothing else is being stored."""
        self.send(self.machine.end("409 Leadership Change"))
        if self.machine.is_changed and not self.is_storing:
            self.stored = self.snapshot()
        self.is_up = False

    @property
    def us(self) -> int:
        """The time of the world."""
        return int(self.world.now_ms * 1000)

    @property
    def now_us(self) -> int:
        """Of the clock of this broker."""
        return self.us + self.zero_us

    def later(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Unless it crashes before."""
        life = self.life
        self.world.after(delay_ms, lambda: action() if self.is_up and self.life == life else None)

    # ---- what comes in ----

    def pull(self, reply: str, payload: bytes) -> None:
        if not self.is_up or reply not in self.scene.client.interest:
            return
        found = self.machine.pull(reply, payload, self.now_us)
        try:
            request = pull_request_of(payload)
        except Refusal:
            request = None
        ended = [one.to for one in found if not _code(one).startswith("100")]
        if request is not None and reply not in ended and len(self.machine.pulls) and not self.machine.config.is_push:
            self.scene.checker.opened(reply, request, self.us)
            if not any(pull.reply == reply for pull in self.machine.pulls._waiting):
                self.scene.checker.closed(reply)  # refused without a status: it asked for heartbeats
        self.send([one for one in found if one.to in self.scene.checker.pulls])
        self.scene.client.interest -= {to for to in ended if to not in self.scene.checker.pulls}
        self.went_on()

    def acks(self, acks: list[Ack]) -> None:
        """In runs of equal kinds, as they come."""
        if not self.is_up:
            return
        start = 0
        for end in range(1, len(acks) + 1):
            if end == len(acks) or acks[end][0] != acks[start][0] or acks[start][0] != "ack":
                self._run(acks[start:end])
                start = end
        self.went_on()

    def _run(self, acks: list[Ack]) -> None:
        machine, checker, now_us = self.machine, self.scene.checker, self.now_us
        kind, seq, delivered_as, reply, delay_us = acks[0]
        match kind:
            case "ack" | "term" | "next":
                seqs, ases = np.array([one[1] for one in acks]), np.array([one[2] for one in acks])
                answered = np.broadcast_to(machine.ack(seqs, ases, now_us), len(acks))
                for one, is_answered in zip(acks, answered.tolist(), strict=True):
                    checker.acked(machine, one[1], is_answered)
                    if one[3] and is_answered and kind != "next":
                        self.answers.append((one[3], one[1]))
                if kind == "next" and reply not in self.scene.checker.seen:
                    self.scene.checker.seen.add(reply)
                    self.pull(reply, b'{"batch":2,"expires":200000000}')
            case "nak":
                is_due = checker.is_nakable(machine, seq, delivered_as)
                is_done = machine.nak(seq, delivered_as, None if delay_us < 0 else delay_us, now_us)
                checker.naked(seq, max(0, delay_us), self.us, is_done=is_done, is_due=is_due)
            case "progress":
                checker.progressed(machine, seq, self.us)
                machine.progress(seq, now_us)

    def confirm_flow(self, reply: str) -> None:
        if self.is_up:
            self.machine.confirm_flow(reply)
            self.scene.checker.flow.confirmed(reply)
            self.went_on()

    def look_at_interest(self) -> None:
        if self.is_up and self.scene.config.is_push:
            self.machine.interest(self.scene.config.deliver_subject in self.scene.client.interest, self.now_us)
            self.went_on()

    def published(self) -> None:
        if self.is_up and self.is_hungry:
            self.wake()

    def purged(self) -> None:
        """The stream was: what that means for the consumer is read, which takes a while."""
        if not self.is_up:
            return
        stream = self.scene.stream
        start = min(stream.messages, default=stream.last + 1)
        gone = self._gone()

        def apply() -> None:
            self.scene.checker.compare(self.machine)
            self.machine.purged(start, gone, self.now_us)
            left = self.machine.pending.column(SEQ)
            require(not (left < start).any(), "what was purged is pending")
            self.scene.checker.purged(self.machine)
            self.went_on()

        self.later(self.world.random.uniform(0.0, 3.0), apply)

    def _gone(self) -> Longs:
        """Messages that the machine tracks and that are no longer there."""
        return np.array([seq for seq in self.machine.tracked.tolist() if not self.scene.stream.has(seq)], np.int64)

    def settle(self) -> None:
        """As a request for information does."""
        if not self.is_up:
            return
        machine, gone = self.machine, self._gone()
        machine.gone(gone, self.now_us)
        require(not len(self._gone()), "what is gone is tracked")
        self.send(machine.look(self.now_us, at_end=self.is_hungry))
        self.changed()

    def change(self) -> None:
        """To the configuration of the scene."""
        if self.is_up:
            self.machine.change(self.scene.config, self.now_us)
            self.look_at_interest()
            self.went_on()

    def went_on(self) -> None:
        self.changed()
        self.wake()

    # ---- time ----

    def changed(self) -> None:
        machine, now_us = self.machine, self.now_us
        if machine.is_changed or self.answers:
            self.store_soon()
        due_us = min(machine.due_us, machine.resumes_us if machine.resumes_us > now_us else FOREVER_US)
        if due_us < FOREVER_US and not now_us < self.scheduled_us <= due_us:
            due_us = self.scheduled_us = max(due_us, now_us + _LEAST_WAIT_US)
            late_ms = self.world.random.choice((0.0, 0.0, 0.0, 20.0))  # the event loop is busy
            self.later((due_us - now_us) / 1000 + late_ms, lambda: self.ring(due_us))

    def ring(self, due_us: int) -> None:
        if self.scheduled_us != due_us:
            return
        self.scheduled_us = 0
        machine, now_us = self.machine, self.now_us
        self.send([*machine.tick(now_us), *machine.look(now_us, at_end=self.is_hungry)])
        self.note_exceeded()
        self.went_on()

    def note_exceeded(self) -> None:
        found, self.machine.exceeded_now = self.machine.exceeded_now, []
        self.scene.checker.exceeded(self.machine, found)

    # ---- storing ----

    def snapshot(self) -> Stored:
        checker, machine = self.scene.checker, self.machine
        self.note_exceeded()
        checker.compare(machine)
        checker.removable(machine)
        machine.is_changed = False
        return Stored(state_of(machine, self.now_us).to_bytes(), checker.lineage.copy())

    def store_soon(self) -> None:
        if not self.is_storing and not self.is_store_due:
            self.is_store_due = True
            self.later(0.0 if self.answers else self.world.random.uniform(0.0, _STORE_MS), self.store)

    def store(self) -> None:
        """What is not stored yet. A crash on the way leaves open whether it was stored."""
        self.is_store_due, self.is_storing = False, True
        answers, self.answers = self.answers, []
        found, life = self.snapshot(), self.life
        self.scene.checker.taken(self.machine.take_acked().tolist())
        fails = not self.scene.is_healed and self.world.random.random() < 0.03

        def done() -> None:
            if not self.is_up or self.life != life:
                return
            self.is_storing = False
            if fails:
                self.machine.is_changed, self.answers = True, answers + self.answers
                self.later(_RETRY_MS, self.changed)
                self.is_store_due = True
                self.later(_RETRY_MS, self.store)
                return
            self.scene.answered(answers, found.lineage)
            self.changed()

        def commit() -> None:
            if self.life == life and (self.is_up or self.world.random.random() < 0.5) and not fails:
                self.stored = found
            done()

        self.world.after(self.world.random.uniform(1.0, 20.0), commit)

    # ---- what goes out ----

    def send(self, statuses: list[Status]) -> None:
        for one in statuses:
            self.scene.told(one)

    def wake(self) -> None:
        self.wakes = True
        if not self.is_pumping:
            self.is_pumping = True
            self.later(0.0, self.pump)

    def pump(self) -> None:
        """Until the machine takes no more messages, or there are none."""
        self.wakes = self.is_hungry = False
        self.go_on()

    def go_on(self) -> None:
        machine = self.machine
        if machine.resumes_us > self.now_us or (wanted := machine.wanted()) is None:
            self.note_exceeded()
            self.rest()
            return
        self.note_exceeded()
        self.scene.checker.wants(machine, wanted, self.us)
        stream, chance = self.scene.stream, self.world.random
        counted_from = machine.resume if len(machine.skip) else machine.next_seq
        left = stream.count_from(counted_from) + len(machine.skip)
        expected, end = len(self.scene.checker.undelivered()), stream.last
        if len(wanted.seqs):
            window = stream.chosen(wanted.seqs.tolist())
        else:
            window = stream.read(wanted.start, chance.randint(1, _WINDOW))
        delay_ms = 0.0 if chance.random() < 0.5 else chance.uniform(0.0, 3.0)
        self.later(delay_ms, lambda: self.was_read(wanted, window, left, expected, end))

    def was_read(self, wanted: Wanted, window: Window, left: int, expected: int, end: int) -> None:
        """Args: expected: messages that were left when they were read, and left: as the machine counts them."""
        machine = self.machine
        is_empty = not left and not len(wanted.seqs) and machine.pulls.none_waits
        if is_empty or not self.deliver(wanted, window, left, expected):
            is_at_end = is_empty or (not len(wanted.seqs) and machine.next_seq > end)
            if is_at_end and self.scene.stream.last == end:
                self.is_hungry = True
                self.rest()
                return
        self.later(0.0, self.go_on)

    def rest(self) -> None:
        self.send(self.machine.look(self.now_us, at_end=self.is_hungry))
        self.changed()
        self.is_pumping = False
        if self.wakes:
            self.wake()

    def deliver(self, wanted: Wanted, window: Window, left: int, expected: int) -> bool:
        machine = self.machine
        if len(wanted.seqs):
            return self.deliver_chosen(wanted, window, left, expected)
        if machine.next_seq != wanted.start:  # purged meanwhile
            return True
        count = min(len(window.messages), wanted.most)
        delivered = self.assign(window, count, left, expected, is_again=False) if count else 0
        if delivered == len(window.messages):
            machine.read_to(window.upto)
        return delivered > 0

    def deliver_chosen(self, wanted: Wanted, window: Window, left: int, expected: int) -> bool:
        machine = self.machine
        if wanted.is_again:
            machine.gone(np.setdiff1d(wanted.seqs, np.array(window.seqs, np.int64)), self.now_us)
            window = window.only(set(machine.pending.column(SEQ).tolist()))
            self.assign(window, len(window.messages), left, expected, is_again=True)
            return True
        delivered = self.assign(window, len(window.messages), left, expected, is_again=False)
        if delivered == len(window.messages):
            machine.read_to(int(wanted.seqs[-1]) + 1)
        return True

    def assign(self, window: Window, count: int, left: int, expected: int, *, is_again: bool) -> int:
        machine, checker = self.machine, self.scene.checker
        messages = window.messages[:count]
        found = machine.deliver(window.batch(count), is_again=is_again, now_us=self.now_us, num_pending=left)
        checker.delivered(machine, messages, found, expected, self.us, is_again=is_again)
        statuses = list(found.statuses)
        for at, message in enumerate(messages[: found.count]):
            while statuses and statuses[0][0] <= at:
                self.scene.told(statuses.pop(0)[1])
            reply = found.replies[int(found.reply_of[at])]
            numbers = (found.times[at], message.seq, found.delivered_as[at], "t" * 19, found.pending[at])
            size_bytes = message.size_bytes + len(PREFIX) + len(".".join(map(str, numbers)))
            self.hand_over(reply, message, int(found.delivered_as[at]), size_bytes, is_again=is_again)
        for _, one in statuses:
            self.scene.told(one)
        return found.count

    def hand_over(self, reply: str, message: Message, delivered_as: int, size_bytes: int, *, is_again: bool) -> None:
        checker = self.scene.checker
        if self.machine.config.is_push:
            require(bool(self.scene.client.interest), "a message without a subscriber")
            checker.pushed(self.machine, message, size_bytes, self.us, is_again=is_again)
        else:
            checker.sent(reply, size_bytes, self.us)
        self.scene.client.receive(message.seq, delivered_as)


def _code(one: Status) -> str:
    return one.headers.decode().split()[1]
