"""Made the golden files of format version 1: `python -m tests.golden.make FOLDER`.

Add files for a new version; never edit old ones.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import pyarrow as pa

from natslog.cluster.metadata import BrokerRecord, CreateStream, DeleteStream, RegisterBroker
from natslog.log import LogOptions, StreamLog
from natslog.log.checked_file import write_checked
from natslog.model import StreamSettings
from natslog.node.metadata_store import MetadataStore
from natslog.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.schema import HEADERS_TYPE

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


def columns(commit: list) -> RowBuffers:
    subjects, keys, headers, values = zip(*commit, strict=True)
    arrays = [
        pa.array(subjects),
        pa.array(keys, pa.binary()),
        pa.array(headers, HEADERS_TYPE),
        pa.array(values, pa.binary()),
    ]
    return RowBuffers.of(pa.RecordBatch.from_arrays(arrays, schema=PAYLOAD_SCHEMA))


def make(folder: Path) -> None:
    """Writes every golden file of version 1 into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for compression in ("none", "zstd"):
        with tempfile.TemporaryDirectory() as scratch:
            settings = StreamSettings(subject="orders.>", compression=compression)
            log = StreamLog(Path(scratch), STREAM_ID, settings, LogOptions(min_free_bytes=0))
            for at, commit in enumerate(COMMITS):
                log.append(columns(commit), FIRST_US + at)
            if compression == "none":
                shutil.copy(log.chain.segments[0].path, folder / "segment-v1.active")
            log.roll_if_due(FIRST_US + 10**12)
            log.seal_next()
            shutil.copy(log.chain.segments[0].path, folder / f"segment-v1-{compression}.arrow")
            log.close()
            if compression == "none":
                for name in ("hw-checkpoint", "leader-epochs"):
                    shutil.copy(Path(scratch) / name, folder / f"{name}-v1")
    write_checked(folder / "broker-v1", "broker", 1, {"broker_id": 1, "cluster_id": "c1"})
    store = MetadataStore(folder / "metadata-v1", "c1")
    store.propose(RegisterBroker(broker=BrokerRecord(id=1, url="http://127.0.0.1:9292", rack="a")))
    for name, stream_id in (("orders", STREAM_ID), ("gone", "ff" * 16)):
        settings = StreamSettings(subject=f"{name}.>", max_age_s=604800.0, max_bytes=2**30)
        store.propose(CreateStream(name=name, id=stream_id, settings=settings, created_us=FIRST_US, placement=(1,)))
    store.propose(DeleteStream(name="gone", deleted_us=FIRST_US + 1))
    offsets = {"orders": {"id": STREAM_ID, "offset": 42}, "returns": {"id": "ff" * 16, "offset": 0}}
    (folder / "spark-offsets-v1.json").write_text(json.dumps(offsets))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
