"""Processor time of process trees, from `/proc/PID/stat`, and a run measured with it.

A tree is a process with all of its descendants, and the children that any of them has waited for: a process that ends
between two readings has its time in its parent's then, so that a sum never decreases. Unit of the kernel: 10 ms.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from tests.bench.pairs import Measured

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


class Stat(NamedTuple):
    """What one line of `/proc/PID/stat` says: the parent's id, and ticks of the process and of its waited children."""

    parent: int
    ticks: int


def parse_stat(line: str) -> Stat:
    """The name of a program stands in parentheses and may contain anything, also parentheses and spaces."""
    fields = line.rpartition(")")[2].split()
    return Stat(int(fields[1]), sum(map(int, fields[11:15])))


def processor_seconds(roots: Collection[int]) -> float:
    """Seconds of user and system time that the trees of these processes have used so far.

    Raises:
        ProcessLookupError: one of them does not exist.
    """
    stats = _all_stats()
    children: dict[int, list[int]] = defaultdict(list)
    for pid, stat in stats.items():
        children[stat.parent].append(pid)
    if missing := set(roots) - set(stats):
        raise ProcessLookupError(f"no process has the id {', '.join(map(str, sorted(missing)))}")
    waiting, found = list(roots), set[int]()
    while waiting:
        if (pid := waiting.pop()) not in found:
            found.add(pid)
            waiting += children[pid]
    return sum(stats[pid].ticks for pid in found) / _TICKS_A_SECOND


def _all_stats() -> dict[int, Stat]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(path.parent.name)] = parse_stat(path.read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended after the folder was listed
    return found


def measured(rows: int, pids: Collection[int], run: Callable[[], object]) -> Measured:
    """The rate of `run`, which processes `rows`, and the processor time that the trees of `pids` used for a row."""
    before, started = processor_seconds(pids), time.perf_counter()
    run()
    taken = time.perf_counter() - started
    return Measured(rows / taken, (processor_seconds(pids) - before) / rows * 1e6)
