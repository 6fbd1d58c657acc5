"""`natslog dev` and `natslog server`: running brokers."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natslog.cli.common import broker_extra
from natslog.cli.output import err, out
from natslog.config import DEFAULT_DATA_DIR, DEFAULT_HTTP_PORT, BrokerConfig, is_loopback, load_config
from natslog.errors import ConfigError, NatslogError
from natslog.log_events import event, write_log
from natslog.urls import without_secrets

if TYPE_CHECKING:
    from natslog.cli.dev_cluster import DevCluster

logger = logging.getLogger("natslog")


def _run(config: BrokerConfig, *, is_dev: bool = False) -> None:
    """Args: `is_dev`: does not print who may use the broker, and prints the rest whatever the format of the log is."""
    import asyncio

    write_log(config.log_level, config.log_format, config.broker_id)
    with broker_extra("running a broker"):
        from natslog.runner import run_broker

    def ready(config: BrokerConfig, admin_token: str | None) -> None:
        lines = [_nats_line(config.nats_url), f"HTTP   {config.url}", f"data   {Path(config.data_dir).resolve()}"]
        if not is_dev:
            lines.append(f"access {_access(config)}")
        if admin_token is not None and config.admin_token_file is not None:
            lines.append(f"token  of the administrator: in {config.admin_token_file}")
        elif admin_token is not None:
            lines += ["", "The token of the administrator, which is shown only now:", admin_token, ""]
        lines.append("ready")
        if config.log_format == "json" and not is_dev:  # the log states it, and no other lines come between
            lines = [] if admin_token is None or config.admin_token_file is not None else [admin_token]
        for line in lines:
            out.print(line)

    try:
        asyncio.run(run_broker(config, ready))
    except NatslogError as error:
        if config.log_format == "text":
            raise
        logger.critical("%s", error.message, extra=event("broker.failed", reason=error.code))
        raise typer.Exit(1) from error


def _access(config: BrokerConfig) -> str:
    """Who may use the broker."""
    if config.security:
        return "by tokens and client certificates, as the rules permit (natslog acl ls)"
    if is_loopback(config.http_host):
        return "from this machine only, without credentials (security is not enabled)"
    return "WITHOUT CREDENTIALS from every machine that reaches this address (insecure)"


def _nats_line(nats_url: str) -> str:
    return f"NATS   {without_secrets(nats_url)}"


def dev(
    brokers: Annotated[int, typer.Option("--brokers", min=1, max=9, help="Number of brokers; each is a process.")] = 1,
    data_dir: Annotated[
        Path, typer.Option("--data-dir", help="Data folder: messages and state are stored here.")
    ] = Path(DEFAULT_DATA_DIR),
    nats_url: Annotated[
        str | None, typer.Option("--nats-url", help="Use this NATS server instead of starting one.")
    ] = None,
    nats_leaf_url: Annotated[
        str | None, typer.Option("--nats-leaf-url", help="Leafnode listener of that server, for JetStream consumers.")
    ] = None,
    nats_port: Annotated[
        int,
        typer.Option(
            "--nats-port", min=0, max=65535, help="Port of the NATS server that is started; 0: any free port."
        ),
    ] = 4222,
    http_port: Annotated[
        int, typer.Option("--http-port", help="Port of the HTTP API; 0: any free port.")
    ] = DEFAULT_HTTP_PORT,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "warning",
    log_format: Annotated[
        str, typer.Option("--log-format", envvar="NATSLOG_LOG_FORMAT", help="text, or json: one JSON object per line.")
    ] = "text",
) -> None:
    """Run a NATS server and a broker on this machine, for evaluation. ^C stops both; the state stays in the data
    folder.
    """
    from natslog.cli.dev_cluster import DevCluster
    from natslog.nats_server import NatsServer

    log = {"log_level": log_level, "log_format": log_format}
    load_config(None, log, {})  # raises if they are invalid
    os.umask(0o077)  # files that are created here are readable by their owner only
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the data folder {data_dir}: {error.strerror}") from error
    _check_same_kind(data_dir, brokers)
    nats = None
    if nats_url is None:
        if nats_leaf_url is not None:
            raise ConfigError("--nats-leaf-url belongs to --nats-url: the server that is started has its own")
        nats = NatsServer(nats_port, data_dir / "nats-server.log", ends_with_parent=True).start()
        nats_url, nats_leaf_url = nats.url, nats.leaf_url
    try:
        if brokers == 1:
            flags = {"data_dir": str(data_dir), "http_port": http_port, "nats_url": nats_url}
            _run(load_config(None, flags | log | {"nats_leaf_url": nats_leaf_url}), is_dev=True)
        else:
            cluster = DevCluster(data_dir, nats_url, nats_leaf_url, brokers, http_port, log)
            _run_cluster(cluster, nats_url)
    finally:
        if nats is not None:
            nats.stop()


def _check_same_kind(data_dir: Path, brokers: int) -> None:
    """A folder holds the state of one broker, or of as many brokers as it was created for."""
    known = len(list(data_dir.glob("broker-*/"))) or (1 if (data_dir / "broker").exists() else brokers)
    if known != brokers:
        raise ConfigError(
            f"{data_dir} holds the state of {known} broker(s): use --brokers {known}, or another folder with --data-dir"
        )


def _run_cluster(cluster: DevCluster, nats_url: str) -> None:
    cluster.start()
    try:
        out.print(_nats_line(nats_url))
        for number, url in enumerate(cluster.urls, start=1):
            out.print(f"HTTP   {url}  (broker {number})")
        out.print("ready")
        cluster.wait(lambda text: err.print(text, style="yellow"))
    finally:
        cluster.stop()


def server(
    config: Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Data folder: messages and state are stored here.")] = None,
    broker_id: Annotated[int | None, typer.Option(help="This broker's number in the cluster.")] = None,
    tags: Annotated[
        str | None,
        typer.Option(help="Tags of this broker, comma-separated; streams may require them (--placement-tag)."),
    ] = None,
    rack: Annotated[
        str | None, typer.Option(help="Rack of this broker; replicas are placed on different racks.")
    ] = None,
    nats_url: Annotated[str | None, typer.Option(help="NATS server(s), comma-separated.")] = None,
    nats_creds_file: Annotated[str | None, typer.Option(help="NATS credentials (JWT).")] = None,
    nats_nkey_file: Annotated[str | None, typer.Option(help="File with the nkey seed of a NATS user.")] = None,
    nats_user: Annotated[str | None, typer.Option(help="User name for NATS.")] = None,
    nats_user_file: Annotated[str | None, typer.Option(help="File with the user name for NATS.")] = None,
    nats_password_file: Annotated[str | None, typer.Option(help="File with the password of the NATS user.")] = None,
    nats_token_file: Annotated[str | None, typer.Option(help="File with a NATS token.")] = None,
    nats_tls_ca_file: Annotated[
        str | None, typer.Option(help="File with the CA certificates that verify the NATS server.")
    ] = None,
    nats_tls_cert_file: Annotated[str | None, typer.Option(help="Client certificate for NATS.")] = None,
    nats_tls_key_file: Annotated[
        str | None, typer.Option(help="Private key of the client certificate for NATS.")
    ] = None,
    nats_tls_handshake_first: Annotated[
        bool | None,
        typer.Option("--nats-tls-handshake-first", help="The NATS server begins with the TLS handshake."),
    ] = None,
    nats_leaf_url: Annotated[
        str | None,
        typer.Option(help="Leafnode listener(s) of the NATS server, comma-separated; JetStream consumers need it."),
    ] = None,
    nats_leaf_creds_file: Annotated[
        str | None, typer.Option(help="NATS credentials (JWT) of the leafnode; default for its login: that of NATS.")
    ] = None,
    nats_leaf_nkey_file: Annotated[
        str | None, typer.Option(help="File with the nkey seed of the NATS user of the leafnode.")
    ] = None,
    nats_leaf_user: Annotated[str | None, typer.Option(help="User name of the leafnode.")] = None,
    nats_leaf_user_file: Annotated[str | None, typer.Option(help="File with the user name of the leafnode.")] = None,
    nats_leaf_password_file: Annotated[
        str | None, typer.Option(help="File with the password of the user of the leafnode.")
    ] = None,
    nats_leaf_token_file: Annotated[str | None, typer.Option(help="File with the token of the leafnode.")] = None,
    nats_leaf_tls_ca_file: Annotated[
        str | None,
        typer.Option(help="CA certificates that verify the leafnode listener; default for TLS: as for NATS."),
    ] = None,
    nats_leaf_tls_cert_file: Annotated[str | None, typer.Option(help="Client certificate of the leafnode.")] = None,
    nats_leaf_tls_key_file: Annotated[
        str | None, typer.Option(help="Private key of the client certificate of the leafnode.")
    ] = None,
    nats_leaf_tls_handshake_first: Annotated[
        bool | None,
        typer.Option(
            "--nats-leaf-tls-handshake-first/--no-nats-leaf-tls-handshake-first",
            help="The leafnode listener begins with the TLS handshake.",
        ),
    ] = None,
    http_host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    advertise_url: Annotated[str | None, typer.Option(help="URL at which clients reach this broker.")] = None,
    tls_cert_file: Annotated[
        str | None, typer.Option(help="Certificate of this broker: the HTTP port then serves TLS only.")
    ] = None,
    tls_key_file: Annotated[str | None, typer.Option(help="Private key of the certificate.")] = None,
    tls_ca_file: Annotated[
        str | None, typer.Option(help="CA certificates that clients and other brokers are verified with.")
    ] = None,
    tls_client_certs: Annotated[
        str | None, typer.Option(help="optional: clients may present a certificate; required: they must.")
    ] = None,
    tls_identity: Annotated[
        str | None,
        typer.Option(
            help="Where the identity of a client certificate is: cn (common name) or san (first URI, e-mail, DNS name)."
        ),
    ] = None,
    security: Annotated[
        bool | None, typer.Option("--security", help="Require tokens or client certificates, and apply access rules.")
    ] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure", help="Listen on a network without security.")] = None,
    audit_file: Annotated[
        str | None, typer.Option(help="File for the audit log; default: the log of the broker.")
    ] = None,
    new_admin_token: Annotated[
        bool | None, typer.Option("--new-admin-token", help="Create and print another token of the administrator.")
    ] = None,
    admin_token_file: Annotated[
        str | None,
        typer.Option(help="File that a new token of the administrator is written to; default: standard output."),
    ] = None,
    admin_identity: Annotated[
        str | None,
        typer.Option(help="Identity of the administrator, whose token the first start creates; default admin."),
    ] = None,
    segment_bytes: Annotated[
        str | None, typer.Option(help="Size at which a segment is closed; default 128MiB.")
    ] = None,
    segment_age: Annotated[str | None, typer.Option(help="Age at which a segment is closed; default 1h.")] = None,
    min_free_bytes: Annotated[str | None, typer.Option(help="Disk space that is kept free; default 64MiB.")] = None,
    max_store_bytes: Annotated[
        str | None, typer.Option(help="Most bytes that all streams of this broker may take; default: the disk.")
    ] = None,
    ingest_memory_bytes: Annotated[
        str | None, typer.Option(help="Memory for uncommitted messages; default 80MiB.")
    ] = None,
    append_max_bytes: Annotated[
        str | None, typer.Option(help="Maximum size of one direct append; default 1GiB.")
    ] = None,
    retention_interval: Annotated[
        str | None, typer.Option(help="Interval at which retention limits are enforced; default 5s.")
    ] = None,
    tombstone_grace: Annotated[
        str | None, typer.Option(help="Time for which files of deleted streams are kept; default 1h.")
    ] = None,
    scrub_interval: Annotated[
        str | None,
        typer.Option(help="Interval at which stored messages are read back and checked; default 7d, 0: never."),
    ] = None,
    scrub_max_bytes_per_s: Annotated[
        str | None, typer.Option(help="Rate at which they are read at most; default 8MiB.")
    ] = None,
    ack_reply_prefixes: Annotated[
        str | None,
        typer.Option(
            help=(
                "Prefixes of subjects that acks may be sent to, comma-separated: _INBOX. and custom inbox prefixes "
                "of clients."
            )
        ),
    ] = None,
    jetstream: Annotated[
        str | None,
        typer.Option(help="Whether the JetStream API is served: auto (unless security is enabled), on or off."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="URLs of the cluster's first brokers, comma-separated; the same on all of them.")
    ] = None,
    cluster_secret_file: Annotated[
        str | None,
        typer.Option(
            help="File with the secret shared by the brokers of the cluster; one secret per line, the new one first."
        ),
    ] = None,
    peer_urls: Annotated[
        str | None, typer.Option(help="Further URLs at which other brokers reach this broker, comma-separated.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[
        str | None, typer.Option(help="Format of the log: text (the default), or json: one JSON object per line.")
    ] = None,
) -> None:
    """Run one broker. Every setting can also be given as a NATSLOG_… variable or as a line of the TOML file."""
    flags: dict[str, Any] = {name: value for name, value in locals().items() if name != "config"}
    _run(load_config(config, flags))
