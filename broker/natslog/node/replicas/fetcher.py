"""The follower's side of replication: one exchange with each broker that leads a stream with a replica here.

Theory of operation. A request names the positions that changed; the answer has records, or the offset to truncate to.
Records are validated by their own CRCs, appended and fsynced; only then does the next request confirm them. The current
role of a stream decides how an answer is used.

An answer is used, and the next request sent, in the call that received it, unless a thread is needed. A task begins the
exchange, and begins it again when an answer does not come in time, or the link was lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import suppress

from natslog.arrow import ipc
from natslog.cluster.roles import Matching
from natslog.errors import CorruptAnswer, CorruptLog, NatslogError
from natslog.log import ReplicaLog
from natslog.log.batch_encoder import EncodedBatch
from natslog.log_events import event
from natslog.model import BrokerId, Epoch, StreamId
from natslog.node.begun import begin
from natslog.node.clock import monotonic_ms, now_us
from natslog.node.peers.handshake import Hello
from natslog.node.peers.links import DialledLink
from natslog.node.peers.messages import FetchAnswer, FetchRequest, FetchResponse
from natslog.node.peers.pieces import ask_for_pieces
from natslog.node.replicas.replicated_log import ReplicatedLog
from natslog.node.supervisor import OnBug, Supervisor
from natslog.node.threads import in_thread
from natslog.node.writes.pace import DiskPace

logger = logging.getLogger("natslog.replication")

_ANSWER_WITHIN_S = 2.0
_AGAIN_S = 0.2
_SMALL_BYTES, _MEASURED_BYTES = 512 * 1024, 32 * 1024
_COMPLAIN_EVERY_S = 10.0


class Fetcher:
    """Follows one leader broker for all streams that it leads and that have a replica here.

    Args:
        link: the link to that broker now, if it is up.
        incarnation: of this broker's life. pace: of the disk.
    """

    def __init__(
        self,
        leader: BrokerId,
        *,
        link: Callable[[], DialledLink | None],
        incarnation: str,
        executor: Executor,
        pace: DiskPace,
        on_bug: OnBug,
    ) -> None:
        self.leader = leader
        self.last_contact_ms = monotonic_ms()
        self.fetched_bytes = 0
        self._link = link
        self._incarnation = incarnation
        self._executor, self._pace = executor, pace
        self._streams: dict[StreamId, ReplicatedLog] = {}
        self._changed: dict[StreamId, None] = {}
        self._forget: set[StreamId] = set()
        self._number = 0
        self._asked_s = -_ANSWER_WITHIN_S
        self._is_asked = self._is_taking = False  # a request is not answered; an answer is used
        self._is_closed = False
        self._session: tuple[DialledLink, Hello | None] | None = None
        self._something = asyncio.Event()
        self._adopting: set[StreamId] = set()
        self._complained_s = -_COMPLAIN_EVERY_S
        self._tasks = Supervisor(on_bug)
        self._tasks.start(self._run(), f"fetching from broker {leader}")

    def follow(self, stream: ReplicatedLog) -> None:
        self._streams[stream.id] = stream
        self._forget.discard(stream.id)
        self._changed[stream.id] = None
        self._something.set()

    def forget(self, stream: ReplicatedLog) -> None:
        if self._streams.pop(stream.id, None) is not None:
            self._forget.add(stream.id)
            self._changed.pop(stream.id, None)

    @property
    def streams(self) -> list[ReplicatedLog]:
        return list(self._streams.values())

    async def _run(self) -> None:
        """Begins the exchange."""
        while True:
            if not self._streams:
                self._something.clear()
                await self._something.wait()
            link = self._link()
            if link is None or self._is_taking or not self._begin(link):
                await asyncio.sleep(_AGAIN_S / 4)
                continue
            while (left_s := self._goes_on_for_s()) > 0:
                self._something.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._something.wait()

    def _goes_on_for_s(self) -> float:
        """At least; then it is to be looked at again. 0: it is to begin again."""
        if self._is_taking:
            return _ANSWER_WITHIN_S
        return max(0.0, self._asked_s + _ANSWER_WITHIN_S - time.monotonic()) if self._is_asked else 0.0

    def _begin(self, link: DialledLink) -> bool:
        """The leader forgets what it was told before."""
        self._session, self._forget = (link, link.peer), set()
        self._changed = dict.fromkeys(self._streams)
        link.begin_fetching(self._on_fetched)
        return self._ask(begins=True)

    def _ask(self, *, begins: bool = False) -> bool:
        """Sends the next request. False: it could not be sent, so the exchange has to begin again."""
        if self._session is None or self._session[0].peer is not self._session[1]:
            return self._lost()
        changed = []
        for stream_id in list(self._changed):
            stream = self._streams.get(stream_id)
            del self._changed[stream_id]
            if stream is not None and (position := stream.position()) is not None:
                changed.append((stream_id, position))
            elif stream is not None:
                self._again(stream)
        forget, self._forget = tuple(self._forget), set()
        self._number += 1
        self._is_asked, self._asked_s = True, time.monotonic()
        if not self._session[0].send(
            FetchRequest(self._number, self._incarnation, tuple(changed), forget, begins=begins)
        ):
            return self._lost()
        return True

    def _lost(self) -> bool:
        self._session, self._is_asked = None, False
        self._something.set()  # for the task
        return False

    def _on_fetched(self, response: FetchResponse, payload: memoryview) -> None:
        if self._is_asked and response.number == self._number and not self._is_closed:
            self._is_asked, self._is_taking = False, True
            self.last_contact_ms = monotonic_ms()
            begin(self._take(response, payload), f"records from broker {self.leader}", self._tasks.start)

    async def _take(self, response: FetchResponse, payload: memoryview) -> None:
        works, position = list[Awaitable[None]](), 0
        of_companions = list[Awaitable[None]]()
        for answer in response.answers:
            data = payload[position : position + answer.length]
            position += answer.length
            stream = self._streams.get(answer.stream_id)
            if stream is not None:
                (of_companions if stream.is_companion else works).append(self._apply(stream, answer, data))
        if len(works) == 1:
            await works[0]
        elif works:
            await asyncio.gather(*works)
        if of_companions:  # afterwards: a replica takes one step at a time
            await asyncio.gather(*of_companions)
        self._is_taking = False
        if self._streams and not self._is_closed:
            self._ask()

    async def _apply(self, stream: ReplicatedLog, answer: FetchAnswer, data: memoryview) -> None:
        def append(log: ReplicaLog) -> Awaitable[None] | None:
            return self._append(log, stream, answer.epoch, data)

        stream.leader_starts_at(answer.epoch, answer.log_start_offset)  # first: a full disk may need what it frees
        if stream.lacks_ids(answer.epoch, answer.ids_serial):
            if stream.id not in self._adopting:  # beside the fetches of other streams; then this one is asked again
                self._adopting.add(stream.id)
                self._tasks.start(self._adopt_ids(stream, answer), f"message ids of {stream.name}")
            return
        try:
            has_changed = await stream.answered(
                answer.epoch, answer.verdict, append if answer.length else None, answer.high_watermark
            )
        except NatslogError as error:
            self._complain(stream, error)
            self._again(stream)
            return
        if stream.id not in self._streams:
            return
        if has_changed:
            self._changed[stream.id] = None
        elif not isinstance(answer.verdict, Matching) or answer.length or stream.is_behind(answer.high_watermark):
            self._again(stream)

    async def _adopt_ids(self, stream: ReplicatedLog, answer: FetchAnswer) -> None:
        try:
            if (link := self._link()) is not None:
                data = await ask_for_pieces(link, "kept_ids", stream_id=stream.id)
                await stream.adopt_ids(answer.epoch, answer.ids_serial, data)
        except NatslogError as error:
            self._complain(stream, error)
        finally:
            self._adopting.discard(stream.id)
            self._again(stream)

    def _complain(self, stream: ReplicatedLog, error: NatslogError) -> None:
        if time.monotonic() - self._complained_s > _COMPLAIN_EVERY_S:
            self._complained_s = time.monotonic()
            logger.error(
                "stream %s is not copied from broker %d: %s",
                stream.name,
                self.leader,
                error.message,
                extra=event("replica.not_copied", stream=stream.name, peer=self.leader, reason=error.code),
            )

    def _again(self, stream: ReplicatedLog) -> None:
        """Sends a new request in a moment."""

        def mark() -> None:
            if stream.id in self._streams:
                self._changed[stream.id] = None

        asyncio.get_running_loop().call_later(_AGAIN_S, mark)

    def _append(self, log: ReplicaLog, stream: ReplicatedLog, epoch: Epoch, data: memoryview) -> Awaitable[None] | None:
        """Small records are appended immediately if the disk was fast recently; large ones, or those that need a new
        file, in a thread.
        """
        self.fetched_bytes += len(data)
        is_quick = self._pace.is_quick and log.is_quick_append(max(now_us(), log.newest_timestamp_us), epoch)
        if len(data) > _SMALL_BYTES or not is_quick:
            return self._append_in_thread(log, stream.name, epoch, data)
        _append_copies(log, stream.name, epoch, data)
        if len(data) <= _MEASURED_BYTES:
            self._pace.took(log.written_in_s)
        else:
            self._pace.blocked(log.written_in_s)
        return None

    async def _append_in_thread(self, log: ReplicaLog, name: str, epoch: Epoch, data: memoryview) -> None:
        await in_thread(self._executor, _append_copies, log, name, epoch, data)
        self._pace.took_in_thread(log.written_in_s)

    async def close(self) -> None:
        """No write is in progress when this returns."""
        self._is_closed = True
        await self._tasks.stop()


def _append_copies(log: ReplicaLog, name: str, epoch: Epoch, data: memoryview) -> None:
    """Proves each batch, then appends them as one commit.

    Raises:
        CorruptAnswer: one is damaged, or of a later epoch than that of the answering leader: records of that epoch are
            only for followers that have compared their logs with its leader.
    """
    source = f"stream {name!r}, from its leader"
    try:
        batches = [EncodedBatch(header, [message]) for header, message in ipc.split_messages(data, source=source)]
    except CorruptLog as error:
        raise CorruptAnswer(error.message, **error.facts) from error
    first, last = batches[0].header, batches[-1].header
    if last.epoch > epoch:
        raise CorruptAnswer(f"{source} of epoch {epoch} has records of epoch {last.epoch}")
    if first.base_offset != log.log_end_offset:
        raise CorruptAnswer(
            f"{source} begins at offset {first.base_offset}, but the next offset is {log.log_end_offset}"
        )
    log.append_copies(batches)
