"""`view=latest`: the newest message of each key or subject, without the messages that it supersedes.

The leader determines the offsets of a view with the first request and keeps them for a while (`log.latest_views`); all
further requests state `as_of`. Nothing superseded is read: whole batches without a message of the view are passed over.
"""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from natslog.http.context import broker_of
from natslog.log.removed import AllBut
from natslog.node.replicas.stream import HostedStream


async def latest_view(request: web.Request, stream: HostedStream, as_of: int | None) -> AllBut:
    """The latest view of a stream that is led here, as of a high watermark, or of the present one.

    Raises:
        As `LatestViews.begun` and `begin`.
    """
    log, now_s = stream.usable_log(), time.monotonic()
    if as_of is not None and (begun := log.latest_views.begun(as_of, log.high_watermark, now_s)) is not None:
        return begun
    return await asyncio.get_running_loop().run_in_executor(
        broker_of(request).readers, log.latest_views.begin, as_of, now_s
    )
