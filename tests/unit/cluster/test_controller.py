"""What the metadata leader decides: who leads when, which moves are done, when a stream goes back."""

from __future__ import annotations

from typing import Any

import msgspec

from natslog.cluster.commands import (
    AppointLeaders,
    Appointment,
    BrokerRecord,
    CreateStream,
    FinishMoves,
    MoveReplicas,
    PauseStream,
    RegisterBroker,
    StopBroker,
)
from natslog.cluster.controller import Controller, Decisions, LeadershipTransfer
from natslog.cluster.features import LATEST_LEVEL
from natslog.cluster.metadata import Metadata
from natslog.model import BrokerId, Epoch, StreamId, StreamSettings, companion_id

BEGAN_MS = -3000.0  # so that every broker has had the time to report
ALL = (1, 2, 3)
STABLE_MS = 20_000.0


def cluster(*, brokers: int = 3, **record: Any) -> Metadata:
    """1, 2 and 3 keep `orders`; 1 leads it, in epoch 1."""
    state = Metadata(cluster_id="c")
    for number in range(1, brokers + 1):
        state.apply(RegisterBroker(broker=BrokerRecord(id=number, url="", directory=str(number), nonce="n")))
    add_stream(state, "orders", (1, 2, 3), **record)
    return state


def add_stream(state: Metadata, name: str, placement: tuple[int, ...], **record: Any) -> None:
    settings = StreamSettings(subject=name, replicas=len(placement), min_isr=2)
    state.apply(CreateStream(name=name, id=name, settings=settings, created_us=0, placement=placement))
    state.streams[name] = msgspec.structs.replace(state.streams[name], **record)


def appointed(controller: Controller, state: Metadata, alive: tuple[int, ...], now_ms: float) -> list[Appointment]:
    commands = controller.decide(state, alive, now_ms).commands
    return [one for command in commands if isinstance(command, AppointLeaders) for one in command.appointments]


def chosen(controller: Controller, state: Metadata, alive: tuple[int, ...], now_ms: float = 0.0) -> Any:
    """(leader, isr) of the only stream, or None."""
    found = appointed(controller, state, alive, now_ms)
    return (found[0].leader, found[0].isr) if found else None


# ---- when a leader is gone ----


def test_leader_with_a_session_that_is_not_reported_unresponsive_stays() -> None:
    assert chosen(Controller(BEGAN_MS), cluster(), ALL) is None


def test_while_brokers_are_missing_a_new_metadata_leader_waits_for_reports() -> None:
    assert chosen(Controller(0.0), cluster(), (2, 3), 2999.0) is None
    assert chosen(Controller(0.0), cluster(), (2, 3), 3000.0) == (2, (2, 3))
    assert chosen(Controller(0.0), cluster(leader=None), ALL, 1.0) is not None, "all have reported"


def test_broker_that_stops_is_no_successor_and_no_target() -> None:
    state = cluster()
    state.feature_level = LATEST_LEVEL
    assert state.apply(StopBroker(broker=2, incarnation="2.0.n"))
    assert chosen(Controller(BEGAN_MS), state, (2, 3)) == (3, (2, 3))
    assert chosen(Controller(BEGAN_MS), cluster(leader=None), ALL) == (1, (1, 2, 3))
    assert state.apply(StopBroker(broker=1, incarnation="1.0.n"))
    state.streams["orders"] = msgspec.structs.replace(state.streams["orders"], leader=3)
    controller = Controller(BEGAN_MS)
    controller.decide(state, ALL, 0.0)
    assert not controller.decide(state, ALL, 60_000.0).transfers, "the preferred leader stops"


def test_appointments_of_a_broker_that_stops_are_refused_until_its_next_life() -> None:
    state = cluster()
    assert not state.apply(StopBroker(broker=2, incarnation="2.9")), "of another life"
    assert state.apply(StopBroker(broker=2, incarnation="2.0.n"))
    assert not state.apply(StopBroker(broker=2, incarnation="2.0.n"))
    record = state.streams["orders"]
    appointing = AppointLeaders(
        appointments=(Appointment(stream_id=record.id, version=record.version, leader=2, isr=(1, 2, 3)),)
    )
    assert not state.apply(appointing)
    same_life = BrokerRecord(id=2, url="http://moved", directory="2", nonce="n")
    assert state.apply(RegisterBroker(broker=same_life))
    assert state.brokers[2].is_stopping, "a registration that is repeated ends nothing"
    next_life = msgspec.structs.replace(same_life, life=1)
    state.apply(RegisterBroker(broker=next_life, after="2.0.n", lives=("2.0.n", "2.1.n")))
    assert not state.brokers[2].is_stopping
    assert state.apply(appointing)


