"""`natslog import --from-jetstream`: a stream of JetStream is copied, followed, and replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from natslog.cli.common import broker_extra, global_of
from natslog.cli.output import err, out, print_json
from natslog.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from natslog.migration.importing import Migrated, Progress
    from natslog.wire.credentials import NatsCredentials

_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of the command."""

    url: str
    stream: str
    name: str
    follow: bool
    switch_over: bool
    domain: str | None
    ignored: tuple[str, ...]
    replicas: int | None
    consumers: bool
    skip_unstorable: bool
    as_json: bool


def import_from_jetstream(context: typer.Context, asked: Asked, credentials: NatsCredentials) -> None:
    """Raises InvalidRequest, and as `migration.importing.migrate`."""
    if asked.switch_over and not asked.follow:
        raise InvalidRequest("--switch-over and --no-follow exclude each other")
    with broker_extra("natslog import --from-jetstream"):
        import asyncio

        from natslog.migration.importing import MigrationOptions, migrate

    client = global_of(context).client(_PATIENCE_S)
    with _progress(asked) as show:
        options = MigrationOptions(
            url=asked.url,
            stream=asked.stream,
            name=asked.name,
            credentials=credentials,
            domain=asked.domain,
            until="switched" if asked.switch_over else "resumed" if asked.follow else "copied",
            ignored=asked.ignored,
            replicas=asked.replicas,
            with_consumers=asked.consumers,
            skips_unstorable=asked.skip_unstorable,
            progress=show,
        )
        try:
            done = asyncio.run(migrate(client, options))
        except KeyboardInterrupt:
            err.print(f"stream {asked.name}: interrupted; the same command continues")
            raise
    if asked.as_json:
        import msgspec

        print_json(msgspec.to_builtins(done))
    else:
        _show(done)
    if done.refused:
        raise typer.Exit(1)


def _show(done: Migrated) -> None:
    state = "it accepts messages" if done.resumed else "it is paused and records nothing until the switch-over"
    gaps = "" if done.removed is None else f", of which {done.removed} have no message"
    out.print(
        f"stream {done.stream}: {done.messages} messages were copied, sequences {done.first_offset + 1} to "
        f"{done.end_offset}{gaps}; {state}"
    )
    if done.skipped:
        out.print(f"{done.skipped} messages were left out, because natslog cannot store them")
    if done.consumers:
        out.print("consumers: " + ", ".join(done.consumers))
    if done.others:
        out.print("consumers without a durable name were not copied: " + ", ".join(done.others))
    for one in done.refused:
        err.print(f"natslog: consumer {one['name']} was not copied: {one['reason']}")


@contextmanager
def _progress(asked: Asked) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal; otherwise a line for each thing that happens."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = ""
    with Bar(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("copying", total=None)

        def show(progress: Progress) -> None:
            nonlocal shown
            bar.update(task, completed=progress.done, total=progress.total or None, description=progress.line)
            if progress.line != shown:
                shown = progress.line
                _say(asked, progress)

        yield show


def _say(asked: Asked, progress: Any) -> None:
    from natslog.migration.importing import WAITING

    if progress.line == WAITING:
        err.print(
            f"stream {asked.name}: waiting until JetStream records its subjects no more. Now give its stream another "
            f"subject, for example: nats stream edit {asked.stream} --subjects moved.{asked.stream}"
        )
    elif not err.is_terminal:
        err.print(f"stream {asked.name}: {progress.line}, {progress.done} messages are copied")
