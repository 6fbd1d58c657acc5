"""What background work sees of a hosted stream: its log, whether it leads, and stream time, which the test sets."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from natslog.errors import CorruptLog
from natslog.log import ReplicaLog
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, StreamSettings
from natslog.node.removing import Removing
from tests.conftest import open_log, rows


class Ingest:
    """Attributes: `rolls`: how often upkeep asked for a new segment; `time_us`: stream time."""

    def __init__(self) -> None:
        self.rolls, self.time_us = 0, 1_000_001
        self.stream_time = self

    def roll(self) -> None:
        self.rolls += 1

    def now_us(self) -> int:
        return self.time_us

    def expiry_us(self) -> int:
        return self.time_us


class UpkeepStream:
    """As `HostedStream`; its log is opened by the test."""

    def __init__(self, record: StreamRecord, log: ReplicaLog) -> None:
        self.record = self.record = record
        self.name, self.id = record.name, record.id
        self.log: ReplicaLog | None = log
        self.ingest = Ingest()
        self.is_leading, self.is_ready, self.following = True, True, None
        self.problem: Any = None
        self.companion: Any = SimpleNamespace(log=None, files=None, is_missing=False, size_bytes=0)
        self.driver: Any = SimpleNamespace(log_start_moved=lambda: None)
        self.leader_log_start = 0

    @property
    def logs(self) -> list[ReplicaLog]:
        return [] if self.log is None else [self.log]

    def usable_log(self) -> ReplicaLog:
        if self.log is None:
            raise CorruptLog("it is not open")
        return self.log


def expire(stream: Any, time_us: int) -> None:
    """What the leader hides at this time."""
    stream.ingest.time_us = time_us
    with ThreadPoolExecutor(1) as executor:
        asyncio.run(Removing(None, executor, None)._expire(stream, stream.usable_log()))  # type: ignore[arg-type]


def hosted(folder: Path, batches: int) -> Any:
    """A stream with so many batches of one message, stored at second 1."""
    log = open_log(folder)
    for _ in range(batches):
        log.append(rows([b"x" * 1000]), 1_000_000)
    log.checkpoint()
    record = StreamRecord(
        name=folder.name,
        id=StreamId("0" * 32),
        settings=StreamSettings(subject="orders.>"),
        created_us=0,
        leader=BrokerId(1),
        leader_epoch=Epoch(1),
        replicas=(BrokerId(1),),
        isr=(BrokerId(1),),
    )
    return UpkeepStream(record, log)
