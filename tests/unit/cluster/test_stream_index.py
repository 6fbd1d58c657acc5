"""The index of streams follows each command, and says what has changed."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from natslog.cluster.commands import (
    AppointLeaders,
    Appointment,
    BrokerRecord,
    CreateStream,
    DeleteStream,
    FinishMoves,
    MoveReplicas,
    PauseStream,
    RegisterBroker,
)
from natslog.cluster.metadata import Metadata
from natslog.cluster.stream_index import StreamIndex
from natslog.errors import NatslogError
from natslog.model import StreamSettings

NAMES = ("a", "b", "c", "__d")


def command(random: Random, state: Metadata, number: int) -> Any:
    name, placement = random.choice(NAMES), tuple(random.sample(range(1, 5), 2))
    record = state.streams.get(name)
    kind = random.choice(["create", "delete", "pause", "move", "finish", "restart", "appoint"])
    if kind == "create" or record is None:
        settings = StreamSettings(subject=name.strip("_"), replicas=2, min_isr=1)
        return CreateStream(name=name, id=f"{number}", settings=settings, created_us=number, placement=placement)
    match kind:
        case "delete":
            return DeleteStream(name=name, deleted_us=number)
        case "pause":
            return PauseStream(name=name, paused=not record.paused)
        case "move":
            return MoveReplicas(name=name, target=placement)
        case "finish":
            return FinishMoves(moves=((record.id, record.version),), moved_us=number)
        case "restart":
            broker = BrokerRecord(id=placement[0], url="", directory="d", life=number, nonce="n")
            return RegisterBroker(broker=broker, lives=tuple(f"d.{one}.n" for one in range(number + 1)))
        case _:
            one = Appointment(stream_id=record.id, version=record.version, leader=record.isr[0], isr=record.isr)
            return AppointLeaders(appointments=(one,))


def state_of_brokers() -> Metadata:
    state = Metadata(cluster_id="c")
    for number in range(1, 5):
        state.apply(RegisterBroker(broker=BrokerRecord(id=number, url="", directory="d", nonce="n")))
    return state


@pytest.mark.parametrize("seed", range(30))
def test_index_is_that_of_the_streams_after_any_commands(seed: int) -> None:
    random, state = Random(seed), state_of_brokers()
    assert state.index.take_changed() == set()
    for number in range(1, 60):
        before = dict(state.streams)
        try:
            state.apply(command(random, state, number))
        except NatslogError:
            assert state.streams == before
        anew = StreamIndex(state.streams.values())
        assert state.index.by_id == anew.by_id
        assert +state.index.replicas == +anew.replicas
        assert +state.index.leaders == +anew.leaders
        for subject in [">", "*", *(one.settings.subjects[0] for one in state.streams.values())]:
            assert state.index.recording([subject]) == anew.recording([subject])
        changed = {name for name in NAMES if before.get(name) != state.streams.get(name)}
        assert changed <= state.index.take_changed()


def test_first_all_streams_have_changed_and_then_none() -> None:
    index = StreamIndex(cluster_of("a", "b").streams.values())
    assert index.take_changed() == {"a", "b"}
    assert index.take_changed() == set()


def cluster_of(*names: str) -> Metadata:
    state = state_of_brokers()
    for name in names:
        settings = StreamSettings(subject=name)
        state.apply(CreateStream(name=name, id=name, settings=settings, created_us=0, placement=(1,)))
    return state
