"""The schema of a sample of JSON payloads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pyspark_natslog.payload.inferring import schema_of

DEEP = "a:struct<" * 63 + "a:string" + ">" * 63


def inferred(*documents: Any) -> str:
    payloads = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in documents]
    return schema_of(payloads).simpleString().removeprefix("struct<").removesuffix(">")


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ([{"id": 1, "user": "a"}, {"user": None, "paid": True}], "id:bigint,user:string,paid:boolean"),
        ([{"n": 1}, {"n": 1.5}], "n:double"),
        ([{"n": 1}, {"n": 2**63}], "n:decimal(38,0)"),
        ([{"n": 2**63}, {"n": 0.5}], "n:double"),
        ([{"n": 10**40}], "n:double"),
        ([{"n": 1}, {"n": "1"}], "n:string"),
        ([{"n": 1}, {"n": {"a": 1}}], "n:string"),
        ([{"n": True}, {"n": 1}], "n:string"),
        ([{"n": None}], "n:string"),
        ([{"n": {}}], "n:string"),
        ([{"n": []}], "n:array<string>"),
        ([{"n": [1, None, 2.5]}, {"n": None}], "n:array<double>"),
        ([{"a": {"x": 1}}, {"a": {"y": [{"z": "t"}]}}], "a:struct<x:bigint,y:array<struct<z:string>>>"),
        ([b"no json", b"[1]", b"7", b"\xff", {"a": 1}], "a:bigint"),
        ([b"[" * 100_000, {"a": "2026-11-26T00:00:00Z"}], "a:string"),
        ([b'{"a":' * 500 + b"1" + b"}" * 500, {"b": 1}], DEEP + ",b:bigint"),
        ([b'{"a":' + b"[" * 500 + b"]" * 500 + b"}"], "a:" + "array<" * 63 + "string" + ">" * 63),
        ([{"id": 1, "a": {"x": 1, "X": 2}}, {"ID": "y", "b": 1}], "id:bigint,a:struct<x:bigint>,b:bigint"),
        ([b'{"\\ud800":1,"a":[{"\\udfff":1,"x":1}]}'], "a:array<struct<x:bigint>>"),
        ([json.dumps({"wide": 1}).encode("utf-16"), {"a": 1}], "a:bigint"),
        ([b"x"], ""),
        ([], ""),
    ],
)
def test_types(documents: list[Any], expected: str) -> None:
    assert inferred(*documents) == expected
