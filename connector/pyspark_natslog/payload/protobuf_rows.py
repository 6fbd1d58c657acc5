"""Protobuf payloads into typed columns, by protobuf's own library (upb): an object per message, so a few times slower
than JSON and Avro.

    message                                                  without framing
    00 | schema id, 4 bytes | message indexes | message      as Confluent's serializers write it

The schema id is not looked up: the descriptor set is the schema, and Protobuf's own rules apply to newer and older
messages. The message indexes must be those of the message that is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from pyspark.sql.pandas.types import to_arrow_type

from natslog.arrow.payloads import Payloads
from pyspark_natslog.payload.protobuf_schema import TIMESTAMP, WRAPPERS, MessageType, is_map
from pyspark_natslog.payload.rows import Decoded

_ID_BYTES = 5
_UNSIGNED_64 = (4, 6)
_STRING, _ENUM = 9, 14
_LATEST_US = 2**63
_US_PER_S = 1_000_000
_MOST_INDEXES = 64

Convert = Callable[[Any], Any]


class ProtobufDecoder:
    """Args: columns: the fields that are wanted. is_framed: whether payloads have Confluent's header."""

    def __init__(self, message: MessageType, columns: Sequence[str], *, is_framed: bool) -> None:
        self._class = GetMessageClass(message.descriptor)
        self._indexes = message.indexes if is_framed else None
        fields = message.descriptor.fields_by_name
        self._types = {name: to_arrow_type(message.columns[name].dataType, timezone="UTC") for name in columns}
        self._values = {name: _field_value(fields[name]) for name in columns}

    def decode(self, payloads: Payloads) -> Decoded:
        problems: dict[int, str] = {}
        values: dict[str, list[Any]] = {name: [] for name in self._types}
        for row in range(len(payloads)):
            try:
                found = self._class.FromString(self._body(payloads[row]))
                one = {name: value(found) for name, value in self._values.items()}
            except (DecodeError, UnicodeDecodeError, ValueError) as error:
                problems[row] = str(error) or "it is not a message of this type"
                one = dict.fromkeys(self._types)
            for name, cell in one.items():
                values[name].append(cell)
        malformed = np.zeros(len(payloads), bool)
        malformed[list(problems)] = True
        arrays = {name: pa.array(values[name], kind) for name, kind in self._types.items()}
        return Decoded(arrays, malformed, problems.__getitem__, blank=np.zeros(len(payloads), bool))

    def _body(self, payload: bytes) -> bytes:
        """The message. Raises ValueError: the header is missing, or is that of another message."""
        if self._indexes is None:
            return payload
        if len(payload) <= _ID_BYTES or payload[0]:
            raise ValueError("it does not begin with Confluent's header (00 and a schema id)")
        count, at = _zigzag(payload, _ID_BYTES)
        found = []
        if not 0 <= count <= _MOST_INDEXES:
            raise ValueError("the message indexes in Confluent's header are not valid")
        for _ in range(count):
            index, at = _zigzag(payload, at)
            found.append(index)
        if tuple(found or [0]) != self._indexes:
            raise ValueError(f"it is message {found or [0]} of its schema, not {list(self._indexes)}")
        return payload[at:]


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    """(the number there, where it ends). Raises ValueError: it ends too early."""
    value = shift = 0
    while at < len(data) and shift < 35:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return (value >> 1) ^ -(value & 1), at
    raise ValueError("the message indexes in Confluent's header are cut short")


def _field_value(of: Any) -> Convert:
    """From a message to the field's value as Arrow takes it; None where it is absent."""
    name = of.name
    if is_map(of):
        key, value = (_item(of.message_type.fields_by_name[one]) for one in ("key", "value"))
        return lambda message: [(key(one), value(other)) for one, other in getattr(message, name).items()]
    item = _item(of)
    if of.is_repeated:
        return lambda message: [item(one) for one in getattr(message, name)]
    if of.has_presence:
        has_field = _class_of(of).HasField  # a field may have the name of the method
        return lambda message: item(getattr(message, name)) if has_field(message, name) else None
    return lambda message: item(getattr(message, name))


def _class_of(of: Any) -> Any:
    """The class of the messages that have this field."""
    return GetMessageClass(of.containing_type)


def _item(of: Any) -> Convert:
    """One value of the field."""
    if of.message_type is not None:
        if of.message_type.full_name == TIMESTAMP:
            return _microseconds
        if of.message_type.full_name in WRAPPERS:
            inner = _item(of.message_type.fields_by_name["value"])
            return lambda value: inner(value.value)
        fields = {one.name: _field_value(one) for one in of.message_type.fields}
        return lambda value: {name: field(value) for name, field in fields.items()}
    if of.type in _UNSIGNED_64:
        return Decimal
    if of.type == _ENUM:
        names: dict[int, str] = {}
        for value in of.enum_type.values:
            names.setdefault(value.number, value.name)  # of aliases, the first
        return lambda value: names.get(value, str(value))
    return _text if of.type == _STRING else _same


def _microseconds(time: Any) -> int:
    """Raises ValueError: it is beyond Spark's times."""
    found = int(time.seconds * _US_PER_S + time.nanos // 1000)
    if not -_LATEST_US <= found < _LATEST_US:
        raise ValueError("a google.protobuf.Timestamp is out of range")
    return found


def _text(value: Any) -> Any:
    """Raises ValueError: it is not UTF-8, which proto2 allows."""
    if isinstance(value, bytes):
        raise ValueError("a string is not valid UTF-8")
    return value


def _same(value: Any) -> Any:
    return value
