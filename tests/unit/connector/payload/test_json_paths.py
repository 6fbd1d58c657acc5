"""Which chunks go to Arrow's parser and which to the kernel; that the kernel is loaded only then; and the modes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow.payloads import Payloads
from natslog.errors import MalformedPayload
from pyspark_natslog.payload import decoding
from pyspark_natslog.payload.ddl import parse_ddl
from pyspark_natslog.payload.decoding import Shaper
from pyspark_natslog.payload.json_arrow import ArrowJson
from pyspark_natslog.payload.json_paths import JsonPaths
from pyspark_natslog.payload.json_rows import JsonDecoder
from pyspark_natslog.payload.rows import Decoded
from tests.unit.connector.payload.test_payload_column import parse, stored

ROOT = Path(__file__).parents[4]
ACCEPTED, REFUSED = b'{"id":1}', b'{"id":"x"}'
SCHEMA = "id INT, user STRING, at TIMESTAMP, _corrupt_record STRING"
ROWS = [
    b'{"id":1,"user":"a","at":"2024-01-02T03:04:05Z"}', b"", b"  ", b"oops", b'{"id":1,"user":"cut', b"\xff",
    b'{"user":null}', b'{"id":5}\n',
]  # fmt: skip


class Counted:
    """The kernel's decoder, with a count of its chunks."""

    def __init__(self, ddl: str) -> None:
        self.decoder = JsonDecoder(parse_ddl(ddl))
        self.loaded = self.chunks = 0

    def load(self) -> Counted:
        self.loaded += 1
        return self

    def decode(self, payloads: Payloads) -> Decoded:
        self.chunks += 1
        return self.decoder.decode(payloads)


def paths(chunks: list[bytes], ddl: str = "id INT") -> tuple[str, int]:
    """(K for each chunk that went to the kernel, A for others; how often the kernel was loaded)."""
    kernel, taken = Counted(ddl), ""
    decoder = JsonPaths(parse_ddl(ddl), kernel.load)
    for chunk in chunks:
        before = kernel.chunks
        found = decoder.decode(Payloads.of(pa.array([chunk], pa.binary())))
        assert bool(found.malformed[0]) == (chunk == REFUSED)
        taken += "A" if kernel.chunks == before else "K"
    return taken, kernel.loaded


def test_accepted_chunks_never_load_the_kernel() -> None:
    assert paths([ACCEPTED] * 5) == ("AAAAA", 0)


def test_schema_that_is_not_supported_goes_to_the_kernel() -> None:
    assert paths([ACCEPTED] * 3, "id INT, m MAP<STRING, INT>") == ("KKK", 1)


def test_refused_chunk_goes_to_the_kernel_and_the_next_one_too() -> None:
    assert paths([ACCEPTED, REFUSED, ACCEPTED, ACCEPTED, REFUSED, ACCEPTED, ACCEPTED]) == ("AKKAKKA", 1)


def test_task_of_refused_chunks_stays_with_the_kernel_for_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Counted("id INT")
    decoder = JsonPaths(parse_ddl("id INT"), kernel.load)
    tried: list[int] = []
    monkeypatch.setattr(ArrowJson, "decode", lambda self, payloads: tried.append(kernel.chunks))
    for _ in range(300):
        decoder.decode(Payloads.of(pa.array([REFUSED], pa.binary())))
    assert tried == [0, 2, 5, 10, 19, 36, 69, 134, 199, 264], "after 1, 2, 4, … 64 chunks, and 64 again"


def test_chunk_after_many_refused_ones_is_tried_and_accepted() -> None:
    taken, _ = paths([REFUSED] * 10 + [ACCEPTED] * 20)
    assert taken == "K" * 10 + "A" * 20, "the eleventh chunk is the next one that is tried"


# ---- what Spark gets ----


def shaped(payloads: list[bytes], **options: str) -> pa.Table:
    given = parse(payloadFormat="json", payloadSchema=SCHEMA, **options)
    batches = Shaper(given.payload, given.selected_columns()).shape(stored(payloads), "orders")
    return pa.Table.from_batches(batches)


def by_kernel(monkeypatch: pytest.MonkeyPatch, payloads: list[bytes], **options: str) -> pa.Table:
    with monkeypatch.context() as patch:
        patch.setattr("pyspark_natslog.payload.json_paths.supports", lambda kind: False)
        return shaped(payloads, **options)


@pytest.mark.parametrize("options", [{}, {"mode": "DROPMALFORMED"}, {"payloadColumn": "p"}, {"columns": "id,offset"}])
@pytest.mark.parametrize("payloads", [ROWS, [*ROWS, b'{"id":"x","user":"kept"}'], ROWS[:2]])
def test_modes_and_the_corrupt_record_column_are_those_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], payloads: list[bytes]
) -> None:
    found = shaped(payloads, **options)
    kept = [row for row in payloads if row in ROWS and row not in ROWS[3:6]]
    assert found.num_rows == len(kept if "mode" in options else payloads)
    assert found.equals(by_kernel(monkeypatch, payloads, **options))


@pytest.mark.parametrize("bad", [3, 4, 5])
def test_failfast_has_the_kernels_reason(monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    payloads = [*ROWS[:3], ROWS[bad]]
    with pytest.raises(MalformedPayload, match="offset 103: the payload is malformed") as found:
        shaped(payloads, mode="FAILFAST")
    with pytest.raises(MalformedPayload) as expected:
        by_kernel(monkeypatch, payloads, mode="FAILFAST")
    assert str(found.value) == str(expected.value)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([*ROWS, REFUSED, b'{"id":1,"id":2}']), max_size=40), st.integers(1, 60))
def test_chunks_of_any_size_make_the_same_rows(payloads: list[bytes], chunk_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        whole: Any = shaped(payloads).to_pylist() if payloads else []
        patch.setattr(decoding, "_CHUNK_BYTES", chunk_bytes)
        assert (shaped(payloads).to_pylist() if payloads else []) == whole


def in_fresh_process(payload: bytes, schema: str) -> str:
    """The modules of kernels that decoding one payload imports, in a Python that has imported nothing before."""
    program = f"""
import sys
import pyarrow as pa
import pyspark_natslog.data_source, pyspark_natslog.source.range_reader
from natslog.arrow.schema import MESSAGE_SCHEMA
from pyspark_natslog.payload.decoding import Shaper
from pyspark_natslog.source.options import SourceOptions

given = SourceOptions.parse({{"stream": "s", "payloadFormat": "json", "payloadSchema": {schema!r}}})
row = {{"offset": 0, "timestamp": 0, "subject": "s", "key": None, "headers": None, "value": {payload!r}}}
batch = pa.RecordBatch.from_pylist([row], schema=MESSAGE_SCHEMA)
(found,) = Shaper(given.payload, given.selected_columns()).shape(batch, "s")
assert found.column("id").to_pylist() == [1], found
names = ("numba", "pyspark_natslog.payload.kernels_json")
print([name for name in names if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()


def test_fast_path_alone_does_not_import_the_other_kernel() -> None:
    assert in_fresh_process(b'{"id":1}', "id INT, at TIMESTAMP, s STRUCT<x: ARRAY<STRING>>") == "[]"


@pytest.mark.long
def test_refused_chunk_imports_the_other_kernel() -> None:
    assert "pyspark_natslog.payload.kernels_json" in in_fresh_process(b"{'id':1}", "id INT")
