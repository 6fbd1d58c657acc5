"""Messages that were read and are not committed: those that a thread has read ahead, and those of the next commit."""

from __future__ import annotations

import math
import queue
import threading
import time
from contextlib import suppress

import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.client.consuming import ConsumedBatch, Consumer

_READ_AHEAD = 2
_POLL_S = 0.2


class Gathered:
    """Messages that were read and not committed."""

    def __init__(self, start: int) -> None:
        self.messages: list[pa.RecordBatch] = []
        self.end, self.high_watermark = start, start
        self.bytes, self.since_s = 0, math.inf

    def add(self, batch: ConsumedBatch) -> None:
        if not self.messages:
            self.since_s = time.monotonic()
        self.messages.append(batch.record_batch)
        self.bytes += batch.record_batch.get_total_buffer_size()
        self.end, self.high_watermark = batch.next_offset, batch.high_watermark

    def pass_over(self, end: int) -> None:
        """There are no other messages below this offset that the filter has not left out."""
        if end > self.end:
            self.end, self.high_watermark = end, max(end, self.high_watermark)
            if self.since_s == math.inf:
                self.since_s = time.monotonic()

    def cut(self, end: int) -> tuple[pa.Table, Gathered]:
        """(the messages below this offset, the others)."""
        whole = pa.Table.from_batches(self.messages, MESSAGE_SCHEMA)
        rest = Gathered(end)
        if end >= self.end:
            return whole, rest
        below = int(pc.sum(pc.less(whole.column("offset"), end)).as_py() or 0)
        rest.messages = whole.slice(below).to_batches()
        rest.bytes = sum(one.nbytes for one in rest.messages)
        rest.end, rest.high_watermark, rest.since_s = self.end, self.high_watermark, self.since_s
        return whole.slice(0, below), rest


class Reader:
    """Reads ahead in a thread."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._batches: queue.Queue[ConsumedBatch | BaseException | None] = queue.Queue(_READ_AHEAD)
        self._is_closed = threading.Event()
        self.is_over = False
        self._thread = threading.Thread(target=self._read, name="natslog-table-reader", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for batch in self._consumer:
                if not self._put(batch):
                    return
            self._put(None)
        except BaseException as error:  # the main thread raises it
            self._put(error)

    def _put(self, one: ConsumedBatch | BaseException | None) -> bool:
        while not self._is_closed.is_set():
            with suppress(queue.Full):
                self._batches.put(one, timeout=_POLL_S)
                return True
        return False

    def next(self, within_s: float, stopping: threading.Event) -> ConsumedBatch | None:
        """None: there is none in time, it is the end, or the process is to stop. Raises what the consumer raised."""
        until_s = time.monotonic() + within_s
        while not (self.is_over or stopping.is_set()):
            left_s = until_s - time.monotonic()
            try:
                found = self._batches.get(timeout=max(0.0, min(_POLL_S, left_s)))
            except queue.Empty:
                if left_s <= 0:
                    return None
                continue
            if isinstance(found, BaseException):
                raise found
            self.is_over = found is None
            return found
        return None

    def close(self) -> None:
        self._is_closed.set()
        self._consumer.close()
        self._thread.join()
