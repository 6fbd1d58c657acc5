"""`natslog pub`: one message, or a file of them.

The publisher, with its compiled kernels, is loaded by this command alone: it takes half of a command's time to start.
"""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from natslog.cli.common import Global, JsonFlag, NatsUrl, global_of
from natslog.cli.csv_rows import JsonRows, Row, declared_types, inferred_types, next_chunk, rows_of, shown_types
from natslog.cli.nats_options import LOGIN, NatsLogin
from natslog.cli.option_groups import OptionGroup, takes
from natslog.cli.output import err, is_terminal, out, print_json
from natslog.config import DEFAULT_NATS_URL
from natslog.errors import InvalidRequest, NatslogError, PublishFailed

if TYPE_CHECKING:
    from natslog.client.publisher import Publisher, Rows
    from natslog.model import Ack

_CHUNK_ROWS = 4000
_CHUNK_BYTES = 8 * 1024 * 1024
_SPECIAL = re.compile(r"[.*>\s\x00-\x1f\x7f]")
_ESCAPED = re.compile(r"[%.*>\s\x00-\x1f\x7f]")
_Header = tuple[str, str]
_Show = Callable[[int, str], None]
"""Shows the progress: bytes of the input that are done, and what is done with it."""
_NOTHING_GIVEN = "give a PAYLOAD, --file, or data on standard input"


@dataclass(frozen=True, slots=True)
class _Csv:
    """How rows become JSON. `types`: of the columns, once they are known. `is_quiet`: they are not shown."""

    declared: dict[str, str]
    strings: bool
    is_quiet: bool
    show: _Show
    types: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Chunk:
    """Messages to be published together; `done_bytes` of the input are used up by them."""

    subjects: list[str] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    done_bytes: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """A file of messages, and how its rows become messages."""

    file: Annotated[
        Path | None, typer.Option("--file", help="Publish the rows of this file; - means standard input.")
    ] = None
    form: Annotated[
        Literal["lines", "csv", "ndjson"],
        typer.Option(
            "--format",
            help=(
                "lines: one message per line, without its line end; csv: one JSON object per row, with the types that "
                "its columns have (numbers, booleans, otherwise text; of a pipe those of its first rows); ndjson: one "
                "message per line."
            ),
        ),
    ] = "lines"
    types: Annotated[
        str | None,
        typer.Option(
            "--types",
            metavar="TYPES",
            help="Types of CSV columns that are not to be inferred: 'magnitude DOUBLE, code STRING'.",
        ),
    ] = None
    strings: Annotated[bool, typer.Option("--strings", help="Do not infer types of CSV columns: all are text.")] = False
    in_subject: Annotated[
        Literal["refuse", "escape", "split"],
        typer.Option(
            "--in-subject",
            help=(
                "If a {field} has dots, spaces or wildcards: refuse it, escape them (a dot becomes %2E), or split it "
                "at dots into levels."
            ),
        ),
    ] = "refuse"
    key: Annotated[str | None, typer.Option("--key", help="Field whose value becomes the message key.")] = None

    def require_consistent(self, subject: str, payload: str | None) -> None:
        """Raises InvalidRequest: they exclude each other, or nothing is to be published."""
        if payload is not None and self.file is not None:
            raise InvalidRequest("give either a PAYLOAD or --file")
        if self.file is None and payload is None and is_terminal(sys.stdin):
            raise InvalidRequest(_NOTHING_GIVEN)
        if self.file is not None and self.form == "lines" and (self.key is not None or "{" in subject):
            raise InvalidRequest("lines have no fields: --key and {field} require --format csv or ndjson")
        if self.file is None and self.form != "lines":
            raise InvalidRequest(f"--format {self.form} is for rows: give --file FILE, or --file - for standard input")
        if self.form != "csv" and (self.types is not None or self.strings):
            raise InvalidRequest("--types and --strings require --format csv")


