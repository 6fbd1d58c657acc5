"""What must hold of a consumer, whatever happens to it: see `consumer_world`, which names the promises.

The checker follows what was delivered and acked. That part of it which a leader continues from is a `Lineage`: it is
copied when a state is stored, and the copy is continued when that state is restored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from natslog.jetstream.consumers import retention
from natslog.jetstream.consumers.deliveries import FLOW_BYTES, Delivery, Wanted
from natslog.jetstream.consumers.machine import Consumer, Pair
from natslog.jetstream.consumers.pending import DELIVERED_AS, SEQ
from natslog.jetstream.consumers.pulls import PullRequest

if TYPE_CHECKING:
    from tests.sim.consumer_stream import Message, Stream

_ENDS_WITHIN_US = 50_000
_SHORTLY_US = 60_000
_NS_PER_US = 1000
_FLOW_FROM_BYTES = FLOW_BYTES // 16


class Violation(AssertionError):
    """Something that must never be."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


@dataclass(slots=True)
class Lineage:
    """Attributes:
    delivered: sequences, and how often each was delivered. given_up: delivered as often as is permitted.
    dropped: gone before they were acked. earliest_us: when a message may be delivered again, and since when
        that is so.
    """

    delivered_as: int = 0
    delivered: dict[int, int] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    earliest_us: dict[int, tuple[int, int]] = field(default_factory=dict)
    floor: Pair = (0, 0)
    last_seq: int = 0

    def copy(self) -> Lineage:
        return Lineage(
            self.delivered_as,
            dict(self.delivered),
            set(self.acked),
            set(self.given_up),
            set(self.dropped),
            dict(self.earliest_us),
            self.floor,
            self.last_seq,
        )

    def is_pending(self, seq: int) -> bool:
        return seq in self.delivered and not (seq in self.acked or seq in self.given_up or seq in self.dropped)


@dataclass(slots=True)
class OpenPull:
    """A request, as its client has made it. `expires_us`: None: never. `ready_us`: since when nothing keeps a request
    that does not wait.
    """

    request: PullRequest
    began_us: int
    expires_us: int | None
    last_us: int
    got: int = 0
    got_bytes: int = 0
    ready_us: int | None = None


class FlowWindow:
    """What was sent to a subscriber with flow control, in one life of a leader."""

    def __init__(self) -> None:
        self.most = _FLOW_FROM_BYTES
        self.unconfirmed = 0
        self.largest = 0
        self.asked: dict[str, int] = {}

    def sent(self, size_bytes: int) -> None:
        self.largest = max(self.largest, size_bytes)
        self.unconfirmed += size_bytes
        most = min(self.most, FLOW_BYTES) + self.largest
        require(self.unconfirmed <= most, f"{self.unconfirmed} bytes are unconfirmed, of {most}")

    def ask(self, reply: str) -> None:
        require(bool(reply) and reply not in self.asked, f"flow control request {reply!r} again")
        self.asked[reply] = self.unconfirmed

    def confirmed(self, reply: str) -> None:
        if (upto := self.asked.pop(reply, None)) is not None:
            self.unconfirmed -= upto
            self.most *= 2


