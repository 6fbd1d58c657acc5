"""Publishing to NATS by a request: one message (`publish`), and dead letters to the subjects that they were meant for
(`redrive`). The broker publishes, with its own NATS user, to subjects that a stream records and on which the identity
may publish; the ack of that stream is the outcome.

A dead letter (see `pyspark_natslog.sink.dead_letters`) has the subject that its row was meant for in the header
`Natslog-Subject`, and the reason in `Natslog-Error`. When it is sent again, its message id is made of the stream and
the offset, so that a second run is stored once by streams that deduplicate.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET

from natslog.arrow import ipc
from natslog.arrow.covered import covered
from natslog.arrow.schema import HEADERS_TYPE
from natslog.arrow.trace_contexts import is_traceparent, with_traceparent
from natslog.errors import Forbidden, InvalidRequest, OffsetOutOfRange, PublishFailed, Unauthorized
from natslog.http.access import AUDITED, limits_of, require_still, rights_of
from natslog.http.context import ANSWERS, OWNER, broker_of, confirmed_out_of_range, leading, stated
from natslog.http.endpoint import Call
from natslog.http.shapes import writing as shapes
from natslog.http.shapes.common import Answer, shape_response
from natslog.log import StreamLog
from natslog.model import StreamRecord
from natslog.node.broker import Broker
from natslog.node.publishing import Stored
from natslog.node.stream_operations import require_not_internal
from natslog.node.threads import in_thread
from natslog.security.decisions import Patterns
from natslog.security.guard import Rights
from natslog.subjects import check_subject, cover, has_wildcard, is_internal, overlap
from natslog.tracing import TRACEPARENT
from natslog.wire.outgoing_rows import Rows, unsendable_rows

_MOST_BYTES = 16 * 1024 * 1024
"""Values of the dead letters of one request; what is beyond stays for a further one."""
_MOST_READ_BYTES = 64 * 1024 * 1024
_STEP_BYTES = 4 * 1024 * 1024
_NEAR = 10_000  # offsets
_OWN_HEADERS = ("natslog-", "nats-")
"""Headers that the sink added, or that would be requests to a stream: they are not sent again."""

_NOT_RECORDED = "no stream records this subject, so that no ack would come: create a stream for it"

# ---- one message ----


async def publish(call: Call[None, shapes.NewMessage]) -> Answer[shapes.Published]:
    """Publish a message to NATS, on a subject that the stream records. Answered when the stream has stored it"""
    request, message, broker = call.request, call.body, broker_of(call.request)
    record = await broker.record(request.match_info["name"])
    require_not_internal(record.name)
    subject = _subject_of(message, record)
    if not cover(record.settings.subjects, subject):
        shown = ", ".join(map(repr, record.settings.subjects))
        raise InvalidRequest(f"the stream records {shown}, not the subject {subject!r}", subject=subject)
    for own in message.headers:
        if _is_own(own.key):
            raise InvalidRequest(f"header {own.key!r} is a request to a stream: it cannot be given here")
    recording = [  # the message reaches all of these
        one
        for one in broker.state.streams.values()
        if not is_internal(one.name) and any(overlap(pattern, subject) for pattern in one.settings.subjects)
    ]
    for other in recording:
        rights_of(request).require_subject("publish", other.name, subject)
    facts: dict[str, object] = {"subject": subject, "stream": record.name}
    request[AUDITED] = facts
    if (why_not := _why_not(record)) is not None:
        raise InvalidRequest(f"stream {record.name!r} {why_not}", stream=record.name)
    rows = Rows(
        subjects=pa.array([subject]),
        values=pa.array([_bytes(message.value, message.value_base64, "value")], pa.binary()),
        keys=None if message.key is UNSET else pa.array([message.key.encode()], pa.binary()),
        headers=pa.array([[{"key": one.key, "value": one.value} for one in message.headers]], HEADERS_TYPE),
        ids=None if message.message_id is UNSET else pa.array([message.message_id]),
    )
    _require_sendable(rows, broker)
    limits = [one.settings.max_message_bytes for one in recording]
    most_bytes = broker.publishing.most_bytes_of([limit for limit in limits if limit is not None])
    rows = traced(rows, request.headers.get(TRACEPARENT, ""), most_bytes)
    (stored,) = await broker.publishing.publish(rows, [record.name])
    if stored.offset is None:
        raise PublishFailed(stored.problem, stream=record.name)
    return shape_response(shapes.Published(record.name, subject, stored.offset, stored.duplicate), status=201)


def traced(rows: Rows, traceparent: str, most_bytes: int) -> Rows:
    """The message with this trace context, unless that is none, or would make the message larger than `most_bytes`."""
    if not is_traceparent(traceparent):
        return rows
    with_context = replace(rows, headers=with_traceparent(rows.headers, len(rows), traceparent))
    return rows if unsendable_rows(with_context, most_bytes) else with_context


def _require_sendable(rows: Rows, broker: Broker) -> None:
    """Raises InvalidRequest."""
    for reason in unsendable_rows(rows, broker.publishing.most_bytes).values():
        raise InvalidRequest(f"the message cannot be sent: {reason}")


def _subject_of(message: shapes.NewMessage, record: StreamRecord) -> str:
    """Raises InvalidRequest."""
    if message.subject is not UNSET:
        return check_subject(message.subject, wildcards=False)
    recorded = record.settings.subjects
    if len(recorded) != 1 or has_wildcard(recorded[0]):
        raise InvalidRequest(f"stream {record.name!r} records several subjects: give a subject", parameter="subject")
    return recorded[0]


def _bytes(text: Any, in_base64: Any, name: str) -> bytes:
    """Raises InvalidRequest: not exactly one is given, or it is not base64."""
    if (text is UNSET) == (in_base64 is UNSET):
        raise InvalidRequest(f"give either {name} or {name}_base64", parameter=name)
    try:
        return str(text).encode() if in_base64 is UNSET else base64.b64decode(in_base64, validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise InvalidRequest(f"{name} cannot be sent: {error}", parameter=name) from error


def _why_not(record: StreamRecord) -> str | None:
    """Why a message of this stream would get no ack."""
    if record.sealed:
        return "is sealed: it takes no messages"
    if record.paused:
        return "is paused: resume it first"
    if record.import_state == "importing":
        return "is being imported: it takes no messages yet"
    if record.settings.acks == "never":
        return "sends no acks (its setting acks is never), so that it would not be known whether a message is stored"
    return None


# ---- dead letters ----


@dataclass(frozen=True, slots=True)
class _Letter:
    """A dead letter. `subject`: where it is sent; `stream`: the one that records it; `problem`: why it is not sent."""

    offset: int
    value: bytes
    key: bytes | None
    headers: list[dict[str, str]]
    subject: str = ""
    stream: str = ""
    problem: str = ""

    @property
    def size_bytes(self) -> int:
        return len(self.value) + len(self.key or b"") + sum(len(one["value"]) for one in self.headers)


async def redrive(call: Call[None, shapes.Redrive]) -> Answer[shapes.Redriven]:
    """Publish dead letters of the stream to the subjects that they were meant for (the header Natslog-Subject). A
    letter that is sent again has the same message id
    """
    request, asked, broker = call.request, call.body, broker_of(call.request)
    stream = await leading(request)
    require_not_internal(stream.name)
    allowed, offsets = limits_of(request, "read", stream.record), sorted(set(asked.offsets))
    log, owner = stream.usable_log(), request[OWNER] or request.remote or ""
    records = [one for name, one in sorted(broker.state.streams.items()) if not is_internal(name)]
    id_prefix = f"redrive-{stream.record.id}-"
    async with request.app[ANSWERS].slot(owner) as threads:
        try:
            found, until = await in_thread(threads, _letters, log, offsets, allowed)
        except OffsetOutOfRange as error:
            raise await confirmed_out_of_range(request, stream, error) from error
        checked = await in_thread(threads, _checked, found, id_prefix, broker.publishing.most_bytes)
        letters = await in_thread(threads, _addressed, checked, records, rights_of(request))
    require_still(request)
    facts: dict[str, object] = {"dry_run": asked.dry_run, "letters": len(offsets)}
    request[AUDITED] = facts
    outcomes = {} if asked.dry_run else await _sent(broker, letters, id_prefix)
    shown = [_shown(one, outcomes.get(one.offset, Stored(problem=one.problem))) for one in letters]
    missing = sorted({one for one in offsets if one < until} - {one.offset for one in found})
    left = [one for one in offsets if one >= until]
    return stated(request, stream, shapes.Redriven(shown, missing=missing, left=left))


# ---- in a thread ----


def _letters(log: StreamLog, offsets: Sequence[int], allowed: Patterns | None) -> tuple[list[_Letter], int]:
    """The messages at these offsets that still exist, up to `_MOST_BYTES` of them, and `_MOST_READ_BYTES` of the log;
    and the offset up to which all of them were read. Raises OffsetOutOfRange, CorruptLog, OSError.
    """
    found: list[_Letter] = []
    room_bytes, read_bytes, wanted = _MOST_BYTES, 0, pa.array(offsets, pa.int64())
    for first, end in _ranges(offsets):
        at = max(first, log.first_readable_offset)
        while at < min(end, log.high_watermark):
            if read_bytes >= _MOST_READ_BYTES:
                return found, at
            with log.reader.plan_read(at, end, max_bytes=_STEP_BYTES) as plan:
                read_bytes += plan.length
                for header, batch in plan.rows():
                    rows = ipc.rows_within(header, batch, plan.start, plan.next_offset)
                    batch = batch.slice(rows.start, rows.stop - rows.start)
                    for letter in _letters_in(batch.filter(pc.is_in(batch.column("offset"), wanted)), allowed):
                        if room_bytes <= 0:
                            return found, letter.offset
                        found.append(letter)
                        room_bytes -= letter.size_bytes
                at = plan.next_offset
    return found, offsets[-1] + 1


def _ranges(offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges that have all of the offsets: those near each other are read together."""
    first = before = offsets[0]
    for offset in offsets[1:]:
        if offset > before + _NEAR:
            yield first, before + 1
            first = offset
        before = offset
    yield first, before + 1


