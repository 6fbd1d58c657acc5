"""A stream of three replicas, each with its log and its companion log, driven by one operation after another; and the
same stream as a list in memory, which says what readers must get.

The leader appends to both logs; followers copy when they are told to, so they lag. What all have is committed. Time is
a number that operations advance. Everything below is the code of the broker, but for the transport and the roles.
"""

from __future__ import annotations

import random
import shutil
import time
from base64 import b64decode
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import msgspec
import pyarrow as pa
from pyroaring import BitMap64

from natslog.arrow import ipc
from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.arrow.schema import HEADERS_TYPE
from natslog.cluster.epochs import NO_EPOCH
from natslog.cluster.stream_changes import edited
from natslog.errors import CorruptLog, InvalidRequest
from natslog.log import LogOptions, ReplicaLog, small_segments
from natslog.log.batch_encoder import EncodedBatch
from natslog.log.erasing import ErasedOffsets, Erases
from natslog.log.expiry import TOMBSTONE_HEADER, TTL_HEADER
from natslog.log.read_plan import ReadPlan
from natslog.log.removed import AllBut, from_bytes, offset_range, to_array
from natslog.log.repairing import FetchedBatches, missing_ranges
from natslog.log.rollups import ALL, ROLLUP_HEADER
from natslog.log.rules import Expiry, Rule
from natslog.log.scrub import Finding, read_back
from natslog.log.sealed import SealedSegment
from natslog.log.segment import ACTIVE_SUFFIX, ActiveSegment, read_at
from natslog.model import BrokerId, Epoch, FormerRule, StreamId, StreamRecord, StreamSettings
from natslog.node.removing import (
    ErasureBegun,
    _derived,
    _erasure_records,
    _found,
    _recordable,
    _records,
    _stored_rows_of,
    erased_key,
    erased_subject,
    of_subject,
)
from natslog.node.replicas.companion_records import ERASED, RULES, read_records, rows_of
from natslog.node.replicas.range_repair import _damaged_segments, _pass_unreadable, _piece
from natslog.node.replicas.settings_in_force import rules_of
from tests.conftest import open_log
from tests.unit.log.crash_points import Images, images_of

Result = TypeVar("Result")
SECOND_US = 1_000_000
OPTIONS = LogOptions(min_free_bytes=0)
_NO_WINDOW_US = 2**60
_MOST_HELD = 8


@dataclass(frozen=True, slots=True)
class Message:
    """`ttl_s`: of its own; 0: it never expires; None: as the stream says. `rollup`: `sub` or `all`."""

    subject: str
    key: str | None = None
    ttl_s: int | None = None
    is_tombstone: bool = False
    rollup: str | None = None

    @property
    def headers(self) -> list[tuple[str, str]] | None:
        found = [] if self.ttl_s is None else [(TTL_HEADER, str(self.ttl_s) if self.ttl_s else "never")]
        found += [(TOMBSTONE_HEADER, "true")] if self.is_tombstone else []
        return found + ([] if self.rollup is None else [(ROLLUP_HEADER, self.rollup)]) or None


@dataclass(frozen=True, slots=True)
class Settings:
    """Of the stream. Ages in seconds. `rules`: as `visibility.Rule`, oldest first."""

    rules: tuple[Rule, ...] = (Rule(Epoch(0)),)
    tombstones_s: int = 5
    allow_ttl: bool = False
    ttl_s: int | None = None
    max_messages: int | None = None
    max_bytes: int | None = None
    purged_below: int = 0
    rules_version: int = 0

    @property
    def rule(self) -> Rule:
        return self.rules[-1]


def value_at(offset: int) -> bytes:
    """No other value contains the part up to `>`."""
    return b"<%d>" % offset + b"." * 40


def message_rows(messages: list[Message], start: int) -> RowBuffers:
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([one.subject for one in messages]),
            pa.array([None if one.key is None else one.key.encode() for one in messages], pa.binary()),
            pa.array([one.headers for one in messages], HEADERS_TYPE),
            pa.array([value_at(start + at) for at in range(len(messages))], pa.binary()),
        ],
        schema=PAYLOAD_SCHEMA,
    )
    return RowBuffers.of(batch)


# ---- one replica ----


