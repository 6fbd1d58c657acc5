"""Edits that name the version of the settings or the id of the stream; protection against removal."""

from __future__ import annotations

import msgspec
import pytest

from natslog.cluster.commands import (
    Command,
    CreateCompanion,
    CreateStream,
    DeleteStream,
    EditStream,
    PauseStream,
    PurgeStream,
    ResizeReplicas,
    SealStream,
)
from natslog.cluster.metadata import Metadata
from natslog.cluster.stream_changes import require_deletable, require_purgeable
from natslog.errors import (
    InvalidRequest,
    RemovalDenied,
    SettingsConflict,
    StreamConflict,
    StreamRecreated,
    StreamSealed,
)
from natslog.model import Epoch, FormerRule, StreamRecord, StreamSettings
from natslog.node.replicas.settings_in_force import rules_of
from tests.unit.cluster.test_stream_changes import NAME, edit, finish_moves, set_isr, state_of


def record_of(state: Metadata) -> StreamRecord:
    return state.stream(NAME)


def edits(version: int) -> list[Command]:
    """One of each kind, for settings of this version."""
    settings = StreamSettings(subject="orders.>", max_messages=7)
    return [
        EditStream(name=NAME, settings=settings, changed=("max_messages",), id="aa", if_version=version),
        PauseStream(name=NAME, paused=True, id="aa", if_version=version),
        ResizeReplicas(name=NAME, target=(1, 2), min_isr=1, id="aa", if_version=version),
    ]


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(3))
def test_of_two_editors_at_once_exactly_one_wins(first: int, second: int) -> None:
    state = state_of()
    assert state.apply(edits(0)[first])
    assert record_of(state).settings_version == 1
    before = record_of(state)
    with pytest.raises(SettingsConflict, match="are of version 1, not 0") as refused:
        state.apply(edits(0)[second])
    assert record_of(state) == before
    assert refused.value.facts["settings_version"] == 1
    assert refused.value.facts["settings"] == before.settings.to_json() | {"paused": before.paused}


@pytest.mark.parametrize("kind", range(3))
def test_edit_of_a_former_stream_of_that_name_changes_nothing(kind: int) -> None:
    state = state_of()
    state.streams[NAME] = msgspec.structs.replace(record_of(state), id="bb")
    with pytest.raises(StreamRecreated, match="nothing was changed"):
        state.apply(edits(0)[kind])
    assert record_of(state).settings_version == 0


def test_what_changes_nothing_and_what_operators_do_not_edit_has_no_new_version() -> None:
    state = state_of(replicas=3, min_isr=2)
    assert not edit(state, max_messages=None)
    set_isr(state, 1, 2)
    state.apply(PurgeStream(name=NAME, id="aa", below=3))
    assert record_of(state).settings_version == 0
    assert edit(state, max_messages=7)
    assert edit(state, min_isr=1)
    assert record_of(state).settings_version == 2


def test_a_finished_move_to_another_number_of_replicas_is_a_new_version() -> None:
    state = state_of()
    state.apply(ResizeReplicas(name=NAME, target=(1, 2), min_isr=1))
    set_isr(state, 1, 2)
    assert finish_moves(state)
    assert (record_of(state).settings.replicas, record_of(state).settings_version) == (2, 2)


# ---- protection ----


def test_deny_purge_refuses_a_purge_and_deny_delete_a_deletion() -> None:
    state = state_of()
    require_purgeable(record_of(state))
    require_deletable(record_of(state))
    edit(state, deny_purge=True)
    with pytest.raises(RemovalDenied, match="deny_purge, which cannot be turned off"):
        state.apply(PurgeStream(name=NAME, id="aa", below=3))
    assert record_of(state).purged_below == 0
    require_deletable(record_of(state))
    edit(state, deny_delete=True)
    with pytest.raises(RemovalDenied, match="deny_delete"):
        require_deletable(record_of(state))
    state.apply(DeleteStream(name=NAME, deleted_us=1))


@pytest.mark.parametrize("name", ["deny_delete", "deny_purge"])
def test_protection_cannot_be_turned_off(name: str) -> None:
    state = state_of()
    edit(state, **{name: True})
    with pytest.raises(InvalidRequest, match=f"{name} of stream 'orders' cannot be turned off"):
        edit(state, **{name: False})
    edit(state, max_messages=7)
    assert getattr(record_of(state).settings, name)


