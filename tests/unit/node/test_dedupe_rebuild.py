"""The deduplication window rebuilt from the log: all ids that can be read, and a word of those that cannot."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from natslog.ingest.dedupe import NEW, DedupeWindow, ids_of_headers
from natslog.log import LogOptions
from natslog.log.sealed import _INDEX_TEXT
from natslog.node.clock import monotonic_us, now_us
from natslog.node.dedupe_rebuild import rebuilt_dedupe
from natslog.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.schema import HEADERS_TYPE
from tests.conftest import open_log

SMALL = LogOptions(segment_bytes=4096, min_free_bytes=0)
BATCHES, ROWS = 30, 10


def headers_of(batch: int) -> pa.Array:
    return pa.array([[{"key": "Nats-Msg-Id", "value": f"{batch}.{row}"}] for row in range(ROWS)], HEADERS_TYPE)


@pytest.fixture
def log(log_folder: Path):
    log = open_log(log_folder, SMALL)
    for at in range(BATCHES):
        columns = [pa.array(["a"] * ROWS), pa.nulls(ROWS, pa.binary()), headers_of(at), pa.array([b"v" * 50] * ROWS)]
        log.append(RowBuffers.of(pa.RecordBatch.from_arrays(columns, schema=PAYLOAD_SCHEMA)), now_us())
    while log.seal_next():
        pass
    yield log
    log.close()


def known(window: DedupeWindow) -> list[int]:
    """The batches all of whose ids the window knows."""
    found = []
    for at in range(BATCHES):
        ids = ids_of_headers(headers_of(at))
        assert ids is not None
        offsets = window.find(ids, monotonic_us())
        if (offsets != NEW).all():
            assert offsets.tolist() == list(range(at * ROWS, (at + 1) * ROWS))
            found.append(at)
    return found


def test_whole_log_is_remembered(log) -> None:
    window, damage = rebuilt_dedupe(60.0, log)
    assert damage is None
    assert known(window) == list(range(BATCHES))


def test_nothing_is_remembered_without_a_window(log) -> None:
    window, damage = rebuilt_dedupe(0.0, log)
    assert damage is None
    assert known(window) == []


@pytest.mark.parametrize("where", ["footer", "header", "body"])
def test_what_lies_behind_damage_is_remembered_and_the_damage_is_told(log, where: str) -> None:
    segment = log.chain.segments[2]
    assert segment.path.suffix == ".arrow"
    base, end, positions = segment.base_offset, segment.end_offset, list(segment.index.positions)
    content = bytearray(segment.path.read_bytes())
    index_text = list(_INDEX_TEXT.finditer(bytes(content)))[-1]
    at = {"footer": sum(index_text.span()) // 2, "header": positions[0] + 20, "body": positions[0] + 1200}[where]
    content[at] ^= 4
    segment.path.write_bytes(bytes(content))
    segment.forget()
    window, damage = rebuilt_dedupe(60.0, log)
    assert damage is not None
    assert segment.path.name in damage.message
    remembered = known(window)
    missing = sorted(set(range(BATCHES)) - set(remembered))
    assert missing, "the damage hides some"
    assert base // ROWS <= missing[0]
    assert missing[-1] <= (end - 1) // ROWS, "of the damaged segment only"


def test_ids_out_of_the_window_are_left_out(log, monkeypatch: pytest.MonkeyPatch) -> None:
    later = now_us() + 3_600_000_000
    monkeypatch.setattr("natslog.node.dedupe_rebuild.now_us", lambda: later)
    window, _ = rebuilt_dedupe(60.0, log)
    assert known(window) == []
