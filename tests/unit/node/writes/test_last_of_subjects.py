"""The newest message of a subject, where most messages are committed without this being asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from natslog.node.writes.last_of_subjects import LastOfSubjects
from tests.conftest import open_log, rows


def test_a_request_after_many_commits_reads_few_of_them(log_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain messages are committed without telling it."""
    log = open_log(log_folder)
    last = LastOfSubjects(log)
    log.append(rows([b"x"], "a.b"), 1)
    assert last.last_sequence("a.b") == 1
    monkeypatch.setattr("natslog.node.writes.last_of_subjects._ROWS_AT_MOST", 100)
    for _ in range(20):
        log.append(rows([b"x"] * 10, "c.d"), 1)
    read: list[tuple[int, int]] = []
    stored_rows = log.reader.stored_rows

    def noting(start: int, end: int, **settings: Any) -> Any:
        read.append((start, end))
        return stored_rows(start, end, **settings)

    monkeypatch.setattr(log.reader, "stored_rows", noting)
    assert last.last_sequence("a.b") == 1
    assert last.last_sequence("c.d") == 201
    assert sum(max(0, end - start) for start, end in read) <= 100
    log.close()
