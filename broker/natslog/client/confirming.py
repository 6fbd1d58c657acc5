"""Confirms a loss before it is reported: the brokers are asked again.

A leader that has just been replaced has fewer messages than were read from its successor. So one answer is not enough
for a reader to fail or to go back: the answers of the newest leader epoch must show the loss for `PERSISTS_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from natslog.errors import NatslogError

Answer = TypeVar("Answer")

PERSISTS_S = 2.0
_AGAIN_AFTER_S = 0.25
_OUTDATED_ANSWERS = 20


def confirmed(ask: Callable[[], Answer], is_loss: Callable[[Answer], bool]) -> Answer:
    """The first answer that shows no loss, or the last one after `PERSISTS_S` in which all answers showed a loss.

    Raises:
        What `ask` raises.
    """
    until_s = time.monotonic() + PERSISTS_S
    while is_loss(state := ask()) and time.monotonic() < until_s:
        time.sleep(_AGAIN_AFTER_S)
    return state


class OutdatedAnswers:
    """Bounds the retries of a range that was refused although the newest leader has it."""

    def __init__(self) -> None:
        self._left = _OUTDATED_ANSWERS

    def one_more(self, error: NatslogError) -> None:
        """Waits `_AGAIN_AFTER_S`. Raises the error after `_OUTDATED_ANSWERS` calls."""
        self._left -= 1
        if self._left < 0:
            raise error
        time.sleep(_AGAIN_AFTER_S)
