"""The footer that turns a finished stream of batches into an Arrow IPC *file*.

pyarrow writes footers only for files it wrote itself; a segment is sealed by appending the footer to bytes that are on
disk already, so natslog builds this one flatbuffer. Source: Arrow `format/File.fbs`, `Schema.fbs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flatbuffers
import pyarrow as pa

from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.log.batch_index import BatchIndex

FILE_MAGIC = b"ARROW1"
_METADATA_V5 = 4
_INT, _BINARY, _UTF8, _TIMESTAMP, _LIST, _STRUCT = 2, 4, 5, 10, 12, 13
_MICROSECOND = 2


def footer_bytes(index: BatchIndex, header_bytes_of: Mapping[int, int], metadata: Mapping[str, str]) -> bytes:
    """Footer, its length and the closing magic.

    Args:
        index: the batches of the file, positions from its start.
        header_bytes_of: length of each batch's metadata part, by position.
        metadata: stored with the footer; pyarrow shows it as `RecordBatchFileReader.metadata`.
    """
    builder = flatbuffers.Builder(1024 + 24 * len(index))
    schema = _schema(builder)
    pairs = [_key_value(builder, key, value) for key, value in metadata.items()]
    builder.StartVector(4, len(pairs), 4)
    for pair in reversed(pairs):
        builder.PrependUOffsetTRelative(pair)
    pairs_vector = builder.EndVector()
    builder.StartVector(24, 0, 8)
    dictionaries = builder.EndVector()
    builder.StartVector(24, len(index), 8)
    for at in range(len(index) - 1, -1, -1):
        _block(builder, index.positions[at], header_bytes_of[index.positions[at]], index.lengths[at])
    blocks = builder.EndVector()
    builder.StartObject(5)
    builder.PrependInt16Slot(0, _METADATA_V5, 0)
    builder.PrependUOffsetTRelativeSlot(1, schema, 0)
    builder.PrependUOffsetTRelativeSlot(2, dictionaries, 0)
    builder.PrependUOffsetTRelativeSlot(3, blocks, 0)
    builder.PrependUOffsetTRelativeSlot(4, pairs_vector, 0)
    builder.Finish(builder.EndObject())
    footer = bytes(builder.Output())
    return footer + len(footer).to_bytes(4, "little") + FILE_MAGIC


def _block(builder: Any, position: int, header_bytes: int, length: int) -> None:
    """struct Block { offset: long; metaDataLength: int; (4 bytes of padding) bodyLength: long }, written backwards."""
    builder.Prep(8, 24)
    builder.PrependInt64(length - header_bytes)
    builder.Pad(4)
    builder.PrependInt32(header_bytes)
    builder.PrependInt64(position)


def _key_value(builder: Any, key: str, value: str) -> int:
    key_at, value_at = builder.CreateString(key), builder.CreateString(value)
    builder.StartObject(2)
    builder.PrependUOffsetTRelativeSlot(0, key_at, 0)
    builder.PrependUOffsetTRelativeSlot(1, value_at, 0)
    return int(builder.EndObject())


def _schema(builder: Any) -> int:
    fields = [_field(builder, field) for field in MESSAGE_SCHEMA]
    vector = _offsets(builder, fields)
    builder.StartObject(4)
    builder.PrependUOffsetTRelativeSlot(1, vector, 0)
    return int(builder.EndObject())


def _offsets(builder: Any, offsets: list[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return int(builder.EndVector())


def _field(builder: Any, field: pa.Field[Any]) -> int:
    kind = field.type
    nested = [kind.field(at) for at in range(kind.num_fields)]
    children = _offsets(builder, [_field(builder, child) for child in nested])
    name = builder.CreateString(field.name)
    type_code, type_at = _type(builder, kind)
    builder.StartObject(7)
    builder.PrependUOffsetTRelativeSlot(0, name, 0)
    builder.PrependBoolSlot(1, field.nullable, False)
    builder.PrependUint8Slot(2, type_code, 0)
    builder.PrependUOffsetTRelativeSlot(3, type_at, 0)
    builder.PrependUOffsetTRelativeSlot(5, children, 0)
    return int(builder.EndObject())


def _type(builder: Any, kind: pa.DataType) -> tuple[int, int]:
    """The type's code in the union and its table."""
    if pa.types.is_int64(kind):
        builder.StartObject(2)
        builder.PrependInt32Slot(0, 64, 0)
        builder.PrependBoolSlot(1, True, False)
        return _INT, int(builder.EndObject())
    if pa.types.is_timestamp(kind):
        zone = builder.CreateString(kind.tz)
        builder.StartObject(2)
        builder.PrependInt16Slot(0, _MICROSECOND, 0)
        builder.PrependUOffsetTRelativeSlot(1, zone, 0)
        return _TIMESTAMP, int(builder.EndObject())
    codes = {
        pa.types.is_binary: _BINARY,
        pa.types.is_string: _UTF8,
        pa.types.is_list: _LIST,
        pa.types.is_struct: _STRUCT,
    }
    code = next(code for is_kind, code in codes.items() if is_kind(kind))
    builder.StartObject(0)
    return code, int(builder.EndObject())
