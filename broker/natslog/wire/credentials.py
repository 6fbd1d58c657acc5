"""How to log in to NATS: every method of nats-py, each from files that are read at each connection.

Theory of operation. `NatsCredentials` names the files and is checked when it is made. `login` and `tls_context` read
them; the link calls both for each connection that it makes, so that a rotated file is used without a restart. What was
read is checked before nats-py gets it: nats-py does not return from reading a credentials file that has no JWT.

Invariant. No error contains anything that was read from a file of secrets.
"""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass, field

from natslog.errors import ConfigError

_MOST_BYTES = 1024 * 1024
_JWT = re.compile(r"-+BEGIN NATS USER JWT-+\s+([\w.-]+)\s+-+END NATS USER JWT-+")
_SEED = re.compile(r"-+BEGIN USER NKEY SEED-+\s+([A-Z0-9]+)\s+-+END USER NKEY SEED-+")


@dataclass(frozen=True, slots=True)
class Login:
    """What a connection is authenticated with. `credentials`: the text of a credentials file, as nats-py reads it."""

    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    credentials: str | None = field(default=None, repr=False)
    nkey_seed: str | None = field(default=None, repr=False)

    def jwt_and_seed(self) -> tuple[str | None, str | None]:
        """What signs the nonce of a server: JWT and seed of a credentials file, a seed alone, or neither."""
        if self.credentials is None:
            return None, self.nkey_seed
        jwt, seed = _JWT.search(self.credentials), _SEED.search(self.credentials)
        assert jwt is not None, "`NatsCredentials.login` has checked it"
        assert seed is not None, "as well"
        return jwt[1], seed[1]


