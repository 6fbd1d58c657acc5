"""The replicas of one stream whose sealed segments are damaged by chance, while brokers lose their connections, leave
and join the ISR, and an operator accepts losses. `natslog.cluster.damage` decides; the rest is as thin as it can be.

What must never be:
1. An offset is given up only if every other replica has answered, and none has it.
2. What any replica has is on every replica again, once all of them answer.
3. All replicas end with the same rows, also where losses were accepted.
4. Clients are referred to another replica as long as one may have the offset, and get the exact error otherwise.
"""

from __future__ import annotations

from random import Random

import msgspec

from natslog.cluster.damage import (
    Fetch,
    GiveUp,
    Losses,
    OffsetRange,
    RangeRepair,
    Remedy,
    has_others_in_sync,
    remedy_for,
)
from natslog.errors import BrokerUnavailable, CorruptLog
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, StreamSettings
from tests.sim.raft_checker import Violation, require

ROWS, SEGMENT_ROWS, MOST_ROWS = 24, 6, 3
STEPS = 120
REMOVED = -1
"""In place of the row of an offset whose loss was accepted."""


class SimReplica:
    """`rows`: by offset; None where it is damaged."""

    def __init__(self, me: BrokerId) -> None:
        self.me = me
        self.rows: list[int | None] = list(range(ROWS))
        self.losses = Losses()
        self.known: set[int] = set()  # the damage that was noticed
        self.is_connected = True

    def damage_from(self, start: int, end: int) -> OffsetRange | None:
        """The first damaged range of `[start, end)`."""
        first = next((at for at in range(start, end) if self.rows[at] is None), None)
        if first is None:
            return None
        return first, next((at for at in range(first, end) if self.rows[at] is not None), end)

    def piece(self, start: int, end: int) -> list[int]:
        """A few rows, for another replica."""
        if not self.is_connected:
            raise BrokerUnavailable("no answer")
        damaged = self.damage_from(start, end)
        if damaged is not None and damaged[0] == start:
            raise CorruptLog("damaged here, too", start=start, end=damaged[1])
        rows = self.rows[start : min(end, start + MOST_ROWS)]
        return [row for row in rows[: rows.index(None) if None in rows else None] if row is not None]


