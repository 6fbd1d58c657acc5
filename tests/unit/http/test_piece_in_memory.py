"""Answers of the last small commits: the same rows as from files, and no file is opened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from natslog.http.answer_parts import Piece, Question, make_piece, piece_in_memory
from natslog.log.log_reader import LogReader
from natslog.log.removed import offset_set
from natslog.node.replicas.stream import HostedStream
from tests.conftest import rows
from tests.unit.node.replicas.replica_stage import ME, ReplicaStage, record_of, run

ALL = Question(start=0, end=None, max_bytes=1 << 20, wait_ms=0, subject=None, columns=None, ndjson=False, exact=False)


def commit(stream: HostedStream, *values: bytes, subject: str = "orders.a") -> None:
    log = stream.usable_log()
    log.append(rows(list(values), subject=subject), 1_000_000)
    stream.driver.appended(log.log_end_offset)


@contextmanager
def without_files() -> Iterator[None]:
    def failing(*_: object, **__: object) -> None:
        raise AssertionError("files are planned to be read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogReader, "plan_read", failing)
        yield


def shown(asked: Question, piece: Piece | None) -> object:
    assert piece is not None
    if asked.ndjson:
        return [json.loads(line) for line in piece.body.splitlines()]
    return pa.ipc.open_stream(asked.opening + piece.body + asked.ending).read_all().to_pylist()


def with_commits(folder: Path, commits: int, story: object) -> None:
    async def told(stage: ReplicaStage) -> None:
        stream = await stage.host(record_of("orders", replicas=(ME,), isr=(ME,), holders=()))
        await stage.change(stream, holders=(ME,))
        commit(stream, b"before")
        stream.usable_log().recent.stored(0, 1)  # a reader has come
        for at in range(commits):
            commit(stream, b"%d" % at, b"x", subject="orders.a" if at % 3 else "orders.b")
        story(stream)  # type: ignore[operator]
        await stream.driver.stop()

    run(folder, told)


@pytest.mark.parametrize("commits", [3, 60])
@pytest.mark.parametrize(
    "asked",
    [
        ALL,
        replace(ALL, exact=True),
        replace(ALL, max_bytes=None),
        replace(ALL, columns=("offset", "value")),
        replace(ALL, subject="orders.b"),
        replace(ALL, ndjson=True),
        replace(ALL, allowed=("orders.a",), exact=True),
    ],
)
def test_rows_are_those_of_the_files(tmp_path: Path, asked: Question, commits: int) -> None:
    def story(stream: HostedStream) -> None:
        log = stream.usable_log()
        for start, end in ((1, log.log_end_offset), (3, log.log_end_offset), (1, 5)):
            with without_files():
                from_memory = piece_in_memory(stream, asked, start, end)
                assert make_piece(stream, asked, start, end) == from_memory
            assert from_memory is not None
            assert (from_memory.start, from_memory.end, from_memory.removed_rows) == (start, end, 0)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("natslog.http.answer_parts.piece_in_memory", lambda *_: None)
                from_files = make_piece(stream, asked, start, end)
            assert shown(asked, from_memory) == shown(asked, from_files)

    with_commits(tmp_path, commits, story)


def test_what_is_not_in_memory_or_hidden_or_too_large_is_read_from_files(tmp_path: Path) -> None:
    def story(stream: HostedStream) -> None:
        log = stream.usable_log()
        end = log.log_end_offset
        assert piece_in_memory(stream, ALL, 1, end) is not None
        assert piece_in_memory(stream, ALL, 0, end) is None, "it was committed before it was asked for"
        assert piece_in_memory(stream, ALL, 2, end) is None, "it begins inside of a commit"
        assert piece_in_memory(stream, ALL, end, end) is None
        assert piece_in_memory(stream, replace(ALL, max_bytes=100), 1, end) is None
        log.visibility.removed.record(offset_set(np.array([3], np.int64)))
        assert piece_in_memory(stream, ALL, 1, end) is None
        assert piece_in_memory(stream, ALL, 5, end) is not None
        log.recent.clear()
        assert piece_in_memory(stream, ALL, 5, end) is None

    with_commits(tmp_path, 5, story)
