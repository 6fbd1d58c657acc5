"""Events of applied commands: the same numbers on every broker, and bounded."""

from __future__ import annotations

import pytest

from natslog.cluster.commands import CreateStream, PauseStream, Proposal
from natslog.cluster.metadata import Metadata
from natslog.model import StreamSettings
from natslog.node.metadata import changes as module
from natslog.node.metadata.changes import RecentChanges


def create(name: str) -> Proposal:
    settings = StreamSettings(subject="orders.>")
    return Proposal(
        id=name,
        command=CreateStream(name=name, id=f"id-{name}", settings=settings, created_us=1, placement=(1,)),  # type: ignore[arg-type]
    )


def test_two_brokers_number_the_same_events_equally() -> None:
    brokers = [RecentChanges(), RecentChanges()]
    for changes in brokers:
        state = Metadata(cluster_id="c", feature_level=2)
        for index, name in enumerate(["a", "b"], start=7):
            changes.decide(state, index, create(name))  # type: ignore[arg-type]
    first, second = ([(number, event.id, event.stream) for number, event in one.after(0)] for one in brokers)
    assert first == second
    assert [event_id for _, event_id, _ in first] == ["m7.0", "m8.0"]


def test_repeated_proposal_is_one_event() -> None:
    changes, state = RecentChanges(), Metadata(cluster_id="c", feature_level=2)
    assert changes.decide(state, 1, create("a")).changed  # type: ignore[arg-type]
    assert changes.decide(state, 2, create("a")).changed  # type: ignore[arg-type]
    assert len(changes.after(0)) == 1


def test_refused_proposal_is_no_event() -> None:
    changes, state = RecentChanges(), Metadata(cluster_id="c", feature_level=2)
    outcome = changes.decide(state, 1, Proposal(id="1", command=PauseStream(name="none", paused=True)))  # type: ignore[arg-type]
    assert outcome.error is not None
    assert not changes.after(0)


def test_oldest_events_are_dropped_and_counted_where_this_broker_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 2)
    changes, state = RecentChanges(), Metadata(cluster_id="c", feature_level=2)
    for index in range(1, 4):
        changes.decide(state, index, create(str(index)))  # type: ignore[arg-type]
    assert (len(changes.after(0)), changes.dropped) == (2, 0)
    changes.is_reporting = True
    changes.decide(state, 4, create("4"))  # type: ignore[arg-type]
    assert [event.stream for _, event in changes.after(0)] == ["3", "4"]
    assert changes.dropped == 1


def test_stored_events_are_forgotten() -> None:
    changes, state = RecentChanges(), Metadata(cluster_id="c", feature_level=2)
    for index in range(1, 4):
        changes.decide(state, index, create(str(index)))  # type: ignore[arg-type]
    first, *rest = changes.after(0)
    changes.forget(first[0])
    assert changes.after(0) == rest
