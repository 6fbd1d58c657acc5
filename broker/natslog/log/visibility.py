"""Which messages of a log readers get: the removed offsets, and the rules by which newer messages hide older ones.

Theory of operation. The rules (a limit per subject, compaction by key) are applied to committed rows in the order of
the log, and not while messages are appended: by a reader, up to the high watermark that it reads to, and regularly by
maintenance, so that a reader finds little left to do. Every replica applies the same rules to the same rows, so it
hides the same messages. The state is stored in the file `newest` from time to time; opening applies the rules to the
rows behind it only.

A rule that hides less than before is in force for the rows of later leader epochs (`Rule.from_epoch`); one that hides
more is in force for all rows at once, so that rows without a limit never precede rows with one. Roll-ups concern rows
of all epochs, so they are in force from an epoch on in either case.

Rows that cannot be read hide nothing. If another replica has them, readers are refused until the damage is repaired.
Otherwise they are passed over, and all is applied again when they were repaired.

Invariant. Rules are applied to committed rows only, so nothing has to be taken back, except when a damaged log is cut
below what was applied: then all of it is applied again, which hides the same messages.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from natslog.errors import CorruptLog, InvalidRequest, NatslogError
from natslog.log.applied_rules import AppliedRules, Standing, StoredRows
from natslog.log.checked_file import read_checked, sync_folder, write_checked
from natslog.log.erasing import ErasedRows, Erases
from natslog.log.newest import Offsets, Texts
from natslog.log.removed import RemovedOffsets, offset_range, offset_set, to_array
from natslog.log.rules import NO_RULE, Expiry, Rule, weaker
from natslog.log_events import event
from natslog.model import Epoch

logger = logging.getLogger("natslog.log")

_FILE = "newest"
_STORED_EVERY_OFFSETS = 1_000_000
_FIRST_WINDOW = 1 << 14

UNKNOWN = -2
"""In place of an offset."""


class Visibility:
    """See the module. Thread-safe.

    Args:
        folder: of the log. `rows`: reads its rows. `log_start`: the first offset that it has.

    Attributes:
        removed: what is hidden, as far as it is known. `rules_version`: as of the last call of `count_anew`; 0: there
            was none. (`_delivered_version`: since it was opened.)
        on_applied: called when the rules were applied to more rows. on_damage: called with damage of rows that they
            have to be applied to; returns whether it is repaired from another replica.
    """

    def __init__(
        self,
        folder: Path | None = None,
        rows: StoredRows | None = None,
        log_start: Callable[[], int] = lambda: 0,
    ) -> None:
        self._applied = AppliedRules(rows, log_start)
        self.removed: RemovedOffsets = self._applied.removed
        self.on_applied: Callable[[], None] = lambda: None
        self.on_damage: Callable[[CorruptLog], bool] = lambda error: False
        self._path = folder / _FILE if folder is not None else None
        self._rows = rows
        self._lock = threading.Lock()
        self._store_lock = threading.Lock()  # taken first; others do not wait while the state is written
        self._stored = -1
        self.rules_version = self._delivered_version = 0
        self._has_rules_of_stream = False  # since it was opened

    @property
    def applied(self) -> int:
        """The rules were applied to all rows below."""
        return self._applied.applied

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Each is in force from its epoch on."""
        return self._applied.rules

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
        """Whether any message may be hidden by a rule."""
        return self._applied.has_rules

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
            table, upto = self._applied.keys if self.rule.compacts else self._applied.subjects, self.applied
            if self.rule.compacts and not table and upto > log_start_offset:
                raise InvalidRequest(
                    "the stream is compacted by key, but none of its messages has a key, so its latest view would be "
                    "empty: publish with the header Natslog-Key (natslog pub --key), or edit the stream: compact=false "
                    "makes it a view of the newest message of each subject"
                )
            newest = offset_set(table.newest()) if table is not None else BitMap64()
            return newest - removed.all - self._applied.tombstones, upto

    def without_tombstones(self, offsets: BitMap64) -> BitMap64:
        """Of messages that rules were applied to."""
        with self._lock:
            return offsets - self._applied.tombstones

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
                self._applied.index_subjects(log_start_offset)
        removed = self.removed_below(high_watermark)
        with self._lock:
            if self._applied.passed_damage or self.applied < high_watermark:
                raise CorruptLog(
                    f"the last message on {subject!r} cannot be determined, because the log is damaged: repair it"
                )
            queue = [] if self._applied.subjects is None else self._applied.subjects.queue_of(subject)
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
            is_counted = self._applied.counts_subjects or self._applied.indexes_subjects
            if self._applied.subjects is None or not is_counted or self._applied.passed_damage or self.applied < end:
                return None
            found = self._applied.subjects.newest_of(subjects)
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

    def standing(self, start: int, subjects: Iterable[str], keys: Iterable[bytes]) -> Standing:
        """Of the log from `start` on."""
        with self._lock:
            return self._applied.standing(start, subjects, keys)

    def is_applied(self, end: int) -> bool:
        """Whether all is known that rows below this offset hide."""
        return not self.has_rules or self.applied >= end

    def droppable(self, offsets: Offsets, subjects: pa.Array[Any]) -> Offsets:
        """Those of these hidden rows whose files may be rewritten without them: no older message of their subject is
        visible because of the limit per subject, for which they count. (With a limit of 1, none is: former limits are
        not higher.)
        """
        with self._lock:
            return self._applied.droppable(offsets, subjects)

    # ---- erasure ----

    def offsets_of_texts(self, erases: Erases, chosen: Callable[[pa.Array[Any]], Any]) -> BitMap64:
        """The newest offsets of the subjects, or keys, for which `chosen` is true: their texts are known here, also if
        no row with them is stored any more.
        """
        with self._lock:
            table = self._applied.subjects if erases == "subject" else self._applied.keys
            return BitMap64() if table is None else offset_set(table.offsets_where(chosen))

    def forget_texts(self, rows: ErasedRows, log_start_offset: int) -> None:
        """Texts of which only erased rows are known; durable when this returns. Raises OSError."""
        assert self._path is not None, "only of a log with a folder"
        with self._lock:
            if self._applied.subjects is not None:
                self._applied.subjects = self._applied.subjects.without(rows.dropped)
            if self._applied.keys is not None:
                self._applied.keys = self._applied.keys.without(rows.all)
            self._stored = -1
        if self.has_rules:
            self.store(log_start_offset, at_least=1)
        else:
            self._path.unlink(missing_ok=True)
            sync_folder(self._path.parent)

    # ---- rules ----

    def set_rules(self, rules: Sequence[Rule], log_start_offset: int, version: int = 0) -> None:
        """From now on. Where they hide more than before, messages that are stored already are hidden too.

        Args:
            version: of the settings that added a rule after messages were removed. Until `count_anew` was called for
                it, messages are hidden only where the rules before them do so, too, except when there are none because
                the log was just opened.
        """
        given = tuple(rules) or (NO_RULE,)
        waits, self._has_rules_of_stream = version > self.rules_version and self._has_rules_of_stream, True
        if waits:
            given = (*self.rules, *(weaker(self.rule, one) for one in given if one.from_epoch > self.rule.from_epoch))
        if given == self.rules:
            return
        with self._lock:
            self._applied.set_rules(given, log_start_offset)

    def set_expiry(self, expiry: Expiry, log_start_offset: int) -> None:
        """From now on, also for messages that are stored already."""
        with self._lock:
            self._applied.set_expiry(expiry, log_start_offset)

    def begin_again(self, log_start_offset: int) -> None:
        """The log was cut below what was applied: the rules are applied to all of it again."""
        with self._lock:
            self._applied.begin_again(log_start_offset)

    def repaired(self, log_start_offset: int) -> None:
        """Damage in the log was repaired."""
        with self._lock:
            if self._applied.passed_damage:
                self._applied.begin_again(log_start_offset)

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
            if version > self.rules_version:  # otherwise the stored state is of this version
                self.rules_version, self._stored = version, -1
                self.removed.forget_derived()
                self._applied.begin_again(log_start_offset)

    def catch_up(self, high_watermark: int) -> None:
        """Applies the rules to all rows below. Others that need the lock wait for a part of it at most.

        Raises:
            CorruptLog: some of them are damaged, and are repaired from another replica.
        """
        while self.has_rules and self.applied < high_watermark:
            with self._lock:
                before, was_searching = self.applied, self._applied.is_searching
                try:
                    self._applied.apply_some(high_watermark)
                except CorruptLog as error:
                    if self.on_damage(error):
                        raise
                    self._applied.pass_damage(error, high_watermark)
                if self.applied <= before and not was_searching and not self._applied.is_searching:
                    return

    # ---- expiry ----

    def expired(self, now_us: int, *, leads: bool) -> BitMap64:
        """The offsets that have expired by this stream time and are not recorded as removed yet.

        Args:
            leads: the caller records them, or calls `not_recorded`. On a replica that does not lead they are kept, for
                the time when it does.
        """
        with self._lock:
            due = self._applied.expiries.due(now_us)
            waiting = offset_set(due) - self.removed.recorded if len(due) else BitMap64()
            if waiting and not leads:
                self._keep_due(waiting, now_us)
            return waiting

    def next_expiry_us(self) -> int | None:
        """When the next message expires that has a time of its own; None if none does."""
        with self._lock:
            return self._applied.expiries.next_us()

    def not_recorded(self, offsets: BitMap64, now_us: int) -> None:
        """Expired offsets could not be recorded: `expired` returns them again."""
        with self._lock:
            self._keep_due(offsets, now_us)

    def _keep_due(self, offsets: BitMap64, now_us: int) -> None:
        again = to_array(offsets)
        self._applied.expiries.add(again, np.full(len(again), now_us, np.int64))

    def without_own_ttl(self, start: int, end: int) -> BitMap64:
        """The offsets in `[start, end)` whose messages have no time to live of their own, and are not recorded as
        removed.
        """
        with self._lock:
            return offset_range(start, end) - self._applied.own_ttl - self.removed.recorded

    # ---- what is stored ----

    def open(self, log_start_offset: int, high_watermark: int) -> None:
        """Takes over the stored state, as far as it is of these rules and of this log. Raises DataDirError: a newer
        format.
        """
        assert self._path is not None, "only of a log with a folder"
        self._applied.applied = log_start_offset
        try:
            content = read_checked(self._path, _FILE, 1)
            if content is not None and log_start_offset <= content["applied"] <= high_watermark:
                rules_version = int(content["rules_version"])
                self._applied.take_over(content, str(self._path))
                self.rules_version, self._stored = rules_version, self.applied
        except (CorruptLog, ValueError, KeyError, IndexError, TypeError) as error:
            why = error.message if isinstance(error, NatslogError) else f"{self._path} cannot be read ({error})"
            logger.error("%s. It is made again from the log", why, extra=event("log.file_damaged", path=self._path))
            self._applied.begin_again(log_start_offset)

    def store(self, log_start_offset: int, *, at_least: int = _STORED_EVERY_OFFSETS) -> None:
        """Writes the state, if rules were applied to so many offsets since it was written. Raises OSError."""
        assert self._path is not None, "only of a log with a folder"
        with self._store_lock:
            with self._lock:
                if (
                    not self.has_rules
                    or self._applied.passed_damage
                    or self.applied - max(self._stored, 0) < max(at_least, 1)
                ):
                    return
                content = self._applied.content(log_start_offset) | {"rules_version": self.rules_version}
                expiries = self._applied.expiries.copy()
                self._stored = self.applied
            try:
                seconds, before_ms = expiries.to_bytes()
                write_checked(self._path, _FILE, 1, content | {"expiries": seconds, "expiries_ms": before_ms})
            except BaseException:
                self._stored = -1
                raise
