"""A consumer with one rule switched off, each: what `test_consumer_mutations` runs.

A mutation replaces a small function of the machine, or a method of the simulated broker around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from natslog.errors import NatslogError
from natslog.jetstream.consumers import leading, machine, retention, state
from natslog.jetstream.consumers.deliveries import DeliverSubject, Delivery, FlowControl, Wanted
from natslog.jetstream.consumers.leading import LedConsumers
from natslog.jetstream.consumers.machine import Consumer
from natslog.jetstream.consumers.pending import REDELIVERED, SEQ, Longs, Pending
from natslog.jetstream.consumers.pulls import FOREVER_US, Assigned, WaitingPulls
from natslog.jetstream.consumers.retention import Retention
from natslog.jetstream.consumers.state import StateRecord
from natslog.node.replicas import consumer_records
from natslog.node.replicas.companion_records import Record
from natslog.wire.leaf_protocol import bytes_of
from tests.sim.consumer_broker import Leaf, Led

Patch = Callable[[pytest.MonkeyPatch], None]

_ack, _wanted, _purged = Consumer.ack, Consumer.wanted, Consumer.purged
_state_of, _queue_again = leading.state_of, Consumer._queue_again
_track, _deliver, _due_again = Consumer._track, Consumer.deliver, Consumer._due_again
_count_again = Pending.count_again
_sent, _one = FlowControl.sent, WaitingPulls._one
_store, _led_state_of = LedConsumers._store_now, Led._state_of


def replaced(target: Any, name: str, value: Any) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(target, name, value)


def nothing(*_: Any, **__: Any) -> None:
    """In place of what a method does."""


# ---- storing ----


def stored_as(**changes: Any) -> Patch:
    """The state without some of it."""

    def state_without(consumer: Consumer, now_us: int) -> StateRecord:
        return msgspec.structs.replace(_state_of(consumer, now_us), **changes)

    return replaced(leading, "state_of", state_without)


def columns_stored_as(change: Callable[[Any, int], None]) -> Patch:
    """Pending messages, their columns changed."""

    def state_with(consumer: Consumer, now_us: int) -> StateRecord:
        found = _state_of(consumer, now_us)
        columns = state.unpacked(found.pending, 4, "")
        if columns.shape[1]:
            columns = columns.copy()
            change(columns, now_us)
        return msgspec.structs.replace(found, pending=state.packed(columns))

    return replaced(leading, "state_of", state_with)


def counts_forgotten(columns: Any, _now_us: int) -> None:
    columns[REDELIVERED] = 0


def times_of_that_clock(columns: Any, now_us: int) -> None:
    """What is stored is the time, not the age."""
    columns[machine.TIME_US] = now_us - columns[machine.TIME_US]


def next_is_last_delivered(consumer: Consumer, now_us: int) -> StateRecord:
    """Where it reads on is taken from the last message that exists."""
    found = _state_of(consumer, now_us)
    return msgspec.structs.replace(found, next_seq=max(found.next_seq, found.floor[1] + 2))


def _frames(answers: list[str]) -> bytes:
    return b"".join(b"PUB %b 0\r\n\r\n" % bytes_of(reply) for reply in answers)


async def answered_at_once(self: LedConsumers) -> None:
    """Acks are answered before they are stored."""
    answers, self._answers = self._answers, []
    await self.stream.nats.send(_frames(answers))
    await _store(self)


async def answered_although_failed(self: LedConsumers) -> None:
    """An error of the store is taken for a success."""
    try:
        await _store(self)
    except NatslogError:
        answers, self._answers = self._answers, []
        await self.stream.nats.send(_frames(answers))
        raise


async def answered_last(self: LedConsumers) -> None:
    """After the start of the log was moved, which may fail."""
    held: list[bytes] = []

    async def hold(protocol: bytes) -> bool:
        held.append(protocol)
        return True

    nats: Any = self.stream.nats
    nats.send = hold
    try:
        await _store(self)
    finally:
        del nats.send
    await nats.send(b"".join(held))


def stored_late(self: Led, served: Any) -> Record:
    """The state that is stored is the one before."""
    found, client = _led_state_of(self, served), self.host.scene.client
    former, client.former_state = client.former_state, (self.host.life, found[1])
    if former is None or former[0] != self.host.life:
        return found
    self.host.lineages[former[1]] = self.host.lineages[found[1]]
    return consumer_records.STATE, former[1]


def recorded_with_all(self: Retention) -> None:
    """Also what a consumer had acked that was deleted while this was stored."""
    self._looked_at, self._acked = [], []


# ---- acks ----


def ack_anything(self: Consumer, seqs: Longs, delivered_as: Longs, now_us: int) -> Any:
    """Also what was not delivered yet, or by a former leader whose state is lost."""
    if self.config.ack_policy == "none":
        return np.zeros(len(seqs), np.bool_)
    _ack(self, seqs, delivered_as, now_us)
    return True


def ack_nothing_else(self: Consumer, seqs: Longs, delivered_as: Longs, now_us: int) -> Any:
    """An ack of all before acks one."""
    if self.config.ack_policy != "all":
        return _ack(self, seqs, delivered_as, now_us)
    self._ack_each(seqs[seqs < self.next_seq], now_us)
    return seqs < self.next_seq


def ack_all_above(self: Consumer, seqs: Longs, delivered_as: Longs, now_us: int) -> None:
    if len(at := self.pending.positions()):
        self._remove(at)


def ack_by_count(self: Consumer, seqs: Longs, delivered_as: Longs, now_us: int) -> None:
    """As the server does: an ack that names an earlier delivery than the floor is answered and ignored."""
    last = int(np.argmax(seqs))
    if int(delivered_as[last]) > self.floor[0]:
        _ack_all(self, seqs, delivered_as, now_us)


_ack_all = Consumer._ack_all


def floor_at_delivered(self: Consumer, at: Longs) -> None:
    self.acked.append(self.pending.at(SEQ, at))
    self.pending.remove(at)
    self.is_changed = True
    self.floor = self.delivered


def floor_stays(self: Consumer, at: Longs) -> None:
    self.acked.append(self.pending.at(SEQ, at))
    self.pending.remove(at)
    self.is_changed = True


def floor_goes_back(self: Consumer, at: Longs) -> None:
    """To the first that is pending."""
    self.acked.append(self.pending.at(SEQ, at))
    self.pending.remove(at)
    self.is_changed = True
    self.floor = (self.pending.first()[1] - 1, 0) if len(self.pending) else self.delivered


def nak_at_once(self: Consumer, seq: int, delivered_as: int, delay_us: int | None, now_us: int) -> bool:
    return _nak(self, seq, delivered_as, None, now_us)


_nak = Consumer.nak


def nak_of_anything(self: Consumer, seq: int, delivered_as: int, delay_us: int | None, now_us: int) -> bool:
    _nak(self, seq, delivered_as, delay_us, now_us)
    return True


# ---- deliveries ----


def give_up(limit_plus: int) -> Patch:
    """After one more, or one less."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        def with_limit(method: Any) -> Any:
            def call(self: Consumer, *arguments: Any) -> Any:
                config = self.config
                if config.max_deliver > 1:
                    self.config = msgspec.structs.replace(config, max_deliver=config.max_deliver + limit_plus)
                try:
                    return method(self, *arguments)
                finally:
                    self.config = config

            return call

        monkeypatch.setattr(Consumer, "_queue_again", with_limit(_queue_again))
        monkeypatch.setattr(Consumer, "_due_again", with_limit(_due_again))

    return patch


