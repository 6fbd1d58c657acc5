"""The metadata state machine: deterministic, idempotent, and nothing changes on refusal."""

from __future__ import annotations

import copy

import msgspec
import pytest

from natslog.cluster.commands import (
    AppointLeaders,
    Appointment,
    BrokerRecord,
    ChangeIsrs,
    Command,
    CreateStream,
    DeleteStream,
    DisableReplicas,
    DropTombstone,
    EditStream,
    FinishMoves,
    ForgetBroker,
    IsrChange,
    MoveReplicas,
    PauseStream,
    Proposal,
    RegisterBroker,
    tombstone_key,
)
from natslog.cluster.metadata import Metadata
from natslog.errors import InvalidRequest, StreamConflict, StreamNotFound
from natslog.model import StreamRecord, StreamSettings


def create(name: str = "orders", stream_id: str = "aa", **settings: object) -> CreateStream:
    wanted = StreamSettings(subject="orders.>", **settings)
    return CreateStream(name=name, id=stream_id, settings=wanted, created_us=1, placement=(1,))


def test_create_again_with_the_same_settings_changes_nothing() -> None:
    state = Metadata(cluster_id="c")
    assert state.apply(create())
    before = copy.deepcopy(state)
    assert not state.apply(create(stream_id="bb"))
    assert state == before
    assert state.stream("orders").id == "aa"


def test_create_with_other_settings_is_a_conflict_that_names_them() -> None:
    state = Metadata(cluster_id="c")
    state.apply(create())
    with pytest.raises(StreamConflict) as conflict:
        state.apply(create(max_bytes=5, max_age_s=60.0))
    assert conflict.value.facts["settings"] == ["max_age", "max_bytes"]
    assert state.version == 1


def test_deleted_stream_leaves_a_tombstone_and_its_id_is_never_used_again() -> None:
    state = Metadata(cluster_id="c")
    state.apply(create())
    state.apply(DeleteStream(name="orders", deleted_us=2))
    assert set(state.tombstones) == {tombstone_key("aa", 1)}
    with pytest.raises(StreamNotFound):
        state.stream("orders")
    with pytest.raises(InvalidRequest):
        state.apply(create(stream_id="aa"))
    assert state.apply(create(stream_id="bb"))
    assert state.apply(DropTombstone(id="aa"))
    assert not state.apply(DropTombstone(id="aa"))


def test_edit_and_pause_change_only_what_they_name() -> None:
    state = Metadata(cluster_id="c")
    state.apply(create(group="g"))
    settings = msgspec.structs.replace(state.stream("orders").settings, max_messages=9)
    assert state.apply(EditStream(name="orders", settings=settings))
    assert state.apply(PauseStream(name="orders", paused=True))
    assert not state.apply(PauseStream(name="orders", paused=True))
    record = state.stream("orders")
    assert (record.settings.max_messages, record.paused, record.id) == (9, True, "aa")
    assert state.apply(EditStream(name="orders", settings=msgspec.structs.replace(settings, group="h")))
    assert (state.stream("orders").settings.group, state.stream("orders").settings.max_messages) == ("h", 9)


def test_two_edits_at_once_both_hold() -> None:
    """Each was made from the settings as they were before the other."""
    state = Metadata(cluster_id="c")
    state.apply(create())
    before = state.stream("orders").settings
    state.apply(
        EditStream(name="orders", settings=msgspec.structs.replace(before, max_messages=9), changed=("max_messages",))
    )
    state.apply(
        EditStream(name="orders", settings=msgspec.structs.replace(before, max_age_s=60.0), changed=("max_age_s",))
    )
    after = state.stream("orders").settings
    assert (after.max_messages, after.max_age_s) == (9, 60.0)


