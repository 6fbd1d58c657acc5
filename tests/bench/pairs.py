"""A comparison: both sides in turn, several pairs, medians of each side and of the pairs' ratios."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 170)


def _ratio(one: float, other: float) -> float:
    """Infinite where the other side got nothing done in its time."""
    return one / other if other else math.inf


@dataclass
class Comparison:
    """One line of the table.

    Attributes:
        unit: of both sides' figures. `bar`: the least ratio wanted, or the bound on our own figure where `peer` is "".
        ours, theirs: one figure a pair. `ratios`: how many times better ours is, pair by pair.
        is_bound: `bar` is an upper bound of our figure; there is no peer.
        notes: further figures, by name.
    """

    title: str
    unit: str
    bar: float
    peer: str = ""
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    is_bound: bool = False
    lower_is_better: bool = False
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def ratios(self) -> list[float]:
        pairs = zip(self.ours, self.theirs, strict=True)
        return [_ratio(their, our) if self.lower_is_better else _ratio(our, their) for our, their in pairs]

    @property
    def figure(self) -> float:
        """What is compared with the bar."""
        return statistics.median(self.ours if self.is_bound else self.ratios)

    @property
    def holds(self) -> bool:
        return self.figure <= self.bar if self.is_bound else self.figure >= self.bar

    def as_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "unit": self.unit,
            "peer": self.peer,
            "bar": self.bar,
            "figure": self.figure,
            "holds": self.holds,
            "ours": self.ours,
            "theirs": self.theirs,
            "notes": self.notes,
        }


def compare(
    title: str,
    unit: str,
    bar: float,
    *,
    ours: Callable[[], float],
    peer: str,
    theirs: Callable[[], float],
    pairs: int,
    lower_is_better: bool = False,
) -> Comparison:
    """Runs both sides `pairs` times, the first one changing each time."""
    found = Comparison(title, unit, bar, peer, lower_is_better=lower_is_better)
    for number in range(pairs):
        sides = [(found.ours, ours), (found.theirs, theirs)]
        for side, run in sides if number % 2 == 0 else reversed(sides):
            side.append(run())
        figures = f"ours {found.ours[-1]:,.2f}, theirs {found.theirs[-1]:,.2f} {unit}"
        console.print(f"  {title}: pair {number + 1} of {pairs}: {figures}")
    return found
