"""The tail of a stream over one connection: messages from an offset on, and what follows, as it is committed.

Theory of operation. The response has no end. Whenever the high watermark has moved, Arrow messages are sent with the
rows of all offsets up to it; the header of each states its offsets, so that the reader can tell how far it has got also
where rows were removed or left out. What was committed just now is in memory (`RecentCommits`), and sent by the event
loop: a few commits as they are stored, with their CRCs, and others, or chosen rows, as one message. A reader that is
behind gets one part after another from the files, at its own pace. Where nothing happens, a message without rows is
sent every `HEARTBEAT_S`: for a reader that receives none, the broker is gone, and a broker whose message cannot
be sent notices the end of the reader.

The response ends, with the mark of the end of an Arrow stream, when the broker stops or does not lead the stream any
more. The reader asks again from where it is, as after any other end.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

import pyarrow as pa
from aiohttp import web

from natslog.arrow.ipc import Bytes
from natslog.arrow.projection import encode_rows
from natslog.arrow.schema import COLUMNS, MESSAGE_SCHEMA
from natslog.errors import NoLeader
from natslog.http.access import LIMITS, limits_of, polling, require_still, rights_of
from natslog.http.answer_parts import ARROW_STREAM, Question, columns_in_memory, rows_in_memory, stored_rows
from natslog.http.context import broker_of, check_still_leading, epoch_headers, leading
from natslog.http.endpoint import Call
from natslog.http.messages import further, or_elsewhere
from natslog.http.row_shares import Passed, Share
from natslog.http.sending import Body, disconnecting_slow_client
from natslog.http.shapes.reading import TailOf
from natslog.node.replicas.stream import HostedStream
from natslog.node.threads import in_thread

HEARTBEAT_S = 1.0
_NOTHING = pa.RecordBatch.from_pylist([], schema=MESSAGE_SCHEMA)


async def tail(call: Call[TailOf, None]) -> web.StreamResponse:
    """Messages from start on, and those that follow, as they are committed, as an Arrow IPC stream without an end. Each
    of its messages states the offsets that it is about, as those of stored columns do; one without rows is sent every
    second. The response ends where the broker does not lead the stream any more
    """
    request, asked = call.request, call.parameters
    stream = await leading(request)
    limits, rights = request.app[LIMITS], rights_of(request)
    with polling(request):
        sent = _Tail(request, stream, _question(request, asked, stream))
        message = await or_elsewhere(request, stream, sent.next_message())
        check_still_leading(request, stream)
        headers = epoch_headers(stream) | {"Natslog-Batches": "columns"}
        body = await Body.begun(request, headers, ARROW_STREAM, None, broker_of(request).readers)
        with disconnecting_slow_client(request):
            await body.send_bytes(sent.question.opening)
        while True:
            limits.charge(rights, len(message))
            with disconnecting_slow_client(request):
                await body.send_bytes(message)
            await limits.sent(rights)
            if not await sent.wait():
                break
            require_still(request)
            message = await further(request, stream, sent.next_message())
    with disconnecting_slow_client(request):
        await body.send_bytes(sent.question.ending)
        return await body.end()


def _question(request: web.Request, asked: TailOf, stream: HostedStream) -> Question:
    return Question(
        start=asked.start,
        end=None,
        max_bytes=None,
        wait_ms=0,
        subject=asked.subject,
        allowed=limits_of(request, "read", stream.record),
        columns=asked.columns or COLUMNS,
        ndjson=False,
        exact=True,
        share=Share.parse(asked.share) if asked.share else None,
        passed=Passed.parse_all(asked.passed) if asked.passed else (),
    )


class _Tail:
    """What is sent to one reader. Belongs to the event loop."""

    def __init__(self, request: web.Request, stream: HostedStream, question: Question) -> None:
        self.question = question
        self._stream, self._readers, self._at = stream, broker_of(request).readers, question.start

    async def next_message(self) -> Bytes:
        """With the rows of the next offsets, up to the high watermark at most; without rows where it is reached. A few
        commits are several messages.

        Raises:
            OffsetOutOfRange, CorruptLog, OSError: they cannot be read.
        """
        stream, start = self._stream, self._at
        question = self.question = self.question.beyond(start)
        end = stream.usable_log().high_watermark
        passed = max((max(one.ends) for one in question.passed), default=0)
        if passed > end:
            raise NoLeader(
                f"rows of stream {stream.name!r} were passed up to offset {passed}, but it ends at {end}: it has lost "
                "its newest messages, or the reader was given wrong positions",
                stream=stream.name,
            )
        if start == end:
            return encode_rows(_NOTHING.select(question.columns), start, end)
        if (columns := columns_in_memory(stream, question, start, end)) is not None:
            self._at = end
            return columns
        recent = rows_in_memory(stream, question, start, end)
        stored = partial(in_thread, self._readers, stored_rows, stream, question, start, end)
        rows, self._at = await stored() if recent is None else (recent, end)
        batches = rows.combine_chunks().to_batches() or [_NOTHING.select(question.columns)]
        return encode_rows(batches[0], start, self._at)

    async def wait(self) -> bool:
        """Returns when there is something to send, or when nothing was sent for `HEARTBEAT_S`; false where the response
        is to end.
        """
        stream = self._stream
        advanced = stream.advanced  # stays, and is set, where the broker stops
        if self._is_led() and not advanced.is_set() and stream.usable_log().high_watermark == self._at:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await advanced.wait()
        return self._is_led() and not stream.advanced.is_set()

    def _is_led(self) -> bool:
        return self._stream.is_leading and self._stream.log is not None
