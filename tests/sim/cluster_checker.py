"""What must never be, whatever happens to the cluster: the promises of FAULTS.md, by number.

1. No acked loss: at every moment what is committed is on the stable disk of everyone who may lead (in sync, or
   eligible), but for disks that lie or are damaged; what is acked is committed; after healing every replica holds it.
2. One history: an offset is committed once, everywhere with the same record; a leader holds all that was committed.
3. Order: what a publisher sent once stays in order, what began after an ack stands behind it, nothing stands twice.
4. Nothing uncommitted is read, and of a run all or nothing; nothing read changes; a leader that shows itself shows
   all that earlier ones acked.
5. Halt rather than lie: within what is tolerated nobody halts (the broker asks), and beyond it promises 1 (but for
   damage), 2 and 4 hold all the same.
6. Back in time: after healing, or while a majority lives, new messages are acked within 10 s (the world asks).
7. Metadata: everywhere the same commands, each once, in one order, with the same outcome; a version is one record.
   What is refused is not proposed for ever. A broker that has announced its stop becomes the leader of nothing.
   Timestamps never go back, and no clock that is wrong, while a majority is right, makes a stream's time outrun them.
   While every broker is up and the network works, only a broker that stops leaves an ISR (in healthy seeds).
8. No reader is told that its position is beyond the end while it is not, and no position is stated that is older than
   a metadata session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from natslog.cluster.commands import Command, Outcome, PauseStream, Proposal, StopBroker
from natslog.cluster.lease import SESSION_S
from natslog.cluster.metadata import Metadata
from natslog.cluster.tracks import Timeouts
from natslog.model import BrokerId, StreamId, StreamRecord, companion_id
from tests.sim.cluster_clocks import SKEW_US, right_us
from tests.sim.cluster_process import Entry, Life
from tests.sim.cluster_removals import Record, RemovalsChecker, without_rules
from tests.sim.raft_checker import Violation, require

if TYPE_CHECKING:
    from tests.sim.cluster_companion import SimCompanion
    from tests.sim.cluster_replica import SimReplica
    from tests.sim.cluster_world import Cluster

PUBLISHERS = 3
NOBODY = -1
STALE_MS = 1000 * SESSION_S
"""A position that a leader states may be as old as the question that its session lasts from."""
MOST_AHEAD_US = 2 * SKEW_US
MOST_ALIKE = 40
"""Proposals of one kind by one broker for one version of a record: more is a storm."""


def publisher_of(message: int) -> int:
    """A publisher numbers its messages in the order of sending; all share one sequence of numbers."""
    return message % PUBLISHERS


class StreamChecker:
    """Of one stream. Sees everything at once, as nobody in the cluster can.

    Attributes:
        committed: the one history. `record`: the newest that any broker knows.
        runs: what is there whole or not at all: record → its run's first and end offset, as its batch's mark says.
    """

    def __init__(self, cluster: Cluster, checker: Checker, record: StreamRecord) -> None:
        self.cluster = cluster
        self.checker = checker
        self.id = record.id
        self.committed: list[Entry] = []
        self.offsets: dict[int, int] = {}
        self.runs: dict[Entry, tuple[int, int]] = {}
        self.stamps: dict[Entry, int] = {}
        self.newest_us = 0
        self.most_ahead_us = MOST_AHEAD_US
        self.acked: dict[int, int] = {}
        self.most_acked = NOBODY
        self.read: list[Entry] = []
        self.read_until: list[tuple[float, int]] = [(0.0, 0)]  # how much had been read by when
        self.sent: dict[int, int] = {}
        self._floors: dict[int, int] = {}
        self._newest_of = [NOBODY] * PUBLISHERS
        self.record = record
        self.records = {record.version: _agreed(record)}

    # ---- 1 and 2: what is committed ----

    def advanced(self, broker: SimReplica, start: int, end: int) -> None:
        """HW of a broker has risen."""
        log, committed = broker.log, self.committed
        if end > log.synced:
            raise Violation(f"broker {broker.me} has HW {end} beyond its own log {log.synced}")
        known = min(end, len(committed))
        if log.records[start:known] != committed[start:known]:
            at = next(at for at in range(start, known) if log.records[at] != committed[at])
            raise Violation(f"offset {at} is {log.records[at]} on {broker.me}, committed as {committed[at]}")
        for offset in range(len(committed), end):
            self._first_committed(offset, log.records[offset])
        for record in log.records[start:end]:
            if (run := self.runs.get(record)) is not None:
                whole = [one for one in log.records[run[0] : end] if self.runs.get(one) == run]
                require(len(whole) == run[1] - run[0], f"HW {end} of {broker.me} shows a part of the run {run}")
        if end > known:
            self._require_held(known, f"HW of {broker.me}")

    def _first_committed(self, offset: int, entry: Entry) -> None:
        message = entry[1]
        if message in self.offsets:
            raise Violation(f"message {message}, committed at {self.offsets[message]}, is committed at {offset} again")
        if offset <= self._floors[message]:
            raise Violation(f"message {message} at {offset} was sent after {self._floors[message]} was acked")
        publisher = publisher_of(message)
        if self.sent[message] == 1 and message < self._newest_of[publisher]:
            raise Violation(f"message {message}, sent once, is committed after {self._newest_of[publisher]}")
        self._newest_of[publisher] = max(self._newest_of[publisher], message)
        if self.stamps[entry] < self.newest_us:
            raise Violation(f"offset {offset} is older than the one before it: {self.stamps[entry]}, {self.newest_us}")
        self.newest_us = self.stamps[entry]
        self.committed.append(entry)
        self.offsets[message] = offset

    def _require_held(self, start: int, by: str) -> None:
        """Everyone who may lead holds what is committed from `start` on."""
        for number in self.record.candidates:
            if self.may_have_lost(number, self.id):
                continue
            log = self.cluster.disks[number].log_of(self.id)
            if log.synced < len(self.committed) or log.records[start : len(self.committed)] != self.committed[start:]:
                record = self.record
                raise Violation(
                    f"{len(self.committed)} are committed ({by}), and broker {number} has {log.synced} on its disk, in "
                    f"v{record.version} of epoch {record.leader_epoch}, isr {record.isr}, eligible {record.eligible}"
                )

    def may_have_lost(self, number: BrokerId, log_id: StreamId) -> bool:
        """Damaged, and says so; or on the disk that lies, and nobody has believed it yet in its present life."""
        log = self.cluster.disks[number].log_of(log_id)
        is_damaged = log.is_damaged or not log.exists
        if number != self.cluster.liar:
            return is_damaged
        broker = self.cluster.brokers[number]
        is_registered = broker.is_up and self.checker.brokers[number].incarnation == broker.incarnation
        return is_damaged or number in self.record.unproven or not is_registered

    def leads(self, broker: SimReplica, record: StreamRecord) -> None:
        if record.leader_epoch < self.record.leader_epoch:
            return  # late: it will be told so by everyone
        records = broker.log.records[: broker.log.synced]
        if records[: len(self.committed)] != self.committed:
            raise Violation(
                f"leader {broker.me} of epoch {record.leader_epoch} lacks committed records: it has {len(records)}, "
                f"committed are {len(self.committed)}"
            )

    def appends(self, record: StreamRecord) -> None:
        require(len(record.isr) >= record.settings.min_isr, "appended below min_isr")

    def time_is(self, broker: BrokerId, stream_time_us: int, *, is_first: bool) -> int:
        """What a leader takes for the stream's time. A stream without messages may begin ahead."""
        ahead_us = stream_time_us - right_us(self.cluster.world.now_ms)
        if is_first:
            self.most_ahead_us = max(self.most_ahead_us, ahead_us)
        require(ahead_us <= self.most_ahead_us, f"on broker {broker} the stream's time is {ahead_us / 1e6:.1f} s ahead")
        return stream_time_us

    def cut(self, broker: SimReplica, end: int) -> None:
        if end < len(self.committed):
            self._require_held(end, f"cut by {broker.me}")

    # ---- 1 and 3: what publishers know ----

    def publishes(self, message: int) -> None:
        self.sent[message] = self.sent.get(message, 0) + 1
        self._floors.setdefault(message, self.most_acked)

    def acks(self, offset: int, message: int) -> None:
        if offset >= len(self.committed) or self.committed[offset][1] != message:
            raise Violation(f"message {message} is acked at offset {offset} and not committed there")
        self.acked[message] = offset
        self.most_acked = max(self.most_acked, offset)

    # ---- 4: what readers see ----

    def reads(self, broker: SimReplica, end: int) -> None:
        self.checker.companions[self.id].reads(broker)
        records = broker.log.records
        start = max(0, min(len(self.read), end) - 30)
        if end > len(self.committed) or records[start:end] != self.committed[start:end]:
            raise Violation(f"broker {broker.me} shows what is not committed, from {start} to {end}")
        both = min(end, len(self.read))
        if records[start:both] != self.read[start:both]:
            raise Violation(f"what was read below {both} has changed on broker {broker.me}")
        if end > both:
            self.read += records[both:end]
            self.read_until.append((self.cluster.world.now_ms, len(self.read)))
        if broker.leader is not None and broker.leader.epoch == self.record.leader_epoch and end <= self.most_acked:
            raise Violation(f"leader {broker.me} shows {end}, and offset {self.most_acked} was acked before it led")

    # ---- 8: what readers are told of positions ----

    def refuses(self, broker: SimReplica, start: int) -> None:
        """A reader that begins at `start` is told that this is beyond the end."""
        if start <= len(self.read):
            raise Violation(f"broker {broker.me} refuses {start} as beyond its end, and {len(self.read)} were read")

    def states(self, broker: SimReplica, end: int, now_ms: float) -> None:
        """A leader says that the stream ends at `end`."""
        while len(self.read_until) > 1 and self.read_until[1][0] <= now_ms - STALE_MS:
            self.read_until.pop(0)
        at_ms, known = self.read_until[0]
        if at_ms <= now_ms - STALE_MS and end < known:
            raise Violation(f"broker {broker.me} states the end {end}, and {known} were read {STALE_MS:.0f} ms ago")

    # ---- 7: metadata ----

    def applied(self, process: Life, record: StreamRecord, *, is_first: bool) -> None:
        if self.records.setdefault(record.version, _agreed(record)) != _agreed(record):
            raise Violation(f"version {record.version} is {record} on {process.me}, was {self.records[record.version]}")
        if is_first and record.version > self.record.version:
            old, self.record = self.record, record
            self._require_sound(old, record)
            self._require_held(max(0, len(self.committed) - 1), f"v{record.version} begins")
            self.cluster.faults.record_changed(old, record)

    def _require_sound(self, old: StreamRecord, record: StreamRecord) -> None:
        """The leader is not one that stops; where nothing is wrong, the ISR is left by those only that stop, or were
        down until a moment ago.
        """
        leader = self.checker.brokers.get(record.leader) if record.leader is not None else None
        if leader is not None and record.leader != old.leader and leader.incarnation in self.checker.stopping_lives:
            raise Violation(f"broker {leader.id} stops, and v{record.version} of {record.name} makes it the leader")
        for number in set(old.isr) - set(record.isr) if self.cluster.is_healthy else ():
            broker = self.cluster.brokers[number]
            runs_ms = self.cluster.world.now_ms - broker.began_ms
            is_fine = broker.is_up and not broker.is_asked_to_stop and runs_ms > Timeouts().lag_ms
            require(not is_fine, f"nothing is wrong, and v{record.version} puts {number} out of {old.isr}")

    # ---- after healing ----

    def healed(self, leader: BrokerId) -> None:
        record = self.record
        require(set(record.isr) == set(record.replicas), f"after healing the ISR is {record.isr} of {record.replicas}")
        require(not record.target and not record.unproven, f"after healing the record is {record}")
        for number in record.isr:
            records = self.cluster.disks[number].log_of(self.id).records
            for message, offset in self.acked.items():
                if offset >= len(records) or records[offset][1] != message:
                    raise Violation(f"message {message}, acked at {offset}, is not on broker {number}")
        end = self.cluster.brokers[leader].replicas[self.id].readable_end()
        require(end is not None and end > self.most_acked, f"leader {leader} shows {end} after healing")
        self.checker.companions[self.id].healed()


