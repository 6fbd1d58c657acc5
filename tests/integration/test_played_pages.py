"""Pages as their reader uses them: their commands and programs, and what they print.

The machines of these tests have a network of their own, so that every address is as printed: the names of hosts lead to
them, and all ports are free.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from natslog.client import NatslogClient
from natslog.nats_server import find_binary
from tests.harness import BrokerProcess, eventually, publish_acked, write_secret
from tests.newcomer import Terminal, left_running, own_network
from tests.pages import page_blocks, plays, runs
from tests.readme import ROOT, Block, Command

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

STOPPED = 130
"""The exit code of a command after ^C."""
NAMES = ("log1", "broker-1", "log1.example.com", "nats")


@plays("TABLES.md", "READERS.md")
def test_commands_of_a_page_print_what_it_states(
    broker: BrokerProcess, nats_url: str, tmp_path: Path, played: list[Block]
) -> None:
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    with Terminal(tmp_path, [], {"NATSLOG_SERVER": broker.url, "NATS_URL": nats_url}) as terminal:
        for block in played:
            if block.file_name is not None:
                (tmp_path / block.file_name).write_text(block.text)
            else:
                for command in block.commands:
                    if "pip install" not in command.text:
                        terminal.play(command)
    assert len(played) > 5


# ---- programs, in this process ----


class EnoughError(Exception):
    """Ends a program that would go on."""


def received_by(block: Block, name: str, **names: Any) -> list[Any]:
    """Runs a program until it calls `name` for the first time: with these arguments."""
    found: list[Any] = []

    def receive(*arguments: Any) -> None:
        found.extend(arguments)
        raise EnoughError

    with pytest.raises(EnoughError):
        exec(compile(block.text, block.heading, "exec"), {"__name__": "__main__", name: receive, **names})
    return found


@pytest.fixture
def orders(client: NatslogClient, nats_url: str) -> Iterator[NatslogClient]:
    client.create_stream("orders", "orders.>")
    publish_acked(nats_url, "orders.eu", [b'{"id": 1}', b'{"id": 2}'])
    yield client
    client.delete_stream("orders")


@runs("OPERATIONS.md", block="Consume with Python")
def test_consumer_of_operations(orders: NatslogClient, block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natslog.client.NatslogClient", lambda url: orders)
    (batch,) = received_by(block, "bill")
    assert batch["value"].to_pylist() == [b'{"id": 1}', b'{"id": 2}']
    assert orders.cursor("billing", "orders")["offset"] == 0, "the batch in hand is not counted"


@runs("API.md", block="natslog.client.NatslogClient.consume")
def test_consumer_of_the_docstring(orders: NatslogClient, block: Block) -> None:
    (batch,) = received_by(block, "bill", client=orders)
    assert batch["value"].to_pylist() == [b'{"id": 1}', b'{"id": 2}']


@runs("README.md", block="Read (2)")
def test_consumer_of_readme(orders: NatslogClient, block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natslog.client.NatslogClient", lambda url: orders)
    assert received_by(block, "print") == [2, "messages from offset", 0]


# ---- machines of their own ----


@dataclass
class Machine:
    """`folder`: where commands are run. `prefix`: what they begin with to run there. `running`: servers."""

    folder: Path
    prefix: list[str]
    variables: dict[str, str]
    running: list[str] = field(default_factory=list)

    def terminal(self) -> Terminal:
        return Terminal(self.folder, self.prefix, self.variables)

    @contextmanager
    def left_running(self, line: str, *output: str, exit_code: int = 0) -> Iterator[Path]:
        """From when the command has printed these lines until ^C; the file that has its output."""
        with left_running(Command(line, [*output]), self.folder, self.prefix, self.variables, exit_code) as log:
            self.running.append(line)
            yield log

    def prints(self, line: str, *parts: str) -> str:
        """What a command prints, which must succeed and print these texts among others."""
        with self.terminal() as terminal:
            code, output = terminal.run(line)
        assert code == 0, f"$ {line}\n{output}"
        assert all(part in output for part in parts), f"$ {line}\n{output}"
        return output

    def program(self, block: Block) -> list[str]:
        """The lines that a program prints."""
        (self.folder / "program.py").write_text(block.text)
        return self.prints("python program.py").strip().splitlines()


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """With the programs of natslog in PATH."""
    (folder / "home").mkdir(parents=True)
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {' '.join(NAMES)}\n")
    path = f"{Path(sys.executable).parent}:{Path(find_binary()).parent}:{os.environ['PATH']}"
    variables = {
        "HOME": str(folder / "home"),
        "PATH": path,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),  # compiled kernels
    }
    with own_network(hosts=hosts) as prefix:
        yield Machine(folder / "home", prefix, variables)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """The two servers of JETSTREAM.md run on it."""
    nats, broker = page_blocks("JETSTREAM.md")["JetStream API"].shell_lines
    with machine(tmp_path_factory.mktemp("served")) as found:
        (found.folder / "nats.conf").write_text(page_blocks("OPERATIONS.md")["Leafnode connection"].text)
        with found.left_running(nats, "…", "…Server is ready", "…"), found.left_running(broker, "…", "ready"):
            connected = "leafnode connection to NATS: up"
            eventually(lambda: connected in found.prints("natslog --server http://log1:9292 cluster status"))
            yield found


@runs("JETSTREAM.md", servers="JetStream API", program="JetStream API (3)")
@runs("OPERATIONS.md", leafnodes="Leafnode connection")
def test_jetstream_clients(served: Machine, servers: Block, program: Block, leafnodes: Block) -> None:
    assert served.running[:2] == servers.shell_lines
    assert (served.folder / "nats.conf").read_text() == leafnodes.text
    expected = ["on disk, sequence 1", """events.login b'{"user": 1}'""", "b'100'"]
    assert served.program(program) == expected


@runs("README.md", program="Read (3)")
def test_jetstream_client_of_readme(served: Machine, program: Block) -> None:
    assert served.program(program) == ["jobs.resize b'photo.png'"]


@runs("README.md", publish="Publish", read="Read")
def test_a_file_is_published_and_read(served: Machine, publish: Block, read: Block) -> None:
    (served.folder / "quakes.csv").write_text("EventID,Source,Magnitude\nq1,us,5.5\nq2,nc,2.1\n")
    create, line = publish.shell_lines
    served.prints(create)
    served.prints(line, "sent 2, acked 2")
    follow, download = read.shell_lines
    with served.left_running(follow, "…", exit_code=STOPPED) as log:
        eventually(lambda: served.prints(line) and "quake.nc" in log.read_text(), what="what is new is printed")
    served.prints(download)
    with pyarrow.ipc.open_stream(served.folder / "quakes.arrows") as reader:
        subjects = reader.read_all()["subject"].to_pylist()
    assert subjects == ["quake.us", "quake.nc"] * (len(subjects) // 2)


@runs("OPERATIONS.md", doctor="Diagnosis (2)", bundle="Diagnosis (3)")
def test_diagnosis(served: Machine, doctor: Block, bundle: Block) -> None:
    (diagnosed,), (bundled,) = doctor.commands, bundle.commands
    with served.terminal() as terminal:
        code, output = terminal.run(diagnosed.text)
        assert code == 1
        assert diagnosed.is_answered_by(output), output
        (served.folder / "dev.log").write_text("")
        terminal.play(bundled)
    (archive,) = served.folder.glob("natslog-support-*.tar.gz")
    with tarfile.open(archive) as tar:
        assert "natslog-support/doctor.json" in tar.getnames()


@runs("README.md", access="Access control")
@runs("SECURITY.md", profile="Set up (2)", tokens="Set up (3)", program="Set up (4)")
def test_access_control(tmp_path: Path, access: Block, profile: Block, tokens: Block, program: Block) -> None:
    certificates, server, *commands = access.shell_lines
    with machine(tmp_path) as found, found.left_running("nats-server", "…", "…Server is ready"):
        found.prints(certificates)
        with found.left_running(server, "…", "ready", "…") as log:
            (token,) = re.findall(r"nlt_[\w-]+", log.read_text())
            configuration = found.folder / ".config" / "natslog"
            configuration.mkdir(parents=True)
            write_secret(configuration / "admin.token", token)
            (configuration / "config.toml").write_text(profile.text)
            for folder in (configuration, found.folder):
                shutil.copy(found.folder / "certs" / "ca.pem", folder)
            found.prints("natslog stream create orders --subject 'orders.>'")
            answers = [found.prints(line) for line in (*commands, *tokens.shell_lines)]
            assert all("orders.eu.>" in answer for answer in answers[2::3]), "the rule that decides"
            shown = replace(program, lines=(*program.lines, 'print(client.whoami()["identity"])'))
            assert found.program(shown) == ["spark-orders"]
