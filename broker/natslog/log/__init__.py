"""The log of one stream: files, blocking calls, one owner. See `stream_log` for an overview and docs/FORMATS.md for the
bytes.

Writing: `batch_encoder`, `segment`, `chain` (the list of segments), `run_log` (direct appends), `replica_log` (of a
follower). Start: `opening`, `recovery`, `checkpoints`. Reading: `log_reader` with `read_plan`; `visibility` decides
which messages are hidden (`removed`, `newest`, `rollups`, `expiry`, `limits`). Upkeep: `sealed`, `small_segments`,
`rewriting`, `scrub`, `repairing`, `verify`.
"""

from natslog.log.lag import Lag
from natslog.log.log_reader import LogReader
from natslog.log.options import LogOptions
from natslog.log.read_plan import FilePiece, FileRange, ReadPlan
from natslog.log.replica_log import ReplicaLog
from natslog.log.room import StoreLimit, free_bytes, fullest_disk
from natslog.log.run_log import RunLog
from natslog.log.stream_log import StreamLog

__all__ = [
    "FilePiece",
    "FileRange",
    "Lag",
    "LogOptions",
    "LogReader",
    "ReadPlan",
    "ReplicaLog",
    "RunLog",
    "StoreLimit",
    "StreamLog",
    "free_bytes",
    "fullest_disk",
]
