"""Options of the commands that connect to NATS: how they log in. The variables are those of a broker's settings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natslog.cli.option_groups import OptionGroup

if TYPE_CHECKING:
    from natslog.wire.credentials import NatsCredentials


def _option(name: str, text: str) -> Any:
    """`nkey-file`: the option `--nats-nkey-file`, and the variable `NATSLOG_NATS_NKEY_FILE`."""
    variable = f"NATSLOG_NATS_{name.upper().replace('-', '_')}"
    return typer.Option(f"--nats-{name}", envvar=variable, help=text, rich_help_panel="Login to NATS")


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsLogin:
    """The fields of `NatsCredentials` that are options. That class is imported when a command connects."""

    creds_file: Annotated[
        str | None,
        typer.Option(
            "--creds", "--nats-creds-file", envvar="NATSLOG_NATS_CREDS_FILE", help="NATS credentials file (JWT)."
        ),
    ] = None
    nkey_file: Annotated[str | None, _option("nkey-file", "File with the nkey seed of a user.")] = None
    user: Annotated[str | None, _option("user", "User name.")] = None
    user_file: Annotated[str | None, _option("user-file", "File with the user name.")] = None
    password_file: Annotated[str | None, _option("password-file", "File with the password of the user.")] = None
    token_file: Annotated[str | None, _option("token-file", "File with a token.")] = None
    tls_ca_file: Annotated[str | None, _option("tls-ca-file", "CA certificates that verify the NATS server.")] = None
    tls_cert_file: Annotated[str | None, _option("tls-cert-file", "Client certificate.")] = None
    tls_key_file: Annotated[str | None, _option("tls-key-file", "Private key of the client certificate.")] = None
    tls_handshake_first: Annotated[
        bool, _option("tls-handshake-first", "The server begins with the TLS handshake.")
    ] = False

    def credentials(self) -> NatsCredentials:
        """Raises ConfigError: two of them exclude each other."""
        from natslog.wire.credentials import NatsCredentials

        return NatsCredentials(**{one.name: getattr(self, one.name) for one in fields(self)})


LOGIN = OptionGroup.of(NatsLogin)
