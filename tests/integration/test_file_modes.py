"""Files that natslog writes: only their owner can read them, whatever the umask is; and a data folder that leads to
other places is refused, as is one that everyone may write to.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from natslog.client import ClientOptions, NatslogClient
from natslog.client.appending import PartUploader
from natslog.errors import DataDirError
from natslog.nats_server import NatsServer
from natslog.node.data_dir import DataDir
from tests.harness import BrokerProcess, all_values, eventually, natslog, publish_acked, running, write_secret

UMASKS = (0, 0o022)
NOBODY = 65534
PUBLIC = {"ca.pem", "broker.pem", "client.pem"}  # certificates


def with_umask(umask: int) -> list[str]:
    return ["sh", "-c", f'umask {umask:o}; exec "$@"', "sh"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def open_to_others(folder: Path) -> list[tuple[str, str]]:
    """Files and folders, this one included, to which others than the owner have any access."""
    paths = [folder, *folder.rglob("*")]
    return [(str(path), f"{mode(path):o}") for path in paths if mode(path) & 0o077]


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(0, tmp_path_factory.mktemp("nats") / "nats.log").start()
    yield server
    server.stop()


def refused_start(broker: BrokerProcess) -> str:
    """What a broker prints that does not start, as one line. A broker that starts ends with the test."""
    try:
        assert broker.spawn().wait(60) == 1
        return broker.output().replace("\n", " ")
    finally:
        broker.kill()


def stage_a_part(client: NatslogClient, stream: str) -> None:
    """Without the commit."""
    uploader = PartUploader(client, stream, "modes", 0)
    uploader.add(pa.RecordBatch.from_pydict({"subject": ["orders.b"], "value": pa.array([b"staged"], pa.binary())}))
    uploader.finish()


# ---- modes ----


@pytest.mark.parametrize("umask", UMASKS, ids=oct)
@pytest.mark.long
def test_files_of_a_broker_with_security_are_private_under_any_umask(
    tmp_path: Path, nats: NatsServer, umask: int
) -> None:
    token_file, audit_file = tmp_path / "admin.token", tmp_path / "audit.log"
    broker = BrokerProcess(
        tmp_path / "data", nats.url, admin_token_file=token_file, audit_file=audit_file, segment_bytes=4096,
        cluster_secret_file=write_secret(tmp_path / "secret", "a secret of many characters"),
        retention_interval="100ms",
    )  # fmt: skip
    broker.environment, broker.prefix = {"NATSLOG_SECURITY": "true"}, with_umask(umask)
    try:
        broker.start()
        with NatslogClient(broker.url, ClientOptions(token_file=str(token_file))) as client:
            client.create_stream("orders", "orders.>", compression="zstd")
            publish_acked(nats.url, "orders.a", [b"x" * 1000] * 20)
            stage_a_part(client, "orders")
            eventually(lambda: list(broker.folder.rglob("*.arrow")), what="a segment is sealed")
        created = [*with_umask(umask), sys.executable, "-m", "natslog", "--server", broker.url]
        created += ["--token-file", str(token_file), "token", "create", "spark", "-o", str(tmp_path / "spark.token")]
        subprocess.run(created, check=True, capture_output=True, timeout=60)
    finally:
        broker.kill()
    assert list((tmp_path / "data" / "staged").iterdir())
    assert open_to_others(tmp_path / "data") == []
    assert {path.name: mode(path) for path in (token_file, audit_file, tmp_path / "spark.token")} == {
        "admin.token": 0o600,
        "audit.log": 0o600,
        "spark.token": 0o600,
    }


@pytest.mark.long
@pytest.mark.parametrize("umask", UMASKS, ids=oct)
def test_keys_of_tls_init_are_private_under_any_umask(tmp_path: Path, umask: int) -> None:
    command = [*with_umask(umask), sys.executable, "-m", "natslog", "tls", "init", str(tmp_path / "certs")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    public = {str(tmp_path / "certs" / name) for name in PUBLIC}
    assert [found for found in open_to_others(tmp_path / "certs") if found[0] not in public] == []
    assert all(mode(Path(path)) == 0o644 for path in public)


@pytest.mark.long
@pytest.mark.parametrize("umask", UMASKS, ids=oct)
def test_files_of_dev_and_of_a_recovery_are_private_under_any_umask(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "dev"
    dev = ["dev", "--brokers", "2", "--data-dir", str(folder), "--nats-port", "0", "--http-port", "0"]
    with open(tmp_path / "out", "wb") as out:
        process = subprocess.Popen([*with_umask(umask), sys.executable, "-m", "natslog", *dev], stdout=out, stderr=out)
    try:
        eventually(lambda: "ready\n" in (tmp_path / "out").read_text(), 120, "the brokers are ready")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    names = {path.name for path in folder.iterdir()}
    assert {"cluster-secret", "nats-server.log", "broker-1.log", "broker-1", "broker-2"} <= names
    assert open_to_others(folder) == []

    recover = ["cluster", "recover", "--yes", str(folder / "broker-1")]
    subprocess.run([*with_umask(umask), sys.executable, "-m", "natslog", *recover], check=True, timeout=60)
    assert any(path.name.startswith("raft.before-") for path in (folder / "broker-1").iterdir())
    assert open_to_others(folder) == []


@pytest.mark.long
def test_a_new_token_of_the_administrator_replaces_the_file_and_is_not_shown(tmp_path: Path, nats: NatsServer) -> None:
    token_file = tmp_path / "admin.token"
    broker = BrokerProcess(tmp_path / "data", nats.url, admin_token_file=token_file)
    broker.environment = {"NATSLOG_SECURITY": "true"}
    try:
        broker.start()
        first = token_file.read_text().strip()
        broker.terminate()
        token_file.chmod(0o644)
        broker.environment["NATSLOG_NEW_ADMIN_TOKEN"] = "true"
        broker.start()
        second = token_file.read_text().strip()
        assert (second[:4], second != first, mode(token_file)) == ("nlt_", True, 0o600)
        with NatslogClient(broker.url, ClientOptions(token_file=str(token_file))) as client:
            assert client.whoami()["identity"] == "admin"
        eventually(lambda: broker.output().count(f"token  of the administrator: in {token_file}") == 2)
        assert first not in broker.output()
        assert second not in broker.output()
    finally:
        broker.kill()


@pytest.mark.long
def test_a_token_of_the_administrator_that_cannot_be_written_is_not_created(tmp_path: Path, nats: NatsServer) -> None:
    token_file = tmp_path / "nowhere" / "admin.token"
    broker = BrokerProcess(tmp_path / "data", nats.url, admin_token_file=token_file)
    broker.environment = {"NATSLOG_SECURITY": "true"}
    try:
        assert "correct the path; no token was created" in refused_start(broker)
        token_file.parent.mkdir()
        broker.start()
        assert token_file.read_text().startswith("nlt_")
    finally:
        broker.kill()


# ---- files that others can read ----


@pytest.mark.long
@pytest.mark.parametrize("setting", ["tls_key_file", "cluster_secret_file"])
def test_a_broker_does_not_start_with_a_secret_that_everyone_can_read(
    tmp_path: Path, nats: NatsServer, setting: str
) -> None:
    natslog("tls", "init", str(tmp_path / "certs"))
    files = {
        "tls_cert_file": tmp_path / "certs" / "broker.pem",
        "tls_key_file": tmp_path / "certs" / "broker-key.pem",
        "cluster_secret_file": write_secret(tmp_path / "secret", "a secret of many characters"),
    }
    files[setting].chmod(0o604)
    assert f"chmod 600 {files[setting]}" in refused_start(BrokerProcess(tmp_path / "data", nats.url, **files))


# ---- a user without rights ----


def as_nobody() -> list[str]:
    """A prefix. If that user cannot reach this interpreter, it may also read all files; it may write none of them."""
    base = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    if subprocess.run([*base, sys.executable, "-c", ""], check=False, capture_output=True).returncode:
        base += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return base


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@pytest.mark.long
def test_a_broker_runs_as_a_user_without_rights(nats: NatsServer) -> None:
    folder = Path(tempfile.mkdtemp(prefix="natslog-nobody-"))
    try:
        os.chown(folder, NOBODY, NOBODY)
        broker = BrokerProcess(folder / "data", nats.url)
        broker.prefix, broker.environment = as_nobody(), {"HOME": str(folder)}
        try:
            broker.start()
            assert {Path(f"/proc/{broker.pid}").stat().st_uid} == {NOBODY}
            with broker.client() as client:
                client.create_stream("nobody", "nobody.>")
                publish_acked(nats.url, "nobody.a", [b"1", b"2"])
                assert all_values(client, "nobody") == [b"1", b"2"]
            assert broker.terminate() < 10
        finally:
            broker.kill()
        assert {path.lstat().st_uid for path in (folder / "data").rglob("*")} == {NOBODY}
        assert open_to_others(folder / "data") == []

        os.chown(folder, 0, 0)
        elsewhere = BrokerProcess(folder / "other", nats.url)
        elsewhere.prefix, elsewhere.environment = broker.prefix, broker.environment
        assert "Give this user the right to" in refused_start(elsewhere)
    finally:
        shutil.rmtree(folder)


# ---- links to other places ----


def test_a_data_folder_may_be_a_link(tmp_path: Path, nats: NatsServer) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    with running(tmp_path) as (server, broker), broker.client() as client:
        client.create_stream("orders", "orders.>")
        publish_acked(server.url, "orders.a", [b"1"])
    assert list((tmp_path / "disk").rglob("*.active"))


def _replace_by_link(inside: Path, outside: Path) -> None:
    shutil.move(inside, outside)
    inside.symlink_to(outside)


def _add_link(inside: Path, outside: Path) -> None:
    outside.write_bytes(b"not of natslog")
    inside.symlink_to(outside)


def _add_pipe(inside: Path, outside: Path) -> None:
    os.mkfifo(inside)


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("streams/*", _replace_by_link),
        ("streams/*/*.active", _replace_by_link),
        ("raft", _replace_by_link),
        ("streams", _replace_by_link),
        ("staged/0.part", _add_link),
        ("broker.new", _add_link),
        ("streams/orders." + "0" * 32, _add_link),
        ("raft/pipe", _add_pipe),
    ],
)
@pytest.mark.long
def test_a_data_folder_that_leads_to_another_place_is_refused_and_nothing_is_written_there(
    filled: Path, tmp_path: Path, where: str, how: Callable[[Path, Path], None]
) -> None:
    data, outside = tmp_path / "data", tmp_path / "elsewhere"
    shutil.copytree(filled, data)
    inside = next(iter(data.glob(where)), data / where)
    how(inside, outside)
    before = contents(outside)
    with pytest.raises(DataDirError, match="files and folders only: move what it refers to") as refused:
        DataDir(data, 1)
    assert refused.value.facts["file"] == str(inside)
    assert contents(outside) == before


def contents(path: Path) -> dict[str, bytes]:
    return {str(one): one.read_bytes() for one in [path, *path.rglob("*")] if one.is_file()}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of a broker that has stopped."""
    folder = tmp_path_factory.mktemp("filled")
    with running(folder) as (server, broker):
        with broker.client() as client:
            client.create_stream("orders", "orders.>")
            publish_acked(server.url, "orders.a", [b"1"])
            stage_a_part(client, "orders")
        broker.terminate()
    return broker.folder


