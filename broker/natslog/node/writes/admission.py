"""Which rows of a commit are appended: those whose conditions are met, in the order of the rows, as far as a stream
that refuses new messages at its limits has room.

Theory of operation. Only rows with a condition are visited, or all where room is scarce. Each sees the log as it is
appended to at that moment, and the rows before it in its commit that are appended. A repeated message id whose first
row is refused is new again.

Source: JetStream's order of checks, error numbers and texts (nats-server, `server/stream.go`, `processJetStreamMsg`).
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from natslog.errors import ConditionFailed, CorruptLog, NatslogError
from natslog.ingest.batches import Batch
from natslog.ingest.conditions import Condition
from natslog.ingest.dedupe import NEW, REPEATED
from natslog.log import RunLog
from natslog.log.rollups import rollups_of
from natslog.node.writes.dedupe_rebuild import last_message_id, message_id_of
from natslog.node.writes.header_checks import rollup_not_permitted
from natslog.node.writes.last_of_subjects import LastOfSubjects
from natslog.node.writes.stream_room import RowRoom

REFUSED = -3
"""In the offsets of a commit, beside `NEW` and `REPEATED`: a condition is not met, or there is no room."""

Refusal: TypeAlias = tuple[int, NatslogError]
"""The number of a row, and why it is not appended."""
Offsets = npt.NDArray[np.int64]


def refusals_of(
    batch: Batch, offsets: Offsets, log: RunLog, last: LastOfSubjects, room: RowRoom | None = None
) -> list[Refusal]:
    """Marks rows that are not appended as `REFUSED`, and those as `NEW` that are no repetition because of that.

    Args:
        offsets: where each row is stored, as `DedupeWindow.find` returns it; changed in place.
        room: of the stream; None where all rows fit.
    """
    return _Commit(batch, offsets, log, last, room).refusals()


class _Commit:
    """One commit, whose rows below the visited one are decided."""

    def __init__(self, batch: Batch, offsets: Offsets, log: RunLog, last: LastOfSubjects, room: RowRoom | None) -> None:
        self._batch, self._offsets, self._log, self._last, self._room = batch, offsets, log, last, room
        self._base = log.log_end_offset
        self._conditions = dict(batch.conditions)
        self._last_rows = _last_rows(batch)
        self._repeated: dict[bytes, list[int]] | None = None
        self._subjects: _Subjects | None = None
        self._rolled_up: Offsets | None = None

    def refusals(self) -> list[Refusal]:
        refused: list[Refusal] = []
        rows = self._visited()  # ascending, so it is a heap
        while rows:
            row = heappop(rows)
            last = self._last_rows.get(row, row)
            if (error := self._why_not(row, last)) is None:
                continue
            self._offsets[row : last + 1] = REFUSED
            refused += [(one, error) for one in range(row, last + 1)]
            successor = self._renewed(last)
            if successor is not None and (self._room is not None or successor in self._conditions):
                heappush(rows, successor)
        return refused

    def _visited(self) -> list[int]:
        """Each row that is new, or only those with a condition. Of an envelope its first row."""
        if self._room is None:
            return [row for row in self._conditions if self._offsets[row] == NEW]
        starts = self._offsets == NEW
        for first, last in self._last_rows.items():
            starts[first + 1 : last + 1] = False
        return np.flatnonzero(starts).tolist()

    def _why_not(self, row: int, last: int) -> NatslogError | None:
        try:
            error = self._unmet(row, self._conditions[row]) if row in self._conditions else None
            return error if error is not None or self._room is None else self._room.why_not(row, last)
        except NatslogError as error:
            return error
        except OSError as error:
            return CorruptLog(f"the condition cannot be checked, because the log cannot be read: {error}")

    def _unmet(self, row: int, condition: Condition) -> NatslogError | None:
        if condition.is_rollup and not self._log.visibility.rule_of(self._log.epoch).rolls_up:
            return rollup_not_permitted()  # allowed when the message arrived
        if condition.last_subject_sequence is not None:
            last = self._last_of_subject(row)
            if last != condition.last_subject_sequence:
                return _wrong_sequence(last)
        if condition.last_sequence is not None:
            last = self._sequence_before(row)
            if last != condition.last_sequence:
                return _wrong_sequence(last)
        if condition.last_message_id is not None:
            last_id = self._last_id(row)
            if last_id != condition.last_message_id:
                return ConditionFailed(f"wrong last msg ID: {last_id}", err_code=10070)
        return None

    def _sequence_before(self, row: int) -> int:
        """The last sequence of the stream when this row is the next one."""
        return self._base + int(np.count_nonzero(self._offsets[:row] == NEW))

    def _last_id(self, row: int) -> str:
        before = np.flatnonzero(self._offsets[:row] == NEW)
        if not len(before):
            return last_message_id(self._log)
        last, rows = int(before[-1]), self._batch.rows
        return message_id_of(rows.to_arrow().column("headers"), rows.packed_ids, last)

    def _last_of_subject(self, row: int) -> int:
        if self._subjects is None:
            self._subjects = _Subjects(self._batch, self._offsets)
        before = self._subjects.appended_before(row)
        if before < self._last_rolled_up(row):
            return 0
        if before >= 0:
            return self._sequence_before(before) + 1
        subject = self._subjects.of(row)
        if (known := self._subjects.stored.get(subject)) is None:
            known = self._subjects.stored[subject] = self._last.last_sequence(subject)
        return known

    def _last_rolled_up(self, row: int) -> int:
        """The last row before this one that removes all messages before it; -1 if there is none."""
        if self._rolled_up is None:
            _, of_all = rollups_of(self._batch.rows.to_arrow().column("headers"))
            is_in_force = self._log.visibility.rule_of(self._log.epoch).rolls_up
            self._rolled_up = of_all if is_in_force else of_all[:0]
        before = self._rolled_up[: np.searchsorted(self._rolled_up, row)]
        appended = before[self._offsets[before] == NEW]
        return int(appended[-1]) if len(appended) else -1

    def _renewed(self, refused: int) -> int | None:
        """The next row with the message id of a refused one, which is new now, or the first row of its envelope; None
        if there is none.
        """
        ids = self._batch.ids
        if ids is None or not ids[refused].any():
            return None
        if self._repeated is None:
            self._repeated = {}
            for row in np.flatnonzero(self._offsets == REPEATED)[::-1].tolist():
                if ids[row].any():
                    self._repeated.setdefault(ids[row].tobytes(), []).append(row)
        rows = self._repeated.get(ids[refused].tobytes())
        if not rows:
            return None
        last, spans = rows.pop(), self._batch.spans
        first = last + 1 - (1 if spans is None else max(1, int(spans[last])))
        self._offsets[first : last + 1] = NEW
        return first


def _last_rows(batch: Batch) -> dict[int, int]:
    """The last row of each envelope of several rows, by its first one."""
    if batch.spans is None:
        return {}
    return {last - int(batch.spans[last]) + 1: last for last in np.flatnonzero(batch.spans > 1).tolist()}


class _Subjects:
    """The subjects of a commit's rows. `stored`: the last sequences of some, of the log before the commit."""

    def __init__(self, batch: Batch, offsets: Offsets) -> None:
        self._offsets = offsets
        self._column = batch.rows.to_arrow().column("subject").dictionary_encode()
        codes = self._column.indices.to_numpy()
        order = np.argsort(codes, kind="stable")
        is_same = codes[order[1:]] == codes[order[:-1]]
        self._before = np.full(len(codes), -1, np.int64)
        self._before[order[1:][is_same]] = order[:-1][is_same]
        self.stored: dict[str, int] = {}

    def of(self, row: int) -> str:
        return str(self._column[row].as_py())

    def appended_before(self, row: int) -> int:
        """The last row of the same subject before this one that is appended; -1 if there is none."""
        before = int(self._before[row])
        while before >= 0 and self._offsets[before] != NEW:
            before = int(self._before[before])
        self._before[row] = before  # so that rows behind it do not pass the same ones again
        return before


def _wrong_sequence(last: int) -> ConditionFailed:
    return ConditionFailed(f"wrong last sequence: {last}", err_code=10071)
