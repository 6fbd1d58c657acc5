"""One stream's way from frames to acks: gather while the last commit syncs, commit, answer.

Theory of operation. `receive` runs in the event loop for every received chunk: it copies the frames into the builder
and
wakes the committer. The committer takes the oldest builder, has a thread write and fsync it, then sends all its acks in
one piece. What arrives meanwhile gathers in the next builder; so batches grow by themselves under load, and at one
message a second an ack takes one fsync. There is no delay anywhere.

Invariants. Nothing is acked before its fsync returned. Memory is bounded by the broker's `MemoryBudget`; what does not
fit is refused (answered, where a reply subject was given), counted and logged, never silently dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.errors import InvalidRequest, NatslogError, Overloaded, ShuttingDown, StreamPaused
from natslog.ingest import acks
from natslog.ingest.batches import Batch, BatchBuilder, split_by_expectation, split_by_text
from natslog.ingest.dedupe import NEW, REPEATED, DedupeWindow
from natslog.log import StreamLog
from natslog.node.clock import monotonic_us, now_us
from natslog.node.dedupe_rebuild import rebuilt_dedupe
from natslog.wire.frames import Frames
from natslog.wire.layout import END, REPLY_LEN, START

logger = logging.getLogger("natslog.ingest")

_LOG_EVERY_S = 5.0


class Sender(Protocol):
    """How acks leave: raw NATS protocol; False while no server is connected."""

    async def send(self, protocol: bytes) -> bool: ...


class MemoryBudget:
    """Bytes of messages received and not yet committed, over all streams of a broker."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, size_bytes: int) -> bool:
        """One message fits into an empty budget whatever its size."""
        if self.used_bytes and self.used_bytes + size_bytes > self.limit_bytes:
            return False
        self.used_bytes += size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        assert self.used_bytes >= 0, "more was given back than taken"


class IngestStats:
    """Counters since the broker started; written by the event loop only."""

    def __init__(self) -> None:
        self.received = 0
        self.received_bytes = 0
        self.committed = 0
        self.duplicates = 0
        self.commits = 0
        self.commit_seconds = 0.0
        self.acks_unsent = 0
        self.refused: Counter[str] = Counter()


