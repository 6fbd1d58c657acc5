"""How soon writes go on when the process of a leader has ended, and that nothing less replaces a leader.

Each rule of it, switched off, turns one of the two stories red.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from natslog.cluster.controller import Controller, Decisions
from natslog.cluster.metadata import Metadata
from natslog.cluster.roles import FollowerReplica
from natslog.consensus import Raft
from natslog.model import BrokerId
from tests.sim.cluster_mutants import Patch, replaced
from tests.sim.cluster_process import STREAM
from tests.sim.cluster_world import Cluster

SEEDS = range(8)
ENDED_MS, WATCHED_MS = 16_000.0, 4000.0
RESUME_WITHIN_MS = {False: 500.0, True: 900.0}
"""By whether the leader leads the metadata, too; an election by timeout takes at least a second."""


def quiet(seed: int) -> Cluster:
    """Brokers that notice ends, and have nothing else to do than to serve publishers."""
    cluster = Cluster(seed, faults_until_ms=ENDED_MS + 1, resizes=False, notices_ends=True)
    cluster.world.delay_ms, cluster.faults.blow_share = (1.0, 12.0), 0.0
    cluster.world.after(1000, cluster.publish)
    cluster.world.run_until(ENDED_MS - 4000)
    return cluster


def leader_of(cluster: Cluster) -> BrokerId:
    return BrokerId(cluster.checker.streams[STREAM].record.leader or 0)


def metadata_leader_of(cluster: Cluster) -> BrokerId:
    return next(broker.me for broker in cluster.brokers.values() if broker.raft.role == "leader")


def lead_metadata(cluster: Cluster, wanted: BrokerId) -> None:
    leader = cluster.brokers[metadata_leader_of(cluster)]
    if leader.me != wanted:
        leader.raft.transfer(wanted)
        leader.pump()
    cluster.world.run_until(ENDED_MS)
    assert metadata_leader_of(cluster) == wanted


def resumes_soon(seed: int, *, leads_metadata: bool) -> None:
    cluster = quiet(seed)
    lost = leader_of(cluster)
    others = [number for number in cluster.numbers if number != lost]
    lead_metadata(cluster, lost if leads_metadata else others[seed % len(others)])
    cluster.crash(lost, down_ms=10 * WATCHED_MS)
    cluster.faults.until_ms = cluster.world.now_ms
    cluster.world.run_until(ENDED_MS + WATCHED_MS)
    resumed_ms = cluster.resumed_ms.get(STREAM)
    assert resumed_ms is not None, f"seed {seed}: nothing is acked"
    within_ms = RESUME_WITHIN_MS[leads_metadata]
    took_ms = resumed_ms - ENDED_MS
    assert took_ms <= within_ms, f"seed {seed}: writes went on after {took_ms:.0f} ms, metadata leader {leads_metadata}"


def stays(seed: int) -> None:
    """One broker is wrong: about the leader of the stream, which leads the metadata, too."""
    cluster = quiet(seed)
    leader = leader_of(cluster)
    lead_metadata(cluster, leader)
    term, epoch = cluster.brokers[leader].raft.term, cluster.checker.streams[STREAM].record.leader_epoch
    for by in cluster.numbers:
        if by != leader:
            cluster.ends.take_as_ended(by, leader)
            cluster.world.run_until(cluster.world.now_ms + WATCHED_MS / 4)
            cluster.ends.correct(by, leader)
            cluster.world.run_until(cluster.world.now_ms + 2 * WATCHED_MS)  # until its reports do not count any more
    assert cluster.brokers[leader].raft.term == term, f"seed {seed}: another broker leads the metadata"
    assert cluster.checker.streams[STREAM].record.leader_epoch == epoch, f"seed {seed}: another broker leads the stream"


def stories() -> None:
    for seed in SEEDS:
        resumes_soon(seed, leads_metadata=False)
        resumes_soon(seed, leads_metadata=True)
        stays(seed)


@pytest.mark.parametrize("leads_metadata", [False, True])
def test_writes_resume_soon_after_the_process_of_the_leader_has_ended(leads_metadata: bool) -> None:
    for seed in SEEDS:
        resumes_soon(seed, leads_metadata=leads_metadata)


def test_leader_stays_that_only_one_broker_takes_for_ended() -> None:
    for seed in SEEDS:
        stays(seed)


def waits_for_brokers(self: Controller, state: Metadata, alive: Collection[BrokerId], now_ms: float, *rest: Any) -> Any:
    """A new metadata leader waits, whatever is reported."""
    if len(alive) < len(state.brokers) and not self.has_waited_for_brokers(now_ms):
        return Decisions()
    return _decide(self, state, alive, now_ms, *rest)


def one_report_suffices(self: Controller, record: Any, absent: Any, now_ms: float) -> bool:
    epoch, reports = self._unresponsive.get(record.id, (record.leader_epoch, {}))
    return epoch == record.leader_epoch and bool(reports)


def silent_only(self: FollowerReplica, now_ms: float, leader_contact_ms: float, ended: Any) -> bool:
    return _is_unresponsive(self, now_ms, leader_contact_ms, ())


def led_until_timeout(self: Raft, broker: BrokerId) -> None:
    """Voters keep to a leader whose process has ended."""


_decide = Controller.decide
_is_unresponsive = FollowerReplica.is_leader_unresponsive

MUTATIONS: dict[str, Patch] = {
    "a new metadata leader waits although a majority reports": replaced(Controller, "decide", waits_for_brokers),
    "one report suffices": replaced(Controller, "_is_reported", one_report_suffices),
    "a leader that has ended is reported after its silence": replaced(
        FollowerReplica, "is_leader_unresponsive", silent_only
    ),
    "voters keep to a leader that has ended": replaced(Raft, "member_ended", led_until_timeout),
    "voters with a leader answer requests": replaced(Raft, "_is_led", lambda self: False),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_rule_switched_off_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        stories()
