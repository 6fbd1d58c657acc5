"""Which replicas to move, and which preferred leaders to change, so that brokers have even loads: with as few moves as
that takes. Deterministic arithmetic.

Theory of operation. Replicas first: a broker may have the average number of them, rounded up or down. Those above give
replicas to those below; of the streams that could be moved, the one is chosen that evens out bytes best. No move may
reduce the number of racks that a stream is on, or leave its placement tags. Then bytes: where one broker has much more
than another, a large replica is exchanged for a small one. At last leaders: the preferred leader of a stream is changed
to another of its replicas, along the shortest chain from a broker with too many to one with too few; this copies
nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from natslog.model import BrokerId

_UNEVEN_BYTES = 0.2
"""Two brokers whose bytes differ by less than this share of the average are even enough."""
_WORTH = 0.25
"""An exchange of replicas must reduce the difference by this share of it: each one copies two replicas."""


@dataclass(frozen=True, slots=True)
class Place:
    """A broker that may hold replicas."""

    id: BrokerId
    rack: str = ""
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Placed:
    """A stream. `replicas`: the preferred leader first; where they are being moved, where they will be."""

    name: str
    replicas: tuple[BrokerId, ...]
    size_bytes: int = 0
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Move:
    """A stream, and where its replicas are to be. `copied_bytes`: what has to be copied for it."""

    name: str
    before: tuple[BrokerId, ...]
    after: tuple[BrokerId, ...]
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class Load:
    """What a broker has, in replicas, preferred leaders and bytes."""

    replicas: int = 0
    leaders: int = 0
    size_bytes: int = 0


def rebalanced(places: Sequence[Place], streams: Sequence[Placed]) -> list[Move]:
    """The moves, in the order of the streams. Replicas on brokers that are not in `places` stay where they are."""
    if len(places) < 2:
        return []
    plan = _Plan(places, streams)
    plan.even_out_replicas()
    plan.even_out_bytes()
    plan.even_out_leaders()
    return list(plan.moves())


def loads_of(streams: Sequence[Placed], moves: Sequence[Move] = ()) -> dict[BrokerId, Load]:
    """The load of each broker that has any, after these moves."""
    after = {move.name: move.after for move in moves}
    replicas, leaders, size_bytes = Counter[BrokerId](), Counter[BrokerId](), Counter[BrokerId]()
    for stream in streams:
        brokers = after.get(stream.name, stream.replicas)
        replicas.update(brokers)
        leaders[brokers[0]] += 1
        size_bytes.update(dict.fromkeys(brokers, stream.size_bytes))
    return {broker: Load(replicas[broker], leaders[broker], size_bytes[broker]) for broker in sorted(replicas)}


class _Plan:
    def __init__(self, places: Sequence[Place], streams: Sequence[Placed]) -> None:
        self._places = {place.id: place for place in places}
        self._streams = {stream.name: stream for stream in streams}
        self._now = {stream.name: list(stream.replicas) for stream in streams}
        self._on: dict[BrokerId, list[tuple[int, str]]] = {broker: [] for broker in self._places}  # by size
        self._bytes = dict.fromkeys(self._places, 0)
        for size_bytes, name in sorted((stream.size_bytes, stream.name) for stream in streams):
            for broker in self._now[name]:
                if broker in self._places:
                    self._on[broker].append((size_bytes, name))
                    self._bytes[broker] += size_bytes

    def moves(self) -> Iterator[Move]:
        for name, stream in self._streams.items():
            after = tuple(self._now[name])
            if after != stream.replicas:
                copies = len(set(after) - set(stream.replicas))
                yield Move(name, stream.replicas, after, copies * stream.size_bytes)

    # ---- replicas ----

    def even_out_replicas(self) -> None:
        stuck: set[tuple[BrokerId, BrokerId]] = set()
        while (pair := self._uneven(stuck)) is not None:
            heavy, light = pair
            name = self._best_for(heavy, light)
            if name is None:
                stuck.add(pair)
            else:
                self._move(name, heavy, light)
                stuck = {pair for pair in stuck if not self._frees(name, *pair)}

    def _frees(self, name: str, heavy: BrokerId, light: BrokerId) -> bool:
        """Whether a stream that was moved can now be moved from one to the other: of others, nothing has changed."""
        return heavy in self._now[name] and self._may_move(name, heavy, light)

    def _uneven(self, stuck: set[tuple[BrokerId, BrokerId]]) -> tuple[BrokerId, BrokerId] | None:
        """The pair that differs most, and by more than one replica."""
        count = {broker: len(names) for broker, names in self._on.items()}
        pairs = [
            (count[heavy] - count[light], self._bytes[heavy] - self._bytes[light], -heavy, -light)
            for heavy in count
            for light in count
            if count[heavy] - count[light] > 1 and (heavy, light) not in stuck
        ]
        if not pairs:
            return None
        _, _, heavy, light = max(pairs)
        return BrokerId(-heavy), BrokerId(-light)

    def _best_for(self, heavy: BrokerId, light: BrokerId) -> str | None:
        """The stream whose replica makes the bytes of both brokers most alike."""
        wanted = (self._bytes[heavy] - self._bytes[light]) / 2
        names = _nearest(self._on[heavy], wanted)
        return next((name for name in names if self._may_move(name, heavy, light)), None)

    def _size(self, name: str) -> int:
        return self._streams[name].size_bytes

    def _may_move(self, name: str, leaving: BrokerId, coming: BrokerId) -> bool:
        stream, place, brokers = self._streams[name], self._places[coming], self._now[name]
        if coming in brokers or not stream.tags <= place.tags:
            return False
        after = [coming if broker == leaving else broker for broker in brokers]
        return self._racks(after) >= self._racks(brokers)

    def _racks(self, brokers: Sequence[BrokerId]) -> int:
        """How many racks they are on; brokers without a rack count as one each."""
        racks = [self._places[broker].rack if broker in self._places else "" for broker in brokers]
        return len({rack for rack in racks if rack}) + racks.count("")

    def _move(self, name: str, leaving: BrokerId, coming: BrokerId) -> None:
        self._now[name] = [coming if broker == leaving else broker for broker in self._now[name]]
        entry = self._size(name), name
        del self._on[leaving][bisect_left(self._on[leaving], entry)]
        insort(self._on[coming], entry)
        self._bytes[leaving] -= entry[0]
        self._bytes[coming] += entry[0]

    # ---- bytes ----

    def even_out_bytes(self) -> None:
        average = sum(self._bytes.values()) / len(self._bytes)
        for _ in range(len(self._streams)):
            heavy = max(self._bytes, key=lambda broker: (self._bytes[broker], -broker))
            light = min(self._bytes, key=lambda broker: (self._bytes[broker], broker))
            difference = self._bytes[heavy] - self._bytes[light]
            if difference <= _UNEVEN_BYTES * average or (found := self._exchange(heavy, light, difference)) is None:
                return
            large, small = found
            self._move(large, heavy, light)
            if small is not None:
                self._move(small, light, heavy)

    def _exchange(self, heavy: BrokerId, light: BrokerId, difference: int) -> tuple[str, str | None] | None:
        """A replica of each broker whose exchange makes their bytes most alike; alone, if the numbers stay even."""
        others = [entry for entry in self._on[light] if self._may_move(entry[1], light, heavy)]
        sizes = [size for size, _ in others]
        may_be_alone = len(self._on[heavy]) > len(self._on[light])
        best: tuple[float, str, str | None] | None = None
        for size, name in self._on[heavy]:
            if not self._may_move(name, heavy, light):
                continue
            candidates: list[tuple[int, str | None]] = [(0, None)] if may_be_alone else []
            at = bisect_left(sizes, size - difference / 2)
            candidates += [others[one] for one in (at - 1, at) if 0 <= one < len(others)]
            for other_size, other in candidates:
                left = abs(difference - 2 * (size - other_size))
                if best is None or left < best[0]:
                    best = left, name, other
        if best is None or best[0] > (1 - _WORTH) * difference:
            return None
        return best[1], best[2]

    # ---- leaders ----

    def even_out_leaders(self) -> None:
        while (chain := self._chain()) is not None:
            for name, leader in chain:
                brokers = self._now[name]
                self._now[name] = [leader, *(broker for broker in brokers if broker != leader)]

    def _chain(self) -> list[tuple[str, BrokerId]] | None:
        """Streams with new preferred leaders, which take one from a broker with most and give one to another that has
        at least two less; as few of them as possible. None: there is none.
        """
        led: dict[BrokerId, list[str]] = {broker: [] for broker in self._places}
        for name, brokers in self._now.items():
            if brokers[0] in led:
                led[brokers[0]].append(name)
        for heavy in sorted(led, key=lambda broker: (-len(led[broker]), broker)):
            before: dict[BrokerId, tuple[BrokerId, str]] = {}
            reached = deque([heavy])
            while reached:
                broker = reached.popleft()
                if len(led[broker]) <= len(led[heavy]) - 2:
                    return _back(before, broker, heavy)
                for name in led[broker]:
                    for other in self._now[name][1:]:
                        if other in led and other != heavy and other not in before:
                            before[other] = broker, name
                            reached.append(other)
        return None


def _nearest(entries: Sequence[tuple[int, str]], wanted: float) -> Iterator[str]:
    """The names of (size, name), sorted by size, in the order of how near their sizes are."""
    right = bisect_left(entries, (wanted, ""))
    left = right - 1
    while left >= 0 or right < len(entries):
        is_left = right == len(entries) or (left >= 0 and wanted - entries[left][0] <= entries[right][0] - wanted)
        yield entries[left if is_left else right][1]
        left, right = (left - 1, right) if is_left else (left, right + 1)


def _back(before: dict[BrokerId, tuple[BrokerId, str]], last: BrokerId, first: BrokerId) -> list[tuple[str, BrokerId]]:
    chain = []
    while last != first:
        giver, name = before[last]
        chain.append((name, last))
        last = giver
    return chain
