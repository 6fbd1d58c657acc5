"""Cursors in the metadata: bounded, tied to the stream's id, and never in the way of other changes' retries."""

from __future__ import annotations

import copy

import msgspec
import pytest

from natslog.cluster.commands import CreateStream, DeleteStream, DropCursor, PauseStream, Proposal, SetCursor
from natslog.cluster.cursors import MAX_CURSORS
from natslog.cluster.metadata import Metadata
from natslog.errors import CursorNotFound, NatslogError, StreamNotFound, StreamRecreated, TooManyCursors
from natslog.model import StreamSettings


def state_with(*streams: str) -> Metadata:
    state = Metadata(cluster_id="c")
    for name in streams:
        create(state, name, f"id of {name}")
    return state


def create(state: Metadata, name: str, stream_id: str) -> None:
    wanted = StreamSettings(subject=name)
    state.apply(CreateStream(name=name, id=stream_id, settings=wanted, created_us=1, placement=(1,)))


def at(offset: int, *, stream: str = "orders", consumer: str = "report", set_us: int = 5, **changes: str) -> SetCursor:
    stream_id = changes.get("stream_id", f"id of {stream}")
    return SetCursor(consumer=consumer, stream=stream, stream_id=stream_id, offset=offset, set_us=set_us)


def test_cursor_is_set_moved_back_visibly_and_dropped() -> None:
    state = state_with("orders")
    assert state.apply(at(10))
    assert not state.apply(at(10)), "the same again changes nothing"
    assert state.apply(at(90, set_us=6))
    found = state.cursor("report", "orders")
    assert (found.offset, found.set_us, found.rewound_from) == (90, 6, None)
    assert state.apply(at(20, set_us=7))
    assert state.apply(at(30, set_us=8))
    found = state.cursor("report", "orders")
    assert (found.offset, found.rewound_from, found.rewound_us) == (30, 90, 7), "remembered while it goes on"
    assert state.apply(DropCursor(consumer="report", stream="orders"))
    with pytest.raises(CursorNotFound, match="'report' has no cursor on stream 'orders'"):
        state.cursor("report", "orders")


def test_cursors_go_with_their_stream_and_only_they() -> None:
    state = state_with("orders", "returns")
    for stream in ("orders", "returns"):
        state.apply(at(10, stream=stream))
    state.apply(DeleteStream(name="orders", deleted_us=2))
    assert [cursor.stream for cursor in state.cursors.values()] == ["returns"]
    with pytest.raises(StreamNotFound):
        state.cursor("report", "orders")
    create(state, "orders", "another id")
    with pytest.raises(StreamRecreated, match="deleted and created again.*offset 10 of the former stream"):
        state.apply(at(10))
    with pytest.raises(CursorNotFound):
        state.cursor("report", "orders")


REFUSED = [
    (at(1, stream="nosuch"), StreamNotFound),
    (at(1, stream_id="other"), StreamRecreated),
    (at(1, consumer="one too many"), TooManyCursors),
    (DropCursor(consumer="nobody", stream="orders"), CursorNotFound),
    (DropCursor(consumer="report", stream="nosuch"), StreamNotFound),
]


@pytest.mark.parametrize(("command", "expected"), REFUSED)
def test_refused_command_changes_nothing(command: SetCursor | DropCursor, expected: type[NatslogError]) -> None:
    state = state_with("orders")
    for number in range(MAX_CURSORS):
        state.apply(at(number, consumer=f"consumer{number}"))
    before = copy.deepcopy(state)
    with pytest.raises(expected):
        state.apply(command)
    assert state == before
    assert state.apply(at(77, consumer="consumer0")), "those that are there may still be moved"


def test_retry_is_applied_once_and_does_not_push_out_what_became_of_other_changes() -> None:
    state = state_with("orders")
    pause = Proposal(id="pause", command=PauseStream(name="orders", paused=True))
    assert state.decide(pause).changed
    first = Proposal(id="first", command=at(10))
    assert state.decide(first).changed
    assert state.decide(Proposal(id="second", command=at(20))).changed
    state.decide(first)
    assert state.cursor("report", "orders").offset == 20, "a late copy does not move it back"
    for number in range(3000):
        state.decide(Proposal(id=f"set {number}", command=at(number)))
    assert state.outcome_of("pause") == state.decide(pause)
    assert state.outcome_of("first") is None
    assert len(msgspec.msgpack.encode(state)) < 200_000


def test_state_survives_its_serialised_form() -> None:
    state = state_with("orders")
    state.decide(Proposal(id="a", command=at(10)))
    state.decide(Proposal(id="b", command=at(4)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=Metadata) == state
    for command in (at(1), DropCursor(consumer="report", stream="orders")):
        proposal = Proposal(id="x", command=command)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(proposal), type=Proposal) == proposal
