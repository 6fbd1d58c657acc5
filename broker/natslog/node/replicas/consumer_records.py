"""The consumers of a stream, as the records of its companion log state them.

Every replica has the last record and the last state of each consumer, as bytes, so that whichever becomes leader can
serve them at once. What they mean is decided where consumers are served (`natslog.jetstream.consumers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from natslog.errors import CorruptLog
from natslog.node.replicas.companion_records import Record

CONSUMER = "consumer"
"""Kind of the records of a companion log that create or change a consumer."""
STATE = "consumer-state"
"""Kind of those that state how far a consumer is."""
DELETED = "consumer-deleted"
KINDS = frozenset((CONSUMER, STATE, DELETED))


class _Named(msgspec.Struct, frozen=True, array_like=True):
    """`id`: of this consumer: a later one of the same name has another. `data`: what the record states."""

    name: str
    id: str
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class StoredConsumer:
    """`state`: empty until one was stored."""

    id: str
    config: bytes
    state: bytes = b""


class ConsumerNumbers(NamedTuple):
    """Of a consumer that is served, as the JetStream API states them. `delivered`, `ack_floor`: sequence of the
    consumer, and of the stream. `num_pending`: None if messages would have to be read for too long to count them.
    """

    delivered: tuple[int, int]
    ack_floor: tuple[int, int]
    num_pending: int | None
    num_ack_pending: int
    num_redelivered: int
    num_waiting: int


class ConsumerPosition(NamedTuple):
    """Of a consumer: below `offset`, it needs no message any more. `set_us`: when it last moved. `numbers`: None if it
    is not served, or they were not requested.
    """

    name: str
    offset: int
    set_us: int
    is_durable: bool
    numbers: ConsumerNumbers | None = None


@dataclass(frozen=True, slots=True)
class ConsumerOrigin:
    """A durable consumer of a stream of JetStream that is imported. `config`: as JetStream states it. `ack_floor`:
    consumer sequence and stream sequence.
    """

    config: dict[str, Any]
    created_us: int
    ack_floor: tuple[int, int]


class ConsumerRecords:
    """Of one stream, by name."""

    def __init__(self) -> None:
        self.consumers: dict[str, StoredConsumer] = {}

    def __len__(self) -> int:
        return len(self.consumers)

    def apply(self, kind: str, data: bytes, source: str) -> None:
        """A committed record. Raises CorruptLog: it cannot be read."""
        try:
            record = msgspec.msgpack.decode(data, type=_Named)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptLog(f"{source}: the record of a consumer is damaged ({error})", source=source) from error
        known = self.consumers.get(record.name)
        is_known = known is not None and known.id == record.id
        if kind == CONSUMER:
            state = known.state if known is not None and is_known else b""
            self.consumers[record.name] = StoredConsumer(record.id, record.data, state)
        elif known is not None and is_known and kind == STATE:
            self.consumers[record.name] = StoredConsumer(known.id, known.config, record.data)
        elif is_known and kind == DELETED:
            del self.consumers[record.name]

    def snapshot(self) -> list[Record]:
        """Records that state the same."""
        records: list[Record] = []
        for name, one in self.consumers.items():
            records.append(consumer(name, one.id, one.config))
            if one.state:
                records.append(state(name, one.id, one.state))
        return records


def consumer(name: str, consumer_id: str, config: bytes) -> Record:
    return CONSUMER, msgspec.msgpack.encode(_Named(name, consumer_id, config))


def state(name: str, consumer_id: str, data: bytes) -> Record:
    return STATE, msgspec.msgpack.encode(_Named(name, consumer_id, data))


def deleted(name: str, consumer_id: str) -> Record:
    return DELETED, msgspec.msgpack.encode(_Named(name, consumer_id))