class StreamIngest:
    """Takes frames, returns acks. `start` and `stop` it in the event loop."""

    def __init__(
        self, name: str, log: StreamLog, *, sender: Sender, executor: Executor, budget: MemoryBudget, paused: bool
    ) -> None:
        self.name = name
        self.log = log
        self.stats = IngestStats()
        self.paused = paused
        self.committed = asyncio.Event()
        self._sender = sender
        self._executor = executor
        self._budget = budget
        self._builders: deque[tuple[BatchBuilder, list[int]]] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._roll_due = False
        self._new_window_s: float | None = None
        self._committer: asyncio.Task[None] | None = None
        self._answers: set[asyncio.Task[None]] = set()
        self._last_complaint = -_LOG_EVERY_S
        self.dedupe = DedupeWindow(log.settings.dedupe_window_s)

    def start(self, on_end: Callable[[asyncio.Task[None]], None]) -> None:
        """`on_end` is told when the committer ends, by `stop` or by a bug."""
        self._committer = asyncio.create_task(self._commit_loop(), name=f"commit-{self.name}")
        self._committer.add_done_callback(on_end)

    async def stop(self) -> None:
        """Commits and acks what has been received, then ends."""
        self._closing = True
        self._wake.set()
        if self._committer is not None:
            await self._committer
        if self._answers:
            await asyncio.gather(*self._answers)

    # ---- receiving ----

    def receive(self, frames: Frames) -> None:
        """Called by the link with frames of this stream's subscription; copies what it keeps."""
        self.stats.received += len(frames.rows)
        self.stats.received_bytes += int((frames.rows[:, END] - frames.rows[:, START]).sum())
        if (why_not := self._why_not()) is not None:
            self._refuse(frames, why_not)
            return
        frames, garbled = split_by_text(frames)
        if len(garbled.rows):
            self._refuse(garbled, InvalidRequest("subject and headers must be UTF-8: correct the message"), "not_utf8")
        frames, expecting = split_by_expectation(frames)
        if len(expecting.rows):
            self._refuse(expecting, InvalidRequest("this version of natslog does not check Nats-Expected-… headers"))
        if len(frames.rows):
            self._gather(frames)

    def _why_not(self) -> NatslogError | None:
        """What keeps the stream from taking messages now."""
        if self._closing:
            return ShuttingDown("the broker is shutting down: send again")
        if self.paused:
            return StreamPaused(f"stream {self.name!r} is paused: resume it, then send again")
        return self.log.failure

    def _gather(self, frames: Frames) -> None:
        size_bytes = int((frames.rows[:, END] - frames.rows[:, START]).sum())
        if not self._budget.take(size_bytes):
            self._refuse(frames, Overloaded("the broker's memory for uncommitted messages is full: send slower"))
            return
        if not self._builders or self._builders[-1][0].is_full:
            self._builders.append((BatchBuilder(), [0]))
        builder, taken_bytes = self._builders[-1]
        builder.add(frames)
        taken_bytes[0] += size_bytes
        self._wake.set()

    def _refuse(self, frames: Frames, error: NatslogError, reason: str | None = None) -> None:
        """Answers those who wait for an ack; the loss of the others is counted and logged."""
        replies = BatchBuilder()
        replies.add(frames.select(frames.rows[:, REPLY_LEN] > 0))
        self._count_refused(len(frames.rows), error, reason)
        if replies.rows:
            answers = replies.taken().replies
            assert answers is not None, "rows with a reply subject were selected"
            self._answer_soon(acks.refused(answers, error, stream=self.name))

    def _count_refused(self, rows: int, error: NatslogError, reason: str | None = None) -> None:
        self.stats.refused[reason or error.code] += rows
        if time.monotonic() - self._last_complaint >= _LOG_EVERY_S:
            self._last_complaint = time.monotonic()
            total = sum(self.stats.refused.values())
            logger.error("stream %s: refused %d messages (%d so far): %s", self.name, rows, total, error.message)

    def _answer_soon(self, protocol: bytes) -> None:
        task = asyncio.create_task(self._answer(protocol))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, protocol: bytes) -> None:
        if not await self._sender.send(protocol):
            self.stats.acks_unsent += protocol.count(b"PUB ")

    # ---- committing ----

    def change_window(self, window_s: float) -> None:
        """Another deduplication window; the committer rebuilds it between two commits."""
        self._new_window_s = window_s
        self._wake.set()

    def roll_if_due(self) -> None:
        """Lets an idle stream's active segment age; the committer does it, as the log's only writer."""
        self._roll_due = True
        self._wake.set()

    async def _commit_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._new_window_s is not None:
                window_s, self._new_window_s = self._new_window_s, None
                self.dedupe = await loop.run_in_executor(self._executor, rebuilt_dedupe, window_s, self.log)
            while self._builders:
                builder, taken_bytes = self._builders.popleft()
                batch = builder.taken()
                try:
                    await self._commit(loop, batch)
                finally:
                    self._budget.give_back(taken_bytes[0])
            if self._closing:
                return
            if self._roll_due:
                self._roll_due = False
                await self._roll(loop)

    async def _roll(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            await loop.run_in_executor(self._executor, self.log.roll_if_due, now_us())
        except NatslogError as error:
            logger.error("stream %s: the active segment could not be rolled: %s", self.name, error.message)

    async def _commit(self, loop: asyncio.AbstractEventLoop, batch: Batch) -> None:
        started = time.perf_counter()
        try:
            offsets, duplicate = await loop.run_in_executor(self._executor, self._append, batch)
        except NatslogError as error:
            self._count_refused(batch.columns.num_rows, error)
            if batch.replies is not None:
                await self._answer(acks.refused(batch.replies, error, stream=self.name))
            return
        self._note_commit(offsets, duplicate, time.perf_counter() - started)
        if batch.replies is not None:
            epoch = self.log.epoch
            await self._answer(acks.stored(batch.replies, offsets, stream=self.name, epoch=epoch, duplicate=duplicate))

    def _note_commit(
        self, offsets: npt.NDArray[np.int64], duplicate: npt.NDArray[np.bool_] | None, seconds: float
    ) -> None:
        duplicates = int(duplicate.sum()) if duplicate is not None else 0
        self.stats.committed += len(offsets) - duplicates
        self.stats.duplicates += duplicates
        self.stats.commits += 1
        self.stats.commit_seconds += seconds
        self.committed.set()  # wakes long polls; they wait on the event as it was
        self.committed = asyncio.Event()

    def _append(self, batch: Batch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]:
        """In a thread: drops duplicates, appends the rest. Returns each row's offset, and which were duplicates."""
        if batch.ids is None:
            base_offset, _ = self.log.append(batch.columns, now_us())
            return np.arange(base_offset, base_offset + batch.columns.num_rows, dtype=np.int64), None
        window, time_us = self.dedupe, monotonic_us()
        offsets = window.find(batch.ids, time_us)
        fresh = offsets == NEW
        if fresh.any():
            columns = batch.columns if fresh.all() else batch.columns.filter(pa.array(fresh))
            base_offset, _ = self.log.append(columns, now_us())
            offsets[fresh] = np.arange(base_offset, base_offset + columns.num_rows, dtype=np.int64)
            window.remember(batch.ids[fresh], offsets[fresh], time_us)
        repeated = offsets == REPEATED
        if repeated.any():
            offsets[repeated] = window.find(batch.ids[repeated], time_us)
        return offsets, ~fresh if not fresh.all() else None
