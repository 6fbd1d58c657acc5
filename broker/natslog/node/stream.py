"""A stream on this broker: its record, its log, its ingest, and its subscription."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from dataclasses import dataclass, field

from natslog import ipc
from natslog.errors import CorruptLog, NatslogError
from natslog.ingest.dedupe import MAX_IDS, DedupeWindow, ids_of_headers
from natslog.log import StreamLog
from natslog.model import StreamRecord
from natslog.node.clock import now_us
from natslog.node.stream_ingest import StreamIngest
from natslog.wire.link import NatsLink

logger = logging.getLogger("natslog.node")

_REBUILD_READ_BYTES = 8 * 1024 * 1024


@dataclass(slots=True)
class HostedStream:
    """`log` is None where it could not be opened; `problem` says why, and every read and write answers with it."""

    record: StreamRecord
    log: StreamLog | None
    ingest: StreamIngest | None = None
    problem: NatslogError | None = None
    subscription: object | None = field(default=None, repr=False)

    def usable_log(self) -> StreamLog:
        """Raises the problem where there is one."""
        if self.log is None:
            raise self.problem or CorruptLog(f"the log of stream {self.record.name!r} could not be opened")
        return self.log

    async def subscribe(self, link: NatsLink) -> None:
        if self.ingest is not None and self.subscription is None:
            settings = self.record.settings
            self.subscription = await link.attach(settings.subject, self.ingest.receive, queue=settings.group or "")

    async def unsubscribe(self, link: NatsLink) -> None:
        if self.subscription is not None:
            handle, self.subscription = self.subscription, None
            await link.detach(handle)

    async def stop(self, executor: Executor) -> None:
        """Commits and acks what was received, then closes the log. The subscription must be gone."""
        if self.ingest is not None:
            await self.ingest.stop()
        if self.log is not None:
            await asyncio.get_running_loop().run_in_executor(executor, self.log.close)

    def maintain(self) -> None:
        """In a thread, beside commits: seals, drops what is past retention, checkpoints."""
        if self.log is None:
            return
        try:
            while self.log.seal_next():
                pass
            dropped = self.log.enforce_retention(now_us())
            self.log.checkpoint()
        except (NatslogError, OSError) as error:
            logger.error("stream %s: maintenance failed, to be tried again: %s", self.record.name, error)
        else:
            if dropped:
                logger.info("stream %s: retention dropped %d segments", self.record.name, dropped)


def rebuild_dedupe(window: DedupeWindow, log: StreamLog) -> None:
    """Fills a window with the ids of the messages stored within it, read from the log (at most the newest
    `MAX_IDS`).
    """
    if not window.window_us:
        return
    try:
        start, _ = log.reader.offset_at(now_us() - window.window_us)
        start = max(start, log.high_watermark - MAX_IDS, log.log_start_offset)
        while start < log.high_watermark:
            with log.reader.plan_read(start, max_bytes=_REBUILD_READ_BYTES) as plan:
                for message in plan.messages():
                    batch = ipc.decode_batch(message)
                    ids = ids_of_headers(batch.column("headers"))
                    if ids is not None:
                        window.remember(ids, batch.column("offset").to_numpy(), now_us())
                start = plan.next_offset
    except CorruptLog as error:
        logger.error("deduplication starts with what could be read: %s", error.message)
