"""Of which parts an answer consists; a reader that leaves while one is planned leaves no open file behind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from natslog.arrow import ipc
from natslog.http import answer_parts
from natslog.http.answer_parts import Question, _held
from natslog.log import FileRange, LogOptions, ReadPlan
from natslog.log.batch_encoder import EncodedBatch
from natslog.log.batch_index import BatchEntry, BatchIndex
from natslog.log.removed import offset_set
from tests.conftest import open_log
from tests.unit.wire.test_small_batches import singles


def test_plan_that_comes_after_the_client_left_is_closed(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)

    async def leave_early() -> None:
        planning: asyncio.Future[ReadPlan] = asyncio.get_running_loop().create_future()
        handler = asyncio.create_task(_held(planning))
        await asyncio.sleep(0)
        handler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handler
        plan = ReadPlan(0)
        plan.ranges.append(FileRange(fd, tmp_path / "file", BatchIndex(), 0, 0))
        planning.set_result(plan)
        await asyncio.sleep(0)

    asyncio.run(leave_early())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def _log_of_singles(folder: Path, count: int) -> Any:
    log = open_log(folder, LogOptions(min_free_bytes=0))
    messages = singles(count)
    for start in range(0, count, 500):
        some = messages[start : start + 500]
        log.append_copies([EncodedBatch(ipc.proven_header(one), [one]) for one in some])  # type: ignore[arg-type]
    return log


def _parts(log: Any, asked: Question) -> list[tuple[int, int, bool]]:
    """Of an answer to all of it: each part's offsets, and whether it is rewritten."""
    stream: Any = SimpleNamespace(usable_log=lambda: log)
    found, start = [], 0
    while start < log.high_watermark:
        with answer_parts._plan(stream, asked, start, None) as plan:
            found.append((start, plan.next_offset, answer_parts._rewrites(plan, asked, projects=False)))
            start = plan.next_offset
    return found


def test_small_batches_with_hidden_rows_among_them_are_one_part(tmp_path: Path) -> None:
    """What hides rows makes a plan of many ranges, which are not parts of their own: every second one had no row."""
    log = _log_of_singles(tmp_path / "log", 6000)
    log.visibility.removed.record(offset_set(np.arange(300, 6000, 300, dtype=np.int64)))
    asked = Question(0, None, 16 << 20, 0, None, None, False, True)
    assert _parts(log, asked) == [(0, 6000, True)]
    log.close()


def test_small_batches_are_rewritten_also_where_more_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("natslog.log.batch_index._MOST_BATCHES", 1 << 30)  # as an earlier version left them
    log = _log_of_singles(tmp_path / "log", 16_000)
    assert log.chain.segments[-1].size_bytes > 16 << 20
    parts = _parts(log, Question(0, None, 32 << 20, 0, None, None, False, False))
    assert [is_rewritten for *_, is_rewritten in parts] == [True] * len(parts)
    assert 2 <= len(parts) <= 3
    log.close()


def test_plan_that_begins_with_one_batch_that_is_too_large_ends_behind_it(tmp_path: Path) -> None:
    """It ended with IndexError where hundreds of small files followed."""

    def one_range(base: int, length: int) -> FileRange:
        index = BatchIndex()
        index.append(BatchEntry(base, base + 1, 1, 24, length, 0))
        return FileRange(os.open(os.devnull, os.O_RDONLY), tmp_path, index, 0, 1)

    with ReadPlan(0) as plan:
        plan.ranges = [one_range(0, 9 << 20), *(one_range(base, 1200) for base in range(1, 800))]
        plan.next_offset = 800
        answer_parts._limit_to_alike(plan)
        assert (plan.batches, plan.next_offset) == (1, 1)
