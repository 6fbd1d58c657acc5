"""Publishing many rows to NATS: columnar frames out, columnar acks in; for the command line and the Spark sink.

    with Publisher("nats://127.0.0.1:4222") as publisher:
        publisher.publish(Rows(subjects, values), ack="stored")

Theory of operation. Rows go out in slices. `flush`: after the last one the server confirms that it has the bytes.
`stored`: every row carries a reply subject `<inbox>.~<sequence>` and a message id; acks are counted as columns
(`in_flight`); rows that stay unacked are sent again with the same id until `ack_timeout_s` passes without any progress,
so that a stream which deduplicates stores them once. A row is acked when one stream has acked it, whichever that is;
or, with `streams`, when each of these has.

Invariant: `publish` returns only when the requested confirmation has been received for every row. A row without an id
is never sent twice.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from natslog import tracing
from natslog.client.in_flight import InFlight, Sequences, Slice
from natslog.client.publish_spans import PublishSpan, begin_span
from natslog.errors import InvalidRequest, NatsUnavailable, PublishFailed
from natslog.model import MAX_IN_FLIGHT, Ack
from natslog.wire.enveloping import as_envelopes
from natslog.wire.frames import Frames
from natslog.wire.link import NatsCredentials, NatsLink
from natslog.wire.outgoing import BY_HEADER, BY_REPLY, ack_header_bytes
from natslog.wire.outgoing_rows import Rows, check_rows

__all__ = ["BY_HEADER", "BY_REPLY", "Publisher", "Rows"]

Result = TypeVar("Result")

_SLICE_ROWS = 8192
_SLICE_BYTES = 1024 * 1024
_LEAST_SLICES = 4  # that may be in flight: the next one is made while the others wait for their acks
_FLUSH_EVERY_BYTES = 16 * 1024 * 1024
_RESEND_AFTER_S = 2.0
_RESEND_REFUSED_AFTER_S, _RESEND_REFUSED_AT_MOST_S = 0.1, 0.4
_ASK_AFTER_S = 1.0
_TICK_S = 0.25
_LOST_S = 0.01


class Publisher:
    """A connection to NATS with a loop of its own in a thread; use it in a `with`, from one thread.

    Errors of nats-py are raised as natslog's own, with the remedy; no text shows a password of the URL.

    Args:
        ack_timeout_s: how long `stored` goes on without a single new ack.
        max_in_flight: messages sent and not acked at any time (and no more than some 32 MiB of them). A message is a
            row, or many in an envelope.
        streams: names of streams; with `stored`, each of them must ack each row. Empty: the first ack of any stream
            counts.
        why_hopeless: is called in a thread after one second without an ack, once for each subject that waits for one.
            Returns why no ack will come, which ends the waiting, or None.
        envelope: rows of one subject are sent together, thousands in one message, and acked and deduplicated together
            (see `wire.envelope`). Only for subjects whose streams say `"envelopes": true`; each other subscriber gets
            these messages as they are.
        span_attributes: of its spans, in addition to those that it states itself.
        on_acked: called in the publisher's thread with a time in seconds, and the number of rows that were acked so
            long after they were first sent.

    Raises (on entering):
        NatsUnavailable: no server answers. NatsLoginRefused: it does not accept the credentials.
        InvalidRequest: it was used before.
    """

    def __init__(
        self,
        url: str,
        *,
        credentials: NatsCredentials = NatsCredentials(),
        name: str = "natslog-publisher",
        connect_timeout_s: float = 5.0,
        ack_timeout_s: float = 30.0,
        max_in_flight: int = MAX_IN_FLIGHT,
        streams: Sequence[str] = (),
        envelope: bool = False,
        why_hopeless: Callable[[str], str | None] | None = None,
        on_acked: Callable[[float, int], None] | None = None,
        span_attributes: tracing.Attributes = MappingProxyType({}),
    ) -> None:
        self._link = NatsLink(url, name=name, credentials=credentials)
        self._connect_timeout_s = connect_timeout_s
        self._ack_timeout_s = ack_timeout_s
        self._slice_rows = min(_SLICE_ROWS, -(-max_in_flight // _LEAST_SLICES))
        self._streams = tuple(dict.fromkeys(streams))
        self._envelope = envelope
        self._why_hopeless = why_hopeless
        self._asked_of = ""
        self._on_acked = on_acked
        self._span_attributes = span_attributes
        self._inbox = f"_INBOX.{secrets.token_hex(11)}"
        self._in_flight = InFlight(self._inbox, self._streams, max_in_flight)
        self._awaited: Callable[[], bool] = self._in_flight.is_empty
        self._has_come = asyncio.Event()  # what is awaited
        self._last_progress = 0.0
        self._refusal = ""
        self._refused_for_good = -1  # a message that would be refused again
        self._failure: PublishFailed | None = None
        self._has_no_responders = False
        self._refused_s = 0.0  # when the server last said that there are none
        self._refused_after_s: float | None = None  # for how long what is sent again waits, while there are none
        self._unflushed_bytes = 0
        self._sent_plain = False  # and their arrival was not confirmed yet
        self._before: tuple[int, int] | None = None  # connections and refusals before what is being sent
        self._span: PublishSpan | None = None  # of what is being sent
        self.acked = 0
        self.resent = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="publisher", daemon=True)

    def __enter__(self) -> Publisher:
        if self._thread.ident is not None:
            raise InvalidRequest("this publisher was used before: make a new one")
        self._thread.start()
        try:
            self._run(self._open())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Flushes and closes the connection."""
        self._end_span("none")
        if self._thread.is_alive():
            self._run(self._link.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Raises InvalidRequest where there is no connection to run it on."""
        if not self._thread.is_alive():
            work.close()
            raise InvalidRequest("this publisher is not open: use it in a `with`")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        await self._link.open()
        await self._link.wait_until_up(self._connect_timeout_s)
        await self._link.attach((f"{self._inbox}.*",), self._receive_acks)

    @property
    def max_payload_bytes(self) -> int:
        """The maximum size of a message that the server accepts, headers and body."""
        return self._link.max_payload_bytes

    @property
    def ack_header_bytes(self) -> int:
        """The most that the header takes which `BY_HEADER` adds to each row."""
        return ack_header_bytes(self._inbox)

    def publish(self, rows: Rows, ack: Ack, *, first_row: int = 0) -> None:
        """Sends all rows in order and returns when `ack` holds for them; `send`, then `wait_for_ack`."""
        self.send(rows, ack, first_row=first_row)
        self.wait_for_ack(ack)

    def send(
        self, rows: Rows, ack: Ack, *, first_row: int = 0, ack_to: int = BY_REPLY, envelope: bool | None = None
    ) -> None:
        """Sends all rows in order. With `stored`, returns when at most `max_in_flight` of them wait for an ack.

        Args:
            first_row: the number of the first row, for error messages.
            ack: `none`: handed to the connection; `flush`: the server has the bytes; `stored`: a stream acked each row.
            ack_to: where rows that are to be `stored` request their acks: `BY_REPLY` for streams whose setting `acks`
                is `reply`, `BY_HEADER` for `header`, or both.
            envelope: None: as the publisher was made.

        Raises:
            PublishFailed: rows that NATS would not accept (none of them was sent), or rows that no stream acked in
            time. NatsUnavailable: no connection could be made in time.
        """
        more_bytes = self.ack_header_bytes if ack == "stored" and ack_to & BY_HEADER else 0
        check_rows(rows, self._link.max_payload_bytes, first_row, more_bytes)
        if self._before is None:
            self._before = (self._link.connections, self._link.forbidden)
            self._refusal, self._failure, self._has_no_responders = "", None, False
            self._span = begin_span(self._span_attributes)
        span = self._span if len(rows) else None
        if span is not None:
            span.note_rows(rows)
        if self._envelope if envelope is None else envelope:
            rows = as_envelopes(rows, self._link.max_payload_bytes - more_bytes)
        if span is not None:
            rows = span.added_to(rows, self._link.max_payload_bytes - more_bytes)
        try:
            if len(rows):
                self._sent_plain |= ack == "flush"
                self._run(self._send_stored(rows, ack_to) if ack == "stored" else self._send_plain(rows))
        except BaseException as error:
            self._before = None
            self._end_span(ack, error)
            raise

    def wait_for_ack(self, ack: Ack) -> None:
        """Returns when `ack` holds for everything sent since the last time.

        Raises:
            PublishFailed: the server refused messages, or some were not acked in time.
            NatsUnavailable: the connection was lost, and it is not known which rows arrived.
        """
        try:
            if self._before is not None and ack == "stored":
                self._run(self._wait_until_stored())
            if self._before is not None and (ack == "flush" or self._sent_plain):
                self._run(self._wait_until_flushed())
        except BaseException as error:
            self._end_span(ack, error)
            raise
        finally:
            self._before, self._sent_plain = None, False
            self._end_span(ack)

    def _end_span(self, ack: Ack, error: BaseException | None = None) -> None:
        if self._span is not None:
            self._span.end(ack, error)
            self._span = None

    # ---- flush ----

    async def _send_plain(self, rows: Rows) -> None:
        for part in rows.parts(_SLICE_ROWS, _SLICE_BYTES):
            protocol = part.frames()
            await self._send(protocol)
            self._unflushed_bytes += len(protocol)
            if self._unflushed_bytes >= _FLUSH_EVERY_BYTES:
                await self._flush()

    async def _wait_until_flushed(self) -> None:
        assert self._before is not None, "something was sent"
        connections, forbidden = self._before
        await self._flush()
        self._raise_if_forbidden(forbidden)
        if self._link.connections != connections:
            raise NatsUnavailable(
                "the connection to NATS was lost while publishing: some rows may not have arrived, so publish them "
                "again"
            )

    async def _flush(self) -> None:
        await self._link.flush(self._ack_timeout_s)
        self._unflushed_bytes = 0

    def _raise_if_forbidden(self, before: int) -> None:
        if self._link.forbidden > before:
            raise PublishFailed(f"the NATS server refused messages: {self._link.last_refusal}")

    async def _send(self, protocol: memoryview) -> None:
        """Waits for a connection where there is none."""
        while not await self._link.send(protocol):
            await asyncio.sleep(_LOST_S)  # a connection that was just lost counts as connected until nats-py has run
            await self._link.wait_until_up(self._ack_timeout_s)

    # ---- stored ----

    async def _send_stored(self, rows: Rows, ack_to: int) -> None:
        self._last_progress = time.monotonic()  # no acks were counted while the caller was busy elsewhere
        try:
            for part in rows.parts(self._slice_rows, _SLICE_BYTES):
                await self._wait_until(partial(self._in_flight.has_room_for, len(part)))
                sent = self._in_flight.add(part, ack_to)
                await self._send_slice(sent, np.arange(len(part)))
        except BaseException:
            self._in_flight.clear()
            raise

    async def _wait_until_stored(self) -> None:
        self._last_progress = time.monotonic()
        try:
            await self._wait_until(self._in_flight.is_empty)
        finally:
            self._in_flight.clear()

    async def _send_slice(self, sent: Slice, rows: Sequences) -> None:
        part = sent.rows if len(rows) == len(sent.rows) else sent.rows.take(rows)
        sent.sent_at = time.monotonic()
        await self._send(part.frames(self._inbox, sent.first + rows, sent.ack_to))

    async def _wait_until(self, awaited: Callable[[], bool]) -> None:
        """Returns when acks have made this true; meanwhile sends late messages again.

        Raises:
            PublishFailed: nothing was acked for `ack_timeout_s`, or the server refused messages.
        """
        self._awaited = awaited
        self._raise_if_failed()
        while not awaited():
            self._has_come.clear()
            try:
                async with asyncio.timeout(_TICK_S if self._refused_after_s is None else _RESEND_REFUSED_AFTER_S / 2):
                    await self._has_come.wait()
            except TimeoutError:
                assert self._before is not None, "something was sent"
                self._raise_if_forbidden(self._before[1])
                await self._resend_late()
            self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        """Raises PublishFailed: an ack has shown that a message was not stored as it was meant."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    async def _resend_late(self) -> None:
        now = time.monotonic()
        if now - self._last_progress > self._ack_timeout_s:
            subject, _ = self._in_flight.first_waiting()
            listens = bool(self._refusal) or not self._has_no_responders
            why = self._why_unacked(f" within {self._ack_timeout_s:g} s")
            raise PublishFailed(why, unacked=self._in_flight.rows, subject=subject, listens=listens)
        if now - self._last_progress > _ASK_AFTER_S:
            if self._in_flight.waits_for(self._refused_for_good):
                raise PublishFailed(self._why_unacked(), unacked=self._in_flight.rows)
            await self._raise_if_hopeless()
        after_s = _RESEND_AFTER_S if self._refused_after_s is None else self._refused_after_s
        if now - self._last_progress > min(_TICK_S, after_s):  # else those that wait are on their way
            for sent, rows in self._in_flight.late(now - after_s):
                self.resent += len(rows)
                await self._send_slice(sent, rows)
                if self._refused_after_s is not None:
                    self._refused_after_s = min(2 * after_s, _RESEND_REFUSED_AT_MOST_S)

    async def _raise_if_hopeless(self) -> None:
        (subject, _), acked = self._in_flight.first_waiting(), self.acked
        if self._why_hopeless is None or subject == self._asked_of:
            return
        self._asked_of = subject
        why = await asyncio.to_thread(self._why_hopeless, subject)
        if why is not None and self.acked == acked:
            raise PublishFailed(f"{self._in_flight.rows} rows were not acked. {why}", subject=subject)

    def _why_unacked(self, within: str = "") -> str:
        subject, stream = self._in_flight.first_waiting()
        head = f"{self._in_flight.rows} rows were not acked{within} (the first to subject {subject!r}): "
        if stream:
            head += f"the ack of stream {stream!r} is missing: "
        if self._refusal:
            return head + f"the stream refused them: {self._refusal}"
        if self._has_no_responders:
            return (
                head
                + "no stream receives messages on that subject now: no stream records it, or its stream has no leader."
            )
        return head + "no stream answered. Check that a broker is running and that a stream records the subject."

    def _receive_acks(self, frames: Frames) -> None:
        """Runs in the loop for every received chunk of acks."""
        acked = self._in_flight.take_acks(frames)
        if (span := self._span) is not None:
            span.note_acks(frames)
        if acked.is_progress:
            self._last_progress = time.monotonic()
            if self._last_progress - self._refused_s > _RESEND_AFTER_S:
                self._refused_after_s = None
        if acked.rows:
            self.acked += acked.rows
            if self._on_acked is not None:
                for seconds, rows in self._in_flight.waited(acked, self._last_progress):
                    self._on_acked(seconds, rows)
        if acked.refusal is not None:
            self._note_refusal(acked.refusal, acked.refused)
        if acked.mismatch is not None:
            self._failure = PublishFailed(
                f"an envelope was stored as one message instead of as its rows ({acked.mismatch[:200]!r}): publish "
                'without envelopes, or only to subjects whose streams all say "envelopes": true'
            )
        if self._failure is not None or self._awaited():
            self._has_come.set()

    def _note_refusal(self, answer: bytes, sequence: int) -> None:
        """An empty reply is the server's "no responders"; any other reply is the reason of a stream."""
        self._refused_s = time.monotonic()
        if self._refused_after_s is None:  # mostly a stream changes its leader: that is known at once, and soon over
            self._refused_after_s = _RESEND_REFUSED_AFTER_S
            self._has_come.set()
        if not answer:
            self._has_no_responders = True
            return
        try:
            body = json.loads(answer)
            if not self._streams or body.get("stream", self._streams[0]) in self._streams:
                self._refusal = str(body["error"]["description"])
                if 400 <= body["error"]["code"] < 500 and body["error"]["code"] != 429:
                    self._refused_for_good = sequence
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            self._refusal = repr(answer[:200])
