"""Shared by the jobs: how they log in to brokers and to NATS, from files only.

The options have the names and variables of the commands `natslog …`. The jobs pass the names of the files on to Spark,
as options of the source and the sink. The files are read where they are used: on the driver and on executors.
"""

from __future__ import annotations

import argparse
import os

from natslog.client import ClientOptions
from natslog.wire.link import NatsCredentials

_OF_BROKERS = {
    "--token-file": ("NATSLOG_TOKEN_FILE", "tokenFile", "file with the bearer token for the brokers"),
    "--tls-ca": ("NATSLOG_TLS_CA", "tlsCaFile", "CA certificates that verify the brokers (default: the system's)"),
    "--tls-cert": ("NATSLOG_TLS_CERT", "tlsCertFile", "client certificate for the brokers"),
    "--tls-key": ("NATSLOG_TLS_KEY", "tlsKeyFile", "private key of that certificate"),
}
_OF_NATS = {
    "--nats-creds-file": ("NATSLOG_NATS_CREDS_FILE", "natsCredsFile", "NATS credentials file (JWT)"),
    "--nats-nkey-file": ("NATSLOG_NATS_NKEY_FILE", "natsNkeyFile", "file with the nkey seed of a user"),
    "--nats-user": ("NATSLOG_NATS_USER", "natsUser", "user name for NATS"),
    "--nats-user-file": ("NATSLOG_NATS_USER_FILE", "natsUserFile", "file with the user name"),
    "--nats-password-file": ("NATSLOG_NATS_PASSWORD_FILE", "natsPasswordFile", "file with the password of that user"),
    "--nats-token-file": ("NATSLOG_NATS_TOKEN_FILE", "natsTokenFile", "file with a NATS token"),
    "--nats-tls-ca-file": ("NATSLOG_NATS_TLS_CA_FILE", "natsTlsCaFile", "CA certificates that verify the NATS server"),
    "--nats-tls-cert-file": ("NATSLOG_NATS_TLS_CERT_FILE", "natsTlsCertFile", "client certificate for NATS"),
    "--nats-tls-key-file": ("NATSLOG_NATS_TLS_KEY_FILE", "natsTlsKeyFile", "private key of that certificate"),
}
"""Option: (variable, option of the source or sink, help)."""
_HANDSHAKE_FIRST = "NATSLOG_NATS_TLS_HANDSHAKE_FIRST"


def add_broker_login(parser: argparse.ArgumentParser) -> None:
    """How a job logs in to brokers."""
    _add(
        parser.add_argument_group("login to brokers", "each option has a variable: NATSLOG_TOKEN_FILE, …"), _OF_BROKERS
    )


def add_nats_login(parser: argparse.ArgumentParser) -> None:
    """How a job that publishes logs in to NATS."""
    group = parser.add_argument_group("login to NATS", "each option has a variable: NATSLOG_NATS_USER, …")
    _add(group, _OF_NATS)
    group.add_argument(
        "--nats-tls-handshake-first",
        action="store_true",
        default=os.environ.get(_HANDSHAKE_FIRST, "").lower() in ("1", "true", "yes", "on"),
        help="the server begins with the TLS handshake",
    )


def client_options(arguments: argparse.Namespace) -> ClientOptions:
    """For checks before Spark starts."""
    return ClientOptions(
        retries=2,
        token_file=arguments.token_file,
        tls_ca_file=arguments.tls_ca,
        tls_cert_file=arguments.tls_cert,
        tls_key_file=arguments.tls_key,
    )


def nats_credentials(arguments: argparse.Namespace) -> NatsCredentials:
    """The same, for NATS. Raises ConfigError: two of them exclude each other."""
    return NatsCredentials(
        creds_file=arguments.nats_creds_file,
        nkey_file=arguments.nats_nkey_file,
        user=arguments.nats_user,
        user_file=arguments.nats_user_file,
        password_file=arguments.nats_password_file,
        token_file=arguments.nats_token_file,
        tls_ca_file=arguments.nats_tls_ca_file,
        tls_cert_file=arguments.nats_tls_cert_file,
        tls_key_file=arguments.nats_tls_key_file,
        tls_handshake_first=arguments.nats_tls_handshake_first,
    )


def broker_login(arguments: argparse.Namespace) -> dict[str, str]:
    """Options of the source."""
    return _given(arguments, _OF_BROKERS)


def nats_login(arguments: argparse.Namespace) -> dict[str, str]:
    """Options of the sink."""
    first = {"natsTlsHandshakeFirst": "true"} if arguments.nats_tls_handshake_first else {}
    return _given(arguments, _OF_NATS) | first


_Options = dict[str, tuple[str, str, str]]


def _add(group: argparse._ArgumentGroup, options: _Options) -> None:
    for name, (variable, _, text) in options.items():
        metavar = "NAME" if name == "--nats-user" else "FILE"
        group.add_argument(name, metavar=metavar, default=os.environ.get(variable), help=text)


def _given(arguments: argparse.Namespace, options: _Options) -> dict[str, str]:
    values = {option: getattr(arguments, name[2:].replace("-", "_")) for name, (_, option, _) in options.items()}
    return {option: str(value) for option, value in values.items() if value is not None}