def test_leader_without_a_session_is_followed_by_one_in_sync() -> None:
    assert chosen(Controller(BEGAN_MS), cluster(), (2, 3)) == (2, (2, 3))
    assert chosen(Controller(BEGAN_MS), cluster(isr=(1, 3)), (2, 3)) == (3, (3,))


def test_nobody_leads_who_does_not_hold_everything() -> None:
    assert chosen(Controller(BEGAN_MS), cluster(isr=(1,)), (2, 3)) is None
    assert chosen(Controller(BEGAN_MS), cluster(isr=(1,), eligible=(3,)), (2, 3)) == (3, (3,))


def test_leader_that_a_majority_reports_unresponsive_is_replaced() -> None:
    controller, state = Controller(BEGAN_MS), cluster()
    controller.reported_unresponsive("orders", 1, 2, 0.0)
    assert chosen(controller, state, ALL) is None
    controller.reported_unresponsive("orders", 1, 3, 0.0)
    assert chosen(controller, state, ALL, 100.0) == (2, (2, 3))


def test_new_metadata_leader_replaces_at_once_who_is_reported_by_a_majority_and_no_other() -> None:
    controller, state = Controller(0.0), cluster()
    add_stream(state, "unreported", (1, 2, 3))
    controller.reported_unresponsive("orders", 1, 2, 0.0)
    assert not appointed(controller, state, (2, 3), 100.0), "1 has no session, which does not count yet"
    controller.reported_unresponsive("orders", 1, 3, 100.0)
    found = appointed(controller, state, (2, 3), 200.0)
    assert [(one.stream_id, one.leader, one.isr) for one in found] == [("orders", 2, (2, 3))]
    found = appointed(controller, state, (2, 3), 3000.0)
    assert {one.stream_id for one in found} == {"orders", "unreported"}


def test_leader_that_has_just_removed_a_replica_is_replaced_as_a_majority_of_all_replicas_reports_it() -> None:
    controller, state = Controller(BEGAN_MS), cluster(isr=(1, 3))
    controller.reported_unresponsive("orders", 1, 3, 0.0)
    assert chosen(controller, state, ALL) is None, "one of two that hold everything is no majority"
    controller.reported_unresponsive("orders", 1, 2, 0.0)
    assert chosen(controller, state, ALL, 100.0) == (3, (3,)), "only who holds everything leads"


def test_who_has_no_session_counts_as_missing_the_leader() -> None:
    controller = Controller(BEGAN_MS)
    controller.reported_unresponsive("orders", 1, 2, 0.0)
    assert chosen(controller, cluster(), (1, 2)) == (2, (2,))


def test_reports_of_another_epoch_or_long_ago_or_of_outsiders_do_not_count() -> None:
    for epoch, by, at_ms in ((0, 3, 0.0), (1, 3, -10_000.0), (1, 9, 0.0)):
        controller = Controller(BEGAN_MS)
        controller.reported_unresponsive("orders", 1, 2, 0.0)
        controller.reported_unresponsive("orders", epoch, by, at_ms)
        assert chosen(controller, cluster(), ALL) is None


def test_leaders_are_spread() -> None:
    state = cluster()
    for at in range(5):
        add_stream(state, f"s{at}", (1, 2, 3))
    found = appointed(Controller(BEGAN_MS), state, (2, 3), 0.0)
    assert sorted(one.leader for one in found) == [2, 2, 2, 3, 3, 3]


# ---- after unclean restarts ----


def test_proven_member_leads_before_unproven_ones() -> None:
    assert chosen(Controller(BEGAN_MS), cluster(leader=None, unproven=(1, 2)), ALL) == (3, (1, 2, 3))


def test_all_unproven_the_longest_log_leads_when_all_have_said_where_they_end() -> None:
    controller, state = Controller(BEGAN_MS), cluster(leader=None, unproven=(1, 2, 3), version=7)
    for by, end in ((1, 10), (2, 12)):
        controller.reported_position("orders", 7, by, 1, end, 0.0)
    assert chosen(controller, state, ALL) is None, "3 has a session and may say more"
    controller.reported_position("orders", 7, 3, 1, 11, 0.0)
    assert chosen(controller, state, ALL, 100.0) == (2, (1, 2, 3))


def test_all_unproven_a_majority_is_enough_after_a_while_and_less_never_is() -> None:
    controller, state = Controller(BEGAN_MS), cluster(leader=None, unproven=(1, 2, 3))
    controller.reported_position("orders", 0, 1, 1, 10, 0.0)
    assert chosen(controller, state, ALL, 60_000.0) is None
    controller.reported_position("orders", 0, 3, 1, 11, 60_000.0)
    assert chosen(controller, state, ALL, 60_000.0) == (3, (1, 2, 3))


