"""`natslog doctor`: what is wrong with a broker, its machine and its cluster, and what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live

from natslog.cli.broker_settings import EXAMINED_SETTINGS, config_of
from natslog.cli.common import Global, JsonFlag, global_of
from natslog.cli.option_groups import takes
from natslog.cli.output import err, is_terminal, out, print_json, table_of

if TYPE_CHECKING:
    from natslog.config import BrokerConfig
    from natslog.diagnosis.outcomes import Report

_CHECK_WIDTH = 32  # several that failed for one reason are in one cell
_STYLES = {"warning": "yellow", "problem": "bold red", "not checked": "dim"}


@takes(settings=EXAMINED_SETTINGS)
def doctor(
    context: typer.Context,
    production: Annotated[
        bool,
        typer.Option("--production", help="Also what is missing for production: replicas, TLS, backups, alerts, …"),
    ] = False,
    as_json: JsonFlag = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Check NATS, the disk, clocks, limits, versions, the cluster and access, and print what to do.

    With the settings of a broker (flags, variables, --config) it checks the machine of this broker, also before its
    first start; without, only the brokers at --server. It writes one temporary file into the data folder, and changes
    nothing. Each part has at most 15 s. Exit code: 0 without problems (there may be warnings), 1 with problems.
    """
    from natslog.diagnosis.doctor import diagnose, examine

    config, problem = config_of(settings)
    client = broker_at(global_of(context), config).client()
    with shown_progress() as progress:
        examined = examine(config, problem, client, client.options.token_file, progress, for_production=production)
        report = diagnose(examined, for_production=production)
    if as_json:
        print_json(report)
    else:
        _show(report)
    if report.problems:
        raise typer.Exit(1)


def broker_at(given: Global, config: BrokerConfig | None) -> Global:
    """Without --server, NATSLOG_SERVER and a profile: the broker of the settings."""
    import dataclasses
    import os

    from natslog.client.profiles import load_profile

    if config is None or given.servers or os.environ.get("NATSLOG_SERVER") or load_profile(given.profile).servers:
        return given
    url = config.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//:::", "//[::1]:")
    ca_file = given.tls_ca_file or config.tls_ca_file
    return dataclasses.replace(given, servers=(url,), tls_ca_file=ca_file)


@contextmanager
def shown_progress() -> Iterator[Callable[[str], None]]:
    """What is done now, on a terminal. No thread draws it: the probes are forks of this process."""
    if not is_terminal(sys.stderr):
        yield lambda what: None
        return
    with Live("", console=err, auto_refresh=False, transient=True) as live:
        yield lambda what: live.update(f"examining {what} …", refresh=True)


def _show(report: Report) -> None:
    table = table_of([], [])
    for name, most in (("result", None), ("check", _CHECK_WIDTH), ("found", None)):
        table.add_column(name, overflow="fold", max_width=most)
    for (state, found), alike in groupby(report.outcomes, key=lambda one: (one.state, one.found)):
        checks = ", ".join(dict.fromkeys(one.check for one in alike))  # those of one probe that failed are one line
        table.add_row(state, checks, out.shown(found), style=_STYLES.get(state))
    out.print(table)
    out.print()
    out.print(f"{_counted(report.problems, 'problem')}, {_counted(report.warnings, 'warning')}")
    for state in ("problem", "warning"):
        for one in report.outcomes:
            if one.state == state:
                out.print(f"{state} {one.check}: {one.found.rstrip('.')}. {one.remedy}", style=_STYLES[state])


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