def _rows_of(letters: Sequence[_Letter], id_prefix: str) -> Rows:
    return Rows(
        subjects=pa.array([one.subject for one in letters], pa.string()),
        values=pa.array([one.value for one in letters], pa.binary()),
        keys=pa.array([one.key for one in letters], pa.binary()),
        headers=pa.array([one.headers for one in letters], HEADERS_TYPE),
        ids=pa.array([f"{id_prefix}{one.offset}" for one in letters], pa.string()),
    )


def _checked(letters: Sequence[_Letter], id_prefix: str, most_bytes: int) -> list[_Letter]:
    """With the reason where NATS would not accept one."""
    if not letters:
        return []
    refused = unsendable_rows(_rows_of(letters, id_prefix), most_bytes)
    return [replace(one, problem=one.problem or refused.get(at, "")) for at, one in enumerate(letters)]


def _addressed(letters: Sequence[_Letter], records: Sequence[StreamRecord], rights: Rights) -> list[_Letter]:
    """With the stream that records its subject, or the reason why it cannot be sent."""
    by_first: dict[str, list[tuple[str, StreamRecord]]] = {}
    for record in records:
        for pattern in record.settings.subjects:
            token = pattern.split(".", 1)[0]
            by_first.setdefault("*" if token in ("*", ">") else token, []).append((pattern, record))
    places: dict[str, tuple[str, str]] = {}
    found = []
    for letter in letters:
        if not letter.problem:
            if letter.subject not in places:
                candidates = by_first.get(letter.subject.split(".", 1)[0], []) + by_first.get("*", [])
                recording = [record for pattern, record in candidates if overlap(pattern, letter.subject)]
                places[letter.subject] = _place(letter.subject, recording, rights)
            stream, problem = places[letter.subject]
            letter = replace(letter, stream=stream, problem=problem)
        found.append(letter)
    return found