def test_all_unproven_with_companion_logs_the_leader_is_among_the_longest_in_both() -> None:
    """The longest log of messages may be that of a replica that has lost the end of its companion log."""
    controller, state = Controller(BEGAN_MS), cluster(leader=None, unproven=(1, 2, 3), version=7, has_companion=True)
    for log_id, ends in (("orders", (10, 9, 9)), (companion_id(StreamId("orders")), (3, 5, 5))):
        assert chosen(controller, state, ALL) is None
        for number, end in enumerate(ends, 1):
            controller.reported_position(log_id, 7, number, 5, end, 0.0)
    assert chosen(controller, state, ALL) == (2, (1, 2, 3))


def test_positions_of_another_version_do_not_count() -> None:
    controller, state = Controller(BEGAN_MS), cluster(leader=None, unproven=(1, 2, 3), version=7)
    for by in ALL:
        controller.reported_position("orders", 6, by, 1, 10, 0.0)
    assert chosen(controller, state, ALL, 60_000.0) is None


def test_last_one_that_holds_everything_leads_unproven_too() -> None:
    assert chosen(Controller(BEGAN_MS), cluster(leader=None, isr=(2,), unproven=(2,)), ALL) == (2, (2,))


# ---- moves and transfers ----


def test_move_is_done_when_its_target_is_in_sync_and_leads() -> None:
    state = cluster(brokers=4, replicas=(1, 2, 4, 3), target=(1, 2, 4), version=3)
    assert not Controller(BEGAN_MS).decide(state, (1, 2, 3, 4), 0.0).commands
    state.streams["orders"] = msgspec.structs.replace(state.streams["orders"], isr=(1, 2, 4))
    decisions = Controller(BEGAN_MS).decide(state, (1, 2, 3, 4), 0.0, wall_us=9)
    assert decisions.commands == (FinishMoves(moves=(("orders", 3),), moved_us=9),)


def test_stream_goes_back_to_its_preferred_leader_when_all_is_quiet_and_once() -> None:
    controller, state = Controller(BEGAN_MS), cluster(leader=2)
    assert not controller.decide(state, ALL, 0.0).transfers
    assert controller.decide(state, ALL, STABLE_MS).transfers == (LeadershipTransfer("orders", 2, 1),)
    assert not controller.decide(state, ALL, STABLE_MS + 100.0).transfers
    assert controller.decide(state, ALL, STABLE_MS + 11_000.0).transfers


def test_preferred_leader_that_is_not_in_sync_or_unproven_waits() -> None:
    for record in ({"isr": (2, 3)}, {"unproven": (1,)}):
        controller, state = Controller(BEGAN_MS), cluster(leader=2, **record)
        controller.decide(state, ALL, 0.0)
        assert not controller.decide(state, ALL, STABLE_MS).transfers


def report_nats(controller: Controller, *cut_off: int, now_ms: float = 0.0) -> None:
    for broker in ALL:
        controller.reported_nats(BrokerId(broker), broker not in cut_off, now_ms)


def test_leader_cut_off_from_nats_is_replaced_by_one_that_reaches_it_and_leads_again_later() -> None:
    controller, state = Controller(BEGAN_MS), cluster()
    report_nats(controller, 1, 2)
    assert not controller.decide(state, ALL, 1000.0).transfers, "it may be a moment of a server's restart"
    assert controller.decide(state, ALL, 1600.0).transfers == (LeadershipTransfer("orders", 1, 3),)
    state.streams["orders"] = msgspec.structs.replace(state.streams["orders"], leader=3)
    assert not controller.decide(state, ALL, STABLE_MS).transfers, "the preferred leader is cut off as before"
    report_nats(controller, now_ms=STABLE_MS)
    assert not controller.decide(state, ALL, STABLE_MS + 1000.0).transfers
    assert controller.decide(state, ALL, STABLE_MS + 1600.0).transfers == (LeadershipTransfer("orders", 3, 1),)


def test_where_no_broker_or_only_one_out_of_sync_reaches_nats_no_leadership_is_transferred() -> None:
    controller, state = Controller(BEGAN_MS), cluster(isr=(1, 2))
    report_nats(controller, 1, 2)
    assert not controller.decide(state, ALL, STABLE_MS).transfers
    report_nats(controller, 1, 2, 3, now_ms=STABLE_MS)
    assert not controller.decide(state, ALL, 2 * STABLE_MS).transfers
    report_nats(controller, 1, now_ms=2 * STABLE_MS)
    assert not controller.decide(state, ALL, 2 * STABLE_MS + 1000.0).transfers, "NATS is just coming back"


