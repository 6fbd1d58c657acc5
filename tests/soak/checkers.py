"""What must hold in the end: every acked message once in each place, nothing twice, nothing that was not sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.chaos.history import Published, name_of, value_of

_NAMED = 5


@dataclass(frozen=True, slots=True)
class Count:
    """One place, compared with what was sent.

    Attributes:
        unacked: rows of messages whose ack was not received, which may be stored or not, but at most once.
        lost, twice, strange: how many messages were acked and are not there, are there more than once, were never sent.
    """

    place: str
    acked: int
    rows: int
    unacked: int
    lost: int
    twice: int
    strange: int
    named: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        return not (self.lost or self.twice or self.strange)


def count(place: str, published: Sequence[Published], values: Iterable[bytes], *, up_to_an_end: bool = False) -> Count:
    """Compares values, as they are stored in `place`, with what the publishers know.

    Args:
        up_to_an_end: the query that wrote there ended: what is missing is not counted as lost.
    """
    there = Counter(values)
    sent: set[bytes] = set()
    acked: set[bytes] = set()
    for one in published:
        for number, acked_s in enumerate(one.acked_s):
            value = value_of(one.number, number)
            sent.add(value)
            if acked_s is not None:
                acked.add(value)
    lost = set() if up_to_an_end else acked - there.keys()
    twice = [value for value, times in there.items() if times > 1]
    strange = there.keys() - sent
    named = [f"lost {name_of(value)}" for value in sorted(lost)[:_NAMED]]
    named += [f"{there[value]} times {value[:12]!r}" for value in sorted(twice)[:_NAMED]]
    named += [f"never sent {value[:40]!r}" for value in sorted(strange)[:_NAMED]]
    return Count(
        place,
        acked=len(acked),
        rows=there.total(),
        unacked=len((sent - acked) & there.keys()),
        lost=len(lost),
        twice=len(twice),
        strange=len(strange),
        named=tuple(named),
    )


def gaps(offsets: Sequence[int], end: int) -> str | None:
    """What is wrong with offsets that should be those from 0 to `end`, each once; None where nothing is."""
    if sorted(offsets) == list(range(end)):
        return None
    there = Counter(offsets)
    missing = [offset for offset in range(end) if offset not in there]
    several = [offset for offset, times in there.items() if times > 1]
    beyond = [offset for offset in there if not 0 <= offset < end]
    return (
        f"{len(missing)} offsets missing {missing[:_NAMED]}, {len(several)} several times {several[:_NAMED]}, "
        f"{len(beyond)} beyond {end} {beyond[:_NAMED]}"
    )