@takes(rows=OptionGroup.of(RowOptions), login=LOGIN)
def pub(
    context: typer.Context,
    subject: Annotated[
        str, typer.Argument(help="Subject to publish to; {field} is replaced by that field of JSON or CSV rows.")
    ],
    payload: Annotated[
        str | None, typer.Argument(help="The message. Without PAYLOAD and --file, it is read from standard input.")
    ] = None,
    *,
    rows: RowOptions,
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header", metavar="NAME:VALUE", help="A header of each message, such as Nats-TTL:1h; repeatable."
        ),
    ] = None,
    ack: Annotated[bool, typer.Option("--ack", help="Wait until a stream has stored each message on disk.")] = False,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.001, help="Maximum rate in messages per second.")
    ] = None,
    ack_timeout: Annotated[
        float, typer.Option("--ack-timeout", help="Fail after this many seconds without an ack.")
    ] = 30,
    nats_url: NatsUrl = DEFAULT_NATS_URL,
    login: NatsLogin,
    as_json: JsonFlag = False,
) -> None:
    """Publish to NATS; with --ack, every message is on disk in a stream when this ends."""
    if rate is not None and rate > 1e9:
        raise InvalidRequest(f"--rate {rate} must be a number above 0")
    rows.require_consistent(subject, payload)
    declared, headers = declared_types(rows.types or ""), list(map(_header_of, header or []))
    total_bytes = 0 if rows.file is None else _size_of(rows.file)
    from natslog.client.publisher import Publisher

    started = time.monotonic()
    options = global_of(context)
    publisher = Publisher(
        nats_url,
        credentials=login.credentials(),
        ack_timeout_s=ack_timeout,
        why_hopeless=lambda subject: _why_never_acked(options, subject),
    )
    with publisher, _progress(total_bytes) as show:
        csv = _Csv(declared, rows.strings, is_quiet=as_json, show=show) if rows.form == "csv" else None
        limit_bytes = publisher.max_payload_bytes
        if rows.file is not None:
            chunks = _chunks(rows.file, csv or rows.form, subject, rows.in_subject, rows.key, limit_bytes)
        else:
            value = _standard_input(limit_bytes) if payload is None else payload.encode("utf-8", "surrogateescape")
            chunks = iter([_single(value, subject, rows.in_subject, rows.key)])
        try:
            sent = _publish_all(publisher, chunks, show, "stored" if ack else "flush", rate, headers)
        except PublishFailed as error:
            if error.facts.get("listens", True):
                raise
            why = _why_none_listens(options, str(error.facts["subject"]))
            raise PublishFailed(f"{error.message} {why}", **error.facts) from error
    seconds = max(time.monotonic() - started, 1e-9)
    _report(sent, publisher.acked if ack else None, publisher.resent, seconds, as_json, csv)


def _why_never_acked(options: Global, subject: str) -> str | None:
    """Why no ack will ever come from this subject; None where one may, or no broker answers."""
    from natslog.cli.recording import streams_on, why_never_acked

    try:
        with options.client() as client:
            found = streams_on(client, subject)
    except NatslogError:
        return None
    why = why_never_acked(found, subject)
    return f"{why} Without --ack, pub does not wait for acks." if why and found else why


def _why_none_listens(options: Global, subject: str) -> str:
    """Describes the streams that record the subject, as a broker reports them."""
    from natslog.cli.recording import streams_on, why_never_acked

    try:
        with options.client() as client:
            found = streams_on(client, subject)
    except NatslogError as error:
        return f"The cause could not be determined: {error.message}"
    if (why := why_never_acked(found, subject)) is not None:
        return why
    return " ".join(
        f"Stream {stream['name']} records this subject but cannot accept messages now: {stream['problem']['message']}"
        if "problem" in stream
        else f"Stream {stream['name']} records this subject, and broker {stream['leader']} is its leader: check that "
        "this broker is connected to the NATS server given by --nats-url."
        for stream in found
    )


def _size_of(file: Path) -> int:
    """0 where it is no plain file. Raises InvalidRequest."""
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError as error:
        raise InvalidRequest(f"cannot read {file}: {error.strerror}") from error


def _standard_input(limit_bytes: int) -> bytes:
    """All of it, as one message. Raises InvalidRequest: there is none, or more than `limit_bytes`."""
    value = b"" if sys.stdin is None else sys.stdin.buffer.read(limit_bytes + 1)
    if not value:
        raise InvalidRequest(_NOTHING_GIVEN)
    if len(value) > limit_bytes:
        raise InvalidRequest(f"standard input is {_too_large(limit_bytes)}: publish one message per line with --file -")
    return value


def _too_large(limit_bytes: int) -> str:
    return f"larger than the {limit_bytes} bytes that the NATS server accepts in a message (max_payload)"


