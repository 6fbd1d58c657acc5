"""The cluster with one rule switched off, each: what `test_cluster_mutations` runs.

A mutation replaces one small function of the cores, or a method of the simulated broker around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import pytest

from natslog.cluster import controller, leading, metadata, replica_context, roles, stream_changes
from natslog.cluster.commands import Appointment, DisableReplicas, Outcome, Proposal, StopBroker
from natslog.cluster.controller import Controller
from natslog.cluster.metadata import Metadata
from natslog.cluster.outcomes import RecentOutcomes
from natslog.cluster.replica import Replica
from natslog.cluster.replica_context import ReplicaContext, ReplicaLogs
from natslog.cluster.replica_steps import OpenCompanion
from natslog.cluster.roles import CutTo, Diverging, FollowerReplica, LeaderReplica, Matching
from natslog.cluster.stream_time import ClockSample, StreamClock
from natslog.cluster.tracks import Track
from natslog.errors import NatslogError
from natslog.log.removed import RemovedOffsets
from natslog.model import BrokerId, Epoch, StreamRecord, StreamSettings
from tests.sim import cluster_clocks, cluster_process
from tests.sim.cluster_broker import Broker, Roles
from tests.sim.cluster_companion import SimCompanion
from tests.sim.cluster_process import Log
from tests.sim.cluster_replica import SimReplica

Patch = Callable[[pytest.MonkeyPatch], None]

_judge = roles.judge
_answered = FollowerReplica.answered
_register = Metadata._register
_apply_to_broker = Metadata._apply_to_broker


def replaced(target: Any, name: str, value: Any) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(target, name, value)


def run_by(replica_type: type[SimReplica]) -> Patch:
    return replaced(Roles, "replica_type", replica_type)


# ---- truncation ----


class CutsToHighWatermark(SimReplica):
    """KIP-101: a replica that begins to follow cuts to HW, whatever the epochs say."""

    def act(self) -> None:
        was = self.follower
        super().act()
        if self.follower is not None and self.follower is not was and not self.is_writing:
            self.cut(min(self.high_watermark, self.log.synced))


def single_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """KIP-279: the follower cuts where the leader's epoch ends, does not look where its own one does, and is done."""

    def judge(position: Any, **rest: Any) -> Any:
        verdict = _judge(position, **rest)
        is_short = isinstance(verdict, Diverging) and position.offset <= verdict.end_offset
        return Matching() if is_short else verdict

    def answered(self: FollowerReplica, epoch: Any, verdict: Any, now_ms: float, **rest: Any) -> Any:
        step = _answered(self, epoch, verdict, now_ms, **rest)
        if isinstance(verdict, Diverging) and isinstance(step, CutTo):
            return CutTo(min(verdict.end_offset, rest["log_end_offset"]))
        return step

    monkeypatch.setattr(FollowerReplica, "answered", answered)
    monkeypatch.setattr(leading, "judge", judge)


def judge_any_epoch(position: Any, *, epoch: Any, **rest: Any) -> Any:
    return _judge(msgspec.structs.replace(position, epoch=epoch), epoch=epoch, **rest)


def follow_any_epoch(self: FollowerReplica, epoch: Any, verdict: Any, now_ms: float, **rest: Any) -> Any:
    return _answered(self, self.epoch, verdict, now_ms, **rest)


def never_compare(position: Any, *, epoch: Any, log_end_offset: int, **rest: Any) -> Any:
    if position.epoch != epoch:
        return roles.Fenced(epoch)
    return Matching() if position.offset <= log_end_offset else Diverging(epoch, log_end_offset)


# ---- HW and the ISR ----


class AsksBeforeSync(SimReplica):
    """Asks for what comes after records that are not on its disk yet."""

    def durable_end(self) -> int:
        return len(self.log.records)

    def after_append(self, done: Callable[[], None]) -> None:
        log, appended = self.log, len(self.log.records)

        def synced() -> None:
            log.synced = max(log.synced, min(appended, len(log.records)))

        self.world.after(300.0, lambda: self.life.when_awake(synced))
        self.is_writing = False
        self.machine.done()
        self.act()