class CompanionChecker:
    """Of the companion log of one stream: an answered record is never lost, it is on every replica that counts, and
    every replica is given the one history, in order, from its beginning.
    """

    def __init__(self, cluster: Cluster, stream: StreamChecker) -> None:
        self.cluster, self.stream = cluster, stream
        self.id = companion_id(stream.id)
        self.committed: list[Entry] = []
        self.acked: dict[int, int] = {}
        self.most_acked = NOBODY
        self._given: dict[tuple[SimCompanion, int], int] = {}
        self.contents: dict[tuple[int, int], Record] = {}  # by epoch and offset
        self.removals = RemovalsChecker(stream.committed, self.committed, self.contents)

    def advanced(self, companion: SimCompanion, start: int, end: int) -> None:
        """HW of a replica has risen."""
        log, committed = companion.log, self.committed
        require(end <= log.synced, f"broker {companion.me} has HW {end} beyond its companion log {log.synced}")
        known = min(end, len(committed))
        require(
            log.records[start:known] == committed[start:known],
            f"the companion log of {companion.me} differs below {known} from what is committed",
        )
        committed += log.records[len(committed) : end]
        if end > known:
            self.require_held(f"HW of {companion.me}")

    def require_held(self, by: str) -> None:
        """Everyone who may lead holds what is committed."""
        record = self.stream.record
        for number in record.candidates:
            if self.stream.may_have_lost(number, self.id):
                continue
            log = self.cluster.disks[number].log_of(self.id)
            if log.records[: min(log.synced, len(self.committed))] != self.committed:
                raise Violation(
                    f"{len(self.committed)} records are committed ({by}), and broker {number} has {log.synced} of its "
                    f"companion log, in v{record.version} of epoch {record.leader_epoch}, isr {record.isr}, eligible "
                    f"{record.eligible}"
                )

    def leads(self, companion: SimCompanion, record: StreamRecord) -> None:
        records = companion.log.records[: companion.log.synced]
        is_late = record.leader_epoch < self.stream.record.leader_epoch
        require(
            is_late or records[: len(self.committed)] == self.committed,
            f"leader {companion.me} of epoch {record.leader_epoch} lacks committed records of the companion log",
        )

    def cut(self, companion: SimCompanion, end: int) -> None:
        if end < len(self.committed):
            self.require_held(f"cut by {companion.me}")

    def delivers(self, companion: SimCompanion, start: int, end: int) -> None:
        """The owner of a replica is given these."""
        opening = companion, companion.openings
        require(self._given.get(opening, 0) == start, f"broker {companion.me} delivers {start} out of order")
        self._given[opening] = end
        records = companion.log.records[start:end]
        require(records == self.committed[start:end], f"broker {companion.me} delivers what is not committed")

    def reads(self, replica: SimReplica) -> None:
        """A replica serves: a leader that is the newest was given everything that is acked."""
        leader = replica.leader
        if leader is not None and leader.epoch == self.stream.record.leader_epoch:
            given = replica.companion.delivered
            require(given > self.most_acked, f"leader {replica.me} serves with {given} of {self.most_acked} records")
        if replica.removals is not None and (end := replica.readable_end()) is not None:
            self.removals.reads(replica.removals, end)

    def acks(self, offset: int, number: int) -> None:
        is_committed = offset < len(self.committed) and self.committed[offset][1] == number
        require(is_committed, f"record {number} is acked at offset {offset} and not committed there")
        self.acked[number] = offset
        self.most_acked = max(self.most_acked, offset)

    def healed(self) -> None:
        for number in self.stream.record.isr:
            records = self.cluster.disks[number].log_of(self.id).records
            for change, offset in self.acked.items():
                is_there = offset < len(records) and records[offset][1] == change
                require(is_there, f"record {change}, acked at {offset}, is not on broker {number}")
            given = self.cluster.brokers[number].replicas[self.stream.id].companion.delivered
            require(given > self.most_acked, f"after healing broker {number} was given {given} records")
            self.reads(self.cluster.brokers[number].replicas[self.stream.id])


