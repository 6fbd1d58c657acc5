"""Made the golden files of removed messages, of the index of subjects and of cursors:
`python -m tests.golden.make_removal FOLDER`.

Add files for a new version; never edit old ones.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from pyroaring import BitMap64

from natslog.arrow import ipc
from natslog.backup.arrow_files import FileWriter
from natslog.backup.manifest import MANIFEST, ExportedFile, StreamManifest, write_manifest
from natslog.backup.removals import Removed, applied, drop_unnamed
from natslog.cluster.cursor_table import ROW_SUBJECT, CursorRow, Row
from natslog.cluster.cursors import CursorRecord, cursor_key
from natslog.errors import CorruptLog
from natslog.log import LogOptions, StreamLog
from natslog.log.erasing import ErasedOffsets, Erases, Erasures, RewrittenFile
from natslog.log.removed import to_bytes
from natslog.log.rules import Rule
from natslog.log.scrub import Finding, ScrubProgress
from natslog.log.subject_part import SubjectPart
from natslog.model import Epoch, Fork, Offset, StreamId, StreamSettings
from natslog.node.replicas.companion_records import ERASED, REMOVED, RULES, Record, rows_of
from tests.golden.make import FIRST_US, STREAM_ID, columns

SPREAD = BitMap64([0, 2, *range(100, 20_000), 1 << 33])
"""Its bitmap has an array, runs, and two halves of 32 bits."""


def erased(erasure_id: str, erases: Erases, *offsets: int) -> ErasedOffsets:
    return ErasedOffsets(
        id=erasure_id, erases=erases, below=90, requested_us=FIRST_US, messages=3, offsets=to_bytes(BitMap64(offsets))
    )


BY_SUBJECT, BY_KEY = erased("5ec0de", "subject", 5, 6, 70), erased("5ec0df", "key", 8)
RECORDS: list[Record] = [
    (REMOVED, to_bytes(SPREAD)),
    (RULES, b"12"),
    (ERASED, BY_SUBJECT.to_bytes()),
    (ERASED, BY_KEY.to_bytes()),
    (REMOVED, to_bytes(BitMap64([7]))),
]
"""Of a companion log; each two are a commit."""

NEWEST_RULES = (Rule(Epoch(0), per_subject=1), Rule(Epoch(1), per_subject=2, compacts=True, rolls_up=True))
RULES_VERSION = 3
ROLLED_UP = [{"key": "Nats-Rollup", "value": "sub"}]
NEWEST_ROWS = [
    ("s.a", b"k1", None, b"0"),  # 3 has its key
    ("s.b", None, None, b"1"),  # 4 rolls it up
    ("s.a", b"k2", None, b"2"),
    ("s.a", b"k1", None, b"3"),
    ("s.b", None, ROLLED_UP, b"4"),
    ("s.c", b"k3", None, b"5"),
    ("s.c", b"k4", None, b"6"),
    ("s.c", b"k5", None, b"7"),  # the third on s.c
]

SUBJECT_ROWS = [("orders.new", 10), ("orders.grün", 11), ("orders.new", 13), ("orders.new", 14)]
SUBJECT_IDENTITY = b"17.4711.1800000000000000000"

_READER = CursorRecord(consumer="reader", stream="orders", stream_id=StreamId(STREAM_ID), offset=Offset(40), set_us=1)
_REWOUND = msgspec.structs.replace(_READER, offset=Offset(7), set_us=2, rewound_from=Offset(40), rewound_us=2)
_OWNED = msgspec.structs.replace(_READER, consumer="nightly", owner="team-a", set_us=3)
CURSOR_ROWS: list[list[Row]] = [
    [(cursor_key(one.consumer, one.stream), CursorRow(cursor=one, request=f"request-{at}"))]
    for at, one in enumerate((_READER, _REWOUND))
]
CURSOR_ROWS += [
    [("nightly/orders", CursorRow(cursor=_OWNED)), ("gone/orders", CursorRow(cursor=_OWNED, request="request-2"))],
    [("gone/orders", CursorRow())],
]
"""Of `__cursors`, by commit."""
CURSORS = {"reader/orders": _REWOUND, "nightly/orders": _OWNED}

EXPORTED = [
    [("orders.bob", None, None, b"0"), ("orders.bob", None, None, b"1")],
    [("orders.anna", None, None, b"2"), ("orders.bob", b"carl", None, b"3"), ("orders.bob", None, None, b"4")],
    [("orders.bob", None, None, b"5")],
]
"""The messages of each file of an export, before some were removed."""
EXPORT_REMOVED = Removed(BitMap64([1, 2, 3]), BitMap64([2]), BitMap64([3]))


def make(folder: Path) -> None:
    """Writes every golden file of this module into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    make_companion(folder)
    make_cursors(folder)
    make_newest(folder)
    make_erasures(folder)
    make_scrub(folder)
    make_subjects(folder)
    make_export(folder / "export-v1-removals")


@contextmanager
def scratch_log(commits: Sequence[Any], options: LogOptions | None = None) -> Iterator[StreamLog]:
    """A log with these rows; each commit is a second newer than the one before."""
    with tempfile.TemporaryDirectory() as scratch:
        log = StreamLog(Path(scratch), STREAM_ID, StreamSettings(subject="x"), options or LogOptions(min_free_bytes=0))
        for at, commit in enumerate(commits):
            log.append(commit, FIRST_US + 1_000_000 * at)
        yield log
        log.close()


