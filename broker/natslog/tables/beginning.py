"""Where a table begins or continues in its stream, and with which options."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

from natslog.client import NatslogClient
from natslog.client.lineage import lineage_in
from natslog.errors import ConfigError, DataLoss, InvalidRequest, StreamRecreated
from natslog.log_events import event
from natslog.model import beyond_fork
from natslog.tables.options import TableOptions
from natslog.tables.table import Position
from natslog.units import offsets_between

logger = logging.getLogger("natslog.tables")


def check_start(start: int, stream: str, info: dict[str, object]) -> None:
    """Raises InvalidRequest: the stream has no message at the offset where a new table would begin."""
    low, high = int(str(info["log_start_offset"])), int(str(info["high_watermark"]))
    if not low <= start <= high:
        raise InvalidRequest(
            f"--from: stream {stream!r} has {offsets_between(low, high)}, and {start} is not one of them: give another "
            "one, a time, earliest or latest"
        )


def first_position(
    client: NatslogClient,
    stream: str,
    options: TableOptions,
    stored: Position | None,
    info: dict[str, object],
    name: str,
) -> Position:
    """Where the table begins or continues. Raises as `copy_stream`."""
    stream_id, log_start = str(info["id"]), int(str(info["log_start_offset"]))
    if stored is None:
        return Position(stream, stream_id, start_offset(client, stream, options.start, info), options=options.stated)
    if stored.stream != stream:
        raise ConfigError(
            f"table {name} has the messages of stream {stored.stream!r} up to offset {stored.offset}, and not those of "
            f"{stream!r}: use another table"
        )
    _check_options(options, stored, name)
    if stored.stream_id != stream_id:
        fork = lineage_in(info).get(stored.stream_id)
        if fork is None:
            raise StreamRecreated(
                f"stream {stream!r} was deleted and created again (its id is {stream_id}; table {name} has messages of "
                f"{stored.stream_id} up to offset {stored.offset}): use another table for the new stream",
                stream=stream,
                id=stream_id,
            )
        if stored.offset > fork:
            raise beyond_fork(stream, stored.stream_id, stream_id, stored.offset, fork)
    if stored.offset < log_start and options.on_data_loss == "fail":
        raise DataLoss(
            f"stream {stream!r}: {offsets_between(stored.offset, log_start)} were removed before they were copied to "
            f"table {name}: --on-data-loss skip continues at {log_start}; a longer retention (natslog stream edit "
            "--max-age) prevents further losses",
            stream=stream,
            start=stored.offset,
            end=log_start,
        )
    if stored.offset < log_start:
        logger.warning(
            f"stream {stream}: {offsets_between(stored.offset, log_start)} are lost, and not in the table",
            extra=event("table.offsets_lost", stream=stream, offset=stored.offset, end_offset=log_start),
        )
    offset = max(stored.offset, log_start)
    return replace(stored, stream_id=stream_id, offset=offset, options=options.stated)


def _check_options(options: TableOptions, stored: Position, name: str) -> None:
    """Raises ConfigError: with these options the table would lack messages, or have rows of another meaning."""
    if not stored.options:  # written by a former version, or by the Spark job
        return
    before, now = json.loads(stored.options), json.loads(options.stated)
    for option in sorted(before.keys() | now.keys()):
        if before.get(option) == now.get(option):
            continue
        was = f"with {option}" if option in before else f"without {option}"
        was += f" {before[option]}" if isinstance(before.get(option), str) else ""
        raise ConfigError(
            f"table {name} was written {was}: with another choice messages would be missing, or rows would have two "
            "meanings. Give the same option, or use another table"
        )


def start_offset(client: NatslogClient, stream: str, start: str, info: dict[str, object]) -> int:
    """The offset that `--from` states: an offset, a time, earliest or latest."""
    if start.isdecimal():
        return int(start)
    if start == "earliest":
        return int(str(info["log_start_offset"]))
    if start == "latest":
        return int(str(info["high_watermark"]))
    return client.offset_at(stream, start)[0]
