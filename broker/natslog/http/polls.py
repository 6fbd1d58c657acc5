"""Long polls: requests that wait where a stream ends, thousands of which may wait for the same messages.

Theory of operation. The polls of a stream queue up. When there are messages for them, they have their *turn* a few at a
time, in the order in which they came, and the event loop serves publishers and other requests between two turns. Who is
answered and asks again is behind all others, so each poll has its turn.

What polls are sent is the same messages, so it is made once. For a question that several polls ask, the queue keeps a
*tail*: the pieces that were made last, each of which begins where the one before it ended. Before a turn the tail is
extended to the high watermark; an answer joins the pieces from the poll's start on. As every answer ends where a piece
ends, the next poll of the same reader begins there too, wherever the others are by then. So how much is made depends on
the number of turns and messages, not on that of readers. A poll whose start is no beginning of a piece is answered by
itself, up to the end of the tail.

Bounds: `_MOST_TAILS` of a stream, `_TAIL_BYTES` of each, `_ALL_BYTES` in all, for `_KEPT_S` where no poll is queued;
answers are counted by `Answers`, once for all polls that share one. All of this belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from contextvars import Context
from dataclasses import replace
from itertools import islice

from aiohttp import web

from natslog.errors import NatslogError
from natslog.http.answer_parts import Piece, Question, make_piece
from natslog.http.answers import Answers
from natslog.http.part import QUICK_BYTES, Part
from natslog.model import StreamId
from natslog.node.replicas.stream import HostedStream

logger = logging.getLogger("natslog.http")

_AT_ONCE = 32
_MOST_TAILS = 4
_MOST_PIECES = 16
_TAIL_BYTES = 8 * 1024 * 1024
_ALL_BYTES = 32 * 1024 * 1024
_KEPT_S = 2.0


class Polls:
    """Of one server.

    Args:
        readers: their threads make what is not at hand. `on_bug` is called with what must stop the broker.
    """

    def __init__(self, answers: Answers, readers: Executor, on_bug: Callable[[str, BaseException], None]) -> None:
        self.answers, self.readers, self.on_bug = answers, readers, on_bug
        self.held_bytes = 0
        self._queues: dict[StreamId, _Queue] = {}

    def poll(self, stream: HostedStream, asked: Question) -> Poll:
        return Poll(self, stream, asked)

    def queue(self, stream: HostedStream) -> _Queue:
        """The one in which polls of this stream wait now."""
        found = self._queues.get(stream.id)
        if found is None or found.stream is not stream:
            found = self._queues[stream.id] = _Queue(self, stream)
        return found

    def ended(self, queue: _Queue) -> None:
        if self._queues.get(queue.stream.id) is queue:
            del self._queues[queue.stream.id]


POLLS = web.AppKey("polls", Polls)


class Poll:
    """One request. A context manager, which gives back what the poll holds.

    Attributes:
        question: what polls that may share an answer have in common; None: this one shares none.
        end: where its answer is to end; None: at the high watermark. `part`: its answer, where it shares one.
    """

    def __init__(self, polls: Polls, stream: HostedStream, asked: Question) -> None:
        self.asked = asked
        self.end: int | None = None
        self.part: Part | None = None
        self._polls, self._stream = polls, stream
        admits_a_piece = asked.exact if asked.max_bytes is None else asked.max_bytes >= QUICK_BYTES
        self.question = (
            replace(asked, start=0, wait_ms=0, max_bytes=QUICK_BYTES) if asked.end is None and admits_a_piece else None
        )
        self._turn: asyncio.Future[None] | None = None

    def __enter__(self) -> Poll:
        return self

    def __exit__(self, *_: object) -> None:
        if (part := self.take_part()) is not None:
            with part:
                pass

    async def turn(self) -> None:
        """Returns when the poll is to be answered: there are messages, its time is up, or there is nothing to wait for.

        Raises:
            NatslogError: the stream cannot be read.
        """
        asked, stream = self.asked, self._stream
        high_watermark = stream.usable_log().high_watermark
        if not asked.wait_ms or asked.start > high_watermark or asked.end == asked.start:
            return
        if asked.start < high_watermark and asked.end is not None:
            return
        if stream.advanced.is_set() or not stream.is_leading:
            return  # the broker is stopping, or the role has changed
        queue = self._polls.queue(stream)
        self._turn = asyncio.get_running_loop().create_future()
        queue.add(self)
        try:
            async with asyncio.timeout(asked.wait_ms / 1000):
                await self._turn
        except TimeoutError:
            return
        finally:
            queue.remove(self)

    @property
    def is_waiting(self) -> bool:
        """Its client has not left, and its time is not up."""
        return self._turn is not None and not self._turn.done()

    def wake(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def take_part(self) -> Part | None:
        """What it shares with others, which the caller is to close; None where its answer is made by itself."""
        part, self.part = self.part, None
        return part


class _Queue:
    """The polls of one stream."""

    def __init__(self, polls: Polls, stream: HostedStream) -> None:
        self.stream = stream
        self._polls = polls
        self._ready: dict[Poll, None] = {}  # first come, first served
        self._waiting: dict[Poll, None] = {}  # each began at the high watermark when it came, so they ascend
        self._asking: Counter[Question | None] = Counter()
        self._tails: dict[Question, _Tail] = {}
        self._news = asyncio.Event()  # a poll came or left, or there may be messages
        self._task = asyncio.create_task(self._run(), name="polls", context=Context())
        self._watcher = asyncio.create_task(self._watch(), name="news for polls", context=Context())

    def add(self, poll: Poll) -> None:
        (self._ready if self._is_due(poll) else self._waiting)[poll] = None
        self._asking[poll.question] += 1
        self._news.set()

    def remove(self, poll: Poll) -> None:
        """It has had its turn, or waits no longer."""
        self._ready.pop(poll, None)
        self._waiting.pop(poll, None)
        self._asking[poll.question] -= 1
        if not self._asking[poll.question]:
            del self._asking[poll.question]
        self._news.set()

    def _is_due(self, poll: Poll) -> bool:
        """There are messages for it, or it is to be told that the broker is stopping or the role has changed."""
        stream = self.stream
        if stream.log is None or not stream.is_leading or stream.advanced.is_set():
            return True
        return poll.asked.start < stream.log.high_watermark

    async def _run(self) -> None:
        try:
            kept_until_s: float | None = None
            while True:
                while self._waiting and self._is_due(first := next(iter(self._waiting))):
                    del self._waiting[first]
                    self._ready[first] = None
                if self._ready:
                    kept_until_s = None
                    await self._serve(list(islice(self._ready, _AT_ONCE)))
                    continue
                self._news.clear()
                if self._waiting:
                    kept_until_s = None
                elif kept_until_s is None:  # all of them are being answered
                    kept_until_s = asyncio.get_running_loop().time() + _KEPT_S
                async with asyncio.timeout_at(kept_until_s):
                    await self._news.wait()
        except TimeoutError:
            return
        except Exception as error:
            self._polls.on_bug(f"the queue of polls of stream {self.stream.name}", error)
        finally:
            for poll in [*self._ready, *self._waiting]:
                poll.wake()
            self._watcher.cancel()
            self._close()

    async def _watch(self) -> None:
        """The high watermark moves, or the role changes. Ends where the broker is stopping."""
        is_stopping = False
        while not is_stopping:
            advanced = self.stream.advanced
            await advanced.wait()
            self._news.set()
            is_stopping = advanced is self.stream.advanced

    def _close(self) -> None:
        self._polls.ended(self)
        for question in list(self._tails):
            self._drop(question)

    async def _serve(self, due: list[Poll]) -> None:
        """Their turn."""
        for poll in due:
            del self._ready[poll]
        try:
            await self._prepare(due)
        finally:
            for poll in due:
                poll.wake()
        await asyncio.sleep(0)

    async def _prepare(self, due: list[Poll]) -> None:
        """Gives each of them its answer, or says where that is to end."""
        groups: dict[tuple[Question, int], list[Poll]] = {}
        try:
            for poll in due:
                if (question := self._shared_question(poll, {one for one, _ in groups})) is None:
                    poll.wake()  # what others share is not waited for
                else:
                    groups.setdefault((question, poll.asked.start), []).append(poll)
            for question in dict.fromkeys(question for question, _ in groups):
                await self._extend(question, max(start for asked, start in groups if asked == question))
            for (question, start), polls in groups.items():
                if (tail := self._tails.get(question)) is not None:
                    await self._share(tail, start, polls)
        except (NatslogError, OSError) as error:  # each of them finds out by itself
            logger.debug("stream %s: polls share no answer: %s", self.stream.name, error)

    def _shared_question(self, poll: Poll, chosen: set[Question]) -> Question | None:
        """What it asks together with others, where that is worth it: little is to be made for it, or it was made
        already. In one turn there are answers to a few different questions only, so that a turn is short.
        """
        question, start = poll.question, poll.asked.start
        if question is None or not (question in self._tails or self._asking[question] > 1):
            return None
        if question not in chosen and len(chosen) >= _MOST_TAILS:
            return None
        tail = self._tails.get(question)
        is_made = tail is not None and bool(tail.pieces_from(start))
        return question if is_made or self.stream.is_at_tail(start) else None

    async def _extend(self, question: Question, start: int) -> None:
        """To the high watermark; a new tail begins at `start`."""
        tail = self._tails.pop(question, None)
        if tail is None:
            while len(self._tails) >= _MOST_TAILS:
                self._drop(next(iter(self._tails)))
            tail = _Tail(self._polls, self.stream, question, start)
        self._tails[question] = tail  # the one that was used last comes last
        await tail.extend(self.stream.usable_log().high_watermark)

    def _drop(self, question: Question) -> None:
        tail = self._tails.pop(question)
        tail.begin_at(tail.end)

    async def _share(self, tail: _Tail, start: int, polls: list[Poll]) -> None:
        """One answer for all of them."""
        pieces = tail.pieces_from(start)
        size_bytes = sum(len(piece.body) for piece in pieces)
        end = tail.end
        for poll in polls:
            poll.end = end
        if not pieces or start < self.stream.usable_log().first_readable_offset:
            return
        is_whole = all(piece.is_whole for piece in pieces)
        bodies = [tail.question.opening, *(piece.body for piece in pieces), tail.question.ending]
        with await self._polls.answers.keep(memoryview(b"".join(bodies))) as answer:
            for poll in polls:
                if poll.is_waiting and size_bytes <= (poll.asked.max_bytes or size_bytes):
                    held = ExitStack()
                    held.enter_context(answer)
                    poll.part = Part(
                        self.stream,
                        self._polls.readers,
                        end,
                        [answer],
                        held,
                        is_whole=is_whole,
                        is_framed=True,
                        removed_rows=sum(piece.removed_rows for piece in pieces),
                    )


class _Tail:
    """The newest pieces of the answers to one question. `end`: where they end."""

    def __init__(self, polls: Polls, stream: HostedStream, question: Question, start: int) -> None:
        self.end = start
        self._polls, self._stream, self.question = polls, stream, question
        self._pieces: list[Piece] = []
        self._size_bytes = 0

    def begin_at(self, offset: int) -> None:
        """Without pieces."""
        self._forget(len(self._pieces))
        self.end = offset

    def pieces_from(self, start: int) -> list[Piece]:
        """Empty where none begins there."""
        at = bisect_left(self._pieces, start, key=lambda piece: piece.start)
        found = self._pieces[at:]
        return found if found and found[0].start == start else []

    async def extend(self, end: int) -> None:
        """It ends at `end` afterwards; without pieces, where these would be too many or cannot be made."""
        try:
            for _ in range(_MOST_PIECES):
                if self.end >= end:
                    return
                piece = await self._made(end)
                if piece is None or piece.end <= self.end:
                    break
                self._append(piece)
        finally:
            if self.end < end:
                self.begin_at(end)

    async def _made(self, end: int) -> Piece | None:
        """What was written just now is in memory, and read at once."""
        if not self.question.changes_rows and self._stream.is_at_tail(self.end):
            await asyncio.sleep(0)
            return make_piece(self._stream, self.question, self.end, end)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._polls.readers, make_piece, self._stream, self.question, self.end, end)

    def _append(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self.end = piece.end
        self._size_bytes += len(piece.body)
        self._polls.held_bytes += len(piece.body)
        while self._pieces and (self._size_bytes > _TAIL_BYTES or self._polls.held_bytes > _ALL_BYTES):
            self._forget(max(1, len(self._pieces) // 8))

    def _forget(self, count: int) -> None:
        """The oldest ones."""
        size_bytes = sum(len(piece.body) for piece in self._pieces[:count])
        self._size_bytes -= size_bytes
        self._polls.held_bytes -= size_bytes
        del self._pieces[:count]