def make_companion(folder: Path) -> None:
    """Unsealed, and sealed as a snapshot leaves it."""
    with scratch_log([rows_of(RECORDS[at : at + 2]) for at in range(0, len(RECORDS), 2)]) as log:
        shutil.copy(log.chain.segments[0].path, folder / "companion-v1.active")
        log.roll()
        log.upkeep.seal_next()
        shutil.copy(log.chain.segments[0].path, folder / "companion-v1.arrow")


def make_cursors(folder: Path) -> None:
    commits = [
        [(ROW_SUBJECT, key.encode(), None, msgspec.json.encode(row)) for key, row in commit] for commit in CURSOR_ROWS
    ]
    with scratch_log(list(map(columns, commits))) as log:
        shutil.copy(log.chain.segments[0].path, folder / "cursors-v1.active")


def make_newest(folder: Path) -> None:
    """Without expiries."""
    with scratch_log([columns([row]) for row in NEWEST_ROWS]) as log:
        visibility = log.visibility
        visibility.set_rules(NEWEST_RULES, 0)
        visibility.count_anew(RULES_VERSION, 0)
        visibility.catch_up(len(NEWEST_ROWS))
        visibility.store(0, at_least=1)
        shutil.copy(log.folder / "newest", folder / "newest-v1")


def make_erasures(folder: Path) -> None:
    """One that is complete, one that is not."""
    with tempfile.TemporaryDirectory() as scratch:
        erasures = Erasures(Path(scratch))
        erasures.add(BY_SUBJECT, "here")
        rows = erasures.pending()
        assert rows is not None
        for name, start, end in ((f"{0:020d}.arrow", 0, 60), (f"{60:020d}.arrow", 60, 90)):
            file = RewrittenFile(name=name, bytes_before=4096, bytes_after=2048, rows=2, at_us=FIRST_US + 1)
            erasures.rewrote(rows, start, end, file)
        assert erasures.complete(rows, FIRST_US + 2)
        erasures.add(BY_KEY, "here")
        later = erasures.pending()
        assert later is not None
        file = RewrittenFile(name=f"{0:020d}.arrow", bytes_before=2048, bytes_after=1024, rows=1, at_us=FIRST_US + 3)
        erasures.rewrote(later, 0, 60, file)
        shutil.copy(Path(scratch, "erasures"), folder / "erasures-v1")


def make_scrub(folder: Path) -> None:
    """A second pass is under way; the first one has found damage, of which some was accepted as lost."""
    commits = [columns([("x", None, None, b"x")]) for _ in range(3)]
    with scratch_log(commits, LogOptions(segment_bytes=1, min_free_bytes=0)) as log:
        log.roll()
        while log.upkeep.seal_next():
            pass
        progress = ScrubProgress(log.folder)
        progress.begin(log.chain, FIRST_US)
        error = CorruptLog("damaged")
        progress.verified(0, 1, [Finding(0, 1, error), Finding(0, 0, error)])
        progress.verified(1, 3, [Finding(2, 3, error)])
        progress.complete(FIRST_US + 5, 0)
        progress.accept([(0, 1)])
        progress.begin(log.chain, FIRST_US + 10)
        progress.verified(0, 1, [Finding(0, 0, error)])
        progress.store()
        shutil.copy(log.folder / "scrub", folder / "scrub-v1")


def make_subjects(folder: Path) -> None:
    subjects, offsets = zip(*SUBJECT_ROWS, strict=True)
    batch = pa.record_batch({"offset": pa.array(offsets), "subject": pa.array(subjects)})
    SubjectPart.of_rows(10, 15, [batch]).store(folder / "subjects-v1.arrow", SUBJECT_IDENTITY)


def make_export(folder: Path) -> None:
    """Three files were exported; then a message was removed, and two were erased, before the fourth one was added."""
    folder.mkdir()
    with scratch_log(list(map(columns, EXPORTED))) as log, log.reader.plan_read(0, max_bytes=1 << 20) as plan:
        files = [_exported(folder, bytes(message)) for message in plan.messages()]
    before = _manifest(tuple(files[:-1]))
    kept, removed = applied(folder, before, EXPORT_REMOVED)
    manifest = msgspec.structs.replace(_manifest((*kept, files[-1])), removals=removed.stated())
    write_manifest(folder / MANIFEST, manifest)
    drop_unnamed(folder, manifest)


def _exported(folder: Path, message: bytes) -> ExportedFile:
    header = ipc.proven_header(message)
    assert header is not None
    writer = FileWriter(folder, STREAM_ID, header.base_offset)
    writer.add(header, message)
    return writer.finish()


def _manifest(files: tuple[ExportedFile, ...]) -> StreamManifest:
    end = Offset(files[-1].end_offset)
    return StreamManifest(
        format_version=1,
        natslog="0.2.0",
        cluster_id="c1",
        name="orders",
        id=STREAM_ID,
        settings={"subject": "orders.*", "subjects": ["orders.*"], "replicas": 1, "max_age": "7d"},
        subjects=["orders.*"],
        sealed=False,
        lineage=(Fork(id=StreamId(STREAM_ID), offset=end),),
        first_offset=0,
        end_offset=end,
        high_watermark=end,
        exported_at="2026-11-24T00:05:03Z",
        files=files,
    )


if __name__ == "__main__":
    make(Path(sys.argv[1]))
