"""The path of one stream from frames to acks: gather while the last commit syncs, commit, ack.

Theory of operation. Two owners, and a queue of builders between them:

- `receive` runs in the event loop for every received chunk. It copies the frames into the last builder, which is one
  step under the lock, and ensures that a writer thread will take a turn.
- A turn (`_turn`) takes builders, oldest first: writes and fsyncs each as one commit, a kernel builds its acks, which
  are passed to the event loop to be sent in one piece, and the turn continues with the messages gathered meanwhile,
  without waiting for the loop. Batches therefore grow automatically under load, and at one message a second an ack
  takes one fsync. There are no artificial delays.

If few messages have gathered, no new segment is due and the disk was fast recently, the loop takes the turn itself: two
thread switches would cost more than the fsync. When the disk becomes slow, only the threads take turns from then on.

A commit is acked when all in-sync replicas have it: its acks wait in order until the high watermark (HW) has passed its
rows. With one replica this is immediate. The rows are on disk, and use no memory any more.

Invariants. Nothing is acked before its fsync returned here and HW is above it. At most one turn of a stream runs at a
time: it is the log's only writer while it leads. The event loop gets the reports of commits in their order: it makes
none itself while the report of a thread is on its way. Memory is bounded by the broker's `IngestMemory`; messages that
do not fit are refused (with an answer if they have a reply subject), counted and logged, never dropped without a
record.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from natslog import tracing
from natslog.arrow.row_buffers import RowBuffers
from natslog.errors import ConditionFailed, InvalidRequest, NatslogError, Overloaded, ShuttingDown
from natslog.ingest import acks
from natslog.ingest.ack_rules import AckRules
from natslog.ingest.batches import (
    COMMIT_BYTES,
    Batch,
    BatchBuilder,
    survey_of,
)
from natslog.ingest.columns import Texts
from natslog.ingest.conditions import (
    are_of_fast_batches,
    begin_as_envelopes,
    conditions_of,
    demands_at,
    marked,
    marked_features,
)
from natslog.ingest.dedupe import NEW, REPEATED, DedupeWindow
from natslog.ingest.envelopes import BYTES_PER_ROW, Envelope, Refused, open_messages, split_envelopes
from natslog.ingest.message_sizes import first_larger, split_by_size, too_large
from natslog.ingest.unwanted import split_by_subject, split_by_text
from natslog.log import RunLog
from natslog.log.stream_log import ROW_BYTES, Written
from natslog.log_events import event
from natslog.node.cluster_clock import StreamTime
from natslog.node.writes.admission import REFUSED, Refusal, refusals_of
from natslog.node.writes.commit_spans import CommitSpan
from natslog.node.writes.commit_timing import CommitTiming
from natslog.node.writes.dedupe_rebuild import rebuilt_dedupe
from natslog.node.writes.disk_pace import DiskPace
from natslog.node.writes.header_checks import fast_batch_refusal, feature_refusals, refusal_of
from natslog.node.writes.ingest_memory import IngestMemory, IngestStats
from natslog.node.writes.last_of_subjects import LastOfSubjects
from natslog.node.writes.stream_room import StreamRoom
from natslog.request_ids import carried
from natslog.subjects import MAX_SUBJECT_BYTES
from natslog.wire.frames import Frames
from natslog.wire.layout import REPLY_LEN, Survey

logger = logging.getLogger("natslog.ingest")

Offsets: TypeAlias = npt.NDArray[np.int64]
Marks: TypeAlias = npt.NDArray[np.bool_]

_LOG_EVERY_S = 5.0
_TURN_S = 0.05
_QUICK_BYTES = 32 * 1024
_WAITING_BYTES = 256  # of a commit's own record


class Sender(Protocol):
    """Sends acks as raw NATS protocol; returns False while no server is connected."""

    def send_now(self, protocol: bytes | memoryview) -> bool: ...


@dataclass(slots=True)
class _Gathering:
    """A builder, the bytes of frames that its rows came in, and when the first of them came (monotonic)."""

    builder: BatchBuilder
    frame_bytes: int = 0
    begun_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of one builder's rows. All of them, including duplicates, are stored below `end_offset`, except those
    that are refused (`unmet`): as acks, their answers wait until what they were compared with is committed. `begun_s`:
    when the first row was received. `span`: None without tracing.
    """

    rows: int
    duplicates: int
    frame_bytes: int
    seconds: float
    answers: bytes | memoryview | None
    refusal: NatslogError | None = None
    end_offset: int = 0
    unmet: Sequence[Refusal] = ()
    begun_s: float = 0.0
    span: CommitSpan | None = None

    @property
    def stored(self) -> int:
        return self.rows - self.duplicates - len(self.unmet)

    @property
    def held_bytes(self) -> int:
        """The memory of a commit that waits for HW: the buffer of the acks. The buffers of the rows are released once
        they are stored here.
        """
        if isinstance(self.answers, memoryview):
            return _WAITING_BYTES + memoryview(self.answers.obj).nbytes
        return _WAITING_BYTES + len(self.answers or b"")

    def end_span(self) -> None:
        """The messages are committed, or refused."""
        if self.span is None:
            return
        attributes: dict[str, int | float] = {
            "messaging.batch.message_count": self.rows,
            "natslog.stored_rows": 0 if self.refusal is not None else self.stored,
            "natslog.bytes": self.frame_bytes,
        }
        if self.refusal is None:
            attributes |= {"natslog.duplicates": self.duplicates, "natslog.append_seconds": self.seconds}
            if self.stored:
                attributes |= {
                    "natslog.first_offset": self.end_offset - self.stored,
                    "natslog.last_offset": self.end_offset - 1,
                }
        self.span.ended(attributes, self.refusal)


