"""Before anything is called lost, or shorter than it was, the brokers are asked again.

A leader that was replaced a moment ago knows less than was read of its successor. So what one answer says is not enough
for a query to fail, or to go back: it must stay so for a while, in the answers of the newest leader epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from natslog.client import NatslogClient
from natslog.errors import NatslogError, StreamNotFound
from pyspark_natslog.source.selection import StreamState

Answer = TypeVar("Answer")

PERSISTS_S = 2.0
_AGAIN_AFTER_S = 0.25
_OUTDATED_ANSWERS = 20


def confirmed(ask: Callable[[], Answer], is_loss: Callable[[Answer], bool]) -> Answer:
    """The last answer: at once where it is no loss, and where it is, when there was no other one for `PERSISTS_S`.

    Raises:
        What `ask` raises.
    """
    until_s = time.monotonic() + PERSISTS_S
    while is_loss(state := ask()) and time.monotonic() < until_s:
        time.sleep(_AGAIN_AFTER_S)
    return state


def newest(client: NatslogClient, stream: str) -> StreamState | None:
    """As the leader of the newest epoch describes it; None where there is no such stream. Raises NatslogError."""
    try:
        return StreamState.of(client.newest_position(stream))
    except StreamNotFound:
        return None


class OutdatedAnswers:
    """Bounds how often a range is asked for again that is there, by the newest leader's word, and was refused."""

    def __init__(self) -> None:
        self._left = _OUTDATED_ANSWERS

    def one_more(self, error: NatslogError) -> None:
        """Waits a moment. Raises the error where it was met too often."""
        self._left -= 1
        if self._left < 0:
            raise error
        time.sleep(_AGAIN_AFTER_S)
