"""A comparison: both sides in turn, several pairs, medians of each side and of the pairs' ratios."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 170)


def _ratio(one: float, other: float) -> float:
    """Infinite where the other side got nothing done in its time."""
    return one / other if other else math.inf


class Measured(NamedTuple):
    """One run of a side: its rate, and the processor time in µs that all processes together took for a row."""

    rate: float
    cpu_us: float


@dataclass
class Comparison:
    """One line of the table.

    Attributes:
        unit: of both sides' figures. `bar`: the least ratio wanted, or the bound on our own figure where `peer` is "".
            0 for a line without a bar, unless `is_bound`.
        ours, theirs: one figure a pair. `ratios`: how many times better ours is, pair by pair.
        is_bound: `bar` is an upper bound of our figure; there is no peer. quantile: which of our figures is compared
            with it; the median unless stated.
        our_cpu_us, their_cpu_us: processor time of all processes together for a row, one figure a pair, or empty.
        alternative: another line; this one also holds where that one does.
        notes: further figures, by name.
    """

    title: str
    unit: str
    bar: float
    peer: str = ""
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    is_bound: bool = False
    quantile: float = 0.5
    lower_is_better: bool = False
    notes: dict[str, Any] = field(default_factory=dict)
    our_cpu_us: list[float] = field(default_factory=list)
    their_cpu_us: list[float] = field(default_factory=list)
    alternative: Comparison | None = None

    @property
    def ratios(self) -> list[float]:
        pairs = zip(self.ours, self.theirs, strict=True)
        return [_ratio(their, our) if self.lower_is_better else _ratio(our, their) for our, their in pairs]

    @property
    def figure(self) -> float:
        """What is compared with the bar."""
        return float(np.quantile(self.ours, self.quantile)) if self.is_bound else statistics.median(self.ratios)

    @property
    def has_bar(self) -> bool:
        return self.is_bound or self.bar > 0

    @property
    def holds(self) -> bool:
        reached = self.figure <= self.bar if self.is_bound else self.figure >= self.bar
        return reached or (self.alternative is not None and self.alternative.holds)

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
            "our_cpu_us": self.our_cpu_us,
            "their_cpu_us": self.their_cpu_us,
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


def in_turn(title: str, sides: dict[str, Callable[[], Measured]], rounds: int) -> dict[str, list[Measured]]:
    """Runs all sides, by name, `rounds` times; every other time in the reverse order."""
    found: dict[str, list[Measured]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            found[name].append(sides[name]())
        figures = "; ".join(f"{name} {runs[-1].rate:,.0f} ({runs[-1].cpu_us:.2f} µs)" for name, runs in found.items())
        console.print(f"  {title}: round {number + 1} of {rounds}: {figures}")
    return found


def against(title: str, unit: str, bar: float, ours: list[Measured], peer: str, theirs: list[Measured]) -> Comparison:
    """Two sides of what `in_turn` measured."""
    found = Comparison(title, unit, bar, peer, [run.rate for run in ours], [run.rate for run in theirs])
    found.our_cpu_us, found.their_cpu_us = [run.cpu_us for run in ours], [run.cpu_us for run in theirs]
    return found


def processor_times(title: str, bar: float, ours: list[Measured], peer: str, theirs: list[Measured]) -> Comparison:
    """The same, of their processor times."""
    our_us, their_us = [run.cpu_us for run in ours], [run.cpu_us for run in theirs]
    return Comparison(f"{title}: processor time", "µs/row", bar, peer, our_us, their_us, lower_is_better=True)