def _single(value: bytes, template: str, in_subject: str, key: str | None) -> _Chunk:
    """One message; where the subject or the key takes a field, it must be a JSON object."""
    fields = _object(value, 1) if key is not None or "{" in template else {}
    return _Chunk([_subject(template, in_subject, fields, 1)], [value], [_key(fields, key, 1)])


def _report(sent: int, acked: int | None, resent: int, seconds: float, as_json: bool, csv: _Csv | None) -> None:
    per_second = round(sent / seconds)
    if as_json:
        types = {} if csv is None else {"types": shown_types(csv.types)}
        found = {"sent": sent, "acked": acked, "resent": resent, "seconds": round(seconds, 3), "per_second": per_second}
        print_json(found | types)
        return
    acks = "" if acked is None else f", acked {acked}"
    again = f", {resent} sent again" if resent else ""
    out.print(f"sent {sent}{acks}{again} in {seconds:.1f} s ({per_second}/s)")


def _header_of(text: str) -> _Header:
    """Of an option. Raises InvalidRequest."""
    name, separator, value = text.partition(":")
    if not name.strip() or not separator:
        raise InvalidRequest(f"--header {text[:100]!r} must be NAME:VALUE, such as Nats-TTL:1h")
    return name.strip(), value.strip()


def _publish_all(
    publisher: Publisher,
    chunks: Iterator[_Chunk],
    show: _Show,
    ack: Ack,
    rate: float | None,
    headers: Sequence[_Header],
) -> int:
    run, sent, started = secrets.token_hex(8), 0, time.monotonic()
    try:
        for chunk in chunks:
            for rows in _paced(_rows(chunk, run if ack == "stored" else None, sent, headers), rate):
                if rate is not None:
                    time.sleep(max(0.0, started + sent / rate - time.monotonic()))
                publisher.publish(rows, ack, first_row=sent + 1)
                sent += len(rows)
            show(chunk.done_bytes, f"published {sent}")
    except NatslogError:
        acked = f", acked {publisher.acked}" if ack == "stored" else ""
        err.print(f"stopped: {sent} messages were sent before the error{acked}")
        raise
    return sent


def _rows(chunk: _Chunk, run: str | None, first: int, headers: Sequence[_Header]) -> Rows:
    import pyarrow as pa

    from natslog.arrow.schema import HEADERS_TYPE
    from natslog.client.publisher import Rows

    keys = pa.array(chunk.keys, pa.binary()) if any(key is not None for key in chunk.keys) else None
    has_ids = any(name.lower() == "nats-msg-id" for name, _ in headers)
    ids = None if run is None or has_ids else pa.array([f"{run}:{first + at}" for at in range(len(chunk.values))])
    pairs = pa.array([headers] * len(chunk.values), HEADERS_TYPE) if headers else None
    return Rows(pa.array(chunk.subjects), pa.array(chunk.values, pa.binary()), keys, pairs, ids)


def _paced(rows: Rows, rate: float | None) -> Iterator[Rows]:
    """Parts small enough to keep a rate evenly, about twenty a second."""
    step = len(rows) if rate is None else max(1, int(rate / 20))
    for start in range(0, len(rows), max(1, step)):
        yield rows.slice(start, step)


@contextmanager
def _progress(total_bytes: int) -> Iterator[_Show]:
    """Yields what shows the progress: on a terminal, of an input whose size is known."""
    if not total_bytes or not err.is_terminal:
        yield lambda done_bytes, what: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("bytes"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("publishing", total=total_bytes)
        yield lambda done_bytes, what: bar.update(task, completed=done_bytes, description=what)


def _chunks(
    path: Path, form: str | _Csv, template: str, in_subject: str, key: str | None, limit_bytes: int
) -> Iterator[_Chunk]:
    """Rows of the input; memory is bounded by a chunk and the server's limit for a message.

    Raises:
        InvalidRequest: the file, a row that is too large, or a field that is not there, with its line number.
    """
    try:
        with open(path, "rb") if str(path) != "-" else nullcontext(sys.stdin.buffer) as file:
            chunk = _Chunk()
            for number, value, fields in _records(file, form, limit_bytes):
                chunk.subjects.append(_subject(template, in_subject, fields, number))
                chunk.values.append(value)
                chunk.keys.append(_key(fields, key, number))
                chunk.done_bytes += len(value) + 1
                chunk.size_bytes += len(value)
                if len(chunk.values) == _CHUNK_ROWS or chunk.size_bytes >= _CHUNK_BYTES:
                    chunk.done_bytes = file.tell() if file.seekable() else chunk.done_bytes
                    yield chunk
                    chunk = _Chunk(done_bytes=chunk.done_bytes)
            if chunk.values:
                yield chunk
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror or error}") from error


