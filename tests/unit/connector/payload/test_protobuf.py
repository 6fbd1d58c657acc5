"""Protobuf payloads into columns, by a descriptor set that protobuf's own library makes."""

from __future__ import annotations

import datetime
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, timestamp_pb2, wrappers_pb2
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow.payloads import Payloads
from natslog.errors import ConfigError
from pyspark_natslog.options import Given
from pyspark_natslog.payload import PAYLOAD_OPTIONS, PayloadOptions
from pyspark_natslog.payload.protobuf_rows import ProtobufDecoder
from pyspark_natslog.payload.protobuf_schema import MessageType

SCALARS = ("double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string")
NUMBERS = {name: getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{name.upper()}") for name in (*SCALARS, "bytes")}
STRUCT, ENUM = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE, descriptor_pb2.FieldDescriptorProto.TYPE_ENUM
REPEATED = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED


def descriptor_set() -> bytes:
    """`shop.Order` with a field of every kind, `shop.Order.Line`, `shop.Loop`, `shop.Nothing`, `other.Line`."""
    files = descriptor_pb2.FileDescriptorSet()
    for module in (timestamp_pb2, wrappers_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    file = files.file.add(name="shop.proto", package="shop", syntax="proto3")
    file.dependency.extend(["google/protobuf/timestamp.proto", "google/protobuf/wrappers.proto"])
    state = file.enum_type.add(name="State")
    for number, name in enumerate(("NEW", "PAID")):
        state.value.add(name=name, number=number)
    file.message_type.add(name="First").field.add(name="a", number=1, type=NUMBERS["int32"], label=1)
    order = file.message_type.add(name="Order")
    line = order.nested_type.add(name="Line")
    line.field.add(name="sku", number=1, type=NUMBERS["string"], label=1)
    line.field.add(name="count", number=2, type=NUMBERS["int32"], label=1)
    entry = order.nested_type.add(name="TagsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=NUMBERS["string"], label=1)
    entry.field.add(name="value", number=2, type=NUMBERS["int64"], label=1)
    for number, (name, kind) in enumerate(NUMBERS.items(), 1):
        order.field.add(name=f"f_{name}", number=number, type=kind, label=1)
    order.oneof_decl.add(name="_note")
    order.field.add(name="note", number=20, type=NUMBERS["string"], label=1, proto3_optional=True, oneof_index=0)
    order.field.add(name="state", number=21, type=ENUM, type_name=".shop.State", label=1)
    order.field.add(name="at", number=22, type=STRUCT, type_name=".google.protobuf.Timestamp", label=1)
    order.field.add(name="size", number=23, type=STRUCT, type_name=".google.protobuf.Int64Value", label=1)
    order.field.add(name="first", number=24, type=STRUCT, type_name=".shop.Order.Line", label=1)
    order.field.add(name="lines", number=25, type=STRUCT, type_name=".shop.Order.Line", label=REPEATED)
    order.field.add(name="codes", number=26, type=NUMBERS["int32"], label=REPEATED)
    order.field.add(name="tags", number=27, type=STRUCT, type_name=".shop.Order.TagsEntry", label=REPEATED)
    loop = file.message_type.add(name="Loop")
    loop.field.add(name="again", number=1, type=STRUCT, type_name=".shop.Loop", label=1)
    file.message_type.add(name="Nothing")
    other = files.file.add(name="other.proto", package="other", syntax="proto3")
    other.message_type.add(name="Line").field.add(name="x", number=1, type=NUMBERS["int32"], label=1)
    return files.SerializeToString()


FILES = descriptor_set()
ORDER = MessageType.find(FILES, "Order")
Order = GetMessageClass(ORDER.descriptor)


def decoded(payloads: list[bytes], *, is_framed: bool = False) -> tuple[list[dict[str, Any]], list[str | None]]:
    message = pickle.loads(pickle.dumps(ORDER))
    decoder = ProtobufDecoder(message, message.columns.names, is_framed=is_framed)
    found = decoder.decode(Payloads.of(pa.array(payloads, pa.binary())))
    lists = {name: array.to_pylist() for name, array in found.arrays.items()}
    rows = [{name: lists[name][row] for name in lists} for row in range(len(payloads))]
    return rows, [found.reason(row) if found.malformed[row] else None for row in range(len(payloads))]


def test_types_of_the_columns() -> None:
    assert ORDER.name == "shop.Order"
    assert ORDER.columns.simpleString() == (
        "struct<f_double:double,f_float:float,f_int64:bigint,f_uint64:decimal(20,0),f_int32:int,"
        "f_fixed64:decimal(20,0),f_fixed32:bigint,f_bool:boolean,f_string:string,f_bytes:binary,note:string,"
        "state:string,at:timestamp,size:bigint,first:struct<sku:string,count:int>,"
        "lines:array<struct<sku:string,count:int>>,codes:array<int>,tags:map<string,bigint>>"
    )


def test_every_kind_of_field() -> None:
    order = Order(f_double=1.5, f_float=0.5, f_int64=-(2**63), f_uint64=2**64 - 1, f_int32=-1, f_fixed64=2**64 - 1)
    order.MergeFrom(Order(f_fixed32=2**32 - 1, f_bool=True, f_string="é", f_bytes=b"\xff", note="", state=1))
    order.at.FromDatetime(datetime.datetime(2026, 11, 26, 1, 2, 3, 456789))
    order.size.value = 0
    order.lines.add(sku="a", count=2)
    order.codes.extend([1, 2])
    order.tags["x"] = 5
    rows, problems = decoded([order.SerializeToString(), b"", Order(state=7).SerializeToString()])
    assert problems == [None] * 3
    assert rows[0] == {
        "f_double": 1.5, "f_float": 0.5, "f_int64": -(2**63), "f_uint64": Decimal(2**64 - 1), "f_int32": -1,
        "f_fixed64": Decimal(2**64 - 1), "f_fixed32": 2**32 - 1, "f_bool": True, "f_string": "é", "f_bytes": b"\xff",
        "note": "", "state": "PAID", "at": datetime.datetime(2026, 11, 26, 1, 2, 3, 456789, datetime.UTC), "size": 0,
        "first": None, "lines": [{"sku": "a", "count": 2}], "codes": [1, 2], "tags": [("x", 5)],
    }  # fmt: skip
    defaults = {name: rows[1][name] for name in ("f_int64", "f_string", "note", "state", "at", "size", "lines")}
    assert defaults == {
        "f_int64": 0,
        "f_string": "",
        "note": None,
        "state": "NEW",
        "at": None,
        "size": None,
        "lines": [],
    }
    assert rows[2]["state"] == "7", "a number that this schema has no name for"


def test_payloads_that_are_not_messages_leave_their_neighbours_alone() -> None:
    good = Order(f_int32=5).SerializeToString()
    rows, problems = decoded([good, b"\xff\xff", good, b"\x4a\x02\xff\xfe", good])
    assert [row["f_int32"] for row in rows] == [5, None, 5, None, 5]
    assert [problem is None for problem in problems] == [True, False, True, False, True]
    assert set(rows[1].values()) == {None}


def test_times_beyond_sparks_are_malformed() -> None:
    far = Order(f_int32=5)
    far.at.seconds = 10**17
    rows, problems = decoded([Order(f_int32=1).SerializeToString(), far.SerializeToString()])
    assert problems == [None, "a google.protobuf.Timestamp is out of range"]
    assert rows[0]["f_int32"] == 1


def test_proto2_texts_enums_with_aliases_and_fields_named_as_methods() -> None:
    files = descriptor_pb2.FileDescriptorSet()
    file = files.file.add(name="old.proto", package="old", syntax="proto2")
    kind = file.enum_type.add(name="Kind")
    kind.options.allow_alias = True
    for name in ("A", "A2"):
        kind.value.add(name=name, number=0)
    message = file.message_type.add(name="M")
    message.field.add(name="HasField", number=1, type=NUMBERS["int32"], label=1)
    message.field.add(name="text", number=2, type=NUMBERS["string"], label=1)
    message.field.add(name="kind", number=3, type=ENUM, type_name=".old.Kind", label=1)
    found = MessageType.find(files.SerializeToString(), "old.M")
    decoder = ProtobufDecoder(found, found.columns.names, is_framed=False)
    payloads = [b"\x08\x05\x12\x01x\x18\x00", b"\x12\x01\xff", b"\x08\x06"]
    result = decoder.decode(Payloads.of(pa.array(payloads, pa.binary())))
    assert result.malformed.tolist() == [False, True, False]
    assert result.reason(1) == "a string is not valid UTF-8"
    assert {name: array.to_pylist() for name, array in result.arrays.items()} == {
        "HasField": [5, None, 6], "text": ["x", None, None], "kind": ["A", None, None],
    }  # fmt: skip


def test_header_of_confluent_and_its_message_indexes() -> None:
    good = Order(f_int32=5).SerializeToString()
    headers = {b"\0\0\0\0\x07\x02\x02": None, b"\0\0\0\0\x07\x00": "it is message [0] of its schema, not [1]"}
    headers |= {b"\0\0\0\0\x07\x04\x02\x00": "it is message [1, 0]", b"\0\0\0\0\x07\xff": "cut short"}
    headers |= {b"\x01\0\0\0\x07\x00": "does not begin with Confluent's header", b"\0\0\0\0\x07\x01": "not valid"}
    rows, problems = decoded(
        [header + (b"" if "cut" in str(why) else good) for header, why in headers.items()], is_framed=True
    )
    assert rows[0]["f_int32"] == 5
    for why, problem in zip(headers.values(), problems, strict=True):
        assert (why is None and problem is None) or why in problem  # type: ignore[operator]
    first = MessageType.find(FILES, "shop.First")
    decoder = ProtobufDecoder(first, ["a"], is_framed=True)
    found = decoder.decode(
        Payloads.of(pa.array([b"\0\0\0\0\x07\x00\x08\x05", b"\0\0\0\0\x07\x02\x00\x08\x05"], pa.binary()))
    )
    assert found.arrays["a"].to_pylist() == [5, 5], "the first message has a short form"


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=6), st.booleans())
def test_any_bytes(payloads: list[bytes], is_framed: bool) -> None:
    rows, _ = decoded(payloads, is_framed=is_framed)
    assert len(rows) == len(payloads)


def options(tmp_path: Path, **given: str) -> PayloadOptions:
    (tmp_path / "shop.desc").write_bytes(FILES)
    base = {"payloadFormat": "protobuf", "descriptorFile": str(tmp_path / "shop.desc"), "messageName": "shop.Order"}
    return PayloadOptions.parse(
        Given({name: text for name, text in (base | given).items() if text}, PAYLOAD_OPTIONS), []
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"messageName": ""}, "option messageName is missing"),
        ({"descriptorFile": "/nowhere"}, "cannot read descriptorFile /nowhere: No such file"),
        ({"messageName": "Ordr"}, "'Ordr': there is none; did you mean"),
        ({"messageName": "Line"}, "have this name: give the package"),
        ({"messageName": "Loop"}, "shop.Loop contains itself"),
        ({"messageName": "Nothing"}, "shop.Nothing has no fields"),
        ({"payloadSchema": "id INT"}, "payloadSchema requires payloadFormat json, avro or arrow"),
        ({"payloadFraming": "kafka"}, "payloadFraming 'kafka' must be none or confluent"),
        ({"payloadFormat": "json", "payloadSchema": "a INT"}, "requires payloadFormat protobuf"),
    ],
)
def test_wrong_options(tmp_path: Path, given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options(tmp_path, **given)


@pytest.mark.parametrize("content", [b"no set", FILES[len(FILES) // 2 :]])
def test_file_that_is_no_descriptor_set(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.desc").write_bytes(content)
    with pytest.raises(ConfigError, match="no descriptor set|not complete|there is none"):
        options(tmp_path, descriptorFile=str(tmp_path / "x.desc"))


def test_descriptor_set_without_its_imports_says_so(tmp_path: Path) -> None:
    files = descriptor_pb2.FileDescriptorSet.FromString(FILES)
    del files.file[0]
    (tmp_path / "x.desc").write_bytes(files.SerializeToString())
    with pytest.raises(ConfigError, match="not complete .* --include_imports"):
        options(tmp_path, descriptorFile=str(tmp_path / "x.desc"))
