"""Certificates of `natslog tls init`, and contexts of a broker: which files are used, and when they are replaced."""

from __future__ import annotations

import datetime
import errno
import logging
import os
import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from natslog.config import load_config
from natslog.errors import ConfigError
from natslog.security import certificates
from natslog.security.certificates import make_certificates
from natslog.security.tls import BrokerTls, TlsFiles

_HOSTS = ["localhost", "127.0.0.1", "::1"]


def _made(folder: Path, clients: tuple[str, ...] = ("client",), days: int = 30) -> TlsFiles:
    make_certificates(folder, _HOSTS, clients, days)
    return _files(folder)


def _files(folder: Path, name: str = "broker") -> TlsFiles:
    return TlsFiles(str(folder / f"{name}.pem"), str(folder / f"{name}-key.pem"), str(folder / "ca.pem"))


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> dict[str, object]:
    """What the client sees of the server's certificate. Raises ssl.SSLError, as the client gets it."""
    one, other = socket.socketpair()

    def accept() -> None:
        try:
            with server.wrap_socket(one, server_side=True) as wrapped:
                wrapped.sendall(b"x")
        except OSError:
            one.close()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        with client.wrap_socket(other, server_hostname=host) as wrapped:
            wrapped.recv(1)  # with TLS 1.3 the server refuses after the client's handshake
            return dict(wrapped.getpeercert() or {})
    finally:
        other.close()
        thread.join(10)


def _client(folder: Path, name: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if name is not None:
        context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}-key.pem")
    return context


def test_files_are_private_and_what_they_say(tmp_path: Path) -> None:
    os.umask(0o022)
    folder = tmp_path / "tls"
    written = make_certificates(folder, ["log1.example.com", "10.0.0.5"], ["ada", "job-7"], 30).written
    names = {"ca", "broker", "ada", "job-7"}
    assert {path.name for path in written} == {f"{name}{rest}" for name in names for rest in (".pem", "-key.pem")}
    modes = {path.name: path.stat().st_mode & 0o777 for path in written}
    assert all(mode == (0o600 if name.endswith("-key.pem") else 0o644) for name, mode in modes.items())
    assert folder.stat().st_mode & 0o777 == 0o700
    broker = x509.load_pem_x509_certificate((folder / "broker.pem").read_bytes())
    found = broker.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"localhost", "log1.example.com"} <= set(found.get_values_for_type(x509.DNSName))
    assert list(map(str, found.get_values_for_type(x509.IPAddress))) == ["127.0.0.1", "::1", "10.0.0.5"]
    assert (broker.not_valid_after_utc - broker.not_valid_before_utc).days == 30


def test_existing_certificates_stay_and_the_ca_signs_new_ones(tmp_path: Path) -> None:
    _made(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for hosts, clients, said in ((["log9"], ["other"], "broker"), (None, ["client"], "client")):
        with pytest.raises(ConfigError, match=rf"{said}\.pem exists already"):
            make_certificates(tmp_path, hosts, clients, 30)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    made = make_certificates(tmp_path, None, ["other"], 30)
    assert {path.name for path in made.written} == {"other.pem", "other-key.pem"}
    assert {path.name for path in made.kept} == {"ca.pem", "broker.pem"}
    assert before.items() <= {path.name: path.read_bytes() for path in tmp_path.iterdir()}.items()
    tls = BrokerTls(_files(tmp_path), requires_clients=True)
    assert _handshake(tls.accepting, _client(tmp_path, "client"))
    assert _handshake(tls.accepting, _client(tmp_path, "other"))


@pytest.mark.parametrize(
    "name",
    ["ca", "broker", "broker-key", "ca-key", "../up", "a/b", "a b", "", ".hidden", "-x", "x" * 65, "naïve", "a\nb"],
)
def test_names_of_certificates_that_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        make_certificates(tmp_path / "tls", _HOSTS, [name], 30)
    assert not (tmp_path / "tls").exists()


def test_half_a_folder_is_refused_and_nothing_is_written_where_something_fails(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="named twice"):
        make_certificates(tmp_path / "tls", _HOSTS, ["a", "a"], 30)
    assert not (tmp_path / "tls").exists()
    (tmp_path / "tls").mkdir()
    (tmp_path / "tls" / "ca-key.pem").touch()
    with pytest.raises(ConfigError, match="only one of"):
        make_certificates(tmp_path / "tls", _HOSTS, ["a"], 30)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        make_certificates(tmp_path / "file", _HOSTS, ["a"], 30)


def test_disk_that_is_full_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    real = os.open

    def failing(path: str, flags: int, mode: int = 0o777) -> int:
        opened.append(path)
        if len(opened) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, flags, mode)

    monkeypatch.setattr(certificates.os, "open", failing)
    with pytest.raises(ConfigError, match="No space left"):
        make_certificates(tmp_path / "tls", _HOSTS, ["a"], 30)
    assert not list((tmp_path / "tls").iterdir())
    monkeypatch.undo()
    assert make_certificates(tmp_path / "tls", _HOSTS, ["a"], 30).written


