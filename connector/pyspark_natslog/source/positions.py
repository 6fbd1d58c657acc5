"""Resolves options to offsets: where a read starts and ends, checked against the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial

from natslog.client import NatslogClient
from natslog.client.confirming import confirmed
from natslog.errors import ConfigError, CursorNotFound, StreamRecreated
from natslog.times import format_timestamp_us
from natslog.units import offsets_between
from pyspark_natslog.source.confirming import newest
from pyspark_natslog.source.loss import Loss, report_loss
from pyspark_natslog.source.options import CURSOR, Bound, SourceOptions
from pyspark_natslog.source.selection import StreamState

logger = logging.getLogger("pyspark_natslog")


def resolve_end(client: NatslogClient, bound: Bound, state: StreamState) -> int:
    """The exclusive end that `bound` means for a stream; it may lie below the log start.

    Raises:
        ConfigError: above the high watermark.
    """
    return _named(client, bound, state)


def resolve_start(
    client: NatslogClient,
    options: SourceOptions,
    bound: Bound,
    state: StreamState,
    end: int | None = None,
    *,
    selected: Collection[str] = (),
) -> int:
    """The offset that `bound` means as the start of a read up to `end`.

    Args:
        state: the stream as its leader describes it. `selected`: the streams that the options select now.

    Raises:
        ConfigError: an offset above the high watermark. DataLoss: one below the log start. CursorNotFound: the cursor
            that it names does not exist on this stream; if streams are selected by a pattern or group, on none.
    """
    cursor = _cursor_of(bound, state.name)
    position = _named(client, bound, state) if cursor is None else _at_cursor(client, options, cursor, state, selected)
    if position < state.log_start_offset:
        state = _confirmed(client, state, lambda now: position < now.log_start_offset)
    log_start = state.log_start_offset
    if position >= log_start:
        return position
    reachable = log_start if end is None else min(log_start, end)
    if position < reachable:
        report_loss(options, Loss(state.name, position, reachable, f"the log starts at {log_start}"))
    return reachable


def begins_with_log(bound: Bound, stream: str) -> bool:
    """Whether the start is `earliest`: what retention removes before it is read is not missing then."""
    return bound.time_us_of(stream) is None and bound.of(stream) == "earliest"


def _cursor_of(bound: Bound, stream: str) -> str | None:
    """The name of the cursor at which a read of this stream starts."""
    position = bound.of(stream) if bound.time_us_of(stream) is None else None
    is_cursor = isinstance(position, str) and position.startswith(CURSOR)
    return str(position).removeprefix(CURSOR) if is_cursor else None


def _at_cursor(
    client: NatslogClient, options: SourceOptions, cursor: str, state: StreamState, selected: Collection[str]
) -> int:
    """The next offset that the cursor's consumer has not read. A stream that a pattern or group selects may be newer
    than the cursor: then its start.
    """
    try:
        shown = client.cursor(cursor, state.name)
    except CursorNotFound as error:
        others = [] if options.selection.names else client.cursors(consumer=cursor)
        if not any(one["stream"] in selected for one in others):
            raise CursorNotFound(
                f"option startingOffsets: there is no cursor {cursor!r} on stream {state.name!r}: `natslog cursor ls` "
                "shows which exist; `natslog cursor set` creates one",
                **error.facts,
            ) from error
        logger.warning("stream %r has no cursor %r yet: it is read from its start", state.name, cursor)
        return state.log_start_offset
    if shown["id"] != state.id:  # a cursor ends with its stream
        raise StreamRecreated(
            f"stream {state.name!r} was created again just now: start the query again", stream=state.name
        )
    return _checked(client, state, int(shown["offset"]), f"cursor {cursor!r}: ")


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
    return _checked(client, state, int(position))


def _checked(client: NatslogClient, state: StreamState, position: int, what: str = "") -> int:
    """The position. Raises ConfigError: it is above the high watermark."""
    if position > state.high_watermark:
        state = _confirmed(client, state, lambda now: position > now.high_watermark)
    if position > state.high_watermark:
        raise ConfigError(
            f"{what}stream {state.name!r}: offset {position} is above the high watermark {state.high_watermark}; "
            f"it has {offsets_between(state.log_start_offset, state.high_watermark)}",
            stream=state.name,
            offset=position,
        )
    return position
