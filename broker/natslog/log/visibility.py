"""Which messages of a log readers get: the removed offsets, and the rules by which newer messages hide older ones.

Theory of operation. The rules (a limit per subject, compaction by key) are applied to committed rows in the order of
the log, and not while messages are appended: by a reader, up to the high watermark that it reads to, and regularly by
maintenance, so that a reader finds little left to do. Every replica applies the same rules to the same rows, so it
hides the same messages. The state is stored in the file `newest` from time to time; opening applies the rules to the
rows behind it only.

A rule that hides less than before is in force for the rows of later leader epochs (`Rule.from_epoch`); one that hides
more is in force for all rows at once, so that rows without a limit never precede rows with one. Roll-ups concern rows
of all epochs, so they are in force from an epoch on in either case.

A roll-up of a subject hides all older messages of it. Of each subject only the newest ones are known, so before rows
with such a roll-up are applied the log is read backwards for others, in parts, unless it is known that all messages
before the newest one of the subject are hidden (`_settled`).

Rows that cannot be read hide nothing. If another replica has them, readers are refused until the damage is repaired.
Otherwise they are passed over, and all is applied again when they were repaired.

Invariant. Rules are applied to committed rows only, so nothing has to be taken back, except when a damaged log is cut
below what was applied: then all of it is applied again, which hides the same messages.
"""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from natslog.errors import CorruptLog, InvalidRequest, NatslogError
from natslog.log.checked_file import read_checked, sync_folder, write_checked
from natslog.log.erasing import ErasedRows, Erases
from natslog.log.expiry import NEVER_S, TOMBSTONE_HEADER, Expiries, header_values, own_ttls_s
from natslog.log.newest import NewestRows, Offsets, Texts
from natslog.log.removed import RemovedOffsets, from_bytes, marks_among, offset_range, offset_set, to_array, to_bytes
from natslog.log.rollups import rollups_of
from natslog.log_events import event
from natslog.model import Epoch

logger = logging.getLogger("natslog.log")

_FILE = "newest"
_STORED_EVERY_OFFSETS = 1_000_000
_ROWS_AT_ONCE = 100_000
_FIRST_WINDOW = 1 << 14

UNKNOWN = -2
"""In place of an offset."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How messages of a stream hide older ones.

    Attributes:
        from_epoch: the first leader epoch whose rows it is applied to. `per_subject`: how many messages of a subject
            are visible; None: all. `compacts`: a message hides older ones with the same key. `rolls_up`: roll-ups hide
            older messages.
    """

    from_epoch: Epoch
    per_subject: int | None = None
    compacts: bool = False
    rolls_up: bool = False

    @property
    def hides(self) -> bool:
        return self.per_subject is not None or self.compacts or self.rolls_up


NO_RULE = Rule(Epoch(0))


@dataclass(frozen=True, slots=True)
class Expiry:
    """Which messages of a stream expire one by one.

    Attributes:
        has_own: messages may have a time to live of their own. `tombstones_us`: how long a tombstone is visible; None:
            the stream has none.
    """

    has_own: bool = False
    tombstones_us: int | None = None

    @property
    def concerns_any(self) -> bool:
        return self.has_own or self.tombstones_us is not None


NO_EXPIRY = Expiry()


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


StoredRows = Callable[[int, int], Iterator[tuple[int, pa.RecordBatch]]]
"""The stored batches that have rows in `[start, end)`, cut to it, each with its leader epoch. Raises CorruptLog."""