class Checker:
    """Args: start: no message below is delivered but those in `skip`; with these, none below `resume`."""

    def __init__(self, stream: Stream, start: int, skip: list[int], resume: int) -> None:
        self.stream = stream
        self.start, self.skip, self.resume = start, frozenset(skip), resume
        self.lineage = Lineage(floor=(0, start - 1))
        self.confirmed: set[int] = set()
        self.pulls: dict[str, OpenPull] = {}
        self.completed: set[str] = set()  # with a limit of bytes: a status follows, unless that was reached
        self.seen: set[str] = set()  # requests that came with acks, which may come twice
        self.flow = FlowWindow()
        self.may_pass = False  # what a purge removes above the floor, and acks of redeliveries, count as below it
        self.changed_us = -1  # when acks were given another time
        self.deliveries = self.again = self.acks = self.confirmations = self.given_up = self.ended_pulls = 0
        self.paced_bytes, self.paced_from_us, self.last_first = 0, 0, (0, 0)

    # ---- lives ----

    def restored(self, stored: Lineage, now_us: int) -> None:
        """Another leader continues from what was stored. Requests are lost."""
        self.lineage = stored.copy()
        self.pulls.clear()
        self.flow = FlowWindow()
        self.paced_bytes, self.paced_from_us, self.last_first = 0, now_us, (0, 0)

    def begin_again(self, start: int) -> None:
        """The consumer was deleted, and another one of its name begins."""
        self.start, self.skip, self.resume = start, frozenset(), 0
        self.confirmed.clear()
        self.pulls.clear()
        self.may_pass = False

    # ---- messages ----

    def is_wanted(self, seq: int) -> bool:
        return seq in self.skip or seq >= (self.resume if self.skip else self.start)

    def undelivered(self) -> list[int]:
        """Messages that are to be delivered for the first time."""
        delivered = self.lineage.delivered
        return [seq for seq in self.stream.order if seq not in delivered and self.is_wanted(seq)]

    def wants(self, machine: Consumer, wanted: Wanted, now_us: int) -> None:
        """It asks for messages to be read."""
        if not wanted.is_again:
            require(not machine.is_stalled, "new messages although too many are pending")
            return
        for seq in wanted.seqs.tolist():
            due_us, since_us = self.lineage.earliest_us.get(seq, (0, 0))
            is_early = now_us < due_us and since_us > self.changed_us
            require(not is_early, f"{seq} is to be delivered again {due_us - now_us} µs too early")

    def delivered(
        self, machine: Consumer, messages: list[Message], found: Delivery, left: int, now_us: int, *, is_again: bool
    ) -> None:
        """Args: left: messages that were to be delivered for the first time when they were read."""
        lineage = self.lineage
        require(found.count <= len(messages), "more messages than there are")
        for at, message in enumerate(messages[: found.count]):
            seq, times = message.seq, int(found.times[at])
            self.deliveries += 1
            self.again += is_again
            lineage.delivered_as += 1
            require(
                int(found.delivered_as[at]) == lineage.delivered_as, f"{seq} is delivered as {found.delivered_as[at]}"
            )
            require(seq not in self.confirmed, f"{seq} is delivered although its ack was answered")
            require(seq not in lineage.acked, f"{seq} is delivered although it was acked")
            require(seq not in lineage.given_up, f"{seq} is delivered although it was given up")
            known = lineage.delivered.get(seq, 0)
            require(times == known + 1, f"{seq} is delivered for the {known + 1}. time, as the {times}.")
            require(is_again == (known > 0), f"{seq} is delivered again")
            most = machine.config.max_deliver
            require(most <= 0 or times <= most, f"{seq} is delivered {times} times, of {most}")
            if not is_again:
                require(self.is_wanted(seq), f"{seq} is not for this consumer")
                require(seq > lineage.last_seq, f"{seq} is delivered after {lineage.last_seq}")
                lineage.last_seq = seq
                left -= 1
            require(self.skip or int(found.pending[at]) == left, f"{found.pending[at]} are left, not {left}")
            self._track(machine, seq, times, now_us)
        if found.count and not is_again:
            missing = [seq for seq in self.undelivered() if seq < lineage.last_seq]
            require(not missing, f"{lineage.last_seq} is delivered, but not {missing[:5]}")

    def _track(self, machine: Consumer, seq: int, times: int, now_us: int) -> None:
        lineage = self.lineage
        lineage.delivered[seq] = times
        if machine.config.ack_policy == "none":
            lineage.acked.add(seq)
        else:
            lineage.earliest_us[seq] = now_us + self._wait_us(machine, times), now_us

    @staticmethod
    def _wait_us(machine: Consumer, times: int) -> int:
        config = machine.config
        steps = config.backoff or (config.ack_wait,)
        return steps[min(times, len(steps)) - 1] // _NS_PER_US

    def sent(self, reply: str, size_bytes: int, now_us: int) -> None:
        """A message to a request."""
        pull = self.pulls.get(reply)
        require(pull is not None, f"a message to {reply}, which has ended")
        assert pull is not None
        pull.got, pull.got_bytes, pull.last_us = pull.got + 1, pull.got_bytes + size_bytes, now_us
        request = pull.request
        require(pull.got <= max(1, request.batch), f"{reply} got {pull.got} messages, of {request.batch}")
        require(request.max_bytes <= 0 or pull.got_bytes <= request.max_bytes, f"{reply} got {pull.got_bytes} bytes")
        require(pull.expires_us is None or now_us < pull.expires_us, f"{reply} has expired")
        if pull.got == max(1, request.batch) or 0 < pull.got_bytes == request.max_bytes:
            self._end(reply)
            if request.max_bytes > 0:
                self.completed.add(reply)

    def pushed(self, machine: Consumer, message: Message, size_bytes: int, now_us: int, *, is_again: bool) -> None:
        """A message to the deliver subject."""
        config = machine.config
        if config.flow_control:
            self.flow.sent(size_bytes)
        if config.rate_limit_bps:
            rate = config.rate_limit_bps / 8 / 1e6
            self.paced_bytes += size_bytes
            most = rate * (now_us - self.paced_from_us + 110_000) + size_bytes + 400
            require(self.paced_bytes <= most, f"{self.paced_bytes} bytes within {now_us - self.paced_from_us} µs")
        if config.replay_policy == "original" and not is_again:
            last_us, published_us = self.last_first
            pause_us = message.time_us - published_us
            if last_us and pause_us > 1000 and message.seq <= machine.push.replay_upto:
                require(
                    now_us - last_us >= pause_us - 1000, f"{message.seq} comes {pause_us} µs after another too early"
                )
            self.last_first = now_us, message.time_us

    # ---- acks ----

    def acked(self, machine: Consumer, seq: int, is_answered: bool) -> None:
        """Args: is_answered: it may be, when it is stored."""
        lineage, policy = self.lineage, machine.config.ack_policy
        if policy == "none":
            require(not is_answered, f"the ack of {seq} is answered")
            return
        self.acks += 1
        if not is_answered:
            require(seq not in lineage.delivered, f"the ack of {seq} is ignored")
            return
        for one in [seq] if policy == "explicit" else [one for one in lineage.delivered if one <= seq]:
            if one in lineage.delivered:
                lineage.acked.add(one)

    def answered(self, seqs: list[int], stored: Lineage) -> None:
        """Acks that were answered, when this was stored."""
        for seq in seqs:
            self.confirmations += 1
            require(
                seq in stored.acked or not self.stream.has(seq) or not self.is_wanted(seq),
                f"the ack of {seq} was answered, but is not stored",
            )
            self.confirmed.add(seq)

    def is_nakable(self, machine: Consumer, seq: int, delivered_as: int) -> bool:
        return (
            self.lineage.is_pending(seq)
            and self.stream.has(seq)
            and machine.floor[0] < delivered_as <= self.lineage.delivered_as
        )

    def naked(self, seq: int, delay_us: int, now_us: int, *, is_done: bool, is_due: bool) -> None:
        require(is_done or not is_due, f"the negative ack of {seq} is ignored")
        if is_done:
            require(self.lineage.is_pending(seq), f"a negative ack of {seq}, which is not pending")
            self.lineage.earliest_us[seq] = now_us + delay_us, now_us

    def progressed(self, machine: Consumer, seq: int, now_us: int) -> None:
        lineage = self.lineage
        due_us, since_us = lineage.earliest_us.get(seq, (0, 0))
        if lineage.is_pending(seq) and due_us > now_us and since_us > self.changed_us:  # else it may be due already
            lineage.earliest_us[seq] = now_us + self._wait_us(machine, lineage.delivered[seq]), now_us

    def exceeded(self, machine: Consumer, found: list[tuple[int, int]]) -> None:
        """They were delivered as often as is permitted."""
        most = machine.config.max_deliver
        for seq, times in found:
            self.given_up += 1
            require(self.lineage.is_pending(seq), f"{seq} is given up, and not pending")
            require(times == self.lineage.delivered[seq], f"{seq} is given up after {times} deliveries")
            require(0 < most <= times, f"{seq} is given up after {times} deliveries, of {most}")
            self.lineage.given_up.add(seq)

    def purged(self, machine: Consumer) -> None:
        """If nothing is pending then, what was given up is forgotten."""
        self.may_pass = True
        if not len(machine.pending):
            self.lineage.acked |= self.lineage.given_up
        self.compare(machine)

    def taken(self, seqs: list[int]) -> None:
        """They need not be kept any more."""
        lineage = self.lineage
        for seq in seqs:
            require(not self.stream.has(seq) or seq in lineage.acked, f"{seq} need not be kept, and was not acked")

    def removable(self, machine: Consumer) -> None:
        """What it does not need was acked."""
        seqs = self.stream.order
        if not seqs:
            return
        needs = np.broadcast_to(retention.needs(machine, np.array(seqs, np.int64)), len(seqs))
        unneeded = [seq for seq, is_needed in zip(seqs, needs.tolist(), strict=True) if not is_needed]
        wrong = [seq for seq in unneeded if self.is_wanted(seq) and seq not in self.lineage.acked]
        require(not wrong, f"{wrong[:5]} are not needed, and were not acked")

    # ---- requests ----

    def opened(self, reply: str, request: PullRequest, now_us: int) -> None:
        expires_us = now_us + request.expires // _NS_PER_US if request.expires else None
        self.pulls[reply] = OpenPull(request, now_us, expires_us, now_us)

    def told(self, to: str, code: str, now_us: int) -> None:
        """A status."""
        if code == "409" and to in self.completed:
            self.completed.discard(to)
            return
        pull = self.pulls.get(to)
        require(pull is not None, f"status {code} to {to}, which has ended")
        assert pull is not None
        pull.last_us = now_us
        if code != "100":
            self._end(to)

    def closed(self, reply: str) -> None:
        """Its client has gone."""
        self.pulls.pop(reply, None)

    def _end(self, reply: str) -> None:
        self.ended_pulls += 1
        del self.pulls[reply]

    # ---- always ----

    def watch(self, machine: Consumer, now_us: int, *, is_served: bool) -> None:
        """After every step. `is_served`: nothing keeps the leader from answering at once."""
        floor, lineage = machine.floor, self.lineage
        require(
            floor[0] >= lineage.floor[0] and floor[1] >= lineage.floor[1],
            f"the floor goes from {lineage.floor} to {floor}",
        )
        lineage.floor = floor
        require(machine.delivered[0] == lineage.delivered_as, "deliveries are counted wrongly")
        require(floor[0] <= lineage.delivered_as, f"the floor {floor} is above what was delivered")
        if len(machine.pending):
            seq, delivered_as = machine.pending.first()
            is_below = floor[0] < delivered_as or self.may_pass or machine.config.ack_policy == "all"
            require(floor[1] < seq and is_below, f"the floor {floor} passes {seq}, which is pending")
            most = machine.config.max_ack_pending
            require(most <= 0 or len(machine.pending) <= most, f"{len(machine.pending)} are pending, of {most}")
        self._watch_pulls(machine, now_us, is_served)

    def _watch_pulls(self, machine: Consumer, now_us: int, is_served: bool) -> None:
        for reply, pull in self.pulls.items():
            until_us = pull.expires_us
            require(until_us is None or now_us <= until_us + _ENDS_WITHIN_US, f"{reply} does not end")
            every_us = pull.request.idle_heartbeat // _NS_PER_US
            require(not every_us or now_us <= pull.last_us + every_us + _ENDS_WITHIN_US, f"{reply} gets no heartbeats")
            if not pull.request.no_wait or until_us is not None:
                continue
            if not is_served or machine.is_stalled or machine.pending.has_queued or self.undelivered():
                pull.ready_us = None
            elif pull.ready_us is None:
                pull.ready_us = now_us
            require(pull.ready_us is None or now_us <= pull.ready_us + _SHORTLY_US, f"{reply} waits")

    def compare(self, machine: Consumer) -> None:
        """What is pending is what was delivered and neither acked nor given up nor gone."""
        lineage = self.lineage
        pending = set(machine.pending.column(SEQ).tolist())
        expected = {seq for seq in lineage.delivered if lineage.is_pending(seq)}
        for seq in expected - pending:
            require(not self.stream.has(seq), f"{seq} was delivered, and is neither pending nor acked")
            lineage.dropped.add(seq)
        require(pending <= expected, f"{sorted(pending - expected)[:5]} are pending")
        numbers = machine.pending.column(DELIVERED_AS)
        require(bool((np.diff(numbers) > 0).all()), "what is pending is not in order")
        require(len(numbers) == len(machine.pending), "what is pending is counted wrongly")
        wrong = set(machine.exceeded) & lineage.acked
        require(not wrong, f"{sorted(wrong)[:5]} were acked, and count as given up")
        stays = {seq for seq in lineage.given_up - lineage.acked if self.stream.has(seq)}
        require(stays <= set(machine.exceeded), f"{sorted(stays - set(machine.exceeded))[:5]} are forgotten")

    def is_done(self) -> bool:
        """Whether everything was delivered, and acked or given up."""
        lineage = self.lineage
        done = lineage.acked | lineage.given_up
        return all(seq in done for seq in self.stream.order if self.is_wanted(seq))

    def standing(self) -> str:
        lineage = self.lineage
        left = [seq for seq in self.stream.order if self.is_wanted(seq) and seq not in lineage.acked | lineage.given_up]
        return f"not acked are {[(seq, lineage.delivered.get(seq, 0)) for seq in left[:8]]} of {len(left)}"
