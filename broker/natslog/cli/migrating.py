"""`natslog import --from-jetstream`: a stream of JetStream is copied, followed, and replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natslog.cli.common import broker_extra, global_of
from natslog.cli.nats_options import NatsLogin
from natslog.cli.option_groups import OptionGroup
from natslog.cli.output import err, out, print_json
from natslog.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from natslog.migration.importing import Migrated, Progress

_PATIENCE_S = 60.0


def _option(names: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(names, help=text, metavar=metavar, rich_help_panel="From JetStream")


@dataclass(frozen=True, slots=True, kw_only=True)
class FromJetStream:
    """Options of `natslog import` for a stream of JetStream."""

    url: Annotated[str | None, _option("--from-jetstream", "Copy a stream of JetStream.", metavar="URL")] = None
    follow: Annotated[
        bool,
        _option(
            "--follow/--no-follow",
            "Continue until another command has switched over, or end with what there is now.",
        ),
    ] = True
    switch_over: Annotated[
        bool,
        _option(
            "--switch-over",
            "As soon as JetStream does not record the subjects any more: copy the rest and the positions of "
            "consumers, and resume the natslog stream.",
        ),
    ] = False
    js_domain: Annotated[str | None, _option("--js-domain", "The domain of JetStream.")] = None
    ignored: Annotated[
        list[str] | None,
        _option("--ignore", "A field of the configuration that natslog does not support; repeatable.", metavar="FIELD"),
    ] = None
    consumers: Annotated[
        bool,
        _option("--consumers/--no-consumers", "With --switch-over: also durable consumers and their positions."),
    ] = True
    skip_unstorable: Annotated[
        bool, _option("--skip-unstorable", "Leave out messages whose subject or headers are not UTF-8.")
    ] = False

    def require_nothing(self) -> None:
        """For the import of an export. Raises InvalidRequest."""
        if self.switch_over or self.js_domain is not None or self.ignored or self.skip_unstorable:
            raise InvalidRequest("--switch-over, --js-domain, --ignore and --skip-unstorable require --from-jetstream")


FROM_JETSTREAM = OptionGroup.of(FromJetStream)


@dataclass(frozen=True, slots=True)
class Copied:
    """The stream of JetStream, and the name and the number of replicas of the one that it becomes."""

    stream: str
    name: str
    replicas: int | None


def import_from_jetstream(
    context: typer.Context, given: FromJetStream, login: NatsLogin, copied: Copied, as_json: bool
) -> None:
    """Raises InvalidRequest, and as `migration.importing.migrate`."""
    assert given.url is not None, "the option --from-jetstream"
    if given.switch_over and not given.follow:
        raise InvalidRequest("--switch-over and --no-follow exclude each other")
    with broker_extra("natslog import --from-jetstream"):
        import asyncio

        from natslog.migration.importing import MigrationOptions, migrate

    client = global_of(context).client(_PATIENCE_S)
    with _progress(copied) as show:
        options = MigrationOptions(
            url=given.url,
            stream=copied.stream,
            name=copied.name,
            credentials=login.credentials(),
            domain=given.js_domain,
            until="switched" if given.switch_over else "resumed" if given.follow else "copied",
            ignored=tuple(given.ignored or ()),
            replicas=copied.replicas,
            with_consumers=given.consumers,
            skips_unstorable=given.skip_unstorable,
            progress=show,
        )
        try:
            done = asyncio.run(migrate(client, options))
        except KeyboardInterrupt:
            err.print(f"stream {copied.name}: interrupted; the same command continues")
            raise
    if as_json:
        print_json(done)
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
def _progress(copied: Copied) -> Iterator[Callable[[Progress], None]]:
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
                _print_progress(copied, progress)

        yield show


def _print_progress(copied: Copied, progress: Any) -> None:
    from natslog.migration.importing import WAITING

    if progress.line == WAITING:
        err.print(
            f"stream {copied.name}: waiting until JetStream records its subjects no more. Now give its stream another "
            f"subject, for example: nats stream edit {copied.stream} --subjects moved.{copied.stream}"
        )
    elif not err.is_terminal:
        err.print(f"stream {copied.name}: {progress.line}, {progress.done} messages are copied")
