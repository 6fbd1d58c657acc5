"""NATS servers that require a login, one for each method, with the files that are accepted and some that are not.

JWTs are made here, as `nsc` makes them: an operator signs an account, the account a user, and the server verifies both
with the operator's JWT (memory resolver). Source: nats-io/jwt, version 2.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nkeys

from natslog.nats_server import NatsServer
from natslog.security.certificates import make_certificates


@dataclass(frozen=True, slots=True)
class Login:
    """Of one server. `right` and `wrong`: arguments of `NatsCredentials`; a setting of a broker has `nats_` before it.

    Attributes:
        said: a part of the error where `wrong` is given: what to correct.
        secret: texts that no error and no log shows.
    """

    configuration: str
    right: dict[str, Any]
    wrong: dict[str, Any]
    said: str
    secret: list[str] = field(default_factory=list)


def private(path: Path, text: str) -> str:
    """A file that only its owner can read."""
    path.touch(mode=0o600)
    path.write_text(text)
    return str(path)


@contextmanager
def server_with(folder: Path, configuration: str, port: int = 0) -> Iterator[NatsServer]:
    path = folder / "nats.conf"
    path.write_text(configuration)
    server = NatsServer(port, folder / "nats.log", arguments=("--config", str(path))).start()
    try:
        yield server
    finally:
        server.stop()


# ---- keys and JWTs ----


class KeyPair:
    """Of an operator, an account or a user."""

    def __init__(self, prefix: int) -> None:
        self.seed = bytes(nkeys.encode_seed(os.urandom(32), prefix)).decode()
        self._pair = nkeys.from_seed(bytearray(self.seed.encode()))
        self.public = self._pair.public_key.decode()

    def token(self, subject: str, name: str, claims: dict[str, Any]) -> str:
        """A JWT that this key signs."""
        body = {"iat": int(time.time()), "iss": self.public, "sub": subject, "name": name, "nats": claims}
        body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).decode().rstrip("=")
        signed = f"{_part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_part(body)}"
        return f"{signed}.{_encoded(self._pair.sign(signed.encode()))}"


def _part(body: dict[str, Any]) -> str:
    return _encoded(json.dumps(body, separators=(",", ":")).encode())


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def user_key() -> KeyPair:
    return KeyPair(nkeys.PREFIX_BYTE_USER)


class Accounts:
    """An operator with one account, whose users may publish and subscribe everywhere."""

    def __init__(self) -> None:
        self._operator, self._account = KeyPair(nkeys.PREFIX_BYTE_OPERATOR), KeyPair(nkeys.PREFIX_BYTE_ACCOUNT)

    def configuration(self) -> str:
        operator = self._operator.token(self._operator.public, "operator", {"type": "operator", "version": 2})
        limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
        claims = {"type": "account", "version": 2, "limits": limits | {"wildcards": True}}
        account = self._operator.token(self._account.public, "account", claims)
        return f"operator: {operator}\nresolver: MEMORY\nresolver_preload: {{ {self._account.public}: {account} }}\n"

    def credentials(self, *, signed_by: KeyPair | None = None) -> tuple[str, str]:
        """The content of a credentials file of a new user, and the seed in it."""
        user = user_key()
        claims = {"type": "user", "version": 2, "pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1}
        if signed_by is not None:
            claims["issuer_account"] = self._account.public
        token = (signed_by or self._account).token(user.public, "user", claims)
        return credentials_file(token, user.seed), user.seed


def credentials_file(token: str, seed: str) -> str:
    """As `nsc` writes it."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        "************************* IMPORTANT *************************\nNKEY Seed printed below can be used to sign\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


# ---- the methods ----


def _tls(folder: Path, more: str = "") -> str:
    make_certificates(folder / "tls", ["localhost", "127.0.0.1"], ["client"], 30)
    make_certificates(folder / "other", ["localhost", "127.0.0.1"], ["client"], 30)
    at = folder / "tls"
    return f'tls {{ cert_file: "{at}/broker.pem", key_file: "{at}/broker-key.pem", ca_file: "{at}/ca.pem"{more} }}\n'


