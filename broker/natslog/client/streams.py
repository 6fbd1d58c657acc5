"""The client's calls that show streams and their positions, as the newest leader states them."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import urllib3

from natslog.client.asking import Asker, Facts, converted, decoded, in_path, leader_epochs
from natslog.client.searching import FoundPage
from natslog.errors import (
    BrokerUnavailable,
    MetadataUnavailable,
    NatslogError,
    PayloadTooLarge,
    StreamNotFound,
    from_json,
)
from natslog.planning import AskedPlan, ReadPlan

_SUBJECTS_OF_A_PAGE = 10_000
_SEARCH_WITHIN_S = 60.0


class StreamCalls(Asker):
    """A part of `NatslogClient`."""

    def streams(
        self,
        *,
        pattern: str | None = None,
        group: str | None = None,
        subject: str | None = None,
        current: bool = False,
        internal: bool = False,
    ) -> list[dict[str, Any]]:
        """All streams, by name; or those whose names match the glob `pattern`, those of a group, or those that record a
        subject, if given.

        Args:
            subject: a plain one, without wildcards.
            current: only from a broker that has received all changes, so that a stream that is not listed does not
            exist.
            internal: also those that natslog itself writes (`__activity`).

        Raises:
            BrokerUnavailable: with `current`, no broker has.
        """
        query = {"pattern": pattern, "group": group, "subject": subject, "internal": "true" if internal else None}
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
            wait_ms: wait so long until one of them differs.

        Raises:
            BrokerUnavailable.
        """
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
        except PayloadTooLarge:  # the names, or what is known of the streams, are too many for one request
            if wait_ms:
                return self.positions(names=names, pattern=pattern, group=group)
            if names is None:
                return self.streams(pattern=pattern, group=group, current=True)
        found = []
        for name in names:
            with contextlib.suppress(StreamNotFound):  # it is omitted
                found.append(self.position(name))
        return found

    def plan_read(self, asked: AskedPlan) -> ReadPlan:
        """What a reader at some positions reads next, within its limits, by the newest known leaders.

        Raises:
            NotFound: the broker is of version 0.2.0. NoLeader, NotLeader, CorruptLog, …: why there is no plan.
            InvalidRequest: the plan would be too large. BrokerUnavailable.
        """
        plan = ReadPlan(streams={})
        problem: NatslogError | None = None

        def judge(response: urllib3.BaseHTTPResponse) -> NatslogError | None:
            nonlocal plan, problem
            plan = decoded(response.data, ReadPlan, "POST /v1/plans")
            stated = ({"id": one.id, "leader_epoch": one.leader_epoch} for one in plan.streams.values())
            problem = next((error for one in stated if (error := leader_epochs.outdated(one)) is not None), None)
            problem = from_json({"error": plan.problem}) if plan.problem is not None else problem
            return _unless_current(response) or (None if asked.wait_ms else problem)

        timeout_s = self.options.timeout_s + asked.wait_ms / 1000
        try:
            self._ask("POST", "/v1/plans", body=msgspec.to_builtins(asked), judge=judge, timeout_s=timeout_s)
        except BrokerUnavailable as error:
            if problem is None:
                raise
            raise problem from error
        if problem is not None:  # the wait has ended: it is not repeated with the request
            return self.plan_read(msgspec.structs.replace(asked, seen={}, wait_ms=0))
        return plan

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

    def subjects(self, name: str, *, pattern: str | None = None) -> Iterator[dict[str, Any]]:
        """The distinct subjects of the visible messages, in ascending order: `subject`, `count`, `first` and `last`
        (offsets), all as of one high watermark. They are requested in pages; for the first one, the broker reads the
        subjects of the whole stream.

        Args:
            pattern: only those that this one covers (wildcards as in NATS).

        Raises:
            StreamNotFound. ViewExpired: between two pages there were minutes, or another leader.
        """
        page = self.subject_page(name, pattern=pattern, limit=_SUBJECTS_OF_A_PAGE)
        while page["subjects"]:
            yield from page["subjects"]
            after = page["subjects"][-1]["subject"]
            if len(page["subjects"]) < _SUBJECTS_OF_A_PAGE:
                return
            page = self.subject_page(name, pattern=pattern, after=after, as_of=page["as_of"], limit=_SUBJECTS_OF_A_PAGE)

    def subject_page(
        self,
        name: str,
        *,
        pattern: str | None = None,
        after: str | None = None,
        as_of: int | None = None,
        limit: int | None = None,
    ) -> dict[str, Any]:
        """One page of the same: `subjects`, `as_of` (the high watermark that they are of), `total` (of all pages).

        Args:
            after: the last subject of the page before. `as_of`: of the page before. `limit`: 1,000 if not given.

        Raises:
            As `subjects`.
        """
        query = {"pattern": pattern, "after": after, "as_of": as_of, "limit": limit}
        return self._json("GET", f"{stream_path(name)}/subjects", Facts, query=query, timeout_s=600.0)

    def overview(self) -> dict[str, Any]:
        """What is wrong in the cluster (`findings`), each broker (`cluster`, `broker_stats`), and all streams as
        columns (`streams`), at this moment. Needs the action `monitor`.
        """
        return self._json("GET", "/v1/overview", Facts)

    def history(self, stream: str | None = None) -> dict[str, Any]:
        """The last hour, a value every few seconds, of each broker that answers (`brokers`), or of one stream
        (`stream`). Needs the action `monitor`.
        """
        return self._json("GET", "/v1/history", Facts, query={"stream": stream})

    def search_page(self, name: str, **query: Any) -> FoundPage:
        """One page of a search: messages with the first bytes of their values, and where the next page begins.

        Args:
            query: its parameters: `start`, `end`, `newest`, `subject`, `grep`, `regex`, `ignore_case`, `limit`,
                `value_bytes`, `max_bytes`, `max_ms`, as `/openapi.json` describes them; `columns` for its `in`.

        Raises:
            StreamNotFound. OffsetOutOfRange: the log begins after `start`. InvalidRequest.
        """
        columns = query.pop("columns", None)
        if columns is not None:
            query["in"] = ",".join(columns)
        shown = {key: str(value).lower() if isinstance(value, bool) else value for key, value in query.items()}
        return self._json("GET", f"{stream_path(name)}/search", FoundPage, query=shown, timeout_s=_SEARCH_WITHIN_S)

    def redrive(self, name: str, offsets: Sequence[int], *, dry_run: bool = False) -> dict[str, Any]:
        """Publishes dead letters of the stream to the subjects in their headers Natslog-Subject.

        Args:
            offsets: at most 1,000. `dry_run`: nothing is published.

        Returns:
            `messages`: of each letter `offset`, `subject`, `stream`, `stored_at`, `duplicate`, `problem`; `missing`:
            offsets without a message; `left`: offsets for a further call, because the letters are large.

        Raises:
            StreamNotFound. NatsUnavailable: the broker is not connected to NATS.
        """
        body = {"offsets": list(offsets), "dry_run": dry_run}
        return self._json("POST", f"{stream_path(name)}/redrive", Facts, body=body, timeout_s=_SEARCH_WITHIN_S)

    def segments(self, name: str) -> dict[str, Any]:
        """`total` and `segments`, the newest first: `start`, `end`, `bytes`, `sealed`, `newest` of each file at the
        leader. Raises StreamNotFound.
        """
        return self._json("GET", f"{stream_path(name)}/segments", Facts)

    def replicas(self, name: str) -> dict[str, Any]:
        """How far each replica has copied the log: `end`, `high_watermark`, and `replicas` with `broker`, `leads`,
        `in_sync`, `end`, `behind`. Raises StreamNotFound.
        """
        return self._json("GET", f"{stream_path(name)}/replicas", Facts)

    def delete_message(self, name: str, offset: int) -> dict[str, Any]:
        """Removes one message; it cannot be read any more when this returns.

        Raises:
            StreamNotFound, StreamSealed. MessageNotFound: there is no message at this offset.
        """
        return self._json("DELETE", f"{stream_path(name)}/messages/{offset}", Facts)

    def accept_loss(self, name: str) -> dict[str, Any]:
        """Repairs damaged sealed segments of all replicas; offsets that are damaged on every replica become removed
        ones. Returns `replicas`: the `lost` offsets of each, or its `problem`.

        Raises:
            StreamNotFound.
        """
        return self._json("POST", f"{stream_path(name)}/repair", Facts, body={"accept_loss": True}, timeout_s=600.0)

    def purge(
        self, name: str, below: int | None = None, *, subject: str | None = None, keep: int | None = None
    ) -> dict[str, Any]:
        """Removes all messages that are committed now; they cannot be read any more when this returns.

        Args:
            below: only those below this offset. `subject`: only those whose subject this one covers (wildcards as in
                NATS). `keep`: all but so many of the newest.

        Returns:
            `log_start_offset` and `high_watermark` after it; `purged`: how many messages were removed.

        Raises:
            StreamNotFound, StreamSealed. OffsetOutOfRange: the offset is beyond the high watermark.
        """
        given = {"below": below, "subject": subject, "keep": keep}
        body = {field: value for field, value in given.items() if value is not None}
        return self._json("POST", f"{stream_path(name)}/purge", Facts, body=body)

    def erase(self, name: str, *, subject: str | None = None, key: bytes | str | None = None) -> dict[str, Any]:
        """Erases the messages on a subject (wildcards as in NATS), or with a key, that are committed now. They cannot
        be read any more when this returns; then each replica writes the files again that have them.

        Returns:
            The receipt as it begins: `id` (None: there was nothing to erase), `messages`, `complete`, `replicas`. Ask
            `erasure` for it until it is complete.

        Raises:
            StreamNotFound, StreamSealed, RemovalDenied, InvalidRequest.
        """
        body = {} if subject is None else {"subject": subject}
        if key is not None:
            data = key.encode() if isinstance(key, str) else key
            body["key_base64"] = base64.b64encode(data).decode()
        return self._json("POST", f"{stream_path(name)}/erase", Facts, body=body, timeout_s=600.0)

    def erasure(self, name: str, erasure_id: str) -> dict[str, Any]:
        """The receipt of an erasure: which `files` each replica has written again, and whether all are `complete`.

        Raises:
            StreamNotFound, ErasureNotFound.
        """
        return self._json("GET", f"{stream_path(name)}/erase", Facts, query={"id": erasure_id})

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
