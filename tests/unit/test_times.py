"""Points in time as users write them."""

from __future__ import annotations

import pytest

from natslog.times import parse_timestamp_us


@pytest.mark.parametrize(
    ("text", "expected_us"),
    [
        ("1970-01-01T00:00:00.000001Z", 1),
        ("1970-01-01T00:00:00.000001000Z", 1),
        ("1970-01-01T00:00:00.000001001Z", 2),
        ("1970-01-01T00:00:00.0000019Z", 2),
        ("1970-01-01T00:00:00.999999999+00:00", 1_000_000),
        ("1970-01-01 00:00:00,1", 100_000),
        ("-1", -1000),
    ],
)
def test_a_time_between_two_microseconds_is_the_later_one(text: str, expected_us: int) -> None:
    """The first message at or after a time, or the last one before it, is the same as with the nanoseconds."""
    assert parse_timestamp_us(text) == expected_us
