"""The plots at the end of `make demo`, of measurements that are given."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.spark.jobs_as_modules import demo_plot

START_S = 1_800_000_000.0  # 08:00:00 UTC


def plot(seconds: float, values: list[float | None]) -> demo_plot.Plot:
    """Messages at equal distances; the first second has an alert."""
    points = [
        demo_plot.Point(at, START_S + at * seconds / len(values), "cpu", value) for at, value in enumerate(values)
    ]
    return demo_plot.Plot(points, [demo_plot.Window(START_S, START_S + 1)], "percent", 90.0)


def printed(plot: demo_plot.Plot, has_blocks: bool = True) -> list[list[str]]:
    """Words of each row, with the header."""
    shown = io.StringIO()
    Console(file=shown, width=80).print(demo_plot.bars(plot, has_blocks))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    return [line.split() for line in lines]


def test_bars_are_as_long_as_the_means_of_equal_times() -> None:
    _, *rows = printed(plot(24.0, [10.0, 30.0] * 12 + [40.0, 40.0] * 12))
    assert len(rows) == demo_plot.BARS
    assert sum(int(row[1]) for row in rows) == 48
    assert rows[0][0] == "08:00:00"
    assert rows[0][2:] == ["█" * 12, "20.0", "30.0", "0", "alert"]
    assert rows[-1][0] == "08:00:22"
    assert rows[-1][2:] == ["█" * 24, "40.0", "40.0", "0"]


def test_what_is_recorded_at_once_is_shown_by_offset_and_without_blocks_if_the_terminal_has_none() -> None:
    _, *rows = printed(plot(0.5, [float(at) for at in range(100)]), has_blocks=False)
    assert [row[1] for row in rows][:2] == ["0", "9"]
    assert {row[0] for row in rows} == {"offset"}
    assert rows[-1][3] == "#" * 24
    assert sum(int(row[-1]) for row in rows) == 10, "measurements from the threshold on"


@pytest.mark.parametrize("values", [[None], [0.0], [-5.0, -1.0], [None, 7.0]])
def test_few_and_odd_values_have_rows_too(values: list[float | None], tmp_path: Path) -> None:
    given = plot(0.1, values)
    _, *rows = printed(given)
    assert sum(int(row[2]) for row in rows) == len(values)
    demo_plot.draw(given, tmp_path / "odd.svg")


def test_image_has_the_sources_the_threshold_and_the_rate(tmp_path: Path) -> None:
    demo_plot.draw(plot(24.0, [10.0, 95.0] * 24), tmp_path / "image.svg")
    text = (tmp_path / "image.svg").read_text()
    assert all(f"<!-- {label} -->" in text for label in ("cpu", "threshold 90", "window with an alert", "messages/s"))