def _ca(folder: Path, name: str = "tls") -> dict[str, Any]:
    return {"tls_ca_file": str(folder / name / "ca.pem")}


def _pair(folder: Path, name: str = "tls") -> dict[str, Any]:
    at = folder / name
    return {"tls_cert_file": str(at / "client.pem"), "tls_key_file": str(at / "client-key.pem")}


def token(folder: Path) -> Login:
    right, wrong = secrets.token_hex(16), secrets.token_hex(16)
    return Login(
        f"authorization {{ token: {right!r} }}",
        {"token_file": private(folder / "token", right + "\n")},
        {"token_file": private(folder / "wrong-token", wrong + "\n")},
        f"correct the token in {folder}/wrong-token",
        [right, wrong],
    )


def user_and_password(folder: Path) -> Login:
    right, wrong = "p" + secrets.token_hex(16), "p" + secrets.token_hex(16)
    return Login(
        f"authorization {{ user: natslog, password: {right!r} }}",
        {"user": "natslog", "password_file": private(folder / "password", right)},
        {"user": "natslog", "password_file": private(folder / "wrong-password", wrong)},
        f"correct the user 'natslog' or the password in {folder}/wrong-password",
        [right, wrong],
    )


def user_in_a_file(folder: Path) -> Login:
    login = user_and_password(folder)
    user = {"user": None, "user_file": private(folder / "user", "natslog\n")}
    said = f"correct the user in {folder}/user or the password in {folder}/wrong-password"
    return Login(login.configuration, login.right | user, login.wrong | user, said, login.secret)


def nkey(folder: Path) -> Login:
    right, wrong = user_key(), user_key()
    return Login(
        f"authorization {{ users: [ {{ nkey: {right.public} }} ] }}",
        {"nkey_file": private(folder / "user.nk", right.seed + "\n")},
        {"nkey_file": private(folder / "wrong.nk", wrong.seed + "\n")},
        f"correct the nkey seed in {folder}/wrong.nk",
        [right.seed, wrong.seed],
    )


def credentials(folder: Path) -> Login:
    accounts = Accounts()
    (right, seed), (wrong, wrong_seed) = accounts.credentials(), Accounts().credentials()
    return Login(
        accounts.configuration(),
        {"creds_file": private(folder / "user.creds", right)},
        {"creds_file": private(folder / "wrong.creds", wrong)},
        f"correct the credentials file {folder}/wrong.creds",
        [seed, wrong_seed],
    )


def tls(folder: Path) -> Login:
    said = f"correct the CA file {folder}/other/ca.pem"
    return Login(_tls(folder), _ca(folder), _ca(folder, "other"), said)


def tls_with_client_certificate(folder: Path) -> Login:
    said = f"correct the client certificate {folder}/other/client.pem"
    right, wrong = _ca(folder) | _pair(folder), _ca(folder) | _pair(folder, "other")
    return Login(_tls(folder, ", verify: true"), right, wrong, said)


def tls_without_client_certificate(folder: Path) -> Login:
    right, wrong = _ca(folder) | _pair(folder), _ca(folder)
    return Login(_tls(folder, ", verify: true"), right, wrong, "give a client certificate")


def tls_handshake_first(folder: Path) -> Login:
    right = _ca(folder) | {"tls_handshake_first": True}
    return Login(_tls(folder, ", handshake_first: true"), right, _ca(folder), "set handshake first")


def tls_and_user(folder: Path) -> Login:
    login, ca = user_and_password(folder), _ca(folder)
    return Login(_tls(folder) + login.configuration, login.right | ca, login.wrong | ca, login.said, login.secret)


def tls_client_certificate_and_credentials(folder: Path) -> Login:
    login, files = credentials(folder), _ca(folder) | _pair(folder)
    configuration = _tls(folder, ", verify: true") + login.configuration
    return Login(configuration, login.right | files, login.wrong | files, login.said, login.secret)


METHODS: list[Callable[[Path], Login]] = [
    token,
    user_and_password,
    user_in_a_file,
    nkey,
    credentials,
    tls,
    tls_with_client_certificate,
    tls_without_client_certificate,
    tls_handshake_first,
    tls_and_user,
    tls_client_certificate_and_credentials,
]
