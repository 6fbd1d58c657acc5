"""A certificate authority, and certificates of brokers and clients, for a test or a small cluster.

Source: RFC 5280; the recipes of `cryptography`.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from natslog.errors import ConfigError

_CLOCKS_APART = datetime.timedelta(hours=1)
_AUTHORITY = "natslog CA"
_CA_LASTS = datetime.timedelta(days=3650)
_DNS_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*")
_MOST_DNS_CHARS = 253
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")  # at most as long as a common name of RFC 5280

Purpose = x509.ObjectIdentifier


@dataclass(frozen=True, slots=True)
class _Pair:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def pem(self) -> Iterator[tuple[str, bytes]]:
        """What follows the name of the file, and its content."""
        yield ".pem", self.certificate.public_bytes(serialization.Encoding.PEM)
        yield (
            "-key.pem",
            self.key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )


@dataclass(frozen=True, slots=True)
class Made:
    """The files that were written, and those that were kept."""

    written: list[Path]
    kept: list[Path]


def make_certificates(folder: Path, hosts: Sequence[str] | None, clients: Sequence[str], days: int) -> Made:
    """Writes the pairs `ca` and `broker`, and one for each client, each as `NAME.pem` and `NAME-key.pem`. A CA that is
    in the folder is kept, and signs the others. A certificate of brokers that is there is kept too.

    Args:
        hosts: further DNS names and addresses of the brokers, besides this machine's; None: a certificate of brokers
            may be kept. `days`: for which the certificates are valid, the CA apart.

    Raises:
        ConfigError: a file exists already, cannot be written, or a name cannot be used. Nothing is written then.
    """
    _check_names(clients)
    alternatives = [_host(host) for host in dict.fromkeys([*_here(), *(hosts or ())])]
    has_ca, has_broker = (_has_pair(folder, name) for name in ("ca", "broker"))
    if has_broker and (hosts is not None or not has_ca):
        raise ConfigError(
            f"{folder / 'broker.pem'} exists already: to make one for other hosts, or a new one, move broker.pem and "
            "broker-key.pem to another place first, and name all hosts again"
        )
    for name in clients:
        if _has_pair(folder, name):
            raise ConfigError(f"{folder / f'{name}.pem'} exists already: choose another name with --client")
    authority = _read_pair(folder / "ca.pem", folder / "ca-key.pem") if has_ca else _authority()
    lasts = datetime.timedelta(days=days)
    made = [] if has_ca else [("ca", authority)]
    if not has_broker:
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]  # brokers dial each other
        made.append(("broker", _signed(authority, "broker", both, lasts, alternatives)))
    made += [(name, _signed(authority, name, [ExtendedKeyUsageOID.CLIENT_AUTH], lasts, [])) for name in clients]
    kept = [folder / f"{name}.pem" for name, is_kept in (("ca", has_ca), ("broker", has_broker)) if is_kept]
    return Made(_written(folder, [(f"{name}{rest}", data) for name, pair in made for rest, data in pair.pem()]), kept)


def _check_names(clients: Sequence[str]) -> None:
    for name in clients:
        if not _NAME.fullmatch(name) or name in ("ca", "broker") or name.endswith("-key"):
            raise ConfigError(
                f"{name!r} cannot be the name of a certificate: use at most 64 letters, digits, -, _ and ., and not "
                "ca, broker or a name that ends with -key"
            )
    if len(set(clients)) < len(clients):
        raise ConfigError("a client is named twice: name each once")


def _has_pair(folder: Path, name: str) -> bool:
    """Raises ConfigError: only one of the two files is there."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    if certificate.exists() != key.exists():
        raise ConfigError(f"only one of {certificate} and {key} exists: restore the other one, or delete it")
    return certificate.exists()


def _here() -> list[str]:
    """The names of this machine that can be in a certificate."""
    name = socket.gethostname()
    return ["localhost", "127.0.0.1", "::1", *([name] if _DNS_NAME.fullmatch(name) else [])]


def is_own_authority(certificate: x509.Certificate) -> bool:
    """Whether `natslog tls init` has made it: it signs certificates of brokers and of clients of natslog only."""
    return certificate.subject == _named(_AUTHORITY)


def _authority() -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _named(_AUTHORITY)
    built = _certificate(name, name, key.public_key(), _CA_LASTS)
    built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    built = built.add_extension(_usage(signs_certificates=True), critical=True)
    return _Pair(built.sign(key, hashes.SHA256()), key)


def _signed(
    authority: _Pair, name: str, purposes: list[Purpose], lasts: datetime.timedelta, hosts: list[x509.GeneralName]
) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    built = _certificate(_named(name), authority.certificate.subject, key.public_key(), lasts)
    built = built.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    built = built.add_extension(_usage(signs_certificates=False), critical=True)
    built = built.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    built = built.add_extension(signer, critical=False)
    if hosts:
        built = built.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    return _Pair(built.sign(authority.key, hashes.SHA256()), key)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lasts: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    built = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    built = built.serial_number(x509.random_serial_number())
    built = built.not_valid_before(now - _CLOCKS_APART).not_valid_after(now + lasts)
    return built.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(text: str) -> x509.GeneralName:
    """A DNS name or an address. Raises ConfigError."""
    try:
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        pass
    if not _DNS_NAME.fullmatch(text) or len(text) > _MOST_DNS_CHARS:
        raise ConfigError(f"{text!r} is not a host: write a DNS name or an IP address, without port")
    return x509.DNSName(text.lower())


def _read_pair(certificate: Path, key: Path) -> _Pair:
    """Raises ConfigError: these are not the files of a CA."""
    try:
        read = x509.load_pem_x509_certificate(certificate.read_bytes())
        private = serialization.load_pem_private_key(key.read_bytes(), None)
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(
            f"{certificate} and {key} cannot be read as a CA ({error}): restore them, or choose another folder"
        ) from error
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != read.public_key():
        raise ConfigError(f"{key} is not the key of {certificate}: restore it, or choose another folder")
    return _Pair(read, private)


def _written(folder: Path, files: Sequence[tuple[str, bytes]]) -> list[Path]:
    """All of them or none. Raises ConfigError: they cannot be written."""
    written: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, data in files:
            mode = 0o600 if name.endswith("-key.pem") else 0o644
            fd = os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
            written.append(folder / name)
            with open(fd, "wb") as file:
                file.write(data)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise ConfigError(f"the certificates cannot be written to {folder}: {error.strerror}") from error
    return written