def gives_up_without_a_record(self: Consumer, at: Longs) -> None:
    for seq, again in zip(self.pending.at(SEQ, at).tolist(), self.pending.at(REDELIVERED, at).tolist(), strict=True):
        self.exceeded_now.append((seq, again + 1))
    self.pending.remove(at)


def wants_more(self: Consumer) -> Wanted | None:
    found = _wanted(self)
    return found if found is None or len(found.seqs) else found._replace(most=found.most + 3)


def waits_once(self: Consumer, at: Longs) -> Longs:
    """Whatever the backoff states for the second delivery."""
    return np.full(len(at), self._first_wait_us, np.int64)


def delivered_again_as_first(self: Pending, positions: Longs, redelivered: Longs) -> None:
    _count_again(self, positions, np.minimum(redelivered, 1))


def track_without_alarm(self: Consumer, seqs: Longs, found: Delivery, is_again: bool, now_us: int) -> None:
    check_us = self._check_us
    _track(self, seqs, found, is_again, now_us)
    if is_again:
        self._check_us = check_us


def begin_without_check(self: Consumer, now_us: int, last_seq: int) -> None:
    _begin(self, now_us, last_seq)
    self._check_us = FOREVER_US


_begin = Consumer.begin


def read_to_beyond(self: Consumer, seq: int) -> None:
    """One message too far."""
    _read_to(self, seq + 1 if seq > self.next_seq else seq)


_read_to = Consumer.read_to


def skips_one_more(self: Consumer, seq: int) -> None:
    _skipped_to(self, seq)
    self.skip = self.skip[1:] if len(self.skip) > 1 else self.skip


_skipped_to = Consumer._skipped_to


def purged_in_part(self: Consumer, start: int, gone: Longs, now_us: int) -> None:
    """What is purged stays pending."""
    self.next_seq = max(self.next_seq, start)
    self._skipped_to(start)
    self.is_changed = True


