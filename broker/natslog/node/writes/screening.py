"""Which of the received frames a stream can store: the others are refused before anything of them is copied."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from natslog.errors import InvalidRequest, NatslogError
from natslog.ingest.batches import survey_of
from natslog.ingest.conditions import are_of_fast_batches, begin_as_envelopes, demands_at, marked, marked_features
from natslog.ingest.message_sizes import split_by_size, too_large
from natslog.ingest.unwanted import split_by_subject, split_by_text
from natslog.log import RunLog
from natslog.node.writes.header_checks import fast_batch_refusal, feature_refusals, refusal_of
from natslog.node.writes.refusals import Refusals
from natslog.subjects import MAX_SUBJECT_BYTES
from natslog.wire.frames import Frames
from natslog.wire.layout import Survey

Marks: TypeAlias = npt.NDArray[np.bool_]


class Screening:
    """Of one stream, by its subjects, texts, sizes and headers. In the event loop."""

    def __init__(self, name: str, log: RunLog, refusals: Refusals) -> None:
        self._name, self._log, self._refusals = name, log, refusals

    def screened(self, frames: Frames, survey: Survey) -> tuple[Frames, Survey, bool]:
        """The frames that can be stored, and whether any of them may have a condition. `survey`: of the frames."""
        wanted, has_conditions = self._without_unwanted(frames, survey)
        return wanted, survey if wanted is frames else survey_of(wanted), has_conditions

    def _without_unwanted(self, frames: Frames, survey: Survey) -> tuple[Frames, bool]:
        frames, not_plain = split_by_subject(frames)
        if len(not_plain.rows):
            error = InvalidRequest(
                f"the subject of a message must have at most {MAX_SUBJECT_BYTES} bytes and no wildcard as a token: "
                "correct it"
            )
            self._refusals.refuse(not_plain, error, "bad_subject")
        if survey.not_ascii_rows:
            frames, garbled = split_by_text(frames)
            if len(garbled.rows):
                error = InvalidRequest("subject and headers must be UTF-8: correct the message")
                self._refusals.refuse(garbled, error, "not_utf8")
        settings = self._log.settings
        if settings.max_message_bytes is not None and survey.headed_rows:  # first, as JetStream does it
            frames = frames if begin_as_envelopes(frames).any() else self.of_allowed_size(frames)
        if settings.acks == "any":
            frames = self._without_features(frames, has_headers=survey.headed_rows > 0)
        if survey.headed_rows and (marks := marked(frames)) is not None:
            return self._without_refused_demands(frames, marks), True
        return frames, False

    def of_allowed_size(self, frames: Frames) -> Frames:
        """The same frames where none is too large."""
        max_bytes = self._log.settings.max_message_bytes
        if max_bytes is None:
            return frames
        fitting, large = split_by_size(frames, max_bytes)
        if len(large.rows):
            self._refusals.refuse(large, too_large(max_bytes, "the message is larger"))
        return fitting

    def _without_features(self, frames: Frames, *, has_headers: bool) -> Frames:
        """A JetStream client must not take an ack for one of what the header, or the reply subject, requests."""
        marks, errors = [are_of_fast_batches(frames)], [fast_batch_refusal(self._name)]
        if has_headers:
            marks += marked_features(frames)
            errors += feature_refusals(self._name)
        for error, refused in zip(errors, marks, strict=True):
            if refused.any():
                self._refusals.refuse(frames.select(refused), error)
        refused = np.logical_or.reduce(marks)
        return frames.select(~refused) if refused.any() else frames

    def _without_refused_demands(self, frames: Frames, marks: Marks) -> Frames:
        """Checks the headers of the marked frames that depend on the settings of the stream only."""
        are_envelopes, refused = begin_as_envelopes(frames), np.zeros(len(frames.rows), np.bool_)
        errors: dict[str, tuple[NatslogError, list[int]]] = {}
        for at in np.flatnonzero(marks).tolist():
            error = refusal_of(demands_at(frames, at), self._name, self._log.settings)
            if error is None and are_envelopes[at]:
                error = InvalidRequest(
                    "an envelope of rows has no Nats-Expected-…, Nats-TTL or Nats-Rollup header of its own: "
                    "send its rows as messages"
                )
            if error is not None:
                refused[at] = True
                errors.setdefault(error.message, (error, []))[1].append(at)
        for error, rows in errors.values():
            self._refusals.refuse(frames.select(np.array(rows)), error)
        return frames.select(~refused) if errors else frames
