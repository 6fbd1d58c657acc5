"""`natslog verify DIR`: checks every CRC of a stopped broker's data folder; read-only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from natslog.cli.common import JsonFlag
from natslog.cli.output import err, out, print_json, print_table
from natslog.errors import InvalidRequest
from natslog.units import format_size

if TYPE_CHECKING:
    from natslog.log.verify import FileReport


def verify(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A broker's data folder, the folder of one stream in it, or an export."),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Check every CRC of a stopped broker's data folder. Exit code 1 if a file is damaged. Nothing is changed.

    "messages" are those that are stored. "removed" are the offsets that are recorded as removed: their messages are no
    longer served, and are stored until the file is rewritten.
    """
    from rich.progress import Progress

    from natslog.log.verify import check_file, files_of

    if not folder.is_dir():
        raise InvalidRequest(f"{folder} is not a folder")
    paths = files_of(folder)
    if not paths:
        raise InvalidRequest(f"{folder} contains no natslog files")
    reports: list[FileReport] = []
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        reports.extend(check_file(path) for path in bar.track(paths, description="verifying"))
    damaged = [report for report in reports if report.problems]
    if as_json:
        print_json({"files": msgspec.to_builtins(reports), "damaged": len(damaged)})
    else:
        _show(folder, reports, damaged)
    if damaged:
        raise typer.Exit(1)


def _show(folder: Path, reports: list[FileReport], damaged: list[FileReport]) -> None:
    rows = [
        [Path(report.file).relative_to(folder), report.kind, format_size(report.bytes), report.batches, report.messages,
         report.removed, "; ".join(report.problems) or report.note or "ok"]
        for report in reports
    ]  # fmt: skip
    print_table(["file", "kind", "bytes", "batches", "messages", "removed", "state"], rows)
    total = sum(report.bytes for report in reports)
    state = f"{len(damaged)} damaged" if damaged else "all CRCs are correct"
    out.print(f"{len(reports)} files, {format_size(total)}: {state}", style="bold red" if damaged else None)
