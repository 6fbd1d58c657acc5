"""Bit flips and truncations in a stopped broker's files, and what must follow."""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from pathlib import Path

from natslog.log.segment import ACTIVE_SUFFIX, SEALED_SUFFIX
from natslog.log.verify import check_file
from tests.cluster_harness import Cluster, ClusterBroker
from tests.harness import stream_folder

STREAM_KINDS = ("active", "sealed", "leader-epochs", "hw-checkpoint", "companion", "newest")
BROKER_KINDS = ("hard-state", "raft-log", "raft-snapshot", "broker", "life")
_DECIDES_WITHIN_S = 40.0
_SEALED_WITHIN_S = 30.0
_REPAIRED_WITHIN_S = 180.0  # on a busy machine scrubbing has taken 100 s to reach a file
_COUNTED_WITHIN_S = 10.0


def files_of_kind(broker: ClusterBroker, stream_id: str, kind: str) -> list[Path]:
    stream, raft = stream_folder(broker.folder, stream_id), broker.folder / "raft"
    found = {
        "active": lambda: stream.glob(f"*{ACTIVE_SUFFIX}"),
        "sealed": lambda: stream.glob(f"*{SEALED_SUFFIX}"),
        "companion": lambda: stream.glob(f"companion/*{ACTIVE_SUFFIX}"),
        "newest": lambda: stream.glob("newest"),
        "leader-epochs": lambda: stream.glob("leader-epochs"),
        "hw-checkpoint": lambda: stream.glob("hw-checkpoint"),
        "hard-state": lambda: raft.glob("hard-state"),
        "raft-log": lambda: [*raft.glob("log-*"), *raft.glob("wal-*")],
        "raft-snapshot": lambda: raft.glob("snapshot"),
        "broker": lambda: broker.folder.glob("broker"),
        "life": lambda: broker.folder.glob("life"),
    }[kind]()
    return sorted(path for path in found if path.suffix != ".new" and path.stat().st_size > 0)


def used_bytes(path: Path) -> int:
    """Its size; of a write-ahead log, where the room for further records begins: a flip there changes nothing."""
    durable = re.search(rb" durable=(\d+) ", path.read_bytes()[:512]) if path.name.startswith("wal-") else None
    return path.stat().st_size if durable is None else int(durable[1])


def flip_bit(path: Path, chance: random.Random) -> str:
    """Returns what was done."""
    position, bit = chance.randrange(used_bytes(path)), chance.randrange(8)
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))
        file.flush()
        os.fsync(file.fileno())
    return f"bit {bit} of byte {position} of {path.stat().st_size} in {path.name}"


def wait_sealed(broker: ClusterBroker, stream_id: str) -> list[Path]:
    """Sealed segments of a running broker; none where there are none in time."""
    deadline = time.monotonic() + _SEALED_WITHIN_S
    while not (found := files_of_kind(broker, stream_id, "sealed")) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def repaired_ranges(broker: ClusterBroker, stream: str) -> float:
    """How many damaged ranges of its replica were repaired in place since it was started."""
    found = broker.metrics()
    return found.get(f'natslog_scrub_repaired_total{{stream="{stream}"}}', 0.0)


def wait_counted(broker: ClusterBroker, stream: str, before: float) -> float:
    """How many more than `before`: a broker counts a repair a moment after the file is in its place."""
    deadline = time.monotonic() + _COUNTED_WITHIN_S
    while (more := repaired_ranges(broker, stream) - before) <= 0 and time.monotonic() < deadline:
        time.sleep(0.2)
    return more


def wait_intact(paths: list[Path]) -> bool:
    """Of sealed segments of a running broker: whether each is intact, or gone, in time."""
    deadline = time.monotonic() + _REPAIRED_WITHIN_S
    while not all(_is_intact(path) for path in paths):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def scrub_all(brokers: list[ClusterBroker], stream: str, stream_id: str) -> bool:
    """Scrubs every replica of a stream now; returns whether each sealed segment of it is intact in time."""
    for broker in brokers:
        broker.ask("POST", f"/v1/streams/{stream}/scrub", timeout_s=10)
    return wait_intact([path for broker in brokers for path in files_of_kind(broker, stream_id, "sealed")])


def _is_intact(path: Path) -> bool:
    return not path.exists() or not check_file(path).problems


def truncate(path: Path, chance: random.Random) -> str:
    size_bytes = path.stat().st_size
    kept = chance.randrange(size_bytes)
    os.truncate(path, kept)
    return f"{path.name} cut from {size_bytes} to {kept} bytes"


def tear(path: Path, chance: random.Random) -> str:
    """Appends what a write that was cut off leaves behind: zeros, anything, or a part of what such files hold."""
    size_bytes, count = path.stat().st_size, chance.randint(1, 8192)
    how = chance.choice(("zeros", "noise", "a part of itself"))
    with open(path, "r+b") as file:
        file.seek(chance.randrange(size_bytes))
        torn = {"zeros": bytes(count), "noise": chance.randbytes(count)}.get(how) or file.read(count)
        file.seek(0, os.SEEK_END)
        file.write(torn)
        file.flush()
        os.fsync(file.fileno())
    return f"{len(torn)} bytes of {how} after the end of {path.name}"


def copy_folder(broker: ClusterBroker) -> Path:
    """Of a broker that is stopped."""
    copy = broker.folder.with_name("older-copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(broker.folder, copy)
    return copy


def put_back(broker: ClusterBroker, copy: Path) -> None:
    broker.clear_folder()
    shutil.copytree(copy, broker.folder, dirs_exist_ok=True)
    shutil.rmtree(copy)


def readiness(broker: ClusterBroker) -> str:
    answer = broker.ask("GET", "/readyz")
    return f"exit code {broker.exit_code}" if answer is None else f"{answer.status} {answer.data.decode()[:600]}"


def outdated_says(broker: ClusterBroker) -> str | None:
    """What a broker says of itself whose folder is an older copy; None where it does not, in time."""
    size_before = len(broker.output())
    deadline = time.monotonic() + _DECIDES_WITHIN_S
    while time.monotonic() < deadline:
        said = readiness(broker) if broker.exit_code is None else broker.output()[size_before:]
        if "older copy" in said:
            return said
        if broker.exit_code is not None:
            return None
        time.sleep(0.2)
    return None


def starts(broker: ClusterBroker) -> tuple[bool, str]:
    """Starts it; whether it became ready, or else the last line it wrote before it ended by itself."""
    size_before = len(broker.output())
    broker.spawn()
    broker.is_wanted = False  # it may end
    deadline = time.monotonic() + _DECIDES_WITHIN_S
    while time.monotonic() < deadline:
        if (code := broker.exit_code) is not None:
            said = broker.output()[size_before:].strip().splitlines()
            return False, f"exit code {code}: {said[-1] if said else 'not a word'}"
        if broker.ready():
            broker.is_wanted = True
            return True, "ready"
        time.sleep(0.1)
    return False, f"neither ready nor ended within {_DECIDES_WITHIN_S:.0f} s"


def refusal_is_clear(said: str) -> bool:
    """It names what is damaged and what to do."""
    return said.startswith("exit code 1") and any(word in said for word in ("remove", "restore", "empty data folder"))


def replace(cluster: Cluster, broker: ClusterBroker) -> None:
    """As an operator would do it, with the time for each step bounded."""
    cluster.replace(broker)
