"""Which streams a read means: by name, by glob, or by consumer group; and what the brokers say of them now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from natslog.client import NatslogClient
from natslog.errors import StreamNotFound


@dataclass(frozen=True, slots=True)
class StreamState:
    """A stream as its leader describes it: offsets `[log_start_offset, high_watermark)` can be read."""

    name: str
    id: str
    log_start_offset: int
    high_watermark: int

    @classmethod
    def of(cls, body: dict[str, Any]) -> StreamState:
        return cls(body["name"], body["id"], int(body["log_start_offset"]), int(body["high_watermark"]))


@dataclass(frozen=True, slots=True)
class Selection:
    """Exactly one of `names`, `pattern` (a glob over names) and `group`. What a pattern or group matches may change."""

    names: tuple[str, ...] = ()
    pattern: str | None = None
    group: str | None = None

    def could_hold(self, name: str) -> bool:
        """Whether a stream of this name may be meant; of a group this is not known before a request."""
        if self.pattern is not None:
            return fnmatchcase(name, self.pattern)
        return self.group is not None or name in self.names

    def states(self, client: NatslogClient) -> dict[str, StreamState]:
        """All streams meant that are there now, by name. One that has no leader for the moment is waited for."""
        found = {}
        for name, ask in self._questions(client).items():
            try:
                found[name] = StreamState.of(ask())
            except StreamNotFound:  # never there, or deleted: the caller knows which
                continue
        return found

    def _questions(self, client: NatslogClient) -> dict[str, Callable[[], dict[str, Any]]]:
        if self.names:
            return {name: partial(client.position, name) for name in self.names}
        return {body["name"]: partial(_position, client, body) for body in self._listed(client)}

    def _listed(self, client: NatslogClient) -> list[dict[str, Any]]:
        return client.streams(pattern=self.pattern, group=self.group, current=True)

    def __str__(self) -> str:
        if self.names:
            return f"stream {', '.join(self.names)}"
        return f"streamPattern {self.pattern!r}" if self.pattern is not None else f"group {self.group!r}"


def _position(client: NatslogClient, body: dict[str, Any]) -> dict[str, Any]:
    """The list's own word, where it says how far the stream is."""
    return body if "high_watermark" in body else client.position(body["name"])
