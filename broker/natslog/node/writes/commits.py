"""From the rows of one commit to its outcome: what is stored of them, and the bytes of their acks.

Theory of operation. The writer of a stream takes the rows that were gathered. Duplicates, rows whose condition is not
met and rows without room are dropped; the rest is appended to the log as one batch, which is on stable storage when the
append returns. A kernel then builds the answers of all rows as one piece of NATS protocol. Plain messages
(`kernels_plain.survey_plain`) have none of all that, and are appended straight from their frames.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from natslog.arrow.row_buffers import RowBuffers
from natslog.errors import NatslogError
from natslog.ingest import acks
from natslog.ingest.batches import Batch, BatchBuilder
from natslog.ingest.columns import Texts
from natslog.ingest.dedupe import NEW, REPEATED, DedupeWindow
from natslog.log import RunLog
from natslog.log.stream_log import Written
from natslog.log_events import event
from natslog.node.cluster_clock import StreamTime
from natslog.node.writes.admission import REFUSED, Refusal, refusals_of
from natslog.node.writes.commit_spans import CommitSpan
from natslog.node.writes.dedupe_rebuild import rebuilt_dedupe
from natslog.node.writes.last_of_subjects import LastOfSubjects
from natslog.node.writes.refusals import Refusals
from natslog.node.writes.stream_room import StreamRoom
from natslog.wire.frames import Frames
from natslog.wire.header_parts import HeaderParts

logger = logging.getLogger("natslog.ingest")

Offsets: TypeAlias = npt.NDArray[np.int64]
Marks: TypeAlias = npt.NDArray[np.bool_]

_WAITING_BYTES = 256  # of a commit's own record


@dataclass(slots=True)
class Gathering:
    """A builder, the bytes of frames that its rows came in, and when the first of them came (monotonic)."""

    builder: BatchBuilder
    frame_bytes: int = 0
    begun_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one commit. All of its rows, including duplicates, are stored below `end_offset`, except those
    that are refused (`unmet`): as acks, their answers wait until what they were compared with is committed.

    Attributes:
        frame_bytes: memory that was taken for the rows. `seconds`: to append them. `begun_s`: when the first row was
            received. `span`: None without tracing. `refusal`: why none of the rows is stored.
    """

    rows: int
    frame_bytes: int = 0
    duplicates: int = 0
    seconds: float = 0.0
    answers: bytes | memoryview | None = None
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


