"""`GET /v1/streams/{name}/subjects`: the distinct subjects of a stream, with counts, in pages.

Theory of operation. The index of subjects (`log.subject_index`) counts the visible messages of each subject, in a
reader's thread. The result is of one high watermark (`as_of`) and is kept for a while; a request that states `as_of`
gets the next page of the same result, while messages are appended. A single subject is looked up in the index.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakValueDictionary

from aiohttp import web

from natslog.errors import ViewExpired
from natslog.http.access import limits_of, require_still
from natslog.http.context import broker_of, leading, read_from_log, stated
from natslog.http.endpoint import Call
from natslog.http.shapes.common import Answer
from natslog.http.shapes.reading import SubjectCount, SubjectPage, SubjectsOf
from natslog.log.subject_counts import SubjectCounts
from natslog.log.subject_index import VisibleState
from natslog.model import StreamId
from natslog.node.replicas.stream import HostedStream
from natslog.security.decisions import Patterns, is_whole
from natslog.subjects import is_wildcard

_KEPT = 8
_KEPT_S = 300.0


@dataclass(slots=True)
class _Kept:
    """`erasures`: of the log, when they were counted: a later one may have removed a subject."""

    counts: SubjectCounts
    erasures: int
    used_s: float


class SubjectLists:
    """Of one broker: the results that readers use now."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[StreamId, int, int, int], _Kept] = OrderedDict()
        self._reading: WeakValueDictionary[StreamId, asyncio.Lock] = WeakValueDictionary()

    async def of(self, request: web.Request, stream: HostedStream, as_of: int | None) -> SubjectCounts:
        """The subjects of a stream that is led here, at present or as of a former high watermark.

        Raises:
            ViewExpired: that result is not kept any more. CorruptLog: the log must be read for it, and cannot be. As
                `read_from_log`.
        """
        self._drop_old()
        if as_of is not None:
            return self._of_then(stream, as_of)
        erasures = stream.usable_log().erasures.serial
        lock = self._reading.setdefault(stream.id, asyncio.Lock())
        async with lock:  # of requests at once, one reads
            state = await read_from_log(request, stream, lambda log: log.subjects.visible_state())
            kept = self._kept.get((stream.id, *state.key))
            if kept is None or kept.erasures != erasures:
                state, counts = await read_from_log(request, stream, lambda log: log.subjects.counts())
                kept = self._keep(stream.id, state, _Kept(counts, erasures, time.monotonic()))
            return kept.counts

    def _keep(self, stream_id: StreamId, state: VisibleState, kept: _Kept) -> _Kept:
        while len(self._kept) >= _KEPT:
            self._kept.popitem(last=False)
        self._kept[stream_id, *state.key] = kept
        return kept

    def _of_then(self, stream: HostedStream, as_of: int) -> SubjectCounts:
        erasures = stream.usable_log().erasures.serial
        for (stream_id, end, _, _), kept in reversed(self._kept.items()):
            if (stream_id, end, kept.erasures) == (stream.id, as_of, erasures):
                kept.used_s = time.monotonic()
                return kept.counts
        raise ViewExpired(
            f"the subjects of stream {stream.name!r} as of offset {as_of} are no longer known here: begin again, "
            "without after and as_of",
            stream=stream.name,
            as_of=as_of,
        )

    def _drop_old(self) -> None:
        now_s = time.monotonic()
        for key, kept in list(self._kept.items()):
            if now_s - kept.used_s > _KEPT_S:
                del self._kept[key]


SUBJECT_LISTS = web.AppKey("subject_lists", SubjectLists)


async def subjects(call: Call[SubjectsOf, None]) -> Answer[SubjectPage]:
    """The distinct subjects of the visible messages, in ascending order, with counts and offsets, in pages. The first
    request for a stream reads all of its subjects, to make an index

    Those that the identity may read.
    """
    request, asked = call.request, call.parameters
    pattern, after = asked.pattern, asked.after
    stream = await leading(request)
    allowed = limits_of(request, "read", stream.record)
    if pattern is not None and asked.as_of is None and not any(map(is_wildcard, pattern.split("."))):
        found = await read_from_log(request, stream, lambda log: log.subjects.on_subject(pattern))
        listed = [SubjectCount(pattern, found.count, found.first, found.last)] if found.count else []
        if allowed is not None and not is_whole(allowed, (pattern,)):
            listed = []
        require_still(request)
        shown = listed if after is None or pattern.encode() > after.encode() else []
        return stated(request, stream, SubjectPage(stream.name, found.state.end, len(listed), shown))
    counts = await request.app[SUBJECT_LISTS].of(request, stream, asked.as_of)
    page = await asyncio.get_running_loop().run_in_executor(
        broker_of(request).readers, _page, stream.name, counts, pattern, allowed, after, asked.limit
    )
    require_still(request)
    return stated(request, stream, page)


def _page(
    name: str, counts: SubjectCounts, pattern: str | None, allowed: Patterns | None, after: str | None, limit: int
) -> SubjectPage:
    if allowed is not None and not (pattern is not None and is_whole(allowed, (pattern,))):
        counts = counts.covered_by(allowed)
    if pattern is not None:
        counts = counts.covered_by((pattern,))
    rows = counts.page(after, limit).to_pydict()
    listed = [SubjectCount(*row) for row in zip(*rows.values(), strict=True)]
    return SubjectPage(name, counts.end, len(counts.table), listed)
