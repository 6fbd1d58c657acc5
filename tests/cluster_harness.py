"""A cluster of real processes: brokers, a NATS server; on request a disk and a network namespace for each broker."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import urllib3

from natslog.client import ClientOptions, NatslogClient
from natslog.nats_server import NatsServer, free_port
from tests.chaos.network import CLIENTS, NATS, Network, address
from tests.clocks import WallClock
from tests.disks import Disk, GrowingDisk
from tests.harness import BrokerProcess, eventually, write_secret

HTTP_PORT = 9292
_ASK_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Args: `disks`: a file system of its own for each broker, of `disk_bytes`: ext4, or one that can be enlarged
    (`disks_grow`). `network`: a host of its own for each.

    `has_leafnodes`: the brokers have a leafnode connection. `clocks`: brokers whose wall clock can be set; not all, as
    what does it makes their starts several times as slow at times. `settings`: flags for all brokers.

    `streams_disks`: brokers whose folder `streams` is on a disk of its own. `is_secured`: requests need a token, which
    brokers of the harness and their clients have.
    """

    brokers: int = 3
    disks: bool = False
    disk_bytes: int = 256 * 1024 * 1024
    disks_grow: bool = False
    network: bool = False
    has_leafnodes: bool = False
    clocks: tuple[int, ...] = ()
    streams_disks: tuple[int, ...] = ()
    is_secured: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


class ClusterBroker(BrokerProcess):
    """One of several: it has a number, perhaps a host and a disk of its own, and may be paused."""

    def __init__(self, number: int, folder: Path, nats_url: str, host: str, port: int, **settings: Any) -> None:
        super().__init__(folder, nats_url, broker_id=number, http_host=host, **settings)
        self.number = number
        self.environment = {"NATSLOG_INSECURE": "true"}  # networks of the tests have no other users
        self.http_port, self.url = port, f"http://{host}:{port}"
        self.disk: Disk | None = None
        self.streams_disk: Disk | None = None
        self.token: str | None = None
        self.is_paused = False
        self.is_wanted = False  # it runs, as far as this harness knows
        self._pool = urllib3.PoolManager(maxsize=4, retries=False)

    def spawn(self) -> ClusterBroker:
        super().spawn()
        self.is_wanted, self.is_paused = True, False
        return self

    def kill(self) -> None:
        self.is_wanted = self.is_paused = False
        super().kill()

    def terminate(self, timeout_s: float = 60.0) -> float:
        self.is_wanted = False
        return super().terminate(timeout_s)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.is_paused = True

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.is_paused = False

    @property
    def exit_code(self) -> int | None:
        """None while it runs, or if it was not started."""
        return None if self._process is None else self._process.poll()

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None and not self.is_paused

    def client(self, **options: Any) -> NatslogClient:
        """By default a patient one."""
        settings = options or {"retries": 3, "patience_s": 10}
        return NatslogClient(self.url, ClientOptions(token=self.token, **settings))

    @property
    def disks(self) -> list[Disk]:
        """The outer one first."""
        return [disk for disk in (self.disk, self.streams_disk) if disk is not None]

    def clear_folder(self) -> None:
        """As if it were new. What is mounted there stays so."""
        _clear(self.folder)

    def ask(
        self, method: str, path: str, body: Any = None, timeout_s: float = _ASK_WITHIN_S
    ) -> urllib3.BaseHTTPResponse | None:
        """This broker's own answer, redirects not followed; None where there is none."""
        try:
            return self._pool.request(
                method,
                self.url + path,
                body=None if body is None else json.dumps(body).encode(),
                headers={"Content-Type": "application/json"} | self.credentials,
                timeout=timeout_s,
                redirect=False,
            )
        except (urllib3.exceptions.HTTPError, OSError):
            return None

    @property
    def credentials(self) -> dict[str, str]:
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    def json(self, path: str, timeout_s: float = _ASK_WITHIN_S) -> Any:
        """What a GET answers with, where it answers with 200."""
        answer = self.ask("GET", path, timeout_s=timeout_s)
        return json.loads(answer.data) if answer is not None and answer.status == 200 else None

    def high_watermark(self, stream: str) -> int | None:
        """As far as this replica knows that the stream is committed; None where it does not answer, or has no log."""
        answer = self.ask("GET", "/metrics")
        if answer is None or answer.status != 200:
            return None
        name = f'natslog_stream_high_watermark{{stream="{stream}"}} '
        found = [line for line in answer.data.decode().splitlines() if line.startswith(name)]
        return int(float(found[0].removeprefix(name))) if found else None


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_mount():
            _clear(path)
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


