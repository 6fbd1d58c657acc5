"""What the demo has recorded, as a plot: bars in the terminal, and an image.

Both show the measurement that Spark watched, with its threshold and the windows that became alerts, and how many
messages were recorded. They are made of what the streams hold: at most the newest `MOST_MESSAGES` of them.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from fields import as_number
from rich.console import Console
from rich.table import Table
from rich.text import Text

from natslog.client import NatslogClient

MOST_MESSAGES = 100_000
BARS = 12
BAR_CELLS = 24
_SHORT_S = 3.0  # what was recorded in less time is shown by offset
_SHOWN_SOURCES = 6
_NUMBERS = ("messages", "mean", "highest", "reached")
_SECOND = 1 / 86_400  # of the axis, which counts days


@dataclass(frozen=True, slots=True)
class Point:
    """A message: when it was recorded (seconds since 1970), and what it measured, where it has the field."""

    offset: int
    time_s: float
    source: str
    value: float | None


@dataclass(frozen=True, slots=True)
class Window:
    """Of an alert: seconds since 1970."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Plot:
    """Args: `points`: at least one, by offset. `field`: what is measured."""

    points: Sequence[Point]
    windows: Sequence[Window]
    field: str
    threshold: float

    @property
    def is_by_time(self) -> bool:
        """Else by offset: all was recorded at once, and one window has all of it."""
        return self.points[-1].time_s - self.points[0].time_s >= _SHORT_S


def points_of(client: NatslogClient, stream: str, prefix: str, field: str, group_field: str | None) -> list[Point]:
    """The newest messages of a stream. The source is the value of `group_field`, or else the subject.

    Args:
        prefix: messages on other subjects count as such, but not as measurements.
    """
    start = max(0, int(client.position(stream)["high_watermark"]) - MOST_MESSAGES)
    found: list[Point] = []
    for batch in client.read(stream, start=start, columns=["offset", "timestamp", "subject", "value"]):
        times_us = batch["timestamp"].cast(pa.int64()).to_pylist()
        rows = zip(batch["offset"].to_pylist(), times_us, batch["subject"].to_pylist(), batch["value"], strict=True)
        for offset, time_us, subject, value in rows:
            facts = json.loads(value.as_py())
            source = subject if group_field is None else str(facts.get(group_field))
            measured = as_number(facts.get(field)) if subject.startswith(prefix) else None
            found.append(Point(offset, time_us / 1e6, source, measured))
    return found


def windows_of(alerts: Sequence[Mapping[str, Any]]) -> list[Window]:
    """Of alerts as `detect_and_publish.py` publishes them."""
    return [Window(_seconds(alert["window_start"]), _seconds(alert["window_end"])) for alert in alerts]


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# ---- in the terminal ----


@dataclass(frozen=True, slots=True)
class Part:
    """Messages that were recorded one after another, and what they measured."""

    title: str
    messages: int
    values: Sequence[float]
    has_alert: bool  # not where all parts are in one window


def parts_of(plot: Plot) -> list[Part]:
    """At most `BARS` of them: equal lengths of time, or, where all is recorded at once, equal numbers of messages."""
    first, last = plot.points[0], plot.points[-1]
    start, end = (first.time_s, last.time_s) if plot.is_by_time else (first.offset, last.offset)
    width = max((end - start) / BARS, 1.0)
    parts: defaultdict[int, list[Point]] = defaultdict(list)
    for point in plot.points:
        at = point.time_s if plot.is_by_time else point.offset
        parts[min(int((at - start) / width), BARS - 1)].append(point)
    return [_part(plot, found) for _, found in sorted(parts.items())]


def _part(plot: Plot, points: Sequence[Point]) -> Part:
    first, last = points[0], points[-1]
    moment = datetime.fromtimestamp(first.time_s, UTC)
    return Part(
        f"{moment:%H:%M:%S}" if plot.is_by_time else f"offset {first.offset}",
        len(points),
        [point.value for point in points if point.value is not None],
        plot.is_by_time and any(one.start_s <= last.time_s and first.time_s < one.end_s for one in plot.windows),
    )


def bars(plot: Plot, has_blocks: bool) -> Table:
    """A row for each part, which fits 80 columns. `has_blocks`: the terminal can show block characters."""
    parts = parts_of(plot)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("from", "messages", f"mean {plot.field}", "mean", "highest", "reached", ""):
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    means = [sum(part.values) / len(part.values) for part in parts if part.values]
    low, high = min([0.0, *means]), max([0.0, *means])
    for part in parts:
        mean = sum(part.values) / len(part.values) if part.values else low
        cells = round(BAR_CELLS * (mean - low) / (high - low)) if high > low else 0
        bar = Text(("█" if has_blocks else "#") * cells, "red" if part.has_alert else "cyan")
        reached = sum(value >= plot.threshold for value in part.values)
        numbers = (f"{mean:.1f}", f"{max(part.values):.1f}", str(reached)) if part.values else ("", "", "")
        table.add_row(part.title, str(part.messages), bar, *numbers, "alert" if part.has_alert else "")
    return table


def can_show_blocks(out: Console) -> bool:
    return out.encoding.lower().startswith("utf")


# ---- as an image ----


def draw(plot: Plot, path: Path) -> None:
    """Writes the image: PNG, SVG or PDF, by the name. Raises OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    if plot.is_by_time:
        above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
        _draw_rates(plot, below)
    else:
        above = figure.subplots()
        above.set_xlabel("offset in the stream")
    for source, points in _by_source(plot.points):
        places = [_moment(one.time_s) if plot.is_by_time else one.offset for one in points]
        style = ".-" if plot.is_by_time else "."
        above.plot(places, [one.value for one in points], style, label=source, lw=0.8, ms=4)
    above.axhline(plot.threshold, color="red", lw=1, label=f"threshold {plot.threshold:g}")
    for at, window in enumerate(plot.windows if plot.is_by_time else ()):
        label = "window with an alert" if at == 0 else None
        above.axvspan(_moment(window.start_s), _moment(window.end_s), color="red", alpha=0.08, lw=0, label=label)
    above.set_ylabel(plot.field)
    above.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)


def _draw_rates(plot: Plot, axes: Any) -> None:
    rates = Counter(int(point.time_s) for point in plot.points)
    axes.bar([_moment(second) for second in rates], [*rates.values()], 0.9 * _SECOND, align="edge", color="tab:gray")
    axes.set_ylabel("messages/s")
    axes.set_xlabel("time at which natslog recorded the message, UTC")


def _by_source(points: Sequence[Point]) -> Iterator[tuple[str, list[Point]]]:
    """The sources with the most measurements."""
    found: defaultdict[str, list[Point]] = defaultdict(list)
    for point in points:
        if point.value is not None:
            found[point.source].append(point)
    yield from sorted(found.items(), key=lambda item: -len(item[1]))[:_SHOWN_SOURCES]


def _moment(time_s: float) -> datetime:
    return datetime.fromtimestamp(time_s, UTC)
