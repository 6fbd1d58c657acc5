"""The options of a consumer, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from natslog.client.checkpoints import Checkpoints
from natslog.client.cursors import CursorCalls
from natslog.errors import InvalidRequest
from natslog.subjects import check_name

_MAX_WAIT_MS = 60_000
_MAX_BYTES = 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumeOptions:
    """As `NatslogClient.consume` describes them. Raises InvalidRequest: one of them is wrong."""

    cursor: str | None
    start: int | str | datetime
    follow: bool
    checkpoint: Literal["auto", "manual"]
    checkpoint_every: int | None
    checkpoint_interval_s: float | None
    on_data_loss: Literal["fail", "skip"]
    subject: str | None
    columns: Sequence[str] | None
    max_bytes: int
    wait_ms: int
    patience_s: float

    def __post_init__(self) -> None:
        if isinstance(self.start, bool) or not isinstance(self.start, int | str | datetime):
            raise InvalidRequest(f"start {self.start!r} must be 'earliest', 'latest', an offset or a time")
        _check_choice("checkpoint", self.checkpoint, ("auto", "manual"))
        _check_choice("on_data_loss", self.on_data_loss, ("fail", "skip"))
        if isinstance(self.start, int):
            _check_number("start", self.start, 0, 2**62)
        if self.checkpoint_every is not None:
            _check_number("checkpoint_every", self.checkpoint_every, 1, 2**62)
        if self.checkpoint_interval_s is not None:
            _check_number("checkpoint_interval_s", self.checkpoint_interval_s, 0, math.inf)
        _check_number("max_bytes", self.max_bytes, 1, _MAX_BYTES)
        _check_number("wait_ms", self.wait_ms, 1, _MAX_WAIT_MS)
        _check_number("patience_s", self.patience_s, 0, math.inf)
        if self.cursor is not None:
            check_name(self.cursor, "consumer name")
        if self.cursor is None and self.checkpoint == "manual":
            raise InvalidRequest("checkpoint='manual' requires a cursor: give its name, as in cursor='billing'")

    def checkpoints(self, client: CursorCalls, stream: str) -> Checkpoints | None:
        if self.cursor is None:
            return None
        every_rows, interval_s = self.checkpoint_every, self.checkpoint_interval_s
        return Checkpoints(client, self.cursor, stream, every_rows=every_rows, interval_s=interval_s)


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidRequest(f"{name} {value!r} must be {' or '.join(map(repr, choices))}")


def _check_number(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidRequest(f"{name} {value!r} must be a number from {low} to {high}")
