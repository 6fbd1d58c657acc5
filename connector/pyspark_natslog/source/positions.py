"""Resolves options to offsets: where a read starts and ends, checked against the log."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from natslog.client import NatslogClient
from natslog.client.confirming import confirmed
from natslog.errors import ConfigError
from natslog.times import format_timestamp_us
from pyspark_natslog.source.confirming import newest
from pyspark_natslog.source.loss import Loss, report_loss
from pyspark_natslog.source.options import Bound, SourceOptions
from pyspark_natslog.source.selection import StreamState


def resolve_end(client: NatslogClient, bound: Bound, state: StreamState) -> int:
    """The exclusive end that `bound` means for a stream; it may lie below the log start.

    Raises:
        ConfigError: above the high watermark.
    """
    return _named(client, bound, state)


def resolve_start(
    client: NatslogClient, options: SourceOptions, bound: Bound, state: StreamState, end: int | None = None
) -> int:
    """The offset that `bound` means as the start of a read up to `end`.

    Args:
        state: the stream as its leader describes it.

    Raises:
        ConfigError: an offset above the high watermark. DataLoss: one below the log start.
    """
    position = _named(client, bound, state)
    if position < state.log_start_offset:
        state = _confirmed(client, state, lambda now: position < now.log_start_offset)
    log_start = state.log_start_offset
    if position >= log_start:
        return position
    reachable = log_start if end is None else min(log_start, end)
    if position < reachable:
        report_loss(options, Loss(state.name, position, reachable, f"the log starts at {log_start}"))
    return reachable


def _confirmed(client: NatslogClient, state: StreamState, is_missing: Callable[[StreamState], bool]) -> StreamState:
    """The state by the newest leader, if data seem to be missing; unchanged if the stream was deleted since."""
    now = confirmed(partial(newest, client, state.name), lambda now: now is not None and is_missing(now))
    return state if now is None else now


def _named(client: NatslogClient, bound: Bound, state: StreamState) -> int:
    moment_us = bound.time_us_of(state.name)
    if moment_us is not None:
        return client.offset_at(state.name, format_timestamp_us(moment_us))[0]
    position = bound.of(state.name)
    if position == "earliest":
        return state.log_start_offset
    if position == "latest":
        return state.high_watermark
    if position > state.high_watermark:
        state = _confirmed(client, state, lambda now: position > now.high_watermark)
    if position > state.high_watermark:
        raise ConfigError(
            f"stream {state.name!r}: offset {position} is above the high watermark {state.high_watermark}; offsets "
            f"{state.log_start_offset} to {state.high_watermark} can be read",
            stream=state.name,
            offset=position,
        )
    return position