def purged_with_all(self: Consumer, start: int, gone: Longs, now_us: int) -> None:
    _purged(self, start, self.pending.column(SEQ), now_us)
    self.pending.remove(self.pending.positions())


def counts_all_left(self: Consumer, batch: Any, **rest: Any) -> Delivery:
    found = _deliver(self, batch, **rest)
    found.pending = np.full(found.count, rest["num_pending"], np.int64)
    return found


def same_numbers_again(self: Consumer, batch: Any, **rest: Any) -> Delivery:
    """A redelivery keeps its consumer sequence."""
    found = _deliver(self, batch, **rest)
    if rest["is_again"]:
        found.delivered_as = found.delivered_as - 1
    return found


# ---- requests ----


def to_first_all(self: WaitingPulls, taken: Assigned, left: int, now_us: int) -> None:
    pull = self._waiting[0]
    taken.add(taken.index_of(pull.reply), left)
    pull.took(left, now_us)
    if pull.left <= 0:
        self._waiting.popleft()


def in_turn_too_often(self: WaitingPulls, taken: Assigned, left: int, now_us: int) -> None:
    """Rounds of all, until the largest request has enough."""
    rounds = min(left // len(self._waiting), max(max(1, pull.left) for pull in self._waiting))
    indices = [taken.index_of(pull.reply) for pull in self._waiting]
    taken.add_all(np.tile(np.array(indices, np.int64), rounds))
    for pull in self._waiting:
        pull.took(rounds, now_us)
    self._waiting = type(self._waiting)(pull for pull in self._waiting if pull.left > 0)


def bytes_without_limit(self: WaitingPulls, taken: Assigned, size_bytes: int, now_us: int) -> None:
    _one(self, taken, 0, now_us)


def look_without_end(self: WaitingPulls, now_us: int, heartbeat: Any, *, at_end: bool, is_stalled: bool) -> Any:
    return _look(self, now_us, heartbeat, at_end=False, is_stalled=is_stalled)


_look = WaitingPulls.due_statuses


def look_without_expiry(self: WaitingPulls, now_us: int, heartbeat: Any, *, at_end: bool, is_stalled: bool) -> Any:
    return _look(self, 0, heartbeat, at_end=at_end, is_stalled=is_stalled)


def look_without_heartbeats(self: WaitingPulls, now_us: int, heartbeat: Any, *, at_end: bool, is_stalled: bool) -> Any:
    found = _look(self, now_us, heartbeat, at_end=at_end, is_stalled=is_stalled)
    return [one for one in found if b" 100 " not in one.headers]


def keeps_expired(self: WaitingPulls, taken: Assigned, now_us: int) -> None:
    """A request that has expired gets messages until an alarm ends it."""
    self._waiting = type(self._waiting)(pull for pull in self._waiting if self._has_interest(pull.reply))


# ---- push ----


def sent_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a subject whose subscriber has gone."""
    monkeypatch.setattr(
        DeliverSubject, "active", property(lambda self: True, lambda self, is_there: None), raising=False
    )


def confirm_anything(self: FlowControl, reply: str) -> None:
    """Whatever request it names."""
    if self.asked:
        _confirm(self, self.asked)


_confirm = FlowControl.confirm


def confirm_all(self: FlowControl, reply: str) -> None:
    """All that was sent, also after the request."""
    _confirm(self, reply)
    if not self.asked:
        self._unconfirmed = 0


def asks_once(self: FlowControl, sizes: Longs) -> tuple[int, int | None]:
    """No request of flow control after the first."""
    if self._requests and not self.asked:
        self.asked = "asked"
    return _sent(self, sizes)


# ---- kept ----


def needs_pending(consumer: Consumer, seqs: Longs) -> Any:
    return (seqs >= consumer.next_seq) | (consumer.pending.find(seqs) >= 0) | np.isin(seqs, consumer.skip)


# ---- all of them ----

MUTATIONS: dict[str, Patch] = {
    "stored: pending messages are forgotten": stored_as(pending=b""),
    "stored: what was given up is forgotten": stored_as(exceeded={}),
    "stored: where to skip to is forgotten": stored_as(skip=b""),
    "stored: the position is that behind the floor": replaced(leading, "state_of", next_is_last_delivered),
    "stored: the floor is forgotten": stored_as(floor=(0, 0)),
    "stored: the count of deliveries is forgotten": stored_as(delivered=(0, 0)),
    "stored: counts of redeliveries are forgotten": columns_stored_as(counts_forgotten),
    "stored: times of another clock": columns_stored_as(times_of_that_clock),
    "stored: the state before": replaced(Led, "_state_of", stored_late),
    "acks are answered before they are stored": replaced(LedConsumers, "_store_now", answered_at_once),
    "acks are answered although they are not stored": replaced(LedConsumers, "_store_now", answered_although_failed),
    "acks are answered when the start was moved": replaced(LedConsumers, "_store_now", answered_last),
    "link: messages are assigned although it was lost": replaced(Leaf, "is_writable", True),
    "session: messages are delivered without one": replaced(Led, "may_deliver", True),
    "interest: messages go while a consumer is damaged": replaced(Retention, "_waits_for_consumers", False),
    "kept: what was acked during a store": replaced(Retention, "recorded", recorded_with_all),
    "ack: what was not delivered yet": replaced(Consumer, "ack", ack_anything),
    "ack: of all before acks one": replaced(Consumer, "ack", ack_nothing_else),
    "ack: of all before acks all": replaced(Consumer, "_ack_all", ack_all_above),
    "ack: of all before, by the number of the delivery": replaced(Consumer, "_ack_all", ack_by_count),
    "ack: one that was given up": replaced(Consumer, "_forget_exceeded", nothing),
    "floor: passes pending messages": replaced(Consumer, "_remove", floor_at_delivered),
    "floor: stays": replaced(Consumer, "_remove", floor_stays),
    "floor: goes back": replaced(Consumer, "_remove", floor_goes_back),
    "nak: a delay is ignored": replaced(Consumer, "nak", nak_at_once),
    "nak: is ignored": replaced(Consumer, "nak", lambda *_: False),
    "nak: of what is not pending": replaced(Consumer, "nak", nak_of_anything),
    "progress: is ignored": replaced(Consumer, "progress", nothing),
    "given up after one delivery more": give_up(1),
    "given up after one delivery less": give_up(-1),
    "given up without a record": replaced(Consumer, "_give_up", gives_up_without_a_record),
    "limit of pending messages is exceeded": replaced(Consumer, "wanted", wants_more),
    "backoff is that of the first delivery": replaced(Consumer, "_waits", waits_once),
    "deliveries are counted up to two": replaced(Pending, "count_again", delivered_again_as_first),
    "no alarm after a redelivery": replaced(Consumer, "_track", track_without_alarm),
    "no alarm after a change of the leader": replaced(Consumer, "begin", begin_without_check),
    "what was read is passed over": replaced(Consumer, "read_to", read_to_beyond),
    "last of each subject: one after the other is skipped": replaced(Consumer, "_skipped_to", skips_one_more),
    "purge: pending messages stay": replaced(Consumer, "purged", purged_in_part),
    "purge: all pending messages go": replaced(Consumer, "purged", purged_with_all),
    "gone: stays pending": replaced(Consumer, "missing", nothing),
    "left: not counted down": replaced(Consumer, "deliver", counts_all_left),
    "consumer sequences of redeliveries": replaced(Consumer, "deliver", same_numbers_again),
    "queue: messages that are delivered stay in it": replaced(Pending, "take_queued", nothing),
    "queue: messages with a delay stay in it": replaced(Pending, "unqueue", nothing),
    "pending: acked messages are found": replaced(Pending, "find", lambda self, seqs: _find_all(self, seqs)),
    "pull: gets all": replaced(WaitingPulls, "_to_first", to_first_all),
    "pull: gets as much as others": replaced(WaitingPulls, "_in_turn", in_turn_too_often),
    "pull: limit of bytes is ignored": replaced(WaitingPulls, "_one", bytes_without_limit),
    "pull: one that does not wait waits": replaced(WaitingPulls, "due_statuses", look_without_end),
    "pull: does not expire": replaced(WaitingPulls, "due_statuses", look_without_expiry),
    "pull: gets no heartbeats": replaced(WaitingPulls, "due_statuses", look_without_heartbeats),
    "pull: gets messages when it has expired": replaced(WaitingPulls, "_drop_expired", keeps_expired),
    "push: sent without a subscriber": sent_to_nobody,
    "push: rate is ignored": replaced(Consumer, "resumes_us", 0),
    "flow: never stalls": replaced(FlowControl, "is_stalled", False),
    "flow: any confirmation counts": replaced(FlowControl, "confirm", confirm_anything),
    "flow: a confirmation counts for all": replaced(FlowControl, "confirm", confirm_all),
    "flow: is asked once": replaced(FlowControl, "sent", asks_once),
    "flow: confirmations are ignored": replaced(FlowControl, "confirm", nothing),
    "kept: what was given up is not needed": replaced(retention, "needs", needs_pending),
}


def _find_all(self: Pending, seqs: Longs) -> Longs:
    window = self._columns[SEQ, self._start : self._end]
    if not len(window):
        return np.full(len(seqs), -1, np.int64)
    at = np.minimum(np.searchsorted(window, seqs), len(window) - 1)
    return np.where(window[at] == seqs, at + self._start, -1)
