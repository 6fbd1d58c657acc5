"""Which messages are acked, and where acks are sent: a message that does not request an ack must not get one.

Theory of operation. A publisher requests an ack with a reply subject; a requester requests the answer of a service in
the same way. Where a stream records a service's subject, its setting `acks` says which of both reply subjects are:

    reply    every one is a publisher's: the ack goes there (to the header's subject where an envelope has that header)
    any      the same, for clients of JetStream, whose inboxes have prefixes of their own
    header   none is: acks go to the subject in the header `Natslog-Ack-To`
    never    nothing is acked

Except with `any`, an ack is sent only to subjects under the broker's `ack_reply_prefixes`. Otherwise every client that
may publish to a stream could make the broker publish to any subject that the broker's NATS user has rights on. With
`any` it is sent to no subject that a stream records, and to none that begins with `$`: such an ack would be a message,
or a request to JetStream.

The rules are applied to the positions of frames in the receive buffer, before anything is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from natslog.errors import InvalidRequest
from natslog.model import Acks
from natslog.subjects import MAX_SUBJECT_BYTES, check_subject, is_wildcard
from natslog.wire import native
from natslog.wire.frames import Frames
from natslog.wire.layout import REPLY, REPLY_LEN

_ACK_TO = np.frombuffer(b"Natslog-Ack-To", np.uint8)


@dataclass(frozen=True, slots=True)
class AckRules:
    """Of one stream at one broker.

    Attributes:
        acks: the stream's setting. `prefixes`: what subjects of acks begin with, one after another.
        omits_internal: whether messages on subjects that begin with `$` or one of the prefixes are not recorded: a
            subject of the stream begins with a wildcard, so it covers those as well. is_recorded: whether a stream
            records a subject.
    """

    acks: Acks
    omits_internal: bool
    is_recorded: Callable[[str], bool]
    _prefixes: npt.NDArray[np.uint8]
    _prefix_ends: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls,
        acks: Acks,
        subjects: Iterable[str],
        prefixes: Sequence[str],
        is_recorded: Callable[[str], bool] = lambda subject: True,
    ) -> AckRules:
        encoded = [prefix.encode() for prefix in prefixes]
        ends = np.cumsum([len(prefix) for prefix in encoded], dtype=np.int64)
        omits_internal = any(is_wildcard(subject.split(".")[0]) for subject in subjects)
        return cls(acks, omits_internal, is_recorded, np.frombuffer(b"".join(encoded), np.uint8), ends)

    def survey_plain(self, frames: Frames, most_bytes: int) -> tuple[int, int]:
        """How many bytes these frames have, and at least how many headers; no bytes where one is not plain, or needs
        more than to be stored, and acked at its reply subject: see `kernels_plain.survey_plain`.
        """
        if self.acks not in ("reply", "any"):
            return 0, 0
        limits = (most_bytes, MAX_SUBJECT_BYTES, int(self.omits_internal))
        found = native.survey_plain(frames.buffer, frames.rows, *limits, self._prefixes, self._prefix_ends)
        size_bytes, header_lines = found
        return size_bytes, header_lines

    def applied(self, frames: Frames, opened: npt.NDArray[np.bool_] | None = None) -> Frames:
        """The frames that are recorded, with the subject that each one's ack goes to as its reply subject. What a
        JetStream consumer delivers to a recorded subject is not: it is stored already, and would go around for ever.

        Args:
            opened: marks those whose headers came in an envelope.
        """
        if opened is not None and self.acks in ("reply", "any"):
            _prefer_header(frames, opened)
        marks = np.zeros(len(frames.rows), np.bool_)
        if native.mark_deliveries(frames.buffer, frames.rows, marks):
            frames = frames.select(~marks)
            marks = np.zeros(len(frames.rows), np.bool_)
        if self.omits_internal:
            native.mark_internal(frames.buffer, frames.rows, self._prefixes, self._prefix_ends, marks)
            if marks.any():
                frames = frames.select(~marks)
        if self.acks == "never":
            native.no_replies(frames.rows)
            return frames
        if self.acks == "header":
            native.replies_from_header(frames.buffer, frames.rows, _ACK_TO)
        lengths = frames.rows[:, REPLY_LEN].copy() if self.acks == "any" else None
        native.keep_replies(frames.buffer, frames.rows, self._prefixes, self._prefix_ends)
        if lengths is not None:
            self._keep_others(frames, lengths)
        return frames

    def _keep_others(self, frames: Frames, lengths: npt.NDArray[np.int64]) -> None:
        """Of the replies with other prefixes those that an ack may be sent to. `lengths`: as they were."""
        rows = frames.rows
        for at in np.flatnonzero((lengths > 0) & (rows[:, REPLY_LEN] == 0)).tolist():
            start, length = int(rows[at, REPLY]), int(lengths[at])
            if self._may_be_acked(frames.buffer[start : start + length].tobytes()):
                rows[at, REPLY_LEN] = length

    def _may_be_acked(self, reply: bytes) -> bool:
        try:
            subject = check_subject(reply.decode(), wildcards=False)
        except (InvalidRequest, UnicodeDecodeError):
            return False
        return not subject.startswith("$") and not self.is_recorded(subject)


def _prefer_header(frames: Frames, opened: npt.NDArray[np.bool_]) -> None:
    """Makes the subject in the header the reply subject of those of the marked frames that have the header."""
    rows = frames.rows[opened]
    native.replies_from_header(frames.buffer, rows, _ACK_TO)
    has_header = rows[:, REPLY_LEN] > 0
    frames.rows[np.flatnonzero(opened)[has_header]] = rows[has_header]