class Visibility:
    """See the module. Thread-safe.

    Args:
        folder: of the log. `rows`: reads its rows. `log_start`: the first offset that it has.

    Attributes:
        removed: what is hidden, as far as it is known. `applied`: the rules were applied to all rows below.
        on_applied: called when they were applied to more rows. on_damage: called with damage of rows that they have to
            be applied to; returns whether it is repaired from another replica.
    """

    def __init__(
        self,
        folder: Path | None = None,
        rows: StoredRows | None = None,
        log_start: Callable[[], int] = lambda: 0,
    ) -> None:
        self.removed = RemovedOffsets()
        self.applied = 0
        self.rules: tuple[Rule, ...] = (NO_RULE,)
        self.on_applied: Callable[[], None] = lambda: None
        self.on_damage: Callable[[CorruptLog], bool] = lambda error: False
        self._path = folder / _FILE if folder is not None else None
        self._rows, self._log_start = rows, log_start
        self._lock = threading.Lock()
        self._store_lock = threading.Lock()  # taken first; others do not wait while the state is written
        self._expiry = NO_EXPIRY
        self._expiries = Expiries()
        self._own_ttl = BitMap64()  # offsets with a time to live of their own
        self._tombstones = BitMap64()
        self._settled = BitMap64()  # offsets: all older messages of the same subject are hidden
        self._search: _Search | None = None
        self._indexes_subjects = False  # although no limit requires it
        self._passed_damage = False  # rows were not applied because they cannot be read
        self._at = 0  # the number of the rule that the last applied row belongs to
        self._subjects: NewestRows | None = None
        self._keys: NewestRows | None = None
        self._stored = -1
        self._rules_version = self._delivered_version = 0  # as of `count_anew`; the latter since it was opened
        self._has_rules_of_stream = False  # since it was opened

    @property
    def rule(self) -> Rule:
        """In force for new messages."""
        return self.rules[-1]

    def rule_of(self, epoch: Epoch) -> Rule:
        """In force for messages of this leader epoch."""
        return next((rule for rule in reversed(self.rules) if rule.from_epoch <= epoch), self.rules[0])

    def removed_below(self, high_watermark: int) -> RemovedOffsets:
        """What is hidden of the messages below this offset, and by them. Raises as `catch_up`."""
        if self.has_rules and self.applied < high_watermark:
            self.catch_up(high_watermark)
            self.on_applied()
        return self.removed

    @property
    def is_in_use(self) -> bool:
        """Whether any message is hidden, or may be hidden by a rule."""
        return self.has_rules or bool(self.removed)

    @property
    def has_rules(self) -> bool:
        return self._indexes_subjects or self._expiry.concerns_any or any(rule.hides for rule in self.rules)

    @property
    def _counts_subjects(self) -> bool:
        """Of all rows, also of those that are under a rule without a limit: the same on every replica, whichever of
        them was asked for the newest messages.
        """
        return any(rule.per_subject is not None for rule in self.rules)

    @property
    def keeps_newest_only(self) -> bool:
        """Whether the rules leave one message of each key, or of each subject, at most."""
        return len(self.rules) == 1 and (self.rule.compacts or self.rule.per_subject == 1)

    def newest_only(self, high_watermark: int, log_start_offset: int) -> tuple[BitMap64, int]:
        """The visible message of each key or subject, without tombstones, where the rules leave no other. Returns their
        offsets and the high watermark that they are of.

        Raises:
            InvalidRequest: the stream is compacted, and none of its messages has a key.
        """
        removed = self.removed_below(high_watermark)
        with self._lock:
            table, upto = self._keys if self.rule.compacts else self._subjects, self.applied
            if self.rule.compacts and not table and upto > log_start_offset:
                raise InvalidRequest(
                    "the stream is compacted by key, but none of its messages has a key, so its latest view would be "
                    "empty: publish with the header Natslog-Key (natslog pub --key), or edit the stream: compact=false "
                    "makes it a view of the newest message of each subject"
                )
            newest = offset_set(table.newest()) if table is not None else BitMap64()
            return newest - removed.all - self._tombstones, upto

    def without_tombstones(self, offsets: BitMap64) -> BitMap64:
        """Of messages that rules were applied to."""
        with self._lock:
            return offsets - self._tombstones

    def _index_subjects(self, log_start_offset: int) -> None:
        if not self._indexes_subjects:
            self._indexes_subjects = True
            self._begin_again(log_start_offset)

    def newest_of_subject(
        self, subject: str, high_watermark: int, log_start_offset: int, first_readable_offset: int
    ) -> int:
        """The newest visible message of a subject below the high watermark; -1 if there is none.

        The first call reads the log. If newer messages of the subject were removed, the log is
        read backwards to an older one.

        Raises:
            CorruptLog: messages that cannot be read may be newer.
        """
        with self._lock:
            if len(self.rules) > 1 or self.rule.per_subject is None:
                self._index_subjects(log_start_offset)
        removed = self.removed_below(high_watermark)
        with self._lock:
            if self._passed_damage or self.applied < high_watermark:
                raise CorruptLog(
                    f"the last message on {subject!r} cannot be determined, because the log is damaged: repair it"
                )
            queue = [] if self._subjects is None else self._subjects.queue_of(subject)
            has_all = len(self.rules) == 1 and self.rule.per_subject is not None
        for offset in reversed(queue):
            if not removed.is_hidden(offset):
                return offset if offset >= first_readable_offset else -1
        return -1 if has_all or not queue else self._older_visible(subject, queue[0], first_readable_offset)

    def newest_of_subjects(self, subjects: Texts, end: int, *, may_wait: bool) -> Offsets | None:
        """The newest visible message of each subject, as far as it is known without the index: -1 where there is none,
        `UNKNOWN` where the index is to be asked.

        Args:
            end: rows below are committed. `may_wait`: for the lock, under which others read the log.

        Returns:
            None: no rule counts subjects, or the rules were not applied to all rows below yet, or the lock is taken.
        """
        if not self._lock.acquire(blocking=may_wait):
            return None
        try:
            is_counted = self._counts_subjects or self._indexes_subjects
            if self._subjects is None or not is_counted or self._passed_damage or self.applied < end:
                return None
            found = self._subjects.newest_of(subjects)
            is_hidden = self.removed.marks_of(found)  # under the lock: newer rows would hide what was found
            has_all = len(self.rules) == 1 and self.rule.per_subject == 1  # then all older ones are hidden
        finally:
            self._lock.release()
        found[(found < 0) | is_hidden] = -1 if has_all else UNKNOWN
        return found

    def _older_visible(self, subject: str, end: int, first_readable_offset: int) -> int:
        """The newest visible message of a subject below `end`; -1 if there is none. Reads the log backwards."""
        assert self._rows is not None, "subjects are of the rows of a log"
        window = _FIRST_WINDOW
        while end > first_readable_offset:
            start, found = max(end - window, first_readable_offset), -1
            for _, batch in self._rows(start, end):
                offsets = batch.column("offset").to_numpy()
                of_subject = pc.equal(batch.column("subject"), subject).to_numpy(zero_copy_only=False)
                visible = offsets[of_subject & ~self.removed.marks(offsets)]
                found = int(visible[-1]) if len(visible) else found
            if found >= 0:
                return found
            end, window = start, 2 * window
        return -1

    def hidden_as_of(self, high_watermark: int) -> tuple[BitMap64, int]:
        """What is hidden, and the high watermark that it is of: this one, or a newer one that rules were applied to."""
        removed = self.removed_below(high_watermark)
        with self._lock:
            return BitMap64(removed.all), max(high_watermark, self.applied) if self.has_rules else high_watermark

    # ---- erasure ----

    def offsets_of_texts(self, erases: Erases, chosen: Callable[[pa.Array[Any]], Any]) -> BitMap64:
        """The newest offsets of the subjects, or keys, for which `chosen` is true: their texts are known here, also if
        no row with them is stored any more.
        """
        with self._lock:
            table = self._subjects if erases == "subject" else self._keys
            return BitMap64() if table is None else offset_set(table.offsets_where(chosen))

    def forget_texts(self, rows: ErasedRows, log_start_offset: int) -> None:
        """Texts of which only erased rows are known; durable when this returns. Raises OSError."""
        assert self._path is not None, "only of a log with a folder"
        with self._lock:
            if self._subjects is not None:
                self._subjects = self._subjects.without(rows.dropped)
            if self._keys is not None:
                self._keys = self._keys.without(rows.all)
            self._stored = -1
        if self.has_rules:
            self.store(log_start_offset, at_least=1)
        else:
            self._path.unlink(missing_ok=True)
            sync_folder(self._path.parent)

    def standing(self, start: int, subjects: Iterable[str], keys: Iterable[bytes]) -> Standing:
        """Of the log from `start` on."""
        with self._lock:
            by_subject, by_key = self._subjects, self._keys
            return Standing(
                self.applied,
                max(0, self.applied - start) - self.removed.count(start, self.applied),
                {} if by_subject is None else {one: by_subject.queue_of(one) for one in subjects},
                {} if by_key is None else {one: by_key.queue_of(one) for one in keys},
            )

    def is_applied(self, end: int) -> bool:
        """Whether all is known that rows below this offset hide."""
        return not self.has_rules or self.applied >= end

    # ---- rules ----

    def set_rules(self, rules: Sequence[Rule], log_start_offset: int, version: int = 0) -> None:
        """From now on. Where they hide more than before, messages that are stored already are hidden too.

        Args:
            version: of the settings that added a rule after messages were removed. Until `count_anew` was called for
                it, messages are hidden only where the rules before them do so, too, except when there are none because
                the log was just opened.
        """
        given = tuple(rules) or (NO_RULE,)
        waits, self._has_rules_of_stream = version > self._rules_version and self._has_rules_of_stream, True
        if waits:
            given = (*self.rules, *(_weaker(self.rule, one) for one in given if one.from_epoch > self.rule.from_epoch))
        if given == self.rules:
            return
        with self._lock:
            was, self.rules = self.rules, given
            if any(rule.rolls_up for rule in given) and not self._indexes_subjects:
                self._index_subjects(log_start_offset)
                return
            counts = self._subjects is not None or not self._counts_subjects
            if counts and was == given[: len(was)] and all(rule.hides for rule in was):
                return  # only later rows are concerned
            if len(was) == len(given) and was[:-1] == given[:-1] and self._tightened(was[-1], given[-1]):
                return
            self._begin_again(log_start_offset)

    def _tightened(self, was: Rule, now: Rule) -> bool:
        """Whether the rule in force differs by a lower limit only, which is applied at once."""
        if was.per_subject is None or now.per_subject is None or now.per_subject > was.per_subject:
            return False
        if (was.from_epoch, was.compacts, was.rolls_up) != (now.from_epoch, now.compacts, now.rolls_up):
            return False
        if self._subjects is not None and self._at == len(self.rules) - 1:
            self.removed.derive(offset_set(self._subjects.change_limit(now.per_subject)))
        return True

    def set_expiry(self, expiry: Expiry, log_start_offset: int) -> None:
        """From now on, also for messages that are stored already."""
        with self._lock:
            if expiry != self._expiry:
                self._expiry = expiry
                self._begin_again(log_start_offset)

    def expired(self, now_us: int, *, leads: bool) -> BitMap64:
        """The offsets that have expired by this stream time and are not recorded as removed yet.

        Args:
            leads: the caller records them, or calls `not_recorded`. On a replica that does not lead they are kept, for
                the time when it does.
        """
        with self._lock:
            due = self._expiries.due(now_us)
            waiting = offset_set(due) - self.removed.recorded if len(due) else BitMap64()
            if waiting and not leads:
                self._keep_due(waiting, now_us)
            return waiting

    def next_expiry_us(self) -> int | None:
        """When the next message expires that has a time of its own; None if none does."""
        with self._lock:
            return self._expiries.next_us()

    def not_recorded(self, offsets: BitMap64, now_us: int) -> None:
        """Expired offsets could not be recorded: `expired` returns them again."""
        with self._lock:
            self._keep_due(offsets, now_us)

    def _keep_due(self, offsets: BitMap64, now_us: int) -> None:
        again = to_array(offsets)
        self._expiries.add(again, np.full(len(again), now_us, np.int64))

    def without_own_ttl(self, start: int, end: int) -> BitMap64:
        """The offsets in `[start, end)` whose messages have no time to live of their own, and are not recorded as
        removed.
        """
        with self._lock:
            return offset_range(start, end) - self._own_ttl - self.removed.recorded

    def begin_again(self, log_start_offset: int) -> None:
        """The log was cut below what was applied: the rules are applied to all of it again."""
        with self._lock:
            self._begin_again(log_start_offset)

    def repaired(self, log_start_offset: int) -> None:
        """Damage in the log was repaired."""
        with self._lock:
            if self._passed_damage:
                self._begin_again(log_start_offset)

    @property
    def rules_version(self) -> int:
        """As of the last call of `count_anew`; 0: there was none."""
        return self._rules_version

    def count_anew(self, version: int, log_start_offset: int) -> None:
        """A record of the companion log states that rules were added: what was recorded as removed before does not
        count for rules, because other replicas may not have these rows any more. What they hid until now is recorded.

        Args:
            version: of the settings.
        """
        with self._lock:
            if version > self._delivered_version:  # otherwise it is delivered again, with later records behind it
                self._delivered_version = version
                self.removed.count_anew()
            if version > self._rules_version:  # otherwise the stored state is of this version
                self._rules_version, self._stored = version, -1
                self.removed.forget_derived()
                self._begin_again(log_start_offset)

    def _begin_again(self, log_start_offset: int) -> None:
        self.applied, self._at, self._passed_damage = log_start_offset, 0, False
        self._subjects = self._keys = None
        self._expiries, self._own_ttl, self._tombstones = Expiries(), BitMap64(), BitMap64()
        self._settled, self._search = BitMap64(), None

    # ---- rows ----

    def catch_up(self, high_watermark: int) -> None:
        """Applies the rules to all rows below. Others that need the lock wait for a part of it at most.

        Raises:
            CorruptLog: some of them are damaged, and are repaired from another replica.
        """
        while self.has_rules and self.applied < high_watermark:
            with self._lock:
                before = self.applied
                try:
                    if self._search is not None:
                        self._search_some(self._search)
                        continue
                    self._apply_some(high_watermark)
                except CorruptLog as error:
                    if self.on_damage(error):
                        raise
                    self._pass_damage(error, high_watermark)
                if self.applied <= before and self._search is None:
                    return

    def _apply_some(self, high_watermark: int) -> None:
        """Under the lock. Raises CorruptLog."""
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

    def _pass_damage(self, error: CorruptLog, high_watermark: int) -> None:
        """What cannot be read hides nothing, and is not served either."""
        self._passed_damage = True
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
        if self._expiry.concerns_any and batch.column("headers").null_count < len(batch):
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
        if self._counts_subjects or self._indexes_subjects:
            if self._subjects is None:
                self._subjects = NewestRows(rule.per_subject or 1)
            superseded = self._subjects.add(Texts.of(batch.column("subject")), offsets)
            if rule.per_subject is not None:
                self._hide(superseded)
        if rule.compacts:
            if self._keys is None:
                self._keys = NewestRows()
            keys = batch.column("key")
            if keys.null_count < len(keys):
                self._hide(self._keys.add(Texts.of(keys), offsets))

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
        if self._subjects is None:
            return True
        newest = self._subjects.newest_of(Texts.of(subjects))
        self._hide(newest[newest >= 0])
        settled = np.array([offset < 0 or offset in self._settled for offset in newest.tolist()], np.bool_)
        unknown = subjects.filter(pa.array(~settled))
        if len(unknown) and all(rule.per_subject is not None for rule in self.rules[: self._at + 1]):
            for subject in unknown.to_pylist():  # older ones are hidden by the limit
                self._hide(np.array(self._subjects.queue_of(subject), np.int64))
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
                self._passed_damage = True
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
        if self._expiry.has_own:
            rows, seconds = own_ttls_s(headers)
            self._own_ttl |= offset_set(offsets[rows])
            rows, seconds = rows[seconds != NEVER_S], seconds[seconds != NEVER_S]
            self._expiries.add(offsets[rows], times_us[rows] + (seconds * 1e6).astype(np.int64))
        if self._expiry.tombstones_us is not None:
            rows, _ = header_values(headers, TOMBSTONE_HEADER)
            rows = rows[batch.column("key").is_valid().to_numpy(zero_copy_only=False)[rows]]
            self._expiries.add(offsets[rows], times_us[rows] + self._expiry.tombstones_us)
            self._tombstones |= offset_set(offsets[rows])

    def _enter(self, rule: Rule) -> None:
        """The rows from here on are of another rule."""
        if self._subjects is not None:
            if rule.per_subject is None:
                self._indexes_subjects = True  # what is known remains known
                self._subjects.change_limit(1)
            else:
                self._hide(self._subjects.change_limit(rule.per_subject))
        if not rule.compacts:
            self._keys = None

    def _hide(self, offsets: Offsets) -> None:
        if len(offsets):
            self.removed.derive(offset_set(offsets))

    def droppable(self, offsets: Offsets, subjects: pa.Array[Any]) -> Offsets:
        """Those of these hidden rows whose files may be rewritten without them: no older message of their subject is
        visible because of the limit per subject, for which they count. (With a limit of 1, none is: former limits are
        not higher.)
        """
        with self._lock:
            if self._subjects is None or self._subjects.limit == 1:
                return offsets
            oldest = self._subjects.oldest_of(Texts.of(subjects))
            uncounted = marks_among(offsets, self._uncounted_within(offsets))
        return offsets[(oldest < 0) | (offsets < oldest) | uncounted]

    # ---- what is stored ----

    def open(self, log_start_offset: int, high_watermark: int) -> None:
        """Takes over the stored state, as far as it is of these rules and of this log. Raises DataDirError: a newer
        format.
        """
        assert self._path is not None, "only of a log with a folder"
        self.applied = log_start_offset
        try:
            content = read_checked(self._path, _FILE, 1)
            if content is not None and log_start_offset <= content["applied"] <= high_watermark:
                self._take_over(content)
        except (CorruptLog, ValueError, KeyError, IndexError, TypeError) as error:
            why = error.message if isinstance(error, NatslogError) else f"{self._path} cannot be read ({error})"
            logger.error("%s. It is made again from the log", why, extra=event("log.file_damaged", path=self._path))
            self._begin_again(log_start_offset)

    def _take_over(self, content: dict[str, Any]) -> None:
        rules = tuple(Rule(*one) for one in content["rules"])
        tables = [_table_of(content[name]) for name in ("subjects", "keys")]
        hidden = from_bytes(base64.b64decode(content["derived"]), str(self._path))
        self.rules, self._at = rules, int(content["at"])
        self._subjects, self._keys = tables
        self._expiry = Expiry(*content["expiry"])
        self._own_ttl = from_bytes(base64.b64decode(content["own_ttl"]), str(self._path))
        self._tombstones = from_bytes(base64.b64decode(content["tombstones"]), str(self._path))
        self._settled = from_bytes(base64.b64decode(content["settled"]), str(self._path))
        self._indexes_subjects = bool(content["indexes_subjects"])
        stored = (base64.b64decode(content.get(name, "")) for name in ("expiries", "expiries_ms"))
        self._expiries = Expiries.from_bytes(*stored)
        self._rules_version = int(content["rules_version"])
        self.applied = self._stored = int(content["applied"])
        self.removed.derive(hidden)

    def store(self, log_start_offset: int, *, at_least: int = _STORED_EVERY_OFFSETS) -> None:
        """Writes the state, if rules were applied to so many offsets since it was written. Raises OSError."""
        assert self._path is not None, "only of a log with a folder"
        with self._store_lock:
            with self._lock:
                if not self.has_rules or self._passed_damage or self.applied - max(self._stored, 0) < max(at_least, 1):
                    return
                content, expiries = self._content(log_start_offset), self._expiries.copy()
                self._stored = self.applied
            try:
                seconds, before_ms = expiries.to_bytes()
                write_checked(self._path, _FILE, 1, content | {"expiries": seconds, "expiries_ms": before_ms})
            except BaseException:
                self._stored = -1
                raise

    def _content(self, log_start_offset: int) -> dict[str, Any]:
        """Under the lock: what is stored but the times of expiry, copied."""
        return {
            "applied": self.applied,
            "rules": [[rule.from_epoch, rule.per_subject, rule.compacts, rule.rolls_up] for rule in self.rules],
            "at": self._at,
            "rules_version": self._rules_version,
            "subjects": _stored_table(self._subjects),
            "keys": _stored_table(self._keys),
            "expiry": [self._expiry.has_own, self._expiry.tombstones_us],
            "own_ttl": to_bytes(self._own_ttl),
            "tombstones": to_bytes(self._tombstones - self.removed.recorded),
            "settled": to_bytes(self._settled),
            "indexes_subjects": self._indexes_subjects,
            "derived": to_bytes(self.removed.derived(log_start_offset, self.applied)),
        }


def _weaker(one: Rule, other: Rule) -> Rule:
    """From the epoch of the other one on: it hides what both hide."""
    limits = [one.per_subject, other.per_subject]
    limit = None if None in limits else max(each for each in limits if each is not None)
    return Rule(other.from_epoch, limit, one.compacts and other.compacts, one.rolls_up and other.rolls_up)


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
