"""Where replicas go: on the brokers with the fewest replicas and leaders, racks apart, and only on those that have all
placement tags of the stream. Deterministic arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from natslog.cluster.metadata import Metadata
from natslog.errors import NotEnoughBrokers
from natslog.model import BrokerId, StreamRecord


class Loads:
    """How many replicas and leaders each broker has, and is to have; new placements count at once."""

    def __init__(self, state: Metadata) -> None:
        self._racks = {broker.id: broker.rack for broker in state.brokers.values()}
        self._tags = {broker.id: set(broker.tags) for broker in state.brokers.values()}
        self._replicas, self._leaders = Counter(state.index.replicas), Counter(state.index.leaders)

    def place(self, replicas: int, usable: Collection[BrokerId], tags: tuple[str, ...] = ()) -> tuple[BrokerId, ...]:
        """Brokers for a new stream, the preferred leader first.

        Raises:
            NotEnoughBrokers: fewer than `replicas` are usable, and have the tags.
        """
        usable = self._having(tags, usable)
        if replicas > len(usable):
            raise _not_enough(replicas, len(usable), tags)
        chosen: list[BrokerId] = []
        for _ in range(replicas):
            chosen.append(self._next(chosen, usable))
        leader = min(chosen, key=lambda broker: (self._leaders[broker], chosen.index(broker)))
        placed = (leader, *(broker for broker in chosen if broker != leader))
        self._replicas.update(placed)
        self._leaders[leader] += 1
        return placed

    def replace(self, record: StreamRecord, leaving: BrokerId, usable: Collection[BrokerId]) -> tuple[BrokerId, ...]:
        """The stream's replicas with another broker in place of the one that leaves.

        Raises:
            NotEnoughBrokers: no other broker is free of this stream.
        """
        wanted = record.target or record.replicas
        staying = [broker for broker in wanted if broker != leaving]
        tags = record.settings.placement_tags
        free = [broker for broker in self._having(tags, usable) if broker not in wanted]
        if not free:
            raise NotEnoughBrokers(
                f"stream {record.name!r} has {len(wanted)} replicas and no other broker {_with_tags(tags)}is available "
                f"for the replica of broker {leaving}: start another broker first",
                stream=record.name,
                replicas=len(wanted),
            )
        newcomer = self._next(staying, free)
        self._replicas.update({newcomer: 1, leaving: -1})
        return tuple(newcomer if broker == leaving else broker for broker in wanted)

    def resize(
        self, record: StreamRecord, replicas: int, usable: Collection[BrokerId], tags: tuple[str, ...] | None = None
    ) -> tuple[BrokerId, ...]:
        """Brokers for another number of replicas of the stream. The leader is kept first, then who is in sync; further
        replicas are placed as for a new stream. Brokers without the tags are left.

        Args:
            tags: of the stream after the change; None: as they are.

        Raises:
            NotEnoughBrokers: too few brokers are usable.
        """
        present = record.target or record.replicas
        tags = record.settings.placement_tags if tags is None else tags
        usable = self._having(tags, usable)
        former = [broker for broker in record.replicas if broker not in present and broker in usable]
        keeping = (record.leader, *record.isr)
        staying = self._having(tags, present)
        first = sorted(staying, key=lambda one: keeping.index(one) if one in keeping else len(keeping))
        chosen = [*first, *former][:replicas]
        while len(chosen) < replicas:
            free = [broker for broker in usable if broker not in chosen]
            if not free:
                raise _not_enough(replicas, len({*usable, *chosen}), tags)
            chosen.append(self._next(chosen, free))
        return tuple(sorted(chosen, key=lambda one: present.index(one) if one in present else len(present)))

    def _having(self, tags: tuple[str, ...], brokers: Collection[BrokerId]) -> list[BrokerId]:
        """Those that have all of the tags."""
        return [broker for broker in brokers if self._tags.get(broker, set()) >= set(tags)]

    def _next(self, chosen: list[BrokerId], usable: Collection[BrokerId]) -> BrokerId:
        racks = {self._racks.get(broker, "") for broker in chosen} - {""}
        return min(
            (broker for broker in usable if broker not in chosen),
            key=lambda broker: (
                self._racks.get(broker, "") in racks,
                self._replicas[broker],
                self._leaders[broker],
                broker,
            ),
        )


def _with_tags(tags: tuple[str, ...]) -> str:
    return f"with the placement tags {', '.join(tags)} " if tags else ""


def _not_enough(replicas: int, brokers: int, tags: tuple[str, ...]) -> NotEnoughBrokers:
    return NotEnoughBrokers(
        f"{replicas} replicas require {replicas} brokers {_with_tags(tags)}, but only {brokers} are available: start "
        "more brokers, or use fewer replicas with --replicas".replace(" ,", ","),
        brokers=brokers,
        replicas=replicas,
    )
