"""Turning options into offsets: where a read starts and ends, checked against what the log holds."""

from __future__ import annotations

from typing import Any

from natslog.client import NatslogClient
from natslog.errors import ConfigError
from natslog.times import format_timestamp_us
from pyspark_natslog.loss import Loss, report_loss
from pyspark_natslog.source_options import Bound, SourceOptions


def resolve_end(client: NatslogClient, bound: Bound, info: dict[str, Any]) -> int:
    """The exclusive end that `bound` means for a stream; it may lie below the log start.

    Raises:
        ConfigError: above the high watermark.
    """
    return _named(client, bound, info)


def resolve_start(
    client: NatslogClient, options: SourceOptions, bound: Bound, info: dict[str, Any], end: int | None = None
) -> int:
    """The offset that `bound` means as the start of a read up to `end`.

    Args:
        info: the stream as the broker describes it.

    Raises:
        ConfigError: an offset above the high watermark. DataLoss: one below the log start.
    """
    position, log_start = _named(client, bound, info), int(info["log_start_offset"])
    if position >= log_start:
        return position
    reachable = log_start if end is None else min(log_start, end)
    if position < reachable:
        report_loss(options, Loss(info["name"], position, reachable, "the log starts later"))
    return reachable


def _named(client: NatslogClient, bound: Bound, info: dict[str, Any]) -> int:
    name, log_start, high_watermark = info["name"], int(info["log_start_offset"]), int(info["high_watermark"])
    if bound.timestamp_us is not None:
        return client.offset_at(name, format_timestamp_us(bound.timestamp_us))[0]
    position = bound.of(name)
    if position == "earliest":
        return log_start
    if position == "latest":
        return high_watermark
    if position > high_watermark:
        raise ConfigError(
            f"stream {name!r}: offset {position} is above its high watermark {high_watermark}; it holds {log_start} to "
            f"{high_watermark}",
            stream=name,
            offset=position,
        )
    return position
