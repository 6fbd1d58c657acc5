"""What a consumer does: a state machine without I/O and without a clock.

Theory of operation. Requests, acks, the time and messages come in; statuses, and which message goes where, come out.
Messages are handled as columns: `wanted` states which ones are to be read, the caller reads them, and `deliver` assigns
them to requests (pull) or to the deliver subject (push), as far as these take them. Acks come as columns of sequences.
Whoever runs the machine stores its state when `is_changed`, and answers acks when that is stored.

Sequences are those of JetStream: of the stream, an offset plus one; of the consumer, a count of deliveries. `delivered`
and `floor` are pairs of both: the last delivery, and below or at what everything is acked.

Invariants. A message is pending from its first delivery until it is acked, removed, or was delivered `max_deliver`
times; a pending message is delivered again. `next_seq` never goes back but when it has been read and not been taken.

Times are microseconds of a clock that does not jump; any zero.

Source: nats-server, `server/consumer.go`.
"""

from __future__ import annotations

import numpy as np

from natslog.jetstream.consumers.config import ConsumerConfig, go_duration
from natslog.jetstream.consumers.deliveries import NO_SEQS, Batch, DeliverSubject, Delivery, Wanted
from natslog.jetstream.consumers.pending import DELIVERED_AS as AS
from natslog.jetstream.consumers.pending import REDELIVERED, SEQ, TIME_US, Longs, Marks, Pending
from natslog.jetstream.consumers.pulls import (
    FOREVER_US,
    NS_PER_US,
    HasInterest,
    Pull,
    Refusal,
    Status,
    WaitingPulls,
    pull_request_of,
    status,
)

_DELAY_US = 1000  # deliveries that are due at about the same time are made at once
_AT_ONCE = 5000
_POWERS = 10 ** np.arange(1, 19, dtype=np.int64)

Pair = tuple[int, int]
Reached = tuple[int, Pair, int, Longs]
"""Consumer sequence, stream sequence."""


