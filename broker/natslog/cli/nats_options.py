"""Options of the commands that connect to NATS: how they log in. The variables are those of a broker's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from natslog.wire.credentials import NatsCredentials

_PANEL = "Login to NATS"

CredsFile = Annotated[
    str | None,
    typer.Option("--creds", "--nats-creds-file", envvar="NATSLOG_NATS_CREDS_FILE", help="NATS credentials file (JWT)."),
]
NkeyFile = Annotated[
    str | None,
    typer.Option(
        "--nats-nkey-file",
        envvar="NATSLOG_NATS_NKEY_FILE",
        help="File with the nkey seed of a user.",
        rich_help_panel=_PANEL,
    ),
]
User = Annotated[
    str | None,
    typer.Option("--nats-user", envvar="NATSLOG_NATS_USER", help="User name.", rich_help_panel=_PANEL),
]
UserFile = Annotated[
    str | None,
    typer.Option(
        "--nats-user-file",
        envvar="NATSLOG_NATS_USER_FILE",
        help="File with the user name.",
        rich_help_panel=_PANEL,
    ),
]
PasswordFile = Annotated[
    str | None,
    typer.Option(
        "--nats-password-file",
        envvar="NATSLOG_NATS_PASSWORD_FILE",
        help="File with the password of the user.",
        rich_help_panel=_PANEL,
    ),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        "--nats-token-file", envvar="NATSLOG_NATS_TOKEN_FILE", help="File with a token.", rich_help_panel=_PANEL
    ),
]
TlsCaFile = Annotated[
    str | None,
    typer.Option(
        "--nats-tls-ca-file",
        envvar="NATSLOG_NATS_TLS_CA_FILE",
        help="CA certificates that verify the NATS server.",
        rich_help_panel=_PANEL,
    ),
]
TlsCertFile = Annotated[
    str | None,
    typer.Option(
        "--nats-tls-cert-file",
        envvar="NATSLOG_NATS_TLS_CERT_FILE",
        help="Client certificate.",
        rich_help_panel=_PANEL,
    ),
]
TlsKeyFile = Annotated[
    str | None,
    typer.Option(
        "--nats-tls-key-file",
        envvar="NATSLOG_NATS_TLS_KEY_FILE",
        help="Private key of the client certificate.",
        rich_help_panel=_PANEL,
    ),
]
TlsHandshakeFirst = Annotated[
    bool,
    typer.Option(
        "--nats-tls-handshake-first",
        envvar="NATSLOG_NATS_TLS_HANDSHAKE_FIRST",
        help="The server begins with the TLS handshake.",
        rich_help_panel=_PANEL,
    ),
]


def credentials_of(
    *,
    creds: CredsFile,
    nkey_file: NkeyFile,
    user: User,
    user_file: UserFile,
    password_file: PasswordFile,
    token_file: TokenFile,
    tls_ca_file: TlsCaFile,
    tls_cert_file: TlsCertFile,
    tls_key_file: TlsKeyFile,
    tls_handshake_first: TlsHandshakeFirst,
) -> NatsCredentials:
    """Raises ConfigError: two of them exclude each other."""
    from natslog.wire.credentials import NatsCredentials

    return NatsCredentials(
        creds_file=creds,
        nkey_file=nkey_file,
        user=user,
        user_file=user_file,
        password_file=password_file,
        token_file=token_file,
        tls_ca_file=tls_ca_file,
        tls_cert_file=tls_cert_file,
        tls_key_file=tls_key_file,
        tls_handshake_first=tls_handshake_first,
    )
