"""The data folder and its disk."""

from __future__ import annotations

from collections.abc import Iterator

from natslog.diagnosis.examined import Examined, FolderFacts, LatencyFacts, MachineFacts
from natslog.diagnosis.outcomes import Outcome, ok, problem, warning
from natslog.units import format_size

_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "virtiofs"}
)
_MEMORY = frozenset({"tmpfs", "ramfs"})
_NO_BARRIER = frozenset({"nobarrier", "barrier=0"})
_LOW_SHARE = 0.1
_FEW_FILES = 10_000
_SLOW_P50_MS, _SLOW_P99_MS, _HANGS_MS = 20.0, 200.0, 2000.0


def file_system(facts: FolderFacts, examined: Examined) -> Iterator[Outcome]:
    kind = facts.file_system
    found = f"{kind} ({facts.source}) at {facts.measured}, {','.join(facts.mount_options[:3])}"
    known = {"type": kind, "source": facts.source, "options": facts.mount_options}
    if kind in _MEMORY:
        yield problem(
            f"{found}: it is in memory, so that all messages are lost when the machine stops",
            "Choose a data folder on a disk.",
            **known,
        )
    elif "ro" in facts.mount_options:
        yield problem(f"{found}: it is mounted read-only", "Mount it writable; check the kernel log.", **known)
    elif _NO_BARRIER & set(facts.mount_options):
        yield problem(
            f"{found}: without barriers, a power loss loses what was acked",
            "Mount it without nobarrier (barrier=0).",
            **known,
        )
    elif kind in _NETWORK or kind.startswith("fuse"):
        yield warning(
            f"{found}: a file system over a network, or in user space",
            "Prefer a local disk: an ack needs an fsync of this file system, and a broker whose file system hangs is "
            "replaced after 2 s. With several replicas, messages are on several disks anyway.",
            **known,
        )
    elif kind == "overlay":
        yield warning(
            f"{found}: the layer of a container, which is deleted with the container",
            "Mount a volume, and choose a data folder on it.",
            **known,
        )
    else:
        yield ok(found, **known)


def space(facts: FolderFacts, examined: Examined) -> Iterator[Outcome]:
    config = examined.config
    reserve_bytes = 0 if config is None else config.min_free_bytes
    found = f"{format_size(facts.free_bytes)} of {format_size(facts.total_bytes)} are free"
    known = {"free_bytes": facts.free_bytes, "total_bytes": facts.total_bytes, "min_free_bytes": reserve_bytes}
    if facts.free_bytes <= reserve_bytes:
        yield problem(
            f"{found}, and min_free_bytes is {format_size(reserve_bytes)}: messages are refused",
            "Free space on this disk, or lower the retention limits of streams.",
            **known,
        )
    elif facts.free_files is not None and facts.free_files < _FEW_FILES:
        yield warning(
            f"{found}, but only {facts.free_files:,} more files can be created",
            "Delete files, or create the file system with more inodes.",
            **known,
        )
    elif config is not None and config.max_store_bytes is not None and config.max_store_bytes > facts.total_bytes:
        yield warning(
            f"{found}, and max_store_bytes is {format_size(config.max_store_bytes)}",
            "Lower max_store_bytes below the size of the disk, or remove it: it has no effect.",
            **known,
        )
    elif facts.free_bytes < _LOW_SHARE * facts.total_bytes:
        yield warning(found, "Free space, or set limits of streams (max_bytes, max_age) that fit.", **known)
    else:
        yield ok(found, **known)


def folder(facts: FolderFacts, examined: Examined) -> Iterator[Outcome]:
    path, user = facts.folder, examined.machine.user if isinstance(examined.machine, MachineFacts) else None
    if facts.problem:
        yield problem(facts.problem, "Correct what the message names; the broker would not start.")
    elif facts.exists and facts.mode & 0o002:
        yield problem(
            f"every user of this machine may write to {path}: a broker refuses it",
            f"Run chmod 700 {path}, or choose a folder inside it.",
        )
    elif facts.links:
        yield problem(
            f"{facts.links[0]} is a symbolic link, pipe or device: a broker refuses it",
            "Move what it refers to into the data folder, or mount the other disk there (mount --bind).",
            links=facts.links,
        )
    elif not facts.is_writable:
        yield problem(
            f"this user ({user}) may not write to {facts.measured}, which is of user {facts.owner}",
            f"Run natslog as the user of the broker, or give it the folder: chown -R USER {facts.measured}",
        )
    elif examined.config is not None and facts.broker_id not in (None, examined.config.broker_id):
        yield problem(
            f"{path} belongs to broker {facts.broker_id}, but broker_id is {examined.config.broker_id}",
            "Correct broker_id, or mount the disk of this broker.",
        )
    elif facts.exists and user is not None and facts.owner not in (user, 0) and user != 0:
        yield warning(f"{path} is of user {facts.owner}, this is user {user}", "Give it one owner.")
    elif not facts.exists:
        yield ok(f"{path} does not exist yet; the broker creates it")
    else:
        used = "" if facts.process is None else f", used by the running broker (process {facts.process})"
        yield ok(f"{path}, mode {facts.mode:04o}, of user {facts.owner}{used}", process=facts.process)


def latency(facts: LatencyFacts, examined: Examined) -> Iterator[Outcome]:
    small, large = sorted(facts.small_ms), sorted(facts.large_ms)
    known = {
        "small_p50_ms": _at(small, 0.5),
        "small_p99_ms": _at(small, 0.99),
        "large_p50_ms": _at(large, 0.5),
        "large_p99_ms": _at(large, 0.99),
    }
    found = (
        f"write and fsync of 4 KiB: p50 {known['small_p50_ms']:.1f} ms, p99 {known['small_p99_ms']:.1f} ms "
        f"({len(small)} times); of 1 MiB: p50 {known['large_p50_ms']:.1f} ms, p99 {known['large_p99_ms']:.1f} ms "
        f"({len(large)} times)"
    )
    if max(small[-1], large[-1]) >= _HANGS_MS:
        yield problem(
            f"{found}; one took {max(small[-1], large[-1]) / 1000:.1f} s",
            "Check the disk and the kernel log: after 2 s without a write, other brokers become leaders.",
            **known,
        )
    elif known["small_p50_ms"] > _SLOW_P50_MS or known["small_p99_ms"] > _SLOW_P99_MS:
        yield warning(
            found,
            "Use a faster disk, or one that other programs do not use: an ack takes at least one fsync on each replica "
            "in sync.",
            **known,
        )
    else:
        yield ok(found, **known)


def _at(ascending: list[float], share: float) -> float:
    return round(ascending[min(len(ascending) - 1, int(share * len(ascending)))], 3)


def calls(facts: LatencyFacts, examined: Examined) -> Iterator[Outcome]:
    for name, why in facts.failed.items():
        yield problem(
            f"{name} fails on this file system: {why}",
            "Choose a data folder on another file system, for example ext4 or XFS: a broker needs this call.",
            call=name,
        )
    if not facts.failed:
        yield ok("fdatasync, flock, posix_fallocate, sendfile and fsync of folders work")