def join_at_high_watermark(self: LeaderReplica, broker: Any) -> bool:
    return all((end := track.end_of(broker)) is not None and end >= track.high_watermark for track in self.tracks)


def join_at_once(self: LeaderReplica, broker: Any) -> bool:
    return all(track.end_of(broker) is not None for track in self.tracks)


def advance_below_min_isr(self: LeaderReplica) -> int:
    for track in self.tracks:
        ends = [track.end_of(broker) for broker in self.counted]
        if None not in ends:
            track.high_watermark = max(track.high_watermark, min(end for end in ends if end is not None))
    return self.high_watermark


def advance_by_who_asked(self: LeaderReplica) -> int:
    """A follower that has not asked in this epoch does not hold HW back."""
    if len(self.record.isr) >= self.record.settings.min_isr:
        for track in self.tracks:
            ends = [track.end_of(broker) for broker in self.counted]
            track.high_watermark = max(track.high_watermark, min(end for end in ends if end is not None))
    return self.high_watermark


def advance_beyond(self: FollowerReplica, leader_high_watermark: int, log_end_offset: int) -> int:
    self.high_watermark = max(self.high_watermark, leader_high_watermark)
    return self.high_watermark


def with_isr_and_nobody_eligible(record: Any, isr: Iterable[BrokerId], *, unproven: Iterable[BrokerId]) -> Any:
    members = tuple(broker for broker in record.replicas if broker in set(isr))
    left = tuple(sorted(set(unproven) & set(members)))
    return metadata.next_version(record, isr=members, eligible=(), unproven=left)


# ---- metadata ----


def any_version(self: Metadata, record: Any, broker: Any, change: Any) -> bool:
    return set(change.isr) <= set(record.replicas) and record.leader in change.isr


def any_life(self: Metadata, broker: BrokerId, incarnation: str) -> bool:
    return True


def appoint_any_version(self: Metadata, record: Any, appointment: Appointment) -> bool:
    if record is None:
        return False
    return _appoint(self, record, msgspec.structs.replace(appointment, version=record.version))


_appoint = Metadata._appoint


def decide_every_time(self: Metadata, proposal: Proposal) -> Outcome:
    try:
        outcome = Outcome(changed=self.apply(proposal.command))
    except NatslogError as error:
        outcome = Outcome(changed=False, error=error.to_json())
    if self.answered is None:
        self.answered = RecentOutcomes()
    self.answered.keep(proposal, outcome)
    return outcome


def register_as_clean(self: Metadata, broker: Any, after: str, lives: Any) -> bool:
    known = self.brokers.get(broker.id)
    return _register(self, broker, known.incarnation if known is not None else "", lives)


def go_on_in_epoch(self: Metadata, broker: Any, *, is_clean: bool) -> None:
    """Who led before its restart leads on, in the epoch in which it may have sent what it has lost."""
    for record in list(self.streams.values()):
        if not is_clean and broker in record.candidates:
            self._replace(metadata.next_version(record, unproven=tuple(sorted({*record.unproven, broker}))))


def register_by_marker(self: Metadata, broker: Any, after: str, lives: Any) -> bool:
    """Accepts any marker of a life that ended gracefully, also of one that was never registered."""
    return register_as_clean(self, broker, after, lives) if after else _register(self, broker, after, lives)


def register_late(self: Metadata, broker: Any, after: str, lives: Any) -> bool:
    """A life that is over takes the place of the present one."""
    known = self.brokers.get(broker.id)
    if known is not None and known.life > broker.life:
        known = self.brokers[broker.id] = msgspec.structs.replace(known, life=-1)
        lives = (*lives, known.incarnation)
    return _register(self, broker, after, lives)