@pytest.mark.long
def test_a_broker_reports_the_link_in_one_sentence(filled: Path, tmp_path: Path, nats: NatsServer) -> None:
    shutil.copytree(filled, tmp_path / "data")
    _replace_by_link(tmp_path / "data" / "raft", tmp_path / "elsewhere")
    said = refused_start(BrokerProcess(tmp_path / "data", nats.url))
    assert f"{tmp_path / 'data' / 'raft'} is a symbolic link" in said
    assert "Traceback" not in said


def test_a_data_folder_that_everyone_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(DataDirError, match=f"chmod 700 {tmp_path}"):
        DataDir(tmp_path, 1)
    DataDir(tmp_path / "inside", 1).release()
    tmp_path.chmod(0o750)
    DataDir(tmp_path, 1).release()


def test_deleting_a_stream_does_not_follow_links(tmp_path: Path) -> None:
    """Which its own user made while the broker ran."""
    folder = DataDir(tmp_path / "data", 1)
    try:
        inside = folder.stream_folder("0" * 32, "orders")
        inside.mkdir()
        (tmp_path / "kept").mkdir()
        (tmp_path / "kept" / "file").write_text("not of natslog")
        (inside / "link").symlink_to(tmp_path / "kept")
        folder.remove_stream("0" * 32)
        assert not inside.exists()
        assert (tmp_path / "kept" / "file").exists()
    finally:
        folder.release()
