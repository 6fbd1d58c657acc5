"""`natslog export` and `natslog import`: streams, or a whole cluster, as files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natslog.cli.common import JsonFlag, global_of
from natslog.cli.migrating import FROM_JETSTREAM, Copied, FromJetStream, import_from_jetstream
from natslog.cli.nats_options import LOGIN, NatsLogin
from natslog.cli.option_groups import takes
from natslog.cli.output import err, is_terminal, out, print_json
from natslog.errors import InvalidRequest
from natslog.units import format_size, offsets_between, parse_size_bytes

if TYPE_CHECKING:
    from natslog.backup.exporting import Exported, Progress
    from natslog.backup.importing import Imported

_PATIENCE_S = 60.0

Access = Annotated[
    bool,
    typer.Option("--access/--no-access", help="With --all: also tokens (digests), roles, access rules and quotas."),
]
All = Annotated[bool, typer.Option("--all", help="All streams, cursors, and tokens and access rules.")]


def export(
    context: typer.Context,
    names: Annotated[
        list[str], typer.Argument(metavar="[STREAM] DIR", help="The stream, and a folder; - writes a tar stream.")
    ],
    everything: All = False,
    file_size: Annotated[str, typer.Option("--file-size", help="Largest size of a file.")] = "128MiB",
    verify: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Compare the files of an earlier export with their CRCs first."),
    ] = True,
    access: Access = True,
    as_json: JsonFlag = False,
) -> None:
    """Export a stream, or all of the cluster (--all), into a folder, or as a tar stream (-).

    Into a folder with an export of the same stream, only what is new is added. After ^C, or a failure, the same command
    continues. The files are Arrow IPC files; natslog verify DIR checks them.
    """
    from natslog.backup.exporting import ExportOptions

    name, target = _named(names, everything)
    file_bytes = parse_size_bytes(file_size, "--file-size")
    with _progress() as progress:
        options = ExportOptions(file_bytes=file_bytes, verify=verify, progress=progress)
        if target == "-":
            body = _export_to_output(context, name, options, access, as_json)
        else:
            body = _export(context, name, Path(target), options, access)
    if target == "-":
        return
    if as_json:
        print_json(body)
        return
    for one in [body] if name is not None else body.streams:
        _show_exported(one)
    if name is None:
        out.print(f"{body.cursors} cursors; holds: {', '.join(body.holds)}")
        out.print(f"does not hold: {', '.join(body.lacks)}")


def _named(names: list[str], everything: bool) -> tuple[str | None, str]:
    """The stream (None: all) and the folder."""
    if len(names) != (1 if everything else 2):
        raise InvalidRequest(
            "with --all, give the folder only: natslog export --all DIR"
            if everything
            else "give a stream and a folder: natslog export STREAM DIR; or all streams: natslog export --all DIR"
        )
    return (None, names[0]) if everything else (names[0], names[1])


def _export(context: typer.Context, name: str | None, folder: Path, options: Any, access: bool) -> Any:
    from natslog.backup.exporting import export_stream
    from natslog.backup.whole_cluster import export_cluster

    client = global_of(context).client(_PATIENCE_S)
    if name is not None:
        return export_stream(client, name, folder, options)
    return export_cluster(client, folder, options, with_access=access)


def _export_to_output(context: typer.Context, name: str | None, options: Any, access: bool, as_json: bool) -> Any:
    """Each file is made in a temporary folder, and removed when it has been written."""
    from tempfile import TemporaryDirectory

    from natslog.backup.tar_streams import TarWriter

    if as_json:
        raise InvalidRequest("--json cannot be combined with -: standard output has the export")
    if is_terminal(sys.stdout):
        raise InvalidRequest("a tar stream is binary data, which a terminal cannot show: redirect it to a file or pipe")
    with TemporaryDirectory(prefix="natslog-export-") as temporary:
        folder = Path(temporary)
        tar = TarWriter(sys.stdout.buffer, folder)
        body = _export(context, name, folder, replace(options, deliver=tar.add), access)
        tar.close()
        sys.stdout.buffer.flush()
    return body


def _show_exported(one: Exported) -> None:
    out.print(
        f"stream {one.stream}: {one.messages} messages, {offsets_between(one.first_offset, one.end_offset)}, "
        f"{format_size(one.bytes)} in {one.files} files; {one.added_messages} messages are new"
        + (f", {one.removed_messages} were removed since the last export" if one.removed_messages else "")
        + (f"; {one.rewritten_files} files had erased messages and were replaced" if one.rewritten_files else "")
    )


@takes(jetstream=FROM_JETSTREAM, login=LOGIN)
def import_(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIR|STREAM", help="The folder of an export; - reads a tar stream. A stream with --from-jetstream."
        ),
    ],
    everything: Annotated[
        bool, typer.Option("--all", help="Require an export of a whole cluster (it is recognised without this).")
    ] = False,
    new_name: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="Name of the stream; default: the original's.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="The streams take messages when they are complete. Only if the original takes none any more.",
        ),
    ] = False,
    replicas: Annotated[
        int | None, typer.Option("--replicas", min=1, help="Number of replicas, instead of the original's.")
    ] = None,
    access: Access = True,
    *,
    jetstream: FromJetStream,
    login: NatsLogin,
    as_json: JsonFlag = False,
) -> None:
    """Import an export, or a stream of JetStream, into this cluster.

    An export is checked completely before anything is created.

    Offsets, times, keys and headers are those of the original. The stream is created paused, and subscribes to no
    subject before natslog stream resume NAME: the original may still record them. The same command continues an import
    that was interrupted, and adds what a newer export has, until the stream is resumed.

    --from-jetstream URL STREAM copies a stream of a NATS server with JetStream, with its sequences, subjects, headers
    and times, and follows it until --switch-over: see docs/JETSTREAM.md, "Moving from JetStream".
    """
    if jetstream.url is not None:
        if everything or resume:
            raise InvalidRequest("--all and --resume are for exports; --from-jetstream has --switch-over")
        import_from_jetstream(context, jetstream, login, Copied(source, new_name or source, replicas), as_json)
        return
    jetstream.require_nothing()
    from natslog.backup.importing import ImportOptions

    with _folder(source) as folder, _progress() as progress:
        settings = {} if replicas is None else {"replicas": replicas}
        options = ImportOptions(resume=resume, settings=settings, progress=progress)
        body = _import(context, folder, options, new_name, everything, access)
    if as_json:
        print_json(body)
    else:
        _show_all_imported(body)
    problems = getattr(body, "cursor_problems", [])  # of a cluster
    for problem in problems:
        err.print(f"natslog: {problem}. Set it with natslog cursor set")
    if problems:
        raise typer.Exit(1)


def _import(
    context: typer.Context, folder: Path, options: Any, new_name: str | None, everything: bool, access: bool
) -> Any:
    from natslog.backup.importing import checked_export, import_stream
    from natslog.backup.manifest import CLUSTER
    from natslog.backup.whole_cluster import checked_cluster, import_cluster

    client = global_of(context).client(_PATIENCE_S)
    if everything or (folder / CLUSTER).exists():
        if new_name is not None:
            raise InvalidRequest("--as is for the export of one stream: import DIR/streams/NAME --as NEW")
        return import_cluster(client, checked_cluster(folder), options, with_access=access)
    manifest = checked_export(folder)
    return import_stream(client, folder, manifest, new_name or manifest.name, options)


@contextmanager
def _folder(source: str) -> Iterator[Path]:
    """With the files of the export. Raises InvalidRequest, DamagedExport."""
    if source != "-":
        if not Path(source).is_dir():
            raise InvalidRequest(f"{source} is not a folder")
        yield Path(source)
        return
    from tempfile import TemporaryDirectory

    from natslog.backup.tar_streams import extract

    with TemporaryDirectory(prefix="natslog-import-") as temporary:
        extract(sys.stdin.buffer, Path(temporary))
        yield Path(temporary)


def _show_all_imported(body: Any) -> None:
    """A stream, or the streams of a cluster with all else."""
    if not hasattr(body, "streams"):
        _show_imported(body)
        return
    for one in body.streams:
        _show_imported(one)
    out.print(f"{body.cursors} cursors were set, {body.cursors_left} existed and were left")
    if body.access is not None:
        out.print("added: " + ", ".join(f"{count} {kind}" for kind, count in body.access.items()))


def _show_imported(one: Imported) -> None:
    added = f"{one.added_messages} messages were imported" if one.added_messages else "all was imported before"
    state = (
        "it accepts messages"
        if one.resumed
        else f"it is paused and records nothing until: natslog stream resume {one.stream}"
    )
    out.print(f"stream {one.stream}: {added}, {offsets_between(one.first_offset, one.end_offset)}; {state}")
    if one.without_interest:
        out.print(
            f"stream {one.stream}: its retention is limits instead of interest, so that no message is removed before "
            "its consumers exist, which are not in an export. Create them, and then set the retention again"
        )


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("messages"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield show
