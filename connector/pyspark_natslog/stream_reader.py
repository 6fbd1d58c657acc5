"""Streaming reads: `spark.readStream.format("natslog")`.

Theory of operation. Spark keeps the positions; this reader answers "how far is there, within the limit?" and "how is
this
range cut?". Its methods run one at a time in one process on the driver, `read` on copies in executors; so whatever a
task needs is in its `OffsetRange`. A call that raises ends the query: brokers that are away are waited for.

Invariant: `partitions(start, end)` covers exactly `[start, end)` of each stream, however often it is asked, and
whatever is missing of it goes through `report_loss`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from natslog.errors import BrokerUnavailable, StreamNotFound
from pyspark_natslog.loss import Loss, report_loss
from pyspark_natslog.offsets import Offsets, StreamOffset, from_json, share_limit, to_json
from pyspark_natslog.positions import resolve_start
from pyspark_natslog.schema import checked_columns
from pyspark_natslog.source_options import SourceOptions
from pyspark_natslog.splits import plan_range, read_range

logger = logging.getLogger("pyspark_natslog")

Answer = TypeVar("Answer")

_OUTAGE_TIMEOUTS = 6
"""A query waits this many times `fetchTimeout` for brokers to come back before it fails."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One query's source. Picklable: connections are made where they are used."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._columns = checked_columns(schema, options.payload.types)
        self._target: Offsets | None = None
        self._latest: Offsets | None = None
        self._away_since: float | None = None
        self._client = options.client()

    # ---- how far ----

    def initialOffset(self) -> dict[str, Any]:
        offsets = {}
        for name in self._options.streams:
            info = self._patiently(partial(self._client.stream, name))
            start = resolve_start(self._client, self._options, self._options.start, info)
            offsets[name] = StreamOffset(info["id"], start)
        return to_json(offsets)

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fixes how far this run goes."""
        self._target = self._patiently(lambda: self._high_watermarks({}))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        position = from_json(start)
        if self._target is not None:  # the same position would end the run, undrained
            latest = self._patiently(lambda: self._high_watermarks(position))
        else:
            try:
                latest = self._high_watermarks(position)
            except BrokerUnavailable:
                if self._is_away_too_long():
                    raise
                return start
        self._away_since = None
        self._latest = latest
        begin = {name: self._effective_start(name, at, latest.get(name)) for name, at in position.items()}
        latest = self._within_target(latest)
        for name in latest.keys() - position.keys():  # named in the options since the checkpoint was written
            begin[name] = StreamOffset(latest[name].id, self._log_starts[name])
        waiting = {name: max(0, latest[name].offset - at.offset) for name, at in begin.items() if name in latest}
        if isinstance(limit, ReadMaxRows):
            waiting = share_limit(waiting, limit.max_rows)
        end = {}
        for name, at in begin.items():
            moved = waiting.get(name, 0)
            end[name] = StreamOffset(at.id, at.offset + moved)
        return to_json(end)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None if self._latest is None else to_json(self._latest)

    def _high_watermarks(self, position: Offsets) -> Offsets:
        """Of all streams that are there; one that is gone is a loss, from the position on."""
        offsets, self._log_starts = {}, {}
        for name in self._options.streams:
            try:
                info = self._client.position(name)
            except StreamNotFound:
                start = position[name].offset if name in position else 0
                report_loss(self._options, Loss(name, start, None, "the stream was deleted"))
                continue
            offsets[name] = StreamOffset(info["id"], int(info["high_watermark"]))
            self._log_starts[name] = int(info["log_start_offset"])
        return offsets

    def _within_target(self, latest: Offsets) -> Offsets:
        """With `availableNow`: never beyond what was there when the run began."""
        target = self._target
        if target is None:
            return latest
        return {
            name: StreamOffset(at.id, min(at.offset, target[name].offset) if target[name].id == at.id else at.offset)
            for name, at in latest.items()
            if name in target
        }

    def _effective_start(self, name: str, at: StreamOffset, latest: StreamOffset | None) -> StreamOffset:
        """Where reading can go on; what lies between is reported as lost."""
        if latest is None:
            return at
        log_start = self._log_starts[name]
        if latest.id != at.id:
            why = f"the stream was deleted and created again (id {latest.id}, not {at.id})"
            report_loss(self._options, Loss(name, at.offset, None, why))
            return StreamOffset(latest.id, log_start)
        if at.offset < log_start:
            report_loss(self._options, Loss(name, at.offset, log_start, "retention removed these messages"))
            return StreamOffset(at.id, log_start)
        if at.offset > latest.offset:
            why = f"the log ends at {latest.offset}: it is shorter than it was"
            report_loss(self._options, Loss(name, latest.offset, at.offset, why))
            return latest
        return at

    def _patiently(self, ask: Callable[[], Answer]) -> Answer:
        """The answer, also of brokers that are away for a while."""
        while True:
            try:
                answer = ask()
            except BrokerUnavailable:
                if self._is_away_too_long():
                    raise
            else:
                self._away_since = None
                return answer

    def _is_away_too_long(self) -> bool:
        now = time.monotonic()
        self._away_since = self._away_since or now
        patience_s = _OUTAGE_TIMEOUTS * self._options.client_options.timeout_s
        logger.warning("no broker answers; the query waits (%.0f s so far)", now - self._away_since)
        return now - self._away_since > patience_s

    # ---- which ranges ----

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begin, upto = from_json(start), from_json(end)
        options, planned = self._options, []
        latest = self._patiently(lambda: self._high_watermarks(begin))
        for name, last in upto.items():
            known = latest.get(name)
            first = begin.get(name)
            if known is None or last == first:
                continue
            if first is None:
                first = StreamOffset(last.id, self._log_starts[name])
            if known.id != last.id:
                why = f"the stream was deleted and created again (id {known.id}, not {last.id})"
                report_loss(options, Loss(name, first.offset, last.offset, why))
                continue
            first = self._effective_start(name, first, known)
            low, high = min(first.offset, last.offset), min(last.offset, known.offset)
            if high < last.offset:
                report_loss(options, Loss(name, max(low, high), last.offset, f"the log ends at {high}"))
            cores = os.cpu_count() or 1
            planned += self._patiently(partial(plan_range, self._client, options, name, last.id, low, high, cores))
        return planned

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_range(self._options, self._columns, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Spark's checkpoint is the position; nothing is kept elsewhere."""

    def stop(self) -> None:
        self._client.close()
