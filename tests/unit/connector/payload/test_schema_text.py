"""`payloadSchema` in all its forms, and DDL beside Spark's JSON of the same schema."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from pyspark.sql.types import DecimalType, IntegerType, StringType, StructField, StructType

from natslog.errors import InvalidRequest
from pyspark_natslog.payload.ddl import parse_ddl
from pyspark_natslog.payload.schema_text import parse_payload_schema
from tests.unit.connector.payload.test_json import ALL_TYPES, schemas


def quoted(schema: StructType) -> str:
    """DDL as a person may write it."""
    return schema.simpleString().removeprefix("struct<").removesuffix(">")


@settings(max_examples=100, deadline=None)
@given(schemas(ALL_TYPES))
def test_ddl_and_json_of_a_schema_are_the_schema(schema: StructType) -> None:
    plain = StructType.fromJson(_renamed(schema.jsonValue()))
    assert parse_payload_schema(plain.json()).columns == plain
    assert parse_ddl(quoted(plain)) == plain
    assert parse_ddl(plain.simpleString()) == plain


def _renamed(body: object) -> object:
    """The schema with names that need no quotes."""
    if isinstance(body, dict) and "name" in body:
        body = body | {"name": "n" + "_".join(str(ord(letter)) for letter in body["name"])}
    if isinstance(body, dict):
        return {key: _renamed(value) for key, value in body.items()}
    return [_renamed(item) for item in body] if isinstance(body, list) else body


def test_ddl_as_people_write_it() -> None:
    found = parse_ddl("`a b` INT NOT NULL COMMENT 'it\\'s', c: DECIMAL(5,2),\n d Struct<`e``f`: string, g dec>")
    inner = StructType([StructField("e`f", StringType()), StructField("g", DecimalType(10, 0))])
    assert found == StructType(
        [StructField("a b", IntegerType(), False), StructField("c", DecimalType(5, 2)), StructField("d", inner)]
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a", "expected a name or type, found the end"),
        ("a int b int", "expected ','.*found 'b'"),
        ("a int,", "expected a name or type, found the end"),
        ("a array<int", "expected '>', found the end"),
        ("a map<string>", "expected ',', found '>'"),
        ("a map<int, int>", "a: the keys of a map must be string, not int"),
        ("a decimal(50, 1)", r"decimal\(50, 1\): the precision must be 1 to 38"),
        ("a decimal(x)", "whole numbers"),
        ("a interval", "the type interval is not supported: write string"),
        ("a varchar(10)", "the type varchar is not supported: write string"),
        ("a integr", "'integr' is not a type; did you mean 'integer'"),
        ("a int, A string", "the name 'a' occurs twice"),
        ("s struct<x int, X int>", "the name 'x' occurs twice in s"),
        ("<", "expected a column's name, found '<'"),
        ("'x' int", "expected a column's name"),
        ("", "the schema has no columns"),
        ('{"type": "struct", "fields": [{"name": 1}]}', "not Spark's JSON of a schema"),
        ('{"type": "struct", "fields": []}', "the schema has no columns"),
        ('{"a": 1}', "is not an Avro type"),
        ("{", "begins like JSON and is not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("a " + "array<" * 100_000, "nested too deeply"),
        (f"a decimal({'9' * 5000})", "whole numbers"),
        ('{"type": "record", "name": 5, "fields": []}', "not an Avro schema"),
        ('{"type": "record", "name": "R", "fields": [{"name": "a", "type": {"type": 7}}]}', "is not an Avro type"),
        ('{"type": "fixed", "name": "F", "size": "x"}', "not an Avro schema"),
        ("./missing.avsc", "cannot read the file ./missing.avsc: No such file or directory; the driver reads it"),
        ("/", "cannot read the file /: Is a directory"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse_payload_schema(text)


def test_file_holds_any_form(tmp_path: Path) -> None:
    expected = StructType([StructField("a", IntegerType())])
    avro = '{"type": "record", "name": "R", "fields": [{"name": "a", "type": ["null", "int"]}]}'
    for number, text in enumerate(["a INT\n", expected.json(), avro]):
        path = tmp_path / f"schema{number}.txt"
        path.write_text(text)
        for given_path in (str(path), f"file://{path}"):
            assert parse_payload_schema(given_path).columns == expected
    (tmp_path / "binary.avsc").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match="is not text in UTF-8"):
        parse_payload_schema(str(tmp_path / "binary.avsc"))