class DamageWorld:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        brokers = tuple(BrokerId(one) for one in range(1, self.random.choice((1, 2, 3, 3, 4)) + 1))
        self.record = StreamRecord(
            name="orders",
            id=StreamId("ab" * 16),
            settings=StreamSettings(subject="orders.>"),
            created_us=0,
            leader=brokers[0],
            leader_epoch=Epoch(1),
            replicas=brokers,
            isr=brokers,
            holders=brokers,
        )
        self.replicas = {broker: SimReplica(broker) for broker in brokers}

    def run(self) -> None:
        for _ in range(STEPS):
            replica = self.random.choice(list(self.replicas.values()))
            getattr(
                self, self.random.choice(("damage", "damage", "read", "repair", "connect", "change_isr", "accept"))
            )(replica)
        for replica in self.replicas.values():
            replica.is_connected = True
        for replica in self.replicas.values():
            replica.known = {at for at in range(ROWS) if replica.rows[at] is None}
        self.accept(next(iter(self.replicas.values())))
        for replica in self.replicas.values():
            self.repair(replica)
        found = [replica.rows for replica in self.replicas.values()]
        require(all(rows == found[0] for rows in found), f"replicas differ in the end: {found}")

    # ---- what happens ----

    def damage(self, replica: SimReplica) -> None:
        start = self.random.randrange(ROWS)
        segment_end = (start // SEGMENT_ROWS + 1) * SEGMENT_ROWS
        for at in range(start, min(start + self.random.randint(1, 4), segment_end)):
            replica.rows[at] = None

    def connect(self, replica: SimReplica) -> None:
        replica.is_connected = self.random.random() < 0.6

    def change_isr(self, replica: SimReplica) -> None:
        others = [one for one in self.record.isr if one != replica.me]
        isr = tuple(others) if replica.me in self.record.isr and others else (*others, replica.me)
        self.record = msgspec.structs.replace(self.record, isr=isr)

    def read(self, replica: SimReplica) -> None:
        """A reader finds the damage of one segment."""
        first = self.random.randrange(ROWS // SEGMENT_ROWS) * SEGMENT_ROWS
        damaged = replica.damage_from(first, first + SEGMENT_ROWS)
        if damaged is None:
            return
        error = CorruptLog("a batch is damaged", start=damaged[0], end=damaged[1])
        is_final = replica.losses.is_final(error, others_hold_it=len(self.replicas) > 1)
        others = [one for one in self.replicas.values() if one is not replica]
        has_copy = any(one.rows[at] is not None for one in others for at in range(*damaged))
        was_asked = any(lost[0] < damaged[1] and damaged[0] < lost[1] for lost in replica.losses.ranges)
        require(is_final or bool(others), "a client of the only replica is referred to another one")
        require(not is_final or not others or was_asked, "a client gets damage as final that others may not have")
        if is_final and others and not was_asked:
            require(not has_copy, "another replica has it")
        remedy = remedy_for(error, self.record, is_in_sealed_segment=True)
        require((remedy is Remedy.RANGE) == bool(others), "a replica of several keeps its role, and one alone its log")
        if remedy is Remedy.RANGE:
            replica.known |= set(range(*damaged))

    def repair(self, replica: SimReplica) -> None:
        if has_others_in_sync(self.record, replica.me):
            self._repair(replica, accepts_loss=False)

    def accept(self, _: SimReplica) -> None:
        """An operator accepts what is lost, on one replica after the other; each must answer."""
        for replica in self.replicas.values():
            if replica.is_connected:
                self._repair(replica, accepts_loss=True)

    def _repair(self, replica: SimReplica, *, accepts_loss: bool) -> None:
        others = [one for one in self.replicas.values() if one is not replica]
        for first in range(0, ROWS, SEGMENT_ROWS):
            upto = first + SEGMENT_ROWS
            fixed, lost = list(replica.rows), list[OffsetRange]()
            at = first
            while (damaged := replica.damage_from(at, upto)) is not None:
                if replica.known.isdisjoint(range(*damaged)) and not accepts_loss:
                    break
                repair = RangeRepair(damaged, [one.me for one in others], accepts_loss=accepts_loss)
                self._perform(repair, others, fixed)
                lost += repair.lost
                if repair.without_copy is not None:
                    self._require_lost(others, repair.without_copy)
                    replica.losses.note(repair.without_copy)
                if repair.problem is not None or repair.without_copy is not None:
                    break
                at = damaged[1]
            else:
                replica.rows[first:upto] = fixed[first:upto]
                replica.losses.resolved((first, upto), lost)
                replica.known -= set(range(first, upto))

    def _perform(self, repair: RangeRepair, others: list[SimReplica], rows: list[int | None]) -> None:
        while (step := repair.next_step()) is not None:
            match step:
                case GiveUp(lost=lost):
                    self._require_lost(others, lost)
                    rows[lost[0] : lost[1]] = [REMOVED] * (lost[1] - lost[0])
                    repair.given_up()
                case Fetch(broker=broker, start=start, end=end):
                    try:
                        piece = self.replicas[broker].piece(start, end)
                    except (BrokerUnavailable, CorruptLog) as error:
                        repair.refused(error)
                    else:
                        require(bool(piece), "an answer has a row")
                        rows[start : start + len(piece)] = piece
                        repair.fetched(start + len(piece))

    @staticmethod
    def _require_lost(others: list[SimReplica], lost: OffsetRange) -> None:
        for one in others:
            require(one.is_connected, f"broker {one.me} has not answered, and {lost} is called lost")
            has = [at for at in range(*lost) if one.rows[at] is not None]
            require(not has, f"broker {one.me} has {has}, and {lost} is called lost")


def first_red(seeds: int) -> tuple[int, str] | None:
    """The first seed that fails, and how."""
    for seed in range(seeds):
        try:
            DamageWorld(seed).run()
        except Violation as error:
            return seed, f"{type(error).__name__}: {error}"
    return None
