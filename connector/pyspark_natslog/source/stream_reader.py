"""Streaming reads: `spark.readStream.format("natslog")`.

Theory of operation. Spark stores the positions. This reader determines the end of the next batch within the limits, and
the tasks of a range. Its methods run one at a time in one process on the driver, and `read` runs on copies in
executors; so a `Task` contains everything that it needs. An exception ends the query: so calls wait for unavailable
brokers.

Invariants. `partitions(start, end)` covers exactly `[start, end)` of each stream at every call, by the same tasks (they
are planned with the end, which contains them); missing rows are reported by `report_loss`. The first position of a
stream that joins, or that was created again, contains the offset where it started. A position that does not move has
the same text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from natslog.client import leader_epochs
from natslog.errors import NatslogError, NotLeader
from natslog.planning import (
    AskedPlan,
    PlannedStream,
    ReadLimits,
    ReadPlan,
    ReadPosition,
    TaskEnds,
    TaskLimits,
    task_ends,
)
from pyspark_natslog.source.admission import Admitter
from pyspark_natslog.source.offsets import Offsets, StreamOffset, from_json, to_json
from pyspark_natslog.source.options import FIRST_ANSWER_WITHIN_S, SourceOptions
from pyspark_natslog.source.parallelism import default_parallelism
from pyspark_natslog.source.positions import begins_with_log, resolve_start
from pyspark_natslog.source.read_plans import planned, report_losses, task_limits
from pyspark_natslog.source.schema import checked_columns
from pyspark_natslog.source.selection import StreamState
from pyspark_natslog.source.splits import Task, tasks_of

logger = logging.getLogger("pyspark_natslog")

Answer = TypeVar("Answer")

FIRST_EPOCH = 1
_OUTAGE_TIMEOUTS = 6
"""A query waits this many times `fetchTimeout` for brokers or leaders to become available before it fails."""


_IDLE_WAIT_S = 0.4
"""The stop of an idle query may take as long."""
_OTHERS_S = 10.0


@dataclass(frozen=True, slots=True)
class _Plan:
    """The tasks from one position to another; both as Spark has them."""

    start: dict[str, Any]
    end: dict[str, Any]
    tasks: list[Task]


@dataclass(frozen=True, slots=True)
class _Idle:
    """The last trigger took nothing from this position, where so many rows wait for a minimum."""

    position: dict[str, Any]
    waiting_rows: int


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source of one query. Picklable: connections are opened where they are used."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._columns = checked_columns(schema, options.types)
        self._admitter = Admitter(options.admission)
        self._target: dict[str, tuple[str, int]] | None = None
        self._latest: dict[str, PlannedStream] | None = None
        self._planned: _Plan | None = None
        self._idle: _Idle | None = None
        self._committed: dict[str, Any] | None = None
        self._others_until_s = float("-inf")
        self._away_since: float | None = None
        self._accepted: set[str] = set()  # ids of streams whose older leader is accepted
        self._left: set[str] = set()  # streams of the checkpoint that exist and are not selected now
        self._gone: Offsets = {}  # streams that were deleted
        self._open: set[tuple[str, int]] = set()  # ids, and where their logs began when this query did
        self._client = options.client(FIRST_ANSWER_WITHIN_S)

    # ---- how far ----

    def initialOffset(self) -> dict[str, Any]:
        options = self._options
        states = self._retry_until_available(self._states)
        options.selection.require_all(states)
        if not states:
            logger.warning(
                f"no stream matches {options.selection} yet; streams that are created later are read from their start"
            )
        resolve = partial(resolve_start, self._client, options, options.start, selected=states.keys())
        starts = {name: self._retry_until_available(partial(resolve, state)) for name, state in states.items()}
        self._open |= {(states[name].id, at) for name, at in starts.items() if begins_with_log(options.start, name)}
        return to_json({name: StreamOffset(states[name].id, start) for name, start in starts.items()})

    def getDefaultReadLimit(self) -> ReadLimit:
        return self._admitter.default_limit()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fixes the end of this run."""
        states = self._retry_until_available(self._states)
        self._target = {name: (state.id, state.high_watermark) for name, state in states.items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        position = self._noted(start)
        is_limited = not isinstance(limit, ReadAllAvailable)
        asked = self._asked(start, position, is_limited=is_limited)
        ask = partial(planned, self._client, asked, ignored=self._left)
        self._idle = None
        if self._target is not None:  # returning the same position would end the run too early
            plan = self._retry_until_available(ask)
        else:
            try:
                plan = ask()
            except NatslogError as error:
                if self._should_raise(error):
                    raise
                return start
        self._away_since = None
        self._latest = plan.streams
        begin = self._begin(position, plan, asked)
        kept = {name: at for name, at in position.items() if name not in begin and name in self._left}
        ends = task_ends(plan.tasks)
        end = {
            name: _moved(at, position.get(name), plan.streams[name], ends.get(name, [])) for name, at in begin.items()
        }
        if is_limited:
            took_rows = {name for name, one in plan.streams.items() if one.end > one.start and one.rows != 0}
            self._admitter.note(begin.keys(), took_rows)
        body = to_json({**end, **kept})
        opened = {name for name, at in begin.items() if self._is_open(at)}
        self._planned = _Plan(start, body, tasks_of(plan, opened, begin=begin))
        if body == start:
            self._idle = _Idle(start, sum(map(_waiting_rows, plan.streams.values())))
        return body

    def _asked(self, start: dict[str, Any], position: Offsets, *, is_limited: bool) -> AskedPlan:
        selection, target = self._options.selection, self._target
        seen, wait_ms = self._wait_for_news(start)
        selected = filter(selection.could_hold, self._admitter.in_turn(position))
        return AskedPlan(
            streams=frozenset(selection.names) or None,
            pattern=selection.pattern,
            group=selection.group,
            positions={name: self._position(position[name]) for name in selected},
            ends=target or {},
            with_new=target is None,
            seen=seen,
            wait_ms=wait_ms,
            limits=self._admitter.limits(drains=target is not None) if is_limited else ReadLimits(),
            tasks=self._task_limits(),
        )

    def _task_limits(self) -> TaskLimits:
        return task_limits(self._options.cutting, default_parallelism())

    def _position(self, at: StreamOffset) -> ReadPosition:
        return ReadPosition(at.id, at.offset, is_open=self._is_open(at))

    def _wait_for_news(self, start: dict[str, Any]) -> tuple[dict[str, tuple[str, int]], int]:
        """Ids and high watermarks, and for how many ms brokers may wait until one differs: not at all before a trigger
        has found no rows, in a run with an end, or while other sources of the query have rows.
        """
        idle = self._idle
        if idle is None or idle.position != start or self._latest is None or self._target is not None:
            return {}, 0
        if time.monotonic() < self._others_until_s:
            return {}, 0
        seen = {name: (one.id, one.high_watermark) for name, one in self._latest.items()}
        return seen, int(1000 * min(_IDLE_WAIT_S, self._admitter.due_in_s(idle.waiting_rows)))

    def _noted(self, body: dict[str, Any]) -> Offsets:
        """Positions from Spark. Answers of leaders of older epochs than theirs are ignored."""
        positions = from_json(body)
        for at in positions.values():
            if at.id not in self._accepted:
                leader_epochs.note(at.id, at.epoch)
        return positions

    def reportLatestOffset(self) -> dict[str, Any] | None:
        if self._latest is None:
            return None
        return to_json({name: StreamOffset(state.id, state.high_watermark) for name, state in self._latest.items()})

    def _states(self) -> dict[str, StreamState]:
        return self._options.selection.states(self._client)

    def _begin(self, position: Offsets, plan: ReadPlan, asked: AskedPlan) -> Offsets:
        """Where reading continues in each selected stream that exists; losses are reported. A stream that is new, or
        was created again, has `start`.
        """
        self._left -= plan.streams.keys()
        for name, at in position.items():
            if name not in plan.streams and name not in self._left:
                self._note_missing(name, at, plan)
        report_losses(self._options, plan, {name: at for name, at in asked.positions.items() if name not in self._left})
        begin = {name: self._begun(position.get(name), stream) for name, stream in plan.streams.items()}
        if (target := self._target) is not None:  # of a stream that was created again since: its current end
            again = {name: one for name, one in plan.streams.items() if target.get(name, ("", 0))[0] != one.id}
            target |= {name: (one.id, one.high_watermark) for name, one in again.items()}
        return begin

    def _begun(self, at: StreamOffset | None, stream: PlannedStream) -> StreamOffset:
        if at is None or (self._is_open(at) and at.id == stream.id):
            self._open.add((stream.id, stream.start))
        if at is None or at.id != stream.id:
            return StreamOffset(stream.id, stream.start, stream.start)
        if at.offset == stream.start:
            return at
        start = None if at.start is None else stream.start
        return StreamOffset(at.id, stream.start, start, passed=at.passed_beyond(stream.start))

    def _is_open(self, at: StreamOffset) -> bool:
        """Whether nothing was read yet from where the log began."""
        return (at.id, at.offset) in self._open

    def _note_missing(self, name: str, at: StreamOffset, plan: ReadPlan) -> None:
        """A stream that was read is not among the selected ones: it has left the selection, or it was deleted."""
        if plan.others.get(name) == "deleted":
            self._gone[name] = at
            return
        logger.warning(
            f"{self._options.selection} does not select stream {name!r}: it is not read, and the checkpoint keeps its "
            f"position {at.offset}. If it is selected again, it continues there"
        )
        self._left.add(name)

    def _retry_until_available(self, ask: Callable[[], Answer]) -> Answer:
        """The answer; waits while brokers are unavailable, or streams have no leader."""
        while True:
            try:
                answer = ask()
            except NatslogError as error:
                if self._should_raise(error):
                    raise
            else:
                self._away_since = None
                return answer

    def _should_raise(self, error: NatslogError) -> bool:
        """Whether this error ends the query: it is not retriable, or the outage has lasted too long."""
        if not error.retriable or error.facts.get("answered") is False:
            return True
        now = time.monotonic()
        self._away_since = self._away_since or now
        logger.warning("the query has been waiting for %.0f s: %s", now - self._away_since, error.message)
        if now - self._away_since <= _OUTAGE_TIMEOUTS * self._options.client_options.timeout_s:
            return False
        return not self._accepts_older_leader(error)

    def _accepts_older_leader(self, error: NatslogError) -> bool:
        """Whether only the leader of an older epoch responds. Its answers are accepted from now on (a cluster that was
        restored from a backup has older epochs); what it lacks is then reported as lost.
        """
        stream_id = error.facts.get("id")
        if not isinstance(error, NotLeader) or not isinstance(stream_id, str):
            return False
        logger.warning(
            f"stream {stream_id}: no broker has the leader epoch of the checkpoint; an older one is accepted now"
        )
        leader_epochs.forget(stream_id)
        self._accepted.add(stream_id)
        self._away_since = None
        return True

    # ---- which ranges ----

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[Task]:
        if self._planned is not None and (self._planned.start, self._planned.end) == (start, end):
            return self._planned.tasks  # a moment ago; a task reports what has been lost since
        begin, upto = self._noted(start), self._noted(end)
        moved = {name: last for name, last in upto.items() if last != begin.get(name)}
        if not moved:
            return []
        positions = {name: self._repeated(begin.get(name), last) for name, last in moved.items()}
        asked = AskedPlan(streams=frozenset(moved), positions=positions, is_repeated=True, tasks=self._task_limits())
        plan = self._retry_until_available(partial(planned, self._client, asked))
        report_losses(self._options, plan, positions)
        return tasks_of(plan, {name for name, one in positions.items() if one.is_open}, begin=_same(begin, upto))

    def _repeated(self, first: StreamOffset | None, last: StreamOffset) -> ReadPosition:
        """A stream's part of a batch that ends at `last`."""
        goes_on = first is not None and first.id == last.id
        start = first.offset if first is not None and goes_on else last.start or 0
        return ReadPosition(last.id, start, last.offset, (last.id, start) in self._open, list(last.tasks))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from pyspark_natslog.source.range_reader import read_task  # not needed by the process that plans

        return read_task(self._options, self._columns, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Spark's checkpoint is the position; nothing else is stored. A batch without rows of these streams had those
        of another source, which must not wait for this one.
        """
        if end == self._committed:
            self._others_until_s = time.monotonic() + _OTHERS_S
        self._committed = end

    def stop(self) -> None:
        self._client.close()


def _moved(at: StreamOffset, before: StreamOffset | None, stream: PlannedStream, tasks: TaskEnds) -> StreamOffset:
    """The position behind what is read. One that does not move keeps `start`, as does one that has just joined."""
    if stream.end == stream.start:
        return at
    has_joined = before is None or before.id != at.id
    epoch = stream.leader_epoch if stream.leader_epoch > FIRST_EPOCH else 0  # no leader is older than that of the first
    start = at.start if has_joined else None
    return StreamOffset(at.id, stream.end, start, tuple(tasks), epoch, at.passed_beyond(stream.end))


def _same(begin: Offsets, upto: Offsets) -> Offsets:
    """Those of `begin` whose streams still were the same ones at the end of the batch."""
    return {name: at for name, at in begin.items() if name in upto and upto[name].id == at.id}


def _waiting_rows(stream: PlannedStream) -> int:
    return stream.high_watermark - stream.start if stream.rows is None else stream.rows
