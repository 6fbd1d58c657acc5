"""The archive as a file: a compressed tar of parts in memory."""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from natslog.errors import ConfigError, InvalidRequest

FOLDER = "natslog-support"
"""In the archive: all files are below it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A file of the archive. `name`: chosen by natslog, never by what it has. `what`: for the manifest."""

    name: str
    what: str
    data: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def require_free(path: Path, *, force: bool) -> None:
    """Raises InvalidRequest: there is such a file, or no such folder."""
    if path.is_dir() or (path.exists() and not force):
        raise InvalidRequest(f"{path} exists: choose another file with --output, or pass --force to replace a file")
    if not path.parent.is_dir():
        raise InvalidRequest(f"there is no folder {path.parent}: create it, or choose another file with --output")


def write_archive(path: Path, parts: Sequence[Part], *, force: bool) -> int:
    """The file has its name when it is complete, and mode 0600 from the begin on. Returns its size in bytes.

    Raises:
        InvalidRequest: there is such a file meanwhile. ConfigError: it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz") as tar:
                for part in parts:
                    _add(tar, part)
            file.flush()
            os.fsync(file.fileno())
            size_bytes = os.fstat(file.fileno()).st_size
        _name(unfinished, path, force=force)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(FileNotFoundError):
            unfinished.unlink()
    return size_bytes


def _add(tar: tarfile.TarFile, part: Part) -> None:
    entry = tarfile.TarInfo(f"{FOLDER}/{part.name}")
    entry.size, entry.mode, entry.mtime = len(part.data), 0o600, int(time.time())
    tar.addfile(entry, io.BytesIO(part.data))


def _name(unfinished: Path, path: Path, *, force: bool) -> None:
    if force:
        os.replace(unfinished, path)
        return
    try:
        os.link(unfinished, path)  # unlike a rename, it replaces nothing that was created meanwhile
    except FileExistsError as error:
        raise InvalidRequest(f"{path} exists: choose another file with --output, or pass --force") from error
