"""`natslog`: global options, commands, and how errors are shown."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from natslog.cli import (
    activity,
    applying,
    backup,
    bench,
    cat,
    checkpoint,
    cluster,
    cursor,
    doctor,
    pub,
    redriving,
    repair,
    security,
    serve,
    sql,
    standard_output,
    stream,
    support_bundle,
    table,
    tls,
    top,
    verify,
)
from natslog.cli.common import Global, err
from natslog.errors import NatslogError, natslog_version

app = typer.Typer(
    name="natslog",
    help="Durable, replayable streams for people who run NATS.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(stream.app, name="stream")
app.add_typer(cluster.app, name="cluster")
app.add_typer(cursor.app, name="cursor")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(table.app, name="table")
app.add_typer(bench.app, name="bench")
app.add_typer(tls.app, name="tls")
app.add_typer(security.token_app, name="token")
app.add_typer(security.acl_app, name="acl")
app.add_typer(security.role_app, name="role")
app.add_typer(security.quota_app, name="quota")
app.command("whoami")(security.whoami)
app.command("dev")(serve.dev)
app.command("server")(serve.server)
app.command("pub")(pub.pub)
app.command("cat")(cat.cat)
app.command("sql")(sql.sql)
app.command("activity")(activity.activity)
app.command("top")(top.top)
app.command("doctor")(doctor.doctor)
app.command("support-bundle")(support_bundle.support_bundle)
app.command("verify")(verify.verify)
app.command("export")(backup.export)
app.command("import")(backup.import_)
app.command("redrive")(redriving.redrive)
app.command("repair")(repair.repair)
app.command("apply")(applying.apply)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"natslog {natslog_version()}")
        raise typer.Exit


@app.callback()
def options(
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


_GLOBAL_OPTIONS = ("--server", "--token", "--token-file", "--tls-ca", "--tls-cert", "--tls-key", "--profile")


def _global_options_first(arguments: list[str]) -> list[str]:
    """Global options are also accepted after the command, as in the `nats` command line. Arguments after `--` are
    unchanged.
    """
    first: list[str] = []
    rest = list(arguments)
    at = 0
    while at < len(rest) and rest[at] != "--":
        name, has_value, _ = rest[at].partition("=")
        if name in _GLOBAL_OPTIONS:
            count = 1 if has_value else 2
            first += rest[at : at + count]
            del rest[at : at + count]
        else:
            at += 1
    return first + rest


def main(arguments: list[str] | None = None) -> None:
    """Runs a command; an error in operation is one sentence on stderr and exit code 1, wrong usage is 2."""
    standard_output.report_failures()
    try:
        try:
            app(args=_global_options_first(sys.argv[1:] if arguments is None else arguments))
        finally:
            standard_output.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except standard_output.OutputFailed as error:
        if error.is_closed_pipe:
            sys.exit(standard_output.CLOSED_PIPE_EXIT_CODE)
        _show(error)
    except NatslogError as error:
        _show(error)


def _show(error: NatslogError) -> NoReturn:
    err.print("error:", style="bold red", end=" ")
    err.print(error.message)
    sys.exit(1)
