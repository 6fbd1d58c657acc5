"""Typed payloads in a real Spark: formats, modes, projection, batch and streaming; JSON beside Spark's `from_json`."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from natslog.arrow.payloads import Payloads
from natslog.client import NatslogClient
from pyspark_natslog.payload.avro_schema import fingerprint
from pyspark_natslog.payload.ddl import parse_ddl
from pyspark_natslog.payload.json_flat import FlatJson, supports
from tests.harness import BrokerProcess, publish_acked

pytestmark = pytest.mark.spark

DDL = (
    "i int, l long, b tinyint, d double, f float, s string, bo boolean, de decimal(6,2), dt date, ts timestamp, "
    "tn timestamp_ntz, bi binary, a array<int>, m map<string,int>, st struct<x:int,y:string>, "
    "aa array<struct<x:int,y:string>>, am map<string,struct<x:int>>, _corrupt_record string"
)
CASES = r"""
{"i":1,"l":2,"b":3,"d":1.5,"s":"q","bo":true,"de":1.005}
{"i":"x","l":5}
{"i":1.0,"l":5}
{"i":3000000000,"l":5}
{"l":99999999999999999999,"i":1}
{"b":300,"i":1}
{"i":null,"s":null,"bo":"true","l":1}
{"s":5}
{"s":true}
{"s":{"a":1,"b":[1,2]}}
{"d":"NaN"}
{"d":"Infinity","f":"-INF"}
{"d":NaN}
{"d":"1.5","i":1}
{"i":"","l":1}
{"s":"","bi":"","a":"","l":1}
{"de":"1.5"}
{"de":"x","l":1}
{"de":123456.789,"l":1}
{"de":9999.995,"l":1}
{"dt":"2024-01-02","ts":"2024-01-02T03:04:05Z","tn":"2024-01-02 03:04:05"}
{"dt":"2024","ts":"2024"}
{"dt":"2024-1-2","ts":"2024-1-2 3:4:5"}
{"dt":"2024-01-02T03:04","ts":"2024-01-02T03:04","tn":"2024-01-02T03:04Z","l":1}
{"dt":"2024-01-02abc","l":1}
{"dt":19000,"l":1}
{"ts":1700000000,"l":1}
{"ts":1700000000.5,"l":1}
{"ts":"2024-01-02T03:04:05.123456789+02:00"}
{"ts":"2024-01-02T03:04:05 UTC"}
{"ts":"2024-01-02T03:04:05GMT+2"}
{"ts":"2024-01-02T03:04:05+0200","l":1}
{"ts":"2024-01-02T25:04:05","l":1}
{"ts":" 2024-02-20 ","dt":" 2024-02-20 "}
{"bi":"aGVsbG8="}
{"bi":"aGVsbG8"}
{"a":[1,2,null]}
{"a":[1,"x",3],"l":1}
{"a":{"x":1},"l":1}
{"a":[],"m":{}}
{"m":{"a":1,"b":null}}
{"m":{"a":1,"b":"x","c":3},"l":1}
{"st":{"x":1,"y":"b","z":[{}]}}
{"st":{"x":"bad","y":"b"},"l":1}
{"st":[1],"l":1}
{"aa":[{"x":1},{"y":"q"},null,{}]}
{"aa":[{"x":"bad","y":"q"},{"x":2}],"l":1}
{"aa":[5,{"x":2}],"l":1}
{"am":{"k":{"x":1},"j":null}}
{"am":{"k":{"x":"bad"},"j":{"x":2}},"l":1}
{"i":1,"i":2}
{"i":1,}
{"i":1,"l":
{"i":01}
{"i":+1}
{"i":-0,"d":-0.0}
{"d":1e400,"f":1e39}
{"d":0.1234567890123456789,"f":0.1234567890123456789}
{"d":1.}
{'i':1,"s":'x'}
{i:1}
{"s":"a\u0041\n\/\ud83d\ude00"}
{"s":"\ud83d"}
{"u":"\x","i":1}
{"u":{"a":[1,2,{"b":}]},"i":1}
[{"i":1}]
5
null
xyz
   {"i" : 1 , "l":2 }   
{}
{"I":1}
{"ts":null,"dt":null,"a":null,"m":null,"st":null}
""".strip("\n").split("\n")  # noqa: W291
CASES += ["  ", '{"s":"a\tb"}', '{"i":\n1,\r\n"l":2}', '\ufeff{"i":1}']

AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "user", "type": ["null", "string"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["NEW", "OLD"]}},
    ],
}


@pytest.fixture
def read(spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str) -> Any:
    """`read(payloads, **options)`: a frame over a stream of its own that holds these."""
    made: list[str] = []

    def frame(payloads: list[bytes] | None, schema: str | None = None, **options: str) -> DataFrame:
        if payloads is not None:
            made.append(f"{name}-{len(made)}")
            client.create_stream(made[-1], made[-1])
            publish_acked(nats_url, made[-1], payloads)
        reader = spark.read.format("natslog").options(servers=broker.url, stream=made[-1], **options)
        return (reader.schema(schema) if schema else reader).load()

    return frame


def rows(frame: DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frame.orderBy("offset").select(*columns).collect()]


@pytest.mark.long
def test_json_means_what_spark_means_by_it(spark: SparkSession, read: Any) -> None:
    """Every case decoded here and by Spark; where the two differ on purpose, docs/SPARK.md says so."""
    frame = read([case.encode() for case in CASES], payloadFormat="json", payloadSchema=DDL)
    assert frame.columns[:5] == ["stream", "offset", "timestamp", "subject", "key"]
    assert ", ".join(f"{name} {kind}" for name, kind in frame.dtypes[5:]).replace("bigint", "long") == DDL
    theirs = spark.createDataFrame(list(enumerate(CASES)), "offset long, text string")
    options = {"columnNameOfCorruptRecord": "_corrupt_record"}
    theirs = theirs.select("offset", F.from_json("text", DDL, options).alias("row")).select("offset", "row.*")
    names = frame.columns[5:]
    both = zip(rows(frame, *names), rows(theirs, *names), strict=True)
    different = {case: pair for case, pair in zip(CASES, both, strict=True) if repr(pair[0]) != repr(pair[1])}
    assert different == {}


@pytest.mark.long
def test_fast_path_of_json_means_what_spark_means_by_it(spark: SparkSession, read: Any) -> None:
    """The cases that the kernel for usual JSON accepts: all in one chunk, so that it decodes them, and by Spark."""
    every = [name for name in parse_ddl(DDL).fields if name.name != "_corrupt_record"]
    schema = StructType([inner for inner in every if supports(StructType([inner]))])
    parser = FlatJson(schema)

    def is_accepted(*payloads: str) -> bool:
        return parser.decode(Payloads.of(pa.array([payload.encode() for payload in payloads]))) is not None

    cases = [case for case in [*CASES, ""] if is_accepted(case)]
    assert len(cases) > 20
    assert is_accepted(*cases)
    text = ", ".join(f"{inner.name} {inner.dataType.simpleString()}" for inner in schema) + ", _corrupt_record string"
    frame = read([case.encode() for case in cases], payloadFormat="json", payloadSchema=text)
    theirs = spark.createDataFrame(list(enumerate(cases)), "offset long, text string")
    options = {"columnNameOfCorruptRecord": "_corrupt_record"}
    theirs = theirs.select("offset", F.from_json("text", text, options).alias("row")).select("offset", "row.*")
    both = zip(rows(frame, *frame.columns[5:]), rows(theirs, *frame.columns[5:]), strict=True)
    assert {case: pair for case, pair in zip(cases, both, strict=True) if repr(pair[0]) != repr(pair[1])} == {}


VARIANTS = [
    *(line.encode() for line in CASES),
    b'{"\\uffff":1,"\\ud83d\\ude00":2,"\\ue000":3}', b"[1,2.50,1e3,12345678901234567890]", b'"text"', b"17", b"null",
]  # fmt: skip


@pytest.mark.long
def test_variants_are_those_of_parse_json(read: Any) -> None:
    """Byte for byte, of what both read; what only one reads is malformed here."""
    values = [*VARIANTS, b'{"a":{"b":[1,{"c":"x"}]}}', b"no json", b""]
    found = read(values, payloadFormat="variant", columnNameOfCorruptRecord="bad")
    spark = read(values).select("offset", F.expr("try_parse_json(cast(value as string)) v"))
    expected = {row.offset: row.v for row in spark.collect()}
    compared = 0
    for row in found.collect():
        if row.bad is None and values[row.offset].strip():
            theirs = expected[row.offset]
            assert (bytes(row.value.value), bytes(row.value.metadata)) == (bytes(theirs.value), bytes(theirs.metadata))
            compared += 1
        elif row.bad is not None:
            assert row.value is None
            assert row.bad.encode() == values[row.offset]
    assert compared > len(CASES) // 2
    (inner,) = found.selectExpr("variant_get(value, '$.a.b[1].c', 'string') c").where("c is not null").collect()
    assert inner.c == "x"
    assert read(values, payloadFormat="variant", mode="DROPMALFORMED").count() < len(values)
    with pytest.raises(Exception, match="offset 1: the payload is malformed: it is not valid JSON"):
        read([b"1", b"x"], payloadFormat="variant", mode="FAILFAST").collect()


@pytest.mark.long
def test_modes_and_the_corrupt_record_column(read: Any) -> None:
    payloads = [b'{"id":1}', b"oops \xff", b'{"id":"x","user":"kept"}', b'{"id":2}', b""]
    schema = "id INT, user STRING, _corrupt_record STRING"
    frame = read(payloads, payloadFormat="json", payloadSchema=schema)
    expected = [(1, None, None), (None, None, "oops \ufffd"), (None, "kept", payloads[2].decode()), (2, None, None)]
    assert rows(frame, "id", "user", "_corrupt_record") == [*expected, (None, None, None)]
    only = read(None, payloadFormat="json", payloadSchema=schema, columns="_corrupt_record,offset")
    assert [text is not None for text, _ in rows(only, *only.columns)] == [False, True, True, False, False]
    plain = read(None, payloadFormat="json", payloadSchema="id INT, user STRING", columnNameOfCorruptRecord="bad")
    assert "bad" not in plain.columns
    assert rows(plain, "id") == [(1,), (None,), (None,), (2,), (None,)]
    dropped = read(None, payloadFormat="json", payloadSchema=schema, mode="dropMalformed")
    assert rows(dropped, "offset", "id", "_corrupt_record") == [(0, 1, None), (3, 2, None), (4, None, None)]
    failing = read(None, payloadFormat="json", payloadSchema=schema, mode="FAILFAST")
    with pytest.raises(Exception, match=r"offset 1: the payload is malformed: it is not valid UTF-8\. Read it with"):
        failing.count()
    text = read(None, payloadFormat="string")
    assert rows(text, "value") == [('{"id":1}',), (None,), (payloads[2].decode(),), ('{"id":2}',), ("",)]
    assert read(None, payloadFormat="string", mode="DROPMALFORMED").count() == 4


@pytest.mark.long
def test_projection_by_option_and_by_schema_decodes_only_what_is_asked_for(read: Any) -> None:
    payloads = [b'{"id":1,"user":"a","n":{"x":[1]}}', b'{"id":2,"user":7,"n":5}']
    options = {"payloadFormat": "json", "payloadSchema": "id INT, user STRING, n STRUCT<x: ARRAY<INT>>"}
    assert rows(read(payloads, columns="n,offset", **options), "n") == [(([1],),), (None,)]
    some = read(None, columns="user,offset,id", mode="FAILFAST", **options)
    assert some.columns == ["user", "offset", "id"], "n is wrong in one, and nobody looks at it"
    assert rows(some, *some.columns) == [("a", 0, 1), ("7", 1, 2)]
    given = read(None, schema="id INT, stream STRING, offset BIGINT", **options)
    assert [row[0] for row in rows(given, "id", "stream")] == [1, 2]
    assert rows(read(None, columns="offset,subject", **options), "offset") == [(0,), (1,)]
    assert read(None, includeHeaders="true", **options).columns[-4:] == ["id", "user", "n", "headers"]
    with pytest.raises(Exception, match="column 'id' is int, not string"):
        read(None, schema="id STRING", **options).count()
    with pytest.raises(Exception, match="unknown column 'usr'; did you mean 'user'"):
        read(None, columns="usr", **options).count()


@pytest.mark.long
def test_avro_plain_and_single_object_encoded(read: Any, tmp_path: Path) -> None:
    text = json.dumps(AVRO)
    path = tmp_path / "order.avsc"
    path.write_text(text)
    orders = [
        {"id": at, "user": f"u{at}" if at % 2 else None, "at": at * 10**6, "tags": ["t"] * at, "kind": "NEW"}
        for at in range(4)
    ]
    payloads = []
    for order in orders:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, fastavro.parse_schema(AVRO), order)
        payloads.append(out.getvalue())
    header = b"\xc3\x01" + fingerprint(text).to_bytes(8, "little")
    payloads = [payloads[0], header + payloads[1], payloads[2], header + payloads[3], b"\0\0\0\0\1" + payloads[1]]
    options = {"payloadFormat": "avro", "payloadSchema": str(path), "columnNameOfCorruptRecord": "bad"}
    frame = read(payloads, **options)
    assert frame.dtypes[5:] == [
        ("id", "bigint"), ("user", "string"), ("at", "timestamp"), ("tags", "array<string>"), ("kind", "string"),
        ("bad", "string"),
    ]  # fmt: skip
    found = rows(frame.withColumn("at", F.unix_micros("at")), "id", "user", "at", "tags", "kind", "bad")
    assert found[:4] == [(*order.values(), None) for order in orders]
    assert found[4] == (None, None, None, None, None, b64encode(payloads[4]).decode())
    with pytest.raises(Exception, match="offset 4: .*Confluent header"):
        read(None, payloadFormat="avro", payloadSchema=text, mode="FAILFAST").count()


def test_arrow_payloads_are_exploded_beside_their_messages(read: Any) -> None:
    def stream(*ids: int) -> bytes:
        batch = pa.record_batch(
            {"id": pa.array(ids, pa.int32()), "user": pa.array([f"u{at}" for at in ids], pa.string())}
        )
        out = io.BytesIO()
        with pa.ipc.new_stream(out, batch.schema) as writer:
            writer.write_batch(batch)
        return out.getvalue()

    payloads = [stream(1, 2), stream(), b"junk", stream(3)]
    options = {"payloadFormat": "arrow", "payloadSchema": "id BIGINT, user STRING, more DOUBLE"}
    frame = read(payloads, columnNameOfCorruptRecord="bad", **options)
    assert rows(frame, "offset", "id", "user", "more", "bad") == [
        (0, 1, "u1", None, None), (0, 2, "u2", None, None), (2, None, None, None, b64encode(b"junk").decode()),
        (3, 3, "u3", None, None),
    ]  # fmt: skip
    assert rows(read(None, mode="DROPMALFORMED", **options), "offset") == [(0,), (0,), (3,)]


CLASHING = ["timestamp", "key", "subject", "offset", "stream", "headers"]


def clashing_payloads(format: str) -> tuple[str, list[bytes]]:
    """(a schema with the names of natslog's columns, payloads of it: two messages, and one that is malformed)."""
    values = [{name: f"{name}{at}" for name in CLASHING} for at in range(2)]
    ddl = ", ".join(f"{name} STRING" for name in CLASHING)
    if format == "json":
        return ddl, [*(json.dumps(value).encode() for value in values), b"!"]
    out = io.BytesIO()
    if format == "arrow":
        batch = pa.RecordBatch.from_pylist(values)
        with pa.ipc.new_stream(out, batch.schema) as writer:
            writer.write_batch(batch)
        return ddl, [out.getvalue(), b"!"]
    schema = {"type": "record", "name": "R", "fields": [{"name": name, "type": "string"} for name in CLASHING]}
    payloads = []
    for value in values:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
        payloads.append(out.getvalue())
    return json.dumps(schema), [*payloads, b"!"]


@pytest.mark.long
@pytest.mark.parametrize("format", ["json", "arrow", pytest.param("avro", marks=pytest.mark.long)])
def test_payload_column_holds_fields_that_have_the_names_of_natslogs_columns(read: Any, format: str) -> None:
    schema, payloads = clashing_payloads(format)
    with pytest.raises(Exception, match=r"'timestamp', 'key', .* Add \.option\(\"payloadColumn\", \"payload\"\)"):
        read(payloads, payloadFormat=format, payloadSchema=schema)
    options = {"payloadFormat": format, "payloadSchema": schema, "payloadColumn": "payload"}
    frame = read(None, **options)
    fields = ",".join(f"{name}:string" for name in CLASHING)
    assert frame.dtypes[5:] == [("payload", f"struct<{fields}>")]
    names = [f"payload.{name}" for name in CLASHING]
    good = [tuple(f"{name}{at}" for name in CLASHING) for at in range(2)]
    assert sorted(rows(frame.where("payload.key is not null"), *names)) == good
    (bad,) = frame.where("payload.key is null").select("offset", "payload").collect()
    assert (bad["offset"], [*bad["payload"]]) == (len(payloads) - 1, [None] * 6), "a struct of nulls, not null"
    assert read(None, mode="DROPMALFORMED", **options).count() == 2
    with pytest.raises(Exception, match=f"offset {len(payloads) - 1}: the payload is malformed"):
        read(None, mode="FAILFAST", **options).count()


@pytest.mark.long
def test_payload_column_means_what_spark_means_by_from_json(spark: SparkSession, read: Any) -> None:
    """Every case with the struct itself: it is null where from_json has null, and has nulls where that has nulls."""
    cases = [*CASES, ""]
    ddl = DDL.removesuffix(", _corrupt_record string")
    frame = read([case.encode() for case in cases], payloadFormat="json", payloadSchema=ddl, payloadColumn="p")
    theirs = spark.createDataFrame(list(enumerate(cases)), "offset long, text string")
    theirs = theirs.select("offset", F.from_json("text", ddl).alias("p"))
    both = zip(rows(frame, "p"), rows(theirs, "p"), strict=True)
    different = {case: pair for case, pair in zip(cases, both, strict=True) if repr(pair[0]) != repr(pair[1])}
    assert different == {}


@pytest.mark.long
def test_payload_column_beside_the_corrupt_record_column_and_in_a_projection(read: Any) -> None:
    payloads = [b'{"id":1,"key":"a"}', b"oops", b'{"id":"x","key":"kept"}', b"", b'{"id":5,"key":null}']
    schema = "id INT, _corrupt_record STRING, key STRING"
    options = {"payloadFormat": "json", "payloadSchema": schema, "payloadColumn": "order"}
    frame = read(payloads, includeHeaders="true", **options)
    assert frame.columns[4:] == ["key", "order", "_corrupt_record", "headers"]
    expected = [(1, "a"), (None, None), (None, "kept"), None, (5, None)]
    bad = [None, "oops", payloads[2].decode(), None, None]
    found = rows(frame, "order", "_corrupt_record")
    assert [(order if order is None else tuple(order), text) for order, text in found] == [
        *zip(expected, bad, strict=True)
    ]
    assert rows(frame.where("order is null"), "offset") == [(3,)], "an empty payload"
    some = read(None, columns="order,offset", mode="DROPMALFORMED", **options)
    assert some.columns == ["order", "offset"]
    assert [offset for _, offset in rows(some, "order", "offset")] == [0, 3, 4]
    only = read(None, columns="_corrupt_record,offset", **options)
    assert [text for text, _ in rows(only, *only.columns)] == bad
    assert rows(read(None, columns="offset", mode="FAILFAST", **options), "offset") == [(at,) for at in range(5)]
    given = read(None, schema="order STRUCT<id: INT, key: STRING>, offset BIGINT", **options)
    assert [order and order["id"] for order, _ in rows(given, "order", "offset")] == [1, None, None, None, 5]
    with pytest.raises(Exception, match="unknown column 'id'; it is a field of order: name that"):
        read(None, columns="id", **options).count()


@pytest.mark.long
@pytest.mark.parametrize("format", ["json", pytest.param("avro", marks=pytest.mark.long), "arrow"])
def test_payload_column_in_a_streaming_query_that_is_restarted(
    spark: SparkSession,
    broker: BrokerProcess,
    client: NatslogClient,
    nats_url: str,
    name: str,
    folder: Path,
    format: str,
) -> None:
    schema, payloads = clashing_payloads(format)
    client.create_stream(name, name)
    source = spark.readStream.format("natslog").options(servers=broker.url, stream=name, payloadFormat=format)
    source = source.options(payloadSchema=schema, payloadColumn="payload", columnNameOfCorruptRecord="bad")
    out, checkpoint = str(folder / "out"), str(folder / "checkpoint")
    for _ in range(2):  # the second run begins at the checkpoint of the first
        publish_acked(nats_url, name, payloads)
        writer = source.load().writeStream.format("parquet").option("path", out)
        query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        query.awaitTermination()
    found = spark.read.parquet(out).orderBy("offset", "payload.key").select("offset", "payload").collect()
    one_run = [(0, 0), (0, 1), (1, None)] if format == "arrow" else [(0, 0), (1, 1), (2, None)]
    assert [(row["offset"], [*row["payload"]]) for row in found] == [
        (run * len(payloads) + offset, [None if at is None else f"{name}{at}" for name in CLASHING])
        for run in range(2)
        for offset, at in one_run
    ]


@pytest.mark.long
def test_typed_payloads_in_a_streaming_query(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, folder: Path
) -> None:
    client.create_stream(name, name)
    source = spark.readStream.format("natslog").options(servers=broker.url, stream=name, payloadFormat="json")
    source = source.options(payloadSchema="id INT, _corrupt_record STRING", maxOffsetsPerTrigger="7")

    def drain(**options: str) -> None:
        writer = source.options(**options).load().writeStream.format("parquet").option("path", str(folder / "out"))
        query = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
        query.awaitTermination()

    publish_acked(nats_url, name, [b'{"id":%d}' % at for at in range(10)])
    drain()
    publish_acked(nats_url, name, [b"broken", b'{"id":11}'])
    drain()
    found = spark.read.schema("offset long, id int, _corrupt_record string").parquet(str(folder / "out"))
    assert rows(found, "offset", "id", "_corrupt_record") == [
        *((at, at, None) for at in range(10)), (10, None, "broken"), (11, 11, None),
    ]  # fmt: skip
    publish_acked(nats_url, name, [b"broken again"])
    with pytest.raises(Exception, match=f"stream '{name}', offset 12: the payload is malformed"):
        drain(mode="FAILFAST")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"payloadFormat": "jsn"}, "option payloadFormat 'jsn' must be binary, .*; did you mean 'json'"),
        ({"payloadFormat": "json"}, "option payloadSchema is missing: payloadFormat json requires it"),
        ({"payloadSchema": "a int"}, "option payloadSchema requires .* and payloadFormat is binary by default"),
        ({"payloadFormat": "string", "payloadSchema": "a int"}, "payloadSchema requires .* payloadFormat is string"),
        (
            {"mode": "FAILFAST"},
            "option mode requires payloadFormat string, variant, json, avro, arrow or protobuf, and",
        ),
        ({"payloadColumn": "p"}, "option payloadColumn requires .* and payloadFormat is binary by default: set"),
        ({"payloadFormat": "json", "payloadSchema": "a itn"}, "payloadSchema: 'itn' is not a type; did you mean 'int'"),
        ({"payloadFormat": "json", "payloadSchema": "a int, A int"}, "payloadSchema: the name 'a' occurs twice"),
        ({"payloadFormat": "json", "payloadSchema": "a variant"}, "payloadSchema: the type variant is not supported"),
        ({"payloadFormat": "json", "payloadSchema": "Timestamp int"}, r'\.option\("payloadColumn", "payload"\)'),
        ({"payloadFormat": "json", "payloadSchema": "no/such.json"}, "cannot read the file no/such.json: No such file"),
        ({"payloadFormat": "json", "payloadSchema": '{"type": "struct"'}, "begins like JSON and is not valid JSON"),
        ({"payloadFormat": "avro", "payloadSchema": "a int"}, "payloadFormat avro requires the Avro schema"),
        (
            {"payloadFormat": "json", "payloadSchema": "a int", "mode": "DROP"},
            "option mode 'drop' must be permissive",
        ),
        (
            {"payloadFormat": "json", "payloadSchema": "_corrupt_record int"},
            "'_corrupt_record' is int .* must be string",
        ),
        ({"payloadFromat": "json"}, "(?i)unknown option 'payloadFromat'; did you mean 'payloadFormat'"),
    ],
)
@pytest.mark.long
def test_wrong_options_are_named_before_a_job_starts(
    spark: SparkSession, broker: BrokerProcess, options: dict[str, str], words: str
) -> None:
    with pytest.raises(Exception, match=words):
        spark.read.format("natslog").options(servers=broker.url, stream="none", **options).load()
