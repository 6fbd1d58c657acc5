"""Each trap of the design with its rule switched off: the simulation of the cluster must turn red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from natslog.cluster import metadata, replica
from natslog.cluster.controller import Controller
from natslog.cluster.metadata import Appointment, Metadata
from natslog.cluster.replica import CutTo, FollowerReplica, LeaderReplica, Matching
from tests.sim import cluster_world
from tests.sim.cluster_world import Broker, run_seed

SEEDS = 400
Patch = Callable[[pytest.MonkeyPatch], type[Broker]]


def replaced(target: Any, name: str, value: Any) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> type[Broker]:
        monkeypatch.setattr(target, name, value)
        return Broker

    return patch


class CutsToHighWatermark(Broker):
    """KIP-101: a replica that begins to follow cuts to HW, whatever the epochs say."""

    def look_at_record(self) -> None:
        was = self.follower
        super().look_at_record()
        if self.follower is not None and self.follower is not was and not self.is_writing:
            self.cut(min(self.high_watermark, self.disk.log.synced))


class AsksBeforeSync(Broker):
    """Asks for what comes after records that are not on its disk yet."""

    def durable_end(self) -> int:
        return len(self.disk.log.records)

    def after_append(self, done: Callable[[], None]) -> None:
        log = self.disk.log
        appended = len(log.records)

        def synced() -> None:
            log.synced = max(log.synced, min(appended, len(log.records)))

        self.world.after(300.0, lambda: self.when_awake(synced))
        self.is_writing = False
        if self.follower is not None:
            self.follower.heard_ms = self.world.now_ms

    def fetch(self) -> None:
        super().fetch()


class ServesAnyLife(Broker):
    """Its process may have been another one when it fetched."""

    def fetched(self, fetch: Any) -> None:
        super().fetched(msgspec.structs.replace(fetch, incarnation="") if False else _without_life(fetch))


def _without_life(fetch: Any) -> Any:
    fetch.incarnation = ""
    return fetch


def _judge_any_epoch(position: Any, *, epoch: Any, **rest: Any) -> Any:
    position = msgspec.structs.replace(position, epoch=epoch)
    return _judge(position, epoch=epoch, **rest)


_judge = replica.judge


def _follow_any_epoch(self: FollowerReplica, epoch: Any, verdict: Any, now_ms: float, **rest: Any) -> Any:
    return _answered(self, self.epoch, verdict, now_ms, **rest)


_answered = FollowerReplica.answered


def _no_fencing(monkeypatch: pytest.MonkeyPatch) -> type[Broker]:
    monkeypatch.setattr(replica, "judge", _judge_any_epoch)
    monkeypatch.setattr(FollowerReplica, "answered", _follow_any_epoch)
    return Broker


def _no_comparing(position: Any, *, epoch: Any, log_end_offset: int, **rest: Any) -> Any:
    if position.epoch != epoch:
        return replica.Fenced(epoch)
    return Matching() if position.offset <= log_end_offset else replica.Diverging(epoch, log_end_offset)


def _cut_to_leaders_end(self: FollowerReplica, epoch: Any, verdict: Any, now_ms: float, **rest: Any) -> Any:
    """KIP-279: does not look where its own records of that epoch end, and believes that it is done."""
    step = _answered(self, epoch, verdict, now_ms, **rest)
    if isinstance(verdict, replica.Diverging) and isinstance(step, CutTo):
        return CutTo(min(verdict.end_offset, rest["log_end_offset"]))
    return step


def _single_step(monkeypatch: pytest.MonkeyPatch) -> type[Broker]:
    def judge(position: Any, **rest: Any) -> Any:
        verdict = _judge(position, **rest)
        if isinstance(verdict, replica.Diverging) and position.offset <= verdict.end_offset:
            return Matching()
        return verdict

    monkeypatch.setattr(FollowerReplica, "answered", _cut_to_leaders_end)
    monkeypatch.setattr(replica, "judge", judge)
    return Broker


def _may_join_at_high_watermark(self: LeaderReplica, broker: Any) -> bool:
    end_offset = self._end_of(broker)
    return end_offset is not None and end_offset >= self.high_watermark


def _joins_at_once(self: LeaderReplica, broker: Any) -> bool:
    return self._end_of(broker) is not None


def _advance_below_min_isr(self: LeaderReplica) -> int:
    ends = [self._end_of(broker) for broker in self.counted]
    if None not in ends:
        self.high_watermark = max(self.high_watermark, min(end for end in ends if end is not None))
    return self.high_watermark


def _counts_who_asked(self: LeaderReplica) -> int:
    """A follower that has not asked in this epoch does not hold HW back."""
    if len(self.record.isr) >= self.record.settings.min_isr:
        ends = [self._end_of(broker) for broker in self.counted]
        self.high_watermark = max(self.high_watermark, min(end for end in ends if end is not None))
    return self.high_watermark


def _advanced_beyond(self: FollowerReplica, leader_high_watermark: int, log_end_offset: int) -> int:
    self.high_watermark = max(self.high_watermark, leader_high_watermark)
    return self.high_watermark


def _any_version(self: Metadata, record: Any, broker: Any, change: Any) -> bool:
    return set(change.isr) <= set(record.replicas) and record.leader in change.isr


def _unclean(self: Controller, record: Any, loads: Any, now_ms: float) -> Any:
    live = [broker for broker in record.replicas if broker in self._alive]
    if not live:
        return None
    return Appointment(stream_id=record.id, version=record.version, leader=live[0], isr=(live[0],))


def _unclean_election(monkeypatch: pytest.MonkeyPatch) -> type[Broker]:
    def appoint(self: Metadata, record: Any, appointment: Any) -> bool:
        if record is None or record.version != appointment.version:
            return False
        epoch = record.leader_epoch + 1
        changed = msgspec.structs.replace(record, leader=appointment.leader, leader_epoch=epoch)
        return self._replace(metadata.with_isr(changed, appointment.isr, unproven=()))

    monkeypatch.setattr(Controller, "_successor", _unclean)
    monkeypatch.setattr(Metadata, "_appoint", appoint)
    return Broker


_register = Metadata._register


def _every_restart_is_clean(self: Metadata, broker: Any, after: str) -> bool:
    known = self.brokers.get(broker.id)
    return _register(self, broker, known.incarnation if known is not None else "")


MUTATIONS: dict[str, Patch] = {
    "KIP-101: cut to HW instead of by epoch": lambda _: CutsToHighWatermark,
    "KIP-279: one step back instead of a walk": _single_step,
    "KIP-320: epochs of questions and answers unchecked": _no_fencing,
    "logs never compared": replaced(replica, "judge", _no_comparing),
    "zombie: ISR changes of any epoch and version": replaced(Metadata, "_is_current", _any_version),
    "HW not held back by those of whom nothing is known": replaced(LeaderReplica, "_advance", _counts_who_asked),
    "a new leader admits at its lagging HW": replaced(LeaderReplica, "_may_join", _may_join_at_high_watermark),
    "admitted before it has caught up": replaced(LeaderReplica, "_may_join", _joins_at_once),
    "a follower's HW beyond its own log": replaced(FollowerReplica, "advanced", _advanced_beyond),
    "ISR grows while HW moves: pending additions uncounted": replaced(
        LeaderReplica, "counted", property(lambda self: frozenset(self.record.isr))
    ),
    "asked before the fsync": lambda _: AsksBeforeSync,
    "an unclean restart stays as if nothing had been": replaced(Metadata, "_register", _every_restart_is_clean),
    "KIP-966: HW moves below min_isr": replaced(LeaderReplica, "_advance", _advance_below_min_isr),
    "appended below min_isr": replaced(LeaderReplica, "refusal", lambda self: None),
    "unclean election": _unclean_election,
    "a damaged replica stays in the ISR": replaced(Metadata, "_disable", lambda self, record, broker: False),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_with_its_rule_switched_off_the_simulation_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broker_type = MUTATIONS[name](monkeypatch)
    for seed in range(SEEDS):
        if _fails(seed, broker_type):
            return
    pytest.fail(f"{SEEDS} seeds did not notice: {name}")


def _fails(seed: int, broker_type: type[Broker]) -> bool:
    try:
        return run_seed(seed, broker_type).violation is not None
    except (AssertionError, IndexError):
        return True  # the code's own assertions are checkers too


assert cluster_world.replica_module is replica, "the simulation asks the module, so that a mutation is seen"
