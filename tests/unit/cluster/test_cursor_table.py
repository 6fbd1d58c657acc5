"""The table of cursors that the rows of `__cursors` give: the newest row counts, and calls are made whole or not."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.cluster import cursor_table as module
from natslog.cluster.commands import (
    CreateStream,
    DeleteStream,
    DropCursor,
    DropMovedCursors,
    SetCursor,
)
from natslog.cluster.cursor_table import Changes, CursorTable
from natslog.cluster.metadata import Metadata
from natslog.cluster.security_commands import EnableSecurity, SetQuota
from natslog.errors import (
    CursorNotFound,
    NotReady,
    StorageQuotaExceeded,
    StreamNotFound,
    StreamRecreated,
    TooManyCursors,
)
from natslog.model import StreamSettings
from natslog.security.records import Quota, TokenRecord


def state_with(*streams: str) -> Metadata:
    state = Metadata(cluster_id="c")
    for name in streams:
        create(state, name, f"id of {name}")
    return state


def create(state: Metadata, name: str, stream_id: str) -> None:
    settings = StreamSettings(subject=name)
    state.apply(CreateStream(name=name, id=stream_id, settings=settings, created_us=1, placement=(1,)))  # type: ignore[arg-type]


def at(offset: int, consumer: str = "report", stream: str = "orders", **changes: str) -> SetCursor:
    fields = {"stream_id": f"id of {stream}"} | changes
    return SetCursor(consumer=consumer, stream=stream, offset=offset, set_us=offset, **fields)  # type: ignore[arg-type]


def made(table: CursorTable, state: Metadata, *calls: tuple[list[SetCursor | DropCursor], str]) -> None:
    """Makes a group of calls, and adopts their rows."""
    changes = Changes(table, state)
    for commands, request in calls:
        changes.add(commands, request)
    table.adopt(changes.rows)


def offsets(table: CursorTable, state: Metadata) -> dict[str, int]:
    return {f"{one.consumer}/{one.stream}": one.offset for one in table.shown(state)}


def test_newest_call_of_a_group_counts_and_rewinds_are_kept() -> None:
    table, state = CursorTable(), state_with("orders")
    made(table, state, ([at(10)], "a"), ([at(30)], "b"), ([at(20)], "c"))
    (found,) = table.shown(state)
    assert (found.offset, found.rewound_from, found.rewound_us) == (20, 30, 20)


def test_nothing_is_shown_before_its_rows_are_adopted() -> None:
    table, state = CursorTable(), state_with("orders")
    changes = Changes(table, state)
    changes.add([at(10)], "a")
    assert not table.shown(state)
    table.adopt(changes.rows)
    assert offsets(table, state) == {"report/orders": 10}


def test_refused_call_leaves_nothing_of_itself_and_the_others_are_made() -> None:
    table, state = CursorTable(), state_with("orders")
    changes = Changes(table, state)
    changes.add([at(1, "first")], "a")
    with pytest.raises(StreamNotFound):
        changes.add([at(2, "second"), at(3, stream="none")], "b")
    with pytest.raises(StreamRecreated, match="offset 4 of the former stream"):
        changes.add([at(4, stream_id="another")], "c")
    with pytest.raises(CursorNotFound):
        changes.add([DropCursor(consumer="second", stream="orders")], "d")
    table.adopt(changes.rows)
    assert offsets(table, state) == {"first/orders": 1}


def test_repeated_request_changes_nothing_also_for_a_later_leader() -> None:
    table, state = CursorTable(), state_with("orders")
    made(table, state, ([at(1)], "a"), ([at(2)], "b"))
    rows = Changes(table, state)
    (found,) = rows.add([at(1)], "a")
    assert (found and found.offset, rows.rows) == (2, [])
    same_group = Changes(table, state)
    same_group.add([at(5)], "c")
    same_group.add([at(5)], "c")
    assert len(same_group.rows) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["orders", "returns"]), st.integers(-1, 9))))
def test_table_of_the_rows_is_the_table_that_appended_them(steps: list[tuple[str, str, int]]) -> None:
    state, table, log = state_with("orders", "returns"), CursorTable(), []
    model: dict[str, int] = {}
    for consumer, stream, offset in steps:
        changes = Changes(table, state)
        if offset >= 0:
            changes.add([at(offset, consumer, stream)], "")
            model[f"{consumer}/{stream}"] = offset
        elif model.pop(f"{consumer}/{stream}", None) is not None:
            changes.add([DropCursor(consumer=consumer, stream=stream)], "")
        log += [(key, msgspec.json.encode(row)) for key, row in changes.rows]
        table.adopt(changes.rows)
    rebuilt, whole = CursorTable(), CursorTable()
    rebuilt.adopt((key, msgspec.json.decode(row, type=module.CursorRow)) for key, row in log)
    whole.adopt(table.whole())
    assert rebuilt.cursors == table.cursors == whole.cursors
    assert offsets(table, state) == model


def test_cursors_of_a_deleted_stream_are_hidden_and_removed() -> None:
    table, state = CursorTable(), state_with("orders", "returns")
    made(table, state, ([at(1), at(2, stream="returns")], "a"))
    state.apply(DeleteStream(name="orders", deleted_us=1))
    create(state, "orders", "another")
    assert offsets(table, state) == {"report/returns": 2}
    with pytest.raises(CursorNotFound):
        Changes(table, state).add([DropCursor(consumer="report", stream="orders")], "b")
    assert [key for key, _ in table.stale(state)] == ["report/orders"]
    table.adopt(table.stale(state))
    assert not table.stale(state)
    made(table, state, ([at(7, stream_id="another")], "c"))
    assert offsets(table, state) == {"report/orders": 7, "report/returns": 2}


def test_number_of_cursors_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CURSORS", 2)
    table, state = CursorTable(), state_with("orders")
    made(table, state, ([at(1, "one")], "a"))
    changes = Changes(table, state)
    changes.add([at(1, "two")], "b")
    with pytest.raises(TooManyCursors):
        changes.add([at(1, "three")], "c")
    changes.add([at(2, "one")], "d")


def test_quota_of_an_owner_holds() -> None:
    table, state = CursorTable(), state_with("orders")
    token = TokenRecord(id="t", identity="root", digest="d" * 64, created_us=1)
    state.apply(EnableSecurity(token=token))
    state.apply(SetQuota(identity="ann", quota=Quota(cursors=1)))
    made(table, state, ([at(1, "one", owner="ann")], "a"))
    with pytest.raises(StorageQuotaExceeded):
        Changes(table, state).add([at(1, "two", owner="ann")], "b")
    made(table, state, ([at(1, "two", owner="bob")], "c"))


def test_commands_about_cursors_that_are_left_in_a_log_change_nothing() -> None:
    """As natslog 0.2.0 may have proposed them while an upgrade from level 1 was finalized."""
    state = state_with("orders")
    version = state.version
    for command in (at(2), DropCursor(consumer="report", stream="orders")):
        with pytest.raises(NotReady, match="repeat the request"):
            state.apply(command)
    assert not state.apply(DropMovedCursors())
    assert state.version == version


def test_position_in_a_stream_that_was_created_again_is_refused() -> None:
    state = state_with("orders")
    with pytest.raises(StreamRecreated, match="deleted and created again.*offset 10 of the former stream"):
        made(CursorTable(), state, ([at(10, stream_id="of before")], "a"))
