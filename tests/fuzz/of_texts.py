"""Texts of users and requests: names, subjects, wildcards, times, durations, sizes, addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow.compute as pc

from natslog.errors import InvalidRequest
from natslog.ingest.staged_rows import _PLAIN_SUBJECT, _WILDCARD_TOKEN
from natslog.ingest.unwanted import split_by_subject
from natslog.subjects import MAX_SUBJECT_BYTES, check_name, check_subject, overlap
from natslog.subjects import covers as covers_by_regex
from natslog.times import format_timestamp_us, parse_timestamp_us
from natslog.units import format_duration, format_size, parse_duration_s, parse_size_bytes
from natslog.urls import normal_url, without_secrets
from natslog.wire.frames import Frames
from natslog.wire.layout import FRAME_COLUMNS
from tests.fuzz.target import target
from tests.unit.test_words import covers

# ---- subjects ----


def _subjects() -> Iterator[bytes]:
    for pattern, subject in (
        ("orders.>", "orders.eu.new"), ("orders.*.new", "orders.eu.new"), (">", "a"), ("a.b", "a.b"), ("*", "grün"),
        ("a..b", ".a"), ("a.>.b", "a.*"), ("$SYS.>", "a b"), ("a*", "a\u00a0b"), ("a.+", "a.(b|c)"),
    ):  # fmt: skip
        yield f"{pattern}\n{subject}".encode()


def accepts(check: Callable[[], object]) -> bool:
    try:
        check()
    except InvalidRequest:
        return False
    return True


def is_plain_by_kernel(subject: bytes) -> bool:
    rows = np.zeros((1, FRAME_COLUMNS), np.int64)
    rows[0, 3:5] = 0, len(subject)
    good, _ = split_by_subject(Frames(np.frombuffer(subject or b" ", np.uint8), rows))
    return len(good.rows) == 1


@target(
    "subjects", _subjects, [b".", b"*", b">", b".*.", b".>", b"\xc2\xa0", b"\xe2\x80\xa8", b"\x7f", b"\xed\xa0\x80"]
)
def check_subjects(data: bytes) -> None:
    """A subject is refused (InvalidRequest), or accepted in every way that it may come in (NATS, upload, request); a
    wildcard covers what the dumb model of NATS covers, and overlaps with it.
    """
    first, _, second = data.partition(b"\n")
    pattern, subject = (text.decode("utf-8", "surrogateescape") for text in (first, second))
    if any("\udc80" <= letter <= "\udcff" for letter in subject):
        is_plain_by_kernel(second)
        assert not accepts(lambda: check_subject(subject, wildcards=True)), "a subject is accepted that is not UTF-8"
        return
    is_plain = accepts(lambda: check_subject(subject, wildcards=False))
    if subject and len(second) <= MAX_SUBJECT_BYTES:
        right = pc.match_substring_regex([subject], _PLAIN_SUBJECT)[0].as_py()
        wild = pc.match_substring_regex([subject], _WILDCARD_TOKEN)[0].as_py()
        assert is_plain_by_kernel(second) == (right and not wild), "the kernel and the check of uploads differ"
    assert not is_plain or is_plain_by_kernel(second), "a subject that a request may name cannot be received"
    if not (is_plain and accepts(lambda: check_subject(pattern, wildcards=True))):
        return
    expected = covers(pattern.split("."), subject.split("."))
    assert covers_by_regex(pattern, subject) == expected, "the regular expression covers something else than NATS does"
    by_arrow = pc.match_substring_regex([subject], _regex(pattern))[0].as_py()
    assert by_arrow == expected, "RE2 covers something else than NATS does"
    assert overlap(pattern, subject) == overlap(subject, pattern) == expected


def _regex(pattern: str) -> str:
    from natslog.subjects import wildcard_regex

    return wildcard_regex(pattern)


# ---- numbers, times, names, addresses ----


def _texts() -> Iterator[bytes]:
    for text in (
        "2026-11-20T10:30:00Z", "2026-11-20T10:00:00+02:00", "1500", "-62135596800000", "253402300799999", "7d",
        "1h30m", "250ms", "1.5h", "10GiB", "64 MB", "1g", "9223372036854775807", "orders-2026_v1.eu",
        "http://Host:80/a/", "https://[::1]:9292", "http://user:p@ss@host", "http://a:1,https://b:x@c", "٣",
    ):  # fmt: skip
        yield text.encode()


_TEXT_WORDS = [
    b"T10:30:00", b"Z", b"+02:00", b"ms", b"GiB", b"http://", b"https://", b"@", b"[::1]", b":9292", b".",
    b"9999999999",
    b"2026-W01-1", b"20261120", b",", b"24:00", b"\xd9\xa3", b"e308", b"inf", b"nan",
]  # fmt: skip


@target("texts", _texts, _TEXT_WORDS)
def check_texts(data: bytes) -> None:
    """A time, duration, size, name or address is refused (InvalidRequest), or its own form is read as the same; no
    password of an address is shown.
    """
    text = data.decode("utf-8", "surrogateescape")
    for read, write in (
        (parse_timestamp_us, format_timestamp_us),
        (parse_size_bytes, str),
        (normal_url, str),
        (check_name, str),
    ):
        try:
            found = read(text)
        except InvalidRequest as error:
            str(error)
            continue
        assert read(write(found)) == found, f"{read.__name__} reads {write(found)!r} as something else"
    try:
        seconds = parse_duration_s(text)
    except InvalidRequest:
        pass
    else:
        assert 0 < seconds < 1e10
        if round(seconds * 1000) > 0:
            assert abs(parse_duration_s(format_duration(seconds)) - seconds) <= 0.0005001 + 1e-12 * seconds
    if accepts(lambda: parse_size_bytes(text)):
        format_size(parse_size_bytes(text))
    shown = without_secrets(text)
    before, separator, rest = text.partition("://")
    if separator and "," not in text and "@" in rest:
        assert shown == f"{before}://…@{rest.rpartition('@')[2]}"
