"""Which chunks go to the kernel for usual JSON and which to the reference; and the modes."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow.payloads import Payloads
from natslog.errors import MalformedPayload
from natslog.wire import library
from pyspark_natslog.payload import decoding
from pyspark_natslog.payload.ddl import parse_ddl
from pyspark_natslog.payload.decoding import Shaper
from pyspark_natslog.payload.json_flat import FlatJson
from pyspark_natslog.payload.json_paths import JsonPaths
from pyspark_natslog.payload.rows import Decoded
from tests.unit.connector.payload.test_payload_column import parse, stored

ACCEPTED, REFUSED = b'{"id":1}', b'{"id":"x"}'
SCHEMA = "id INT, user STRING, at TIMESTAMP, _corrupt_record STRING"
ROWS = [
    b'{"id":1,"user":"a","at":"2024-01-02T03:04:05Z"}', b"", b"  ", b"oops", b'{"id":1,"user":"cut', b"\xff",
    b'{"user":null}', b'{"id":5}\n',
]  # fmt: skip


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each chunk that the kernel for usual JSON got: whether it accepted it."""
    found: list[bool] = []
    decode = FlatJson.decode

    def noted(self: FlatJson, payloads: Payloads) -> Decoded | None:
        decoded = decode(self, payloads)
        found.append(decoded is not None)
        return decoded

    monkeypatch.setattr(FlatJson, "decode", noted)
    return found


def paths(tried: list[bool], chunks: list[bytes], ddl: str = "id INT") -> str:
    """U for each chunk that went by the kernel for usual JSON, R for each one of the reference."""
    taken, decoder = "", JsonPaths(parse_ddl(ddl))
    for chunk in chunks:
        tried.clear()
        found = decoder.decode(Payloads.of(pa.array([chunk], pa.binary())))
        assert bool(found.malformed[0]) == (chunk == REFUSED)
        taken += "U" if tried == [True] else "R"
    return taken


def test_accepted_chunks_go_to_the_kernel_for_usual_json(tried: list[bool]) -> None:
    assert paths(tried, [ACCEPTED] * 5) == "UUUUU"


def test_schema_that_is_not_supported_goes_to_the_reference(tried: list[bool]) -> None:
    assert paths(tried, [ACCEPTED] * 3, "id INT, m MAP<STRING, INT>") == "RRR"
    assert tried == []


def test_without_compiled_kernels_all_goes_to_the_reference(tried: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library", lambda: None)
    assert paths(tried, [ACCEPTED] * 3) == "RRR"


def test_refused_chunk_goes_to_the_reference_and_the_next_one_too(tried: list[bool]) -> None:
    assert paths(tried, [ACCEPTED, REFUSED, ACCEPTED, ACCEPTED, REFUSED, ACCEPTED, ACCEPTED]) == "URRURRU"


def test_task_of_refused_chunks_stays_with_the_reference_for_longer_and_longer(tried: list[bool]) -> None:
    decoder, at = JsonPaths(parse_ddl("id INT")), []
    for number in range(300):
        before = len(tried)
        decoder.decode(Payloads.of(pa.array([REFUSED], pa.binary())))
        if len(tried) > before:
            at.append(number)
    assert at == [0, 2, 5, 10, 19, 36, 69, 134, 199, 264], "after 1, 2, 4, … 64 chunks, and 64 again"


def test_chunk_after_many_refused_ones_is_tried_and_accepted(tried: list[bool]) -> None:
    taken = paths(tried, [REFUSED] * 10 + [ACCEPTED] * 20)
    assert taken == "R" * 10 + "U" * 20, "the eleventh chunk is the next one that is tried"


def test_each_task_has_its_own_rule(tried: list[bool]) -> None:
    assert [paths(tried, [REFUSED]), paths(tried, [ACCEPTED])] == ["R", "U"]


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
