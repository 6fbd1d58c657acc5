"""The state of a consumer as a record of the companion log: its numbers, and its pending messages as columns.

Theory of operation. A record states the whole state, so that the last one of a consumer counts. Columns of sequences
and times are stored as differences, which are nearly constant, and compressed: 100,000 pending messages that were
delivered in order take some hundred bytes. Times are stored as ages, since clocks of brokers differ.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa

from natslog.errors import CorruptLog
from natslog.jetstream.consumers.config import ConsumerConfig
from natslog.jetstream.consumers.machine import Consumer
from natslog.jetstream.consumers.pending import COLUMNS, TIME_US, Longs, Pending

_DEFAULTS = msgspec.to_builtins(ConsumerConfig())
_MOST_BYTES = 256 * 1024 * 1024


class ConsumerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer, and where it begins: at `start`, or at the sequences `skip` (packed) and then at `resume`."""

    created_us: int
    config: ConsumerConfig
    start: int
    resume: int
    skip: bytes = b""

    def to_bytes(self) -> bytes:
        """Without the fields of the configuration that have their defaults: every replica has it in memory."""
        body = msgspec.to_builtins(self)
        body["config"] = {name: value for name, value in body["config"].items() if value != _DEFAULTS[name]}
        return msgspec.json.encode(body)


class StateRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """`pending`: columns, `skip`: sequences; both packed. `exceeded`: see `Consumer`. Ages: -1 if it never was."""

    next_seq: int
    delivered: tuple[int, int]
    floor: tuple[int, int]
    resume: int
    skip: bytes
    pending: bytes
    exceeded: dict[int, int]
    delivered_age_us: int
    acked_age_us: int

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)


def consumer_record(data: bytes, source: str) -> ConsumerRecord:
    """Raises CorruptLog."""
    try:
        return msgspec.json.decode(data, type=ConsumerRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptLog(f"{source}: the record of a consumer is damaged ({error})", source=source) from error


def state_record(data: bytes, source: str) -> StateRecord:
    """Raises CorruptLog."""
    try:
        return msgspec.msgpack.decode(data, type=StateRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptLog(f"{source}: the state of a consumer is damaged ({error})", source=source) from error


def state_of(consumer: Consumer, now_us: int) -> StateRecord:
    """Args: now_us: as of the clock of the machine."""
    columns = consumer.pending.to_columns()
    columns[TIME_US] = now_us - columns[TIME_US]
    return StateRecord(
        next_seq=consumer.next_seq,
        delivered=consumer.delivered,
        floor=consumer.floor,
        resume=consumer.resume,
        skip=packed(consumer.skip.reshape(1, -1)),
        pending=packed(columns),
        exceeded=dict(consumer.exceeded),
        delivered_age_us=now_us - consumer.delivered_us if consumer.delivered_us else -1,
        acked_age_us=now_us - consumer.acked_us if consumer.acked_us else -1,
    )


def restore(consumer: Consumer, state: StateRecord, now_us: int, source: str) -> None:
    """Raises CorruptLog."""
    columns = unpacked(state.pending, COLUMNS, source)
    columns[TIME_US] = now_us - columns[TIME_US]
    consumer.pending = Pending.of_columns(columns)
    consumer.next_seq, consumer.resume = state.next_seq, state.resume
    consumer.delivered, consumer.floor = state.delivered, state.floor
    consumer.skip = unpacked(state.skip, 1, source)[0]
    consumer.exceeded = dict(state.exceeded)
    consumer.delivered_us = now_us - state.delivered_age_us if state.delivered_age_us >= 0 else 0
    consumer.acked_us = now_us - state.acked_age_us if state.acked_age_us >= 0 else 0


def packed(columns: Longs) -> bytes:
    """Columns of numbers, of shape (columns, rows)."""
    if not columns.shape[1]:
        return b""
    differences = np.diff(columns, axis=1, prepend=0).astype("<i8")
    head = columns.shape[1].to_bytes(8, "little")
    return b"".join((head, pa.Codec("zstd", 1).compress(differences.tobytes(), asbytes=True)))


def unpacked(data: bytes, columns: int, source: str) -> Longs:
    """Raises CorruptLog."""
    if not data:
        return np.empty((columns, 0), np.int64)
    size_bytes = 8 * columns * int.from_bytes(data[:8], "little")
    try:
        if size_bytes > _MOST_BYTES:
            raise ValueError(f"{size_bytes} bytes")
        plain = pa.Codec("zstd").decompress(data[8:], decompressed_size=size_bytes, asbytes=True)
        differences = np.frombuffer(plain, "<i8").reshape(columns, -1)
    except (pa.ArrowInvalid, OSError, ValueError) as error:
        raise CorruptLog(f"{source}: the state of a consumer is damaged ({error})", source=source) from error
    return np.cumsum(differences, axis=1, dtype=np.int64)
