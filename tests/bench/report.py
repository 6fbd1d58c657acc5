"""The table in the terminal, the JSON and the plot in `docs/bench/`."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib as mpl
from rich.table import Table

from natslog.nats_server import find_binary
from tests.bench.pairs import Comparison, console

mpl.use("Agg")
from matplotlib import pyplot as plt  # the backend comes first

_PACKAGES = ("natslog", "pyarrow", "numpy", "numba", "pyspark", "nats-py", "aiohttp")


def machine(folder: Path) -> dict[str, Any]:
    """What it ran on, and the versions."""
    cpu = _field("/proc/cpuinfo", "model name")
    memory_kib = int(_field("/proc/meminfo", "MemTotal").split()[0])
    server = subprocess.run([find_binary(), "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory_kib / 1024**2, 1),
        "kernel": platform.release(),
        "filesystem": _filesystem(folder),
        "free_gb": round(shutil.disk_usage(folder).free / 1e9),
        "fdatasync_ms": _fdatasync_ms(folder),
        "python": platform.python_version(),
        "nats-server": server,
        "packages": {name: version(name) for name in _PACKAGES},
        "when": datetime.now(UTC).isoformat(timespec="minutes"),
    }


def _field(path: str, name: str) -> str:
    lines = (line.partition(":") for line in Path(path).read_text().splitlines())
    return next(value.strip() for key, _, value in lines if key.strip() == name)


def _filesystem(folder: Path) -> str:
    done = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _fdatasync_ms(folder: Path) -> dict[str, float]:
    """Median of a write at the end of a file with its fdatasync, by size."""
    found = {}
    path = folder / ".bench-fsync"
    for size in (4 << 10, 64 << 10, 1 << 20):
        block, times = os.urandom(size), []
        with open(path, "wb", buffering=0) as file:
            for _ in range(50):
                started = time.perf_counter()
                file.write(block)
                os.fdatasync(file.fileno())
                times.append(time.perf_counter() - started)
        found[f"{size >> 10} KiB"] = round(statistics.median(times) * 1e3, 3)
    path.unlink()
    return found


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.2f}"


_RIGHT = ("natslog", "peer's", "ratio", "bar", "µs/row", "peer's µs/row")


def print_table(found: list[Comparison]) -> None:
    """With processor times only where a line has them."""
    has_cpu = any(line.our_cpu_us for line in found)
    table = Table(title="natslog against its peers (medians)")
    cpu_columns = ("µs/row", "peer's µs/row") if has_cpu else ()
    for column in ("what", "natslog", "peer", "peer's", "unit", *cpu_columns, "ratio", "bar", ""):
        table.add_column(column, justify="right" if column in _RIGHT else "left")
    for line in found:
        ours = _text(line.figure if line.is_bound else statistics.median(line.ours))
        theirs = _text(statistics.median(line.theirs)) if line.theirs else ""
        cpu = [_median_text(line.our_cpu_us), _median_text(line.their_cpu_us)] if has_cpu else []
        ratio = "" if line.is_bound else f"{line.figure:.2f}×"
        table.add_row(line.title, ours, line.peer, theirs, line.unit, *cpu, ratio, *_verdict(line))
    console.print(table)


def _median_text(values: list[float]) -> str:
    return _text(statistics.median(values)) if values else ""


def _verdict(line: Comparison) -> tuple[str, str]:
    """The bar, and whether it holds."""
    if not line.has_bar:
        return "", ""
    bar = f"≤ {_text(line.bar)}" if line.is_bound else f"≥ {line.bar:g}×"
    if line.alternative is not None:
        bar += f", or of {line.alternative.peer} ≥ {line.alternative.bar:g}×"
    return bar, "[green]holds[/]" if line.holds else "[red]missed[/]"


def write_json(found: list[Comparison], about: dict[str, Any], seconds: float, path: Path) -> None:
    content = {"machine": about, "seconds": round(seconds), "comparisons": [line.as_dict() for line in found]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def plot(found: list[Comparison], about: dict[str, Any], path: Path) -> None:
    """How many times the bar each figure is, one bar each; what is right of the line holds."""
    lines = [line for line in found if line.bar > 0]
    shares = [line.bar / line.figure if line.is_bound else line.figure / line.bar for line in lines]
    figure, axes = plt.subplots(figsize=(10, 0.42 * len(lines) + 1.6))
    colours = ["#2a9d8f" if line.holds else "#e76f51" for line in lines]
    axes.barh(range(len(lines)), shares, color=colours)
    axes.axvline(1.0, color="black", linewidth=1)
    names = [f"{line.title}" + (f"\nvs {line.peer}" if line.peer else "") for line in lines]
    axes.set_yticks(range(len(lines)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("times the bar (log scale): right of the line the bar holds")
    for at, (line, share) in enumerate(zip(lines, shares, strict=True)):
        text = f"{_text(line.figure)} {line.unit}" if line.is_bound else f"{line.figure:.2f}×"
        axes.text(share, at, f" {text}", va="center", fontsize=7)
    axes.set_title(f"{about['cores']} cores, {about['cpu']}; {about['nats-server']}", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
