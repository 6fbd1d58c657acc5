"""The metadata on disk: a snapshot that proves itself, replaced whole for each command, fsynced before it is
answered.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import msgspec

from natslog.cluster.metadata import Command, Metadata
from natslog.errors import CorruptLog
from natslog.log.checked_file import read_checked, write_checked

logger = logging.getLogger("natslog.metadata")


class MetadataStore:
    """Owns the state; `propose` is the only way to change it.

    Raises:
        CorruptLog: the snapshot cannot be read. The broker must not start: it would forget streams.
        DataDirError: a newer format.
    """

    def __init__(self, path: Path, cluster_id: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        snapshot = read_checked(path, "metadata", 1)
        try:
            self.state = (
                Metadata(cluster_id=cluster_id)
                if snapshot is None
                else msgspec.convert(snapshot, Metadata, strict=False)
            )
        except msgspec.ValidationError as error:
            raise CorruptLog(f"{path}: not what a metadata snapshot holds: {error}", file=str(path)) from error
        if self.state.cluster_id != cluster_id:
            raise CorruptLog(
                f"{path} is of cluster {self.state.cluster_id}, the folder of cluster {cluster_id}: mixed up files",
                file=str(path),
            )

    def propose(self, command: Command) -> bool:
        """Applies the command and returns when the result is on stable storage; True if anything changed.

        Raises:
            NatslogError: refused by the state machine.
            OSError: it could not be stored; the state is as before.
        """
        with self._lock:  # commands come from several threads; each builds on the one before
            changed_state = msgspec.convert(msgspec.to_builtins(self.state), Metadata, strict=False)
            changed = changed_state.apply(command)
            if changed:
                write_checked(self._path, "metadata", 1, changed_state)
                self.state = changed_state
                logger.info("metadata version %d: %s", changed_state.version, command)
            return changed
