"""Which messages contain a text, by Arrow's kernels: a whole column at a time, without the interpreter's lock.

A regular expression is one of RE2, which takes time in proportion to the bytes it is applied to and to its own size:
counted repetitions, which make it large, have a limit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.schema import rows_of_items
from natslog.errors import InvalidRequest

SEARCHED = ("value", "key", "headers", "subject")
"""Columns that can be searched."""
USUALLY_SEARCHED = ("value", "key", "headers")
MOST_CHARS = 1_000
"""Of a text or regular expression."""
MOST_REPETITIONS = 64
"""By `{n}` and `{n,m}`: the product of all of them, as they may be nested."""
_REPETITION = re.compile(r"\{(\d+)(?:,(\d*))?\}")


@dataclass(frozen=True, slots=True)
class Pattern:
    """What is searched for.

    Attributes:
        text: as bytes in UTF-8; with `is_regex` a regular expression of RE2.
        columns: of `SEARCHED`; a message matches if one of them does. Of headers, names and values are searched.
    """

    text: str
    is_regex: bool = False
    ignores_case: bool = False
    columns: tuple[str, ...] = USUALLY_SEARCHED

    def check(self) -> None:
        """Raises InvalidRequest: it is empty, too long, or no regular expression."""
        if self.is_regex and (most := _repetitions(self.text)) > MOST_REPETITIONS:
            raise InvalidRequest(
                f"the regular expression repeats parts of it {most} times in all; {MOST_REPETITIONS} are permitted: "
                "use * or + instead of {…}",
                parameter="grep",
            )
        if not self.text or len(self.text) > MOST_CHARS:
            raise InvalidRequest(f"the text to search for must have 1 to {MOST_CHARS} characters", parameter="grep")
        try:
            self._found(pa.array([b""], pa.binary()))
        except (pa.ArrowInvalid, UnicodeEncodeError) as error:
            raise InvalidRequest(
                f"{self.text!r} is not a regular expression of RE2: {error}", parameter="grep"
            ) from error

    def rows(self, messages: pa.RecordBatch) -> Any:
        """For each message of the batch whether it matches: a boolean array without nulls."""
        found = np.zeros(messages.num_rows, bool)
        for name in self.columns:
            column = messages.column(name)
            found |= self._in_headers(column) if name == "headers" else self._in(column)
        return pa.array(found)

    def _in(self, column: Any) -> Any:
        """As numpy."""
        return pc.fill_null(self._found(column), False).to_numpy(zero_copy_only=False)

    def _in_headers(self, lists: Any) -> Any:
        items = lists.flatten()
        found = np.zeros(len(lists), bool)
        if len(items):
            in_items = np.zeros(len(items), bool)
            for part in items.flatten():
                in_items |= self._in(part)
            found[rows_of_items(lists)[in_items]] = True
        return found

    def _found(self, column: Any) -> Any:
        match = pc.match_substring_regex if self.is_regex else pc.match_substring
        return match(column, self.text, ignore_case=self.ignores_case)


def _repetitions(regex: str) -> int:
    """What counted repetitions multiply a regular expression by, at most."""
    found = 1
    for low, high in _REPETITION.findall(regex):
        found *= max(1, int(low), int(high or 0))
    return found
