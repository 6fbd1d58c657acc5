"""Made the golden files of all format versions: `python -m tests.golden.make FOLDER`.

Add files for a new version; never edit old ones.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

from natslog.arrow.batch_line import FIRST_FORMAT, LATEST_FORMAT
from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.arrow.schema import HEADERS_TYPE
from natslog.consensus import Entry, HardState, Member, Membership, Snapshot
from natslog.log import LogOptions, StreamLog
from natslog.log.checked_file import write_checked
from natslog.model import StreamSettings
from natslog.node.metadata.raft_store import RaftStore
from tests.gaps import remove_offsets

STREAM_ID = "0123456789abcdef" * 2
COMMITS = [
    [("orders.new", None, None, b"first")],
    [
        ("orders.new", b"k", [{"key": "Trace", "value": "a"}, {"key": "Trace", "value": "b"}], b""),
        ("orders.old", None, [], b"\x00\xff"),
    ],
    [("orders.grün", b"", None, b"third")],
]
FIRST_US = 1_800_000_000_000_000
REMOVED = {0, 2}
PACKED_IDS = [None, [list(range(1, 13)), [0] * 12], None]
"""Of the rows of each commit, in format 2: 12 bytes a row."""


def columns(commit: list, packed_ids: list | None = None) -> RowBuffers:
    subjects, keys, headers, values = zip(*commit, strict=True)
    arrays = [
        pa.array(subjects),
        pa.array(keys, pa.binary()),
        pa.array(headers, HEADERS_TYPE),
        pa.array(values, pa.binary()),
    ]
    ids = None if packed_ids is None else np.array(packed_ids, np.uint8)
    return RowBuffers.of(pa.RecordBatch.from_arrays(arrays, schema=PAYLOAD_SCHEMA), ids)


def make(folder: Path) -> None:
    """Writes every golden file into `folder`, but for `raft-v1`, which natslog 0.2.0 wrote last."""
    folder.mkdir(parents=True, exist_ok=True)
    for batch_format in (FIRST_FORMAT, LATEST_FORMAT):
        make_segments(folder, batch_format)
    make_segments_with_gaps(folder)
    write_checked(folder / "broker-v1", "broker", 1, {"broker_id": 1, "cluster_id": "c1"})
    write_checked(folder / "broker-v2", "broker", 2, {"broker_id": 1, "cluster_id": "c1", "directory": "d" * 16})
    write_checked(folder / "life-v1", "life", 1, {"number": 7, "has_ended": True})
    make_raft(folder / "raft-v2")
    offsets = {"orders": {"id": STREAM_ID, "offset": 42}, "returns": {"id": "ff" * 16, "offset": 0}}
    (folder / "spark-offsets-v1.json").write_text(json.dumps(offsets))
    offsets["orders"] |= {"epoch": 5, "tasks": [[1, 20], [0, 42]]}
    (folder / "spark-offsets-v1-epoch.json").write_text(json.dumps(offsets))


def make_segments(folder: Path, batch_format: int) -> None:
    kind = f"v{batch_format}"
    for compression in ("none", "zstd"):
        with tempfile.TemporaryDirectory() as scratch:
            settings = StreamSettings(subject="orders.>", compression=compression)
            log = StreamLog(Path(scratch), STREAM_ID, settings, LogOptions(min_free_bytes=0))
            for at, (commit, ids) in enumerate(zip(COMMITS, PACKED_IDS, strict=True)):
                rows = columns(commit, ids if batch_format > FIRST_FORMAT else None)
                log.append(rows, FIRST_US + at, batch_format=batch_format)
            if compression == "none":
                shutil.copy(log.chain.segments[0].path, folder / f"segment-{kind}.active")
            log.roll()
            log.upkeep.seal_next()
            shutil.copy(log.chain.segments[0].path, folder / f"segment-{kind}-{compression}.arrow")
            log.close()
            if compression == "none" and batch_format == FIRST_FORMAT:
                for name in ("hw-checkpoint", "leader-epochs"):
                    shutil.copy(Path(scratch) / name, folder / f"{name}-v1")


def make_segments_with_gaps(folder: Path) -> None:
    """As of format 2, but without the messages of `REMOVED`."""
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch, "whole")
        log = StreamLog(whole, STREAM_ID, StreamSettings(subject="orders.>"), LogOptions(min_free_bytes=0))
        for at, (commit, ids) in enumerate(zip(COMMITS, PACKED_IDS, strict=True)):
            log.append(columns(commit, ids), FIRST_US + at)
        active = log.chain.segments[0].path
        log.close()
        remove_offsets(active, REMOVED)
        shutil.copy(active, folder / "segment-v2-gaps.active")
        log = StreamLog(whole, STREAM_ID, StreamSettings(subject="orders.>"), LogOptions(min_free_bytes=0))
        log.roll()
        log.upkeep.seal_next()
        shutil.copy(log.chain.segments[0].path, folder / "segment-v2-gaps.arrow")
        log.close()


def make_raft(folder: Path) -> None:
    folder.mkdir()
    store = RaftStore(folder, room_bytes=512)
    members = Membership(members=(Member(id=1, directory="d" * 16, url="http://127.0.0.1:9292"),))
    store.save(HardState(term=1, commit=1), None, (), Snapshot(index=1, term=1, membership=members, data=b"state"))
    store.save(HardState(term=3, vote=2, commit=2), None, [Entry(2, 2, "empty"), Entry(3, 3, "command", b"do")], None)
    store.close()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
