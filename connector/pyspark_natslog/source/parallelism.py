"""How many tasks run at once, for the number of tasks that a large range is divided into.

Spark does not tell a Python source its parallelism. In local mode, which has no other executors, the command line of
the JVM that started this process states it. On a cluster and for `local[*]` it is the number of processors that this
process may use: those of its CPU set, limited by the quotas of its control groups (containers).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_MAX_ANCESTORS = 8
_PROPERTY = re.compile(r"spark\.(?P<name>master|default\.parallelism)=(?P<value>.+)")
_LOCAL = re.compile(r"local(\[(?P<cores>\d+|\*)(,\s*\d+)?\])?")


@cache
def default_parallelism(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The parallelism that Spark was given, else the number of available processors; at least 1.

    Args:
        proc, cgroups: where the kernel shows processes and control groups.
    """
    for command in _ancestors(proc):
        if any("org.apache.spark" in word for word in command):
            stated = stated_parallelism(command)
            if stated is not None:
                return stated
            break
    return available_processors(proc, cgroups)


def stated_parallelism(command: list[str]) -> int | None:
    """`spark.default.parallelism`, or N of the master `local[N]`, on the command line of Spark's driver; else None."""
    given: dict[str, str] = {}
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if found := _PROPERTY.fullmatch(word):
            given[found["name"]] = found["value"]
        elif word == "--master":
            given["master"] = following
    if (number := given.get("default.parallelism", "")).isdecimal() and int(number):
        return int(number)
    local = _LOCAL.fullmatch(given.get("master", ""))
    if local is None or local["cores"] == "*":
        return None
    return max(1, int(local["cores"] or 1))


def available_processors(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Those of the CPU set of this process, limited by the quotas of its control groups."""
    quotas = [quota for folder in _control_groups(proc, cgroups) if (quota := _quota(folder)) is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def _ancestors(proc: Path) -> Iterator[list[str]]:
    """Command lines of the parent process, its parent and so on."""
    pid = os.getppid()
    for _ in range(_MAX_ANCESTORS):
        try:
            yield (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
            pid = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # it has ended, or belongs to another user
            return


def _control_groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Folders of the groups of this process and of their parents, of both versions of control groups."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = cgroups / "cpu" if "cpu" in controllers.split(",") else cgroups
        if controllers and root == cgroups:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            yield root.joinpath(*parts[:depth])


def _quota(group: Path) -> int | None:
    """Processors that the group may use, rounded up; None where there is no quota."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
        return -(-int(quota) // int(period)) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such file; `max`
        return None