class Checker:
    """Of all streams, and of the metadata."""

    def __init__(self, cluster: Cluster, state: Metadata) -> None:
        self.brokers = state.brokers
        self.streams: dict[StreamId, StreamChecker] = {
            record.id: StreamChecker(cluster, self, record) for record in state.streams.values()
        }
        self.companions = {one.id: CompanionChecker(cluster, one) for one in self.streams.values()}
        self._commands: dict[int, tuple[str, Outcome]] = {}
        self.stopping_lives: set[str] = set()
        self._pauses: set[str] = set()
        self._paused: dict[str, bool] = {}
        self._proposed: dict[tuple[BrokerId, str, StreamId, int], int] = {}
        self._last_index = 0

    def proposes(self, by: BrokerId, record: StreamRecord | None, command: Command) -> None:
        """A replica proposes something for itself."""
        if record is not None:
            kind = by, type(command).__name__, record.id, record.version
            self._proposed[kind] = self._proposed.get(kind, 0) + 1
            require(self._proposed[kind] <= MOST_ALIKE, f"broker {by} proposes {kind[1]} again and again")

    def applied(self, process: Life, index: int, proposal: Proposal, outcome: Outcome) -> None:
        """A broker has applied what stands at `index`."""
        known = self._commands.setdefault(index, (proposal.id, outcome))
        if known != (proposal.id, outcome):
            raise Violation(f"entry {index} is {proposal.id} with {outcome} on {process.me}, and elsewhere {known}")
        require(process.state.index.by_id == _by_id(process.state), f"{proposal.command} left the index behind")
        is_first = index >= self._last_index
        if is_first:
            self._last_index, self.brokers = index, process.state.brokers
            self._applied_first(process, proposal)
        for record in process.state.streams.values():
            self.streams[record.id].applied(process, record, is_first=is_first)
            if is_first and self.companions[record.id].committed:
                self.companions[record.id].require_held(f"v{record.version} is known")

    def _applied_first(self, process: Life, proposal: Proposal) -> None:
        """Of all brokers. Each command counts once, however often it was sent: pausing is what shows."""
        if isinstance(stop := proposal.command, StopBroker):
            known = process.state.brokers.get(stop.broker)
            if known is not None and known.incarnation == stop.incarnation:  # otherwise it is of no registered life
                self.stopping_lives.add(stop.incarnation)
        if isinstance(proposal.command, PauseStream) and proposal.id not in self._pauses:
            self._pauses.add(proposal.id)
            self._paused[proposal.command.name] = proposal.command.paused
        for record in process.state.streams.values():
            if record.paused != self._paused.get(record.name, False):
                raise Violation(f"{proposal.id} changed what is paused again")


def _by_id(state: Metadata) -> dict[StreamId, StreamRecord]:
    return {record.id: record for record in state.streams.values()}


def _agreed(record: StreamRecord) -> StreamRecord:
    """What a version stands for; pausing does not change it, nor do rules for removal."""
    return msgspec.structs.replace(without_rules(record), paused=False, settings_version=0)