class StreamIngest:
    """Receives frames and sends acks. `start` and `stop` it in the event loop.

    Args:
        stream_time: gives the timestamps of appended messages, and the time for deduplication.
        pace: of the disk, shared by the streams of a broker.
        appended: told, in the event loop, where the log ends now; calls `release` with the high watermark that
            follows. Without it all that is appended is committed.
        written: told, in the event loop, of a small commit that is written, before it is synced.
        refusal: why nothing may be appended now, if so; asked from any thread.
        domain: of JetStream, that acks of a stream of its API state; empty: none. Asked from any thread.

    Attributes:
        ack_rules: which messages are acked, and where to. The event loop's.
        refuses: why no message is taken: an operator has paused or sealed the stream.
        max_message_bytes: larger messages are refused; None: no limit. room: where new messages are refused at limits.
    """

    def __init__(
        self,
        name: str,
        log: RunLog,
        *,
        stream_time: StreamTime,
        sender: Sender,
        executor: Executor,
        memory: IngestMemory,
        refuses: NatslogError | None = None,
        ack_rules: AckRules,
        stats: IngestStats | None = None,
        pace: DiskPace | None = None,
        appended: Callable[[int], object] | None = None,
        written: Written | None = None,
        refusal: Callable[[], NatslogError | None] = lambda: None,
        domain: Callable[[], str] = lambda: "",
    ) -> None:
        self._domain = domain
        self.name = name
        self.log = log
        self.stream_time = stream_time
        self.stats = stats or IngestStats()
        self.refuses = refuses
        self.ack_rules = ack_rules
        self.max_message_bytes = log.settings.max_message_bytes
        self.dedupe = DedupeWindow(log.settings.dedupe_window_s)
        self.room = StreamRoom(log)
        self._last_of_subjects = LastOfSubjects(log)
        self._has_spans = tracing.is_on()
        self._sender = sender
        self._executor = executor
        self._memory = memory
        self._pace = pace or DiskPace()
        self._loop = asyncio.get_running_loop()
        self._last_complaint = -_LOG_EVERY_S
        self._appended = appended or self.release
        self._written = written
        self._refusal = refusal
        self._uncommitted: deque[_Outcome] = deque()
        self._timing = CommitTiming()
        self._is_copying = False  # copies of a commit are awaited
        self._postponed: asyncio.TimerHandle | None = None
        self._begun = self._ended = 0  # builders so far: that rows were gathered in, and whose commit has an outcome
        self._abandoned = False
        self._on_bug: Callable[[str, BaseException], None]
        self._stopped = asyncio.Event()
        self._lock = threading.Lock()  # guards what follows
        self._gathered: deque[_Gathering] = deque()
        self._has_turn = False
        self._is_in_loop = False  # the present turn
        self._is_turn_due = False  # for the event loop
        self._closing = False
        self._roll_due = False
        self._new_window_s: float | None = None
        self._errands: deque[Callable[[], None]] = deque()
        self._did_errand = False
        self._has_report = False  # the present turn has handed something to the event loop
        self._unreported = 0  # turns with a report that the event loop may not have processed yet
        self._idle: asyncio.Event | None = None  # made where somebody waits until nothing is left to be done
        self._outcome: asyncio.Event | None = None  # the same of the next commit's outcome; for the event loop

    def start(self, on_bug: Callable[[str, BaseException], None]) -> None:
        """`on_bug` is called, in the event loop, with the error that stopped the writer."""
        self._on_bug = on_bug

    async def stop(self) -> None:
        """Appends received messages, then ends; messages that are committed by then are acked."""
        with self._lock:
            self._closing = True
            self._ensure_turn()
        await self._stopped.wait()

    async def abandon(self) -> None:
        """Ends at once: another broker is leader. Uncommitted messages are not acked: their publishers send them
        again.
        """
        self._abandoned = True
        await self.stop()
        await asyncio.sleep(0)  # the loop has processed the results of the last turn
        for outcome in self._uncommitted:
            self._memory.give_back(outcome.held_bytes)
        self._uncommitted.clear()

    async def drained(self) -> None:
        """Returns when all messages received so far are appended; no more messages may arrive."""
        with self._lock:
            if self._gathered:
                self._ensure_turn()
            if self._has_turn and not self._stopped.is_set():
                self._idle = self._idle or asyncio.Event()
            idle = self._idle
        if idle is not None:
            await idle.wait()
        await asyncio.sleep(0)  # the loop has processed the results of the last turn

    @property
    def is_settled(self) -> bool:
        """Whether all messages received until now are appended or refused. In the event loop."""
        return self._ended >= self._begun

    async def settled(self) -> None:
        """Returns when all messages received until now are appended or refused. In the event loop."""
        begun = self._begun
        while self._ended < begun:
            self._outcome = self._outcome or asyncio.Event()
            await self._outcome.wait()

    # ---- receiving: the event loop ----

    def receive(self, frames: Frames) -> None:
        """Called by the link with frames of this stream's subscription; copies the data that it keeps."""
        if self._begin_plain(frames):
            return
        try:
            self._receive(frames)
        finally:
            if self._is_turn_due:
                self._begin_turn()

    def _begin_plain(self, frames: Frames) -> bool:
        """Commits a few plain messages at once, without gathering them; False, and nothing is done, where they, what is
        pending or the stream need more than that.
        """
        if self._has_turn or self._gathered or self._has_spans:
            return False
        most_bytes = _QUICK_BYTES if self.max_message_bytes is None else self.max_message_bytes
        size_bytes = self.ack_rules.plain_bytes(frames, most_bytes)
        if not 0 < size_bytes <= _QUICK_BYTES or not self._memory.fits(size_bytes) or self.why_not() is not None:
            return False
        if self._timing.pause_s(len(frames.rows), time.monotonic()) > 0:
            return False
        now_us = self.stream_time.now_us()
        with self._lock:
            if self._has_turn or not self._is_quick(len(frames.rows), now_us):
                return False
            self._has_turn = True
        self._begun += 1
        self.stats.received += len(frames.rows)
        self.stats.received_bytes += size_bytes
        self._turn(
            self._finish, self._pace.took, partial(self._commit_plain, frames, size_bytes, now_us, time.monotonic())
        )
        return True

    def _receive(self, frames: Frames) -> None:
        opened, unread = open_messages(frames)
        self.stats.unread_envelopes += unread
        frames = self.ack_rules.applied(frames, opened)
        survey = survey_of(frames)
        self.stats.received += len(frames.rows)
        self.stats.received_bytes += survey.frame_bytes
        if (why_not := self.why_not()) is not None:
            self._refuse(frames, why_not)
            return
        wanted, has_conditions = self._without_unwanted(frames, survey)
        if wanted is not frames:
            frames, survey = wanted, survey_of(wanted)
        if not len(frames.rows):
            return
        most_bytes = self.max_message_bytes
        for received, is_unread in split_envelopes(frames, max_message_bytes=most_bytes):
            match received:
                case Frames():
                    self.stats.unread_envelopes += is_unread
                    part = survey if received is frames else survey_of(received)
                    self._gather(received, part, has_conditions=has_conditions)
                case Envelope():
                    self._gather_envelope(received)
                case Refused(refused, error):
                    self._refuse(refused, error, "bad_envelope")

    def why_not(self) -> NatslogError | None:
        """The reason why the stream accepts no messages now; None if it does. From any thread."""
        if self.refuses is not None and not self._closing:
            return self.refuses
        return self.why_not_write()

    def why_not_write(self) -> NatslogError | None:
        """The same, but for what an operator decided."""
        if self._closing:
            return ShuttingDown("the broker is shutting down: send the message again")
        return self.log.failure or self._refusal()

    def _without_unwanted(self, frames: Frames, survey: Survey) -> tuple[Frames, bool]:
        """The same frames where all can be taken; and whether any of them may have a condition."""
        frames, not_plain = split_by_subject(frames)
        if len(not_plain.rows):
            error = InvalidRequest(
                f"the subject of a message must have at most {MAX_SUBJECT_BYTES} bytes and no wildcard as a token: "
                "correct it"
            )
            self._refuse(not_plain, error, "bad_subject")
        if survey.not_ascii_rows:
            frames, garbled = split_by_text(frames)
            if len(garbled.rows):
                error = InvalidRequest("subject and headers must be UTF-8: correct the message")
                self._refuse(garbled, error, "not_utf8")
        if self.max_message_bytes is not None and survey.headed_rows:  # first, as JetStream does it
            are_envelopes = begin_as_envelopes(frames)
            frames = frames if are_envelopes.any() else self._of_allowed_size(frames, self.max_message_bytes)
        if self.ack_rules.acks == "any":
            frames = self._without_features(frames, has_headers=survey.headed_rows > 0)
        if survey.headed_rows and (marks := marked(frames)) is not None:
            return self._without_refused_demands(frames, marks), True
        return frames, False

    def _without_features(self, frames: Frames, *, has_headers: bool) -> Frames:
        """A JetStream client must not take an ack for one of what the header, or the reply subject, requests."""
        marks, errors = [are_of_fast_batches(frames)], [fast_batch_refusal(self.name)]
        if has_headers:
            marks += marked_features(frames)
            errors += feature_refusals(self.name)
        for error, refused in zip(errors, marks, strict=True):
            if refused.any():
                self._refuse(frames.select(refused), error)
        refused = np.logical_or.reduce(marks)
        return frames.select(~refused) if refused.any() else frames

    def _without_refused_demands(self, frames: Frames, marks: Marks) -> Frames:
        """Checks the headers of the marked frames that depend on the settings of the stream only."""
        are_envelopes, refused = begin_as_envelopes(frames), np.zeros(len(frames.rows), np.bool_)
        errors: dict[str, tuple[NatslogError, list[int]]] = {}
        for at in np.flatnonzero(marks).tolist():
            error = refusal_of(demands_at(frames, at), self.name, self.log.settings)
            if error is None and are_envelopes[at]:
                error = InvalidRequest(
                    "an envelope of rows has no Nats-Expected-…, Nats-TTL or Nats-Rollup header of its own: "
                    "send its rows as messages"
                )
            if error is not None:
                refused[at] = True
                errors.setdefault(error.message, (error, []))[1].append(at)
        for error, rows in errors.values():
            self._refuse(frames.select(np.array(rows)), error)
        return frames.select(~refused) if errors else frames

    def _gather(self, frames: Frames, survey: Survey, *, has_conditions: bool) -> None:
        if self.max_message_bytes is not None:
            fitting = self._of_allowed_size(frames, self.max_message_bytes)
            if not len(fitting.rows):
                return
            if fitting is not frames:
                frames, survey = fitting, survey_of(fitting)
        if not self._memory.take(survey.frame_bytes):
            self._refuse(
                frames, Overloaded("the broker's memory for uncommitted messages is full: reduce the publish rate")
            )
            return
        conditions = conditions_of(frames) if has_conditions else ()

        def add(builder: BatchBuilder) -> None:
            builder.add_conditions(conditions)
            builder.add(frames, survey)

        self._add(survey.frame_bytes, add)

    def _of_allowed_size(self, frames: Frames, max_bytes: int) -> Frames:
        """The same frames where none is too large."""
        fitting, large = split_by_size(frames, max_bytes)
        if len(large.rows):
            self._refuse(large, too_large(max_bytes, "the message is larger"))
        return fitting

    def _gather_envelope(self, envelope: Envelope) -> None:
        size_bytes = envelope.rows.nbytes + BYTES_PER_ROW * envelope.rows.num_rows
        max_bytes = self.max_message_bytes
        if max_bytes is not None and (larger := first_larger(envelope.rows, max_bytes)) is not None:
            row, row_bytes = larger
            self._refuse_envelope(envelope, too_large(max_bytes, f"row {row} of the envelope has {row_bytes} bytes"))
            return
        if not self._memory.take(size_bytes):
            self._refuse_envelope(
                envelope, Overloaded("the broker's memory for uncommitted messages is full: reduce the publish rate")
            )
            return
        given = (envelope.subject, envelope.reply, envelope.rows, envelope.message_id, envelope.correlation_id)
        wants_full_ack = envelope.wants_full_ack
        self._add(size_bytes, lambda builder: builder.add_envelope(*given, wants_full_ack=wants_full_ack))

    def _refuse_envelope(self, envelope: Envelope, error: NatslogError) -> None:
        self._count_refused(envelope.rows.num_rows, error)
        if len(envelope.reply):
            replies, correlations = Texts.of([envelope.reply.tobytes()]), Texts.of([envelope.correlation_id])
            self._answer(self._refused(replies, correlations, error), 1)

    def _add(self, size_bytes: int, add: Callable[[BatchBuilder], None]) -> None:
        """To the rows of the next commit."""
        with self._lock:
            last = self._gathered[-1] if self._gathered else None
            # A commit of a full builder and a large message must fit into a frame between brokers.
            if last is None or last.builder.is_full or (size_bytes > COMMIT_BYTES and last.builder.rows):
                last = _Gathering(self._memory.builder())
                self._gathered.append(last)
                self._begun += 1
            add(last.builder)
            last.frame_bytes += size_bytes
            if not self._has_turn:
                self._has_turn = self._is_turn_due = True

    def _refuse(self, frames: Frames, error: NatslogError, reason: str | None = None) -> None:
        """Sends the refusal to publishers that wait for an ack; the loss of other messages is counted and logged."""
        self._count_refused(len(frames.rows), error, reason)
        answers = self._refusals_of(frames, error)
        if answers is not None:
            self._answer(answers, len(frames.rows))

    def _refusals_of(self, frames: Frames, error: NatslogError) -> memoryview | None:
        """None where no publisher waits for an ack."""
        asking = frames.select(frames.rows[:, REPLY_LEN] > 0)
        if not len(asking.rows):
            return None
        builder = BatchBuilder()
        builder.add(asking)
        batch = builder.taken()
        assert batch.replies is not None, "rows with a reply subject were selected"
        return self._refusals(batch, batch.replies, error)

    def _refusals(self, batch: Batch, replies: Texts, error: NatslogError) -> memoryview:
        return self._refused(replies, batch.correlations, error)

    def _refused(self, replies: Texts, correlations: Texts | None, error: NatslogError) -> memoryview:
        is_jetstream = self.ack_rules.acks == "any"
        return acks.refused(replies, error, stream=self.name, correlations=correlations, is_jetstream=is_jetstream)

    def _count_refused(self, rows: int, error: NatslogError, reason: str | None = None) -> None:
        self.stats.refused[reason or error.code] += rows
        if time.monotonic() - self._last_complaint >= _LOG_EVERY_S:
            self._last_complaint = time.monotonic()
            total = sum(self.stats.refused.values())
            what = ("stream %s: refused %d messages (%d in total): %s", self.name, rows, total, error.message)
            if isinstance(error, ConditionFailed):  # publishers expect it
                logger.info(*what, extra=event("stream.condition_failed", stream=self.name, count=rows))
            else:
                reason = reason or error.code
                logger.error(*what, extra=event("stream.messages_refused", stream=self.name, count=rows, reason=reason))

    def _answer(self, protocol: bytes | memoryview, rows: int) -> None:
        if not self._sender.send_now(protocol):
            self.stats.acks_unsent += rows

    def _finish(self, outcome: _Outcome) -> None:
        """Counts a commit or its refusal; sends acks when HW allows it."""
        self._memory.give_back(outcome.frame_bytes)
        self._ended += 1
        if self._outcome is not None:
            self._outcome.set()
            self._outcome = None
        if outcome.refusal is not None:
            self._count_refused(outcome.rows, outcome.refusal)
            if outcome.answers is not None:
                self._answer(outcome.answers, outcome.rows)
            outcome.end_span()
            return
        self.stats.commits += 1
        self.stats.commit_seconds += outcome.seconds
        self._uncommitted.append(outcome)
        self._memory.charge(outcome.held_bytes)
        for _, error in outcome.unmet:
            self._count_refused(1, error)
        if outcome.stored:
            self._appended(outcome.end_offset)  # releases messages that are committed by it
            if self._uncommitted:
                self._is_copying = True
                self._timing.copying(time.monotonic())
        else:
            self.release(self.log.high_watermark)

    def release(self, high_watermark: int) -> None:
        """Sets HW: sends acks for everything below it."""
        waiting, acked_rows = self._uncommitted, 0
        while waiting and waiting[0].end_offset <= high_watermark:
            outcome = waiting.popleft()
            self._memory.give_back(outcome.held_bytes)
            self.stats.committed += outcome.stored
            self.stats.duplicates += outcome.duplicates
            seconds = time.monotonic() - outcome.begun_s
            self.stats.acked_commits += 1
            self.stats.ack_seconds += seconds
            self.stats.latency.observe(seconds)
            if outcome.answers is not None:
                self._answer(outcome.answers, outcome.rows)
            outcome.end_span()
            acked_rows += outcome.rows
        if acked_rows and self._is_copying:
            self._is_copying = bool(waiting)
            with self._lock:
                gathered_rows = sum(one.builder.rows for one in self._gathered)
            self._timing.acked(acked_rows, gathered_rows, time.monotonic(), is_last=not waiting)
            self._begin_gathered()

    def change_window(self, window_s: float) -> None:
        """Another deduplication window; the writer rebuilds it between two commits."""
        with self._lock:
            self._new_window_s = window_s
            self._ensure_turn()

    def roll(self) -> None:
        """Closes the active segment, so that it can be sealed; only the writer may do this."""
        with self._lock:
            self._roll_due = True
            self._ensure_turn()

    def hand_to_writer(self, errand: Callable[[], None]) -> None:
        """Executes this in the log's only writer between two commits; an exception in it is a bug.

        Raises:
            ShuttingDown: no more data is written.
        """
        with self._lock:
            if self._closing:
                raise ShuttingDown("the broker is shutting down, or is no longer the leader: repeat the request")
            self._errands.append(carried(errand))
            self._ensure_turn()

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
            rows, is_small = self._gathered[0].builder.rows, self._is_gathered_quick()
            pause_s = self._timing.pause_s(rows, time.monotonic()) if is_small and not self._closing else 0.0
            if pause_s > 0:
                self._has_turn = False
                self._postpone(self._loop.time() + pause_s)
                return
            is_quick = is_small and self._is_quick(rows, self.stream_time.now_us())
        if is_quick:
            self._turn(self._finish, self._pace.took)
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
        self._executor.submit(self._turn, self._finish_soon, self._pace.took_in_thread)

    def _is_gathered_quick(self) -> bool:
        """Whether what was gathered is one small commit. Under the lock."""
        return (
            len(self._gathered) == 1
            and self._gathered[0].frame_bytes <= _QUICK_BYTES
            and not self._gathered[0].builder.has_conditions  # to check them may take a read of the log
        )

    def _is_quick(self, rows: int, now_us: int) -> bool:
        """Whether a small commit of so many rows is all there is to do, without a new file, and the disk was fast
        recently. Under the lock.
        """
        return (
            self._unreported == 0  # the loop gets the reports of commits in their order
            and self.room.fits(rows, 2 * _QUICK_BYTES + ROW_BYTES * rows)
            and not (self._closing or self._roll_due or self._errands or self._new_window_s is not None)
            and self._pace.is_quick
            and self.log.is_quick_append(now_us)
        )

    def _finish_soon(self, outcome: _Outcome) -> None:
        self._loop.call_soon_threadsafe(self._finish, outcome)

    # ---- committing: a writer thread, or the event loop if the commit is fast ----

    def _turn(
        self,
        finish: Callable[[_Outcome], None],
        took: Callable[[float], None],
        first: Callable[[], None] | None = None,
    ) -> None:
        """Executes pending commits, and for a while new ones; then other streams get their turn.

        Args:
            finish: takes the outcome of each commit. took: takes the seconds that each took. first: comes before what
                is pending.
        """
        self._is_in_loop = finish == self._finish
        try:
            until, work = time.monotonic() + _TURN_S, first
            while (work := work or self._next_work(finish, took)) is not None:
                work()
                work = None
                if time.monotonic() > until:
                    self._turn_in_thread()
                    return
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._on_bug, f"the writer of stream {self.name}", error)
            raise

    def _next_work(
        self, finish: Callable[[_Outcome], None], took: Callable[[float], None]
    ) -> Callable[[], None] | None:
        with self._lock:
            if self._new_window_s is not None:
                return self._rebuild_dedupe
            if self._errands and not (self._gathered and self._did_errand):  # in turn with commits
                self._did_errand = self._has_report = True
                return self._errands.popleft()
            if self._gathered:
                self._did_errand = False
                self._has_report |= finish == self._finish_soon
                return partial(self._commit, self._gathered.popleft(), finish, took)
            if self._closing:
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

    @property
    def dedupe_window_s(self) -> float:
        """For how long message ids are recognised now: for less than configured if too many come. From any thread."""
        window = self.dedupe
        shortened_us = window.shortened_to_us(self.stream_time.now_us())
        return (window.window_us if shortened_us is None else shortened_us) / 1e6

    def _rebuild_dedupe(self) -> None:
        with self._lock:
            window_s, self._new_window_s = self._new_window_s, None
        assert window_s is not None, "only this turn takes it"
        self.dedupe, damage = rebuilt_dedupe(window_s, self.log)
        if damage is not None:
            logger.error(
                "stream %s: deduplication uses only the readable part of the log: %s",
                self.name,
                damage.message,
                extra=event("stream.dedupe_partial", stream=self.name),
            )

    def _roll(self) -> None:
        with self._lock:
            self._roll_due = False
        try:
            self.log.roll()
        except NatslogError as error:
            logger.error(
                "stream %s: the active segment could not be rolled: %s",
                self.name,
                error.message,
                extra=event("stream.roll_failed", stream=self.name, reason=error.code),
            )

    def _commit(self, gathering: _Gathering, finish: Callable[[_Outcome], None], took: Callable[[float], None]) -> None:
        outcome = self._outcome_of(gathering, took)
        finish(outcome)
        if outcome.span is not None:
            outcome.span.find_contexts()
        self._memory.take_back(gathering.builder)

    def _commit_plain(self, frames: Frames, size_bytes: int, now_us: int, begun_s: float) -> None:
        """In the event loop: see `_begin_plain`."""
        rows, started = len(frames.rows), time.perf_counter()
        try:
            base_offset, _ = self.log.append_plain(frames, size_bytes, now_us, self._written)
        except NatslogError as error:
            self._finish(_Outcome(rows, 0, 0, 0.0, self._refusals_of(frames, error), error))
            return
        seconds = time.perf_counter() - started
        self._pace.took(self.log.written_in_s)
        answers = acks.of_plain(frames, size_bytes, base_offset, stream=self.name, domain=self._stated_domain())
        end_offset = base_offset + rows
        self._finish(_Outcome(rows, 0, 0, seconds, answers or None, end_offset=end_offset, begun_s=begun_s))

    def _outcome_of(self, gathering: _Gathering, took: Callable[[float], None]) -> _Outcome:
        if self._abandoned:
            return _Outcome(
                0,
                0,
                gathering.frame_bytes,
                0.0,
                None,
                ShuttingDown("another broker is now the leader: send the message again"),
            )
        batch, started = gathering.builder.taken(), time.perf_counter()
        rows, frame_bytes = batch.rows.rows, gathering.frame_bytes
        span = self._span_of(batch, gathering.begun_s) if self._has_spans else None
        answers: bytes | memoryview | None = None
        try:
            if (refusal := self._refusal()) is not None:
                raise refusal
            offsets, duplicate, unmet = self._append(batch)
        except NatslogError as error:
            if batch.replies is not None:
                answers = self._refusals(batch, batch.replies, error)
            return _Outcome(rows, 0, frame_bytes, 0.0, answers, error, span=span)
        seconds = time.perf_counter() - started
        took(self.log.written_in_s)
        if batch.replies is not None:
            answers = self._answers(batch, batch.replies, offsets, duplicate, unmet)
        repeated = 0 if duplicate is None else int(duplicate.sum())
        end_offset, begun_s = self.log.log_end_offset, gathering.begun_s
        return _Outcome(
            rows,
            repeated,
            frame_bytes,
            seconds,
            answers,
            end_offset=end_offset,
            unmet=unmet,
            begun_s=begun_s,
            span=span,
        )

    def _span_of(self, batch: Batch, begun_s: float) -> CommitSpan:
        ago_ns = int((time.monotonic() - begun_s) * 1e9)
        return CommitSpan(self.name, batch.rows, time.time_ns() - ago_ns)

    def _answers(
        self, batch: Batch, replies: Texts, offsets: Offsets, duplicate: Marks | None, unmet: Sequence[Refusal]
    ) -> bytes | memoryview:
        """Acks, and the refusals of rows whose condition is not met."""
        correlations, counts, full = batch.correlations, batch.spans, batch.full
        refusals: list[memoryview] = []
        if unmet:
            refusals = self._unmet_answers(replies, correlations, unmet)
            kept = offsets != REFUSED
            replies, offsets = replies.filter(kept), offsets[kept]
            correlations = None if correlations is None else correlations.filter(kept)
            duplicate = None if duplicate is None else duplicate[kept]
            counts = None if counts is None else counts[kept]
            full = None if full is None else full[kept]
        stored = acks.stored(
            replies,
            offsets,
            stream=self.name,
            epoch=self.log.epoch,
            duplicate=duplicate,
            full=full,
            counts=counts,
            correlations=correlations,
            domain=self._stated_domain(),
        )
        return b"".join((stored, *refusals)) if refusals else stored

    def _stated_domain(self) -> str:
        return self._domain() if self.ack_rules.acks == "any" else ""

    def _unmet_answers(self, replies: Texts, correlations: Texts | None, unmet: Sequence[Refusal]) -> list[memoryview]:
        """One piece for all rows with the same reason."""
        reasons: dict[str, tuple[NatslogError, list[int]]] = {}
        for row, error in unmet:
            reasons.setdefault(error.message, (error, []))[1].append(row)
        pieces = []
        for error, rows in reasons.values():
            marks = np.zeros(len(replies.offsets) - 1, np.bool_)
            marks[rows] = True
            ids = None if correlations is None else correlations.filter(marks)
            pieces.append(self._refused(replies.filter(marks), ids, error))
        return pieces

    def _append(self, batch: Batch) -> tuple[Offsets, Marks | None, Sequence[Refusal]]:
        """Drops duplicates, rows whose condition is not met, and those that have no room; appends the rest. Returns
        each row's offset, which were duplicates, and which are refused.
        """
        time_us, ids, room = self.stream_time.now_us(), batch.ids, self.room.of_commit(batch.rows)
        if ids is None and not batch.conditions and room is None:
            base_offset = self._append_rows(batch.rows, time_us)
            return np.arange(base_offset, base_offset + batch.rows.rows, dtype=np.int64), None, ()
        window = self.dedupe
        offsets = np.full(batch.rows.rows, NEW, np.int64) if ids is None else window.find(ids, time_us)
        if batch.spans is not None:
            _spread(offsets, batch.spans)
        is_visited = room is not None or batch.conditions
        unmet = refusals_of(batch, offsets, self.log, self._last_of_subjects, room) if is_visited else ()
        fresh, duplicate = offsets == NEW, (offsets != NEW) & (offsets != REFUSED)
        if fresh.any():
            rows = batch.rows if fresh.all() else batch.rows.filter(fresh)
            base_offset = self._append_rows(rows, time_us)
            offsets[fresh] = np.arange(base_offset, base_offset + rows.rows, dtype=np.int64)
            if ids is not None:
                window.remember(ids[fresh], offsets[fresh], time_us)
        repeated = offsets == REPEATED
        if ids is not None and repeated.any():
            offsets[repeated] = window.find(ids[repeated], time_us)
        return offsets, duplicate if duplicate.any() else None, unmet

    def _append_rows(self, rows: RowBuffers, time_us: int) -> int:
        written = self._written if self._is_in_loop else None
        base_offset, _ = self.log.append(rows, time_us, written)
        self._last_of_subjects.appended(rows, base_offset)
        return base_offset


def _spread(offsets: npt.NDArray[np.int64], spans: npt.NDArray[np.int64]) -> None:
    """All rows of an envelope are duplicates if its last one is, which has the id. The others have no id, and so no
    offset either when `REPEATED` ones are looked up again; they have no reply subject that it would be sent to.
    """
    for last in np.flatnonzero((spans > 1) & (offsets != NEW)).tolist():
        offsets[last - spans[last] + 1 : last] = REPEATED
