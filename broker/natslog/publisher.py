"""Publishing many rows to NATS: columnar frames out, columnar acks in; for the command line and the Spark sink.

    with Publisher("nats://127.0.0.1:4222") as publisher:
        publisher.publish(Rows(subjects, values), ack="stored")

Theory of operation. Rows go out in slices. `flush`: after the last one the server confirms that it has the bytes.
`stored`: every row carries a reply subject `<inbox>.<sequence>` and a message id; acks are counted as columns; rows
that
stay unacked are sent again with the same id until `ack_timeout_s` passes without any progress, so that a stream which
deduplicates stores them once.

Invariant: `publish` returns only when what was asked for holds for every row. A row without an id is never sent twice.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.errors import NatsUnavailable, PublishFailed
from natslog.ingest.batches import BatchBuilder, is_utf8
from natslog.model import MAX_IN_FLIGHT, Ack
from natslog.subjects import MAX_SUBJECT_BYTES
from natslog.wire.frames import Frames
from natslog.wire.link import NatsCredentials, NatsLink
from natslog.wire.outgoing import header_blocks, number_text, publish_frames

Result = TypeVar("Result")

_SLICE_ROWS = 1000
_SLICE_BYTES = 1024 * 1024
_FLUSH_EVERY_BYTES = 16 * 1024 * 1024
_RESEND_AFTER_S = 2.0
_TICK_S = 0.25
_NAMED_ROWS = 3


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of equal length.

    Attributes:
        subjects: string. `values`: binary.
        keys: binary or None: sent as `Natslog-Key`. `ids`: string or None: sent as `Nats-Msg-Id`.
        headers: list<struct<key: string, value: string>> or None.
    """

    subjects: Any
    values: Any
    keys: Any | None = None
    headers: Any | None = None
    ids: Any | None = None

    def __len__(self) -> int:
        return len(self.values)

    def slice(self, start: int, count: int) -> Rows:
        return self._each(lambda column: column.slice(start, count))

    def take(self, rows: npt.NDArray[np.int64]) -> Rows:
        return self._each(lambda column: column.take(pa.array(rows)))

    def _each(self, change: Any) -> Rows:
        columns = (self.subjects, self.values, self.keys, self.headers, self.ids)
        return Rows(*(None if column is None else change(column) for column in columns))

    def header_blocks(self) -> Any | None:
        extra = {"Natslog-Key": self.keys, "Nats-Msg-Id": self.ids}
        given = {name: values for name, values in extra.items() if values is not None}
        return header_blocks(self.headers, given, len(self)) if given or self.headers is not None else None


def check_rows(rows: Rows, max_payload_bytes: int, first_row: int = 0) -> None:
    """Raises PublishFailed with number and reason of the first rows that NATS would not take."""
    problems = [
        ("value is null", pc.is_null(rows.values)),
        ("subject is null", pc.is_null(rows.subjects)),
        ("subject is not one plain NATS subject", pc.invert(_valid_subjects(rows.subjects))),
        (f"subject is longer than {MAX_SUBJECT_BYTES} bytes", pc.greater(_size(rows.subjects), MAX_SUBJECT_BYTES)),
        (
            f"message is larger than the server's limit of {max_payload_bytes} bytes",
            _too_large(rows, max_payload_bytes),
        ),
    ]
    for name, values in (("key", rows.keys), ("message id", rows.ids)):
        if values is not None:
            problems.append((f"{name} is not one line of UTF-8 text without blanks around it", _not_one_line(values)))
    if rows.headers is not None:
        problems.append(("a header name or value is not allowed", _bad_headers(rows.headers)))
    for reason, bad in problems:
        at = np.flatnonzero(pc.fill_null(bad, False).to_numpy(zero_copy_only=False))
        if len(at):
            named = ", ".join(
                f"row {first_row + row} (subject {_shortened(rows.subjects[row].as_py())!r})"
                for row in at[:_NAMED_ROWS].tolist()
            )
            numbers = (at[:100] + first_row).tolist()
            raise PublishFailed(f"{len(at)} rows cannot be sent: {reason}: {named}", reason=reason, rows=numbers)


def _shortened(subject: str | None) -> str | None:
    return subject if subject is None or len(subject) <= 100 else subject[:100] + "…"


def _size(texts: Any) -> Any:
    return pc.binary_length(texts.cast(pa.binary()))


def _valid_subjects(subjects: Any) -> Any:
    wildcard = pc.match_substring_regex(subjects, r"(^|\.)[*>](\.|$)")
    plain = pc.match_substring_regex(subjects, r"^[^\s.\x00-\x1f\x7f]+(\.[^\s.\x00-\x1f\x7f]+)*$")
    return pc.and_(plain, pc.invert(wildcard))


def _too_large(rows: Rows, max_payload_bytes: int) -> Any:
    blocks = rows.header_blocks()
    size = pc.binary_length(rows.values)
    return pc.greater(size if blocks is None else pc.add(size, pc.binary_length(blocks)), max_payload_bytes)