def _place(subject: str, recording: Sequence[StreamRecord], rights: Rights) -> tuple[str, str]:
    """The stream whose ack counts; or "" and the reason. The message would reach all streams that record the subject:
    the identity must be permitted to publish to each of them.
    """
    try:
        for record in recording:
            rights.require_subject("publish", record.name, subject)
    except (Forbidden, Unauthorized) as error:
        return "", error.message
    reasons = {record.name: _why_not(record) for record in recording}
    taking = sorted(name for name, reason in reasons.items() if reason is None)
    if taking:
        return taking[0], ""
    return "", next((f"stream {name!r} {reason}" for name, reason in sorted(reasons.items())), _NOT_RECORDED)


def _letters_in(batch: pa.RecordBatch, allowed: Patterns | None) -> Iterator[_Letter]:
    if allowed is not None:
        batch = batch.filter(covered(batch.column("subject"), allowed))
    for row in batch.select(["offset", "key", "headers", "value"]).to_pylist():
        headers = row["headers"] or []
        letter = _Letter(row["offset"], row["value"], row["key"], [one for one in headers if not _is_own(one["key"])])
        stated = {one["key"].lower(): one["value"] for one in headers}
        subject = stated.get("natslog-subject")
        if subject is None:
            yield replace(letter, problem="it is not a dead letter: the header Natslog-Subject is missing")
        elif "natslog-truncated" in stated:
            size = stated["natslog-truncated"]
            yield replace(
                letter, subject=subject, problem=f"its value was cut when it was written: it had {size} bytes"
            )
        else:
            yield replace(letter, subject=subject)


def _is_own(header: str) -> bool:
    return header.lower().startswith(_OWN_HEADERS)


async def _sent(broker: Broker, letters: Sequence[_Letter], id_prefix: str) -> dict[int, Stored]:
    """What became of each letter, by its offset."""
    sendable = [one for one in letters if not one.problem]
    if not sendable:
        return {}
    stored = await broker.publishing.publish(_rows_of(sendable, id_prefix), [one.stream for one in sendable])
    return {one.offset: outcome for one, outcome in zip(sendable, stored, strict=True)}


def _shown(letter: _Letter, stored: Stored) -> shapes.RedrivenMessage:
    return shapes.RedrivenMessage(
        offset=letter.offset,
        subject=letter.subject,
        stream=letter.stream or None,
        stored_at=stored.offset,
        duplicate=stored.duplicate,
        problem=stored.problem or None,
    )
