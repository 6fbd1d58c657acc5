"""A stream on this broker: its record, its log, its ingest, and its subscription."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from natslog.errors import CorruptLog, NatslogError
from natslog.log import StreamLog
from natslog.model import StreamRecord
from natslog.node.clock import now_us
from natslog.node.stream_ingest import StreamIngest
from natslog.wire.link import NatsLink

logger = logging.getLogger("natslog.node")

_USUAL_SHARE = 0.25
_UNSEALED_IN_PEACE = 8
_LONGEST_PAUSE_S = 0.25


class Pacer:
    """Keeps background work of one thread to a share of a core, so that commits have the rest."""

    def __init__(self, is_stopping: Callable[[], bool]) -> None:
        self.is_stopping = is_stopping
        self.share = _USUAL_SHARE
        self._worked_s = time.thread_time()

    def pause(self) -> None:
        """Sleeps as long as the work since the last pause asks for."""
        worked_s = time.thread_time() - self._worked_s
        if not self.is_stopping():
            time.sleep(min(_LONGEST_PAUSE_S, worked_s * (1 / self.share - 1)))
        self._worked_s = time.thread_time()


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

    def maintain(self, pacer: Pacer) -> None:
        """In a thread, beside commits: checkpoints, drops what is past retention, seals. One failing stops no other."""
        if self.log is None:
            return
        for work in (self.log.checkpoint, self._drop_expired, lambda: self._seal_all(pacer)):
            try:
                work()
            except (NatslogError, OSError) as error:
                logger.error("stream %s: upkeep failed, to be tried again: %s", self.record.name, error)

    def _drop_expired(self) -> None:
        assert self.log is not None, "maintain has looked"
        if dropped := self.log.enforce_retention(now_us()):
            logger.info("stream %s: retention dropped %d segments", self.record.name, dropped)

    def _seal_all(self, pacer: Pacer) -> None:
        assert self.log is not None, "maintain has looked"
        pacer.share = _USUAL_SHARE if len(self.log.chain.unsealed) <= _UNSEALED_IN_PEACE else 1.0
        while not pacer.is_stopping() and self.log.seal_next(pacer.pause):
            pass
