"""Rows to be published, and the check for rows that NATS would not accept, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.schema import rows_of_items
from natslog.errors import PublishFailed
from natslog.subjects import MAX_SUBJECT_BYTES
from natslog.wire import native
from natslog.wire.outgoing import BY_REPLY, Sequences, header_lines, publish_frames, sent_bytes, texts_of

_NAMED_ROWS = 3


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of equal length.

    Attributes:
        subjects: string. `values`: binary.
        keys: binary or None: sent as `Natslog-Key`. `ids`: string or None: sent as `Nats-Msg-Id`.
        headers: list<struct<key: string, value: string>> or None.
        counts: int64: how many rows each message carries (see `envelope`); None: one each.
    """

    subjects: Any
    values: Any
    keys: Any | None = None
    headers: Any | None = None
    ids: Any | None = None
    counts: Any | None = None

    def __len__(self) -> int:
        return len(self.values)

    def slice(self, start: int, count: int) -> Rows:
        return self._each(lambda column: column.slice(start, count))

    def take(self, rows: npt.NDArray[np.int64]) -> Rows:
        return self._each(lambda column: column.take(pa.array(rows)))

    def _each(self, change: Any) -> Rows:
        columns = (self.subjects, self.values, self.keys, self.headers, self.ids, self.counts)
        return Rows(*(None if column is None else change(column) for column in columns))

    def lines(self) -> Any | None:
        return header_lines(self.headers, self.keys)

    def sent_bytes(self, more_bytes: int = 0) -> Any:
        """What the server counts against its `max_payload`, of each row. Args: `more_bytes`: of further headers."""
        return sent_bytes(self.values, self.lines(), self.ids, more_bytes)

    def frames(self, inbox: str = "", sequences: Sequences | None = None, ack_to: int = BY_REPLY) -> memoryview:
        """NATS protocol that publishes them; see `outgoing.publish_frames`."""
        return publish_frames(
            self.subjects,
            self.values,
            lines=self.lines(),
            ids=self.ids,
            inbox=inbox,
            sequences=sequences,
            ack_to=ack_to,
        )

    def parts(self, max_rows: int, max_bytes: int) -> list[Rows]:
        """Slices of at most `max_rows` rows and, as far as single rows allow, `max_bytes` bytes of values."""
        ends = texts_of(self.values)[0][1:].astype(np.int64)
        parts, start = [], 0
        while start < len(self):
            before = int(ends[start - 1]) if start else int(texts_of(self.values)[0][0])
            by_bytes = int(np.searchsorted(ends, before + max_bytes, side="right"))
            end = max(start + 1, min(start + max_rows, by_bytes))
            parts.append(self.slice(start, end - start))
            start = end
        return parts


def check_rows(rows: Rows, max_payload_bytes: int, first_row: int = 0, more_bytes: int = 0) -> None:
    """Raises PublishFailed with number and reason of the first rows that NATS would not accept.

    Args:
        more_bytes: of headers that every row gets in addition.
    """
    for reason, at in _problems(rows, max_payload_bytes, more_bytes):
        named = ", ".join(
            f"row {first_row + row} (subject {_shortened(rows.subjects[row].as_py())!r})"
            for row in at[:_NAMED_ROWS].tolist()
        )
        numbers = (at[:100] + first_row).tolist()
        raise PublishFailed(f"{len(at)} rows cannot be sent: {reason}: {named}", reason=reason, rows=numbers)


def unsendable_rows(rows: Rows, max_payload_bytes: int, more_bytes: int = 0) -> dict[int, str]:
    """Rows that NATS would not accept, by number within `rows`, each with the first reason. Args: as `check_rows`."""
    reasons: dict[int, str] = {}
    for reason, at in _problems(rows, max_payload_bytes, more_bytes):
        reasons = dict.fromkeys(at.tolist(), reason) | reasons
    return dict(sorted(reasons.items()))


def _problems(rows: Rows, max_payload_bytes: int, more_bytes: int) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """The reason, and the rows."""
    problems = [
        ("value is null", pc.is_null(rows.values)),
        ("subject is null", pc.is_null(rows.subjects)),
        ("subject is not one plain NATS subject", bad_subjects(rows.subjects)),
        (f"subject is longer than {MAX_SUBJECT_BYTES} bytes", pc.greater(_size(rows.subjects), MAX_SUBJECT_BYTES)),
        (
            f"message is larger than the server's limit of {max_payload_bytes} bytes",
            pc.greater(rows.sent_bytes(more_bytes), max_payload_bytes),
        ),
    ]
    for name, values in (("key", rows.keys), ("message id", rows.ids)):
        if values is not None:
            problems.append(
                (f"{name} is not one line of UTF-8 text without leading or trailing blanks", _not_one_line(values))
            )
    if rows.headers is not None:
        problems.append(("a header name or value is not allowed", _bad_headers(rows.headers)))
    for reason, bad in problems:
        at = np.flatnonzero(pc.fill_null(bad, False).to_numpy(zero_copy_only=False))
        if len(at):
            yield reason, at


def _shortened(subject: str | None) -> str | None:
    return subject if subject is None or len(subject) <= 100 else subject[:100] + "…"


def _size(texts: Any) -> Any:
    return pc.binary_length(texts.cast(pa.binary()))


def bad_subjects(subjects: Any) -> Any:
    """Marks those that are not one plain NATS subject, null excepted; each different subject is checked once."""
    distinct = pc.unique(subjects)
    wildcard = pc.match_substring_regex(distinct, r"(^|\.)[*>](\.|$)")
    plain = pc.match_substring_regex(distinct, r"^[^\s.\x00-\x1f\x7f]+(\.[^\s.\x00-\x1f\x7f]+)*$")
    bad = distinct.filter(pc.fill_null(pc.or_(wildcard, pc.invert(plain)), False))
    return pc.is_in(subjects, bad) if len(bad) else pa.repeat(pa.scalar(False), len(subjects))


def _not_one_line(values: Any) -> Any:
    """Text that could not stand in a header line: line breaks, blanks around it, or not UTF-8."""
    marks = np.zeros(len(values), np.bool_)
    native.mark_unlike_a_line(*texts_of(values), marks)
    for at in np.flatnonzero(marks).tolist():  # only rows that are not plain ASCII, or wrong, are checked here
        value = values[at].as_py()
        marks[at] = value is not None and not _is_one_line(value)
    return pa.array(marks)


def _is_one_line(value: str | bytes) -> bool:
    try:
        text = value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError:
        return False
    return not set(text) & set("\r\n") and text == text.strip(" \t")


def _bad_headers(headers: Any) -> Any:
    pairs = headers.flatten()
    bad_name = pc.invert(pc.match_substring_regex(pairs.field("key"), r"^[!-9;-~]+$"))
    bad_value = pc.match_substring_regex(pairs.field("value"), r"[\r\n]|^[ \t]|[ \t]$")
    bad = pc.or_(pc.fill_null(bad_name, True), pc.fill_null(bad_value, True))
    rows = np.unique(rows_of_items(headers)[bad.to_numpy(zero_copy_only=False)])
    marks = np.zeros(len(headers), np.bool_)
    marks[rows] = True
    return pa.array(marks)
