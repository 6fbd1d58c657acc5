"""Positions in the files of a Spark query's checkpoint: whole, older, damaged, and of other sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from natslog.client.spark_checkpoint import StreamPosition, read_spark_checkpoint
from natslog.errors import ConfigError

SPARKS = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 1, "conf": {}})


def at(offset: int, stream_id: str = "3ef2", **more: Any) -> dict[str, Any]:
    return {"id": stream_id, "offset": offset} | more


def write_batch(folder: Path, batch: int, *sources: object, committed: bool = True, version: str = "v1") -> None:
    lines = [source if isinstance(source, str) else json.dumps(source) for source in sources]
    (folder / "offsets").mkdir(parents=True, exist_ok=True)
    (folder / "commits").mkdir(exist_ok=True)
    (folder / "offsets" / str(batch)).write_text("\n".join([version, SPARKS, *lines]))
    if committed:
        (folder / "commits" / str(batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')


def starting_offsets(folder: Path, batch: int | None = None) -> Any:
    (source,) = read_spark_checkpoint(str(folder), batch).sources
    return json.loads(source.starting_offsets)


def test_last_committed_batch_counts_and_the_one_that_was_begun_is_stated(tmp_path: Path) -> None:
    write_batch(tmp_path, 9, {"orders": at(90)})
    write_batch(tmp_path, 10, {"orders": at(100, epoch=5, tasks=[[0, 50], [1, 100]]), "returns": at(7, "9a", start=0)})
    write_batch(tmp_path, 11, {"orders": at(110), "returns": at(7, "9a")}, committed=False)
    (tmp_path / "offsets" / ".11.crc").write_bytes(b"crc")
    (tmp_path / "offsets" / ".12.0f3.tmp").write_bytes(b"half")
    (tmp_path / "metadata").write_text('{"id":"d7352eb9"}')
    found = read_spark_checkpoint(str(tmp_path))
    assert (found.query_id, found.batch, found.warnings) == ("d7352eb9", 10, [])
    assert found.sources[0].streams == {
        "orders": StreamPosition(id="3ef2", offset=100, epoch=5),
        "returns": StreamPosition(id="9a", offset=7),
    }
    assert found.sources[0].starting_offsets == '{"orders":100,"returns":7}'
    assert found.planned is not None
    assert found.planned[0].starting_offsets == '{"orders":110,"returns":7}'
    assert starting_offsets(tmp_path, 9) == {"orders": 90}
    assert read_spark_checkpoint(str(tmp_path), 9).planned is None, "the batch after it is committed"


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_sources_keep_their_numbers_and_others_are_told_apart(tmp_path: Path, version: str) -> None:
    ours, kafkas = json.dumps({"orders": at(5)}), json.dumps({"orders": {"0": 42}})
    lines = ["1:" + kafkas, "0:" + ours, "2:17", "3:-"] if version == "v2" else [ours, kafkas, "17", "-"]
    write_batch(tmp_path, 0, *lines, version=version)
    found = read_spark_checkpoint(str(tmp_path))
    assert {one.source: one.streams for one in found.sources} == {
        "0": {"orders": StreamPosition(id="3ef2", offset=5)},
        "1": None,
        "2": None,
        "3": None,
    }


def test_positions_of_other_sources_may_be_any_text(tmp_path: Path) -> None:
    write_batch(tmp_path, 0, '{"a": "\u2028\x85"}', "[" * 100_000, '{"a":' * 100_000, {"orders": at(5)})
    found = read_spark_checkpoint(str(tmp_path))
    assert [one.streams is None for one in found.sources] == [True, True, True, False]


def test_commit_counts_by_its_name_also_where_a_power_failure_has_emptied_it(tmp_path: Path) -> None:
    write_batch(tmp_path, 3, {"orders": at(30)})
    (tmp_path / "commits" / "3").write_bytes(b"")
    assert starting_offsets(tmp_path) == {"orders": 30}


@pytest.mark.parametrize("content", [b"", b"v1", b'v1\n{}\n{"orders": {"id"', b"\xff\xfe", None])
def test_damaged_positions_of_the_last_batch_are_no_guess(tmp_path: Path, content: bytes | None) -> None:
    write_batch(tmp_path, 6, {"orders": at(60)})
    write_batch(tmp_path, 7, {"orders": at(70)})
    path = tmp_path / "offsets" / "7"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"committed is 7, and its file offsets/7 .*--batch 6 shows where batch 6 ended"
    ):
        read_spark_checkpoint(str(tmp_path))
    assert starting_offsets(tmp_path, 6) == {"orders": 60}


def test_damaged_batch_after_the_last_committed_one_is_a_warning(tmp_path: Path) -> None:
    write_batch(tmp_path, 6, {"orders": at(60)})
    (tmp_path / "offsets" / "7").write_bytes(b"")
    found = read_spark_checkpoint(str(tmp_path))
    assert found.sources[0].starting_offsets == '{"orders":60}'
    assert found.planned is None
    assert found.warnings == [
        "batch 7 was begun, and its file offsets/7 is missing or empty: its rows may be in the sink already"
    ]


@pytest.mark.parametrize(
    ("line", "version", "words"),
    [
        (at(5, since="v9"), "v1", "written by a newer natslog: the position of stream 'orders' has since"),
        (at(5) | {"offset": "5"}, "v1", "is damaged: stream 'orders'"),
        (at(-5), "v1", "is damaged: stream 'orders'"),
        (at(5), "v3", "format 'v3', and this natslog reads v1 and v2"),
    ],
)
def test_newer_formats_and_wrong_types_are_errors(tmp_path: Path, line: Any, version: str, words: str) -> None:
    write_batch(tmp_path, 0, {"orders": line}, version=version)
    with pytest.raises(ConfigError, match=words):
        read_spark_checkpoint(str(tmp_path))


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the checkpoint of a streaming query"):
        read_spark_checkpoint(str(tmp_path))
    (tmp_path / "file").write_text("x")
    for location in (str(tmp_path / "file"), str(tmp_path / "nowhere")):
        with pytest.raises(ConfigError, match="is not a folder"):
            read_spark_checkpoint(location)
    with pytest.raises(ConfigError, match="cannot be opened"):
        read_spark_checkpoint("nosuch://bucket/checkpoint")
    write_batch(tmp_path / "begun", 0, {"orders": at(5)}, committed=False)
    with pytest.raises(ConfigError, match="has committed no batch: begin its new checkpoint with the same"):
        read_spark_checkpoint(str(tmp_path / "begun"))
    write_batch(tmp_path / "begun", 4, {"orders": at(5)})
    write_batch(tmp_path / "begun", 5, {"orders": at(5)})
    with pytest.raises(ConfigError, match="batch 1 of .* is not committed; these are: 4 to 5"):
        read_spark_checkpoint(str(tmp_path / "begun"), 1)


def test_urls_are_read(tmp_path: Path) -> None:
    write_batch(tmp_path, 0, {"orders": at(5)})
    (source,) = read_spark_checkpoint(tmp_path.as_uri()).sources
    assert source.starting_offsets == '{"orders":5}'
