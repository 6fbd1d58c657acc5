"""Streams that are restored from exports: the metadata's part. Their lineage, and what may be done when."""

from __future__ import annotations

import msgspec
import pytest

from natslog.cluster.commands import (
    BeginImport,
    BrokerRecord,
    Command,
    CreateStream,
    EditStream,
    FinishImport,
    PauseStream,
    RegisterBroker,
    SealStream,
    SetCursor,
)
from natslog.cluster.cursors import of_present_stream
from natslog.cluster.features import LATEST_LEVEL
from natslog.cluster.metadata import Metadata
from natslog.errors import NatslogError, StreamConflict, StreamImporting, StreamRecreated
from natslog.model import Fork, StreamRecord, StreamSettings
from natslog.node.replicas.settings_in_force import rules_of

LINEAGE = (Fork(id="aa", offset=60), Fork(id="bb", offset=100))
MORE = (Fork(id="aa", offset=60), Fork(id="bb", offset=150))
BEGIN = BeginImport(name="s", id="cc", subjects=("s", "old"))
FINISH = FinishImport(name="s", id="cc", lineage=LINEAGE, resumes=False)
RESUME = PauseStream(name="s", paused=False)


def state_of(*commands: Command) -> Metadata:
    """A stream that is being imported, after these commands."""
    state = Metadata(cluster_id="c", feature_level=LATEST_LEVEL)
    state.apply(RegisterBroker(broker=BrokerRecord(id=1, url="", directory="d", nonce="n")))
    create = CreateStream(
        name="s",
        id="cc",
        settings=StreamSettings(subject="s"),
        created_us=1,
        placement=(1,),
        is_import=True,
        first_offset=40,
        lineage=LINEAGE,
        former_subjects=("former",),
    )
    for command in (create, *commands):
        state.apply(command)
    return state


def stream(state: Metadata) -> StreamRecord:
    return state.stream("s")


def test_stream_is_imported_then_resumed() -> None:
    state = state_of()
    assert (stream(state).import_state, stream(state).paused, stream(state).first_offset) == ("importing", True, 40)
    assert (stream(state).lineage, stream(state).former_subjects) == (LINEAGE, ("former",))
    with pytest.raises(StreamImporting):
        state.apply(RESUME)
    state.apply(FINISH)
    assert (stream(state).import_state, stream(state).paused) == ("imported", True)
    assert not state.apply(FINISH), "a repeated request changes nothing"
    state.apply(RESUME)
    assert (stream(state).import_state, stream(state).paused) == ("", False)
    state.apply(PauseStream(name="s", paused=True))
    assert stream(state).import_state == "", "what was resumed may have messages of its own"
    resumed = state_of(FinishImport(name="s", id="cc", lineage=LINEAGE, resumes=True))
    assert (stream(resumed).import_state, stream(resumed).paused) == ("", False)


def test_roll_ups_of_imported_messages_have_no_effect() -> None:
    """The original may have stored the header while it did not allow roll-ups."""
    for commands in ((FINISH, RESUME), (FinishImport(name="s", id="cc", lineage=LINEAGE, resumes=True),)):
        state = state_of()
        allowed = msgspec.structs.replace(stream(state).settings, allow_rollup=True)
        state.apply(EditStream(name="s", id="cc", settings=allowed, changed=("allow_rollup",)))
        assert not any(rule.rolls_up for rule in rules_of(stream(state)))
        for command in commands:
            state.apply(command)
        record = stream(state)
        assert [rule.rolls_up for rule in rules_of(record)][-2:] == [False, True]
        assert rules_of(record)[-1].from_epoch == record.leader_epoch


def test_more_is_imported_until_the_stream_is_resumed() -> None:
    state = state_of(FINISH, BEGIN)
    assert stream(state).import_state == "importing"
    assert stream(state).former_subjects == ("former", "old")
    assert stream(state).lineage == LINEAGE, "what is not there yet is not valid yet"
    state.apply(BeginImport(name="s", id="cc", subjects=("newer",)))  # of a later export, before that one was complete
    assert stream(state).former_subjects == ("former", "old", "newer")
    state.apply(FinishImport(name="s", id="cc", lineage=MORE, resumes=False))
    assert stream(state).lineage == MORE
    for last in (RESUME, SealStream(name="s")):
        with pytest.raises(StreamConflict, match="resumed or sealed since"):
            state_of(FINISH, last, BEGIN)
    with pytest.raises(StreamConflict, match="not being imported"):
        state_of(FINISH, FinishImport(name="s", id="cc", lineage=MORE, resumes=False))
    for command in (BeginImport(name="s", id="dd", subjects=()), FinishImport(
        name="s", id="dd", lineage=LINEAGE, resumes=False
    )):  # fmt: skip
        with pytest.raises(StreamRecreated):
            state_of(command)


def test_second_creation_by_an_import_is_refused() -> None:
    state = state_of()
    again = CreateStream(
        name="s", id="dd", settings=StreamSettings(subject="s"), created_us=1, placement=(1,), is_import=True
    )
    with pytest.raises(StreamConflict, match="created meanwhile"):
        state.apply(again)


@pytest.mark.parametrize(
    ("stream_id", "offset", "error"),
    [
        ("cc", 10_000, None),
        ("bb", 100, None),
        ("bb", 101, "ends at offset 100 .* position 101 is beyond it: messages 100 to 101 of the original"),
        ("aa", 60, None),
        ("aa", 61, "ends at offset 60"),
        ("ee", 0, "was deleted and created again"),
    ],
)
def test_position_of_an_origin_is_valid_up_to_the_fork(stream_id: str, offset: int, error: str | None) -> None:
    state = state_of(FINISH)
    command = SetCursor(consumer="c", stream="s", stream_id=stream_id, offset=offset, set_us=1)
    if error is None:
        assert of_present_stream(command, stream(state)) == msgspec.structs.replace(command, stream_id="cc")
        return
    with pytest.raises(NatslogError, match=error):
        of_present_stream(command, stream(state))


def test_an_edit_before_the_stream_is_resumed_lets_no_roll_up_of_imported_messages_take_effect() -> None:
    settings = StreamSettings(subject="s", max_messages_per_subject=5, allow_rollup=True)
    for names, now in (
        (("max_messages_per_subject",), StreamSettings(subject="s")),
        (("allow_rollup",), StreamSettings(subject="s")),
    ):
        state = state_of(FINISH)
        state.streams["s"] = msgspec.structs.replace(stream(state), settings=settings)
        state.apply(EditStream(name="s", settings=now, changed=names))
        assert not any(rule.rolls_up for rule in rules_of(stream(state)))
        state.apply(RESUME)
        assert [rule.rolls_up for rule in rules_of(stream(state))][:-1] == [False] * (len(rules_of(stream(state))) - 1)
