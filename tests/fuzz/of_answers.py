"""Answers of brokers at the client: rows, offsets in headers, errors."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa

from natslog.arrow import ipc
from natslog.arrow.projection import project, schema_of
from natslog.client.answers import RequestedRows
from natslog.errors import NatslogError, from_json
from tests.fuzz import edits
from tests.fuzz.target import target
from tests.integration.fuzz_answers import Sample, check
from tests.unit.client.test_answers import stored

_END = 9


@functools.cache
def samples() -> list[tuple[Sample, list[dict[str, Any]]]]:
    """Answers of each kind, as a broker makes them, and their rows."""
    batches = [bytes(stored(0, 5)), bytes(stored(5, 4))]
    columns = ("value", "key", "offset")
    table = pa.Table.from_batches([ipc.decode_batch(batch) for batch in batches])
    found = [
        _sample("whole", ipc.schema_message() + b"".join(batches) + ipc.END_OF_STREAM),
        _sample("columns", _projected(batches, columns), columns),
        _sample("exact", _stream(table)),
        _sample("exact", _stream(table.select(["value", "offset"])), ("value", "offset")),
        _sample("exact", _stream(table.slice(3, 2)), is_filtered=True),
        _sample("whole", ipc.schema_message() + b"".join(batches) + ipc.END_OF_STREAM, start=2, end=7),
    ]
    return [(sample, sample.read(sample.data)) for sample in found]


def _sample(
    kind: str, data: bytes, columns: Any = None, *, start: int = 0, end: int = _END, is_filtered: bool = False
) -> Sample:
    headers = {"Natslog-Next-Offset": str(end), "Natslog-High-Watermark": "9", "Natslog-Log-Start-Offset": "0"}
    asked = RequestedRows("orders", start, end, columns, is_filtered)
    return Sample(data, headers | {"Natslog-Batches": kind}, asked)


def _stream(table: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _projected(batches: list[bytes], columns: tuple[str, ...]) -> bytes:
    data = ipc.schema_message(schema_of(columns))
    for batch in batches:
        header = ipc.proven_header(batch)
        assert header is not None
        made = project(header, batch[: header.header_bytes], columns)
        body = batch[header.header_bytes :]
        data += bytes(made.header) + b"".join(body[start:end] for start, end in made.body)
    return data + ipc.END_OF_STREAM


@target("answers", lambda: edits.seeds([sample.data for sample, _ in samples()]))
def check_answers(script: bytes) -> None:
    """A damaged answer is an error, or the right rows where CRCs prove them; where nothing does, as many rows as were
    requested, with ascending offsets.
    """
    originals = [sample.data for sample, _ in samples()]
    sample, right = samples()[edits.chosen(script, len(originals))]
    data = edits.edited(script, originals)
    try:
        rows = sample.read(data)
    except NatslogError:
        return
    if sample.headers["Natslog-Batches"] == "columns":
        assert rows == right, "damaged columns were read as other rows"
    check(sample, rows, right)


_NAMES = ("Natslog-Next-Offset", "Natslog-High-Watermark", "Natslog-Log-Start-Offset")


def _texts() -> Iterator[bytes]:
    yield b"9\0009\0000\0whole"
    yield b"7\0009\0001\0exact"
    yield b'{"error": {"code": "not_leader", "message": "no", "retriable": true, "url": "http://x"}}'
    yield b'{"error": {"code": "offset_out_of_range", "message": "no", "self": 1, "message_": [], "facts": {}}}'
    yield b"9223372036854775808\0-1\0 1\0columns"


@target(
    "replies", _texts, [b"\0", b'"error"', b'"code"', b'"message"', b'"facts"', b"not_leader", b"999999999999999999"]
)
def check_replies(data: bytes) -> None:
    """Whatever the headers of an answer state, the rows are those of the range that was requested, or it is an error;
    an error in JSON is read as a NatslogError, whatever else it states.
    """
    sample, right = samples()[0]
    texts = data.decode("latin-1").split("\0")
    headers = dict(zip((*_NAMES, "Natslog-Batches"), texts, strict=False))
    stated = replace(sample, headers=headers)
    try:
        rows = stated.read(sample.data)
    except NatslogError:
        pass
    else:
        assert rows == right[: int(headers[_NAMES[0]])], "other rows than those of the range"
    try:
        body = json_of(data)
    except (ValueError, RecursionError):
        return
    if isinstance(body, dict):
        error = from_json(body)
        assert isinstance(error, NatslogError)
        assert isinstance(error.to_json()["error"]["message"], str)


def json_of(data: bytes) -> Any:
    import json

    return json.loads(data)
