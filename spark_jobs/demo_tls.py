"""`make demo TLS=1`: certificates, passwords, NATS users, tokens and access rules, as an administrator would make them.

    certs/      by `natslog tls init`: a CA for the broker, and its certificate
    nats-certs/ the same for the NATS server, so that no client can mistake one CA for the other
    secrets/    tokens by `natslog token create -o`, random passwords, and the configuration files of both servers; only
                their owner can read them

Each identity gets what it needs, and no more:

| identity | at the broker | at NATS |
|---|---|---|
| admin | everything, with the token that the first start of the broker wrote | - |
| broker | - | subscribes to what the streams record, publishes acks to inboxes |
| publisher | - | publishes to `events.>`, receives acks in its inbox |
| spark | reads stream `events` | publishes to `alerts.>`, receives acks in its inbox |
| viewer | reads both streams | - |

No program gets a secret as an argument or in a variable: they get the names of files.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from demo_stage import DemoFailed, Stage, natslog

from natslog.client import ClientOptions, NatslogClient
from natslog.client.publisher import Publisher
from natslog.errors import Forbidden, NatslogError, NatsLoginRefused, Unauthorized
from natslog.nats_server import find_binary, free_port, is_listening
from natslog.wire.link import NatsCredentials

NATS_WITHIN_S = 15.0
INBOXES = "_INBOX.>"
TOKENS = ("spark", "viewer")


class Secured:
    """The files of one demo. `events`, `alerts`: names of the streams, whose subjects begin with them."""

    def __init__(self, stage: Stage, events: str, alerts: str) -> None:
        self._stage, self._events, self._alerts = stage, events, alerts
        self._certs, self._nats_certs = stage.folder / "certs", stage.folder / "nats-certs"
        self._secrets = stage.folder / "secrets"
        self._secrets.mkdir(mode=0o700)
        stage.options = ClientOptions(
            retries=2, token_file=str(self._token_file("viewer")), tls_ca_file=str(self._certs / "ca.pem")
        )
        stage.credentials = self._nats_login("publisher")
        stage.reading = ("--token-file", str(self._token_file("spark")), "--tls-ca", str(self._certs / "ca.pem"))
        stage.publishing = (
            "--nats-user", "spark", "--nats-password-file", str(self._password_file("spark")),
            "--nats-tls-ca-file", str(self._nats_certs / "ca.pem"),
        )  # fmt: skip

    def _token_file(self, identity: str) -> Path:
        return self._secrets / f"{identity}.token"

    def _password_file(self, user: str) -> Path:
        return self._secrets / f"{user}.nats-password"

    def _nats_login(self, user: str) -> NatsCredentials:
        return NatsCredentials(
            user=user,
            password_file=str(self._password_file(user)),
            tls_ca_file=str(self._nats_certs / "ca.pem"),
        )

    # ---- NATS and the broker ----

    def start_nats(self) -> None:
        """A NATS server that requires TLS and a user."""
        self._stage.run("natslog-tls-nats", natslog("tls", "init", str(self._nats_certs)))
        port, config = free_port(), self._secrets / "nats.conf"
        write_private(config, json.dumps(self._nats_config(port), indent=2))
        child = self._stage.start("nats-server", [find_binary(), "--config", str(config)])
        self._stage.wait_for("nats-server", child, lambda: is_listening(port), NATS_WITHIN_S, "its port")
        self._stage.nats_url = f"tls://127.0.0.1:{port}"

    def _nats_config(self, port: int) -> dict[str, object]:
        """JSON is a form of the server's configuration, too."""
        events, alerts = f"{self._events}.>", f"{self._alerts}.>"
        permissions = {
            "broker": {"publish": [INBOXES], "subscribe": [events, alerts]},
            "publisher": {"publish": [events], "subscribe": [INBOXES]},
            "spark": {"publish": [alerts], "subscribe": [INBOXES]},
        }
        users = []
        for user, allowed in permissions.items():
            password = secrets.token_hex(24)
            write_private(self._password_file(user), password + "\n")
            users.append({"user": user, "password": password, "permissions": allowed})
        certificate, key = (str(self._nats_certs / name) for name in ("broker.pem", "broker-key.pem"))
        return {
            "listen": f"127.0.0.1:{port}",
            "tls": {"cert_file": certificate, "key_file": key, "timeout": 5},
            "accounts": {"DEMO": {"users": users}},
        }

    def broker_command(self, data: Path) -> list[str]:
        """`natslog server` with a configuration file."""
        self._stage.run("natslog-tls", natslog("tls", "init", str(self._certs)))
        settings = {
            "data_dir": data,
            "nats_url": self._stage.nats_url,
            "nats_user": "broker",
            "nats_password_file": self._password_file("broker"),
            "nats_tls_ca_file": self._nats_certs / "ca.pem",
            "tls_cert_file": self._certs / "broker.pem",
            "tls_key_file": self._certs / "broker-key.pem",
            "admin_token_file": self._token_file("admin"),
            "audit_file": self._stage.folder / "logs" / "audit.log",
        }
        lines = [f"{name} = {json.dumps(str(value))}" for name, value in settings.items()]
        config = self._secrets / "natslog.toml"
        write_private(config, "\n".join([*lines, "http_port = 0", "security = true", ""]))
        return natslog("server", "--config", str(config))

    # ---- identities ----

    def admin(self) -> NatslogClient:
        """With the token of the administrator."""
        token = str(self._token_file("admin"))
        options = ClientOptions(retries=2, token_file=token, tls_ca_file=str(self._certs / "ca.pem"))
        return NatslogClient(self._stage.servers, options)

    def permit(self) -> None:
        """Tokens and access rules."""
        for identity in TOKENS:
            self._as_admin("token", "create", identity, "--expires", "1h", "-o", str(self._token_file(identity)))
        for identity, stream in (("spark", self._events), ("viewer", self._events), ("viewer", self._alerts)):
            self._as_admin("acl", "add", identity, "read", stream)

    def _as_admin(self, *command: str) -> None:
        login = ("--token-file", str(self._token_file("admin")), "--tls-ca", str(self._certs / "ca.pem"))
        self._stage.run("natslog-" + "-".join(command[:3]), natslog(*login, *command))

    def identities(self) -> list[str]:
        """What each may do, for the terminal."""
        return [
            f"NATS: user broker subscribes to {self._events}.> and {self._alerts}.>, publisher publishes to "
            f"{self._events}.>, spark to {self._alerts}.>",
            f"broker: spark may read {self._events}; viewer may read {self._events} and {self._alerts}",
            "all tokens and passwords are in files that only their owner can read",
        ]

    # ---- what is refused ----

    def check_refusals(self) -> list[str]:
        """One line for each. Raises DemoFailed: something is permitted that must not be."""
        ca = str(self._certs / "ca.pem")
        none, spark = (
            ClientOptions(retries=0, token_file=token, tls_ca_file=ca)
            for token in (None, str(self._token_file("spark")))
        )
        return [
            self._refused("a request without a token", Unauthorized, lambda: self._ask(none, self._events)),
            self._refused(f"spark on stream {self._alerts}", Forbidden, lambda: self._ask(spark, self._alerts)),
            self._refused("NATS without a user", NatsLoginRefused, self._connect_without_user),
        ]

    def _ask(self, options: ClientOptions, stream: str) -> None:
        with NatslogClient(self._stage.servers, options) as client:
            client.position(stream)

    def _connect_without_user(self) -> None:
        credentials = NatsCredentials(tls_ca_file=str(self._nats_certs / "ca.pem"))
        logging.disable(logging.WARNING)  # the refusal is expected
        try:
            with Publisher(self._stage.nats_url, credentials=credentials, connect_timeout_s=2.0):
                pass
        finally:
            logging.disable(logging.NOTSET)

    @staticmethod
    def _refused(what: str, error: type[NatslogError], attempt: Callable[[], None]) -> str:
        try:
            attempt()
        except error as refusal:
            return f"{what}: refused ({refusal.code})"
        raise DemoFailed(f"{what} was not refused")


def write_private(path: Path, text: str) -> None:
    """A new file that only its owner can read, whatever the umask is."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
