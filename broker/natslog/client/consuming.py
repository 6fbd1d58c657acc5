"""Consumes a stream batch by batch, from a named cursor on: `NatslogClient.consume`.

    with client.consume("orders", cursor="billing") as consumer:
        for batch in consumer:
            bill(batch.record_batch)

Theory of operation. A `ReadAhead` requests one part after another in a thread, with long polls at the end of the
stream. The iterator waits for the next part, for a checkpoint that is due, or for `close`, whichever comes first. A
batch is *in hand* from the time it is returned until the next one is requested; then it counts as processed, and its
end may be stored as the cursor (`checkpoints`). So a consumer that ends at any moment receives again what it had not
processed, and skips nothing: at least once, in order.

Errors. What passes (a broker restarts, a leader is chosen) is retried for `patience_s`. What the stream has lost is
confirmed by its newest leader (`confirming`) and then reported, by `on_data_loss`. An error leaves the position where
it is: the next request for a batch tries the same position again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import pyarrow as pa

from natslog.client.answers import Fetched
from natslog.client.confirming import OutdatedAnswers, confirmed
from natslog.client.consume_options import ConsumeOptions
from natslog.client.lineage import lineage_in
from natslog.client.reading_ahead import ReadAhead
from natslog.errors import (
    CorruptAnswer,
    DataLoss,
    InvalidRequest,
    NatslogError,
    OffsetOutOfRange,
    StreamNotFound,
    StreamRecreated,
)
from natslog.log_events import event
from natslog.model import beyond_fork
from natslog.units import offsets_between

if TYPE_CHECKING:
    from natslog.client.client import NatslogClient

logger = logging.getLogger("natslog.client")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class ConsumedBatch:
    """Messages of a stream, at least one.

    Attributes:
        record_batch: the rows, in the order of their offsets.
        start_offset, next_offset: the range that it covers, `[start_offset, next_offset)`. Messages that were removed,
            or that the filter leaves out, have no row in it.
        high_watermark: of the stream when the batch was sent: how far this consumer is behind.
    """

    stream: str
    stream_id: str
    record_batch: pa.RecordBatch = field(repr=False)
    start_offset: int
    next_offset: int
    high_watermark: int
    _consumer: Consumer = field(repr=False)

    @property
    def num_rows(self) -> int:
        return int(self.record_batch.num_rows)

    def checkpoint(self) -> None:
        """States that this batch and all before it are processed, and stores that at once.

        Raises:
            InvalidRequest: the consumer has no cursor. As `Consumer.checkpoint`.
        """
        self._consumer._checkpoint_behind(self)


class Consumer:
    """Iterator over the batches of a stream; made by `NatslogClient.consume`, which describes it.

    One thread iterates. `close` may be called by any thread. In a signal handler, raise an exception instead (as Python
    does for SIGINT): the iterator leaves at once, and the context manager stores what was processed.
    """

    def __init__(self, client: NatslogClient, stream: str, options: ConsumeOptions) -> None:
        self._client, self._stream, self._options = client, stream, options
        self._checkpoints = options.checkpoints(client, stream)
        self._closing: Future[None] = Future()
        self._ahead: ReadAhead | None = None
        self._in_hand: ConsumedBatch | None = None
        self._outdated = OutdatedAnswers()
        self._retry_until_available(self._open)

    def _open(self) -> None:
        """Finds the position. A new cursor is stored with it at once: a consumer that fails before its first checkpoint
        then does not start at a later `latest`.
        """
        stored = None if self._checkpoints is None else self._checkpoints.load()
        info = self._client.position(self._stream)
        self._end: int | None = None if self._options.follow else int(info["high_watermark"])
        self._has_position = stored is not None
        self._stream_id, self._position = stored or (
            str(info["id"]),
            self._client.start_offset(self._stream, self._options.start, info),
        )
        self._processed = self._position
        is_valid = info["log_start_offset"] <= self._position <= info["high_watermark"]
        if self._checkpoints is not None and is_valid:
            self._checkpoints.store(self._processed, self._stream_id)

    @property
    def position(self) -> int:
        """The offset at which the next batch begins."""
        return self._position

    @property
    def processed(self) -> int:
        """Every message below it was returned in a batch behind which the next one was requested, or the filter leaves
        it out.
        """
        return self._processed

    # ---- iteration ----

    def __iter__(self) -> Iterator[ConsumedBatch]:
        return self

    def __next__(self) -> ConsumedBatch:
        """The next batch; the last one counts as processed.

        Raises:
            StopIteration: closed, or at the end without `follow`. DataLoss, StreamRecreated: with
            `on_data_loss="fail"`. OffsetOutOfRange: the position is beyond the end. StreamNotFound: the stream was
            deleted. CorruptLog: the messages are damaged on every replica. BrokerUnavailable: for `patience_s`.
        """
        self._note_processed()
        while not (self._closing.done() or self._position == self._end):
            self._checkpoint_if_due()
            fetched = self._next_part()
            if fetched is None:
                continue
            start, self._position = self._position, fetched.next_offset
            if fetched.batches:
                self._in_hand = self._batch(start, fetched)
                return self._in_hand
            self._processed = self._position  # all rows were filtered out
        self.close()
        raise StopIteration

    def _batch(self, start: int, fetched: Fetched) -> ConsumedBatch:
        rows = fetched.batches[0] if len(fetched.batches) == 1 else pa.concat_batches(fetched.batches)
        return ConsumedBatch(
            self._stream, self._stream_id, rows, start, fetched.next_offset, fetched.high_watermark, self
        )

    def _note_processed(self) -> None:
        batch, self._in_hand = self._in_hand, None
        if batch is not None:
            self._processed = batch.next_offset
            if self._checkpoints is not None:
                self._checkpoints.note(batch.num_rows)

    def _next_part(self) -> Fetched | None:
        """None if there is none yet: a checkpoint is due, the consumer is closed, or the position was changed."""
        ahead = self._ahead or self._read_ahead()
        assert ahead.coming is not None, "the end was not reached"
        self._ahead = ahead
        either: list[Future[Any]] = [ahead.coming, self._closing]
        wait(either, timeout=self._until_due_s(), return_when=FIRST_COMPLETED)
        if not ahead.coming.done():
            return None
        self._ahead = None  # none is left behind an error
        try:
            fetched = ahead.take()
        except (OffsetOutOfRange, StreamNotFound, StreamRecreated) as error:
            self._continue_behind_loss(error)
            return None
        self._ahead, self._has_position, self._outdated = ahead, True, OutdatedAnswers()
        return fetched

    def _read_ahead(self) -> ReadAhead:
        options, stream_id = self._options, self._stream_id
        is_beyond = self._end is not None and self._position > self._end  # a broker then reports both bounds
        end = None if is_beyond else self._end

        def fetch(start: int) -> Fetched:
            ask = partial(
                self._client.fetch,
                self._stream,
                start,
                end,
                max_bytes=options.max_bytes,
                wait_ms=options.wait_ms if end is None else 0,
                subject=options.subject,
                columns=options.columns,
                expected_id=stream_id,
                max_decoded_bytes=options.max_bytes,
            )
            asked_s, pause_s = time.monotonic(), self._client.options.retry_interval_s
            fetched = self._retry_until_available(ask, unless_closed=True)
            if end is None and fetched.next_offset == start and time.monotonic() - asked_s < pause_s:
                wait([self._closing], timeout=pause_s)  # a leader that is stopping ends its long polls at once
            return fetched

        return ReadAhead(fetch, self._stream, self._position, end, options.max_bytes)

    def _retry_until_available(self, call: Callable[[], Result], *, unless_closed: bool = False) -> Result:
        """The result of the call, which is repeated for `patience_s` while brokers cannot answer it."""
        until_s, is_first = time.monotonic() + self._options.patience_s, True
        while True:
            try:
                return call()
            except NatslogError as error:
                is_over = time.monotonic() >= until_s or (unless_closed and self._closing.done())
                if is_over or not error.retriable or isinstance(error, CorruptAnswer):
                    raise
                if is_first:
                    logger.warning(
                        f"consumer of stream {self._stream}: the request is repeated: {error}",
                        extra=event("client.request_repeated", stream=self._stream),
                    )
            is_first = False
            time.sleep(self._client.options.retry_interval_s)

    # ---- checkpoints ----

    @property
    def _stores_automatically(self) -> bool:
        return self._checkpoints is not None and self._options.checkpoint == "auto"

    def _checkpoint_if_due(self) -> None:
        if self._checkpoints is not None and self._stores_automatically:
            self._checkpoints.store_if_due(self._processed, self._stream_id)

    def _until_due_s(self) -> float | None:
        """How long the iterator may wait; None: until there is a batch."""
        if self._checkpoints is None or not self._stores_automatically:
            return None
        due_at_s = self._checkpoints.due_at_s(self._processed)
        return None if due_at_s == math.inf else max(0.0, due_at_s - time.monotonic())

    def checkpoint(self) -> None:
        """States that all batches that were returned are processed, also the one in hand, and stores that at once.

        Raises:
            InvalidRequest: the consumer has no cursor. StreamRecreated, StreamNotFound, BrokerUnavailable: the position
            is not stored.
        """
        self._note_processed()
        self._store(self._processed, self._stream_id)

    def _checkpoint_behind(self, batch: ConsumedBatch) -> None:
        if batch is self._in_hand:
            self._note_processed()
        self._store(batch.next_offset, batch.stream_id)

    def _store(self, offset: int, stream_id: str) -> None:
        if self._checkpoints is None:
            raise InvalidRequest("this consumer stores no position: give it a cursor, as in cursor='billing'")
        self._retry_until_available(partial(self._checkpoints.store, offset, stream_id))

    # ---- closing ----

    def close(self) -> None:
        """Ends the iteration, also one that waits in another thread; a long poll in progress is abandoned. Stores what
        was processed before the batch in hand, except with `checkpoint="manual"`. May be called several times.

        Raises:
            NatslogError: the position cannot be stored; messages behind the stored one will be consumed again.
        """
        self._end_waiting()
        if self._stores_automatically:
            self._store(self._processed, self._stream_id)

    def _end_waiting(self) -> None:
        with suppress(InvalidStateError):  # it was closed before
            self._closing.set_result(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Without an exception, the batch in hand was processed."""
        if kind is None:
            self._note_processed()
            self.close()
            return
        self._end_waiting()
        if self._checkpoints is not None and self._stores_automatically:
            try:
                self._checkpoints.store(self._processed, self._stream_id)
            except NatslogError as failure:
                logger.warning(
                    f"cursor of stream {self._stream} was not set to {self._processed}: {failure}",
                    extra=event("cursor.not_set", stream=self._stream, offset=self._processed),
                )

    # ---- losses ----

    def _continue_behind_loss(self, error: NatslogError) -> None:
        """Sets the position behind what the stream no longer has. Leaves it where it is if the newest leader has it.

        Raises:
            DataLoss, StreamRecreated: with `on_data_loss="fail"`. OffsetOutOfRange, StreamNotFound.
        """
        info = confirmed(partial(self._retry_until_available, self._newest), self._lacks_position)
        if info is None:
            raise StreamNotFound(
                f"stream {self._stream!r} was deleted while it was consumed, at offset {self._position}: create it, "
                "or end this consumer",
                stream=self._stream,
            ) from error
        if not self._lacks_position(info):
            self._outdated.one_more(error)
        elif info["id"] != self._stream_id:
            fork = lineage_in(info).get(self._stream_id)
            if fork is None:
                self._continue_in_new_stream(info, error)
            else:
                self._continue_in_restored_stream(info, fork, error)
        elif self._position < info["log_start_offset"]:
            self._continue_at_log_start(info, error)
        else:
            raise self._beyond_end(info) from error

    def _newest(self) -> dict[str, Any] | None:
        try:
            return self._client.newest_position(self._stream)
        except StreamNotFound:
            return None

    def _lacks_position(self, info: dict[str, Any] | None) -> bool:
        if info is None or info["id"] != self._stream_id:
            return True
        return not info["log_start_offset"] <= self._position <= info["high_watermark"]

    def _continue_in_new_stream(self, info: dict[str, Any], error: NatslogError) -> None:
        said = (
            f"stream {self._stream!r} was deleted and created again (id {info['id']}, not {self._stream_id}): messages "
            f"of the old stream from offset {self._position} on are lost"
        )
        if self._options.on_data_loss == "fail":
            raise StreamRecreated(
                f"{said}. Start the consumer again to consume the new stream, or use on_data_loss='skip', which "
                "continues at its start; use another name for a stream with other messages",
                stream=self._stream,
                id=info["id"],
            ) from error
        logger.warning(
            f"{said}; the consumer continues with the new stream, because on_data_loss is 'skip'",
            extra=event("consumer.data_skipped", stream=self._stream),
        )
        self._stream_id = info["id"]
        if self._checkpoints is not None:
            self._checkpoints.forget()
        self._move(info)

    def _continue_in_restored_stream(self, info: dict[str, Any], fork: int, error: NatslogError) -> None:
        """The stream was restored from an export that ends at the offset `fork`: up to there it has the same messages,
        at the same offsets.
        """
        if self._position > fork:
            beyond = beyond_fork(self._stream, self._stream_id, str(info["id"]), self._position, fork)
            if self._options.on_data_loss == "fail":
                raise beyond from error
            logger.warning(
                f"{beyond.message}. The consumer continues at {fork}, because on_data_loss is 'skip'",
                extra=event("consumer.data_skipped", stream=self._stream, offset=fork),
            )
            self._position = self._processed = fork
        else:
            logger.warning(
                f"stream {self._stream} was restored from an export (id {info['id']}, was {self._stream_id}): the "
                f"consumer continues at offset {self._position}",
                extra=event("consumer.stream_restored", stream=self._stream, offset=self._position),
            )
        self._stream_id = str(info["id"])
        if self._checkpoints is not None:
            self._checkpoints.forget()
        if self._end is not None:
            self._end = int(info["high_watermark"])

    def _continue_at_log_start(self, info: dict[str, Any], error: NatslogError) -> None:
        start, end = self._position, int(info["log_start_offset"])
        if not self._has_position:  # nothing was consumed yet: nothing is missing in what is consumed
            if isinstance(self._options.start, int) and self._options.on_data_loss == "fail":
                raise error
            self._move(info)
            return
        said = f"stream {self._stream!r}: {offsets_between(start, end)} are lost: retention or a purge removed them"
        if self._options.on_data_loss == "fail":
            raise DataLoss(
                f"{said} before they were consumed. Read them from a copy, or accept the loss: on_data_loss='skip' "
                f"continues at {end}; a longer retention (natslog stream edit --max-age) prevents further losses",
                stream=self._stream,
                start=start,
                end=end,
            ) from error
        logger.warning(
            f"{said}; the consumer continues at {end}, because on_data_loss is 'skip'",
            extra=event("consumer.data_skipped", stream=self._stream, offset=end),
        )
        self._move(info)

    def _move(self, info: dict[str, Any]) -> None:
        """To the log start; all below it that remained was processed."""
        self._position = self._processed = int(info["log_start_offset"])
        if self._end is not None:
            self._end = int(info["high_watermark"])

    def _beyond_end(self, info: dict[str, Any]) -> OffsetOutOfRange:
        what, remedy = f"offset {self._position}", "start at an offset that it has, or at 'latest'"
        if self._options.cursor is not None:
            what = f"{what} of consumer {self._options.cursor!r}"
            remedy = f"`natslog cursor set {self._options.cursor} {self._stream} latest` skips to its end"
        bounds = {"log_start_offset": info["log_start_offset"], "high_watermark": info["high_watermark"]}
        return OffsetOutOfRange(
            f"stream {self._stream!r} has {offsets_between(info['log_start_offset'], info['high_watermark'])}: {what} "
            f"is beyond its end. The cursor was set by hand, or the log is shorter than it was; {remedy}",
            stream=self._stream,
            offset=self._position,
            **bounds,
        )
