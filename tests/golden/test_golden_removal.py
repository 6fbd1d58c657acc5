"""Golden files of removed messages, of the index of subjects and of cursors, made once by `make_removal.py`: they are
read for ever, and the same content is written as the same bytes.
"""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyroaring import BitMap64

from natslog.arrow import ipc
from natslog.backup.importing import checked_export
from natslog.backup.manifest import MANIFEST, write_manifest
from natslog.backup.removals import Removed, without_removed
from natslog.log import LogOptions, StreamLog, subject_part
from natslog.log.checked_file import read_checked
from natslog.log.erasing import ErasedOffsets, Erasures, LogReceipt, RewrittenFile
from natslog.log.scrub import ScrubProgress
from natslog.log.subject_part import SubjectPart
from natslog.log.verify import check_file
from natslog.log.visibility import Visibility
from natslog.model import StreamSettings
from natslog.node.internal.cursor_leader import table_of
from natslog.node.replicas.companion_records import read_records
from tests.golden import make_removal
from tests.golden.make import FIRST_US, STREAM_ID
from tests.golden.make_removal import (
    BY_KEY,
    BY_SUBJECT,
    CURSOR_ROWS,
    CURSORS,
    EXPORT_REMOVED,
    NEWEST_ROWS,
    NEWEST_RULES,
    SPREAD,
    SUBJECT_IDENTITY,
)

HERE = Path(__file__).parent
NEW = sorted(
    str(path.relative_to(HERE))
    for pattern in ("companion-*", "cursors-*", "erasures-*", "export-v1-removals/*", "scrub-*", "subjects-*")
    for path in HERE.glob(pattern)
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden files as they are written today."""
    folder = tmp_path_factory.mktemp("written")
    make_removal.make(folder)
    return folder


def log_of(golden: str, folder: Path) -> StreamLog:
    """Of one segment."""
    path = folder / f"{0:020d}.{golden.rpartition('.')[2]}"
    shutil.copy(HERE / golden, path)
    assert not check_file(path).problems
    log = StreamLog(folder, STREAM_ID, StreamSettings(subject="x"), LogOptions(min_free_bytes=0))
    assert log.failure is None
    return log


@pytest.mark.parametrize("file", NEW)
def test_same_content_is_written_as_the_same_bytes(file: str, written: Path) -> None:
    assert (written / file).read_bytes() == (HERE / file).read_bytes()


def test_every_file_that_is_made_is_golden(written: Path) -> None:
    made = {str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()}
    assert made == {*NEW, "newest-v1"}


@pytest.mark.parametrize("suffix", ["active", "arrow"])
def test_companion_records_are_read(suffix: str, tmp_path: Path) -> None:
    log = log_of(f"companion-v1.{suffix}", tmp_path)
    records, end = read_records(log, 0, log.log_end_offset)
    assert end == 5
    assert [(offset, kind) for offset, kind, _ in records] == [
        (0, "removed"), (1, "rules"), (2, "erased"), (3, "erased"), (4, "removed"),
    ]  # fmt: skip
    values = [value for _, _, value in records]
    assert BitMap64.deserialize(values[0]) == SPREAD
    assert int(values[1]) == 12
    assert [ErasedOffsets.from_bytes(one, "golden") for one in values[2:4]] == [BY_SUBJECT, BY_KEY]
    assert BitMap64.deserialize(values[4]) == BitMap64([7])
    fields = msgspec.msgpack.decode(values[2])
    assert BitMap64.deserialize(fields.pop("offsets")) == BitMap64([5, 6, 70])
    assert fields == {"id": "5ec0de", "erases": "subject", "below": 90, "requested_us": FIRST_US, "messages": 3}


def test_a_removed_record_has_the_portable_format_of_roaring_bitmaps(tmp_path: Path) -> None:
    """The record is read without the library: https://github.com/RoaringBitmap/RoaringFormatSpec, 64 bits."""
    (_, _, value), *_ = read_records(log_of("companion-v1.active", tmp_path), 4, 5)[0]
    header = [(1).to_bytes(8, "little"), bytes(4)]  # one bitmap of 32 bits, whose offsets begin with 0
    cookie, count = (12346).to_bytes(4, "little"), (1).to_bytes(4, "little")
    container = [bytes(2), bytes(2), (16).to_bytes(4, "little"), (7).to_bytes(2, "little")]
    assert value == b"".join([*header, cookie, count, *container])


@pytest.fixture
def newest(tmp_path: Path) -> Visibility:
    """As it was stored; it has no log of which it could be made again."""
    shutil.copy(HERE / "newest-v1", tmp_path / "newest")
    found = Visibility(tmp_path)
    found.open(0, len(NEWEST_ROWS))
    return found


def test_newest_is_taken_over(newest: Visibility) -> None:
    assert (newest.applied, newest.rules, newest.rules_version) == (8, NEWEST_RULES, 3)
    assert sorted(newest.removed.all) == [0, 1, 5]
    standing = newest.standing(0, ["s.a", "s.b", "s.c", "s.d"], [b"k1", b"k2", b"k3", b"k4", b"k5", b"k6"])
    assert standing.visible == 5
    assert standing.of_subject == {"s.a": [2, 3], "s.b": [1, 4], "s.c": [6, 7], "s.d": []}
    assert standing.of_key == {b"k1": [3], b"k2": [2], b"k3": [5], b"k4": [6], b"k5": [7], b"k6": []}
    hidden, upto = newest.hidden_as_of(8)
    assert (sorted(hidden), upto) == ([0, 1, 5], 8)
    visible, _ = newest.newest_only(8, 0)
    assert sorted(visible) == [2, 3, 6, 7]


def test_newest_has_what_the_documentation_states() -> None:
    content = read_checked(HERE / "newest-v1", "newest", 1)
    assert content is not None
    tables = {name: content.pop(name) for name in ("subjects", "keys")}
    texts = {name: base64.b64decode(table["texts"]) for name, table in tables.items()}
    assert texts == {"subjects": b"s.as.bs.c", "keys": b"k1k2k3k4k5"}
    assert {name: table["limit"] for name, table in tables.items()} == {"subjects": 2, "keys": 1}
    bitmaps = {
        name: list(BitMap64.deserialize(base64.b64decode(content.pop(name))))
        for name in ("own_ttl", "tombstones", "settled", "derived")
    }
    assert bitmaps == {"own_ttl": [], "tombstones": [], "settled": [4], "derived": [0, 1, 5]}
    assert without_expiries(content) == {
        "applied": 8,
        "rules": [[0, 1, False, False], [1, 2, True, True]],
        "at": 1,
        "rules_version": 3,
        "indexes_subjects": True,
    }


def test_newest_of_the_same_rows_is_written_the_same(written: Path) -> None:
    now, golden = (read_checked(folder / "newest-v1", "newest", 1) for folder in (written, HERE))
    assert without_expiries(now) == without_expiries(golden)


def without_expiries(content: Any) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name not in ("expiry", "expiries", "expiries_ms")}