def edit_settings_only(record: StreamRecord, settings: StreamSettings, changed: Any) -> StreamRecord:
    """Who was eligible under the former `min_isr` stays so."""
    kept = _edited(record, settings, changed)
    return msgspec.structs.replace(kept, eligible=record.eligible)


_edited = metadata.edited


def finish_move_in_same_epoch(self: Metadata, record: Any, version: int, moved_us: int) -> bool:
    before = record and record.leader_epoch
    changed = _finish_move(self, record, version, moved_us)
    if changed:
        moved = self.streams[record.name]
        self.streams[record.name] = msgspec.structs.replace(moved, leader_epoch=before)
    return changed


_finish_move = Metadata._finish_move


# ---- elections ----


def unclean_election(monkeypatch: pytest.MonkeyPatch) -> None:
    def successor(self: Controller, state: Any, record: Any, loads: Any, now_ms: float) -> Any:
        live = [broker for broker in record.replicas if broker in self._alive]
        if not live:
            return None
        return Appointment(stream_id=record.id, version=record.version, leader=live[0], isr=(live[0],))

    def appoint(self: Metadata, record: Any, appointment: Appointment) -> bool:
        if record is None or record.version != appointment.version:
            return False
        epoch = Epoch(record.leader_epoch + 1)
        changed = msgspec.structs.replace(record, leader=appointment.leader, leader_epoch=epoch)
        return self._replace(metadata.with_isr(changed, appointment.isr, unproven=()))

    monkeypatch.setattr(Controller, "_successor", successor)
    monkeypatch.setattr(Metadata, "_appoint", appoint)


def forget_stops(self: Metadata, command: Any) -> bool:
    return False if isinstance(command, StopBroker) else _apply_to_broker(self, command)


def best_of_any(positions: Mapping[BrokerId, tuple[Epoch, int]], candidates: Iterable[BrokerId]) -> BrokerId | None:
    given = [broker for broker in sorted(set(candidates)) if broker in positions]
    return max(given, key=lambda broker: (*positions[broker], -broker), default=None)


# ---- the node's part ----


class RebuildsCommittedOnly(SimReplica):
    """The deduplication window after a failover: without what is in the log and not committed yet."""

    def rebuilt_window(self) -> dict[int, int]:
        return {message: offset for message, offset in super().rebuilt_window().items() if offset < self.high_watermark}


def drop_with_ids(self: Log, offsets: set[int]) -> None:
    self.dropped |= offsets


class RebuildsNothing(SimReplica):
    def rebuilt_window(self) -> dict[int, int]:
        return {}


class KeepsUnfinishedRuns(SimReplica):
    """Leads with a part of a run at the end of its log."""

    def cut_unfinished_run(self) -> None:
        pass


class FollowsIntoRuns(SimReplica):
    """A follower's HW goes as far as its log, also inside a run."""

    def whole_end(self) -> int:
        return self.log.synced


class LeadsDamaged(SimReplica):
    """Serves what is left after damage."""

    def open(self, must_exist: bool) -> None:
        self.log.is_damaged = False
        super().open(must_exist)


class OpensWhatIsMissing(SimReplica):
    """A folder that is missing opens as an empty, healthy log."""

    def open(self, must_exist: bool) -> None:
        super().open(False)


# ---- the state machine of a replica ----


def leave_as_if_damaged(self: Roles) -> Any:
    """As natslog 0.1.0 did on a clean stop: out of the in-sync replicas, and not eligible."""
    ids = tuple(one.id for one in self.replicas.values() if one.leave())
    return DisableReplicas(broker=self.me, incarnation=self.incarnation, stream_ids=ids) if ids else None


def propose_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused proposals are repeated at every tick, also by the only candidate."""
    monkeypatch.setattr(ReplicaContext, "may_propose", lambda self, kind, version: True)
    monkeypatch.setattr(ReplicaContext, "others_hold_it", True)


def answer_without_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that has no metadata session states positions all the same."""
    monkeypatch.setattr(Replica, "is_leading", property(lambda self: self.is_exposed))
    monkeypatch.setattr(Broker, "may_state_positions", True)


