"""`natslog table run STREAM TARGET`: a stream as a table of Delta Lake or Apache Iceberg."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natslog.cli.common import global_of
from natslog.cli.option_groups import OptionGroup, takes
from natslog.cli.output import err, out
from natslog.errors import ConfigError
from natslog.units import offsets_between, parse_duration_s, parse_size_bytes

if TYPE_CHECKING:
    from natslog.tables.copying import Committed
    from natslog.tables.options import TableOptions
    from natslog.tables.table import Target

app = typer.Typer(help="Copy streams into tables of Delta Lake or Apache Iceberg.", no_args_is_help=True)
_PATIENCE_S = 120.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@app.callback()
def table() -> None:
    """Copy streams into tables of Delta Lake or Apache Iceberg."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """How the stream becomes rows, and where they are stored."""

    payload_format: Annotated[
        str,
        typer.Option("--payload-format", help="json: members are columns. string or binary: the column value."),
    ] = "binary"
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="NAME=TYPE",
            help="Of a new table, with json: a column's type (string, boolean, int, "
            "bigint, float, double, date, timestamp, decimal(P,S)). Other members are inferred. May be repeated.",
        ),
    ] = None
    new_columns: Annotated[
        str, typer.Option("--new-columns", help="Members that are no column: add them, or reject the message.")
    ] = "add"
    on_misfit: Annotated[
        str,
        typer.Option("--on-misfit", help="Messages that do not fit: dead-letter (TARGET_dead_letters), or fail."),
    ] = "dead-letter"
    most_columns: Annotated[
        int, typer.Option("--max-columns", min=1, help="A message that would add more columns does not fit.")
    ] = 1_000
    partition_by: Annotated[
        list[str] | None,
        typer.Option("--partition-by", help="A column of a new table; _day is computed. May be repeated."),
    ] = None
    headers: Annotated[bool, typer.Option("--headers", help="Also store the messages' headers.")] = False
    event_time: Annotated[
        str | None, typer.Option("--event-time", help="The timestamp column that _day and --late refer to.")
    ] = None
    late: Annotated[
        str | None,
        typer.Option("--late", help="A message so much older than the newest one before it does not fit, as in 1h."),
    ] = None
    merge: Annotated[
        bool, typer.Option("--merge", help="Keep one row for each key, the newest; a tombstone deletes it.")
    ] = False
    start: Annotated[
        str, typer.Option("--from", help="Where a new table begins: earliest, latest, an offset, a time.")
    ] = "earliest"
    once: Annotated[bool, typer.Option("--once", help="Stop at the present end of the stream.")] = False
    commit_bytes: Annotated[str, typer.Option("--commit-bytes", help="Commit when so much of the stream was read.")] = (
        "64MiB"
    )
    commit_every: Annotated[str, typer.Option("--commit-every", help="Commit when a message has waited so long.")] = (
        "1m"
    )
    compact_every: Annotated[
        int, typer.Option("--compact-every", min=0, help="Compact small files after so many commits; 0: never.")
    ] = 64
    file_bytes: Annotated[str, typer.Option("--file-bytes", help="The size of a file that compactions aim at.")] = (
        "128MiB"
    )
    subject: Annotated[
        str | None, typer.Option("--subject", help="Only messages whose subject matches this NATS wildcard.")
    ] = None
    cursor: Annotated[
        str | None, typer.Option("--cursor", help="A cursor that follows the table, so that brokers show its lag.")
    ] = None
    on_data_loss: Annotated[
        str, typer.Option("--on-data-loss", help="Messages that retention removed before: fail, or skip them.")
    ] = "fail"
    catalog: Annotated[
        str | None,
        typer.Option("--catalog", help="Iceberg: a catalog of PyIceberg's configuration; default: SQLite."),
    ] = None
    warehouse: Annotated[
        str, typer.Option("--warehouse", help="Iceberg without --catalog: the folder of catalog.db and the tables.")
    ] = "warehouse"
    storage_option: Annotated[
        list[str] | None,
        typer.Option("--storage-option", metavar="NAME=VALUE", help="Delta: an option of the object store."),
    ] = None

    def table_options(self) -> TableOptions:
        """Raises InvalidRequest, ConfigError: one of them is not valid."""
        from natslog.tables.options import TableOptions, parse_column

        return TableOptions(
            payload_format=_word(self.payload_format),
            columns=dict(map(parse_column, self.column or [])),
            new_columns=_word(self.new_columns),
            on_misfit=_word(self.on_misfit),
            most_columns=self.most_columns,
            partition_by=tuple(self.partition_by or ()),
            headers=self.headers,
            event_time=self.event_time,
            late_s=None if self.late is None else parse_duration_s(self.late, "--late"),
            merge=self.merge,
            start=self.start,
            commit_bytes=parse_size_bytes(self.commit_bytes, "--commit-bytes"),
            commit_every_s=parse_duration_s(self.commit_every, "--commit-every"),
            compact_every=self.compact_every,
            file_bytes=parse_size_bytes(self.file_bytes, "--file-bytes"),
            follow=not self.once,
            subject=self.subject,
            cursor=self.cursor,
            on_data_loss=_word(self.on_data_loss),
            patience_s=_PATIENCE_S,
        )

    def place(self, target: str) -> Target:
        """Raises ConfigError."""
        from natslog.tables.table import parse_target

        storage = _storage(self.storage_option or [])
        return parse_target(target, catalog=self.catalog, warehouse=self.warehouse, storage=storage)


@app.command()
@takes(copying=OptionGroup.of(CopyOptions))
def run(
    context: typer.Context,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="delta:FOLDER, delta:URL (s3:, gs:, abfs:) or iceberg:NAMESPACE.NAME; without a word "
            "in front a Delta table.",
        ),
    ],
    *,
    copying: CopyOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each commit.")] = False,
) -> None:
    """Copy a stream into a table, each message exactly once, until stopped; neither Spark nor Java is needed.

    The table is created if it does not exist. The position is part of each commit, so the same command continues where
    the table ends. SIGTERM and Ctrl-C commit what was read, and end it.
    """
    options = copying.table_options()
    _run(context, stream, copying.place(target), options, as_json)


def _run(context: typer.Context, stream: str, place: Target, options: TableOptions, as_json: bool) -> None:
    import logging

    from natslog.tables.copying import copy_stream

    logging.basicConfig(level=logging.WARNING, format="natslog: %(message)s")
    stopping = threading.Event()
    rows = 0

    def stop(*_: object) -> None:
        for number in _SIGNALS:  # a second one ends the process at once
            signal.signal(number, signal.SIG_DFL)
        stopping.set()  # nothing waits for it in this thread, which would hold its lock

    def started() -> None:
        for number in _SIGNALS:
            signal.signal(number, stop)

    def report(done: Committed) -> None:
        nonlocal rows
        rows += done.rows
        _show(done, as_json)

    with global_of(context).client(_PATIENCE_S if options.follow else 0.0) as client:
        copy_stream(client, stream, place, options, report=report, stopping=stopping, started=started)
    if not as_json:
        err.print(f"{'stopped' if stopping.is_set() else 'complete'}: {rows} rows were written to {place.name}")


def _show(done: Committed, as_json: bool) -> None:
    if as_json:
        import msgspec

        out.print(msgspec.json.encode(done).decode())
        return
    parts = [f"{done.rows} rows"]
    if done.dead_letters:
        parts.append(f"{done.dead_letters} dead letters")
    if done.removed_files:
        parts.append(f"{done.removed_files} files were compacted into {done.added_files}")
    out.print(
        f"{done.stream} to {done.table}: {offsets_between(done.start, done.end)}, {', '.join(parts)}, "
        f"{done.took_s:.1f} s, {done.behind} behind"
    )


def _word(text: str) -> Any:
    return text.strip().lower()


def _storage(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise ConfigError(f"--storage-option {one!r} is not NAME=VALUE, as in AWS_REGION=eu-central-1")
        found[name] = value
    return found
