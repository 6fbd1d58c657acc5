"""A leader plans a range although the start of the log moves meanwhile, as limits of a stream move it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from natslog.errors import OffsetOutOfRange
from natslog.log import LogOptions, ReplicaLog
from natslog.model import StreamSettings
from natslog.node.replicas import read_plans
from natslog.node.replicas.read_plans import _Cutting
from tests.conftest import rows


def log_of(folder: Path, count: int) -> ReplicaLog:
    log = ReplicaLog(folder, "a" * 32, StreamSettings(subject="orders"), LogOptions(min_free_bytes=0))
    for at in range(count):
        log.append(rows([b"%d" % at], "orders"), at + 1)
    return log


def cutting(start: int, end: int, max_rows: int | None) -> _Cutting:
    return _Cutting("a", start, end, max_rows, None, None, 1 << 20, 1)


def test_offsets_that_are_removed_after_they_were_stated_are_in_the_first_part(tmp_path: Path) -> None:
    log = log_of(tmp_path / "log", 20)
    log.limits.move_to(8)
    stream: Any = None
    (part,) = read_plans._cut(stream, log, cutting(2, 20, 5)).parts
    assert (part.start, part.end) == (2, 13), "five that are there, and those before that are lost"
    log.limits.move_to(20)
    (part,) = read_plans._cut(stream, log, cutting(2, 15, 5)).parts
    assert (part.start, part.end) == (2, 15), "nothing of it is left: the reader reports that"
    log.close()


def test_a_start_that_moves_with_every_look_does_not_end_the_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(tmp_path / "log", 20)
    splits = log.reader.splits

    def after_a_commit(start: int, end: int, **limits: Any) -> Any:
        log.limits.move_to(log.first_readable_offset + 1)
        return splits(start, end, **limits)

    monkeypatch.setattr(log.reader, "splits", after_a_commit)
    with pytest.raises(OffsetOutOfRange):
        after_a_commit(log.first_readable_offset, 20, max_bytes=None, max_rows=None, min_splits=1)
    stream: Any = None
    (part,) = read_plans._cut(stream, log, cutting(0, 20, 5)).parts
    assert (part.start, part.end) == (0, 20)
    log.close()