def test_replicas_are_not_declared_by_an_edit() -> None:
    state = Metadata(cluster_id="c")
    state.apply(create())
    for name in ("replicas", "min_isr"):
        settings = msgspec.structs.replace(state.stream("orders").settings, **{name: 3})
        with pytest.raises(InvalidRequest, match=name):
            state.apply(EditStream(name="orders", settings=settings))


# ---- brokers and replicas ----


def cluster(*, brokers: int = 3, min_isr: int = 2) -> Metadata:
    """Brokers 1, 2, 3 … of life 1; 1, 2 and 3 keep the stream, 1 leads."""
    state = Metadata(cluster_id="c")
    for number in range(1, brokers + 1):
        state.apply(register(number))
    settings = StreamSettings(subject="orders", replicas=3, min_isr=min_isr)
    state.apply(CreateStream(name="orders", id="aa", settings=settings, created_us=1, placement=(1, 2, 3)))
    return state


def register(number: int, life: int = 1, after: str = "") -> RegisterBroker:
    broker = BrokerRecord(id=number, url="", directory=f"d{number}", life=life, nonce="n")
    return RegisterBroker(broker=broker, after=after, lives=tuple(f"d{number}.{one}.n" for one in range(1, life + 1)))


def change(state: Metadata, isr: tuple[int, ...], *, by: int = 1, **changes: object) -> ChangeIsrs:
    record = state.stream("orders")
    made = IsrChange(
        stream_id="aa", epoch=record.leader_epoch, version=record.version, isr=isr, incarnations=("",) * len(isr)
    )
    return ChangeIsrs(broker=by, changes=(msgspec.structs.replace(made, **changes),))


def appointment(state: Metadata, leader: int, isr: tuple[int, ...]) -> AppointLeaders:
    version = state.stream("orders").version
    return AppointLeaders(appointments=(Appointment(stream_id="aa", version=version, leader=leader, isr=isr),))


def seen(record: StreamRecord) -> tuple[object, ...]:
    return record.leader, record.leader_epoch, record.isr, record.eligible, record.unproven


def test_unclean_restart_ends_leading_and_is_to_be_proven() -> None:
    state = cluster()
    assert state.apply(register(1, life=2))
    assert seen(state.stream("orders")) == (None, 1, (1, 2, 3), (), (1,))


def test_unclean_restart_again_voids_what_the_life_between_said() -> None:
    state = cluster()
    state.apply(register(2, life=2))
    version = state.stream("orders").version
    state.apply(register(2, life=3))
    assert state.stream("orders").version == version + 1


def test_clean_restart_ends_leading_only() -> None:
    state = cluster()
    state.apply(register(1, life=2, after="d1.1.n"))
    assert seen(state.stream("orders")) == (None, 1, (1, 2, 3), (), ())


def test_clean_end_of_a_life_that_was_never_registered_proves_nothing() -> None:
    state = cluster()
    state.apply(register(2, life=3, after="d2.2.n"))
    assert state.stream("orders").unproven == (2,)


def test_isr_below_min_isr_keeps_who_left_eligible_until_it_is_enough_again() -> None:
    state = cluster()
    assert state.apply(change(state, (1, 2)))
    assert seen(state.stream("orders")) == (1, 1, (1, 2), (), ())
    assert state.apply(change(state, (1,)))
    assert seen(state.stream("orders")) == (1, 1, (1,), (2,), ())
    assert state.apply(change(state, (1, 3)))
    assert seen(state.stream("orders")) == (1, 1, (1, 3), (), ())


@pytest.mark.parametrize(
    "stale", [{"epoch": 0}, {"epoch": 2}, {"version": 5}, {"isr": (2, 3)}, {"isr": (1, 4)}, {"incarnations": ("", "x")}]
)
def test_isr_change_of_another_epoch_version_or_life_changes_nothing(stale: dict[str, object]) -> None:
    state = cluster(brokers=4)
    before = copy.deepcopy(state)
    assert not state.apply(change(state, **{"isr": (1, 2)} | stale))
    assert not state.apply(change(state, (1, 2), by=2))
    assert state == before


