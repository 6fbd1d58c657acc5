"""The client's calls that show streams and their positions, as the newest leader states them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import urllib3

from natslog.client.asking import Asker, Facts, converted, decoded, in_path, leader_epochs
from natslog.errors import (
    BrokerUnavailable,
    MetadataUnavailable,
    NatslogError,
    NotFound,
    PayloadTooLarge,
    StreamNotFound,
    from_json,
)

_WITHOUT_POSITIONS_S = 60.0
_without_positions_until_s: dict[tuple[str, ...], float] = {}
"""Servers that do not have the call, and the time from which it is tried again. Shared by all clients in this
process.
"""


class StreamCalls(Asker):
    """A part of `NatslogClient`."""

    def streams(
        self,
        *,
        pattern: str | None = None,
        group: str | None = None,
        subject: str | None = None,
        current: bool = False,
    ) -> list[dict[str, Any]]:
        """All streams, by name; or those whose names match the glob `pattern`, those of a group, or those that record a
        subject, if given.

        Args:
            subject: a plain one, without wildcards.
            current: only from a broker that has received all changes, so that a stream that is not listed does not
            exist.

        Raises:
            BrokerUnavailable: with `current`, no broker has.
        """
        query = {"pattern": pattern, "group": group, "subject": subject}
        judge = _unless_current if current else _as_it_is
        listed = list(map(_checked, self._json("GET", "/v1/streams", list[Facts], query=query, judge=judge)))
        return list(map(_newer_only, listed))

    def positions(
        self,
        *,
        names: Sequence[str] | None = None,
        pattern: str | None = None,
        group: str | None = None,
        seen: Mapping[str, tuple[str, int]] = MappingProxyType({}),
        wait_ms: int = 0,
    ) -> list[dict[str, Any]]:
        """Selected streams that exist, by name: `name`, `id`, `leader_epoch`, and `log_start_offset` and
        `high_watermark` where the leader states them. One request, from a broker that has received all changes.

        Args:
            names: of streams; or those whose names match the glob `pattern`, or those of a group.
            seen: id and high watermark of each stream, as the caller has them.
            wait_ms: wait so long until one of them differs. Brokers of 0.1.0 do not wait.

        Raises:
            BrokerUnavailable.
        """
        if time.monotonic() >= _without_positions_until_s.get(self.servers, 0.0):
            given = {"streams": names, "pattern": pattern, "group": group}
            body: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
            if wait_ms:
                body |= {"seen": seen, "wait_ms": wait_ms}
            timeout_s = self.options.timeout_s + wait_ms / 1000
            try:
                listed = self._json(
                    "POST", "/v1/positions", list[Facts], body=body, judge=_unless_current, timeout_s=timeout_s
                )
                return [_newer_only(_checked(one)) for one in listed]
            except (NotFound, PayloadTooLarge):  # the broker is of version 0.1.0, or the names are too many
                _without_positions_until_s[self.servers] = time.monotonic() + _WITHOUT_POSITIONS_S
        if names is None:
            return self.streams(pattern=pattern, group=group, current=True)
        found = []
        for name in names:
            with contextlib.suppress(StreamNotFound):  # it is omitted
                found.append(self.position(name))
        return found

    def stream(self, name: str) -> dict[str, Any]:
        """One stream: settings, `id`, `leader`, `isr`, `problem` where it has one (then perhaps without offsets).

        Raises:
            StreamNotFound.
        """
        body = _checked(self._json("GET", stream_path(name), Facts, judge=_as_it_is))
        if "high_watermark" in body and leader_epochs.outdated(body) is None:
            return body
        return self._newest(name) or _without_position(body)

    def roll(self, name: str) -> dict[str, Any]:
        """Closes the active segment: `sealed_end`, up to which everything is in Arrow files of the leader's `folder`.

        Raises:
            StreamNotFound.
        """
        return self._json("POST", f"{stream_path(name)}/roll", Facts, timeout_s=60.0)

    def scrub(self, name: str, *, begin: bool = False) -> dict[str, Any]:
        """The state of the scrubbing of each replica: `broker`, `scrubbed_at`, `scrub_progress`, `damaged`.

        Args:
            begin: a new pass begins first, on every replica.

        Raises:
            StreamNotFound.
        """
        return self._json("POST" if begin else "GET", f"{stream_path(name)}/scrub", Facts)

    def purge(self, name: str, below: int | None = None) -> dict[str, Any]:
        """Removes the messages below an offset, or all that are committed now; they cannot be read any more when this
        returns.

        Returns:
            `log_start_offset` and `high_watermark` after it; `purged`: how many messages were removed.

        Raises:
            StreamNotFound, StreamSealed. OffsetOutOfRange: the offset is beyond the high watermark.
        """
        return self._json("POST", f"{stream_path(name)}/purge", Facts, body={} if below is None else {"below": below})

    def seal(self, name: str) -> dict[str, Any]:
        """Makes the stream permanently read-only.

        Raises:
            StreamNotFound.
        """
        return self._json("POST", f"{stream_path(name)}/seal", Facts)

    def position(self, name: str) -> dict[str, Any]:
        """The same, always with `log_start_offset` and `high_watermark`: the call waits for a leader that is being
        chosen.

        Raises:
            StreamNotFound. NoLeader, CorruptLog, …: why no broker can state its position.
        """
        problem: NatslogError | None = None

        def judge(response: urllib3.BaseHTTPResponse) -> NatslogError | None:
            nonlocal problem
            body = _body(response)
            is_stated = "high_watermark" in body
            problem = leader_epochs.outdated(body) if is_stated else from_json({"error": body.get("problem")})
            return problem

        try:
            return self._json("GET", stream_path(name), Facts, judge=judge)
        except BrokerUnavailable as error:
            if problem is None:
                raise
            raise problem from error

    def newest_position(self, name: str) -> dict[str, Any]:
        """The same, from the response with the newest leader epoch of all brokers: for callers that conclude from a
        position that messages are lost.

        Raises:
            As `position`.
        """
        return self._newest(name) or self.position(name)

    def _newest(self, name: str) -> dict[str, Any] | None:
        """None where no broker states its position."""
        shown = []
        for response in self._of_each(stream_path(name)):
            with contextlib.suppress(NatslogError):  # without a response of a broker, nothing is known about the stream
                shown.append(_body(response))
        stated = [body for body in shown if "high_watermark" in body and leader_epochs.outdated(body) is None]
        return max(stated, key=lambda body: int(body.get("leader_epoch", 0)), default=None)


class _Shown(msgspec.Struct):
    """The fields of a stream that callers depend on."""

    name: str
    id: str
    leader_epoch: int = 0
    high_watermark: int | msgspec.UnsetType = msgspec.UNSET
    log_start_offset: int | msgspec.UnsetType = msgspec.UNSET


def _body(response: urllib3.BaseHTTPResponse) -> Facts:
    return _checked(decoded(response.data, Facts, "the description of a stream"))


def _checked(body: Facts) -> Facts:
    """The same. Raises NatslogError: it is no stream."""
    shown = converted(body, _Shown, "the description of a stream")
    if (shown.high_watermark is msgspec.UNSET) != (shown.log_start_offset is msgspec.UNSET):
        raise NatslogError(
            f"the description of stream {shown.name!r} has only one of the two offset bounds: check that the URL "
            "is that of a natslog broker"
        )
    return body


def _as_it_is(_: urllib3.BaseHTTPResponse) -> None:
    """It is used whatever it says: the caller checks it."""


def _unless_current(response: urllib3.BaseHTTPResponse) -> NatslogError | None:
    if response.headers.get("Natslog-Current") != "false":
        return None
    return MetadataUnavailable("the broker has no session with the metadata leader: its list may be outdated")


def _newer_only(body: Facts) -> Facts:
    """Without the position if a newer leader is known than the one that stated it."""
    return body if leader_epochs.outdated(body) is None else _without_position(body)


def _without_position(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("high_watermark", "log_start_offset", "bytes")}


def stream_path(name: str) -> str:
    return f"/v1/streams/{in_path(name)}"