def test_a_deletion_is_of_the_stream_and_the_settings_that_it_names() -> None:
    state = state_of()
    edit(state, max_messages=7)
    for condition, refused in (({"id": "bb"}, StreamRecreated), ({"id": "aa", "if_version": 0}, SettingsConflict)):
        with pytest.raises(refused):
            state.apply(DeleteStream(name=NAME, deleted_us=1, **condition))
    assert NAME in state.streams
    assert state.apply(DeleteStream(name=NAME, deleted_us=1, id="aa", if_version=1))
    assert NAME not in state.streams


def test_prevent_delete_refuses_a_deletion_until_it_is_turned_off_also_of_a_sealed_stream() -> None:
    state = state_of()
    edit(state, prevent_delete=True)
    state.apply(SealStream(name=NAME))
    with pytest.raises(RemovalDenied, match="has prevent_delete"):
        state.apply(DeleteStream(name=NAME, deleted_us=1))
    assert edit(state, prevent_delete=False, managed_by="shop")
    assert record_of(state).settings.managed_by == "shop"
    with pytest.raises(StreamSealed):
        edit(state, prevent_delete=True, max_messages=7)
    assert state.apply(DeleteStream(name=NAME, deleted_us=1))


def test_a_repeated_creation_need_not_name_what_operators_have_set() -> None:
    state = state_of()
    plain = record_of(state).settings
    edit(state, prevent_delete=True, managed_by="shop")

    def create(**changes: object) -> bool:
        settings = msgspec.structs.replace(plain, **changes)
        return state.apply(CreateStream(name=NAME, id="cc", settings=settings, created_us=1, placement=(1,)))

    assert not create()
    assert not create(prevent_delete=True, managed_by="shop")
    with pytest.raises(StreamConflict, match="managed_by is 'shop', not 'other'"):
        create(managed_by="other")
    edit(state, prevent_delete=False)
    with pytest.raises(StreamConflict, match="prevent_delete is False, not True"):
        create(prevent_delete=True)


def test_roll_ups_are_in_force_from_another_leader_epoch_on() -> None:
    """So that the header has no effect in messages that were stored before."""
    state = state_of()
    epoch = record_of(state).leader_epoch
    edit(state, max_messages=7)
    assert record_of(state).leader_epoch == epoch
    for count, allowed in enumerate((True, False), 1):
        edit(state, allow_rollup=allowed)
        record = record_of(state)
        assert record.leader_epoch == epoch + count
        assert record.former_rules[-1] == FormerRule(Epoch(epoch + count), None, False, not allowed)
        assert [rule.rolls_up for rule in rules_of(record)] == [False, True, False][: count + 1]


def test_what_hides_more_messages_is_in_force_for_all_of_them() -> None:
    """A former rule without a limit before one with a limit would depend on rows that replicas drop."""
    state = state_of()
    found = []
    for change in (
        {"compact": True},
        {"compact": False},
        {"max_messages_per_subject": 3},
        {"max_messages_per_subject": 5},
        {"max_messages_per_subject": None},
        {"compact": True, "max_messages_per_subject": 4},
        {"compact": False, "max_messages_per_subject": 2},
    ):
        edit(state, **change)
        found.append([(rule.per_subject, rule.compacts) for rule in rules_of(record_of(state))])
    assert found == [
        [(None, True)],
        [(None, True), (None, False)],
        [(3, True), (3, False)],
        [(3, True), (3, False), (5, False)],
        [(3, True), (3, False), (5, False), (None, False)],
        [(3, True), (4, True)],
        [(2, True), (2, False)],
    ]


def test_a_rule_that_is_added_after_removals_is_counted_anew() -> None:
    """Removals of before do not count for it: only some replicas may have these messages."""
    state = state_of()
    edit(state, max_messages_per_subject=5)
    assert record_of(state).rules_version == 0, "nothing was removed yet"
    edit(state, max_messages_per_subject=None)
    record = record_of(state)
    assert record.leader is not None
    state.apply(CreateCompanion(stream_id=record.id, broker=record.leader, epoch=record.leader_epoch))
    assert record_of(state).has_companion
    versions = []
    for change in (
        {"max_messages": 7},
        {"max_messages_per_subject": 5},
        {"max_messages_per_subject": 3},
        {"max_messages_per_subject": 4},
        {"compact": True},
        {"compact": False},
        {"max_messages_per_subject": None},
    ):
        edit(state, **change)
        record = record_of(state)
        versions.append(record.settings_version if record.rules_version == record.settings_version else 0)
    assert versions == [0, 4, 0, 0, 7, 0, 0]


def test_of_two_edits_at_once_that_contradict_each_other_the_second_is_refused() -> None:
    state = state_of()
    edit(state, deny_purge=True)
    with pytest.raises(InvalidRequest, match="either deny_purge or allow_rollup"):
        edit(state, allow_rollup=True)
