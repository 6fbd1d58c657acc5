"""What the rules of one log hide, as far as they were applied to its rows.

Theory of operation. Rows are applied in the order of the log, a part at a time. A roll-up of a subject hides all older
messages of it. Of each subject only the newest ones are known, so before rows with such a roll-up are applied the log
is read backwards for others, in parts, unless it is known that all messages before the newest one of the subject are
hidden (`_settled`).

It has no lock: `log.visibility` calls it under its own one.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from natslog.errors import CorruptLog
from natslog.log.expiry import NEVER_S, TOMBSTONE_HEADER, Expiries, header_values, own_ttls_s
from natslog.log.newest import NewestRows, Offsets, Texts
from natslog.log.removed import RemovedOffsets, from_bytes, marks_among, offset_range, offset_set, to_array, to_bytes
from natslog.log.rollups import rollups_of
from natslog.log.rules import NO_EXPIRY, NO_RULE, Expiry, Rule
from natslog.log_events import event

logger = logging.getLogger("natslog.log")

_ROWS_AT_ONCE = 100_000

StoredRows: TypeAlias = Callable[[int, int], Iterator[tuple[int, pa.RecordBatch]]]
"""The stored batches that have rows in `[start, end)`, cut to it, each with its leader epoch. Raises CorruptLog."""


@dataclass(slots=True)
class _Search:
    """Older messages of subjects that are rolled up: all below `end` are yet to be read.

    Attributes:
        newest: the newest offset of each of the subjects.
    """

    subjects: pa.Array[Any]
    newest: Offsets
    end: int


@dataclass(frozen=True, slots=True)
class Standing:
    """What is visible at one moment, and what later rows will hide.

    Attributes:
        applied: the rules were applied to all rows below. `visible`: how many messages below are.
        of_subject, of_key: the newest offsets of some subjects and keys, ascending, as many as a rule keeps visible.
    """

    applied: int
    visible: int
    of_subject: dict[str, list[int]]
    of_key: dict[bytes, list[int]]


class AppliedRules:
    """See the module.

    Args:
        rows: reads the rows of the log. `log_start`: the first offset that it has.

    Attributes:
        removed: what is hidden, as far as it is known. `applied`: the rules were applied to all rows below.
        has_rules: whether any message may be hidden by a rule.
        subjects, keys: the newest messages of each, if they are counted. `expiries`: when messages expire, of which
            those of `own_ttl` have a time to live of their own. `tombstones`: their offsets.
        indexes_subjects: `subjects` is kept although no limit requires it.
        passed_damage: rows were not applied because they cannot be read.
    """

    def __init__(self, rows: StoredRows | None, log_start: Callable[[], int]) -> None:
        self.removed = RemovedOffsets()
        self._rows, self._log_start = rows, log_start
        self._adopt((NO_RULE,), NO_EXPIRY, indexes_subjects=False)
        self.begin_again(0)

    def set_rules(self, given: tuple[Rule, ...], log_start_offset: int) -> None:
        """From now on. Where they hide more than before, messages that are stored already are hidden too."""
        was = self.rules
        self._adopt(given, self.expiry, indexes_subjects=self.indexes_subjects)
        if any(rule.rolls_up for rule in given) and not self.indexes_subjects:
            self.index_subjects(log_start_offset)
            return
        counts = self.subjects is not None or not self.counts_subjects
        if counts and was == given[: len(was)] and all(rule.hides for rule in was):
            return  # only later rows are concerned
        if len(was) == len(given) and was[:-1] == given[:-1] and self._tightened(was[-1], given[-1]):
            return
        self.begin_again(log_start_offset)

    def set_expiry(self, expiry: Expiry, log_start_offset: int) -> None:
        """From now on, also for messages that are stored already."""
        if expiry != self.expiry:
            self._adopt(self.rules, expiry, indexes_subjects=self.indexes_subjects)
            self.begin_again(log_start_offset)

    def index_subjects(self, log_start_offset: int) -> None:
        """From now on the newest message of each subject is known, although no limit requires it."""
        if not self.indexes_subjects:
            self._adopt(self.rules, self.expiry, indexes_subjects=True)
            self.begin_again(log_start_offset)

    def _adopt(self, rules: tuple[Rule, ...], expiry: Expiry, *, indexes_subjects: bool) -> None:
        self.rules, self.expiry, self.indexes_subjects = rules, expiry, indexes_subjects
        self.has_rules = indexes_subjects or expiry.concerns_any or any(rule.hides for rule in rules)

    def _tightened(self, was: Rule, now: Rule) -> bool:
        """Whether the rule in force differs by a lower limit only, which is applied at once."""
        if was.per_subject is None or now.per_subject is None or now.per_subject > was.per_subject:
            return False
        if (was.from_epoch, was.compacts, was.rolls_up) != (now.from_epoch, now.compacts, now.rolls_up):
            return False
        if self.subjects is not None and self._at == len(self.rules) - 1:
            self.removed.derive(offset_set(self.subjects.change_limit(now.per_subject)))
        return True

    def begin_again(self, log_start_offset: int) -> None:
        """All rows are to be applied again."""
        self.applied, self.passed_damage = log_start_offset, False
        self._at = 0  # the number of the rule that the last applied row belongs to
        self.subjects: NewestRows | None = None
        self.keys: NewestRows | None = None
        self.expiries, self.own_ttl, self.tombstones = Expiries(), BitMap64(), BitMap64()
        self._settled = BitMap64()  # offsets: all older messages of the same subject are hidden
        self._search: _Search | None = None

    @property
    def counts_subjects(self) -> bool:
        """Of all rows, also of those that are under a rule without a limit: the same on every replica, whichever of
        them was asked for the newest messages.
        """
        return any(rule.per_subject is not None for rule in self.rules)

    @property
    def is_searching(self) -> bool:
        """Whether the log is searched for messages that the next rows hide."""
        return self._search is not None

    # ---- rows ----

    def apply_some(self, high_watermark: int) -> None:
        """Applies the rules to some of the next rows below, or searches a part of the log for what the next ones hide.
        Raises CorruptLog.
        """
        if self._search is not None:
            self._search_some(self._search)
            return
        assert self._rows is not None, "rules are for the rows of a log"
        rows = 0
        for epoch, batch in self._rows(self.applied, high_watermark):
            self._enter_epoch(epoch)
            offsets = batch.column("offset").to_numpy()
            if self.rules[self._at].rolls_up and not self._roll_up(batch, offsets):
                return
            self._apply(batch, offsets)
            self.applied = max(self.applied, int(offsets[-1]) + 1)
            rows += len(batch)
            if rows >= _ROWS_AT_ONCE:
                return
        self.applied = max(self.applied, high_watermark)

    def pass_damage(self, error: CorruptLog, high_watermark: int) -> None:
        """What cannot be read hides nothing, and is not served either."""
        self.passed_damage = True
        end = error.facts.get("end")
        logger.warning(
            "the messages hidden by a damaged range are visible: %s",
            error.message,
            extra=event("log.removals_unreadable"),
        )
        if isinstance(end, int) and end > self.applied:
            self.applied = min(end, high_watermark)

    def _enter_epoch(self, epoch: int) -> None:
        while self._at + 1 < len(self.rules) and epoch >= self.rules[self._at + 1].from_epoch:
            self._at += 1
            self._enter(self.rules[self._at])

    def _apply(self, batch: pa.RecordBatch, offsets: Offsets) -> None:
        if self.expiry.concerns_any and batch.column("headers").null_count < len(batch):
            self._note_expiry(batch, offsets)
        uncounted = self._uncounted_within(offsets)
        if len(uncounted):
            counted = ~marks_among(offsets, uncounted)
            batch, offsets = batch.filter(pa.array(counted)), offsets[counted]
        if len(offsets):
            self._count(batch, offsets)

    def _uncounted_within(self, offsets: Offsets) -> Offsets:
        """Of ascending offsets: at least those that do not count for rules."""
        uncounted = self.removed.uncounted
        if not uncounted or not len(offsets):
            return np.empty(0, np.int64)
        return to_array(uncounted & offset_range(int(offsets[0]), int(offsets[-1]) + 1))

    def _count(self, batch: pa.RecordBatch, offsets: Offsets) -> None:
        rule = self.rules[self._at]
        if self.counts_subjects or self.indexes_subjects:
            if self.subjects is None:
                self.subjects = NewestRows(rule.per_subject or 1)
            superseded = self.subjects.add(Texts.of(batch.column("subject")), offsets)
            if rule.per_subject is not None:
                self._hide(superseded)
        if rule.compacts:
            if self.keys is None:
                self.keys = NewestRows()
            keys = batch.column("key")
            if keys.null_count < len(keys):
                self._hide(self.keys.add(Texts.of(keys), offsets))

    def _roll_up(self, batch: pa.RecordBatch, offsets: Offsets) -> bool:
        """Hides what roll-ups of this batch hide, before its rows are applied. False: the log is to be searched before,
        then this is called again.
        """
        of_subject, of_all = rollups_of(batch.column("headers"))
        if len(of_all):
            last = int(offsets[of_all[-1]])
            self.removed.derive(offset_range(self._log_start(), last))
            of_subject = of_subject[of_subject > of_all[-1]]
        if len(of_subject):
            subjects = batch.column("subject").dictionary_encode()
            rolled = np.full(len(subjects.dictionary), -1, np.int64)  # the last roll-up of each subject
            codes = subjects.indices.to_numpy()
            np.maximum.at(rolled, codes[of_subject], of_subject)
            if not len(of_all) and not self._hide_stored(subjects.dictionary.filter(pa.array(rolled >= 0))):
                return False
            self._hide(offsets[np.arange(len(codes)) < rolled[codes]])
        self._settled |= offset_set(offsets[np.concatenate([of_subject, of_all])])
        return True

    def _hide_stored(self, subjects: pa.Array[Any]) -> bool:
        """All messages of these subjects that are applied. False: the log is to be searched for them before."""
        if self.subjects is None:
            return True
        newest = self.subjects.newest_of(Texts.of(subjects))
        self._hide(newest[newest >= 0])
        settled = np.array([offset < 0 or offset in self._settled for offset in newest.tolist()], np.bool_)
        unknown = subjects.filter(pa.array(~settled))
        if len(unknown) and all(rule.per_subject is not None for rule in self.rules[: self._at + 1]):
            for subject in unknown.to_pylist():  # older ones are hidden by the limit
                self._hide(np.array(self.subjects.queue_of(subject), np.int64))
        elif len(unknown):
            self._search = _Search(unknown, newest[~settled], self.applied)
        return self._search is None

    def _search_some(self, search: _Search) -> None:
        """Hides the messages of some subjects in a part of the log, from its end to its start."""
        start, done = max(search.end - _ROWS_AT_ONCE, self._log_start()), set[str]()
        for batch in self._readable(start, search.end):
            found = pc.is_in(batch.column("subject"), value_set=search.subjects).to_numpy(zero_copy_only=False)
            rows, offsets = np.flatnonzero(found), batch.column("offset").to_numpy()[found]
            self._hide(offsets)
            settled = rows[[offset in self._settled for offset in offsets.tolist()]]
            done.update(batch.column("subject").take(settled).to_pylist())
        search.subjects = pa.array([one for one in search.subjects.to_pylist() if one not in done], pa.string())
        search.end = start
        if start <= self._log_start() or not len(search.subjects):
            self._settled |= offset_set(search.newest)
            self._search = None

    def _readable(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """The stored rows of a range, without damaged ones."""
        assert self._rows is not None, "subjects are of the rows of a log"
        while start < end:
            try:
                for _, batch in self._rows(start, end):
                    start = max(start, int(batch.column("offset")[-1].as_py()) + 1)
                    yield batch
                return
            except CorruptLog as error:
                damaged_end = error.facts.get("end")
                self.passed_damage = True
                logger.warning(
                    "a damaged range is not searched for messages to hide: %s",
                    error.message,
                    extra=event("log.removals_unreadable"),
                )
                if not isinstance(damaged_end, int) or damaged_end <= start:
                    return
                start = damaged_end

    def _note_expiry(self, batch: pa.RecordBatch, offsets: Offsets) -> None:
        headers = batch.column("headers")
        times_us = batch.column("timestamp").cast(pa.int64()).to_numpy()
        if self.expiry.has_own:
            rows, seconds = own_ttls_s(headers)
            self.own_ttl |= offset_set(offsets[rows])
            rows, seconds = rows[seconds != NEVER_S], seconds[seconds != NEVER_S]
            self.expiries.add(offsets[rows], times_us[rows] + (seconds * 1e6).astype(np.int64))
        if self.expiry.tombstones_us is not None:
            rows, _ = header_values(headers, TOMBSTONE_HEADER)
            rows = rows[batch.column("key").is_valid().to_numpy(zero_copy_only=False)[rows]]
            self.expiries.add(offsets[rows], times_us[rows] + self.expiry.tombstones_us)
            self.tombstones |= offset_set(offsets[rows])

    def _enter(self, rule: Rule) -> None:
        """The rows from here on are of another rule."""
        if self.subjects is not None:
            if rule.per_subject is None:
                self.indexes_subjects = True  # what is known remains known
                self.subjects.change_limit(1)
            else:
                self._hide(self.subjects.change_limit(rule.per_subject))
        if not rule.compacts:
            self.keys = None

    def _hide(self, offsets: Offsets) -> None:
        if len(offsets):
            self.removed.derive(offset_set(offsets))

    # ---- what is known ----

    def standing(self, start: int, subjects: Iterable[str], keys: Iterable[bytes]) -> Standing:
        """Of the log from `start` on."""
        by_subject, by_key = self.subjects, self.keys
        return Standing(
            self.applied,
            max(0, self.applied - start) - self.removed.count(start, self.applied),
            {} if by_subject is None else {one: by_subject.queue_of(one) for one in subjects},
            {} if by_key is None else {one: by_key.queue_of(one) for one in keys},
        )

    def droppable(self, offsets: Offsets, subjects: pa.Array[Any]) -> Offsets:
        """See `Visibility.droppable`."""
        if self.subjects is None or self.subjects.limit == 1:
            return offsets
        oldest = self.subjects.oldest_of(Texts.of(subjects))
        uncounted = marks_among(offsets, self._uncounted_within(offsets))
        return offsets[(oldest < 0) | (offsets < oldest) | uncounted]

    # ---- what is stored ----

    def content(self, log_start_offset: int) -> dict[str, Any]:
        """What is stored but the times of expiry, copied."""
        return {
            "applied": self.applied,
            "rules": [[rule.from_epoch, rule.per_subject, rule.compacts, rule.rolls_up] for rule in self.rules],
            "at": self._at,
            "subjects": _stored_table(self.subjects),
            "keys": _stored_table(self.keys),
            "expiry": [self.expiry.has_own, self.expiry.tombstones_us],
            "own_ttl": to_bytes(self.own_ttl),
            "tombstones": to_bytes(self.tombstones - self.removed.recorded),
            "settled": to_bytes(self._settled),
            "indexes_subjects": self.indexes_subjects,
            "derived": to_bytes(self.removed.derived(log_start_offset, self.applied)),
        }

    def take_over(self, content: dict[str, Any], source: str) -> None:
        """What `content` returned, with the times of expiry.

        Raises:
            ValueError, KeyError, IndexError, TypeError, CorruptLog: it is something else.
        """
        rules = tuple(Rule(*one) for one in content["rules"])
        tables = [_table_of(content[name]) for name in ("subjects", "keys")]
        hidden = from_bytes(base64.b64decode(content["derived"]), source)
        self._at = int(content["at"])
        self.subjects, self.keys = tables
        self.own_ttl = from_bytes(base64.b64decode(content["own_ttl"]), source)
        self.tombstones = from_bytes(base64.b64decode(content["tombstones"]), source)
        self._settled = from_bytes(base64.b64decode(content["settled"]), source)
        self._adopt(rules, Expiry(*content["expiry"]), indexes_subjects=bool(content["indexes_subjects"]))
        stored = (base64.b64decode(content.get(name, "")) for name in ("expiries", "expiries_ms"))
        self.expiries = Expiries.from_bytes(*stored)
        self.applied = int(content["applied"])
        self.removed.derive(hidden)


def _stored_table(table: NewestRows | None) -> dict[str, Any] | None:
    if table is None:
        return None
    return {"limit": table.limit} | {name: array.tobytes() for name, array in table.to_arrays().items()}


def _table_of(content: dict[str, Any] | None) -> NewestRows | None:
    """Raises ValueError, KeyError."""
    if content is None:
        return None
    limit = int(content.pop("limit"))
    return NewestRows.from_arrays(limit, {name: base64.b64decode(text) for name, text in content.items()})
