"""Which subjects of an Arrow column some wildcards cover."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from natslog.subjects import wildcard_regex

_MOST_CHARS = 16 * 1024
"""Of one regular expression; a longer one may need more memory than RE2 permits, and then is an error."""


def covered(subjects: pa.Array | pa.ChunkedArray, patterns: tuple[str, ...]) -> Any:
    """Whether each subject is covered by one of the wildcards (at least one); null where the subject is null."""
    return reduce(pc.or_, [pc.match_substring_regex(subjects, regex) for regex in _joined(patterns)])


def _joined(patterns: tuple[str, ...]) -> list[str]:
    """Regular expressions, as few as their lengths permit. A wildcard has at most 1 KiB."""
    joined: list[str] = []
    for regex in map(wildcard_regex, patterns):
        if joined and len(joined[-1]) + len(regex) < _MOST_CHARS:
            joined[-1] += f"|{regex}"
        else:
            joined.append(regex)
    return joined
