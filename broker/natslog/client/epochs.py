"""The highest leader epoch that was received for each stream: a response about its bounds from an older epoch is
outdated.

Every answer that states a position names the epoch of the leader that states it. A leader that was replaced may not
have received this change yet. Epochs only increase, so a client that has received a response of a newer leader
recognises outdated ones.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping

from natslog.errors import NotLeader

_NUMBER = re.compile(r"[0-9]{1,19}")
_REMEMBERED_S = 600.0
_MOST_STREAMS = 100_000


class LeaderEpochs:
    """Thread-safe. An epoch that no broker has confirmed for ten minutes is removed: a cluster that was restored from a
    backup starts with older epochs.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._seen: dict[str, tuple[int, float]] = {}

    def highest(self, stream_id: str) -> int:
        """0 where none is known."""
        with self._lock:
            epoch, seen_s = self._seen.get(stream_id, (0, 0.0))
            return epoch if self._clock() - seen_s < _REMEMBERED_S else 0

    def note(self, stream_id: str, epoch: int) -> bool:
        """Whether this is the newest known epoch of the stream; the epoch is stored if it is."""
        is_newest = epoch >= self.highest(stream_id)
        if is_newest and epoch:
            with self._lock:
                if stream_id not in self._seen and len(self._seen) >= _MOST_STREAMS:
                    del self._seen[next(iter(self._seen))]
                self._seen[stream_id] = (epoch, self._clock())
        return is_newest

    def forget(self, stream_id: str) -> None:
        """The next epoch that is stated is accepted, also an older one."""
        with self._lock:
            self._seen.pop(stream_id, None)

    def outdated(self, stated: Mapping[str, object]) -> NotLeader | None:
        """Why a statement about a stream's bounds must not be used; None if it may be used, or names no epoch.

        Args:
            stated: `id` and `leader_epoch`, as in the body of a stream or the facts of an error.
        """
        stream_id, epoch = stated.get("id"), stated.get("leader_epoch")
        if not isinstance(stream_id, str) or not isinstance(epoch, int) or self.note(stream_id, epoch):
            return None
        return NotLeader(
            f"the response is from leader epoch {epoch}, but epoch {self.highest(stream_id)} of this stream was "
            "already received: the stream has another leader now",
            id=stream_id,
            leader_epoch=epoch,
        )


def stated_in(headers: Mapping[str, str]) -> dict[str, object]:
    """The stream id and epoch in the headers of a response; empty for brokers that do not send them."""
    stream_id, epoch = headers.get("Natslog-Stream-Id"), headers.get("Natslog-Leader-Epoch", "")
    return {"id": stream_id, "leader_epoch": int(epoch)} if stream_id and _NUMBER.fullmatch(epoch) else {}
