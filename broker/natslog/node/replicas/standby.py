"""The subscription of a replica that stands by, until the leader's takes it over with what was kept.

Theory of operation. What is received is kept (`StandbyMessages`); twice a second it is compared with the rows that the
log has got as a copy of the leader's, and what is stored is dropped. A replica that begins to lead compares it once
more, with its whole log, which is final then. In one call it gives what is left to the ingest, as if it was received
now, and redirects the subscription: so no message is missed in between, none comes twice, and all keep their order.

Of requests nothing is stored. While there is no leader one follower answers them (`cluster.standby.answers_requests`),
as soon as NATS has confirmed that no earlier ones are on their way, which the leader may have stored. The next leader
answers those that are not in its log. Which ones were answered by another follower is not exchanged: some are answered
again, and clients ignore that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from natslog.cluster.standby import answers_requests
from natslog.errors import NatslogError, NatsUnavailable
from natslog.ingest import acks
from natslog.ingest.ack_rules import AckRules
from natslog.ingest.standby import COMPARED, Words, are_requests, replies_of, screened, words_of_rows
from natslog.log import StreamLog
from natslog.log_events import event
from natslog.model import StreamRecord
from natslog.node.threads import in_thread
from natslog.node.writes.standby_messages import Compared, StandbyMessages
from natslog.node.writes.stream_ingest import StreamIngest
from natslog.wire.frames import Frames
from natslog.wire.link import NatsLink

if TYPE_CHECKING:
    from natslog.node.replicas.replica_driver import ReplicaDriver
    from natslog.node.replicas.services import Services

logger = logging.getLogger("natslog.node")

_COMPARE_EVERY_S = 0.5
_CHECK_EVERY_S = 0.01
_AGAIN_S = 1.0
_COMPLAIN_EVERY_S = 10.0


class Standby:
    """Of one replica. In the event loop. Args: rules: which messages of a stream are acked."""

    def __init__(
        self, driver: ReplicaDriver, nats: NatsLink, services: Services, rules: Callable[[StreamRecord], AckRules]
    ) -> None:
        self._driver, self._nats, self._services, self._rules = driver, nats, services, rules
        self._messages = StandbyMessages(services.standby_memory, driver.stats, self._screened)
        self._wanted: tuple[str, ...] = ()
        self._subjects: tuple[str, ...] = ()
        self._handle: object | None = None
        self._subscribing: asyncio.Task[None] | None = None
        self._comparing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._compared_to = self._seen = 0  # offsets: all rows below were compared; HW at the last look
        self._checked_s = self._complained_s = -_COMPLAIN_EVERY_S
        self._is_to_answer = self._answers = False  # requests; as soon as, and when NATS has confirmed it
        self._confirming: asyncio.Task[None] | None = None

    # ---- the subscription ----

    @property
    def is_subscribed(self) -> bool:
        return bool(self._subjects)

    def subscribe(self, subjects: tuple[str, ...]) -> None:
        """To these subjects and no others, soon."""
        self._wanted = subjects
        if self._subscribing is None:
            self._subscribing = self._services.tasks.start(self._subscribe(), f"standing by for {self._driver.name}")

    async def _subscribe(self) -> None:
        while self._wanted != self._subjects:
            wanted = self._wanted
            try:
                await self._exchange(wanted)
            except NatsUnavailable as error:
                self._complain(error.message)
                await asyncio.sleep(_AGAIN_S)
            else:
                self._subjects = wanted
        self._subscribing = None

    async def _exchange(self, wanted: tuple[str, ...]) -> None:
        if self._handle is None:
            if (log := self._driver.log) is not None:
                self._compared_to = self._seen = log.high_watermark
            self._handle = await self._nats.attach(wanted, self._receive)
            self._compare_later()
        elif wanted:
            await self._nats.move(self._handle, wanted)
        else:
            handle, self._handle = self._handle, None
            await self._nats.detach(handle)
            self._compare_no_more()
            self._messages.take()

    async def quiesced(self) -> None:
        """Returns when it is subscribed as wanted, and nothing is compared."""
        for task in (self._subscribing, self._comparing):
            if task is not None:
                await asyncio.wait([task])

    # ---- receiving ----

    def _screened(self, frames: Frames) -> Frames:
        return screened(frames, self._rules(self._driver.record))

    def _receive(self, frames: Frames) -> None:
        now_s = time.monotonic()
        if now_s - self._checked_s >= _CHECK_EVERY_S:
            self._check_leader(now_s)
        if self._answers:
            frames = self._without_requests(self._screened(frames))
        if len(frames.rows) and not self._messages.add(frames, now_s):
            self._complain("messages were dropped: the memory for all streams is used up")

    def _check_leader(self, now_s: float) -> None:
        self._checked_s = now_s
        answering = answers_requests(self._driver.record, self._driver.me, self._services.host.ended())
        self._is_to_answer = answering == self._driver.me
        self._answers &= self._is_to_answer
        if self._is_to_answer and not self._answers and self._confirming is None:
            self._confirming = self._services.tasks.start(self._confirm(), "confirming that requests have no leader")

    async def _confirm(self) -> None:
        with suppress(NatsUnavailable):
            await self._nats.flush()
            self._answers = self._is_to_answer
        self._confirming = None

    def _without_requests(self, frames: Frames) -> Frames:
        """Answers them, if they ask for that by their reply subjects."""
        requests = are_requests(frames)
        if not requests.any():
            return frames
        if self._driver.record.settings.acks in ("reply", "any"):
            self._nats.send_now(acks.no_responders(replies_of(frames.select(requests))))
        return frames.select(~requests)

    def _complain(self, why: str) -> None:
        if time.monotonic() - self._complained_s >= _COMPLAIN_EVERY_S:
            self._complained_s, name = time.monotonic(), self._driver.name
            logger.warning("stream %s: standing by: %s", name, why, extra=event("standby.incomplete", stream=name))

    # ---- comparing ----

    def _compare_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_COMPARE_EVERY_S, self._compare_due)

    def _compare_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _compare_due(self) -> None:
        self._compare_later()
        if (log := self._driver.log) is None or self._comparing is not None:
            return
        if self._messages.is_empty:  # of a row of just now, the message may be on its way
            self._compared_to, self._seen = self._seen, log.high_watermark
        else:
            self._comparing = self._services.tasks.start(self._compare(log, log.high_watermark), "comparing")

    async def _compare(self, log: StreamLog, end: int) -> None:
        """With the rows up to this offset. What cannot be compared could be stored twice: it is dropped."""
        compare, start = self._messages.comparison(), self._compared_to
        try:
            found: Compared = await in_thread(self._services.readers, lambda: compare(_words(log, start, end)))
        except (NatslogError, OSError) as error:
            self._complain(f"messages were dropped: they cannot be compared with the log ({error})")
            self._driver.stats.standby_dropped += sum(len(frames.rows) for frames in self._messages.take())
        else:
            self._messages.apply(found, time.monotonic())
        self._compared_to = self._seen = end
        self._comparing = None

    # ---- leading ----

    async def taken_over(self, subjects: tuple[str, ...], ingest: StreamIngest) -> object | None:
        """The subscription, whose messages `ingest` receives from now on, after those that are not in its log; None:
        this replica has none.
        """
        self._compare_no_more()
        await self.quiesced()
        if self._handle is None:
            return None
        if subjects != self._subjects:
            await self._nats.move(self._handle, subjects)
        with suppress(NatsUnavailable):  # of rows that the log has, the messages have come by then
            await self._nats.flush()
        await self._compare(ingest.log, ingest.log.log_end_offset)
        self._messages.apply(self._messages.comparison()(np.zeros(0, np.uint64)), time.monotonic())
        left = [self._without_requests(frames) for frames in self._messages.take()]
        self._give(left, ingest)
        handle, self._handle = self._handle, None
        self._wanted = self._subjects = ()
        self._nats.redirect(handle, ingest.receive)
        return handle

    def _give(self, left: list[Frames], ingest: StreamIngest) -> None:
        count, name = sum(len(frames.rows) for frames in left), self._driver.name
        for frames in left:
            if len(frames.rows):
                ingest.receive(frames)
        if count:
            self._driver.stats.standby_stored += count
            logger.info(
                "stream %s: %d messages that its former leader had not stored are stored now",
                name,
                count,
                extra=event("standby.stored", stream=name, count=count),
            )


def _words(log: StreamLog, start: int, end: int) -> Words:
    """Of the rows in this range, also of those that are hidden or not committed."""
    rows = log.reader.stored_rows(min(start, end), end, columns=COMPARED)
    return np.concatenate([np.zeros(0, np.uint64), *(words_of_rows(batch) for _, batch in rows)])
