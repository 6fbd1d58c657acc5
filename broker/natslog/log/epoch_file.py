"""The epoch history on disk, and how it is rebuilt from the log where the file is lost."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from natslog.arrow import ipc
from natslog.cluster.epochs import EpochHistory
from natslog.errors import CorruptLog
from natslog.log.chain import SegmentChain
from natslog.log.checked_file import read_checked, write_checked
from natslog.log.segment import damage, read_at
from natslog.log_events import event

logger = logging.getLogger("natslog.log")

_NAME = "leader-epochs"


def read_epochs(folder: Path) -> EpochHistory | None:
    """None where there is no file.

    Raises:
        CorruptLog: it is damaged. DataDirError: a newer format.
    """
    history = read_checked(folder / _NAME, _NAME, 1)
    return None if history is None else EpochHistory((epoch, start) for epoch, start in history)


def write_epochs(folder: Path, epochs: EpochHistory, *, sync_name: bool = True) -> None:
    """Raises OSError."""
    write_checked(folder / _NAME, _NAME, 1, epochs.entries, sync_name=sync_name)


def rebuilt_epochs(folder: Path, chain: SegmentChain, *, has_others: bool) -> EpochHistory:
    """The history according to the headers of all batches; bodies are not read.

    It has no epochs without messages, and the first epoch begins with the log. As after retention, the comparison with
    another replica uses the epochs that both have.

    Args:
        has_others: the stream has other replicas, with which epochs are compared.

    Raises:
        CorruptLog: a header or footer is damaged, or the log holds no message and does not begin at 0.
        OSError: a file cannot be read.
    """
    logger.warning(
        f"{folder}: {_NAME} is missing; it was rebuilt from the headers of all batches",
        extra=event("log.file_rebuilt", path=folder / _NAME),
    )
    entries: list[tuple[int, int]] = []
    for segment in chain.segments:
        index = segment.index
        fd = os.open(segment.path, os.O_RDONLY)
        try:
            for at in range(len(index)):
                entry = index[at]
                header = ipc.proven_header(read_at(fd, entry.position, min(entry.length, ipc.MAX_HEADER_BYTES)))
                if header is None:
                    raise damage(segment.path, entry, "has a damaged header")
                if not entries or header.epoch != entries[-1][0]:
                    entries.append((header.epoch, header.base_offset))
        finally:
            os.close(fd)
    if not entries and chain.log_start_offset > 0 and has_others:
        raise CorruptLog(
            f"{folder / _NAME} is missing, and the log has no message to rebuild it from: restore the file from a "
            "copy; if the stream has other replicas, the log is fetched again from them",
            file=str(folder / _NAME),
        )
    return EpochHistory(entries)
