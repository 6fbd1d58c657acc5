"""Which messages readers get: whatever the order of appends, removals, crashes and rewriting, it is what a simple model
in memory has, and the same on every replica.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow import ipc
from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.arrow.schema import HEADERS_TYPE
from natslog.log import LogOptions, ReplicaLog
from natslog.log.batch_encoder import EncodedBatch
from natslog.log.removed import offset_set
from natslog.log.rules import Rule
from natslog.log.segment import read_at
from natslog.model import Epoch
from tests.conftest import open_log

Message = tuple[str, str | None, str | None]
"""Subject, key, and the value of `Nats-Rollup`."""

OPTIONS = LogOptions(min_free_bytes=0)


def rows_of(messages: list[Message], start: int) -> RowBuffers:
    count = len(messages)
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([subject for subject, _, _ in messages]),
            pa.array([None if key is None else key.encode() for _, key, _ in messages], pa.binary()),
            pa.array([[("Nats-Rollup", value)] if value else None for _, _, value in messages], HEADERS_TYPE),
            pa.array([b"%d" % at for at in range(start, start + count)], pa.binary()),
        ],
        schema=PAYLOAD_SCHEMA,
    )
    return RowBuffers.of(batch)


def visible(log: ReplicaLog, *, max_bytes: int = 1 << 20) -> list[int]:
    """The offsets that readers get. Checks that batches are contiguous and that values belong to their offsets."""
    found: list[int] = []
    start = log.chain.first_readable_offset
    while start < log.high_watermark:
        at = start
        with log.reader.plan_read(start, max_bytes=max_bytes) as plan:
            for header, message in plan.walked_messages():
                assert header.base_offset <= at if at == start else header.base_offset == at
                at = header.end_offset
                batch = ipc.decode_batch(message)
                assert len(batch) == header.rows
                offsets = batch.column("offset").to_pylist()
                assert batch.column("value").to_pylist() == [b"%d" % offset for offset in offsets]
                found += [offset for offset in offsets if start <= offset < plan.next_offset]
            assert at >= plan.next_offset > start
            start = plan.next_offset
    return found


@dataclass
class Model:
    """All messages ever, and which of them are hidden by the rules, or recorded as removed."""

    messages: list[Message] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)
    hidden: set[int] = field(default_factory=set)
    per_subject: int | None = None
    compacts: bool = False
    rolls_up: bool = False

    def append(self, messages: list[Message]) -> None:
        for one in messages:
            self.messages.append(one)
            if self.rolls_up and one[2] in ("sub", "all"):
                last = len(self.messages) - 1
                self.hidden |= {at for at in range(last) if one[2] == "all" or self.messages[at][0] == one[0]}
        self.apply()

    def apply(self) -> None:
        if self.per_subject is not None:
            newer: dict[str, int] = {}
            for offset in range(len(self.messages) - 1, -1, -1):
                subject = self.messages[offset][0]
                if newer.get(subject, 0) >= self.per_subject:
                    self.hidden.add(offset)
                newer[subject] = newer.get(subject, 0) + 1
        if self.compacts:
            seen: set[str] = set()
            for offset in range(len(self.messages) - 1, -1, -1):
                key = self.messages[offset][1]
                if key is not None:
                    if key in seen:
                        self.hidden.add(offset)
                    seen.add(key)

    @property
    def visible(self) -> list[int]:
        return [at for at in range(len(self.messages)) if at not in self.hidden and at not in self.recorded]


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "d"]),
        st.sampled_from([None, "k", "l", "m"]),
        st.sampled_from([None, None, None, None, None, None, "sub", "sub", "all", "other"]),
    ),
    min_size=1,
    max_size=8,
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), MESSAGES),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 60), max_size=6)),
        st.tuples(st.just("roll"), st.none()),
        st.tuples(st.just("seal"), st.none()),
        st.tuples(st.just("rewrite"), st.none()),
        st.tuples(st.just("read"), st.none()),
        st.tuples(st.just("reopen"), st.booleans()),
        st.tuples(st.just("tighten"), st.integers(1, 3)),
        st.tuples(st.just("record derived"), st.none()),
        st.tuples(st.just("allow roll-ups"), st.booleans()),
    ),
    max_size=30,
)


class Replica:
    """A log with its rules and its records, as a replica has them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recorded: set[int] = set()
        self.rules: tuple[Rule, ...] = ()
        self.log = open_log(folder, OPTIONS)

    def reopen(self, *, forgets: bool) -> None:
        self.log.visibility.store(self.log.log_start_offset, at_least=1)
        self.log.close()
        if forgets:
            (self.folder / "newest").unlink(missing_ok=True)
        self.log = open_log(self.folder, OPTIONS)
        self.set_rules(self.rules)
        self.log.visibility.removed.record(offset_set(np.array(sorted(self.recorded), np.int64)))

    def set_rules(self, rules: tuple[Rule, ...]) -> None:
        self.rules = rules
        self.log.visibility.set_rules(rules, self.log.log_start_offset)

    def record(self, offsets: set[int]) -> None:
        self.recorded |= offsets
        self.log.visibility.removed.record(offset_set(np.array(sorted(offsets), np.int64)))

    def copy_from(self, other: Replica, *, batches: int = 1) -> None:
        """As a follower: stored batches of the leader, which may lack removed rows."""
        while self.log.log_end_offset < other.log.log_end_offset:
            with other.log.reader.plan_read(self.log.log_end_offset, max_bytes=1, uncommitted=True) as plan:
                piece = plan.ranges[0]
                data = read_at(piece.fd, piece.position, piece.length)
                pieces = []
                for header, message in ipc.split_messages(data, source="leader"):
                    start = self.log.log_end_offset if not pieces else pieces[-1].header.end_offset
                    if header.base_offset < start:
                        message = ipc.clip_batch(message, start, header.end_offset)
                        header = ipc.proven_header(message)  # type: ignore[assignment]
                    pieces.append(EncodedBatch(header, [message]))
            self.log.append_copies(pieces)


