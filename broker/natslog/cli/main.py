"""`natslog`: global options, commands, and how errors are shown.

The module of a command is imported when the command is called; that of `--help`, and of a wrong name, are all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated, NoReturn

import typer

from natslog.cli import standard_output
from natslog.cli.common import Global, with_similar_names
from natslog.errors import NatslogError, StreamNotFound, natslog_version

COMMANDS = {
    "stream": "stream.app",
    "cluster": "cluster.app",
    "cursor": "cursor.app",
    "checkpoint": "checkpoint.app",
    "table": "table.app",
    "bench": "bench.app",
    "tls": "tls.app",
    "token": "security.token_app",
    "acl": "security.acl_app",
    "role": "security.role_app",
    "quota": "security.quota_app",
    "whoami": "security.whoami",
    "dev": "serve.dev",
    "server": "serve.server",
    "pub": "pub.pub",
    "cat": "cat.cat",
    "sql": "sql.sql",
    "activity": "activity.activity",
    "top": "top.top",
    "doctor": "doctor.doctor",
    "support-bundle": "support_bundle.support_bundle",
    "verify": "verify.verify",
    "export": "backup.export",
    "import": "backup.import_",
    "redrive": "redriving.redrive",
    "repair": "repair.repair",
    "apply": "applying.apply",
}
"""Where in `natslog.cli` each is: a function, or several commands."""


def application(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The command line with these commands."""
    app = typer.Typer(
        name="natslog",
        help="Durable, replayable streams for people who run NATS.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in names:
        module, attribute = COMMANDS[name].split(".")
        found = getattr(import_module(f"natslog.cli.{module}"), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return app


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"natslog {natslog_version()}")
        raise typer.Exit


def _options(
    context: typer.Context,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", envvar="NATSLOG_SERVER", help="Broker URL. May be given several times."),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="NATSLOG_TOKEN",
            help="Bearer token. Other users of this machine can see it in the list of processes: use --token-file.",
        ),
    ] = None,
    token_file: Annotated[
        str | None, typer.Option("--token-file", envvar="NATSLOG_TOKEN_FILE", help="File with the bearer token.")
    ] = None,
    tls_ca: Annotated[
        str | None,
        typer.Option("--tls-ca", envvar="NATSLOG_TLS_CA", help="CA certificates to trust; default: the system's."),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option("--tls-cert", envvar="NATSLOG_TLS_CERT", help="Client certificate.")
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option("--tls-key", envvar="NATSLOG_TLS_KEY", help="Private key of the client certificate.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            envvar="NATSLOG_PROFILE",
            help="Servers and credentials of ~/.config/natslog/config.toml. The options above override it; with "
            "--server, its credentials are used only if the server is one of the profile.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Durable, replayable streams for people who run NATS."""
    context.obj = Global(
        servers=tuple(server or ()),
        token=token,
        token_file=token_file,
        tls_ca_file=tls_ca,
        tls_cert_file=tls_cert,
        tls_key_file=tls_key,
        profile=profile,
    )


_COMPLETION = "_NATSLOG_COMPLETE"
"""Set by shells that ask how a line may go on."""
_GLOBAL_OPTIONS = ("--server", "--token", "--token-file", "--tls-ca", "--tls-cert", "--tls-key", "--profile")


def _parted(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Global options, and the rest: they are also accepted after the command, as in the `nats` command line. Arguments
    after `--` are unchanged.
    """
    options: list[str] = []
    rest = list(arguments)
    at = 0
    while at < len(rest) and rest[at] != "--":
        name, has_value, _ = rest[at].partition("=")
        if name in _GLOBAL_OPTIONS:
            count = 1 if has_value else 2
            options += rest[at : at + count]
            del rest[at : at + count]
        else:
            at += 1
    return options, rest


def _meant(arguments: Sequence[str]) -> Iterable[str]:
    """The commands that may be called, or shown, where the arguments begin so."""
    if not arguments or _COMPLETION in os.environ:
        return COMMANDS
    return [name] if (name := arguments[0]) in COMMANDS else () if name == "--version" else COMMANDS


def main(arguments: list[str] | None = None) -> None:
    """Runs a command; an error in operation is one sentence on stderr and exit code 1, wrong usage is 2."""
    standard_output.report_failures()
    try:
        try:
            options, rest = _parted(sys.argv[1:] if arguments is None else arguments)
            application(_meant(rest))(args=[*options, *rest])
        finally:
            standard_output.flush()
    except standard_output.OutputFailed as error:
        if error.is_closed_pipe:
            sys.exit(standard_output.CLOSED_PIPE_EXIT_CODE)
        _show(error)
    except StreamNotFound as error:
        _show(with_similar_names(error))
    except NatslogError as error:
        _show(error)


def _show(error: NatslogError) -> NoReturn:
    from natslog.cli.output import err

    err.print("error:", style="bold red", end=" ")
    err.print(error.message)
    sys.exit(1)
