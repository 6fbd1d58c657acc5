"""Streams that are purged, sealed, or given another number of replicas or another `min_isr`: the metadata's part."""

from __future__ import annotations

import msgspec
import pytest

from natslog.cluster.commands import (
    BrokerRecord,
    ChangeIsrs,
    Command,
    CreateStream,
    EditStream,
    FinishMoves,
    IsrChange,
    MoveReplicas,
    PauseStream,
    PurgeStream,
    RegisterBroker,
    ResizeReplicas,
    SealStream,
    tombstone_key,
)
from natslog.cluster.controller import Controller
from natslog.cluster.features import LATEST_LEVEL
from natslog.cluster.metadata import Metadata
from natslog.errors import InvalidRequest, NatslogError, StreamConflict, StreamRecreated, StreamSealed
from natslog.model import StreamRecord, StreamSettings

NAME = "orders"


def state_of(replicas: int = 1, min_isr: int = 1, level: int = LATEST_LEVEL) -> Metadata:
    """Five brokers, and a stream on the first of them."""
    state = Metadata(cluster_id="c", feature_level=level)
    for number in range(1, 6):
        state.apply(RegisterBroker(broker=BrokerRecord(id=number, url="", directory=f"d{number}", nonce="n")))
    settings = StreamSettings(subject="orders.>", replicas=replicas, min_isr=min_isr)
    placement = tuple(range(1, replicas + 1))
    state.apply(CreateStream(name=NAME, id="aa", settings=settings, created_us=1, placement=placement))
    return state


def edit(state: Metadata, **changes: object) -> bool:
    settings = msgspec.structs.replace(state.stream(NAME).settings, **changes)
    return state.apply(EditStream(name=NAME, settings=settings, changed=tuple(changes)))


def set_isr(state: Metadata, *isr: int) -> StreamRecord:
    record = state.stream(NAME)
    change = IsrChange(
        stream_id="aa", epoch=record.leader_epoch, version=record.version, isr=isr, incarnations=("",) * len(isr)
    )
    assert state.apply(ChangeIsrs(broker=record.leader, changes=(change,)))
    return state.stream(NAME)


def finish_moves(state: Metadata) -> bool:
    """What the metadata leader decides now, applied. Whether it finished a move."""
    decided = Controller(0.0).decide(state, state.brokers, 10_000.0).commands
    return any(state.apply(command) for command in decided if isinstance(command, FinishMoves))


# ---- purged ----


def test_purge_only_rises_and_is_not_of_the_next_stream_of_that_name() -> None:
    state = state_of()
    assert state.apply(PurgeStream(name=NAME, id="aa", below=10))
    assert not state.apply(PurgeStream(name=NAME, id="aa", below=10))
    assert not state.apply(PurgeStream(name=NAME, id="aa", below=7))
    assert state.stream(NAME).purged_below == 10
    with pytest.raises(StreamRecreated):
        state.apply(PurgeStream(name=NAME, id="bb", below=20))
    assert state.stream(NAME).purged_below == 10


# ---- sealed ----


def test_sealed_stream_is_neither_purged_nor_edited_nor_opened_again() -> None:
    state = state_of(replicas=3, min_isr=2)
    assert state.apply(SealStream(name=NAME))
    assert not state.apply(SealStream(name=NAME))
    for command in (PurgeStream(name=NAME, id="aa", below=1),):
        with pytest.raises(StreamSealed):
            state.apply(command)
    with pytest.raises(StreamSealed):
        edit(state, max_age_s=60.0)
    state.apply(PauseStream(name=NAME, paused=True))
    state.apply(PauseStream(name=NAME, paused=False))
    assert state.stream(NAME).sealed


def test_sealed_stream_may_have_another_number_of_replicas() -> None:
    state = state_of(replicas=3, min_isr=2)
    state.apply(SealStream(name=NAME))
    assert edit(state, min_isr=1)
    assert state.apply(ResizeReplicas(name=NAME, target=(1, 2, 3, 4), min_isr=2))


# ---- min_isr ----


def test_lower_min_isr_takes_eligibility_from_those_who_left() -> None:
    """From now on the leader commits without them: what they hold is not all that is committed."""
    state = state_of(replicas=3, min_isr=2)
    assert set_isr(state, 1).eligible == (2, 3)
    before = state.stream(NAME)
    assert edit(state, min_isr=1)
    record = state.stream(NAME)
    assert (record.candidates, record.version) == ((1,), before.version + 1)


def test_higher_min_isr_makes_nobody_eligible_who_was_not() -> None:
    state = state_of(replicas=3, min_isr=1)
    set_isr(state, 1)
    assert edit(state, min_isr=3)
    assert state.stream(NAME).candidates == (1,)


def test_min_isr_beyond_the_replicas_is_refused() -> None:
    state = state_of(replicas=3, min_isr=2)
    with pytest.raises(InvalidRequest, match="min_isr 4 is more than the 3 replicas"):
        edit(state, min_isr=4)


# ---- the number of replicas ----


def test_more_replicas_count_when_all_of_them_are_in_sync() -> None:
    state = state_of()
    assert state.apply(ResizeReplicas(name=NAME, target=(1, 2, 3), min_isr=2))
    record = state.stream(NAME)
    assert (record.replicas, record.settings.replicas, record.settings.min_isr) == ((1, 2, 3), 1, 1)
    set_isr(state, 1, 2)
    assert not finish_moves(state), "one is not in sync yet"
    set_isr(state, 1, 2, 3)
    assert finish_moves(state)
    record = state.stream(NAME)
    assert (record.settings.replicas, record.settings.min_isr, record.target) == (3, 2, ())
    assert (record.isr, record.target_min_isr) == ((1, 2, 3), 0)


