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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from natslog.client import leader_epochs
from natslog.client.confirming import confirmed
from natslog.errors import NatslogError, NotLeader, OffsetOutOfRange, StreamNotFound
from pyspark_natslog.source.admission import Admitter
from pyspark_natslog.source.confirming import newest
from pyspark_natslog.source.loss import Loss, beyond_fork, log_start_in, recreated, report_loss, shorter
from pyspark_natslog.source.offsets import Offsets, StreamOffset, from_json, to_json
from pyspark_natslog.source.options import FIRST_ANSWER_WITHIN_S, SourceOptions
from pyspark_natslog.source.parallelism import default_parallelism
from pyspark_natslog.source.positions import begins_with_log, resolve_start
from pyspark_natslog.source.schema import checked_columns
from pyspark_natslog.source.selection import StreamState
from pyspark_natslog.source.splits import OffsetRange, Task, numbers_of, plan_again, plan_tasks

logger = logging.getLogger("pyspark_natslog")

Answer = TypeVar("Answer")
States = dict[str, StreamState]

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
    ranges: list[OffsetRange]
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
        self._target: Offsets | None = None
        self._latest: States | None = None
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
        for name in options.selection.names:
            if name not in states:
                raise StreamNotFound(f"there is no stream {name!r}: create it, or correct the option stream")
        if not states:
            logger.warning(
                "no stream matches %s yet; streams that are created later are read from their start", options.selection
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
        self._target = {name: StreamOffset(state.id, state.high_watermark) for name, state in states.items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        position = self._noted(start)
        seen, wait_ms = self._wait_for_news(start)
        ask = partial(self._states_for, {name: (at, at.offset) for name, at in position.items()}, seen, wait_ms)
        self._idle = None
        if self._target is not None:  # returning the same position would end the run too early
            states = self._retry_until_available(ask)
        else:
            try:
                states = ask()
            except NatslogError as error:
                if self._should_raise(error):
                    raise
                return start
        self._away_since = None
        self._latest = states
        begin = self._begin(position, states)
        kept = {name: at for name, at in position.items() if name not in begin and name in self._left}
        waiting = {name: max(0, self._limit(states[name]) - at.offset) for name, at in begin.items()}
        admitted = waiting if isinstance(limit, ReadAllAvailable) else self._admit(begin, waiting)
        end = {name: _moved(at, position.get(name), admitted[name], states[name]) for name, at in begin.items()}
        ranges = [
            OffsetRange(name, at.id, at.offset, end[name].offset, is_open=self._is_open(at))
            for name, at in sorted(begin.items())
        ]
        ranges = [one for one in ranges if one.rows]
        plan = partial(plan_tasks, self._client, self._options, ranges, default_parallelism())
        tasks = self._retry_until_available(plan)
        for name, share in numbers_of(tasks).items():
            end[name] = replace(end[name], tasks=share)
        body = to_json({**end, **kept})
        self._planned = _Plan(start, body, ranges, tasks)
        if body == start:
            self._idle = _Idle(start, sum(waiting.values()))
        return body

    def _wait_for_news(self, start: dict[str, Any]) -> tuple[States, int]:
        """For how many ms brokers may wait until something differs from these states: not at all before a trigger has
        found no rows, in a run with an end, or while other sources of the query have rows.
        """
        idle = self._idle
        if idle is None or idle.position != start or self._latest is None or self._target is not None:
            return {}, 0
        if time.monotonic() < self._others_until_s:
            return {}, 0
        return self._latest, int(1000 * min(_IDLE_WAIT_S, self._admitter.due_in_s(idle.waiting_rows)))

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

    def _states(self) -> States:
        return self._options.selection.states(self._client)

    def _states_for(
        self,
        wanted: Mapping[str, tuple[StreamOffset, int]],
        seen: States | None = None,
        wait_ms: int = 0,
        *,
        with_others: bool = False,
    ) -> States:
        """As `_states`; the first request waits for `wait_ms` until something differs from `seen`. A part of what is
        wanted (a stream from a position to an end) is missing in the result only if the newest leader has confirmed it
        for some time. `with_others`: also streams that the options do not select any more.
        """

        def is_missing(name: str, state: StreamState | None) -> bool:
            first, end = wanted[name]
            valid_to = None if state is None else state.valid_to(first.id)
            if state is None or valid_to is None:
                return state is not None or (self._options.selection.could_hold(name) and name not in self._left)
            is_below = first.offset < state.log_start_offset and not self._is_open(first)
            return is_below or not first.offset <= end <= min(state.high_watermark, valid_to)

        def missing(states: States) -> list[str]:
            return [name for name in wanted if is_missing(name, states.get(name))]

        left_ms = [wait_ms]

        def ask() -> States:
            states = self._options.selection.states(self._client, seen or {}, left_ms.pop() if left_ms else 0)
            others = wanted.keys() - states.keys() if with_others else set()
            for name in {*missing(states), *others}:
                is_asked = with_others or name in states
                if is_asked and (state := newest(self._client, name)) is not None:
                    states[name] = state
            return states

        return confirmed(ask, lambda states: bool(missing(states)))

    def _begin(self, position: Offsets, states: States) -> Offsets:
        """Where reading continues in each selected stream that exists; losses are reported. A stream that is new, or
        was created again, has `start`.
        """
        begin = {}
        for name, at in position.items():
            if name in states:
                self._left.discard(name)
                begin[name] = self._effective_start(at, states[name])
            elif name not in self._left:
                self._note_missing(name, at)
        for name in states.keys() - position.keys():
            if self._target is None or name in self._target:
                start = states[name].log_start_offset
                begin[name] = StreamOffset(states[name].id, start, start)
                self._open.add((states[name].id, start))
        return begin

    def _is_open(self, at: StreamOffset) -> bool:
        """Whether nothing was read yet from where the log began."""
        return (at.id, at.offset) in self._open

    def _note_missing(self, name: str, at: StreamOffset) -> None:
        """A stream that was read is not among the selected ones: it has left the selection, or it was deleted."""
        selection = self._options.selection
        has_left = not selection.could_hold(name)
        if selection.group is not None:
            has_left = self._retry_until_available(partial(newest, self._client, name)) is not None
        if not has_left:
            report_loss(self._options, Loss(name, at.offset, None, "the stream was deleted"))
            self._gone[name] = at
            return
        logger.warning(
            "%s does not select stream %r: it is not read, and the checkpoint keeps its position %d. If it is selected "
            "again, it continues there",
            selection,
            name,
            at.offset,
        )
        self._left.add(name)

    def _limit(self, state: StreamState) -> int:
        """How far this stream is read: with `availableNow`, not beyond its end when the run started."""
        if self._target is None:
            return state.high_watermark
        target = self._target.get(state.name)
        if target is None or target.id != state.id:  # created again since: its target is its current end
            target = self._target[state.name] = StreamOffset(state.id, state.high_watermark)
        return min(state.high_watermark, target.offset)

    def _admit(self, begin: Offsets, waiting: dict[str, int]) -> dict[str, int]:
        def reach(name: str, max_bytes: int | None) -> tuple[int, int | None]:
            first = start = begin[name].offset
            upto = start + waiting[name]
            while start < upto:
                ask = partial(self._client.extent, name, start, upto, max_bytes=max_bytes)
                try:
                    end, size_bytes = self._retry_until_available(ask)
                except OffsetOutOfRange as error:
                    if not (self._is_open(begin[name]) and log_start_in(error) > start):
                        raise
                    start = log_start_in(error)
                else:
                    return end - first, size_bytes
            return waiting[name], 0

        return self._admitter.admit(waiting, reach, drains=self._target is not None)

    def _effective_start(self, at: StreamOffset, state: StreamState) -> StreamOffset:
        """Where reading can continue; the range before it is reported as lost."""
        log_start, valid_to = state.log_start_offset, state.valid_to(at.id)
        if valid_to is None:
            report_loss(self._options, recreated(state.name, at.offset, None, was=at.id, is_now=state.id))
            return StreamOffset(state.id, log_start, log_start)
        if at.offset > valid_to:
            report_loss(self._options, beyond_fork(state, at.offset, valid_to, was=at.id))
        if state.id != at.id:  # restored from an export: the same messages at the same offsets
            offset = min(at.offset, valid_to)
            at = StreamOffset(state.id, offset, offset)
        if at.offset < log_start and self._is_open(at):
            self._open.add((at.id, log_start))
            return StreamOffset(at.id, log_start, None if at.start is None else log_start)
        if at.offset < log_start:
            loss = Loss(state.name, at.offset, log_start, "retention or a purge removed these messages")
            report_loss(self._options, loss)
            return StreamOffset(at.id, log_start, None if at.start is None else log_start)
        if at.offset > state.high_watermark:
            report_loss(self._options, shorter(state.name, state.high_watermark, at.offset, state.high_watermark))
            return StreamOffset(at.id, state.high_watermark)
        return at

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
            "stream %s: no broker has the leader epoch of the checkpoint; an older one is accepted now", stream_id
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
        wanted = {name: (_first(begin.get(name), last), last.offset) for name, last in moved.items()}
        states = self._retry_until_available(partial(self._states_for, wanted, with_others=True))
        ranges = [self._range(name, wanted[name][0].offset, last, states.get(name)) for name, last in moved.items()]
        known = [one for one in ranges if one is not None and one.rows]
        if self._planned is not None and self._planned.ranges == known:
            return self._planned.tasks
        numbered = {name: last.tasks for name, last in moved.items()}
        return self._retry_until_available(partial(plan_again, self._client, self._options, known, numbered))

    def _range(self, name: str, begun: int, last: StreamOffset, state: StreamState | None) -> OffsetRange | None:
        """The part of a batch in one stream that can still be read."""
        if state is None:
            report_loss(self._options, Loss(name, begun, last.offset, "the stream was deleted"))
            return None
        valid_to = state.valid_to(last.id)
        if valid_to is None:
            report_loss(self._options, recreated(name, begun, last.offset, was=last.id, is_now=state.id))
            return None
        if last.offset > valid_to:
            report_loss(self._options, beyond_fork(state, last.offset, valid_to, was=last.id))
            if begun >= valid_to:
                return None
            last = replace(last, offset=valid_to)
        low = min(self._effective_start(StreamOffset(last.id, begun), state).offset, last.offset)
        high = min(last.offset, state.high_watermark)
        if high < last.offset:
            report_loss(self._options, shorter(name, max(low, high), last.offset, high))
        return OffsetRange(name, state.id, low, high, is_open=self._is_open(StreamOffset(last.id, low)))

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


def _first(first: StreamOffset | None, last: StreamOffset) -> StreamOffset:
    """Where a stream's part of a batch that ends at `last` begins."""
    if first is not None and first.id == last.id:
        return first
    return StreamOffset(last.id, last.start or 0)


def _moved(at: StreamOffset, before: StreamOffset | None, rows: int, state: StreamState) -> StreamOffset:
    """The position after `rows` more. A position that does not move keeps `start`, as does one that has just joined."""
    if rows == 0:
        return at
    has_joined = before is None or before.id != at.id
    epoch = state.leader_epoch if state.leader_epoch > FIRST_EPOCH else 0  # no leader is older than that of the first
    return StreamOffset(at.id, at.offset + rows, at.start if has_joined else None, epoch=epoch)
