"""The latest views of a log that readers use now.

Theory of operation. A view is of one high watermark (`as_of`), so that the requests of one reader fit together while
messages are appended. Its offsets are determined with the first request and kept for a while after the last one. As
long as they are kept, rewriting leaves the messages of the view in their files, also those that newer messages hide
meanwhile: otherwise a reader would miss them without an error.

Invariant. A view has no message that was erased: an erasure ends the views that began before it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pyroaring import BitMap64

from natslog.errors import InvalidRequest, ViewExpired
from natslog.log.removed import AllBut

_KEPT = 16
_KEPT_S = 900.0


@dataclass(slots=True)
class _Kept:
    view: AllBut
    erasures: int
    used_s: float


class LatestViews:
    """Of one log. Thread-safe.

    Args:
        determine: returns the offsets of a view that begins now, and the high watermark that it is of. `erasures`: a
            number that rises with each erasure.
    """

    def __init__(self, determine: Callable[[], tuple[BitMap64, int]], erasures: Callable[[], int]) -> None:
        self._determine, self._erasures = determine, erasures
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._lock = threading.Lock()  # a view that is being determined is pinned before files are rewritten

    def begun(self, as_of: int, high_watermark: int, now_s: float) -> AllBut | None:
        """The view as of a high watermark, if it is kept. Touches no file.

        Raises:
            InvalidRequest: there is no such high watermark yet.
        """
        if as_of > high_watermark:
            raise InvalidRequest(f"as_of {as_of} is above the high watermark {high_watermark}")
        kept = self._kept.get(as_of)
        if kept is None or kept.erasures != self._erasures():
            return None
        kept.used_s = now_s
        self._kept.move_to_end(as_of)
        return kept.view

    def renewed(self, view: AllBut, high_watermark: int, now_s: float) -> AllBut:
        """The view as of the same high watermark; another one if some of its messages were deleted meanwhile.

        Raises:
            ViewExpired: it is not kept any more.
        """
        kept = self.begun(view.end, high_watermark, now_s)
        if kept is None:
            raise _expired(view.end, high_watermark)
        return kept

    def begin(self, as_of: int | None, now_s: float) -> AllBut:
        """A view of what is committed now.

        Args:
            as_of: the high watermark that it has to be of, as the reader has begun with it.

        Raises:
            ViewExpired: it is not of this high watermark. InvalidRequest: the stream is compacted, and none of its
                messages has a key. CorruptLog: the log must be read for it, and cannot be.
        """
        with self._lock:
            self._drop_old(now_s)
            while len(self._kept) >= _KEPT:
                self._kept.popitem(last=False)
            erasures = self._erasures()  # before: an erasure meanwhile ends the view
            visible, end = self._determine()
            if as_of not in (None, end):
                raise _expired(as_of, end)
            kept = self._kept.get(end)
            if kept is None or kept.view.visible != visible:
                self._kept[end] = kept = _Kept(AllBut(visible, end), erasures, now_s)
            kept.used_s = now_s
            self._kept.move_to_end(end)
            return kept.view

    def pinned(self, now_s: float) -> BitMap64:
        """The messages of all views that are kept."""
        with self._lock:
            self._drop_old(now_s)
            return BitMap64.union(BitMap64(), *(one.view.visible for one in self._kept.values()))

    def _drop_old(self, now_s: float) -> None:
        erasures = self._erasures()
        for end, kept in list(self._kept.items()):
            if now_s - kept.used_s > _KEPT_S or kept.erasures != erasures:
                del self._kept[end]


def _expired(as_of: int | None, high_watermark: int) -> ViewExpired:
    return ViewExpired(
        f"the latest view as of offset {as_of} is not known any more, because it was not used for "
        f"{_KEPT_S / 60:.0f} minutes, messages were erased, too many others are read, or another broker became leader: "
        "begin to read again",
        as_of=as_of,
        high_watermark=high_watermark,
    )
