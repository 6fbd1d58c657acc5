"""Rules of the state machine of a replica that the simulation hardly ever needs. (All others: tests/sim.)"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from natslog.cluster.commands import HoldCompanions, HoldReplicas
from natslog.cluster.epochs import EpochHistory
from natslog.cluster.replica import Replica
from natslog.cluster.replica_steps import Follow, Open, OpenCompanion, Propose
from tests.unit.cluster.test_calm import Around
from tests.unit.cluster.test_roles import record_of

EPOCH, SERIAL = 5, 3


@dataclass
class OpenLog:
    """Ten records, all of them committed."""

    epochs: EpochHistory = field(default_factory=lambda: EpochHistory([(EPOCH, 0)]))
    log_start_offset: int = 0
    log_end_offset: int = 10
    written_end_offset: int = 10
    whole_end_offset: int = 10
    high_watermark: int = 10


def follower(around: Around, *, isr: tuple[int, ...] = (1, 2, 3), unproven: tuple[int, ...] = ()) -> Replica:
    """Broker 2 follows broker 1."""
    record = msgspec.structs.replace(record_of(isr), unproven=unproven, holders=(1, 2, 3))
    replica = Replica(2, record, around, 0.0)
    assert isinstance(replica.next_step(), Open)
    replica.opened(OpenLog())
    assert replica.next_step() is None
    assert replica.take_notices() == [Follow(1)]
    return replica


@pytest.mark.parametrize(
    ("isr", "unproven", "is_registered", "lacks"),
    [
        ((1, 2, 3), (), True, False),
        ((1, 3), (), True, True),
        ((1, 2, 3), (2,), True, True),  # what its last life had not synced is lost
        ((1, 2, 3), (), False, True),  # the record is of its last life
    ],
)
def test_kept_ids_are_taken_over_unless_the_replica_has_had_the_rows(
    isr: tuple[int, ...], unproven: tuple[int, ...], is_registered: bool, lacks: bool
) -> None:
    around = Around()
    replica = follower(around, isr=isr, unproven=unproven)
    around.is_registered = is_registered
    assert replica.lacks_ids(EPOCH, SERIAL) == lacks
    replica.adopted_ids(EPOCH, SERIAL)
    assert not replica.lacks_ids(EPOCH, SERIAL)
    assert replica.lacks_ids(EPOCH, SERIAL + 1) == lacks


def test_no_ids_are_taken_over_of_another_epoch_or_where_the_leader_keeps_none() -> None:
    replica = follower(Around(), isr=(1, 3))
    assert not replica.lacks_ids(EPOCH - 1, SERIAL)
    assert not replica.lacks_ids(EPOCH, 0)


def test_that_the_companion_log_exists_is_proposed_while_the_log_of_messages_is_not_confirmed_yet() -> None:
    record = msgspec.structs.replace(record_of((1, 3)), holders=(1, 3), has_companion=True, companion_holders=(1, 3))
    replica = Replica(2, record, Around(), 0.0)
    assert isinstance(replica.next_step(), Open)
    replica.opened(OpenLog())
    assert [type(one.command) for one in replica.take_notices() if isinstance(one, Propose)] == [HoldReplicas]
    assert isinstance(replica.next_step(), OpenCompanion)
    replica.companion_opened(OpenLog(), 10)
    assert [type(one.command) for one in replica.take_notices() if isinstance(one, Propose)] == [HoldCompanions]
