"""`natslog dev` and `natslog server`: running brokers."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natslog.cli.broker_settings import SERVER_SETTINGS, loaded
from natslog.cli.common import broker_extra
from natslog.cli.option_groups import takes
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


@takes(settings=SERVER_SETTINGS)
def server(*, settings: dict[str, Any]) -> None:
    """Run one broker. Every setting can also be given as a NATSLOG_… variable or as a line of the TOML file."""
    _run(loaded(settings))
