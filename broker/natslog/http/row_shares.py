"""Shares of a stream: its rows, divided among several readers so that the order of each subject, or key, holds.

Theory of operation. A row belongs to the share that a hash of its subject names; by keys, that of its key where it has
one. Positions of readers contain numbers of shares ("Passed"), so the hash is a format (docs/FORMATS.md): it never
changes. Only brokers compute it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import pyarrow as pa
import pyarrow.compute as pc

from natslog.errors import InvalidRequest
from natslog.http.shapes.common import MAX_OFFSET
from natslog.wire.row_hashes import text_shares

MOST_SHARES = 256
By: TypeAlias = Literal["subject", "key"]


@dataclass(frozen=True, slots=True)
class Share:
    """Number `number` of `of` shares."""

    by: By
    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """Of `subject:0/4`. Raises InvalidRequest."""
        by, _, numbers = text.partition(":")
        number, _, of = numbers.partition("/")
        found = cls(_by(by, "share"), _whole(number, "share"), _whole(of, "share"))
        if not found.number < found.of <= MOST_SHARES:
            raise InvalidRequest(
                f"share {text!r} is not one of 1 to {MOST_SHARES} shares, which are counted from 0", parameter="share"
            )
        return found

    def holds(self, rows: pa.Table) -> Any:
        """For each row whether it belongs to this share."""
        return pa.array(_shares(rows, self.by, self.of) == self.number)


@dataclass(frozen=True, slots=True)
class Passed:
    """What readers of shares have passed: of share `i`, each row below `ends[i]`."""

    by: By
    ends: tuple[int, ...]

    @classmethod
    def parse_all(cls, text: str) -> tuple[Passed, ...]:
        """Of `subject:10,12;key:9,9,15`. Raises InvalidRequest."""
        found = []
        for one in text.split(";"):
            by, _, ends = one.partition(":")
            found.append(cls(_by(by, "passed"), tuple(_whole(end, "passed") for end in ends.split(","))))
        if any(len(one.ends) > MOST_SHARES for one in found):
            raise InvalidRequest(f"passed: there are at most {MOST_SHARES} shares", parameter="passed")
        return tuple(found)

    def holds(self, rows: pa.Table) -> Any:
        """For each row whether it has been passed."""
        ends = pa.array(self.ends, pa.int64()).take(pa.array(_shares(rows, self.by, len(self.ends))))
        return pc.less(rows.column("offset"), ends)


def _shares(rows: pa.Table, by: By, of: int) -> Any:
    subjects = rows.column("subject").combine_chunks()
    if by == "subject":
        return text_shares(subjects, of)
    keys = rows.column("key").combine_chunks()
    return text_shares(pc.coalesce(keys, subjects.cast(pa.binary())), of)


def _by(text: str, parameter: str) -> By:
    if text not in get_args(By):
        why = f"{parameter}: rows are divided by subject or by key, not by {text[:20]!r}"
        raise InvalidRequest(why, parameter=parameter)
    return "subject" if text == "subject" else "key"


def _whole(text: str, parameter: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 19 or int(text) > MAX_OFFSET:
        raise InvalidRequest(f"{parameter}: {text[:20]!r} is not a whole number", parameter=parameter)
    return int(text)
