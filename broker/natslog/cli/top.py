"""`natslog top`: the cluster and its busiest streams, live in the terminal."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from natslog.cli.common import global_of
from natslog.cli.output import is_terminal, out, print_json, table_of
from natslog.errors import InvalidRequest, NatslogError
from natslog.units import format_size, parse_duration_s

_COLUMNS = {
    "rate": "messages_per_s",
    "bytes": "bytes_per_s",
    "messages": "messages",
    "size": "bytes",
    "name": "name",
}
_LEAST_INTERVAL_S = 0.5


def top(
    context: typer.Context,
    sort: Annotated[
        str,
        typer.Option("--sort", help=f"Sort the streams by {', '.join(_COLUMNS)}: numbers descending."),
    ] = "rate",
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many streams are shown.")] = 20,
    interval: Annotated[str, typer.Option("--interval", help="Time between two tables.")] = "2s",
    once: Annotated[
        bool, typer.Option("--once", help="Print one table and exit. This is the default without a terminal.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, as GET /v1/overview, and exit.")
    ] = False,
) -> None:
    """Show what is wrong, each broker, and the busiest streams, until Ctrl-C."""
    if sort not in _COLUMNS:
        raise InvalidRequest(f"--sort {sort!r} must be one of {', '.join(_COLUMNS)}")
    interval_s = max(_LEAST_INTERVAL_S, parse_duration_s(interval, "--interval"))
    client = global_of(context).client()
    found = client.overview()
    if as_json:
        print_json(found)
        return
    if once or not is_terminal(sys.stdout):
        out.print(_shown(found, _COLUMNS[sort], lines))
        return
    with Live(_shown(found, _COLUMNS[sort], lines), console=out, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                found, problem = client.overview(), ""
            except NatslogError as error:
                problem = error.message
            live.update(_shown(found, _COLUMNS[sort], lines, problem), refresh=True)


def _shown(overview: dict[str, Any], column: str, lines: int, problem: str = "") -> RenderableType:
    cluster, broker_stats = overview["cluster"], overview["broker_stats"]
    alive = sum(one["alive"] for one in cluster["brokers"])
    rate, stored = (sum(one[name] for one in broker_stats) for name in ("messages_per_s", "stored_bytes_per_s"))
    head = (
        f"natslog {cluster['version']}, {alive} of {len(cluster['brokers'])} brokers, {cluster['streams']} streams, "
        f"{rate:,.0f} messages/s, {format_size(int(stored))}/s, as of {overview['at'][11:19]} UTC"
    )
    parts: list[RenderableType] = [Text(head)]
    if problem:
        parts.append(Text(f"no answer now, this is older: {out.shown(problem)}", style="red"))
    for one in overview["findings"]:
        style = "red" if one["level"] == "error" else "yellow"
        parts.append(
            Text(f"{one['level']}, {out.shown(one['where'])}: {out.shown(one['what'])} {one['remedy']}", style=style)
        )
    return Group(*parts, _brokers(overview), _streams(overview["streams"], column, lines))


def _brokers(overview: dict[str, Any]) -> Table:
    columns = ["broker", "role", "messages/s", "sent/s", "commit", "stored", "free disk", "memory", "processor"]
    stats_of = {one["id"]: one for one in overview["broker_stats"]}
    leader = overview["cluster"]["metadata_leader"]
    return table_of(
        columns,
        [
            [broker["id"], _role(broker, leader), *_values(stats_of.get(broker["id"]), len(columns) - 2)]
            for broker in overview["cluster"]["brokers"]
        ],
    )


def _role(broker: dict[str, Any], leader: int | None) -> str:
    if not broker["alive"]:
        return "DOWN"
    return "metadata leader" if broker["id"] == leader else str(broker["role"])


def _values(stats: dict[str, Any] | None, count: int) -> list[str | None]:
    if stats is None:
        return [None] * count
    return [
        f"{stats['messages_per_s']:,.0f}",
        _size(stats["sent_bytes_per_s"]),
        f"{stats['commit_ms']:.1f} ms" if stats["commit_ms"] else "-",
        _size(stats["store_bytes"]),
        _size(stats["disk_free_bytes"]),
        _size(stats["memory_bytes"]),
        f"{100 * stats['cpu_share']:.0f} %",
    ]


def _streams(columns: dict[str, list[Any]], by: str, lines: int) -> Table:
    rows = [{name: values[at] for name, values in columns.items()} for at in range(len(columns["name"]))]
    rows.sort(key=lambda row: row["name"])
    if by != "name":
        rows.sort(key=lambda row: row[by] or 0, reverse=True)
    return table_of(
        ["stream", "messages/s", "bytes/s", "messages", "size", "in sync", "leader"],
        [
            [
                row["name"],
                _number(row["messages_per_s"]),
                _size(row["bytes_per_s"]),
                _number(row["messages"]),
                _size(row["bytes"]),
                f"{row['in_sync']} of {row['replicas']}",
                row["leader"] or "none",
            ]
            for row in rows[:lines]
        ],
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _size(value: float | None) -> str:
    return "-" if value is None else format_size(int(value))