class Cluster:
    """Brokers 1 to n. `start` it, and `close` it in the end; `running_cluster` does both."""

    def __init__(self, folder: Path, options: ClusterOptions = ClusterOptions()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.options = folder, options
        self.network = Network(options.brokers) if options.network else None
        self.brokers: list[ClusterBroker] = []
        self.clocks: dict[int, WallClock] = {}
        self.leaf_url = ""
        arguments = () if self.network is None else ("--addr", "0.0.0.0")
        if options.has_leafnodes:
            arguments += self._leafnodes()
        self.nats = NatsServer(0, folder / "nats.log", arguments=arguments, ends_with_parent=True)
        self.nats_url = self.nats.url if self.network is None else f"nats://{address(NATS)}:{self.nats.port}"
        self._inside = None if self.network is None else self.network.entered()
        try:
            if self._inside is not None:
                self._inside.__enter__()
            self._make_brokers()
        except BaseException:
            self.close()
            raise

    def _leafnodes(self) -> tuple[str, ...]:
        """Arguments of a NATS server that accepts them on any address."""
        port, path = free_port(), self.folder / "leafnodes.conf"
        path.write_text(f"leafnodes {{ host: 0.0.0.0, port: {port} }}\n")
        self.leaf_url = f"nats-leaf://{'127.0.0.1' if self.network is None else address(NATS)}:{port}"
        return "--config", str(path)

    def _make_brokers(self) -> None:
        numbers = range(1, self.options.brokers + 1)
        places = [("127.0.0.1", free_port()) if self.network is None else (address(n), HTTP_PORT) for n in numbers]
        secret = write_secret(self.folder / "secret", secrets.token_hex(32))
        common = {
            "seeds": ",".join(f"http://{host}:{port}" for host, port in places),
            "cluster_secret_file": secret,
            "log_level": "info",
        }
        if self.leaf_url:
            common["nats_leaf_url"] = self.leaf_url
        for number, (host, port) in zip(numbers, places, strict=True):
            folder, disk = self.folder / f"broker-{number}", None
            if self.options.disks:
                kind = GrowingDisk if self.options.disks_grow else Disk
                disk = kind(self.folder, self.options.disk_bytes, f"disk-{number}")
                folder = disk.mounted / "data"
            broker = ClusterBroker(number, folder, self.nats_url, host, port, **(common | self.options.settings))
            broker.log_path, broker.disk = self.folder / f"broker-{number}.log", disk
            if number in self.options.streams_disks:
                at = folder / "streams"
                broker.streams_disk = Disk(self.folder, self.options.disk_bytes, f"disk-{number}-streams", at)
            if self.options.is_secured:
                broker.environment["NATSLOG_SECURITY"] = "true"
            if self.network is not None:
                broker.prefix = self.network.prefix(number)
            if number in self.options.clocks:
                self.clocks[number] = WallClock(self.folder / f"clock-{number}")
                broker.environment |= self.clocks[number].environment
            self.brokers.append(broker)

    # ---- clocks ----

    def set_clock(self, number: int, ahead_s: int) -> None:
        """Its wall clock jumps within a second; the monotonic one goes on."""
        self.clocks[number].set(ahead_s)

    # ---- life ----

    def start(self) -> Cluster:
        self.nats.start()
        for broker in self.brokers:
            broker.spawn()
        self.wait_ready()
        if self.options.is_secured:
            for broker in self.brokers:
                broker.token = self._first_token()
        return self

    def _first_token(self) -> str:
        """As the broker printed it that was the first metadata leader."""

        def printed() -> list[str]:
            lines = [line for broker in self.brokers for line in broker.output().splitlines()]
            return [line for line in lines if line.startswith("nlt_")]

        return eventually(printed, what="the token of the administrator is printed")[0]

    def wait_ready(self, within_s: float = 60.0) -> None:
        for broker in self.brokers:
            eventually(lambda broker=broker: broker.ready() or broker._must_live(), within_s, f"{broker.url} is ready")

    def wait_alive(self, within_s: float = 60.0) -> None:
        """Every process answers; it may still wait for the others, or read its logs."""
        for broker in self.brokers:

            def is_alive(broker: ClusterBroker = broker) -> bool:
                return broker.ask("GET", "/healthz") is not None or broker._must_live()

            eventually(is_alive, within_s, f"{broker.url} is alive")

    def close(self) -> None:
        with ExitStack() as steps:  # each is taken, whatever becomes of the others; the last one first
            if self.network is not None:
                steps.callback(self.network.close)
            if self._inside is not None:
                steps.callback(self._inside.__exit__, None, None, None)
            for broker in self.brokers:
                for disk in broker.disks:
                    steps.callback(disk.close)
            steps.callback(self.nats.stop)
            for broker in self.brokers:
                steps.callback(broker.kill)
                if broker.disk is not None:
                    steps.callback(broker.disk.thaw)  # who waits for a disk cannot be killed
        self._inside = None

    def broker(self, number: int) -> ClusterBroker:
        return self.brokers[number - 1]

    def lose_power(self, brokers: Sequence[ClusterBroker]) -> None:
        """All at once; the disks are mounted again, the brokers are down."""
        for broker in brokers:
            broker.halt()
        for broker in brokers:
            assert broker.disks, "power loss needs disks"
            for disk in broker.disks:
                disk.cut_power()
        for broker in brokers:
            broker.kill()
        for broker in brokers:
            for disk in reversed(broker.disks):
                disk.unmount()
            for disk in broker.disks:
                disk.mount()

    # ---- what it says of itself ----

    @property
    def up(self) -> list[ClusterBroker]:
        return [broker for broker in self.brokers if broker.is_up]

    def state(self) -> dict[str, Any] | None:
        """`/v1/cluster` of the first broker that is sure to be up to date."""
        for broker in self.up:
            found = broker.json("/v1/cluster", timeout_s=4)
            if found is not None and found["is_current"]:
                return dict(found)
        return None

    def metadata_leader(self) -> ClusterBroker | None:
        state = self.state()
        return None if state is None or state["metadata_leader"] is None else self.broker(state["metadata_leader"])

    def stream(self, name: str) -> dict[str, Any] | None:
        """As its leader shows it, or else as anybody does."""
        shown = [found for broker in self.up if (found := broker.json(f"/v1/streams/{name}")) is not None]
        if shown or not self.up:
            return dict(max(shown, key=lambda one: one["leader_epoch"])) if shown else None
        try:
            options = ClientOptions(retries=0, timeout_s=4, token=self.brokers[0].token)
            with NatslogClient([broker.url for broker in self.up], options) as client:
                return client.stream(name)
        except Exception:  # of any kind: it is not known now
            return None

    def leader_of(self, name: str) -> ClusterBroker | None:
        found = self.stream(name)
        return None if found is None or found["leader"] is None else self.broker(found["leader"])

    def replicas_of(self, name: str) -> list[ClusterBroker]:
        """The brokers that keep the stream; none while it is not known."""
        found = self.stream(name)
        return [] if found is None else [self.broker(number) for number in sorted(found["replica_ids"])]

    def in_sync(self) -> bool:
        """All brokers are up and every stream's every replica is in its ISR."""
        if len(self.up) < len(self.brokers):
            return False
        state = self.state()
        if state is None or state["under_replicated"] or state["leaderless"]:
            return False
        brokers = state["brokers"]
        if len(brokers) < len(self.brokers):
            return False
        if not all(one["alive"] and one["role"] == "voter" and not one["draining"] for one in brokers):
            return False
        streams = self.up[0].json("/v1/streams", timeout_s=5)
        return streams is not None and all("high_watermark" in one for one in streams)  # else its leader does not serve

    def wait_in_sync(self, within_s: float = 40.0) -> float:
        """Returns the seconds it took."""
        started = time.monotonic()
        while not self.in_sync():
            assert time.monotonic() < started + within_s, f"not in sync within {within_s:.0f} s: {self.troubles()}"
            time.sleep(0.05)
        return time.monotonic() - started

    def wait_replicated(self, stream: str, within_s: float = 40.0) -> None:
        """Without publishers: returns when all are in sync and every replica has the same high watermark."""

        deadline = time.monotonic() + within_s
        while True:
            known = {broker.number: broker.high_watermark(stream) for broker in self.replicas_of(stream)}
            if known and self.in_sync() and None not in known.values() and len(set(known.values())) == 1:
                return
            assert time.monotonic() < deadline, (
                f"not replicated within {within_s:.0f} s: {self.troubles()}; high watermarks by broker: {known}"
            )
            time.sleep(0.05)

    def troubles(self) -> str:
        """What is not as it should be, in a line."""
        state = self.state()
        if state is None:
            return f"no broker knows the cluster; up are {[broker.number for broker in self.up]}"
        brokers = {one["id"]: (one["role"], one["alive"]) for one in state["brokers"]}
        streams = [one for broker in self.up[:1] for one in broker.json("/v1/streams", timeout_s=5) or []]
        short = [
            (
                *(one[name] for name in ("name", "leader", "leader_epoch", "isr", "replica_ids")),
                one.get("problem", {}).get("message"),
                {broker.number: broker.high_watermark(one["name"]) for broker in self.up},
            )
            for one in streams
            if len(one["isr"]) < len(one["replica_ids"]) or one["leader"] is None
        ]
        return f"brokers (role, alive): {brokers}; streams (leader, epoch, ISR, replicas, problem, HWs): {short[:5]}"

    def client(self, **options: Any) -> NatslogClient:
        settings = {"retries": 3, "patience_s": 20, "timeout_s": 10, "token": self.brokers[0].token} | options
        return NatslogClient([broker.url for broker in self.brokers], ClientOptions(**settings))

    # ---- what an operator does ----

    def replace(self, broker: ClusterBroker) -> None:
        """For a broker whose folder is lost: out by force, an empty folder, in again."""
        broker.kill()
        self.operate("DELETE", f"/v1/cluster/brokers/{broker.number}?force=true")
        broker.clear_folder()
        broker.spawn()
        self.operate("POST", "/v1/cluster/brokers", {"url": broker.url})

    def operate(self, method: str, path: str, body: Any = None, within_s: float = 30.0) -> Any:
        """Asks the metadata leader until it does it."""
        last = "nobody answered"

        def done() -> bool:
            nonlocal last
            leader = self.metadata_leader()
            answer = None if leader is None else leader.ask(method, path, body, timeout_s=10)
            if answer is None:
                return False
            last = f"{answer.status} {answer.data.decode(errors='replace')}"
            return answer.status < 300

        deadline = time.monotonic() + within_s
        while not done():
            assert time.monotonic() < deadline, f"{method} {path} within {within_s} s: {last}"
            time.sleep(0.2)
        return last


@contextmanager
def running_cluster(folder: Path, **options: Any) -> Iterator[Cluster]:
    """A cluster that is ready; gone afterwards, with its disks and hosts."""
    cluster = Cluster(folder, ClusterOptions(**options))
    try:
        yield cluster.start()
    finally:
        cluster.close()


__all__ = ["CLIENTS", "NATS", "Cluster", "ClusterBroker", "ClusterOptions", "running_cluster"]
