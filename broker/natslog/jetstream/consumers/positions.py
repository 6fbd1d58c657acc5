"""How far the consumers of a stream are, for operators who look at their lag, and their numbers.

The position is the ack floor; or, if no message is pending, where the consumer continues to read, since one with
filters passes messages without acks. It is taken from the machine of a consumer that is served, and otherwise from its
last record. Nothing is stored or computed for it before it is requested, and no message is read.

Numbers are those of consumers that are served. How many messages are left is counted by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from natslog.errors import CorruptLog
from natslog.jetstream.consumers.machine import Consumer
from natslog.jetstream.consumers.served import ServedConsumer
from natslog.jetstream.consumers.state import ConsumerRecord, StateRecord, consumer_record, state_record
from natslog.jetstream.stream_config import config_of
from natslog.node.clock import elapsed_us, now_us
from natslog.node.replicas.consumer_records import ConsumerNumbers, ConsumerPosition, StoredConsumer
from natslog.node.replicas.stream import HostedStream

_MOST = 10_000


def chosen(stream: HostedStream, name: str | None = None) -> list[str]:
    """The names of the consumers that are listed, at most 10,000; or this one, if it exists."""
    known = stream.consumers.consumers
    return sorted(known)[:_MOST] if name is None else [name] if name in known else []


def positions_of(
    stream: HostedStream,
    consumers: Mapping[str, ServedConsumer],
    names: Sequence[str] | None = None,
    left: Mapping[str, int | None] | None = None,
) -> list[ConsumerPosition]:
    """By name. Consumers that clients do not see, or whose record is damaged, are left out.

    Args:
        consumers: those that are served. names: of those that are shown; by default `chosen`. left: how many messages
            are left for each of them, by its id; None: without numbers.
    """
    source, found = f"companion log of stream {stream.name!r}", []
    start, log = 0, stream.log
    if log is not None and config_of(stream.record).retention != "limits":
        start = log.first_readable_offset  # no consumer needs what was before
    for name in chosen(stream) if names is None else names:
        if (stored := stream.consumers.consumers.get(name)) is None:
            continue
        served, numbers = consumers.get(name), None
        try:
            if served is not None and served.id == stored.id:
                numbers = None if left is None else _numbers_of(served, left.get(served.id))
                record, offset, moved_us = served.record, _offset_of(served), _moved_us(served.machine)
            else:
                record = consumer_record(stored.config, source)
                offset, moved_us = _stored_offset(record, stored, source), 0
        except CorruptLog:  # it is logged where it is served
            continue
        if not record.config.direct:
            moved_us, is_durable = moved_us or record.created_us, bool(record.config.durable_name)
            found.append(ConsumerPosition(name, max(offset, start), moved_us, is_durable, numbers))
    return found


def _numbers_of(served: ServedConsumer, left: int | None) -> ConsumerNumbers:
    machine = served.machine
    return ConsumerNumbers(
        delivered=machine.delivered,
        ack_floor=machine.floor,
        num_pending=left,
        num_ack_pending=len(machine.pending),
        num_redelivered=machine.num_redelivered,
        num_waiting=len(machine.pulls),
    )


def _offset_of(served: ServedConsumer) -> int:
    machine, left = served.machine, served.reader.left
    if len(machine.pending) or machine.exceeded:
        return machine.floor[1]
    next_seq = machine.next_seq
    if left.hidden >= 0 and not left.count and left.start == next_seq - 1:
        next_seq = left.end + 1  # none of those in between is for it
    return _caught_up(machine.floor[1], next_seq, has_earlier=bool(len(machine.skip)))


def _stored_offset(record: ConsumerRecord, stored: StoredConsumer, source: str) -> int:
    if not stored.state:
        return record.start - 1
    state: StateRecord = state_record(stored.state, source)
    if state.pending or state.exceeded:
        return state.floor[1]
    return _caught_up(state.floor[1], state.next_seq, has_earlier=bool(state.skip))


def _caught_up(floor: int, next_seq: int, *, has_earlier: bool) -> int:
    """Args: has_earlier: single messages are delivered before the next one: the last of each subject."""
    return floor if has_earlier else max(floor, next_seq - 1)


def _moved_us(machine: Consumer) -> int:
    """By the wall clock; 0: nothing was acked."""
    last_us = machine.delivered_us if machine.config.ack_policy == "none" else machine.acked_us
    return now_us() - (elapsed_us() - last_us) if last_us else 0
