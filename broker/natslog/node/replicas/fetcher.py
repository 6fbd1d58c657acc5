"""The follower's end of replication: one conversation with each broker that leads something we keep.

Theory of operation. A request names the positions that changed; the answer has records, or where to cut. Records are
proven by their own CRCs, appended and fsynced; only then does the next request say so. Whatever a stream's role has
become meanwhile decides what is done with an answer, under that stream's `writing` lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor

from natslog.arrow import ipc
from natslog.cluster.replica import Append, BeginAt, CutTo, Halt, Ignore
from natslog.errors import CorruptLog, NatslogError, StorageFailed, StorageFull, StorageUnavailable
from natslog.log.batch_encoder import EncodedBatch
from natslog.model import BrokerId, Epoch, StreamId
from natslog.node.clock import monotonic_ms, now_us
from natslog.node.peers.links import DialledLink
from natslog.node.peers.messages import FetchAnswer, FetchRequest, FetchResponse
from natslog.node.replicas.stream import HostedStream

logger = logging.getLogger("natslog.replication")

_ANSWER_WITHIN_S = 2.0
_AGAIN_S = 0.2
_SMALL_BYTES = 512 * 1024
_QUICK_S = 0.003
_COMPLAIN_EVERY_S = 10.0


class Fetcher:
    """Follows one leader broker for all streams that it leads and we keep.

    Args:
        link: the link to that broker now, if it is up.
        incarnation: of this broker's life.
    """

    def __init__(
        self,
        leader: BrokerId,
        *,
        link: Callable[[], DialledLink | None],
        incarnation: str,
        executor: Executor,
    ) -> None:
        self.leader = leader
        self.heard_ms = monotonic_ms()
        self.fetched_bytes = 0
        self._link = link
        self._incarnation = incarnation
        self._executor = executor
        self._streams: dict[StreamId, HostedStream] = {}
        self._changed: dict[StreamId, None] = {}
        self._forget: set[StreamId] = set()
        self._number = 0
        self._response: asyncio.Future[tuple[FetchResponse, memoryview]] | None = None
        self._session_of: object = None
        self._something = asyncio.Event()
        self._usual_s = 1.0
        self._complained_s = -_COMPLAIN_EVERY_S
        self._task = asyncio.create_task(self._run(), name=f"fetching from broker {leader}")

    def follow(self, stream: HostedStream) -> None:
        self._streams[stream.record.id] = stream
        self._forget.discard(stream.record.id)
        self._changed[stream.record.id] = None
        self._something.set()

    def forget(self, stream: HostedStream) -> None:
        if self._streams.pop(stream.record.id, None) is not None:
            self._forget.add(stream.record.id)
            self._changed.pop(stream.record.id, None)

    @property
    def streams(self) -> list[HostedStream]:
        return list(self._streams.values())

    async def _run(self) -> None:
        while True:
            if not self._streams:
                self._something.clear()
                await self._something.wait()
            link = self._link()
            if link is None:
                await asyncio.sleep(_AGAIN_S / 4)
                continue
            try:
                await self._round(link)
            except TimeoutError:
                self._session_of = None
            except Exception as error:
                logger.exception("fetching from broker %d failed and goes on", self.leader, exc_info=error)
                await asyncio.sleep(_AGAIN_S)

    async def _round(self, link: DialledLink) -> None:
        session = (link, link.peer)
        begins = self._session_of != session
        if begins:
            self._session_of, self._forget = session, set()
            self._changed = dict.fromkeys(self._streams)
            link.on_fetched = self._on_fetched
        changed = []
        for stream_id in list(self._changed):
            stream = self._streams.get(stream_id)
            if stream is not None and stream.following is not None and stream.log is not None:
                log = stream.log
                changed.append((stream_id, stream.following.position(log.epochs, log.log_end_offset)))
            del self._changed[stream_id]
        forget, self._forget = tuple(self._forget), set()
        self._number += 1
        self._response = asyncio.get_running_loop().create_future()
        if not link.send(FetchRequest(self._number, self._incarnation, tuple(changed), forget, begins=begins)):
            self._session_of = None
            await asyncio.sleep(_AGAIN_S / 4)
            return
        async with asyncio.timeout(_ANSWER_WITHIN_S):
            response, payload = await self._response
        self.heard_ms = monotonic_ms()
        await self._take(response, payload)

    def _on_fetched(self, response: FetchResponse, payload: memoryview) -> None:
        if self._response is not None and not self._response.done() and response.number == self._number:
            self._response.set_result((response, payload))

    async def _take(self, response: FetchResponse, payload: memoryview) -> None:
        works, position = [], 0
        for answer in response.answers:
            data = payload[position : position + answer.length]
            position += answer.length
            stream = self._streams.get(answer.stream_id)
            if stream is not None:
                works.append(self._apply(stream, answer, data))
        if len(works) == 1:
            await works[0]
        elif works:
            await asyncio.gather(*works)

    async def _apply(self, stream: HostedStream, answer: FetchAnswer, data: memoryview) -> None:
        try:
            async with stream.writing:
                await self._apply_alone(stream, answer, data)
        except (StorageFull, StorageUnavailable, StorageFailed, CorruptLog) as error:
            self._complain(stream, error)
            self._again(stream)

    def _complain(self, stream: HostedStream, error: NatslogError) -> None:
        if time.monotonic() - self._complained_s > _COMPLAIN_EVERY_S:
            self._complained_s = time.monotonic()
            logger.error("stream %s is not copied from broker %d: %s", stream.record.name, self.leader, error.message)

    async def _apply_alone(self, stream: HostedStream, answer: FetchAnswer, data: memoryview) -> None:
        following, log = stream.following, stream.log
        if following is None or log is None:
            return
        step = following.answered(
            answer.epoch, answer.verdict, monotonic_ms(), epochs=log.epochs, log_end_offset=log.log_end_offset
        )
        match step:
            case Append():
                if answer.length:
                    await self._append(stream, following.epoch, data)
                    self._changed[stream.record.id] = None
                elif answer.high_watermark > log.log_end_offset:
                    self._again(stream)
                stream.followed(answer.high_watermark)
            case CutTo(end_offset=end_offset):
                logger.warning(
                    "stream %s: cut from %d to %d, where it parts from the log of epoch %d",
                    stream.record.name,
                    log.log_end_offset,
                    end_offset,
                    answer.epoch,
                )
                await self._in_thread(log.cut_to, end_offset)
                self._changed[stream.record.id] = None
            case BeginAt(log_start_offset=start, epoch=epoch):
                logger.warning("stream %s: begins anew at %d, where the leader's log begins", stream.record.name, start)
                await self._in_thread(log.begin_at, start, epoch, now_us())
                following.high_watermark = max(following.high_watermark, start)
                self._changed[stream.record.id] = None
            case Halt(why=why):
                stream.problem = CorruptLog(
                    f"stream {stream.record.name!r}: {why}. Nothing was changed here: look at both brokers' logs with "
                    "natslog verify, keep a copy, and move the replica that is wrong",
                    stream=stream.record.name,
                )
                logger.critical("%s", stream.problem.message)
                stream.following = None
                self.forget(stream)
            case Ignore():
                self._again(stream)

    def _again(self, stream: HostedStream) -> None:
        """Asks anew in a moment."""

        def mark() -> None:
            if stream.record.id in self._streams:
                self._changed[stream.record.id] = None

        asyncio.get_running_loop().call_later(_AGAIN_S, mark)

    async def _append(self, stream: HostedStream, epoch: Epoch, data: memoryview) -> None:
        started = time.perf_counter()
        if len(data) <= _SMALL_BYTES and self._usual_s < _QUICK_S:
            _append_copies(stream, epoch, data)
        else:
            await self._in_thread(_append_copies, stream, epoch, data)
        if len(data) <= _SMALL_BYTES:
            self._usual_s += (time.perf_counter() - started - self._usual_s) / 8
        self.fetched_bytes += len(data)

    async def _in_thread(self, work: Callable[..., None], *arguments: object) -> None:
        """As `run_in_executor`; a thread cannot be cancelled, so who cancels waits for it."""
        running = asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    async def close(self) -> None:
        """Nothing is written any more when this returns."""
        self._task.cancel()
        await asyncio.wait([self._task])


def _append_copies(stream: HostedStream, epoch: Epoch, data: memoryview) -> None:
    """Proves each batch, then appends them as one commit.

    Raises:
        CorruptLog: one is not what was written, or of a later epoch than the answering leader's: what that one wrote is
            for its own followers, who have compared their logs with it.
    """
    source = f"stream {stream.record.name!r}, from its leader"
    batches = [EncodedBatch(header, [message]) for header, message in ipc.split_messages(data, source=source)]
    if batches[-1].header.epoch > epoch:
        raise CorruptLog(f"{source} of epoch {epoch}: records of epoch {batches[-1].header.epoch}")
    stream.usable_log().append_copies(batches, now_us())