def refuse_without_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader says that a position is beyond its end without asking whether it still leads."""
    monkeypatch.setattr(Broker, "barrier", lambda self, then: then())
    monkeypatch.setattr(Replica, "is_leading", property(lambda self: self.is_exposed))


# ---- clocks ----


def latest_clock(samples: Iterable[ClockSample], own_wall_us: int, elapsed_us: int, brokers: int) -> int:
    return max([own_wall_us, *(one.wall_us + elapsed_us - one.elapsed_us for one in samples)])


# ---- the companion log ----


def joins_by_messages(self: LeaderReplica, broker: Any) -> bool:
    """Who has all messages joins the ISR, whatever it has of the companion log."""
    return self.messages.may_join(broker)


def advances_companion_at_once(self: LeaderReplica) -> int:
    """What the leader has of the companion log counts as committed."""
    if len(self.record.isr) >= self.record.settings.min_isr:
        self.messages.advance(self.counted)
        if self.companion is not None:
            self.companion.advance([self.me])
    return self.high_watermark


def serves_before_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader shows itself by its log of messages, whatever was delivered of the other."""
    monkeypatch.setattr(LeaderReplica, "is_exposed", property(lambda self: self.messages.is_exposed))
    exposed = property(lambda self: self.is_ready and self.leading is not None and self.leading.is_exposed)
    monkeypatch.setattr(Replica, "is_exposed", exposed)


def opens_missing_companion(self: SimCompanion, step: Any) -> None:
    """A companion log that is missing opens as an empty one."""
    _open_companion(self, OpenCompanion(must_exist=False, epoch=step.epoch))


# ---- removed messages ----


def former_rules_as_they_are(former: Any, settings: StreamSettings) -> Any:
    """A limit, or compaction, that is added applies to the messages of the last rule only."""
    return tuple(former)


_open_companion = SimCompanion.open


IN_TIME: dict[str, Patch] = {
    "KIP-101: cut to HW instead of by epoch": run_by(CutsToHighWatermark),
    "HW not held back by those of whom nothing is known": replaced(LeaderReplica, "_advance", advance_by_who_asked),
    "a new leader admits at its lagging HW": replaced(LeaderReplica, "_may_join", join_at_high_watermark),
    "a new leader shows its lagging HW": replaced(LeaderReplica, "is_exposed", True),
    "asked before the fsync": run_by(AsksBeforeSync),
    "late registration of a life that is over accepted": replaced(Metadata, "_register", register_late),
    "proposal applied twice on retry": replaced(Metadata, "decide", decide_every_time),
    "a metadata leader at rest stays so": replaced(Controller, "_note_news", lambda self, now_ms: None),
    "a leader that restarts goes on in its epoch": replaced(Metadata, "_begin_life", go_on_in_epoch),
    "a damaged replica stays in the ISR": replaced(Metadata, "_disable", lambda self, record, broker: False),
    "a damaged replica serves what is left": run_by(LeadsDamaged),
    "in-sync followers do not stand by": replaced(ReplicaContext, "note_standby", lambda self, *, can_be: None),
    "any replica stands by": replaced(replica_context, "standby_subjects", lambda record, me: record.settings.subjects),
    "HW rests inside a run": replaced(Track, "_whole_runs_below", lambda self, end: end),
    "who takes office keeps a part of a run": run_by(KeepsUnfinishedRuns),
    "a follower's HW inside a run": run_by(FollowsIntoRuns),
    "a folder that is missing opens as an empty log": run_by(OpensWhatIsMissing),
    "refused proposals are repeated for ever": propose_for_ever,
    "positions are stated without a session": answer_without_session,
    "hearing of a metadata leader begins a session": replaced(Broker, "may_state_positions", Broker.has_session),
    "beyond the end without a barrier": refuse_without_barrier,
    "lives have a number and no nonce": replaced(cluster_process, "nonce_of", lambda life, disk: "n"),
    "the leader's wall clock decides": replaced(StreamClock, "advance", lambda self, reading: reading.wall_us),
    "the latest of all clocks decides": replaced(cluster_clocks, "agreed_us", latest_clock),
    "companion: joins by messages alone": replaced(LeaderReplica, "_may_join", joins_by_messages),
    "companion: committed where the leader has it": replaced(LeaderReplica, "_advance", advances_companion_at_once),
    "companion: a leader serves before its records are delivered": serves_before_delivery,
    "companion: one that is missing opens as an empty log": replaced(SimCompanion, "open", opens_missing_companion),
    "companion: damage is ignored": replaced(Replica, "_is_damage", lambda self, error: False),
    "removal: added rules spare what former ones had shown": replaced(
        stream_changes, "_tightened", former_rules_as_they_are
    ),
    "removal: messages removed before a rule was added count": replaced(
        RemovedOffsets, "count_anew", lambda self: None
    ),
    "removal: a restarted follower serves before its records are delivered": replaced(
        ReplicaLogs, "has_delivered", True
    ),
    "brokers that stop become leaders": replaced(Metadata, "_apply_to_broker", forget_stops),
    "a follower that is behind at all lags": replaced(
        Track, "lags", lambda self, broker, now_ms, contact_ms: (self.end_of(broker) or 0) < self.log_end_offset
    ),
    "ids of dropped rows are forgotten": replaced(Log, "drop", drop_with_ids),
    "a replica joins without its leader's kept ids": replaced(Replica, "lacks_ids", lambda self, epoch, serial: False),
    "deduplication rebuilt up to HW only": run_by(RebuildsCommittedOnly),
    "deduplication not rebuilt": run_by(RebuildsNothing),
}
"""Noticed by `cluster_world`."""