def test_erasures_v1_are_read(tmp_path: Path) -> None:
    shutil.copy(HERE / "erasures-v1", tmp_path / "erasures")
    erasures = Erasures(tmp_path)
    for record in (BY_SUBJECT, BY_KEY):
        erasures.add(record, "golden")
    names = [f"{0:020d}.arrow", f"{60:020d}.arrow"]
    files = [
        RewrittenFile(name=name, bytes_before=4096, bytes_after=2048, rows=2, at_us=FIRST_US + 1) for name in names
    ]
    last = RewrittenFile(name=names[0], bytes_before=2048, bytes_after=1024, rows=1, at_us=FIRST_US + 3)
    receipts = [found[1] for one in ("5ec0de", "5ec0df") if (found := erasures.receipt(one)) is not None]
    assert receipts == [LogReceipt(files=files, completed_us=FIRST_US + 2, offsets=3), LogReceipt(files=[last])]
    rows = erasures.pending()
    assert rows is not None
    assert (rows.ids, sorted(rows.emptied), sorted(rows.dropped)) == (("5ec0df",), [8], []), "the other one is complete"


def test_scrub_v1_is_read(tmp_path: Path) -> None:
    shutil.copy(HERE / "scrub-v1", tmp_path / "scrub")
    progress = ScrubProgress(tmp_path)
    assert (progress.is_running, progress.completed_us) == (True, FIRST_US + 5)
    assert (progress.damaged, progress.lost) == (((0, 0), (2, 3)), ((0, 1),))
    assert progress.share(0) == pytest.approx(1 / 3)
    stored = read_checked(HERE / "scrub-v1", "scrub", 1)
    assert stored is not None
    assert (stored["began_us"], stored["next_offset"], stored["end_offset"]) == (FIRST_US + 10, 1, 3)
    progress.store()
    assert (tmp_path / "scrub").read_bytes() == (HERE / "scrub-v1").read_bytes()


