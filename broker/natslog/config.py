"""Settings of a broker: defaults, `natslog.toml`, `NATSLOG_…` variables and flags, in rising order of precedence."""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from natslog.errors import ConfigError, InvalidRequest, did_you_mean
from natslog.log_events import LEVELS, Format
from natslog.subjects import check_name, check_subject
from natslog.units import parse_duration_s, parse_size_bytes
from natslog.urls import normal_url, without_secrets

DEFAULT_HTTP_PORT = 9292
DEFAULT_NATS_URL = "nats://127.0.0.1:4222"
DEFAULT_SERVER_URL = f"http://127.0.0.1:{DEFAULT_HTTP_PORT}"
DEFAULT_DATA_DIR = "natslog-data"
ACK_REPLY_PREFIX = "_INBOX."
"""The default prefix of subjects that acks may be sent to: the inboxes of NATS clients."""
_MIN_SECRET_CHARS = 16
_MAX_SECRETS = 8


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One broker. Sizes are in bytes, ages in seconds. Of `nats_leaf_…`, a login or a TLS file that is None is that of
    `nats_…`, and one that is empty is none.
    """

    data_dir: str = DEFAULT_DATA_DIR
    broker_id: int = 1
    rack: str = ""
    tags: tuple[str, ...] = ()
    nats_url: str = DEFAULT_NATS_URL
    nats_creds_file: str | None = None
    nats_nkey_file: str | None = None
    nats_user: str | None = None
    nats_user_file: str | None = None
    nats_password_file: str | None = None
    nats_token_file: str | None = None
    nats_tls_ca_file: str | None = None
    nats_tls_cert_file: str | None = None
    nats_tls_key_file: str | None = None
    nats_tls_handshake_first: bool = False
    nats_leaf_url: str = ""
    nats_leaf_creds_file: str | None = None
    nats_leaf_nkey_file: str | None = None
    nats_leaf_user: str | None = None
    nats_leaf_user_file: str | None = None
    nats_leaf_password_file: str | None = None
    nats_leaf_token_file: str | None = None
    nats_leaf_tls_ca_file: str | None = None
    nats_leaf_tls_cert_file: str | None = None
    nats_leaf_tls_key_file: str | None = None
    nats_leaf_tls_handshake_first: bool | None = None
    http_host: str = "127.0.0.1"
    http_port: int = DEFAULT_HTTP_PORT
    advertise_url: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_ca_file: str | None = None
    tls_client_certs: str = "optional"
    tls_identity: Literal["cn", "san"] = "cn"
    security: bool = False
    insecure: bool = False
    audit_file: str | None = None
    new_admin_token: bool = False
    admin_token_file: str | None = None
    admin_identity: str = "admin"
    segment_bytes: int = 128 * 1024 * 1024
    segment_age_s: float = 3600.0
    min_free_bytes: int = 64 * 1024 * 1024
    max_store_bytes: int | None = None
    ingest_memory_bytes: int = 80 * 1024 * 1024
    append_max_bytes: int = 1024 * 1024 * 1024
    retention_interval_s: float = 5.0
    tombstone_grace_s: float = 3600.0
    scrub_interval_s: float = 7 * 86400.0
    scrub_max_bytes_per_s: int = 8 * 1024 * 1024
    ack_reply_prefixes: tuple[str, ...] = (ACK_REPLY_PREFIX,)
    jetstream: Literal["auto", "on", "off"] = "auto"
    seeds: tuple[str, ...] = ()
    cluster_secret_file: str | None = None
    peer_urls: tuple[str, ...] = ()
    log_level: str = "info"
    log_format: Format = "text"

    def __repr__(self) -> str:
        """Without user and password of URLs."""
        shown = {name: _shown(getattr(self, name)) if name in _URLS else getattr(self, name) for name in SETTINGS}
        return f"BrokerConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def url(self) -> str:
        """The URL at which clients and other brokers reach this broker. Brokers also use `peer_urls`."""
        scheme = "http" if self.tls_cert_file is None else "https"
        return self.advertise_url or f"{scheme}://{self.http_host}:{self.http_port}"

    def secrets(self) -> tuple[bytes, ...]:
        """The cluster's secrets, one a line, the preferred one first; read where they are used.

        Raises:
            ConfigError: the file cannot be read, or its contents are invalid.
        """
        if self.cluster_secret_file is None:
            return ()
        try:
            with open(self.cluster_secret_file, "rb") as file:
                mode, lines = os.fstat(file.fileno()).st_mode, file.read().splitlines()
        except OSError as error:
            raise ConfigError(
                f"cannot read cluster_secret_file {self.cluster_secret_file}: {error.strerror}"
            ) from error
        if mode & 0o007:
            raise ConfigError(
                f"cluster_secret_file {self.cluster_secret_file} is readable or writable by every user of this "
                f"machine: chmod 600 {self.cluster_secret_file}"
            )
        secrets = tuple(line.strip() for line in lines if line.strip())
        if not secrets or min(map(len, secrets)) < _MIN_SECRET_CHARS:
            raise ConfigError(
                f"cluster_secret_file {self.cluster_secret_file} must contain one secret per line, each of at least "
                f"{_MIN_SECRET_CHARS} characters; create one with: openssl rand -hex 32"
            )
        if len(secrets) > _MAX_SECRETS:
            raise ConfigError(
                f"cluster_secret_file {self.cluster_secret_file} contains {len(secrets)} secrets, but at most "
                f"{_MAX_SECRETS} are allowed: remove those that no broker uses any more"
            )
        return secrets

    @property
    def nats_login(self) -> dict[str, Any]:
        """Arguments of `NatsCredentials` for the connections to NATS."""
        return {name: getattr(self, f"nats_{name}") for name in (*_LOGIN, *_TLS_OF_NATS)}

    @property
    def nats_leaf_login(self) -> dict[str, Any]:
        """The same for the leafnode connection. The login is taken as a whole, as are certificate and key."""
        found = self.nats_login
        for names in (_LOGIN, ("tls_ca_file",), ("tls_cert_file", "tls_key_file"), ("tls_handshake_first",)):
            own = {name: getattr(self, f"nats_leaf_{name}") for name in names}
            if any(value is not None for value in own.values()):
                found |= {name: value if value != "" else None for name, value in own.items()}
        return found

    @property
    def client_urls(self) -> tuple[str, ...]:
        """The URL given to clients; empty if this broker listens on all addresses and has no `advertise_url`."""
        return (self.url,) if self.advertise_url or self.http_host not in ("0.0.0.0", "::") else ()


_BYTES = {
    "segment_bytes",
    "min_free_bytes",
    "max_store_bytes",
    "ingest_memory_bytes",
    "append_max_bytes",
    "scrub_max_bytes_per_s",
}
_SECONDS = {"segment_age_s", "retention_interval_s", "tombstone_grace_s", "scrub_interval_s"}
_MAY_BE_OFF = {"scrub_interval_s"}
_URLS = {"nats_url", "nats_leaf_url", "advertise_url", "seeds", "peer_urls"}
_LOGIN = ("creds_file", "nkey_file", "user", "user_file", "password_file", "token_file")
_TLS_OF_NATS = ("tls_ca_file", "tls_cert_file", "tls_key_file", "tls_handshake_first")
_CLIENT_CERTS = ("optional", "required")
_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})
SETTINGS = tuple(BrokerConfig.__struct_fields__)
_BY_NAME = {name: name for name in SETTINGS} | {name.removesuffix("_s"): name for name in _SECONDS}
"""Setting by what it may be called: a duration says its unit itself (`segment_age = "1h"`)."""


def _shown(setting: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    if isinstance(setting, tuple):
        return tuple(map(without_secrets, setting))
    return None if setting is None else without_secrets(setting)


def load_config(path: Path | None, flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> BrokerConfig:
    """One broker's settings from all sources.

    Args:
        path: a TOML file of `setting = value` lines, or None.
        flags: settings given on the command line; None values are "not given".
        environ: variables (`NATSLOG_HTTP_PORT=9300`), by default those of this process.

    Raises:
        ConfigError: an unreadable file, an unknown setting (nearest known one named) or a wrong value.
    """
    settings: dict[str, Any] = _from_file(path) if path else {}
    for name, setting in _BY_NAME.items():
        if (value := (os.environ if environ is None else environ).get(f"NATSLOG_{name.upper()}")) is not None:
            settings[setting] = value
    settings |= {_BY_NAME[name]: value for name, value in flags.items() if value is not None}
    return _checked(settings)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        settings = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for name in settings:
        if name not in _BY_NAME:
            raise ConfigError(f"{path}: unknown setting {name!r}{did_you_mean(name, SETTINGS)}", setting=name)
    return {_BY_NAME[name]: value for name, value in settings.items()}


def _interval_s(given: Any, name: str) -> float:
    """Raises InvalidRequest. What is done at intervals may be turned off."""
    if name in _MAY_BE_OFF and str(given).strip().lower() in ("0", "0.0", "none"):
        return 0.0
    return parse_duration_s(given, name)


def _checked(settings: dict[str, Any]) -> BrokerConfig:
    for name in ("seeds", "peer_urls", "ack_reply_prefixes", "tags"):
        if isinstance(texts := settings.get(name), str):
            settings[name] = [text.strip() for text in texts.split(",") if text.strip()]
    try:
        for name in _BYTES & set(settings):
            settings[name] = parse_size_bytes(settings[name], name)
        for name in _SECONDS & set(settings):
            settings[name] = _interval_s(settings[name], name)
        config = msgspec.convert(settings, BrokerConfig, strict=False)
    except (msgspec.ValidationError, InvalidRequest) as error:
        raise ConfigError(f"invalid setting: {error}") from error
    if config.log_level not in LEVELS:
        raise ConfigError(f"log_level {config.log_level!r} must be {', '.join(LEVELS)}")
    if not 0 <= config.http_port <= 65535:
        raise ConfigError(f"http_port {config.http_port} must be from 0 (any free port) to 65535")
    for prefix in config.ack_reply_prefixes:
        try:
            check_subject(f"{prefix}x", wildcards=False, what="prefix")
        except InvalidRequest as error:
            raise ConfigError(f"ack_reply_prefixes: {error.message}", setting="ack_reply_prefixes") from error
        if not prefix.endswith(".") or prefix.startswith("$"):
            raise ConfigError(
                f"ack_reply_prefixes: {prefix!r} must consist of whole tokens, end with a dot, as in '_INBOX.', and "
                "not begin with $",
                setting="ack_reply_prefixes",
            )
    advertised = [] if config.advertise_url is None else [config.advertise_url]
    for name, urls in (("seeds", config.seeds), ("peer_urls", config.peer_urls), ("advertise_url", advertised)):
        for url in urls:
            try:
                normal_url(url)
            except InvalidRequest as error:
                raise ConfigError(f"{name}: {error.message}", setting=name) from error
    for tag in config.tags:
        try:
            check_name(tag, "tag")
        except InvalidRequest as error:
            raise ConfigError(f"tags: {error.message}", setting="tags") from error
    _check_tls(config)
    _check_reach(config)
    if config.seeds and config.cluster_secret_file is None:
        raise ConfigError(
            "seeds require cluster_secret_file: a file with the same secret on all brokers of the cluster"
        )
    if config.seeds and config.http_host in ("0.0.0.0", "::") and config.advertise_url is None:
        raise ConfigError(
            "a broker with seeds that listens on all addresses requires advertise_url: the URL at which other "
            "brokers and clients reach it"
        )
    if not 1 <= config.broker_id <= 2**31:
        raise ConfigError(f"broker_id {config.broker_id} must be a whole number of at least 1")
    if config.append_max_bytes < 1024 * 1024:
        raise ConfigError("append_max_bytes, the maximum size of one direct append, must be at least 1 MiB")
    if config.max_store_bytes is not None and config.max_store_bytes < 1024 * 1024:
        raise ConfigError("max_store_bytes, the maximum size of all streams on this broker, must be at least 1 MiB")
    if config.scrub_max_bytes_per_s < 64 * 1024:
        raise ConfigError(
            "scrub_max_bytes_per_s must be at least 64 KiB; to turn scrubbing off, set scrub_interval to 0",
            setting="scrub_max_bytes_per_s",
        )
    if config.segment_bytes < 4096:
        raise ConfigError("segment_bytes must be at least 4096")
    return config


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach a broker that listens on this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in _LOOPBACK_NAMES


def _check_reach(config: BrokerConfig) -> None:
    """Raises ConfigError: without security, other machines would reach this broker."""
    if config.security or config.insecure or is_loopback(config.http_host):
        return
    raise ConfigError(
        f"http_host {config.http_host} can be reached from other machines, and security is not enabled: everyone there "
        "could read, change and delete all streams. Set security = true (see SECURITY.md), or insecure = true "
        "(--insecure) if everyone in that network may do this",
        setting="http_host",
    )


def _check_tls(config: BrokerConfig) -> None:
    """Raises ConfigError: the settings of TLS do not fit together."""
    if (config.tls_cert_file is None) != (config.tls_key_file is None):
        raise ConfigError("tls_cert_file and tls_key_file belong together: set both, or none to serve HTTP without TLS")
    if config.tls_client_certs not in _CLIENT_CERTS:
        raise ConfigError(f"tls_client_certs {config.tls_client_certs!r} must be {' or '.join(_CLIENT_CERTS)}")
    if config.tls_client_certs == "required" and config.tls_ca_file is None:
        raise ConfigError(
            'tls_client_certs = "required" needs tls_ca_file: the CA that signs the certificates of clients'
        )
    if config.tls_cert_file is None:
        if config.tls_ca_file is not None:
            raise ConfigError("tls_ca_file needs tls_cert_file and tls_key_file: this broker serves HTTP without TLS")
        return
    advertised = () if config.advertise_url is None else (config.advertise_url,)
    for name, urls in (("advertise_url", advertised), ("peer_urls", config.peer_urls), ("seeds", config.seeds)):
        for url in urls:
            if not normal_url(url).startswith("https://"):
                raise ConfigError(
                    f"{name}: {without_secrets(url)} must begin with https://, because brokers with TLS serve nothing "
                    "else",
                    setting=name,
                )
