"""The writer of one stream's log: received messages are gathered while the last commit syncs, then committed.

Theory of operation. Two owners, and a queue of builders between them: the event loop adds messages to the last builder,
and a turn (`_turn`) takes builders, oldest first, and makes one commit of each. It continues with the messages gathered
meanwhile, without waiting for the loop, which gets the report of each commit. Batches therefore grow automatically
under load, and at one message a second an ack takes one fsync. There are no artificial delays but those of
`CommitTiming`.

If few messages have gathered, no new segment is due and the disk was fast recently, the loop takes the turn itself: two
thread switches would cost more than the fsync. When the disk becomes slow, only the threads take turns from then on.

Other work of the log's only writer (errands, a roll, another deduplication window) is done by turns, between commits.

Invariants. At most one turn of a stream runs at a time. The event loop gets the reports of commits in their order: it
makes none itself while the report of a thread is on its way.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from natslog.errors import NatslogError, ShuttingDown
from natslog.ingest.batches import COMMIT_BYTES, BatchBuilder
from natslog.log import RunLog
from natslog.log.stream_log import ROW_BYTES
from natslog.log_events import event
from natslog.node.cluster_clock import StreamTime
from natslog.node.writes.commits import Commits, Gathering, Outcome
from natslog.node.writes.ingest_memory import IngestMemory
from natslog.node.writes.pace import CommitTiming, DiskPace
from natslog.request_ids import carried

logger = logging.getLogger("natslog.ingest")

QUICK_BYTES = 32 * 1024
"""The most bytes of a commit that the event loop may make itself."""
_TURN_S = 0.05


class StreamWriter:
    """See the module. For the event loop, except `_turn` and what it calls, and `hand_over`, `roll`.

    Args:
        finish: gets, in the event loop, the outcome of each commit, in their order.

    Attributes:
        begun: the number of commits so far, of which `finish` gets an outcome, with the one that is being gathered.
        is_closing: no more messages are taken.
    """

    def __init__(
        self,
        name: str,
        log: RunLog,
        commits: Commits,
        finish: Callable[[Outcome], None],
        *,
        stream_time: StreamTime,
        executor: Executor,
        memory: IngestMemory,
        pace: DiskPace,
    ) -> None:
        self.begun = 0
        self._timing = CommitTiming()
        self.is_closing = self._is_abandoned = False
        self._on_bug: Callable[[str, BaseException], None]
        self._name, self._log, self._commits, self._finish = name, log, commits, finish
        self._stream_time, self._executor, self._memory, self._pace = stream_time, executor, memory, pace
        self._loop = asyncio.get_running_loop()
        self._postponed: asyncio.TimerHandle | None = None
        self._stopped = asyncio.Event()
        self._lock = threading.Lock()  # guards what follows, and `is_closing`
        self._gathered: deque[Gathering] = deque()
        self._has_turn = False
        self._is_in_loop = False  # the present turn
        self._is_turn_due = False  # for the event loop
        self._roll_due = False
        self._new_window_s: float | None = None
        self._errands: deque[Callable[[], None]] = deque()
        self._did_errand = False
        self._has_report = False  # the present turn has handed something to the event loop
        self._unreported = 0  # turns with a report that the event loop may not have processed yet
        self._idle: asyncio.Event | None = None  # made where a caller waits until nothing is left to be done

    # ---- what is to be done ----

    @property
    def is_idle(self) -> bool:
        """Whether nothing is gathered, and no turn is taken."""
        return not (self._has_turn or self._gathered)

    def is_to_wait(self, rows: int) -> bool:
        """Whether a commit of so many rows is to wait for more."""
        return self._timing.pause_s(rows, time.monotonic()) > 0

    def commit_at_once(self, rows: int, now_us: int, commit: Callable[[], Outcome]) -> bool:
        """Makes a small commit of so many rows now, in the event loop; False, and nothing is done, where that may take
        longer than one write and one sync.
        """
        with self._lock:
            if self._has_turn or not self._is_quick(rows, now_us):
                return False
            self._has_turn = True
        self.begun += 1
        self._turn(first=lambda: self._report(commit()))
        return True

    def gather(self, size_bytes: int, add: Callable[[BatchBuilder], None]) -> None:
        """Adds rows to the next commit. `begin_due` is called afterwards."""
        with self._lock:
            last = self._gathered[-1] if self._gathered else None
            # A commit of a full builder and a large message must fit into a frame between brokers.
            if last is None or last.builder.is_full or (size_bytes > COMMIT_BYTES and last.builder.rows):
                last = Gathering(self._memory.builder())
                self._gathered.append(last)
                self.begun += 1
            add(last.builder)
            last.frame_bytes += size_bytes
            if not self._has_turn:
                self._has_turn = self._is_turn_due = True

    def begin_due(self) -> None:
        """After messages were gathered: ensures that a turn takes them."""
        if self._is_turn_due:
            self._begin_turn()

    def change_window(self, window_s: float) -> None:
        """Another deduplication window; it is rebuilt between two commits."""
        with self._lock:
            self._new_window_s = window_s
            self._ensure_turn()

    def roll(self) -> None:
        """Closes the active segment, so that it can be sealed. From any thread."""
        with self._lock:
            self._roll_due = True
            self._ensure_turn()

    def hand_over(self, errand: Callable[[], None], *, rows: int = 0, size_bytes: int = 0) -> None:
        """Executes this between two commits; an exception in it is a bug. From any thread, unless `rows` are stated.

        Args:
            rows: in the event loop: it appends so many, of `size_bytes`, and nothing else. If that is quick, it is done
                when this returns, in the event loop, to which it then reports directly.

        Raises:
            ShuttingDown: no more data is written.
        """
        is_small = rows > 0 and size_bytes <= QUICK_BYTES
        with self._lock:
            if self.is_closing:
                raise ShuttingDown("the broker is shutting down, or is no longer the leader: repeat the request")
            is_quick = is_small and not self._has_turn and self._is_quick(rows, self._stream_time.now_us())
            if is_quick:
                self._has_turn = True
            else:
                work = carried(errand)
                self._errands.append(partial(self._timed_in_thread, work) if is_small else work)
                self._ensure_turn()
        if is_quick:
            self._turn(first=partial(self._timed, errand))

    def _timed_in_thread(self, errand: Callable[[], None]) -> None:
        started_s = time.monotonic()
        errand()
        self._pace.took_in_thread(time.monotonic() - started_s)

    def _timed(self, errand: Callable[[], None]) -> None:
        """In the event loop: appends that take long are made in threads again."""
        started_s = time.monotonic()
        errand()
        self._pace.took(time.monotonic() - started_s)

    def start(self, on_bug: Callable[[str, BaseException], None]) -> None:
        """`on_bug` is called, in the event loop, with the error that stopped the writer."""
        self._on_bug = on_bug

    async def stop(self, *, abandon: bool = False) -> None:
        """Returns when all that was gathered is committed, or with `abandon` dropped, and nothing more will be."""
        with self._lock:
            self.is_closing, self._is_abandoned = True, self._is_abandoned or abandon
            self._ensure_turn()
        await self._stopped.wait()

    async def drained(self) -> None:
        """Returns when all messages gathered so far are appended; no more may be gathered meanwhile."""
        with self._lock:
            if self._gathered:
                self._ensure_turn()
            if self._has_turn and not self._stopped.is_set():
                self._idle = self._idle or asyncio.Event()
            idle = self._idle
        if idle is not None:
            await idle.wait()

    # ---- when a turn begins ----

    def awaits_copies(self) -> None:
        """A commit is stored here, and not by all in-sync replicas yet."""
        self._timing.copying(time.monotonic())

    def was_copied(self, rows: int, *, is_last: bool) -> None:
        """All in-sync replicas have so many more rows, and their acks are sent. `is_last`: no other commit waits."""
        with self._lock:
            gathered_rows = sum(one.builder.rows for one in self._gathered)
        self._timing.acked(rows, gathered_rows, time.monotonic(), is_last=is_last)
        self._begin_gathered()

    def _ensure_turn(self) -> None:
        """For other work than new messages. Under the lock."""
        if not self._has_turn:
            self._has_turn = True
            self._turn_in_thread()

    def _begin_turn(self) -> None:
        """For the messages that were just received, or that have waited: in the event loop, without another turn of it,
        or in a thread.
        """
        self._is_turn_due = False
        with self._lock:
            rows, is_small = self._gathered[0].builder.rows, self._is_gathered_small()
            pause_s = self._timing.pause_s(rows, time.monotonic()) if is_small and not self.is_closing else 0.0
            if pause_s > 0:
                self._has_turn = False
                self._postpone(self._loop.time() + pause_s)
                return
            is_quick = is_small and self._is_quick(rows, self._stream_time.now_us())
        if is_quick:
            self._turn()
        else:
            self._turn_in_thread()

    def _postpone(self, until_s: float) -> None:
        if self._postponed is not None and self._postponed.when() > until_s:
            self._postponed.cancel()
            self._postponed = None
        if self._postponed is None:
            self._postponed = self._loop.call_at(until_s, self._begin_postponed)

    def _begin_postponed(self) -> None:
        self._postponed = None
        self._begin_gathered()

    def _begin_gathered(self) -> None:
        with self._lock:
            if self._has_turn or not self._gathered:
                return
            self._has_turn = True
        self._begin_turn()

    def _turn_in_thread(self) -> None:
        self._executor.submit(self._turn, is_in_loop=False)

    def _is_gathered_small(self) -> bool:
        """Whether what was gathered is one small commit. Under the lock."""
        return (
            len(self._gathered) == 1
            and self._gathered[0].frame_bytes <= QUICK_BYTES
            and not self._gathered[0].builder.has_conditions  # to check them may take a read of the log
        )

    def _is_quick(self, rows: int, now_us: int) -> bool:
        """Whether a small commit of so many rows is all there is to do, without a new file, and the disk was fast
        recently. Under the lock.
        """
        return (
            self._unreported == 0  # the loop gets the reports of commits in their order
            and self._commits.room.fits(rows, 2 * QUICK_BYTES + ROW_BYTES * rows)
            and not (self.is_closing or self._roll_due or self._errands or self._new_window_s is not None)
            and self._pace.is_quick
            and self._log.is_quick_append(now_us)
        )

    # ---- a turn: in a thread, or in the event loop if the commit is fast ----

    def _turn(self, *, first: Callable[[], None] | None = None, is_in_loop: bool = True) -> None:
        """Executes pending commits, and for a while new ones; then other streams get their turn. `first`: comes before
        what is pending.
        """
        self._is_in_loop = is_in_loop
        try:
            until, work = time.monotonic() + _TURN_S, first or self._next_work()
            while work is not None:
                work()
                if time.monotonic() > until:
                    self._turn_in_thread()
                    return
                work = self._next_work()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._on_bug, f"the writer of stream {self._name}", error)
            raise

    def _next_work(self) -> Callable[[], None] | None:
        with self._lock:
            if self._new_window_s is not None:
                return self._rebuild_dedupe
            if self._errands and not (self._gathered and self._did_errand):  # in turn with commits
                self._did_errand = self._has_report = True
                return self._errands.popleft()
            if self._gathered:
                self._did_errand = False
                self._has_report |= not self._is_in_loop
                return partial(self._commit, self._gathered.popleft())
            if self.is_closing:
                self._note_idle()
                self._loop.call_soon_threadsafe(self._stopped.set)
                return None  # the turn is not released: no more data is written
            if self._roll_due:
                return self._roll
            self._has_turn = False
            if self._has_report:
                self._has_report = False
                self._unreported += 1
                self._loop.call_soon_threadsafe(self._reported)
            if self._idle is not None:
                self._note_idle()
            return None

    def _reported(self) -> None:
        """In the event loop, after the reports of a turn."""
        with self._lock:
            self._unreported -= 1

    def _note_idle(self) -> None:
        """Under the lock."""
        if self._idle is not None:
            self._loop.call_soon_threadsafe(self._idle.set)
            self._idle = None

    def _commit(self, gathering: Gathering) -> None:
        if self._is_abandoned:
            error = ShuttingDown("another broker is now the leader: send the message again")
            outcome = Outcome(0, gathering.frame_bytes, refusal=error)
        else:
            outcome = self._commits.of_gathered(gathering, is_in_loop=self._is_in_loop)
        self._report(outcome)
        if outcome.span is not None:
            outcome.span.find_contexts()
        self._memory.take_back(gathering.builder)

    def _report(self, outcome: Outcome) -> None:
        """To the event loop."""
        is_stored, took_s = outcome.refusal is None, self._log.written_in_s
        if self._is_in_loop:
            if is_stored:
                self._pace.took(took_s)
            self._finish(outcome)
        else:
            if is_stored:
                self._pace.took_in_thread(took_s)
            self._loop.call_soon_threadsafe(self._finish, outcome)

    def _rebuild_dedupe(self) -> None:
        with self._lock:
            window_s, self._new_window_s = self._new_window_s, None
        assert window_s is not None, "only this turn takes it"
        self._commits.rebuild_dedupe(window_s)

    def _roll(self) -> None:
        with self._lock:
            self._roll_due = False
        try:
            self._log.roll()
        except NatslogError as error:
            logger.error(
                "stream %s: the active segment could not be rolled: %s",
                self._name,
                error.message,
                extra=event("stream.roll_failed", stream=self._name, reason=error.code),
            )
