"""This machine: limits of the broker's process, memory, clock, packages, the port, and names of hosts."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from natslog.config import BrokerConfig
from natslog.diagnosis.examined import Limits, MachineFacts
from natslog.errors import natslog_version
from natslog.wire import library

_CGROUPS = Path("/sys/fs/cgroup")
_STA_UNSYNC = 0x0040
_TIME_ERROR = 5
BROKER_PACKAGES = ("aiohttp", "cryptography", "prometheus_client", "nkeys")
"""Modules of natslog[broker]."""


def probe_machine(config: BrokerConfig | None, process: int | None) -> MachineFacts:
    """Args: `process`: that of the running broker, if one has the data folder."""
    memory = _memory()
    synchronized, error_s = _kernel_clock()
    return MachineFacts(
        user=os.geteuid(),
        processors=_processors(),
        memory_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemAvailable", 0),
        limits=_limits(process),
        clock_synchronized=synchronized,
        clock_error_s=error_s,
        python=platform.python_version(),
        versions=package_versions(),
        missing=[name for name in BROKER_PACKAGES if importlib.util.find_spec(name) is None],
        kernels_problem=library.reason() or "",
        port_problem="" if config is None or process is not None else _port_problem(config),
        names={} if config is None else _unknown_names(config),
    )


# ---- processes ----


def _limits(process: int | None) -> Limits:
    folder = Path("/proc") / ("self" if process is None else str(process))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = None
    if process is not None:
        found = re.search(r"^Max open files\s+(\S+)\s+(\S+)", (folder / "limits").read_text(), re.MULTILINE)
        if found is not None:
            soft, hard = (resource.RLIM_INFINITY if text == "unlimited" else int(text) for text in found.groups())
        with suppress(PermissionError):
            open_files = len(list((folder / "fd").iterdir()))
    return Limits(
        process=process,
        user=folder.stat().st_uid,
        files_soft=soft,
        files_hard=hard,
        open_files=open_files,
        memory_bytes=_cgroup_memory(folder / "cgroup"),
    )


def _cgroup_memory(file: Path) -> int | None:
    """The lowest limit of the process's cgroup and those above it; None without one."""
    limits = []
    for line in file.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = _CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = _CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        for one in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # no limit is the text "max", or there is no such file
                limits.append(int((one / name).read_text()))
            if one == root:
                break
    real = [limit for limit in limits if limit < 2**62]  # version 1 states no limit as a huge number
    return min(real, default=None)


def _memory() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in lines if len(parts) > 2}


def _processors() -> float:
    count = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError):
        quota, period = (_CGROUPS / "cpu.max").read_text().split()
        count = min(count, int(quota) / int(period))
    return round(count, 2)


# ---- the clock ----


class _Timeval(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("microseconds", ctypes.c_long)]


class _Timex(ctypes.Structure):
    """`struct timex` of adjtimex(2), as far as it is read, with room for the rest."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("time", _Timeval),
        ("rest", ctypes.c_long * 32),
    ]


def _kernel_clock() -> tuple[bool | None, float | None]:
    """Whether something (NTP, PTP, the hypervisor) keeps the kernel's clock, and its largest error in seconds."""
    read = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)
    if read is None:
        return None, None
    state = _Timex()
    result = read(ctypes.byref(state))
    if result < 0:
        return None, None
    return result != _TIME_ERROR and not state.status & _STA_UNSYNC, state.maxerror / 1e6


# ---- packages ----


def package_versions() -> dict[str, str]:
    """natslog, and those of its dependencies that are installed, also of its extras."""
    found = {"natslog": natslog_version()}
    with suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("natslog") or []:
            name = re.match(r"[A-Za-z0-9._-]+", requirement)
            if name is not None and "extra == 'dev'" not in requirement.replace('"', "'"):
                with suppress(importlib.metadata.PackageNotFoundError):
                    found[name[0]] = importlib.metadata.version(name[0])
    return dict(sorted(found.items()))


# ---- the network ----


def _port_problem(config: BrokerConfig) -> str:
    """Why a broker that is started now could not listen."""
    if config.http_port == 0:
        return ""
    family = socket.AF_INET6 if ":" in config.http_host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((config.http_host, config.http_port))
            listening.listen(1)
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _unknown_names(config: BrokerConfig) -> dict[str, str]:
    urls = [config.url, *config.seeds, *config.peer_urls]
    found = {}
    for host in dict.fromkeys(urlsplit(url).hostname for url in urls):
        if host is None:
            continue
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            found[host] = error.strerror or str(error)
    return found