def _not_one_line(values: Any) -> Any:
    """Binary text that could not stand in a header line: line breaks, or not UTF-8."""
    breaks = pc.match_substring_regex(values.cast(pa.binary()), r"[\r\n]|^[ \t]|[ \t]$")
    try:
        values.cast(pa.string())
    except pa.ArrowInvalid:
        garbled = [value is not None and not is_utf8(value) for value in values.cast(pa.binary()).to_pylist()]
        return pc.or_(pc.fill_null(breaks, False), pa.array(garbled))
    return breaks


def _bad_headers(headers: Any) -> Any:
    pairs = headers.flatten()
    bad_name = pc.invert(pc.match_substring_regex(pairs.field("key"), r"^[!-9;-~]+$"))
    bad_value = pc.match_substring_regex(pairs.field("value"), r"[\r\n]|^[ \t]|[ \t]$")
    bad = pc.or_(pc.fill_null(bad_name, True), pc.fill_null(bad_value, True))
    rows = np.unique(pc.list_parent_indices(headers).filter(bad).to_numpy())
    marks = np.zeros(len(headers), np.bool_)
    marks[rows] = True
    return pa.array(marks)


class _Slice:
    """Rows `[first, first + count)` of the publisher's sequence that wait for their acks."""

    def __init__(self, first: int, rows: Rows) -> None:
        self.first = first
        self.rows = rows
        self.waiting = np.ones(len(rows), np.bool_)
        # Without an id a stream could not know a second copy: such rows are sent once.
        known = np.zeros(len(rows), np.bool_) if rows.ids is None else pc.is_valid(rows.ids)
        self.has_id = np.asarray(known, np.bool_)
        self.sent_at = time.monotonic()


