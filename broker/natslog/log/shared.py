"""What the parts of one log share, whichever thread they run in.

`StreamLog` appends, and belongs to the log's one writer. `LogUpkeep` writes segments again and removes them, in threads
of maintenance; readers run anywhere. What they have in common is here.

Locks, in the order in which they are taken: `files_lock`, `checkpoint_lock`, those of the parts, `SegmentChain.lock`. A
test fails where two of them are taken in both orders.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

from natslog.errors import CorruptLog, StorageFailed
from natslog.log.chain import SegmentChain
from natslog.log.checkpoints import Checkpoints
from natslog.log.compression import CompressedSizes
from natslog.log.erasing import Erasures
from natslog.log.kept_messages import KeptMessages
from natslog.log.latest_views import LatestViews
from natslog.log.log_reader import LogReader
from natslog.log.message_bytes import MessageBytes, size_rule
from natslog.log.newest_messages import NewestMessages
from natslog.log.opening import check_folder
from natslog.log.options import LogOptions
from natslog.log.recent_commits import RecentCommits
from natslog.log.room import DiskRoom
from natslog.log.scrub import ScrubProgress
from natslog.log.small_segments import Full
from natslog.log.subject_index import SubjectIndex
from natslog.log.visibility import Visibility
from natslog.model import StreamSettings

_SMALLEST_ROLL_BYTES = 64 * 1024
_ROLLS_PER_LIMIT = 8


class SharedLog:
    """See the module.

    Args:
        must_exist: the log was there before.

    Attributes:
        settings: of the stream; replaced as a whole when they are edited (`adopt`). `full`: when a segment is, by them.
        failure: why the log takes no more writes; None: it takes some.
        is_closed: no file of it changes any more.
        newest_timestamp_us: as stored, in stream time; 0 if it is unknown. `written_s`: when the newest message was
            written here, or the log was opened, by a clock that never jumps.
        files_lock: protects which segments there are: one thread at a time writes one again, replaces or removes it.
        checkpoint_lock: protects that what is stored of the high watermark goes back only where the log is cut.

    Raises:
        CorruptLog: the checkpoint cannot be read. DataDirError: a newer format. OSError: the folder cannot be used.
    """

    def __init__(
        self, folder: Path, stream_id: str, settings: StreamSettings, options: LogOptions, *, must_exist: bool
    ) -> None:
        check_folder(folder, must_exist=must_exist)
        self.folder, self.stream_id, self.options = folder, stream_id, options
        self.adopt(settings)
        self.failure: StorageFailed | CorruptLog | None = None
        self.is_closed = False
        self.newest_timestamp_us, self.written_s = 0, time.monotonic()
        self.files_lock, self.checkpoint_lock = threading.Lock(), threading.Lock()
        self.chain = chain = SegmentChain()
        stored_rows = LogReader(chain).stored_rows
        self.visibility = Visibility(folder, stored_rows, lambda: chain.log_start_offset)
        self.reader = LogReader(chain, self.visibility)
        subject_rows = partial(stored_rows, columns=("offset", "subject"))
        self.subjects = SubjectIndex(folder, chain, self.visibility, subject_rows, options.kept_counts)
        self.newest = NewestMessages(chain, self.visibility, self.reader, self.subjects)
        self.message_bytes = MessageBytes(chain, self.visibility.removed, lambda: size_rule(self.settings))
        self.recent = RecentCommits(options.recent_room)
        self.room = DiskRoom(folder, options.min_free_bytes, options.store)
        self.checkpoints = Checkpoints(folder)
        self.scrub = ScrubProgress(folder, is_stored=options.stores_scrub)
        self.compression = CompressedSizes(folder, is_stored=options.stores_scrub)
        self.erasures = Erasures(folder)
        self.kept = KeptMessages()
        self.latest_views = LatestViews(self.newest.all, lambda: self.erasures.serial)

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self.written_s

    def adopt(self, settings: StreamSettings) -> None:
        """These are the settings of the stream now. Its limits roll segments earlier, so that retention can work in
        whole segments.
        """
        self.settings = settings
        roll_bytes = self.options.segment_bytes
        if settings.max_bytes is not None:
            roll_bytes = min(roll_bytes, max(_SMALLEST_ROLL_BYTES, settings.max_bytes // _ROLLS_PER_LIMIT))
        roll_age_s = min(self.options.segment_age_s, (settings.max_age_s or 1e12) / _ROLLS_PER_LIMIT)
        roll_rows = max(1, (settings.max_messages or 2**62) // _ROLLS_PER_LIMIT)
        self.full = Full(roll_bytes, roll_rows, roll_age_s * 1_000_000)

    def checkpoint(self) -> None:
        """Makes the high watermark durable, so that a file that is cut short later is seen as damage, and the start by
        limits, so that it does not go back. Raises OSError.
        """
        with self.checkpoint_lock:
            if self.failure is None and not self.is_closed:
                self.checkpoints.advance(self.chain.high_watermark, self.chain.limited_below)
