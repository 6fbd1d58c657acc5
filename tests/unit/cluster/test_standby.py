"""Which replicas stand by for a leader, from when to when, and who answers requests meanwhile."""

from __future__ import annotations

import msgspec
import pytest

from natslog.cluster.replica_steps import BeginEpoch, StandBy, Subscribe, Unsubscribe
from natslog.cluster.standby import answers_requests, standby_subjects
from natslog.model import StreamRecord
from tests.unit.cluster.test_calm import Around
from tests.unit.cluster.test_replica import follower
from tests.unit.cluster.test_roles import record_of

SUBJECTS = ("orders.>",)


def standby_record(isr: tuple[int, ...] = (1, 2, 3), **changes: object) -> StreamRecord:
    record = msgspec.structs.replace(record_of(isr), holders=(1, 2, 3))
    settings = msgspec.structs.replace(record.settings, subject=SUBJECTS[0], standby=True)
    return msgspec.structs.replace(record, settings=settings, **changes)


def subjects_noted(replica: object) -> list[tuple[str, ...]]:
    return [one.subjects for one in replica.take_notices() if isinstance(one, StandBy)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("record", "stands_by"),
    [
        (standby_record(), True),
        (standby_record((1, 3)), False),
        (standby_record(sealed=True), False),
        (standby_record(import_state="importing"), False),
        (standby_record(name="__activity"), False),
    ],
)
def test_only_in_sync_replicas_of_streams_that_take_messages_stand_by(record: StreamRecord, stands_by: bool) -> None:
    assert standby_subjects(record, 2) == (SUBJECTS if stands_by else ())


def test_the_setting_is_followed_while_the_replica_follows() -> None:
    replica = follower(Around())
    for record, noted in [
        (standby_record(), [SUBJECTS]),
        (standby_record(), []),
        (standby_record((1, 3)), [()]),
        (standby_record(), [SUBJECTS]),
        (msgspec.structs.replace(standby_record(), settings=record_of().settings), [()]),
        (standby_record(), [SUBJECTS]),
        (None, [()]),
    ]:
        replica.changed(record)
        replica.next_step()
        assert subjects_noted(replica) == noted


def test_the_subscription_goes_on_until_that_of_the_leader_takes_it_over() -> None:
    around = Around()
    replica = follower(around)
    replica.changed(standby_record())
    replica.next_step()
    assert subjects_noted(replica) == [SUBJECTS]
    for leader in (None, 2):  # the end of its leader, and its own appointment
        replica.changed(standby_record(leader=leader, leader_epoch=6))
        step = replica.next_step()
        assert subjects_noted(replica) == []
    assert isinstance(step, BeginEpoch)
    replica.done()
    assert replica.next_step() == Subscribe(SUBJECTS)
    replica.done()
    replica.next_step()
    assert (subjects_noted(replica), replica.context.stands_by_for) == ([], ())


def test_a_broker_that_stops_stands_by_no_more() -> None:
    replica = follower(Around())
    replica.changed(standby_record())
    replica.next_step()
    replica.leave()
    replica.next_step()
    assert subjects_noted(replica) == [SUBJECTS, ()]


def test_a_leader_without_a_session_stands_by_until_it_subscribes_again() -> None:
    around = Around()
    replica = follower(around)
    replica.changed(standby_record(leader=2, leader_epoch=6))
    assert isinstance(replica.next_step(), BeginEpoch)
    replica.done()
    assert replica.next_step() == Subscribe(SUBJECTS)
    replica.done()
    assert (replica.next_step(), subjects_noted(replica)) == (None, []), "it did not stand by before"
    around.has_session = False
    assert isinstance(replica.next_step(), Unsubscribe)
    assert subjects_noted(replica) == [], "not before its subscription has ended: nothing is received twice"
    replica.done()
    replica.next_step()
    assert subjects_noted(replica) == [SUBJECTS]
    around.has_session = True
    assert replica.next_step() == Subscribe(SUBJECTS)
    replica.done()
    assert (replica.next_step(), subjects_noted(replica), replica.context.stands_by_for) == (None, [], ())


@pytest.mark.parametrize(
    ("leader", "ended", "answers"),
    [
        (2, (1,), 2),  # which receives requests while it does not take messages
        (1, (), None),
        (1, (3,), None),
        (1, (1,), 2),
        (1, (1, 2), 3),
        (1, (1, 2, 3), None),
        (None, (), 1),
        (None, (1,), 2),
    ],
)
def test_one_follower_answers_requests_while_there_is_no_leader(
    leader: int | None, ended: tuple[int, ...], answers: int | None
) -> None:
    assert answers_requests(standby_record(leader=leader), 2, ended) == answers
