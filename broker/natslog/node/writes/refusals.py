"""What publishers get for messages that a stream does not store, and what operators see of it: each refusal is counted,
and some of them are logged. All answers of a stream are sent here, acks too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from natslog.errors import ConditionFailed, NatslogError
from natslog.ingest import acks
from natslog.ingest.batches import BatchBuilder
from natslog.ingest.columns import Texts
from natslog.ingest.envelopes import Envelope
from natslog.log import RunLog
from natslog.log_events import event
from natslog.node.writes.admission import Refusal
from natslog.node.writes.ingest_memory import IngestStats
from natslog.wire.frames import Frames
from natslog.wire.layout import REPLY_LEN

logger = logging.getLogger("natslog.ingest")

_LOG_EVERY_S = 5.0


class Sender(Protocol):
    """Sends acks as raw NATS protocol; returns False while no server is connected."""

    def send_now(self, protocol: bytes | memoryview) -> bool: ...


class Refusals:
    """Of one stream. For the event loop; what only builds answers, for any thread."""

    def __init__(self, name: str, log: RunLog, sender: Sender, stats: IngestStats) -> None:
        self._name, self._log, self._sender, self._stats = name, log, sender, stats
        self._last_logged_s = -_LOG_EVERY_S

    # ---- the event loop ----

    def refuse(self, frames: Frames, error: NatslogError, reason: str | None = None) -> None:
        """Sends the refusal to publishers that wait for an ack; the loss of other messages is counted and logged."""
        self.count(len(frames.rows), error, reason)
        answers = self.of_frames(frames, error)
        if answers is not None:
            self.send(answers, len(frames.rows))

    def refuse_envelope(self, envelope: Envelope, error: NatslogError) -> None:
        """As `refuse`."""
        self.count(envelope.rows.num_rows, error)
        if len(envelope.reply):
            replies, correlations = Texts.of([envelope.reply.tobytes()]), Texts.of([envelope.correlation_id])
            self.send(self.of_replies(replies, correlations, error), 1)

    def count(self, rows: int, error: NatslogError, reason: str | None = None) -> None:
        """So many messages are refused. `reason`: that they are counted under, if not by the code of the error."""
        self._stats.refused[reason or error.code] += rows
        if time.monotonic() - self._last_logged_s < _LOG_EVERY_S:
            return
        self._last_logged_s = time.monotonic()
        total = sum(self._stats.refused.values())
        what = ("stream %s: refused %d messages (%d in total): %s", self._name, rows, total, error.message)
        if isinstance(error, ConditionFailed):  # publishers expect it
            logger.info(*what, extra=event("stream.condition_failed", stream=self._name, count=rows))
        else:
            reason = reason or error.code
            logger.error(*what, extra=event("stream.messages_refused", stream=self._name, count=rows, reason=reason))

    def send(self, answers: bytes | memoryview, rows: int) -> None:
        """Acks or refusals of so many rows."""
        if not self._sender.send_now(answers):
            self._stats.acks_unsent += rows

    # ---- answers: any thread ----

    def of_frames(self, frames: Frames, error: NatslogError) -> memoryview | None:
        """None where no publisher waits for an ack."""
        asking = frames.select(frames.rows[:, REPLY_LEN] > 0)
        if not len(asking.rows):
            return None
        builder = BatchBuilder()
        builder.add(asking)
        batch = builder.taken()
        assert batch.replies is not None, "rows with a reply subject were selected"
        return self.of_replies(batch.replies, batch.correlations, error)

    def of_replies(self, replies: Texts, correlations: Texts | None, error: NatslogError) -> memoryview:
        """The same answer to each of these reply subjects."""
        is_jetstream = self._log.settings.acks == "any"
        return acks.refused(replies, error, stream=self._name, correlations=correlations, is_jetstream=is_jetstream)

    def of_rows(self, replies: Texts, correlations: Texts | None, unmet: Sequence[Refusal]) -> list[memoryview]:
        """To some rows of a commit. One piece for all rows with the same reason."""
        reasons: dict[str, tuple[NatslogError, list[int]]] = {}
        for row, error in unmet:
            reasons.setdefault(error.message, (error, []))[1].append(row)
        pieces = []
        for error, rows in reasons.values():
            marks = np.zeros(len(replies.offsets) - 1, np.bool_)
            marks[rows] = True
            ids = None if correlations is None else correlations.filter(marks)
            pieces.append(self.of_replies(replies.filter(marks), ids, error))
        return pieces
