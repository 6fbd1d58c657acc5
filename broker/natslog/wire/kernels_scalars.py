"""Kernels that parse the text of one value as Spark does: numbers, decimals, dates, times, base64.

The first value that each returns is whether the text is valid; the parsed value follows.

Source: Spark's `JacksonParser`, `SparkDateTimeUtils.stringToDate` and `stringToTimestamp`; days from the civil calendar
as in Howard Hinnant's "chrono-Compatible Low-Level Date Algorithms".
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from natslog.wire.compiled import compiled

Word: TypeAlias = Any
"""A number in a kernel: Python's or numpy's."""

DOT, MINUS, PLUS, UPPER_E, LOWER_E, COLON, SLASH = 46, 45, 43, 69, 101, 58, 47
WRONG, EXACT, HARD = 0, 1, 2
"""The result of a real number: not a number, parsed, or too many digits for the fast path."""

_POWERS = np.array([10.0**exponent for exponent in range(23)])
_TENS = np.array([(10**power & 2**64 - 1, 10**power >> 64) for power in range(39)], np.uint64).view(np.int64)
"""Powers of ten in 128 bits: low and high words."""
_MAX_MANTISSA, _MAX_MANTISSA_SINGLE = 1 << 53, 1 << 24
_MAX_POWER, _MAX_POWER_SINGLE = 22, 10
_MAX_EXPONENT = 100_000
_US_PER_S, _S_PER_DAY = 1_000_000, 86_400
_MOST_DAYS = (2**63 - 1) // (_US_PER_S * _S_PER_DAY) - 2  # of a time in microseconds, with any zone
_MOST_BUT_ONE = (2**63 - 1) // 10
DATE_TEXT, TIMESTAMP_TEXT, NAIVE_TEXT, DECIMAL_TEXT = 0, 1, 2, 3
"""What `parse_texts` reads; of timestamps with and without a zone."""


@compiled
def is_digit(byte: int) -> bool:
    return 48 <= byte <= 57


@compiled
def parse_integer(text: Any, start: Word, end: Word, bits: Word) -> tuple[bool, Word]:
    """A JSON integer that fits into so many bits."""
    negative = text[start] == MINUS
    at = start + 1 if negative else start
    if end - at > 19 or at >= end:
        return False, 0
    value = np.int64(0)
    for position in range(at, min(end, at + 18)):
        digit = np.int64(text[position]) - 48
        if digit < 0 or digit > 9:
            return False, 0
        value = value * 10 + digit
    value = -value if negative else value
    if end - at == 19:
        digit = np.int64(text[end - 1]) - 48
        magnitude = -value if negative else value
        if digit < 0 or digit > 9 or magnitude > _MOST_BUT_ONE or (magnitude == _MOST_BUT_ONE and digit > 7 + negative):
            return False, 0
        value = value * 10 + (-digit if negative else digit)
    most = (np.int64(1) << np.int64(bits - 2)) - 1 + (np.int64(1) << np.int64(bits - 2))
    return bool(-most - 1 <= value <= most), value


@compiled
def parse_real(text: Any, start: Word, end: Word, single: bool) -> tuple[Word, Word]:
    """A JSON number, rounded once: exactly the nearest float, or HARD.

    Source: Clinger's fast path: mantissa and power of ten are both exact, so their product or quotient is rounded once.
    """
    negative = text[start] == MINUS
    at = start + 1 if negative else start
    mantissa, exponent, digits, seen_point = np.int64(0), 0, 0, False
    while at < end:
        byte = int(text[at])
        if is_digit(byte):
            digits += int(mantissa > 0 or byte != 48)
            if digits > 18:
                return HARD, 0.0
            mantissa = mantissa * 10 + (byte - 48)
            exponent -= seen_point
        elif byte == DOT:
            seen_point = True
        else:
            break
        at += 1
    if at < end:  # the exponent: its grammar was checked
        sign = 1
        at += 1
        if text[at] == MINUS or text[at] == PLUS:
            sign = -1 if text[at] == MINUS else 1
            at += 1
        power = 0
        while at < end:
            power = min(power * 10 + int(text[at]) - 48, _MAX_EXPONENT)
            at += 1
        exponent += sign * power
    if mantissa == 0:
        return EXACT, -0.0 if negative else 0.0
    most, furthest = (_MAX_MANTISSA_SINGLE, _MAX_POWER_SINGLE) if single else (_MAX_MANTISSA, _MAX_POWER)
    if mantissa > most or exponent > furthest or exponent < -furthest:
        return HARD, 0.0
    value = np.float64(mantissa)
    if single:
        scaled = (
            np.float32(value) * np.float32(_POWERS[exponent])
            if exponent >= 0
            else np.float32(value) / np.float32(_POWERS[-exponent])
        )
        value = np.float64(scaled)
    else:
        value = value * _POWERS[exponent] if exponent >= 0 else value / _POWERS[-exponent]
    return EXACT, -value if negative else value


@compiled
def tenfold(low: Word, high: Word, digit: Word) -> tuple[Word, Word]:
    """(high, low) * 10 + digit in 128 bits, of a number below 10^38; `low` is unsigned in a signed word."""
    mask = np.int64(0xFFFFFFFF)
    first = (low & mask) * 10 + digit
    second = ((low >> 32) & mask) * 10 + (first >> 32)
    return (second << 32) | (first & mask), high * 10 + (second >> 32)


@compiled
def parse_decimal(text: Any, start: Word, end: Word, precision: Word, scale: Word) -> tuple[bool, Word, Word]:
    """A number as an unscaled 128-bit integer (low, high), rounded half up to `scale`; False where it does not fit."""
    negative = text[start] == MINUS
    begin = start + 1 if negative or text[start] == PLUS else start
    whole, point, digits_end, exponent = 0, -1, end, 0
    for at in range(begin, end):  # find point and exponent
        byte = int(text[at])
        if byte == DOT and point < 0:
            point = at
        elif byte in (UPPER_E, LOWER_E):
            digits_end = at
            sign, at_power = 1, at + 1
            if at_power < end and text[at_power] in (MINUS, PLUS):
                sign = -1 if text[at_power] == MINUS else 1
                at_power += 1
            if at_power >= end:
                return False, 0, 0
            for power_at in range(at_power, end):
                if not is_digit(int(text[power_at])):
                    return False, 0, 0
                exponent = min(exponent * 10 + int(text[power_at]) - 48, _MAX_EXPONENT)
            exponent *= sign
            break
        elif not is_digit(byte):
            return False, 0, 0
    whole = (point if point >= 0 else digits_end) - begin
    digits = digits_end - begin - (point >= 0)
    if digits <= 0:
        return False, 0, 0
    kept = whole + exponent + scale  # digits left of where it is cut
    low, high, significant, seen = np.int64(0), np.int64(0), 0, 0
    for at in range(begin, digits_end):
        if at == point or seen >= kept:
            continue
        digit = np.int64(text[at]) - 48
        seen += 1
        significant += int(significant > 0 or digit > 0)
        if significant > precision:
            return False, 0, 0
        low, high = tenfold(low, high, digit)
    if significant > 0:
        if significant + (kept - seen) > precision:
            return False, 0, 0
        for _ in range(kept - seen):
            low, high = tenfold(low, high, 0)
    if 0 <= kept < digits:  # the first digit that is cut
        cut = begin + kept
        if point >= 0 and cut >= point:
            cut += 1
        if text[cut] >= 53:
            low += 1
            high += low == 0
            if _is_power_of_ten(low, high, precision):
                return False, 0, 0
    if negative:
        low = -low
        high = ~high + (low == 0)
    return True, low, high


@compiled
def _is_power_of_ten(low: Word, high: Word, power: Word) -> bool:
    """Whether rounding up has carried the number to 10^power, one digit too many."""
    return bool(low == _TENS[power, 0] and high == _TENS[power, 1])


@compiled
def fits_precision(low: Word, high: Word, precision: Word) -> bool:
    """Whether a signed 128-bit number has at most so many digits."""
    if high < 0:
        low = -low
        high = ~high + (low == 0)
    if high < 0:
        return False  # -2^127
    most_low, most_high = _TENS[precision, 0], _TENS[precision, 1]
    flip = np.int64(-(2**63))  # unsigned words compare as signed ones with the top bit flipped
    return bool(high < most_high or (high == most_high and (low ^ flip) < (most_low ^ flip)))


@compiled
def days_of(year: Word, month: Word, day: Word) -> tuple[bool, Word]:
    """Days since 1970-01-01; False if the calendar has no such day."""
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    most = 31 if month in (1, 3, 5, 7, 8, 10, 12) else (30 if month != 2 else (29 if leap else 28))
    if month < 1 or month > 12 or day < 1 or day > most:
        return False, 0
    shifted = year - (month <= 2)
    era = shifted // 400
    of_era = shifted - era * 400
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return True, era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468


@compiled
def _digits(text: Any, at: Word, end: Word, most: Word) -> tuple[Word, Word]:
    """(the number of up to `most` digits there, where it ends)."""
    value, begin = 0, at
    while at < end and at - begin < most and is_digit(int(text[at])):
        value = value * 10 + int(text[at]) - 48
        at += 1
    return value, at


@compiled
def parse_date_part(text: Any, start: Word, end: Word) -> tuple[bool, Word, Word]:
    """`[+-]yyyy[-[m]m[-[d]d]]` → (good, days, where it ends)."""
    at, negative = start, False
    if at < end and text[at] in (MINUS, PLUS):
        negative = text[at] == MINUS
        at += 1
    year, after = _digits(text, at, end, 7)
    if after - at < 4 or after - at > 6:
        return False, 0, start
    month = day = 1
    at = after
    if at < end and text[at] == MINUS:
        month, after = _digits(text, at + 1, end, 2)
        if after == at + 1:
            return False, 0, start
        at = after
        if at < end and text[at] == MINUS:
            day, after = _digits(text, at + 1, end, 2)
            if after == at + 1:
                return False, 0, start
            at = after
            good, days = days_of(-year if negative else year, month, day)
            return good, days, at
    good, days = days_of(-year if negative else year, month, day)
    return good and at == end, days, at  # only a full date may be followed by a time


@compiled
def trimmed(text: Any, start: Word, end: Word) -> tuple[Word, Word]:
    while start < end and text[start] <= 32:
        start += 1
    while end > start and text[end - 1] <= 32:
        end -= 1
    return start, end


@compiled
def parse_date(text: Any, start: Word, end: Word) -> tuple[bool, Word]:
    """Days since 1970-01-01; text after a full date and a blank or T is ignored."""
    start, end = trimmed(text, start, end)
    good, days, at = parse_date_part(text, start, end)
    return good and (at == end or text[at] == 32 or text[at] == 84), days


@compiled
def _parse_zone(text: Any, at: Word, end: Word) -> tuple[bool, Word]:
    """Seconds east of Greenwich: `Z`, `UTC`, `GMT`, `UT`, each with or without an offset, or an offset alone."""
    if at < end and text[at] == 32:
        at += 1
    if at >= end:
        return False, 0
    if text[at] == 90:  # Z
        return at + 1 == end, 0
    if end - at >= 3 and (
        (text[at] == 85 and text[at + 1] == 84 and text[at + 2] == 67)
        or (text[at] == 71 and text[at + 1] == 77 and text[at + 2] == 84)
    ):
        at += 3
    elif end - at >= 2 and text[at] == 85 and text[at + 1] == 84:
        at += 2
    if at == end:
        return True, 0
    if text[at] not in (MINUS, PLUS):
        return False, 0
    sign = -1 if text[at] == MINUS else 1
    at += 1
    compact = end - at in (4, 6) and is_digit(int(text[at + 1])) and is_digit(int(text[at + 2]))  # +hhmm, +hhmmss
    hours, after = _digits(text, at, end, 2)
    minutes = seconds = 0
    if after == at:
        return False, 0
    at = after
    for part in range(2):
        if at < end:
            if not compact:
                if text[at] != COLON:
                    return False, 0
                at += 1
            value, after = _digits(text, at, end, 2)
            if after == at:
                return False, 0
            at = after
            if part == 0:
                minutes = value
            else:
                seconds = value
    total = hours * 3600 + minutes * 60 + seconds
    return at == end and hours <= 18 and minutes < 60 and seconds < 60 and total <= 18 * 3600, sign * total


@compiled
def _parse_clock(text: Any, at: Word, end: Word) -> tuple[bool, Word, Word, bool]:
    """`[h]h:[m]m[:[s]s]` → (good, seconds, where it ends, whether it has seconds)."""
    hour, after = _digits(text, at, end, 2)
    if after == at or after >= end or text[after] != COLON:
        return False, 0, at, False
    minute, at = _digits(text, after + 1, end, 2)
    if at == after + 1:
        return False, 0, at, False
    second, has_seconds = 0, at < end and text[at] == COLON
    if has_seconds:
        second, after = _digits(text, at + 1, end, 2)
        if after == at + 1:
            return False, 0, at, False
        at = after
    return hour <= 23 and minute <= 59 and second <= 59, hour * 3600 + minute * 60 + second, at, has_seconds


@compiled
def _parse_basic(text: Any, start: Word, end: Word) -> tuple[bool, Word, Word, Word, bool]:
    """`yyyymmddThhmm[ss]` → (good, days, seconds, where it ends, whether it has seconds)."""
    date, at = _digits(text, start, end, 8)
    if at - start != 8 or at >= end or text[at] != 84:
        return False, 0, 0, start, False
    clock, after = _digits(text, at + 1, end, 6)
    has_seconds = after - at == 7
    if not has_seconds:
        clock *= 100
    good, days = days_of(date // 10000, date // 100 % 100, date % 100)
    hour, minute, second = clock // 10000, clock // 100 % 100, clock % 100
    good = good and (has_seconds or after - at == 5) and hour <= 23 and minute <= 59 and second <= 59
    return good, days, hour * 3600 + minute * 60 + second, after, has_seconds


@compiled
def parse_timestamp(text: Any, start: Word, end: Word, with_zone: bool) -> tuple[bool, Word]:
    """µs since 1970-01-01: `yyyy-[m]m-[d]d[T| ][h]h:[m]m[:[s]s[.digits]][zone]`, a date alone, or the basic form of ISO
    8601, `yyyymmddThhmm[ss[.digits]][zone]`. Without a zone it is UTC; where `with_zone` is False, there must be none.
    Digits beyond the µs are cut.
    """
    start, end = trimmed(text, start, end)
    good, days, of_day_s, at, has_seconds = _parse_basic(text, start, end)
    if not good:
        good, days, at = parse_date_part(text, start, end)
        if days < -_MOST_DAYS or days > _MOST_DAYS:
            return False, 0
        if not good or at == end:
            return good, days * _S_PER_DAY * _US_PER_S
        if text[at] != 32 and text[at] != 84:
            return False, 0
        good, of_day_s, at, has_seconds = _parse_clock(text, at + 1, end)
        if not good:
            return False, 0
    fraction = kept = 0
    if has_seconds and at < end and text[at] == DOT:
        at += 1
        while at < end and is_digit(int(text[at])):
            if kept < 6:
                fraction = fraction * 10 + int(text[at]) - 48
                kept += 1
            at += 1
        for _ in range(6 - kept):
            fraction *= 10
    offset_s = 0
    if at < end:
        if not with_zone:
            return False, 0
        good, offset_s = _parse_zone(text, at, end)
    return good, (days * _S_PER_DAY + of_day_s - offset_s) * _US_PER_S + fraction


@compiled
def parse_texts(text: Any, edges: Any, kind: Word, precision: Word, scale: Word, words: Any, good: Any) -> None:
    """Each text as a value: days, microseconds, or the low and the high word of a decimal.

    Args:
        edges: row `i` is `[edges[i], edges[i + 1])` of `text`. words: one a row, of decimals two. good: whether a row
            has such a value.
    """
    for row in range(len(edges) - 1):
        start, end = int(edges[row]), int(edges[row + 1])
        is_good, value, high = False, np.int64(0), np.int64(0)
        if end > start:
            if kind == DECIMAL_TEXT:
                is_good, value, high = parse_decimal(text, start, end, precision, scale)
            elif kind == DATE_TEXT:
                is_good, value = parse_date(text, start, end)
            else:
                is_good, value = parse_timestamp(text, start, end, kind == TIMESTAMP_TEXT)
        good[row] = is_good
        if kind == DECIMAL_TEXT:
            words[2 * row], words[2 * row + 1] = value, high
        else:
            words[row] = value


@compiled
def _sextet(byte: Word) -> Word:
    if 65 <= byte <= 90:
        return byte - 65
    if 97 <= byte <= 122:
        return byte - 71
    if is_digit(byte):
        return byte + 4
    return 62 if byte == PLUS else (63 if byte == SLASH else -1)


@compiled
def decode_base64(text: Any, start: Word, end: Word, out: Any, at: Word) -> Word:
    """Writes the bytes to `out` from `at` on; returns where they end, or -1. Padding is required, as in Spark."""
    if (end - start) % 4:
        return -1
    padding = 0
    while padding < 2 and end - padding > start and text[end - 1 - padding] == 61:
        padding += 1
    for group in range(start, end, 4):
        is_last = group + 4 == end
        bits = 0
        for place in range(4):
            padded = is_last and place >= 4 - padding
            value = 0 if padded else _sextet(int(text[group + place]))
            if value < 0:
                return -1
            bits = bits << 6 | value
        count = 3 - padding if is_last else 3
        for place in range(count):
            out[at] = (bits >> (16 - 8 * place)) & 255
            at += 1
    return at
