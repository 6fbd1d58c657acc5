"""Where replicas go: on the brokers with the fewest replicas and leaders, racks apart. Deterministic arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from natslog.cluster.metadata import Metadata
from natslog.errors import NotEnoughBrokers
from natslog.model import BrokerId, StreamRecord


class Loads:
    """How many replicas and leaders each broker has, and is to have; what is placed counts at once."""

    def __init__(self, state: Metadata) -> None:
        self._racks = {broker.id: broker.rack for broker in state.brokers.values()}
        self._replicas = Counter(broker for record in state.streams.values() for broker in record.replicas)
        self._leaders = Counter(record.replicas[0] for record in state.streams.values())

    def place(self, replicas: int, usable: Collection[BrokerId]) -> tuple[BrokerId, ...]:
        """Brokers for a new stream, the preferred leader first.

        Raises:
            NotEnoughBrokers: fewer than `replicas` are usable.
        """
        if replicas > len(usable):
            raise NotEnoughBrokers(
                f"{replicas} replicas need as many brokers, and there are {len(usable)}: start more, or ask for fewer "
                "with --replicas",
                brokers=len(usable),
                replicas=replicas,
            )
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
        free = [broker for broker in usable if broker not in wanted]
        if not free:
            raise NotEnoughBrokers(
                f"stream {record.name!r} has {len(wanted)} replicas and no other broker is free to take that of broker "
                f"{leaving}: start another broker first",
                stream=record.name,
                replicas=len(wanted),
            )
        newcomer = self._next(staying, free)
        self._replicas.update({newcomer: 1, leaving: -1})
        return tuple(newcomer if broker == leaving else broker for broker in wanted)

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
