"""What commands share: the client of the global options, output for people and programs, errors."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from natslog.client import ClientOptions, NatslogClient

# Names and subjects are printed as they are, never as markup; a pipe gets a row per line, however long.
out = Console(highlight=False, soft_wrap=True, markup=False, width=None if sys.stdout.isatty() else 1000)
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
NatsUrl = Annotated[
    str, typer.Option("--nats-url", envvar=["NATS_URL", "NATSLOG_NATS_URL"], help="NATS server(s), comma-separated.")
]


@dataclass(slots=True)
class Global:
    """Options before the command."""

    servers: tuple[str, ...] = ()
    options: ClientOptions = field(default_factory=ClientOptions)

    def client(self, patience_s: float = 0.0) -> NatslogClient:
        return NatslogClient(self.servers or None, replace(self.options, patience_s=patience_s))


def global_of(context: typer.Context) -> Global:
    found = context.find_object(Global)
    assert found is not None, "the main callback sets it"
    return found


def position_of(client: NatslogClient, stream: str, text: str) -> int:
    """The offset that `text` means: a number, a time, earliest or latest."""
    if text.isdecimal():
        return int(text)
    if text not in ("earliest", "latest"):
        return client.offset_at(stream, text)[0]
    info = client.position(stream)
    return int(info["log_start_offset" if text == "earliest" else "high_watermark"])


def print_json(body: Any) -> None:
    sys.stdout.write(json.dumps(body, indent=2, default=str) + "\n")


def print_table(columns: list[str], rows: list[list[Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in _RIGHT else "left", overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    out.print(table)


_RIGHT = {"messages", "bytes", "start", "end", "segments", "batches", "offset", "behind", "oldest"}
