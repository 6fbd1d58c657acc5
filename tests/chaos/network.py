"""Hosts of our own: a network namespace for each broker, one for NATS and clients, a bridge between, and cuts.

    hub (bridge)  10.99.0.253 NATS, 10.99.0.254 clients
    broker n      10.99.0.n

A cut from A to B lets B's kernel drop what comes from A (`deaf`), or A's what goes to the hub (`mute`): connections
stay and stall, as with a switch that fails. A host that loses packets drops one in five, either way, at random. All
namespaces carry this process's id and go with `close`. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NATS, CLIENTS = 253, 254
_CLONE_NEWNET = 0x40000000
_RULES = """
table inet cuts {
  set deaf { type ipv4_addr; }
  set mute { type ipv4_addr; }
  chain hear { type filter hook input priority 0; ip saddr @deaf drop; jump cable; }
  chain say { type filter hook output priority 0; ip daddr @mute drop; jump cable; }
  chain cable { }
}
"""


def missing_for_network() -> str | None:
    """What this machine lacks for it; None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [tool for tool in ("ip", "nft", "nsenter") if shutil.which(tool) is None]
    return f"{', '.join(lacking)} not found (Debian: apt-get install iproute2 nftables util-linux)" if lacking else None


def address(host: int) -> str:
    return f"10.99.0.{host}"


def _run(*command: str, text: str | None = None) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"


class Network:
    """Hosts 1 to `hosts`, connected until cut."""

    def __init__(self, hosts: int, name: str = "") -> None:
        self._name = name or f"natslog{os.getpid()}"
        self.hosts = range(1, hosts + 1)
        try:
            self._make_hub()
            for host in self.hosts:
                self._make_host(host)
        except BaseException:
            self.close()
            raise

    def _make_hub(self) -> None:
        hub = self.namespace(NATS)
        _run("ip", "netns", "add", hub)
        for line in ("link set lo up", "link add bridge type bridge forward_delay 0", "link set bridge up"):
            _run("ip", "-n", hub, *line.split())
        for host in (CLIENTS, NATS):
            _run("ip", "-n", hub, "address", "add", f"{address(host)}/24", "dev", "bridge")

    def _make_host(self, host: int) -> None:
        hub, own = self.namespace(NATS), self.namespace(host)
        _run("ip", "netns", "add", own)
        _run(*f"ip link add eth0 netns {own} type veth peer name port{host} netns {hub}".split())
        _run(*f"ip -n {hub} link set port{host} master bridge up".split())
        _run(*f"ip -n {own} address add {address(host)}/24 dev eth0".split())
        for device in ("lo", "eth0"):
            _run(*f"ip -n {own} link set {device} up".split())
        _run(*self.prefix(host), "nft", "-f", "-", text=_RULES)

    def namespace(self, host: int) -> str:
        return f"{self._name}-{'hub' if host in (NATS, CLIENTS) else host}"

    def prefix(self, host: int) -> list[str]:
        """Runs a command on that host, in place: the process keeps its id, and sees the same mounts."""
        return ["nsenter", f"--net=/run/netns/{self.namespace(host)}"]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and those that it starts, are among the clients."""
        libc = ctypes.CDLL(None, use_errno=True)
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        hub = os.open(f"/run/netns/{self.namespace(CLIENTS)}", os.O_RDONLY)
        try:
            assert libc.setns(hub, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert libc.setns(home, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        finally:
            os.close(hub)
            os.close(home)

    def cut(self, origin: int, to: int) -> None:
        """From now on nothing of what `origin` sends arrives at `to`. One way: cut twice for both."""
        where, kind, whom = (to, "deaf", origin) if to in self.hosts else (origin, "mute", to)
        self._nft(where, "add", "element", "inet", "cuts", kind, f"{{ {address(whom)} }}")

    def separate(self, one: int, others: list[int]) -> None:
        """Both ways between `one` and each of the others."""
        for other in others:
            self.cut(one, other)
            self.cut(other, one)

    def refuse(self, host: int, port: int) -> None:
        """Connections of this host to the port are reset, as if nothing listened there."""
        self._nft(host, "add", "rule", "inet", "cuts", "cable", f"tcp dport {port} reject with tcp reset")

    def lose_packets(self, host: int) -> None:
        self._nft(host, "add", "rule", "inet", "cuts", "cable", "numgen random mod 5 == 0 drop")

    def heal(self) -> None:
        for host in self.hosts:
            self._nft(host, "flush", "chain", "inet", "cuts", "cable")
            self._nft(host, "flush", "set", "inet", "cuts", "deaf")
            self._nft(host, "flush", "set", "inet", "cuts", "mute")

    def _nft(self, host: int, *words: str) -> None:
        _run(*self.prefix(host), "nft", *words)

    def close(self) -> None:
        for host in (*self.hosts, NATS):
            subprocess.run(["ip", "netns", "delete", self.namespace(host)], capture_output=True, check=False)