@dataclass(frozen=True, slots=True)
class NatsCredentials:
    """How to log in; files are read when a connection is made.

    Args:
        creds_file: JWT and nkey seed of a user, as `nsc` writes them. `nkey_file`: the nkey seed of a user.
        user, user_file: the user name, or a file with it; with `password_file`.
        token_file: a token; with `creds_file` or `nkey_file` as well, for servers whose auth callout reads it.
        tls_ca_file: verifies the server; without it, the authorities of the system do. `tls_cert_file`: certificate of
            this client; `tls_key_file`: its key, if `tls_cert_file` does not contain it.
        tls_handshake_first: the server sends nothing before the TLS handshake (`handshake_first` of its configuration).
        requires_private_files: whether secrets that every user of the machine can read are refused.

    Raises:
        ConfigError: two of them exclude each other, or one requires another.
    """

    creds_file: str | None = None
    nkey_file: str | None = None
    user: str | None = None
    user_file: str | None = None
    password_file: str | None = None
    token_file: str | None = None
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_handshake_first: bool = False
    requires_private_files: bool = False

    def __post_init__(self) -> None:
        if self.user and self.user_file:
            raise ConfigError("give either the NATS user or the user file: both were given")
        if self._has_user != bool(self.password_file):
            raise ConfigError(
                "the NATS user and the file with the password belong together: give both (a user or a user file, and a "
                "password file), or none"
            )
        ways = {
            "credentials file": self.creds_file,
            "nkey file": self.nkey_file,
            "user with password file": self.password_file,
        }
        if self.password_file:  # a token is for servers without users, or for an auth callout beside a JWT or nkey
            ways["token file"] = self.token_file
        given = [name for name, value in ways.items() if value]
        if len(given) > 1:
            raise ConfigError(f"a NATS server takes only one login: remove all but one of {', '.join(given)}")
        if self.tls_key_file and not self.tls_cert_file:
            raise ConfigError("the private key for NATS requires the client certificate for NATS: give both")

    @property
    def _has_user(self) -> bool:
        return bool(self.user or self.user_file)

    @property
    def wants_tls(self) -> bool:
        """Whether nothing may be sent to a server without TLS."""
        return bool(self.tls_ca_file or self.tls_cert_file or self.tls_handshake_first)

    def check(self) -> None:
        """Raises ConfigError: a file cannot be read, or is of another kind."""
        self.login()
        self.tls_context()

    # ---- the login ----

    def login(self) -> Login:
        """What the files contain now.

        Raises:
            ConfigError: one cannot be read, or is of another kind.
        """
        return Login(
            user=self._text(self.user_file, "NATS user file", is_secret=False) if self.user_file else self.user,
            password=self._text(self.password_file, "NATS password file") if self.password_file else None,
            token=self._text(self.token_file, "NATS token file") if self.token_file else None,
            credentials=self._credentials(self.creds_file) if self.creds_file else None,
            nkey_seed=self._seed(self.nkey_file) if self.nkey_file else None,
        )

    def _credentials(self, path: str) -> str:
        text = self._text(path, "NATS credentials file")
        jwt, seed = _JWT.search(text), _SEED.search(text)
        if jwt is None or seed is None or not _is_user_seed(seed[1]):
            raise ConfigError(
                f"{path} is no NATS credentials file: it must hold a JWT and an nkey seed of a user, each between a "
                "BEGIN and an END line (nsc generate creds writes one)",
                file=path,
            )
        return (
            f"-----BEGIN NATS USER JWT-----\n{jwt[1]}\n------END NATS USER JWT------\n"
            f"-----BEGIN USER NKEY SEED-----\n{seed[1]}\n------END USER NKEY SEED------\n"
        )

    def _seed(self, path: str) -> str:
        text = self._text(path, "NATS nkey file")
        if not _is_user_seed(text):
            raise ConfigError(
                f"{path} is no nkey seed of a user: it must hold one line that begins with SU (nk -gen user writes it)",
                file=path,
            )
        return text

    def _text(self, path: str, what: str, *, is_secret: bool = True) -> str:
        try:
            text = self._bytes(path, what, is_secret=is_secret).decode().strip()
        except UnicodeDecodeError:
            raise ConfigError(f"the {what} {path} is not UTF-8 text: correct it", file=path) from None
        if not text:
            raise ConfigError(f"the {what} {path} is empty: write one line into it", file=path)
        return text

    def _bytes(self, path: str, what: str, *, is_secret: bool = True) -> bytes:
        try:
            with open(path, "rb") as file:
                mode, data = os.fstat(file.fileno()).st_mode, file.read(_MOST_BYTES)
        except OSError as error:
            raise ConfigError(f"cannot read the {what} {path}: {error.strerror}", file=path) from error
        if self.requires_private_files and is_secret and mode & 0o007:
            raise ConfigError(
                f"the {what} {path} is readable or writable by every user of this machine: chmod 600 {path}", file=path
            )
        return data

    # ---- TLS ----

    def tls_context(self) -> ssl.SSLContext:
        """Of the files as they are now.

        Raises:
            ConfigError: one cannot be read, or is of another kind.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.tls_ca_file:
            self._load_authorities(context, self.tls_ca_file)
        else:
            context.load_default_certs()
        if self.tls_cert_file:
            self._load_certificate(context, self.tls_cert_file, self.tls_key_file)
        return context

    def _load_authorities(self, context: ssl.SSLContext, path: str) -> None:
        data = self._bytes(path, "CA file for NATS", is_secret=False)
        try:
            context.load_verify_locations(cadata=data.decode("ascii", "replace"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"{path} has no CA certificates that can be used ({_reason(error)}): write a PEM file", file=path
            ) from error

    def _load_certificate(self, context: ssl.SSLContext, certificate: str, key: str | None) -> None:
        self._bytes(certificate, "client certificate for NATS", is_secret=key is None)
        if key is not None:
            self._bytes(key, "private key for NATS")
        try:
            context.load_cert_chain(certificate, key, password=_no_passphrase)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"the client certificate {certificate} for NATS cannot be used with the key {key or certificate} "
                f"({_reason(error)}): both must be PEM files of one pair, and the key must have no passphrase",
                file=certificate,
            ) from error

    # ---- what to correct ----

    @property
    def login_remedy(self) -> str:
        """What to correct where the server refuses the login."""
        token = f"the token in {self.token_file}" if self.token_file else ""
        if self.creds_file:
            return f"correct the credentials file {self.creds_file}" + (f" or {token}" if token else "")
        if self.nkey_file:
            return f"correct the nkey seed in {self.nkey_file}" + (f" or {token}" if token else "")
        if self.password_file:
            user = f"the user in {self.user_file}" if self.user_file else f"the user {self.user!r}"
            return f"correct {user} or the password in {self.password_file}"
        if token:
            return f"correct {token}"
        return "correct user and password in the URL, or give credentials"

    @property
    def ca_remedy(self) -> str:
        """What to correct where the certificate of the server is not accepted."""
        host = "and use a host in the URL that the certificate is for"
        if self.tls_ca_file:
            return f"correct the CA file {self.tls_ca_file}, {host}"
        return f"give the CA file of the server, {host}"

    @property
    def certificate_remedy(self) -> str:
        """What to correct where the server does not accept the certificate of this client, or that there is none."""
        if self.tls_cert_file:
            return f"correct the client certificate {self.tls_cert_file}: it must be of a CA that the server accepts"
        return "give a client certificate of a CA that the server accepts"


def _is_user_seed(text: str) -> bool:
    """Raises ConfigError: the package that reads seeds is not installed."""
    try:
        import nkeys
    except ImportError as error:
        raise ConfigError("NATS credentials files and nkeys need the package nkeys: pip install nkeys") from error
    try:
        prefix, raw = nkeys.decode_seed(text.encode())
    except (nkeys.NkeysError, ValueError):
        return False
    return bool(prefix == nkeys.PREFIX_BYTE_USER and len(raw) == 32)


def _no_passphrase() -> str:
    """Without this, a terminal is asked."""
    return ""


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
