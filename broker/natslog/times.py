"""Points in time as users write them: ISO-8601 (UTC where no zone is given) or epoch milliseconds."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from natslog.errors import InvalidRequest

_WHOLE = re.compile(r"-?[0-9]{1,19}")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EARLIEST_US = -62_135_596_800_000_000  # year 1
_YEAR_10000_US = 253_402_300_800_000_000
_BELOW_US = re.compile(r"[.,][0-9]{6}0*[1-9]")  # digits that Python's datetime does not have


def parse_timestamp_us(text: str | int, name: str = "timestamp") -> int:
    """Microseconds since 1970 UTC: the first one that is not before the time.

    Raises:
        InvalidRequest: neither ISO-8601 nor a whole number of milliseconds, or out of range.
    """
    compact = str(text).strip()
    try:
        if _WHOLE.fullmatch(compact):
            timestamp_us = int(compact) * 1000
        else:
            moment = datetime.fromisoformat(compact)
            moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
            delta = moment - _EPOCH
            timestamp_us = (delta.days * 86400 + delta.seconds) * 1_000_000 + delta.microseconds
            timestamp_us += _BELOW_US.search(compact) is not None
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(
            f"{name} {text!r} is not a time: write ISO-8601 (2026-11-20T10:30:00Z) or epoch milliseconds"
        ) from error
    if not _EARLIEST_US <= timestamp_us < _YEAR_10000_US:
        raise InvalidRequest(f"{name} {text!r} is out of range (numbers are milliseconds)")
    return timestamp_us


def format_timestamp_us(timestamp_us: int) -> str:
    """`2026-11-20T10:30:00.000000Z`."""
    moment = datetime.fromtimestamp(timestamp_us // 1_000_000, UTC)
    return f"{moment.year:04d}-{moment:%m-%dT%H:%M:%S}.{timestamp_us % 1_000_000:06d}Z"  # %Y does not pad years