class Commits:
    """Of one stream. For its writer.

    Args:
        refusal: why nothing may be appended now, if so. `domain`: of JetStream, that acks of a stream of its API state;
            empty: none. `written`: is called with a small commit that is written, before it is synced.

    Attributes:
        dedupe: the message ids that are recognised. `room`: whether new messages are refused at limits.
    """

    def __init__(
        self,
        name: str,
        log: RunLog,
        refusals: Refusals,
        *,
        stream_time: StreamTime,
        refusal: Callable[[], NatslogError | None],
        domain: Callable[[], str],
        written: Written | None,
        has_spans: bool,
    ) -> None:
        self.dedupe = DedupeWindow(log.settings.dedupe_window_s)
        self.room = StreamRoom(log)
        self._name, self._log, self._refusals, self._stream_time = name, log, refusals, stream_time
        self._refusal, self._domain, self._written = refusal, domain, written
        self._has_spans = has_spans
        self._last_of_subjects = LastOfSubjects(log)

    def of_plain(
        self, frames: Frames, headers: HeaderParts | None, size_bytes: int, now_us: int, begun_s: float
    ) -> Outcome:
        """Appends plain frames of so many bytes. In the event loop. `headers`: None where no frame has any."""
        rows, started = len(frames.rows), time.perf_counter()
        ids = headers.hashes if headers is not None and headers.hashes.any() else None
        if ids is not None and (self.dedupe.find(ids, now_us) != NEW).any():  # which the acks state
            gathering = Gathering(BatchBuilder(), begun_s=begun_s)
            gathering.builder.add(frames)
            return self.of_gathered(gathering, is_in_loop=True)
        try:
            base_offset, _ = self._log.append_plain(frames, headers, size_bytes, now_us, self._written)
        except NatslogError as error:
            return Outcome(rows, answers=self._refusals.of_frames(frames, error), refusal=error)
        if ids is not None:
            self.dedupe.remember(ids, np.arange(base_offset, base_offset + rows, dtype=np.int64), now_us)
        seconds = time.perf_counter() - started
        answers = acks.of_plain(frames, size_bytes, base_offset, stream=self._name, domain=self._stated_domain())
        return Outcome(rows, seconds=seconds, answers=answers or None, end_offset=base_offset + rows, begun_s=begun_s)

    def of_gathered(self, gathering: Gathering, *, is_in_loop: bool) -> Outcome:
        """Appends what is new and allowed of the rows. The builder is used again after that, and after
        `CommitSpan.find_contexts`.
        """
        batch, started = gathering.builder.taken(), time.perf_counter()
        rows, frame_bytes = batch.rows.rows, gathering.frame_bytes
        span = self._span_of(batch, gathering.begun_s) if self._has_spans else None
        answers: bytes | memoryview | None = None
        try:
            if (refusal := self._refusal()) is not None:
                raise refusal
            offsets, duplicate, unmet = self._append(batch, self._written if is_in_loop else None)
        except NatslogError as error:
            if batch.replies is not None:
                answers = self._refusals.of_replies(batch.replies, batch.correlations, error)
            return Outcome(rows, frame_bytes, answers=answers, refusal=error, span=span)
        seconds = time.perf_counter() - started
        if batch.replies is not None:
            answers = self._answers(batch, batch.replies, offsets, duplicate, unmet)
        return Outcome(
            rows,
            frame_bytes,
            0 if duplicate is None else int(duplicate.sum()),
            seconds,
            answers,
            end_offset=self._log.log_end_offset,
            unmet=unmet,
            begun_s=gathering.begun_s,
            span=span,
        )

    def rebuild_dedupe(self, window_s: float) -> None:
        """Another deduplication window, which is read from the log."""
        self.dedupe, damage = rebuilt_dedupe(window_s, self._log)
        if damage is not None:
            logger.error(
                "stream %s: deduplication uses only the readable part of the log: %s",
                self._name,
                damage.message,
                extra=event("stream.dedupe_partial", stream=self._name),
            )

    def _span_of(self, batch: Batch, begun_s: float) -> CommitSpan:
        ago_ns = int((time.monotonic() - begun_s) * 1e9)
        return CommitSpan(self._name, batch.rows, time.time_ns() - ago_ns)

    def _append(self, batch: Batch, written: Written | None) -> tuple[Offsets, Marks | None, Sequence[Refusal]]:
        """Drops duplicates, rows whose condition is not met, and those that have no room; appends the rest. Returns
        each row's offset, which were duplicates, and which are refused.
        """
        time_us, ids, room = self._stream_time.now_us(), batch.ids, self.room.of_commit(batch.rows)
        if ids is None and not batch.conditions and room is None:
            base_offset = self._append_rows(batch.rows, time_us, written)
            return np.arange(base_offset, base_offset + batch.rows.rows, dtype=np.int64), None, ()
        window = self.dedupe
        offsets = np.full(batch.rows.rows, NEW, np.int64) if ids is None else window.find(ids, time_us)
        if batch.spans is not None:
            _spread(offsets, batch.spans)
        is_visited = room is not None or batch.conditions
        unmet = refusals_of(batch, offsets, self._log, self._last_of_subjects, room) if is_visited else ()
        fresh, duplicate = offsets == NEW, (offsets != NEW) & (offsets != REFUSED)
        if fresh.any():
            rows = batch.rows if fresh.all() else batch.rows.filter(fresh)
            base_offset = self._append_rows(rows, time_us, written)
            offsets[fresh] = np.arange(base_offset, base_offset + rows.rows, dtype=np.int64)
            if ids is not None:
                window.remember(ids[fresh], offsets[fresh], time_us)
        repeated = offsets == REPEATED
        if ids is not None and repeated.any():
            offsets[repeated] = window.find(ids[repeated], time_us)
        return offsets, duplicate if duplicate.any() else None, unmet

    def _append_rows(self, rows: RowBuffers, time_us: int, written: Written | None) -> int:
        base_offset, _ = self._log.append(rows, time_us, written)
        self._last_of_subjects.appended(rows, base_offset)
        return base_offset

    def _answers(
        self, batch: Batch, replies: Texts, offsets: Offsets, duplicate: Marks | None, unmet: Sequence[Refusal]
    ) -> bytes | memoryview:
        """Acks, and the refusals of rows whose condition is not met."""
        correlations, counts, full = batch.correlations, batch.spans, batch.full
        refusals: list[memoryview] = []
        if unmet:
            refusals = self._refusals.of_rows(replies, correlations, unmet)
            kept = offsets != REFUSED
            replies, offsets = replies.filter(kept), offsets[kept]
            correlations = None if correlations is None else correlations.filter(kept)
            duplicate = None if duplicate is None else duplicate[kept]
            counts = None if counts is None else counts[kept]
            full = None if full is None else full[kept]
        stored = acks.stored(
            replies,
            offsets,
            stream=self._name,
            epoch=self._log.epoch,
            duplicate=duplicate,
            full=full,
            counts=counts,
            correlations=correlations,
            domain=self._stated_domain(),
        )
        return b"".join((stored, *refusals)) if refusals else stored

    def _stated_domain(self) -> str:
        return self._domain() if self._log.shared.settings.acks == "any" else ""


def _spread(offsets: npt.NDArray[np.int64], spans: npt.NDArray[np.int64]) -> None:
    """All rows of an envelope are duplicates if its last one is, which has the id. The others have no id, and so no
    offset either when `REPEATED` ones are looked up again; they have no reply subject that it would be sent to.
    """
    for last in np.flatnonzero((spans > 1) & (offsets != NEW)).tolist():
        offsets[last - spans[last] + 1 : last] = REPEATED
