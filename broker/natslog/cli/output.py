"""Output for people and programs: text, tables and JSON, without what could control a terminal."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from natslog.errors import InvalidRequest


def is_terminal(stream: Any) -> bool:
    """Whether standard input or output is a terminal; a closed one (None) is not."""
    return stream is not None and bool(stream.isatty())


_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
"""All but tab and line feed; characters without width, and those that change the direction of text, too."""


def escaped(text: str, *, as_json: bool = False) -> str:
    """With control characters as hexadecimal: no text of others may control the terminal, or look like another one.

    Args:
        as_json: the text is JSON, and remains so.
    """
    return _CONTROLS.sub(lambda found: json.dumps(found[0])[1:-1] if as_json else _shown(ord(found[0])), text)


def _shown(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class _Console(Console):
    """On a terminal, control characters are escaped: names, subjects and errors come from brokers and their clients."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*map(self.shown, objects), **options)

    def shown(self, one: Any) -> Any:
        return escaped(one) if self.is_terminal and isinstance(one, str) else one


# Names and subjects are never printed as markup. In a pipe they are unchanged, and each row is one line of any length.
out = _Console(highlight=False, soft_wrap=True, markup=False, width=None if is_terminal(sys.stdout) else 1000)
err = _Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


def check_formats(*, as_json: bool, as_arrow: bool) -> None:
    """Raises InvalidRequest: both, or Arrow for a terminal."""
    if as_json and as_arrow:
        raise InvalidRequest("--json and --arrow cannot be combined")
    if as_arrow and is_terminal(sys.stdout):
        raise InvalidRequest(
            "--arrow writes binary data, which a terminal cannot show: redirect it to a file or a pipe"
        )


def print_json(body: Any) -> None:
    """Of JSON values, or of structs of msgspec."""
    if not isinstance(body, dict | list):
        import msgspec

        body = msgspec.to_builtins(body)
    sys.stdout.write(json.dumps(body, indent=2, default=str) + "\n")


def print_table(columns: list[str], rows: list[list[Any]]) -> None:
    out.print(table_of(columns, rows))


def table_of(columns: list[str], rows: list[list[Any]]) -> Table:
    """Columns of numbers are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(out.shown(column), justify="right" if column in _RIGHT else "left", overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else out.shown(str(cell)) for cell in row))
    return table


_RIGHT = {"messages", "bytes", "start", "end", "segments", "batches", "offset", "behind", "oldest", "size"} | {
    "messages/s",
    "bytes/s",
    "sent/s",
    "commit",
    "stored",
    "free disk",
    "memory",
    "processor",
}