DIRECTED: dict[str, Patch] = {
    "a clean stop gives up eligibility": replaced(Roles, "leaving_command", leave_as_if_damaged),
    "a full disk keeps its leaderships": replaced(Broker, "has_room", True),
}
"""Noticed by the stories of `test_cluster` that say when writes resume."""

WALKING: dict[str, Patch] = {
    "KIP-279: one step back instead of a walk": single_step,
    "KIP-320: answers of any epoch believed": replaced(FollowerReplica, "answered", follow_any_epoch),
    "logs never compared": replaced(leading, "judge", never_compare),
    "zombie: ISR changes of any epoch and version": replaced(Metadata, "_is_current", any_version),
    "ISR grows while HW moves: pending additions uncounted": replaced(
        LeaderReplica, "counted", property(lambda self: frozenset(self.record.isr))
    ),
    "admitted before it has caught up": replaced(LeaderReplica, "_may_join", join_at_once),
    "a follower's HW beyond its own log": replaced(FollowerReplica, "advanced", advance_beyond),
    "members' lives unchecked in ISR changes": replaced(Metadata, "_is_registered", any_life),
    "clean marker of a life that was never registered believed": replaced(Metadata, "_register", register_by_marker),
    "an unclean restart stays as if nothing had been": replaced(Metadata, "_register", register_as_clean),
    "KIP-966: HW moves below min_isr": replaced(LeaderReplica, "_advance", advance_below_min_isr),
    "KIP-966: who leaves below min_isr is forgotten": replaced(metadata, "with_isr", with_isr_and_nobody_eligible),
    "who is eligible stays so when min_isr is lowered": replaced(metadata, "edited", edit_settings_only),
    "appended below min_isr": replaced(LeaderReplica, "refusal", lambda self: None),
    "companion: ends of a former life count": replaced(Track, "begin_life", lambda self, broker: None),
    "unclean election": unclean_election,
    "leader chosen among unproven by one position": replaced(controller, "quorum_position", best_of_any),
    "appointment of a stale version accepted": replaced(Metadata, "_appoint", appoint_any_version),
}
"""Noticed by `cluster_walk`: these need several rare delays in a row."""