def test_name_of_this_machine_that_no_certificate_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "a b")
    assert make_certificates(tmp_path, ["build_host_1"], [], 30).written


@pytest.mark.parametrize("host", ["a b", "a..b", "x" * 300, "host:9292", "https://x", "", "a/b", "ü.de"])
def test_hosts_that_are_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="is not a host"):
        make_certificates(tmp_path / "tls", [host], [], 30)
    assert not (tmp_path / "tls").exists()


def test_a_ca_with_another_key_is_refused(tmp_path: Path) -> None:
    _made(tmp_path / "one")
    _made(tmp_path / "two")
    (tmp_path / "one" / "ca-key.pem").write_bytes((tmp_path / "two" / "ca-key.pem").read_bytes())
    for name in ("broker.pem", "broker-key.pem"):
        (tmp_path / "one" / name).unlink()
    with pytest.raises(ConfigError, match="is not the key of"):
        make_certificates(tmp_path / "one", None, ["more"], 30)
    assert not (tmp_path / "one" / "more.pem").exists()


def test_clients_are_verified_where_there_is_a_ca(tmp_path: Path) -> None:
    files = _made(tmp_path / "ours")
    _made(tmp_path / "theirs")
    strange = _client(tmp_path / "ours")
    strange.load_cert_chain(tmp_path / "theirs" / "client.pem", tmp_path / "theirs" / "client-key.pem")
    optional, required = BrokerTls(files), BrokerTls(files, requires_clients=True)
    assert _handshake(optional.accepting, _client(tmp_path / "ours"))
    assert _handshake(required.accepting, _client(tmp_path / "ours", "client"))
    for tls, client in ((optional, strange), (required, strange), (required, _client(tmp_path / "ours"))):
        with pytest.raises(OSError):
            _handshake(tls.accepting, client)


def test_old_versions_and_other_hosts_are_refused(tmp_path: Path) -> None:
    tls = BrokerTls(_made(tmp_path))
    old = _client(tmp_path)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(OSError):
        _handshake(tls.accepting, old)
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(tls.accepting, _client(tmp_path), host="log9.example.com")
    with pytest.raises(ssl.SSLCertVerificationError):  # by another broker, too
        _handshake(tls.accepting, tls.dialling, host="log9.example.com")
    assert tls.dialling.minimum_version == ssl.TLSVersion.TLSv1_2


def _replace(folder: Path, other: Path, *names: str) -> None:
    for name in names:
        fresh = folder / f"{name}.new"
        fresh.write_bytes((other / name).read_bytes())
        fresh.chmod(0o600)
        fresh.rename(folder / name)


def test_replaced_files_are_used_and_half_a_pair_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = _made(tmp_path / "now")
    _made(tmp_path / "next")
    tls = BrokerTls(files)
    assert not tls.refresh()
    first = _handshake(tls.accepting, _client(tmp_path / "now"))["serialNumber"]
    _replace(tmp_path / "now", tmp_path / "next", "broker.pem")
    caplog.set_level(logging.INFO, "natslog.tls")
    assert not tls.refresh()
    assert not tls.refresh()
    assert [record.levelname for record in caplog.records] == ["ERROR"], "once for each change"
    assert _handshake(tls.accepting, _client(tmp_path / "now"))["serialNumber"] == first
    _replace(tmp_path / "now", tmp_path / "next", "broker-key.pem", "ca.pem")
    assert tls.refresh()
    assert _handshake(tls.accepting, _client(tmp_path / "next"))["serialNumber"] != first
    assert _handshake(tls.accepting, _client(tmp_path / "next", "client")), "of the new CA"
    (tmp_path / "now" / "broker.pem").unlink()
    assert not tls.refresh()
    assert _handshake(tls.accepting, _client(tmp_path / "next"))
    (tmp_path / "now" / "broker.pem").write_bytes(b"-----BEGIN TRUSTED CERTIFICATE-----")
    assert not tls.refresh()
    _replace(tmp_path / "now", tmp_path / "next", "broker.pem")
    assert tls.refresh()


def test_authority_that_was_removed_is_not_trusted_any_more(tmp_path: Path) -> None:
    files = _made(tmp_path / "ours")
    theirs = _made(tmp_path / "theirs")
    both = (tmp_path / "ours" / "ca.pem").read_bytes() + (tmp_path / "theirs" / "ca.pem").read_bytes()
    only_ours = tmp_path / "only.pem"
    (tmp_path / "ours" / "ca.pem").rename(only_ours)
    (tmp_path / "ours" / "ca.pem").write_bytes(both)
    tls, other = BrokerTls(files, requires_clients=True), BrokerTls(TlsFiles(theirs.certificate, theirs.key))
    client = _client(tmp_path / "ours")
    client.load_cert_chain(tmp_path / "theirs" / "client.pem", tmp_path / "theirs" / "client-key.pem")
    assert _handshake(tls.accepting, client)
    assert _handshake(other.accepting, tls.dialling)
    (tmp_path / "ours" / "ca.pem").write_bytes(only_ours.read_bytes())
    assert tls.refresh()
    with pytest.raises(OSError):
        _handshake(tls.accepting, client)
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(other.accepting, tls.dialling)


