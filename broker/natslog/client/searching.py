"""Messages that were found by a search, as Arrow batches."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from natslog.errors import CorruptAnswer, InvalidRequest
from natslog.times import parse_timestamp_us

if TYPE_CHECKING:
    import pyarrow as pa

FOUND_OF_A_PAGE = 1_000
FOUND_VALUE_BYTES = 64 * 1024
"""Longer values are read one by one."""


class Header(msgspec.Struct):
    key: str
    value: str


class FoundMessage(msgspec.Struct):
    offset: int
    timestamp: str
    subject: str
    headers: list[Header]
    is_cut: bool
    value: str | UnsetType = UNSET
    value_base64: str | UnsetType = UNSET
    key: str | UnsetType | None = UNSET
    key_base64: str | UnsetType = UNSET


class FoundPage(msgspec.Struct):
    """As `GET /v1/streams/{name}/search` answers."""

    messages: list[FoundMessage]
    next_offset: int
    high_watermark: int
    is_complete: bool


def runs_of(messages: list[FoundMessage]) -> Iterator[pa.RecordBatch | int]:
    """The messages as batches, in order; the offset alone of one whose value was cut.

    Raises:
        CorruptAnswer: no broker sends this.
    """
    rows: list[FoundMessage] = []
    for message in messages:
        if not message.is_cut:
            rows.append(message)
            continue
        if rows:
            yield _batch(rows)
            rows = []
        yield message.offset
    if rows:
        yield _batch(rows)


def _batch(messages: list[FoundMessage]) -> pa.RecordBatch:
    import pyarrow as pa

    from natslog.arrow.schema import MESSAGE_SCHEMA

    try:
        rows = [
            {
                "offset": one.offset,
                "timestamp": parse_timestamp_us(one.timestamp),
                "subject": one.subject,
                "key": _bytes(one.key, one.key_base64),
                "headers": [{"key": header.key, "value": header.value} for header in one.headers] or None,
                "value": _bytes(one.value, one.value_base64),
            }
            for one in messages
        ]
        return pa.RecordBatch.from_pylist(rows, schema=MESSAGE_SCHEMA)
    except (binascii.Error, pa.ArrowException, InvalidRequest, OverflowError, UnicodeEncodeError) as error:
        raise CorruptAnswer(f"the response has a message that no broker sends: {error}") from error


def _bytes(text: str | UnsetType | None, in_base64: str | UnsetType) -> bytes | None:
    if in_base64 is not UNSET:
        return base64.b64decode(in_base64, validate=True)
    return text.encode() if isinstance(text, str) else None