class Consumer:
    """See the module.

    Args:
        has_interest: whether a reply subject has a subscriber.
        flow_prefix: of the reply subjects of flow control requests.
        size_of_ack: bytes of the reply subject of a delivery without its numbers.

    Attributes:
        next_seq: the next message to be read. `skip`: sequences to be delivered before (last per subject), and
            `resume`: the next one after them.
        exceeded: of messages that were delivered too often, how often they were delivered again.
        num_pending: how many messages are still to be delivered, as known last.
        acked: sequences that need not be kept for this consumer any more, since `take_acked`.
        paused_us: until when it delivers nothing. push: the state of its deliver subject, if it has one.
    """

    __slots__ = (
        "_check_us",
        "_has_interest",
        "_size_of_ack",
        "_used_us",
        "acked",
        "acked_us",
        "config",
        "delivered",
        "delivered_us",
        "exceeded",
        "exceeded_now",
        "floor",
        "is_changed",
        "name",
        "next_seq",
        "num_pending",
        "paused_us",
        "pending",
        "pulls",
        "push",
        "resume",
        "skip",
    )

    def __init__(
        self,
        name: str,
        config: ConsumerConfig,
        start: int,
        *,
        has_interest: HasInterest,
        flow_prefix: str = "",
        size_of_ack: int = 0,
    ) -> None:
        self.name, self.config = name, config
        self.next_seq = start
        self.delivered: Pair = (0, start - 1)
        self.floor: Pair = (0, start - 1)
        self.pending = Pending()
        self.exceeded: dict[int, int] = {}
        self.skip, self.resume = NO_SEQS, start
        self.num_pending = 0
        self.delivered_us = self.acked_us = 0  # 0: never
        self.paused_us = 0
        self.is_changed = False
        self.acked: list[Longs] = []
        self.exceeded_now: list[tuple[int, int]] = []
        self._has_interest = has_interest
        self._size_of_ack = size_of_ack
        self.pulls = WaitingPulls(config.max_waiting, has_interest)
        self._check_us = FOREVER_US
        self._used_us = 0
        self.push = DeliverSubject(flow_prefix)

    # ---- life ----

    def begin(self, now_us: int, last_seq: int) -> None:
        """A leader begins to serve it. `last_seq`: of the stream."""
        self._used_us = now_us
        self._check_us = now_us if len(self.pending) else FOREVER_US
        self.push.replay_upto = last_seq if self.config.replay_policy == "original" else 0
        self.push.reset_heartbeat(self.config, now_us)

    def change(self, config: ConsumerConfig, now_us: int) -> None:
        """To an updated configuration."""
        was, self.config = self.config, config
        self.pulls.most = config.max_waiting
        self._used_us = now_us
        if was.ack_wait != config.ack_wait or was.backoff != config.backoff:
            self._check_us = now_us
        if was.deliver_subject != config.deliver_subject:
            at = self.pending.waiting_positions()
            if len(at):
                self._queue_again(at, now_us)

    @property
    def due_us(self) -> int:
        """When `tick` is to be called at the latest."""
        due = min(self._check_us, self.pulls.due_us if len(self.pulls) else FOREVER_US)
        if self.config.is_push and self.push.active:
            due = min(due, self.push.heartbeat_us)
        return due

    @property
    def resumes_us(self) -> int:
        """Until when nothing is delivered, so as to keep the pace, or because it is paused; in the past if something
        may be.
        """
        return max(self.push.resumes_us, self.paused_us)

    @property
    def is_stalled(self) -> bool:
        """Whether too many messages are pending for new ones."""
        most = self.config.max_ack_pending
        return most > 0 and self.config.ack_policy != "none" and len(self.pending) >= most

    @property
    def num_redelivered(self) -> int:
        return 0 if self.config.max_deliver == 1 else self.pending.redelivered + len(self.exceeded)

    def idle_since_us(self, now_us: int) -> int:
        """Since when it is not in use; in the future while it is."""
        if self.config.is_push:
            return now_us + 1 if self.push.active else self._used_us
        if len(self.pulls):
            return now_us + 1
        last_us = self._used_us
        if len(self.pending):
            last_us = max(last_us, int((self.pending.column(TIME_US) + self._waits(self.pending.positions())).max()))
        return last_us

    # ---- requests ----

    def pull(self, reply: str, payload: bytes, now_us: int) -> list[Status]:
        """A request for messages."""
        config = self.config
        if config.is_push:
            return [status(reply, "409 Consumer is push based")]
        try:
            request = pull_request_of(payload)
        except Refusal as refusal:
            return [status(reply, str(refusal))]
        if 0 < config.max_batch < request.batch:
            return [status(reply, f"409 Exceeded MaxRequestBatch of {config.max_batch}")]
        if 0 < config.max_expires < request.expires:
            return [status(reply, f"409 Exceeded MaxRequestExpires of {go_duration(config.max_expires)}")]
        if 0 < config.max_bytes < request.max_bytes:
            return [status(reply, f"409 Exceeded MaxRequestMaxBytes of {config.max_bytes}")]
        found: list[Status] = []
        if len(self.pulls) >= self.pulls.most:
            found += self.due_statuses(now_us, at_end=False)
        self._used_us = now_us
        waiting = self.num_pending + self.pending.queued
        if request.no_wait and self.is_stalled and waiting and waiting < self.pulls.wanted:
            return [*found, status(reply, "408 Requests Pending")]
        if not self.pulls.add(Pull.of(reply, request, now_us)):
            return [*found] if request.idle_heartbeat > 0 else [*found, status(reply, "409 Exceeded MaxWaiting")]
        return found

    def due_statuses(self, now_us: int, *, at_end: bool) -> list[Status]:
        """Requests that have expired end; with `at_end` (there are no messages now) those that do not wait as well."""
        if not len(self.pulls):
            return []
        is_stalled = self.is_stalled
        return self.pulls.due_statuses(
            now_us, self._idle_heartbeat, at_end=at_end and not is_stalled, is_stalled=is_stalled
        )

    # ---- acks ----

    def ack(self, seqs: Longs, delivered_as: Longs, now_us: int) -> bool | Marks:
        """Returns which of them may be answered: True for all of them. What was not delivered yet is ignored."""
        if self.config.ack_policy == "none":
            return np.zeros(len(seqs), np.bool_)
        if len(seqs) and not 0 < np.minimum.reduce(seqs) <= np.maximum.reduce(seqs) < self.next_seq:
            known = (seqs < self.next_seq) & (seqs > 0)
            if self.config.ack_policy == "all":
                delivered_as = delivered_as[known]
            given, seqs = seqs, seqs[known]
            self.ack(seqs, delivered_as, now_us)
            return known if len(given) else True
        if len(seqs) and self.config.ack_policy == "all":
            self._ack_all(seqs, delivered_as, now_us)
        elif len(seqs):
            self._ack_each(seqs, now_us)
        return True

    def _ack_each(self, seqs: Longs, now_us: int) -> None:
        at = self.pending.found(seqs)
        if self.exceeded:
            self._forget_exceeded(seqs)
        self.acked_us = self._used_us = now_us
        if len(at):
            self._remove(at)

    def _forget_exceeded(self, seqs: Longs) -> None:
        gone = [seq for seq in seqs.tolist() if self.exceeded.pop(seq, None) is not None]
        if gone:
            self.is_changed = True
            self.acked.append(np.array(gone, np.int64))

    def _ack_all(self, seqs: Longs, delivered_as: Longs, now_us: int) -> None:
        last = int(np.argmax(seqs))
        seq = int(seqs[last])
        if self.exceeded:  # also one below the floor, which passes what was given up
            self._forget_exceeded(np.array([one for one in self.exceeded if one <= seq], np.int64))
        if seq <= self.floor[1]:
            return
        self.acked_us = self._used_us = now_us
        at = self.pending.upto(seq)
        if len(at):
            self.acked.append(self.pending.at(SEQ, at))
            self.pending.remove(at)
        self.floor = (max(self.floor[0], min(int(delivered_as[last]), self.delivered[0])), seq)
        self.is_changed = True

    def _remove(self, at: Longs) -> None:
        """Rows that are acked, or need no ack any more."""
        seqs, follows = self.pending.take(at, self.floor[0] + 1)
        self.acked.append(seqs)
        self.is_changed = True
        if not len(self.pending):
            self.floor = self.delivered
        elif follows:
            seq, delivered_as = self.pending.first()
            self.floor = (max(self.floor[0], delivered_as - 1), max(self.floor[1], seq - 1))

    def nak(self, seq: int, delivered_as: int, delay_us: int | None, now_us: int) -> bool:
        """A message is to be delivered again, at once or after a delay. Whether that is so."""
        at = self.pending.position_of(seq)
        if at is None or not self.floor[0] < delivered_as <= self.delivered[0]:
            return False
        if delay_us is None:
            self.pending.queue(at)
        else:
            self.pending.unqueue(at)
            due_us = now_us + delay_us
            self.pending.touch(at, due_us - self._waits(at))
            self._check_us = min(self._check_us, due_us)
        self.is_changed = True
        return True

    def progress(self, seq: int, now_us: int) -> None:
        """The subscriber is still working on a message."""
        if (at := self.pending.position_of(seq)) is not None:
            self.pending.touch(at, now_us)
            self.is_changed = True

    # ---- messages that are gone ----

    @property
    def tracked(self) -> Longs:
        """Sequences of messages that are pending, or were delivered too often; ascending."""
        pending: Longs = self.pending.to_columns()[SEQ]
        if not self.exceeded:
            return pending
        return np.sort(np.concatenate((pending, np.fromiter(self.exceeded, np.int64))))

    def missing(self, seqs: Longs, now_us: int) -> None:
        """Tracked messages that are no longer in the stream."""
        if not len(seqs):
            return
        at = self.pending.find(seqs)
        at = at[at >= 0]
        if self.exceeded:
            for seq in seqs.tolist():
                self.exceeded.pop(seq, None)
        if len(at):
            self._remove(at)
        self.acked_us = now_us
        self.is_changed = True

    def purged(self, start: int, gone: Longs, now_us: int) -> None:
        """The stream was purged: for this consumer it begins at `start`, and the tracked messages `gone` are gone."""
        self.next_seq = max(self.next_seq, start)
        self._skipped_to(start)
        if self.floor[1] < start:
            at = self.pending.find(gone)
            at = np.union1d(self.pending.upto(start - 1), at[at >= 0])
            highest = int(self.pending.at(AS, at).max()) if len(at) else 0
            self.pending.remove(at)
            self.floor = (max(self.floor[0], highest), start - 1)
            self.acked_us = now_us if len(at) else self.acked_us
        for seq in [one for one in self.exceeded if one < start]:
            del self.exceeded[seq]
        self.delivered = (self.delivered[0], self.next_seq - 1)
        if not len(self.pending):
            self.exceeded.clear()
            self.floor = self.delivered
        self.is_changed = True

    # ---- time ----

    def tick(self, now_us: int) -> list[Status]:
        """Messages whose ack did not come in time are to be delivered again; push heartbeats."""
        if now_us >= self._check_us:
            self._expire(now_us)
        found = []
        if self.config.is_push and self.push.active and now_us >= self.push.heartbeat_us:
            found.append(self._idle_heartbeat(self.config.deliver_subject))
            self.push.reset_heartbeat(self.config, now_us)
        return found

    def _waits(self, at: Longs) -> Longs:
        """How long an ack of each of these rows may take."""
        backoff = self.config.backoff
        if not backoff:
            return np.full(len(at), self.config.ack_wait // NS_PER_US, np.int64)
        steps = np.array(backoff, np.int64) // NS_PER_US
        found: Longs = steps[np.minimum(self.pending.at(REDELIVERED, at), len(steps) - 1)]
        return found

    def _expire(self, now_us: int) -> None:
        self._check_us = FOREVER_US
        if self.config.ack_policy == "none" or not self.config.ack_wait:
            return
        at = self.pending.waiting_positions()
        if not len(at):
            return
        due_us = self.pending.at(TIME_US, at) + self._waits(at)
        late = at[due_us <= now_us]
        if len(late) < len(at):
            self._check_us = int(due_us[due_us > now_us].min()) + _DELAY_US
        if len(late):
            self._queue_again(late, now_us)

    def _queue_again(self, at: Longs, now_us: int) -> None:
        most = self.config.max_deliver
        if most > 0:
            too_often = np.maximum(self.pending.at(REDELIVERED, at), 1) >= most  # others when they would be delivered
            self._give_up(at[too_often])
            at = at[~too_often]
        if len(at):
            first_us = int(self.pending.at(TIME_US, at[:1])[0])
            self.pending.touch(at, self.pending.at(TIME_US, at) + (now_us - first_us))
            self.pending.queue(at)

    def _give_up(self, at: Longs) -> None:
        """They were delivered as often as is permitted."""
        if not len(at):
            return
        pairs = zip(self.pending.at(SEQ, at).tolist(), self.pending.at(REDELIVERED, at).tolist(), strict=True)
        for seq, again in pairs:
            self.exceeded[seq] = again + 1
            self.exceeded_now.append((seq, again + 1))
        self.pending.remove(at)
        self.is_changed = True

    # ---- push ----

    def interest(self, is_there: bool, now_us: int) -> None:
        """Whether the deliver subject has a subscriber now."""
        if is_there != self.push.active:
            self.push.active = is_there
            self._used_us = now_us
            self.push.reset_heartbeat(self.config, now_us)

    def confirm_flow(self, reply: str) -> None:
        """The subscriber has received what was sent before this flow control request."""
        self.push.flow.confirm(reply)

    def _idle_heartbeat(self, to: str) -> Status:
        headers: dict[str, object] = {
            "Nats-Last-Consumer": self.delivered[0],
            "Nats-Last-Stream": self.next_seq - 1,
        }
        if self.push.flow.asked:
            headers["Nats-Consumer-Stalled"] = self.push.flow.asked
        return status(to, "100 Idle Heartbeat", headers)

    # ---- deliveries ----

    @property
    def has_takers(self) -> bool:
        """Whether a request waits, or the deliver subject has a subscriber."""
        return self.push.active if self.config.is_push else len(self.pulls) > 0

    @property
    def takes_messages(self) -> bool:
        if self.config.is_push:
            return self.push.active and not (self.config.flow_control and self.push.flow.is_stalled)
        return len(self.pulls) > 0

    def wanted(self) -> Wanted | None:
        """What is to be read; None: nothing can be delivered now."""
        if not self.takes_messages:
            return None
        most = _AT_ONCE if self.config.is_push else min(_AT_ONCE, self.pulls.wanted)
        again = self._due_again(most)
        if len(again):
            return Wanted(again, 0, 0, is_again=True)
        if self.is_stalled:
            return None
        if self.config.max_ack_pending > 0 and self.config.ack_policy != "none":
            most = min(most, self.config.max_ack_pending - len(self.pending))
        if len(self.skip):
            return Wanted(self.skip[:most], self.next_seq, 0)
        return Wanted(NO_SEQS, self.next_seq, most)

    def _due_again(self, most: int) -> Longs:
        """Sequences to be delivered again; those that were delivered too often are not."""
        if not self.pending.has_queued:
            return NO_SEQS
        again = self.pending.next_queued(most)
        limit = self.config.max_deliver
        if limit > 0:
            at = self.pending.find(again)
            too_often = self.pending.at(REDELIVERED, at) + 1 >= limit
            if too_often.any():
                self._give_up(at[too_often])
                again = again[~too_often]
        return again

    def read_to(self, seq: int) -> None:
        """There is no message for it below this sequence, from `next_seq` on."""
        if seq > self.next_seq:
            self.next_seq = seq
            self._skipped_to(seq)
            self.is_changed = True

    def _skipped_to(self, seq: int) -> None:
        if len(self.skip):
            self.skip = self.skip[self.skip >= seq]
            if not len(self.skip):
                self.next_seq = max(self.next_seq, self.resume)

    def deliver(self, batch: Batch, *, is_again: bool, now_us: int, num_pending: int) -> Delivery:
        """Messages that were read as `wanted`: delivered as far as they are taken.

        Args:
            is_again: they are delivered again. num_pending: how many there are to be delivered, with new ones of these.
        """
        seqs = batch.seqs
        if is_again:
            again_at = self.pending.find(seqs)
            times = self.pending.at(REDELIVERED, again_at) + 2
        else:
            times = np.ones(len(seqs), np.int64)
        left = np.full(len(seqs), num_pending, np.int64) if is_again else num_pending - 1 - np.arange(len(seqs))
        delivered_as = self.delivered[0] + 1 + np.arange(len(seqs))
        sizes = batch.sizes
        if self.config.flow_control or self.config.rate_limit_bps or self.pulls.counts_bytes:
            sizes = sizes + self._size_of_ack + _digits(seqs) + _digits(delivered_as) + _digits(times)
            sizes += _digits(np.maximum(left, 0))
        if self.config.is_push:
            found = self.push.deliver(self.config, batch, sizes, now_us)
        else:
            taken = self.pulls.assign(sizes, now_us)
            found = Delivery(taken.count, taken.replies, taken.reply_of, statuses=taken.statuses)
        count = found.count
        found.delivered_as, found.times, found.pending = (
            delivered_as[:count],
            times[:count],
            np.maximum(left, 0)[:count],
        )
        self.num_pending = num_pending
        if count:
            self._track(seqs[:count], found, is_again, now_us)
            self.num_pending = num_pending if is_again else max(0, num_pending - count)
        return found

    @property
    def reached(self) -> Reached:
        """To be given to `take_back`. Of a consumer without acks."""
        return self.next_seq, self.delivered, self.num_pending, self.skip

    def take_back(self, reached: Reached) -> None:
        """What was delivered since then, without acks, was not sent: it is delivered again."""
        self.next_seq, self.delivered, self.num_pending, self.skip = reached
        self.floor = self.delivered
        self.is_changed = True

    def _track(self, seqs: Longs, found: Delivery, is_again: bool, now_us: int) -> None:
        count = len(seqs)
        self.delivered = (self.delivered[0] + count, max(self.delivered[1], int(seqs[-1])))
        self.delivered_us = now_us
        self._used_us = now_us if not self.config.is_push else self._used_us
        self.is_changed = True
        if not is_again:
            self.next_seq = int(seqs[-1]) + 1
            self._skipped_to(self.next_seq)
        if self.config.ack_policy == "none":
            self.floor = self.delivered
            self.acked.append(seqs)
            return
        if is_again:
            at = self.pending.find(seqs)
            self.pending.take_queued(seqs)
            self.pending.touch(at, now_us)
            self.pending.count_again(at, found.times - 1)
        else:
            at = NO_SEQS
            self.pending.append(seqs, found.delivered_as, now_us)
        if self.config.ack_wait:
            waits = self._waits(at) if is_again else np.array([self._first_wait_us])
            self._check_us = min(self._check_us, now_us + int(waits.min()) + _DELAY_US)

    @property
    def _first_wait_us(self) -> int:
        return (self.config.backoff[0] if self.config.backoff else self.config.ack_wait) // NS_PER_US

    def take_acked(self) -> Longs:
        """Sequences that need not be kept any more for this consumer, since the last call."""
        found, self.acked = self.acked, []
        return np.concatenate(found) if found else NO_SEQS


def _digits(numbers: Longs) -> Longs:
    """How many decimal digits each has."""
    return np.searchsorted(_POWERS, numbers, "right") + 1
