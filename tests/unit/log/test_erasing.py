"""Erasure: no file of a log has the bytes of erased messages any more, and everything else is as it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from natslog.arrow import ipc
from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.arrow.schema import HEADERS_TYPE
from natslog.log import LogOptions, ReplicaLog
from natslog.log.erasing import ErasedOffsets, Erases, Erasures
from natslog.log.newest import NewestRows, Texts
from natslog.log.removed import offset_set, to_bytes
from natslog.log.rules import Rule
from natslog.model import Epoch
from tests.conftest import open_log

NOW_US = 1_700_000_000_000_000

Row = tuple[str, str | None, bytes]
"""Subject, key, value."""

ROWS: list[Row] = [
    ("a.anna", "key-anna", b"first of anna"),
    ("a.bob", "key-bob", b"first of bob"),
    ("a.anna", None, b"second of anna"),
    ("a.bob", "key-anna", b"about anna"),
    ("a.carl", "key-carl", b"first of carl"),
]


def buffers(rows: list[Row]) -> RowBuffers:
    headers = [[("Who", key)] if key else None for _, key, _ in rows]
    columns = [
        pa.array([subject for subject, _, _ in rows]),
        pa.array([None if key is None else key.encode() for _, key, _ in rows], pa.binary()),
        pa.array(headers, HEADERS_TYPE),
        pa.array([value for _, _, value in rows], pa.binary()),
    ]
    return RowBuffers.of(pa.RecordBatch.from_arrays(columns, schema=PAYLOAD_SCHEMA))


def stored(log: ReplicaLog) -> list[tuple[int, str, bytes | None, bytes]]:
    """All rows of the files, hidden ones too."""
    names = ("offset", "subject", "key", "value")
    batches = [batch for _, batch in log.reader.stored_rows(0, log.log_end_offset)]
    return [row for one in batches for row in zip(*(one.column(name).to_pylist() for name in names), strict=True)]


def in_files(folder: Path, text: bytes) -> list[str]:
    return [path.name for path in sorted(folder.rglob("*")) if path.is_file() and text in path.read_bytes()]


def erase(log: ReplicaLog, erases: Erases, offsets: set[int], name: str = "e1", below: int | None = None) -> None:
    """As the record of the companion log does it."""
    bitmap = offset_set(np.array(sorted(offsets), np.int64))
    record = ErasedOffsets(
        id=name,
        erases=erases,
        below=log.log_end_offset if below is None else below,
        requested_us=NOW_US,
        messages=len(offsets),
        offsets=to_bytes(bitmap),
    )
    again = ErasedOffsets.from_bytes(record.to_bytes(), "test")
    log.visibility.removed.record(again.bitmap("test"))
    log.erasures.add(again, "test")


def erase_all(log: ReplicaLog) -> None:
    """As maintenance does it."""
    if log.is_to_be_rolled:
        log.roll()
    while log.upkeep.seal_next():
        pass
    while log.upkeep.erase_next(NOW_US):
        pass


@pytest.fixture(params=["none", "zstd"])
def log(request: pytest.FixtureRequest, log_folder: Path) -> Iterator[ReplicaLog]:
    opened = open_log(log_folder, LogOptions(min_free_bytes=0), compression=request.param)
    for rows in (ROWS[:3], ROWS[3:]):
        opened.append(buffers(rows), NOW_US)
        opened.roll()
    yield opened
    opened.close()


def test_rows_of_a_subject_are_dropped_whole(log: ReplicaLog, log_folder: Path) -> None:
    erase(log, "subject", {0, 2})
    assert log.erasures.is_pending
    erase_all(log)
    assert not log.erasures.is_pending
    assert [row[0] for row in stored(log)] == [1, 3, 4]
    for text in (b"a.anna", b"of anna"):
        assert in_files(log_folder, text) == []
    known, receipt = log.erasures.receipt("e1") or pytest.fail("it is known")
    assert (known.messages, receipt.completed_us) == (2, NOW_US)
    assert [(file.name, file.rows) for file in receipt.files] == [("00000000000000000000.arrow", 2)]
    assert receipt.files[0].bytes_after == (log_folder / receipt.files[0].name).stat().st_size


def test_rows_with_a_key_keep_what_counts_and_lose_all_else(log: ReplicaLog, log_folder: Path) -> None:
    erase(log, "key", {0, 3})
    erase_all(log)
    assert stored(log)[0] == (0, "a.anna", None, b"")
    assert stored(log)[3] == (3, "a.bob", None, b"")
    assert [row[0] for row in stored(log)] == [0, 1, 2, 3, 4]
    for text in (b"key-anna", b"first of anna", b"about anna"):
        assert in_files(log_folder, text) == []
    assert b"second of anna" in {row[3] for row in stored(log)}
    log.upkeep.rewrite_next(2**60)
    assert [row[0] for row in stored(log)] == [1, 2, 3, 4], "rewriting drops them as all removed ones"


def test_few_rows_and_recent_ones_are_erased_at_once(log_folder: Path) -> None:
    """Rewriting in the ordinary course waits for an eighth of a segment, and for the deduplication window."""
    log = open_log(log_folder)
    log.append(buffers([("a", None, b"%d" % at) for at in range(100)] + [("b", None, b"secret")]), NOW_US)
    erase(log, "subject", {100})
    assert log.is_to_be_rolled
    assert log.is_roll_due(NOW_US)
    assert not log.upkeep.erase_next(NOW_US), "an open segment is rolled first"
    assert log.erasures.is_pending
    log.roll()
    log.upkeep.seal_next()
    assert not log.upkeep.rewrite_next(2**60)
    erase_all(log)
    assert in_files(log_folder, b"secret") == []
    assert not log.erasures.is_pending
    log.close()


def test_a_replica_that_is_behind_waits_for_the_messages(log: ReplicaLog) -> None:
    erase(log, "subject", {0, 7}, below=8)
    erase_all(log)
    assert stored(log)[0][0] == 1
    assert log.erasures.is_pending
    log.append(buffers([("x", None, b"5"), ("x", None, b"6"), ("b", None, b"secret")]), NOW_US)
    erase_all(log)
    assert not log.erasures.is_pending
    assert [row[0] for row in stored(log)][-1] == 6


def test_a_part_that_is_fetched_again_is_checked_again(log: ReplicaLog, log_folder: Path) -> None:
    erase(log, "subject", {3})
    erase_all(log)
    assert not log.erasures.is_pending
    log.discard_from(3)
    assert log.erasures.is_pending
    log.append(buffers(ROWS[3:]), NOW_US)
    log.chain.committed = 5
    erase_all(log)
    assert in_files(log_folder, b"about anna") == []
    assert not log.erasures.is_pending


def test_a_restart_continues_and_keeps_the_receipt(log: ReplicaLog, log_folder: Path) -> None:
    erase(log, "subject", {0, 3})
    log.upkeep.seal_next()
    assert log.upkeep.erase_next(NOW_US)
    assert in_files(log_folder, b"about anna"), "the other segment is not done yet"
    log.close()
    again = open_log(log_folder)
    erase(again, "subject", {0, 3})
    assert again.erasures.is_pending
    erase_all(again)
    assert in_files(log_folder, b"about anna") == []
    _, receipt = again.erasures.receipt("e1") or pytest.fail("it is known")
    assert [file.name for file in receipt.files] == ["00000000000000000000.arrow", "00000000000000000003.arrow"]
    again.close()
    third = open_log(log_folder)
    erase(third, "subject", {0, 3})
    assert not third.erasures.is_pending
    third.close()


def test_a_crash_between_the_receipt_and_the_file_leaves_the_old_file_and_is_repeated(
    log: ReplicaLog, log_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    erase(log, "subject", {0})
    log.upkeep.seal_next()

    def crash(*_: object) -> None:
        raise OSError("the power is gone")

    monkeypatch.setattr(os, "replace", _first_of(os.replace, crash, ".arrow"))
    with pytest.raises(OSError, match="power"):
        log.upkeep.erase_next(NOW_US)
    monkeypatch.undo()
    again = open_log(log_folder)
    erase(again, "subject", {0}, below=5)
    erase_all(again)
    assert in_files(log_folder, b"first of anna") == []
    _, receipt = again.erasures.receipt("e1") or pytest.fail("it is known")
    assert len(receipt.files) == 1
    again.close()


def _first_of(real: Callable[..., None], crash: Callable[..., None], suffix: str) -> Callable[..., None]:
    return lambda source, target: (crash if str(target).endswith(suffix) else real)(source, target)


def test_an_erasure_that_arrives_meanwhile_is_not_complete_with_the_first(log: ReplicaLog, log_folder: Path) -> None:
    erase(log, "subject", {0})
    while log.upkeep.seal_next():
        pass
    rows = log.erasures.pending()
    assert rows is not None
    erase(log, "subject", {4}, "e2")
    assert not log.erasures.complete(rows, NOW_US)
    erase_all(log)
    assert in_files(log_folder, b"first of carl") == []
    assert not log.erasures.is_pending


def test_a_further_record_of_a_complete_erasure_is_not_complete(log: ReplicaLog, log_folder: Path) -> None:
    """A large erasure has several records, which are delivered one after another."""
    erase(log, "subject", {0})
    erase_all(log)
    assert not log.erasures.is_pending
    erase(log, "subject", {4})
    assert log.erasures.is_pending
    erase_all(log)
    assert in_files(log_folder, b"first of carl") == []
    log.close()
    again = open_log(log_folder)
    erase(again, "subject", {0})
    erase(again, "subject", {4})
    assert not again.erasures.is_pending, "a restart does not repeat it"
    again.close()


def test_texts_of_erased_rows_are_in_no_table(log_folder: Path) -> None:
    log = open_log(log_folder)
    log.visibility.set_rules((Rule(Epoch(0), 2, compacts=True),), 0)
    log.append(buffers([*ROWS, ("a.bob", "key-bob", b"second of bob")]), NOW_US)
    log.upkeep.apply_rules()
    log.visibility.store(0, at_least=1)
    in_table = open_log(log_folder).visibility
    assert list(in_table.offsets_of_texts("subject", _equal(b"a.anna"))) == [0, 2]
    assert list(in_table.offsets_of_texts("key", _equal(b"key-anna"))) == [3]
    log.visibility.removed.record(log.visibility.removed.derived(0, 6))
    erase(log, "subject", {0, 2})
    erase_all(log)
    subjects = log.visibility.offsets_of_texts("subject", _all)
    assert set(subjects) == {3, 4, 5}
    assert not log.visibility.offsets_of_texts("subject", _equal(b"a.anna"))
    assert set(log.visibility.offsets_of_texts("key", _all)) == {3, 4, 5}
    log.close()


def _equal(text: bytes) -> Callable[[pa.Array], np.ndarray]:
    return lambda texts: pc.equal(texts, pa.scalar(text, pa.binary())).to_numpy(zero_copy_only=False)


def _all(texts: pa.Array) -> np.ndarray:
    return np.ones(len(texts), np.bool_)


@pytest.mark.parametrize("limit", [1, 3])
def test_a_table_without_some_texts_is_as_if_they_had_not_been(limit: int) -> None:
    whole, rest = NewestRows(limit), NewestRows(limit)
    texts = [f"s.{at % 7}" for at in range(60)]
    whole.add(Texts.of(pa.array(texts)), np.arange(60))
    gone = {0, 3}
    kept = np.array([at for at in range(60) if at % 7 not in gone])
    rest.add(Texts.of(pa.array([texts[at] for at in kept])), kept)
    erased = offset_set(np.array([at for at in range(60) if at % 7 in gone]))
    found = whole.without(erased)
    assert len(found) == 5
    for text in set(texts):
        assert found.queue_of(text) == rest.queue_of(text)
    assert whole.without(offset_set(np.array([0, 7]))) is whole, "they have newer rows"
    more = np.arange(60, 70)
    same = [Texts.of(pa.array([f"s.{at % 7}" for at in more])) for _ in range(2)]
    assert found.add(same[0], more).tolist() == rest.add(same[1], more).tolist()


def test_records_of_old_erasures_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natslog.log.erasing._MOST_RECEIPTS", 2)
    erasures = Erasures(tmp_path)
    for at in range(5):
        record = ErasedOffsets(
            id=f"e{at}",
            erases="key" if at == 1 else "subject",
            below=10 + at,
            requested_us=NOW_US,
            messages=1,
            offsets=to_bytes(offset_set(np.array([at]))),
        )
        erasures.add(record, "test")
    again = Erasures(tmp_path)
    for data in erasures.records():
        again.add(ErasedOffsets.from_bytes(data, "test"), "test")
    assert again.receipt("e1") is None
    assert again.receipt("e4") is not None
    rows = again.pending()
    assert rows is not None
    assert (set(rows.dropped), set(rows.emptied), rows.below) == ({0, 2, 3, 4}, {1}, 14)


def test_message_without_contents_keeps_the_rows_beside(log: ReplicaLog) -> None:
    with log.reader.plan_read(0, max_bytes=1 << 20, uncommitted=True) as plan:
        message = plan.messages()[0]
    emptied = ipc.without_contents(message, np.array([True, False, False]))
    header = ipc.proven_header(emptied[: ipc.MAX_HEADER_BYTES])
    assert header is not None
    assert (header.rows, header.has_gaps) == (3, False)
    before, after = ipc.decode_batch(message), ipc.decode_batch(emptied)
    assert after[1:].to_pylist() == before[1:].to_pylist()
    assert b"key-anna" not in bytes(emptied)