def _signed_for(folder: Path, name: str, hosts: list[str], days: float, *, serves: bool = True) -> None:
    """Another certificate of the CA in the folder."""
    authority = certificates._read_pair(folder / "ca.pem", folder / "ca-key.pem")
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if serves else [])]
    lasts = datetime.timedelta(days=days)
    pair = certificates._signed(authority, name, uses, lasts, [certificates._host(host) for host in hosts])
    certificates._written(folder, [(f"{name}{rest}", data) for rest, data in pair.pem()])


@pytest.mark.parametrize(
    ("hosts", "days", "is_for_both", "said"),
    [
        (["log9.example.com"], 30, True, "Hostname mismatch"),
        (["log1.example.com"], -0.01, True, "certificate has expired"),
        (["log1.example.com"], 30, False, "unsuitable certificate purpose|unsupported certificate purpose"),
    ],
)
def test_certificate_that_other_brokers_would_refuse(
    tmp_path: Path, hosts: list[str], days: float, is_for_both: bool, said: str
) -> None:
    _made(tmp_path)
    _signed_for(tmp_path, "good", ["log1.example.com"], 30)
    _signed_for(tmp_path, "bad", hosts, days, serves=is_for_both)
    with pytest.raises(ConfigError, match=said):
        BrokerTls(_files(tmp_path, "bad"), hosts=["log1.example.com"])
    tls = BrokerTls(_files(tmp_path, "good"), hosts=["log1.example.com"])
    client = _client(tmp_path)
    before = _handshake(tls.accepting, client, "log1.example.com")["serialNumber"]
    for rest in (".pem", "-key.pem"):
        (tmp_path / f"good{rest}").write_bytes((tmp_path / f"bad{rest}").read_bytes())
    assert not tls.refresh(), "a renewal is not worse than the certificate that is in use"
    assert _handshake(tls.accepting, client, "log1.example.com")["serialNumber"] == before


def test_certificates_about_to_expire_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    BrokerTls(_made(tmp_path / "long", days=30))
    assert not caplog.records
    files = _made(tmp_path / "short", days=3)
    BrokerTls(files)
    _signed_for(tmp_path / "short", "old", ["localhost"], -0.01)
    old = _files(tmp_path / "short", "old")
    BrokerTls(TlsFiles(old.certificate, old.key))
    soon, expired = caplog.records
    assert "expires in 3.0 days" in soon.getMessage()
    assert expired.levelname == "ERROR"
    assert "has expired" in expired.getMessage()


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    files = _made(tmp_path)
    key = Path(files.key)
    key.chmod(0o604)
    with pytest.raises(ConfigError, match=f"chmod 600 {key}"):
        BrokerTls(files)
    key.chmod(0o640)
    BrokerTls(files)
    pair = serialization.load_pem_private_key(key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"passphrase")
    key.write_bytes(pair.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
    with pytest.raises(ConfigError, match="must have no passphrase"):
        BrokerTls(files)
    key.write_bytes(b"no key")
    with pytest.raises(ConfigError, match="both must be PEM files of one pair"):
        BrokerTls(files)
    with pytest.raises(ConfigError, match="cannot read the TLS file"):
        BrokerTls(TlsFiles(files.certificate, str(tmp_path / "none.pem")))
    empty = tmp_path / "empty.pem"
    empty.touch()
    with pytest.raises(ConfigError, match="has no CA certificates"):
        BrokerTls(TlsFiles(str(tmp_path / "client.pem"), str(tmp_path / "client-key.pem"), str(empty)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tls_cert_file": "a"}, "belong together"),
        ({"tls_key_file": "a"}, "belong together"),
        ({"tls_ca_file": "a"}, "needs tls_cert_file"),
        ({"tls_cert_file": "a", "tls_key_file": "b", "tls_client_certs": "required"}, "needs tls_ca_file"),
        ({"tls_client_certs": "maybe"}, "optional or required"),
        ({"tls_cert_file": "a", "tls_key_file": "b", "advertise_url": "http://log1:9292"}, "must begin with https"),
        ({"tls_cert_file": "a", "tls_key_file": "b", "peer_urls": "http://log1:9292"}, "must begin with https"),
        ({"tls_cert_file": "a", "tls_key_file": "b", "advertise_url": "HTTP://log1:9292"}, "must begin with https"),
        ({"tls_cert_file": "a", "tls_key_file": "b", "seeds": "http://log1:9292"}, "must begin with https"),
    ],
)
def test_settings_that_do_not_fit_together(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, settings, {})


def test_url_of_a_broker_with_tls() -> None:
    config = load_config(None, {"tls_cert_file": "a", "tls_key_file": "b", "http_port": 9300}, {})
    assert config.url == "https://127.0.0.1:9300"
