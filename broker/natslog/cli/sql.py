"""`natslog sql QUERY`: a question about streams, answered by DuckDB in this process."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natslog.cli.common import global_of
from natslog.cli.output import check_formats, err, escaped, is_terminal, out, table_of
from natslog.errors import InvalidRequest

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from natslog.sql import Reads

_BATCH_ROWS = 8_192
_MOST_COUNTED_ROWS = 1_000_000
_STOP_WITHIN_S = 0.7
_INTERRUPTED_EXIT_CODE = 130


def sql(
    context: typer.Context,
    query: Annotated[
        str | None, typer.Argument(metavar="[QUERY]", help="SQL of DuckDB. Default, or -: standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the query from this file.")] = None,
    rows: Annotated[
        int, typer.Option("--rows", min=1, help="Print at most so many rows as a table; of the others their number.")
    ] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per row.")] = False,
    as_arrow: Annotated[bool, typer.Option("--arrow", help="Write an Arrow IPC stream.")] = False,
    memory_limit: Annotated[
        str, typer.Option("--memory-limit", help="Of DuckDB; what exceeds it goes to a temporary folder.")
    ] = "1GiB",
) -> None:
    """Query streams as tables: stream, offset, timestamp, subject, key, value, headers.

    Conditions on offset, timestamp and subject, and the columns that the query needs, decide what is read. Each stream
    ends where it ended when the query began. JSON payloads: decode(value)->>'member'. "offset" needs quotes.
    """
    check_formats(as_json=as_json, as_arrow=as_arrow)
    text = _query_text(query, file)
    show = _write_json if as_json else _write_arrow if as_arrow else lambda reader: _print_table(reader, rows)
    from natslog.sql import Reads, open_streams
    from natslog.units import parse_size_bytes

    limit = f"{parse_size_bytes(memory_limit, '--memory-limit')}B"
    folder = tempfile.mkdtemp(prefix="natslog-sql-")
    try:
        with global_of(context).client() as client:
            reads = Reads(client)
            connection = open_streams(reads, memory_limit=limit, temp_directory=folder, uses_variables=False)
            try:
                _interruptible(lambda: _answer(connection, reads, text, show), lambda: _stop(connection, reads), folder)
            finally:
                reads.stop()
                connection.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _query_text(query: str | None, file: Path | None) -> str:
    if file is not None:
        if query is not None:
            raise InvalidRequest("give the query, or --file, not both")
        try:
            return file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"cannot read the query from {file}: {error}") from error
    if query is None and is_terminal(sys.stdin):
        raise InvalidRequest("a query is required: natslog sql 'SELECT count(*) FROM orders'")
    return sys.stdin.read() if query in (None, "-") else str(query)


def _answer(
    connection: duckdb.DuckDBPyConnection, reads: Reads, text: str, show: Callable[[pa.RecordBatchReader], None]
) -> None:
    """Runs all statements and shows the rows of the last one.

    Raises:
        InvalidRequest: DuckDB's error, with its place in the query. The error of a broker, if that is why it failed.
    """
    import duckdb
    import pyarrow as pa

    try:
        relation = _last_of(connection, text)
        if relation is not None:
            show(relation.to_arrow_reader(_BATCH_ROWS))
    except (duckdb.Error, pa.ArrowException, OSError, RuntimeError) as error:
        if reads.failures:
            raise reads.failures[0] from error
        if not isinstance(error, (duckdb.Error, pa.ArrowException)):
            raise
        raise InvalidRequest(f"{error}{_hint(str(error), text)}") from error


def _last_of(connection: duckdb.DuckDBPyConnection, text: str) -> duckdb.DuckDBPyRelation | None:
    """Runs all statements but the last one, of which the relation is returned; None if it has no rows."""
    import duckdb

    statements = connection.extract_statements(text)
    for statement in statements[:-1]:
        connection.execute(statement)
    if not statements:
        return None
    try:
        return connection.sql(statements[-1])
    except (duckdb.BinderException, duckdb.CatalogException):
        connection.execute(statements[-1])  # it fails again, and this error states the place in the query
        raise


def _hint(message: str, text: str) -> str:
    is_unquoted = re.search(r'(?<!")\boffset\b(?!")', text, re.IGNORECASE)
    if message.startswith("Parser Error") and is_unquoted:
        return '\n\noffset is a keyword of SQL: as the name of the column, write "offset" with quotes.'
    return ""


def _stop(connection: duckdb.DuckDBPyConnection, reads: Reads) -> None:
    reads.stop()
    connection.interrupt()


def _interruptible(work: Callable[[], None], stop: Callable[[], None], folder: str) -> None:
    """Runs it in a thread, so that ^C is received while DuckDB runs, and ends the process. Raises what it raises."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="natslog-sql", daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        stop()
        thread.join(_STOP_WITHIN_S)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(_INTERRUPTED_EXIT_CODE)  # threads of DuckDB may still run, which the interpreter cannot wait for
    if failure:
        raise failure[0]


def _write_json(reader: pa.RecordBatchReader) -> None:
    from natslog.arrow.messages_json import json_lines

    sink, is_shown = sys.stdout.buffer, is_terminal(sys.stdout)
    for batch in reader:
        lines = json_lines(batch)
        sink.write(escaped(lines.decode(), as_json=True).encode() if is_shown else lines)
    sink.flush()


def _write_arrow(reader: pa.RecordBatchReader) -> None:
    import pyarrow as pa

    with pa.ipc.new_stream(sys.stdout.buffer, reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)
    sys.stdout.buffer.flush()


def _print_table(reader: pa.RecordBatchReader, most: int) -> None:
    import pyarrow.types as types

    shown: list[list[Any]] = []
    more = 0
    for batch in reader:
        kept = batch.slice(0, most - len(shown))
        shown += [list(map(_cell, row)) for row in zip(*(column.to_pylist() for column in kept.columns), strict=True)]
        more += batch.num_rows - kept.num_rows
        if more > _MOST_COUNTED_ROWS:
            break
    table = table_of(reader.schema.names, shown)
    for column, field in zip(table.columns, reader.schema, strict=True):
        is_number = types.is_integer(field.type) or types.is_floating(field.type) or types.is_decimal(field.type)
        column.justify = "right" if is_number else "left"
    out.print(table)
    if more:
        many = f"more than {_MOST_COUNTED_ROWS:,}" if more > _MOST_COUNTED_ROWS else f"{more:,}"
        err.print(f"{many} more rows are not shown: use LIMIT, --rows, --json or --arrow")


def _cell(value: Any) -> str:
    """Bytes that are no UTF-8 are shown in hexadecimal."""
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return f"0x{value.hex()}"
    if isinstance(value, (str, int)):
        return str(value)
    from natslog.arrow.messages_json import value_json

    return value_json(value).strip('"')