def test_only_who_holds_everything_is_appointed_and_once() -> None:
    state = cluster()
    state.apply(change(state, (1, 2)))
    assert not state.apply(appointment(state, 3, (3,)))
    assert not state.apply(appointment(state, 2, (2, 3)))
    again = appointment(state, 2, (2,))
    assert state.apply(again)
    assert not state.apply(again)
    assert seen(state.stream("orders")) == (2, 2, (2,), (1,), ())


def test_damaged_replica_neither_leads_nor_counts_unless_it_is_the_last() -> None:
    state = cluster()
    for number, life in ((1, "d1.1.n"), (2, "d2.1.n"), (3, "d3.1.n")):
        state.apply(DisableReplicas(broker=number, incarnation=life, stream_ids=("aa",)))
    assert seen(state.stream("orders")) == (None, 1, (3,), (), ())


def test_damage_found_by_a_life_that_is_over_is_not_that_of_the_present_one() -> None:
    state = cluster()
    assert not state.apply(DisableReplicas(broker=2, incarnation="d2.0", stream_ids=("aa",)))


def test_move_ends_in_another_epoch_with_a_tombstone_for_who_leaves() -> None:
    state = cluster(brokers=4)
    assert state.apply(MoveReplicas(name="orders", target=(1, 2, 4)))
    assert not state.apply(MoveReplicas(name="orders", target=(1, 2, 4)))
    record = state.stream("orders")
    assert (record.replicas, record.target) == ((1, 2, 4, 3), (1, 2, 4))
    assert not state.apply(FinishMoves(moves=(("aa", record.version),), moved_us=1)), "4 is not in sync"
    state.apply(change(state, (1, 2, 3, 4)))
    assert state.apply(FinishMoves(moves=(("aa", record.version + 1),), moved_us=1))
    record = state.stream("orders")
    assert (record.replicas, record.isr, record.target, record.leader_epoch) == ((1, 2, 4), (1, 2, 4), (), 2)
    assert set(state.tombstones) == {tombstone_key("aa", 3)}
    state.apply(MoveReplicas(name="orders", target=(1, 2, 3)))
    assert not state.tombstones, "who comes back keeps its files"


@pytest.mark.parametrize("target", [(1, 2), (1, 2, 2), (1, 2, 9), (1, 2, 3, 4)])
def test_move_to_other_than_so_many_brokers_is_refused(target: tuple[int, ...]) -> None:
    state = cluster(brokers=4)
    with pytest.raises(InvalidRequest, match="3 replicas"):
        state.apply(MoveReplicas(name="orders", target=target))


def test_broker_that_keeps_a_stream_is_not_forgotten() -> None:
    state = cluster(brokers=4)
    with pytest.raises(InvalidRequest, match="drain"):
        state.apply(ForgetBroker(broker=1))
    assert state.apply(ForgetBroker(broker=4))
    assert not state.apply(ForgetBroker(broker=4))


def test_proposal_sent_again_has_the_outcome_of_the_first_time() -> None:
    state = cluster()
    pause, unpause = (Proposal(id=str(on), command=PauseStream(name="orders", paused=on)) for on in (True, False))
    first = state.decide(pause)
    state.decide(unpause)
    assert state.decide(pause) == first
    assert not state.stream("orders").paused
    refused = Proposal(id="r", command=PauseStream(name="nothing", paused=True))
    assert state.decide(refused) == state.decide(refused)
    assert (state.decide(refused).error or {})["error"]["code"] == "stream_not_found"


def test_state_is_the_same_after_a_snapshot() -> None:
    state = cluster(brokers=4)
    commands: list[Command] = [MoveReplicas(name="orders", target=(1, 2, 4)), register(2, life=2)]
    for at, command in enumerate(commands):
        state.decide(Proposal(id=str(at), command=command))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=Metadata) == state