def test_subjects_v1_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject_part, "file_identity", lambda segment: SUBJECT_IDENTITY)
    part = SubjectPart.stored(HERE / "subjects-v1.arrow", 10, 15)
    assert part is not None
    assert part.subjects.to_pylist() == ["orders.grün", "orders.new"]
    assert part.offsets_of("orders.grün".encode(), 10, 15).tolist() == [11]
    assert part.offsets_of(b"orders.new", 10, 14).tolist() == [10, 13]
    assert SubjectPart.stored(HERE / "subjects-v1.arrow", 10, 16) is None
    monkeypatch.setattr(subject_part, "file_identity", lambda segment: b"18.4711.1800000000000000000")
    assert SubjectPart.stored(HERE / "subjects-v1.arrow", 10, 15) is None, "of another file"


def test_subjects_v1_are_as_documented() -> None:
    from crc32c import crc32c

    data = (HERE / "subjects-v1.subjects").read_bytes()
    line, content = data[:128], data[128:]
    facts = f"segment=17.4711.{1_800_000_000 * 10**9} offsets=10-15 bytes={len(content)} crc32c={crc32c(content):08x}"
    assert line == f"natslog subjects v1 {facts}".encode().ljust(127) + b"\n"
    source = pa.BufferReader(content)
    tables = [pa.ipc.open_stream(source).read_all().to_pydict() for _ in range(2)]
    assert tables == [{"subject": ["orders.grün", "orders.new"], "end": [1, 4]}, {"row": [1, 0, 3, 4]}]


def test_cursors_v1_are_read(tmp_path: Path) -> None:
    log = log_of("cursors-v1.active", tmp_path)
    table = table_of(log, log.log_end_offset)
    assert (table.cursors, table.rows) == (CURSORS, 5)
    assert all(table.was_made(f"request-{at}") for at in range(3))
    assert not table.was_made("request-3")
    with log.reader.plan_read(0, max_bytes=1 << 20) as plan:
        rows = pa.Table.from_batches(map(ipc.decode_batch, plan.messages())).to_pylist()
    assert [row["key"].decode() for row in rows] == [key for commit in CURSOR_ROWS for key, _ in commit]
    assert {row["subject"] for row in rows} == {"cursors.changed"}
    assert json.loads(rows[1]["value"]) == {
        "cursor": {
            "consumer": "reader",
            "stream": "orders",
            "stream_id": STREAM_ID,
            "offset": 7,
            "set_us": 2,
            "rewound_from": 40,
            "rewound_us": 2,
        },
        "request": "request-1",
    }
    assert json.loads(rows[2]["value"])["cursor"]["owner"] == "team-a"
    assert json.loads(rows[4]["value"]) == {}


def test_export_v1_with_removals_is_read(tmp_path: Path) -> None:
    folder = HERE / "export-v1-removals"
    manifest = checked_export(folder)
    assert (manifest.name, manifest.rows, manifest.end_offset) == ("orders", 3, 6)
    assert [(one.name, one.rows, one.messages) for one in manifest.files] == [
        (f"{0:020d}.arrow", 2, 1), (f"{2:020d}-1.arrow", 1, 1), (f"{5:020d}.arrow", 1, 1),
    ]  # fmt: skip
    removed = Removed.of(manifest.removals, "golden")
    assert removed == EXPORT_REMOVED
    imported = [
        row
        for file in manifest.files
        for _, message in without_removed(folder, manifest, file, removed.removed)
        for row in ipc.decode_batch(message).to_pylist()
    ]
    assert [(row["offset"], row["subject"], row["key"], row["value"]) for row in imported] == [
        (0, "orders.bob", None, b"0"), (4, "orders.bob", None, b"4"), (5, "orders.bob", None, b"5"),
    ]  # fmt: skip
    write_manifest(tmp_path / MANIFEST, manifest)
    assert (tmp_path / MANIFEST).read_bytes() == (folder / MANIFEST).read_bytes()
