"""Sizes of messages as JetStream counts them: by the headers of stored batches, and message by message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.log import LogOptions, ReplicaLog
from natslog.log.removed import offset_set
from natslog.model import JetStreamSettings
from tests.conftest import open_log

HEADERS = st.one_of(st.none(), st.lists(st.tuples(st.text("ab", max_size=3), st.text("cä", max_size=4)), max_size=3))
ROWS = st.lists(st.tuples(st.sampled_from(["orders.a", "orders.bcd"]), HEADERS, st.binary(max_size=30)), min_size=1)


def size(subject: str, headers: list[tuple[str, str]] | None, value: bytes, storage: str) -> int:
    """As the server computes it."""
    block = b"" if headers is None else b"NATS/1.0\r\n%b\r\n" % "".join(f"{k}: {v}\r\n" for k, v in headers).encode()
    if storage == "memory":
        return len(subject) + len(block) + len(value) + 16
    return 22 + len(subject) + (4 + len(block) if block else 0) + len(value) + 8


def buffers(rows: list[Any]) -> RowBuffers:
    pairs = [None if headers is None else [{"key": k, "value": v} for k, v in headers] for _, headers, _ in rows]
    columns = {
        "subject": [subject for subject, _, _ in rows],
        "key": [None] * len(rows),
        "headers": pairs,
        "value": [value for _, _, value in rows],
    }
    return RowBuffers.of(pa.RecordBatch.from_pydict(columns, schema=PAYLOAD_SCHEMA))


def filled(folder: Path, commits: list[list[Any]], compression: str, storage: str) -> ReplicaLog:
    """Sealed in the middle."""
    options = LogOptions(min_free_bytes=0)
    jetstream = JetStreamSettings(storage=storage)  # type: ignore[arg-type]
    log = open_log(folder, options, compression=compression, jetstream=jetstream)
    for at, rows in enumerate(commits):
        log.append(buffers(rows), 1 + at)
        if at == len(commits) // 2:
            log.roll()
            log.upkeep.seal_next()
    return log


@pytest.mark.long
@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("storage", ["file", "memory"])
def test_total_is_that_of_each_visible_message(
    tmp_path_factory: pytest.TempPathFactory, compression: str, storage: str
) -> None:
    @settings(max_examples=30, deadline=None)
    @given(commits=st.lists(ROWS, min_size=1, max_size=5), data=st.data())
    def compared(commits: list[list[Any]], data: st.DataObject) -> None:
        log = filled(tmp_path_factory.mktemp("log") / "log", commits, compression, storage)
        sizes = [size(*row, storage) for rows in commits for row in rows]
        end = len(sizes)
        assert log.message_bytes.total(0, end) == sum(sizes)
        hidden = data.draw(st.sets(st.integers(0, end - 1)))
        log.visibility.removed.record(offset_set(pa.array(sorted(hidden), pa.int64()).to_numpy()))
        visible = [0 if at in hidden else one for at, one in enumerate(sizes)]
        for _ in range(3):
            start = data.draw(st.integers(0, end))
            stop = data.draw(st.integers(start, end))
            assert log.message_bytes.total(start, stop) == sum(visible[start:stop])
        most = data.draw(st.integers(0, sum(visible)))
        first = log.message_bytes.start_within(0, end, most)
        assert sum(visible[first:]) <= most
        assert first == 0 or sum(visible[first - 1 :]) > most
        log.close()

    compared()


def test_total_follows_what_is_appended_and_rewritten(tmp_path: Path) -> None:
    row = ("orders.a", [("k", "v")], b"value")
    log = filled(tmp_path / "log", [[row] * 3, [row]], "none", "file")
    assert log.message_bytes.total(0, 4) == 4 * size(*row, "file")
    log.append(buffers([row] * 2), 9)
    assert log.message_bytes.total(0, 6) == 6 * size(*row, "file")
    log.visibility.removed.record(offset_set(pa.array([1, 4]).to_numpy()))
    assert log.message_bytes.total(0, 6) == 4 * size(*row, "file")
    while log.upkeep.rewrite_next(2**62):
        pass
    assert log.message_bytes.total(0, 6) == 4 * size(*row, "file")
    log.close()


def test_total_after_batches_were_cut_off_and_others_have_taken_their_places(tmp_path: Path) -> None:
    small, large = ("orders.a", None, b"v"), ("orders.a", None, b"v" * 25)
    log = filled(tmp_path / "log", [[small]], "none", "file")
    for at in range(4):
        log.append(buffers([small]), 10 + at)
    assert log.message_bytes.total(0, 5) == 5 * size(*small, "file")
    log.discard_from(2)
    for at in range(3):
        log.append(buffers([large]), 20 + at)
    assert log.message_bytes.total(0, 5) == 2 * size(*small, "file") + 3 * size(*large, "file")
    log.close()
