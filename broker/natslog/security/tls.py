"""TLS of a broker: of its HTTP port, and of its connections to other brokers.

Theory of operation. There are two contexts, one for each direction. Both present the broker's certificate. `refresh`
compares the files with those that were loaded; if they were replaced, it makes new contexts, which new connections use.
The present ones are not changed: a context cannot forget a CA, and it resumes sessions whose certificates it accepted
before. Connections that are open continue. Replaced files are read once. If they cannot be used, as between two steps
of a renewal, the present contexts stay in use.

Invariants. TLS 1.2 is the least version. A key that every user of the machine can read is refused, and so is one with a
passphrase, because a broker cannot ask for it.

Source: Python's `ssl`, whose defaults choose the ciphers.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from natslog.errors import ConfigError
from natslog.log_events import event

logger = logging.getLogger("natslog.tls")

_EXPIRES_SOON_S = 14 * 24 * 3600.0
_DAY_S = 24 * 3600.0
_MOST_BYTES = 16 * 1024 * 1024
_MOST_FLIGHTS = 10  # of a handshake, which has four

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
        hosts: at which this broker is dialled. Where there is `files.ca`, the certificate must be valid for them.
        requires_clients: whether clients must present a certificate; without it they may, if there is `files.ca`.

    Attributes:
        accepting: for the next connection to the HTTP port. `dialling`: for the next one to another broker.
        expires_s: when the certificate expires, in seconds since 1970.

    Raises:
        ConfigError: a file cannot be used, with the remedy.
    """

    def __init__(self, files: TlsFiles, *, hosts: Sequence[str] = (), requires_clients: bool = False) -> None:
        self._files = files
        self._hosts = hosts
        self._requires_clients = requires_clients
        self._complaint = ""
        with _Copies(files) as copies:
            self._seen = copies.seen
            self.accepting, self.dialling = self._contexts(copies)
            self.expires_s = _expiry_s(copies)
        self._warn_of_expiry()

    @property
    def verifies_clients(self) -> bool:
        return self._files.ca is not None

    def refresh(self) -> bool:
        """Loads files that were replaced. Returns whether it did. If they cannot be loaded, the present certificate
        stays in use; the reason is logged, once, and the next call tries again.
        """
        try:
            if _seen(self._files) == self._seen:
                return False
            with _Copies(self._files) as copies:
                accepting, dialling = self._contexts(copies)
                expires_s = _expiry_s(copies)
                self._seen = copies.seen
        except ConfigError as error:
            if error.message != self._complaint:
                self._complaint = error.message
                logger.error("the changed TLS files are not used: %s", error.message, extra=event("tls.not_used"))
            return False
        self.accepting, self.dialling = accepting, dialling
        self.expires_s, self._complaint = expires_s, ""
        logger.info("the TLS files were loaded again", extra=event("tls.reloaded"))
        self._warn_of_expiry()
        return True

    def _contexts(self, copies: _Copies) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        accepting, dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context in (accepting, dialling):
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            _load(context, copies)
        if self._files.ca is None:
            dialling.load_default_certs()
        else:
            accepting.verify_mode = ssl.CERT_REQUIRED if self._requires_clients else ssl.CERT_OPTIONAL
            for host in self._hosts:
                self._check_own(accepting, dialling, host)
        return accepting, dialling

    def _check_own(self, accepting: ssl.SSLContext, dialling: ssl.SSLContext, host: str) -> None:
        """This broker dials itself, in memory. Raises ConfigError: other brokers could not dial it, or it them."""
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = dialling.wrap_bio(to_client, to_server, server_hostname=host)
        waiting = [client, accepting.wrap_bio(to_server, to_client, server_side=True)]
        try:
            for _ in range(_MOST_FLIGHTS):
                for side in list(waiting):
                    with suppress(ssl.SSLWantReadError):
                        side.do_handshake()
                        waiting.remove(side)
            assert not waiting, "a handshake in memory succeeds or fails"
        except ssl.SSLError as error:
            why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else _reason(error)
            raise ConfigError(
                f"the TLS certificate {self._files.certificate} is not accepted by a broker that connects to {host!r} "
                f"({why.rstrip('.')}): it must be signed by a CA in {self._files.ca}, be valid now, for this host, and "
                "for servers and clients (natslog tls init --host HOST makes one)",
                file=self._files.certificate,
            ) from error

    def _warn_of_expiry(self) -> None:
        left_s = self.expires_s - time.time()
        if left_s < 0:  # without a CA, nothing else finds it
            logger.error(
                f"the TLS certificate {self._files.certificate} has expired: replace the file",
                extra=event("tls.expired", path=self._files.certificate),
            )
        elif left_s < _EXPIRES_SOON_S:
            logger.warning(
                f"the TLS certificate {self._files.certificate} expires in {left_s / _DAY_S:.1f} days: replace the "
                "file",
                extra=event("tls.expires_soon", path=self._files.certificate),
            )


def _seen(files: TlsFiles) -> _Seen:
    """Raises ConfigError: one is not there."""
    found = []
    for path in files.paths:
        try:
            stat = os.stat(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def _unreadable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"cannot read the TLS file {path}: {error.strerror}", file=path)


class _Copies:
    """What the files contain at one moment, in memory, as files that OpenSSL can read: they may be replaced between two
    readings. A context manager, which frees the memory.

    Attributes:
        seen: the files that were read. `paths`: of the copies, by the path of the original.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Raises ConfigError: one cannot be read, or every user may read the key."""
        self.files = files
        self.paths: dict[str, str] = {}
        self._fds: list[int] = []
        seen = []
        try:
            for path in files.paths:
                with open(path, "rb") as file:
                    stat, data = os.fstat(file.fileno()), file.read(_MOST_BYTES)
                if path == files.key and stat.st_mode & 0o007:
                    raise ConfigError(
                        f"the TLS key {path} is readable or writable by every user of this machine: chmod 600 {path}",
                        file=path,
                    )
                seen.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
                self._fds.append(fd := os.memfd_create("tls"))
                os.write(fd, data)
                self.paths[path] = f"/proc/self/fd/{fd}"
        except OSError as error:
            self._close()
            raise _unreadable(path, error) from error
        except ConfigError:
            self._close()
            raise
        self.seen: _Seen = tuple(seen)

    def __enter__(self) -> _Copies:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def _load(context: ssl.SSLContext, copies: _Copies) -> None:
    """Raises ConfigError: the files are not what they should be."""
    files, paths = copies.files, copies.paths
    try:
        context.load_cert_chain(paths[files.certificate], paths[files.key], password=_no_passphrase)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"the TLS certificate {files.certificate} cannot be used with the key {files.key} ({_reason(error)}): both "
            "must be PEM files of one pair, and the key must have no passphrase",
            file=files.certificate,
        ) from error
    if files.ca is None:
        return
    try:
        context.load_verify_locations(paths[files.ca])
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


def _expiry_s(copies: _Copies) -> float:
    """Of the first certificate in the file. Raises ConfigError: it cannot be decoded."""
    from cryptography import x509  # 2 MB of memory, which brokers without TLS do not need

    path = copies.files.certificate
    try:
        with open(copies.paths[path], "rb") as file:
            certificates = x509.load_pem_x509_certificates(file.read())
    except ValueError as error:
        raise ConfigError(
            f"the TLS certificate {path} cannot be decoded: write the PEM form of an X.509 certificate", file=path
        ) from error
    return certificates[0].not_valid_after_utc.timestamp()
