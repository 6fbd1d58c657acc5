"""The blocking work on a replica's log folder: open it, repair it, keep a damaged one under another name."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from natslog.cluster.epochs import NO_EPOCH
from natslog.errors import NatslogError, StorageFailed, StorageFull, StorageUnavailable
from natslog.log import LogOptions, ReplicaLog
from natslog.log.checked_file import sync_folder
from natslog.log_events import event
from natslog.model import StreamRecord, StreamSettings

logger = logging.getLogger("natslog.node")

COMPANION_FOLDER = "companion"
_COMPANION_SEGMENT_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LogFolder:
    """Args: `path` of the folder, which may not exist yet."""

    path: Path
    options: LogOptions
    is_companion: bool = False

    @property
    def companion(self) -> LogFolder:
        """The folder of the companion log. It lies in the stream's folder, and is deleted or set aside with it."""
        segment_bytes = min(self.options.segment_bytes, _COMPANION_SEGMENT_BYTES)
        options = replace(self.options, segment_bytes=segment_bytes, stores_scrub=False)
        return LogFolder(self.path / COMPANION_FOLDER, options, is_companion=True)

    def open(self, record: StreamRecord, *, must_exist: bool) -> ReplicaLog:
        """The recovered log; a new one if there is none and none must exist.

        Raises:
            CorruptLog, DataDirError: it cannot be opened. StorageFull, StorageFailed: it may be, later.
        """
        try:
            count = max(record.settings.replicas, len(record.replicas))  # while their number is being changed
            settings = msgspec.structs.replace(record.settings, replicas=count)
            if self.is_companion:  # nothing in it expires, and no limit of the stream counts it
                settings = StreamSettings(subject=record.settings.subject, replicas=count, dedupe_window_s=0.0)
            is_importing = record.import_state == "importing" and not self.is_companion
            options = replace(self.options, appends_copies=is_importing)
            log = ReplicaLog(self.path, record.id, settings, options, must_exist=must_exist)
            first_offset = 0 if self.is_companion else record.first_offset
            if log.failure is None and log.log_end_offset < first_offset:  # an imported stream's new log
                log.begin_at(first_offset, NO_EPOCH)
        except OSError as error:
            raise storage_error(error, f"stream {record.name!r}: its folder {self.path} cannot be used") from error
        log.chain.committed = log.checkpointed
        return log

    def repair(self, log: ReplicaLog, name: str) -> None:
        """Truncates the log at the damage; the rest is fetched again from the leader.

        Raises:
            NatslogError: it could not be dropped yet.
        """
        try:
            start = log.first_damaged_offset()
        except OSError as error:
            raise storage_error(error, f"stream {name!r}: its damage could not be located in {self.path}") from error
        if start is not None:
            logger.warning(
                "stream %s: the log is damaged from offset %d on; it is fetched again from the leader",
                name,
                start,
                extra=event("replica.fetched_again", stream=name, offset=start),
            )
            log.discard_from(start)
        log.scrub.repaired()
        log.scrub.store()

    def set_aside(self, name: str) -> None:
        """Keeps a folder that cannot be opened under another name.

        Raises:
            StorageFailed: it could not be renamed.
        """
        if not self.path.exists():
            return
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.damaged-{number}")).exists():
            number += 1
        try:
            self.path.rename(aside)
            sync_folder(aside.parent)
        except OSError as error:
            raise storage_error(error, f"stream {name!r}: its damaged folder could not be renamed") from error
        logger.warning(
            "stream %s: its damaged folder is kept as %s; it is fetched again from the leader",
            name,
            aside,
            extra=event("replica.set_aside", stream=name, path=aside),
        )


def storage_error(error: OSError, what: str) -> NatslogError:
    """What the caller can do about it: wait for room, try again, or check the disk."""
    message = f"{what}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(message)
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return StorageUnavailable(message)
    return StorageFailed(message)