@settings(deadline=None, max_examples=60)
@given(
    operations=OPERATIONS,
    limit=st.sampled_from([None, 1, 2, 3]),
    compacts=st.booleans(),
    rolls_up=st.booleans(),
    small=st.booleans(),
)
def test_what_is_visible_is_what_a_model_has_on_every_replica(
    operations: list[tuple[str, Any]], limit: int | None, compacts: bool, rolls_up: bool, small: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        leader, follower = Replica(Path(folder) / "leader"), Replica(Path(folder) / "follower")
        model = Model(per_subject=limit, compacts=compacts, rolls_up=rolls_up)
        rules: tuple[Rule, ...] = (Rule(Epoch(0), limit, compacts, rolls_up),)
        leader.set_rules(rules)
        follower.set_rules(rules)
        for name, argument in operations:
            log = leader.log
            match name:
                case "append":
                    log.append(rows_of(argument, len(model.messages)), 1_000_000 + len(model.messages))
                    model.append(argument)
                    if not small:
                        follower.copy_from(leader)
                case "remove":
                    offsets = {offset for offset in argument if offset < len(model.messages)}
                    model.recorded |= offsets
                    leader.record(offsets)
                    follower.record(offsets)
                case "roll":
                    log.roll()
                case "seal":
                    log.upkeep.seal_next()
                case "rewrite":
                    log.upkeep.rewrite_next(2**60)
                case "read":
                    assert visible(log) == model.visible
                case "reopen":
                    leader.reopen(forgets=argument)
                    follower.copy_from(leader)
                    follower.reopen(forgets=not argument)
                case "tighten":
                    if model.per_subject is not None and argument < model.per_subject and len(rules) == 1:
                        model.per_subject = argument
                        model.apply()
                        rules = (Rule(Epoch(0), argument, compacts, model.rolls_up),)
                        leader.set_rules(rules)
                        follower.set_rules(rules)
                case "allow roll-ups":
                    if argument != model.rolls_up:
                        model.rolls_up = argument
                        epoch = Epoch(log.epoch + 1)
                        follower.copy_from(leader)
                        log.begin_epoch(epoch)
                        rules = (*rules, Rule(epoch, model.per_subject, compacts, argument))
                        leader.set_rules(rules)
                        follower.set_rules(rules)
                case "record derived":
                    log.upkeep.apply_rules()
                    derived = set(log.visibility.removed.derived(0, log.high_watermark))
                    leader.record(derived)
                    follower.record(derived)
        follower.copy_from(leader)
        assert visible(leader.log) == model.visible
        assert visible(leader.log, max_bytes=1) == model.visible
        assert visible(follower.log) == model.visible
        leader.reopen(forgets=True)
        assert visible(leader.log) == model.visible
        leader.log.close()
        follower.log.close()


def test_what_a_removed_message_hid_stays_hidden_after_a_restart(log_folder: Path) -> None:
    """Which messages newer ones hide must be known before a file is rewritten."""
    replica = Replica(log_folder)
    replica.set_rules((Rule(Epoch(0), None, compacts=True),))
    for at in range(2):
        replica.log.append(rows_of([("a", "k", None)], at), 1_000_000)
        replica.log.roll()
        replica.log.upkeep.seal_next()
    replica.record({1})
    replica.reopen(forgets=True)
    assert not replica.log.upkeep.rewrite_next(2**60), "what offset 1 hides is not recorded"
    assert visible(replica.log) == []
    replica.record({0})
    assert replica.log.upkeep.rewrite_next(2**60)
    replica.reopen(forgets=True)
    assert visible(replica.log) == []
    assert sum(segment.index.rows[0] for segment in replica.log.chain.segments if len(segment.index)) < 2


def test_a_record_of_added_rules_that_is_delivered_again_changes_nothing(log_folder: Path) -> None:
    """Records are, after a repair of the companion log. Messages that were removed behind it count for the rules."""
    log = open_log(log_folder, OPTIONS)
    log.visibility.set_rules([Rule(Epoch(0), 2)], 0, version=1)
    log.visibility.count_anew(1, 0)
    log.append(rows_of([("a", None, None)] * 4, 0), 1_000_000)
    for _ in range(2):
        log.visibility.count_anew(1, 0)
        log.visibility.removed.record(offset_set(np.array([2])))
    log.chain.committed = log.log_end_offset
    assert visible(log) == [3]
    log.visibility.count_anew(2, 0)
    assert visible(log) == [1, 3], "of another edit it does"
    log.close()


def test_a_limit_that_is_lifted_hides_no_new_message_while_an_added_rule_waits_for_its_record(log_folder: Path) -> None:
    """One edit may add a rule and lift another one: the former takes effect with a record, the latter at once."""
    former, now = Rule(Epoch(0), 1), (Rule(Epoch(0), 1, compacts=True), Rule(Epoch(2), None, compacts=True))
    log = open_log(log_folder, OPTIONS)
    log.visibility.set_rules([former], 0)
    log.append(rows_of([("a", "k", None)] * 2, 0), 1_000_000)
    log.visibility.set_rules(now, 0, version=1)
    log.begin_epoch(Epoch(2))
    log.append(rows_of([("a", key, None) for key in "klmk"], 2), 1_000_000)
    log.chain.committed = log.log_end_offset
    assert visible(log) == [1, 2, 3, 4, 5], "the compaction waits, and the limit is of former messages"
    log.visibility.set_rules((*now, Rule(Epoch(3))), 0, version=2)
    assert visible(log) == [1, 2, 3, 4, 5]
    log.visibility.count_anew(2, 0)
    log.visibility.set_rules(now, 0, version=1)
    assert visible(log) == [3, 4, 5]
    log.close()


def test_a_message_of_a_batch_with_older_gaps_is_hidden(log_folder: Path) -> None:
    """As after an import: the offsets that its batches lack are in no record."""
    replica = Replica(log_folder)
    replica.log.append(rows_of([("a", None, None)] * 6, 0), 1_000_000)
    other = Replica(log_folder.parent / "other")
    (message,) = (bytes(one) for _, one in stored_messages(replica.log))
    gapped = ipc.without_rows(message, np.array([False, True, False, False, False, False]))
    header = ipc.proven_header(gapped)
    assert header is not None
    other.log.append_copies([EncodedBatch(header, [gapped])])
    other.record({4})
    assert visible(other.log) == visible(other.log) == [0, 2, 3, 5]
    other.record({2})
    assert visible(other.log) == [0, 3, 5]


def stored_messages(log: ReplicaLog) -> list[tuple[ipc.BatchHeader, bytes]]:
    with log.reader.plan_read(0, max_bytes=1 << 20, uncommitted=True) as plan:
        return plan.proven_messages()


def test_roll_up_hides_older_messages_of_its_subject_and_reads_no_more_than_it_must(log_folder: Path) -> None:
    replica = Replica(log_folder)
    replica.set_rules((Rule(Epoch(0), rolls_up=True),))
    log, read = replica.log, []
    stored = log.visibility._applied._rows
    assert stored is not None
    log.visibility._applied._rows = lambda start, end: read.append((start, end)) or stored(start, end)  # type: ignore[func-returns-value]
    script = [
        ("a", None),
        ("b", None),
        ("a", None),
        ("b", "sub"),
        ("a", "sub"),
        ("b", None),
        ("a", " SUB"),
        ("c", "sub"),
    ]
    for at, (subject, value) in enumerate(script):
        log.append(rows_of([(subject, None, value)], at), 1_000_000)
        log.upkeep.apply_rules()
    assert visible(log) == [3, 5, 6, 7]
    searched = [one for one in read if one[1] != one[0] + 1]
    assert searched == [(0, 3), (0, 4)], "only for the first roll-up of a subject"
    log.append(rows_of([("c", None, "all")], len(script)), 1_000_000)
    assert visible(log) == [8]


def test_damage_does_not_keep_a_roll_up_from_hiding_the_rest(log_folder: Path) -> None:
    replica = Replica(log_folder)
    log = replica.log
    for at in range(6):
        log.append(rows_of([("a", None, None)], at), 1_000_000)
        log.roll()
        log.upkeep.seal_next()
    log.append(rows_of([("a", None, "sub")], 6), 1_000_000)
    replica.set_rules((Rule(Epoch(0), rolls_up=True),))
    path = log.chain.segments[2].path
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    log.upkeep.apply_rules()
    assert {0, 1, 3, 4, 5} <= set(log.visibility.removed.all)
    assert 6 not in log.visibility.removed.all


def test_a_segment_that_is_rewritten_is_readable_at_every_moment(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader takes the name of the file, and opens it later."""
    replica = Replica(log_folder)
    for at in range(2):
        replica.log.append(rows_of([("a", None, None)] * 8, 8 * at), 1_000_000)
        replica.log.roll()
        replica.log.upkeep.seal_next()
    replica.record({1, 2, 3})
    lost: list[Path] = []

    def replaced(source: Path, target: Path, replace: Callable[[Path, Path], None] = os.replace) -> None:
        names = [segment.path for segment in replica.log.chain.segments]
        replace(source, target)
        lost.extend(path for path in names if not path.exists())

    monkeypatch.setattr(os, "replace", replaced)
    assert replica.log.upkeep.rewrite_next(2**60)
    assert lost == []
    assert visible(replica.log) == [0, *range(4, 16)]


@pytest.mark.parametrize("is_sealed", [False, True])
def test_messages_that_were_past_a_limit_do_not_return_after_a_restart(log_folder: Path, is_sealed: bool) -> None:
    """A sealed segment is smaller: computed of it, the start would be lower."""
    log = open_log(log_folder, max_bytes=3000)
    for at in range(8):
        log.append(rows_of([("a", None, None)], at), 1_000_000)
        log.limits.advance()
    start = log.chain.first_readable_offset
    assert 0 < start < 8
    if is_sealed:
        log.roll()
        assert log.upkeep.seal_next()
    killed = shutil.copytree(log_folder, log_folder.parent / "killed")
    log.close()
    for folder in (killed, log_folder):
        again = open_log(folder, max_bytes=3000)
        again.limits.advance()
        assert again.chain.first_readable_offset == start
        again.close()
    unlimited = open_log(log_folder)
    assert unlimited.chain.first_readable_offset == start
    unlimited.close()


def test_the_newest_message_stays_although_it_exceeds_the_limit(log_folder: Path) -> None:
    log = open_log(log_folder, max_bytes=10)
    for at in range(3):
        log.append(rows_of([("a", None, None)], at), 1_000_000)
        log.limits.advance()
        assert visible(log) == [at]
    log.close()


def test_a_limit_of_bytes_does_not_count_what_is_not_committed(log_folder: Path) -> None:
    log = open_log(log_folder, replicas=3, max_bytes=3000)
    for at in range(3):
        log.append(rows_of([("a", None, None)], at), 1_000_000)
    log.chain.committed = 2
    lengths = log.chain.segments[0].index.lengths
    assert log.chain.segments[0].index.positions[0] + sum(lengths[:2]) < 3000 < log.chain.segments[0].size_bytes
    log.limits.advance()
    assert log.first_readable_offset == 0, "two committed messages are within the limit"
    log.close()


def test_messages_below_the_start_are_dropped_from_a_segment_that_has_later_ones(log_folder: Path) -> None:
    log = open_log(log_folder)
    for at in range(8):
        log.append(rows_of([("a", None, None)], at), 1_000_000 + at)
    log.roll()
    assert log.upkeep.seal_next()
    log.limits.move_to(6)
    assert not log.upkeep.rewrite_next(1_000_007), "its newest message may be repeated"
    assert not log.upkeep.rewrite_next(1_000_007), "also when its index is known"
    assert log.upkeep.rewrite_next(2**60)
    assert not log.upkeep.rewrite_next(2**60)
    assert (visible(log), [list(one.index.rows) for one in log.chain.segments]) == ([6, 7], [[2], []])
    log.close()
    again = open_log(log_folder)
    assert visible(again) == [6, 7]
    again.close()
