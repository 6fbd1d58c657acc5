"""Which streams are read: by name, by glob, or by consumer group; and their current state at the brokers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from natslog.client import NatslogClient
from natslog.client.lineage import lineage_in
from natslog.errors import StreamNotFound

MAX_OFFSET = 2**62
_OF_REGEX = re.compile(r"\.[*+]|[\^$()|\\+{}]")


@dataclass(frozen=True, slots=True)
class StreamState:
    """A stream as its leader describes it: offsets `[log_start_offset, high_watermark)` can be read.

    `leader_epoch`: 0 where the broker did not state it. `lineage`: (id, offset) of each stream that this one was
    restored from, by exports: positions of that stream up to the offset are valid in this one.
    """

    name: str
    id: str
    log_start_offset: int
    high_watermark: int
    leader_epoch: int = 0
    lineage: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, body: dict[str, Any]) -> StreamState:
        bounds = int(body["log_start_offset"]), int(body["high_watermark"])
        epoch, lineage = int(body.get("leader_epoch", 0)), tuple(lineage_in(body).items())
        return cls(body["name"], body["id"], *bounds, epoch, lineage)

    def valid_to(self, stream_id: str) -> int | None:
        """Up to which offset positions in the stream of this id are valid here, whatever its end is; None: they are
        not.
        """
        return MAX_OFFSET if stream_id == self.id else dict(self.lineage).get(stream_id)


@dataclass(frozen=True, slots=True)
class Selection:
    """Exactly one of `names`, `pattern` (a glob over names) and `group`. What a pattern or group matches may change."""

    names: tuple[str, ...] = ()
    pattern: str | None = None
    group: str | None = None

    @property
    def looks_like_regex(self) -> bool:
        """Whether the pattern has what only a regular expression needs."""
        return self.pattern is not None and _OF_REGEX.search(self.pattern) is not None

    def could_hold(self, name: str) -> bool:
        """Whether a stream of this name may be selected; for a group this is unknown before a request."""
        if self.pattern is not None:
            return fnmatchcase(name, self.pattern)
        return self.group is not None or name in self.names

    def states(
        self, client: NatslogClient, seen: Mapping[str, tuple[str, int]] = MappingProxyType({}), wait_ms: int = 0
    ) -> dict[str, StreamState]:
        """All selected streams that exist now, by name. Waits for a stream that has no leader at the moment.

        Args:
            seen: id and high watermark of each, as the caller has them. `wait_ms`: waits so long until one of them is
                outdated.
        """
        found = {}
        for body in client.positions(
            names=self.names or None, pattern=self.pattern, group=self.group, seen=seen, wait_ms=wait_ms
        ):
            try:
                found[body["name"]] = StreamState.of(_position(client, body))
            except StreamNotFound:  # deleted since: the caller distinguishes
                continue
        return found

    def require_all(self, states: Mapping[str, StreamState]) -> None:
        """Raises StreamNotFound: a stream that is named does not exist."""
        for name in self.names:
            if name not in states:
                raise StreamNotFound(f"there is no stream {name!r}: create it, or correct the option stream")

    def __str__(self) -> str:
        if self.names:
            return f"stream {', '.join(self.names)}"
        return f"streamPattern {self.pattern!r}" if self.pattern is not None else f"group {self.group!r}"


def _position(client: NatslogClient, body: dict[str, Any]) -> dict[str, Any]:
    """The position in the list, if it has one; else it is requested."""
    return body if "high_watermark" in body else client.position(body["name"])
