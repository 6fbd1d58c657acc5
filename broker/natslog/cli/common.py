"""Functions shared by the commands: options, the client made from the global ones, questions, errors.

Modules of `natslog.cli` import at their top only what `--help` needs. The rest (pyarrow, urllib3, nats-py, asyncio) is
imported by the function that uses it, because it takes most of the time and memory of a short command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from natslog.errors import ConfigError, InvalidRequest, NatslogError, StreamNotFound

if TYPE_CHECKING:
    from natslog.client import NatslogClient


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
        client = NatslogClient(servers or None, options)
        _clients.append(client)
        return client


_clients: list[NatslogClient] = []
"""Of the command that runs."""


def with_similar_names(error: StreamNotFound) -> StreamNotFound:
    """The error with the names of streams that may be meant; unchanged where it is about another server."""
    from difflib import get_close_matches

    name = error.facts.get("stream")
    if not _clients or not isinstance(name, str) or "server" in error.facts:
        return error
    try:
        names = [str(one["name"]) for one in _clients[-1].streams()]
    except NatslogError:  # the first error is what the user has to know
        return error
    if not (similar := get_close_matches(name, names)):
        return error
    return StreamNotFound(f"{error.message.rstrip('.')}. Did you mean {' or '.join(similar)}?", **error.facts)


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
    from natslog.cli.output import is_terminal

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
