"""Functions shared by the commands: the client made from the global options, output for people and programs, errors.

Modules of `natslog.cli` import at their top only what `--help` needs. The rest (pyarrow, urllib3, nats-py, asyncio) is
imported by the function that uses it, because it takes most of the time and memory of a short command.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from natslog.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from natslog.client import NatslogClient


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

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
NatsUrl = Annotated[
    str, typer.Option("--nats-url", envvar=["NATS_URL", "NATSLOG_NATS_URL"], help="NATS server(s), comma-separated.")
]


_RETRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Global:
    """Options before the command, as they were given; `client` checks them."""

    servers: tuple[str, ...] = ()
    token: str | None = None
    token_file: str | None = None
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    profile: str | None = None

    def client(self, patience_s: float = 0.0) -> NatslogClient:
        """Raises ConfigError where an option is wrong."""
        from natslog.client import ClientOptions, NatslogClient, parse_servers
        from natslog.client.credentials import origin_of
        from natslog.client.profiles import Profile, load_profile

        profile = load_profile(self.profile)
        servers = tuple(part for text in self.servers or profile.servers for part in parse_servers(text))
        if self.servers and not {*map(origin_of, servers)} <= {*map(origin_of, profile.servers)}:
            profile = Profile()  # its credentials are for its own servers
        has_certificate = self.tls_cert_file is not None
        options = ClientOptions(
            token=self.token,
            token_file=self.token_file or (profile.token_file if self.token is None else None),
            tls_ca_file=self.tls_ca_file or profile.tls_ca_file,
            tls_cert_file=self.tls_cert_file if has_certificate else profile.tls_cert_file,
            tls_key_file=self.tls_key_file if has_certificate else profile.tls_key_file,
            retries=_RETRIES,
            patience_s=patience_s,
        )
        return NatslogClient(servers or None, options)


@contextmanager
def broker_extra(what: str) -> Iterator[None]:
    """Around imports that only `natslog[broker]` has: an import that fails is a ConfigError which names the extra."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{what} needs natslog[broker]: pip install 'natslog[broker]' ({error})") from error


def global_of(context: typer.Context) -> Global:
    found = context.find_object(Global)
    assert found is not None, "the main callback sets it"
    return found


def confirm(question: str, *, or_else: str) -> None:
    """Returns when the user confirms.

    Args:
        or_else: the state without confirmation, as in "stream orders is not deleted".

    Raises:
        InvalidRequest: the user declined, or standard input is not a terminal: a program must pass --yes.
    """
    if not is_terminal(sys.stdin):
        raise InvalidRequest(f"{or_else}: confirmation is required and standard input is not a terminal; pass --yes")
    if not typer.confirm(question):
        raise InvalidRequest(or_else)


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
