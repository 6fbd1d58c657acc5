"""Events of one broker: bounded, counted, and each change of its state once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from natslog.node.internal import activity as module
from natslog.node.internal.activity import ActivityStream
from natslog.node.metadata.changes import RecentChanges


class Stage:
    """A broker with an activity stream that is never delivered."""

    def __init__(self, cluster_id: str = "c") -> None:
        incarnation = SimpleNamespace(incarnation="d2.1.n")
        self.sessions: set[int] | None = {2}
        self.around = SimpleNamespace(has_room=True)
        group = SimpleNamespace(changes=RecentChanges(), disk=SimpleNamespace(free_bytes=5))
        cluster: Any = SimpleNamespace(
            me=1,
            group=group,
            state=SimpleNamespace(cluster_id=cluster_id, brokers={2: incarnation}),
            leading=SimpleNamespace(sessions=lambda: self.sessions),
        )
        hosting: Any = SimpleNamespace(around=self.around, streams={})
        keeper: Any = None
        self.activity = ActivityStream(cluster, hosting, keeper, directory="d1", life=lambda: 3)

    def kinds(self) -> list[str]:
        return [event.event.removeprefix("activity.") for _, event in self.activity._waiting]


def test_events_are_numbered_upwards_across_starts() -> None:
    stage = Stage()
    stage.activity.report_replica("activity.replica.damaged", "orders", "id", "bit flip")
    stage.activity.report_replica("activity.replica.repaired", "orders", "id", "")
    numbers = [number for number, _ in stage.activity._waiting]
    assert 3 << 32 < numbers[0] < numbers[1] < 4 << 32
    (_, event), _ = stage.activity._waiting
    assert (event.stream, event.broker, event.message, event.key) == ("orders", 1, "bit flip", "orders")


def test_oldest_events_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 2)
    stage = Stage()
    for at in range(3):
        stage.activity.report("activity.broker.disk_low", broker=at)
    assert [event.broker for _, event in stage.activity._waiting] == [1, 2]
    assert (stage.activity.waiting, stage.activity.dropped) == (2, 1)


def test_nothing_is_reported_before_the_broker_belongs_to_a_cluster() -> None:
    stage = Stage(cluster_id="")
    stage.activity.report("activity.broker.disk_low", broker=1)
    assert stage.kinds() == []


def test_disk_is_reported_when_it_changes() -> None:
    stage = Stage()
    for has_room in (True, False, False, True, True):
        stage.around.has_room = has_room
        stage.activity._note_room()
    assert stage.kinds() == ["broker.disk_low", "broker.disk_writable"]


def test_session_is_reported_when_it_ends_and_when_it_returns() -> None:
    stage = Stage()
    for sessions in ({2}, set(), set(), {2}, {2}):
        stage.sessions = sessions
        stage.activity._note_sessions()
    assert stage.kinds() == ["broker.stopped", "broker.returned"]
    assert stage.activity._waiting[0][1].id == "stopped-d2.1.n"


def test_session_that_returns_with_another_life_is_a_start_and_no_return() -> None:
    stage = Stage()
    stage.sessions = set()
    stage.activity._note_sessions()
    stage.activity._cluster.state.brokers[2] = SimpleNamespace(incarnation="d2.2.m")  # type: ignore[index, assignment]
    stage.sessions = {2}
    stage.activity._note_sessions()
    assert stage.kinds() == ["broker.stopped"]


def test_rows_of_one_request_are_bounded() -> None:
    stage = Stage()
    for at in range(5):
        stage.activity.report("activity.broker.disk_low", broker=at, message="x" * 400_000)
    rows = module._rows_of(list(stage.activity._waiting))
    assert [row.key for row in rows] == ["0", "1"]


def test_other_broker_is_refused_where_the_stream_is_not_here() -> None:
    with pytest.raises(Exception, match="is not on this broker"):
        asyncio.run(Stage().activity.on_this_broker("metadata", []))
