"""The delay that a negative ack may state: `-NAK {"delay": <nanoseconds>}`, or a duration as Go writes it.

Source: nats-server, `processNak` in `server/consumer.go`; `ParseDuration` of Go's package `time`.
"""

from __future__ import annotations

import logging
import re

import msgspec

logger = logging.getLogger("natslog.jetstream")

_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_MOST_BYTES = 1024
_UNITS_US = {"ns": 1e-3, "us": 1, "µs": 1, "μs": 1, "ms": 1e3, "s": 1e6, "m": 60e6, "h": 3600e6}
_MOST_US = 2**53


class _Options(msgspec.Struct, frozen=True):
    delay: int = 0


def delay_us_of(text: bytes, consumer: str) -> int | None:
    """None: none is stated, or it is too long, or cannot be read."""
    text = text.strip()
    if not text or len(text) > _MOST_BYTES:
        return None
    try:
        delay_us = (
            msgspec.json.decode(text, type=_Options).delay // 1000 if text[:1] == b"{" else _parsed(text.decode())
        )
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        logger.debug("consumer %s: there is no delay, as that of a negative ack cannot be read: %s", consumer, error)
        return None
    return max(-_MOST_US, min(_MOST_US, delay_us))


def _parsed(text: str) -> int:
    sign = -1 if text.startswith("-") else 1
    rest = text.lstrip("+-") if text[:1] in ("+", "-") else text
    if rest == "0":
        return 0
    total_us, at = 0.0, 0
    while at < len(rest):
        part = _PART.match(rest, at)
        if part is None:
            raise ValueError(f"{text[:40]!r} is no duration")
        total_us += float(part[1]) * _UNITS_US[part[2]]
        at = part.end()
    if not rest:
        raise ValueError("no duration")
    return sign * int(min(total_us, _MOST_US))
