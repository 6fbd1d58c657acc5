"""Fills every stream of a stopped broker's data directory: `python -m tests.bench.large_log FOLDER BYTES_EACH`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pyarrow as pa

from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.arrow.schema import HEADERS_TYPE
from natslog.log import LogOptions, StreamLog
from natslog.model import StreamSettings
from natslog.node.data_dir import folders_by_id

_ROWS = 6_000
_VALUE_BYTES = 1024


def main(folder: Path, bytes_each: float) -> None:
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(["log.x"] * _ROWS),
            pa.nulls(_ROWS, pa.binary()),
            pa.nulls(_ROWS, HEADERS_TYPE),
            pa.array([bytes(at % 251 for at in range(row, row + _VALUE_BYTES)) for row in range(_ROWS)], pa.binary()),
        ],
        schema=PAYLOAD_SCHEMA,
    )
    rows = RowBuffers.of(batch)
    for stream_id, stream in folders_by_id(folder / "streams").items():
        log = StreamLog(stream, stream_id, StreamSettings(subject="log.>"), LogOptions())
        while log.chain.size_bytes < bytes_each:
            log.append(rows, time.time_ns() // 1000)
        while log.upkeep.seal_next():
            pass
        log.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
