"""The companion log in the metadata: when a stream has one, and which replicas hold it."""

from __future__ import annotations

import msgspec
import pytest

from natslog.cluster.commands import ChangeIsrs, CreateCompanion, FinishMoves, HoldCompanions, IsrChange, MoveReplicas
from natslog.cluster.controller import Controller
from natslog.cluster.metadata import Metadata
from natslog.model import StreamRecord, companion_id, stream_of_companion
from tests.unit.cluster.test_stream_changes import NAME, set_isr, state_of

CREATE = CreateCompanion(stream_id="aa", broker=1, epoch=1)


def hold(state: Metadata, broker: int, incarnation: str = "") -> bool:
    incarnation = incarnation or state.brokers[broker].incarnation
    return state.apply(HoldCompanions(broker=broker, incarnation=incarnation, stream_ids=("aa",)))


def test_leader_creates_the_companion_log_once() -> None:
    state = state_of(replicas=3)
    before = state.stream(NAME)
    assert state.apply(CREATE)
    assert state.stream(NAME) == msgspec.structs.replace(before, has_companion=True, version=before.version + 1)
    assert not state.apply(CREATE)
    assert not state.apply(msgspec.structs.replace(CREATE, stream_id="bb")), "no such stream"


@pytest.mark.parametrize(("broker", "epoch"), [(2, 1), (1, 2)])
def test_only_the_present_leader_creates_it(broker: int, epoch: int) -> None:
    state = state_of(replicas=3)
    assert not state.apply(CreateCompanion(stream_id="aa", broker=broker, epoch=epoch))
    assert not state.stream(NAME).has_companion


def test_change_of_the_isr_that_was_decided_without_the_companion_log_is_void() -> None:
    state = state_of(replicas=3)
    set_isr(state, 1, 2)
    record = state.stream(NAME)
    joining = IsrChange(stream_id="aa", epoch=1, version=record.version, isr=(1, 2, 3), incarnations=("",) * 3)
    assert state.apply(CREATE)
    assert not state.apply(ChangeIsrs(broker=1, changes=(joining,)))


def test_replicas_hold_it_in_their_present_life_only_and_only_where_there_is_one() -> None:
    state = state_of(replicas=3)
    assert not hold(state, 2)
    state.apply(CREATE)
    assert hold(state, 2)
    assert not hold(state, 2), "it is known"
    assert not hold(state, 3, "d3.7.x"), "another life"
    assert not hold(state, 4), "no replica"
    assert state.stream(NAME).companion_holders == (2,)


def test_replica_that_was_moved_away_holds_it_no_longer() -> None:
    state = state_of(replicas=2)
    state.apply(CREATE)
    for broker in (1, 2):
        hold(state, broker)
    state.apply(MoveReplicas(name=NAME, target=(1, 3)))
    set_isr(state, 1, 2, 3)
    hold(state, 3)
    record = state.stream(NAME)
    assert state.apply(FinishMoves(moves=(("aa", record.version),), moved_us=1))
    assert state.stream(NAME).companion_holders == (1, 3)


def test_records_of_streams_without_one_are_stored_as_before() -> None:
    assert b"companion" not in msgspec.msgpack.encode(state_of().stream(NAME))


def test_ids_between_brokers() -> None:
    assert stream_of_companion(companion_id("aa")) == "aa"
    assert stream_of_companion("aa") is None


def test_unproven_replicas_of_a_stream_with_a_companion_log_are_compared_by_both_logs() -> None:
    """Broker 1 has more messages, which nobody confirmed, and has lost the end of its companion log."""
    state = state_of(replicas=3, min_isr=2)
    state.apply(CREATE)
    record = msgspec.structs.replace(state.stream(NAME), leader=None, unproven=(1, 2, 3))
    state.streams[NAME] = record
    controller = Controller(0.0)

    def report(broker: int, messages: int, companion: int | None) -> None:
        controller.reported_position("aa", record.version, broker, 1, messages, 1.0)
        if companion is not None:
            controller.reported_position(companion_id("aa"), record.version, broker, 1, companion, 1.0)

    def appointed() -> StreamRecord | int | None:
        for command in controller.decide(state, state.brokers, 60_000.0).commands:
            return command.appointments[0].leader  # type: ignore[union-attr]
        return None

    report(1, 10, 3)
    report(2, 9, None)
    assert appointed() is None, "the companion log of 2 is not known"
    report(2, 9, 5)
    assert appointed() is None, "either may have lost something"
    report(3, 9, 5)
    assert appointed() == 2
