"""How much the compressed segments of a log hold uncompressed. It is measured when they are sealed, and stored in the
file `compression` beside them: a start reads neither batches nor footers.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import msgspec

from natslog.errors import CorruptLog, DataDirError, UpgradeRequired
from natslog.log.chain import SegmentChain
from natslog.log.checked_file import read_record, write_checked
from natslog.log.sealed import SealedSegment
from natslog.log_events import event

logger = logging.getLogger("natslog.log")

COMPRESSION_FILE = "compression"


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The file `compression`: base offset and uncompressed bytes of each compressed segment."""

    segments: tuple[tuple[int, int], ...] = ()


class CompressedSizes:
    """Of one log. Thread-safe; reads its file once. Args: `is_stored`: False: the sizes are not kept."""

    def __init__(self, folder: Path, *, is_stored: bool) -> None:
        self._path, self._is_stored = folder / COMPRESSION_FILE, is_stored
        self._lock = threading.Lock()
        self._uncompressed_bytes = dict(_read(self._path).segments)

    def sealed(self, chain: SegmentChain, base_offset: int, uncompressed_bytes: int | None) -> None:
        """A segment of the chain was sealed; None: without compression. Best effort."""
        with self._lock:
            was, sizes = self._uncompressed_bytes, self._uncompressed_bytes | {base_offset: uncompressed_bytes}
            bases = {one.base_offset for one in chain.snapshot()}
            known = {base: size for base, size in sizes.items() if size is not None and base in bases}
            self._uncompressed_bytes = known
            if known != was and self._is_stored:
                self._store()

    def _store(self) -> None:
        try:
            content = _Stored(segments=tuple(sorted(self._uncompressed_bytes.items())))
            write_checked(self._path, COMPRESSION_FILE, 1, content)
        except OSError as error:
            logger.warning(
                f"{self._path} could not be written: {error.strerror or error}",
                extra=event("file.not_written", path=self._path),
            )

    def uncompressed_bytes(self, base_offset: int) -> int | None:
        """Of the compressed segment that begins there; None where it is not known, or not compressed."""
        return self._uncompressed_bytes.get(base_offset)

    def totals(self, chain: SegmentChain) -> tuple[int, int] | None:
        """Stored and uncompressed bytes of the compressed segments; None where none is known. Touches no file."""
        sizes = self._uncompressed_bytes
        if not sizes:
            return None
        known = [one for one in chain.snapshot() if isinstance(one, SealedSegment) and one.base_offset in sizes]
        stored_bytes = sum(one.size_bytes for one in known)
        return (stored_bytes, sum(sizes[one.base_offset] for one in known)) if known else None


def _read(path: Path) -> _Stored:
    try:
        return read_record(path, COMPRESSION_FILE, 1, _Stored) or _Stored()
    except (CorruptLog, DataDirError, UpgradeRequired, OSError) as error:
        logger.warning("%s is ignored: %s", path, error, extra=event("file.ignored", path=path))
        return _Stored()
