"""The durable state of this broker's Raft member: hard state, snapshot, and the log entries after it.

The files are those of `raft_wal`. Here is what happens when one of them cannot be written.

A full disk. A save on a full disk uses space from the reserve, if there is one: the result of the failed attempt is
read again, as after a crash, and the save is repeated.

Too many open files. The save is repeated for half a minute, in the same way.

Invariant. Any other OSError is final: the state on disk is then known only after the folder is opened again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from natslog.consensus.types import Entry, HardState, Index, Snapshot
from natslog.errors import StorageFailed
from natslog.log.checked_file import sync_folder
from natslog.log.checkpoints import NO_DESCRIPTORS
from natslog.log_events import event
from natslog.node.data_dir import require_wal
from natslog.node.disk_reserve import NO_ROOM, DiskReserve
from natslog.node.metadata.raft_stored import FILES, Save, Stored, damage, read
from natslog.node.metadata.raft_wal import MANIFEST_VERSION, ROOM_BYTES, Manifest, RaftWal

logger = logging.getLogger("natslog.raft")

_DESCRIPTORS_WITHIN_S, _DESCRIPTORS_POLL_S = 30.0, 0.05


class RaftStore:
    """Opens the store in `folder` (made if missing) and finishes what a crash interrupted. Blocking, one owner.

    Raises:
        CorruptLog: stored data is missing or damaged. Nothing was changed; the broker must not start.
        DataDirError: a newer format, or that of feature level 1.
        StorageFailed: the folder cannot be read or written.
    """

    def __init__(self, folder: Path, *, reserve: DiskReserve | None = None, room_bytes: int = ROOM_BYTES) -> None:
        self._folder, self._reserve, self._room_bytes = folder, reserve, room_bytes
        self._failure = ""
        with self._first_failure_is_final():
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)
            self._files = self._open()

    @property
    def hard_state(self) -> HardState:
        return self._files.stored.hard_state

    @property
    def snapshot(self) -> Snapshot:
        return self._files.stored.snapshot

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All that are stored after the snapshot."""
        return self._files.stored.entries

    @property
    def last_index(self) -> Index:
        return self._files.stored.last_index

    @property
    def is_blank(self) -> bool:
        """Nothing was ever saved."""
        return self._files.stored == Stored()

    @property
    def is_missing(self) -> bool:
        """There are no files: `begin` was never called, or they are lost."""
        return not (self._folder / "hard-state").exists()

    def begin(self) -> None:
        """Creates the files; those of an empty store show that nothing was saved."""
        self.save(None, None, (), None)

    def save(
        self,
        hard_state: HardState | None,
        truncate_from: Index | None,
        entries: Sequence[Entry],
        snapshot: Snapshot | None,
    ) -> None:
        """On stable storage on return, in the order of `Save`. Raises StorageFailed."""
        with self._first_failure_is_final():
            self._save(Save(hard_state, truncate_from, tuple(entries), snapshot))

    def compact(self, snapshot: Snapshot) -> None:
        """Stores a snapshot of applied state, and drops what it covers; no change if it is not newer, or if the disk
        has no space for it: the stored data then remains.
        """
        if snapshot.index <= self.snapshot.index:
            return
        assert self._files.stored.holds(snapshot), "what was applied is in the log"
        with self._first_failure_is_final():
            try:
                self._save(Save(None, None, (), snapshot))
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                logger.warning(
                    "%s: not enough disk space for a snapshot of %d bytes",
                    self._folder,
                    len(snapshot.data),
                    extra=event("metadata.snapshot_postponed", path=self._folder, bytes=len(snapshot.data)),
                )
                self._files = self._read()

    def close(self) -> None:
        """No file is open: no more saves are possible."""
        self._failure = self._failure or "the store is closed"

    def _save(self, save: Save) -> None:
        wanted = self._files.stored.after(save)
        while True:
            try:
                self._files.save(save)
                return
            except OSError as error:
                self._make_room(error)
            self._files = self._open()
            if self._files.stored == wanted and not self.is_missing:
                return
            if save.entries:  # some may have been stored meanwhile
                save = msgspec.structs.replace(save, truncate_from=save.entries[0].index)

    def _open(self) -> RaftWal:
        while True:
            try:
                return self._read()
            except OSError as error:
                self._make_room(error)

    def _make_room(self, error: OSError) -> None:
        """Waits for file descriptors if none is left. Raises this error if that takes too long, or if it is neither
        that nor a lack of space, or if no reserve is left.
        """
        if error.errno in NO_DESCRIPTORS and time.monotonic() < self._wait_until_s:
            time.sleep(_DESCRIPTORS_POLL_S)
            return
        if error.errno not in NO_ROOM or self._reserve is None or not self._reserve.release():
            raise error

    def _read(self) -> RaftWal:
        path = self._folder / "hard-state"
        require_wal(self._folder)
        manifest: Manifest | None = read(path, "raft-hard-state", MANIFEST_VERSION, Manifest | None)
        if manifest is None and any(any(self._folder.glob(pattern)) for pattern in FILES):
            raise damage(path, "the file is missing, but other files of the store exist")
        return RaftWal(self._folder, manifest, room_bytes=self._room_bytes)

    @contextmanager
    def _first_failure_is_final(self) -> Iterator[None]:
        if self._failure:
            raise StorageFailed(f"{self._folder} accepts no more writes: {self._failure}", folder=str(self._folder))
        self._failure = "a previous write did not complete"
        self._wait_until_s = time.monotonic() + _DESCRIPTORS_WITHIN_S
        try:
            yield
        except OSError as error:
            self._failure = f"{error}. The broker must stop; correct the cause and start the broker again"
            raise StorageFailed(f"{self._folder}: {self._failure}", folder=str(self._folder)) from error
        self._failure = ""