def test_fewer_replicas_leave_tombstones_and_begin_another_epoch() -> None:
    state = state_of(replicas=3, min_isr=2)
    epoch = state.stream(NAME).leader_epoch
    assert state.apply(ResizeReplicas(name=NAME, target=(1,), min_isr=1))
    assert state.stream(NAME).settings.min_isr == 2, "until it is done"
    assert finish_moves(state)
    record = state.stream(NAME)
    assert (record.replicas, record.isr, record.settings.replicas, record.settings.min_isr) == ((1,), (1,), 1, 1)
    assert record.leader_epoch == epoch + 1
    assert set(state.tombstones) == {tombstone_key("aa", 2), tombstone_key("aa", 3)}


def test_resize_that_is_taken_back_changes_nothing() -> None:
    state = state_of(replicas=3, min_isr=2)
    state.apply(ResizeReplicas(name=NAME, target=(3,), min_isr=1))
    assert state.apply(ResizeReplicas(name=NAME, target=(1, 2, 3), min_isr=2))
    record = state.stream(NAME)
    assert (record.target, record.target_min_isr, record.settings.replicas) == ((), 0, 3)
    assert not finish_moves(state)


def test_replica_that_is_wanted_again_is_not_deleted() -> None:
    state = state_of(replicas=3, min_isr=2)
    state.apply(ResizeReplicas(name=NAME, target=(1,), min_isr=1))
    finish_moves(state)
    assert state.apply(ResizeReplicas(name=NAME, target=(1, 2, 3), min_isr=2))
    assert not state.tombstones


def test_move_within_a_resize_keeps_the_number_that_is_wanted() -> None:
    """A broker is drained meanwhile, say."""
    state = state_of()
    state.apply(ResizeReplicas(name=NAME, target=(1, 2, 3), min_isr=2))
    with pytest.raises(InvalidRequest, match="has 3 replicas"):
        state.apply(MoveReplicas(name=NAME, target=(4,)))
    assert state.apply(MoveReplicas(name=NAME, target=(3, 2, 1)))
    set_isr(state, 1, 2, 3)
    assert finish_moves(state)
    assert state.stream(NAME).settings.replicas == 3


def test_min_isr_is_not_edited_while_the_replicas_are_changed() -> None:
    state = state_of(replicas=3, min_isr=2)
    state.apply(ResizeReplicas(name=NAME, target=(1, 2, 3, 4, 5), min_isr=3))
    with pytest.raises(InvalidRequest, match="are being changed"):
        edit(state, min_isr=1)


@pytest.mark.parametrize(
    "command",
    [
        ResizeReplicas(name=NAME, target=(1, 9), min_isr=1),
        ResizeReplicas(name=NAME, target=(1, 1), min_isr=1),
        ResizeReplicas(name=NAME, target=(), min_isr=1),
        ResizeReplicas(name=NAME, target=(1, 2), min_isr=3),
        ResizeReplicas(name=NAME, target=(1, 2), min_isr=0),
    ],
    ids=["unknown broker", "twice", "none", "more than there are", "nobody"],
)
def test_impossible_resize_is_refused_and_changes_nothing(command: Command) -> None:
    state = state_of()
    before = msgspec.json.encode(state)
    with pytest.raises(NatslogError):
        state.apply(command)
    assert msgspec.json.encode(state) == before


# ---- subjects ----


def test_subjects_that_an_edit_removes_are_kept_as_former_ones() -> None:
    state = state_of()
    assert edit(state, subject="a", more_subjects=("orders.>", "b"))
    assert state.stream(NAME).former_subjects == ()
    assert edit(state, subject="c", more_subjects=("orders.>",))
    assert state.stream(NAME).recorded_subjects == ("c", "orders.>", "a", "b")


def test_edit_of_the_subject_is_an_edit_of_all_subjects() -> None:
    """`changed` names `subject` alone, as it does in records of streams with one subject."""
    state = state_of()
    for settings in (StreamSettings(subject="a", more_subjects=("b",)), StreamSettings(subject="b")):
        assert state.apply(EditStream(name=NAME, settings=settings, changed=("subject",)))
        assert state.stream(NAME).settings.subjects == settings.subjects
    assert state.stream(NAME).former_subjects == ("orders.>", "a")


def create(state: Metadata, *subjects: str) -> bool:
    settings = StreamSettings(subject=subjects[0], more_subjects=subjects[1:])
    return state.apply(CreateStream(name="x", id="bb", settings=settings, created_us=1, placement=(1,)))


def test_creation_compares_the_set_of_subjects() -> None:
    state = state_of()
    assert create(state, "a", "b")
    assert not create(state, "b", "a")
    with pytest.raises(StreamConflict, match=r"other settings: subjects is \['a', 'b'\], not \['a'\]$"):
        create(state, "a")
    assert edit(state, subject="y")
    with pytest.raises(StreamConflict, match="other settings: subject is 'y', not 'z'$"):
        state.apply(
            CreateStream(name=NAME, id="cc", settings=StreamSettings(subject="z"), created_us=1, placement=(1,))
        )


def test_record_of_one_subject_is_stored_as_before() -> None:
    assert b"more_subjects" not in msgspec.msgpack.encode(StreamSettings(subject="a"))
