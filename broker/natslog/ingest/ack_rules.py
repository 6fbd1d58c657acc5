"""Which messages are acked, and where acks are sent: a message that does not request an ack must not get one.

Theory of operation. A publisher requests an ack with a reply subject; a requester requests the answer of a service in
the same way. Where a stream records a service's subject, its setting `acks` says which of both reply subjects are:

    reply    every one is a publisher's: the ack goes there
    header   none is: acks go to the subject in the header `Natslog-Ack-To`
    never    nothing is acked

In all cases an ack is sent only to subjects under the broker's `ack_reply_prefixes`. Otherwise every client that may
publish to a stream could make the broker publish to any subject that the broker's NATS user has rights on.

The rules are applied to the positions of frames in the receive buffer, before anything is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from natslog.model import Acks
from natslog.subjects import is_wildcard
from natslog.wire import native
from natslog.wire.frames import Frames

_ACK_TO = np.frombuffer(b"Natslog-Ack-To", np.uint8)


@dataclass(frozen=True, slots=True)
class AckRules:
    """Of one stream at one broker.

    Attributes:
        acks: the stream's setting. `prefixes`: what subjects of acks begin with, one after another.
        omits_internal: whether messages on subjects that begin with `$` or one of the prefixes are not recorded: the
            stream's own subject begins with a wildcard, so it covers those as well.
    """

    acks: Acks
    omits_internal: bool
    _prefixes: npt.NDArray[np.uint8]
    _prefix_ends: npt.NDArray[np.int64]

    @classmethod
    def of(cls, acks: Acks, subject: str, prefixes: Sequence[str]) -> AckRules:
        encoded = [prefix.encode() for prefix in prefixes]
        ends = np.cumsum([len(prefix) for prefix in encoded], dtype=np.int64)
        return cls(acks, is_wildcard(subject.split(".")[0]), np.frombuffer(b"".join(encoded), np.uint8), ends)

    def applied(self, frames: Frames) -> Frames:
        """The frames that are recorded, with the subject that each one's ack goes to as its reply subject."""
        if self.omits_internal:
            marks = np.zeros(len(frames.rows), np.bool_)
            native.mark_internal(frames.buffer, frames.rows, self._prefixes, self._prefix_ends, marks)
            if marks.any():
                frames = frames.select(~marks)
        if self.acks == "never":
            native.no_replies(frames.rows)
            return frames
        if self.acks == "header":
            native.replies_from_header(frames.buffer, frames.rows, _ACK_TO)
        native.keep_replies(frames.buffer, frames.rows, self._prefixes, self._prefix_ends)
        return frames