class Replica:
    """Both logs, as a broker has them open.

    Attributes:
        serves_from: of the companion log: what must be delivered before it answers readers. `lives`: rises when it is
            opened or harmed. `harms`: when its files are harmed or repaired.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.is_damaged = False
        self.lives = self.harms = 0
        self.open(settings)

    def open(self, settings: Settings) -> None:
        self.log = open_log(self.folder, OPTIONS, replicas=3)
        self.log.chain.committed = self.log.checkpointed
        self.companion = open_log(self.folder / "companion", OPTIONS, replicas=3)
        self.companion.chain.committed = self.companion.checkpointed
        self.log.visibility.on_damage = lambda error: True
        self.delivered = 0
        self.serves_from = self.companion.log_end_offset
        self.lives += 1
        self.adopt(settings)
        self.deliver()

    def adopt(self, settings: Settings) -> None:
        """As `HostedStream` does."""
        self.settings = settings
        self.log.chain.purged_below = settings.purged_below
        tombstones_us = settings.tombstones_s * SECOND_US if settings.rule.compacts else None
        self.log.visibility.set_rules(settings.rules, self.log.log_start_offset, settings.rules_version)
        self.log.visibility.set_expiry(Expiry(settings.allow_ttl, tombstones_us), self.log.log_start_offset)

    def deliver(self) -> None:
        if self.delivered < self.companion.high_watermark:
            records, self.delivered = read_records(self.companion, self.delivered, self.companion.high_watermark)
            for _, kind, data in records:
                if kind == RULES:
                    self.log.visibility.count_anew(int(data), self.log.log_start_offset)
                    self.adopt(self.settings)
                elif kind == ERASED:
                    erased = ErasedOffsets.from_bytes(data, "companion log")
                    self.log.visibility.removed.record(erased.bitmap("companion log"))
                    self.log.erasures.add(erased, "companion log")
                else:
                    self.log.visibility.removed.record(from_bytes(data, "companion log"))

    def commit(self, high_watermark: int, of_companion: int) -> None:
        self.companion.chain.committed = max(self.companion.high_watermark, of_companion)
        self.deliver()
        self.log.chain.committed = max(self.log.high_watermark, high_watermark)

    @property
    def serves(self) -> bool:
        """Whether it answers readers, unless it leads."""
        return self.delivered >= min(self.serves_from, self.companion.log_end_offset)

    def close(self) -> None:
        self.log.close()
        self.companion.close()

    def crash(self, torn: bytes) -> None:
        """Nothing is stored at its end, and the tail of a write is left behind."""
        for log in (self.log, self.companion):
            log.shared.is_closed = True
            for segment in log.chain.segments:
                if isinstance(segment, ActiveSegment):
                    segment.close()
        for path in sorted(self.folder.glob(f"*{ACTIVE_SUFFIX}"))[-1:]:
            with open(path, "ab") as file:
                file.write(torn)

    def visible(self, max_bytes: int) -> list[int]:
        """The offsets that readers get. Checks that batches are contiguous and that values belong to their offsets."""
        return self._read(self.log.high_watermark, max_bytes)

    def of_view(self, view: AllBut, max_bytes: int) -> list[int]:
        """The same of a latest view."""
        return self._read(view.end, max_bytes, view)

    def _read(self, end: int, max_bytes: int, hidden: AllBut | None = None) -> list[int]:
        found = list[int]()
        start = self.log.first_readable_offset
        while start < end:
            with self.log.reader.plan_read(start, end, max_bytes=max_bytes, hidden=hidden) as plan:
                found += offsets_of(plan)
                assert plan.next_offset > start
                start = plan.next_offset
        return found

    def erase_next(self, now_us: int) -> bool:
        """As maintenance does it. Whether something is left to do."""
        if self.log.is_to_be_rolled:
            self.log.roll()
        return self.log.upkeep.seal_next() or self.log.upkeep.erase_next(now_us)

    def merge_next(self) -> bool:
        """Any two small segments, also after a restart."""
        self.log.upkeep._small_segments._settled = None
        with patch.multiple(small_segments, _MERGED_AT_ONCE=2, _UNEVEN=2.0, _MERGED_EARLY=1.0):
            return self.log.upkeep.merge_next()

    def crash_within(self, work: Callable[[], object], call: int, *, tears: bool) -> bool:
        """Ends before this change of a file name, or sync; as opened afterwards. False: the work was done before."""
        target = self.folder.with_name(self.folder.name + "-images")
        images = Images(self.folder, target, call, tears=tears)
        with images_of(images):
            work()
        if images.made:
            self.crash(b"")
            shutil.rmtree(self.folder)
            images.made[0].folder.rename(self.folder)
        return bool(images.made)

    # ---- damage ----

    def sealed(self) -> list[SealedSegment]:
        """Whose end is known by the segment behind it."""
        return [one for one, _ in pairwise(self.log.chain.snapshot()) if isinstance(one, SealedSegment)]

    def flip(self, chance: random.Random, segment: SealedSegment) -> None:
        """A bit of it; later reads are of the disk."""
        content = bytearray(segment.path.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        segment.path.write_bytes(content)
        segment.forget_proofs()
        segment.forget()
        self.is_damaged = True
        self.lives, self.harms = self.lives + 1, self.harms + 1

    def scrub(self) -> None:
        scrub, chain = self.log.scrub, self.log.chain
        scrub.begin(chain, 0)
        while (chosen := scrub.next_segment(chain)) is not None:
            segment, end_offset = chosen
            findings: list[Finding] = []
            for _ in read_back(segment, end_offset, findings):
                pass
            scrub.verified(segment.base_offset, end_offset, findings)
        scrub.complete(0, self.log.log_start_offset)

    def repair(self, other: Replica) -> None:
        """As `RangeRepairs` does; where the end of the log is damaged, as a replica that fetches it again."""
        self.scrub()
        for segment, end_offset, damaged in _damaged_segments(self.log):
            if end_offset is None:
                self.log.discard_from(segment.base_offset)
                copy_batches(self.log, other.log)
                break
            with FetchedBatches(self.log.folder) as fetched:
                for start, end in missing_ranges(segment, end_offset, self.log.stream_id, damaged):
                    fetch(other.log, fetched, _pass_unreadable(self.log, fetched, start, end), end)
                assert self.log.replace_sealed(segment, end_offset, fetched)
            self.log.scrub.verified(segment.base_offset, end_offset, [], is_pass=False)
        self.is_damaged = False
        self.lives, self.harms = self.lives + 1, self.harms + 1


def offsets_of(plan: ReadPlan) -> list[int]:
    """Of all its messages. Checks that batches are contiguous and that values belong to their offsets."""
    found, at = list[int](), plan.start
    for header, message in plan.walked_messages():
        assert header.base_offset <= at if at == plan.start else header.base_offset == at
        at = header.end_offset
        batch = ipc.decode_batch(message)
        offsets = batch.column("offset").to_pylist()
        assert batch.column("value").to_pylist() == [value_at(offset) for offset in offsets]
        found += [offset for offset in offsets if plan.start <= offset < plan.next_offset]
    assert at >= plan.next_offset
    return found


def fetch(log: ReplicaLog, fetched: FetchedBatches, start: int, end: int) -> None:
    while start < end:
        start = fetched.add(b64decode(_piece(log, start, end, 0)["data"]), start, end)


def copy_batches(log: ReplicaLog, source: ReplicaLog) -> None:
    """As a follower: stored batches of the leader, which may lack removed rows."""
    if log.log_end_offset < source.log_start_offset:
        log.begin_at(source.log_start_offset, NO_EPOCH)
    while log.log_end_offset < source.log_end_offset:
        with source.reader.plan_read(log.log_end_offset, max_bytes=1, uncommitted=True) as plan:
            piece = plan.ranges[0]
            data = read_at(piece.fd, piece.position, piece.length)
        copies = list[EncodedBatch]()
        for header, message in ipc.split_messages(data, source="leader"):
            start = log.log_end_offset if not copies else copies[-1].header.end_offset
            if header.base_offset < start:
                message = ipc.clip_batch(message, start, header.end_offset)
                clipped = ipc.proven_header(message)
                assert clipped is not None
                header = clipped
            copies.append(EncodedBatch(header, [message]))
        log.append_copies(copies)


# ---- the model ----


@dataclass(frozen=True, slots=True)
class Recorded:
    """A record of the companion log. `erases`: of an erasure, what was named. `adds_rule`: it states that a rule was
    added.
    """

    offsets: frozenset[int] = frozenset()
    erases: Erases | None = None
    adds_rule: bool = False


@dataclass
class Model:
    """All messages with the time and the epoch of each, the records, and the start that is set by now."""

    settings: Settings
    messages: list[Message] = field(default_factory=list)
    times_us: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    records: list[Recorded] = field(default_factory=list)
    start: int = 0

    def cut(self, end: int, end_of_records: int) -> None:
        del self.messages[end:], self.times_us[end:], self.epochs[end:], self.records[end_of_records:]

    def derived(self, end: int, uncounted: set[int], rules: tuple[Rule, ...]) -> set[int]:
        """What the rules hide, applied from the beginning on to what counts. Roll-ups always do."""
        found, at = set[int](), 0
        counts = any(rule.per_subject is not None for rule in rules)
        queues: dict[str, list[int]] = {}
        keys: dict[str, int] = {}
        for offset in range(end):
            one = self.messages[offset]
            while at + 1 < len(rules) and self.epochs[offset] >= rules[at + 1].from_epoch:
                at += 1
                limit = rules[at].per_subject
                for queue in queues.values():
                    found |= set() if limit is None else set(queue[:-limit])
                    del queue[: -(limit or 1)]
                keys = keys if rules[at].compacts else {}
            limit = rules[at].per_subject
            found |= self.rolled_up(offset) if rules[at].rolls_up else set()
            if offset in uncounted:
                continue
            if counts:
                queue = queues.setdefault(one.subject, [])
                queue.append(offset)
                hidden = [queue.pop(0)] if len(queue) > (limit or 1) else []
                found |= set(hidden) if limit is not None else set()
            if rules[at].compacts and one.key is not None:
                found |= {keys[one.key]} if one.key in keys else set()
                keys[one.key] = offset
        return found

    def rolled_up(self, offset: int) -> set[int]:
        """What this message hides where its header has an effect."""
        one = self.messages[offset]
        if one.rollup is None:
            return set()
        return {at for at in range(offset) if one.rollup == ALL or self.messages[at].subject == one.subject}

    def hidden(self, end: int, end_of_records: int, rules: tuple[Rule, ...] | None = None) -> set[int]:
        recorded, uncounted = set[int](), set[int]()
        for record in self.records[:end_of_records]:
            recorded |= record.offsets
            uncounted = set(recorded) if record.adds_rule else uncounted
        return self.derived(end, uncounted, rules or self.settings.rules) | recorded

    def visible(
        self, end: int, end_of_records: int, start: int | None = None, rules: tuple[Rule, ...] | None = None
    ) -> list[int]:
        """`start`, `rules`: of a replica that has others than the stream by now."""
        hidden = self.hidden(end, end_of_records, rules)
        start = self.start if start is None else start
        return [offset for offset in range(min(start, end), end) if offset not in hidden]

    def latest(self, end: int, end_of_records: int) -> list[int]:
        """The newest visible message of each key, or of each subject, without tombstones. Of keys as the code has it:
        only of messages that compaction was in force for when they were stored.
        """
        compacts, newest = self.settings.rule.compacts, dict[str, int]()
        since = list(takewhile(lambda rule: rule.compacts, reversed(self.settings.rules)))
        for offset in self.visible(end, end_of_records):
            one = self.messages[offset]
            if compacts and self.epochs[offset] < since[-1].from_epoch:
                continue
            name = one.key if compacts else one.subject
            newest |= {} if name is None else {name: offset}
        return sorted(at for at in newest.values() if not (compacts and self.messages[at].is_tombstone))

    def named(self, erases: Erases, text: str, end: int) -> set[int]:
        """The messages with this subject, or key."""
        return {at for at in range(end) if getattr(self.messages[at], erases) == text}

    def erased(self, end_of_records: int) -> set[int]:
        return set[int]().union(*(one.offsets for one in self.records[:end_of_records] if one.erases is not None))

    def expired(self, end: int, now_us: int, *, may_be: bool = False) -> set[int]:
        """What must be hidden by now because of its age: its own, or that of the stream. `may_be`: also tombstones of
        a stream that is not compacted any more.
        """
        has_tombstones = self.settings.rule.compacts or (may_be and any(one.compacts for one in self.settings.rules))
        found = set[int]()
        for offset in range(end):
            one, time_us = self.messages[offset], self.times_us[offset]
            own_s = one.ttl_s if self.settings.allow_ttl else None
            if own_s and _is_due(time_us + own_s * SECOND_US, now_us):
                found.add(offset)
            if own_s is None and self.settings.ttl_s is not None and time_us < now_us - self.settings.ttl_s * SECOND_US:
                found.add(offset)
            is_tombstone = has_tombstones and one.is_tombstone and one.key is not None
            if is_tombstone and _is_due(time_us + self.settings.tombstones_s * SECOND_US, now_us):
                found.add(offset)
        return found

    def limit(self, end: int, end_of_records: int) -> None:
        """The start by the limit of messages never goes back."""
        visible = self.visible(end, end_of_records)
        most = self.settings.max_messages
        if most is not None and len(visible) > most:
            self.start = visible[-most - 1] + 1


def _is_due(time_us: int, now_us: int) -> bool:
    """In whole seconds."""
    return -(-time_us // SECOND_US) * SECOND_US <= now_us


# ---- what readers hold ----


@dataclass(frozen=True, slots=True)
class HeldView:
    """A latest view of one replica. `erased`: by the records that it had when the view began."""

    replica: Replica
    life: int
    view: AllBut
    serial: int
    erased: set[int]

    @property
    def may_be_read(self) -> bool:
        return self.replica.lives == self.life


@dataclass(frozen=True, slots=True)
class HeldPlan:
    """`expected`: the offsets that it had when it was made. `harms`: of the files by then."""

    replica: Replica
    harms: int
    plan: ReadPlan
    expected: list[int]


# ---- all of them, and the model ----


class Stream:
    """See the module. `check` compares every replica with the model."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings, self.model = settings, Model(settings)
        self.replicas = [Replica(folder / name, settings) for name in ("a", "b", "c")]
        self.leader, self.epoch = self.replicas[0], 1
        self.now_us = 1000 * SECOND_US
        self.chance = random.Random(0)
        self.views: dict[tuple[int, int], HeldView] = {}
        self.plans: list[HeldPlan] = []
        self._had_other_limits = False
        self.begins_at = 0, 0
        self._begin_epoch()

    def close(self) -> None:
        self.read_held()
        for replica in self.replicas:
            replica.close()

    @property
    def followers(self) -> list[Replica]:
        return [one for one in self.replicas if one is not self.leader]

    @property
    def is_exposed(self) -> bool:
        """Whether all that the leader had when its epoch began is committed: it decides nothing, and answers no reader,
        before that.
        """
        begins_at, records_begin_at = self.begins_at
        return self.leader.log.high_watermark >= begins_at and self.leader.delivered >= records_begin_at

    # ---- operations ----

    def append(self, messages: list[Message]) -> None:
        model = self.model
        _, time_us = self.leader.log.append(message_rows(messages, len(model.messages)), self.now_us)
        model.messages += messages
        model.times_us += [time_us] * len(messages)
        model.epochs += [self.epoch] * len(messages)

    def wait(self, seconds: int) -> None:
        self.now_us += seconds * SECOND_US

    def copy(self, number: int) -> None:
        """One follower copies all that the leader has, and receives the settings, HW and log start."""
        follower = self.followers[number % 2]
        self._readable(self.leader, lambda: self._copy(follower))

    def _copy(self, follower: Replica) -> None:
        leader = self.leader
        follower.adopt(self.settings)
        copy_batches(follower.companion, leader.companion)
        copy_batches(follower.log, leader.log)
        leader.commit(
            min(one.log.log_end_offset for one in self.replicas),
            min(one.companion.log_end_offset for one in self.replicas),
        )
        follower.commit(leader.log.high_watermark, leader.companion.high_watermark)
        self._limit()
        follower.log.limits.move_to(leader.log.first_readable_offset)

    def _limit(self) -> None:
        """The leader applies the limits of messages and bytes."""
        if not self.is_exposed:
            return
        leader, high_watermark = self.leader, self.leader.log.high_watermark
        leader.log.settings = _with_limits(leader.log.settings, self.settings)
        self._readable(leader, lambda: leader.log.visibility.removed_below(high_watermark))
        before = leader.log.first_readable_offset
        self._readable(leader, leader.log.limits.advance)
        self.model.limit(high_watermark, leader.delivered)
        if self.settings.max_bytes is not None:
            self._check_bytes(self.settings.max_bytes, max(before, self.model.start))
            self.model.start = max(self.model.start, leader.log.first_readable_offset)

    def _check_bytes(self, max_bytes: int, other_start: int) -> None:
        """The start that a limit of bytes leads to depends on the files of the leader: it keeps no more than that, and
        goes no further. `other_start`: where the log starts otherwise.
        """
        log = self.leader.log
        start, end = log.first_readable_offset, log.high_watermark
        assert stored_bytes(log, start, end) <= max_bytes or start == end
        most = stored_bytes(log, start - 1, log.log_end_offset) + beside_batches_bytes(log)
        assert start <= other_start or most >= max_bytes

    def settle(self) -> None:
        """All have all, and what has expired is removed."""
        if self.leader.log.visibility.rules_version < self.settings.rules_version:
            self.count_anew()
        for _ in range(2):
            for number in (0, 1, 0):
                self.copy(number)
            self.expire()
        for number in (0, 1, 0):
            self.copy(number)

    def delete(self, offset: int) -> None:
        if offset < self.leader.log.high_watermark:
            self._record(offset_range(offset, offset + 1))

    def purge(self, subject: str, keep: int) -> None:
        leader = self.leader

        def found() -> BitMap64:
            return _found(leader.log, of_subject(subject), leader.log.high_watermark)

        chosen = sorted(self._readable(leader, found))
        self._record(BitMap64(chosen[: max(0, len(chosen) - keep)]))

    def purge_below(self, offset: int) -> None:
        """Part of the record of the stream."""
        below = max(self.settings.purged_below, min(offset, self.leader.log.high_watermark))
        self.settings = self.model.settings = replace(self.settings, purged_below=below)
        self.leader.adopt(self.settings)
        self.model.start = max(self.model.start, below)

    def expire(self) -> None:
        """As `Removing._expire`."""
        log, settings = self.leader.log, self.settings
        if settings.ttl_s is not None:
            self._readable(self.leader, lambda: self._expire_by_age(log, settings.ttl_s or 0))
        if log.visibility.has_rules:
            self._readable(self.leader, log.upkeep.apply_rules)
            self._record_expired(log.visibility.expired(self.now_us, leads=True))
        for follower in self.followers:
            follower.log.visibility.expired(self.now_us, leads=False)

    def _expire_by_age(self, log: ReplicaLog, ttl_s: int) -> None:
        start = log.first_readable_offset
        past_us = self.now_us - ttl_s * SECOND_US
        upto, _ = log.reader.offset_at(past_us, start)
        visible = self.model.visible(upto, self.leader.delivered, start)
        assert all(self.model.times_us[offset] < past_us for offset in visible)
        if not self.settings.allow_ttl:
            log.limits.move_to(upto)
            self.model.start = max(self.model.start, upto)
        elif upto > start:
            log.upkeep.apply_rules()
            self._record_expired(log.visibility.without_own_ttl(start, upto))

    def _record_expired(self, offsets: BitMap64) -> None:
        may_be = self.model.expired(self.leader.log.high_watermark, self.now_us, may_be=True)
        assert may_be >= set(to_array(offsets).tolist()), "their time has not passed"
        self._record(offsets)

    def record_hidden(self, at_least: int) -> None:
        """What newer messages hide in sealed segments, however few: so that files may be rewritten."""
        found = self._readable(self.leader, lambda: _recordable(self.leader.log, at_least))
        self._record(found)

    def _record(self, offsets: BitMap64) -> None:
        """As `Removing.record`: appended by the leader, and in force when it is committed."""
        chain = self.leader.log.chain
        if offsets and chain.limited_below > chain.log_start_offset:
            offsets = offsets | offset_range(chain.log_start_offset, chain.limited_below)
        if offsets:
            records = list(_records(offsets))
            self._append_records(records)

    def _append_records(self, records: list[tuple[str, bytes]]) -> None:
        self.leader.companion.append(rows_of(records), self.now_us)
        self.model.records += [_recorded(kind, data) for kind, data in records]

    def erase(self, erases: Erases, text: str) -> None:
        """As `Removing.erase`."""
        leader, end = self.leader, self.leader.log.high_watermark
        what = erased_subject(text) if erases == "subject" else erased_key(text.encode())
        rows, known, derived = self._readable(leader, lambda: _stored_rows_of(leader.log, what, end))
        named = self.model.named(erases, text, end)
        assert set(rows | known) <= named
        assert named.intersection(self.model.visible(end, leader.delivered)) <= set(rows)
        if rows or known:
            begun = ErasureBegun(f"e{len(self.model.records)}", len(rows))
            hidden = derived | offset_range(leader.log.log_start_offset, leader.log.chain.limited_below)
            erasure = _erasure_records(begun, erases, rows | known, end, self.now_us)
            self._append_records([*_records(hidden - rows), *erasure])

    def erase_next(self, number: int) -> None:
        """A replica does a part of what it has to erase."""
        replica = self.replicas[number % 3]
        self._readable(replica, lambda: replica.erase_next(self.now_us))

    def finish_erasures(self) -> None:
        """No file has the bytes of erased messages then."""
        erased = self.model.erased(len(self.model.records))
        for replica in self.replicas if erased else ():
            self._readable(replica, lambda replica=replica: _erase_all(replica, self.now_us))
            assert not replica.log.erasures.is_pending
            assert not erased.intersection(offsets_in_files(replica.folder, erased))

    # ---- edits ----

    def edit_limits(self, max_messages: int | None, max_bytes: int | None) -> None:
        self._edit_settings(replace(self.settings, max_messages=max_messages, max_bytes=max_bytes))

    def edit_ttl(self, allow_ttl: bool, ttl_s: int | None) -> None:
        """`allow_ttl` is not turned off."""
        self._edit_settings(replace(self.settings, allow_ttl=allow_ttl or self.settings.allow_ttl, ttl_s=ttl_s))

    def _edit_settings(self, settings: Settings) -> None:
        self._had_other_limits |= settings != self.settings
        self.settings = self.model.settings = settings
        self.leader.adopt(settings)
        self._limit()

    def edit(self, rule: Rule) -> None:
        """Where it hides less than before, a new epoch of the same leader begins."""
        record = edited(self._record_of_stream(), self._stream_settings(rule), None)
        is_counted_anew = record.rules_version > self.settings.rules_version
        begins = record.leader_epoch > self.epoch
        self.epoch = record.leader_epoch
        wanted = replace(self.settings, rules=rules_of(record), rules_version=record.rules_version)
        self.settings = self.model.settings = wanted
        self.leader.adopt(self.settings)
        if begins:
            self._begin_epoch()
        if is_counted_anew:
            self.count_anew()
            for number in (0, 1, 0):
                self.copy(number)

    def _record_of_stream(self) -> StreamRecord:
        """As far as its rules are concerned."""
        former = [
            FormerRule(following.from_epoch, one.per_subject, one.compacts, one.rolls_up)
            for one, following in pairwise(self.settings.rules)
        ]
        return StreamRecord(
            name="s",
            id=StreamId("s"),
            settings=self._stream_settings(self.settings.rule),
            created_us=0,
            leader=BrokerId(1),
            leader_epoch=Epoch(self.epoch),
            replicas=(BrokerId(1),),
            isr=(BrokerId(1),),
            former_rules=tuple(former),
            has_companion=bool(self.model.records),
            settings_version=self.settings.rules_version,
            rules_version=self.settings.rules_version,
        )

    @staticmethod
    def _stream_settings(rule: Rule) -> StreamSettings:
        return StreamSettings(
            subject="s", max_messages_per_subject=rule.per_subject, compact=rule.compacts, allow_rollup=rule.rolls_up
        )

    def count_anew(self) -> None:
        """As `Removing.count_anew`."""
        leader = self.leader
        self._record(self._readable(leader, lambda: _derived(leader.log)))
        self._append_records([(RULES, b"%d" % self.settings.rules_version)])

    def _begin_epoch(self) -> None:
        for log in (self.leader.log, self.leader.companion):
            log.begin_epoch(Epoch(self.epoch))

    def fail_over(self, number: int) -> None:
        """A follower leads; what it does not have was not committed, and the others cut it."""
        self.leader = leader = self.followers[number % 2]
        self.epoch += 1
        leader.adopt(self.settings)
        self._begin_epoch()
        end, end_of_records = leader.log.log_end_offset, leader.companion.log_end_offset
        self.model.cut(end, end_of_records)
        for one in self.followers:
            self._readable(one, lambda one=one: one.log.cut_to(min(end, one.log.log_end_offset)))
            one.companion.cut_to(min(end_of_records, one.companion.log_end_offset))
        self.begins_at = end, end_of_records
        for number in (0, 1, 0):
            self.copy(number)
        assert self.is_exposed
        if self.settings.ttl_s is not None and not self.settings.allow_ttl:
            self.expire()
        self._limit()
        if self._start_is_known_to_replicas_only:
            self._take_largest_start()

    @property
    def _start_is_known_to_replicas_only(self) -> bool:
        """It does not follow from the log and the settings."""
        return self._had_other_limits or self.settings.max_bytes is not None

    def _open(self, replica: Replica) -> None:
        """A start that does not follow from the log is sent to it again, before it may lead."""
        start = replica.log.chain.limited_below
        replica.open(self.settings)
        if self._start_is_known_to_replicas_only:
            replica.log.chain.limited_below = start

    def _take_largest_start(self) -> None:
        """A new leader may have a lower one than the others: of bytes in its files, and of former limits."""
        log = self.leader.log
        self.model.start = self.settings.purged_below
        self.model.limit(log.high_watermark, self.leader.delivered)
        assert log.first_readable_offset >= min(self.model.start, log.high_watermark)
        largest = max(one.log.chain.limited_below for one in self.replicas)
        log.chain.limited_below = max(log.chain.limited_below, largest)
        self.model.start = max(self.model.start, largest)

    def crash(self, number: int, torn: bytes) -> None:
        """A replica; if it leads, another one does then."""
        replica = self.replicas[number % 3]
        replica.crash(torn)
        self._open(replica)
        if replica is self.leader:
            self.fail_over(number)

    def reopen(self, number: int, *, stores: bool) -> None:
        """In order, with or without the stored state of its rules."""
        replica = self.replicas[number % 3]
        if stores:
            replica.log.visibility.store(replica.log.log_start_offset, at_least=1)
        replica.close()
        if not stores:
            (replica.folder / "newest").unlink(missing_ok=True)
        self._open(replica)
        if replica is self.leader:
            self.fail_over(number)

    def roll(self, number: int) -> None:
        self.replicas[number % 3].log.roll()

    def seal(self, number: int) -> None:
        self.replicas[number % 3].log.upkeep.seal_next()

    def seal_all(self) -> None:
        """All that is committed, on every replica."""
        for number in (0, 1, 0):
            self.copy(number)
        for number in range(3):
            self.roll(number)
            self.seal(number)

    def rewrite(self, number: int) -> None:
        replica = self.replicas[number % 3]
        self._readable(replica, lambda: replica.log.upkeep.rewrite_next(_NO_WINDOW_US))

    def merge(self, number: int) -> None:
        replica = self.replicas[number % 3]
        self._readable(replica, replica.merge_next)

    def compact(self, number: int) -> None:
        """All that is hidden is recorded, and one replica rewrites what it can."""
        self._record_all()
        self.rewrite(number)

    def _record_all(self) -> None:
        """All that is committed is sealed, and what is hidden of it is recorded."""
        self.seal_all()
        self.record_hidden(1)
        for number in (0, 1, 0):
            self.copy(number)

    def crash_within(self, number: int, name: str, call: int, tears: bool) -> None:
        """A replica, while it does a piece of maintenance, for which all is prepared."""
        if name == "seal":
            self.roll(number)
        else:
            self._record_all()
        replica = self.replicas[number % 3]
        work: dict[str, Callable[[], object]] = {
            "rewrite": lambda: replica.log.upkeep.rewrite_next(_NO_WINDOW_US),
            "erase": lambda: replica.erase_next(self.now_us),
            "seal": replica.log.upkeep.seal_next,
            "merge": replica.merge_next,
        }
        if not replica.is_damaged and replica.crash_within(work[name], call, tears=tears):
            self._open(replica)
            if replica is self.leader:
                self.fail_over(number)

    def retain(self, number: int) -> None:
        """Files below the log start go, on one replica before the others."""
        replica = self.replicas[number % 3]
        replica.log.upkeep.drop_before(replica.log.first_readable_offset)

    def damage(self, number: int, seed: int) -> None:
        """Never of two replicas at once. Readers that have a file open are not told."""
        replica = self.replicas[number % 3]
        self.read_held()
        if replica.sealed() and not any(one.is_damaged for one in self.replicas):
            chance = random.Random(seed)
            replica.flip(chance, chance.choice(replica.sealed()))

    def damage_at_start(self, number: int, seed: int) -> None:
        """Before the rules are applied to all of the log again."""
        self.damage(number, seed)
        self.reopen(number, stores=False)

    def scrub(self) -> None:
        for replica in self.replicas:
            if replica.is_damaged:
                self._repair(replica)

    def index(self, subject: str) -> None:
        """The leader is asked for the newest message of a subject, as a condition of a publish does."""
        log = self.leader.log

        def newest() -> int:
            ends = log.high_watermark, log.log_start_offset, log.first_readable_offset
            return log.visibility.newest_of_subject(subject, *ends)

        visible = self.model.visible(log.high_watermark, self.leader.delivered)
        found = [offset for offset in visible if self.model.messages[offset].subject == subject]
        assert self._readable(self.leader, newest) == (found[-1] if found else -1)

    def look(self) -> None:
        """A reader at the leader, which hides all that is to be hidden."""
        self.check_replica(self.leader)

    # ---- what readers hold ----

    def begin_view(self) -> None:
        """A reader asks the leader for the latest view."""
        leader = self.leader
        expected = self.model.latest(leader.log.high_watermark, leader.delivered)
        if len(self.views) == _MOST_HELD:
            return
        try:
            view = self._readable(leader, lambda: leader.log.latest_views.begin(None, time.monotonic()))
        except InvalidRequest:
            assert not expected, "an error instead of an empty view"
            return
        assert view.end == leader.log.high_watermark
        assert self._readable(leader, lambda: leader.of_view(view, 1 << 20)) == expected
        key = self.replicas.index(leader), view.end
        self.views[key] = HeldView(
            leader, leader.lives, view, leader.log.erasures.serial, self.model.erased(leader.delivered)
        )

    def read_views(self) -> None:
        """They are as they were, but for what is below the start; an erasure ends them."""
        for key, held in list(self.views.items()):
            if not held.may_be_read or not self._read_view(held):
                del self.views[key]

    def _read_view(self, held: HeldView) -> bool:
        """False: it has ended."""
        replica, view = held.replica, held.view
        log = replica.log
        begun = log.latest_views.begun(view.end, log.high_watermark, time.monotonic())
        if self.model.erased(replica.delivered) != held.erased:
            assert begun is None, "a view has erased messages"
        if held.serial != log.erasures.serial:
            return False
        assert begun is view
        found = self._readable(replica, lambda: replica.of_view(view, self._max_bytes()))
        assert found == [offset for offset in view.visible if offset >= log.first_readable_offset]
        return True

    def hold(self, number: int) -> None:
        """A reader has a plan and reads it later."""
        replica = self.replicas[number % 3]
        if replica.is_damaged or len(self.plans) == _MOST_HELD:
            return
        expected, log = self._visible(replica), replica.log
        plan = log.reader.plan_read(log.first_readable_offset, max_bytes=1 << 20)
        expected = [offset for offset in expected if offset < plan.next_offset]
        self.plans.append(HeldPlan(replica, replica.harms, plan, expected))

    def read_held(self) -> None:
        """What was removed meanwhile is still there."""
        held, self.plans = self.plans, []
        for one in held:
            with one.plan as plan:
                assert one.replica.harms != one.harms or offsets_of(plan) == one.expected

    # ---- checks ----

    def check(self) -> None:
        self.settle()
        for replica in self.replicas:
            assert replica.log.high_watermark == len(self.model.messages)
            self.check_replica(replica)
        expired = self.model.expired(len(self.model.messages), self.now_us)
        assert not expired.intersection(self._visible(self.leader))
        self.read_views()

    def look_at_all(self) -> None:
        """Nothing is settled before: replicas differ, and each shows what follows from what it has."""
        for replica in self.replicas:
            if replica is self.leader:
                self.check_replica(replica)
            elif replica.serves:
                self.check_replica(replica, is_behind=True)

    def check_replica(self, replica: Replica, *, is_behind: bool = False) -> None:
        """`is_behind`: it may have received less than the leader: another start and former rules too."""
        self._readable(replica, lambda: self._compare(replica, is_behind))

    def _compare(self, replica: Replica, is_behind: bool) -> None:
        visible = replica.visible(self._max_bytes())
        start, end = replica.log.first_readable_offset, replica.log.high_watermark
        own = (start, replica.settings.rules) if is_behind else (None, None)
        expected = self.model.visible(end, replica.delivered, *own)
        assert visible == expected, f"replica {replica.folder.name}: {visible} instead of {expected}"
        if not is_behind:  # the leader states numbers; another replica may lack records of rows that it has dropped
            self._check_numbers(replica, visible, start, end)

    def _check_numbers(self, replica: Replica, visible: list[int], start: int, end: int) -> None:
        """Of the messages that readers get."""
        reader = replica.log.reader
        assert reader.count(start, end) == reader.known_count() == len(visible)
        middle = self.chance.randint(start, end)
        behind = len([offset for offset in visible if offset >= middle])
        assert reader.count(middle, end) == behind
        assert replica.is_damaged or reader.lag(middle).rows == behind
        parts = reader.splits(start, end, max_bytes=None, max_rows=3, min_splits=2)
        assert [*(one.start for one in parts), end] == [start, *(one.end for one in parts)]
        for one in parts:
            assert one.rows == len([offset for offset in visible if one.start <= offset < one.end])

    def _visible(self, replica: Replica) -> list[int]:
        max_bytes = self._max_bytes()
        return self._readable(replica, lambda: replica.visible(max_bytes))

    def _max_bytes(self) -> int:
        return self.chance.choice((1, 1 << 20))

    # ---- damage ----

    def _readable(self, replica: Replica, work: Callable[[], Result]) -> Result:
        """Once more when it was repaired, where it is damaged."""
        try:
            return work()
        except CorruptLog:
            assert replica.is_damaged, "only what was damaged is found to be"
            self._repair(replica)
            return work()

    def _repair(self, replica: Replica) -> None:
        """From a replica that has received HW, when this one has received the log start: until then it is refused."""
        high_watermark = max(one.log.high_watermark for one in self.replicas)
        other = next(one for one in self.replicas if one is not replica)
        other.commit(high_watermark, 0)
        replica.adopt(self.settings)
        replica.commit(high_watermark, 0)
        start = self.leader.log.first_readable_offset
        for one in self.replicas if self._start_is_known_to_replicas_only else (replica,):
            one.log.limits.move_to(start)  # it is repaired without rows below
        replica.repair(other)
        replica.commit(high_watermark, 0)


