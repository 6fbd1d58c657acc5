"""The broker's data folder: its owner, and the lock against other processes.

DIR/lock             held (flock) while a broker runs
DIR/broker           its owner: broker id, the folder's own id, the cluster's id once it belongs to one
DIR/life             its lives, and whether the last one ended gracefully (`life`)
DIR/raft/            the metadata group's log and snapshot
DIR/streams/<name>.<id>/
                     one log each, with at most 64 bytes of its stream's name; <id>/ where natslog 0.1.0 created it.
                     With the suffix .removed it is being removed, with .damaged-N it was set aside

DIR itself may be a symbolic link: the operator chose it. Nothing below it may be one, or a pipe or device: a start
refuses it, because writes, truncations and reads would affect a file elsewhere, for example after a copy of unknown
origin was restored. While the broker runs, no other user can add one, because DIR must not be writable for everyone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from natslog.cluster.features import FIRST_LEVEL, require_supported
from natslog.errors import CorruptLog, DataDirError, UpgradeRequired
from natslog.log.checked_file import make_folder, read_record, sync_folder
from natslog.node.disk_reserve import write_checked
from natslog.node.life import Life, stored_directory

_SHOWN_NAME_BYTES = 64  # names of streams are ASCII
_REMOVED = ".removed"
_ID = re.compile("[0-9a-f]{32}")
IDENTITY_VERSION = 3
REMEDY = (
    "This broker does not start, and nothing was deleted. If a majority of the brokers is still running: natslog "
    "cluster remove ID --force, give this broker an empty data folder, natslog cluster add URL. If no majority is "
    "left because several brokers are damaged or lost: stop an intact broker, run natslog cluster recover DIR on its "
    "data folder, start it, then give the other brokers empty data folders and add them. If this is the only broker "
    "of the cluster: restore its data folder from a copy"
)
"""For data that a broker cannot run without: its identity, its life, its vote."""


class Identity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`directory` is created with the folder and never changes; `cluster_id` is "" before it has a cluster.

    `feature_level`: the formats in which its files may be written. An older natslog refuses the folder because of it.
    It is absent from the files of level 1.
    """

    broker_id: int
    cluster_id: str = ""
    directory: str = ""
    feature_level: int = 1


def read_identity(folder: Path) -> Identity | None:
    """None: the folder has no owner yet. Raises CorruptLog, UpgradeRequired."""
    found = read_record(folder / "broker", "broker", IDENTITY_VERSION, Identity)
    if found is not None:
        require_supported(found.feature_level, f"the data folder {folder}")
    require_wal(folder / "raft")
    return found


def require_wal(raft: Path) -> None:
    """Raises UpgradeRequired: the metadata is still in the files of feature level 1, which 0.2.0 replaces with its next
    snapshot.
    """
    path = raft / "hard-state"
    if path.exists() and path.read_bytes().startswith(b"natslog raft-hard-state v1 "):
        raise UpgradeRequired(
            f"{raft} has the format of feature level 1, in which natslog 0.2.0 keeps the metadata until 1,024 changes "
            "were made after the last snapshot. Start natslog 0.2.0 again, make these changes (docs/OPERATIONS.md, "
            "Upgrade from 0.1.0, has the commands), then start this version. If this broker was never added to a "
            "cluster, give it an empty data folder instead. The broker does not start; nothing was changed",
            file=str(path),
        )


def stream_id_of(folder: Path) -> str:
    """The id of the stream whose log this folder holds, also where it is being removed."""
    return folder.name.removesuffix(_REMOVED).rpartition(".")[2]


OF_FILE_SYSTEM = "lost+found"
"""What a new file system contains that is mounted as the data folder, or as its folder `streams`."""


def folders_by_id(streams: Path) -> dict[str, Path]:
    """The folders of logs, by the ids of their streams.

    Raises:
        DataDirError: two folders are of one stream.
    """
    found: dict[str, Path] = {}
    for folder in sorted(streams.iterdir()):
        stream_id = stream_id_of(folder)
        if folder.suffix == _REMOVED or not _ID.fullmatch(stream_id):
            continue
        if stream_id in found:
            raise DataDirError(
                f"{found[stream_id]} and {folder} hold logs of the same stream: move the one that is not in use to "
                "another place. If both are in use by mistake, `natslog verify` shows what each of them holds",
                data_dir=str(streams.parent),
            )
        found[stream_id] = folder
    return found


def _require_own(folder: Path) -> None:
    """Raises DataDirError: every user may write to it, or it holds links to other places."""
    if folder.stat().st_mode & stat.S_IWOTH:
        raise DataDirError(
            f"every user of this machine may write to the data folder {folder}: run chmod 700 {folder}, or choose a "
            "folder inside it, which the broker creates for its user only",
            data_dir=str(folder),
        )
    for path in irregular_files(folder):
        raise DataDirError(
            f"{path} is a symbolic link, pipe or device, and a data folder must hold files and folders only: move what "
            "it refers to into the data folder, or mount the other disk there (mount --bind)",
            data_dir=str(folder),
            file=str(path),
        )


