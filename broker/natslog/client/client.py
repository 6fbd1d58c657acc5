"""Blocking client of the HTTP API, for the connector, notebooks and the command line.

    client = NatslogClient("http://127.0.0.1:9292")
    for batch in client.read("orders", start=0):
        print(batch.num_rows)

Every request may be sent to any broker; all are tried before it fails. Stored batches are validated by their own CRC32C
before they are returned, so that damage is detected wherever it happened between the leader's memory and this process.
Other rows are validated (`answers`). A call always ends with its result or with a `NatslogError`, whatever a response
contains. pyarrow and numpy are imported by the calls that read or write rows: commands that need none start faster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import urllib3

from natslog.arrow.bounds import MOST_ROWS_BYTES
from natslog.client.appending import AppendAsker
from natslog.client.asking import ClientOptions, Facts, RedirectFailed, leader_epochs, parse_servers
from natslog.client.bounded import MOST_BODY_BYTES, most_bytes
from natslog.client.consume_options import ConsumeOptions
from natslog.client.credentials import origin_of
from natslog.client.cursors import CursorCalls
from natslog.client.epochs import stated_in
from natslog.client.imports import ImportCalls
from natslog.client.operating import OperatorCalls
from natslog.client.searching import FOUND_OF_A_PAGE, FOUND_VALUE_BYTES, FoundPage, runs_of
from natslog.client.security import SecurityCalls
from natslog.client.streams import StreamCalls, stream_path
from natslog.errors import (
    BrokerUnavailable,
    ConfigError,
    CorruptAnswer,
    CorruptLog,
    NatslogError,
    NotLeader,
    OffsetOutOfRange,
    PayloadTooLarge,
    StreamRecreated,
)
from natslog.model import Split, subject_setting

if TYPE_CHECKING:
    import pyarrow as pa

    from natslog.client.answers import Fetched
    from natslog.client.consuming import Consumer

__all__ = ["FETCH_BYTES", "ClientOptions", "NatslogClient", "parse_servers"]

FETCH_BYTES = 8 * 1024 * 1024
_WHOLE_BATCHES = {  # the first is as `exact=false`
    "Natslog-Batches": "whole",
    "Natslog-Columns": "whole",
}

_READY_WITHIN_S = 5.0
_VIEW_S = 600.0  # the first view of a stream may read all of it


class _Found(msgspec.Struct):
    offset: int
    timestamp: str | None


class SplitRange(msgspec.Struct, frozen=True):
    """Offsets `[start, end)` of the stream with this id, to be cut into at least `min_splits` parts."""

    stream: str
    id: str
    start: int
    end: int
    min_splits: int = 1


class _SplitsOfSeveral(msgspec.Struct):
    splits: dict[str, list[Split]]
    elsewhere: dict[str, list[str]]


def _covers(splits: Sequence[Split], whole: SplitRange) -> bool:
    edges = [whole.start, *(split.end for split in splits)]
    follows = all(split.start == start < split.end for start, split in zip(edges, splits, strict=False))
    return follows and edges[-1] == whole.end


class _Extent(msgspec.Struct):
    end: int
    bytes: int | None


class NatslogClient(SecurityCalls, OperatorCalls, AppendAsker, CursorCalls, StreamCalls, ImportCalls):
    """The client of a cluster; see `Asker` for servers and retries."""

    # ---- cluster and streams ----

    def cluster(self) -> dict[str, Any]:
        """`{cluster_id, metadata_leader, brokers, version}`."""
        return self._json("GET", "/v1/cluster", Facts)

    def readiness(self, url: str) -> dict[str, Any] | None:
        """The response of the broker at `url` to `/readyz`, ready or not: `{status, reason, …}`; None without a
        response.
        """
        response = self.answer_of(url, "/readyz", _READY_WITHIN_S)
        try:
            return None if response is None else dict(json.loads(response.data))
        except (ValueError, TypeError):
            return None

    def answer_of(
        self, url: str, path: str, within_s: float, query: dict[str, Any] | None = None
    ) -> urllib3.BaseHTTPResponse | None:
        """The response of the broker at `url` to a GET, with any status; None without a response. It is not repeated,
        and gets the token by the same rule as all requests.
        """
        most_bytes.set(MOST_BODY_BYTES)
        try:
            return self._send("GET", url + path, query, None, within_s, {})
        except (RedirectFailed, CorruptAnswer, urllib3.exceptions.HTTPError, OSError):
            return None

    def create_stream(self, name: str, subject: str | Sequence[str], **settings: Any) -> dict[str, Any]:
        """Creates the stream; does nothing if it exists with the same settings.

        Args:
            subject: the subject to record, or several of them.
            settings: as in the HTTP API: `max_age="7d"`, `max_bytes`, `max_messages`, `group`, `compression`, …

        Raises:
            StreamConflict: it exists with other settings.
            InvalidRequest: a name, subject or setting is wrong.
        """
        return self._json("POST", "/v1/streams", Facts, body={"name": name} | subject_setting(subject) | settings)

    def edit_stream(self, name: str, **settings: Any) -> dict[str, Any]:
        """Changes settings (or `paused=True`); the rest stays. `subjects=[…]`: all that are recorded from then on.
        `if_version`: the `settings_version` for which the edit was made; `id`: of the stream.

        Raises:
            StreamNotFound, InvalidRequest. SettingsConflict, StreamRecreated: the settings were edited meanwhile, or
            the stream was created again; nothing was changed.
        """
        return self._json("PATCH", stream_path(name), Facts, body=settings)

    def delete_stream(self, name: str, *, id: str | None = None, if_version: int | None = None) -> None:
        """Deletes the stream and its messages.

        Args:
            id, if_version: as for `edit_stream`; nothing is deleted if they are others by then.

        Raises:
            StreamNotFound. RemovalDenied: it has `prevent_delete`. SettingsConflict, StreamRecreated.
        """
        self._ask("DELETE", stream_path(name), query={"id": id, "if_version": if_version})

    def offset_at(self, name: str, timestamp: str | int) -> tuple[int, str | None]:
        """The first offset at or after a time (ISO-8601 or epoch ms) and that message's time; beyond the newest one the
        high watermark and None.
        """
        found = self._json("GET", stream_path(name) + "/offsets", _Found, query={"timestamp": timestamp})
        return found.offset, found.timestamp

    def next_on_subject(self, name: str, subject: str, start: int = 0) -> int | None:
        """The offset of the first message on this subject at or after `start`; None if there is none.

        Its last one is `last` of `subjects(name, pattern=subject)`.
        """
        query = {"subject": subject, "start": start}
        found = self._json("GET", stream_path(name) + "/offsets", _Found, query=query)
        return None if found.timestamp is None else found.offset

    def splits(
        self,
        name: str,
        start: int,
        end: int,
        *,
        max_bytes: int | None = None,
        max_rows: int | None = None,
        min_splits: int = 1,
        read_from: str | None = None,
        rack: str | None = None,
    ) -> list[Split]:
        """`[start, end)` cut for parallel readers.

        Args:
            read_from: which replicas come first in each split's URLs: `nearest` (of `rack`), `leader` or `any`.

        Raises:
            OffsetOutOfRange.
        """
        query: dict[str, Any] = {"start": start, "end": end, "max_bytes": max_bytes, "max_rows": max_rows}
        query |= {"min_splits": min_splits, "read_from": read_from, "rack": rack}
        return self._json("GET", stream_path(name) + "/splits", list[Split], query=query)

    def splits_of_several(
        self,
        ranges: Sequence[SplitRange],
        *,
        max_bytes: int | None = None,
        max_rows: int | None = None,
        read_from: str | None = None,
        rack: str | None = None,
    ) -> dict[str, list[Split]]:
        """Committed ranges of several streams cut for parallel readers, with one request for each broker that has some
        of them. Those that no broker can cut now are omitted: `splits` says why.

        Args:
            ranges: at most one of each stream.

        Raises:
            BrokerUnavailable.
        """
        limits = {"max_bytes": max_bytes, "max_rows": max_rows, "read_from": read_from, "rack": rack}
        limits = {name: value for name, value in limits.items() if value is not None}
        wanted = {one.stream: one for one in ranges}
        found: dict[str, list[Split]] = {}
        asked, urls = set[str](), [""]
        while wanted and urls:
            url = urls.pop()
            asked.add(url)
            body = limits | {"ranges": list(map(msgspec.to_builtins, wanted.values()))}
            try:
                answer = self._json("POST", "/v1/splits", _SplitsOfSeveral, body=body, prefer=[url] if url else [])
            except PayloadTooLarge:
                break
            for name, splits in answer.splits.items():
                if name in wanted and _covers(splits, wanted[name]):
                    found[name] = splits
                    del wanted[name]
            urls = [other for other in answer.elsewhere if other not in asked and origin_of(other) is not None] + urls
        return found

    def extent(self, name: str, start: int, end: int, *, max_bytes: int | None = None) -> tuple[int, int | None]:
        """The approximate stored size of `[start, end)`; with `max_bytes`, the beginning of the range that has this
        size, at least one row.

        Returns:
            The end reached, and the bytes up to it; None if they are unknown to this reader.

        Raises:
            OffsetOutOfRange.
        """
        query = {"start": start, "end": end, "max_bytes": max_bytes}
        found = self._json("GET", stream_path(name) + "/extent", _Extent, query=query)
        return found.end, found.bytes

    # ---- messages ----

    def fetch(
        self,
        name: str,
        start: int,
        end: int | None = None,
        *,
        max_bytes: int = FETCH_BYTES,
        wait_ms: int = 0,
        subject: str | None = None,
        columns: Sequence[str] | None = None,
        prefer: Sequence[str] = (),
        expected_id: str | None = None,
        as_of: int | None = None,
        passed: str | None = None,
        max_decoded_bytes: int | None = None,
    ) -> Fetched:
        """One answer: rows of `[start, end)` from `start` on, at most about `max_bytes` as they are stored.

        Args:
            wait_ms: wait so long for new messages where `start` is the high watermark.
            subject: NATS wildcard, applied at the broker. `columns`: projection, likewise.
            prefer: brokers to ask first. `expected_id`: the stream's id, if it must still be that one.
            as_of: only the latest view as of this high watermark (`latest_as_of`).
            passed: rows to leave out, by the shares of several readers: `subject:10,12`, as in `/openapi.json`.
            max_decoded_bytes: stored batches may be compressed; more of them than this are left in `rest`.

        Raises:
            OffsetOutOfRange, StreamNotFound, StreamRecreated, CorruptLog, BrokerUnavailable. ViewExpired: the view is
                not known any more. CorruptAnswer: the
                responses of two brokers (or two responses of one) are not valid for the request.
        """
        from natslog.client.answers import RequestedRows, rows_of

        query = {
            "start": start,
            "end": end,
            "max_bytes": max_bytes,
            "wait_ms": wait_ms or None,
            "subject": subject,
            "columns": ",".join(columns) if columns is not None else None,
            "view": None if as_of is None else "latest",
            "as_of": as_of,
            "passed": passed,
        }
        timeout_s = self.options.timeout_s + wait_ms / 1000
        judge = partial(self._judge_messages, name, start, expected_id)
        path = stream_path(name) + "/messages"
        most_bytes = max_bytes + MOST_ROWS_BYTES
        ask = partial(
            self._ask,
            "GET",
            path,
            query=query,
            headers=_WHOLE_BATCHES,
            timeout_s=timeout_s,
            most_body_bytes=most_bytes,
            judge=judge,
        )
        is_filtered = subject is not None or passed is not None
        asked = RequestedRows(name, start, end, columns, is_filtered=is_filtered, most_bytes=most_bytes)
        try:
            answer = rows_of(ask(prefer=prefer), asked, max_decoded_bytes)
        except (CorruptLog, CorruptAnswer):  # damaged on the network, or by that broker: another one shows which
            answer = rows_of(ask(prefer=[*prefer[1:], *self.servers]), asked, max_decoded_bytes)
        if expected_id is not None and answer.stream_id != expected_id:
            raise StreamRecreated(
                f"stream {name!r} was deleted and created again (id {answer.stream_id}, not {expected_id}): offsets "
                "of the old stream are not valid in the new one",
                stream=name,
            )
        return answer

    def _judge_messages(
        self, name: str, start: int, expected_id: str | None, response: urllib3.BaseHTTPResponse
    ) -> NatslogError | None:
        """Rows are committed whichever broker serves them, unless they are of a stream that was deleted meanwhile. Only
        the newest leader can state that there are no rows.
        """
        from natslog.client.answers import number_of

        headers = response.headers
        stream_id = headers.get("Natslog-Stream-Id")
        if expected_id is not None and stream_id != expected_id and self.position(name)["id"] == expected_id:
            return NotLeader(f"a broker has not yet received the deletion of the stream with id {stream_id}")
        next_offset = number_of(headers, "Natslog-Next-Offset")
        if next_offset is not None and next_offset > start:
            return None
        return leader_epochs.outdated(stated_in(headers))

    def start_offset(self, name: str, start: int | str | datetime, info: Mapping[str, Any]) -> int:
        """The offset that `start` means: an offset, `earliest`, `latest`, or a time (ISO-8601, or with its zone).

        Args:
            info: of `position`.

        Raises:
            InvalidRequest: no time.
        """
        match start:
            case "earliest":
                return int(info["log_start_offset"])
            case "latest":
                return int(info["high_watermark"])
            case int(offset):
                return offset
            case datetime() as moment:
                return self.offset_at(name, moment.isoformat())[0]
            case text:
                return self.offset_at(name, text)[0]

    def search(
        self,
        name: str,
        text: str,
        *,
        is_regex: bool = False,
        ignores_case: bool = False,
        columns: Sequence[str] | None = None,
        subject: str | None = None,
        start: int | str | datetime = "earliest",
        end: int | None = None,
        on_page: Callable[[FoundPage], None] = lambda page: None,
    ) -> Iterator[pa.RecordBatch]:
        """The messages that contain a text, with all columns, in the order of offsets, to the present high watermark
        by default. The brokers search, a page at a time.

        Args:
            start: an offset, `earliest`, `latest`, or a time.
            is_regex: the text is a regular expression of RE2.
            columns: those that are searched, of `value`, `key`, `headers`, `subject`; by default the first three.
            on_page: called with each page, so that progress can be shown.

        Raises:
            As `search_page` and `read`.
        """
        query = {"grep": text, "regex": is_regex, "ignore_case": ignores_case, "columns": columns, "subject": subject}
        info = self.position(name)
        at, end = self.start_offset(name, start, info), int(info["high_watermark"]) if end is None else end
        while True:
            try:
                page = self.search_page(
                    name, start=at, end=end, limit=FOUND_OF_A_PAGE, value_bytes=FOUND_VALUE_BYTES, **query
                )
            except OffsetOutOfRange as error:  # retention removes what was not searched yet
                first = error.facts.get("log_start_offset")
                if start != "earliest" or not isinstance(first, int) or first <= at:
                    raise
                at = first
                if at >= end:
                    return
                continue
            on_page(page)
            for run in runs_of(page.messages):
                if isinstance(run, int):
                    yield from self.read(name, run, run + 1)
                else:
                    yield run
            if page.is_complete:
                return
            at = page.next_offset

    def read(
        self,
        name: str,
        start: int | None = None,
        end: int | None = None,
        *,
        subject: str | None = None,
        columns: Sequence[str] | None = None,
        prefer: Sequence[str] = (),
        expected_id: str | None = None,
        view: Literal["latest"] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """All rows of `[start, end)`, batch by batch; from the log start and to the present high watermark by default.

        While the caller works on one part of about `FETCH_BYTES`, the next one is fetched or decoded: two parts are in
        memory, and two answers of `FETCH_BYTES` as they are stored.

        Args:
            view: `latest`: only the newest message of each key, if the stream is compacted, else of each subject; of
                what is committed now, without tombstones. What is superseded is not read.

        Raises:
            As `fetch`. ConfigError: a view has no `end`.
        """
        as_of = None
        if view is not None:
            if view != "latest" or end is not None:
                raise ConfigError("view must be latest, and has no end: it is of what is committed now")
            end = as_of = self.latest_as_of(name)
        is_open = start is None
        if start is None or end is None:
            info = self.position(name)
            start = info["log_start_offset"] if start is None else start
            end = info["high_watermark"] if end is None else end
        answers = self.answers(
            name,
            start,
            end,
            is_open=is_open,
            subject=subject,
            columns=columns,
            prefer=prefer,
            expected_id=expected_id,
            as_of=as_of,
        )
        for fetched in answers:
            yield from fetched.batches

    def latest_as_of(self, name: str) -> int:
        """The high watermark of a latest view that begins now; requests of the view state it as `as_of`.

        Raises:
            StreamNotFound, CorruptLog, BrokerUnavailable.
        """
        from natslog.client.answers import number_of

        at = self.position(name)["high_watermark"]
        answer = self._ask(
            "GET", stream_path(name) + "/messages", query={"view": "latest", "start": at, "end": at}, timeout_s=_VIEW_S
        )
        as_of = number_of(answer.headers, "Natslog-As-Of")
        if as_of is None:
            raise BrokerUnavailable(f"the brokers of stream {name!r} do not support views: upgrade them")
        return as_of

    def answers(self, name: str, start: int, end: int, *, is_open: bool = False, **asked: Any) -> Iterator[Fetched]:
        """The same, part by part: each says where the next one begins.

        Args:
            is_open: the range begins where the log did: what retention removes before it is read is left out.
            asked: as for `fetch`.

        Raises:
            As `fetch`.
        """
        from natslog.client.reading_ahead import Fetch, ReadAhead, fetch_what_is_left

        fetch: Fetch = partial(self.fetch, name, end=end, max_decoded_bytes=FETCH_BYTES, **asked)
        if is_open:
            fetch = partial(fetch_what_is_left, fetch, end)
        ahead = ReadAhead(fetch, name, start, end, FETCH_BYTES)
        while ahead.coming is not None:
            yield ahead.take()

    def consume(
        self,
        stream: str,
        *,
        cursor: str | None = None,
        start: int | str | datetime = "earliest",
        follow: bool = True,
        checkpoint: Literal["auto", "manual"] = "auto",
        checkpoint_every: int | None = None,
        checkpoint_interval_s: float | None = 5.0,
        on_data_loss: Literal["fail", "skip"] = "fail",
        subject: str | None = None,
        columns: Sequence[str] | None = None,
        max_bytes: int = FETCH_BYTES,
        wait_ms: int = 5_000,
        patience_s: float = 120.0,
    ) -> Consumer:
        """Iterates over the batches of a stream from its cursor on, at least once and in order:

        ```python
        with client.consume("orders", cursor="billing") as consumer:
            for batch in consumer:
                bill(batch.record_batch)
        ```

        A batch counts as processed when the next one is requested, or when the `with` block ends without an exception.
        Without `with`, `break` and exceptions store nothing: messages behind the last checkpoint are consumed again.
        Two consumers must not share a cursor: the last write is the one that is kept. A consumer that finds its cursor
        moved logs a warning.

        Args:
            cursor: the name under which brokers store the position; the consumer resumes there. None: it is not stored.
            start: where a consumer without a stored cursor starts: `earliest`, `latest`, an offset, or a time (a
                `datetime`, UTC where it has no zone, or ISO-8601). That position is stored at once.
            follow: wait for new messages at the end; False: end at the present high watermark.
            checkpoint: `manual`: the position is stored only by `batch.checkpoint()` and `consumer.checkpoint()`.
            checkpoint_every, checkpoint_interval_s: store it when so many messages were processed, or so much time has
                passed, since the last time; whichever comes first. It is stored between batches, and on `close`.
            on_data_loss: `skip`: where retention or a purge removed messages before they were consumed, or the stream
                was deleted and created again, log the lost range and continue behind it.
            subject, columns: as for `fetch`.
            max_bytes: of one response as it is stored, and of one batch as it is decoded, exceeded by one stored batch
                at most. Two batches and two responses are in memory.
            wait_ms: of one long poll.
            patience_s: how long requests are repeated while no broker, or no leader, is available.

        Raises:
            InvalidRequest: an argument is wrong. StreamNotFound, TooManyCursors, Forbidden, BrokerUnavailable. The
            iterator: see `Consumer`.
        """
        from natslog.client.consuming import Consumer

        options = ConsumeOptions(
            cursor=cursor,
            start=start,
            follow=follow,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            checkpoint_interval_s=checkpoint_interval_s,
            on_data_loss=on_data_loss,
            subject=subject,
            columns=columns,
            max_bytes=max_bytes,
            wait_ms=wait_ms,
            patience_s=patience_s,
        )
        return Consumer(self, stream, options)