def _with_limits(settings: Any, wanted: Settings) -> Any:
    return msgspec.structs.replace(settings, max_messages=wanted.max_messages, max_bytes=wanted.max_bytes)


def _recorded(kind: str, data: bytes) -> Recorded:
    if kind == RULES:
        return Recorded(adds_rule=True)
    if kind == ERASED:
        erased = ErasedOffsets.from_bytes(data, "record")
        return Recorded(frozenset(erased.bitmap("record")), erased.erases)
    return Recorded(frozenset(from_bytes(data, "record")))


def stored_bytes(log: ReplicaLog, start: int, end: int) -> int:
    """Of the batches of `[start, end)`: of a part of a batch its share. At most: it is rounded down."""
    total = 0
    for segment in log.chain.snapshot():
        index = segment.index
        for at in range(len(index)):
            base, upto = index.base_offsets[at], index.end_offsets[at]
            total += index.lengths[at] * max(0, min(upto, end) - max(base, start)) // (upto - base)
    return total


def beside_batches_bytes(log: ReplicaLog) -> int:
    """What files have beside batches, and a byte for each batch."""
    segments = log.chain.snapshot()
    return sum(one.size_bytes - sum(one.index.lengths) + len(one.index) for one in segments)


def _erase_all(replica: Replica, now_us: int) -> None:
    while replica.erase_next(now_us):
        pass


def offsets_in_files(folder: Path, offsets: Iterable[int]) -> set[int]:
    """Those whose values are in the files of a log."""
    content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    return {offset for offset in offsets if value_at(offset)[:-40] in content}
