"""Removed messages in the simulation: what a replica hides, what its leader records, and what it drops from its files.

The rules are applied by the production `Visibility`, of rows that follow from the numbers of the messages. A record of
the companion log has contents here: offsets to hide, and perhaps that a rule was added.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from random import Random
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

from natslog.arrow.schema import HEADERS_TYPE
from natslog.cluster.commands import EditStream
from natslog.log.expiry import TTL_HEADER
from natslog.log.removed import offset_range, to_array
from natslog.log.rollups import ROLLUP_HEADER
from natslog.log.rules import Expiry, Rule
from natslog.log.visibility import Visibility
from natslog.model import StreamRecord, StreamSettings
from natslog.node.replicas.settings_in_force import rules_of
from tests.sim.raft_checker import require

if TYPE_CHECKING:
    from tests.sim.cluster_process import Entry
    from tests.sim.cluster_replica import SimReplica

SEGMENT_ROWS = 4
MOST_RECENT = 16
SUBJECTS = "aababcd"
REWRITE_SHARE = 0.1
RULE_FIELDS = ("max_messages_per_subject", "compact", "allow_rollup")
_SCHEMA = pa.schema(
    [
        ("offset", pa.int64()),
        ("timestamp", pa.int64()),
        ("subject", pa.string()),
        ("key", pa.binary()),
        ("headers", HEADERS_TYPE),
    ]
)


@dataclass(frozen=True, slots=True)
class Record:
    """What a record of the companion log states. `version`: of a rule that was added, as in `Visibility.count_anew`."""

    hidden: BitMap64 = field(default_factory=BitMap64)
    version: int = 0


def subject_of(message: int) -> str:
    return SUBJECTS[message % len(SUBJECTS)]


def key_of(message: int) -> bytes | None:
    return None if message % 4 == 0 else b"klm"[message % 5 % 3 :][:1]


def rollup_of(message: int) -> str | None:
    return "sub" if message % 17 == 5 else None


def ttl_of(message: int) -> str | None:
    return "2" if message % 11 == 3 else None


@cache
def headers_of(message: int) -> list[tuple[str, str]] | None:
    found = [
        (name, value) for name, value in ((ROLLUP_HEADER, rollup_of(message)), (TTL_HEADER, ttl_of(message))) if value
    ]
    return found or None


def settings_of(chance: Random, name: str) -> StreamSettings:
    """By which rules messages hide others."""
    return StreamSettings(
        subject=name,
        max_messages_per_subject=chance.choice((None, None, 1, 2, 3)),
        compact=chance.random() < 0.4,
        allow_rollup=chance.random() < 0.3,
    )


def edited_rules(chance: Random, name: str) -> EditStream:
    return EditStream(name=name, settings=settings_of(chance, name), changed=RULE_FIELDS)


def without_rules(record: StreamRecord) -> StreamRecord:
    """Edits of rules do not begin a version of the record, unless another epoch begins."""
    settings = msgspec.structs.replace(record.settings, **{name: getattr(_NO_RULES, name) for name in RULE_FIELDS})
    return msgspec.structs.replace(record, settings=settings, former_rules=(), rules_version=0)


_NO_RULES = StreamSettings(subject="none")


class SimRemovals:
    """Of one replica, from the opening of its log on. As `HostedStream`, `Removing` and `rewriting` do it.

    Attributes:
        delivered: the records below were given to it, and are in force.
    """

    def __init__(self, replica: SimReplica) -> None:
        self.replica, self.log = replica, replica.log
        self.visibility = Visibility(rows=self._rows)
        self.visibility.on_damage = lambda error: True
        self.delivered = 0
        self.adopt()

    def adopt(self) -> None:
        record = self.replica.record
        if record is not None:
            self.visibility.set_rules(rules_of(record), 0, record.rules_version)
            self.visibility.set_expiry(Expiry(has_own=True), 0)

    def deliver(self, start: int, records: list[Record]) -> None:
        """Some again, after a repair."""
        for at, record in enumerate(records, start):
            self.visibility.removed.record(record.hidden)
            if record.version:
                self.visibility.count_anew(record.version, 0)
                self.adopt()
            self.delivered = max(self.delivered, at + 1)

    def hidden(self, end: int) -> BitMap64:
        if self.visibility.applied > end:  # after a repair
            self.visibility.begin_again(0)
        return self.visibility.removed_below(end).all

    def visible(self, end: int) -> list[int]:
        hidden = self.hidden(end)
        return [at for at in range(end) if at not in hidden and at not in self.log.dropped]

    # ---- what a leader records ----

    def record_for(self, number: int) -> Record:
        """What a request comes to: a deletion, a purge, or what is hidden anyway, so that files may be rewritten."""
        end, record = self.replica.high_watermark, self.replica.record
        visible = self.visible(end)
        removed = self.visibility.removed
        hidden, version = BitMap64(), 0
        match number % 6:
            case 0 | 1 if visible:  # mostly a recent one, which hides others or counts for them
                hidden.add(visible[-1 - number * 7 % min(len(visible), MOST_RECENT)])
            case 2 if number % 4 == 2:
                found = [
                    at for at in visible if subject_of(self.log.records[at][1]) == SUBJECTS[number % len(SUBJECTS)]
                ]
                hidden |= BitMap64(found[: len(found) - number % 2])
            case 2 | 3:
                hidden |= self.expired()
            case _:
                hidden |= removed.derived(0, end)
        if record is not None and record.rules_version > self.visibility.rules_version:
            hidden, version = hidden | removed.derived(0, end), record.rules_version
        return Record(hidden, version)

    def expired(self) -> BitMap64:
        """By the time of the newest message. They remain due: the record may never be committed."""
        end = self.replica.high_watermark
        now_us = self.replica.checker.stamps[self.log.records[end - 1]] if end else 0
        found = self.visibility.expired(now_us, leads=True)
        self.visibility.not_recorded(found, now_us)
        return found

    # ---- what files lack ----

    def rewrite(self) -> None:
        """Segments without hidden rows take the place of others, on each replica at its own time."""
        end = self.replica.high_watermark
        self.hidden(end)
        for start in range(0, end - SEGMENT_ROWS + 1, SEGMENT_ROWS):
            if not self.may_drop(start + SEGMENT_ROWS):
                return
            offsets = to_array(self.visibility.removed.recorded & offset_range(start, start + SEGMENT_ROWS))
            offsets = np.array([at for at in offsets.tolist() if at not in self.log.dropped], np.int64)
            if len(offsets):
                subjects = pa.array([subject_of(self.log.records[at][1]) for at in offsets.tolist()])
                self.log.drop(set(self.visibility.droppable(offsets, subjects).tolist()))

    def may_drop(self, end: int) -> bool:
        """Whether all that is hidden below is in records: otherwise what a dropped row hides would return."""
        first_derived = self.visibility.removed.first_derived(0)
        return (first_derived is None or end <= first_derived) and self.visibility.is_applied(end)

    # ---- rows ----

    def _rows(self, start: int, end: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        log, stamps = self.log, self.replica.checker.stamps
        stored = [at for at in range(start, end) if at not in log.dropped]
        for epoch, found in groupby(stored, lambda at: log.records[at][0]):
            offsets = list(found)
            entries = [log.records[at] for at in offsets]
            yield epoch, batch_of(offsets, entries, [stamps[one] for one in entries])


def batch_of(offsets: list[int], entries: list[Entry], times_us: list[int]) -> pa.RecordBatch:
    messages = [message for _, message in entries]
    columns = [
        pa.array(offsets, pa.int64()),
        pa.array(times_us, pa.int64()),
        pa.array([subject_of(one) for one in messages], pa.string()),
        pa.array([key_of(one) for one in messages], pa.binary()),
        pa.array([headers_of(one) for one in messages], HEADERS_TYPE),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


class RemovalsChecker:
    """Of one stream: a replica that serves shows what follows from the messages that are committed, the records that it
    was given, and the rules that it knows, whatever it has dropped; and nothing else.
    """

    def __init__(self, committed: list[Entry], records: list[Entry], contents: dict[tuple[int, int], Record]) -> None:
        self.committed, self.records, self.contents = committed, records, contents

    def reads(self, removals: SimRemovals, end: int) -> list[int]:
        """Returns what it shows. A rule that was added waits for its record; a replica that is opened meanwhile has it
        in force at once, for the rows that its files still have.
        """
        shown, record = removals.visible(end), removals.replica.record
        waits = record is not None and record.rules_version > removals.visibility.rules_version
        lacking = removals.log.dropped if waits else set[int]()
        hidden = self.hidden(end, removals.delivered, removals.visibility.rules, lacking)
        expected = [at for at in range(end) if at not in hidden]
        if removals.replica.me == removals.replica.cluster.liar:  # its files may lack what a record states that it lost
            recorded = set[int]().union(
                *(self.contents[epoch, at].hidden for at, (epoch, _) in enumerate(self.records))
            )
            expected = [at for at in expected if at in shown or at not in recorded]
        require(
            shown == expected,
            f"broker {removals.replica.me} with {end} messages and {removals.delivered} records shows {shown}, "
            f"and not {expected}; its rules are {removals.visibility.rules}",
        )
        return shown

    def hidden(
        self, end: int, end_of_records: int, rules: tuple[Rule, ...], lacking: Set[int] = frozenset()
    ) -> set[int]:
        """Args: lacking: what does not count for rules because files lack it."""
        recorded, uncounted, version = set[int](), set[int](), 0
        for at, (epoch, _) in enumerate(self.records[:end_of_records]):
            record = self.contents[epoch, at]
            recorded.update(record.hidden)
            if record.version > version:
                uncounted, version = set(recorded), record.version
        return recorded | self._derived(end, uncounted | lacking, rules)

    def _derived(self, end: int, uncounted: set[int], rules: tuple[Rule, ...]) -> set[int]:
        """The rules, applied to one message after another."""
        found, at = set[int](), 0
        of_subject: dict[str, list[int]] = {}
        of_key: dict[bytes, int] = {}
        for offset in range(end):
            epoch, message = self.committed[offset]
            while at + 1 < len(rules) and epoch >= rules[at + 1].from_epoch:
                at += 1
                of_key = of_key if rules[at].compacts else {}
            rule, subject, key = rules[at], subject_of(message), key_of(message)
            if rule.rolls_up and rollup_of(message):
                found.update(one for one in range(offset) if subject_of(self.committed[one][1]) == subject)
            if offset in uncounted:
                continue
            queue = of_subject.setdefault(subject, [])
            queue.append(offset)
            if rule.per_subject is not None:
                found.update(queue[: -rule.per_subject])
            if rule.compacts and key is not None:
                found |= {of_key[key]} if key in of_key else set()
                of_key[key] = offset
        return found
