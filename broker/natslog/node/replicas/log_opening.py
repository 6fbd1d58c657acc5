"""A replica's log, opened beside the event loop; what keeps it from being opened becomes the replica's problem."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from pathlib import Path

from natslog.errors import CorruptLog, DataDirError, StorageFailed
from natslog.log import LogOptions, ReplicaLog
from natslog.model import StreamRecord
from natslog.node.replicas.stream import HostedStream

logger = logging.getLogger("natslog.node")


async def open_log(stream: HostedStream, folder: Path, options: LogOptions, executor: Executor) -> None:
    """Sets `log`, or `problem`, and with other replicas `damage`: these can make good what is damaged here."""
    loop, record = asyncio.get_running_loop(), stream.wanted
    try:
        stream.log = await loop.run_in_executor(executor, _opened, record, folder, options)
        stream.problem = None
    except (DataDirError, CorruptLog) as error:
        stream.problem = error
        if record.settings.replicas > 1:
            stream.note_damage(error)
    except OSError as error:
        stream.problem = StorageFailed(f"stream {record.name!r}: its folder cannot be used: {error}")
    if stream.log is None:
        logger.error("stream %s is not served: %s", record.name, stream.problem)
    elif stream.log.chain.damages and record.settings.replicas > 1:
        stream.note_damage(stream.log.failure or CorruptLog("a part of the log is damaged"))


def _opened(record: StreamRecord, folder: Path, options: LogOptions) -> ReplicaLog:
    log = ReplicaLog(folder, record.id, record.settings, options)
    log.chain.committed = log.checkpointed
    return log
