"""The data folder: where it lies, who owns it, and how fast its disk stores. Files of a broker are not touched."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from natslog.diagnosis.examined import FolderFacts, LatencyFacts
from natslog.errors import NatslogError
from natslog.log import fullest_disk

_SMALL_BYTES, _SMALL_WRITES = 4 * 1024, 50
_LARGE_BYTES, _LARGE_WRITES = 1024 * 1024, 5
_MEASURED_S = 4.0
_MOST_LINKS = 3


def probe_folder(folder: str) -> FolderFacts:
    path = Path(folder).absolute()
    measured = nearest_folder(path)
    space, status = fullest_disk(measured), measured.stat()
    disk = os.statvfs(space.folder)
    point, kind, source, options = _mount(measured)
    facts = FolderFacts(
        folder=str(path),
        exists=path.is_dir(),
        measured=str(measured),
        file_system=kind,
        source=source,
        mount_options=options,
        mount_point=point,
        free_bytes=space.free_bytes,
        total_bytes=space.size_bytes,
        free_files=disk.f_favail if disk.f_files else None,
        owner=status.st_uid,
        mode=stat.S_IMODE(status.st_mode),
        is_writable=os.access(measured, os.W_OK | os.X_OK),
    )
    if path.exists() and not path.is_dir():
        facts.problem = f"{path} is not a folder"
    if facts.exists:
        facts.process = lock_holder(path / "lock")
        _read_owner(path, facts)
    return facts


def nearest_folder(path: Path) -> Path:
    """The folder, or if it does not exist, the nearest one above it."""
    return next(one for one in (path, *path.parents) if one.is_dir())


def _read_owner(path: Path, facts: FolderFacts) -> None:
    from natslog.node.data_dir import irregular_files, read_identity

    for found in irregular_files(path):
        facts.links.append(str(found))
        if len(facts.links) == _MOST_LINKS:
            break
    try:
        identity = read_identity(path)
    except PermissionError:
        return  # `is_writable` states it
    except NatslogError as error:
        facts.problem = error.message
        return
    if identity is not None:
        facts.broker_id, facts.cluster_id = identity.broker_id, identity.cluster_id


def lock_holder(file: Path) -> int | None:
    """The process that has locked the file, without an attempt to lock it: a broker that starts at this moment would
    fail.
    """
    try:
        status = file.stat()
    except OSError:
        return None
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    stated = ""
    with suppress(OSError):  # it is of another user
        stated = file.read_text().strip()  # where the kernel names another device than `stat`, as of btrfs
    locks = re.findall(
        rf"^\d+: FLOCK +\S+ +WRITE (\d+) (\S+):{status.st_ino} ", Path("/proc/locks").read_text(), re.MULTILINE
    )
    return next((int(process) for process, of_device in locks if of_device == device or process == stated), None)


def _mount(folder: Path) -> tuple[str, str, str, list[str]]:
    """Place, type, source and options of the file system that the folder is on."""
    place = os.path.realpath(folder)
    best = ("", "", "", list[str]())
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        point, options = _unescaped(before.split()[4]), before.split()[5]
        kind, source, super_options = after.split(" ", 2)
        is_above = place == point or place.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= len(best[0]):  # of two at the same place, the later one hides the other
            best = (point, kind, _unescaped(source), [*options.split(","), *super_options.split(",")])
    return *best[:3], list(dict.fromkeys(best[3]))


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


# ---- how fast it stores ----


def probe_latency(file: Path) -> LatencyFacts:
    """Writes into a new file, and deletes it. Ends after a few seconds also on a slow disk, then with fewer writes."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        until_s = time.monotonic() + _MEASURED_S
        return LatencyFacts(
            small_ms=_written_ms(fd, _SMALL_BYTES, _SMALL_WRITES, until_s),
            large_ms=_written_ms(fd, _LARGE_BYTES, _LARGE_WRITES, until_s + _MEASURED_S / 2),
            failed=_failed_calls(fd, file.parent),
        )
    finally:
        os.close(fd)
        remove(file)


def remove(file: Path) -> bool:
    """Deletes what a probe that was killed has left."""
    with suppress(FileNotFoundError):
        file.unlink()
    return True


def _written_ms(fd: int, size_bytes: int, count: int, until_s: float) -> list[float]:
    data, found = os.urandom(size_bytes), list[float]()
    while len(found) < count and (not found or time.monotonic() < until_s):
        started = time.perf_counter()
        os.write(fd, data)
        os.fdatasync(fd)
        found.append((time.perf_counter() - started) * 1000)
    return found


def _failed_calls(fd: int, folder: Path) -> dict[str, str]:
    calls: dict[str, Callable[[], object]] = {
        "flock": lambda: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB),
        "posix_fallocate": lambda: os.posix_fallocate(fd, os.fstat(fd).st_size, _SMALL_BYTES),
        "fsync of a folder": lambda: _sync_folder(folder),
        "sendfile": lambda: _send(fd),
    }
    failed = {}
    for name, call in calls.items():
        try:
            call()
        except OSError as error:
            failed[name] = error.strerror or str(error)
    return failed


def _sync_folder(folder: Path) -> None:
    from natslog.log.checked_file import sync_folder

    sync_folder(folder)


def _send(fd: int) -> None:
    target = os.memfd_create("doctor")
    try:
        os.sendfile(target, fd, 0, _SMALL_BYTES)
    finally:
        os.close(target)
