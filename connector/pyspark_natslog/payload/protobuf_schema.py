"""Protobuf messages as columns: what a descriptor set contains, in Spark's types.

Types are those of Spark's `from_protobuf`, but unsigned numbers keep all of their values: `uint32` is BIGINT, `uint64`
is DECIMAL(20,0). Enums are STRING, `google.protobuf.Timestamp` is TIMESTAMP, and the wrappers (`Int64Value`, …) are
their values, null where they are absent.

Source: `google/protobuf/descriptor.proto`; Confluent's wire format for Protobuf (message indexes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from natslog.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

TIMESTAMP = "google.protobuf.Timestamp"
WRAPPERS = tuple(
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
_MOST_BYTES = 64 * 1024 * 1024
_MOST_NESTED = 64


@dataclass(frozen=True, slots=False)
class MessageType:
    """A message of a descriptor set. Picklable: executors need no file.

    Attributes:
        files: a serialized `FileDescriptorSet`, with all imports. `name`: the message's full name.
    """

    files: bytes = field(repr=False)
    name: str

    @classmethod
    def find(cls, files: bytes, name: str) -> MessageType:
        """The message of this name, with or without its package.

        Raises:
            ConfigError: protobuf is not installed, this is no descriptor set, it lacks imports, or there is no such
                message.
        """
        names = [descriptor.full_name for descriptor in _messages(_pool_of(files), files)]
        matching = [one for one in names if name in (one, one.rpartition(".")[2])]
        if name in matching or len(matching) == 1:
            return cls(files, name if name in matching else matching[0])
        why = f"{' and '.join(matching)} have this name: give the package" if matching else "there is none"
        hint = "" if matching else did_you_mean(name, names)
        raise ConfigError(f"option messageName {name!r}: {why}{hint}", option="messageName")

    @cached_property
    def descriptor(self) -> Descriptor:
        """Its descriptor, in a pool of its own."""
        found: Descriptor = _pool_of(self.files).FindMessageTypeByName(self.name)
        return found

    @cached_property
    def columns(self) -> StructType:
        """Raises ConfigError: the message has no field, or contains itself."""
        found = _struct(self.descriptor, (), self.name)
        if not found.fields:
            raise ConfigError(f"option messageName: {self.name} has no fields", option="messageName")
        return found

    @property
    def indexes(self) -> tuple[int, ...]:
        """Where the message is in its file, as Confluent's header states it."""
        found, descriptor = [], self.descriptor
        while descriptor.containing_type is not None:
            found.append([one.name for one in descriptor.containing_type.nested_types].index(descriptor.name))
            descriptor = descriptor.containing_type
        found.append(list(descriptor.file.message_types_by_name).index(descriptor.name))
        return tuple(reversed(found))

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "name": self.name}


def read_files(path: str) -> bytes:
    """A descriptor set's file. Raises ConfigError: it cannot be read."""
    try:
        with open(path.removeprefix("file://"), "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read descriptorFile {path}: {error.strerror}", option="descriptorFile") from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"descriptorFile {path} is larger than any descriptor set", option="descriptorFile")
    return data


def _pool_of(files: bytes) -> Any:
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise ConfigError(
            "payloadFormat protobuf requires the package protobuf: run pip install 'natslog[protobuf]', also on the "
            "executors"
        ) from error
    listed = descriptor_pb2.FileDescriptorSet()
    try:
        listed.ParseFromString(files)
    except DecodeError as error:
        raise ConfigError(
            "option descriptorFile: this is no descriptor set: write one with protoc --include_imports "
            "--descriptor_set_out=FILE",
            option="descriptorFile",
        ) from error
    pool = descriptor_pool.DescriptorPool()
    try:
        for file in listed.file:
            pool.Add(file) if hasattr(pool, "Add") else pool.AddSerializedFile(file.SerializeToString())
        for file in listed.file:
            pool.FindFileByName(file.name)
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(
            f"option descriptorFile: the descriptor set is not complete ({error}): write it with protoc "
            "--include_imports",
            option="descriptorFile",
        ) from error
    return pool


def _messages(pool: Any, files: bytes) -> Iterator[Descriptor]:
    from google.protobuf import descriptor_pb2

    waiting = [
        descriptor
        for file in descriptor_pb2.FileDescriptorSet.FromString(files).file
        for descriptor in pool.FindFileByName(file.name).message_types_by_name.values()
    ]
    while waiting:
        descriptor = waiting.pop()
        yield descriptor
        waiting += descriptor.nested_types


def _struct(descriptor: Descriptor, within: tuple[str, ...], path: str) -> StructType:
    if descriptor.full_name in within or len(within) > _MOST_NESTED:
        raise ConfigError(f"{path}: {descriptor.full_name} contains itself; Spark has no recursive types")
    inner = (*within, descriptor.full_name)
    return StructType(
        [StructField(one.name, _type(one, inner, f"{path}.{one.name}"), True) for one in descriptor.fields]
    )


def _type(of: FieldDescriptor, within: tuple[str, ...], path: str) -> DataType:
    if is_map(of):
        key, value = of.message_type.fields_by_name["key"], of.message_type.fields_by_name["value"]
        return MapType(_one(key, within, path), _one(value, within, path), True)
    kind = _one(of, within, path)
    return ArrayType(kind, True) if of.is_repeated else kind


def is_map(of: FieldDescriptor) -> bool:
    return bool(of.message_type is not None and of.message_type.GetOptions().map_entry)


def _one(of: FieldDescriptor, within: tuple[str, ...], path: str) -> DataType:
    if of.message_type is not None:
        if of.message_type.full_name == TIMESTAMP:
            return TimestampType()
        if of.message_type.full_name in WRAPPERS:
            return _one(of.message_type.fields_by_name["value"], within, path)
        found = _struct(of.message_type, within, path)
        if not found.fields:
            raise ConfigError(f"{path}: {of.message_type.full_name} has no fields; Spark has no columns without any")
        return found
    return _SCALARS[of.type]


_SCALARS: dict[int, DataType] = {
    1: DoubleType(), 2: FloatType(), 3: LongType(), 4: DecimalType(20, 0), 5: IntegerType(), 6: DecimalType(20, 0),
    7: LongType(), 8: BooleanType(), 9: StringType(), 12: BinaryType(), 13: LongType(), 14: StringType(),
    15: IntegerType(), 16: LongType(), 17: IntegerType(), 18: LongType(),
}  # fmt: skip
"""By `FieldDescriptorProto.Type`."""
