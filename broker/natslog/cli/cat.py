"""`natslog cat`: messages of a stream on standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natslog.cli.common import global_of
from natslog.cli.output import check_formats, err, escaped, is_terminal
from natslog.errors import InvalidRequest

if TYPE_CHECKING:
    import pyarrow as pa

    from natslog.client import NatslogClient
    from natslog.client.searching import FoundPage

_WAIT_MS = 20_000
_FOLLOW_PATIENCE_S = 120.0


def cat(
    context: typer.Context,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")],
    start: Annotated[
        str, typer.Option("--from", help="An offset, a time (ISO-8601), earliest or latest.")
    ] = "earliest",
    count: Annotated[int | None, typer.Option("--count", min=0, help="Stop after this many messages.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new messages as they arrive.")] = False,
    subject: Annotated[
        str | None, typer.Option("--subject", help="Print only messages whose subject matches this NATS wildcard.")
    ] = None,
    grep: Annotated[
        str | None, typer.Option("--grep", help="Print only messages that contain this text. The brokers search.")
    ] = None,
    regex: Annotated[bool, typer.Option("--regex", help="With --grep: it is a regular expression (RE2).")] = False,
    ignore_case: Annotated[
        bool, typer.Option("--ignore-case", "-i", help="With --grep: capital and small letters are the same.")
    ] = False,
    within: Annotated[
        str | None,
        typer.Option("--in", help="With --grep: the columns to search, of value,key,headers,subject (first three)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per message.")] = False,
    as_arrow: Annotated[bool, typer.Option("--arrow", help="Write an Arrow IPC stream.")] = False,
) -> None:
    """Print messages: one value per line, JSON (--json) or Arrow (--arrow). On a terminal, control characters are
    escaped.
    """
    check_formats(as_json=as_json, as_arrow=as_arrow)
    is_shown = is_terminal(sys.stdout)
    client = global_of(context).client()
    begin = int(start) if start.isdecimal() else start
    if grep is not None:
        if follow:
            raise InvalidRequest("--grep searches what is stored: it cannot be combined with --follow")
        how = {"is_regex": regex, "ignores_case": ignore_case, "columns": within and within.split(",")}
        found = _searched(client, stream, grep, start=begin, subject=subject, **how)
    else:
        if regex or ignore_case or within is not None:
            raise InvalidRequest("--regex, --ignore-case and --in have no effect without --grep")
        found = _consumed(client, stream, start=begin, subject=subject, follow=follow)
    batches = _limited(found, count)
    sink = sys.stdout.buffer
    if as_arrow:
        import pyarrow as pa

        from natslog.arrow.schema import MESSAGE_SCHEMA

        with pa.ipc.new_stream(sink, MESSAGE_SCHEMA) as writer:
            for batch in batches:
                writer.write_batch(batch)
                sink.flush()
    else:
        for batch in batches:
            lines = _lines(batch, as_json)
            sink.write(_escaped(lines, as_json) if is_shown else lines)
            sink.flush()
    sink.flush()


def _consumed(
    client: NatslogClient, stream: str, *, start: int | str, subject: str | None, follow: bool
) -> Iterator[pa.RecordBatch]:
    patience_s = _FOLLOW_PATIENCE_S if follow else 0.0
    consumer = client.consume(
        stream, start=start, follow=follow, subject=subject, wait_ms=_WAIT_MS, patience_s=patience_s
    )
    return (batch.record_batch for batch in consumer)


def _searched(
    client: NatslogClient, stream: str, text: str, *, start: int | str, **how: Any
) -> Iterator[pa.RecordBatch]:
    """What was found. On a terminal, how far the search is."""
    with err.status("searching") as status:

        def show(page: FoundPage) -> None:
            status.update(f"searched to offset {page.next_offset:,} of {page.high_watermark:,}")

        yield from client.search(stream, text, start=start, on_page=show, **how)


def _limited(batches: Iterator[pa.RecordBatch], count: int | None) -> Iterator[pa.RecordBatch]:
    if count == 0:
        return
    for batch in batches:
        if count is not None and batch.num_rows >= count:
            yield batch.slice(0, count)
            return
        count = None if count is None else count - batch.num_rows
        yield batch


def _lines(batch: pa.RecordBatch, as_json: bool) -> bytes:
    if as_json:
        from natslog.arrow.messages_json import json_lines

        return json_lines(batch)
    values: list[Any] = batch.column("value").to_pylist()
    return b"".join(value + b"\n" for value in values)


def _escaped(lines: bytes, as_json: bool) -> bytes:
    """Stored messages must not control the terminal."""
    text = lines.decode(errors="backslashreplace")
    return escaped(text, as_json=as_json).encode()