def irregular_files(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from irregular_files(Path(entry.path))
                elif not entry.is_file(follow_symlinks=False):
                    yield Path(entry.path)
    except PermissionError:
        return  # for example lost+found: the broker does not use it


class DataDir:
    """Locks a folder for this process; `release` unlocks it.

    Args:
        path: created if missing. broker_id: must be the owner of the folder, if it has one.

    Attributes:
        life: this start, and those before it.

    Raises:
        DataDirError: another broker's, of a newer format, in use, not writable, or not private, with what to do.
        CorruptLog: its identity or life is damaged, with what to do.
    """

    def __init__(self, path: Path, broker_id: int) -> None:
        self.path = path
        self.streams = path / "streams"
        self.raft = path / "raft"
        self._lock_fd = -1
        self._is_stored = True
        try:
            make_folder(path)
            _require_own(path)
            read_identity(path)  # a folder that is refused is not changed, not even its lock
            make_folder(self.streams)
            self._stream_folders = folders_by_id(self.streams)
            self._lock_fd = os.open(path / "lock", os.O_CREAT | os.O_RDWR, 0o644)
            self._take_lock()
            self._check_recovered()
            self.identity = self._own_identity(broker_id)
            self.life = Life(path / "life", self.identity.directory, must_exist=self.raft.exists())
        except OSError as error:
            self.release()
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "Free space on that disk" if full else "Give this user the right to"
            raise DataDirError(
                f"the data folder {path} cannot be written: {error.strerror or error}. {remedy}, or choose another "
                "folder with --data-dir",
                data_dir=str(path),
            ) from error
        except CorruptLog as error:
            self.release()
            raise CorruptLog(f"{error.message}. {REMEDY}", **error.facts) from error
        except BaseException:
            self.release()
            raise

    def _check_recovered(self) -> None:
        """Raises DataDirError: `natslog cluster recover` was not completed. A broker would start without its state."""
        if not self.raft.exists() and any(self.path.glob("raft.before-*")):
            raise DataDirError(
                f"the recovery of {self.path} was interrupted: run natslog cluster recover {self.path} again",
                data_dir=str(self.path),
            )

    @property
    def incarnation(self) -> str:
        return self.life.name

    @property
    def after(self) -> str:
        """The incarnation that ended gracefully immediately before this one, or ""."""
        return self.life.after

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise DataDirError(
                f"the data folder {self.path} is in use by a running broker (process {holder}): stop that broker, or "
                "choose another folder with --data-dir",
                data_dir=str(self.path),
                process=holder,
            ) from error
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, str(os.getpid()).encode(), 0)

    def _own_identity(self, broker_id: int) -> Identity:
        found = read_identity(self.path)
        if found is None and self._is_used():
            return self._rebuilt_identity(broker_id)
        known = Identity(broker_id=broker_id, feature_level=FIRST_LEVEL) if found is None else found
        if known.broker_id != broker_id:
            raise DataDirError(
                f"the data folder {self.path} belongs to broker {known.broker_id}, but this is broker {broker_id}: "
                "correct broker_id, or choose another folder with --data-dir",
                data_dir=str(self.path),
                owner=known.broker_id,
            )
        if not known.directory:
            known = msgspec.structs.replace(known, directory=secrets.token_hex(8))
            self._store(known)
            sync_folder(self.path)
        return known

    def _is_used(self) -> bool:
        """A start stores `broker` before any of these."""
        has_streams = any(one.name != OF_FILE_SYSTEM for one in self.streams.iterdir())
        return (self.path / "life").exists() or self.raft.exists() or has_streams

    def _rebuilt_identity(self, broker_id: int) -> Identity:
        """`broker` is missing: the folder's id is stored in `life`, and the cluster in the metadata log, which also
        confirms the broker's id. It is stored again when that was read (`join`).

        Raises:
            CorruptLog: `life` does not name the folder either, or there is no metadata log.
        """
        directory = stored_directory(self.path / "life")
        if not directory or not (self.raft / "hard-state").exists():
            raise CorruptLog(
                f"{self.path / 'broker'} is missing, but the data folder was used before", data_dir=str(self.path)
            )
        self._is_stored = False
        return Identity(broker_id=broker_id, directory=directory, feature_level=FIRST_LEVEL)

    def _store(self, identity: Identity) -> None:
        write_checked(self.path / "broker", "broker", IDENTITY_VERSION, identity)
        self.identity, self._is_stored = identity, True

    def raise_level(self, level: int) -> None:
        """Before anything of that feature level is written: from now on an older natslog refuses this folder."""
        if level > self.identity.feature_level:
            raised = msgspec.structs.replace(self.identity, feature_level=level)
            if self._is_stored:
                self._store(raised)
            else:  # `join` stores it, before anything else is written
                self.identity = raised

    def recovered_as(self, cluster_id: str) -> None:
        """`natslog cluster recover`: this folder starts another cluster."""
        self._store(msgspec.structs.replace(self.identity, cluster_id=cluster_id))

    def join(self, cluster_id: str) -> None:
        """From now on this folder belongs to that cluster."""
        assert self.identity.cluster_id in ("", cluster_id), "a data folder never changes its cluster"
        self._store(msgspec.structs.replace(self.identity, cluster_id=cluster_id))

    def end_life(self) -> None:
        """Everything is on disk as in the logs: the next life does not need to validate it."""
        self.life.end()

    def stream_folder(self, stream_id: str, name: str = "") -> Path:
        """Where the log of this stream is, or is to be made.

        Args:
            name: of the stream, for a folder that does not exist yet.
        """
        if stream_id not in self._stream_folders:
            shown = name[:_SHOWN_NAME_BYTES]
            self._stream_folders[stream_id] = self.streams / (f"{shown}.{stream_id}" if shown else stream_id)
        return self._stream_folders[stream_id]

    def remove_stream(self, stream_id: str) -> None:
        """Removes a stream's folder. If this is interrupted, no part of it is ever opened as a complete log.

        Raises:
            OSError: it is not or not completely removed; the same call continues.
        """
        for doomed in self.streams.glob(f"*{stream_id}{_REMOVED}"):
            shutil.rmtree(doomed)
        folder = self._stream_folders.get(stream_id)
        if folder is not None and folder.exists():
            doomed = folder.replace(folder.with_name(folder.name + _REMOVED))
            sync_folder(self.streams)
            shutil.rmtree(doomed)
        self._stream_folders.pop(stream_id, None)

    def release(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
