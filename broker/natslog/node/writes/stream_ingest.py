"""The path of one stream from frames to acks.

Theory of operation. Data goes one way, through one part after another:

    received frames ──▶ AckRules      which are recorded, and where their acks go
                        Screening     which can be stored; the others are refused (`Refusals`)
                        StreamWriter  gathers them while the last commit syncs, and makes the next one
                        Commits       drops duplicates, appends to the log (fsync), builds the acks
                        WaitingAcks   until the high watermark (HW) has passed the rows: then the acks are sent

A few plain messages that come while nothing is pending are committed straight from their frames, in the call that
received them: they need neither screening nor a builder.

A commit is acked when all in-sync replicas have it. With one replica this is immediate. The rows are on disk, and use
no memory any more.

Invariants. Nothing is acked before its fsync returned here and HW is above it. The writer is the log's only one while
it leads. Memory is bounded by the broker's `IngestMemory`; messages that do not fit are refused (with an answer if they
have a reply subject), counted and logged, never dropped without a record.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor

from natslog import tracing
from natslog.errors import NatslogError, Overloaded, ShuttingDown
from natslog.ingest.ack_rules import AckRules
from natslog.ingest.batches import BatchBuilder, survey_of
from natslog.ingest.conditions import conditions_of
from natslog.ingest.dedupe import DedupeWindow
from natslog.ingest.envelopes import BYTES_PER_ROW, Envelope, Refused, open_messages, split_envelopes
from natslog.ingest.message_sizes import first_larger, too_large
from natslog.log import RunLog
from natslog.log.stream_log import Written
from natslog.node.cluster_clock import StreamTime
from natslog.node.writes.commits import Commits, Outcome
from natslog.node.writes.ingest_memory import IngestMemory, IngestStats
from natslog.node.writes.pace import DiskPace
from natslog.node.writes.refusals import Refusals, Sender
from natslog.node.writes.screening import Screening
from natslog.node.writes.stream_room import StreamRoom
from natslog.node.writes.waiting_acks import WaitingAcks
from natslog.node.writes.writer import QUICK_BYTES, StreamWriter
from natslog.wire.frames import Frames
from natslog.wire.header_parts import split_headers
from natslog.wire.layout import Survey

_OUT_OF_MEMORY = "the broker's memory for uncommitted messages is full: reduce the publish rate"


class StreamIngest:
    """Receives frames and sends acks. `start` and `stop` it in the event loop.

    Args:
        stream_time: gives the timestamps of appended messages, and the time for deduplication.
        pace: of the disk, shared by the streams of a broker.
        appended: is called, in the event loop, with the end of the log; calls `release` with the high watermark that
            follows. Without it all that is appended is committed.
        written: is called, in the event loop, with a small commit that is written, before it is synced.
        refusal: why nothing may be appended now, if so; called from any thread.
        domain: of JetStream, that acks of a stream of its API state; empty: none. Called from any thread.

    Attributes:
        ack_rules: which messages are acked, and where to. The event loop's.
        refuses: why no message is taken: an operator has paused or sealed the stream.
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
        self.name = name
        self.log = log
        self.stream_time = stream_time
        self.stats = stats or IngestStats()
        self.refuses = refuses
        self.ack_rules = ack_rules
        self._memory = memory
        self._appended = appended or self.release
        self._refusal = refusal
        self._has_spans = tracing.is_on()
        self._refusals = Refusals(name, log, sender, self.stats)
        self._screening = Screening(name, log, self._refusals)
        self._commits = Commits(
            name,
            log,
            self._refusals,
            stream_time=stream_time,
            refusal=refusal,
            domain=domain,
            written=written,
            has_spans=self._has_spans,
        )
        self._writer = StreamWriter(
            name,
            log,
            self._commits,
            self._finish,
            stream_time=stream_time,
            executor=executor,
            memory=memory,
            pace=pace or DiskPace(),
        )
        self._waiting = WaitingAcks(memory, self._refusals, self.stats)
        self._is_copying = False  # copies of a commit are awaited
        self._ended = 0  # commits with an outcome
        self._outcome: asyncio.Event | None = None  # made where a caller waits for the next commit's outcome

    # ---- life ----

    def start(self, on_bug: Callable[[str, BaseException], None]) -> None:
        """`on_bug` is called, in the event loop, with the error that stopped the writer."""
        self._writer.start(on_bug)

    async def stop(self) -> None:
        """Appends received messages, then ends; messages that are committed by then are acked."""
        await self._writer.stop()

    async def abandon(self) -> None:
        """Ends at once: another broker is leader. Uncommitted messages are not acked: their publishers send them
        again.
        """
        await self._writer.stop(abandon=True)
        await asyncio.sleep(0)  # the loop has processed the results of the last turn
        self._waiting.drop()

    async def drained(self) -> None:
        """Returns when all messages received so far are appended; no more messages may arrive."""
        await self._writer.drained()
        await asyncio.sleep(0)  # the loop has processed the results of the last turn

    @property
    def is_quiescent(self) -> bool:
        """Whether all messages received until now are appended or refused. In the event loop."""
        return self._ended >= self._writer.begun

    async def quiesced(self) -> None:
        """Returns when all messages received until now are appended or refused. In the event loop."""
        begun = self._writer.begun
        while self._ended < begun:
            self._outcome = self._outcome or asyncio.Event()
            await self._outcome.wait()

    def why_not(self) -> NatslogError | None:
        """The reason why the stream accepts no messages now; None if it does. From any thread."""
        if self.refuses is not None and not self._writer.is_closing:
            return self.refuses
        return self.why_not_write()

    def why_not_write(self) -> NatslogError | None:
        """The same, but for what an operator decided."""
        if self._writer.is_closing:
            return ShuttingDown("the broker is shutting down: send the message again")
        return self.log.shared.failure or self._refusal()

    # ---- receiving ----

    def receive(self, frames: Frames) -> None:
        """Called by the link with frames of this stream's subscription; copies the data that it keeps."""
        if self._writer.is_idle and not self._has_spans and self._commit_plain(frames):
            return
        try:
            self._gather_wanted(frames)
        finally:
            self._writer.begin_due()

    def _commit_plain(self, frames: Frames) -> bool:
        """Commits a few plain messages at once, without gathering them; False, and nothing is done, where they, or the
        stream, need more than that.
        """
        max_bytes = self.log.shared.settings.max_message_bytes
        most_bytes = QUICK_BYTES if max_bytes is None else max_bytes
        size_bytes, header_lines = self.ack_rules.survey_plain(frames, most_bytes)
        if not 0 < size_bytes <= QUICK_BYTES or not self._memory.fits(size_bytes) or self.why_not() is not None:
            return False
        rows = len(frames.rows)
        if self._writer.is_to_wait(rows):
            return False
        now_us = self.stream_time.now_us()

        def commit() -> Outcome:
            self.stats.received += rows
            self.stats.received_bytes += size_bytes
            headers = split_headers(frames, header_lines) if header_lines else None
            return self._commits.of_plain(frames, headers, size_bytes, now_us, time.monotonic())

        return self._writer.commit_at_once(rows, now_us, commit)

    def _gather_wanted(self, frames: Frames) -> None:
        """What can be stored of the frames goes to the writer; the rest is refused."""
        opened, unread = open_messages(frames)
        self.stats.unread_envelopes += unread
        frames = self.ack_rules.applied(frames, opened)
        survey = survey_of(frames)
        self.stats.received += len(frames.rows)
        self.stats.received_bytes += survey.frame_bytes
        if (why_not := self.why_not()) is not None:
            self._refusals.refuse(frames, why_not)
            return
        frames, survey, has_conditions = self._screening.screened(frames, survey)
        if not len(frames.rows):
            return
        max_bytes = self.log.settings.max_message_bytes
        for received, is_unread in split_envelopes(frames, max_message_bytes=max_bytes):
            match received:
                case Frames():
                    self.stats.unread_envelopes += is_unread
                    part = survey if received is frames else survey_of(received)
                    self._gather(received, part, has_conditions=has_conditions)
                case Envelope():
                    self._gather_envelope(received)
                case Refused(refused, error):
                    self._refusals.refuse(refused, error, "bad_envelope")

    def _gather(self, frames: Frames, survey: Survey, *, has_conditions: bool) -> None:
        fitting = self._screening.of_allowed_size(frames)
        if not len(fitting.rows):
            return
        if fitting is not frames:
            frames, survey = fitting, survey_of(fitting)
        if not self._memory.take(survey.frame_bytes):
            self._refusals.refuse(frames, Overloaded(_OUT_OF_MEMORY))
            return
        conditions = conditions_of(frames) if has_conditions else ()

        def add(builder: BatchBuilder) -> None:
            builder.add_conditions(conditions)
            builder.add(frames, survey)

        self._writer.gather(survey.frame_bytes, add)

    def _gather_envelope(self, envelope: Envelope) -> None:
        size_bytes = envelope.rows.nbytes + BYTES_PER_ROW * envelope.rows.num_rows
        max_bytes = self.log.settings.max_message_bytes
        if max_bytes is not None and (larger := first_larger(envelope.rows, max_bytes)) is not None:
            row, row_bytes = larger
            error = too_large(max_bytes, f"row {row} of the envelope has {row_bytes} bytes")
            self._refusals.refuse_envelope(envelope, error)
            return
        if not self._memory.take(size_bytes):
            self._refusals.refuse_envelope(envelope, Overloaded(_OUT_OF_MEMORY))
            return
        given = (envelope.subject, envelope.reply, envelope.rows, envelope.message_id, envelope.correlation_id)
        wants_full_ack = envelope.wants_full_ack
        self._writer.gather(size_bytes, lambda builder: builder.add_envelope(*given, wants_full_ack=wants_full_ack))

    # ---- acks ----

    def _finish(self, outcome: Outcome) -> None:
        """Counts a commit or its refusal; its acks are sent when HW allows it."""
        self._memory.give_back(outcome.frame_bytes)
        self._ended += 1
        if self._outcome is not None:
            self._outcome.set()
            self._outcome = None
        if outcome.refusal is not None:
            self._refusals.count(outcome.rows, outcome.refusal)
            if outcome.answers is not None:
                self._refusals.send(outcome.answers, outcome.rows)
            outcome.end_span()
            return
        self.stats.commits += 1
        self.stats.commit_seconds += outcome.seconds
        self._waiting.add(outcome)
        for _, error in outcome.unmet:
            self._refusals.count(1, error)
        if outcome.stored:
            self._appended(outcome.end_offset)  # releases messages that are committed by it
            if self._waiting:
                self._is_copying = True
                self._writer.awaits_copies()
        else:
            self.release(self.log.high_watermark)

    def release(self, high_watermark: int) -> None:
        """Sets HW: sends acks for everything below it."""
        acked_rows = self._waiting.release(high_watermark)
        if acked_rows and self._is_copying:
            self._is_copying = bool(self._waiting)
            self._writer.was_copied(acked_rows, is_last=not self._is_copying)

    # ---- other work of the log's only writer ----

    def change_window(self, window_s: float) -> None:
        """Another deduplication window; the writer rebuilds it between two commits."""
        self._writer.change_window(window_s)

    def roll(self) -> None:
        """Closes the active segment, so that it can be sealed."""
        self._writer.roll()

    def hand_to_writer(self, errand: Callable[[], None], *, rows: int = 0, size_bytes: int = 0) -> None:
        """As `StreamWriter.hand_over`."""
        self._writer.hand_over(errand, rows=rows, size_bytes=size_bytes)

    @property
    def dedupe(self) -> DedupeWindow:
        """The message ids that are recognised. For the writer; set before `start`."""
        return self._commits.dedupe

    @dedupe.setter
    def dedupe(self, window: DedupeWindow) -> None:
        self._commits.dedupe = window

    @property
    def dedupe_window_s(self) -> float:
        """For how long message ids are recognised now: for less than configured if too many come. From any thread."""
        window = self.dedupe
        shortened_us = window.shortened_to_us(self.stream_time.now_us())
        return (window.window_us if shortened_us is None else shortened_us) / 1e6

    @property
    def room(self) -> StreamRoom:
        """Whether new messages are refused at limits. For the writer."""
        return self._commits.room