class Publisher:
    """A connection to NATS with a loop of its own in a thread; use it in a `with`, from one thread.

    Args:
        ack_timeout_s: how long `stored` goes on without a single new ack.
        max_in_flight: rows sent and not acked at any time.

    Raises (on entering):
        NatsUnavailable: no server answers.
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
    ) -> None:
        self._link = NatsLink(url, name=name, credentials=credentials)
        self._connect_timeout_s = connect_timeout_s
        self._ack_timeout_s = ack_timeout_s
        self._max_in_flight = max_in_flight
        self._inbox = f"_INBOX.{secrets.token_hex(11)}"
        self._next_sequence = 0
        self._slices: deque[_Slice] = deque()
        self._progress = asyncio.Event()
        self._last_progress = 0.0
        self._refusal = ""
        self._unheard = False
        self.acked = 0
        self.resent = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="publisher", daemon=True)

    def __enter__(self) -> Publisher:
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
        """Flushes and lets the connection go."""
        if self._thread.is_alive():
            self._run(self._link.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        await self._link.open()
        await self._link.wait_until_up(self._connect_timeout_s)
        await self._link.attach(f"{self._inbox}.*", self._receive_acks)

    def publish(self, rows: Rows, ack: Ack, *, first_row: int = 0) -> None:
        """Sends all rows in order and returns when `ack` holds for them.

        Args:
            first_row: the number of the first row, for error messages.
            ack: `none`: handed to the connection; `flush`: the server has the bytes; `stored`: a stream acked each row.

        Raises:
            PublishFailed: rows NATS would not take (nothing was sent), or rows that no stream acked in time.
            NatsUnavailable: the connection was lost and what arrived is not known.
        """
        check_rows(rows, self._link.max_payload_bytes, first_row)
        if len(rows):
            self._run(self._publish_stored(rows) if ack == "stored" else self._publish_plain(rows, ack))

    async def _publish_plain(self, rows: Rows, ack: Ack) -> None:
        connections, forbidden, unflushed = self._link.connections, self._link.forbidden, 0
        for part in _parts(rows, _SLICE_ROWS):
            protocol = publish_frames(_binary(part.subjects), part.values, headers=part.header_blocks())
            await self._send(protocol)
            unflushed += len(protocol)
            if unflushed >= _FLUSH_EVERY_BYTES:
                await self._link.flush(self._ack_timeout_s)
                unflushed = 0
        if ack == "flush":
            await self._link.flush(self._ack_timeout_s)
            self._raise_if_forbidden(forbidden)
            if self._link.connections != connections:
                raise NatsUnavailable(
                    "the connection to NATS was lost while publishing: some rows may not have arrived"
                )

    def _raise_if_forbidden(self, before: int) -> None:
        if self._link.forbidden > before:
            raise PublishFailed(f"the server refused messages: {self._link.last_refusal}")

    async def _send(self, protocol: bytes) -> None:
        """Waits for a connection where there is none."""
        while not await self._link.send(protocol):
            await self._link.wait_until_up(self._ack_timeout_s)

    # ---- stored ----

    async def _publish_stored(self, rows: Rows) -> None:
        self._last_progress = time.monotonic()
        self._refusal, self._unheard = "", False
        forbidden = self._link.forbidden
        try:
            for part in _parts(rows, min(_SLICE_ROWS, self._max_in_flight)):
                while self._slices and self._in_flight() + len(part) > self._max_in_flight:
                    await self._wait_for_acks()
                waiting = _Slice(self._next_sequence, part)
                self._next_sequence += len(part)
                self._slices.append(waiting)
                await self._send_slice(waiting, np.arange(len(part)))
            while self._slices:
                await self._wait_for_acks()
                self._raise_if_forbidden(forbidden)
        finally:
            self._slices.clear()

    def _in_flight(self) -> int:
        return int(sum(waiting.waiting.sum() for waiting in self._slices))

    async def _send_slice(self, waiting: _Slice, rows: npt.NDArray[np.int64]) -> None:
        part = waiting.rows if len(rows) == len(waiting.rows) else waiting.rows.take(rows)
        sequence = number_text(pa.array(waiting.first + rows))
        replies = pc.binary_join_element_wise(f"{self._inbox}.".encode(), sequence, b"")
        waiting.sent_at = time.monotonic()
        await self._send(
            publish_frames(_binary(part.subjects), part.values, headers=part.header_blocks(), replies=replies)
        )

    async def _wait_for_acks(self) -> None:
        """Returns after new acks, or after a look at what must be sent again.

        Raises:
            PublishFailed: nothing was acked for `ack_timeout_s`.
        """
        self._progress.clear()
        try:
            async with asyncio.timeout(_TICK_S):
                await self._progress.wait()
        except TimeoutError:
            await self._resend_late()
        while self._slices and not self._slices[0].waiting.any():
            self._slices.popleft()

    async def _resend_late(self) -> None:
        now = time.monotonic()
        if now - self._last_progress > self._ack_timeout_s:
            raise PublishFailed(self._why_unacked(), unacked=self._in_flight())
        for waiting in list(self._slices):
            late = np.flatnonzero(waiting.waiting & waiting.has_id)
            if len(late) and now - waiting.sent_at > _RESEND_AFTER_S:
                self.resent += len(late)
                await self._send_slice(waiting, late)

    def _why_unacked(self) -> str:
        count, subject = self._in_flight(), self._first_unacked_subject()
        head = f"{count} rows were not acked within {self._ack_timeout_s:g} s (the first to subject {subject!r}): "
        if self._refusal:
            return head + f"the stream refused with: {self._refusal}"
        if self._unheard:
            return head + "no stream listens to that subject. Create one: natslog stream create NAME --subject …"
        return head + "no stream answered. Is a broker running that records that subject?"

    def _first_unacked_subject(self) -> str:
        waiting = next(waiting for waiting in self._slices if waiting.waiting.any())
        return str(waiting.rows.subjects[int(np.flatnonzero(waiting.waiting)[0])].as_py())

    def _receive_acks(self, frames: Frames) -> None:
        """Runs in the loop for every received chunk of acks."""
        builder = BatchBuilder()
        builder.add(frames)
        columns = builder.taken().rows.to_arrow()
        sequence = pc.utf8_slice_codeunits(columns.column("subject"), len(self._inbox) + 1).cast(pa.int64())
        answers = columns.column("value")
        has_sequence, has_error = pc.match_substring(answers, b'"seq"'), pc.match_substring(answers, b'"error":')
        good = pc.and_(has_sequence, pc.invert(has_error)).to_numpy(zero_copy_only=False)
        self._mark_acked(sequence.to_numpy()[good])
        if not good.all():
            self._note_refusal(answers.filter(pa.array(~good))[0].as_py())

    def _mark_acked(self, acked: npt.NDArray[np.int64]) -> None:
        for waiting in self._slices:
            rows = acked[(acked >= waiting.first) & (acked < waiting.first + len(waiting.rows))] - waiting.first
            if len(rows):
                self.acked += int(waiting.waiting[np.unique(rows)].sum())
                waiting.waiting[rows] = False
                self._last_progress = time.monotonic()
                self._progress.set()

    def _note_refusal(self, answer: bytes) -> None:
        """An empty answer is the server's "no responders"; another one is a stream's reason."""
        if not answer:
            self._unheard = True
            return
        try:
            self._refusal = str(json.loads(answer)["error"]["description"])
        except (ValueError, KeyError, TypeError):
            self._refusal = repr(answer[:200])


def _binary(subjects: Any) -> Any:
    return subjects.cast(pa.binary())


def _parts(rows: Rows, max_rows: int) -> list[Rows]:
    """Slices of at most `max_rows` rows and, as far as single rows allow, `_SLICE_BYTES` bytes."""
    lengths = np.cumsum(pc.binary_length(rows.values).to_numpy(zero_copy_only=False).astype(np.int64))
    parts, start = [], 0
    while start < len(rows):
        before = int(lengths[start - 1]) if start else 0
        by_bytes = int(np.searchsorted(lengths, before + _SLICE_BYTES, side="right"))
        end = max(start + 1, min(start + max_rows, by_bytes))
        parts.append(rows.slice(start, end - start))
        start = end
    return parts
