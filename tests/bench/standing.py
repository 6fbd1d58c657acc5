"""What it costs to have much: 1,000 mostly idle streams, and a start with a 20 GB log of 100 streams."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from natslog.nats_server import NatsServer
from tests.bench.pairs import Comparison, console
from tests.bench.sides import ROOT, natslog_side, raw_publish, resident_mib, scratch
from tests.harness import BrokerProcess, eventually, running

_IDLE_STREAMS = 1000
_IDLE_SECONDS = 10.0
_LOGS = 100
_FREE_GB_WANTED = 8
_LATENCY = {"bytes": 128, "rate": 10_000, "seconds": 3, "warm": 1}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def resident_now_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def start_seconds(broker: BrokerProcess) -> float:
    """From the start of the process to the first ready answer."""
    started = time.perf_counter()
    broker.start()
    return time.perf_counter() - started


def _create(broker: BrokerProcess, count: int) -> None:
    with broker.client() as client, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda at: client.create_stream(f"idle{at}", f"idle.{at}.>"), range(count)))


def _at_rest(server: NatsServer, broker: BrokerProcess) -> dict[str, float]:
    """Memory, CPU at rest in per cent of a core, the latency of the active stream, and the time to start again."""
    time.sleep(2)
    before = cpu_seconds(broker.pid)
    time.sleep(_IDLE_SECONDS)
    idle = (cpu_seconds(broker.pid) - before) / _IDLE_SECONDS * 100
    latency = raw_publish(server, "paced", **_LATENCY)
    memory = resident_now_mib(broker.pid)
    broker.terminate()
    return {
        "resident_mib": round(memory, 1),
        "idle_cpu_percent": round(idle, 2),
        "p50_ms": round(latency["p50_ms"], 3),
        "p99_ms": round(latency["p99_ms"], 3),
        "start_s": round(start_seconds(broker), 2),
    }


def many_streams() -> list[Comparison]:
    """One active stream alone, and the same beside 1,000 idle ones."""
    with natslog_side() as (server, broker):
        alone = _at_rest(server, broker)
        console.print(f"  one stream: {alone}")
        _create(broker, _IDLE_STREAMS)
        raw_publish(server, "acked", bytes=128, window=100, seconds=0.5, warm=0)
        beside = _at_rest(server, broker)
        console.print(f"  {_IDLE_STREAMS} idle streams beside it: {beside}")
    bounds = [
        ("resident memory", "MiB more", "resident_mib", 60.0),
        ("CPU at rest", "% of a core", "idle_cpu_percent", 2.0),
        ("start-up", "s", "start_s", 5.0),
    ]
    found = []
    for title, unit, name, bound in bounds:
        figure = beside[name] - alone[name] if name == "resident_mib" else beside[name]
        line = Comparison(f"{_IDLE_STREAMS} idle streams: {title}", unit, bound, ours=[figure], is_bound=True)
        line.notes |= {"one stream": alone, "with idle streams": beside}
        found.append(line)
    latency = Comparison(f"{_IDLE_STREAMS} idle streams: ack p50 of an active one", "ms", 0.67, "the same stream alone")
    latency.ours, latency.theirs, latency.lower_is_better = [beside["p50_ms"]], [alone["p50_ms"]], True
    return [*found, latency]


def _unsealed_bytes(broker: BrokerProcess) -> int:
    return sum(path.stat().st_size for path in broker.folder.glob("streams/[!_]*/*.active"))


def start_with_a_large_log() -> Comparison:
    """20 GB in 100 streams, written through the broker's own log code; less where the disk has no room, and said so."""
    with scratch() as folder:
        room_gb = shutil.disk_usage(folder).free / 1e9 - _FREE_GB_WANTED
        size_gb = min(20.0, max(1.0, room_gb))
        with running(folder / "natslog") as (_, broker):
            with broker.client() as client:
                for at in range(_LOGS):
                    client.create_stream(f"log{at}", f"log.{at}")
            broker.terminate()
            started = time.perf_counter()
            command = [sys.executable, "-m", "tests.bench.large_log", str(broker.folder), str(size_gb / _LOGS * 1e9)]
            subprocess.run(command, check=True, cwd=ROOT, timeout=600)
            console.print(f"  {size_gb:.0f} GB of log written in {time.perf_counter() - started:.0f} s")
            sealing = time.perf_counter()
            broker.start()  # a broker that has been up for a while has sealed what would be long to recover
            eventually(lambda: _unsealed_bytes(broker) < 1.1e9, 180, "the broker has sealed its full segments")
            broker.kill()
            console.print(f"  sealed in {time.perf_counter() - sealing:.0f} s")
            times = []
            for _ in range(3):
                times.append(start_seconds(broker))
                memory = resident_mib(broker.pid)
                broker.kill()
            console.print(f"  ready after {', '.join(f'{seconds:.2f}' for seconds in times)} s")
    found = Comparison(f"start-up with a {size_gb:.0f} GB log of {_LOGS} streams", "s", 3.0, ours=times, is_bound=True)
    found.notes = {"gigabytes": size_gb, "resident_mib": memory, "stopped by": "SIGKILL"}
    return found
