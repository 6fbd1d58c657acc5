"""Files of secrets and certificates of the settings: whether a broker accepts them, and until when."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from cryptography import x509

from natslog.config import BrokerConfig
from natslog.diagnosis.examined import SecretFacts
from natslog.errors import NatslogError
from natslog.security import certificates

TOKEN_OF_CLIENT = "token file of this command"


def probe_secrets(config: BrokerConfig | None, token_file: str | None) -> SecretFacts:
    facts = SecretFacts(problems={}, used=0)
    checks: dict[str, Callable[[], None]] = {}
    if token_file is not None:
        checks[TOKEN_OF_CLIENT] = lambda: _require_private(token_file)
    if config is not None:
        if config.cluster_secret_file is not None:
            checks["secret of the cluster"] = lambda: _read(config)
        if any(config.nats_login.values()):
            checks["login to NATS"] = lambda: _check_login(config.nats_login)
        if config.nats_leaf_url and config.nats_leaf_login != config.nats_login:
            checks["login of the leafnode"] = lambda: _check_login(config.nats_leaf_login)
        if config.tls_cert_file is not None:
            checks["TLS certificate"] = lambda: _check_certificate(config, facts)
        if config.admin_token_file is not None and os.path.exists(config.admin_token_file):
            checks["token of the administrator"] = lambda: _require_private(str(config.admin_token_file))
    for name, check in checks.items():
        try:
            check()
        except NatslogError as error:
            facts.problems[name] = error.message
        except PermissionError as error:
            facts.problems[name] = f"cannot read {error.filename}: {error.strerror}"
    facts.used = len(checks)
    return facts


def _read(config: BrokerConfig) -> None:
    config.secrets()


def _check_login(login: dict[str, object]) -> None:
    from natslog.wire.credentials import NatsCredentials

    NatsCredentials(**login, requires_private_files=True).check()  # type: ignore[arg-type]


def _check_certificate(config: BrokerConfig, facts: SecretFacts) -> None:
    from natslog.node.broker import tls_of

    tls = tls_of(config)
    facts.certificate_expires_s = None if tls is None else tls.expires_s
    if config.tls_ca_file is not None:
        authorities = x509.load_pem_x509_certificates(Path(config.tls_ca_file).read_bytes())
        facts.trusts_other_ca = any(not certificates.is_own_authority(one) for one in authorities)


def _require_private(path: str) -> None:
    """Raises ConfigError."""
    from natslog.errors import ConfigError

    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise ConfigError(f"cannot read the token file {path}: {error.strerror}", file=path) from error
    if mode & 0o007:
        raise ConfigError(f"{path} is readable or writable by every user of this machine: chmod 600 {path}", file=path)
