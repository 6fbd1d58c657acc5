"""Answers that are damaged or crafted: an error, never a crash, and never rows that were not asked for."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.client import NatslogClient
from natslog.client.answers import Fetched, RequestedRows, rows_of
from natslog.client.client import _WHOLE_BATCHES
from natslog.client.streams import stream_path
from natslog.errors import CorruptAnswer, CorruptLog
from tests.harness import publish_acked
from tests.integration.fuzz_answers import Sample

_TIMES = 3000


def sample_of(client: NatslogClient, name: str, end: int, **query: Any) -> Sample:
    response = client._ask("GET", stream_path(name) + "/messages", query={"start": 0, "end": end} | query)
    columns = query["columns"].split(",") if "columns" in query else None
    return Sample(response.data, dict(response.headers), RequestedRows(name, 0, end, columns, "subject" in query))


def columns_sample_of(client: NatslogClient, name: str, end: int, columns: str) -> Sample:
    """Columns of stored batches, as this client asks for them."""
    query = {"start": 0, "end": end, "columns": columns, "max_bytes": 1 << 20}
    response = client._ask("GET", stream_path(name) + "/messages", query=query, headers=_WHOLE_BATCHES)
    assert response.headers["Natslog-Batches"] == "columns"
    return Sample(
        response.data, dict(response.headers), RequestedRows(name, 0, end, columns.split(","), is_filtered=False)
    )


@pytest.mark.parametrize("kind", ["whole", "columns", "coalesced", "filtered", "projected"])
@pytest.mark.long
def test_damaged_answer_is_an_error_or_the_right_rows(
    client: NatslogClient, nats_url: str, name: str, filled: str, tmp_path: Path, kind: str
) -> None:
    if kind in ("whole", "columns"):
        client.create_stream(f"{name}-whole", f"{name}-whole.>")
        publish_acked(nats_url, f"{name}-whole.x", [b"value %d" % at for at in range(20)])
        is_whole = kind == "whole"
        sample = (
            sample_of(client, f"{name}-whole", 20)
            if is_whole
            else columns_sample_of(client, f"{name}-whole", 20, "value,key,offset")
        )
    else:
        query = {"coalesced": {}, "filtered": {"subject": "*.odd.>"}, "projected": {"columns": "value,offset"}}[kind]
        sample = sample_of(client, filled, 100, **query)
    assert sample.is_whole == (kind == "whole")
    file = tmp_path / "sample"
    file.write_bytes(pickle.dumps(sample))
    command = [sys.executable, "-m", "tests.integration.fuzz_answers", str(file), "1", str(_TIMES)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert int(ended.stdout) > _TIMES / 20, "much of the damage is found"


ROWS: dict[str, Any] = {
    "offset": [5, 6, 7],
    "timestamp": [0, 0, 0],
    "subject": ["a", "b", "c"],
    "key": [None, None, None],
    "headers": [None, None, None],
    "value": [b"1", b"2", b"3"],
}


def exact(rows: dict[str, Any], schema: pa.Schema = MESSAGE_SCHEMA) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        arrays = [pa.array(rows[field.name], field.type) for field in schema]
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return bytes(sink.getvalue())


def read(data: bytes, start: int = 5, end: int = 8, *, is_filtered: bool = False, columns: Any = None) -> Fetched:
    headers = {"Natslog-High-Watermark": "9", "Natslog-Log-Start-Offset": "0", "Natslog-Batches": "exact"}
    answer: Any = SimpleNamespace(data=data, headers=headers | {"Natslog-Next-Offset": str(end)})
    return rows_of(answer, RequestedRows("orders", start, end, columns, is_filtered))


def test_right_rows_are_read() -> None:
    assert read(exact(ROWS)).batches[0].column("offset").to_pylist() == [5, 6, 7]
    assert read(exact(ROWS), 0, 100, is_filtered=True).batches[0].num_rows == 3


@pytest.mark.parametrize("offsets", [[4, 5, 6], [5, 6, 8], [5, 7, 6], [5, 6, 6], [5, 6, 2**62], [-1, 5, 6]])
@pytest.mark.parametrize("is_filtered", [True, False])
def test_offsets_that_were_not_asked_for_are_a_corrupt_answer(offsets: list[int], is_filtered: bool) -> None:
    with pytest.raises(CorruptAnswer, match="the offsets of the response are not"):
        read(exact(ROWS | {"offset": offsets}), is_filtered=is_filtered)


def test_other_number_of_rows_is_a_corrupt_answer() -> None:
    with pytest.raises(CorruptAnswer, match="3 rows for offsets 5 to 8"):
        read(exact(ROWS), end=9)
    schema = pa.schema([MESSAGE_SCHEMA.field("value")])
    with pytest.raises(CorruptAnswer, match="3 rows for offsets 5 to 6"):
        read(exact(ROWS, schema), end=7, is_filtered=True, columns=["value"])


def test_other_columns_are_a_corrupt_answer() -> None:
    with pytest.raises(CorruptAnswer, match="does not have the requested columns"):
        read(exact(ROWS), columns=["value"])
    schema = MESSAGE_SCHEMA.set(5, pa.field("value", pa.string(), nullable=False))
    with pytest.raises(CorruptAnswer, match="does not have the requested columns"):
        read(exact(ROWS, schema))


def test_missing_value_is_a_corrupt_answer() -> None:
    with pytest.raises(CorruptAnswer, match="rows without value"):
        read(exact(ROWS | {"value": [b"1", None, b"3"]}))


def test_string_offsets_out_of_range_are_a_corrupt_answer() -> None:
    data = exact(ROWS)
    ends = b"".join(end.to_bytes(4, "little") for end in (0, 1, 2, 3))
    assert data.count(ends) == 2, "subject and value"
    crafted = data.replace(ends, ends[:-4] + (2**30).to_bytes(4, "little"))
    with pytest.raises(CorruptAnswer, match="cannot be read"):
        read(crafted)


def test_whole_answer_without_its_last_batch_is_corrupt(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, f"{name}.>")
    publish_acked(nats_url, f"{name}.x", [b"1", b"2"])
    sample = sample_of(client, name, 2)
    without = sample.data[: 8 + int.from_bytes(sample.data[4:8], "little")]
    with pytest.raises(CorruptLog, match="offsets 0 to 1 are missing"):
        sample.read(without)
