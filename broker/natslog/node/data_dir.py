"""The broker's folder: whose it is, and that nobody else is using it.

DIR/lock             held (flock) while a broker runs
DIR/broker           who owns it: broker id, cluster id
DIR/metadata         the metadata state machine's snapshot
DIR/streams/<id>/    one log each
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import Any

from natslog.errors import DataDirError
from natslog.log.checked_file import read_checked, sync_folder, write_checked


class DataDir:
    """Claims a folder for this process; `release` gives it back.

    Args:
        path: made if missing.
        broker_id: must be the one that owns the folder, if anyone does.

    Raises:
        DataDirError: another broker's, of a newer format, in use, or not writable, with what to do.
        CorruptLog: its identity file is damaged.
    """

    def __init__(self, path: Path, broker_id: int) -> None:
        self.path = path
        self.streams = path / "streams"
        self._lock_fd = -1
        try:
            self.streams.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(path / "lock", os.O_CREAT | os.O_RDWR, 0o644)
            self._take_lock()
            self.cluster_id = self._identity(broker_id)
        except OSError as error:
            self.release()
            raise DataDirError(
                f"the data folder {path} cannot be written: {error.strerror or error}. Give this user the right to, or "
                "name another with --data-dir",
                data_dir=str(path),
            ) from error
        except BaseException:
            self.release()
            raise

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise DataDirError(
                f"the data folder {self.path} is in use by a running broker (process {holder}): stop that one, or name "
                "another folder with --data-dir",
                data_dir=str(self.path),
                process=holder,
            ) from error
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, str(os.getpid()).encode(), 0)

    def _identity(self, broker_id: int) -> str:
        known: dict[str, Any] | None = read_checked(self.path / "broker", "broker", 1)
        if known is None:
            cluster_id = secrets.token_hex(8)
            write_checked(self.path / "broker", "broker", 1, {"broker_id": broker_id, "cluster_id": cluster_id})
            sync_folder(self.path)
            return cluster_id
        if known["broker_id"] != broker_id:
            raise DataDirError(
                f"the data folder {self.path} belongs to broker {known['broker_id']}, and this is broker {broker_id}: "
                "correct broker_id, or name another folder with --data-dir",
                data_dir=str(self.path),
                owner=known["broker_id"],
            )
        return str(known["cluster_id"])

    def stream_folder(self, stream_id: str) -> Path:
        return self.streams / stream_id

    def release(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
