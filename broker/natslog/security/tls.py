"""TLS of a broker: of its HTTP port, and of its connections to other brokers.

Theory of operation. Two contexts are made at the start, one for each direction. Both present the broker's certificate.
`refresh` compares the files with those that were loaded; if they were replaced, it loads them into the same contexts,
so that new connections use them. Connections that are open keep the certificate of their handshake. Replaced files are
first loaded into contexts that are thrown away: a certificate without its key, as between two steps of a renewal, would
otherwise leave the broker without any.

Invariants. TLS 1.2 is the least version. A key that every user of the machine can read is refused, and so is one with a
passphrase, because nobody is there to type it.

Source: Python's `ssl`, whose defaults choose the ciphers.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from dataclasses import dataclass
from typing import TypeAlias

from natslog.errors import ConfigError

logger = logging.getLogger("natslog.tls")

_EXPIRES_SOON_S = 14 * 24 * 3600.0
_DAY_S = 24 * 3600.0

_Seen: TypeAlias = tuple[tuple[int, int, int], ...]
"""Of each file: inode, size and time of its last change."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. `ca`: certificates of the authorities that clients and other brokers are verified with; None: clients
    present no certificates, and brokers are verified with the authorities of the system.
    """

    certificate: str
    key: str
    ca: str | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.certificate, self.key) if self.ca is None else (self.certificate, self.key, self.ca)


class BrokerTls:
    """The contexts of one broker.

    Args:
        requires_clients: whether clients must present a certificate; without it they may, if there is `files.ca`.

    Attributes:
        accepting: for the HTTP port. `dialling`: for connections to other brokers.
        expires_s: when the certificate expires, in seconds since 1970.

    Raises:
        ConfigError: a file cannot be used, with the remedy.
    """

    def __init__(self, files: TlsFiles, *, requires_clients: bool = False) -> None:
        self._files = files
        self._requires_clients = requires_clients
        self._seen = _seen(files)
        self.accepting, self.dialling = self._contexts()
        self.expires_s = _expiry_s(files.certificate)
        self._warn_of_expiry()

    @property
    def verifies_clients(self) -> bool:
        return self._files.ca is not None

    def refresh(self) -> bool:
        """Loads files that were replaced. Returns whether it did. What cannot be loaded is logged, once for each
        change, and the present certificate stays in use.
        """
        try:
            seen = _seen(self._files)
            if seen == self._seen:
                return False
            self._seen = seen
            self._contexts()
            for context in (self.accepting, self.dialling):
                _load(context, self._files)
        except ConfigError as error:
            logger.error("the changed TLS files are not used: %s", error.message)
            return False
        self.expires_s = _expiry_s(self._files.certificate)
        logger.info("the TLS files were loaded again")
        self._warn_of_expiry()
        return True

    def _contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        accepting, dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context in (accepting, dialling):
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            _load(context, self._files)
        if self._files.ca is None:
            dialling.load_default_certs()
        else:
            accepting.verify_mode = ssl.CERT_REQUIRED if self._requires_clients else ssl.CERT_OPTIONAL
        return accepting, dialling

    def _warn_of_expiry(self) -> None:
        left_s = self.expires_s - time.time()
        if left_s < 0:
            logger.error("the TLS certificate %s has expired: replace the file", self._files.certificate)
        elif left_s < _EXPIRES_SOON_S:
            logger.warning(
                "the TLS certificate %s expires in %.1f days: replace the file",
                self._files.certificate,
                left_s / _DAY_S,
            )


def _seen(files: TlsFiles) -> _Seen:
    """Raises ConfigError: one is not there, or everybody may read the key."""
    found = []
    for path in files.paths:
        try:
            stat = os.stat(path)
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"cannot read the TLS file {path}: {error.strerror}", file=path) from error
        if path == files.key and stat.st_mode & 0o007:
            raise ConfigError(
                f"the TLS key {path} is readable or writable by every user of this machine: chmod 600 {path}", file=path
            )
        found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Raises ConfigError: the files are not what they should be."""
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_passphrase)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"the TLS certificate {files.certificate} cannot be used with the key {files.key} ({_reason(error)}): both "
            "must be PEM files of one pair, and the key must have no passphrase",
            file=files.certificate,
        ) from error
    if files.ca is None:
        return
    try:
        context.load_verify_locations(files.ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"{files.ca} has no CA certificates that can be used ({_reason(error)}): write a PEM file", file=files.ca
        ) from error


def _no_passphrase() -> str:
    """Without this, a terminal is asked."""
    return ""


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return error.strerror or str(error) or type(error).__name__


def _expiry_s(path: str) -> float:
    """Of the first certificate in the file."""
    from cryptography import x509  # 2 MB of memory, which brokers without TLS do not need

    with open(path, "rb") as file:
        certificates = x509.load_pem_x509_certificates(file.read())
    return certificates[0].not_valid_after_utc.timestamp()
