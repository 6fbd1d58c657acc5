"""Settings of a broker: defaults, `natslog.toml`, `NATSLOG_…` variables and flags, in rising order of precedence."""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from natslog.errors import ConfigError, InvalidRequest, did_you_mean
from natslog.log_events import Format, Level
from natslog.setting_kinds import (
    Choice,
    Duration,
    File,
    Flag,
    Setting,
    Size,
    Stated,
    Texts,
    Url,
    Urls,
    Whole,
    stated_settings,
)
from natslog.subjects import check_name, check_subject
from natslog.urls import normal_url, without_secrets

DEFAULT_HTTP_PORT = 9292
DEFAULT_NATS_URL = "nats://127.0.0.1:4222"
DEFAULT_SERVER_URL = f"http://127.0.0.1:{DEFAULT_HTTP_PORT}"
DEFAULT_DATA_DIR = "natslog-data"
ACK_REPLY_PREFIX = "_INBOX."
"""The default prefix of subjects that acks may be sent to: the inboxes of NATS clients."""
ClientCerts = Literal["optional", "required"]
TlsIdentity = Literal["cn", "san"]
ServesJetStream = Literal["auto", "on", "off"]
_MIB = 1024 * 1024
_MIN_SECRET_CHARS = 16
_MAX_SECRETS = 8


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One broker. Sizes are in bytes, ages in seconds. Of `nats_leaf_…`, a login or a TLS file that is None is that of
    `nats_…`, and one that is empty is none.
    """

    data_dir: Annotated[str, Setting("Data folder: messages and state are stored here.")] = DEFAULT_DATA_DIR
    broker_id: Annotated[int, Whole("This broker's number in the cluster.", 1, 2**31)] = 1
    tags: Annotated[
        tuple[str, ...], Texts("Tags of this broker, comma-separated; streams may require them (--placement-tag).")
    ] = ()
    rack: Annotated[str, Setting("Rack of this broker; replicas are placed on different racks.")] = ""
    nats_url: Annotated[str, Url("NATS server(s), comma-separated.")] = DEFAULT_NATS_URL
    nats_creds_file: Annotated[str | None, File("NATS credentials (JWT).", is_secret=True)] = None
    nats_nkey_file: Annotated[str | None, File("File with the nkey seed of a NATS user.", is_secret=True)] = None
    nats_user: Annotated[str | None, Setting("User name for NATS.")] = None
    nats_user_file: Annotated[str | None, File("File with the user name for NATS.")] = None
    nats_password_file: Annotated[str | None, File("File with the password of the NATS user.", is_secret=True)] = None
    nats_token_file: Annotated[str | None, File("File with a NATS token.", is_secret=True)] = None
    nats_tls_ca_file: Annotated[str | None, File("File with the CA certificates that verify the NATS server.")] = None
    nats_tls_cert_file: Annotated[str | None, File("Client certificate for NATS.")] = None
    nats_tls_key_file: Annotated[
        str | None, File("Private key of the client certificate for NATS.", is_secret=True)
    ] = None
    nats_tls_handshake_first: Annotated[
        bool, Flag("The NATS server begins with the TLS handshake.", flag="--nats-tls-handshake-first")
    ] = False
    nats_leaf_url: Annotated[
        str, Url("Leafnode listener(s) of the NATS server, comma-separated; JetStream consumers need it.")
    ] = ""
    nats_leaf_creds_file: Annotated[
        str | None, File("NATS credentials (JWT) of the leafnode; default for its login: that of NATS.", is_secret=True)
    ] = None
    nats_leaf_nkey_file: Annotated[
        str | None, File("File with the nkey seed of the NATS user of the leafnode.", is_secret=True)
    ] = None
    nats_leaf_user: Annotated[str | None, Setting("User name of the leafnode.")] = None
    nats_leaf_user_file: Annotated[str | None, File("File with the user name of the leafnode.")] = None
    nats_leaf_password_file: Annotated[
        str | None, File("File with the password of the user of the leafnode.", is_secret=True)
    ] = None
    nats_leaf_token_file: Annotated[str | None, File("File with the token of the leafnode.", is_secret=True)] = None
    nats_leaf_tls_ca_file: Annotated[
        str | None, File("CA certificates that verify the leafnode listener; default for TLS: as for NATS.")
    ] = None
    nats_leaf_tls_cert_file: Annotated[str | None, File("Client certificate of the leafnode.")] = None
    nats_leaf_tls_key_file: Annotated[
        str | None, File("Private key of the client certificate of the leafnode.", is_secret=True)
    ] = None
    nats_leaf_tls_handshake_first: Annotated[
        bool | None, Flag("The leafnode listener begins with the TLS handshake.")
    ] = None
    http_host: Annotated[str, Setting("Address to listen on.")] = "127.0.0.1"
    http_port: Annotated[int, Whole("Port to listen on.", 0, 65535)] = DEFAULT_HTTP_PORT
    advertise_url: Annotated[str | None, Url("URL at which clients reach this broker.")] = None
    tls_cert_file: Annotated[str | None, File("Certificate of this broker: the HTTP port then serves TLS only.")] = None
    tls_key_file: Annotated[str | None, File("Private key of the certificate.", is_secret=True)] = None
    tls_ca_file: Annotated[str | None, File("CA certificates that clients and other brokers are verified with.")] = None
    tls_client_certs: Annotated[
        ClientCerts, Choice("optional: clients may present a certificate; required: they must.", ClientCerts)
    ] = "optional"
    tls_identity: Annotated[
        TlsIdentity,
        Choice(
            "Where the identity of a client certificate is: cn (common name) or san (first URI, e-mail, DNS name).",
            TlsIdentity,
        ),
    ] = "cn"
    security: Annotated[
        bool, Flag("Require tokens or client certificates, and apply access rules.", flag="--security")
    ] = False
    insecure: Annotated[bool, Flag("Listen on a network without security.", flag="--insecure")] = False
    audit_file: Annotated[str | None, File("File for the audit log; default: the log of the broker.")] = None
    new_admin_token: Annotated[
        bool, Flag("Create and print another token of the administrator.", flag="--new-admin-token")
    ] = False
    admin_token_file: Annotated[
        str | None,
        File("File that a new token of the administrator is written to; default: standard output.", is_secret=True),
    ] = None
    admin_identity: Annotated[
        str, Setting("Identity of the administrator, whose token the first start creates; default admin.")
    ] = "admin"
    segment_bytes: Annotated[int, Size("Size at which a segment is closed; default 128MiB.", at_least=4096)] = (
        128 * _MIB
    )
    segment_age_s: Annotated[float, Duration("Age at which a segment is closed; default 1h.")] = 3600.0
    min_free_bytes: Annotated[int, Size("Disk space that is kept free; default 64MiB.")] = 64 * _MIB
    max_store_bytes: Annotated[
        int | None,
        Size("Most bytes that all streams of this broker may take; default: the disk.", at_least=_MIB),
    ] = None
    ingest_memory_bytes: Annotated[int, Size("Memory for uncommitted messages; default 80MiB.")] = 80 * _MIB
    append_max_bytes: Annotated[int, Size("Maximum size of one direct append; default 1GiB.", at_least=_MIB)] = (
        1024 * _MIB
    )
    retention_interval_s: Annotated[
        float,
        Duration("Interval at which retention limits are enforced; default 5s."),
    ] = 5.0
    tombstone_grace_s: Annotated[
        float,
        Duration("Time for which files of deleted streams are kept; default 1h."),
    ] = 3600.0
    scrub_interval_s: Annotated[
        float, Duration("Interval at which stored messages are read back and checked; default 7d, 0: never.", null=0.0)
    ] = 7 * 86400.0
    scrub_max_bytes_per_s: Annotated[
        int, Size("Rate at which they are read at most; default 8MiB.", at_least=64 * 1024)
    ] = 8 * _MIB
    ack_reply_prefixes: Annotated[
        tuple[str, ...],
        Texts(
            "Prefixes of subjects that acks may be sent to, comma-separated: _INBOX. and custom inbox prefixes of "
            "clients."
        ),
    ] = (ACK_REPLY_PREFIX,)
    jetstream: Annotated[
        ServesJetStream,
        Choice("Whether the JetStream API is served: auto (unless security is enabled), on or off.", ServesJetStream),
    ] = "auto"
    seeds: Annotated[
        tuple[str, ...], Urls("URLs of the cluster's first brokers, comma-separated; the same on all of them.")
    ] = ()
    cluster_secret_file: Annotated[
        str | None,
        File(
            "File with the secret shared by the brokers of the cluster; one secret per line, the new one first.",
            is_secret=True,
        ),
    ] = None
    peer_urls: Annotated[
        tuple[str, ...], Urls("Further URLs at which other brokers reach this broker, comma-separated.")
    ] = ()
    log_level: Annotated[Level, Choice("debug, info, warning or error.", Level)] = "info"
    log_format: Annotated[
        Format, Choice("Format of the log: text (the default), or json: one JSON object per line.", Format)
    ] = "text"

    def __repr__(self) -> str:
        """Without user and password of URLs."""
        fields = msgspec.structs.asdict(self).items()
        shown = {name: _shown(value) if name in _URLS else value for name, value in fields}
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


_LOGIN = ("creds_file", "nkey_file", "user", "user_file", "password_file", "token_file")
_TLS_OF_NATS = ("tls_ca_file", "tls_cert_file", "tls_key_file", "tls_handshake_first")
_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})
SETTINGS = stated_settings(BrokerConfig)
"""From these follow the options of `natslog server`, its variables and file, and what a support bundle shows."""
_BY_NAME = {name: one for one in SETTINGS for name in (one.field, one.name)}
"""A duration states its unit itself: its setting may be named without it (`segment_age = "1h"`)."""
_URLS = {one.field for one in SETTINGS if isinstance(one.setting, Url | Urls)}


def variables_of(setting: Stated) -> tuple[str, ...]:
    """The environment variables that a setting is read from."""
    return tuple(dict.fromkeys(f"NATSLOG_{name.upper()}" for name in (setting.field, setting.name)))


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
    for one in SETTINGS:
        for variable in variables_of(one):
            if (value := (os.environ if environ is None else environ).get(variable)) is not None:
                settings[one.field] = value
    settings |= {_BY_NAME[name].field: value for name, value in flags.items() if value is not None}
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
            raise ConfigError(
                f"{path}: unknown setting {name!r}{did_you_mean(name, BrokerConfig.__struct_fields__)}", setting=name
            )
    return {_BY_NAME[name].field: value for name, value in settings.items()}


def _parsed(one: Stated, given: Any) -> Any:
    """Raises ConfigError."""
    try:
        value = one.setting.from_text(given, one.name) if isinstance(given, str) else given
        if isinstance(one.setting, Flag) and value in (0, 1):  # as files of 0.2.0 may have it
            value = bool(value)
        return one.setting.parse(value, one.name)
    except InvalidRequest as error:
        raise ConfigError(f"invalid setting: {error.message}", **error.facts) from error


def _checked(settings: dict[str, Any]) -> BrokerConfig:
    config = BrokerConfig(**{name: _parsed(_BY_NAME[name], value) for name, value in settings.items()})
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