def _text_lines(file: IO[bytes], limit_bytes: int) -> Iterator[str]:
    for number, line in _lines(file, limit_bytes):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"line {number} is not UTF-8 text: convert the file first") from error


def _lines(file: IO[bytes], limit_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Each line, with its number from 1 and its end. Raises InvalidRequest: a line of more than `limit_bytes`."""
    number = 0
    while line := file.readline(limit_bytes + 3):
        number += 1
        if len(line) > limit_bytes + 2 or len(line.rstrip(b"\r\n")) > limit_bytes:
            raise InvalidRequest(f"line {number} is {_too_large(limit_bytes)}")
        yield number, line


def _records(file: IO[bytes], form: str | _Csv, limit_bytes: int) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Each row's line, payload and fields."""
    if isinstance(form, _Csv):
        yield from _csv_records(file, form, limit_bytes)
        return
    for number, line in _lines(file, limit_bytes):
        value = line.rstrip(b"\r\n")
        value = value.removeprefix(b"\xef\xbb\xbf") if number == 1 and form == "ndjson" else value
        if form == "lines":
            yield number, value, {}
        elif value.strip():
            yield number, value, _object(value, number)


def _object(line: bytes, number: int) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"line {number} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequest(f"line {number} is not a JSON object")
    return fields


def _csv_records(file: IO[bytes], options: _Csv, limit_bytes: int) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """The limit of a message holds for lines, too: a row's JSON is not shorter, but for blanks and `+`."""
    begin = file.tell() if file.seekable() else None
    rows = rows_of(_text_lines(file, limit_bytes), limit_bytes)
    _, names = next(rows)
    if options.strings:
        types = inferred_types((), names, options.declared)
    elif begin is not None:
        types = inferred_types(_with_progress(rows, file, options.show), names, options.declared)
        file.seek(begin)
        rows = rows_of(_text_lines(file, limit_bytes), limit_bytes)
        next(rows)
    else:
        first = next_chunk(rows)
        types, rows = inferred_types(first, names, options.declared), chain(first, rows)
    options.types.update(types)
    if not options.is_quiet:
        err.print(f"types: {shown_types(types)}", markup=False, highlight=False, soft_wrap=True)
    objects = JsonRows(types)
    while chunk := next_chunk(rows):
        for (number, cells), value in zip(chunk, objects.encode(chunk), strict=True):
            yield number, value, dict(zip(names, cells, strict=True))


def _with_progress(rows: Iterator[Row], file: IO[bytes], show: _Show) -> Iterator[Row]:
    for count, row in enumerate(rows):
        if count % _CHUNK_ROWS == 0:
            show(file.tell(), "inferring types")
        yield row


def _key(fields: dict[str, Any], name: str | None, number: int) -> bytes | None:
    """A null field is no key."""
    value = None if name is None else _field(fields, name, number)
    return None if value is None else str(value).encode()


def _subject(template: str, in_subject: str, fields: dict[str, Any], number: int) -> str:
    if "{" not in template:
        return template
    parts = template.split("{")
    subject = parts[0]
    for part in parts[1:]:
        name, closed, rest = part.partition("}")
        if not closed:
            raise InvalidRequest(f"subject {template!r}: a {{ without }}")
        value = _field(fields, name, number)
        if value is None:
            raise InvalidRequest(f"line {number}: field {name!r} is null; a null value cannot be part of a subject")
        subject += _level(str(value), in_subject, name, number) + rest
    return subject


def _level(value: str, in_subject: str, name: str, number: int) -> str:
    """A field's value as part of a subject: one level, unless `split`."""
    if value and (in_subject == "split" or not _SPECIAL.search(value)):
        return value
    if value and in_subject == "escape":
        return _ESCAPED.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), value)
    permit = "; use --in-subject escape or --in-subject split" if value else ""
    raise InvalidRequest(f"line {number}: field {name!r} is {value!r}, which cannot be one level of a subject{permit}")


def _field(fields: dict[str, Any], name: str, number: int) -> Any:
    if name not in fields:
        raise InvalidRequest(f"line {number} has no field {name!r}; it has {', '.join(map(str, fields)) or 'none'}")
    return fields[name]
