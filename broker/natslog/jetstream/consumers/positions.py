"""How far the consumers of a stream are, for operators who look at their lag.

The position is the ack floor; or, if no message is pending, where the consumer continues to read, since one with
filters passes messages without acks. It is taken from the machine of a consumer that is served, and otherwise from its
last record. Nothing is stored or computed for it before it is requested, and no message is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from natslog.errors import CorruptLog
from natslog.jetstream.consumers.machine import Consumer
from natslog.jetstream.consumers.served import ServedConsumer
from natslog.jetstream.consumers.state import ConsumerRecord, StateRecord, consumer_record, state_record
from natslog.jetstream.stream_config import config_of
from natslog.node.clock import elapsed_us, now_us
from natslog.node.replicas.consumer_records import ConsumerPosition, StoredConsumer
from natslog.node.replicas.stream import HostedStream

_MOST = 10_000


def positions_of(stream: HostedStream, consumers: Mapping[str, ServedConsumer]) -> list[ConsumerPosition]:
    """By name; of at most 10,000 consumers. Those that clients do not see, or whose record is damaged, are left out.

    Args:
        consumers: those that are served.
    """
    source, found = f"companion log of stream {stream.name!r}", []
    start, log = 0, stream.log
    if log is not None and config_of(stream.record).retention != "limits":
        start = log.first_readable_offset  # no consumer needs what was before
    for name, stored in islice(sorted(stream.consumers.consumers.items()), _MOST):
        served = consumers.get(name)
        try:
            if served is not None and served.id == stored.id:
                record, offset, moved_us = served.record, _offset_of(served), _moved_us(served.machine)
            else:
                record = consumer_record(stored.config, source)
                offset, moved_us = _stored_offset(record, stored, source), 0
        except CorruptLog:  # it is logged where it is served
            continue
        if not record.config.direct:
            moved_us, is_durable = moved_us or record.created_us, bool(record.config.durable_name)
            found.append(ConsumerPosition(name, max(offset, start), moved_us, is_durable))
    return found


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