def test_dead_leader_is_followed_by_one_that_reaches_nats_where_there_is_one() -> None:
    controller, state = Controller(BEGAN_MS), cluster()
    report_nats(controller, 2)
    assert chosen(controller, state, (2, 3), 2000.0) == (3, (2, 3))
    report_nats(controller, 2, 3, now_ms=3000.0)
    assert chosen(controller, state, (2, 3), 5000.0) == (2, (2, 3))


def test_drain_goes_on_while_no_broker_reaches_nats() -> None:
    controller, state = Controller(BEGAN_MS), cluster()
    state.brokers[1] = msgspec.structs.replace(state.brokers[1], is_draining=True)
    report_nats(controller, *ALL)
    controller.decide(state, ALL, 0.0)
    assert controller.decide(state, ALL, STABLE_MS).transfers == (LeadershipTransfer("orders", 1, 2),)


def test_drained_broker_hands_over_and_is_moved_off() -> None:
    controller, state = Controller(BEGAN_MS), cluster(brokers=4)
    state.brokers[1] = msgspec.structs.replace(state.brokers[1], is_draining=True)
    controller.decide(state, (1, 2, 3, 4), 0.0)
    decisions = controller.decide(state, (1, 2, 3, 4), STABLE_MS)
    assert decisions.transfers == (LeadershipTransfer("orders", 1, 2),)
    assert decisions.commands == (MoveReplicas(name="orders", target=(4, 2, 3)),)


def test_moves_to_a_broker_that_was_lost_on_the_way_are_turned_however_many_there_are() -> None:
    state = cluster(brokers=5)
    for number in range(6):
        add_stream(state, f"moving-{number}", (1, 2, 3), target=(1, 2, 4))
    state.brokers[4] = msgspec.structs.replace(state.brokers[4], is_draining=True)
    controller = Controller(BEGAN_MS)
    controller.decide(state, (1, 2, 3, 5), 0.0)
    moves = [one for one in controller.decide(state, (1, 2, 3, 5), STABLE_MS).commands if isinstance(one, MoveReplicas)]
    assert len(moves) == 6
    assert all(4 not in one.target for one in moves)


def test_drain_without_another_broker_waits() -> None:
    state = cluster()
    state.brokers[1] = msgspec.structs.replace(state.brokers[1], is_draining=True)
    assert not Controller(BEGAN_MS).decide(state, ALL, STABLE_MS).commands


class _Counted(dict[str, Any]):
    """Streams that count how often all of them are looked at."""

    looks = 0

    def values(self) -> Any:
        self.looks += 1
        return super().values()


def settled(**record: Any) -> tuple[Controller, Metadata, _Counted, float]:
    """With the time at which nothing is looked at any more."""
    controller, state = Controller(BEGAN_MS), cluster(**record)
    streams = state.streams = _Counted(state.streams)
    for now_ms in (0.0, STABLE_MS):
        controller.decide(state, ALL, now_ms)
    return controller, state, streams, 2 * STABLE_MS


def test_streams_are_not_looked_at_while_nothing_is_new() -> None:
    controller, state, streams, now_ms = settled()
    streams.looks = 0
    for _ in range(3):
        assert controller.decide(state, ALL, now_ms) == Decisions()
    assert not streams.looks
    state.apply(PauseStream(name="orders", paused=True))
    controller.decide(state, ALL, now_ms)
    assert streams.looks


def test_each_kind_of_news_is_acted_upon_after_a_long_rest() -> None:
    controller, state, _, now_ms = settled()
    assert chosen(controller, state, (2, 3), now_ms) == (2, (2, 3)), "a session ended"
    controller, state, _, now_ms = settled()
    for by in (2, 3):
        controller.reported_unresponsive(StreamId("orders"), Epoch(1), BrokerId(by), now_ms)
    assert chosen(controller, state, ALL, now_ms) == (2, (2, 3)), "the leader does not respond"
    controller, state, _, now_ms = settled()
    report_nats(controller, 1, now_ms=now_ms)
    assert controller.decide(state, ALL, now_ms + 1600.0).transfers, "the leader is cut off"
    controller, state, _, now_ms = settled(leader=None, unproven=ALL)
    version = state.streams["orders"].version
    for broker in ALL:
        controller.reported_position(StreamId("orders"), version, BrokerId(broker), Epoch(1), broker, now_ms)
    assert chosen(controller, state, ALL, now_ms + 1600.0), "where the logs end is known"


def test_what_a_decision_leaves_undone_is_decided_again() -> None:
    controller, state, streams, now_ms = settled(leader=2)
    streams.looks = 0
    assert controller.decide(state, ALL, now_ms).transfers == (LeadershipTransfer("orders", 2, 1),)
    assert streams.looks
