"""`natslog tls`: certificates for a test or a small cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from natslog.cli.common import JsonFlag, broker_extra
from natslog.cli.output import out, print_json

app = typer.Typer(help="Certificates for TLS.", no_args_is_help=True)


@app.callback()
def commands() -> None:
    """Certificates for TLS."""


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the files; it is created.")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="DNS name or address of a broker. May be given several times."),
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option("--client", help="Name of a client certificate, default client. May be given several times."),
    ] = None,
    days: Annotated[
        int, typer.Option("--days", min=1, max=3650, help="Days for which the certificates are valid (the CA: 3650).")
    ] = 365,
    as_json: JsonFlag = False,
) -> None:
    """Create a certificate authority (CA), a certificate for brokers and one for each client.

    The certificate for brokers is valid for this machine (its name, localhost, 127.0.0.1, ::1) and for each --host; all
    brokers can use it. A CA and a certificate for brokers that are in the folder are kept, so that the same command
    with --client adds a client.
    """
    with broker_extra("creating certificates"):
        from natslog.security.certificates import make_certificates

    clients = client or ([] if (folder / "client.pem").exists() else ["client"])
    made = make_certificates(folder, host or None, clients, days)
    if as_json:
        print_json({"written": list(map(str, made.written)), "kept": list(map(str, made.kept))})
        return
    for path in made.written:
        out.print(path)
    for path in made.kept:
        out.print(f"{path} (kept)")
    out.print(
        f"\nBrokers:  natslog server --tls-cert-file {folder / 'broker.pem'} "
        f"--tls-key-file {folder / 'broker-key.pem'} --tls-ca-file {folder / 'ca.pem'} …\n"
        f"Clients:  natslog --server https://HOST:9292 --tls-ca {folder / 'ca.pem'} …\n"
        f"Keep {folder / 'ca-key.pem'} apart from brokers and clients: it can sign certificates that they trust."
    )
